"""Parked snapshots that go from the memories of nodes to storage, and are only there then.

Those of tasks that wait for long, so that memory is free; and at once those that lie on nodes which are to go, where
none stays that could keep a copy.
"""

from hashlib import blake2b

import msgspec

from unicron.contracts.base import Message
from unicron.contracts.commands import StoreState
from unicron.contracts.ranges import Count
from unicron.contracts.states import ParkedSnapshot, StateRef
from unicron.contracts.storage import Saving
from unicron_transition.cluster import KnownNodes
from unicron_transition.deadlines import Deadline, WaitKind
from unicron_transition.group import WorkerGroup


class StorageAttempt(msgspec.Struct, kw_only=True):
    """A snapshot that is to go from memory to storage.

    Attributes:
        wait: what is waited for before it is written, as in `WaitKind`; empty: nothing.
        saving: what is being written now.
        nodes: that write it, by their incarnations when they were ordered to; a later one does not know the order.
    """

    wait: str = ""
    saving: Saving | None = None
    nodes: dict[str, str] = {}

    def under_way(self, cluster: KnownNodes) -> bool:
        """Return whether every writing node still has the incarnation to which the order was sent."""
        return self.saving is not None and all(
            cluster.is_there(node) and cluster.nodes[node].incarnation == incarnation
            for node, incarnation in self.nodes.items()
        )


class Retirement(msgspec.Struct, kw_only=True):
    """Attempts to write a task's parked snapshot to storage.

    Attributes:
        attempt: that is on, or waited for.
        attempts: how many there were.
    """

    attempt: StorageAttempt | None = None
    attempts: Count = 0

    def retire(
        self, cluster: KnownNodes, group: WorkerGroup, parked: ParkedSnapshot, *, at_once: bool
    ) -> list[Message]:
        """Return the commands that write the parked snapshot to storage, or the timer after which that is done."""
        idle_s = cluster.idle_s
        attempt = self.attempt
        if attempt is None:
            attempt = self.attempt = StorageAttempt(wait=WaitKind.IDLE)
            if not at_once:
                return [Deadline(WaitKind.IDLE, group.spec.name).set(idle_s)]
        if attempt.under_way(cluster) or attempt.wait == (WaitKind.AGAIN if at_once else WaitKind.IDLE):
            return []
        return self._order_writes(cluster, group, parked, attempt)

    def cancel(self, task: str) -> list[Message]:
        """Cancel the attempt, as the snapshot is about to be restored or is gone; a write under way may finish."""
        attempt, self.attempt = self.attempt, None
        return [Deadline(WaitKind(attempt.wait), task).cancel()] if attempt and attempt.wait else []

    def expire(self) -> None:
        """Record that the wait before the next attempt is over."""
        if self.attempt is not None:
            self.attempt.wait = ""

    def record_failure(
        self, cluster: KnownNodes, task: str, node: str, *, at_once: bool
    ) -> tuple[Saving | None, list[Message]]:
        """Schedule another attempt after a node failed to write its part; return the failed saving and the timer."""
        attempt = self.attempt
        if attempt is None or attempt.saving is None or node not in attempt.nodes:
            return None, []
        saving, attempt.saving = attempt.saving, None
        wait = WaitKind.AGAIN if at_once else WaitKind.IDLE
        attempt.wait = wait
        return saving, [Deadline(wait, task).set(cluster.idle_s if wait is WaitKind.IDLE else None)]

    def record_written(self, node: str) -> Saving | None:
        """End the attempt that `node` reports as written; return its saving, None where there is no such attempt."""
        attempt = self.attempt
        if attempt is None or node not in attempt.nodes or attempt.saving is None:
            return None
        self.attempt = None
        return attempt.saving

    def _order_writes(
        self, cluster: KnownNodes, group: WorkerGroup, parked: ParkedSnapshot, attempt: StorageAttempt
    ) -> list[Message]:
        """Order one node for each place to write it; each attempt chooses other nodes where it can."""
        out: list[Message] = [Deadline(WaitKind(attempt.wait), group.spec.name).cancel()] if attempt.wait else []
        self.attempts += 1
        named = f"{group.submitted_at}:{group.before}:{parked.iteration}:{self.attempts}"
        saving = Saving(
            root=group.spec.checkpoints,
            task=group.spec.name,
            iteration=parked.iteration,
            layout=parked.layout.with_workers(0),
            attempt=blake2b(named.encode(), digest_size=4).hexdigest(),
        )
        places: dict[int, list[StateRef]] = {}
        for ref in parked.states:
            places.setdefault(ref.place, []).append(ref)
        chosen = [refs[self.attempts % len(refs)] for refs in places.values()]
        attempt.wait, attempt.saving = "", saving
        attempt.nodes = {ref.location.node: cluster.nodes[ref.location.node].incarnation for ref in chosen}
        return out + [
            StoreState(**cluster.command_fields(ref.location.node), task=group.spec.name, state=ref, saving=saving)
            for ref in chosen
        ]
