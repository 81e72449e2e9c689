"""Faults that an agent injects into its own node when asked to."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from unicron.contracts.faults import NODE, WORKER, kind_of
from unicron.contracts.queries import InjectFault
from unicron.contracts.worker import ExitFault, RaiseFault, ResetFault, SlowFault, ToWorker
from unicron.errors import InvalidInputError
from unicron.snapshots.memory import FOLDER_VARIABLE, SnapshotMemory
from unicron_agent.core import AgentCore
from unicron_agent.hardware.gpus import addresses
from unicron_agent.hardware.kernel_log import append
from unicron_agent.workers.activity import processes_of, start_time
from unicron_agent.workers.supervisor import Supervisor
from unicron_agent.workers.workers import LocalWorker

SOON_S = 0.05
"""From the answer to a fault that would hold it back."""

LOOKS = 20
"""How often such a fault waits once more as long for the journal to have the facts that there are, its own order first.
"""

READ_S = 1.0
"""From a line in the kernel's log to SIGKILL, if nothing came of the line by then.

It is the line that is to be heard first, as of a process whose memory the kernel takes away.
"""

NO_GPU = "0000:3b:00"
"""PCI address that an Xid has where there is no GPU."""

XIDS = {
    48: "An uncorrectable double bit error (DBE) has been detected on GPU in the framebuffer at partition 4, "
    "subpartition 0.",
    79: "GPU has fallen off the bus.",
    94: "Contained: SM (0x1). RST: No, D-RST: No",
}
"""Messages of the driver, by the code of the Xid."""

IN_SESSIONS = frozenset({"raise", "slow-worker", "reset-connection"})
"""Faults that a session injects into its own script."""

WAKE = """
import os, signal, sys, time
time.sleep(float(sys.argv[1]))
if os.getppid() == int(sys.argv[2]):
    os.kill(int(sys.argv[2]), signal.SIGCONT)
