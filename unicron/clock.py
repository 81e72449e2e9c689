"""Time, at the edge: the shells read it here, the cores get it with their messages."""

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Clock(Protocol):
    """A source of time."""

    def now(self) -> float:
        """Return Unix seconds."""


class SystemClock:
    """The machine's own clock."""

    def now(self) -> float:
        """Return Unix seconds."""
        return time.time()


class VirtualClock:
    """Time that moves only when told to, or, under `run`, to the next timer whenever nothing is left to do."""

    def __init__(self, start: float = 0.0) -> None:
        self._start = start
        self._elapsed = 0.0

    def now(self) -> float:
        """Return the virtual Unix seconds."""
        return self._start + self._elapsed

    def elapsed(self) -> float:
        """Return the virtual seconds since the start: a small number, which resolves finer steps than `now`."""
        return self._elapsed

    def advance(self, seconds: float) -> None:
        """Move time forward."""
        self._elapsed += seconds

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run `main` in an event loop that lives in this time: its sleeps cost none of the real one."""
        with asyncio.Runner(loop_factory=lambda: _VirtualLoop(self)) as runner:
            return runner.run(main)


class _VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that reads a virtual clock."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(_Jump(clock))
        self._virtual = clock

    def time(self) -> float:
        """Return the virtual time."""
        return self._virtual.elapsed()


class _Jump(selectors.DefaultSelector):
    """Waits in virtual time: a wait for the next timer moves the clock instead."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready; if nothing is, let `timeout` seconds of virtual time pass."""
        if timeout is None:
            return super().select(None)
        ready = super().select(0)
        if not ready and timeout > 0:
            self._clock.advance(timeout)
        return ready
