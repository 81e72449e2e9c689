"""Follows the loops of a script that may train: enters and leaves them, takes snapshots in them, and restores those.

The calls are those that the instrumented source makes (`unicron.train.loops.instrument`).
"""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

from unicron.train.carry.kinds import NotCarriedError
from unicron.train.loops.active_loops import HEAD, ActiveLoop, LoopSnapshot
from unicron.train.loops.loop_stack import LoopStack
from unicron.train.loops.phases import Move, Phase, Story
from unicron.train.loops.replay import Replay
from unicron.train.loops.snapshot_taker import SnapshotTaker


class LoopFollower:
    """Follows the loops.

    Args:
        publish_record: publishes this rank's own record, or the reason why there is none, where it outlives the rank.

    Attributes:
        story: the phase of the script.
        stack: its active loops.
        taker: of its snapshots.
        replay: the way to where others are.
        closed_reason: why no new rank can continue from the last snapshot; empty where one can.
        abandon: is called with an error that the script is not to see.
    """

    def __init__(self, publish_record: Callable[[LoopSnapshot | NotCarriedError], None]) -> None:
        self._publish_record = publish_record
        self.abandon: Callable[[Exception], None] = lambda _: None
        self.story, self.stack = Story(), LoopStack()
        self.taker = SnapshotTaker(self.stack)
        self.replay, self.closed_reason = Replay(self.stack), ""
        self._has_inner_loop: dict[str, bool] = {}
        self._changing_places = set[str]()
        self._reduced_since = self._has_snapshot = False
        self._updates_at_point = self._updates_at_end = 0

    @property
    def has_begun(self) -> bool:
        """Whether the first loop has begun, and the ranks have joined."""
        return self.story.phase not in {Phase.BEFORE, Phase.TRIED}

    @property
    def is_tried(self) -> bool:
        """Whether a loop has begun that may be the first."""
        return self.story.phase is Phase.TRIED

    @property
    def in_iteration(self) -> bool:
        """Whether an iteration has begun and its gradient is not reduced."""
        return self.story.phase is Phase.OPEN

    # --- what the script calls ------------------------------------------------------------

    def should_test(self, place: str) -> bool:
        """Return whether a `while` loop's test is to be evaluated; not where the other ranks have left the loop.

        What the test makes as the loop begins gets no number: where the others are in it, a new rank evaluates none.
        """
        caller = sys._getframe(1)  # noqa: SLF001
        self.exit_abandoned(caller, place)
        at, index = self.stack.innermost, self.stack.next_index(place)
        if at is not None and at.place == place and at.frame is caller:
            return True
        if not self.replay.is_due or self.replay.target.where.is_loop(place, index):
            if place not in self.stack.idle:
                self._number_before(place, index, caller)
            return True
        self.stack.count_begin(place)
        return False

    def should_enter(self, place: str) -> bool:
        """Return whether a `while` loop's body is to be entered whatever its test says: the others are in it."""
        return self.replay.is_due and self.replay.target.where.is_loop(place, self.stack.next_index(place))

    def at_head(self, place: str, last: int | None, *dead: str) -> None:
        """Take a snapshot at the head of a loop's body, or restore there that of the rank which this one replaces.

        Args:
            place: of the loop.
            last: line at which it ends, if it does not say so by itself.
            dead: variables that are set anew before anybody reads them.
        """
        caller = sys._getframe(1)  # noqa: SLF001
        self.exit_abandoned(caller, place)
        at = self.stack.innermost
        if last is not None:
            if (at is None or at.place != place) and place not in self.stack.idle:
                at = self.enter_loop(place, caller, last)
            if at is not None and at.place == place:
                at.count += 1
        if at is None or at.place != place or at.is_fed:
            return
        if at.has_begun:
            self._has_inner_loop[place] = at.had_inner_loop
            self.stack.note_body(at)
        at.has_begun, at.had_inner_loop = True, False
        self.stack.reset_counts()
        has_inner_loop = self._has_inner_loop.get(place, True)
        if self.replay.is_at_innermost:
            where = self.replay.target.where
            if not where.is_loop(place, at.index):
                with self.refusing():
                    raise NotCarriedError(
                        f"the others are at {where.place}, and this process comes to {place} before that"
                    )
            at.count = where.round
            if where.point == HEAD:
                self._restore_at(at, caller, ends=True)
        elif not (place in self.stack.idle or self.stack.is_passed or self.stack.is_aside) and (
            has_inner_loop or (not self.in_iteration and (self._reduced_since or not self._has_snapshot))
        ):
            self._take_snapshot(at, caller, HEAD, dead, leaves=not self.in_iteration)

    def should_run(self, place: str, point: int) -> bool:
        """Return whether the statements before a point of a body are to be run: a new rank may begin after them."""
        at = self.stack.innermost
        if not self.replay.is_at_innermost or at is None or at.place != place:
            return True
        return self.replay.target.where.point < point

    def begins_between(self, place: str, first: int, last: int) -> bool:
        """Return whether this rank is to begin at one of these points, which are in a branch of an `if`."""
        at = self.stack.innermost
        if not self.replay.is_at_innermost or at is None or at.place != place:
            return False
        return first <= self.replay.target.where.point <= last

    def after_update(self, place: str, point: int, long: bool, *dead: str) -> None:
        """Take a snapshot if an update was made since the last one, or restore that of the replaced rank.

        Args:
            place: of the loop.
            point: in its body.
            long: what follows in it may take long; else the end of the body is soon, and will do where nobody could
                begin here.
            dead: variables that are set anew before anybody reads them.
        """
        if self.replay.is_under_way or self.taker.updates > self._updates_at_point:
            self._at_point(sys._getframe(1), place, point, dead, needed=long)  # noqa: SLF001

    def at_end(self, place: str, point: int, *dead: str) -> None:
        """Do so at the end of a loop's body, if an update was made since the end of the last body."""
        if self.replay.is_under_way or self.taker.updates > self._updates_at_end:
            self._at_point(sys._getframe(1), place, point, dead, needed=True, ends=True)  # noqa: SLF001

    def _at_point(
        self, caller: FrameType, place: str, point: int, dead: Iterable[str], *, needed: bool, ends: bool = False
    ) -> None:
        self.exit_abandoned(caller, place)
        at = self.stack.innermost
        if at is None or at.place != place or at.is_fed or self.stack.is_aside:
            return
        self._updates_at_point = self.taker.updates
        if ends:
            self._updates_at_end = self.taker.updates
        if not self.replay.is_under_way:
            if not self.in_iteration and place not in self._changing_places:
                self._take_snapshot(at, caller, point, dead, leaves=True, needed=needed)
        elif self.replay.is_at_innermost and self.replay.target.where.point == point:
            self._restore_at(at, caller, ends=ends)

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Publish why this rank can't take over the one that it replaces, if it can't: all are to begin again."""
        try:
            yield
        except NotCarriedError as error:
            self._publish_record(error)
            self.abandon(error)
            raise

    def _restore_at(self, at: ActiveLoop, caller: FrameType, *, ends: bool) -> None:
        """Restore the snapshot that the replaced rank took at this point of a loop's body.

        Args:
            at: the loop.
            caller: what runs it.
            ends: a body has ended there; else the rank took another snapshot at its end, as a second optimizer may
                have made its update in between.

        Raises:
            NotCarriedError: this process has made something else on the way.
        """
        with self.refusing():
            self.taker.restore(caller, self.replay.snapshot, ends=self.replay.ends_next)
        if self.replay.reach(at):
            self.story.move(Move.ARRIVE, at.place)
            self.taker.note_parameters()
            self._has_snapshot, self._reduced_since = True, False
            self._updates_at_point = self.taker.updates
            self._updates_at_end = self.taker.updates - (not ends)
            self.replay.arrive()

    def _take_snapshot(
        self, at: ActiveLoop, caller: FrameType, point: int, dead: Iterable[str], *, leaves: bool, needed: bool = True
    ) -> None:
        """Take this rank's snapshot at a point of a loop's body; if it `leaves` it where it outlives it, publish it."""
        lasts = self._has_inner_loop.get(at.place, True)
        if not self.taker.take(at, caller, point, dead, leaves=leaves, needed=needed, lasts=lasts):
            return
        self.stack.reset_counts()
        if leaves:
            alone = self._reduced_since or self.taker.has_other_parameters
            self.replay.points.add(self.replay.present_point(), alone=alone)
            self.taker.note_parameters()
            self.closed_reason, self._has_snapshot, self._reduced_since = "", True, False
            if self.taker.can_take and self.has_begun:
                self._publish_record(self.taker.record(self.stack.active))

    # --- entering and leaving loops ----------------------------------------------------------------------------------

    def enter_loop(self, place: str, caller: FrameType, last: int | None) -> ActiveLoop:
        """Push a loop; objects made on the way to it are numbered, as a new rank makes them, too."""
        index = self.stack.next_index(place)
        self.stack.count_begin(place)
        if last is None:
            self._number_before(place, index, caller)
        return self.stack.push(place, index, caller, last)

    def _number_before(self, place: str, index: int, caller: FrameType) -> None:
        depth = len(self.stack.active)
        if depth or index:  # else all is numbered
            self.taker.number_before(caller, f"{depth}.{place}#{index}")

    def exit_loops(self, depth: int) -> None:
        """Pop the loops from this depth on; a first one that was tried, and has not trained, is forgotten."""
        caller, number = self.stack.active[depth].frame, len(self.stack.active)
        trained = any(each.trains for each in self.stack.active[depth:])
        for at, within in zip(self.stack.active[depth:], [*self.stack.active[depth + 1 :], None], strict=True):
            if at.has_begun:  # a loop of one item each time comes to no other head
                self._has_inner_loop[at.place] = at.had_inner_loop or within is not None
        self.taker.forget_levels(
            [f"{each}." for each in range(depth, number + 1)],
            caller,
            arriving=self.replay.is_under_way or not trained,
        )
        self.stack.pop(depth)
        if self.story.phase is Phase.TRIED and not self.stack.active:
            self.story.move(Move.LEAVE)
            self.taker.forget()
            self.replay, self._has_snapshot = Replay(self.stack), False

    def exit_abandoned(self, caller: FrameType, place: str = "") -> None:
        """Pop `while` loops that the script has left."""
        if self.stack.active and (depth := self.stack.find_abandoned(caller, place)) is not None:
            self.exit_loops(depth)
