"""The items of a `for` loop that is followed, from the one at which this process is to begin."""

from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

from unicron.train.carry.kinds import NotCarriedError, OwnCheckpointNewerError
from unicron.train.loops.active_loops import DRAWING, ActiveLoop
from unicron.train.loops.collective_results import KnownResults
from unicron.train.loops.follower import LoopFollower
from unicron.train.loops.handing import HandingLoop
from unicron.train.loops.layers import Layer, wrapped
from unicron.train.loops.phases import Phase
from unicron.train.loops.positions import Counted, counts_up


def items_of(
    follower: LoopFollower,
    place: str,
    caller: FrameType,
    over: Iterable[Any],
    layers: list[Layer],
    handing: HandingLoop | None = None,
) -> Iterator[Any]:
    """Yield the items of a loop, and note as it is left.

    Args:
        follower: of the script's loops.
        place: of this one.
        caller: runs it.
        over: what it iterates over.
        layers: around that.
        handing: of a generator that hands out the loop's items.
    """
    at, replay = follower.enter_loop(place, caller, None), follower.replay
    try:
        wanted = replay.is_at_innermost
        if wanted and not replay.target.where.is_loop(place, at.index):
            return  # the others have it behind them
        if wanted:
            at.iterator_results = KnownResults(replay.target.drawn)
        at.is_drawing = True
        at.iterator = position = Counted(over, [])  # what it is given is noted as `drawn`
        if handing is not None:
            handing.begin(lambda: position)
        counts = counts_up(over)
        resumed = _resume(follower, at, layers) if wanted else ()
        for number, item in _numbered(follower, at, resumed, layers):
            at.count, at.item = number, item if counts else None
            yield wrapped(layers, number, item)
            for each in layers:
                each.begin_next()
    finally:
        if at.iterator is not None:
            at.iterator.is_left = True
        for each in layers:
            each.close()
        if at in follower.stack.active:
            follower.exit_loops(follower.stack.active.index(at))


def _numbered(
    follower: LoopFollower, at: ActiveLoop, resumed: Iterable[tuple[int, Any]], layers: list[Layer]
) -> Iterator[tuple[int, Any]]:
    """Yield those items that are there already, and then what the loop's iterator finds, each with its number."""
    yield from resumed
    while at.iterator is not None and not any(each.is_over(at.count) for each in layers):
        at.is_drawing = True
        try:
            item = next(at.iterator)
        except StopIteration:
            return
        finally:
            _end_drawing(follower, at)
        yield at.count + 1, item


def _end_drawing(follower: LoopFollower, at: ActiveLoop) -> None:
    """Leave the loops that have run in an iterator as it found an item, unless those train.

    Raises:
        NotCarriedError: the other ranks train in there, and this one has not come to that.
    """
    at.is_drawing, stack = False, follower.stack
    if at in stack.active and stack.innermost is not at and not at.is_fed:
        follower.exit_loops(stack.active.index(at) + 1)
    if at.is_fed and follower.story.phase is Phase.SEEKING:
        with follower.refusing():
            raise NotCarriedError(f"what the loop at {at.place} goes over hands out items before it trains")


def _resume(follower: LoopFollower, at: ActiveLoop, layers: list[Layer]) -> list[tuple[int, Any]]:
    """Bring a loop's iterator to where the other ranks' are; return the item whose body they are in, with its number.

    What this process's iterator has handed out beyond that follows it. Where the others train in the iterator, there is
    no such item: it is entered as the next one is asked for.
    """
    where = follower.replay.target.where
    if where.point == DRAWING:
        follower.replay.enter_fed(at)
        if at.iterator is not None:
            at.iterator.count = at.count
        return []
    with follower.refusing():
        found = _resume_items(follower, at)
    _end_drawing(follower, at)
    for each in layers:
        each.resume(where.round)
    return found


def _resume_items(follower: LoopFollower, at: ActiveLoop) -> list[tuple[int, Any]]:
    where, number, *_ = follower.replay.target
    position, record = at.iterator, follower.replay.record
    if position is None or record is None:
        raise NotCarriedError("there is no snapshot of the rank that is replaced")
    if number is None:
        try:
            item = follower.taker.advance(position, record.positions[follower.replay.depth])
        except NotCarriedError as error:
            raise NotCarriedError(f"{error} (what the loop at {at.place} goes over)") from error
        return [(where.round, item)]
    # a script that has begun from a checkpoint of its own counts from there
    item = first = next(position, None)
    over = position.iterable
    if first != number + 1 and isinstance(over, range) and number not in over:
        item = None  # which a range of a million says at once
    while item is not None and item != number and first != number + 1:
        item = next(position, None)
    if item is None:
        newer = isinstance(first, int) and first > number
        text = f"the others are at {number} of the loop at {at.place}, which has no such here"
        own = f"{text}, as this script has begun from a checkpoint of its own that is newer"
        raise OwnCheckpointNewerError(own) if newer else NotCarriedError(text)
    later = (first,) * (item != number)  # its checkpoint is of the end of this one
    position.count = where.round + len(later)  # as of one that has counted from the top
    return [*enumerate((number, *later), where.round)]
