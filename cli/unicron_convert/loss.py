"""The loss: a session takes the mean over microbatches itself, and tells that of the global batch."""

import ast
from itertools import takewhile

from unicron_convert.flow import Flow
from unicron_convert.ranks import WORLD
from unicron_convert.script import Script
from unicron_convert.shape import after
from unicron_convert.source import UnusualError

REDUCED = frozenset({"detach", "item", "cpu", "float"})


class Loss:
    """Edits what a script does with its loss."""

    def __init__(self, script: Script) -> None:
        self._script, self._ranks = script, script.ranks
        self._source, self._shape = script.source, script.shape

    def rewrite(self, accumulated: ast.expr | None) -> set[str]:
        """Have the session's backward pass, of the whole loss; return the names that the loss has.

        Args:
            accumulated: microbatches of a rank in an iteration, by which the script divides; None: there is one.

        Raises:
            UnusualError: a session would come to another gradient.
        """
        shape, source = self._shape, self._source
        (start, end), (first, last) = source.span(shape.backward), source.span(shape.loss)
        names = {shape.loss.id} if isinstance(shape.loss, ast.Name) else set[str]()
        if accumulated is not None:
            if isinstance(shape.loss, ast.BinOp) and self._is_share(shape.loss, accumulated):
                names |= {shape.loss.left.id} if isinstance(shape.loss.left, ast.Name) else set()
                last = self._before_operator(shape.loss)
            elif not names or not self._undivide(accumulated, names):
                raise UnusualError(
                    shape.backward,
                    f"expected the loss divided by {source.of(accumulated)}: a session takes their mean",
                )
        source.replace_span(start, first, f"{self._script.session}.backward(")
        source.replace_span(last, end, ")")
        for node in (node for part in shape.computed for node in ast.walk(part)):
            by = node.right if isinstance(node, ast.BinOp) else node.value if isinstance(node, ast.AugAssign) else None
            if by is not None and isinstance(getattr(node, "op", None), ast.Div) and self._ranks.kind(by) == WORLD:
                raise UnusualError(node, "this divides by the number of ranks, over which DDP has the mean already")
        self._mean_loss(names, accumulated)
        return names

    def _is_share(self, node: ast.BinOp, accumulated: ast.expr) -> bool:
        return isinstance(node.op, ast.Div) and self._same(node.right, accumulated)

    def _same(self, left: ast.expr, right: ast.expr) -> bool:
        scope = self._shape.scope
        if isinstance(left, ast.Name) and isinstance(right, ast.Name) and left.id == right.id:
            return True
        return ast.dump(self._source.value(left, scope)) == ast.dump(self._source.value(right, scope))

    def _before_operator(self, node: ast.BinOp) -> int:
        """Return where the left operand ends, with its parentheses."""
        place = self._source.text.index("/", self._source.span(node.left)[1])
        return len(self._source.text[:place].rstrip())

    def _undivide(self, accumulated: ast.expr, names: set[str]) -> bool:
        """Leave the division out of what the loss was last bound to; return whether there was one."""
        made: list[ast.Assign | ast.AugAssign] = [
            node
            for part in self._shape.computed
            for node in ast.walk(part)
            if isinstance(node, ast.Assign | ast.AugAssign)
            and any(
                isinstance(each, ast.Name) and each.id in names
                for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
                for each in ast.walk(target)
            )
        ]
        made = sorted(made, key=lambda each: each.lineno)
        if not made or made[-1].lineno > self._shape.backward.lineno:
            return False
        last, value = made[-1], made[-1].value
        if any(isinstance(each, ast.If | ast.For | ast.While) for each in self._up(last)):
            return False
        if isinstance(last, ast.AugAssign):
            if not (isinstance(last.op, ast.Div) and self._same(value, accumulated)):
                return False
            self._source.remove(last)
            return True
        if not (isinstance(value, ast.BinOp) and self._is_share(value, accumulated)):
            return False
        if isinstance(value.left, ast.Name) and value.left.id in names:
            self._source.remove(last)
        else:
            names |= {value.left.id} if isinstance(value.left, ast.Name) else set()
            self._source.replace_span(self._before_operator(value), self._source.span(value)[1], "")
        return True

    def _up(self, statement: ast.stmt) -> list[ast.AST]:
        """Return what a statement of a microbatch stands in."""
        return [
            *takewhile(lambda each: each not in {self._shape.inner, self._shape.loop}, self._source.around(statement))
        ]

    def _mean_loss(self, names: set[str], accumulated: ast.expr | None) -> None:
        """Have what is told of the loss behind the microbatches be that of the global batch."""
        flow = Flow([*self._shape.behind, *self._shape.around()[1], *after(self._source, self._shape)])
        for node in (node for name in names for node in flow.reads.get(name, [])):
            if not self._source.live(node):
                continue
            made = [each for each in self._source.assigned(node.id, self._shape.scope) if each.lineno < node.lineno]
            if any(each.lineno > self._shape.backward.lineno for each in made):
                raise UnusualError(
                    node, f"{node.id} is a microbatch's loss, or another one: give the other another name"
                )
            whole: ast.AST = node
            while (outer := self._reading(whole)) is not None:
                whole = outer
            parent = self._source.parents[whole]
            if isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Mult) and accumulated is not None:
                whole = parent if parent.left is whole and self._same(parent.right, accumulated) else whole
            self._source.replace(whole, f"{self._script.session}.loss")

    def _reading(self, node: ast.AST) -> ast.AST | None:
        """Return the call that makes a number of a loss, if there is one around it."""
        attribute = self._source.parents[node]
        call = self._source.parents[attribute]
        if not isinstance(attribute, ast.Attribute):
            return None
        if not (isinstance(call, ast.Call) and call.func is attribute and attribute.attr in REDUCED):
            raise UnusualError(
                node, f"what is behind the microbatches has session.loss, a number without .{attribute.attr}"
            )
        return call