"""
"""Has a stopped agent go on; run by a process of its own."""


class Chaos:
    """Injects faults into this node.

    Args:
        core: of the agent.
        supervisor: of its workers.
        send: sends a message to a worker.
        memory: of the node.
        cut: keeps the agent off the bus for so many seconds.
        kernel_log: that the agent follows; empty for none.
        unpublished: returns how many facts the journal does not have yet.
        kill_standby: ends the process that forks workers.
    """

    def __init__(
        self,
        core: AgentCore,
        supervisor: Supervisor,
        send: Callable[[str, ToWorker], None],
        memory: SnapshotMemory,
        cut: Callable[[float], None],
        kernel_log: str,
        unpublished: Callable[[], int],
        kill_standby: Callable[[], None],
    ) -> None:
        self._core, self._supervisor, self._send = core, supervisor, send
        self._memory, self._cut, self._kernel_log, self._unpublished = memory, cut, kernel_log, unpublished
        self._kill_standby = kill_standby
        memory.free()  # an earlier agent may have died while it was full

    async def inject(self, query: InjectFault) -> str:
        """Carry the fault out; return what was done, for a person.

        Raises:
            InvalidInputError: there is no such worker or fault, it does not take this value, or it can't be had here.
        """
        kind = kind_of(query.fault)
        value = kind.checked(query.value)
        if query.worker and WORKER not in kind.targets:
            raise InvalidInputError(f"{kind.name} hits a whole node, not worker {query.worker!r} alone")
        if not query.worker and NODE in kind.targets:
            return await self._fault_node(kind.name, value)
        worker = self._core.workers.get(query.worker)
        if worker is None or not worker.pid:
            raise InvalidInputError(f"worker {query.worker!r} does not run on {self._core.node}")
        return self._fault_worker(kind.name, worker, value)

    def _fault_worker(self, fault: str, worker: LocalWorker, value: str) -> str:
        name, done = worker.worker, ""
        if fault in IN_SESSIONS and self._supervisor.restarts(name):
            raise InvalidInputError(f"{fault} needs a script with a Session, and {worker.task} heals by restarts")
        match fault:
            case "kill-worker":
                self._supervisor.signal(name, signal.SIGKILL)
            case "stop-worker":
                self._supervisor.signal(name, signal.SIGSTOP)
            case "oom-worker":
                done = self._end_for_want_of_memory(worker)
            case "raise":
                self._send(name, RaiseFault(exception=value))
            case "exit-worker":
                self._send(name, ExitFault(code=int(value)))
            case "slow-worker":
                self._send(name, SlowFault(factor=float(value)))
            case "reset-connection":
                self._send(name, ResetFault())
            case "xid" | "ecc":
                done = self._log_xid(int(value), worker)
            case _:
                raise _not_carried_out(fault)
        return f"{fault} {name} on {self._core.node}{done or (value and f': {value}')}"

    async def _fault_node(self, fault: str, value: str) -> str:
        node = self._core.node
        match fault:
            case "kill-node":
                workers = [worker.pid for worker in self._core.workers.values() if worker.pid]
                self._inject_when_published(partial(_kill_node, f"{FOLDER_VARIABLE}={self._memory.folder}", workers))
                return f"{node} kills itself with all its workers"
            case "silence-node":
                await asyncio.create_subprocess_exec(sys.executable, "-ISc", WAKE, value, str(os.getpid()))
                self._inject_when_published(partial(os.kill, os.getpid(), signal.SIGSTOP))
                return f"the agent of {node} stops for {value} s"
            case "cut-node":
                self._inject_when_published(partial(self._cut, float(value)))
                return f"the agent of {node} is off the bus for {value} s"
            case "kill-standby":
                self._kill_standby()
                return f"the warm standby of {node} is killed"
            case "full-disk":
                self._memory.fill()
                asyncio.get_running_loop().call_later(float(value), self._memory.free)
                return f"no room for states on {node} for {value} s"
            case "restart-node":
                raise InvalidInputError(f"{node} runs: restart-node is for one that was killed")
            case "xid" | "ecc":
                return f"{fault} on {node}{self._log_xid(int(value))}"
            case _:
                raise _not_carried_out(fault)

    def _inject_when_published(self, fault: Callable[[], None], looks: int = LOOKS) -> None:
        """Inject the fault when the answer is out and all facts are published, or the bus is away for long."""
        later = asyncio.get_running_loop().call_later
        if looks == 0 or (looks < LOOKS and not self._unpublished()):
            fault()
        else:
            later(SOON_S, self._inject_when_published, fault, looks - 1)

    def _end_for_want_of_memory(self, worker: LocalWorker) -> str:
        """Write the kernel's line where there is a log for it, and kill the worker behind it."""
        line = (
            f"Out of memory: Killed process {worker.pid} (python) total-vm:18446744kB, anon-rss:16777216kB, "
            f"file-rss:0kB, shmem-rss:0kB, UID:{os.getuid()} pgtables:33792kB oom_score_adj:0"
        )
        try:
            append(self._kernel_log, line, time.monotonic())
        except InvalidInputError as error:
            self._supervisor.kill(worker.worker)
            return f", without a line in the log: {error}"
        asyncio.get_running_loop().call_later(READ_S, self._supervisor.kill, worker.worker)
        return f": {line}"

    def _log_xid(self, code: int, worker: LocalWorker | None = None) -> str:
        """Log an Xid as the driver does, of the worker's process, or of none."""
        slots = {slot: address for address, slot in addresses().items()}
        address = slots.get(worker.slot if worker else 0, NO_GPU)
        who = f"pid={worker.pid}, name=python" if worker else "pid='<unknown>', name=<unknown>"
        line = f"NVRM: Xid (PCI:{address}): {code}, {who}, {XIDS.get(code, 'Ch 00000008')}"
        append(self._kernel_log, line, time.monotonic())
        return f": {line}"


def _not_carried_out(fault: str) -> InvalidInputError:
    return InvalidInputError(f"{fault} is in the table of faults, but the agent of this version can't carry it out")


def _kill_node(mark: str, workers: Sequence[int] = ()) -> None:
    """End like a machine that lost its power, with these workers and all that has this in its environment.

    Workers lead groups of their own, and so do the programs that they start. In those that the standby forked, the
    kernel shows its environment and not theirs; those that an earlier agent has started are no children of this one.
    """
    for _ in range(100):  # what is just being started shows a little later
        started = [pid for first in (os.getpid(), *workers) for pid in processes_of(first) if start_time(pid)]
        others = {*started, *_processes_with_variable(mark.encode())} - {os.getpid()}
        for pid in others:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not others:
            break
        time.sleep(SOON_S / 10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(0, signal.SIGKILL)
    os._exit(137)  # the first process of a container is spared its own signals


def _processes_with_variable(mark: bytes) -> Iterator[int]:
    """Yield the processes of this machine that live and have this in their environment."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in path.read_bytes().split(b"\0"):
                yield int(path.parent.name)
