"""Instruments source code, so that its training loops report where they are.

Nothing of a program's source is touched; what is compiled of it has calls more in each loop that trains: one that hands
out what the loop goes over, one at the head of its body, one at its end, and one behind each statement that may have
made an update. A process that takes a lost one's place there leaves out what comes before.
"""

import ast
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from unicron.train.carry.variables import NAME
from unicron.train.loops.functions import Functions, called_names, facts_of, functions_of, has_gradients
from unicron.train.loops.handing import mark_handing_loops
from unicron.train.loops.liveness import FUNCTIONS, Liveness
from unicron.train.loops.trees import nodes_of, parse, uncollected, walk

_Scope = TypeVar("_Scope", ast.Module, ast.FunctionDef)

METHODS = frozenset({"staticmethod", "classmethod"})
"""Decorators that leave a function what it is."""

SEVERAL = 2
"""Statements of a function that train: from one call to the next it makes more than one update."""

Recorded = ast.For | ast.While | ast.FunctionDef


def instrument(
    source: bytes | str, path: str, name: str, functions: Functions | None = None, *, library: bool = False
) -> ast.Module:
    """Return what is to be run instead of a file.

    Args:
        source: of it.
        path: of it.
        name: of it, for the names of its loops.
        functions: what is known of functions, where not all of that is seen in this file.
        library: it is of a library: only loops that train for certain are instrumented.

    Raises:
        SyntaxError: it is no Python.
    """
    with uncollected():
        tree = parse(source, path)
        _Instrument(name, functions or functions_of([facts_of(tree)]), library=library).visit(tree)
        return ast.fix_missing_locations(tree)


def _is_plain_generator(node: ast.FunctionDef) -> bool:
    """Return whether a function is a generator to which nothing is sent."""
    if not nodes_of(node, ast.Yield, ast.YieldFrom):
        return False
    inner = {id(one) for each in walk(node) if isinstance(each, FUNCTIONS) and each is not node for one in walk(each)}
    own = [each for each in walk(node) if id(each) not in inner]
    yields = {id(each) for each in own if isinstance(each, ast.Yield | ast.YieldFrom)}
    alone = {id(each.value) for each in own if isinstance(each, ast.Expr)}
    bound = {getattr(each, "id", "") for each in node.decorator_list} <= METHODS
    return bool(yields) and yields <= alone and bound and not node.name.startswith("__")


def _assigned_names(body: Iterable[ast.AST]) -> Iterable[ast.Name]:
    """Yield the names that are assigned in this code."""
    names = (node for each in body for node in nodes_of(each, ast.Name))
    return (each for each in names if isinstance(each.ctx, ast.Store))


def _yields(node: ast.FunctionDef) -> bool:
    return bool(nodes_of(node, ast.Yield, ast.YieldFrom))


