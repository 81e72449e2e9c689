"""Trees of source code whose parts are looked into often: the nodes of each part are found without a walk through it.

All nodes are listed once, in the order in which they begin; those of a part are a slice of that list. What is put into
a tree later is not among them.
"""

import ast
import contextlib
import gc
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

_MARKS = (ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop)
"""Nodes that hold nothing, and of which all trees share one."""

PLACE = "_unicron_place"
"""Attribute of a node: the list in which it is, where it begins there, and where it ends."""


class _Nodes:
    """All nodes of a tree, and the places of those of each class."""

    def __init__(self, tree: ast.AST) -> None:
        self.all, self.places = list[ast.AST](), defaultdict[type, list[int]](list)
        todo: list[tuple[ast.AST, int]] = [(tree, -1)]
        while todo:
            node, begins = todo.pop()
            if begins >= 0:
                setattr(node, PLACE, (self, begins, len(self.all)))
                continue
            todo.append((node, len(self.all)))
            self.places[type(node)].append(len(self.all))
            self.all.append(node)
            todo += [(each, -1) for each in reversed(list(ast.iter_child_nodes(node))) if not isinstance(each, _MARKS)]


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Make many nodes inside: to look for garbage among them, again and again, would take longer than to make them."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def parse(source: bytes | str, path: object = "<unknown>") -> ast.Module:
    """Return the tree of a file's source, with its nodes listed.

    Raises:
        SyntaxError: it is no Python.
    """
    tree = ast.parse(source, str(path))
    _Nodes(tree)
    return tree


def walk(node: ast.AST) -> list[ast.AST]:
    """Return a node and all that are in it."""
    nodes, begins, ends = getattr(node, PLACE, (None, 0, 0))
    return list(ast.walk(node)) if nodes is None else nodes.all[begins:ends]


def nodes_of(node: ast.AST, *kinds: type[ast.AST]) -> list[Any]:
    """Return those nodes of these classes that are a node, or in it."""
    nodes, begins, ends = getattr(node, PLACE, (None, 0, 0))
    if nodes is None:
        return [each for each in ast.walk(node) if isinstance(each, kinds)]
    found = list[ast.AST]()
    for places in (nodes.places.get(kind, ()) for kind in kinds):
        found += [nodes.all[each] for each in places[bisect_left(places, begins) : bisect_left(places, ends)]]
    return found
