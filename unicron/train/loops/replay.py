"""The way of a new rank to where the others are: the loops that it is to enter, and results of collectives run by then.

The results come from the other ranks. What they have run before the loops is replayed elsewhere.
"""

from collections.abc import Callable

from unicron.train.loops.active_loops import DRAWING, ActiveLoop, Chain, LoopLocation, LoopPlace, LoopSnapshot
from unicron.train.loops.collective_results import KnownResults, Results
from unicron.train.loops.loop_stack import LoopStack
from unicron.train.loops.positions import RUNNING
from unicron.train.loops.snapshot_points import Point, SnapshotPoints


class Replay:
    """The replay of a rank, and the results of collectives that it keeps for others to replay.

    Args:
        stack: of its loops.

    Attributes:
        points: at which its snapshots were taken.
        record: that of the rank which this one replaces.
        depth: how many of the target's loops it has come to.
        given: results of collectives are replayed: the others have run them.
    """

    def __init__(self, stack: LoopStack) -> None:
        self._stack, self.points = stack, SnapshotPoints()
        self._target: list[LoopLocation] = []
        self.record: LoopSnapshot | None = None
        self.depth, self.given = 0, False
        self._outside = KnownResults()
        self._on_arrival: Callable[[], None] = lambda: None

    # --- the way -----------------------------------------------------------------------------------------------------

    @property
    def is_under_way(self) -> bool:
        """Whether this rank is yet to come to where the others are."""
        return bool(self._target)

    @property
    def target(self) -> LoopLocation:
        """The location in the loop that it comes to next."""
        return self._target[self.depth]

    @property
    def is_due(self) -> bool:
        """Whether the loop that begins now, or the innermost one once it has begun, decides about the next step."""
        return self.is_under_way and len(self._stack.active) == self.depth

    @property
    def is_at_innermost(self) -> bool:
        """Whether it is the innermost active loop whose point it comes to next."""
        return self.is_under_way and len(self._stack.active) - 1 == self.depth

    @property
    def ends_next(self) -> bool:
        """Whether the loop that it comes to next is the last."""
        return self.depth + 1 == len(self._target)

    def is_wanted(self, place: str) -> bool:
        """Return whether one of the loops that it is to enter begins at this place."""
        return any(each.where.place == place for each in self._target)

    def begin_at(self, point: Point) -> None:
        """Set where to go, and what collectives have given by then."""
        self._target, self._outside, self.depth = point.loops, KnownResults(point.outside), 0
        self.points.reset_to(Point([], []), KnownResults(point.since))
        self.given = self.is_under_way

    def take_over(self, record: LoopSnapshot, arrive: Callable[[], None]) -> None:
        """Set the record of the rank which this one replaces, and so where to go; `arrive` is called there."""
        self.record, self._on_arrival = record, arrive
        self.begin_at(self.points.candidate(record.chain))

    def enter_fed(self, at: ActiveLoop) -> None:
        """Go on inside of what a loop iterates over: there the other ranks are."""
        at.count, at.is_fed, at.trains = self.target.where.round, True, True
        self.depth += 1
        self._stack.reset_counts()

    def reach(self, at: ActiveLoop) -> bool:
        """Note that a loop is at its place, with its snapshot restored; return whether it was the last of them."""
        where, item, _, results = self.target
        at.count, at.item = where.round, item
        at.record_point(where.point)
        at.snapshot, at.body_results = self.snapshot, KnownResults(results)
        self.depth += 1
        self._stack.reset_counts()
        if self.depth < len(self._target):
            return False
        self.points.reset_to(Point(self._target, self._outside.to_list()), self.points.since_last)
        self._target, self.depth, self.record = [], 0, None
        return True

    def arrive(self) -> None:
        """Tell that this rank is where the one was that it replaces."""
        self._on_arrival()

    @property
    def snapshot(self) -> bytes:
        """The snapshot of the next point."""
        return self.record.snapshots[self.depth] if self.record is not None else b""

    # --- results of collectives --------------------------------------------------------------------------------------

    @property
    def gives_next(self) -> bool:
        """Whether the next collective is to be replayed: the others have run it already."""
        if self.given and not self.is_under_way:
            self.given = not self.points.since_last.exhausted
        return self.given

    def next_result(self) -> Results | None:
        """Return the results of the next collective; None where they are not known."""
        brought = [number for number, each in enumerate(RUNNING) if each.is_replaying]
        if brought:
            found = RUNNING[brought[-1]].results.next_result()
        else:
            found = (self._here if self.is_under_way else self.points.since_last).next_result()
            if not self.is_under_way:
                self._record_here(found)
        for each in RUNNING[brought[-1] + 1 if brought else 0 :]:
            each.results.record(found)
        return found

    def record_result(self, results: Results | None) -> None:
        """Record the results of a collective, None if a rank that comes later can't be given them."""
        self.points.record_result(results)
        self._record_here(results)
        for each in RUNNING:
            each.results.record(results)

    def _record_here(self, results: Results | None) -> None:
        """Record results where this rank is; of a loop that is not known to train also around it.

        Another rank knows by then that it does not, and runs it without looking at it.
        """
        for at in reversed(self._stack.active):
            self._results_in(at).record(results)
            if at.trains or at.place in self._stack.training:
                return
            at.results_around += 1
        self._outside.record(results)

    def note_training(self) -> None:
        """Note that all active loops train; take back what was recorded around them, as another rank enters them."""
        active = self._stack.active
        for around, at in zip([self._outside, *map(self._results_in, active)], active, strict=False):
            around.drop_last(at.results_around)
            at.results_around = 0
        self._stack.note_training()

    @property
    def _here(self) -> KnownResults:
        at = self._stack.innermost
        return self._outside if at is None else self._results_in(at)

    @staticmethod
    def _results_in(at: ActiveLoop) -> KnownResults:
        return at.iterator_results if at.is_drawing else at.body_results

    # --- the state ---------------------------------------------------------------------------------------------------

    def present_point(self) -> Point:
        """Return the point of the snapshots of all active loops."""
        return Point([at.location for at in self._stack.active], self._outside.to_list())

    @property
    def candidate_chains(self) -> list[Chain]:
        """The chains of loops at which this rank can begin, the best first; none where it begins at the top."""
        return list(self.points.candidate_chains()) if self.is_under_way else []


def is_drawing_place(where: LoopPlace) -> bool:
    """Return whether a place is in what a loop iterates over."""
    return where.point == DRAWING
