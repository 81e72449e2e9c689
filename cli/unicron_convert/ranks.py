"""What a script does by its rank and the number of ranks, and what becomes of it."""

import ast
from dataclasses import dataclass, field

from unicron_convert.shape import SAMPLER, Shape
from unicron_convert.source import FUNCTIONS, Source, UnusualError

RANK, WORLD, MAIN = "rank", "number of ranks", "whether it is rank 0"

CALLS = {
    "torch.distributed.get_rank": RANK,
    "torch.distributed.get_node_local_rank": RANK,
    "torch.distributed.get_world_size": WORLD,
}
VARIABLES = {
    "RANK": RANK,
    "LOCAL_RANK": RANK,
    "GROUP_RANK": RANK,
    "SLURM_PROCID": RANK,
    "SLURM_LOCALID": RANK,
    "WORLD_SIZE": WORLD,
    "SLURM_NTASKS": WORLD,
}
SEEDS = frozenset(
    f"{each}.{name}" for each in ("torch", "torch.cuda", "numpy.random", "random") for name in ("manual_seed", "seed")
) | {"torch.cuda.manual_seed_all", "set_seed", "seed_everything", "seed_all"}
DEVICES = frozenset({"device", "to", "cuda", "set_device", "device_count"})
WORDED = frozenset({"format", "str"})
OUTPUT = frozenset({"print", "info", "debug", "warning", "error", "log", "write"})


