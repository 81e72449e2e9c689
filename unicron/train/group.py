"""The process groups of the current membership, and how to wake a rank that is blocked in one of them.

gloo has no abort. What wakes every call that is blocked, whether its peer died or only stopped, is shutting down the
group's own TCP connections from another thread. There is no interface that names them, so they are found as the
sockets that appeared while the groups were formed. NCCL has an abort of its own.
"""

import atexit
import contextlib
import ctypes
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroupGloo, Work

from unicron.contracts.tasks import ParallelLayout
from unicron.contracts.worker import Membership
from unicron.errors import GroupBrokenError
from unicron.train.rendezvous import Rendezvous

FOREVER = timedelta(minutes=30)
"""Nobody waits for a timeout: blocked calls are woken by `abort_below`."""

CONNECT = timedelta(seconds=10)
"""For gloo's mesh, once all ranks have met."""

POLL = timedelta(seconds=0.05)
GIVE_UP_S = 0.15
"""How long an interrupted call may take to come back, before it is abandoned."""


class Group:
    """The one mutable context that holds the process groups; a regroup swaps what is inside.

    There is a group of everybody, and one of the ranks that have this rank's place in their replicas; where a replica
    is one worker, these are the same. torch's default process group is left alone: it counts its groups by process,
    and those counts drift apart when forming one fails on some ranks only.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._everybody: Any = None
        self._replicas: Any = None
        self._aborted_at: float | None = None
        self._older: frozenset[str] = frozenset()
        self._own: frozenset[str] | None = frozenset()
        self._stores: list[Rendezvous] = []  # torch does not keep them
        self._layout = ParallelLayout()
        self.epoch = -1
        atexit.register(self._close)

    def form(self, membership: Membership) -> None:
        """Meet the other ranks of `membership` at its rendezvous.

        Raises:
            GroupBrokenError: interrupted by `abort_below`, or the rendezvous or a peer was lost meanwhile.
        """
        self.leave()
        with self._lock:
            self.epoch = membership.epoch
            self._older, self._own, self._aborted_at = frozenset(_sockets()), None, None
        rank, address = membership.rank, membership.rendezvous
        # the name keeps tasks and epochs apart: a rank that was stopped and goes on meets nobody
        name = f"{membership.rendezvous_id}-{membership.epoch}"
        self._layout = membership.layout.with_workers(membership.world_size)
        try:
            store = self._meet(address, name)
            store.set(f"here-{rank}", "")
            store.wait([f"here-{other}" for other in range(membership.world_size)])
            self._everybody = self._replicas = self._connect(store, rank, membership.world_size)
            if self._layout.replica_workers > 1:
                seat = self._layout.seat(rank)
                store = self._meet(address, f"{name}-place-{seat.place}")
                self._replicas = self._connect(store, seat.replica, self._layout.replicas)
        finally:
            with self._lock:
                self._own = frozenset(_sockets()) - self._older

    def _meet(self, address: str, name: str) -> Rendezvous:
        store = Rendezvous(address, name)
        self._stores.append(store)
        return store

    def _connect(self, store: Rendezvous, rank: int, size: int) -> Any:
        """Make a group in a thread that can be left behind.

        Who waits for a peer to connect has no connection yet that could be shut down: an interrupted rank goes on
        without it, and the thread ends with its timeout.
        """
        made: list[Any] = []
        failed: list[RuntimeError] = []

        def make() -> None:
            try:
                made.append(self._make(store, rank, size))
            except RuntimeError as error:
                failed.append(error)

        thread = threading.Thread(target=make, name="unicron-connect", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(POLL.total_seconds() / 4)
            if self._aborted_at is not None:
                raise GroupBrokenError("interrupted while the group was being formed")
        if failed:
            raise GroupBrokenError(str(failed[0])) from failed[0]
        return made[0]

    def _make(self, store: Rendezvous, rank: int, size: int) -> Any:
        if self._device.type == "cuda":
            from torch._C._distributed_c10d import ProcessGroupNCCL  # noqa: PLC0415 only builds with CUDA have it

            options = ProcessGroupNCCL.Options()
            options._timeout = FOREVER  # noqa: SLF001 torch has no other name for it
            return ProcessGroupNCCL(store, rank, size, options)
        group = ProcessGroupGloo(store, rank, size, timeout=CONNECT)
        group._set_default_timeout(FOREVER)  # noqa: SLF001 likewise
        return group

    def leave(self) -> None:
        """Give up the groups, whatever state they are in."""
        self._everybody = self._replicas = None
        self._stores = []

    def _close(self) -> None:
        """Give the groups up before the interpreter ends: gloo's threads free Python's objects, so must end first."""
        self.abort_below(sys.maxsize)
        self.leave()

    def abort_below(self, epoch: int) -> bool:
        """Wake whoever is blocked in a group older than `epoch`; return whether there is one. From any thread."""
        with self._lock:
            if self.epoch >= epoch:
                return False
            self._aborted_at = self._aborted_at or time.monotonic()
            if self._device.type == "cuda":
                for backend in {self._everybody, self._replicas} - {None}:
                    with contextlib.suppress(RuntimeError):
                        backend.abort()
            for inode, descriptor in _sockets().items():
                # while it forms nobody can tell which are its own; later the program may have opened others
                if inode in self._own if self._own is not None else inode not in self._older:
                    _shut(descriptor)
            return True

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum `tensor` over the ranks with this rank's place, in place.

        Raises:
            GroupBrokenError: the group broke.
        """
        if self._layout.replicas > 1:
            self._wait(self._replicas, lambda group: group.allreduce([tensor]))

    def broadcast(self, tensor: torch.Tensor, replica: int) -> None:
        """Fill `tensor` with what the rank of `replica` with this rank's place has in it.

        Raises:
            GroupBrokenError: the group broke.
        """
        if self._layout.replicas > 1:
            self._wait(self._replicas, lambda group: group.broadcast(tensor, replica))

    def gather(self, data: bytes) -> list[bytes]:
        """Return the `data` of every rank of every replica.

        Raises:
            GroupBrokenError: the group broke.
        """
        sizes = [int(row.item()) for row in self._all_gather(torch.tensor([len(data)]))]
        row = torch.tensor([*data, *bytes(max(sizes) - len(data))], dtype=torch.uint8)
        return [bytes(row[:size].tolist()) for row, size in zip(self._all_gather(row), sizes, strict=True)]

    def _all_gather(self, row: torch.Tensor) -> list[torch.Tensor]:
        row = row.to(self._device)
        rows = [torch.empty_like(row) for _ in range(self._layout.workers)]
        self._wait(self._everybody, lambda group: group.allgather(rows, row))
        return [other.cpu() for other in rows]

    def _wait(self, group: Any, begin: Callable[[Any], Work]) -> None:
        """Do a collective and wait for it; where it was interrupted and yet does not end, go on without it.

        gloo can lose a connection's end that coincides with a send, and would wait for its timeout then. The group is
        kept for good, because its destructor would wait as well; its connections are closed, so nothing of it moves.
        """
        if group is None:
            raise GroupBrokenError("there is no process group")
        try:
            work = begin(group)
        except RuntimeError as error:
            raise GroupBrokenError(str(error)) from error
        try:
            while not self._has_ended(work):
                pass
        except BaseException as error:
            if not work.is_completed():
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            if isinstance(error, RuntimeError):
                raise GroupBrokenError(str(error)) from error
            raise

    def _has_ended(self, work: Work) -> bool:
        try:
            work.wait(POLL)
        except RuntimeError:
            if work.is_completed():
                work.wait()  # it may have ended just after the time-out: this raises only what really went wrong
            elif self._aborted_at is None or time.monotonic() - self._aborted_at < GIVE_UP_S:
                return False
            else:
                raise
        return True


def _sockets() -> dict[str, int]:
    """Return this process's sockets: inode text -> file descriptor."""
    found: dict[str, int] = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(entry.readlink())
            if target.startswith("socket:"):
                found[target] = int(entry.name)
    return found


def _shut(descriptor: int) -> None:
    """Shut a TCP connection down; leave listeners and sockets of other families alone."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family not in {socket.AF_INET, socket.AF_INET6}:
            return
        if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            connection.shutdown(socket.SHUT_RDWR)
