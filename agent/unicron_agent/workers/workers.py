"""A worker as its agent knows it: where it is, and whether it has stalled."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from unicron.contracts.commands import StartWorker
from unicron.contracts.events import WorkerAsleep, WorkerAway, WorkerStalled
from unicron.contracts.tasks import ParallelLayout, WorkerPhase, WorkerStatus
from unicron.contracts.worker import Finished, Hello, Iterated, Joined, Membership, Pong, Progress, Ready, ToAgent
from unicron_agent.silence import Silence, Use
from unicron_agent.stimuli import Running, TakeStacks

BUSY = frozenset({WorkerPhase.COMPUTE, WorkerPhase.REDUCE, WorkerPhase.STEP, WorkerPhase.BETWEEN})
"""Phases in which a worker is to make progress."""

LATE_S = 0.1
"""A microbatch that takes longer than usual by that much has its worker's processes looked at."""

EARLY = 0.6
"""Of the time that a worker may sleep: then its sleep is told. Others that sleep for the same reason began to within a
microbatch, a third of that time, and so have told of it before the first is told to stall."""

AWAKE, TICK_S, MOMENTS = 0.05, 0.011, 0.25
"""Whose processes use more of a core than that, besides one tick of the kernel's clock, or are awake in more of the
looks at them, does something."""

AWAY_S = 10.0
"""A script that is busy for that long between two iterations is told of: well before a regroup is given up (30 s)."""

SILENT_S = 1.0
"""A worker that was asked and has not answered for that long is told to be silent."""


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
    stopped_s: float = 0.7
    asleep_s: float = 2.0
    hang_s: float = 20.0
    between_s: float = 1800.0


