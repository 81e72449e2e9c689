"""The agent's record of a worker, and the checks whether it has stalled."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from unicron.contracts import time_limits
from unicron.contracts.commands import StartWorker
from unicron.contracts.events import WorkerAsleep, WorkerAway, WorkerStalled
from unicron.contracts.tasks import ParallelLayout, WorkerPhase, WorkerStatus
from unicron.contracts.worker import Finished, Hello, Iterated, Joined, Membership, Pong, Progress, Ready, ToAgent
from unicron_agent.effects import TakeStacks
from unicron_agent.life_signs import LifeSigns, ProcessUse
from unicron_agent.stimuli import WorkerProcess

BUSY = frozenset({WorkerPhase.COMPUTE, WorkerPhase.REDUCE, WorkerPhase.STEP, WorkerPhase.BETWEEN})
"""Phases in which a worker is to make progress."""

LATE_S = 0.1
"""A microbatch that takes longer than usual by this makes its worker late: its processes are looked at."""

EARLY = 0.6
"""Share of the time that a worker may sleep after which its sleep is reported. Others that sleep for the same reason
began within a microbatch, a third of that time, so they are reported before the first one counts as stalled."""

AWAKE, TICK_S, MOMENTS = 0.05, 0.011, 0.25
"""A worker does not sleep if its processes use more of a core than this, besides one tick of the kernel's clock, or are
awake in a larger share of the looks at them."""

AWAY_S = 10.0
"""A script that is busy for this long between two iterations is reported: well before a regroup times out (30 s)."""

SILENT_S = 1.0
"""A worker that has not answered a ping for this long is reported as not responsive."""


@dataclass(frozen=True)
class StallLimits:
    """How long a worker may be silent, in seconds.

    Attributes:
        factor: of the mean of its own microbatches (paper section 4.1 says 3, of an iteration).
        stopped_s: floor for a process that a signal or a debugger has stopped.
        asleep_s: floor for one that is alone in its task here in that all its processes sleep.
        hang_s: floor for any other; its script may be busy with something that is no microbatch, and where its control
            thread does not answer, something may hold the interpreter's lock, or the processor is not enough.
        between_s: between two iterations, for what the script does there.
    """

    factor: float = 3.0
    stopped_s: float = time_limits.STOPPED_S
    asleep_s: float = time_limits.ASLEEP_S
    hang_s: float = time_limits.HANG_S
    between_s: float = time_limits.BETWEEN_S


@dataclass
class Sleep:
    """The sleep of a worker's processes.

    Attributes:
        since: monotonic seconds of the first look at them.
        used_s: seconds of CPU that they had used by then.
        looks: how often they were looked at since, and `awake` of these when one of them was.
    """

    since: float
    used_s: float
    looks: int = 0
    awake: int = 0


@dataclass
class LocalWorker:
    """The agent's record of a worker. Times are monotonic seconds of the agent.

    Attributes:
        correlation: chain of the last command for the worker.
        queued: the command to start it, while the slot's last process has not ended or the start is delayed.
        due: earliest time of its start.
        membership: the newest that it was sent.
        greeted: it has connected to the agent, and answers pings.
        interval_s: running mean of the time between two signs of progress while computing; None before the first.
        asleep: the sleep of its processes, while all of them sleep.
        reported: epoch, iteration and kind of the last reported stall.
        looked_at: epoch and iteration in which its stacks were last asked for.
        stacks: what was received then.
        collectives: its last answer about collectives under way.
        away: the newest epoch and iteration for which its script was reported to be busy before it.
        life_signs: its other signs of life, which count while it is unwatched.
    """

    worker: str
    task: str
    slot: int
    place: int = 0
    layout: ParallelLayout = ParallelLayout()  # noqa: RUF009 it is frozen
    pid: int = 0
    correlation: str = ""
    queued: StartWorker | None = None
    due: float = 0.0
    membership: Membership | None = None
    epoch: int = -1
    iteration: int = -1
    greeted: bool = False
    ready: bool = False
    phase: WorkerPhase = WorkerPhase.STARTING
    done: int = 0
    progressed_at: float = 0.0
    heard_at: float = 0.0
    interval_s: float | None = None
    stopping: bool = False
    finished: bool = False
    asleep: Sleep | None = None
    reported: tuple[int, int, str] | None = None
    looked_at: tuple[int, int] | None = None
    stacks: tuple[str, ...] = ()
    collectives: list[str] = field(default_factory=list)
    away: tuple[int, int] | None = None
    life_signs: LifeSigns = field(default_factory=LifeSigns)

    @classmethod
    def adopted(cls, running: WorkerProcess, now: float) -> "LocalWorker":
        """Return the worker of an earlier agent's record."""
        return cls(
            worker=running.worker,
            task=running.task,
            slot=running.slot,
            place=running.place,
            layout=running.layout,
            pid=running.pid,
            correlation=running.correlation,
            progressed_at=now,
            heard_at=now,
            life_signs=LifeSigns(running.silence_s, running.spins, now),
        )

    def status(self) -> WorkerStatus:
        """Return its status for the registry and the transition service."""
        return WorkerStatus(
            worker=self.worker,
            task=self.task,
            slot=self.slot,
            pid=self.pid,
            epoch=self.epoch,
            iteration=self.iteration,
            ready=self.ready,
            place=self.place,
            layout=self.layout,
        )

    def record_message(self, message: ToAgent, now: float) -> None:
        """Record what a message says about the worker's state."""
        self.heard_at = now
        if not isinstance(message, Pong):
            self.asleep, self.life_signs.heard_at = None, now
        match message:
            case Hello():
                self.epoch, self.iteration, self.ready = message.epoch, message.iteration, message.ready
                self.greeted = True
                self.pid = self.pid or message.pid  # its hello may come before its start is reported
                self.progressed_at = now
            case Ready():
                self.ready, self.phase = True, WorkerPhase.WAITING
            case Progress():
                self._record_progress(message, now)
            case Joined():
                self.epoch, self.iteration = message.epoch, message.iteration
                self.phase, self.progressed_at = WorkerPhase.COMPUTE, now
            case Iterated():
                self.phase, self.progressed_at, self.iteration = WorkerPhase.BETWEEN, now, message.iteration + 1
            case Pong(collectives=list(lines)):
                self.collectives = lines
            case Finished():
                self.finished, self.phase = True, WorkerPhase.FINISHED

    def record_stacks(self, stacks: tuple[str, ...], now: float) -> None:
        """Record the stacks of its threads; empty if they can't be read."""
        self.stacks, self.life_signs.seen_at = stacks, now

    def _record_progress(self, message: Progress, now: float) -> None:
        """Record progress, and how long it took if that was a microbatch.

        For a program without a session that includes waiting for others: all of it counts as reduce.
        """
        same = message.phase == self.phase and message.phase in {WorkerPhase.COMPUTE, WorkerPhase.REDUCE}
        if same and message.done > self.done:
            took = now - self.progressed_at
            self.interval_s = took if self.interval_s is None else 0.9 * self.interval_s + 0.1 * took
        self.phase, self.iteration, self.done = message.phase, message.iteration, message.done
        self.progressed_at = now

    @property
    def unwatched(self) -> bool:
        """Whether it need not make progress now, or it is not known how fast."""
        return self.phase not in BUSY or (self.interval_s is None and self.phase is not WorkerPhase.BETWEEN)

    def may_be_silent(self, now: float) -> bool:
        """Return whether to look at its processes for signs of life now."""
        counts = self.unwatched and self.pid > 0 and not (self.stopping or self.finished)
        return counts and self.life_signs.look_is_due(now)

    def is_late(self, now: float) -> bool:
        """Return whether its microbatch takes so much longer than usual that its processes are looked at."""
        computes = self.phase in {WorkerPhase.COMPUTE, WorkerPhase.STEP} and not (self.stopping or self.finished)
        return computes and self.interval_s is not None and now - self.progressed_at > self.interval_s + LATE_S

    def record_cpu_use(self, used_s: float | None, now: float) -> None:
        """Record the seconds of CPU that a late worker's processes have used; None: some of them are awake.

        A sleeping worker is awake for moments, such as to answer its agent.
        """
        nap = self.asleep
        if nap is None:
            self.asleep = Sleep(now, used_s) if used_s is not None else None
            return
        nap.looks += 1
        nap.awake += used_s is None
        worked = used_s is not None and used_s - nap.used_s > AWAKE * (now - nap.since) + TICK_S
        if worked or nap.awake > max(1.0, MOMENTS * nap.looks):
            self.asleep = None

    def asleep_s(self, now: float) -> float:
        """Return for how long its processes are known to have slept."""
        return now - self.asleep.since if self.asleep else 0.0

    def check_stalled(
        self, node: str, limits: StallLimits, now: float, *, stopped: bool, asleep_s: float = math.inf
    ) -> list[WorkerStalled | TakeStacks]:
        """Return a `WorkerStalled` if it has made no progress for too long, once an iteration; `TakeStacks` half-way.

        Args:
            node: that it is on.
            limits: of the agent.
            now: monotonic seconds.
            stopped: whether its process is. A stopped process can't even wait for others or start, so the limit counts
                from its last message.
            asleep_s: how long it may be without progress while all its processes sleep.
        """
        between = self.phase is WorkerPhase.BETWEEN
        if self.stopping or self.finished or (self.unwatched and not (stopped and self.greeted)):
            return []
        usual = limits.factor * (self.interval_s or 0.0)
        limit = max(limits.stopped_s if stopped else limits.between_s if between else limits.hang_s, usual)
        waited = now - (self.heard_at if stopped else self.progressed_at)
        sleeps = not stopped and waited < limit and self.asleep_s(now) >= max(asleep_s, usual) / 2
        if sleeps:
            limit = max(asleep_s, usual)
        place = (self.epoch, self.iteration, "stopped" if stopped else "slept" if sleeps else "")
        if waited < limit or self.reported == place:
            if waited < limit / 2 or self.looked_at == place[:2] or not self.pid:
                return []
            self.looked_at, self.stacks = place[:2], ()
            return [TakeStacks(self.worker, self.pid)]
        self.reported = place
        return [
            WorkerStalled(
                node=node,
                slot=self.slot,
                task=self.task,
                worker=self.worker,
                epoch=self.epoch,
                iteration=self.iteration,
                phase=self.phase if self.phase == WorkerPhase.REDUCE else WorkerPhase.COMPUTE,
                waited_s=waited,
                limit_s=limit,
                responsive=not stopped and now - self.heard_at < SILENT_S,
                asleep=sleeps,
                stacks=list(self.stacks if self.looked_at == place[:2] else ()),
            )
        ]

    def check_silent(
        self, node: str, use: ProcessUse, now: float, others: Iterable["LocalWorker"]
    ) -> list[WorkerStalled | TakeStacks]:
        """Return a `WorkerStalled` at each look without a sign of life from its limit on; `TakeStacks` before that.

        Nothing is reported while one of the `others` of its task here shows signs: all hang or none, since they wait
        for one another, and usually only one rank writes.
        """
        self.life_signs.record_use(use, now)
        if not self.life_signs.is_nearly_over(now) or not all(each.life_signs.is_nearly_over(now) for each in others):
            return []
        looks: list[WorkerStalled | TakeStacks] = (
            [TakeStacks(self.worker, self.pid)] if self.life_signs.begin_stack_request(now) else []
        )
        if not self.life_signs.is_over(now):
            return looks
        stalled = WorkerStalled(
            node=node,
            slot=self.slot,
            task=self.task,
            worker=self.worker,
            epoch=self.epoch,
            iteration=self.iteration,
            phase=WorkerPhase.COMPUTE,
            waited_s=self.life_signs.silent_s(now),
            limit_s=self.life_signs.limit_s,
            responsive=not use.stopped,
            silent=True,
            stacks=list(self.stacks),
        )
        return [stalled, *looks]

    def check_asleep(self, node: str, limits: StallLimits, now: float, asleep_s: float) -> list[WorkerAsleep]:
        """Return the fact that its processes sleep, once, well before it counts as stalled."""
        limit, waited = max(asleep_s, limits.factor * (self.interval_s or 0.0)), now - self.progressed_at
        is_reported = self.reported is not None and self.reported[:2] == (self.epoch, self.iteration)
        if is_reported or waited < EARLY * limit or not self.asleep_s(now):
            return []
        self.reported = self.epoch, self.iteration, "sleeps"
        return [
            WorkerAsleep(
                node=node,
                slot=self.slot,
                task=self.task,
                worker=self.worker,
                epoch=self.epoch,
                iteration=self.iteration,
                waited_s=waited,
                limit_s=limit,
            )
        ]

    def check_away(self, node: str, limits: StallLimits, now: float) -> list[WorkerAway]:
        """Return the fact that its script has been busy for long before an iteration, before others wait too long.

        The others began to wait after this worker's last update, and count as hung after `hang_s` at least. The fact is
        returned once for each membership: members of a newer one wait for this worker there.
        """
        epoch, waited = max(self.epoch, self.membership.epoch if self.membership else -1), now - self.progressed_at
        place = epoch, self.iteration
        if self.phase is not WorkerPhase.BETWEEN or self.away == place or waited < min(limits.hang_s / 2, AWAY_S):
            return []
        self.away = place
        return [
            WorkerAway(
                node=node,
                slot=self.slot,
                task=self.task,
                worker=self.worker,
                epoch=epoch,
                iteration=self.iteration,
                waited_s=waited,
            )
        ]


def communicating(workers: Iterable[LocalWorker]) -> list[int]:
    """Return the slots of workers that may send to other nodes: some of their membership are not on this node."""
    alive = [worker for worker in workers if not worker.finished]
    here = Counter((each.task, each.membership.epoch) for each in alive if each.membership is not None)
    return [
        each.slot
        for each in alive
        if each.membership is None or here[each.task, each.membership.epoch] < each.membership.world_size
    ]
