"""Where a script is in its training loops, so that a worker that is started later begins there, and not at the top.

The script's source is not touched; what is compiled of it has two calls more in each loop that trains: one that hands
out what the loop goes over, and one at the head of its body. There the plain values of its variables are copied, which
is what the script holds besides models, optimizers and data.
"""

import ast
import ctypes
import io
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from types import FrameType
from typing import Any

import torch

from unicron.errors import InvalidInputError

NAME = "__unicron__"
TRAINS = "backward"
MOST = 10_000
"""Values of a list or dictionary that are copied at each head; a longer one is the script's data, not its progress."""

LEAST_BYTES = 1 << 20
"""Tensors that take more are data, too."""

PLAIN = (type(None), bool, int, float, str, bytes)
_NOT_PLAIN = object()


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
        values: of variables of the function, and of the module, at the head of its body when that began last, that are
            not what they were before.
    """

    def __init__(self, line: int, frame: FrameType, space: "Space", last: int | None = None) -> None:
        self.line, self.frame, self.space, self.last, self.count = line, frame, space, last, 0
        self.values: list[dict[str, Any]] = [{}, {}]
        self.own: tuple[str, ...] = ()
        self.item: int | None = None


class Space:
    """The variables of a function that runs loops, or of the module.

    Args:
        frame: of the function, or of anything in the module.
        module: the module's, None where these are the module's.
        line: of the loop that is run first.
    """

    def __init__(self, frame: FrameType, module: "Space | None", line: int) -> None:
        self.frame, self.module = frame, module
        self._before = self._copies(line)
        self._carried = frozenset[str]()

    @property
    def _variables(self) -> dict[str, Any]:
        return self.frame.f_globals if self.module is None else self.frame.f_locals

    def changed(self, line: int, own: Iterable[str]) -> dict[str, Any]:
        """Return copies of what has changed since the first loop began; what differs by rank from the start has not.

        Args:
            line: of the loop that it is in.
            own: variables that loops have just set from what they go over, which is each rank's own.
        """
        before, left_out = self._before, set(own)
        return {
            name: each
            for name, each in self._copies(line).items()
            if name not in left_out and (name in self._carried or name not in before or not _same(each, before[name]))
        }

    def take(self, values: Mapping[str, Any]) -> None:
        """Have the variables be what they are elsewhere."""
        self._carried |= frozenset(values)
        variables = self._variables
        for path, value in values.items():
            name, _, attribute = path.partition(".")
            if attribute:
                setattr(variables[name], attribute, value)
            else:
                variables[name] = value
        if self.module is not None and sys.version_info < (3, 13):  # from then on they are written through (PEP 667)
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(self.frame), ctypes.c_int(0))

    def _copies(self, line: int) -> dict[str, Any]:
        """Return copies of the plain values, those of its objects' attributes too."""
        found: dict[str, Any] = {}
        for name, value in self._variables.items():
            if name.startswith("__"):
                continue
            if isinstance(value, Iterator) and not isinstance(value, io.IOBase):
                raise InvalidInputError(
                    f"the loop at line {line} uses `{name}`, an iterator ({type(value).__name__}), which can't be "
                    "brought to where it is on another worker: loop over it with `for`, or set `heal: restart`"
                )
            copies = ((path, _copied(each)) for path, each in _parts(name, value))
            found |= {path: each for path, each in copies if each is not _NOT_PLAIN}
        return found


def _parts(path: str, value: Any) -> Iterable[tuple[str, Any]]:
    """Return a value, or the attributes of one that the script has made a class for, each with its name."""
    if type(value).__module__ == "__main__" and not isinstance(value, torch.nn.Module) and hasattr(value, "__dict__"):
        return [(f"{path}.{name}", each) for name, each in vars(value).items()]
    return [(path, value)]


