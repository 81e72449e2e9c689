"""The notifier's decisions, pure: facts in, notices out, each to one channel, once.

A fact changes an incident; after the rule's wait its channels get its newest form. Everything due is
due by a timer, so that what is read again after a restart leads to the same. What is to be delivered stays in the state
until the shell beside the core says what became of it.
"""

from collections.abc import Iterable

from unicron.contracts.answers import Reply
from unicron.contracts.base import Delivered, GivenUp, Message, Probed, SetTimer, Started, TimerFired
from unicron.contracts.events import Alert, TaskStateChanged
from unicron.contracts.notices import (
    ChannelView,
    IncidentAcknowledged,
    IncidentKind,
    IncidentView,
    NotificationDecided,
    NotificationFailed,
    NotificationSent,
    NotificationsView,
    Phase,
)
from unicron.contracts.queries import AcknowledgeIncident, GetNotifications
from unicron.errors import InvalidInputError
from unicron.service.core import Answers, Core, Handlers
from unicron_notifier import page
from unicron_notifier.incidents import SETTLED_S, IncidentTracker
from unicron_notifier.rules import Routing, Rule
from unicron_notifier.state import FULL, ChannelQueue, Notified, NotifiedIncident, NotifierState

UPDATE_S = 10.0
"""Seconds after which channels with an incident get its changes; its end they get at once."""

SHOWN = 100
"""Incidents that a query shows."""

LONGEST_NAME = 64
"""Characters of a name that acknowledges."""


