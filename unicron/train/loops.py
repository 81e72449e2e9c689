"""Where a script is in its training loops, so that a worker that is started later begins there, and not at the top.

At the head of a loop's body the plain values of variables are copied, which is what a script holds besides models,
optimizers and data.
"""

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from types import FrameType
from typing import Any

import torch

from unicron.errors import InvalidInputError
from unicron.train.heard import Heard, Results
from unicron.train.instrument import LIBRARIES, NAME
from unicron.train.variables import Counted, Space, differing, unpacked

Values = dict[str, dict[str, Any]]
"""Of variables by name, of a function under "" and of modules under their names."""


class At:
    """A loop that is under way.

    Attributes:
        place: file and line at which it begins.
        frame: of what runs it.
        spaces: whose variables are known, the function's first.
        last: line at which it ends; None of a loop that says by itself when it is left.
        count: of the times that its body has begun.
        own: variables that it sets itself.
        item: what it has just set them to, where that is a number.
        before: copies of variables: a new rank comes to have these by itself.
        copies: what they were at the head of its body when that began last.
        values: those that were not what they were before.
        drawn, heard: what collectives have given, in what it goes over and since its body began last.
        draws: it is just finding what is next in what it goes over.
        inner, passed: another loop that trains has ended since its body began; an iteration has begun in it, or before.
    """

    def __init__(
        self, place: str, frame: FrameType, spaces: dict[str, Space], before: Values, last: int | None
    ) -> None:
        self.place, self.frame, self.spaces, self.before, self.last = place, frame, spaces, before, last
        self.count = 0
        self.copies = before
        self.values: Values = {}
        self.own: tuple[str, ...] = ()
        self.item: int | None = None
        self.drawn, self.heard, self.draws = Heard(), Heard(), False
        self.inner = self.passed = False

    def saved(self) -> list[Any]:
        """Return where it is, as a new rank is told."""
        values = {name: unpacked(each) for name, each in self.values.items()}
        return [self.place, self.count, self.item, values, self.drawn.saved(), self.heard.saved()]


