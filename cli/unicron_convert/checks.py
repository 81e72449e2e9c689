"""What is not the same on all ranks, or not known to a new one, though nothing of it reads the rank."""

import ast
from collections.abc import Iterator

from unicron.train.instrument import called
from unicron_convert.flow import Flow, reachable
from unicron_convert.shape import Shape, after, owner
from unicron_convert.source import Source, UnusualError

GENERATORS = frozenset(
    {
        "torch.Generator",
        "numpy.random.default_rng",
        "numpy.random.RandomState",
        "numpy.random.Generator",
        "random.Random",
    }
)
ADVICE = 'choose data by (iteration, microbatch): docs/training.md, "The rules", 1'
PURE = frozenset({"abs", "divmod", "float", "int", "len", "max", "min", "range", "round"})
KNOWN = frozenset({"torch", "numpy", "math", "random", "contextlib", "time", "os", "itertools"})


def check_microbatches(source: Source, shape: Shape, losses: set[str]) -> None:
    """See that a microbatch depends on nothing that another one leaves behind.

    Args:
        source: of the script.
        shape: of it.
        losses: names of the loss.

    Raises:
        UnusualError: one does, or something depends on what one microbatch leaves behind.
    """
    flow, behind = Flow(shape.computed), Flow([*shape.behind, *shape.around()[1]])
    before = Flow([*shape.around()[0], *shape.before])
    counts = {node.id for loop in (shape.epochs, shape.loop, shape.inner) for node in _targets(loop)}
    for name, nodes in flow.reads.items():
        if name in flow.binds - counts:
            raise UnusualError(nodes[0], f"{name} goes on from microbatch to microbatch of one rank; {ADVICE}")
        if name in behind.binds - counts and name not in before.binds and not _increments(shape, name):
            raise UnusualError(nodes[0], f"{name} is left behind by the iteration before, on one rank alone; {ADVICE}")
    for statement in [*shape.around()[0], *shape.before]:
        names = Flow([statement]).binds & {*flow.reads}
        if names and not _follows(source, statement):
            raise UnusualError(
                statement, f"{', '.join(names)} is made here, and not once for each microbatch; {ADVICE}"
            )
    bound = flow.binds | ({node.id for node in _targets(shape.loop)} if shape.data else set())
    if shape.data is not None:
        bound -= {node.id for node in _targets(shape.loop) if node.id not in _names(shape.data.target)}
    told = bound - losses  # of the loss there is session.loss behind them
    for part, names in ((before, bound), (behind, told), (Flow(after(source, shape)), told)):
        for name, nodes in part.reads.items():
            if name in names and any(source.live(node) for node in nodes):
                raise UnusualError(nodes[0], f"{name} is of one rank's last microbatch, and a new rank has none")


def check_data(source: Source, shape: Shape) -> None:
    """See that what a microbatch comes to keeps no place of its own in the data.

    Raises:
        UnusualError: it does.
    """
    functions = reachable(source.tree, shape.computed)
    parts = [*shape.computed, *functions]
    own = _generators(source, functions)
    for part in parts:
        for node in ast.walk(part):
            name = getattr(node, "attr", getattr(node, "id", ""))
            if isinstance(node, ast.Call) and source.path(node.func) == "next":
                raise UnusualError(node, f"next() goes on where this rank alone was; {ADVICE}")
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load) and name in own:
                raise UnusualError(node, f"{name} is a generator that the session does not seed; {ADVICE}")
            if isinstance(node, ast.Global | ast.Nonlocal):
                raise UnusualError(
                    node, f"{', '.join(node.names)} goes on from call to call, on one rank alone; {ADVICE}"
                )
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Attribute):
                raise UnusualError(
                    node, f"{source.of(node.target)} goes on from call to call, on one rank alone; {ADVICE}"
                )


