"""Facts become incidents: one for each cause, with all that follows from it. Pure."""

import re
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

from unicron.contracts.base import Message
from unicron.contracts.events import (
    Alert,
    DeadLetter,
    FailureDetected,
    NodeAdmitted,
    NodeGone,
    NodeSuspected,
    PlanDecided,
    TaskBroken,
    TaskPaused,
    TaskRecovered,
    TaskRemoved,
    TaskStateChanged,
    TaskSubmitted,
)
from unicron.contracts.failures import Severity
from unicron.contracts.notices import IncidentKind
from unicron.contracts.slowdowns import SlowdownDetected, SlowdownEnded
from unicron.contracts.stragglers import StragglerDetected
from unicron.contracts.tasks import TaskState
from unicron.contracts.watchdogs import AlertKind
from unicron.observe.incidents import chain_of, ends_healing
from unicron.observe.words.ranks import RankNames
from unicron_notifier.state import MOST_NAMES, NotifiedIncident, NotifierState, TaskHit, TaskSeen

OWN = "notifier"
"""As who this service speaks."""

SAME_S = 600.0
"""Seconds for which an alert with the same words, of the same node and task, is the same alert."""

SETTLED_S = 5.0
"""Seconds after which a failure that has changed the state of no task had no consequences."""

HEALED = (IncidentKind.FAILURE, IncidentKind.NODE_LOST)
"""Kinds that are over as soon as all their tasks are well."""

WITH_END = (AlertKind.CLOCK,)
"""Kinds of alerts that another one ends."""

_NUMBER = re.compile(r"(?<![\w-])[-+]?\d(?:[\d.,:]*\d)?(?:e[-+]?\d+)?")
"""A number that is no part of a name."""

_PLAIN = re.compile(r"[A-Za-z0-9_-]{1,64}")


def name_of(chain: str) -> str:
    """Return what an incident is called whose first fact has this chain; chains of others may hold anything."""
    return chain if _PLAIN.fullmatch(chain) else blake2b(chain.encode(), digest_size=8).hexdigest()


