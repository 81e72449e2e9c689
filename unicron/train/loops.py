"""Where a script is in its training loops, so that a worker that is started later begins there, and not at the top.

At the head of a loop's body each rank takes a snapshot of its own script, and leaves it where it outlives the rank.
"""

import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from types import FrameType
from typing import Any

import torch

from unicron.errors import InvalidInputError
from unicron.train.heard import Heard, Results
from unicron.train.instrument import LIBRARIES, NAME
from unicron.train.kinds import NotCarriedError
from unicron.train.positions import RUNNING, Counted
from unicron.train.snapshots import Heap, Variables, spaces_of

Chain = list[list[Any]]
"""Loops that are under way, the outermost first: place, how many began before it in the body around it, count."""


class Record:
    """A rank's own snapshot, of one head.

    Attributes:
        chain: of the loops.
        positions: how far each of them is in what it goes over; None for a `while` loop.
        snapshots: one for each of them, of the head of its body when that began last.
    """

    def __init__(self, chain: Chain, positions: list[Any], snapshots: list[bytes]) -> None:
        self.chain, self.positions, self.snapshots = chain, positions, snapshots


class At:
    """A loop that is under way.

    Attributes:
        place: file and line at which it begins.
        index: how many loops have begun before it in the body around it.
        frame: of what runs it.
        last: line at which it ends; None of a loop that says by itself when it is left.
        count: of the times that its body has begun.
        own: variables that it sets itself, or its body before anything reads them.
        position: in what it goes over.
        item: what it has just handed out, where that is a number.
        snapshot: of the head of its body when that began last.
        drawn, heard: what collectives have given, in what it goes over and since its body began last.
        draws: it is just finding what is next in what it goes over.
        inner, passed: another loop that trains has ended since its body began; an iteration has begun in it, or before.
        begun: its body has, on this worker.
    """

    def __init__(self, place: str, index: int, frame: FrameType, last: int | None) -> None:
        self.place, self.index, self.frame, self.last = place, index, frame, last
        self.count = 0
        self.own: tuple[str, ...] = ()
        self.position: Counted | None = None
        self.item: int | None = None
        self.snapshot = b""
        self.drawn, self.heard, self.draws = Heard(), Heard(), False
        self.inner = self.passed = self.begun = False

    def saved(self) -> list[Any]:
        """Return where it is, as a new rank is told."""
        return [self.place, self.index, self.count, self.item, self.drawn.saved(), self.heard.saved()]


