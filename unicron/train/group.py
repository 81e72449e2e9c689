"""The process group of the current membership, and how to wake a rank that is blocked in it.

gloo has no abort. What wakes every call that is blocked, whether its peer died or only stopped, is shutting down the
group's own TCP connections from another thread. There is no interface that names them, so they are found as the
sockets that appeared while the group was formed. NCCL has an abort of its own.
"""

import contextlib
import os
import socket
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

TIMEOUT = timedelta(days=1)
"""Nobody waits for a timeout: blocked calls are woken by `abort_below`."""


class Group:
    """The one mutable context that holds the process group; a regroup swaps what is inside."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._older: frozenset[str] = frozenset()
        self._own: frozenset[str] | None = None
        self.epoch = -1
        self.rank = 0
        self.world_size = 1

    def form(self, store: str, name: str, epoch: int, rank: int, world_size: int) -> None:
        """Meet the other ranks of `name` at `store` (host:port) as `rank` of `world_size`.

        Raises:
            RuntimeError: interrupted by `abort_below`, or a peer was lost meanwhile.
        """
        self.leave()
        host, _, port = store.rpartition(":")
        with self._lock:
            self._older, self._own = frozenset(_sockets()), None
            self.epoch, self.rank, self.world_size = epoch, rank, world_size
        client = TCPStore(host, int(port), is_master=False, timeout=TIMEOUT)
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        # the prefix keeps tasks and epochs apart: a rank that was stopped and goes on meets nobody
        dist.init_process_group(
            backend, store=PrefixStore(f"{name}-{epoch}", client), rank=rank, world_size=world_size, timeout=TIMEOUT
        )
        with self._lock:
            self._own = frozenset(_sockets()) - self._older

    def leave(self) -> None:
        """Give up the group, whatever state it is in."""
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()

    def abort_below(self, epoch: int) -> bool:
        """Wake whoever is blocked in a group older than `epoch`; return whether there is one. From any thread."""
        with self._lock:
            if self.epoch >= epoch:
                return False
            if self._device.type == "cuda" and dist.is_initialized():
                with contextlib.suppress(RuntimeError):
                    dist.distributed_c10d._abort_process_group()  # noqa: SLF001 torch's own name for it
            for inode, descriptor in _sockets().items():
                if inode in self._own if self._own is not None else inode not in self._older:
                    _shut(descriptor)
            return True

    def all_gather(self, row: torch.Tensor) -> list[torch.Tensor]:
        """Return the `row` (1-D, CPU) of every rank."""
        row = row.to(self._device)
        rows = [torch.empty_like(row) for _ in range(self.world_size)]
        dist.all_gather(rows, row)
        return [other.cpu() for other in rows]


def _sockets() -> dict[str, int]:
    """Return this process's sockets: inode text -> file descriptor."""
    found = {}
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
