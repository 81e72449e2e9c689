"""NCCL's communicators, interrupted so that no rank hangs and none takes noise for a result.

What was measured on a GPU (`python -m benchmarks.gpu`), and what follows from it:

- A collective only enqueues; one that was interrupted ends as if it had gone well, with anything in its tensors.
- So does **that of its peers**, which nobody interrupted: the kernel of a rank that leaves hands on what is in its
  buffers. A sum counts only once every rank has confirmed, over another network, that it came to its end there.
- `ncclCommAbort` frees memory that a kernel of this process may still use, waits until the whole GPU is idle, and takes
  half a second. `ncclCommRevoke` only has kernels end, within 10 ms. So an interruption revokes all communicators at
  once; they are aborted later, when all ranks of the next membership have met.
- What was begun within `ncclGroupStart`, of the thread, swallows later collectives until that group is ended.
"""

import contextlib
import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from unicron.errors import GroupBrokenError, InvalidInputError

LEAST = 22807
"""The first version of NCCL that can revoke a communicator, as it counts them: torch 2.11 has a newer one."""

ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "60",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
}
"""Defaults of torch's and NCCL's variables: torch's own watchdog and monitor would end processes whose
groups are interrupted; buffers that are shared through NVLink's switches are not freed by an abort (NVRx)."""

FOREVER = timedelta(minutes=30)
SUCCESS, INVALID_USAGE, IN_PROGRESS = 0, 5, 7
POLL_S, WATCH_S = 0.0002, 0.02
ABORT_S = 5.0
"""How long aborts may take before this process is given up."""


def on_streams(device: torch.device) -> bool:
    """Return whether collectives of tensors there are only enqueued when they return."""
    return device.type == "cuda"


@functools.cache
def library() -> Any:
    """Return NCCL, as torch has loaded it."""
    return ctypes.CDLL("libnccl.so.2")


def event() -> Any:
    """Return a new event of the GPU's."""
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def synchronize() -> None:
    """Wait until the GPU has finished all work of this process."""
    torch.cuda.synchronize()


def prepare() -> None:
    """Have torch and NCCL leave interruptions to us.

    Raises:
        InvalidInputError: this NCCL can't be interrupted.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    version = ctypes.c_int()
    library().ncclGetVersion(ctypes.byref(version))
    if version.value < LEAST:
        raise InvalidInputError(
            f"NCCL {version.value} has no ncclCommRevoke, without which ranks can't be interrupted: install torch 2.11 "
            "or newer with its own NCCL (2.28.7 at least), or have the task healed by restarts (`heal: restart`)"
        )


class Communicator:
    """A process group of NCCL's, connected.

    Its constructor returns when all ranks are here. A thread that waits there can be left behind: it ends with
    TORCH_NCCL_NONBLOCKING_TIMEOUT.

    Args:
        store: at which the ranks meet.
        rank: of this process.
        size: ranks of the group.
        device: of this process.

    Attributes:
        group: torch's own.

    Raises:
        RuntimeError: a peer did not come, or left.
    """

    def __init__(self, store: Store, rank: int, size: int, device: torch.device) -> None:
        from torch._C._distributed_c10d import ProcessGroupNCCL  # noqa: PLC0415 only builds with CUDA have it

        if device.index is not None:  # which is current is a matter of threads
            torch.cuda.set_device(device)
        options = ProcessGroupNCCL.Options()
        options._timeout = FOREVER  # noqa: SLF001 torch has no other name for it
        options.config.blocking = 0
        made: Any = ProcessGroupNCCL(store, rank, size, options)
        self.group = made
        self.group.eager_connect_single_device(device)
        # this waits for NCCL without the interpreter's lock, which _comm_ptr would keep; and it has all connected
        self.group.allreduce([torch.zeros(1, device=device)]).wait()
        self._pointer = ctypes.c_void_p(self.group._comm_ptr())  # noqa: SLF001 likewise
        self._revoked = False

    @property
    def error(self) -> str:
        """NCCL's asynchronous error; empty where there is none, or after a revoke."""
        if self._revoked:
            return ""
        found = ctypes.c_int()
        library().ncclCommGetAsyncError(self._pointer, ctypes.byref(found))
        if found.value in {SUCCESS, IN_PROGRESS}:
            return ""
        error_string = library().ncclGetErrorString
        error_string.restype = ctypes.c_char_p
        return f"NCCL error: {error_string(found).decode()}"

    def revoke(self) -> None:
        """Have all that is under way end, and what is begun later fail. From any thread; returns at once."""
        if not self._revoked:
            self._revoked = True
            library().ncclCommRevoke(self._pointer, 0)

    def abort(self) -> None:
        """Free it. No rank may still be within a collective of it."""
        self.revoke()
        with contextlib.suppress(RuntimeError):
            self.group.abort()


def begin_aborts(communicators: Sequence[Communicator]) -> list[threading.Thread]:
    """Begin to abort communicators, in a thread each, as one waits for kernels of the other; return the threads."""
    threads = [threading.Thread(target=each.abort, name="unicron-abort", daemon=True) for each in communicators]
    for thread in threads:
        thread.start()
    return threads


def await_aborts(threads: Sequence[threading.Thread]) -> bool:
    """Wait for threads that abort, at most `ABORT_S`; return whether all have ended."""
    until = time.monotonic() + ABORT_S
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def end_groups() -> None:
    """End groups of calls that were begun in this thread and not ended, as where an exception came in between."""
    while library().ncclGroupEnd() != INVALID_USAGE or library().ncclGroupEnd() != INVALID_USAGE:
        pass


def wait_on_stream(work: Any) -> None:
    """Have work that is enqueued later wait for a collective; whether it went well shows when ranks confirm.

    Raises:
        GroupBrokenError: it could not be begun.
    """
    try:
        work.wait()
    except dist.DistError as error:
        raise GroupBrokenError(str(error)) from error


def record_event() -> Any:
    """Record an event on the current stream, and return it."""
    made = event()
    made.record()
    return made


def await_event(ended: Any, is_cut: Callable[[], bool]) -> None:
    """Wait until an event has ended, or a communicator was interrupted."""
    while not (ended.query() or is_cut()):
        time.sleep(POLL_S)
