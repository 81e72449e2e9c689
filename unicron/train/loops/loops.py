"""Positions of a script in its training loops, so that a worker that is started later begins there.

At the end of a loop's body that has made an update each rank takes a snapshot of its own script, and leaves it where it
outlives the rank. Its replacement goes to that position, by way of the heads of the loops around it.

Which loops train shows as an iteration begins in them. So the first loop that may train is tried: the script's state is
numbered as it begins, and the ranks join once it has trained, or it is forgotten if it ends before. A replacement is
told which loop that was, and of all others which ones train.
"""

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch

from unicron.train.carry.kinds import NotCarriedError, OwnCheckpointNewerError
from unicron.train.carry.objects import Call
from unicron.train.carry.randomness import seed
from unicron.train.loops.active_loops import DRAWING, HEAD, ActiveLoop, Chain, LoopSnapshot
from unicron.train.loops.collective_results import KnownResults, Results
from unicron.train.loops.loop_stack import LoopStack
from unicron.train.loops.phases import Move, Phase, Story
from unicron.train.loops.positions import Counted, counts_up
from unicron.train.loops.replay import Replay
from unicron.train.loops.snapshot_points import Point
from unicron.train.loops.snapshot_taker import SnapshotTaker
from unicron.train.loops.unfollowed import own_frames, unfollowed_reason, why_not_fed

TRIES = 8
"""How often a loop may begin and not train before that is taken for certain."""


