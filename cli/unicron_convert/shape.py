"""Finds the parts of a script that trains with DistributedDataParallel: its loops, model, optimizer, loss and data."""

import ast
from dataclasses import dataclass, field

from unicron_convert.flow import microbatch_part
from unicron_convert.source import LOOPS, Loop, Scope, Source, UnusualError

DDP = frozenset({"torch.nn.parallel.DistributedDataParallel", "torch.nn.parallel.distributed.DistributedDataParallel"})
SAMPLER = frozenset({"torch.utils.data.DistributedSampler", "torch.utils.data.distributed.DistributedSampler"})
GRADIENTS = frozenset({"grad", "clip_grad_norm_", "clip_grad_value_", "clip_grad_norm"})
LOADER = frozenset({"torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader"})

_SPREAD = "a model that is spread over ranks: docs/training.md, Models larger than a worker"
_SPAWNS = "the script starts its ranks itself; have torchrun do that first"
_SCALES = "a Session calls the optimizer itself, without loss scaling; autocast to bfloat16 needs none"
_LOOPS = "it has the loop; see docs/training.md, Scripts without a session"
FOREIGN = {
    "unicron.train": "this script is for Unicron already; where it only has `watch`, take that out first",
    "torch.distributed.fsdp": _SPREAD,
    "torch.distributed._composable": _SPREAD,
    "torch.distributed.tensor": _SPREAD,
    "torch.distributed.pipelining": _SPREAD,
    "torch.distributed.device_mesh": _SPREAD,
    "torch.distributed.optim": "its state is spread over replicas, and a lost one takes it along",
    "torch.multiprocessing.spawn": _SPAWNS,
    "torch.multiprocessing.start_processes": _SPAWNS,
    "torch.nn.SyncBatchNorm": "replicas can't exchange anything in the forward pass",
    "torch.amp.GradScaler": _SCALES,
    "torch.cuda.amp.GradScaler": _SCALES,
    "torch.amp.grad_scaler": _SCALES,
    "accelerate": _LOOPS,
    "transformers.Trainer": _LOOPS,
    "lightning": _LOOPS,
    "pytorch_lightning": _LOOPS,
    "deepspeed": "it trains in a way of its own",
    "horovod": "it reduces gradients in a way of its own",
    "megatron": "see docs/training.md, Megatron-core",
}
"""What there can't be beside a Session, by what it is imported from, and why."""


@dataclass
class Data:
    """A DataLoader over a DistributedSampler, which a loop goes through.

    Attributes:
        name: of the loader.
        loader: the call that makes it.
        sampler: the call that makes its sampler.
        target: what a batch is bound to.
    """

    name: str
    loader: ast.Call
    sampler: ast.Call
    target: ast.expr


@dataclass
class Shape:
    """The parts of a script.

    Attributes:
        scope: module or function that has them all.
        model, wrapped: names of the model, and of what is wrapped.
        wrap: the statement that wraps it.
        optimizer: its name.
        schedulers: their names.
        epochs: loop around the iterations, if there is one.
        loop: over iterations.
        inner: loop over the microbatches of a rank, if there is one.
        backward: the statement `loss.backward()`.
        loss: what it is called on.
        step: the statement `optimizer.step()`.
        first, last: statements of the loop with which a microbatch begins and ends; the inner loop, if there is one.
        data: what the loop goes through, if that is a loader.
    """

    scope: Scope
    model: str
    wrapped: str
    wrap: ast.Assign
    optimizer: str
    schedulers: list[str]
    epochs: ast.For | None
    loop: Loop
    inner: ast.For | None
    backward: ast.Expr
    loss: ast.expr
    step: ast.Expr
    first: int = 0
    last: int = 0
    data: Data | None = None
    zeroed: list[ast.stmt] = field(default_factory=list)

    @property
    def outer(self) -> Loop:
        """The outermost loop."""
        return self.epochs or self.loop

    @property
    def computed(self) -> list[ast.stmt]:
        """The statements that compute a microbatch."""
        return self.inner.body if self.inner else self.loop.body[self.first : self.last + 1]

    @property
    def before(self) -> list[ast.stmt]:
        """The statements of an iteration before them."""
        return self.loop.body[: self.first]

    @property
    def behind(self) -> list[ast.stmt]:
        """The statements of an iteration after them."""
        return self.loop.body[self.last + 1 :]

    def around(self) -> tuple[list[ast.stmt], list[ast.stmt]]:
        """Return what an epoch does before its iterations, and after them."""
        if self.epochs is None:
            return [], []
        place = self.epochs.body.index(self.loop)
        return self.epochs.body[:place], self.epochs.body[place + 1 :]


