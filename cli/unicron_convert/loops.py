"""The loops: over the session's iterations, all epochs in one, and in each over its microbatches."""

import ast
from collections.abc import Sequence

from unicron.train.instrument import called
from unicron_convert.flow import Flow
from unicron_convert.ranks import OUTPUT, RANK, WORDED, WORLD
from unicron_convert.script import Script
from unicron_convert.shape import Data, data_of
from unicron_convert.source import UnusualError

AGAIN = frozenset({"train", "eval", "set_epoch"})
"""What is as good in each iteration as it is once an epoch."""


class Loops:
    """Edits the loops of a script."""

    def __init__(self, script: Script) -> None:
        self._script, self._ranks = script, script.ranks
        self._source, self._shape = script.source, script.shape

    def accumulation(self) -> ast.expr | None:
        """Return how many microbatches a rank computes in an iteration; None: one."""
        inner = self._shape.inner
        if inner is None:
            return None
        counts = self._range(inner.iter)
        if counts is None or counts[0] or not isinstance(inner.target, ast.Name):
            raise UnusualError(inner, "expected `for ... in range(COUNT)` over the microbatches of a rank")
        return counts[1]

    def _range(self, over: ast.expr) -> tuple[int, ast.expr, str] | None:
        """Return with which number a `range` begins, the expression at which it ends, and how many there are."""
        if not (isinstance(over, ast.Call) and self._source.path(over.func) == "range" and not over.keywords):
            return None
        if {*Flow(over.args).reads} & Flow([self._shape.outer]).binds:
            raise UnusualError(over, "how often this loop runs is not the same each time")
        if len(over.args) == 1:
            return 0, over.args[0], self._source.of(over.args[0])
        first = over.args[0]
        if len(over.args) != 2 or not isinstance(first, ast.Constant) or not isinstance(first.value, int):
            return None
        last = over.args[1]
        if first.value == 0:
            return 0, last, self._source.of(last)
        if isinstance(last, ast.BinOp) and isinstance(last.op, ast.Add) and ast.dump(last.right) == ast.dump(first):
            return first.value, last, self._source.of(last.left)
        return first.value, last, f"{self._source.operand(last)} - {first.value}"

    def microbatches(self, accumulated: ast.expr | None) -> str:
        """Return how many microbatches a global batch has."""
        if accumulated is None:
            self._ranks.counted = True
            return str(self._script.count)
        value = self._source.value(accumulated, self._shape.scope)
        shared = isinstance(value, ast.BinOp) and isinstance(value.op, ast.FloorDiv)
        if shared and isinstance(value, ast.BinOp) and self._ranks.kind(value.right) == WORLD:
            return self._source.of(value.left)
        self._ranks.counted = True
        text = self._source.operand(accumulated)
        return text if self._script.count == 1 else f"{self._script.count} * {text}"

    def loops(self) -> str:
        """Have the session's iterations instead of the script's; return how many there are."""
        shape, source = self._shape, self._source
        loop = shape.loop
        if isinstance(loop, ast.While):
            return self._counted(loop)
        counts = self._range(loop.iter)
        if counts is None:
            return self._batches(loop)
        if not isinstance(loop.target, ast.Name):
            raise UnusualError(loop, "expected one variable that counts iterations")
        first, _, text = counts
        if shape.epochs is not None:
            text = self._flatten(loop.target.id, first, text)
        else:
            source.replace(loop.iter, f"{self._script.session}.iterations()")
            if first:
                source.insert(loop.body[0].lineno, source.margin(loop.body[0]), [f"{loop.target.id} += {first}"])
        self._split()
        return text

    def _counted(self, loop: ast.While) -> str:
        test, source = loop.test, self._source
        plain = isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Lt)
        if not plain or not isinstance(test, ast.Compare) or not isinstance(test.left, ast.Name) or self._shape.epochs:
            raise UnusualError(loop, "expected `while iteration < COUNT`, with no loop around it")
        name = test.left.id
        made = sorted(source.assigned(name, self._shape.scope), key=lambda each: each.lineno)
        begins = made[0] if made else loop
        zero = isinstance(begins, ast.Assign) and isinstance(begins.value, ast.Constant) and begins.value.value == 0
        once = len(made) == 2 and _counts_on(made[1]) and made[1] in loop.body
        if not once or not zero or begins.lineno > loop.lineno:
            raise UnusualError(begins, f"expected {name} = 0 before the loop, and {name} += 1 once in it")
        if made[1] not in self._shape.behind:
            raise UnusualError(made[1], f"expected {name} += 1 behind the update")
        self._split()
        start = source.span(loop)[0]
        source.replace_span(start, self._header_end(loop), f"for {name} in {self._script.session}.iterations():")
        return source.of(test.comparators[0])

    def _batches(self, loop: ast.For) -> str:
        """Have batches by (iteration, microbatch) that a DataLoader hands out by rank."""
        shape, over, target, number = self._shape, loop.iter, loop.target, self._source.fresh("place")
        if isinstance(over, ast.Call) and self._source.path(over.func) == "enumerate" and len(over.args) == 1:
            if not isinstance(target, ast.Tuple) or len(target.elts) != 2 or not isinstance(target.elts[0], ast.Name):
                raise UnusualError(loop, "expected `for number, batch in enumerate(loader)`")
            over, number, target = over.args[0], target.elts[0].id, target.elts[1]
        if shape.inner is not None:
            raise UnusualError(shape.inner, "accumulation over one and the same batch")
        shape.data = data_of(self._source, shape, over, target)
        bound = {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}
        while shape.first and any(
            isinstance(node, ast.Name) and node.id in bound for each in shape.before for node in ast.walk(each)
        ):
            shape.first -= 1
        self._sampler(shape.data)
        text = self._flatten(number, 0, f"len({shape.data.name})")
        self._split(self._draw(shape.data, number))
        return text

    def _sampler(self, data: Data) -> None:
        """Have as many parts of the data as there were ranks."""
        call, names = data.sampler, ("dataset", "num_replicas", "rank", "shuffle", "seed", "drop_last")
        given = dict(zip(names, call.args, strict=False)) | {each.arg or "": each.value for each in call.keywords}
        for name, kind, text in (("num_replicas", WORLD, str(self._script.count)), ("rank", RANK, "0")):
            value = given.get(name)
            if value is None:
                end = max(self._source.span(each)[1] for each in [*call.args, *(each.value for each in call.keywords)])
                self._source.replace_span(end, end, f", {name}={text}")
            elif self._ranks.kind(value) != kind:
                raise UnusualError(call, f"expected the {kind} for {name} of this DistributedSampler")
        self._script.tell(
            data.loader, f"batches of {data.name} are made in the training process now, none ahead of time"
        )

    def _draw(self, data: Data, number: str) -> list[str]:
        index, indices, loader = self._source.fresh("index"), self._source.fresh("indices"), data.name
        size = f"{loader}.batch_size"
        parts = data.target.elts if isinstance(data.target, ast.Tuple) else []
        target = ", ".join(map(self._source.of, parts)) if len(parts) > 1 else self._source.of(data.target)
        return [
            f"{loader}.sampler.rank = {self._script.microbatch}",
            f"{indices} = list({loader}.sampler)[{number} * {size} : ({number} + 1) * {size}]",
            f"{target} = {loader}.collate_fn([{loader}.dataset[{index}] for {index} in {indices}])",
        ]

    def _split(self, drawn: Sequence[str] = ()) -> None:
        """Have a loop over microbatches around what computes one, with lines that draw its data."""
        shape, source = self._shape, self._source
        if shape.inner is not None:
            return
        for statement in shape.computed[:-1]:
            if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr | ast.With):
                raise UnusualError(
                    statement, "this stands between data and backward pass: move it before or behind both"
                )
        first, last = shape.computed[0], shape.computed[-1]
        margin = source.margin(shape.loop.body[0])
        if shape.epochs is not None:
            margin = margin.removesuffix(self._script.unit)
        source.insert(
            first.lineno, margin, [f"for {self._script.microbatch} in {self._script.session}.microbatches():"]
        )
        source.insert(first.lineno, margin + self._script.unit, drawn)
        source.shift(first.lineno, last.end_lineno or 0, self._script.unit, 1)

    def _flatten(self, number: str, first: int, length: str) -> str:
        """Have one loop over all iterations of all epochs; return how many there are."""
        shape, source, epochs = self._shape, self._source, self._shape.epochs
        margin = self._script.margin + self._script.unit
        header = [f"for {self._script.iteration} in {self._script.session}.iterations():"]
        body = shape.loop.body
        counts = (0, None, "") if epochs is None else self._range(epochs.iter)
        if counts is None or (epochs is not None and not isinstance(epochs.target, ast.Name)):
            raise UnusualError(epochs, "expected `for epoch in range(COUNT)`")
        if epochs is None:
            head = [f"{number} = {self._script.iteration}"]
        else:
            assert isinstance(epochs.target, ast.Name)  # noqa: S101 said above
            head = [f"{epochs.target.id}, {number} = divmod({self._script.iteration}, {length})"]
            head += [f"{epochs.target.id} += {counts[0]}"] * (counts[0] > 0)
        head += [f"{number} += {first}"] * (first > 0)
        outer = shape.outer
        source.replace_span(source.span(outer)[0], self._header_end(outer), header[0])
        source.insert(outer.body[0].lineno, margin, head)
        if epochs is None:
            return length
        begin = source.line(self._header_end(shape.loop)) + 1
        source.replace_span(source.at(shape.loop.lineno), source.at(begin), "")
        source.shift(begin, body[-1].end_lineno or 0, self._script.unit, -1)
        self._epoch_ends(number, first, length if not first else f"{length} + {first}")
        return f"{self._factor(counts[2])} * {self._factor(length)}"

    @staticmethod
    def _factor(text: str) -> str:
        return (
            text
            if isinstance(ast.parse(text, mode="eval").body, ast.Name | ast.Constant | ast.Call | ast.Attribute)
            else f"({text})"
        )

    def _epoch_ends(self, number: str, first: int, length: str) -> None:
        """Have what an epoch does before and after its iterations done in its first and its last."""
        before, after = self._shape.around()
        margin, source = self._script.margin + self._script.unit, self._source
        for statement in before:
            called_there = called([statement]) - WORDED
            if (called_there and called_there <= OUTPUT) or self.adds_up(statement) or self._ranks.by_first(statement):
                source.insert(statement.lineno, margin, [f"if {number} == {first}:"])
                source.shift(statement.lineno, statement.end_lineno or 0, self._script.unit, 1)
            elif not isinstance(statement, ast.Expr | ast.Assign):
                raise UnusualError(statement, "this stands at the beginning of each epoch: have it in the iterations")
            elif not called_there <= AGAIN:
                self._script.tell(
                    statement, "once an epoch, now done in each iteration, as a worker may begin with any"
                )
        if after:
            source.insert(after[0].lineno, margin, [f"if {number} + 1 == {length}:"])
            source.shift(after[0].lineno, after[-1].end_lineno or 0, self._script.unit, 1)

    def adds_up(self, statement: ast.stmt) -> bool:
        """Return whether something begins anew with each epoch, and is added up in its iterations."""
        if not isinstance(statement, ast.Assign):
            return False
        names = {node.id for node in ast.walk(statement.targets[0]) if isinstance(node, ast.Name)}
        sums = [node.target for node in ast.walk(self._shape.loop) if isinstance(node, ast.AugAssign)]
        clock = isinstance(statement.value, ast.Call) and self._source.path(statement.value.func).startswith("time.")
        return clock or any(isinstance(each, ast.Name) and each.id in names for each in sums)

    def _header_end(self, loop: ast.For | ast.While) -> int:
        """Return the place behind the colon of a loop."""
        behind = self._source.span(loop.iter if isinstance(loop, ast.For) else loop.test)[1]
        return self._source.text.index(":", behind) + 1

    def inner(self, accumulated: ast.expr | None) -> None:
        """Have the session's microbatches instead of a rank's."""
        inner, source = self._shape.inner, self._source
        if inner is None or accumulated is None:
            return
        assert isinstance(inner.target, ast.Name)  # noqa: S101 looked at before
        source.replace(inner.iter, f"{self._script.session}.microbatches()")
        name = inner.target.id
        read = any(source.live(node) for node in Flow(inner.body).reads.get(name, []))
        if read or source.uses(self._script.microbatch):
            if read:
                margin = source.margin(inner.body[0])
                margin = margin.removesuffix(self._script.unit) if self._shape.epochs else margin
                text = f"{name} = {self._script.microbatch} % {source.operand(accumulated)}"
                source.insert(inner.body[0].lineno, margin, [text])
            source.replace(inner.target, self._script.microbatch)


def _counts_on(statement: ast.stmt) -> bool:
    if not (isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add)):
        return False
    return isinstance(statement.value, ast.Constant) and statement.value.value == 1
