"""Turns a script whose parts were found into one with a Session."""

import ast

from unicron_convert.loops import Loops
from unicron_convert.loss import Loss
from unicron_convert.ranks import RANK, VARIABLES
from unicron_convert.script import Script
from unicron_convert.shape import SAMPLER
from unicron_convert.source import UnusualError

RULES = 'docs/training.md, "The rules"'
GONE = frozenset(f"torch.distributed.{name}" for name in ("init_process_group", "destroy_process_group", "barrier"))
WRAPPERS = frozenset({"join", "no_sync", "register_comm_hook", "reducer", "require_backward_grad_sync"})
"""What only a wrapped model has."""


class Rewrite:
    """Makes all edits of a script."""

    def __init__(self, script: Script) -> None:
        self._script, self._ranks = script, script.ranks
        self._source, self._shape = script.source, script.shape

    def run(self) -> set[str]:
        """Make all edits; return the names of the loss.

        Raises:
            UnusualError: the script does something that can't be brought to a session.
        """
        self._groups()
        self._model()
        loops = Loops(self._script)
        accumulated = loops.accumulation()
        losses = Loss(self._script).rewrite(accumulated)
        self._source.replace(self._shape.step, f"{self._script.session}.step()")
        for statement in self._shape.zeroed:
            self._source.remove(statement)
        microbatches = loops.microbatches(accumulated)
        iterations = loops.loops()
        in_microbatch = self._script.microbatch
        if accumulated is not None:
            in_microbatch = f"({self._script.microbatch} // {self._source.operand(accumulated)})"
        self._source.settle()
        self._ranks.rewrite(in_microbatch, self._script.session)
        loops.inner(accumulated)
        self._begin(loops, iterations, microbatches)
        self._ranks.define()
        self._imports()
        self._source.settle()
        self._check_rest()
        self._remark_on_ranks()
        return losses

    def _remark_on_ranks(self) -> None:
        tell = self._script.tell
        if self._ranks.counts():
            text = f"the global batch is that of {self._script.count} ranks: --ranks says how many there were"
            tell(self._shape.outer, text)
        for node in self._ranks.seeded:
            tell(node, "what is drawn from here to the loop is what rank 0 drew; in the loop each microbatch is seeded")
        for node in self._ranks.told:
            tell(node, "before the loop workers have no rank yet: each does what rank 0 did")

    def _groups(self) -> None:
        for node in ast.walk(self._source.tree):
            path = self._source.path(node.func) if isinstance(node, ast.Call) else ""
            statement = self._source.parents.get(node)
            if not isinstance(node, ast.Call) or not isinstance(statement, ast.Expr):
                continue
            if path in GONE:
                above = self._source.scope(node) is not self._shape.scope or node.lineno < self._shape.outer.lineno
                if path.endswith("barrier") and above:
                    raise UnusualError(node, "a barrier before the loop: workers meet in session.iterations() only")
                self._source.remove(statement)
            elif path == "torch.cuda.set_device" and node.args and self._ranks.kind(node.args[0]) == RANK:
                self._source.remove(statement)  # each worker sees its own device alone

    def _model(self) -> None:
        """Leave the wrapper out, and the way through it."""
        wrap, shape = self._shape.wrap, self._shape
        call = wrap.value
        assert isinstance(call, ast.Call)  # noqa: S101 so it was found
        if shape.model == shape.wrapped:
            self._source.remove(wrap)
        else:
            (start, end), (first, last) = self._source.span(call), self._source.span(call.args[0])
            self._source.replace_span(start, first, "")
            self._source.replace_span(last, end, "")
        for node in ast.walk(self._source.tree):
            if self._of_model(node) == "module" and self._source.scope(node) is shape.scope:
                end = self._source.span(node)[1]
                self._source.replace_span(end - len(".module"), end, "")
        self._no_sync()

    def _of_model(self, node: ast.AST) -> str:
        """Return which attribute of the wrapped model this is; empty: none."""
        value = node.value if isinstance(node, ast.Attribute) else None
        ours = isinstance(node, ast.Attribute) and isinstance(value, ast.Name) and value.id == self._shape.model
        return node.attr if ours and isinstance(node, ast.Attribute) else ""

    def _no_sync(self) -> None:
        """Gradients are reduced when all microbatches are computed, whatever a script does to delay that."""
        for node in ast.walk(self._shape.outer):
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "attr", "") == "require_backward_grad_sync":
                self._source.remove(node)
            if not (isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "no_sync"):
                continue
            chosen = self._source.parents[node]
            if not isinstance(chosen, ast.IfExp) or node not in {chosen.body, chosen.orelse}:
                raise UnusualError(
                    node, "no_sync() for all of it, or not as `a if condition else b`: take it out first"
                )
            self._source.replace(chosen, self._source.of(chosen.orelse if chosen.body is node else chosen.body))

    def _begin(self, loops: Loops, iterations: str, microbatches: str) -> None:
        shape, session = self._shape, self._script.session
        seed = self._seed()
        given = [f"seed={seed}"] if seed else []
        given += [f"iterations={iterations}", f"microbatches={microbatches}"]
        others = "".join(f", {name}={name}" for name in shape.schedulers)
        lines = [f"{session} = Session({', '.join(given)})"]
        lines += [f"{session}.protect(model={shape.model}, optimizer={shape.optimizer}{others})"]
        for statement in shape.around()[0]:
            if loops.adds_up(statement):  # a worker may begin in an epoch's middle
                lines += self._source.of(statement).splitlines()
        self._source.insert(shape.outer.lineno, self._script.margin, lines)
        text = "a task file decides on iterations and microbatches where it runs; give it those of here"
        self._script.tell(shape.outer, f"{text}: {iterations}, and {microbatches}")

    def _seed(self) -> str:
        """Return what the script seeds torch with, as rank 0 did."""
        for node in ast.walk(self._shape.scope):
            if isinstance(node, ast.Call) and self._source.path(node.func) == "torch.manual_seed" and node.args:
                seed = node.args[0]
                if isinstance(seed, ast.BinOp) and isinstance(seed.op, ast.Add):
                    kinds = [self._ranks.kind(each) for each in (seed.left, seed.right)]
                    seed = seed.left if kinds[1] == RANK else seed.right if kinds[0] == RANK else seed
                plain = isinstance(seed, ast.Constant | ast.Name | ast.Attribute) and not self._ranks.kind(seed)
                if plain and node.lineno < self._shape.outer.lineno:
                    return self._source.of(seed)
        return ""

    def _imports(self) -> None:
        """Import what is new, and nothing that is not used any more of what we took out."""
        imports = [each for each in self._source.tree.body if isinstance(each, ast.Import | ast.ImportFrom)]
        body = self._source.tree.body
        titled = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
        line = (imports[-1].end_lineno or 0) + 1 if imports else (body[0].end_lineno or 0) + 1 if titled else 1
        self._source.insert(line, "", ["from unicron.train import Session"])
        for node in ast.walk(self._source.tree):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            bound = {each.asname or each.name.partition(".")[0]: each for each in node.names}
            gone = [name for name in bound if self._ours(name) and not self._source.uses(name)]
            if len(gone) == len(bound):
                self._source.remove(node)
            elif gone and isinstance(node, ast.ImportFrom):
                kept = [self._source.of(each) for name, each in bound.items() if name not in gone]
                self._source.replace(node, f"from {'.' * node.level}{node.module or ''} import {', '.join(kept)}")

    def _ours(self, name: str) -> bool:
        path = self._source.paths.get(name, "")
        return path.startswith(("torch.distributed", "torch.nn.parallel")) or path == "os"

    def _check_rest(self) -> None:
        """See that nothing is left that a session has no place for."""
        for node in ast.walk(self._source.tree):
            if not isinstance(node, ast.expr) or not self._source.live(node):
                continue
            path, whole = self._source.path(node), not isinstance(self._source.parents[node], ast.Attribute)
            if whole and path.startswith(("torch.distributed", "torch.nn.parallel")):
                raise UnusualError(node, f"{path}: there are no groups of a script's own, {RULES}, 5")
            if isinstance(node, ast.Call) and self._source.path(node.func) in SAMPLER and node is not self._sampler():
                raise UnusualError(node, f"data is chosen by rank: choose it by (iteration, microbatch), {RULES}, 1")
            if self._of_model(node) in WRAPPERS:
                raise UnusualError(node, f"{self._source.of(node)}: the model is not wrapped any more")
            if isinstance(node, ast.Constant) and node.value in VARIABLES:
                raise UnusualError(node, f"{node.value} is looked up here, and not bound to a variable before the loop")

    def _sampler(self) -> ast.Call | None:
        return self._shape.data.sampler if self._shape.data else None