def remarks(source: Source, shape: Shape) -> Iterator[tuple[int, str]]:
    """Yield what nobody can see from here, or has to be looked at, with its line."""
    yield from _elsewhere(source, shape)
    for node in ast.walk(source.tree):
        path = source.path(node.func) if isinstance(node, ast.Call) else ""
        line = getattr(node, "lineno", 0)
        if "BatchNorm" in path:
            yield line, "running means of BatchNorm are those of each replica: they are not averaged, nor sent"
        if path == "torch.compile":
            yield line, "compiling may take longer than a rank may be silent: UNICRON_HANG_S, rule 8"
        if path in {"torch.save", "torch.load"}:
            yield line, "states are Unicron's affair now; the trained model is written by session.save(path)"
    behind = Flow([*shape.behind, *shape.around()[1]])
    for name, nodes in behind.reads.items():
        if name in behind.binds and not _increments(shape, name):
            yield nodes[0].lineno, f"{name} goes on from iteration to iteration, but not to a new worker: rules 6 and 7"
    for statement in [*shape.computed, *shape.behind]:
        call = statement.value if isinstance(statement, ast.Expr) else None
        name = owner(call) if isinstance(call, ast.Call) else ""
        known = {"", *Flow(shape.computed).binds, shape.model, shape.optimizer, *shape.schedulers, *source.paths}
        if name not in known and source.assigned(name, shape.scope):
            yield statement.lineno, f"protect {name} too, if it has a state that goes on: rule 6"


def _elsewhere(source: Source, shape: Shape) -> Iterator[tuple[int, str]]:
    """Yield what a microbatch calls that stands in other files."""
    ours = {each.partition(".")[0] for each in source.paths.values()} - KNOWN
    for statement in source.assigned(shape.wrapped or shape.model, shape.scope):
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and source.path(node.func).partition(".")[0] in ours:
                yield node.lineno, f"{source.path(node.func)} was not looked at; rule 5 says what a model can't have"
    for node in (node for part in shape.computed for node in ast.walk(part)):
        if not isinstance(node, ast.Call) or source.path(node.func) in {shape.model, shape.wrapped}:
            continue
        made = source.value(ast.Name(owner(node), ast.Load()), shape.scope)
        for path in (source.path(node.func), source.path(made.func) if isinstance(made, ast.Call) else ""):
            if path.partition(".")[0] in ours and owner(node) not in {shape.model, shape.wrapped}:
                yield node.lineno, f"{path} is in another file and was not looked at; {ADVICE}"


def _follows(source: Source, statement: ast.stmt) -> bool:
    """Return whether what a statement makes follows from what it reads: it draws nothing, or from a seed."""
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    paths = {source.path(each.func) for each in calls}
    return "manual_seed" in called([statement]) or all(each in PURE or each.startswith("math.") for each in paths)


def _targets(loop: ast.For | ast.While | None) -> list[ast.Name]:
    target = loop.target if isinstance(loop, ast.For) else None
    return [node for node in ast.walk(target) if isinstance(node, ast.Name)] if target is not None else []


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _increments(shape: Shape, name: str) -> bool:
    """Return whether a variable counts the iterations of a while loop."""
    return isinstance(shape.loop, ast.While) and name in _names(shape.loop.test)


def _generators(source: Source, functions: list[ast.FunctionDef]) -> set[str]:
    """Return variables and attributes that hold a generator made outside of what computes a microbatch."""
    found: set[str] = set()
    for statement in ast.walk(source.tree):
        if not isinstance(statement, ast.Assign):
            continue
        value: ast.AST = statement.value
        while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and source.path(value.func) == "":
            value = value.func.value  # torch.Generator().manual_seed(1) is one, too
        scope = source.scope(statement)
        ours = scope in functions and getattr(scope, "name", "") != "__init__"
        if isinstance(value, ast.Call) and source.path(value.func) in GENERATORS and not ours:
            found |= {getattr(each, "attr", getattr(each, "id", "")) for each in statement.targets}
    return found - {""}
