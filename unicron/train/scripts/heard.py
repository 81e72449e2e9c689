"""What collectives have given a script, for a new rank that comes to where the others have these behind them."""

from collections import deque
from collections.abc import Sequence

import torch

MOST_BYTES = 1 << 20
"""What is kept of one place of a script. Who needs more can't come there."""

MOST = 10_000
"""Collectives that are kept of it."""

RECENT = 16
"""Collectives by which one rank may be ahead of another, as the first rank of broadcasts may be, and still help it."""

Results = list[torch.Tensor]


class Ended:
    """The collectives of all ranks that have ended on this one since its loops began.

    One may have ended here and broken on another rank, which then is given what it gave instead of waiting for it.

    Attributes:
        count: how many there were.
        joined: this rank is where its count says, and not one that has just begun and has no state yet.
        ahead: what those give that this rank is yet to come to, and others have behind them.
    """

    def __init__(self) -> None:
        self.count, self.joined = 0, False
        self.ahead = deque[Results | None]()
        self._recent = deque[Results | None](maxlen=RECENT)
        self._fewest, self._most = 0, list[Results | None]()

    def add(self, results: Results | None) -> None:
        """Note that one has ended, with what it gave if that is known."""
        self.count += 1
        small = results is not None and sum(each.nbytes for each in results) <= MOST_BYTES
        self._recent.append([each.detach().cpu().clone() for each in results or ()] if small else None)

    def since(self, fewest: int) -> list[Results | None]:
        """Return what all of them but the first `fewest` gave; None stands for what is not known."""
        late = self.count - fewest
        recent = list(self._recent)[-late:] if late else []
        return [None] * (late - len(recent)) + recent

    def know(self, fewest: int, most: Sequence[Results | None]) -> None:
        """Note what those gave that came after the first `fewest` on the rank that has most of them."""
        self._fewest, self._most = fewest, list(most)
        if self.joined:
            self.stand(self.count)

    def stand(self, count: int) -> None:
        """Be where `count` have ended."""
        self.count, self.joined = count, True
        self.ahead = deque(self._most[max(count - self._fewest, 0) :])


class Heard:
    """Results of collectives that gave all ranks the same, in their order.

    Args:
        saved: what `saved` returned, on another rank.
        taken: those that this rank has had already.
    """

    def __init__(self, saved: Sequence[Results | None] | None = (), taken: "Heard | None" = None) -> None:
        self._results: list[Results | None] | None = None if saved is None else list(saved)
        self._next, self._nbytes = len(taken.saved() or ()) if taken is not None else 0, 0

    def saved(self) -> list[Results | None] | None:
        """Return them; None where they were too many."""
        return None if self._results is None else list(self._results)

    def add(self, results: Results | None) -> None:
        """Note the results of another, None if ranks differ in them."""
        if self._results is None:
            return
        self._nbytes += sum(each.nbytes for each in results or ())
        if self._nbytes > MOST_BYTES or len(self._results) == MOST:
            self._results = None
            return
        self._results.append(None if results is None else [each.detach().cpu().clone() for each in results])
        self._next += self._next == len(self._results) - 1

    @property
    def over(self) -> bool:
        """Whether all of them were taken."""
        return self._results is not None and self._next == len(self._results)

    @property
    def left(self) -> list[Results | None] | None:
        """Those that were not taken."""
        return None if self._results is None else self._results[self._next :]

    def knows(self, count: int) -> bool:
        """Return whether the next results are known, and not that there were none."""
        return self._results is not None and all(self._results[self._next :][:count])

    def following(self) -> Results | None:
        """Return the next, None where it is not known."""
        if self._results is None or self.over:
            return None
        self._next += 1
        return self._results[self._next - 1]
