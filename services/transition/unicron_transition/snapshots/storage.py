"""Checkpoints that are written to storage while a task computes: how often, and when one is complete."""

import msgspec

from unicron.contracts.base import Message
from unicron.contracts.commands import CommitCheckpoint, FindCheckpoint
from unicron.contracts.events import CheckpointStored, PartStored
from unicron.contracts.ranges import Count, Number, Seconds
from unicron.contracts.storage import StoredPart, StoreOrder
from unicron.snapshots.interval import daly
from unicron_transition.cluster import KnownNodes
from unicron_transition.group import WorkerGroup

PRIOR_S = 24 * 3600.0
"""A task is taken to fail once in that time, as long as nothing else is known of it."""

LEAST_S = 60.0
LEAST_WRITE_S = 1.0
ATTEMPTS = 4
"""Checkpoints of which parts may be on their way at once; older ones lack parts that will never come."""

CHANGE = 1.25
"""By how much an interval must differ from the one in force to be ordered."""


class CheckpointWrites(msgspec.Struct, kw_only=True):
    """What a task writes to storage.

    Attributes:
        parts: of checkpoints that are being written those that are there, by attempt.
        write_s: seconds that writing a part took last, at most.
        every_s: seconds from one checkpoint to the next, as ordered.
        failures: of the task so far.
        asks: how often users have ordered to write one now.
        asked_after: the last time, after this iteration, and there is none yet; None where there is.
    """

    parts: dict[str, list[StoredPart]] = {}
    write_s: Seconds = 30.0
    every_s: Seconds = 0.0
    failures: Count = 0
    asks: Count = 0
    asked_after: Number | None = None

    def store_order(self, group: WorkerGroup) -> StoreOrder | None:
        """Return the order that says how often savers write to storage; None for a task without storage."""
        root = group.spec.checkpoints
        if not root:
            return None
        self.every_s = self.every_s or self.interval(group, group.submitted_at)
        asked = self.asks if self.asked_after is not None else 0
        return StoreOrder(root=root, every_s=self.every_s, run=f"{group.submitted_at}:{group.before}", asked=asked)

    def interval(self, group: WorkerGroup, now: float) -> float:
        """Return the seconds from one checkpoint to the next: the user's, or Daly's for what was seen of failures."""
        seen_s = PRIOR_S + max(0.0, now - group.submitted_at)
        best_s = max(LEAST_S, daly(self.write_s, seen_s / (1 + self.failures)))
        return group.spec.checkpoint_s or best_s

    def request_checkpoint(self, after: int) -> None:
        """Record a user's order to write a checkpoint now, of a later iteration than `after`."""
        self.asks, self.asked_after = self.asks + 1, after

    def add_part(self, cluster: KnownNodes, group: WorkerGroup, fact: PartStored) -> list[Message]:
        """Record a written part; when all are there, order the commit, and forget incomplete earlier attempts."""
        saving, task = fact.saving, group.spec.name
        if (saving.root, saving.task) != (group.spec.checkpoints, task):
            return []  # an earlier task's of this name
        others = [part for part in self.parts.pop(saving.attempt, ()) if part.place != fact.part.place]
        parts = self.parts[saving.attempt] = [*others, fact.part]
        self.write_s = max(fact.seconds, self.write_s if others else LEAST_WRITE_S)
        if len(parts) < saving.layout.replica_workers or not cluster.is_there(fact.node):
            self.parts = dict(list(self.parts.items())[-ATTEMPTS:])
            return []
        self.parts = {}
        to = cluster.command_fields(fact.node)
        return [CommitCheckpoint(**to, task=task, saving=saving, parts=parts, since=group.submitted_at)]

    def record_checkpoint(self, group: WorkerGroup, fact: CheckpointStored) -> None:
        """Record that a checkpoint is complete, and adapt the interval to the next one."""
        if fact.iteration > (self.asked_after or 0):
            self.asked_after = None
        best_s = self.interval(group, fact.at)
        if not 1 / CHANGE <= best_s / (self.every_s or best_s) <= CHANGE:
            self.every_s = best_s


def choose_storage_node(cluster: KnownNodes, group: WorkerGroup) -> str:
    """Return a node that can look at the storage, empty where there is none."""
    there = [slot.node for slot in cluster.usable(group.target)]
    return next(iter(there or [name for name in cluster.nodes if cluster.is_there(name)]), "")


def find_checkpoint_order(
    cluster: KnownNodes, group: WorkerGroup, node: str, number: int, *, before: int | None, iteration: int = -1
) -> FindCheckpoint:
    """Return the command that has a node look for the newest checkpoint below `before`, or for that of `iteration`."""
    return FindCheckpoint(
        **cluster.command_fields(node),
        task=group.spec.name,
        search=number,
        root=group.spec.checkpoints,
        since=0.0 if group.spec.resume else group.submitted_at,
        before=-1 if before is None else before,
        iteration=iteration,
    )
