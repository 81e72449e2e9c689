"""Starts of workers' processes that are under way, each of which ends with one report, whenever it is called off."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from unicron.contracts.commands import StartWorker
from unicron_agent.stimuli import ProcessExited, ProcessStarted

Outcome = ProcessStarted | ProcessExited
"""That the process runs, or that there is none."""


class Starts:
    """Starts processes side by side.

    Args:
        start: starts the process of a worker, or tells why it can't.
        report: takes each outcome.
    """

    def __init__(
        self, start: Callable[[StartWorker], Coroutine[Any, Any, Outcome]], report: Callable[[Outcome], None]
    ) -> None:
        self._start, self._report = start, report
        self._jobs: dict[str, asyncio.Task[Outcome]] = {}

    def begin(self, command: StartWorker) -> None:
        """Begin to start the process of a worker."""
        job = self._jobs[command.worker] = asyncio.create_task(self._start(command))
        job.add_done_callback(partial(self._ended, command.worker))

    def call_off(self, worker: str) -> None:
        """Give up a start that waits for the standby, if there is one; it is reported as a worker that was killed."""
        if worker in self._jobs:
            self._jobs[worker].cancel()

    def _ended(self, worker: str, job: asyncio.Task[Outcome]) -> None:
        """Report the outcome; a job that is called off before its first step runs none of its own statements."""
        del self._jobs[worker]
        self._report(ProcessExited(worker, signal=signal.SIGKILL) if job.cancelled() else job.result())
