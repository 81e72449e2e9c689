"""The agent's end of the warm standby: the process that forks workers, whose orphans the agent collects."""

import asyncio
import contextlib
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol, TextIO

from unicron.errors import UnicronError
from unicron_agent.workers.orphans import clear_up

PR_SET_CHILD_SUBREAPER = 36


def single_thread() -> dict[str, str]:
    """Return the variables that keep numerical libraries from starting threads, which a fork would not have."""
    return {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}


WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Variables with which torch, asked whether there is a GPU, says no and leaves CUDA alone. Where a process has so much
as counted GPUs by it, none that it forks can use one. Workers have `CUDA_VISIBLE_DEVICES` of their own."""


class Standby(Protocol):
    """What forks processes for a node."""

    async def start(self) -> None:
        """Begin to get ready; forks wait for that."""

    async def fork(self, request: dict[str, Any]) -> int:
        """Fork what `request` names (see `unicron_agent.workers.standby`); return its process id.

        Raises:
            UnicronError: the standby is dead.
        """

    def clear_up(self, workers: Collection[int]) -> None:
        """End what workers that are gone have left behind.

        Args:
            workers: process ids of those that live.
        """

    async def stop(self) -> None:
        """End the standby, and wait for that."""


class WarmStandby:
    """A standby that is a child of this process; what it forks becomes a child of this process too.

    Args:
        log: file that it writes to.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._requests = asyncio.Lock()

    async def start(self) -> None:
        """Start it; it is ready some seconds later."""
        # orphans of the standby, its forks, become our children: only a parent learns how a process ended
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        with self._log.open("a") as log:
            self._process = await self._begin(log)
        self._ready = asyncio.ensure_future(self._answer())

    async def _begin(self, log: TextIO) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "unicron_agent.workers.standby",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **single_thread(), **WITHOUT_GPU},
        )

    async def fork(self, request: dict[str, Any]) -> int:
        """Have it fork what `request` names."""
        await asyncio.shield(self._ready)
        async with self._requests:
            if self._process.stdin is None:
                raise UnicronError("the warm standby has no input")
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            answer = await self._answer()
        return int(answer["pid"])

    async def _answer(self) -> dict[str, Any]:
        line = await self._process.stdout.readline() if self._process.stdout else b""
        if not line:
            raise UnicronError(f"the warm standby died; see {self._log}")
        return dict(json.loads(line))

    def clear_up(self, workers: Collection[int]) -> None:
        """End the orphans among the children of this process."""
        if not self._requests.locked():  # else one that was forked just now may not be known yet
            clear_up({self._process.pid, *workers})

    async def stop(self) -> None:
        """Kill it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await asyncio.gather(self._ready, return_exceptions=True)  # it may never have come so far
