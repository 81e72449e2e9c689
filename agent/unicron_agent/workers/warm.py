"""The agent's end of the warm standby: the process that forks workers, whose orphans the agent collects."""

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Protocol, TextIO

from unicron.errors import UnicronError
from unicron_agent.stimuli import StandbyEnded, StandbyReady
from unicron_agent.workers.orphans import kill_orphans
from unicron_agent.workers.output import tail

PR_SET_CHILD_SUBREAPER = 36


def single_thread() -> dict[str, str]:
    """Return the variables that keep numerical libraries from starting threads, which a fork would not have."""
    return {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}


WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Variables that make torch find no GPU and leave CUDA alone: if a process has only counted GPUs through CUDA, its
forks can't use them. Workers get the first two of their own."""

Report = Callable[[StandbyReady | StandbyEnded], None]


class Standby(Protocol):
    """Forks processes for a node."""

    async def start(self, report: Report) -> None:
        """Start it, or start it again after its end; `report` is called when it is ready, and when it has ended."""

    async def fork(self, request: dict[str, Any]) -> int:
        """Fork what `request` names (see `unicron_agent.workers.standby`); return its process id.

        Where there is no standby, this waits for the next one. If it is cancelled, there is no such process.

        Raises:
            UnicronError: it was stopped.
        """

    def kill_orphans(self, workers: Collection[int]) -> None:
        """Kill the processes that ended workers have left behind.

        Args:
            workers: process ids of living workers.
        """

    def kill(self) -> None:
        """Kill it, as a fault."""

    async def stop(self) -> None:
        """End the standby, and wait for that."""


class WarmStandby:
    """A standby that is a child of this process; what it forks becomes a child of this process too.

    Args:
        log: file that it writes to.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._requests, self._beginning = asyncio.Lock(), asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._ready, self._stopped = asyncio.Event(), False
        self._life: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """Its process id; 0 where there has been none."""
        return self._process.pid if self._process else 0

    async def start(self, report: Report) -> None:
        """Start it; it is ready some seconds later."""
        # orphans of the standby, its forks, become our children: only a parent learns how a process ended
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        async with self._beginning:
            if self._stopped:
                return
            try:
                with self._log.open("a") as log:
                    self._process = process = await self._spawn(log)
            except OSError as error:  # no process more is allowed, say
                report(StandbyEnded(f"can't be started: {error}"))
            else:
                self._life = asyncio.create_task(self._watch(process, report))

    async def _spawn(self, log: TextIO) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # a script's folder is its own to look in
            "-m",
            "unicron_agent.workers.standby",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **single_thread(), **WITHOUT_GPU},
        )

    async def _watch(self, process: asyncio.subprocess.Process, report: Report) -> None:
        """Report when it is ready, and when it has ended."""
        if await _read_answer(process):
            self._ready.set()
            report(StandbyReady())
        code = await process.wait()
        if not self._stopped:
            self._ready.clear()
            report(StandbyEnded(_ending(code, self._log)))

    async def fork(self, request: dict[str, Any]) -> int:
        """Have it fork what `request` names, or the next one where it dies over that."""
        while True:
            await self._ready.wait()
            if self._stopped:
                raise UnicronError("the agent ends")
            exchange = asyncio.ensure_future(self._exchange(request))
            try:
                if pid := await asyncio.shield(exchange):
                    return pid
            except asyncio.CancelledError:
                exchange.add_done_callback(_kill_unwanted)
                raise
            request = {**request, "again": True}

    async def _exchange(self, request: dict[str, Any]) -> int:
        """Send a request; return the process id that is the answer, 0 where the standby died and nothing was forked."""
        async with self._requests:
            process = self._process
            if not self._ready.is_set() or process is None or process.stdin is None:
                return 0
            process.stdin.write(json.dumps(request).encode() + b"\n")
            answer = await _read_answer(process)
            if not answer:
                self._ready.clear()
            return int(answer.get("pid", 0))

    def kill_orphans(self, workers: Collection[int]) -> None:
        """End the orphans among the children of this process."""
        if not self._requests.locked():  # else one that was forked just now may not be known yet
            kill_orphans({self.pid, *workers})

    def kill(self) -> None:
        """Kill it, where there is one."""
        if self._process:
            _kill(self._process)

    async def stop(self) -> None:
        """Kill it; let what waits for it know."""
        self._stopped = True
        self._ready.set()
        async with self._beginning:
            self.kill()
            if self._life:
                await self._life


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()


async def _read_answer(process: asyncio.subprocess.Process) -> dict[str, Any]:
    """Return the next line that a standby or its fork answers; empty where nobody can any more."""
    line = await process.stdout.readline() if process.stdout else b""
    try:
        return dict(json.loads(line))
    except ValueError:
        if line:  # it is not what it should be; else it is dead
            _kill(process)
        return {}


def _kill_unwanted(exchange: asyncio.Future[int]) -> None:
    """Kill what was forked for nobody."""
    if not exchange.cancelled() and exchange.exception() is None and exchange.result():
        with contextlib.suppress(ProcessLookupError):
            os.kill(exchange.result(), signal.SIGKILL)


def _ending(code: int, log: Path) -> str:
    """Return how a standby ended, with its last line where it ended itself."""
    if code < 0:
        return f"was ended by {signal.Signals(-code).name if -code in set(signal.Signals) else f'signal {-code}'}"
    with contextlib.suppress(OSError):
        last = next((line.strip() for line in reversed(tail(str(log), 3)) if line.strip()), "")
        return f'exited with code {code}; its last line was "{last}"'
    return f"exited with code {code}"
