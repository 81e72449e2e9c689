"""The process groups of the current membership, over which replicas sum their gradients.

Ranks exchange small values over gloo, from host memory, so that no GPU has to be waited for.
"""

import atexit
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Work

from unicron.contracts.tasks import ParallelLayout
from unicron.contracts.worker import Membership
from unicron.errors import GroupBrokenError
from unicron.train.groups import nccl
from unicron.train.groups.connections import Connections
from unicron.train.groups.rendezvous import Rendezvous
from unicron.train.worker.traffic import Traffic

SIZE_BYTES, SHORT = 8, 504
"""Bytes of a length, and of what goes along with it: nearly all that ranks tell one another while they regroup."""


class Group:
    """The one mutable context that holds the process groups; a regroup swaps what is inside.

    There is a group of everybody, and one of the ranks that have this rank's place in their replicas; where a replica
    is one worker, these are the same. torch's default process group is left to the replica's own (`groups/inner.py`).

    Args:
        device: of what is reduced.
        traffic: of this worker, to note what is sent.
        peer_left: is called with the epoch when a peer has left, by a thread.

    Attributes:
        on_streams: a collective of gradients is only enqueued when it returns. What it gives is right once all ranks
            have confirmed so.
    """

    def __init__(
        self, device: torch.device, traffic: Traffic | None = None, peer_left: Callable[[int], None] = lambda _: None
    ) -> None:
        self._device, self._traffic = device, traffic or Traffic()
        self.on_streams = nccl.on_streams(device)
        self._connections = Connections(peer_left)
        self._everybody: Any = None
        self._peers: Any = None
        self._replicas: Any = None
        self._stores: list[Rendezvous] = []  # torch does not keep them
        self._layout, self._size = ParallelLayout(), 1
        atexit.register(self._close)

    @property
    def epoch(self) -> int:
        """Of the membership that it was formed for; -1 before the first."""
        return self._connections.epoch

    def form(self, membership: Membership) -> None:
        """Meet the other ranks of `membership` at its rendezvous.

        Raises:
            GroupBrokenError: interrupted by `abort_below`, or the rendezvous or a peer was lost meanwhile.
        """
        self.leave()
        rank = membership.rank
        self._layout, self._size = membership.shape, membership.world_size
        with self._connections.forming(membership.epoch):
            store = self._rendezvous(membership)
            store.set(f"here-{rank}", "")
            store.wait([f"here-{other}" for other in range(membership.world_size)])
            connect = self._connections.connect
            self._everybody = self._peers = connect(store, rank, membership.world_size)
            seat = membership.seat
            place = (rank, membership.world_size) if seat is None else (seat.replica, self._layout.replicas)
            if self._layout.replica_workers > 1 and seat is not None:
                store = self._rendezvous(membership, f"-place-{seat.place}")
                self._peers = connect(store, *place)
            self._replicas = self._peers
            if self.on_streams:
                with self._connections.freeing_older():
                    if seat is not None and self._layout.replicas > 1:
                        streams = PrefixStore("streams", store)
                        self._replicas = self._connections.connect_streams(self._device, streams, *place)

    def _rendezvous(self, membership: Membership, part: str = "") -> Rendezvous:
        store = Rendezvous(membership, part)
        self._stores.append(store)
        return store

    def leave(self) -> None:
        """Give up the groups, whatever state they are in."""
        self._everybody = self._peers = self._replicas = None
        self._stores = []

    def _close(self) -> None:
        """Give the groups up before the interpreter ends: gloo's threads free Python's objects, so must end first."""
        self.abort_below(sys.maxsize)
        self.leave()

    @property
    def is_cut(self) -> bool:
        """Whether it was left by `abort_below`, or broke by itself."""
        return self._connections.is_cut

    def abort_below(self, epoch: int) -> bool:
        """Interrupt threads blocked in a group older than `epoch`; return whether there is one. From any thread."""
        return self._connections.cut_below(epoch)

    def begin_all_reduce(self, tensor: torch.Tensor) -> Work | None:
        """Begin to sum `tensor` over the ranks with this rank's place, in place; None where there is but one.

        Raises:
            GroupBrokenError: the group broke.
        """
        return (
            self._begin(self._replicas, lambda group: group.allreduce([tensor])) if self._layout.replicas > 1 else None
        )

    def finish(self, work: Work) -> None:
        """Wait for what was begun in the group of replicas; on streams, have what is enqueued later wait for it.

        Raises:
            GroupBrokenError: the group broke.
        """
        if not self.on_streams:
            self._finish(work, self._replicas)
            return
        try:
            nccl.wait_on_stream(work)
        finally:
            self._traffic.end()

    def confirm(self) -> None:
        """Wait until all ranks with this rank's place have seen their enqueued collectives end.

        Only then are the results of collectives on streams right, on all of them.

        Raises:
            GroupBrokenError: the group broke, and results may be noise.
        """
        if self.on_streams:
            self._connections.synchronize()
            self.barrier()

    def barrier(self) -> None:
        """Wait until all ranks with this rank's place have come to this barrier.

        Raises:
            GroupBrokenError: the group broke.
        """
        if self._layout.replicas > 1:
            self._wait(self._peers, lambda group: group.allreduce([torch.zeros(1)]))

    def broadcast(self, tensor: torch.Tensor, replica: int) -> None:
        """Fill `tensor` with what the rank of `replica` with this rank's place has in it.

        Raises:
            GroupBrokenError: the group broke.
        """
        if self._layout.replicas > 1:
            self.finish(self._begin(self._replicas, lambda group: group.broadcast(tensor, replica)))

    def gather_across_replicas(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the numbers of every replica's rank with this rank's place, 64 bits each.

        Raises:
            GroupBrokenError: the group broke.
        """
        row = torch.tensor([*numbers], dtype=torch.int64)
        rows = [torch.empty_like(row) for _ in range(self._layout.replicas)]
        self._wait(self._peers, lambda group: group.allgather(rows, row))
        return [tuple(each.tolist()) for each in rows]

    def gather(self, data: bytes) -> list[bytes]:
        """Return the `data` of every rank of every replica; in one round where each is short.

        Raises:
            GroupBrokenError: the group broke.
        """
        rows = self._all_gather(len(data).to_bytes(SIZE_BYTES, "big") + data[:SHORT], SIZE_BYTES + SHORT)
        sizes = [int.from_bytes(row[:SIZE_BYTES], "big") for row in rows]
        if (longest := max(sizes)) > SHORT:
            rests = self._all_gather(data[SHORT:], longest - SHORT)
            rows = [row + rest for row, rest in zip(rows, rests, strict=True)]
        return [row[SIZE_BYTES : SIZE_BYTES + size] for row, size in zip(rows, sizes, strict=True)]

    def _all_gather(self, data: bytes, size: int) -> list[bytes]:
        """Return the `data` of every rank, filled up to so many bytes."""
        row = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
        rows = [torch.empty_like(row) for _ in range(self._size)]
        self._wait(self._everybody, lambda group: group.allgather(rows, row))
        return [each.numpy().tobytes() for each in rows]

    def _wait(self, group: Any, begin: Callable[[Any], Work]) -> None:
        """Run a collective of a group and wait for its end."""
        self._finish(self._begin(group, begin), group)

    def _finish(self, work: Work, group: Any) -> None:
        try:
            self._connections.finish(work, group)
        finally:
            self._traffic.end()

    def _begin(self, group: Any, begin: Callable[[Any], Work]) -> Work:
        if group is None:
            raise GroupBrokenError("there is no process group")
        self._traffic.begin()
        try:
            return begin(group)
        except RuntimeError as error:
            self._traffic.end()
            if self.on_streams and not isinstance(error, dist.DistError | GroupBrokenError):
                raise  # of the GPU
            raise GroupBrokenError(str(error)) from error