def calls_of(source: Source, method: str) -> list[ast.Call]:
    """Return all calls of a method of this name."""
    nodes = [node for node in ast.walk(source.tree) if isinstance(node, ast.Call)]
    return [node for node in nodes if isinstance(node.func, ast.Attribute) and node.func.attr == method]


def owner(call: ast.Call) -> str:
    """Return the variable whose method is called; empty where it is none."""
    value = call.func.value if isinstance(call.func, ast.Attribute) else call
    return value.id if isinstance(value, ast.Name) else ""


def find(source: Source) -> Shape:
    """Return the parts of a script.

    Raises:
        UnusualError: it has others, or they stand elsewhere.
    """
    _check_foreign(source)
    backward = _the_one(source, "backward")
    scope = source.scope(backward)
    loops = source.loops(backward)
    if not isinstance(scope, ast.Module | ast.FunctionDef) or not loops:
        raise UnusualError(backward, "this backward pass is in no loop of its own function; have it in the loop itself")
    wrap, model, wrapped = _model(source, scope)
    optimizer, step, schedulers = _optimizer(source, scope, loops)
    around = source.loops(step)
    if around != loops[: len(around)] or not 1 <= len(around) <= 2 or len(loops) - len(around) > 1:
        raise UnusualError(
            loops[0], "expected a loop over iterations, one over epochs around it, or accumulation in it"
        )
    loop, inner = around[-1], loops[len(around)] if len(loops) > len(around) else None
    epochs = around[0] if len(around) == 2 else None
    for each in loops:
        if each.orelse:
            raise UnusualError(each, "this loop has an else")
    if (epochs is not None and not isinstance(epochs, ast.For)) or (
        inner is not None and not isinstance(inner, ast.For)
    ):
        raise UnusualError(epochs or inner, "this loop has to be a for loop")
    for part, whole in ((loop, epochs), (inner, loop), (step, loop)):
        if part is not None and whole is not None and part not in whole.body:
            raise UnusualError(part, f"this stands under a condition in the loop of line {whole.lineno}, or in a block")
    assert not isinstance(inner, ast.While)  # noqa: S101 said above
    assert not isinstance(epochs, ast.While)  # noqa: S101 likewise
    assert isinstance(backward.func, ast.Attribute)  # noqa: S101 it is a method
    shape = Shape(
        scope=scope,
        model=model,
        wrapped=wrapped,
        wrap=wrap,
        optimizer=optimizer,
        schedulers=schedulers,
        epochs=epochs,
        loop=loop,
        inner=inner,
        backward=_alone(source, backward),
        loss=backward.func.value,
        step=step,
    )
    _divide(source, shape)
    _leave_no_loop_early(source, loops)
    return shape


