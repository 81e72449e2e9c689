"""Which variables of a function, or of a module, may still be read from a point of one of its loops on.

What is set anew before anybody reads it need not be carried to another process, large as it may be. Where nothing is
known, a variable counts as read.
"""

import ast
from collections.abc import Iterable, Sequence

from unicron.train.loops.trees import nodes_of, walk

Names = frozenset[str]
Loop = ast.For | ast.While
Body = Loop | ast.Module | ast.FunctionDef

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
BY_NAME = frozenset({"globals", "locals", "vars", "eval", "exec", "dir"})
"""By which a scope's variables are read where their names are not seen."""

NONE: Names = frozenset()


class Liveness:
    """The reads of a scope's variables.

    Args:
        scope: a module or a function.

    Attributes:
        names: all that it sets.
    """

    def __init__(self, scope: ast.Module | ast.FunctionDef) -> None:
        shared = {name for each in nodes_of(scope, ast.Global, ast.Nonlocal) for name in each.names}
        self.names = frozenset(_stored(node for each in scope.body for node in walk(each)))
        by_name = any(each.id in BY_NAME for each in nodes_of(scope, ast.Name))
        self._always = self.names if by_name else frozenset(shared).union(*map(_free, _inner(scope)))
        self._after, self._heads = dict[int, Names](), dict[int, Names]()
        self._loops: list[tuple[Names, Names]] = []
        self._caught = NONE
        self._block(scope.body, self._always, scope)

    def dead_at_head(self, loop: Body) -> Names:
        """Return what nobody reads before it is set, as a body begins."""
        return self.names - self._heads.get(id(loop), self.names)

    def dead_after(self, statement: ast.stmt) -> Names:
        """Return what nobody reads before it is set, behind a statement."""
        return self.names - self._after.get(id(statement), self.names)

    def _block(self, body: Sequence[ast.stmt], after: Names, loop: Body | None = None) -> Names:
        for each in reversed(body):
            self._after[id(each)] = after | self._caught | self._always
            after = self._statement(each, after)
        if loop is not None:
            self._heads[id(loop)] = after | self._caught | self._always
        return after

    def _statement(self, each: ast.stmt, after: Names) -> Names:
        match each:
            case ast.If():
                found = _read(each.test) | self._block(each.body, after) | self._block(each.orelse, after)
            case ast.For() | ast.AsyncFor():
                sets = frozenset(_stored(walk(each.target)))
                found = _read(each.iter) | self._loop(each, after, sets, each.target)
            case ast.While():
                found = self._loop(each, after, NONE, each.test)
            case ast.With() | ast.AsyncWith():
                found = self._with(each, after)
            case ast.Try() | ast.TryStar():
                ends = self._block(each.finalbody, after)
                handlers = NONE.union(*(self._block(one.body, ends) | _read_of(one.type) for one in each.handlers))
                found = self._try_block(each.body, self._block(each.orelse, ends), handlers | ends)
            case ast.Break() | ast.Continue() if self._loops:
                found = self._loops[-1][isinstance(each, ast.Continue)] | self._caught
            case ast.Return() | ast.Raise():
                found = _read(each) | self._caught | self._always
            case ast.Match():
                found = _read(each) | after
            case _:
                found = _read(each) | (after - _kills(each))
        return found

    def _with(self, each: ast.With | ast.AsyncWith, after: Names) -> Names:
        read = NONE.union(*(_read(item) for item in each.items))
        swallows = any(getattr(node, "attr", getattr(node, "id", "")) == "suppress" for node in walk(each))
        inside = self._try_block(each.body, after, after) if swallows else self._block(each.body, after)
        return read | (inside - frozenset(_stored(node for item in each.items for node in walk(item))))

    def _try_block(self, body: Sequence[ast.stmt], after: Names, handlers: Names) -> Names:
        before, self._caught = self._caught, self._caught | handlers
        found = self._block(body, after) | handlers
        self._caught = before
        return found

    def _loop(self, each: ast.For | ast.AsyncFor | ast.While, after: Names, sets: Names, reads: ast.AST) -> Names:
        """Return what is read from where a loop looks whether it goes on."""
        left = self._block(each.orelse, after)
        head = left | _read(reads)
        while True:
            self._loops.append((after, head))
            begins = self._block(each.body, head, each if isinstance(each, Loop) else None)
            self._loops.pop()
            more = head | (begins - sets)
            if more == head:
                return head
            head = more


def _kills(each: ast.stmt) -> Names:
    """Return what a statement that has no others inside sets in any case."""
    if isinstance(each, ast.Assign):
        return frozenset(_stored(node for target in each.targets for node in walk(target)))
    if isinstance(each, ast.AnnAssign) and each.value is not None:
        return frozenset(_stored(walk(each.target)))
    if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return frozenset({each.name})
    return NONE


def _read(node: ast.AST) -> Names:
    found = {each.id for each in nodes_of(node, ast.Name) if not isinstance(each.ctx, ast.Store)}
    augmented = (each.target for each in nodes_of(node, ast.AugAssign))
    return frozenset(found | {each.id for each in augmented if isinstance(each, ast.Name)})


def _read_of(node: ast.AST | None) -> Names:
    return NONE if node is None else _read(node)


def _inner(scope: ast.AST) -> Iterable[ast.AST]:
    """Yield the functions and classes that are right inside of a scope."""
    for each in ast.iter_child_nodes(scope):
        if isinstance(each, FUNCTIONS):
            yield each
        else:
            yield from _inner(each)


def _free(function: ast.AST) -> Names:
    """Return what a function, or the methods of a class, read of the variables around it."""
    inner = [*_inner(function)]
    skipped = {id(node) for each in inner for node in walk(each)}
    own = [node for node in walk(function) if id(node) not in skipped]
    read = NONE.union(*map(_free, inner), *(_read(node) for node in own if isinstance(node, ast.Name)))
    if isinstance(function, ast.ClassDef):
        return read
    declared = {name for each in own if isinstance(each, ast.Global | ast.Nonlocal) for name in each.names}
    arguments = {each.arg for each in own if isinstance(each, ast.arg)}
    return read - ((frozenset(_stored(own)) | arguments) - declared) | declared


def _stored(nodes: Iterable[ast.AST]) -> Iterable[str]:
    for each in nodes:
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            yield each.id
        elif isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield each.name
