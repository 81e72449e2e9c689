"""The straggler service's decisions, pure: records of iterations in, stragglers out.

The records of the present window are no part of the state that is kept: they are large, and telemetry. After a change
of the active instance a window begins anew.
"""

from msgspec.structs import replace

from unicron.contracts.answers import Reply, StragglerView
from unicron.contracts.base import Message
from unicron.contracts.events import Alert, NodeAdmitted, StepTimed, TaskRemoved, TaskStateChanged, TaskSubmitted
from unicron.contracts.queries import GetStraggler, SwitchRecording
from unicron.contracts.slowdowns import SlowdownDetected, SlowdownEnded
from unicron.contracts.stragglers import RecordingSwitched, StragglerDetected
from unicron.errors import InvalidInputError
from unicron.service.core import Answers, Core, Handlers
from unicron_straggler.collect import Collector
from unicron_straggler.live import WindowVerdict, judge
from unicron_straggler.records import timing_problems
from unicron_straggler.state import HISTORY, StragglerLimits, StragglerState, WatchedTask

RECORDS = 256
"""Records of one iteration up to which all iterations of a slow task are recorded; of more ranks, fewer iterations."""

MISSED = 10
"""Recorded iterations that are left out in a row before a person is alerted."""


class StragglerCore(Core):
    """Watches the tasks of a cluster.

    Args:
        state: what an earlier instance remembered, None at the very first start.
        limits: when a cause is reported.
    """

    def __init__(self, state: StragglerState | None = None, limits: StragglerLimits | None = None) -> None:
        self.state: StragglerState = state or StragglerState()
        self._limits = limits or StragglerLimits()
        self._collectors: dict[str, Collector] = {}
        self.handlers: Handlers = {
            TaskSubmitted: self._submitted,
            TaskStateChanged: self._changed,
            TaskRemoved: self._removed,
            NodeAdmitted: self._repeat,
            SlowdownDetected: self._slow,
            SlowdownEnded: self._usual,
            StepTimed: self._timed,
        }
        self.answers: Answers = {
            SwitchRecording: self._switch,
            GetStraggler: lambda query: (Reply(straggler=self._view(query.task)), []),
        }

    def _submitted(self, submitted: TaskSubmitted) -> list[Message]:
        self._removed(submitted)
        self.state.tasks[submitted.task] = WatchedTask(min_workers=submitted.spec.min_workers, members=[])
        return []

    def _removed(self, message: TaskSubmitted | TaskRemoved) -> list[Message]:
        self.state.tasks.pop(message.task, None)
        self._collectors.pop(message.task, None)
        return []

    def _changed(self, changed: TaskStateChanged) -> list[Message]:
        task = self.state.tasks.get(changed.task)
        if task is not None:
            task.epoch, task.members = changed.epoch, changed.members
        if task is not None and changed.state.ended:
            task.ended, task.alert, task.alert_cause = True, "", ""
            self._collectors.pop(changed.task, None)
            self.state.forget()
        return []

    # --- what is recorded --------------------------------------------------------------------------------------------

    def _switch(self, query: SwitchRecording) -> tuple[Reply, list[Message]]:
        name, share = query.task, query.share
        task = self._task(name)
        if not 0 <= share <= 1:
            raise InvalidInputError(f"share {share!r}: must be a number from 0 (none) to 1 (each iteration)")
        if task.ended:
            raise InvalidInputError(f"task {name!r} has ended; there is nothing to record")
        task.share, task.closely = share, 0.0
        text = f"{name}: {share:.3g} of the iterations are recorded" if share else f"{name}: nothing is recorded"
        return Reply(text=text), [RecordingSwitched(task=name, share=share)]

    def _slow(self, slowdown: SlowdownDetected) -> list[Message]:
        """Record more of a task that is slower than it was, so that why is known soon; nothing of one that is off.

        A slowdown by busy machines is known already, and brief bad luck would be blamed soon.
        """
        task = self.state.tasks.get(slowdown.task)
        if task is None or task.ended or task.share == 0 or slowdown.busy:
            return []
        task.closely = max(task.usual_share, min(1.0, RECORDS / max(1, slowdown.world_size)))
        return [RecordingSwitched(task=slowdown.task, share=task.closely)]

    def _usual(self, ended: SlowdownEnded) -> list[Message]:
        """Record as before."""
        task = self.state.tasks.get(ended.task)
        if task is None or task.ended or not task.closely:
            return []
        task.closely = 0.0
        return [RecordingSwitched(task=ended.task, share=task.usual_share)]

    def _repeat(self, _: NodeAdmitted) -> list[Message]:
        """Publish again what was switched: the agent of a node that is new does not know it."""
        return [
            RecordingSwitched(task=name, share=task.closely or task.usual_share)
            for name, task in self.state.tasks.items()
            if (task.share is not None or task.closely) and not task.ended
        ]

    def _view(self, name: str) -> StragglerView:
        task = self._task(name)
        collector = self._collectors.get(name)
        return StragglerView(
            task=name,
            share=task.closely or task.usual_share,
            waiting=len(collector.whole) if collector else 0,
            dropped=task.dropped,
            alert=task.alert,
            history=task.history,
        )

    def _task(self, name: str) -> WatchedTask:
        if name not in self.state.tasks:
            raise InvalidInputError(f"no task {name!r}; the known ones are {', '.join(self.state.tasks) or 'none'}")
        return self.state.tasks[name]

    # --- what was recorded -------------------------------------------------------------------------------------------

    def _timed(self, timed: StepTimed) -> list[Message]:
        task = self.state.tasks.get(timed.task)
        if task is None or task.ended or timed.world_size == 1:  # nobody waits for a worker that is alone
            return []
        if not task.has(timed):
            return []  # of a membership before or after this one, or nobody's
        if problem := next(timing_problems(timed), None):
            task.dropped = _plus(task.dropped, {"unusable record": 1})
            return self._missed(timed.task, task, f"{timed.worker}: {problem}")
        collector = self._collectors.setdefault(timed.task, Collector(timed.task))
        before = len(collector.whole)
        if timed.epoch > collector.epoch:
            task.cause, task.streak = "", 0
        collector.add(timed)
        out: list[Message] = []
        if collector.dropped:
            task.dropped = _plus(task.dropped, collector.dropped)
            out = self._missed(timed.task, task, ", ".join(collector.dropped))
            collector.dropped.clear()
        if len(collector.whole) > before:
            task.missed = 0
        if collector.full or len(collector.whole) >= self._limits.window:
            steps = collector.take_window()
            verdict = judge(timed.task, collector.epoch, steps, self._limits.threshold, timed.at)
            out += self._judged(timed.task, task, verdict)
        return out

    def _missed(self, name: str, task: WatchedTask, why: str) -> list[Message]:
        """Alert, once, that a task's records can't be used."""
        task.missed += 1
        if task.missed != MISSED:
            return []
        text = f"task {name}: what its workers record can't be used, {MISSED} times in a row: {why}"
        return [Alert(text=text, task=name)]

    def _judged(self, name: str, task: WatchedTask, verdict: WindowVerdict) -> list[Message]:
        """Report a cause that lasts, once; the next report comes after its end or with another cause."""
        window = verdict.window
        task.history = [*task.history, window][-HISTORY:]
        if not verdict.sound:
            return []
        cause = f"{window.diagnosis} {window.worker}" if window.slow else ""
        if cause != task.cause or not task.streak:
            task.cause, task.streak, task.first, task.steps = cause, 0, window.first, 0
        task.streak += 1
        task.steps += window.steps
        if task.streak < self._limits.windows or cause == task.alert_cause:
            return []
        task.alert_cause, task.alert = cause, window.diagnosis if cause else ""
        if not cause:
            task.drained = False
            return []
        detected = StragglerDetected(
            task=name,
            epoch=window.epoch,
            world_size=window.world_size,
            first=task.first,
            last=window.last,
            steps=task.steps,
            slowdown=window.slowdown,
            waste=window.waste,
            diagnosis=window.diagnosis,
            gain=window.gain,
            evidence=window.evidence,
            cure=window.cure,
        )
        culprit = verdict.culprit
        if culprit is None:
            return [detected]
        # where draining one node did not help, it was not the node: drain no second one before the task is well again
        drain = self._limits.drain and not task.drained and verdict.elsewhere >= task.min_workers
        task.drained = task.drained or drain
        return [replace(detected, node=culprit.node, slot=culprit.slot, worker=culprit.worker, drain=drain)]


def _plus(ones: dict[str, int], others: dict[str, int]) -> dict[str, int]:
    return {name: ones.get(name, 0) + others.get(name, 0) for name in {**ones, **others}}
