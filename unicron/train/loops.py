"""Where a script is in its training loops, so that a worker that is started later begins there, and not at the top.

The script's source is not touched; what is compiled of it has two calls more in each loop that trains: one that hands
out what the loop goes over, and one at the head of its body. There the plain values of its variables are copied, which
is what the script holds besides models, optimizers and data.
"""

import ast
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from types import FrameType
from typing import Any

import torch

from unicron.errors import InvalidInputError
from unicron.train.heard import Heard, Results
from unicron.train.variables import Counted, Space, differing

NAME = "__unicron__"
TRAINS = "backward"


def instrument(source: str, path: str) -> ast.Module:
    """Return what is to be run instead of a script.

    Args:
        source: of the script.
        path: of it, for the names of its loops.

    Raises:
        SyntaxError: it is no Python.
    """
    tree = ast.parse(source, path)
    _Instrument(_training(tree)).visit(tree)
    return ast.fix_missing_locations(tree)


def _training(tree: ast.Module) -> set[str]:
    """Return the names of functions that run a backward pass, or call one that does."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    found = {TRAINS}
    while more := {each.name for each in functions if each.name not in found and _calls(each.body, found)}:
        found |= more
    return found


def _calls(body: Iterable[ast.AST], names: set[str]) -> bool:
    calls = (node.func for each in body for node in ast.walk(each) if isinstance(node, ast.Call))
    return any(getattr(each, "attr", getattr(each, "id", "")) in names for each in calls)


class _Instrument(ast.NodeTransformer):
    def __init__(self, training: set[str]) -> None:
        self._training = training

    def visit_Call(self, node: ast.Call) -> ast.Call:
        """Have iterators know how far they are."""
        if getattr(node.func, "id", "") == "iter" and len(node.args) == 1:
            node.func = ast.copy_location(ast.Attribute(ast.Name(NAME, ast.Load()), "iterate", ast.Load()), node.func)
        self.generic_visit(node)
        return node

    def visit_For(self, node: ast.For) -> ast.For:
        """Have a loop go over what is handed out."""
        if _calls(node.body, self._training):
            numbered, over = False, node.iter
            if isinstance(over, ast.Call) and getattr(over.func, "id", "") == "enumerate" and len(over.args) == 1:
                numbered, over = not over.keywords, over.args[0] if not over.keywords else over
            node.iter = _call("over", node, over, ast.Constant(numbered))
            names = [ast.Constant(each.id) for each in ast.walk(node.target) if isinstance(each, ast.Name)]
            self._add_head(node, ast.Constant(None), *names)
        self.generic_visit(node)
        return node

    def visit_While(self, node: ast.While) -> ast.While:
        """Have a loop say where it is."""
        if _calls(node.body, self._training):
            node.test = ast.copy_location(ast.BoolOp(ast.And(), [_call("still", node), node.test]), node.test)
            self._add_head(node, ast.Constant(node.end_lineno))
        self.generic_visit(node)
        return node

    def _add_head(self, node: ast.For | ast.While, *more: ast.expr) -> None:
        node.body.insert(0, ast.copy_location(ast.Expr(_call("head", node, *more)), node.body[0]))


def _call(name: str, loop: ast.For | ast.While, *arguments: ast.expr) -> ast.expr:
    function = ast.Attribute(ast.Name(NAME, ast.Load()), name, ast.Load())
    return ast.copy_location(ast.Call(function, [ast.Constant(loop.lineno), *arguments], []), loop)


class At:
    """A loop that is under way.

    Attributes:
        line: at which it begins.
        frame, space: of what runs it.
        last: line at which it ends; None of a loop that says by itself when it is left.
        count: of the times that its body has begun.
        own: variables that it sets itself.
        item: what it has just set them to, where that is a number.
        before: copies of variables of the function, and of the module: a new rank comes to have these by itself.
        copies: what they were at the head of its body when that began last.
        values: those that were not what they were before.
        drawn, heard: what collectives have given, in what it goes over and since its body began last.
        draws: it is just finding what is next in what it goes over.
        inner, passed: another loop that trains has ended since its body began; an iteration has begun in it.
    """

    def __init__(
        self, line: int, frame: FrameType, space: Space, before: list[dict[str, Any]], last: int | None
    ) -> None:
        self.line, self.frame, self.space, self.before, self.last = line, frame, space, before, last
        self.count = 0
        self.copies: list[dict[str, Any]] = before
        self.values: list[dict[str, Any]] = [{} for _ in before]
        self.own: tuple[str, ...] = ()
        self.item: int | None = None
        self.drawn, self.heard, self.draws = Heard(), Heard(), False
        self.inner = self.passed = False

    def saved(self) -> list[Any]:
        """Return where it is, as a new rank is told."""
        return [self.line, self.count, self.item, self.values, self.drawn.saved(), self.heard.saved()]


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
        self._spaces: list[Space] = []
        self._to: list[list[Any]] = []
        self._reached = 0
        self._outside, self._inner = Heard(), False
        self._iterators: list[Counted] = []
        self._marked: dict[str, Any] | None = None
        self._window, self._passed, self._between = Heard(), False, False
        self.behind = False

    # --- what the script calls ---------------------------------------------------------------------------------------

    def over(self, line: int, iterable: Iterable[Any], numbered: bool) -> Iterator[Any]:
        """Hand out what a loop goes over, from where this worker is to begin."""
        caller = sys._getframe(1)  # noqa: SLF001 there is no other way to a script's variables
        self._start(caller, line)
        self._leave_what_is_over(caller)
        at = self._enter(line, caller, None)
        depth = len(self._under_way) - 1
        try:
            there, count, number = self._to[depth][:3] if self._to and depth == self._reached else (line, 1, None)
            if there != line:
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
                raise InvalidInputError(f"the others are at {where} of the loop at line {line}, which ends before that")
        finally:
            self._leave(depth)

    def still(self, line: int) -> bool:
        """Return whether a `while` loop is to be looked at; where the others have it behind them, it is not."""
        caller = sys._getframe(1)  # noqa: SLF001
        self._start(caller, line)
        self._leave_what_is_over(caller, line)
        depth = len(self._under_way)
        inside = depth > 0 and self._under_way[-1].line == line
        return inside or not self._to or depth != self._reached or self._to[depth][0] == line

    def head(self, line: int, last: int | None, *own: str) -> None:
        """Note where the script is, or have its variables be what they are elsewhere."""
        caller = sys._getframe(1)  # noqa: SLF001
        self._start(caller, line)
        self._leave_what_is_over(caller, line)
        if last is not None:
            if not self._under_way or self._under_way[-1].line != line:
                self._enter(line, caller, last)
            self._under_way[-1].count += 1
        depth, at = len(self._under_way) - 1, self._under_way[-1]
        at.heard, at.inner, at.passed = Heard(), False, False
        if self._to and depth == self._reached:
            there, count, _, values, _, heard = self._to[depth]
            if there != line:
                raise InvalidInputError(f"the others are in the loop at line {there}, and that at line {line} is first")
            for space, each in zip(self._spaces_of(at.space), values, strict=True):
                space.take(each)
            at.count, at.heard, self._reached = count, Heard(heard), depth + 1
            if at.item is not None:
                self._draw_for()  # its count was another's, where the script has begun from a checkpoint
            if self._reached == len(self._to):
                self._to, self._reached = [], 0
        at.own, spaces = own, self._spaces_of(at.space)
        at.copies = [space.copies(line) for space in spaces]
        sets = [{name for each in self._under_way if each.space is space for name in each.own} for space in spaces]
        at.values = [
            differing(copies, before, left_out)
            for copies, before, left_out in zip(at.copies, at.before, sets, strict=True)
        ]
        if last is not None:
            self._draw_for()

    def iterate(self, over: Iterable[Any]) -> Counted:
        """Return an iterator that knows how far it is."""
        where = ",".join(f"{at.line}:{at.count}" for at in self._under_way)
        return Counted(over, lambda count: self._seeded(f"{where}:{count}"), self._iterators)

    # --- what the others have behind them ----------------------------------------------------------------------------

    @property
    def begun(self) -> bool:
        """Whether the first loop has begun."""
        return self._seed is not None

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
                f"the body of the loop at line {self._under_way[-1].line} makes more than one update, and a new rank "
                "could not come in between: give each a loop of its own, or set `heal: restart`"
            )
        for at in self._under_way[-1:]:
            at.passed = True
        self._marked = self._where()
        if self.behind:
            self._passed = True
        else:
            self._window = Heard()

    def caught_up(self) -> None:
        """Be where the others are."""
        self.behind = self._passed = False

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

    def _start(self, caller: FrameType, line: int) -> None:
        if self._seed is None:
            self._seed = torch.initial_seed()
            self._module = Space(caller, None, line)
            self._begin()

    def _enter(self, line: int, caller: FrameType, last: int | None) -> At:
        """Begin a loop: what a new rank has by then, it has by itself, unless loops that it leaves out came before."""
        space, above = self._space(caller, line), self._under_way[-1] if self._under_way else None
        spaces = self._spaces_of(space)
        if above.inner if above is not None else self._inner:
            known = dict(zip(self._spaces_of(above.space), above.copies, strict=True)) if above is not None else {}
            before = [known.get(each, each.before) for each in spaces]
        else:
            before = [each.copies(line) for each in spaces]
        at = At(line, caller, space, before, last)
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

    def _spaces_of(self, space: Space) -> list[Space]:
        """Return the spaces that values of a loop there are of."""
        return [space, *([space.module] if space.module is not None else [])]

    def _leave_what_is_over(self, caller: FrameType, line: int = -1) -> None:
        """Forget `while` loops that were left: `caller` is elsewhere, or what ran them is gone."""
        frames, frame = set[int](), caller
        while frame is not None:
            frames.add(id(frame))
            frame = frame.f_back  # type: ignore[assignment]
        for depth, at in enumerate(self._under_way):
            if at.last is None:
                continue
            inside = at.line <= (line if line > 0 else caller.f_lineno) <= at.last
            if id(at.frame) not in frames or (at.frame is caller and not inside):
                self._leave(depth)
                return

    def _space(self, caller: FrameType, line: int) -> Space:
        frames, frame = set[int](), caller
        while frame is not None:
            frames.add(id(frame))
            frame = frame.f_back  # type: ignore[assignment]
        self._spaces = [each for each in self._spaces if id(each.frame) in frames]
        known = next((each for each in self._spaces if each.frame is caller), None)
        if known is None:
            known = self._module if caller.f_locals is caller.f_globals else Space(caller, self._module, line)
            self._spaces.append(known)
        return known

    def _draw_for(self) -> None:
        """Have all that is random from here on depend on where this is, and not on what was random before."""
        self._seeded(",".join(f"{at.line}:{at.count}" for at in self._under_way))

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