class NotifierCore(Core):
    """Decides which channel gets which notice, and when.

    Args:
        state: what an earlier instance remembered, None at the very first start.
        routing: the rules; without any it does nothing.
    """

    def __init__(self, state: NotifierState | None = None, routing: Routing | None = None) -> None:
        self.state: NotifierState = state or NotifierState()
        self._routing = routing or Routing()
        self._incidents = IncidentTracker(self.state)
        self.handlers: Handlers = {Started: self._started}
        if self._routing.rules:
            self.handlers = {
                **self.handlers,
                **dict.fromkeys(self._incidents.handlers, self._handle),
                TimerFired: self._fired,
                Delivered: self._delivered,
                GivenUp: self._given_up,
                Probed: lambda _: [],
            }
        self.answers: Answers = {
            GetNotifications: lambda _: (Reply(notifications=self._view()), []),
            AcknowledgeIncident: self._acknowledge,
        }

    def _started(self, started: Started) -> list[Message]:
        """Go by the rules of today: what was decided for channels that are no more is dropped."""
        state, routing = self.state, self._routing
        if not routing.rules:
            state.routed = False
            state.incidents.clear()
            state.channels.clear()
            return []
        if not state.routed:
            state.routed, state.since = True, started.at
        state.channels = {name: state.channels.get(name, ChannelQueue()) for name in routing.channels}
        out: list[Message] = []
        for incident in state.incidents.values():
            incident.told = {name: notified for name, notified in incident.told.items() if name in state.channels}
            unsent = incident.waits or incident.telling or not (incident.ended or incident.notice)
            incident.waits, incident.telling = [], False
            out += self._schedule(incident) if unsent else []
        held = [
            notified for each in state.incidents.values() for notified in each.told.values() if notified.held == "quiet"
        ]
        for rule in sorted({notified.rule for notified in held}):
            out.append(SetTimer(name=f"morning:{rule}", after_s=self._silent_s(rule, started.at)))
        return out

    # --- what changes ------------------------------------------------------------------------------------------------

    def _handle(self, fact: Message) -> list[Message]:
        if fact.at < self.state.since and not isinstance(fact, TaskStateChanged):
            return []
        before = {name: each.version for name, each in self.state.incidents.items()}
        self._incidents.handlers[type(fact)](fact)
        out: list[Message] = []
        for incident in self.state.incidents.values():
            if incident.version != before.get(incident.id, 0):
                out += self._schedule(incident)
                if incident.kind is IncidentKind.FAILURE and not incident.ended:
                    out.append(SetTimer(name=f"settle:{incident.id}", after_s=SETTLED_S))
        return out

    def _schedule(self, incident: NotifiedIncident) -> list[Message]:
        """Set the timers at which channels get the changes of an incident."""
        if incident.hidden or not incident.version:
            return []
        out: list[Message] = []
        for name, rule in self._matching(incident):
            waiting = any(self._is_unnotified(incident, channel) for channel in rule.channels)
            if waiting and name not in incident.waits:
                incident.waits.append(name)
                out.append(SetTimer(name=f"open:{incident.id}:{name}", after_s=rule.wait_s))
        old = any(notified.version < incident.version and not notified.held for notified in incident.told.values())
        at_once = incident.ended or incident.acked == incident.version
        if old and (at_once or not incident.telling):
            incident.telling = True
            out.append(SetTimer(name=f"tell:{incident.id}", after_s=0.0 if at_once else UPDATE_S))
        return out

    def _matching(self, incident: NotifiedIncident) -> list[tuple[str, Rule]]:
        about = (str(incident.kind), incident.severity, incident.status, incident.tasks)
        return [(name, rule) for name, rule in self._routing.rules.items() if rule.matches(*about)]

    def _is_unnotified(self, incident: NotifiedIncident, channel: str) -> bool:
        """Return whether a channel has no notice of an incident yet, or only one that waits for the morning."""
        notified = incident.told.get(channel)
        return notified is None or (notified.held == "quiet" and notified.version < incident.version)

    # --- what is due -------------------------------------------------------------------------------------------------

    def _fired(self, timer: TimerFired) -> list[Message]:
        what, _, rest = timer.name.partition(":")
        if what == "morning":
            silent_s = self._silent_s(rest, timer.at)
            return (
                [SetTimer(name=timer.name, after_s=silent_s)]
                if silent_s
                else self._summarize([f"quiet:{rest}"], timer.at)
            )
        name, _, rule_name = rest.partition(":")
        incident, rule = self.state.incidents.get(name), self._routing.rules.get(rule_name)
        out: list[Message] = []
        if incident is not None and not incident.hidden:
            match what, rule:
                case "settle", _:
                    version = incident.version
                    self._incidents.close_if_harmless(incident, timer.at)
                    out = self._schedule(incident) if incident.version != version else []
                case "tell", _:
                    out = self._update(incident, timer.at)
                case "open", Rule():
                    out = self._open(incident, rule_name, rule, timer.at)
                case "escalate", Rule():
                    out = self._escalate(incident, rule_name, rule, timer.at)
        return out

    def _escalate(self, incident: NotifiedIncident, name: str, rule: Rule, at: float) -> list[Message]:
        """Call others where nobody has acknowledged an incident, and it is not over."""
        if rule.escalate is None or incident.by or incident.ended:
            return []
        if rule.holds(incident.severity, at):
            return [SetTimer(name=f"escalate:{incident.id}:{name}", after_s=self._silent_s(name, at))]
        channels = [each for each in rule.escalate.channels if each not in incident.told]
        return self._notify(incident, channels, name, at, Phase.ESCALATED)

    def _open(self, incident: NotifiedIncident, name: str, rule: Rule, at: float) -> list[Message]:
        """Notify the channels of a rule for the first time, or have it wait for the morning."""
        incident.waits = [each for each in incident.waits if each != name]
        channels = [each for each in rule.channels if self._is_unnotified(incident, each)]
        if not channels or (name, rule) not in self._matching(incident):
            return []
        if rule.holds(incident.severity, at):
            self._hold(incident, channels, name)
            return [SetTimer(name=f"morning:{name}", after_s=self._silent_s(name, at))]
        out = self._notify(incident, channels, name, at, Phase.OPENED)
        if rule.escalate and not incident.ended:
            after_s = rule.escalate.after_min * 60
            out.append(SetTimer(name=f"escalate:{incident.id}:{name}", after_s=after_s))
        return out

    def _update(self, incident: NotifiedIncident, at: float) -> list[Message]:
        """Notify the channels that have an incident of its changes."""
        incident.telling = False
        out: list[Message] = []
        phase = Phase.ACKNOWLEDGED if incident.acked == incident.version else Phase.UPDATED
        for channel, notified in incident.told.items():
            if notified.held or notified.version >= incident.version:
                continue
            rule = self._routing.rules.get(notified.rule)
            if rule is not None and not notified.escalated and rule.holds(incident.severity, at):
                self._hold(incident, [channel], notified.rule)
                out.append(SetTimer(name=f"morning:{notified.rule}", after_s=self._silent_s(notified.rule, at)))
            else:
                out += self._notify(incident, [channel], notified.rule, at, phase)
        return _merged(out)

    def _hold(self, incident: NotifiedIncident, channels: Iterable[str], rule: str) -> None:
        for channel in channels:
            incident.told[channel] = Notified(version=incident.version, rule=rule, held="quiet")

    def _silent_s(self, rule: str, at: float) -> float:
        """Return the seconds until a rule is no longer silent."""
        found = self._routing.rules.get(rule)
        return found.quiet.left_s(at) if found and found.quiet and found.quiet.holds(0, at) else 0.0

    def _notify(
        self, incident: NotifiedIncident, channels: list[str], rule: str, at: float, phase: Phase
    ) -> list[Message]:
        """Have channels say how an incident stands."""
        if incident.label is IncidentKind.UNKNOWN:
            incident.label, incident.first = incident.kind, incident.severity
        escalated, phase = phase is Phase.ESCALATED, Phase.OVER if incident.ended else phase
        saying = []
        for name in channels:
            channel = self.state.channels.get(name)
            if channel is None or (channel.broken and incident.kind is IncidentKind.NOTIFIER):
                continue  # that it is broken it can't say itself
            notified = incident.told.get(name)
            escalated = escalated or bool(notified and notified.escalated)
            earlier = [each for each in channel.pending if each.incident != incident.id]
            full = len(earlier) >= FULL
            held = "full" if full else ""
            incident.told[name] = Notified(version=incident.version, rule=rule, held=held, escalated=escalated)
            if not full:
                channel.pending = [*earlier, page.notice(incident, name, phase, at, self._routing.link)]
                saying.append(name)
        if not saying:
            return []
        return [NotificationDecided(incident=incident.id, phase=phase, channels=saying, text=page.title(incident))]

    def _summarize(self, why: list[str], at: float, only: str = "") -> list[Message]:
        """Have channels sum up what was held back from them: by a rule's quiet hours, or since too much waited."""
        held: dict[str, list[NotifiedIncident]] = {}
        for incident in self.state.incidents.values():
            for name, notified in incident.told.items():
                if (
                    notified.held
                    and f"{notified.held}:{notified.rule if notified.held == 'quiet' else ''}" in why
                    and only in {"", name}
                ):
                    held.setdefault(name, []).append(incident)
        reason = "in quiet hours" if why[0].startswith("quiet") else "since too much waited"
        out: list[Message] = []
        for name, incidents in held.items():
            for incident in incidents:
                notified = incident.told[name]
                notified.version, notified.held = incident.version, ""
            self.state.summaries += 1
            said = page.summary(incidents, name, reason, self.state.summaries, at, self._routing.link)
            self.state.channels[name].pending.append(said)
            out.append(
                NotificationDecided(incident=said.incident, phase=Phase.SUMMARY, channels=[name], text=said.title)
            )
        return out

    # --- what became of it -------------------------------------------------------------------------------------------

    def _delivered(self, delivered: Delivered) -> list[Message]:
        found = self._dequeue(delivered.notice)
        if found is None:
            return []
        name, incident, _ = found
        self.state.channels[name].broken = ""
        sent = NotificationSent(incident=incident, channel=name, delivery=delivered.notice, attempts=delivered.attempts)
        return [sent, *self._catch_up(name, delivered.at)]

    def _given_up(self, given_up: GivenUp) -> list[Message]:
        """Say, once, that a channel does not deliver; not where it could not say that another one does not."""
        found = self._dequeue(given_up.notice)
        if found is None:
            return []
        name, incident, kind = found
        channel, reason = self.state.channels[name], page.cut(given_up.reason, page.LONGEST_LINE)
        was, channel.broken = channel.broken, reason
        out: list[Message] = [
            NotificationFailed(incident=incident, channel=name, delivery=given_up.notice, reason=reason)
        ]
        if not was and kind is not IncidentKind.NOTIFIER:
            text = f"channel {name} does not deliver: {reason}; mend it, and try it with `unicron notify test {name}`"
            out.append(Alert(text=text))
        return out + self._catch_up(name, given_up.at)

    def _dequeue(self, notice: str) -> tuple[str, str, IncidentKind] | None:
        """Take a notice off its channel; return the channel's name, and the incident's and its kind."""
        for name, channel in self.state.channels.items():
            for each in channel.pending:
                if each.id == notice:
                    channel.pending = [other for other in channel.pending if other.id != notice]
                    return name, each.incident, each.kind
        return None

    def _catch_up(self, name: str, at: float) -> list[Message]:
        return [] if self.state.channels[name].pending else self._summarize(["full:"], at, only=name)

    # --- queries and orders ------------------------------------------------------------------------------------------

    def _acknowledge(self, query: AcknowledgeIncident) -> tuple[Reply, list[Message]]:
        by = page.cut(query.by, LONGEST_NAME)
        if not by:
            raise InvalidInputError("no name acknowledges it: give one, with --by NAME")
        shown = [each for each in self.state.incidents.values() if each.version and not each.hidden]
        exact = [each for each in shown if each.id == query.incident]
        found = exact or [each for each in shown if query.incident and each.id.startswith(query.incident)]
        if len(found) != 1:
            trouble = "there is no incident" if not found else f"{len(found)} incidents begin with"
            known = ", ".join(each.id for each in shown if not each.ended) or "none"
            raise InvalidInputError(f"{trouble} {page.cut(query.incident, 80)!r}; going on are {known}")
        [incident] = found
        if incident.ended:
            raise InvalidInputError(f"{incident.id} is over: {page.title(incident)}")
        if incident.by:
            return Reply(text=f"{incident.by} sees to {incident.id} already: {page.title(incident)}"), []
        incident.version += 1
        incident.by, incident.acked = by, incident.version
        text = f"{by} sees to {incident.id}: {page.title(incident)}"
        return Reply(text=text), [IncidentAcknowledged(incident=incident.id, by=by), *self._schedule(incident)]

    def _view(self) -> NotificationsView:
        shown = [each for each in reversed(self.state.incidents.values()) if each.version and not each.hidden]
        shown.sort(key=lambda each: bool(each.ended))
        views = [
            IncidentView(
                id=each.id,
                chain=each.chain,
                kind=each.kind,
                severity=each.severity,
                title=page.title(each),
                tasks=each.tasks,
                nodes=each.nodes,
                began=each.began,
                ended=each.ended,
                by=each.by,
                told=[name for name, notified in each.told.items() if not notified.held],
                held=[name for name, notified in each.told.items() if notified.held],
            )
            for each in shown[:SHOWN]
        ]
        channels = self.state.channels.items()
        return NotificationsView(
            incidents=views,
            channels=[ChannelView(name=name, waiting=len(each.pending), broken=each.broken) for name, each in channels],
            pending=[notice for _, each in channels for notice in each.pending],
        )


def _merged(out: list[Message]) -> list[Message]:
    """Return messages in which channels that say the same of one incident stand together."""
    said = [each for each in out if isinstance(each, NotificationDecided)]
    if len(said) < 2:
        return out
    channels = [name for each in said for name in each.channels]
    one = NotificationDecided(incident=said[0].incident, phase=said[0].phase, channels=channels, text=said[0].text)
    return [one, *(each for each in out if not isinstance(each, NotificationDecided))]
