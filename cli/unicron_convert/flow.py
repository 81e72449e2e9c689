"""Which variables statements read from before, which they bind, and which functions they may come to."""

import ast
from collections.abc import Iterable, Sequence

from unicron.train.instrument import called


class Flow(ast.NodeVisitor):
    """What is read of variables, in the order in which it is run, before it is bound here.

    Args:
        statements: one after the other.

    Attributes:
        reads: names that are read, or may be, as they were before, and where.
        binds: names that are bound, or may be.
    """

    def __init__(self, statements: Iterable[ast.AST]) -> None:
        self.reads: dict[str, list[ast.Name]] = {}
        self.binds: set[str] = set()
        self._surely: set[str] = set()
        for each in statements:
            self.visit(each)

    def visit_Name(self, node: ast.Name) -> None:
        """Note a variable."""
        if isinstance(node.ctx, ast.Load):
            if node.id not in self._surely:
                self.reads.setdefault(node.id, []).append(node)
        else:
            self._bind(node.id)

    def visit_Assign(self, node: ast.Assign) -> None:
        """Read first."""
        self.visit(node.value)
        for each in node.targets:
            self.visit(each)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Read first."""
        if node.value is not None:
            self.visit(node.value)
            self.visit(node.target)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Read what is changed, too."""
        self.visit(node.value)
        if isinstance(node.target, ast.Name):
            self.visit(ast.copy_location(ast.Name(node.target.id, ast.Load()), node.target))
        self.visit(node.target)

    def visit_For(self, node: ast.For) -> None:
        """Read first; its body may be left out."""
        self.visit(node.iter)
        self._perhaps([node.target, *node.body], node.orelse)

    def visit_While(self, node: ast.While) -> None:
        """Leave its body out, perhaps."""
        self.visit(node.test)
        self._perhaps(node.body, node.orelse)

    def visit_If(self, node: ast.If) -> None:
        """Take one of its branches."""
        self.visit(node.test)
        self._perhaps(node.body, node.orelse)

    def _perhaps(self, *branches: Sequence[ast.AST]) -> None:
        """Take only for bound what all branches bind."""
        before, sure = set(self._surely), list[set[str]]()
        for branch in branches:
            self._surely = set(before)
            for each in branch:
                self.visit(each)
            sure.append(self._surely)
        self._surely = set.intersection(*sure)

    def _bind(self, name: str) -> None:
        self.binds.add(name)
        self._surely.add(name)

    def visit_comprehension_like(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        """Keep variables of its own apart."""
        inside = Flow([])
        for each in node.generators:
            for part in (each.iter, each.target, *each.ifs):
                inside.visit(part)
        for value in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            inside.visit(value)
        self._read(inside)

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_comprehension_like  # noqa: N815

    def visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        """Take what it reads from outside for read here."""
        inside = Flow([])
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        for argument in every:
            if argument is not None:
                inside._bind(argument.arg)
        for each in [node.body] if isinstance(node, ast.Lambda) else node.body:
            inside.visit(each)
        self._read(inside)
        if not isinstance(node, ast.Lambda):
            self._bind(node.name)

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = visit_function  # noqa: N815

    def _read(self, inside: "Flow") -> None:
        for name, nodes in inside.reads.items():
            if name not in self._surely:
                self.reads.setdefault(name, []).extend(nodes)


def microbatch_part(body: Sequence[ast.stmt], last: ast.stmt, kept: frozenset[str]) -> int:
    """Return with which statement of an iteration the computation of a microbatch begins.

    Args:
        body: of the loop.
        last: statement that runs the backward pass.
        kept: names that are there for all microbatches, such as the model.
    """
    end = body.index(last)
    needed = {*Flow([last]).reads} - kept
    begin = end
    for place in range(end - 1, -1, -1):
        statement = body[place]
        flow = Flow([statement])
        # x.normal_() makes data as well
        touched = isinstance(statement, ast.Expr) and called([statement]) != {"print"} and needed & {*flow.reads}
        if flow.binds & needed or touched:
            begin = place
            needed |= {*flow.reads} - kept
    return begin


def reachable(tree: ast.AST, statements: Iterable[ast.AST]) -> list[ast.FunctionDef]:
    """Return the functions of a file that statements may come to; methods of its classes they may all come to."""
    names, found = called(statements), list[ast.FunctionDef]()
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    new = [each for node in classes for each in node.body if isinstance(each, ast.FunctionDef)]
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    while new := [*new, *(each for each in functions if each.name in names and each not in found and each not in new)]:
        found += new
        for each in new:
            names |= called(each.body)
        new = []
    return found