class IncidentTracker:
    """Takes facts in; what people should know raises an incident's `version`.

    Args:
        state: that it works on.
    """

    def __init__(self, state: NotifierState) -> None:
        self._state = state
        self.handlers: dict[type[Message], Callable[[Any], None]] = {
            NodeSuspected: self._suspected,
            FailureDetected: self._failed,
            TaskBroken: self._broken,
            TaskStateChanged: self._changed,
            PlanDecided: self._planned,
            TaskRecovered: self._healed,
            TaskPaused: self._healed,
            TaskRemoved: self._task_replaced,
            TaskSubmitted: self._task_replaced,
            NodeAdmitted: self._node_returned,
            NodeGone: self._node_returned,
            SlowdownDetected: self._slowdown,
            SlowdownEnded: self._slowdown_ended,
            StragglerDetected: self._straggler,
            Alert: self._alert,
            DeadLetter: self._dead_letter,
        }

    def close_if_harmless(self, incident: NotifiedIncident, at: float) -> None:
        """End a failure that nothing came of: the process was replaced already, or its membership given up."""
        if incident.kind is IncidentKind.FAILURE and not incident.ended:
            for task, hit in incident.hits.items():
                seen = self._state.tasks.get(task)
                if not hit.stirred and seen is not None and seen.computing:
                    self._heal(hit, at, "goes on: that had been seen to already")
            self._end_if_healed(incident, at)

    # --- failures ----------------------------------------------------------------------------------------------------

    def _suspected(self, suspected: NodeSuspected) -> None:
        """Remember when it began; most that are suspected come back at once."""
        self._forget_suspicion(suspected.node)
        incident = self._ensure(suspected, IncidentKind.NODE_LOST)
        if not incident.version:
            incident.hidden = True
            incident.name(suspected.node)

    def _failed(self, failure: FailureDetected) -> None:
        gone = failure.severity is Severity.SEV1 and bool(failure.node)
        kind = IncidentKind.NODE_LOST if gone else IncidentKind.FAILURE
        incident = self._ensure(failure, kind)
        before = (incident.kind, incident.severity, len(incident.hits), incident.ended, incident.version)
        if incident.hidden or not incident.reason:
            incident.kind, incident.severity, incident.hidden = kind, int(failure.severity), False
            incident.status = str(failure.status)
            incident.reason = self._explain(failure.reason, failure.task)
            incident.worker = self._explain(failure.worker, failure.task)
        else:
            incident.worsen(kind, int(failure.severity))
            what = f"{failure.worker or failure.node or failure.task}: {failure.reason}"
            incident.note(self._explain(what, failure.task))
        incident.name(failure.node, failure.task)
        if failure.task:
            self._record_hit(incident, failure.task, failure.at)
        if gone:
            on = {task: seen.on[failure.node] for task, seen in self._state.tasks.items() if failure.node in seen.on}
            for task in on:
                self._record_hit(incident, task, failure.at)
            incident.workers += sum(on.values())
            incident.out = [*incident.out, failure.node][-MOST_NAMES:]
            incident.away = [] if incident.hits else [*incident.away, failure.node]
        after = (incident.kind, incident.severity, len(incident.hits), incident.ended, incident.version)
        if after != before or not incident.version:
            incident.version += 1

    def _broken(self, broken: TaskBroken) -> None:
        incident = self._ensure(broken, IncidentKind.TASK_FAILED)
        self._fail_task(incident, broken.task, self._explain(broken.reason, broken.task))

    def _fail_task(self, incident: NotifiedIncident, task: str, reason: str) -> None:
        known = incident.kind is IncidentKind.TASK_FAILED and task in incident.tasks and incident.version > 0
        incident.worsen(IncidentKind.TASK_FAILED, 1)
        incident.name(task=task)
        incident.notice, incident.hidden, incident.ended = True, False, 0.0
        if not known:
            if incident.reason:
                incident.note(f"{task} has failed: {reason}")
            incident.reason = incident.reason or reason
            incident.version += 1

    # --- tasks -------------------------------------------------------------------------------------------------------

    def _changed(self, changed: TaskStateChanged) -> None:
        """Follow how many workers a task has where, and how it gets well."""
        running = changed.state is TaskState.RUNNING
        seen = self._state.tasks.setdefault(changed.task, TaskSeen())
        seen.follow(changed)
        if changed.state.ended:
            del self._state.tasks[changed.task]
        for incident, hit in self._hit_by(changed.task):
            hit.advance(changed.at, seen.computing)
            hit.stirred, hit.now = True, f"is {changed.state}"
            if ends_healing(changed) or (running and hit.full and seen.computing >= hit.full):
                self._heal(hit, changed.at, f"is {changed.state}" if changed.state.ended else _goes_on(seen.computing))
            self._end_if_healed(incident, changed.at)
        if changed.at < self._state.since:
            return
        if changed.state.ended:
            self._slowdown_ended(changed)
        known = self._find(changed)
        if changed.state is TaskState.FAILED:
            self._fail_task(known or self._ensure(changed, IncidentKind.TASK_FAILED), changed.task, changed.reason)
        elif (
            not changed.state.ended
            and known
            and known.kind in HEALED
            and not running
            and changed.state is not TaskState.STARTING
        ):
            stopped = changed.task in known.hits and not known.hits[changed.task].over
            self._record_hit(known, changed.task, changed.at, stirred=True)
            known.version += 0 if stopped else 1

    def _planned(self, decided: PlanDecided) -> None:
        incident = self._find(decided)
        if incident is None:
            return
        for share in decided.plan.shares:
            hit, workers = incident.hits.get(share.task), len(share.slots)
            if hit is not None and share.before != workers:
                waits = f"waits for workers ({share.reason})" if share.reason else "waits for workers"
                hit.plan = f"is given {workers} of its {share.before} workers" if workers else waits

    def _healed(self, message: TaskRecovered | TaskPaused) -> None:
        now = _goes_on(message.workers) if isinstance(message, TaskRecovered) else "was paused by a user"
        for incident, hit in self._hit_by(message.task) if ends_healing(message) else ():
            self._heal(hit, message.at, now)
            self._end_if_healed(incident, message.at)

    def _task_replaced(self, message: TaskRemoved | TaskSubmitted) -> None:
        """A user has taken a task that failed away, or launched it again."""
        for incident in self._open():
            if incident.kind is IncidentKind.TASK_FAILED and message.task in incident.tasks:
                incident.notice = False
                self._end(incident, message.at)

    def _node_returned(self, message: NodeAdmitted | NodeGone) -> None:
        """A node is there again, or has said goodbye."""
        self._forget_suspicion(message.node)
        for incident in self._state.incidents.values():
            incident.out = [node for node in incident.out if node != message.node]
        for incident in self._open():
            if message.node in incident.away:
                incident.away.remove(message.node)
                incident.note(f"{message.node} {'is back' if isinstance(message, NodeAdmitted) else 'has left'}")
                self._end_if_healed(incident, message.at)

    # --- slowness ----------------------------------------------------------------------------------------------------

    def _slowdown(self, slow: SlowdownDetected) -> None:
        incident = self._find_by_key(f"slow:{slow.task}") or self._ensure(slow, IncidentKind.SLOW)
        self._record_slowdown(
            incident,
            slow,
            self._explain(slow.text, slow.task),
            1 - slow.usual_s / slow.recent_s if slow.recent_s else 0.0,
        )
        for each in slow.workers:
            incident.name(each.node)

    def _straggler(self, slow: StragglerDetected) -> None:
        incident = self._find_by_key(f"slow:{slow.task}") or self._ensure(slow, IncidentKind.SLOW)
        culprit = f" {self._explain(slow.worker, slow.task)} on {slow.node}" if slow.worker else ""
        self._record_slowdown(
            incident, slow, f"{slow.slowdown:.2f} times as slow as it could be: {slow.diagnosis}{culprit}", slow.waste
        )
        incident.name(slow.node)
        if slow.drain:
            incident.note(f"{slow.node} is drained for it")
        if slow.cure:
            incident.note(slow.cure)

    def _record_slowdown(
        self, incident: NotifiedIncident, slow: SlowdownDetected | StragglerDetected, text: str, factor: float
    ) -> None:
        incident.key = f"slow:{slow.task}"
        incident.name(task=slow.task)
        if incident.reason and text != incident.reason:
            incident.note(text)
        incident.reason = incident.reason or text
        incident.factor, incident.workers = min(1.0, max(0.0, factor)), slow.world_size
        incident.ended = 0.0
        incident.version += 1

    def _slowdown_ended(self, message: SlowdownEnded | TaskStateChanged) -> None:
        incident = self._find_by_key(f"slow:{message.task}")
        if incident is not None and not incident.ended:
            why = f"{message.task} has ended" if isinstance(message, TaskStateChanged) else message.reason
            incident.note(f"over: {why}")
            self._end(incident, message.at)

    # --- alerts ------------------------------------------------------------------------------------------------------

    def _alert(self, alert: Alert) -> None:
        known, incidents = self._find(alert), self._state.incidents.values()
        ends = f"{alert.kind}:{alert.node}:{alert.task}" if alert.kind in WITH_END else ""
        if alert.over:
            if (begun := self._find_by_key(_digest(ends))) is not None:
                begun.note(f"over: {alert.text}")
                self._end(begun, alert.at)
            return
        same = _same_text(alert.text)
        if any(each.kind is IncidentKind.DEAD_LETTER and _same_text(each.reason) == same for each in incidents):
            return  # each dead letter has an alert that says the same
        if alert.source == OWN:  # else it would be about itself
            self._record_once(alert, IncidentKind.NOTIFIER, f"own:{same}", alert.text, name_of(alert.id))
        elif known is None:
            key = ends or f"alert:{alert.node}:{alert.task}:{same}"
            self._record_once(alert, IncidentKind.ALERT, key, self._explain(alert.text, alert.task))
        else:
            known.hidden = False
            known.version += known.note(self._explain(alert.text, alert.task))

    def _dead_letter(self, letter: DeadLetter) -> None:
        text = f"a message on {letter.subject} could not be used: {letter.error}"
        self._record_once(letter, IncidentKind.DEAD_LETTER, f"letter:{letter.subject}:{_same_text(letter.error)}", text)

    def _record_once(
        self, message: Alert | DeadLetter, kind: IncidentKind, key: str, text: str, name: str = ""
    ) -> None:
        """Take in what has no end; the same again, within a while, is only counted."""
        key = _digest(key)
        same = self._find_by_key(key)
        if same is not None and message.at - same.began < SAME_S:
            same.again += 1
            return
        incident = self._ensure(message, kind, name)
        if incident.version:
            return
        incident.key, incident.notice, incident.reason = key, True, text
        incident.severity = 3 if kind is IncidentKind.DEAD_LETTER else 2
        incident.name(getattr(message, "node", ""), getattr(message, "task", ""))
        incident.version = 1

    # --- incidents ---------------------------------------------------------------------------------------------------

    def _explain(self, text: str, task: str) -> str:
        """Return a text that names the workers of a task by TASK:RANK, as far as their ranks are known."""
        names = RankNames()
        names.take(task, self._state.tasks.get(task, TaskSeen()).ranks)
        return names.explain(text)

    def _open(self) -> list[NotifiedIncident]:
        return [each for each in self._state.incidents.values() if not each.ended]

    def _hit_by(self, task: str) -> list[tuple[NotifiedIncident, TaskHit]]:
        """Return the incidents that still keep a task from its work, and what each did to it."""
        found = ((each, each.hits.get(task)) for each in self._open())
        return [(incident, hit) for incident, hit in found if hit is not None and not hit.over]

    def _find(self, message: Message) -> NotifiedIncident | None:
        return self._state.incidents.get(name_of(chain_of(message)))

    def _ensure(self, message: Message, kind: IncidentKind, name: str = "") -> NotifiedIncident:
        """Return the incident that a fact belongs to; a new one where it is the first of its chain."""
        chain = chain_of(message)
        name = name or name_of(chain)
        if name not in self._state.incidents:
            incident = NotifiedIncident(id=name, chain=chain, kind=kind, severity=3, began=message.at)
            self._state.incidents[name] = incident
            self._state.forget()
        return self._state.incidents[name]

    def _find_by_key(self, key: str) -> NotifiedIncident | None:
        """Return the newest incident with a key that is going on, or that has no end."""
        found = (each for each in reversed(self._state.incidents.values()) if each.key == key and not each.ended)
        return next(found, None)

    def _forget_suspicion(self, node: str) -> None:
        for each in [each for each in self._state.incidents.values() if each.hidden and node in each.nodes]:
            del self._state.incidents[each.id]

    def _record_hit(self, incident: NotifiedIncident, task: str, at: float, *, stirred: bool = False) -> None:
        """Note that an incident stops a task; one that was over goes on."""
        incident.name(task=task)
        hit = incident.hits.get(task)
        if hit is None or hit.over:
            if hit is None and len(incident.hits) >= MOST_NAMES:
                return
            seen = self._state.tasks.get(task, TaskSeen())
            lost, full = (hit.lost, hit.full) if hit else (0.0, seen.workers)
            hit = TaskHit(full=full, computing=seen.computing, since=at, lost=lost)
            incident.hits[task] = hit
        hit.stirred = hit.stirred or stirred
        incident.away, incident.ended = [], 0.0

    def _heal(self, hit: TaskHit, at: float, now: str) -> None:
        hit.advance(at, hit.full)
        hit.over, hit.now = True, now

    def _end_if_healed(self, incident: NotifiedIncident, at: float) -> None:
        """End an incident that is healed."""
        waits = incident.away or any(not hit.over for hit in incident.hits.values())
        if incident.kind in HEALED and incident.version and not incident.ended and not waits:
            self._end(incident, at)

    def _end(self, incident: NotifiedIncident, at: float) -> None:
        incident.ended = max(at, incident.began)
        incident.version += 1


def _same_text(text: str) -> str:
    """Return a text without its numbers: said again a second later, it holds another time."""
    return _NUMBER.sub("0", text)


def _digest(key: str) -> str:
    return blake2b(key.encode(), digest_size=8).hexdigest()


def _goes_on(workers: int) -> str:
    return f"goes on with {workers} {'worker' if workers == 1 else 'workers'}"
