"""The notifier's core with a clock, timers and a shell that are played, and facts to give it."""

import itertools

import msgspec
from unicron_notifier.core import NotifierCore
from unicron_notifier.rules import Routing, Rule
from unicron_notifier.state import NotifierState

from unicron.contracts.base import CancelTimer, Delivered, GivenUp, SetTimer, Started, TimerFired
from unicron.contracts.events import FailureDetected, TaskRecovered, TaskStateChanged
from unicron.contracts.failures import DetectionMethod, FailureStatus, Severity
from unicron.contracts.notices import IncidentKind, Notice, NotificationDecided, Phase
from unicron.contracts.queries import AcknowledgeIncident, GetNotifications
from unicron.contracts.tasks import Member, TaskState

NOON = 1_784_894_400.0  # 2026-07-24 12:00:00 UTC, a Friday

NOTICE = Notice(
    id="c1.1.ops",
    channel="ops",
    phase=Phase.OPENED,
    incident="c1",
    chain="c1",
    kind=IncidentKind.NODE_LOST,
    label=IncidentKind.FAILURE,
    severity=1,
    first_severity=2,
    title="n2 is lost",
    lines=["Why: its connection ended"],
    tasks=["gpt"],
    nodes=["n2"],
    workers=2,
    began=NOON,
    decided=NOON + 10.0,
    link="https://unicron.example/failures/c1",
)


def rule(*channels, **fields):
    """Return a rule, as from a file; `from` and the like are given in maps."""
    return msgspec.convert({"channels": list(channels) or ["ops"], "wait_s": 10.0, **fields}, Rule)


def routing(*rules, link=""):
    named = {f"r{number}": each for number, each in enumerate(rules)}
    channels = {name for each in rules for name in each.channels}
    channels |= {name for each in rules if each.escalate for name in each.escalate.channels}
    return Routing(rules=named, channels=tuple(sorted(channels)), link=link)


class Desk:
    """A notifier without a bus.

    Args:
        rules: in their order.
        at: Unix seconds at which it is started.
    """

    def __init__(self, *rules, at=NOON, link=""):
        self.now, self.timers, self.said, self.sent = at, {}, [], []
        self.routing = routing(*(rules or (rule(),)), link=link)
        self._ids = itertools.count()
        self.core = NotifierCore(None, self.routing)
        self._take(Started(token=1))

    def _take(self, message, **fields):
        filled = {"id": f"m{next(self._ids)}", "at": self.now, **fields}
        return self._tell(self.core.handle(msgspec.structs.replace(message, **filled)))

    def _tell(self, out):
        for each in out:
            if isinstance(each, SetTimer):
                self.timers[each.name] = self.now + each.after_s
            elif isinstance(each, CancelTimer):
                self.timers.pop(each.name, None)
            else:
                self.said.append(each)
        return [each for each in out if not isinstance(each, SetTimer | CancelTimer)]

    def say(self, *facts, chain="c1", after=0.0):
        """Have facts of one chain said, after some seconds."""
        self.wait(after)
        for fact in facts:
            self._take(fact, source=fact.source or "detector", correlation=fact.correlation or chain)

    def wait(self, seconds):
        """Let time pass, and what is due happen."""
        until = self.now + seconds
        while due := [(at, name) for name, at in self.timers.items() if at <= until]:
            at, name = min(due)
            self.now = max(self.now, at)
            del self.timers[name]
            self._take(TimerFired(name=name))
        self.now = until

    def pending(self, channel=""):
        """Return what is to be delivered now."""
        found = self.core.answer(GetNotifications())[0].notifications.pending
        return [each for each in found if channel in {"", each.channel}]

    def deliver(self, channel=""):
        """Have all that is pending delivered; return what it was."""
        found = self.pending(channel)
        for notice in found:
            self.sent.append(notice)
            self._take(Delivered(notice=notice.id, correlation=notice.chain, source="notifier"))
        return found

    def give_up(self, notice, reason="it burns"):
        return self._take(GivenUp(notice=notice.id, reason=reason, correlation=notice.chain, source="notifier"))

    def notices_after(self, seconds=0.0):
        """Let time pass; return the phase and the title of all that was delivered meanwhile."""
        self.wait(seconds)
        return [(str(each.phase), each.title) for each in self.deliver()]

    def ack(self, incident="c1", by="ada"):
        reply, out = self.core.answer(AcknowledgeIncident(incident=incident, by=by))
        self._tell(out)
        return reply

    def view(self):
        return self.core.answer(GetNotifications())[0].notifications

    def decided(self):
        return [each for each in self.said if isinstance(each, NotificationDecided)]

    def restart(self, *rules):
        """End it, and start another one on what was committed, maybe by other rules."""
        self.routing = routing(*rules) if rules else self.routing
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(self.core.state), type=NotifierState)
        self.core = NotifierCore(state, self.routing)
        self._take(Started(token=2))


def running(task, *nodes):
    """A task computes on nodes, one worker for each time that they are named."""
    members = [Member(worker=f"{task}-{number}", node=node, slot=number) for number, node in enumerate(nodes)]
    return TaskStateChanged(task=task, state=TaskState.RUNNING, epoch=1, members=members, source="transition")


def changed(task, state, reason=""):
    return TaskStateChanged(task=task, state=TaskState(state), reason=reason, source="transition")


def lost(node, reason="its connection ended"):
    what = {"severity": Severity.SEV1, "method": DetectionMethod.NODE_HEALTH, "status": FailureStatus.LOST_CONNECTION}
    return FailureDetected(**what, node=node, reason=reason)


def failed(worker="gpt-2", task="gpt", node="n2", severity=2, status="exited_abnormally"):
    method, status = DetectionMethod.PROCESS_SUPERVISION, FailureStatus(status)
    where = {"task": task, "node": node, "worker": worker, "slot": 0, "reason": "killed by signal 9"}
    return FailureDetected(severity=Severity(severity), method=method, status=status, **where)


def recovered(task, workers=2):
    return TaskRecovered(task=task, epoch=2, workers=workers, seconds=1.0, source="transition")