@dataclass
class Nap:
    """Processes that sleep.

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
class Worker:
    """A worker as this agent knows it. Times are monotonic seconds of the agent.

    Attributes:
        correlation: chain of the command that the worker obeyed last.
        queued: the command to start it, as long as the slot's last process is not gone, or it is to wait.
        due: monotonic seconds before which it is not to start.
        membership: the newest that it was sent.
        greeted: it has reached its agent, and answers when it is asked whether it is there.
        interval_s: running mean of the time between two signs of progress while computing; None before the first.
        asleep: while all its processes sleep, since when.
        reported: the epoch and iteration for which a stall was reported last, and of which kind.
        looked_at: the epoch and iteration in which its stacks were asked for last.
        stacks: where its threads were then.
        collectives: what it said last of those under way.
        away: the newest epoch and the iteration for which was told that its script is busy before it.
        silence: for how long it has shown no sign of life; counts where nothing else watches it.
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
    moved_at: float = 0.0
    heard_at: float = 0.0
    interval_s: float | None = None
    stopping: bool = False
    finished: bool = False
    asleep: Nap | None = None
    reported: tuple[int, int, str] | None = None
    looked_at: tuple[int, int] | None = None
    stacks: tuple[str, ...] = ()
    collectives: list[str] = field(default_factory=list)
    away: tuple[int, int] | None = None
    silence: Silence = field(default_factory=Silence)

    @classmethod
    def adopted(cls, running: Running, now: float) -> "Worker":
        """Return what an earlier agent wrote down of a worker."""
        return cls(
            worker=running.worker,
            task=running.task,
            slot=running.slot,
            place=running.place,
            layout=running.layout,
            pid=running.pid,
            correlation=running.correlation,
            moved_at=now,
            heard_at=now,
            silence=Silence(running.silence_s, running.spins, now),
        )

    def status(self) -> WorkerStatus:
        """Return what the registry and the transition service are told of it."""
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

    def note(self, message: ToAgent, now: float) -> None:
        """Keep what the worker said of its whereabouts."""
        self.heard_at = now
        if not isinstance(message, Pong):
            self.asleep, self.silence.heard_at = None, now
        match message:
            case Hello():
                self.epoch, self.iteration, self.ready = message.epoch, message.iteration, message.ready
                self.greeted = True
                self.pid = self.pid or message.pid  # it may greet before its start is told
                self.moved_at = now
            case Ready():
                self.ready, self.phase = True, WorkerPhase.WAITING
            case Progress():
                self._move(message, now)
            case Joined():
                self.epoch, self.iteration = message.epoch, message.iteration
                self.phase, self.moved_at = WorkerPhase.COMPUTE, now
            case Iterated():
                self.phase, self.moved_at, self.iteration = WorkerPhase.BETWEEN, now, message.iteration + 1
            case Pong(collectives=list(lines)):
                self.collectives = lines
            case Finished():
                self.finished, self.phase = True, WorkerPhase.FINISHED

    def saw(self, stacks: tuple[str, ...], now: float) -> None:
        """Keep where its threads are; empty where that can't be seen."""
        self.stacks, self.silence.seen_at = stacks, now

    def _move(self, message: Progress, now: float) -> None:
        """Note progress, and how long it took where that was a microbatch.

        Of a program without a session that includes what it waited for others: all of it is a reduce.
        """
        same = message.phase == self.phase and message.phase in {WorkerPhase.COMPUTE, WorkerPhase.REDUCE}
        if same and message.done > self.done:
            took = now - self.moved_at
            self.interval_s = took if self.interval_s is None else 0.9 * self.interval_s + 0.1 * took
        self.phase, self.iteration, self.done = message.phase, message.iteration, message.done
        self.moved_at = now

    @property
    def unwatched(self) -> bool:
        """Whether nobody knows how long it may go without progress, or that it is to make any."""
        return self.phase not in BUSY or (self.interval_s is None and self.phase is not WorkerPhase.BETWEEN)

    def may_be_silent(self, now: float) -> bool:
        """Return whether it may have shown no sign of life for long: then its processes are to be looked at."""
        counts = self.unwatched and self.pid > 0 and not (self.stopping or self.finished)
        return counts and self.silence.is_due(now)

    def is_late(self, now: float) -> bool:
        """Return whether its microbatch takes longer than usual by so much that its processes are to be looked at."""
        computes = self.phase in {WorkerPhase.COMPUTE, WorkerPhase.STEP} and not (self.stopping or self.finished)
        return computes and self.interval_s is not None and now - self.moved_at > self.interval_s + LATE_S

    def look(self, used_s: float | None, now: float) -> None:
        """Note that it is late, and how much CPU its processes have used by now; None: some of them are awake.

        One that sleeps is awake for moments, such as that in which it answers its agent.
        """
        nap = self.asleep
        if nap is None:
            self.asleep = Nap(now, used_s) if used_s is not None else None
            return
        nap.looks += 1
        nap.awake += used_s is None
        worked = used_s is not None and used_s - nap.used_s > AWAKE * (now - nap.since) + TICK_S
        if worked or nap.awake > max(1.0, MOMENTS * nap.looks):
            self.asleep = None

    def asleep_s(self, now: float) -> float:
        """Return for how long its processes have slept, as far as is known."""
        return now - self.asleep.since if self.asleep else 0.0

    def stalled(
        self, node: str, limits: StallLimits, now: float, *, stopped: bool, asleep_s: float = math.inf
    ) -> list[WorkerStalled | TakeStacks]:
        """Return the fact that it has made no progress for too long, once an iteration, and half-way a look at it.

        Args:
            node: that it is on.
            limits: of the agent.
            now: monotonic seconds.
            stopped: its process is. One that is can't even wait for others, or start; it answered until then, whatever
                its last progress was.
            asleep_s: how long it may be without progress while all its processes sleep.
        """
        between = self.phase is WorkerPhase.BETWEEN
        if self.stopping or self.finished or (self.unwatched and not (stopped and self.greeted)):
            return []
        usual = limits.factor * (self.interval_s or 0.0)
        limit = max(limits.stopped_s if stopped else limits.between_s if between else limits.hang_s, usual)
        waited = now - (self.heard_at if stopped else self.moved_at)
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

    def silent(self, node: str, use: Use, now: float, others: Iterable["Worker"]) -> list[WorkerStalled | TakeStacks]:
        """Return the fact that it shows no sign of life, at each look at it from its limit on; have its threads seen.

        Nothing is told while one of the `others` of its task here shows some: all hang or none, as they wait for one
        another, and mostly one rank alone writes.
        """
        self.silence.look(use, now)
        if not self.silence.is_near(now) or not all(each.silence.is_near(now) for each in others):
            return []
        looks: list[WorkerStalled | TakeStacks] = [TakeStacks(self.worker, self.pid)] if self.silence.asks(now) else []
        if not self.silence.is_over(now):
            return looks
        stalled = WorkerStalled(
            node=node,
            slot=self.slot,
            task=self.task,
            worker=self.worker,
            epoch=self.epoch,
            iteration=self.iteration,
            phase=WorkerPhase.COMPUTE,
            waited_s=self.silence.lasts_s(now),
            limit_s=self.silence.limit_s,
            responsive=not use.stopped,
            silent=True,
            stacks=list(self.stacks),
        )
        return [stalled, *looks]

    def sleeping(self, node: str, limits: StallLimits, now: float, asleep_s: float) -> list[WorkerAsleep]:
        """Return the fact that its processes sleep, once, well before it is told to stall for that."""
        limit, waited = max(asleep_s, limits.factor * (self.interval_s or 0.0)), now - self.moved_at
        told = self.reported is not None and self.reported[:2] == (self.epoch, self.iteration)
        if told or waited < EARLY * limit or not self.asleep_s(now):
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

    def long_away(self, node: str, limits: StallLimits, now: float) -> list[WorkerAway]:
        """Return the fact that its script is busy for long before an iteration, ahead of who waits for it there.

        Who waits began to after this worker's last update, and is told to hang after `hang_s` at least. It is told once
        for each membership that the worker is to be in: those who have gone to a newer one wait for it there.
        """
        epoch, waited = max(self.epoch, self.membership.epoch if self.membership else -1), now - self.moved_at
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


def communicating(workers: Iterable[Worker]) -> list[int]:
    """Return the slots of workers that may send something to other nodes: not all of their membership are here."""
    alive = [worker for worker in workers if not worker.finished]
    here = Counter((each.task, each.membership.epoch) for each in alive if each.membership is not None)
    return [
        each.slot
        for each in alive
        if each.membership is None or here[each.task, each.membership.epoch] < each.membership.world_size
    ]
