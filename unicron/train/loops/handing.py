"""Generators of a script that hand out what a loop of theirs goes over, as it is: another process enters that loop.

What stands before the `yield` in the loop's body is left out there, as the item does not depend on it. So nothing of
what the generator has done by then is done again, and none of it has to fail or print: its variables are restored.
"""

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Any

from unicron.train.carry.variables import NAME
from unicron.train.loops.layers import peel, wrapped
from unicron.train.loops.positions import Counted
from unicron.train.loops.trees import nodes_of

Loop = ast.For | ast.While


class HandingLoop:
    """What a loop of a generator goes over that hands it out as it is.

    Args:
        generator: that runs.
        place: of the loop.
        over: what it goes over.

    Attributes:
        over: likewise.
    """

    def __init__(self, generator: Counted, place: str, over: Iterable[Any]) -> None:
        self._generator, self._place, self.over = generator, place, over

    def begin(self, position: Callable[[], Counted]) -> tuple[Counted, list[Any]]:
        """Have the generator know its position; return that, and the item at which it is entered, if it is."""
        return self._generator.begin_loop(self._place, position)

    def __iter__(self) -> Iterator[Any]:
        """Yield the items, from the one at which another process is."""
        over, layers = peel(self.over, numbered=False)
        position, entered = self.begin(lambda: Counted(over))
        try:
            for item in entered:
                for each in layers:
                    each.resume(position.count)
                yield wrapped(layers, position.count, item)
                for each in layers:
                    each.begin_next()
            while not any(each.is_over(position.count) for each in layers):
                try:
                    item = next(position)
                except StopIteration:
                    return
                yield wrapped(layers, position.count, item)
                for each in layers:
                    each.begin_next()
        finally:
            for each in layers:
                each.close()


def mark_handing_loops(node: ast.FunctionDef, call: Callable[..., ast.expr]) -> None:
    """Have a generator's loops be entered at its `yield`, if it has one, and the loop hands out its items as they are.

    Args:
        node: a plain generator, whose loops are changed.
        call: returns a call of a method that is told the loop's place.
    """
    loops = _loops_around_yield(node)
    handed = {each.id for loop in loops if isinstance(loop, ast.For) for each in _names([loop.target])}
    for loop, inside in zip(loops, [*loops[1:], None], strict=False):
        index = next(number for number, each in enumerate(loop.body) if each is inside or _is_yield(each))
        if before := loop.body[:index]:
            entering = ast.Attribute(ast.Name(NAME, ast.Load()), "is_entering", ast.Load())
            skip = ast.If(ast.UnaryOp(ast.Not(), entering), before, [])
            loop.body[:index] = [ast.copy_location(skip, before[0])]
        if isinstance(loop, ast.For):
            told = [ast.Constant(len(loops) - sum(isinstance(each, ast.While) for each in loops))]
            told += [ast.Constant(each) for each in sorted(handed)]
            loop.iter = ast.copy_location(call("handing_loop", loop, loop.iter, *told), loop.iter)


def _loops_around_yield(node: ast.FunctionDef) -> list[Loop]:
    """Return the loops around a generator's only `yield`, the outermost first; none if its items are not theirs."""
    path, body = list[Loop](), node.body
    yields = [one for each in node.body for one in nodes_of(each, ast.Yield, ast.YieldFrom)]
    if len(yields) != 1 or yields[0].value is None:
        return []
    while (around := next((each for each in body if _has_yield(each)), None)) is not None and not _is_yield(around):
        if isinstance(around, ast.For | ast.While):
            path.append(around)
        elif path:
            return []  # what decides in a loop whether it hands out anything would not be asked
        body = [each for field in ("body", "orelse", "handlers", "finalbody") for each in getattr(around, field, ())]
    fors = [each for each in path if isinstance(each, ast.For)]
    targets = [name for each in fors for name in _names([each.target])]
    handed = {each.id for each in _names([yields[0]])}
    if (
        around is None
        or not path
        or not isinstance(path[-1], ast.For)
        or not _is_only_names(yields[0].value)
        or not all(_is_only_names(each.target) for each in fors)
        or not handed <= {each.id for each in targets}
        or any(_has_yield(each) for loop in path for each in loop.orelse)
    ):
        return []
    stored = [each.id for each in _names(node.body) if isinstance(each.ctx, ast.Store | ast.Del)]
    again = {each.id for each in targets if stored.count(each.id) > 1}
    before = [each for loop in path for each in takewhile(lambda one: not _has_yield(one), loop.body)]
    used = {each.id for each in _names(before)} & handed
    return [] if again or used else path


def _names(nodes: Sequence[ast.AST]) -> list[ast.Name]:
    return [one for each in nodes for one in nodes_of(each, ast.Name)]


def _is_only_names(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) or (isinstance(node, ast.Tuple) and all(map(_is_only_names, node.elts)))


def _has_yield(node: ast.AST) -> bool:
    return bool(nodes_of(node, ast.Yield, ast.YieldFrom))


def _is_yield(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Yield)
