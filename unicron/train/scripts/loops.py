"""Where a script is in its training loops, so that a worker that is started later begins there, and not at the top.

At the end of a loop's body that has made an update each rank takes a snapshot of its own script, and leaves it where it
outlives the rank. Whoever replaces it goes to where that was, by way of the heads of the loops around it.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch

from unicron.train.scripts.heard import KnownResults, Results
from unicron.train.scripts.instrument import NAME
from unicron.train.scripts.kinds import NotCarriedError, OwnCheckpointNewerError
from unicron.train.scripts.limit import TimeLimit
from unicron.train.scripts.objects import Call
from unicron.train.scripts.own_snapshot import Heap
from unicron.train.scripts.points import Point, Points, known
from unicron.train.scripts.positions import RUNNING, Counted
from unicron.train.scripts.program import LIBRARIES
from unicron.train.scripts.randomness import seed
from unicron.train.scripts.under_way import Chain, LoopSnapshot, LoopUnderWay
from unicron.train.scripts.variables import Variables, spaces_of
from unicron.train.worker.injected import InjectedFault

EARLY, SMALL_BYTES = 4, 8 << 20
"""Updates before which snapshots have gradients of so many bytes: more may be added to them, which shows later."""


class Loops:
    """The training loops of a script that are under way, the outermost first. It is protected as a model is.

    Args:
        rank: of the program; what is random differs by rank.
        prepare: called as the first of them begins; it returns what of the script's objects goes another way, and what
            `meet` changes.
        meet: called then, to meet the other ranks and to have the state that they have.
        leave: leaves this rank's own record, or the reason why there is none, where it outlives the rank.

    Attributes:
        behind: the others have collectives behind them that this rank, which began later, is yet to come to.
        accumulates: the last snapshot has gradients, to which more is added.
        zeroed: gradients that are there as an iteration begins are zero.
        closed: why no new rank can come to the last snapshot; empty where it can.
    """

    def __init__(
        self,
        rank: int,
        prepare: Callable[[], tuple[Iterable[Any], Iterable[Any]]],
        meet: Callable[[], None],
        leave: Callable[[LoopSnapshot | NotCarriedError], None],
    ) -> None:
        self._prepare, self._meet, self._leave_record = prepare, meet, leave
        self._begun = False
        self._under_way: list[LoopUnderWay] = []
        self._indices = [0]
        self._nested: dict[str, bool] = {}
        self._modules: dict[str, dict[str, Any]] = {}
        self._heap: Heap | None = None
        self._to: list[list[Any]] = []
        self._record: LoopSnapshot | None = None
        self._arrive: Callable[[], None] = lambda: None
        self._reached = 0
        self._outside = KnownResults()
        self._points = Points()
        self._within = self._reduced = self._pending = False
        self._updates = self._seen = self._ended = 0
        self._taken, self._versions, self._changes = False, 0, set[str]()
        self.behind = self.accumulates = self.zeroed = self._keeps = False
        self.closed = ""
        self._limit, self._too_slow = TimeLimit(), None
        seed(rank)

    _too_slow: NotCarriedError | None

    # --- what the script calls ---------------------------------------------------------------------------------------

    def over(self, place: str, iterable: Iterable[Any], numbered: bool) -> Iterator[Any]:
        """Hand out what a loop goes over, from where this worker is to begin."""
        caller = sys._getframe(1)  # noqa: SLF001 there is no other way to a script's variables
        self._start(caller)
        self._leave_what_is_over(caller)
        at = self._enter(place, caller, None)
        depth = len(self._under_way) - 1
        try:
            to = self._to[depth] if self._to and depth == self._reached else None
            if to is not None and to[:2] != [place, at.index]:
                return  # the others have it behind them
            if to is not None:
                at.drawn = KnownResults(to[5])
            at.draws = True
            position = at.position = Counted(iterable, [])  # what it is given is noted as `drawn`
            if to is not None:
                yield from self._first(at, to, position, numbered, iterable)
            while True:
                at.draws = True
                try:
                    item = next(position)
                except StopIteration:
                    break
                finally:
                    at.draws = False
                at.count += 1
                at.item = item if type(item) is int else None
                yield (at.count - 1, item) if numbered else item
        finally:
            self._leave(depth)

    def _first(
        self, at: LoopUnderWay, to: list[Any], position: Counted, numbered: bool, iterable: Iterable[Any]
    ) -> Iterator[Any]:
        """Hand out what the others' bodies are about."""
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
                error = OwnCheckpointNewerError(own) if newer else NotCarriedError(text)
                self._leave_record(error)
                raise error
            item, later = number, (first,) * (item != number)  # its checkpoint is of the end of this one
        elif self._record is not None:
            item = position.go_to(self._heap.unpacked(self._record.positions[self._reached]) if self._heap else {})
        at.draws = False
        at.count, at.item = count, number
        yield (count - 1, item) if numbered else item
        for item in later:
            at.count, at.item = at.count + 1, item
            yield (at.count - 1, item) if numbered else item

    def still(self, place: str) -> bool:
        """Return whether a `while` loop is to be looked at; where the others have it behind them, it is not."""
        caller = sys._getframe(1)  # noqa: SLF001
        self._start(caller)
        self._leave_what_is_over(caller, place)
        depth = len(self._under_way)
        if depth > 0 and self._under_way[-1].place == place and self._under_way[-1].frame is caller:
            return True
        if not self._to or depth != self._reached or self._to[depth][:2] == [place, self._indices[depth]]:
            return True
        self._indices[depth] += 1
        return False

    def enters(self, place: str) -> bool:
        """Return whether a `while` loop's body begins whatever its test says: the others are in there."""
        depth = len(self._under_way)
        return bool(self._to) and depth == self._reached and self._to[depth][:2] == [place, self._indices[depth]]

    def head(self, place: str, last: int | None, *dead: str) -> None:
        """Note where the script is, or have its variables be what they were on the rank that this one replaces.

        Args:
            place: of the loop.
            last: line at which it ends, if it does not say so by itself.
            dead: variables that are set anew before anybody reads them.
        """
        caller = sys._getframe(1)  # noqa: SLF001
        self._start(caller)
        self._leave_what_is_over(caller, place)
        if last is not None:
            if not self._under_way or self._under_way[-1].place != place:
                self._enter(place, caller, last)
            self._under_way[-1].count += 1
        depth, at = len(self._under_way) - 1, self._under_way[-1]
        if at.begun:
            self._nested[place] = at.inner
        at.begun, at.inner = True, False
        self._indices[depth + 1 :] = [0]
        if self._to and depth == self._reached:
            there, index, count, point, *_ = self._to[depth]
            if [there, index] != [place, at.index]:
                error = NotCarriedError(f"the others are at {there}, and this process comes to {place} before that")
                self._leave_record(error)
                raise error
            at.count = count
            if point == 0:
                self._become(at, caller)
        elif self._nested.get(place, True) or (not self._within and (self._reduced or not self._taken)):
            self._take(at, caller, 0, dead, leaves=not self._within)

    def due(self, place: str, point: int) -> bool:
        """Return whether the statements before a point of a body are to be run: a new rank may begin behind them."""
        if not self._to or len(self._under_way) - 1 != self._reached or self._under_way[-1].place != place:
            return True
        return bool(self._to[self._reached][3] < point)

    def behind_update(self, place: str, point: int, long: bool, *dead: str) -> None:
        """Note where the script is, if an update was made since its last snapshot, or be there in another's place.

        Args:
            place: of the loop.
            point: in its body.
            long: what follows in it may take long; else the end of the body is soon, and will do where nobody could
                begin here.
            dead: variables that are set anew before anybody reads them.
        """
        if self._to or self._updates > self._seen:
            self._seen = self._updates
            self._stand(sys._getframe(1), place, point, dead, needed=long)  # noqa: SLF001

    def end(self, place: str, point: int, *dead: str) -> None:
        """Do so at the end of a loop's body, if one was made since that of the last."""
        if self._to or self._updates > self._ended:
            self._ended = self._seen = self._updates
            self._stand(sys._getframe(1), place, point, dead, needed=True)  # noqa: SLF001

    def _stand(self, caller: FrameType, place: str, point: int, dead: Iterable[str], *, needed: bool) -> None:
        self._leave_what_is_over(caller, place)
        at = self._under_way[-1] if self._under_way else None
        if at is None or at.place != place:
            return
        if not self._to:
            if not self._within and place not in self._changes:
                self._take(at, caller, point, dead, leaves=True, needed=needed)
        elif len(self._under_way) - 1 == self._reached and self._to[self._reached][3] == point:
            self._become(at, caller)

    def _become(self, at: LoopUnderWay, caller: FrameType) -> None:
        """Be as the rank was that this one replaces, at a point of this loop's body.

        Raises:
            NotCarriedError: this process has made something else on the way.
        """
        depth = self._reached
        _, _, at.count, point, at.item, _, heard = self._to[depth]
        if self._record is None or self._heap is None:
            error = NotCarriedError("there is no snapshot of the rank that is replaced, or none can be taken here")
            self._leave_record(error)
            raise error
        try:
            self.accumulates = self._heap.restore(self._spaces(caller), self._record.snapshots[depth])
            self._heap.note(self._spaces(caller))
        except NotCarriedError as error:
            self._leave_record(error)
            raise
        at.note(point)
        at.snapshot, at.heard = self._record.snapshots[depth], KnownResults(heard)
        self._reached = depth + 1
        self._indices[depth + 1 :] = [0]
        if self._reached == len(self._to):
            self._points.begin_at({"loops": self._to, "outside": self._outside.saved()}, self._points.since)
            self._versions = self._heap.versions
            self._to, self._reached, self._record = [], 0, None
            self._taken, self._reduced, self._seen, self._ended = True, False, self._updates, self._updates
            self._arrive()

    def _take(
        self, at: LoopUnderWay, caller: FrameType, point: int, dead: Iterable[str], *, leaves: bool, needed: bool = True
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
        accumulates = (self._keeps or self._pending or early) if leaves else self.accumulates
        snapshot, refused = at.snapshot, self._too_slow
        if self._heap is not None and not refused:
            try:
                with self._limit.inside():
                    spaces = self._spaces(caller)
                    never = {name: set(dead) for name, space in spaces.items() if space.runs(caller)}
                    snapshot = self._heap.snapshot(spaces, never, gradients=leaves and accumulates, zeroed=self.zeroed)
                    if self._nested.get(at.place, True):  # it takes long
                        self._heap.note(spaces)
            except InjectedFault:
                raise
            except Exception as raised:  # noqa: BLE001 whatever a script's objects raise, it goes on without a snapshot
                error = raised if isinstance(raised, NotCarriedError) else NotCarriedError(repr(raised))
                if self._limit.exceeded:  # it would in each iteration
                    self._too_slow = error
                if not needed:
                    return
                refused = error
        at.note(point)
        at.snapshot, at.refused, self.accumulates = snapshot, refused, accumulates
        self._indices[len(self._under_way) :] = [0]
        if leaves:
            versions = self._heap.versions if self._heap is not None else 0
            self._points.add(self._where(), alone=self._reduced or versions != self._versions)
            self._versions, self.closed = versions, ""
            self._taken, self._reduced = True, False
            if self._heap is not None:
                self._leave_record(self._made())

    def _made(self) -> LoopSnapshot | NotCarriedError:
        """Return a record of where this rank is, or why there is none."""
        if refused := next((each.refused for each in self._under_way if each.refused is not None), None):
            return refused
        chain = [each.where[:4] for each in self._under_way]
        try:
            positions = [self._packed(each.position) for each in self._under_way]
        except NotCarriedError as error:
            return error
        return LoopSnapshot(chain, positions, [each.snapshot for each in self._under_way])

    def _packed(self, position: Counted | None) -> bytes:
        if position is None or self._heap is None:
            return b""
        try:
            return self._heap.packed(position.saved())
        except NotCarriedError:
            raise
        except Exception as error:
            raise NotCarriedError(f"what {type(position.within).__name__} is made of: {error}") from error

    def iterate(self, over: Iterable[Any]) -> Counted:
        """Return an iterator that knows how far it is."""
        return Counted(over)

    def counted(self, function: Callable[..., Iterator[Any]]) -> Callable[..., Counted]:
        """Return what calls a generator function, and returns what knows how far the generator is."""

        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Counted:
            return Counted(Call(call, arguments, named))

        return call

    # --- what the others have behind them ----------------------------------------------------------------------------

    @property
    def begun(self) -> bool:
        """Whether the first loop has begun."""
        return self._begun

    @property
    def within(self) -> bool:
        """Whether an iteration has begun and its gradient is not reduced."""
        return self._within

    @property
    def open(self) -> bool:
        """Whether a new rank comes here from this one's last snapshot without another iteration."""
        return not self._reduced

    @property
    def reachable(self) -> bool:
        """Whether all is known that a new rank has to be given."""
        return known(self._points.saved()[0])

    def mark(self) -> None:
        """Note that an iteration begins."""
        place = self._under_way[-1].place if self._under_way else "the end"
        if not self.open:
            self._close(
                f"a statement in the body of the loop at {place} makes more than one update, and no process could come "
                "in between: give each a statement of its own"
            )
        elif self._heap is not None and self._versions != self._heap.versions:
            self._changes.add(place)  # from now on the snapshot is taken at the head
            self._close(
                f"parameters are changed in the body of the loop at {place} before its forward pass, and not by an "
                "optimizer: a process that begins there would change them twice"
            )
        self._within = True

    @property
    def lacking(self) -> list[torch.nn.Parameter]:
        """Parameters whose gradient was not in the snapshot where this rank began, though it had one."""
        return self._heap.lacking if self._heap is not None else []

    @property
    def unsure(self) -> bool:
        """Whether gradients may be there to be made zero, and are not known to be there to have more added to them."""
        return not (self._keeps or self._pending)

    def adds(self) -> None:
        """Have snapshots have gradients from now on: more is added to those of an iteration before."""
        self._keeps = True
        if not self.accumulates:
            self._close("more is added to gradients of an iteration before, for the first time")

    def _close(self, why: str) -> None:
        """Say that nobody can go to the last snapshot, from which what all ranks have has changed since."""
        self.closed = why
        self._leave_record(NotCarriedError(why))

    def reduced(self) -> None:
        """Be where the others are, at the end of the iteration's last pass."""
        self.behind, self._within, self._reduced, self._pending = False, False, True, True

    def updated(self) -> None:
        """Note that an iteration has ended."""
        self._updates, self._pending = self._updates + 1, False

    @property
    def given(self) -> bool:
        """Whether the others have the next collective behind them."""
        if self.behind and not self._to:
            self.behind = not self._points.since.over
        return self.behind

    def following(self) -> Results | None:
        """Return what the next collective has given to the others; None where that is not known."""
        iterator = RUNNING[-1] if RUNNING else None
        if iterator is not None and iterator.goes:
            return iterator.heard.following()
        found = (self._heard if self._to else self._points.since).following()
        if not self._to:
            self._heard.add(found)
        if iterator is not None:
            iterator.heard.add(found)
        return found

    def hear(self, results: Results | None) -> None:
        """Note what a collective has given; None: whoever comes later can't be given that."""
        self._points.hear(results)
        for each in (self._heard, *(iterator.heard for iterator in RUNNING)):
            each.add(results)

    @property
    def _heard(self) -> KnownResults:
        if not self._under_way:
            return self._outside
        at = self._under_way[-1]
        return at.drawn if at.draws else at.heard

    def _start(self, caller: FrameType) -> None:
        if not self._begun:
            self._begun = True
            modules = {name: getattr(each, "__dict__", {}) for name, each in sys.modules.copy().items()}
            modules |= {caller.f_globals["__name__"]: caller.f_globals}
            self._modules = {name: each for name, each in modules.items() if NAME in each and name not in LIBRARIES}
            carried, changes = self._prepare()
            heap = Heap(carried)
            try:
                heap.number(self._spaces(caller))
                heap.keep(changes)
            except NotCarriedError as error:
                self._leave_record(error)
            else:
                self._heap = heap
            self._meet()

    def _spaces(self, caller: FrameType) -> Mapping[str, Variables]:
        return spaces_of(caller, self._modules)

    def _enter(self, place: str, caller: FrameType, last: int | None) -> LoopUnderWay:
        """Begin a loop; what was made on the way to it a new rank makes, too."""
        depth = len(self._under_way)
        at = LoopUnderWay(place, self._indices[depth], caller, last)
        self._indices[depth] += 1
        if self._heap is not None and (depth or at.index):
            self._heap.number(self._spaces(caller), f"{depth}.{at.index}")
        self._under_way.append(at)
        del self._indices[depth + 1 :]
        self._indices.append(0)
        return at

    def _leave(self, depth: int) -> None:
        """End loops."""
        if depth < len(self._under_way):
            caller = self._under_way[depth].frame
            if self._heap is not None:
                levels = [f"{number}." for number in range(depth, len(self._under_way) + 1)]
                self._heap.forget(levels)
                if not self._to:
                    self._heap.note(self._spaces(caller))
            del self._under_way[depth:]
            if depth:
                self._under_way[-1].inner = True

    def _leave_what_is_over(self, caller: FrameType, place: str = "") -> None:
        """Forget `while` loops that were left: `caller` is elsewhere, or what ran them is gone."""
        frames, frame = set[int](), caller
        while frame is not None:
            frames.add(id(frame))
            frame = frame.f_back  # type: ignore[assignment]
        for depth, at in enumerate(self._under_way):
            if at.last is None:
                continue
            inside = _line(at.place) <= (_line(place) if place else caller.f_lineno) <= at.last
            if id(at.frame) not in frames or (at.frame is caller and not inside):
                self._leave(depth)
                return

    # --- the state ---------------------------------------------------------------------------------------------------

    def _where(self) -> dict[str, Any]:
        return {"loops": [at.where for at in self._under_way], "outside": self._outside.saved()}

    def state_dict(self) -> dict[str, Any]:
        """Return where this script's last snapshots were taken, and what it has been given since."""
        return {"points": self._points.saved(), "keeps": self._keeps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go there, where this script is in no loop yet; one that is goes on, and comes there by itself."""
        self._keeps |= state["keeps"]
        if not self._under_way:
            self._points.choices = state["points"]
            self._go_to(state["points"][0])

    def _go_to(self, point: Point) -> None:
        self._to, self._outside = point["loops"], KnownResults(point["outside"])
        self._points.begin_at({}, KnownResults(point["since"]))
        self.behind = bool(self._to)

    @property
    def chains(self) -> list[Chain]:
        """Of the loops at which this rank can begin, the best first; none where it begins at the top."""
        return list(self._points.chains()) if self._to else []

    def become(self, record: LoopSnapshot, arrive: Callable[[], None] = lambda: None) -> None:
        """Be the rank that has left this, once this script comes to where that was; then call `arrive`."""
        self._record, self._arrive = record, arrive
        self._go_to(self._points.choice(record.chain))


def _line(place: str) -> int:
    return int(place.rpartition(":")[2])
