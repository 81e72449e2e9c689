"""The process group of the current membership, and how to wake a rank that is blocked in it.

gloo has no abort. What wakes every call that is blocked, whether its peer died or only stopped, is shutting down the
group's own TCP connections from another thread. There is no interface that names them, so they are found as the
sockets that appeared while the group was formed. NCCL has an abort of its own.
"""

import atexit
import contextlib
import ctypes
import os
import socket
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroupGloo, Work

from unicron.train.rendezvous import Rendezvous

FOREVER = timedelta(minutes=30)
"""Nobody waits for a timeout: blocked calls are woken by `abort_below`."""

CONNECT = timedelta(seconds=10)
"""For gloo's mesh, once all ranks have met."""

POLL = timedelta(seconds=0.05)
GIVE_UP_S = 0.15
"""How long an interrupted call may take to come back, before it is abandoned."""


class Group:
    """The one mutable context that holds the process group; a regroup swaps what is inside.

    torch's default process group is left alone: it counts its groups by process, and those counts drift apart when
    forming one fails on some ranks only.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._backend: Any = None
        self._aborted_at: float | None = None
        self._older: frozenset[str] = frozenset()
        self._own: frozenset[str] | None = frozenset()
        self._rendezvous: Rendezvous | None = None
        self.epoch = -1
        self.rank = 0
        self.world_size = 1
        atexit.register(self._close)

    def form(self, rendezvous: str, name: str, epoch: int, rank: int, world_size: int) -> None:
        """Meet the other ranks of `name` at `rendezvous` (host:port) as `rank` of `world_size`.

        Raises:
            RuntimeError: interrupted by `abort_below`, or the rendezvous or a peer was lost meanwhile.
        """
        self.leave()
        with self._lock:
            self.epoch, self.rank, self.world_size = epoch, rank, world_size
            self._older, self._own, self._aborted_at = frozenset(_sockets()), None, None
        # the name keeps tasks and epochs apart: a rank that was stopped and goes on meets nobody
        try:
            self._rendezvous = Rendezvous(rendezvous, f"{name}-{epoch}")
            self._rendezvous.set(f"here-{rank}", "")
            self._rendezvous.wait([f"here-{other}" for other in range(world_size)])
            self._backend = self._connect(self._rendezvous)
        finally:
            with self._lock:
                self._own = frozenset(_sockets()) - self._older

    def _connect(self, rendezvous: Rendezvous) -> Any:
        """Make the group in a thread that can be left behind.

        Who waits for a peer to connect has no connection yet that could be shut down: an interrupted rank goes on
        without it, and the thread ends with its timeout.
        """
        made: list[Any] = []
        failed: list[RuntimeError] = []

        def make() -> None:
            try:
                made.append(self._make(rendezvous, self.rank, self.world_size))
            except RuntimeError as error:
                failed.append(error)

        thread = threading.Thread(target=make, name="unicron-connect", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(POLL.total_seconds() / 4)
            if self._aborted_at is not None:
                raise RuntimeError("interrupted while the group was being formed")
        if failed:
            raise failed[0]
        return made[0]

    def _make(self, rendezvous: Rendezvous, rank: int, world_size: int) -> Any:
        if self._device.type == "cuda":
            from torch._C._distributed_c10d import ProcessGroupNCCL  # noqa: PLC0415 only builds with CUDA have it

            options = ProcessGroupNCCL.Options()
            options._timeout = FOREVER  # noqa: SLF001 torch has no other name for it
            return ProcessGroupNCCL(rendezvous, rank, world_size, options)
        group = ProcessGroupGloo(rendezvous, rank, world_size, timeout=CONNECT)
        group._set_default_timeout(FOREVER)  # noqa: SLF001 likewise
        return group

    def leave(self) -> None:
        """Give up the group, whatever state it is in."""
        self._backend = None

    def _close(self) -> None:
        """Give the group up before the interpreter ends: gloo's threads free Python's objects, so must end first."""
        self.abort_below(sys.maxsize)
        self.leave()

    def abort_below(self, epoch: int) -> bool:
        """Wake whoever is blocked in a group older than `epoch`; return whether there is one. From any thread."""
        with self._lock:
            if self.epoch >= epoch:
                return False
            backend = self._backend
            self._aborted_at = self._aborted_at or time.monotonic()
            if self._device.type == "cuda" and backend is not None:
                with contextlib.suppress(RuntimeError):
                    backend.abort()
            for inode, descriptor in _sockets().items():
                # while it forms nobody can tell which are its own; later the program may have opened others
                if inode in self._own if self._own is not None else inode not in self._older:
                    _shut(descriptor)
            return True

    def tell(self, key: str, value: bytes) -> None:
        """Leave a value for the other ranks at the rendezvous.

        Raises:
            RuntimeError: it is gone, or there is no group.
        """
        self._met.set(key, value)

    def ask(self, key: str) -> bytes:
        """Wait for a value that another rank leaves at the rendezvous, and return it.

        Raises:
            RuntimeError: interrupted by `abort_below`, or the rendezvous is gone.
        """
        return self._met.get(key)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum `tensor` over all ranks, in place.

        Raises:
            RuntimeError: the group broke.
        """
        if self.world_size > 1:
            self._wait(self._group.allreduce([tensor]))

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Fill `tensor` with what rank `source` has in it.

        Raises:
            RuntimeError: the group broke.
        """
        if self.world_size > 1:
            self._wait(self._group.broadcast(tensor, source))

    def all_gather(self, row: torch.Tensor) -> list[torch.Tensor]:
        """Return the `row` (1-D, CPU) of every rank.

        Raises:
            RuntimeError: the group broke.
        """
        row = row.to(self._device)
        rows = [torch.empty_like(row) for _ in range(self.world_size)]
        self._wait(self._group.allgather(rows, row))
        return [other.cpu() for other in rows]

    def _wait(self, work: Work) -> None:
        """Wait for `work`; where it was interrupted and yet does not end, go on without it.

        gloo can lose a connection's end that coincides with a send, and would wait for its timeout then. The group is
        kept for good, because its destructor would wait as well; its connections are closed, so nothing of it moves.
        """
        try:
            while not self._has_ended(work):
                pass
        except BaseException:
            if not work.is_completed():
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
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

    @property
    def _met(self) -> Rendezvous:
        if self._rendezvous is None:
            raise RuntimeError("there is no rendezvous")
        return self._rendezvous

    @property
    def _group(self) -> Any:
        if self._backend is None:
            raise RuntimeError("there is no process group")
        return self._backend


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