class Loops:
    """The training loops of a script that are under way, the outermost first. It is protected as a model is.

    Args:
        rank: of the program; what is random differs by rank.
        begin: called as the first of them begins.

    Attributes:
        behind: the others are waiting in this iteration for this rank, which began later.
    """

    def __init__(self, rank: int, begin: Callable[[], None]) -> None:
        self._rank, self._begin = rank, begin
        self._seed: int | None = None
        self._under_way: list[At] = []
        self._modules: dict[str, Space] = {}
        self._spaces: list[Space] = []
        self._to: list[list[Any]] = []
        self._reached = 0
        self._outside, self._inner = Heard(), False
        self._iterators: list[Counted] = []
        self._marked: dict[str, Any] | None = None
        self._within = False
        self._window, self._passed, self._between = Heard(), False, False
        self.behind = False

    # --- what the script calls ---------------------------------------------------------------------------------------

    def over(self, place: str, iterable: Iterable[Any], numbered: bool) -> Iterator[Any]:
        """Hand out what a loop goes over, from where this worker is to begin."""
        caller = sys._getframe(1)  # noqa: SLF001 there is no other way to a script's variables
        self._start(caller, place)
        self._leave_what_is_over(caller)
        at = self._enter(place, caller, None)
        depth = len(self._under_way) - 1
        try:
            there, count, number = self._to[depth][:3] if self._to and depth == self._reached else (place, 1, None)
            if there != place:
                return  # the others have it behind them
            if self._to and depth == self._reached:
                at.drawn = Heard(self._to[depth][4])
            self._draw_for()
            at.draws = True
            iterator = iter(iterable)
            while True:
                at.count += 1
                at.draws = True
                self._draw_for()
                try:
                    item = next(iterator)
                except StopIteration:
                    if count:
                        break
                    return
                finally:
                    at.draws = False
                at.item = item if type(item) is int else None
                # a script that has begun from a checkpoint of its own counts from there
                if count and (at.count < count if number is None else item != number):
                    continue
                count = 0
                yield (at.count - 1, item) if numbered else item
            if self._to:
                where = f"item {count}" if number is None else number
                raise InvalidInputError(f"the others are at {where} of the loop at {place}, which ends before that")
        finally:
            self._leave(depth)

    def still(self, place: str) -> bool:
        """Return whether a `while` loop is to be looked at; where the others have it behind them, it is not."""
        caller = sys._getframe(1)  # noqa: SLF001
        self._start(caller, place)
        self._leave_what_is_over(caller, place)
        depth = len(self._under_way)
        inside = depth > 0 and self._under_way[-1].place == place
        return inside or not self._to or depth != self._reached or self._to[depth][0] == place

    def head(self, place: str, last: int | None, *own: str) -> None:
        """Note where the script is, or have its variables be what they are elsewhere."""
        caller = sys._getframe(1)  # noqa: SLF001
        self._start(caller, place)
        self._leave_what_is_over(caller, place)
        if last is not None:
            if not self._under_way or self._under_way[-1].place != place:
                self._enter(place, caller, last)
            self._under_way[-1].count += 1
        depth, at = len(self._under_way) - 1, self._under_way[-1]
        at.heard, at.inner, at.passed = Heard(), False, self._within
        if self._to and depth == self._reached:
            there, count, _, values, _, heard = self._to[depth]
            if there != place:
                raise InvalidInputError(f"the others are in the loop at {there}, and that at {place} is first")
            for name, each in values.items():
                at.spaces[name].take(each)
            at.count, at.heard, self._reached = count, Heard(heard), depth + 1
            if at.item is not None:
                self._draw_for()  # its count was another's, where the script has begun from a checkpoint
            if self._reached == len(self._to):
                self._to, self._reached = [], 0
        at.own = own
        if not self._within:
            self._copy(at)
        if last is not None:
            self._draw_for()

    def _copy(self, at: At) -> None:
        """Copy what variables are at the head of a body."""
        at.copies = {name: space.copies(at.place) for name, space in at.spaces.items()}
        sets = {
            name: {its for each in self._under_way if space is next(iter(each.spaces.values())) for its in each.own}
            for name, space in at.spaces.items()
        }
        at.values = {name: differing(each, at.before[name], sets[name]) for name, each in at.copies.items()}

    def iterate(self, over: Iterable[Any]) -> Counted:
        """Return an iterator that knows how far it is."""
        where = ",".join(f"{at.place}:{at.count}" for at in self._under_way)
        return Counted(over, lambda count: self._seeded(f"{where}:{count}"), self._iterators)

    # --- what the others have behind them ----------------------------------------------------------------------------

    @property
    def begun(self) -> bool:
        """Whether the first loop has begun."""
        return self._seed is not None

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
        iterator = self._iterators[-1] if self._iterators else None
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
        for each in (self._heard, self._window, *(iterator.heard for iterator in self._iterators)):
            each.add(results)

    @property
    def _heard(self) -> Heard:
        if not self._under_way:
            return self._outside
        at = self._under_way[-1]
        return at.drawn if at.draws else at.heard

    def _start(self, caller: FrameType, place: str) -> None:
        if self._seed is None:
            self._seed = torch.initial_seed()
            modules = {name: getattr(each, "__dict__", {}) for name, each in sys.modules.copy().items()}
            modules |= {caller.f_globals["__name__"]: caller.f_globals}
            own = {name: each for name, each in modules.items() if NAME in each and name not in LIBRARIES}
            self._modules = {name: Space(each, place) for name, each in own.items()}
            self._begin()

    def _enter(self, place: str, caller: FrameType, last: int | None) -> At:
        """Begin a loop: what a new rank has by then, it has by itself, unless loops that it leaves out came before."""
        spaces, above = self._spaces_of(caller, place), self._under_way[-1] if self._under_way else None
        if above.inner if above is not None else self._inner:
            known = {above.spaces[name]: each for name, each in above.copies.items()} if above is not None else {}
            before = {name: known.get(space, space.before) for name, space in spaces.items()}
        else:
            before = {name: space.copies(place) for name, space in spaces.items()}
        at = At(place, caller, spaces, before, last)
        self._under_way.append(at)
        return at

    def _leave(self, depth: int) -> None:
        """End loops."""
        if depth < len(self._under_way):
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

    def _spaces_of(self, caller: FrameType, place: str) -> dict[str, Space]:
        """Return whose variables a loop there sees: its function's, if it is in one, and the modules'."""
        module = self._modules.get(caller.f_globals["__name__"])
        if module is not None and caller.f_locals is caller.f_globals:
            return {caller.f_globals["__name__"]: module, **self._modules}
        frames, frame = set[int](), caller
        while frame is not None:
            frames.add(id(frame))
            frame = frame.f_back  # type: ignore[assignment]
        self._spaces = [each for each in self._spaces if id(each.scope) in frames]
        known = next((each for each in self._spaces if each.scope is caller), None)
        if known is None:
            known = Space(caller, place)
            self._spaces.append(known)
        return {"": known, **self._modules}

    def _draw_for(self) -> None:
        """Have all that is random from here on depend on where this is, and not on what was random before."""
        self._seeded(",".join(f"{at.place}:{at.count}" for at in self._under_way))

    def _seeded(self, where: str) -> None:
        number = int.from_bytes(blake2b(f"{self._seed}:{self._rank}:{where}".encode(), digest_size=7).digest())
        torch.manual_seed(number)
        random.seed(number)
        if numpy := sys.modules.get("numpy"):  # it takes none so large
            numpy.random.seed(number % 2**32)

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


def _line(place: str) -> int:
    return int(place.rpartition(":")[2])