class Loops:
    """The training loops of a script that are under way, the outermost first. It is protected as a model is.

    Args:
        rank: of the program; what is random differs by rank.
        begin: called as the first of them begins; it returns what of the script's objects goes another way.
        leave: leaves this rank's own record, or the reason why there is none, where it outlives the rank.

    Attributes:
        behind: the others are waiting in this iteration for this rank, which began later.
    """

    def __init__(
        self, rank: int, begin: Callable[[], Iterable[Any]], leave: Callable[[Record | NotCarriedError], None]
    ) -> None:
        self._begin, self._leave_record = begin, leave
        self._begun = False
        self._under_way: list[At] = []
        self._indices = [0]
        self._nested: dict[str, bool] = {}
        self._modules: dict[str, dict[str, Any]] = {}
        self._heap: Heap | None = None
        self._to: list[list[Any]] = []
        self._record: Record | None = None
        self._reached = 0
        self._outside, self._inner = Heard(), False
        self._marked: dict[str, Any] | None = None
        self._within = False
        self._window, self._passed, self._between = Heard(), False, False
        self.behind = False
        seed(rank)

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
                at.drawn = Heard(to[4])
            at.draws = True
            position = at.position = Counted(iterable, [])  # what it is given is noted as `drawn`
            if to is not None:
                yield from self._first(at, to, position, numbered)
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

    def _first(self, at: At, to: list[Any], position: Counted, numbered: bool) -> Iterator[Any]:
        """Hand out what the others' bodies are about."""
        count, number = to[2:4]
        if number is not None:  # a script that has begun from a checkpoint of its own counts from there
            item = next((each for each in position if each == number), None)
            if item is None:
                raise InvalidInputError(f"the others are at {number} of the loop at {at.place}, which ends before that")
        elif self._record is not None:
            item = position.go_to(self._record.positions[self._reached])
        at.draws = False
        at.count, at.item = count, number
        yield (count - 1, item) if numbered else item

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

    def head(self, place: str, last: int | None, *own: str) -> None:
        """Note where the script is, or have its variables be what they were on the rank that this one replaces."""
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
        at.begun = True
        at.heard, at.inner, at.passed = Heard(), False, self._within
        at.own = own
        del self._indices[depth + 1 :]
        self._indices.append(0)
        if self._to and depth == self._reached:
            self._become(at, depth, caller)
        elif not self._within:
            self._take(at, caller)

    def _become(self, at: At, depth: int, caller: FrameType) -> None:
        """Be as the rank was that this one replaces, at the head of this body.

        Raises:
            InvalidInputError: this process has come elsewhere.
            NotCarriedError: it has made something else on the way.
        """
        there, _, count, _, _, heard = self._to[depth]
        if there != at.place:
            raise InvalidInputError(f"the others are in the loop at {there}, and that at {at.place} is first")
        try:
            at.snapshot = self._restored(depth, caller)
        except NotCarriedError as error:
            self._leave_record(error)
            raise
        at.count, at.heard, self._reached = count, Heard(heard), depth + 1
        if self._reached == len(self._to):
            self._to, self._reached, self._record = [], 0, None

    def _restored(self, depth: int, caller: FrameType) -> bytes:
        """Have the script be as a snapshot says, and return that."""
        if self._record is None or self._heap is None:
            raise NotCarriedError("there is no snapshot of the rank that is replaced, or none can be taken here")
        snapshot = self._record.snapshots[depth]
        self._heap.restore(self._spaces(caller), snapshot)
        self._heap.note(self._spaces(caller))
        return snapshot

    def _take(self, at: At, caller: FrameType) -> None:
        """Take this rank's snapshot, and leave it where it outlives the rank."""
        if self._heap is None:
            return
        try:
            spaces = self._spaces(caller)
            dead = {name: set(at.own) for name, space in spaces.items() if space.runs(caller)}
            at.snapshot = self._heap.snapshot(spaces, dead)
            if self._nested.get(at.place, True):  # it takes long
                self._heap.note(spaces)
            chain = [[each.place, each.index, each.count] for each in self._under_way]
            positions = [each.position.saved() if each.position is not None else None for each in self._under_way]
        except NotCarriedError as error:
            self._leave_record(error)
        else:
            self._leave_record(Record(chain, positions, [each.snapshot for each in self._under_way]))

    def iterate(self, over: Iterable[Any]) -> Counted:
        """Return an iterator that knows how far it is."""
        return Counted(over)

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
        """Whether a new rank that begins at the heads of the loops' bodies comes here without another iteration."""
        at = self._under_way[-1] if self._under_way else None
        if at is None:
            return not self._inner
        return not (at.draws or at.inner or any(each.passed for each in self._under_way))

    @property
    def reachable(self) -> bool:
        """Whether all is known that a new rank has to be given."""
        state = self.state_dict()
        places = [state["outside"], state["window"], *(heard for loop in state["loops"] for heard in loop[4:])]
        return all(each is not None and all(results is not None for results in each) for each in places)

    def unmark(self) -> None:
        """Have whoever comes later come to where this rank is now, in no iteration."""
        self._marked = None

    def mark(self) -> None:
        """Have whoever comes later begin where this rank is now: an iteration begins.

        Raises:
            InvalidInputError: nobody could come here, as the body of a loop trains more than once.
        """
        if self._under_way and not self.open:
            raise InvalidInputError(
                f"the body of the loop at {self._under_way[-1].place} makes more than one update, and a new rank "
                "could not come in between: give each a loop of its own, or set `heal: restart`"
            )
        for at in self._under_way[-1:]:
            at.passed = True
        self._marked, self._within = self._where(), True
        if self.behind:
            self._passed = True
        else:
            self._window = Heard()

    def reduced(self) -> None:
        """Be where the others are, at the end of the iteration's last pass."""
        self.behind = self._passed = self._within = False

    @property
    def given(self) -> bool:
        """Whether the others have the next collective behind them."""
        if self.behind and not self._to and (self._passed or self._between):
            self.behind = not (self._window if self._passed else self._heard).over
        return self.behind

    def following(self) -> Results | None:
        """Return what the next collective has given to the others; None where that is not known."""
        iterator = RUNNING[-1] if RUNNING else None
        if iterator is not None and iterator.goes:
            return iterator.heard.following()
        found = (self._window if self._passed else self._heard).following()
        if self._passed:
            self._heard.add(found)
        if iterator is not None:
            iterator.heard.add(found)
        return found

    def hear(self, results: Results | None) -> None:
        """Note what a collective has given; None: whoever comes later can't be given that."""
        for each in (self._heard, self._window, *(iterator.heard for iterator in RUNNING)):
            each.add(results)

    @property
    def _heard(self) -> Heard:
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
            carried = self._begin()
            heap = Heap(carried)
            try:
                heap.number(self._spaces(caller))
            except NotCarriedError as error:
                self._leave_record(error)
            else:
                self._heap = heap

    def _spaces(self, caller: FrameType) -> Mapping[str, Variables]:
        return spaces_of(caller, self._modules)

    def _enter(self, place: str, caller: FrameType, last: int | None) -> At:
        """Begin a loop; what was made on the way to it a new rank makes, too."""
        depth = len(self._under_way)
        at = At(place, self._indices[depth], caller, last)
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
            else:
                self._inner = True

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
        return {"loops": [at.saved() for at in self._under_way], "outside": self._outside.saved()}

    def state_dict(self) -> dict[str, Any]:
        """Return where this script's iteration began, and what it has been given since."""
        between = self._marked is None
        return {**(self._marked or self._where()), "window": self._window.saved(), "between": between}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go there, where this script is in no loop yet; one that is goes on, and comes there by itself."""
        if not self._under_way:
            self._to, self._outside, self._window = state["loops"], Heard(state["outside"]), Heard(state["window"])
            self.behind, self._between = bool(self._to), state["between"]

    @property
    def chain(self) -> Chain:
        """Of the loops at which this rank is to begin; empty where it begins at the top."""
        return [each[:3] for each in self._to]

    def become(self, record: Record) -> None:
        """Be the rank that has left this, once this script comes to where that was."""
        self._record = record


def seed(rank: int) -> None:
    """Have what is random in a script that seeds nothing be the same on a process that replaces this rank's."""
    number = int.from_bytes(blake2b(f"{os.environ.get('UNICRON_TASK', '')}:{rank}".encode(), digest_size=7).digest())
    torch.manual_seed(number)
    random.seed(number)
    if numpy := sys.modules.get("numpy"):  # it takes none so large
        numpy.random.seed(number % 2**32)


def _line(place: str) -> int:
    return int(place.rpartition(":")[2])
