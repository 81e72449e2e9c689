"""A script that was written for torch.distributed and DistributedDataParallel, healed in place with no line changed.

What such a script calls is exchanged before its first line runs. Each of its ranks is then a worker whose only
microbatch in each iteration is its own: who lives waits in the reduction of the gradient, as if it took long, and
whoever replaces a lost rank builds what the script builds, is brought to the same place of its loops
(`unicron.train.loops`) and computes what is missing. To the core each rank is a replica, to all others it is a place of
the only one: so no membership lacks a rank, and who replaces one is started as that. The script's other collectives run
in a group of their own; one that breaks is told to the script as torch would.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

from unicron.contracts.tasks import ParallelLayout
from unicron.contracts.worker import Finished, Membership, Ready, ToAgent
from unicron.errors import GroupBrokenError, InvalidInputError
from unicron.train.channel import Channel
from unicron.train.inner import NAME
from unicron.train.iteration import WorkerCore
from unicron.train.loops import NAME as LOOPS
from unicron.train.loops import Loops, instrument
from unicron.train.phases import Phase
from unicron.train.redistribute import Resumption, Standing
from unicron.train.rendezvous import Rendezvous
from unicron.train.script_groups import ScriptGroups
from unicron.train.shell import run
from unicron.train.timing import PlannedCollection
from unicron.train.torch_shell import TorchShell

STANDS, NEW, GOES_ON = "-stands", "new", "goes on"
"""What ranks of a membership tell those that have just been started."""


class Core(WorkerCore):
    """A worker whose microbatch is always its own: that which has the number of its rank."""

    def _plan(self, standings: list[Standing]) -> Resumption:
        plan = super()._plan(standings)
        missing = {microbatch for each in plan.todo for microbatch in each}
        todo = tuple((rank,) if rank in missing else () for rank in range(len(standings)))
        return replace(plan, todo=todo)


class Shell(TorchShell):
    """The shell of such a worker: to the core each rank is a replica, though it is a place to all others."""

    inner_groups: ScriptGroups

    def __init__(self, channel: Channel, size: int) -> None:
        super().__init__(channel, None, size, PlannedCollection(0))

    def flat(self, membership: Membership) -> Membership:
        """Return a membership as the core is to see it."""
        return msgspec.structs.replace(membership, layout=ParallelLayout(replicas=membership.world_size))

    @property
    def place(self) -> int:
        """Each has the whole model."""
        return 0

    @property
    def saves(self) -> bool:
        """States of such scripts are not saved: their loops can't go back."""
        return False

    async def await_membership(self, above: int) -> Membership:
        """Block until there is a membership newer than epoch `above`."""
        return self.flat(await super().await_membership(above))

    async def form(self, membership: Membership) -> None:
        """Meet the others, and form the group of the script's own collectives anew.

        Raises:
            ConnectionAbortedError: a new rank could not be given what collectives gave, so that all are to begin again.
        """
        if not self.protected["loops"].reachable:
            raise ConnectionAbortedError(
                "what a collective of this script gave since the head of its loop's body can't be given to a new rank: "
                "it was more than 1 MiB, or not the same on all ranks"
            )
        Rendezvous(membership, STANDS).set(f"{membership.rank}", GOES_ON)
        await super().form(membership)
        if self.inner_groups.epoch != membership.epoch:
            self.inner_groups.form(membership.epoch, lambda: Rendezvous(membership, "-script"))
            self.inner_groups.strict = True

    def interrupted(self, membership: Membership) -> bool:
        """Leave what a newer membership replaces."""
        script = self.inner_groups.cut(membership.epoch)
        return (hasattr(self, "group") and self.group.abort_below(membership.epoch)) or script

    def say(self, message: ToAgent) -> None:
        """Tell the agent. That a worker is ready it was told as its script asked for its group."""
        if not isinstance(message, Ready):
            super().say(message)

    def update(self, *, void: bool = False) -> None:
        """Leave it to the script."""


def alike(module: torch.nn.Module) -> None:
    """Have all ranks have the parameters of the first."""
    with torch.no_grad():
        for each in (*module.parameters(), *module.buffers()):
            dist.broadcast(each, 0)