@dataclass
class Ranks:
    """The variables that hold a script's rank, or how many there are.

    Args:
        source: of the script.
        shape: of it.
        count: ranks that it was started with.
    """

    source: Source
    shape: Shape
    count: int
    names: dict[str, str] = field(default_factory=dict)
    told: list[ast.AST] = field(default_factory=list)
    seeded: list[ast.AST] = field(default_factory=list)
    counted: bool = False

    def __post_init__(self) -> None:
        for node in ast.walk(self.source.tree):
            if isinstance(node, ast.Assign):
                self._define(node)
        for node in ast.walk(self.source.tree):  # whether it is the first one is known from the rank
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and self._compared(node.value):
                self._name(node.targets[0], MAIN)

    def kind(self, node: ast.AST) -> str:
        """Return what an expression is: `RANK`, `WORLD`, `MAIN`; empty where it is none of them."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, "") if self._seen(node) else ""
        return self._told(node)

    def _told(self, node: ast.AST) -> str:
        """Return what an expression asks torch.distributed, or the environment, for."""
        path = self.source.path(node.func) if isinstance(node, ast.Call) else ""
        if path in CALLS:
            return CALLS[path]
        if isinstance(node, ast.Call) and path == "int" and node.args:
            return self._told(node.args[0])
        if isinstance(node, ast.Call) and path in {"os.environ.get", "os.getenv"} and node.args:
            key: ast.AST = node.args[0]
        elif isinstance(node, ast.Subscript) and self.source.path(node.value) == "os.environ":
            key = node.slice
        else:
            return ""
        return VARIABLES.get(str(key.value), "") if isinstance(key, ast.Constant) else ""

    def _define(self, node: ast.Assign) -> None:
        target, value = node.targets[0], node.value
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            pairs = [*zip(target.elts, value.elts, strict=True)]
        for to, what in pairs:
            if isinstance(to, ast.Name) and (kind := self._told(what)):
                self._name(to, kind)

    def _name(self, target: ast.Name, kind: str) -> None:
        made = self.source.assigned(target.id, self.source.scope(target))
        scope = self.source.scope(target)
        if len(made) > 1 or scope not in {self.shape.scope, self.source.tree} or self._place(target) != "above":
            raise UnusualError(target, f"{target.id}, {kind}, is to be bound once, before the loop")
        self.names[target.id] = kind

    def _seen(self, node: ast.Name) -> bool:
        """Return whether a variable is not another one of the same name, such as a function's argument."""
        for each in self.source.around(node):
            if isinstance(each, FUNCTIONS):
                arguments = {arg.arg for arg in ast.walk(each.args) if isinstance(arg, ast.arg)}
                if node.id in arguments:
                    return False
        return True

    def _compared(self, node: ast.AST) -> bool:
        """Return whether an expression says whether this is rank 0."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return self.kind(node.operand) == RANK
        if not (isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq | ast.NotEq)):
            return False
        zero = node.comparators[0]
        return self.kind(node.left) == RANK and isinstance(zero, ast.Constant) and zero.value == 0

    # --- what becomes of them ----------------------------------------------------------------------------------------

    def rewrite(self, microbatch: str, session: str) -> None:
        """Have the session's rank, or the microbatch's number, where the script has its own rank.

        Args:
            microbatch: what stands for the rank in a microbatch.
            session: name of the session.

        Raises:
            UnusualError: something depends on the rank, and it can't be told on what it should.
        """
        for node in ast.walk(self.source.tree):
            kind = self.kind(node) if not isinstance(getattr(node, "ctx", None), ast.Store) else ""
            parent = self.source.parents.get(node)
            inside = parent is not None and self._told(parent)
            if not kind or inside or not self.source.live(node) or self._defines(node):
                continue
            if kind == WORLD:
                if not isinstance(node, ast.Name):
                    self.counted = True
                    self.source.replace(node, str(self.count))
            else:
                self._rewrite(node, kind, microbatch, session)

    def _rewrite(self, node: ast.AST, kind: str, microbatch: str, session: str) -> None:
        parent, place = self.source.parents[node], self._place(node)
        if place == "elsewhere":
            raise UnusualError(node, f"{self.source.of(node)} in a function that can't see the session")
        if place == "above" or (kind == RANK and self._of_device(node)):
            self._above(node, kind)
        elif kind == MAIN:
            whole = isinstance(parent, ast.BoolOp) or getattr(parent, "test", None) is node
            test = self._test(node, session)
            self.source.replace(node, test if whole else f"({test})")
        elif self._compared(parent) or self._truth(node, parent):
            self.source.replace(node, f"{session}.rank")
        elif place == "microbatch":
            self.source.replace(node, microbatch)
        elif place == "behind" or self._called(node, OUTPUT):
            self.source.replace(node, f"{session}.rank")
        else:
            raise self._chosen(node)

    def _test(self, node: ast.AST, session: str) -> str:
        assert isinstance(node, ast.Name)  # noqa: S101 nothing else is of this kind
        value = self.source.value(node, self.source.scope(node))
        equal = not (isinstance(value, ast.Compare) and isinstance(value.ops[0], ast.NotEq))
        return f"{session}.rank {'==' if equal else '!='} 0"

    def define(self) -> None:
        """Have those variables that are still read be what they are for all ranks."""
        stores = [node for node in ast.walk(self.source.tree) if isinstance(node, ast.Name) and node.id in self.names]
        made = {self.source.statement(node): None for node in stores if isinstance(node.ctx, ast.Store)}
        for statement in sorted(made, key=lambda each: -each.lineno):  # what reads another stands below it
            if isinstance(statement, ast.Assign) and self.source.live(statement):
                self._define_anew(statement)

    def _define_anew(self, statement: ast.Assign) -> None:
        target = statement.targets[0]
        names = [each for each in ast.walk(target) if isinstance(each, ast.Name)]
        used = [each.id for each in names if self.source.uses(each.id) or each.id not in self.names]
        if not used:
            self.source.remove(statement)
        elif isinstance(target, ast.Name) and self.names[target.id] != MAIN:
            self.source.replace(statement.value, self._constant(target.id))
        elif isinstance(target, ast.Tuple):
            if not self.names.keys() >= {each.id for each in names}:
                raise UnusualError(statement, "have rank and number of ranks in statements of their own")
            self.source.replace(statement, f"{', '.join(used)} = {', '.join(map(self._constant, used))}")

    def _constant(self, name: str) -> str:
        return str(self.count) if self.names[name] == WORLD else "0"

    def counts(self) -> bool:
        """Return whether the number of ranks is in what stays of the script."""
        return self.counted or any(self.source.uses(name) for name, kind in self.names.items() if kind == WORLD)

    def _above(self, node: ast.AST, kind: str) -> None:
        """Before the loop all do what rank 0 did; data must not be chosen there."""
        parent = self.source.parents[node]
        if isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Add) and self._called(parent, SEEDS):
            other = parent.left if parent.right is node else parent.right
            self.source.replace(parent, self.source.of(other))
            self.seeded.append(node)
            return
        if kind == MAIN or self._compared(parent) or self._truth(node, parent) or self._called(node, OUTPUT):
            if not isinstance(self.source.parents[parent], ast.Assign):  # which has it looked at later
                self.told.append(node)
        elif self._called(node, SEEDS):
            self.seeded.append(node)
        elif not (self._of_device(node) or self._called(node, SAMPLER)):
            raise self._chosen(node)
        if not isinstance(node, ast.Name):
            self.source.replace(node, "0")

    def _chosen(self, node: ast.AST) -> UnusualError:
        text = self.source.of(self.source.statement(node)).splitlines()[0]
        advice = 'choose it by (iteration, microbatch), see docs/training.md, "The rules", 1'
        return UnusualError(node, f"`{text}` depends on the rank, as data does that is chosen by it: {advice}")

    def _truth(self, node: ast.AST, parent: ast.AST) -> bool:
        if isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not):
            return True
        return isinstance(parent, ast.If | ast.IfExp) and parent.test is node

    def _of_device(self, node: ast.AST) -> bool:
        parent = self.source.parents[node]
        if isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Mod):
            return "device_count" in self.source.of(parent.right)
        text = self.source.parents[parent] if isinstance(parent, ast.FormattedValue) else None
        if isinstance(text, ast.JoinedStr):
            head = text.values[0]
            return isinstance(head, ast.Constant) and str(head.value).startswith("cuda:")
        text = parent.func.value if isinstance(parent, ast.Call) and isinstance(parent.func, ast.Attribute) else None
        if isinstance(text, ast.Constant) and str(text.value).startswith("cuda:"):  # "cuda:{}".format(rank)
            return True
        return self._called(node, DEVICES)

    def by_first(self, statement: ast.stmt) -> bool:
        """Return whether only rank 0 does anything there, and so nothing that training goes on with."""
        if not isinstance(statement, ast.If) or statement.orelse:
            return False
        test = any(self.kind(each) == MAIN or self._compared(each) for each in ast.walk(statement.test))
        plain = test and not any(isinstance(each, ast.Or) for each in ast.walk(statement.test))
        return plain or all(map(self.by_first, statement.body))

    def _called(self, node: ast.AST, functions: frozenset[str]) -> bool:
        """Return whether an expression is an argument of one of these functions."""
        for each in self.source.around(node):
            if isinstance(each, ast.Call) and getattr(each.func, "attr", getattr(each.func, "id", "")) not in WORDED:
                path = self.source.path(each.func)
                last = each.func.attr if isinstance(each.func, ast.Attribute) else path.rpartition(".")[2]
                return path in functions or last in functions
            if isinstance(each, ast.stmt):
                break
        return False

    def _defines(self, node: ast.AST) -> bool:
        statement = self.source.statement(node)
        if not isinstance(statement, ast.Assign):
            return False
        target, value = statement.targets[0], statement.value
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            return node in value.elts and self._told(node) != "" and isinstance(node, ast.Call | ast.Subscript)
        return value is node and isinstance(target, ast.Name) and target.id in self.names and bool(self._told(node))

    def _place(self, node: ast.AST) -> str:
        """Return where a node stands: above the loop, in it (in a microbatch, before it), behind, or elsewhere."""
        scope, shape = self.source.scope(node), self.shape
        if scope is not shape.scope:
            return "above" if scope is self.source.tree else "elsewhere"
        line, loop = getattr(node, "lineno", 0), shape.outer
        if line < loop.lineno:
            return "above"
        if line > (loop.end_lineno or 0):
            return "behind"
        around = {node, *self.source.around(node)}
        if around.intersection(shape.computed):
            return "microbatch"
        return "behind" if around.intersection([*shape.behind, *shape.around()[1]]) else "before"
