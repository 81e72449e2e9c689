"""Shares with the agent when this worker leaves the network idle, by memory (`unicron.contracts.traffic`)."""

import contextlib
import mmap
import time
from pathlib import Path

from unicron.contracts.traffic import Forecast
from unicron.train.worker.spans import IdleSpans


class Traffic:
    """This worker's traffic to others.

    Args:
        path: of the file that its agent reads; None where there is no agent.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._shared: mmap.mmap | None = None
        with contextlib.suppress(OSError):  # where there is no room, its agent knows of nothing
            if path is not None:
                path.unlink(missing_ok=True)
                path.write_bytes(Forecast().encode())
                with path.open("r+b") as file:
                    self._shared = mmap.mmap(file.fileno(), 0)
        self.reset()

    def reset(self) -> None:
        """Forget all transfers and what was learnt: the next iterations may be different."""
        self._spans, self._under_way = IdleSpans(), 0
        self._share(Forecast())

    def begin(self) -> None:
        """Record that a transfer begins."""
        self._under_way += 1
        if self._under_way == 1:
            self._spans.begin_busy(time.monotonic())
            self._share(Forecast(0.0, self._spans.iteration_s))

    def end(self) -> None:
        """Record that a transfer has ended; those before a reset do not count."""
        self._under_way = max(0, self._under_way - 1)
        if self._under_way == 0:
            self._share(Forecast(self._spans.begin_idle(time.monotonic()), self._spans.iteration_s))

    def end_iteration(self) -> None:
        """Record that an iteration, and with it all of its transfers, has ended."""
        if self._under_way:
            self._under_way = 1
            self.end()
        self._spans.end_iteration(time.monotonic())

    def _share(self, forecast: Forecast) -> None:
        if self._shared is not None:
            self._shared[:] = forecast.encode()
