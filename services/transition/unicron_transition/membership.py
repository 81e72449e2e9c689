"""A task's worker processes, and the newest membership that was ordered of them."""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

import msgspec

from unicron.contracts.ranges import Number, Size
from unicron.contracts.states import COPIES, ParkedSnapshot, StateRef
from unicron.contracts.tasks import ParallelLayout, SlotRef


class WorkerStage(StrEnum):
    """How far a worker process has come."""

    STARTING = "starting"
    """It builds its model."""
    READY = "ready"
    """It waits for a membership or is in one."""
    FINISHED = "finished"
    """It is through the last iteration."""


class WorkerRun(msgspec.Struct, kw_only=True, array_like=True):
    """A worker process from its StartWorker to its end; it holds one place of a layout as long as it lives.

    Attributes:
        called: it was ordered into a membership. Even if that never met, it may have got a state there, unreported.
        token: of the instance of this service that ordered it last.
    """

    worker: str
    slot: SlotRef
    stage: WorkerStage = WorkerStage.STARTING
    place: Number = 0
    layout: ParallelLayout = ParallelLayout(replicas=0)
    called: bool = False
    token: Size = 0


class HeldState(msgspec.Struct, kw_only=True, array_like=True):
    """What part of a task's state one worker has.

    Attributes:
        place: in the replica, whose part of the state it is.
        iteration: of the state, at least: it was this one when the worker last said so.
        node: on which the worker is.
    """

    place: Number
    iteration: Number
    node: str


class TaskMembership(msgspec.Struct, kw_only=True):
    """The newest membership ordered of a task's workers.

    Maps stand in for sets, as they keep an order: equal states are stored as equal bytes.

    Attributes:
        epoch: its number, -1 before the first.
        layout: how its workers share the model and the data.
        group: its workers in rank order; empty where the task has no slots. Behind those of the layout's replicas come
            workers that only take the state of their place.
        since: for each replica, the epoch since which it has been made up of the same workers.
        joined: those of them that have reported that they compute in it.
        away: those whose scripts are busy with something else; they come when they are through with that.
        met: workers of the newest membership that anybody has joined, this one or one before it, who computed in it.
        through: workers that have said they are through with the last iteration, in any membership, living or not.
        broken: it must be formed anew even if its workers stay the same.
        leaving: its workers leave their states behind for others in another layout, and then wait for their end.
        left: what each of them has left behind.
        taken_back: what those have left behind who are to go on after all; they remove it when they join.
    """

    epoch: Number = -1
    layout: ParallelLayout = ParallelLayout(replicas=0)
    group: list[str] = []
    since: list[Number] = []
    joined: dict[str, None] = {}
    away: dict[str, None] = {}
    met: list[str] = []
    through: dict[str, None] = {}
    broken: bool = False
    leaving: bool = False
    left: dict[str, StateRef] = {}
    taken_back: dict[str, StateRef] = {}

    def successor(self, group: Sequence[str], layout: ParallelLayout, *, leaving: bool = False) -> "TaskMembership":
        """Return the membership of the next epoch."""
        epoch, kept = self.epoch + 1, dict(zip(self.replicas(), self.since, strict=False))
        following = TaskMembership(
            epoch=epoch, layout=layout, group=list(group), met=self.met, through=dict(self.through)
        )
        following.since = [kept.get(replica, epoch) for replica in following.replicas()]
        following.leaving, following.taken_back = leaving, self.taken_back
        return following

    def exporting_members(self) -> list[str]:
        """Return the members that must export their states: those of the first `COPIES` replicas."""
        return [name for replica in self.replicas()[:COPIES] for name in replica] if self.leaving else []

    def exported_snapshot(self) -> ParkedSnapshot | None:
        """Return the snapshot that the members have exported; None until all that must have done so."""
        due = self.exporting_members()
        if not due or not self.left.keys() >= set(due):
            return None
        states = [self.left[name] for name in due]
        return ParkedSnapshot(layout=self.layout, iteration=states[0].iteration, states=states)

    def is_exporting(self, workers: Mapping[str, WorkerRun]) -> bool:
        """Return whether the export can still complete: each member that must export has, or still lives."""
        there = (
            name in self.left or (name in workers and name not in self.through) for name in self.exporting_members()
        )
        return self.leaving and not self.broken and all(there)

    def replicas(self) -> list[tuple[str, ...]]:
        """Return the workers of each replica, by place."""
        size = self.layout.replica_workers
        return [
            tuple(self.group[first : first + size])
            for first in range(0, min(self.layout.workers, len(self.group)), size)
        ]

    def unchanged_since(self, ranks: Iterable[int]) -> list[int]:
        """Return for each rank the epoch since which its replica has been made up of the same workers."""
        size = self.layout.replica_workers
        since = [epoch for epoch in self.since for _ in range(size)]
        return [since[rank] if rank < self.layout.workers else self.epoch for rank in ranks]

    def record_join(self, worker: str) -> None:
        """Record that `worker`, a member, computes in this membership; by then all members have met."""
        self.joined[worker] = None
        self.taken_back.pop(worker, None)
        self.met = self.group[: self.layout.workers]

    def record_loss(self, worker: str) -> None:
        """Record that a worker is gone or is being stopped; losing a member breaks the membership."""
        self.broken = self.broken or (worker in self.group and worker not in self.left)

    @property
    def complete(self) -> bool:
        """Whether all members compute in it."""
        return bool(self.group) and len(self.joined) == len(self.group)

    @property
    def has_met(self) -> bool:
        """Whether its members have met and exchanged states: each of them has its task's state."""
        return bool(self.joined) and not self.broken

    def intact(self, workers: Mapping[str, WorkerRun]) -> bool:
        """Return whether every member lives and has joined or still can; a member that has finished can't."""
        return (
            bool(self.group)
            and not self.broken
            and all(
                name in workers and (name in self.joined or workers[name].stage is WorkerStage.READY)
                for name in self.group
            )
        )

    def survivors(self, workers: Mapping[str, WorkerRun]) -> list[str]:
        """Return the members that live and still compute."""
        return [name for name in self.group if name in workers and workers[name].stage is WorkerStage.READY]

    def has_ended(self, workers: Mapping[str, WorkerRun], *, lost: bool) -> bool:
        """Return whether the last iteration is done and no living member can still be busy with it.

        A member that is gone can't be replaced any more: those who have the state are through, and about to end.

        Args:
            workers: that live.
            lost: those of them that are not through lack a part of the state, and can't finish by themselves.
        """
        if not self.through:
            return False
        left = {name for name in self.group[: self.layout.workers] if name in workers} - self.through.keys()
        # through before they could join this membership: who was not in the one before waits there in vain
        in_vain = not self.through.keys() & self.joined.keys() and left.isdisjoint(self.met)
        return not left or in_vain or (lost and not self._is_ending(workers))

    def _is_ending(self, workers: Mapping[str, WorkerRun]) -> bool:
        """Return whether a rank has yet to report the end that another rank of its replica has reported."""
        size, through = self.layout.replica_workers, self.through.keys()
        replicas = [self.met[first : first + size] for first in range(0, len(self.met), size)]
        return any(workers.keys() & replica - through for replica in replicas if not through.isdisjoint(replica))
