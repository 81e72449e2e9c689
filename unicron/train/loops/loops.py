"""Positions of a script in its training loops, so that a worker that is started later begins there.

At the end of a loop's body that has made an update each rank takes a snapshot of its own script, and leaves it where it
outlives the rank. Its replacement goes to that position, by way of the heads of the loops around it.

Which loops train shows as an iteration begins in them. So the first loop that may train is tried: the script's state is
numbered as it begins, and the ranks join once it has trained, or it is forgotten if it ends before. A replacement is
told which loop that was, and of all others which ones train.
"""

import functools
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from types import FrameType
from typing import Any

import torch

from unicron.train.carry.kinds import NotCarriedError
from unicron.train.carry.objects import Call
from unicron.train.carry.randomness import seed
from unicron.train.loops.active_loops import Chain, LoopSnapshot
from unicron.train.loops.collective_results import Results
from unicron.train.loops.follower import LoopFollower
from unicron.train.loops.handing import HandingLoop
from unicron.train.loops.items import items_of
from unicron.train.loops.layers import peel
from unicron.train.loops.phases import Move, Phase
from unicron.train.loops.positions import RUNNING, Counted
from unicron.train.loops.snapshot_points import Point
from unicron.train.loops.unfollowed import own_frames, unfollowed_reason, why_asked, why_not_fed

TRIES = 8
"""How often a loop may begin and not train before that is taken for certain."""


