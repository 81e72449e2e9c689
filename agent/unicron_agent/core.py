"""The agent's decisions, pure: which commands to carry out, what a worker's words mean, who has stalled."""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from unicron.checks import share_problems
from unicron.contracts.base import Message
from unicron.contracts.commands import Command, Regroup
from unicron.contracts.events import (
    CollectiveFailed,
    FailureDetected,
    IterationFinished,
    RecordingSwitched,
    Regrouped,
    StepTimed,
    WorkerExited,
    WorkerFinished,
    WorkerRaised,
    WorkerReady,
    WorkerStalled,
)
from unicron.contracts.tasks import WorkerPhase, WorkerStatus
from unicron.contracts.timings import period_of
from unicron.contracts.worker import (
    Broken,
    Finished,
    Hello,
    Iterated,
    Joined,
    Membership,
    Progress,
    Raised,
    Ready,
    Sample,
    Timed,
    ToAgent,
)
from unicron.errors import InvalidInputError, StaleTokenError

REPORTS: dict[type[ToAgent], type[Message]] = {
    Ready: WorkerReady,
    Iterated: IterationFinished,
    Timed: StepTimed,
    Joined: Regrouped,
    Broken: CollectiveFailed,
    Raised: WorkerRaised,
    Finished: WorkerFinished,
}
"""What a worker says, and the fact that the agent makes of it: the same fields, and where it came from."""


BUSY = frozenset({WorkerPhase.COMPUTE, WorkerPhase.REDUCE, WorkerPhase.STEP})
"""Phases in which a worker is to make progress."""


@dataclass(frozen=True)
class StallLimits:
    """How long a worker may be silent, in seconds.

    Attributes:
        factor: of the mean of its own microbatches (paper section 4.1 says 3, of an iteration).
        unresponsive_s: floor for a process whose control thread does not answer: it is stopped, or starved.
        hang_s: floor for one that answers; its script may be busy with something that is no microbatch.
    """

    factor: float = 3.0
    unresponsive_s: float = 0.7
    hang_s: float = 20.0


@dataclass
class Worker:
    """A worker process as this agent knows it. Times are monotonic seconds of the agent.

    Attributes:
        interval_s: running mean of the time between two signs of progress while computing; None before the first.
        reported: the epoch and iteration for which a stall was reported already.
    """

    worker: str
    task: str
    slot: int
    pid: int
    correlation: str = ""
    epoch: int = -1
    iteration: int = -1
    rank: int = -1
    ready: bool = False
    phase: WorkerPhase = WorkerPhase.STARTING
    done: int = 0
    moved_at: float = 0.0
    heard_at: float = 0.0
    interval_s: float | None = None
    stopping: bool = False
    finished: bool = False
    reported: tuple[int, int] | None = None

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
        )


