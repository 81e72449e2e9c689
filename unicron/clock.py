"""Time, at the edge: the shells read it here, the cores get it with their messages."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from heapq import heapify, heappop, heappush
from typing import Any, Protocol, TypeVar, TypeVarTuple

import msgspec

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

RESOLUTION_S = 1e-9
"""Timers that are no further apart are due together."""

MANY = 100
"""Timers from which on it matters how many of them were cancelled."""


class Clock(Protocol):
    """A source of time."""

    def now(self) -> float:
        """Return Unix seconds."""


class SystemClock:
    """The machine's own clock."""

    def now(self) -> float:
        """Return Unix seconds."""
        return time.time()


STEP_S = 0.25
"""By more than this no clock is off by itself between two looks."""

STILL_S = 1.0
"""Who looks again so much later than it meant to stood still: its machine slept, or it was stopped or got no CPU."""

CREDIT_S = 0.1
"""So much of the time in which it stood still counts as passed, so that who always does comes to its deadlines, too."""


class Watch:
    """Tells time that passed for this process from time in which it stood still, and from the setting of its clock.

    Args:
        clock: that people, or a daemon, may set at any time.
        still_s: seconds by which a look that is late shows that this process stood still.
    """

    def __init__(self, clock: Clock, still_s: float = STILL_S) -> None:
        self._clock, self._still_s = clock, still_s
        self._wall, self._ran = clock.now(), asyncio.get_running_loop().time()

    def look(self, meant_s: float = math.inf) -> tuple[float, float]:
        """Return by how much the clock was set since the last look, and for how long this process stood still.

        Args:
            meant_s: seconds after which this look was meant to come at the latest.

        Returns:
            Seconds of both; 0 where it was less than can be told from the usual.
        """
        wall, ran = self._clock.now(), asyncio.get_running_loop().time()
        passed = ran - self._ran
        step = wall - self._wall - passed
        self._wall, self._ran = wall, ran
        late = passed - meant_s
        return step if abs(step) > STEP_S else 0.0, late - CREDIT_S if late > self._still_s else 0.0


class VirtualClock:
    """Time that moves only on request, or, under `run`, to the next timer whenever nothing is left to do."""

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


class _Call(msgspec.Struct, eq=False):
    """A callback that is to be run.

    Attributes:
        timers: those of the loop, while it waits among them.
    """

    callback: Callable[..., Any]
    args: tuple[Any, ...]
    context: Context
    timers: "_Timers | None" = None
    is_cancelled: bool = False

    def __lt__(self, _: "_Call") -> bool:
        """Say that of two of the same time none comes first."""
        return False

    def cancel(self) -> None:
        """Leave it be."""
        if self.timers is not None and not self.is_cancelled:
            self.timers.cancelled += 1
        self.is_cancelled = True

    def cancelled(self) -> bool:
        """Return whether it is left be."""
        return self.is_cancelled


class _Timers(list[tuple[float, _Call]]):
    """Callbacks with their times, as a heap.

    Attributes:
        cancelled: how many of them are left be.
    """

    cancelled = 0

    def drop_cancelled(self) -> None:
        """Drop those at the head; where they are most of many, all of them."""
        if len(self) > MANY and self.cancelled > len(self) / 2:
            self[:] = [each for each in self if not each[1].is_cancelled]
            heapify(self)
            self.cancelled = 0
        while self and self[0][1].is_cancelled:
            heappop(self)
            self.cancelled -= 1


class _VirtualLoop(asyncio.BaseEventLoop):
    """An event loop that reads a virtual clock.

    Nothing can come from outside of it, neither by a socket nor from a thread. So it needs less than half the time of
    asyncio's own loops, which it is like in all else: callbacks are run in the same order, also those of one instant.
    """

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock
        self._calls: deque[_Call] = deque()
        self._timers = _Timers()

    def time(self) -> float:
        """Return the virtual time."""
        return self._clock.elapsed()

    def call_soon(self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None) -> Any:
        """Have a callback run in the next turn."""
        call = _Call(callback, args, copy_context() if context is None else context)
        self._calls.append(call)
        return call

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> Any:
        """Have a callback run in `delay` seconds."""
        return self.call_at(self._clock.elapsed() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> Any:
        """Have a callback run at a time."""
        call = _Call(callback, args, copy_context() if context is None else context, self._timers)
        heappush(self._timers, (when, call))
        return call

    def run_in_executor(self, _: Any, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Do at once what is for a thread: it takes no time."""
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 the awaiting code gets it
            done.set_exception(error)
        return done

    def _run_once(self) -> None:
        """Run what this turn has; where that is nothing, let time pass until the next timer."""
        calls, timers, clock = self._calls, self._timers, self._clock
        if timers.cancelled:
            timers.drop_cancelled()
        if not (calls or self._stopping):  # type: ignore[attr-defined]
            if not timers:
                raise RuntimeError("everybody waits, and there is nothing left that could happen")
            clock.advance(max(0.0, timers[0][0] - clock.elapsed()))
        due = clock.elapsed() + RESOLUTION_S
        while timers and timers[0][0] < due:
            call = heappop(timers)[1]
            call.timers = None
            calls.append(call)
        for _ in range(len(calls)):
            call = calls.popleft()
            if not call.is_cancelled:
                try:
                    call.context.run(call.callback, *call.args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:  # noqa: BLE001 whatever a callback raises, the others go on
                    self.call_exception_handler({"message": f"{call.callback} raised", "exception": error})