class InPlace:
    """One rank of such a script.

    Args:
        channel: to the agent.
    """

    def __init__(self, channel: Channel) -> None:
        layout = msgspec.json.decode(os.environ["UNICRON_LAYOUT"], type=ParallelLayout)
        self.rank, self.size = int(os.environ["UNICRON_PLACE"]), layout.replica_workers
        self._channel, self._layout = channel, layout
        self.loops = Loops(self.rank, self._begin)
        self._shell = Shell(channel, self.size)
        self._core = Core(self._shell, int(os.environ["UNICRON_ITERATIONS"]), self.size)
        self._inner: ScriptGroups | None = None
        self._models: list[DistributedDataParallel] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._others: list[Any] = []
        self._loss: torch.Tensor | None = None
        self._queued = self._computing = False
        self._waits: Rendezvous | None = None
        self._waits_in = -1

    # --- the script's group ------------------------------------------------------------------------------------------

    def meet(self) -> None:
        """Form the script's group, where all ranks are new; else have a ghost of it until its loops begin."""
        if self._inner is not None:
            raise RuntimeError("trying to initialize the default process group twice!")
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._channel.send(Ready())
        self._inner = self._shell.inner_groups = ScriptGroups(self._layout, self.rank, device, self.loops, self._go_on)
        self._channel.interrupt = self._interrupt
        above = -1
        while True:
            membership = self._channel.await_membership(above)
            above = membership.epoch
            try:
                self._meet(membership, self._inner)
            except GroupBrokenError:  # somebody was lost, and there is a newer one soon
                continue
            return

    def _meet(self, membership: Membership, inner: ScriptGroups) -> None:
        if all(each == NEW.encode() for each in self._wait_for(STANDS, membership, NEW)):
            inner.form(membership.epoch, lambda: Rendezvous(membership, "-script"))
            inner.strict = True

    def _wait_for(self, part: str, membership: Membership, value: str) -> list[bytes]:
        """Tell the others something, and return what each of them has told.

        Raises:
            GroupBrokenError: a newer membership came meanwhile.
        """
        store = self._waits = Rendezvous(membership, part)
        self._waits_in = membership.epoch
        try:
            store.set(f"{membership.rank}", value)
            return store.take([f"{rank}" for rank in range(membership.world_size)])
        finally:
            self._waits = None

    def _interrupt(self, membership: Membership) -> bool:
        if (waits := self._waits) is not None and membership.epoch > self._waits_in:
            waits.cut()
        return self._shell.interrupted(membership)

    # --- what the script makes ---------------------------------------------------------------------------------------

    def made(self, model: DistributedDataParallel) -> None:
        """Note a model, whose gradients are to be reduced."""
        self._models.append(model)
        for parameter in model.module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _: self._has_gradient(model))

    def optimizes(self, optimizer: torch.optim.Optimizer) -> None:
        """Note an optimizer."""
        self._optimizers.append(optimizer)

    def schedules(self, other: Any) -> None:
        """Note a scheduler, or a scaler of the loss."""
        self._others.append(other)

    def _begin(self) -> None:
        """Meet the others, as the first loop begins; have the state that they have."""
        if not (self._models and self._optimizers and self._inner is not None):
            raise InvalidInputError(
                "`heal: in-place` needs a script that calls init_process_group, makes a DistributedDataParallel and an "
                "optimizer, and then begins its training loop"
            )
        for model in self._models:
            if any(name.endswith("running_mean") for name, _ in model.named_buffers()):
                raise InvalidInputError(
                    "`heal: in-place` can't keep the running means of BatchNorm the same: use GroupNorm or LayerNorm, "
                    "or set `heal: restart`"
                )
        others = {f"other{number}": each for number, each in enumerate([*self._optimizers[1:], *self._others])}
        models = torch.nn.ModuleList([each.module for each in self._models])
        self._shell.protect({"model": models, "optimizer": self._optimizers[0], "loops": self.loops, **others})
        self._channel.interrupt = self._interrupt
        run(self._core.start())
        if self._core.phase is Phase.TAKEN:
            self._core.enter()

    # --- an iteration ------------------------------------------------------------------------------------------------

    def forward(self) -> None:
        """Begin an iteration, unless it has begun."""
        if self._computing:
            return
        if any(each.grad is not None and each.grad.any() for each in self._parameters()):
            raise InvalidInputError(
                "this iteration begins with gradients, which nobody else has: call zero_grad() after each update, and "
                "accumulate in no_sync(), or set `heal: restart`"
            )
        if self._core.phase is Phase.REDUCED:  # an update that a scaler of the loss left out
            run(self._core.step())
        self.loops.mark()
        while not self._computing:
            self._core.enter()
            self._computing = run(self._core.next_microbatch()) is not None
            if not self._computing and self._core.phase is not Phase.TAKEN:
                raise GroupBrokenError("this iteration was finished without this rank")

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        return (each for model in self._models for each in model.module.parameters())

    def _has_gradient(self, model: DistributedDataParallel) -> None:
        if model.require_backward_grad_sync and not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._reduce)  # noqa: SLF001 as FSDP2 does

    def _reduce(self) -> None:
        """Finish the backward pass: have the mean gradient of all ranks."""
        self._queued = self._computing = False
        self.loops.caught_up()
        self._shell.computed(self._loss)
        self._core.computed()
        if run(self._core.next_microbatch()) is not None:
            raise GroupBrokenError("what this rank computed was dropped, and can't be computed again in place")

    def _go_on(self, error: GroupBrokenError) -> bool:
        """Go to the next membership from a collective of the script; return whether a new rank comes there, too."""
        if self._core.phase not in {Phase.BETWEEN, Phase.OPEN} or not (self._computing or self.loops.open):
            return False
        if not self._computing:
            self.loops.unmark()
        run(self._core.rejoin(error))
        return self._core.phase is Phase.OPEN or not self._computing

    def computes(self, loss: torch.Tensor) -> None:
        """Note the loss of a backward pass."""
        self._loss = loss.detach().mean()

    def updated(self, optimizer: torch.optim.Optimizer) -> None:
        """End the iteration."""
        if self._core.phase is Phase.REDUCED and optimizer in self._optimizers:
            run(self._core.step())

    def finish(self) -> None:
        """Say that the script is done, once it is on all ranks: who ends closes connections that others may yet use."""
        if self._core.epoch >= 0:
            with contextlib.suppress(GroupBrokenError):
                self._wait_for("-done", self._core.membership, "")
        self._shell.leave()
        self._channel.send(Finished(iterations=int(os.environ["UNICRON_ITERATIONS"])))


