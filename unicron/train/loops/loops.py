"""Positions of a script in its training loops, so that a worker that is started later begins there.

At the end of a loop's body that has made an update each rank takes a snapshot of its own script, and leaves it where it
outlives the rank. Its replacement goes to that position, by way of the heads of the loops around it.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch

from unicron.train.carry.kinds import NotCarriedError, OwnCheckpointNewerError
from unicron.train.carry.limit import TimeLimit
from unicron.train.carry.objects import Call
from unicron.train.carry.own_snapshot import Heap
from unicron.train.carry.randomness import seed
from unicron.train.carry.variables import NAME, Variables, spaces_of
from unicron.train.loops.active_loops import ActiveLoop, Chain, LoopSnapshot
from unicron.train.loops.collective_results import KnownResults, Results
from unicron.train.loops.positions import RUNNING, Counted, counts_up
from unicron.train.loops.program import LIBRARIES
from unicron.train.loops.snapshot_points import Point, SnapshotPoints, chain_at, is_reachable
from unicron.train.worker.injected import InjectedFault

EARLY, SMALL_BYTES = 4, 8 << 20
"""Updates before which snapshots have gradients of so many bytes: more may be added to them, which shows later."""


class Loops:
    """The training loops of a script that are under way, the outermost first. It is protected as a model is.

    Args:
        rank: of the program; what is random differs by rank.
        prepare: is called as the first of them begins. It returns the script's objects whose state is transferred by
            other means (models, optimizers), those that `join_ranks` changes, and, by name, those that go with the
            snapshots though no variable leads to them.
        join_ranks: is called then, to form groups with the other ranks and to load their state.
        publish_record: publishes this rank's own record, or the reason why there is none, where it outlives the rank.

    Attributes:
        replaying: this rank began later than the others, and is given the results of collectives that they have run.
        accumulates: the last snapshot contains gradients, to which more is added.
        zeroed: gradients that exist as an iteration begins are zero.
        closed_reason: why no new rank can continue from the last snapshot; empty where one can.
    """

    def __init__(
        self,
        rank: int,
        prepare: Callable[[], tuple[Iterable[Any], Iterable[Any], dict[str, Any]]],
        join_ranks: Callable[[], None],
        publish_record: Callable[[LoopSnapshot | NotCarriedError], None],
    ) -> None:
        self._prepare, self._join_ranks, self._publish_record = prepare, join_ranks, publish_record
        self._has_begun = False
        self._active: list[ActiveLoop] = []
        self._indices = [0]
        self._has_inner_loop: dict[str, bool] = {}
        self._modules: dict[str, dict[str, Any]] = {}
        self._heap: Heap | None = None
        self._target: list[list[Any]] = []
        self._record: LoopSnapshot | None = None
        self._on_arrival: Callable[[], None] = lambda: None
        self._target_depth = 0
        self._outside_results = KnownResults()
        self._points = SnapshotPoints()
        self._in_iteration = self._reduced_since = self._pending = False
        self._updates = self._updates_at_point = self._updates_at_end = 0
        self._has_snapshot, self._versions, self._changing_places = False, 0, set[str]()
        self.replaying = self.accumulates = self.zeroed = self._keeps_gradients = False
        self.closed_reason = ""
        self._limit, self._too_slow = TimeLimit(), None
        seed(rank)

    _too_slow: NotCarriedError | None

    # --- what the script calls ---------------------------------------------------------------------------------------

    def hand_out_items(self, place: str, iterable: Iterable[Any], numbered: bool) -> Iterator[Any]:
        """Yield the items of a `for` loop, from the one at which this worker is to begin."""
        caller = sys._getframe(1)  # noqa: SLF001 there is no other way to a script's variables
        self._start(caller)
        self._exit_abandoned(caller)
        at = self._enter_loop(place, caller, None)
        depth = len(self._active) - 1
        try:
            to = self._target[depth] if self._target and depth == self._target_depth else None
            if to is not None and to[:2] != [place, at.index]:
                return  # the others have it behind them
            if to is not None:
                at.iterator_results = KnownResults(to[5])
            at.is_drawing = True
            position = at.iterator = Counted(iterable, [])  # what it is given is noted as `drawn`
            counts = counts_up(iterable)
            if to is not None:
                with self._refusing():
                    found = [*self._resume_items(at, to, position, iterable)]
                at.is_drawing = False
                for count, item in found:
                    at.count, at.item = count, item if counts else None
                    yield (count - 1, item) if numbered else item
            while True:
                at.is_drawing = True
                try:
                    item = next(position)
                except StopIteration:
                    break
                finally:
                    at.is_drawing = False
                at.count += 1
                at.item = item if counts else None
                yield (at.count - 1, item) if numbered else item
        finally:
            self._exit_loops(depth)

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        """Publish why this rank can't take over the one that it replaces, if it can't: all are to begin again."""
        try:
            yield
        except NotCarriedError as error:
            self._publish_record(error)
            raise

    def _resume_items(
        self, at: ActiveLoop, to: list[Any], position: Counted, iterable: Iterable[Any]
    ) -> list[tuple[int, Any]]:
        """Bring the iterator to where the other ranks' are, and return the item whose body they are in, with its count.

        What this process's iterator has handed out beyond that follows it.

        Raises:
            NotCarriedError: this loop has no such item.
        """
        count, number = to[2], to[4]
        later: tuple[Any, ...] = ()
        if number is not None:  # a script that has begun from a checkpoint of its own counts from there
            item = first = next(position, None)
            if first != number + 1 and isinstance(iterable, range) and number not in iterable:
                item = None  # which a range of a million says at once
            while item is not None and item != number and first != number + 1:
                item = next(position, None)
            if item is None:
                newer = isinstance(first, int) and first > number
                text = f"the others are at {number} of the loop at {at.place}, which has no such here"
                own = f"{text}, as this script has begun from a checkpoint of its own that is newer"
                raise OwnCheckpointNewerError(own) if newer else NotCarriedError(text)
            item, later = number, (first,) * (item != number)  # its checkpoint is of the end of this one
        elif self._record is not None and self._heap is not None:
            try:
                saved = self._heap.unpack(self._record.positions[self._target_depth], position.own)
                item = position.advance_to(saved)
            except NotCarriedError as error:
                raise NotCarriedError(f"{error} (what the loop at {at.place} goes over)") from error
        return [*enumerate((item, *later), count)]

    def should_test(self, place: str) -> bool:
        """Return whether a `while` loop's test is to be evaluated; not where the other ranks have left the loop."""
        caller = sys._getframe(1)  # noqa: SLF001
        self._start(caller)
        self._exit_abandoned(caller, place)
        depth = len(self._active)
        if depth > 0 and self._active[-1].place == place and self._active[-1].frame is caller:
            return True
        if not self._target or depth != self._target_depth or self._target[depth][:2] == [place, self._indices[depth]]:
            return True
        self._indices[depth] += 1
        return False

    def should_enter(self, place: str) -> bool:
        """Return whether a `while` loop's body is to be entered whatever its test says: the others are in it."""
        depth = len(self._active)
        return (
            bool(self._target)
            and depth == self._target_depth
            and self._target[depth][:2] == [place, self._indices[depth]]
        )

    def at_head(self, place: str, last: int | None, *dead: str) -> None:
        """Take a snapshot at the head of a loop's body, or restore there that of the rank which this one replaces.

        Args:
            place: of the loop.
            last: line at which it ends, if it does not say so by itself.
            dead: variables that are set anew before anybody reads them.
        """
        caller = sys._getframe(1)  # noqa: SLF001
        self._start(caller)
        self._exit_abandoned(caller, place)
        if last is not None:
            if not self._active or self._active[-1].place != place:
                self._enter_loop(place, caller, last)
            self._active[-1].count += 1
        depth, at = len(self._active) - 1, self._active[-1]
        if at.has_begun:
            self._has_inner_loop[place] = at.had_inner_loop
        at.has_begun, at.had_inner_loop = True, False
        self._indices[depth + 1 :] = [0]
        if self._target and depth == self._target_depth:
            there, index, count, point, *_ = self._target[depth]
            if [there, index] != [place, at.index]:
                with self._refusing():
                    raise NotCarriedError(f"the others are at {there}, and this process comes to {place} before that")
            at.count = count
            if point == 0:
                self._restore_at(at, caller)
        elif self._has_inner_loop.get(place, True) or (
            not self._in_iteration and (self._reduced_since or not self._has_snapshot)
        ):
            self._take_snapshot(at, caller, 0, dead, leaves=not self._in_iteration)

    def should_run(self, place: str, point: int) -> bool:
        """Return whether the statements before a point of a body are to be run: a new rank may begin after them."""
        if not self._target or len(self._active) - 1 != self._target_depth or self._active[-1].place != place:
            return True
        return bool(self._target[self._target_depth][3] < point)

    def after_update(self, place: str, point: int, long: bool, *dead: str) -> None:
        """Take a snapshot if an update was made since the last one, or restore that of the replaced rank.

        Args:
            place: of the loop.
            point: in its body.
            long: what follows in it may take long; else the end of the body is soon, and will do where nobody could
                begin here.
            dead: variables that are set anew before anybody reads them.
        """
        if self._target or self._updates > self._updates_at_point:
            self._updates_at_point = self._updates
            self._at_point(sys._getframe(1), place, point, dead, needed=long)  # noqa: SLF001

    def at_end(self, place: str, point: int, *dead: str) -> None:
        """Do so at the end of a loop's body, if an update was made since the end of the last body."""
        if self._target or self._updates > self._updates_at_end:
            self._updates_at_end = self._updates_at_point = self._updates
            self._at_point(sys._getframe(1), place, point, dead, needed=True)  # noqa: SLF001

    def _at_point(self, caller: FrameType, place: str, point: int, dead: Iterable[str], *, needed: bool) -> None:
        self._exit_abandoned(caller, place)
        at = self._active[-1] if self._active else None
        if at is None or at.place != place:
            return
        if not self._target:
            if not self._in_iteration and place not in self._changing_places:
                self._take_snapshot(at, caller, point, dead, leaves=True, needed=needed)
        elif len(self._active) - 1 == self._target_depth and self._target[self._target_depth][3] == point:
            self._restore_at(at, caller)

    def _restore_at(self, at: ActiveLoop, caller: FrameType) -> None:
        """Restore the snapshot that the replaced rank took at this point of a loop's body.

        Raises:
            NotCarriedError: this process has made something else on the way.
        """
        depth = self._target_depth
        _, _, at.count, point, at.item, _, heard = self._target[depth]
        with self._refusing():
            if self._record is None or self._heap is None:
                raise NotCarriedError("there is no snapshot of the rank that is replaced, or none can be taken here")
            self.accumulates = self._heap.restore(self._spaces(caller), self._record.snapshots[depth])
            self._heap.record_present(self._spaces(caller))
        at.record_point(point)
        at.snapshot, at.body_results = self._record.snapshots[depth], KnownResults(heard)
        self._target_depth = depth + 1
        self._indices[depth + 1 :] = [0]
        if self._target_depth == len(self._target):
            self._points.reset_to(
                {"loops": self._target, "outside": self._outside_results.to_list()}, self._points.since_last
            )
            self._versions = self._heap.versions
            self._target, self._target_depth, self._record = [], 0, None
            self._has_snapshot, self._reduced_since, self._updates_at_point, self._updates_at_end = (
                True,
                False,
                self._updates,
                self._updates,
            )
            self._on_arrival()

    def _take_snapshot(
        self, at: ActiveLoop, caller: FrameType, point: int, dead: Iterable[str], *, leaves: bool, needed: bool = True
    ) -> None:
        """Take this rank's snapshot at a point of a loop's body.

        Args:
            at: the loop.
            caller: what runs it.
            point: in its body.
            dead: variables that are set anew before anybody reads them.
            leaves: it is left where it outlives the rank; else it is on the way to another, further inside.
            needed: where there can be none, that is said; else nothing is done.
        """
        early = self._updates < EARLY and self._heap is not None and self._heap.gradient_bytes <= SMALL_BYTES
        accumulates = (self._keeps_gradients or self._pending or early) if leaves else self.accumulates
        snapshot, refused = at.snapshot, self._too_slow
        if self._heap is not None and not refused:
            try:
                with self._limit.limited():
                    spaces = self._spaces(caller)
                    never = {name: set(dead) for name, space in spaces.items() if space.belongs_to(caller)}
                    snapshot = self._heap.snapshot(spaces, never, gradients=leaves and accumulates, zeroed=self.zeroed)
                    if self._has_inner_loop.get(at.place, True):  # it takes long
                        self._heap.record_present(spaces)
            except InjectedFault:
                raise
            except Exception as raised:  # noqa: BLE001 whatever a script's objects raise, it goes on without a snapshot
                error = raised if isinstance(raised, NotCarriedError) else NotCarriedError(repr(raised))
                if self._limit.exceeded:  # it would in each iteration
                    self._too_slow = error
                if not needed:
                    return
                refused = error
        at.record_point(point)
        at.snapshot, at.refusal, self.accumulates = snapshot, refused, accumulates
        self._indices[len(self._active) :] = [0]
        if leaves:
            versions = self._heap.versions if self._heap is not None else 0
            self._points.add(self._location(), alone=self._reduced_since or versions != self._versions)
            self._versions, self.closed_reason = versions, ""
            self._has_snapshot, self._reduced_since = True, False
            if self._heap is not None:
                self._publish_record(self._build_record())

    def _build_record(self) -> LoopSnapshot | NotCarriedError:
        """Return a record of where this rank is, or why there is none."""
        if refused := next((each.refusal for each in self._active if each.refusal is not None), None):
            return refused
        chain = [each.location[:4] for each in self._active]
        try:
            positions = [self._pack_iterator(each.iterator) for each in self._active]
        except NotCarriedError as error:
            return error
        return LoopSnapshot(chain, positions, [each.snapshot for each in self._active])

    def _pack_iterator(self, position: Counted | None) -> bytes:
        if position is None or self._heap is None:
            return b""
        try:
            return self._heap.pack(position.position(), position.own)
        except NotCarriedError:
            raise
        except Exception as error:
            raise NotCarriedError(f"what {type(position.iterable).__name__} is made of: {error}") from error

    def counted_iterator(self, over: Iterable[Any]) -> Counted:
        """Return an iterator that knows how far it is."""
        return Counted(over)

    def counted_generator(self, function: Callable[..., Iterator[Any]]) -> Callable[..., Counted]:
        """Return what calls a generator function, and returns what knows how far the generator is."""

        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Counted:
            return Counted(Call(call, arguments, named))

        return call

    # --- what the others have behind them ----------------------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        """Whether the first loop has begun."""
        return self._has_begun

    @property
    def in_iteration(self) -> bool:
        """Whether an iteration has begun and its gradient is not reduced."""
        return self._in_iteration

    @property
    def is_resumable(self) -> bool:
        """Whether no gradient was reduced since the last snapshot, so that a new rank gets here from it."""
        return not self._reduced_since

    @property
    def is_reachable(self) -> bool:
        """Whether all results of collectives are known that a new rank has to be given."""
        return is_reachable(self._points.reachable_points()[0])

    def begin_iteration(self) -> None:
        """Record that an iteration begins; close the last snapshot if a new rank could not begin there any more."""
        place = self._active[-1].place if self._active else "the end"
        if not self.is_resumable:
            self._close_last_snapshot(
                f"a statement in the body of the loop at {place} makes more than one update, and no process could come "
                "in between: give each a statement of its own"
            )
        elif self._heap is not None and self._versions != self._heap.versions:
            self._changing_places.add(place)  # from now on the snapshot is taken at the head
            self._close_last_snapshot(
                f"parameters are changed in the body of the loop at {place} before its forward pass, and not by an "
                "optimizer: a process that begins there would change them twice"
            )
        self._in_iteration = True

    @property
    def missing_gradients(self) -> list[torch.nn.Parameter]:
        """Parameters whose gradient was not in the snapshot where this rank began, though it had one."""
        return self._heap.missing_gradients if self._heap is not None else []

    @property
    def gradients_uncertain(self) -> bool:
        """Whether gradients may be there to be made zero, and are not known to be there to have more added to them."""
        return not (self._keeps_gradients or self._pending)

    def include_gradients(self) -> None:
        """Put gradients into snapshots from now on, as the script adds to those of an earlier iteration."""
        self._keeps_gradients = True
        if not self.accumulates:
            self._close_last_snapshot("more is added to gradients of an iteration before, for the first time")

    def _close_last_snapshot(self, why: str) -> None:
        """Publish why no new rank can continue from the last snapshot: state that all ranks share has changed since."""
        self.closed_reason = why
        self._publish_record(NotCarriedError(why))

    def record_reduce(self) -> None:
        """Record that the gradient is about to be reduced, which ends a replay: all ranks are here."""
        self.replaying, self._in_iteration, self._reduced_since, self._pending = False, False, True, True

    def record_update(self) -> None:
        """Record that an update was made."""
        self._updates, self._pending = self._updates + 1, False

    @property
    def replays_next(self) -> bool:
        """Whether the next collective is to be replayed: the others have run it already."""
        if self.replaying and not self._target:
            self.replaying = not self._points.since_last.exhausted
        return self.replaying

    def replayed_result(self) -> Results | None:
        """Return the recorded results of the next collective; None where they are not known."""
        iterator = RUNNING[-1] if RUNNING else None
        if iterator is not None and iterator.is_replaying:
            return iterator.results.next_result()
        found = (self._current_results if self._target else self._points.since_last).next_result()
        if not self._target:
            self._current_results.record(found)
        if iterator is not None:
            iterator.results.record(found)
        return found

    def record_result(self, results: Results | None) -> None:
        """Record the results of a collective, None if a rank that comes later can't be given them."""
        self._points.record_result(results)
        for each in (self._current_results, *(iterator.results for iterator in RUNNING)):
            each.record(results)

    @property
    def _current_results(self) -> KnownResults:
        if not self._active:
            return self._outside_results
        at = self._active[-1]
        return at.iterator_results if at.is_drawing else at.body_results

    def _start(self, caller: FrameType) -> None:
        if not self._has_begun:
            self._has_begun = True
            modules = {name: getattr(each, "__dict__", {}) for name, each in sys.modules.copy().items()}
            modules |= {caller.f_globals["__name__"]: caller.f_globals}
            self._modules = {name: each for name, each in modules.items() if NAME in each and name not in LIBRARIES}
            carried, changes, own = self._prepare()
            self._modules["optimizers"] = own
            heap = Heap(carried)
            try:
                heap.number_objects(self._spaces(caller))
                heap.keep_states(changes)
            except NotCarriedError as error:
                self._publish_record(error)
            else:
                self._heap = heap
            self._join_ranks()

    def _spaces(self, caller: FrameType) -> Mapping[str, Variables]:
        return spaces_of(caller, self._modules)

    def _enter_loop(self, place: str, caller: FrameType, last: int | None) -> ActiveLoop:
        """Push a loop; objects made on the way to it are numbered, as a new rank makes them, too."""
        depth = len(self._active)
        at = ActiveLoop(place, self._indices[depth], caller, last)
        self._indices[depth] += 1
        if self._heap is not None and (depth or at.index):
            self._heap.number_objects(self._spaces(caller), f"{depth}.{at.index}")
        self._active.append(at)
        del self._indices[depth + 1 :]
        self._indices.append(0)
        return at

    def _exit_loops(self, depth: int) -> None:
        """Pop the loops from this depth on."""
        if depth < len(self._active):
            caller = self._active[depth].frame
            if self._heap is not None:
                levels = [f"{number}." for number in range(depth, len(self._active) + 1)]
                self._heap.forget_levels(levels)
                if not self._target:
                    self._heap.record_present(self._spaces(caller))
            del self._active[depth:]
            if depth:
                self._active[-1].had_inner_loop = True

    def _exit_abandoned(self, caller: FrameType, place: str = "") -> None:
        """Pop `while` loops that the script has left: `caller` runs outside of them, or their frame is gone."""
        frames, frame = set[int](), caller
        while frame is not None:
            frames.add(id(frame))
            frame = frame.f_back  # type: ignore[assignment]
        for depth, at in enumerate(self._active):
            if at.last is None:
                continue
            inside = line_of(at.place) <= (line_of(place) if place else caller.f_lineno) <= at.last
            if id(at.frame) not in frames or (at.frame is caller and not inside):
                self._exit_loops(depth)
                return

    # --- the state ---------------------------------------------------------------------------------------------------

    def _location(self) -> dict[str, Any]:
        return {"loops": [at.location for at in self._active], "outside": self._outside_results.to_list()}

    def state_dict(self) -> dict[str, Any]:
        """Return where this script's last snapshots were taken, and the results of collectives since each of them."""
        return {"points": self._points.reachable_points(), "keeps": self._keeps_gradients}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin a replay to the newest of these points, unless this script is in a loop already."""
        self._keeps_gradients |= state["keeps"]
        if not self._active:
            self._points.candidates = state["points"]
            self._resume_from(state["points"][0])

    def _resume_from(self, point: Point) -> None:
        self._target, self._outside_results = point["loops"], KnownResults(point["outside"])
        self._points.reset_to({}, KnownResults(point["since"]))
        self.replaying = bool(self._target)

    @property
    def candidate_chains(self) -> list[Chain]:
        """The chains of loops at which this rank can begin, the best first; none where it begins at the top."""
        return list(self._points.candidate_chains()) if self._target else []

    @property
    def reachable_chains(self) -> list[Chain]:
        """The chains of loops at which a rank that replaces another could begin, given the state of this one."""
        return list(map(chain_at, self._points.reachable_points()))

    def take_over(self, record: LoopSnapshot, arrive: Callable[[], None] = lambda: None) -> None:
        """Restore a replaced rank's record as this script comes to where it was taken; then call `arrive`."""
        self._record, self._on_arrival = record, arrive
        self._resume_from(self._points.candidate(record.chain))


def line_of(place: str) -> int:
    """Return the line of a place ("FILE:LINE")."""
    return int(place.rpartition(":")[2])