def _check_foreign(source: Source) -> None:
    for node in ast.walk(source.tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{each.name}" for each in node.names]
        elif isinstance(node, ast.Attribute):
            names = [source.path(node)]
        for name in names:
            for what, why in FOREIGN.items():
                if f"{name}.".startswith(f"{what}."):
                    raise UnusualError(node, f"{name}: {why}")


def _the_one(source: Source, method: str) -> ast.Call:
    found = calls_of(source, method)
    if not found:
        raise UnusualError(None, f"there is no loop here that trains: nothing calls {method}()")
    if len(found) > 1:
        raise UnusualError(found[1], f"a second {method}(), besides that of line {found[0].lineno}: only one is known")
    if found[0].args or found[0].keywords:
        raise UnusualError(found[0], f"{method}() with arguments; session.backward takes none")
    return found[0]


def _alone(source: Source, call: ast.Call) -> ast.Expr:
    statement = source.parents[call]
    if not isinstance(statement, ast.Expr):
        raise UnusualError(call, "this is to be a statement of its own")
    return statement


def _model(source: Source, scope: Scope) -> tuple[ast.Assign, str, str]:
    found = [node for node in ast.walk(source.tree) if isinstance(node, ast.Call) and source.path(node.func) in DDP]
    if len(found) != 1:
        node = found[1] if found else None
        raise UnusualError(node, f"expected one DistributedDataParallel(...), found {len(found)}")
    statement = source.statement(found[0])
    if source.scope(statement) is not scope:
        raise UnusualError(found[0], "the model is wrapped in another function than the training loop is in")
    whole = isinstance(statement, ast.Assign) and statement.value is found[0] and found[0].args
    if not whole or not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
        raise UnusualError(found[0], "expected `model = DistributedDataParallel(model, ...)`")
    odd = [each for each in found[0].keywords if each.arg in {None, "process_group", "device_mesh", "mixed_precision"}]
    if odd:
        raise UnusualError(found[0], f"{source.of(odd[0])}: a session has no such thing")
    inside = found[0].args[0]
    return statement, statement.targets[0].id, inside.id if isinstance(inside, ast.Name) else ""


def _optimizer(source: Source, scope: Scope, loops: list[Loop]) -> tuple[str, ast.Expr, list[str]]:
    """Return the optimizer's name, the statement of its update, and the names of what else makes steps after it."""
    calls = [
        each for each in calls_of(source, "step") if source.scope(each) is scope and loops[0] in source.loops(each)
    ]
    kinds = {owner(each): _values(source, owner(each), scope) for each in calls}
    zeroed = {owner(each) for each in calls_of(source, "zero_grad")}
    names = [name for name, values in kinds.items() if name in zeroed or any(_is_optimizer(source, e) for e in values)]
    if len(names) != 1 or not names[0]:
        raise UnusualError(calls[0] if calls else loops[0], f"expected one optimizer.step() in this loop: {len(names)}")
    updates = [each for each in calls if owner(each) == names[0]]
    if len(updates) > 1 or updates[0].args or updates[0].keywords:
        raise UnusualError(updates[-1], "an optimizer's second step(), or one with a closure")
    made = source.assigned(names[0], scope)
    if len(made) != 1 or source.scope(made[0]) is not scope:
        raise UnusualError(updates[0], f"{names[0]} is to be made once, in the function that has the loop")
    schedulers = [name for name in kinds if name != names[0]]
    for each in calls:
        if (name := owner(each)) == names[0]:
            continue
        if not kinds[name] or not all(_is_scheduler(source, value, names[0]) for value in kinds[name]):
            raise UnusualError(each, f"{name or 'this'}.step(): neither the optimizer, nor a scheduler of it")
        if each.args or each.keywords:
            raise UnusualError(each, f"{name}.step() with arguments, which may differ between ranks")
        if each.lineno < updates[0].lineno:
            raise UnusualError(each, f"{name}.step() before the optimizer's; have it right after that")
    return names[0], _alone(source, updates[0]), schedulers


def _values(source: Source, name: str, scope: Scope) -> list[ast.expr | None]:
    """Return the expressions that a variable is bound to, None for what is bound in another way."""
    return [each.value if isinstance(each, ast.Assign) else None for each in source.assigned(name, scope)]


def _is_scheduler(source: Source, value: ast.AST | None, optimizer: str) -> bool:
    """Return whether something is made of the optimizer."""
    names = (
        {node.id for node in ast.walk(value) if isinstance(node, ast.Name)} if isinstance(value, ast.Call) else set()
    )
    return optimizer in names or (isinstance(value, ast.Call) and "lr_scheduler" in source.path(value.func))


def _is_optimizer(source: Source, value: ast.AST | None) -> bool:
    path = source.path(value.func) if isinstance(value, ast.Call) else ""
    return path.startswith("torch.optim.") and "lr_scheduler" not in path


def _divide(source: Source, shape: Shape) -> None:
    """Find which statements of an iteration compute a microbatch."""
    inside: ast.AST = shape.inner or shape.loop
    statement: ast.AST = shape.backward
    while source.parents[statement] is not inside:
        statement = source.parents[statement]
        if not isinstance(statement, ast.With):
            raise UnusualError(shape.backward, "this backward pass does not take place in each turn of its loop")
    _zeroed(source, shape)
    if shape.inner is not None:
        shape.first = shape.last = shape.loop.body.index(shape.inner)
    else:
        assert isinstance(statement, ast.stmt)  # noqa: S101 statements have statements around them
        kept = frozenset({shape.model, shape.wrapped, shape.optimizer, *source.paths})
        shape.last = shape.loop.body.index(statement)
        shape.first = microbatch_part(shape.loop.body, statement, kept)
    if shape.step not in shape.behind:
        raise UnusualError(shape.step, "the update stands before the backward pass")
    early: list[ast.stmt] = [shape.inner] if shape.inner else []
    late = shape.behind[shape.behind.index(shape.step) :]
    for part, why in (
        (early, "gradients of single microbatches can't be had; move this behind their loop"),
        (late, "session.step() leaves no gradients behind; move this before the update"),
    ):
        for node in (node for each in part for node in ast.walk(each)):
            if getattr(node, "attr", getattr(node, "id", "")) in GRADIENTS:
                raise UnusualError(node, why)


def _zeroed(source: Source, shape: Shape) -> None:
    """Find where gradients are set to zero, which a session does in its step."""
    owners = {shape.optimizer, shape.model, shape.wrapped}
    calls = [each for each in calls_of(source, "zero_grad") if owner(each) in owners]
    for each in calls:
        statement = _alone(source, each)
        loops = source.loops(statement)
        between = shape.backward.lineno < statement.lineno < shape.step.lineno
        if loops and (statement not in shape.loop.body or between):
            raise UnusualError(
                each, "expected zero_grad() once an iteration, before its first backward pass or at its end"
            )
        shape.zeroed.append(statement)
    if not any(statement in shape.loop.body for statement in shape.zeroed):
        raise UnusualError(shape.loop, "nothing sets the gradients to zero in this loop, so they would add up")


def _leave_no_loop_early(source: Source, loops: list[Loop]) -> None:
    for node in ast.walk(loops[0]):
        inner = next((each for each in source.around(node) if isinstance(each, LOOPS)), None)
        leaves = isinstance(node, ast.Break | ast.Continue) and inner in loops
        if leaves or (isinstance(node, ast.Return) and source.loops(node)[:1] == loops[:1]):
            raise UnusualError(node, "loops over iterations and microbatches can't be left early, nor begun again")


def data_of(source: Source, shape: Shape, over: ast.expr, target: ast.expr) -> Data:
    """Return what a loop goes through.

    Raises:
        UnusualError: it is no DataLoader, or one whose order does not follow from epoch and rank alone.
    """
    advice = 'choose data by (iteration, microbatch): docs/training.md, "The rules", 1'
    loader = source.value(over, shape.scope)
    if not isinstance(over, ast.Name) or not isinstance(loader, ast.Call) or source.path(loader.func) not in LOADER:
        raise UnusualError(over, f"{source.of(over)} is no variable that was bound to a DataLoader(...) once; {advice}")
    given = {each.arg: each.value for each in loader.keywords}
    sampler = source.value(given["sampler"], shape.scope) if "sampler" in given else None
    if not isinstance(sampler, ast.Call) or source.path(sampler.func) not in SAMPLER:
        raise UnusualError(loader, f"this loader's order comes from no DistributedSampler(...); {advice}")
    size = given.get("batch_size")
    odd = "batch_sampler" in given or None in given or len(loader.args) > 2
    if (
        odd
        or (isinstance(size, ast.Constant) and size.value is None)
        or any(each.arg is None for each in sampler.keywords)
    ):
        raise UnusualError(loader, f"batches of this loader can't be seen from here; {advice}")
    return Data(over.id, loader, sampler, target)


def after(source: Source, shape: Shape) -> list[ast.stmt]:
    """Return what the script does when its loop has ended."""
    found: list[ast.stmt] = []
    node: ast.AST = shape.outer
    while node is not shape.scope:
        assert isinstance(node, ast.stmt)  # noqa: S101 blocks are of statements
        block = source.block(node)
        found += block[block.index(node) + 1 :]
        node = source.parents[node]
    return found