def _copied(value: Any) -> Any:
    """Return a copy of what is plain, `_NOT_PLAIN` of all else."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        kept = not isinstance(value, torch.nn.Parameter) and value.nbytes <= LEAST_BYTES
        return value.detach().clone() if kept else _NOT_PLAIN
    if type(value) in {list, tuple, dict} and len(value) <= MOST:
        each = {key: _copied(part) for key, part in (value.items() if type(value) is dict else enumerate(value))}
        if any(part is _NOT_PLAIN for part in each.values()) or not all(isinstance(key, str | int) for key in each):
            return _NOT_PLAIN
        return each if type(value) is dict else type(value)(each.values())
    return _NOT_PLAIN


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(each, other[key]) for key, each in one.items())
    return bool(one == other)


class Loops:
    """The training loops of a script that are under way, the outermost first. It is protected as a model is.

    Args:
        rank: of the program; what is random differs by rank.
        begin: called as the first of them begins.
    """

    def __init__(self, rank: int, begin: Callable[[], None]) -> None:
        self._rank, self._begin = rank, begin
        self._seed: int | None = None
        self._under_way: list[At] = []
        self._spaces: list[Space] = []
        self._to: list[list[Any]] = []
        self._reached = 0

    # --- what the script calls ---------------------------------------------------------------------------------------

    def over(self, line: int, iterable: Iterable[Any], numbered: bool) -> Iterator[Any]:
        """Hand out what a loop goes over, from where this worker is to begin."""
        caller = sys._getframe(1)  # noqa: SLF001 there is no other way to a script's variables
        self._start(caller, line)
        self._leave_what_is_over(caller)
        at = At(line, caller, self._space(caller, line))
        self._under_way.append(at)
        depth = len(self._under_way) - 1
        try:
            there, count, number = self._to[depth][:3] if self._to and depth == self._reached else (line, 1, None)
            if there != line:
                return  # the others have it behind them
            self._draw_for()
            iterator = iter(iterable)
            while True:
                at.count += 1
                self._draw_for()
                try:
                    item = next(iterator)
                except StopIteration:
                    if count:
                        break
                    return
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
            del self._under_way[depth:]

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
                self._under_way.append(At(line, caller, self._space(caller, line), last))
            self._under_way[-1].count += 1
        depth, at = len(self._under_way) - 1, self._under_way[-1]
        if self._to and depth == self._reached:
            there, count, _, values = self._to[depth]
            if there != line:
                raise InvalidInputError(f"the others are in the loop at line {there}, and that at line {line} is first")
            for space, each in zip(self._spaces_of(at), values, strict=True):
                space.take(each)
            at.count, self._reached = count, depth + 1
            if at.item is not None:
                self._draw_for()  # its count was another's, where the script has begun from a checkpoint
            if self._reached == len(self._to):
                self._to, self._reached = [], 0
        at.own = own
        at.values = [
            space.changed(line, [name for each in self._under_way if each.space is space for name in each.own])
            for space in self._spaces_of(at)
        ]
        if last is not None:
            self._draw_for()

    def _start(self, caller: FrameType, line: int) -> None:
        if self._seed is None:
            self._seed = torch.initial_seed()
            self._module = Space(caller, None, line)
            self._begin()

    def _spaces_of(self, at: At) -> list[Space]:
        """Return the spaces that a loop's values are of."""
        return [at.space, *([at.space.module] if at.space.module is not None else [])]

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
                del self._under_way[depth:]
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
        where = ",".join(f"{at.line}:{at.count}" for at in self._under_way)
        number = int.from_bytes(blake2b(f"{self._seed}:{self._rank}:{where}".encode(), digest_size=7).digest())
        torch.manual_seed(number)
        random.seed(number)
        if numpy := sys.modules.get("numpy"):  # it takes none so large
            numpy.random.seed(number % 2**32)

    # --- the state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return where this script is."""
        return {"loops": [[at.line, at.count, at.item, at.values] for at in self._under_way]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go there, where this script is in no loop yet; one that is goes on, and comes there by itself."""
        if not self._under_way:
            self._to = state["loops"]
