"""The timeline of a worker: the record of a sampled iteration, and garbage collection at planned places."""

import gc
import time
from typing import Any, NamedTuple

import torch

from unicron.contracts.timings import MOST_OPS, OPERATIONS, Op
from unicron.contracts.worker import Timed

FORWARD, BACKWARD, REDUCE, OPTIMIZER, GC = (
    OPERATIONS.index(name)
    for name in ("forward-compute", "backward-compute", "grads-reduce-scatter", "optimizer", "gc")
)


class _HostClock:
    """For work that is done when its call returns."""

    def mark(self) -> Any:
        return time.perf_counter()

    def resolve(self, marks: list[Any]) -> tuple[float, list[float]]:
        """Return the Unix seconds of the first of `marks`, and the seconds of each since then."""
        began = time.time() - (time.perf_counter() - marks[0])
        return began, [mark - marks[0] for mark in marks]


class _DeviceClock:
    """For work that a GPU does later: marks stand in its stream between the kernels, and nothing waits for them.

    Only the last one is waited for, after the update.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def resolve(self, marks: list[Any]) -> tuple[float, list[float]]:
        marks[-1].synchronize()
        ended = time.time()
        seconds = [marks[0].elapsed_time(mark) / 1000 for mark in marks]
        return ended - seconds[-1], seconds


class _Mark(NamedTuple):
    """The boundary between two operations; `kind` None: nothing begins."""

    kind: int | None
    microbatch: int
    at: Any


class Recorder:
    """The operations of one iteration. Outside of a recorded iteration every call does nothing.

    Args:
        device: of the parameters; decides whose clock counts.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = _DeviceClock(device) if device.type == "cuda" else _HostClock()
        self._marks: list[_Mark] | None = None

    def begin(self, iteration: int, period: int) -> None:
        """Start the record of `iteration` if it is one of those to record: each multiple of `period`, 0 for none."""
        self._marks = [] if period and iteration % period == 0 else None

    def start(self, kind: int, microbatch: int = -1) -> None:
        """An operation begins, and the one before it has ended; one of the same kind and microbatch just goes on."""
        if self._marks is not None and (not self._marks or self._marks[-1][:2] != (kind, microbatch)):
            self._marks.append(_Mark(kind, microbatch, self._clock.mark()))

    def stop(self) -> None:
        """The present operation has ended; what comes until the next is none."""
        if self._marks is not None:
            self._marks.append(_Mark(None, -1, self._clock.mark()))

    def drop(self) -> None:
        """Forget the record: a regroup came in between."""
        self._marks = None

    def end(self, iteration: int, epoch: int, rank: int, world_size: int) -> Timed | None:
        """The iteration is over, its last operation stopped; return its record, None where there is none."""
        marks, self._marks = self._marks, None
        if not marks or len(marks) > MOST_OPS:
            return None
        began, seconds = self._clock.resolve([mark.at for mark in marks])
        micro = [round(second * 1e6) for second in seconds]
        ops = [
            Op(kind=mark.kind, microbatch=mark.microbatch, start_us=start, duration_us=end - start)
            for mark, start, end in zip(marks, micro, micro[1:], strict=False)
            if mark.kind is not None
        ]
        return Timed(iteration=iteration, epoch=epoch, rank=rank, world_size=world_size, began=began, ops=ops)


class PlannedCollection:
    """Garbage collection on all ranks in the same iterations, where Python's own would come on each at another time.

    Args:
        every: iterations from one collection to the next, a text too; 0 leaves Python's own as it is.

    Raises:
        ValueError: it is no number from 0.
    """

    def __init__(self, every: int | str) -> None:
        if not str(every).isdecimal():
            raise ValueError(f"gc_every (or UNICRON_GC_EVERY) is {every!r}: give a number of iterations, 0 for none")
        self._every = int(every)
        self._last = -1

    def take_over(self) -> None:
        """Switch Python's own collection off, and take all that there is by now out of later ones.

        Modules and model live on anyway, and looking through them would hold the interpreter up for a good tenth of a
        second each time.
        """
        if self._every:
            gc.collect()
            gc.freeze()
            gc.disable()

    def hand_back(self) -> None:
        """Switch Python's own collection on again."""
        if self._every:
            gc.unfreeze()
            gc.enable()

    def due(self, iteration: int) -> bool:
        """Return whether `iteration` is one with a collection that has not been done."""
        return self._every > 0 and iteration % self._every == self._every - 1 and iteration != self._last

    def collect(self, iteration: int) -> None:
        """Do the collection of `iteration`."""
        self._last = iteration
        gc.collect()
