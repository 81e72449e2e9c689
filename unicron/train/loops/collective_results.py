"""Results of a script's collectives, kept so that a new rank can replay those that the other ranks have run already."""

import io
import pickle
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from unicron.errors import InvalidInputError

MOST_BYTES = 8 << 20
"""Bytes of results kept for one place of a script; a rank that would need more can't replay them."""

RESULTS_KEPT = 10_000
"""Collectives whose results are kept for one place."""

RECENT = 16
"""Collectives by which one rank may be ahead of another, as the root of broadcasts may be, and still help it."""

Results = list[torch.Tensor]


def kept(results: Results | None) -> Results | None:
    """Return copies of results, on the processor, which stay as they are; None where they are too large."""
    if results is None or sum(each.nbytes for each in results) > MOST_BYTES:
        return None
    return [each.detach().cpu().clone() for each in results]


class EndedCollectives:
    """The global collectives that have ended on this rank since its loops began.

    One may have ended here and broken on another rank, which then is given its results instead of running it again.

    Attributes:
        count: how many there were.
        in_loops: this rank has a state and is at `count`; else it has just been started.
        ahead: results of collectives that others have ended and this rank is yet to come to.
    """

    def __init__(self) -> None:
        self.count, self.in_loops = 0, False
        self.ahead = deque[Results | None]()
        self._recent = deque[Results | None](maxlen=RECENT)
        self._fewest, self._most = 0, list[Results | None]()

    def record(self, results: Results | None) -> None:
        """Record that one has ended, with its results where they are `kept`."""
        self.count += 1
        self._recent.append(results)

    def results_after(self, fewest: int) -> list[Results | None]:
        """Return the results of all but the first `fewest`, None for those that are not known."""
        late = self.count - fewest
        recent = list(self._recent)[-late:] if late else []
        return [None] * (late - len(recent)) + recent

    def set_ahead(self, fewest: int, most: Sequence[Results | None]) -> None:
        """Take the results of all collectives after the first `fewest`, from the rank that is furthest."""
        self._fewest, self._most = fewest, list(most)
        if self.in_loops:
            self.resume_at(self.count)

    def resume_at(self, count: int) -> None:
        """Set the number of ended collectives, and so which of the others' results are ahead."""
        self.count, self.in_loops = count, True
        self.ahead = deque(self._most[max(count - self._fewest, 0) :])


class KnownResults:
    """Results of collectives that are the same on all ranks, in their order, and how many of them were replayed.

    Args:
        saved: what `to_list` returned, on another rank.
        taken: those that this rank has replayed already.
    """

    def __init__(self, saved: Sequence[Results | None] | None = (), taken: "KnownResults | None" = None) -> None:
        self._results: list[Results | None] | None = None if saved is None else list(saved)
        self._next, self._nbytes = len(taken.to_list() or ()) if taken is not None else 0, 0

    def to_list(self) -> list[Results | None] | None:
        """Return all results; None where they were too many to be kept."""
        return None if self._results is None else list(self._results)

    def has_room(self, nbytes: int) -> bool:
        """Return whether results of so many bytes can be kept."""
        return self._nbytes + nbytes <= MOST_BYTES

    def record(self, results: Results | None) -> None:
        """Append the results of one more collective, as they are `kept`, None if they are not known."""
        if self._results is None:
            return
        nbytes = sum(each.nbytes for each in results or ())
        if not self.has_room(nbytes) or len(self._results) == RESULTS_KEPT:
            self._results = None
            return
        self._nbytes += nbytes
        self._results.append(results)
        self._next += self._next == len(self._results) - 1

    def drop_last(self, count: int) -> None:
        """Remove the results of the last collectives."""
        if self._results is not None and count:
            del self._results[-count:]
            self._next = min(self._next, len(self._results))

    @property
    def exhausted(self) -> bool:
        """Whether all of them were replayed."""
        return self._results is not None and self._next == len(self._results)

    @property
    def remaining(self) -> list[Results | None] | None:
        """Results that were not replayed yet; None where they were too many to be kept."""
        return None if self._results is None else self._results[self._next :]

    def has_next(self, count: int) -> bool:
        """Return whether the results of the next `count` collectives are known and not empty."""
        return self._results is not None and all(self._results[self._next :][:count])

    def next_result(self) -> Results | None:
        """Return the results of the next collective, None where they are not known."""
        if self._results is None or self.exhausted:
            return None
        self._next += 1
        return self._results[self._next - 1]


def pack_results(results: list[Results | None]) -> bytes:
    """Return results of collectives as bytes; None stands for results that are not known."""
    stream = io.BytesIO()
    torch.save([None if each is None else [one.clone() for one in each] for each in results], stream)
    return stream.getvalue()


def unpack_results(data: bytes) -> list[Results | None]:
    """Return the results of collectives that another rank has packed.

    Raises:
        InvalidInputError: it is something else.
    """
    try:
        results: Any = torch.load(io.BytesIO(data), weights_only=True)
    except (RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise InvalidInputError(f"what another rank sent of its collectives can't be read: {error}") from error
    lists = isinstance(results, list) and all(isinstance(each, list | None) for each in results)
    if not lists or not all(isinstance(each, torch.Tensor) for given in results for each in given or ()):
        raise InvalidInputError("what another rank sent is no list of results of collectives")
    return list(results)
