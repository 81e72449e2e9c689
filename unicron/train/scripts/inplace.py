"""A script that was written for torch.distributed and DistributedDataParallel, healed in place with no line changed.

What such a script calls is exchanged before its first line runs. Each of its ranks is then a worker whose only
microbatch in each iteration is its own: the survivors wait in the reduction of the gradient, as if it took long, and
the process that replaces a lost rank builds what the script builds, is brought to the same place of its loops
(`unicron.train.scripts.loops`) and computes what is missing. To the core each rank is a replica; to everything else it
is a place of the only replica, so no membership lacks a rank, and a replacement is started as the rank it replaces. The
script's other collectives run in a group of their own; one that breaks raises what torch would raise.
"""

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch
import torch.distributed as dist

from unicron.contracts.tasks import ParallelLayout, WorkerPhase
from unicron.contracts.worker import Finished, Membership, Progress, Ready, Unusable
from unicron.errors import GroupBrokenError, InvalidInputError
from unicron.train.groups.rendezvous import done_everywhere
from unicron.train.scripts.drill import Drill
from unicron.train.scripts.files import Files
from unicron.train.scripts.groups import ScriptGroups
from unicron.train.scripts.kinds import NotCarriedError, OwnCheckpointNewerError
from unicron.train.scripts.loops import Loops
from unicron.train.scripts.meeting import ScriptMeeting
from unicron.train.scripts.objects import LARGE_BYTES
from unicron.train.scripts.parallel import Parallel
from unicron.train.scripts.peers import Peers, Position, Wait, Waiting, script_line
from unicron.train.scripts.piggyback import Piggyback
from unicron.train.scripts.records import Records
from unicron.train.scripts.shell import ScriptStates, SpreadCore, WholeCore, WholeGradients, WholeRanks
from unicron.train.scripts.under_way import Record
from unicron.train.session.gradients import TorchGradients
from unicron.train.session.ranks import TorchRanks
from unicron.train.snapshots.shards import local
from unicron.train.worker.channel import Channel
from unicron.train.worker.iteration import WorkerCore
from unicron.train.worker.phases import Phase
from unicron.train.worker.shell import Shell, run
from unicron.train.worker.timing import PlannedCollection

SPREADING = "torch.distributed.fsdp._fully_shard._fsdp_state"
"""Where torch keeps what `fully_shard` makes of a module."""