def _split_body(node: ast.FunctionDef) -> tuple[list[ast.stmt], list[ast.stmt], list[ast.stmt]]:
    """Return what a function begins with (its docstring, what is not its own), does, and returns."""
    begins = itertools.takewhile(
        lambda each: (
            isinstance(each, ast.Global | ast.Nonlocal)
            or (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
        ),
        node.body,
    )
    first, last = len(list(begins)), len(node.body) - isinstance(node.body[-1], ast.Return)
    return node.body[:first], node.body[first:last], node.body[last:]


class _Body(NamedTuple):
    """The body of a loop or function, as its source has it; `targets` are variables that it sets as it begins."""

    node: Recorded
    whole: Sequence[ast.stmt]
    targets: set[str]


class _Step(NamedTuple):
    """A statement of a body.

    Attributes:
        number: of the statements that are over once it is; those in branches count, too.
        mark: a call behind it; None where no new rank begins there.
        branches: of an `if` or `try` in whose branches there are marks, the steps of both, empty of one without.
    """

    number: int
    mark: ast.stmt | None
    branches: "list[list[_Step]]"


class _Instrument(ast.NodeTransformer):
    def __init__(self, name: str, found: Functions, *, library: bool) -> None:
        self._name, self._found, self._library = name, found, library
        self._scopes: list[Callable[[], Liveness]] = []

    def visit_Module(self, node: ast.Module) -> ast.Module:
        """Find out which variables are read where."""
        return self._visit_scope(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AsyncFunctionDef:
        """Leave a coroutine alone: others run while it waits."""
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """Instrument a function that may train; wrap a generator so that it knows how far it is."""
        if _is_plain_generator(node):
            mark_handing_loops(node, self._call)
            counted = ast.Attribute(ast.Name(NAME, ast.Load()), "counted_generator", ast.Load())
            node.decorator_list = [*node.decorator_list, ast.copy_location(counted, node)]
        if not self._may_train(node):
            return node
        begins, body, ending = _split_body(node)
        trains = [each for each in body if self._trains([each]) and not isinstance(each, ast.For | ast.While)]
        if len(trains) < SEVERAL or node.name not in self._found.repeated or _yields(node):
            return self._visit_scope(node)
        self._scopes.append(functools.cache(lambda: Liveness(node)))
        instrumented = self._body_instrumenter(node, body, ast.Constant(node.end_lineno), set())
        self.generic_visit(node)
        flag = ast.Assign([_flag(node, ast.Store())], self._call("begin_body", node))
        node.body = [*begins, ast.copy_location(flag, node), *instrumented(body), *ending]
        self._scopes.pop()
        return node

    def _may_train(self, node: ast.FunctionDef) -> bool:
        """Return whether a function may train, or one in it; what a model computes is left as fast as it is."""
        if node.name in self._found.training:
            return True
        return not self._library and node.name not in self._found.modelled

    def _trains(self, body: Iterable[ast.AST]) -> bool:
        return bool(called_names(body) & self._found.training)

    def _is_candidate(self, body: Iterable[ast.AST]) -> bool:
        """Return whether statements may train: they call something that is not known to be harmless."""
        return not self._library and bool(called_names(body) - self._found.harmless)

    def _visit_scope(self, node: _Scope) -> _Scope:
        self._scopes.append(functools.cache(lambda: Liveness(node)))  # of a scope without loops nobody asks
        self.generic_visit(node)
        self._scopes.pop()
        return node

    def visit_Call(self, node: ast.Call) -> ast.Call:
        """Wrap iterators so that they know how far they are."""
        if getattr(node.func, "id", "") == "iter" and len(node.args) == 1:
            node.func = ast.copy_location(
                ast.Attribute(ast.Name(NAME, ast.Load()), "counted_iterator", ast.Load()), node.func
            )
        self.generic_visit(node)
        return node

    def visit_For(self, node: ast.For) -> ast.For:
        """Have a loop that may train iterate over what `hand_out_items` returns, and note whether it is followed."""
        certain = self._trains(node.body)
        if certain or self._is_candidate(node.body):
            numbered, over = False, node.iter
            if isinstance(over, ast.Call) and getattr(over.func, "id", "") == "enumerate" and len(over.args) == 1:
                numbered, over = not over.keywords, over.args[0] if not over.keywords else over
            names = {each.id for each in nodes_of(node.target, ast.Name)}
            body = self._body_instrumenter(node, node.body, ast.Constant(None), names)
            items = self._call("hand_out_items", node, over, ast.Constant(numbered), ast.Constant(certain))
            begun = ast.Attribute(ast.Name(NAME, ast.Load()), "begun", ast.Load())
            both = ast.Tuple([items, ast.NamedExpr(_flag(node, ast.Store()), begun)], ast.Load())
            node.iter = ast.copy_location(ast.Subscript(both, ast.Constant(0), ast.Load()), node.iter)
            self.generic_visit(node)
            node.body = body(node.body)
            return node
        self.generic_visit(node)
        return node

    def visit_While(self, node: ast.While) -> ast.stmt:
        """Have a loop that may train ask before its test and its body, if it is followed."""
        certain = self._trains(node.body)
        if certain or self._is_candidate(node.body):
            body = self._body_instrumenter(node, node.body, ast.Constant(node.end_lineno), set())
            self.generic_visit(node)
            node.body = body(node.body)
            flag, alone = _flag(node, ast.Load()), ast.UnaryOp(ast.Not(), _flag(node, ast.Load()))
            tested = ast.BoolOp(ast.Or(), [alone, self._call("should_test", node)])
            inside = ast.BoolOp(ast.And(), [flag, self._call("should_enter", node)])
            entered = ast.BoolOp(ast.Or(), [inside, node.test])
            node.test = ast.copy_location(ast.BoolOp(ast.And(), [tested, entered]), node.test)
            begun = self._call("begin_while", node, ast.Constant(certain))
            before = ast.copy_location(ast.Assign([_flag(node, ast.Store())], begun), node)
            return ast.copy_location(ast.If(ast.Constant(True), [before, node], []), node)
        self.generic_visit(node)
        return node

    def _body_instrumenter(
        self, node: Recorded, whole: list[ast.stmt], last: ast.Constant, targets: set[str]
    ) -> Callable[[list[ast.stmt]], list[ast.stmt]]:
        """Return a function that instruments a body: it says where it is, and can be begun after an update.

        Args:
            node: the loop, or function.
            whole: its body.
            last: line at which it ends, if it does not say so by itself.
            targets: variables that it sets as it begins.
        """
        begins = self._call_statement("at_head", node, [last], targets | self._scopes[-1]().dead_at_head(node))
        steps = self._steps(_Body(node, whole, targets), whole)
        return lambda statements: [_if_followed(node, begins), *self._marked(node, steps, statements)]

    def _steps(
        self, body: "_Body", block: Sequence[ast.stmt], first: int = 0, behind: Sequence[ast.stmt] | None = None
    ) -> "list[_Step]":
        """Return the steps of a block of a body: of all of it, or of a branch of an `if` or `try` in it.

        Args:
            body: that is.
            block: its statements.
            first: how many steps of the body are before it.
            behind: the statements that follow on what it is a branch of; None of the body itself.
        """
        found, number = list[_Step](), first
        for count, each in enumerate(block, 1):
            rest, is_last = [*block[count:], *(behind or ())], count == len(block)
            updates, branches = self._may_update(each, body.whole), list[list[_Step]]()
            for branch in _branches(each) if updates else ():
                steps = self._steps(body, branch, number, rest)
                branches.append(steps if any(one.mark or one.branches for one in steps) else [])
                number = branches[-1][-1].number if branches[-1] else number
            number += 1
            ends = is_last and behind is None
            mark = None
            if ends or (updates and not (is_last and behind is not None) and not self._reads_gradients(rest)):
                assigned = block[:count] if behind is None else body.whole
                same = body.targets - {one.id for one in _assigned_names(assigned)}
                how, long = ("at_end", []) if ends else ("after_update", [ast.Constant(self._takes_long(rest))])
                dead = same | self._scopes[-1]().dead_after(each)
                mark = self._call_statement(how, body.node, [ast.Constant(number), *long], dead)
            found.append(_Step(number, mark, branches if any(branches) else []))
        return found

    def _marked(self, node: Recorded, steps: "Sequence[_Step]", block: Sequence[ast.stmt]) -> list[ast.stmt]:
        """Return a block with its marks; a new rank that begins behind one leaves out what comes before.

        Args:
            node: the loop, or function.
            steps: of the block.
            block: its statements, as they are to be run.
        """
        found, begun = list[ast.stmt](), 0
        for at, (step, each) in enumerate(zip(steps, block, strict=True)):
            if step.branches and at > begun:
                found.append(self._if_due(node, steps[at - 1], block[begun:at]))
                begun = at
            if step.branches and isinstance(each, ast.If | ast.Try):
                self._enter_branches(node, step, each)
            if step.mark is not None:
                found += [self._if_due(node, step, block[begun : at + 1]), _if_followed(node, step.mark)]
                begun = at + 1
        return [*found, *block[begun:]]

    def _if_due(self, node: Recorded, last: "_Step", statements: Sequence[ast.stmt]) -> ast.stmt:
        """Return statements that are run unless a new rank begins behind the last of them."""
        alone = ast.UnaryOp(ast.Not(), _flag(node, ast.Load()))
        due = ast.BoolOp(ast.Or(), [alone, self._call("should_run", node, ast.Constant(last.number))])
        return ast.copy_location(ast.If(due, list(statements), []), statements[0])

    def _enter_branches(self, node: Recorded, step: "_Step", each: ast.If | ast.Try) -> None:
        """Have a new rank that begins in a branch come there, whatever the test says."""
        begins, ends = (self._begins_in(node, steps) for steps in step.branches)
        if begins is not None:
            each.body = self._marked(node, step.branches[0], each.body)
        if ends is not None:
            each.orelse = self._marked(node, step.branches[1], each.orelse)
        if isinstance(each, ast.If):
            test = each.test if begins is None else ast.BoolOp(ast.Or(), [begins, each.test])
            test = test if ends is None else ast.BoolOp(ast.And(), [ast.UnaryOp(ast.Not(), ends), test])
            each.test = ast.copy_location(test, each)

    def _begins_in(self, node: Recorded, branch: "Sequence[_Step]") -> ast.expr | None:
        """Return what finds out whether a new rank begins in a branch; None where there is no mark in it."""
        marked = [each.number for each in _all_steps(branch) if each.mark is not None]
        if not marked:
            return None
        inside = self._call("begins_between", node, ast.Constant(marked[0]), ast.Constant(marked[-1]))
        return ast.BoolOp(ast.And(), [_flag(node, ast.Load()), inside])

    def _may_update(self, statement: ast.stmt, whole: Iterable[ast.stmt]) -> bool:
        """Return whether a statement of a body may make an update: one that is known to, where there is such."""
        if called_names([statement]) & (self._found.training | {"step"}):
            return True
        return not self._trains(whole) and self._is_candidate([statement])

    def _takes_long(self, rest: Sequence[ast.stmt]) -> bool:
        """Return whether statements may take long, or make another update: by a loop, a collective, or training."""
        loops = any(nodes_of(one, ast.For, ast.While) for one in rest)
        return loops or bool(called_names(rest) & (self._found.training | self._found.long))

    def _reads_gradients(self, rest: Sequence[ast.stmt]) -> bool:
        """Return whether statements look at gradients before they make others."""
        looks = itertools.takewhile(lambda each: not called_names([each]) & self._found.training, rest)
        return any(has_gradients(each) or called_names([each]) & self._found.gradients for each in looks)

    def _call_statement(self, how: str, node: Recorded, first: list[ast.Constant], dead: Iterable[str]) -> ast.stmt:
        names = [ast.Constant(each) for each in sorted(dead)]
        return ast.copy_location(ast.Expr(self._call(how, node, *first, *names)), node)

    def _call(self, name: str, loop: Recorded, *arguments: ast.expr) -> ast.expr:
        function = ast.Attribute(ast.Name(NAME, ast.Load()), name, ast.Load())
        place = ast.Constant(f"{self._name}:{loop.lineno}")
        return ast.copy_location(ast.Call(function, [place, *arguments], []), loop)


def _branches(each: ast.stmt) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """Return the branches of a statement in which a new rank may begin, as nothing has to be done to enter them."""
    match each:
        case ast.If():
            return each.body, each.orelse
        case ast.Try():
            return each.body, []
    return [], []


def _all_steps(block: "Sequence[_Step]") -> "Iterable[_Step]":
    """Yield the steps of a block, in their order; those of branches before the one that they are in."""
    for each in block:
        for branch in each.branches:
            yield from _all_steps(branch)
        yield each


def _flag(node: Recorded, context: ast.Load | ast.Store) -> ast.Name:
    """Return the variable that says whether a loop is followed; it is none of the script's."""
    return ast.Name(f"{NAME}{node.lineno}_{node.col_offset}__", context)


def _if_followed(node: Recorded, mark: ast.stmt) -> ast.stmt:
    return ast.copy_location(ast.If(_flag(node, ast.Load()), [mark], []), mark)