def install(channel: Channel) -> InPlace:
    """Exchange what scripts call; return what is behind it."""
    mine = InPlace(channel)
    ranks = {
        "RANK": mine.rank,
        "WORLD_SIZE": mine.size,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "GROUP_RANK": mine.rank,
    }
    os.environ.update({name: str(each) for name, each in ranks.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    begin, backward = dist.init_process_group, torch.autograd.backward

    def init_process_group(*arguments: Any, **named: Any) -> None:
        if NAME in arguments:
            begin(*arguments, **named)
        else:
            mine.meet()

    def noting(tensors: Any, *arguments: Any, **named: Any) -> None:
        mine.computes(tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors)))
        backward(tensors, *arguments, **named)

    model = _parallel(mine)
    for place, name, mended in (
        (dist, "init_process_group", init_process_group),
        (dist.distributed_c10d, "init_process_group", init_process_group),
        (torch.autograd, "backward", noting),
        (torch.nn.parallel, "DistributedDataParallel", model),
        (torch.nn.parallel.distributed, "DistributedDataParallel", model),
        (torch.optim.Optimizer, "__init__", _also(torch.optim.Optimizer, mine.optimizes)),
        (LRScheduler, "__init__", _also(LRScheduler, mine.schedules)),
        (torch.amp.GradScaler, "__init__", _also(torch.amp.GradScaler, mine.schedules)),
    ):
        setattr(place, name, mended)
    register_optimizer_step_post_hook(lambda optimizer, *_: mine.updated(optimizer))
    return mine


def _parallel(mine: InPlace) -> type[DistributedDataParallel]:
    """Return what scripts make instead of torch's own."""

    class InPlaceParallel(DistributedDataParallel):
        """A model whose gradients are reduced as its backward pass ends."""

        def __init__(self, module: torch.nn.Module, *_: Any, **__: Any) -> None:
            torch.nn.Module.__init__(self)
            self.module = module
            self.require_backward_grad_sync = True
            self.device = next(module.parameters()).device
            alike(module)
            mine.made(self)

        def forward(self, *inputs: Any, **named: Any) -> Any:
            """Run the model."""
            if torch.is_grad_enabled():
                mine.forward()
            return self.module(*inputs, **named)

        def register_comm_hook(self, *_: Any) -> None:
            """Refuse it."""
            raise InvalidInputError("`heal: in-place` reduces gradients itself: leave register_comm_hook out")

    return InPlaceParallel


def _also(kind: type, note: Callable[[Any], None]) -> Callable[..., None]:
    """Return what makes such a thing, and notes it."""
    make = vars(kind)["__init__"]

    def made(self: Any, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        note(self)

    return made


def execute(channel: Channel, path: str) -> dict[str, Any]:
    """Run a script as `python script.py` would, in place; return its variables."""
    mine = install(channel)
    program = ModuleType("__main__")
    program.__dict__.update({"__file__": path, LOOPS: mine.loops})
    sys.modules["__main__"] = program
    code = compile(instrument(Path(path).read_text(encoding="utf-8"), path), path, "exec")
    exec(code, program.__dict__)  # noqa: S102 the user's own script
    mine.finish()
    return program.__dict__