class Loops:
    """The training loops of a script that are under way, the outermost first. It is protected as a model is.

    Args:
        rank: of the program; what is random differs by rank.
        prepare: is called as the first of them begins. It returns the script's objects whose state is transferred by
            other means (models, optimizers), those that `join_ranks` changes, and, by name, those that go with the
            snapshots though no variable leads to them.
        join_ranks: is called once it is known that this one trains, to form groups with the other ranks and to load
            their state.
        publish_record: publishes this rank's own record, or the reason why there is none, where it outlives the rank.
        is_ready: returns whether the script has made all that is needed to train.

    Attributes:
        begun: the loop that the script has asked for last is followed.
        first: the first loop that trains, and how often the loop there has begun by then; empty before it is known.
        results_tried: how many collectives have ended in a first loop that is tried.
        closed_reason: why no new rank can continue from the last snapshot; empty where one can.
    """

    def __init__(
        self,
        rank: int,
        prepare: Callable[[], tuple[Iterable[Any], Iterable[Any], dict[str, Any]]],
        join_ranks: Callable[[], None],
        publish_record: Callable[[LoopSnapshot | NotCarriedError], None],
        is_ready: Callable[[], bool] = lambda: True,
    ) -> None:
        self._prepare, self._join_ranks, self._publish_record = prepare, join_ranks, publish_record
        self._is_ready = is_ready
        self._story, self._stack, self._taker = Story(), LoopStack(), SnapshotTaker()
        self._replay = Replay(self._stack)
        self._has_inner_loop: dict[str, bool] = {}
        self._reduced_since = self._has_snapshot = self._confirming = self.begun = False
        self._updates_at_point = self._updates_at_end = 0
        self._changing_places = set[str]()
        self.first, self._told, self._begins = "", "", dict[str, int]()
        self.results_tried, self.closed_reason = 0, ""
        self._unnumbered: NotCarriedError | None = None
        self._thread = threading.get_ident()
        os.register_at_fork(after_in_child=functools.partial(setattr, self, "_thread", 0))
        seed(rank)

    # --- what the script calls as a loop begins ----------------------------------------------------------------------

    def hand_out_items(self, place: str, iterable: Iterable[Any], numbered: bool, certain: bool) -> Iterable[Any]:
        """Return the items of a `for` loop, from the one at which this worker is to begin.

        Args:
            place: of the loop.
            iterable: what it goes over.
            numbered: each with its number, as of `enumerate`.
            certain: its source shows that it trains.
        """
        caller = sys._getframe(1)  # noqa: SLF001 there is no other way to a script's variables
        if begun := self._follows(place, caller, certain=certain):
            found: Iterable[Any] = self._items(place, caller, iterable, numbered)
        else:
            found = enumerate(iterable) if numbered else iterable
        self.begun = begun
        return found

    def begin_while(self, place: str, certain: bool) -> bool:
        """Return whether a `while` loop that begins is followed."""
        return self._follows(place, sys._getframe(1), certain=certain)  # noqa: SLF001

    def begin_body(self, place: str) -> bool:
        """Return whether a function is followed of which several statements train, as the body of a loop is."""
        follows = self._is_here and self._story.phase is not Phase.BEFORE and not self._stack.is_consuming
        if follows:
            self._stack.training.add(place)
        return follows

    @property
    def _is_here(self) -> bool:
        """Whether this is the thread of the process that runs the script's loops."""
        return threading.get_ident() == self._thread

    def _follows(self, place: str, caller: FrameType, *, certain: bool) -> bool:
        """Return whether a loop that begins is followed; if it is the first one, begin with that."""
        if not self._is_here:
            return False
        self._exit_abandoned(caller)
        if certain:
            self._stack.training.add(place)
        phase, number = self._story.phase, self._begins.get(place, 0) + 1
        self._begins[place] = number
        if number <= TRIES:
            self._stack.idle.discard(place)
        if phase is Phase.BEFORE:
            return self._is_first(place, number, caller, certain=certain)
        if phase is Phase.SEEKING:
            follows = place in self._stack.training or self._replay.is_wanted(place)
        else:
            follows = self._stack.may_train(place)
            follows &= phase is Phase.TRIED or place in self._stack.training or not self._stack.is_drawing
        if not follows:
            self._stack.count_begin(place)
        return follows

    def _is_first(self, place: str, number: int, caller: FrameType, *, certain: bool) -> bool:
        """Number what there is if a loop is the first that trains, or may; if that is known, join the other ranks."""
        here = f"{place}#{number}"
        if here != self._told if self._told else not (self._stack.may_train(place) and self._is_ready()):
            return False
        self._story.move(Move.TRY, here)
        self.first = here
        self._unnumbered = self._taker.number(caller, *self._prepare())
        if certain or self._told:
            self._begin()
        return True

    def _begin(self) -> None:
        self._story.move(Move.START, self.first)
        if self._unnumbered is not None:
            self._publish_record(self._unnumbered)
        self._join_ranks()
        self.results_tried = 0

    def start_at(self, first: str) -> None:
        """Set which loop is the first that trains: the other ranks, or those of a saved state, have come to that."""
        self._told = first

    def confirm(self) -> str:
        """Join the ranks, as a model is called that is to be trained, and so the loops around it train.

        Returns:
            why no new process could come there, so that nothing must be trained; empty where one could.
        """
        caller = sys._getframe(1)  # noqa: SLF001
        self._exit_abandoned(next(iter(own_frames(caller)), caller))
        if self._told:
            raise NotCarriedError(f"this process trains before it comes to {self._told}, where the others began to")
        if reason := unfollowed_reason(caller, self._stack.active, ready=self._is_ready()):
            return f"`heal: in-place` can't heal this script: {reason}"
        self._stack.note_training()
        if reason := why_not_fed(self._stack.active):
            return f"`heal: in-place` can't heal this script: {reason}"
        self._confirming = True
        self._begin()
        self._confirming = False
        self._taker.note_parameters()
        if self._taker.can_take:
            self._publish_record(self._taker.record(self._stack.active))
        return ""

    # --- the items of a `for` loop -----------------------------------------------------------------------------------

    def _items(self, place: str, caller: FrameType, iterable: Iterable[Any], numbered: bool) -> Iterator[Any]:
        at = self._enter_loop(place, caller, None)
        try:
            target = self._replay.target if self._replay.is_at_innermost else None
            if target is not None and not target.where.is_loop(place, at.index):
                return  # the others have it behind them
            if target is not None:
                at.iterator_results = KnownResults(target.drawn)
            at.is_drawing = True
            position = at.iterator = Counted(iterable, [])  # what it is given is noted as `drawn`
            counts = counts_up(iterable)
            if target is not None and target.where.point == DRAWING:
                self._replay.enter_fed(at)
                position.count = at.count
            elif target is not None:
                with self._refusing():
                    found = self._resume_items(at, position, iterable)
                self._end_drawing(at)
                for at.count, item in found:
                    at.item = item if counts else None
                    yield (at.count - 1, item) if numbered else item
            while True:
                at.is_drawing = True
                try:
                    item = next(position)
                except StopIteration:
                    break
                finally:
                    self._end_drawing(at)
                at.count += 1
                at.item = item if counts else None
                yield (at.count - 1, item) if numbered else item
        finally:
            if at in self._stack.active:
                self._exit_loops(self._stack.active.index(at))

    def _end_drawing(self, at: ActiveLoop) -> None:
        """Leave the loops that have run in an iterator as it found an item, unless those train."""
        at.is_drawing = False
        if at in self._stack.active and self._stack.innermost is not at and not at.is_fed:
            self._exit_loops(self._stack.active.index(at) + 1)
        if at.is_fed and self._story.phase is Phase.SEEKING:
            with self._refusing():
                raise NotCarriedError(f"what the loop at {at.place} goes over hands out items before it trains")

    def _resume_items(self, at: ActiveLoop, position: Counted, iterable: Iterable[Any]) -> list[tuple[int, Any]]:
        """Bring the iterator to where the other ranks' are, and return the item whose body they are in, with its count.

        What this process's iterator has handed out beyond that follows it.

        Raises:
            NotCarriedError: this loop has no such item.
        """
        where, number, *_ = self._replay.target
        later: tuple[Any, ...] = ()
        item = None
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
        elif (record := self._replay.record) is not None:
            try:
                item = self._taker.advance(position, record.positions[self._replay.depth])
            except NotCarriedError as error:
                raise NotCarriedError(f"{error} (what the loop at {at.place} goes over)") from error
        return [*enumerate((item, *later), where.round)]

    def counted_iterator(self, over: Iterable[Any]) -> Counted:
        """Return an iterator that knows how far it is."""
        return Counted(over)

    def counted_generator(self, function: Callable[..., Iterator[Any]]) -> Callable[..., Counted]:
        """Return what calls a generator function, and returns what knows how far the generator is."""

        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Counted:
            return Counted(Call(call, arguments, named))

        return call

    # --- what the script calls in a loop that is followed ------------------------------------------------------------

    def should_test(self, place: str) -> bool:
        """Return whether a `while` loop's test is to be evaluated; not where the other ranks have left the loop."""
        caller = sys._getframe(1)  # noqa: SLF001
        self._exit_abandoned(caller, place)
        at, index = self._stack.innermost, self._stack.next_index(place)
        if at is not None and at.place == place and at.frame is caller:
            return True
        if not self._replay.is_due or self._replay.target.where.is_loop(place, index):
            return True
        self._stack.count_begin(place)
        return False

    def should_enter(self, place: str) -> bool:
        """Return whether a `while` loop's body is to be entered whatever its test says: the others are in it."""
        return self._replay.is_due and self._replay.target.where.is_loop(place, self._stack.next_index(place))

    def at_head(self, place: str, last: int | None, *dead: str) -> None:
        """Take a snapshot at the head of a loop's body, or restore there that of the rank which this one replaces.

        Args:
            place: of the loop.
            last: line at which it ends, if it does not say so by itself.
            dead: variables that are set anew before anybody reads them.
        """
        caller = sys._getframe(1)  # noqa: SLF001
        self._exit_abandoned(caller, place)
        at = self._stack.innermost
        if last is not None:
            if (at is None or at.place != place) and place not in self._stack.idle:
                at = self._enter_loop(place, caller, last)
            if at is not None and at.place == place:
                at.count += 1
        if at is None or at.place != place or at.is_fed:
            return
        if at.has_begun:
            self._has_inner_loop[place] = at.had_inner_loop
            self._stack.note_body(at)
        at.has_begun, at.had_inner_loop = True, False
        self._stack.reset_counts()
        has_inner_loop = self._has_inner_loop.get(place, True)
        if self._replay.is_at_innermost:
            where = self._replay.target.where
            if not where.is_loop(place, at.index):
                with self._refusing():
                    raise NotCarriedError(
                        f"the others are at {where.place}, and this process comes to {place} before that"
                    )
            at.count = where.round
            if where.point == HEAD:
                self._restore_at(at, caller)
        elif place not in self._stack.idle and (
            has_inner_loop or (not self.in_iteration and (self._reduced_since or not self._has_snapshot))
        ):
            self._take_snapshot(at, caller, HEAD, dead, leaves=not self.in_iteration)

    def should_run(self, place: str, point: int) -> bool:
        """Return whether the statements before a point of a body are to be run: a new rank may begin after them."""
        at = self._stack.innermost
        if not self._replay.is_at_innermost or at is None or at.place != place:
            return True
        return self._replay.target.where.point < point

    def after_update(self, place: str, point: int, long: bool, *dead: str) -> None:
        """Take a snapshot if an update was made since the last one, or restore that of the replaced rank.

        Args:
            place: of the loop.
            point: in its body.
            long: what follows in it may take long; else the end of the body is soon, and will do where nobody could
                begin here.
            dead: variables that are set anew before anybody reads them.
        """
        if self._replay.is_under_way or self._taker.updates > self._updates_at_point:
            self._updates_at_point = self._taker.updates
            self._at_point(sys._getframe(1), place, point, dead, needed=long)  # noqa: SLF001

    def at_end(self, place: str, point: int, *dead: str) -> None:
        """Do so at the end of a loop's body, if an update was made since the end of the last body."""
        if self._replay.is_under_way or self._taker.updates > self._updates_at_end:
            self._updates_at_end = self._updates_at_point = self._taker.updates
            self._at_point(sys._getframe(1), place, point, dead, needed=True)  # noqa: SLF001

    def _at_point(self, caller: FrameType, place: str, point: int, dead: Iterable[str], *, needed: bool) -> None:
        self._exit_abandoned(caller, place)
        at = self._stack.innermost
        if at is None or at.place != place or at.is_fed:
            return
        if not self._replay.is_under_way:
            if not self.in_iteration and place not in self._changing_places:
                self._take_snapshot(at, caller, point, dead, leaves=True, needed=needed)
        elif self._replay.is_at_innermost and self._replay.target.where.point == point:
            self._restore_at(at, caller)

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        """Publish why this rank can't take over the one that it replaces, if it can't: all are to begin again."""
        try:
            yield
        except NotCarriedError as error:
            self._publish_record(error)
            raise

    def _restore_at(self, at: ActiveLoop, caller: FrameType) -> None:
        """Restore the snapshot that the replaced rank took at this point of a loop's body.

        Raises:
            NotCarriedError: this process has made something else on the way.
        """
        with self._refusing():
            self._taker.restore(caller, self._replay.snapshot)
        if self._replay.reach(at):
            self._story.move(Move.ARRIVE, at.place)
            self._taker.note_parameters()
            self._has_snapshot, self._reduced_since = True, False
            self._updates_at_point = self._updates_at_end = self._taker.updates
            self._replay.arrive()

    def _take_snapshot(
        self, at: ActiveLoop, caller: FrameType, point: int, dead: Iterable[str], *, leaves: bool, needed: bool = True
    ) -> None:
        """Take this rank's snapshot at a point of a loop's body; if it `leaves` it where it outlives it, publish it."""
        lasts = self._has_inner_loop.get(at.place, True)
        if not self._taker.take(at, caller, point, dead, leaves=leaves, needed=needed, lasts=lasts):
            return
        self._stack.reset_counts()
        if leaves:
            alone = self._reduced_since or self._taker.has_other_parameters
            self._replay.points.add(self._replay.present_point(), alone=alone)
            self._taker.note_parameters()
            self.closed_reason, self._has_snapshot, self._reduced_since = "", True, False
            if self._taker.can_take and self.has_begun:
                self._publish_record(self._taker.record(self._stack.active))

    # --- entering and leaving loops ----------------------------------------------------------------------------------

    def _enter_loop(self, place: str, caller: FrameType, last: int | None) -> ActiveLoop:
        """Push a loop; objects made on the way to it are numbered, as a new rank makes them, too."""
        depth, index = len(self._stack.active), self._stack.next_index(place)
        self._stack.count_begin(place)
        if depth or index:
            self._taker.number_before(caller, f"{depth}.{place}#{index}")
        return self._stack.push(place, index, caller, last)

    def _exit_loops(self, depth: int) -> None:
        """Pop the loops from this depth on; a first one that was tried, and has not trained, is forgotten."""
        caller, number = self._stack.active[depth].frame, len(self._stack.active)
        trained = any(each.trains for each in self._stack.active[depth:])
        self._taker.forget_levels(
            [f"{each}." for each in range(depth, number + 1)],
            caller,
            arriving=self._replay.is_under_way or not trained,
        )
        self._stack.pop(depth)
        if self._story.phase is Phase.TRIED and not self._stack.active:
            self._story.move(Move.LEAVE)
            self._taker.forget()
            self._replay = Replay(self._stack)
            self._has_snapshot, self.results_tried, self.first = False, 0, ""

    def _exit_abandoned(self, caller: FrameType, place: str = "") -> None:
        """Pop `while` loops that the script has left."""
        if self._stack.active and (depth := self._stack.find_abandoned(caller, place)) is not None:
            self._exit_loops(depth)

    # --- what the others have behind them ----------------------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        """Whether the first loop has begun, and the ranks have joined."""
        return self._story.phase not in {Phase.BEFORE, Phase.TRIED}

    @property
    def is_tried(self) -> bool:
        """Whether a loop has begun that may be the first."""
        return self._story.phase is Phase.TRIED

    @property
    def in_iteration(self) -> bool:
        """Whether an iteration has begun and its gradient is not reduced."""
        return self._story.phase is Phase.OPEN

    @property
    def is_resumable(self) -> bool:
        """Whether no gradient was reduced since the last snapshot, so that a new rank gets here from it."""
        return not self._reduced_since

    @property
    def is_reachable(self) -> bool:
        """Whether all results of collectives are known that a new rank has to be given."""
        return self._replay.points.reachable_points()[0].is_reachable

    def begin_iteration(self) -> None:
        """Record that an iteration begins; close the last snapshot if a new rank could not begin there any more."""
        place = self._stack.active[-1].place if self._stack.active else "the end"
        if self._story.phase is Phase.SEEKING:
            with self._refusing():
                there = self._replay.target.where.place
                raise NotCarriedError(
                    f"this process trains at {place} before it comes to {there}, where the others are"
                )
        self._stack.note_training()
        if reason := why_not_fed(self._stack.active):
            self._close_last_snapshot(reason)
        elif not self.is_resumable:
            self._close_last_snapshot(
                f"a statement in the body of the loop at {place} makes more than one update, and no process could come "
                "in between: give each a statement of its own"
            )
        elif self._taker.has_other_parameters:
            self._changing_places.add(place)  # from now on the snapshot is taken at the head
            self._close_last_snapshot(
                f"parameters are changed in the body of the loop at {place} before its forward pass, and not by an "
                "optimizer: a process that begins there would change them twice"
            )
        self._story.move(Move.BEGIN, place)

    def record_reduce(self) -> None:
        """Record that the gradient is about to be reduced, which ends a replay: all ranks are here."""
        self._story.move(Move.REDUCE)
        self._replay.given, self._reduced_since, self._taker.pending = False, True, True

    def record_update(self) -> None:
        """Record that an update was made."""
        self._story.move(Move.UPDATE)
        self._taker.updates, self._taker.pending = self._taker.updates + 1, False

    def _close_last_snapshot(self, why: str) -> None:
        """Publish why no new rank can continue from the last snapshot: state that all ranks share has changed since."""
        self.closed_reason = why
        self._publish_record(NotCarriedError(why))

    # --- gradients that are added to ---------------------------------------------------------------------------------

    @property
    def zeroed(self) -> bool:
        """Whether gradients that exist as an iteration begins are zero."""
        return self._taker.zeroed

    @zeroed.setter
    def zeroed(self, zeroed: bool) -> None:
        self._taker.zeroed = zeroed

    @property
    def missing_gradients(self) -> list[torch.nn.Parameter]:
        """Parameters whose gradient was not in the snapshot where this rank began, though it had one."""
        return self._taker.missing_gradients

    @property
    def gradients_uncertain(self) -> bool:
        """Whether gradients may be there to be made zero, and are not known to be there to have more added to them."""
        return not (self._taker.keeps_gradients or self._taker.pending)

    def include_gradients(self) -> None:
        """Put gradients into snapshots from now on, as the script adds to those of an earlier iteration."""
        self._taker.keeps_gradients = True
        if not self._taker.accumulates:
            self._close_last_snapshot("more is added to gradients of an iteration before, for the first time")

    # --- collectives -------------------------------------------------------------------------------------------------

    @property
    def replays_next(self) -> bool:
        """Whether the next collective is to be replayed: the others have run it already."""
        return self._replay.gives_next

    def replayed_result(self) -> Results | None:
        """Return the recorded results of the next collective; None where they are not known."""
        return self._replay.next_result()

    def record_result(self, results: Results | None) -> None:
        """Record the results of a collective, None if a rank that comes later can't be given them."""
        self.results_tried += self.is_tried
        self._replay.record_result(results)

    # --- the state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return where this script's last snapshots were taken, and the results of collectives since each of them."""
        return {
            "points": [each.to_dict() for each in self._replay.points.reachable_points()],
            "keeps": self._taker.keeps_gradients,
            "trains": sorted(self._stack.training),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin a replay to the newest of these points, unless this script is in a loop already.

        Raises:
            NotCarriedError: it has just begun to train, and the others are elsewhere.
        """
        self._taker.keeps_gradients |= state["keeps"]
        self._stack.training |= set(state["trains"])
        points = [Point.from_dict(each) for each in state["points"]]
        if self._confirming and points[0].chain != self.reachable_chains[0]:
            raise NotCarriedError(f"this process has begun to train at {self.first}, and the others are elsewhere")
        if not self._stack.active and self._story.phase in {Phase.BETWEEN, Phase.SEEKING}:
            self._replay.points.candidates = points
            self._replay.begin_at(points[0])
            if points[0].loops:
                self._story.move(Move.SEEK, points[0].chain[-1].place)

    @property
    def candidate_chains(self) -> list[Chain]:
        """The chains of loops at which this rank can begin, the best first; none where it begins at the top."""
        return self._replay.candidate_chains

    @property
    def reachable_chains(self) -> list[Chain]:
        """The chains of loops at which a rank that replaces another could begin, given the state of this one."""
        return [each.chain for each in self._replay.points.reachable_points()]

    def take_over(self, record: LoopSnapshot, arrive: Callable[[], None] = lambda: None) -> None:
        """Restore a replaced rank's record as this script comes to where it was taken; then call `arrive`."""
        self._replay.take_over(record, arrive)
