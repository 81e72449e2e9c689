"""What all edits of a script share: its parts, the names that are new in it, and what is told of it."""

import ast

from unicron_convert.ranks import Ranks
from unicron_convert.shape import Shape
from unicron_convert.source import Source, UnusualError


class Script:
    """A script on its way to a Session.

    Args:
        source: of it.
        shape: its parts.
        count: ranks that it was started with.

    Attributes:
        ranks: what it does by its rank.
        remarks: line, and what has to be looked at there.
        session, iteration, microbatch: names of what is new.
        margin: what stands before its outermost loop.
        unit: by what loops are indented.

    Raises:
        UnusualError: its loops are written in a way that can't be taken apart.
    """

    def __init__(self, source: Source, shape: Shape, count: int) -> None:
        self.source, self.shape, self.count = source, shape, count
        self.ranks = Ranks(source, shape, count)
        self.remarks: list[tuple[int, str]] = []
        self.session, self.iteration = source.fresh("session"), source.fresh("iteration")
        self.microbatch = source.fresh("microbatch")
        self.margin = source.margin(shape.outer)
        loops = [each for each in (shape.epochs, shape.loop, shape.inner) if each is not None]
        units = {source.margin(each.body[0]).removeprefix(source.margin(each)) for each in loops}
        self.unit = next(iter(units))
        if self.margin.strip() or len(units) > 1 or not self.unit or self.unit.strip():
            raise UnusualError(shape.outer, "expected the loop and its body on lines of their own, evenly indented")
        for each in (statement for loop in loops for statement in loop.body):
            if source.margin(each).strip() or source.text[source.span(each)[1] :].lstrip(" \t")[:1] == ";":
                raise UnusualError(each, "several statements on one line: have them on lines of their own")

    def tell(self, node: ast.AST, text: str) -> None:
        """Say what has to be looked at."""
        self.remarks.append((getattr(node, "lineno", 0), text))