class InPlace:
    """One rank of such a script.

    Args:
        channel: to the agent.
        files: that the script opens.
    """

    _ranks: TorchRanks
    _gradients: TorchGradients
    _core: WorkerCore

    def __init__(self, channel: Channel, files: Files) -> None:
        layout = msgspec.json.decode(os.environ["UNICRON_LAYOUT"], type=ParallelLayout)
        self.rank, self.size = int(os.environ["UNICRON_PLACE"]), layout.replica_workers
        self._channel, self._layout, self._files = channel, layout, files
        self.loops = Loops(self.rank, self._prepare, self._join, self._leave)
        self._inner: ScriptGroups | None = None
        self._meeting, self._records = ScriptMeeting(channel, files), Records()
        self._models: list[Parallel] = []
        self._piggyback: Piggyback | None = None
        self._spread: list[torch.nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._loss: torch.Tensor | None = None
        self._queued = self._computing = self._empty = False
        self._drill = Drill(channel, self.rank, self.size)
        self._ready, self._given = set[int](), set[int]()
        self._peers = Peers(channel, self._membership, self._position)
        self._pid = os.getpid()

    # --- the script's group ------------------------------------------------------------------------------------------

    def meet(self) -> None:
        """Form the script's group, where all ranks are new; else have a ghost of it until its loops begin."""
        if self._inner is not None:
            raise ValueError("trying to initialize the default process group twice!")
        device = (
            torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
        )
        self._channel.send(Ready())
        self._inner = ScriptGroups(self._layout, self.rank, device, self.loops, self._go_on, self._peers)
        self._ranks = WholeRanks(self._channel, self._inner, self.loops, self._records)
        if spreading := sys.modules.get(SPREADING):  # takes a group, so that all of it comes later
            kind = spreading.FSDPState
            kind.init = also(kind, lambda state: self.spreads(state._modules), "init")  # noqa: SLF001 it tells nobody
        self._meeting.meet(self._inner)
        self._peers.watch()

    @property
    def is_given(self) -> bool:
        """Whether this rank comes later, and the others have the script's next two collectives behind them."""
        return self._inner is not None and self._inner.knows(2)

    # --- what the script makes ---------------------------------------------------------------------------------------

    def made(self, model: Parallel, shared: Iterable[torch.Tensor]) -> None:
        """Note a model, whose gradients are to be reduced; have all ranks have these tensors of the first."""
        self._in_time("a model is made DistributedDataParallel")
        if self._inner is not None:  # who comes later gets them with the state
            self._inner.heeded = False
            with torch.no_grad():
                for each in shared:
                    dist.broadcast(each, 0)
            self._inner.heeded = True
        self._models.append(model)
        for parameter in model.module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _: self._has_gradient(model))

    def synchronise(self, model: Parallel) -> None:
        """Have the buffers that the first rank had, as a forward pass of a model begins that is to have them alike."""
        if self._piggyback is not None:
            self._piggyback.synchronise(model)

    def spreads(self, modules: Iterable[torch.nn.Module]) -> None:
        """Note modules whose parameters were spread over the ranks; those that are within others come first."""
        for module in modules:
            within = {id(each) for each in module.modules()}
            self._spread = [each for each in self._spread if id(each) not in within] + [module]
            module.register_forward_pre_hook(lambda made, _: self.forward(made), prepend=True)

    def optimizes(self, optimizer: torch.optim.Optimizer) -> None:
        """Note an optimizer.

        Raises:
            InvalidInputError: each rank has a part of its state, of which a new one would have nothing.
        """
        if "ZeroRedundancyOptimizer" in {kind.__name__ for kind in type(optimizer).__mro__}:
            raise InvalidInputError(
                "`heal: in-place` can't give a new rank its part of a ZeroRedundancyOptimizer: give each rank all of "
                "the optimizer that it spreads, spread the model by fully_shard instead, or set `heal: restart`"
            )
        self._optimizers.append(optimizer)

    def extends(self, optimizer: torch.optim.Optimizer) -> None:
        """Have no optimizer get parameters later than a new rank would give it them."""
        if any(each is optimizer for each in self._optimizers):
            self._in_time(f"{type(optimizer).__name__} is given parameters")

    def _in_time(self, what: str) -> None:
        """Have nothing be made that a new rank, which goes to where the others are, would not make.

        Raises:
            InvalidInputError: the first training loop has begun.
        """
        if self.loops.begun:
            raise InvalidInputError(
                f"{what} after the first training loop has begun, and a rank that is replaced would not have it: do "
                "that before the loop, or set `heal: restart`"
            )

    def _prepare(self) -> tuple[list[Any], list[Any]]:
        """See what the script has made, as its first loop begins.

        Returns:
            what of its objects goes to others with the state that all have; and all that is changed by having that.
        """
        kinds = bool(self._models) + bool(self._spread)
        if not (kinds == 1 and self._optimizers and self._inner is not None):
            raise InvalidInputError(
                "`heal: in-place` needs a script that calls init_process_group, makes its models either "
                "DistributedDataParallel or spreads them by fully_shard (imported before that), makes an optimizer, "
                "and then begins its training loop"
            )
        others = {f"other{number}": each for number, each in enumerate(self._optimizers[1:])}
        models = torch.nn.ModuleList([each.module for each in self._models] or self._spread)
        own = {"optimizer": self._optimizers[0], "loops": self.loops, "groups": self._inner}
        self._inner.know([*models.parameters(), *models.buffers()])
        if self._spread:
            self._inner.in_parts = True
            own["record"] = self._records
        else:
            self._piggyback = own["piggyback"] = Piggyback(self._models, self._optimizers, first=self.rank == 0)
            self._inner.share = self._piggyback.share
        trained = {id(each) for model in self._models for each in model.reduced}
        carried: list[torch.Tensor] = [
            each for each in models.parameters() if self._spread or id(each) in trained or each.nbytes > LARGE_BYTES
        ]
        carried += [each for each in models.buffers() if each.nbytes > LARGE_BYTES]
        self._protect(self._inner, {"model": models, **own, **others}, trained)
        return [*carried, *self._optimizers], [
            *self._models,
            *models.modules(),
            *models.parameters(),
            *models.buffers(),
        ]

    def _protect(self, groups: ScriptGroups, protected: dict[str, Any], trained: set[int]) -> None:
        """Have these objects as the state, and the gradients of these parameters summed, though they be frozen now."""
        model, parts = protected["model"], (groups, self.loops, self._records)
        if self._piggyback is None:  # the script's own collectives sum gradients: here goes only what is announced
            self._ranks = TorchRanks(self._channel, self.rank, groups)
            states = ScriptStates(self._channel, self._ranks, *parts)
            self._gradients = TorchGradients(self._ranks, None, 1, PlannedCollection(0))
            summed, own = [torch.nn.Parameter(torch.zeros(1, device=next(model.parameters()).device))], protected
        else:
            states = ScriptStates(self._channel, self._ranks, *parts)
            self._gradients = WholeGradients(self._ranks, states, self.size)
            # in reverse: what goes along comes behind the model
            summed = [self._piggyback.carrier, *(each for each in model.parameters() if id(each) in trained)]
            own = {**(protected if self.rank == 0 else {}), "record": self._records}  # of all else others have the same
        self._gradients.prepare(summed)
        made = (f"{type(each).__name__} {name}" for name, each in protected.items())
        self._gradients.shapes = ", ".join([self._gradients.shapes, *made])
        self._ranks.prepare(summed[0].device)
        states.protect(protected, own)
        core, microbatches = (SpreadCore, 1) if self._piggyback is None else (WholeCore, self.size)
        shell = Shell(self._ranks, states, self._gradients)
        self._core = core(shell, int(os.environ["UNICRON_ITERATIONS"]), microbatches)
        self._meeting.group = self._ranks.group

    def _join(self) -> None:
        """Meet the others; have the state that they have."""
        self._channel.interrupt = self._meeting.interrupt
        with self._peers.waiting(Waiting(Wait.LOOP)):
            run(self._core.join_first())
        if self._core.phase is Phase.TAKEN:
            self._core.enter()
        if self.loops.chains:
            self._become()
        else:
            self._files.know(late=False)
            self._records.go_on(self._core.membership, ())
        if self._inner is not None:
            self._inner.ended.joined = True

    def _leave(self, record: Record | NotCarriedError) -> None:
        self._records.leave(record)
        if isinstance(record, NotCarriedError) and self.loops.chains:
            self._give_up(record)

    def _give_up(self, error: NotCarriedError, *, uncarried: bool = False) -> None:
        """Say that this process can't come to where its script was; where all have begun again, nor would others."""
        if uncarried or (self._inner is not None and self._inner.again):
            none = isinstance(error, OwnCheckpointNewerError)  # then no older copy can be used either
            at = {"epoch": self._core.epoch, "iteration": 0 if none else self._core.iteration}
            self._ranks.say(Unusable(**at, copies="copies", reason=str(error), uncarried=uncarried))

    def _become(self) -> None:
        """Become the rank that this one replaces.

        Raises:
            NotCarriedError: its script is not to be had; the others are told.
        """
        try:
            self.loops.become(self._records.begin(self._core.membership, self.loops.chains), self._files.arrive)
        except NotCarriedError as error:
            self._records.refuse(str(error))
            self._give_up(error)
            raise

    # --- an iteration ------------------------------------------------------------------------------------------------

    def forward(self, model: torch.nn.Module) -> None:
        """Begin an iteration by way of a model, unless it has begun, or the model is evaluated."""
        if torch.is_grad_enabled():
            self._ready |= {id(each) for each in model.parameters()}
        if self._computing or not torch.is_grad_enabled():
            return
        if not self.loops.begun:
            raise InvalidInputError(
                "`heal: in-place` sees no training loop around this model: it looks for one that calls `backward()` in "
                "the file that is run and in those beside it (of a package, in all of it, if it is run by `-m`), and "
                "knows those of transformers.Trainer and Lightning; else set `heal: restart`"
            )
        if self._core.phase is Phase.REDUCED:  # an update that a scaler of the loss left out
            run(self._core.step())
        self.loops.mark()
        self._empty = False
        self._channel.injected.begin()
        if self._piggyback is not None:
            self._piggyback.begin()
        while not self._computing:
            self._core.enter()
            self._computing = self._next_microbatch() is not None
            if not self._computing and self._core.phase is not Phase.TAKEN:
                raise GroupBrokenError("this iteration was finished without this rank")

    def _next_microbatch(self) -> int | None:
        """Return what to compute; None once there is the gradient, for which all ranks are waited for."""
        self._peers.iteration = self._core.iteration
        with self._peers.waiting(Waiting(Wait.GRADIENT, self._core.iteration)):
            return run(self._core.next_microbatch())

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        return (each for model in (*self._models, *self._spread) for each in model.parameters())

    def _has_gradient(self, model: Parallel) -> None:
        if model.require_backward_grad_sync and id(model.reduced[0]) not in self._given:
            self._given |= {id(each) for each in model.parameters()}
        if model.require_backward_grad_sync and not self._queued and (piggyback := self._piggyback) is not None:
            self._queued = True
            engine = torch.autograd.Variable._execution_engine  # noqa: SLF001 as FSDP2 does
            engine.queue_callback(lambda: self._reduce(piggyback))

    def _reduce(self, piggyback: Piggyback) -> None:
        """Finish the backward pass: have the mean gradient of all ranks."""
        self._queued = self._computing = False
        self._channel.injected.end()
        self.loops.reduced()
        with self._others_apart():
            self._find_lacking(each for each in self._parameters() if id(each) in self._given)
            self.loops.lacking.clear()
            if problem := self._drill.look(self._records, self._core.iteration, self._models):
                problem = f"in a drill another process has taken the place of rank {self.rank}, and {problem}"
                self._begin_again(problem, uncarried=True)
            piggyback.give()
            self._gradients.loss = self._loss
            self._core.computed()
            if self._next_microbatch() is not None:
                raise GroupBrokenError("what this rank computed was dropped, and can't be computed again in place")
            piggyback.take(self._gradients.summed_of(piggyback.carrier), replaced=self._records.watched > 0)
            self._records.watched = max(0, self._records.watched - 1)

    @contextlib.contextmanager
    def _others_apart(self) -> Iterator[None]:
        """Leave alone what models have as gradients that got none in this iteration."""
        left = [(each, each.grad) for each in self._parameters() if id(each) not in self._given]
        for parameter, _ in left:
            parameter.grad = None
        yield
        for parameter, gradient in left:
            parameter.grad = gradient
        self._ready, self._given = self._ready - self._given, set()

    def _go_on(self, error: GroupBrokenError) -> bool:
        """Go to the next membership from a collective of the script; return whether a new rank comes there, too."""
        among = self._begun and not self._spread and self._core.phase in {Phase.BETWEEN, Phase.OPEN}
        if not among or not (self._computing or self.loops.open):
            return False
        run(self._core.rejoin(error))
        return self._core.phase is Phase.OPEN or not self._computing

    def updates(self, optimizer: torch.optim.Optimizer) -> None:
        """Have all ranks agree that they go on, before any of them updates its part of a model that is spread."""
        if self._spread and self._computing and optimizer in self._optimizers:
            self._computing = False
            self._channel.injected.end()
            self.loops.reduced()
            self._gradients.loss = self._loss
            self._core.computed()
            self._next_microbatch()

    def computes(self, loss: torch.Tensor) -> None:
        """Note the loss of a backward pass; gradients to which its iteration's first adds are carried, too."""
        if self._computing and not self._empty:
            used = [each for each in self._parameters() if id(each) in self._ready and each.grad is not None]
            self._find_lacking(used)
            if used and self.loops.unsure:
                self.loops.zeroed = not any(local(each.grad).any() for each in used)
                if not self.loops.zeroed:
                    self.loops.adds()
            self._empty = True
        self._loss = loss.detach().mean()

    def _find_lacking(self, used: Iterable[torch.nn.Parameter]) -> None:
        """See whether a gradient is added to one that this rank's snapshot did not have.

        Raises:
            NotCarriedError: it is; all are to begin again.
        """
        lacking = {id(each) for each in self.loops.lacking}
        if any(id(each) in lacking and each.grad is not None and local(each.grad).isnan().any() for each in used):
            self._begin_again("more is added to gradients of an iteration before, which no snapshot has")

    def _begin_again(self, why: str, *, uncarried: bool = False) -> NoReturn:
        """Have all begin again, as this process does not go on as the rank would have whose place it has taken.

        Args:
            why: that is.
            uncarried: nor would any other: nothing that ranks have left is to be taken any more.
        """
        error = NotCarriedError(why)
        self._records.refuse(why)
        self._give_up(error, uncarried=uncarried)
        raise error

    def updated(self, optimizer: torch.optim.Optimizer) -> None:
        """End the iteration."""
        if self._begun and self._core.phase is Phase.REDUCED and optimizer in self._optimizers:
            run(self._core.step())
            self.loops.updated()

    # --- the end -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def to_its_end(self) -> Iterator[None]:
        """Have a script run inside, whose end is the task's where it ended well: `sys.exit()` is an end like others."""
        try:
            yield
        except SystemExit as ending:
            if ending.code is None or ending.code == 0:
                self._finish(f"by sys.exit() at {script_line(traceback.extract_tb(ending.__traceback__))}")
            raise
        self._finish(f"at the end of {Path(sys.argv[0]).name}")

    def _finish(self, where: str) -> None:
        """Say that the script is done, once it is on all ranks: who ends closes connections that others may yet use.

        Args:
            where: it has ended, for people.

        Raises:
            InvalidInputError: the others are in a loop that this rank has not come to.
            ConnectionAbortedError: a rank has failed, and what it was to do behind its loop is not done.
        """
        if os.getpid() != self._pid:  # a process that the script has forked ends
            return
        if self._inner is None:
            self.meet()
        self._files.know(late=False)
        if self._inner is not None and not self._begun and self._inner.given and not self._inner.again:
            raise InvalidInputError(
                "this script has ended before the loop that the other ranks are in: something is not as it was "
                "when they began, such as a file of theirs that it found; let it go on from that, or set "
                "`heal: restart`"
            )
        membership = self._membership()
        self._channel.send(Progress(iteration=max(0, self._channel.iteration), phase=WorkerPhase.WAITING, done=0))
        with contextlib.suppress(GroupBrokenError):
            self._peers.tell(self._position(None, where))
        if not done_everywhere(
            lambda: self._meeting.wait_for("-done", membership, b""),
            lambda: self._channel.newest.epoch > membership.epoch,
        ):
            raise ConnectionAbortedError(
                "a rank has failed that had not come to the end of this script, as this one had: all begin again"
            )
        if self._begun:
            self._ranks.leave()
        self._channel.send(Finished(iterations=int(os.environ["UNICRON_ITERATIONS"])))

    @property
    def _begun(self) -> bool:
        """Whether it has come to its first loop."""
        return self._meeting.group is not None and self._core.epoch >= 0

    def _membership(self) -> Membership:
        return self._core.membership if self._begun else self._meeting.membership

    def _position(self, waits: Waiting | None, where: str) -> Position:
        """Return what this rank has begun, by now."""
        setup, collectives = self._inner.began if self._inner is not None else (0, 0)
        iterations = self._core.iteration + (self._core.phase is Phase.REDUCED) if self._begun else 0
        if waits is not None and waits.wait is Wait.GRADIENT:
            iterations = waits.number + 1
        return Position(
            rank=self.rank,
            where=where,
            waits=waits,
            setup=setup,
            begun=self._begun,
            collectives=collectives,
            iterations=iterations,
        )


def also(kind: type, note: Callable[[Any], Any], how: str = "__init__") -> Callable[..., None]:
    """Return what makes such a thing, and notes it."""
    make = vars(kind)[how]

    def made(self: Any, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        note(self)

    return made