class Loops(LoopFollower):
    """The training loops of a script that are under way, the outermost first. It is protected as a model is.

    Args:
        rank: of the program; what is random differs by rank.
        prepare: is called as the first of them begins. It returns the script's objects whose state is transferred by
            other means (models, optimizers), those that `join_ranks` changes, and, by name, those that go with the
            snapshots though no variable leads to them, and evidence of tensors whose copies do.
        join_ranks: is called once it is known that this one trains, to form groups with the other ranks and to load
            their state.
        publish_record: publishes this rank's own record, or the reason why there is none, where it outlives the rank.
        is_ready: returns whether the script has made all that is needed to train.

    Attributes:
        begun: the loop that the script has asked for last is followed.
        first: the first loop that trains, and how often the loop there has begun by then; empty before it is known.
        results_tried: how many collectives have ended in a first loop that is tried.
    """

    def __init__(
        self,
        rank: int,
        prepare: Callable[[], tuple[Iterable[Any], Iterable[Any], dict[str, Any], Collection[str]]],
        join_ranks: Callable[[], None],
        publish_record: Callable[[LoopSnapshot | NotCarriedError], None],
        is_ready: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__(publish_record)
        self._prepare, self._join_ranks, self._is_ready = prepare, join_ranks, is_ready
        self._confirming = self.begun = False
        self.first, self._told, self._begins = "", "", dict[str, int]()
        self.results_tried, self._too_early = 0, set[str]()
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
            handing = iterable if isinstance(iterable, HandingLoop) else None
            over = peel(handing.over if handing is not None else iterable, numbered=numbered)
            found: Iterable[Any] = items_of(self, place, caller, *over, handing)
        else:
            found = enumerate(iterable) if numbered else iterable
        self.begun = begun
        return found

    def begin_while(self, place: str, certain: bool) -> bool:
        """Return whether a `while` loop that begins is followed."""
        return self._follows(place, sys._getframe(1), certain=certain)  # noqa: SLF001

    def begin_body(self, place: str) -> bool:
        """Return whether a function is followed of which several statements train, as the body of a loop is."""
        follows = self._is_here and self.story.phase is not Phase.BEFORE and not self.stack.is_consuming
        if follows:
            self.stack.training.add(place)
        return follows

    @property
    def _is_here(self) -> bool:
        """Whether this is the thread of the process that runs the script's loops."""
        return threading.get_ident() == self._thread

    def _follows(self, place: str, caller: FrameType, *, certain: bool) -> bool:
        """Return whether a loop that begins is followed; if it is the first one, begin with that."""
        if not self._is_here:
            return False
        self.exit_abandoned(caller)
        if certain:
            self.stack.training.add(place)
        phase, number = self.story.phase, self._begins.get(place, 0) + 1
        self._begins[place] = number
        if number <= TRIES:
            self.stack.idle.discard(place)
        if phase is Phase.BEFORE:
            return self._is_first(place, number, caller, certain=certain)
        if phase is Phase.SEEKING:
            follows = place in self.stack.training or self.replay.is_wanted(place)
        else:
            follows = self.stack.may_train(place)
            follows &= phase is Phase.TRIED or place in self.stack.training or not self.stack.is_drawing
        if not follows:
            self.stack.count_begin(place)
        return follows

    def _is_first(self, place: str, number: int, caller: FrameType, *, certain: bool) -> bool:
        """Number what there is if a loop is the first that trains, or may; if that is known, join the other ranks."""
        here = f"{place}#{number}"
        if self._told:
            follows = here == self._told
        else:
            follows = self.stack.may_train(place) and self._is_ready()
            (self._too_early.discard if follows else self._too_early.add)(place)
        if not follows:
            return False
        self.story.move(Move.TRY, here)
        self.first = here
        self.results_tried = 0
        self._unnumbered = self.taker.number(caller, *self._prepare())
        if certain or self._told:
            self._begin()
        return True

    def _begin(self) -> None:
        self.story.move(Move.START, self.first)
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
        self.exit_abandoned(next(iter(own_frames(caller)), caller))
        if self._told:
            raise NotCarriedError(f"this process trains before it comes to {self._told}, where the others began to")
        reason = why_asked(self.stack) or unfollowed_reason(caller, self.stack.active, self._too_early)
        if not reason:
            self.replay.note_training()
            reason = why_not_fed(self.stack.active)
        if reason:
            return reason
        has_changed = self.taker.has_other_given
        self._confirming = True
        self._begin()
        self._confirming = False
        self.taker.note_parameters()
        if has_changed:
            self._close_last_snapshot(
                f"a model is changed in the body of the loop at {self.stack.active[-1].place} before its first forward "
                "pass: a process that begins there would change it twice"
            )
        elif self.taker.can_take:
            self._publish_record(self.taker.record(self.stack.active))
        return ""

    def start_unfollowed(self) -> None:
        """Join the ranks without a loop that is followed: no snapshot is ever taken."""
        self.first = "nowhere"
        self.story.move(Move.START, self.first)
        self._join_ranks()

    def handing_loop(self, place: str, over: Iterable[Any], number: int, *handed: str) -> Iterable[Any]:
        """Return what a loop of a generator goes over that hands its items out as they are.

        Args:
            place: of it.
            over: what it goes over.
            number: of such loops of the generator, each in the one before.
            handed: the variables that those set.
        """
        generator = RUNNING[-1] if RUNNING else None
        if generator is None or generator.frame is not sys._getframe(1):  # noqa: SLF001
            return over
        if not generator.note_loops(number, handed):
            self.taker.number_made(generator)
        return HandingLoop(generator, place, over)

    @property
    def is_entering(self) -> bool:
        """Whether a generator is just being entered in its loops, so that what is before its `yield` is left out."""
        return bool(RUNNING) and RUNNING[-1].entering is not None

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
    def is_resumable(self) -> bool:
        """Whether no gradient was reduced since the last snapshot, so that a new rank gets here from it."""
        return not self._reduced_since

    @property
    def is_reachable(self) -> bool:
        """Whether all results of collectives are known that a new rank has to be given."""
        return self.replay.points.reachable_points()[0].is_reachable

    def begin_iteration(self) -> None:
        """Record that an iteration begins; close the last snapshot if a new rank could not begin there any more."""
        place = self.stack.active[-1].place if self.stack.active else "the end"
        if self.story.phase is Phase.SEEKING:
            with self.refusing():
                there = self.replay.target.where.place
                raise NotCarriedError(
                    f"this process trains at {place} before it comes to {there}, where the others are"
                )
        self.replay.note_training()
        if reason := why_asked(self.stack) or why_not_fed(self.stack.active):
            self._close_last_snapshot(reason)
        elif not self.is_resumable:
            self._close_last_snapshot(
                f"gradients are reduced more than once for an update in the body of the loop at {place}, and no "
                "process could come in between: add the losses up for one backward pass"
                if self.taker.pending
                else f"a statement in the body of the loop at {place} makes more than one update, and no process could "
                "come in between: give each a statement of its own"
            )
        elif self.taker.has_other_parameters:
            self._changing_places.add(place)  # from now on the snapshot is taken at the head
            self._close_last_snapshot(
                f"parameters are changed in the body of the loop at {place} before its forward pass, and not by an "
                "optimizer: a process that begins there would change them twice"
            )
        self.story.move(Move.BEGIN, place)

    def record_reduce(self) -> None:
        """Record that the gradient is about to be reduced, which ends a replay: all ranks are here."""
        self.story.move(Move.REDUCE)
        self.replay.given, self._reduced_since, self.taker.pending = False, True, True

    def record_update(self) -> None:
        """Record that an update was made."""
        self.story.move(Move.UPDATE)
        self.taker.updates, self.taker.pending = self.taker.updates + 1, False

    def _close_last_snapshot(self, why: str) -> None:
        """Publish why no new rank can continue from the last snapshot: state that all ranks share has changed since."""
        self.closed_reason = why
        self._publish_record(NotCarriedError(why))

    # --- gradients that are added to ---------------------------------------------------------------------------------

    @property
    def zeroed(self) -> bool:
        """Whether gradients that exist as an iteration begins are zero."""
        return self.taker.zeroed

    @zeroed.setter
    def zeroed(self, zeroed: bool) -> None:
        self.taker.zeroed = zeroed

    @property
    def missing_gradients(self) -> list[torch.nn.Parameter]:
        """Parameters whose gradient was not in the snapshot where this rank began, though it had one."""
        return self.taker.missing_gradients

    @property
    def gradients_uncertain(self) -> bool:
        """Whether gradients may be there to be made zero, and are not known to be there to have more added to them."""
        return not (self.taker.keeps_gradients or self.taker.pending)

    def include_gradients(self) -> None:
        """Put gradients into snapshots from now on, as the script adds to those of an earlier iteration."""
        self.taker.keeps_gradients = True
        if not self.taker.accumulates:
            self._close_last_snapshot("more is added to gradients of an iteration before, for the first time")

    # --- collectives -------------------------------------------------------------------------------------------------

    @property
    def replays_next(self) -> bool:
        """Whether the next collective is to be replayed: the others have run it already."""
        return self.replay.gives_next

    def replayed_result(self) -> Results | None:
        """Return the recorded results of the next collective; None where they are not known."""
        return self.replay.next_result()

    def record_result(self, results: Results | None) -> None:
        """Record the results of a collective, None if a rank that comes later can't be given them."""
        self.results_tried += self.is_tried
        self.replay.record_result(results)

    # --- the state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return where this script's last snapshots were taken, and the results of collectives since each of them."""
        return {
            "points": [each.to_dict() for each in self.replay.points.reachable_points()],
            "keeps": self.taker.keeps_gradients,
            "trains": sorted(self.stack.training),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin a replay to the newest of these points, unless this script is in a loop already.

        Raises:
            NotCarriedError: it has just begun to train, and the others are elsewhere.
        """
        self.taker.keeps_gradients |= state["keeps"]
        self.stack.training |= set(state["trains"])
        points = [Point.from_dict(each) for each in state["points"]]
        if self._confirming and points[0].chain != self.reachable_chains[0]:
            raise NotCarriedError(f"this process has begun to train at {self.first}, and the others are elsewhere")
        if not self.stack.active and self.story.phase in {Phase.BETWEEN, Phase.SEEKING}:
            self.replay.points.candidates = points
            self.replay.begin_at(points[0])
            if points[0].loops:
                self.story.move(Move.SEEK, points[0].chain[-1].place)

    @property
    def candidate_chains(self) -> list[Chain]:
        """The chains of loops at which this rank can begin, the best first; none where it begins at the top."""
        return self.replay.candidate_chains

    @property
    def reachable_chains(self) -> list[Chain]:
        """The chains of loops at which a rank that replaces another could begin, given the state of this one."""
        return [each.chain for each in self.replay.points.reachable_points()]

    def take_over(self, record: LoopSnapshot, arrive: Callable[[], None] = lambda: None) -> None:
        """Restore a replaced rank's record as this script comes to where it was taken; then call `arrive`."""
        self.replay.take_over(record, arrive)