@dataclass
class AgentCore:
    """Everything the agent knows about its workers; messages in, facts out.

    Attributes:
        joined: place in the journal at which the node joined last; None until that is known.
        given_up: place of the newest fact that gives this node up for its silence, -1 where there is none.
        samples: by task, what its workers are to record, where somebody has switched that.
    """

    node: str
    incarnation: str = ""
    joined: int | None = None
    given_up: int = -1
    limits: StallLimits = field(default_factory=StallLimits)
    token: int = 0
    workers: dict[str, Worker] = field(default_factory=dict)
    samples: dict[str, Sample] = field(default_factory=dict)

    def admit(self, command: Command) -> bool:
        """Return whether to carry a command out: not one that was meant for the node before it joined anew.

        Raises:
            StaleTokenError: a later instance of the sender has spoken already, or the command is for another node.
        """
        if command.node != self.node:
            raise StaleTokenError(f"{type(command).__name__} for node {command.node!r} came to {self.node!r}")
        if command.token < self.token:
            raise StaleTokenError(
                f"{type(command).__name__} carries fencing token {command.token}; {self.token} has been seen"
            )
        self.token = command.token
        return command.incarnation in {"", self.incarnation}

    @property
    def wrongly_given_up(self) -> bool:
        """Whether this node was given up for its silence after it joined, so that it must join again.

        That fact may be late: of a connection that ended long before, or of an earlier agent.
        """
        return self.joined is not None and self.given_up > self.joined

    def read(self, message: Message, sequence: int) -> None:
        """Note what `message` in the journal says of this node.

        A node given up because of what happens on it is not to come back by itself.
        """
        if isinstance(message, FailureDetected) and (message.node, message.method) == (self.node, "node_health"):
            self.given_up = sequence

    def switch(self, switched: RecordingSwitched) -> list[str]:
        """Remember what the workers of a task are to record; return those that live and have to be told.

        Raises:
            InvalidInputError: the share is none.
        """
        if problems := share_problems(switched.share):
            raise InvalidInputError(f"RecordingSwitched of task {switched.task!r}: {problems[0]}")
        self.samples[switched.task] = Sample(period=period_of(switched.share))
        return [name for name, worker in self.workers.items() if worker.task == switched.task]

    def sample_of(self, name: str) -> Sample | None:
        """Return what worker `name` has to be told when it connects; None where the usual holds."""
        worker = self.workers.get(name)
        return self.samples.get(worker.task) if worker else None

    def memberships(self, order: Regroup) -> list[Membership]:
        """Return the place in the new epoch of each worker here that takes part."""
        return [
            Membership(
                epoch=order.epoch,
                rendezvous=order.rendezvous,
                rendezvous_id=order.rendezvous_id,
                rank=rank,
                world_size=order.world_size,
                member=member,
                layout=order.layout,
            )
            for member, rank in zip(order.members, order.ranks, strict=False)
            if member.worker in self.workers
        ]

    def said(self, name: str, message: ToAgent, now: float) -> list[Message]:
        """Take in what worker `name` said at `now`; return the facts for the bus."""
        worker = self.workers.get(name)
        if worker is None:
            return []
        worker.heard_at = now
        _note(worker, message, now)
        kind = REPORTS.get(type(message))
        if kind is None or (isinstance(message, Iterated) and message.rank):
            return []
        fields: dict[str, Any] = {**msgspec.structs.asdict(worker.status()), **msgspec.structs.asdict(message)}
        fields["node"] = self.node
        return [kind(**{field: value for field, value in fields.items() if field in kind.__struct_fields__})]

    def exited(self, name: str, exit_code: int | None, signal: int | None, stderr: list[str]) -> list[Message]:
        """A worker process is gone; return the fact."""
        worker = self.workers.pop(name, None)
        if worker is None:
            return []
        return [
            WorkerExited(
                node=self.node,
                slot=worker.slot,
                task=worker.task,
                worker=name,
                exit_code=exit_code,
                signal=signal,
                expected=worker.stopping,
                finished=worker.finished,
                iteration=worker.iteration,
                microbatches_done=worker.done,
                stderr=stderr,
            )
        ]

    def stalled(self, now: float) -> list[Message]:
        """Return a fact for each worker that has made no progress for too long, once an iteration."""
        facts: list[Message] = []
        for worker in self.workers.values():
            if worker.stopping or worker.interval_s is None or worker.phase not in BUSY:
                continue
            waited, silent = now - worker.moved_at, now - worker.heard_at
            usual = self.limits.factor * worker.interval_s
            quiet = max(self.limits.unresponsive_s, usual)
            responsive = silent < quiet
            limit = max(self.limits.hang_s, usual) if responsive else quiet
            place = (worker.epoch, worker.iteration)
            if waited < limit or worker.reported == place:
                continue
            worker.reported = place
            facts.append(
                WorkerStalled(
                    node=self.node,
                    slot=worker.slot,
                    task=worker.task,
                    worker=worker.worker,
                    epoch=worker.epoch,
                    iteration=worker.iteration,
                    phase=worker.phase if worker.phase == WorkerPhase.REDUCE else WorkerPhase.COMPUTE,
                    waited_s=waited,
                    limit_s=limit,
                    responsive=responsive,
                )
            )
        return facts


def _note(worker: Worker, message: ToAgent, now: float) -> None:
    """Keep what the message says of the worker's whereabouts."""
    match message:
        case Hello():
            worker.epoch, worker.iteration, worker.ready = message.epoch, message.iteration, message.ready
            worker.moved_at = now
        case Ready():
            worker.ready, worker.phase = True, WorkerPhase.WAITING
        case Progress():
            _move(worker, message, now)
        case Joined():
            worker.epoch, worker.iteration, worker.rank = message.epoch, message.iteration, message.rank
            worker.phase, worker.moved_at = WorkerPhase.COMPUTE, now
        case Finished():
            worker.finished, worker.phase = True, WorkerPhase.FINISHED


def _move(worker: Worker, message: Progress, now: float) -> None:
    """Note progress, and how long it took where that was a microbatch."""
    if message.phase == worker.phase == WorkerPhase.COMPUTE and message.done > worker.done:
        took = now - worker.moved_at
        worker.interval_s = took if worker.interval_s is None else 0.9 * worker.interval_s + 0.1 * took
    worker.phase, worker.iteration, worker.done = message.phase, message.iteration, message.done
    worker.moved_at = now
