"""The faults that can be injected: what each hits and which value it takes. One table, for everybody who asks."""

import math
from collections.abc import Callable
from typing import NamedTuple

from unicron.errors import InvalidInputError

WORKER, NODE = "TASK:RANK", "NODE"
"""Targets of faults, as a person names them."""

EXCEPTIONS = {
    "cuda-illegal-access": ("RuntimeError", "CUDA error: an illegal memory access was encountered"),
    "cuda-launch-failure": ("RuntimeError", "CUDA error: unspecified launch failure"),
    "cuda-oom": (
        "torch.OutOfMemoryError",
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB",
    ),
    "cuda-ecc": ("RuntimeError", "CUDA error: uncorrectable ECC error encountered"),
    "cuda-nvlink": ("RuntimeError", "CUDA error: uncorrectable NVLink error detected during the execution"),
    "dma-mapping": ("RuntimeError", "CUDA error: failed to map the DMA buffer: invalid DMA mapping"),
    "gpu-lost": ("RuntimeError", "CUDA error: unable to determine the device handle for GPU 0: GPU is lost"),
    "nccl-timeout": (
        "torch.distributed.DistBackendError",
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=42, OpType=ALLREDUCE)",
    ),
    "nccl-system-error": (
        "torch.distributed.DistBackendError",
        "NCCL error: unhandled system error. ncclSystemError: System call or external library call failed",
    ),
    "link-down": ("torch.distributed.DistBackendError", "NCCL WARN NET/IB: Got completion with IBV_WC_RETRY_EXC_ERR"),
    "connection-refused": ("ConnectionRefusedError", "[Errno 111] Connection refused"),
    "connection-reset": ("ConnectionResetError", "[Errno 104] Connection reset by peer"),
    "memory-error": ("MemoryError", "Unable to allocate 2.00 GiB for an array"),
    "value-error": ("ValueError", "injected by a chaos test"),
}
"""Exceptions that `raise` can raise: class and text as real programs have them, and so as `rules.toml` knows them."""


class Value(NamedTuple):
    """A parameter of a fault.

    Attributes:
        name: as usage shows it.
        allowed: what it may be, in words.
        fits: whether a text is allowed.
        default: where none is given; None: it must be.
    """

    name: str
    allowed: str
    fits: Callable[[str], bool]
    default: str | None = None


class FaultKind(NamedTuple):
    """A row of the table.

    Attributes:
        name: of the fault.
        targets: whom it hits: `WORKER`, `NODE`, or either.
        text: what it does, for a person.
        value: that it takes; None for none.
    """

    name: str
    targets: tuple[str, ...]
    text: str
    value: Value | None = None

    def checked(self, value: str) -> str:
        """Return the value to go by where `value` was given, which is empty for none.

        Raises:
            InvalidInputError: it takes none, or not this one; says which.
        """
        if self.value is None:
            if value:
                raise InvalidInputError(f"{self.name} takes no value, and {value!r} was given; leave it out")
            return ""
        found = value or self.value.default
        if found is None:
            raise InvalidInputError(f"{self.name} needs a {self.value.name}: {self.value.allowed}")
        if found and not self.value.fits(found):
            raise InvalidInputError(f"{self.name} {value!r}: {self.value.name} must be {self.value.allowed}")
        return found


def _whole(first: int, last: int) -> Callable[[str], bool]:
    return lambda text: text.isascii() and text.isdecimal() and len(text) < 10 and first <= int(text) <= last


def _number(first: float, last: float) -> Callable[[str], bool]:
    def fits(text: str) -> bool:
        try:
            return math.isfinite(float(text)) and first <= float(text) <= last
        except ValueError:
            return False

    return fits


SECONDS = Value("SECONDS", "a number from 0.1 to 600", _number(0.1, 600), "10")
LOG = "into the kernel's log that the agent follows"

_TABLE = (
    FaultKind(
        "raise",
        (WORKER,),
        "raise an exception in the worker's script: of a TYPE as its microbatch ends, else wherever it is",
        Value("TYPE", f"one of {', '.join(EXCEPTIONS)}", lambda text: text in EXCEPTIONS, ""),
    ),
    FaultKind("kill-worker", (WORKER,), "end the worker with SIGKILL"),
    FaultKind("stop-worker", (WORKER,), "stop the worker with SIGSTOP: it hangs and says nothing"),
    FaultKind(
        "exit-worker",
        (WORKER,),
        "have the worker's process exit with CODE, without a word",
        Value("CODE", "a whole number from 0 to 255", _whole(0, 255), "1"),
    ),
    FaultKind(
        "oom-worker",
        (WORKER,),
        "end the worker as the kernel does for want of memory: SIGKILL, and its line in the kernel's log, where the "
        "agent follows a file that it may write",
    ),
    FaultKind(
        "slow-worker",
        (WORKER,),
        "have each microbatch of the worker take FACTOR times as long from now on; 1 ends it",
        Value("FACTOR", "a number from 1 to 1000", _number(1, 1000)),
    ),
    FaultKind("reset-connection", (WORKER,), "break the worker's collectives, as if peers had reset its connections"),
    FaultKind("kill-node", (NODE,), "end an agent with all its workers with SIGKILL, as if the machine had lost power"),
    FaultKind("restart-node", (NODE,), "bring a killed node of the cluster of `unicron up` back"),
    FaultKind("kill-standby", (NODE,), "end the process that forks a node's workers with SIGKILL; its workers go on"),
    FaultKind("silence-node", (NODE,), "stop an agent with SIGSTOP for SECONDS; its workers go on", SECONDS),
    FaultKind("cut-node", (NODE,), "keep an agent off the bus for SECONDS; its workers go on", SECONDS),
    FaultKind(
        "xid",
        (WORKER, NODE),
        f"write an Xid of NVIDIA's driver {LOG}; of a worker it names the process",
        Value("CODE", "a whole number from 1 to 999", _whole(1, 999)),
    ),
    FaultKind(
        "ecc",
        (WORKER, NODE),
        f"write an Xid of a memory error that could not be corrected {LOG}: 48, or 94 where the driver contained it",
        Value("CODE", "48 or 94", lambda text: text in {"48", "94"}, "48"),
    ),
    FaultKind("full-disk", (NODE,), "leave no room for copies of states in a node's memory for SECONDS", SECONDS),
)

FAULTS = {kind.name: kind for kind in _TABLE}
"""All of them, by name. An agent carries out all but restart-node, for which none is there."""

LOGGED = frozenset({"xid", "ecc"})
"""Those that are nothing but a line in the kernel's log, which an agent refuses where it follows none."""


def kind_of(fault: str) -> FaultKind:
    """Return the row of `fault`.

    Raises:
        InvalidInputError: there is no such fault; says which there are.
    """
    if fault not in FAULTS:
        raise InvalidInputError(f"no fault {fault!r}; there are {', '.join(FAULTS)}")
    return FAULTS[fault]
