"""A script that was written for torch.distributed and DistributedDataParallel, healed in place with no line changed.

What such a script calls is exchanged before its first line runs. Each of its ranks is then a worker whose only
microbatch in each iteration is its own: the survivors wait in the reduction of the gradient, as if it took long, and
the process that replaces a lost rank builds what the script builds, is brought to the same place of its loops
(`unicron.train.loops.loops`) and computes what is missing. To the core each rank is a replica; to everything else it
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
from unicron.contracts.worker import Drilled, Finished, Membership, Progress, Ready, Unusable
from unicron.errors import GroupBrokenError, InvalidInputError
from unicron.train.carry.files import Files
from unicron.train.carry.kinds import NotCarriedError, OwnCheckpointNewerError
from unicron.train.carry.objects import LARGE_BYTES
from unicron.train.groups.rendezvous import await_all_done
from unicron.train.inplace.alike import Alike, Moments, total_of
from unicron.train.inplace.drill import Drill
from unicron.train.inplace.groups import ScriptGroups
from unicron.train.inplace.parallel import Parallel
from unicron.train.inplace.peers import Peers, RankPosition, Wait, Waiting, script_line
from unicron.train.inplace.piggyback import Piggyback
from unicron.train.inplace.records import Records
from unicron.train.inplace.script_rendezvous import ScriptRendezvous
from unicron.train.inplace.seed import Seed
from unicron.train.inplace.shell import UNKNOWN, ScriptStates, SpreadCore, WholeCore, WholeGradients, WholeRanks
from unicron.train.loops.active_loops import LoopSnapshot
from unicron.train.loops.loops import Loops
from unicron.train.session.gradients import TorchGradients
from unicron.train.session.ranks import TorchRanks
from unicron.train.session.states import TorchStates
from unicron.train.snapshots.gathering import collect_state
from unicron.train.snapshots.shards import local
from unicron.train.worker.channel import AgentChannel
from unicron.train.worker.iteration import WorkerCore
from unicron.train.worker.phases import IterationPhase
from unicron.train.worker.shell import Shell, run
from unicron.train.worker.timing import PlannedCollection

CARRY = "so that no other one has it: keep what is a rank's own out of DistributedDataParallel, or set `heal: restart`"

SPREADING = "torch.distributed.fsdp._fully_shard._fsdp_state"
"""Where torch keeps what `fully_shard` makes of a module."""


class InPlace:
    """One rank of such a script.

    Args:
        channel: to the agent.
        files: that the script opens.
        seed: from which a process on trial grows; None where this rank is not drilled.
    """

    _ranks: TorchRanks
    _states: TorchStates
    _gradients: TorchGradients
    _core: WorkerCore

    def __init__(self, channel: AgentChannel, files: Files, seed: Seed | None) -> None:
        layout = msgspec.json.decode(os.environ["UNICRON_LAYOUT"], type=ParallelLayout)
        self.rank, self.size = int(os.environ["UNICRON_PLACE"]), layout.replica_workers
        self._channel, self._layout, self._files = channel, layout, files
        self.loops = Loops(self.rank, self._made, self._begin_loops, self._publish_record, self._is_ready)
        self._groups: ScriptGroups | None = None
        self._rendezvous, self._records = ScriptRendezvous(channel, files), Records()
        self._models: list[Parallel] = []
        self._piggyback: Piggyback | None = None
        self._sharded: list[torch.nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._loss: torch.Tensor | None = None
        self._unfollowed, self._known, self._is_extended = "", list[int](), False
        self._reduce_queued = self._computing = self._backward_seen = False
        self._drill = Drill(channel, self.rank, seed, self._records.refuse_all)
        self._in_forward, self._with_gradient = set[int](), set[int]()
        self._peers = Peers(channel, self._membership, self._position)
        self._begun_versions: int | None = None
        self._records.moved = self._moved
        self._unpublished: LoopSnapshot | NotCarriedError | None = None
        self._pid = os.getpid()

    # --- the script's group ------------------------------------------------------------------------------------------

    def join_group(self) -> None:
        """Form the script's group, if all ranks are new; else a ghost stands in for it until the loops begin."""
        if self._groups is not None:
            raise ValueError("trying to initialize the default process group twice!")
        device = (
            torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
        )
        self._channel.send(Ready())
        self._groups = ScriptGroups(self._layout, self.rank, device, self.loops, self._rejoin, self._peers)
        self._ranks = WholeRanks(self._line, self._groups, self.loops, self._records)
        if spreading := sys.modules.get(SPREADING):  # takes a group, so that all of it comes later
            kind = spreading.FSDPState
            kind.init = call_after(kind, lambda state: self.add_sharded(state._modules), "init")  # noqa: SLF001 it tells nobody
        self._join_membership(self._groups)

    @property
    def _line(self) -> AgentChannel | None:
        """The channel to the agent, where there is one."""
        return self._channel

    def _join_membership(self, groups: ScriptGroups) -> None:
        groups.trial = self._drill
        self._rendezvous.join(groups)
        self._peers.watch()

    @property
    def replays_next(self) -> bool:
        """Whether this rank came later, and the next two collectives are replayed."""
        return self._groups is not None and self._groups.can_replay(2)

    # --- what the script makes ---------------------------------------------------------------------------------------

    def add_model(self, model: Parallel, shared: Iterable[torch.Tensor]) -> None:
        """Add a model whose gradients are to be reduced, and broadcast these tensors of the first rank."""
        self._extend("a model is made DistributedDataParallel")
        if self._groups is not None:  # who comes later gets them with the state
            self._groups.records_setup = False
            with torch.no_grad():
                for each in shared:
                    dist.broadcast(each, 0)
            self._groups.records_setup = True
        self._models.append(model)
        reduced = {id(each) for each in model.reduced}
        for parameter in model.module.parameters():
            if id(parameter) in reduced:
                parameter.register_post_accumulate_grad_hook(lambda _: self._on_gradient(model))

    def synchronize_buffers(self, model: Parallel) -> None:
        """Give a model the buffers of the first rank, as a forward pass begins that needs them equal on all ranks."""
        if self._piggyback is not None:
            self._piggyback.synchronize_buffers(model)

    def add_sharded(self, modules: Iterable[torch.nn.Module]) -> None:
        """Add modules that were sharded over the ranks; those inside of others come first."""
        for module in modules:
            within = {id(each) for each in module.modules()}
            self._sharded = [each for each in self._sharded if id(each) not in within] + [module]
            module.register_forward_pre_hook(lambda made, _: self.begin_forward(made), prepend=True)

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Add an optimizer.

        Raises:
            InvalidInputError: each rank has a part of its state, of which a new one would have nothing.
        """
        if "ZeroRedundancyOptimizer" in {kind.__name__ for kind in type(optimizer).__mro__}:
            raise InvalidInputError(
                "`heal: in-place` can't give a new rank its part of a ZeroRedundancyOptimizer: give each rank all of "
                "the optimizer that it spreads, spread the model by fully_shard instead, or set `heal: restart`"
            )
        self._optimizers.append(optimizer)

    def check_extension(self, optimizer: torch.optim.Optimizer) -> None:
        """Take in that an optimizer of the script is given parameters."""
        if any(each is optimizer for each in self._optimizers):
            self._extend(f"{type(optimizer).__name__} is given parameters")

    def _extend(self, what: str) -> None:
        """Train something more from the next iteration on; a new rank, which begins in the loops, would not make it.

        Raises:
            InvalidInputError: models are spread over the ranks.
        """
        if not self.loops.has_begun:
            return
        why = (
            f"{what} after the first training loop has begun, and a rank that is replaced would not have it: do that "
            "before the loop, or set `heal: restart`"
        )
        if self._piggyback is None:
            raise InvalidInputError(why)
        self._refuse_all(why)
        self._is_extended = True

    def _is_ready(self) -> bool:
        """Return whether the script has made what it trains, in a way that can be healed in place."""
        return bool(self._models) + bool(self._sharded) == 1 and bool(self._optimizers) and self._groups is not None

    @property
    def _trained(self) -> set[int]:
        """The identities of parameters whose gradients are summed."""
        return {id(each) for model in self._models for each in model.reduced}

    def _made(self) -> tuple[list[Any], list[Any], dict[str, Any]]:
        """Return what the script has made, as a loop begins that may train it.

        Returns:
            objects whose state is transferred apart from the script's snapshots, those that loading it changes, and
            those that go with the snapshots besides variables, by name.
        """
        models, trained = self._modules(), self._trained
        self._moments = Moments(() if self._sharded else self._optimizers, trained)
        self._known = self._known_objects()
        carried: list[torch.Tensor] = [
            each for each in models.parameters() if self._sharded or id(each) in trained or each.nbytes > LARGE_BYTES
        ]
        carried += [each for each in models.buffers() if each.nbytes > LARGE_BYTES]
        changed = [*self._models, *models.modules(), *models.parameters(), *models.buffers()]
        return [*carried, *self._optimizers], changed, {"moments": self._moments}

    def _known_objects(self) -> list[int]:
        """Return the identities of models, optimizers and their parameters."""
        updated = [each for one in self._optimizers for group in one.param_groups for each in group["params"]]
        return [*map(id, (*self._models, *self._sharded, *self._optimizers, *updated))]

    def _modules(self) -> torch.nn.ModuleList:
        return torch.nn.ModuleList([each.module for each in self._models] or self._sharded)

    def _begin_loops(self) -> None:
        """Protect what the script has made, as its first loop trains, and join the other ranks.

        Raises:
            InvalidInputError: it has made some of that in the loop.
        """
        if self._groups is None or self._known != self._known_objects():
            raise InvalidInputError(
                f"a model or an optimizer is made in the loop at {self.loops.first.partition('#')[0]}, which trains "
                "it, and a rank that is replaced would not have it: make it before that loop, or set `heal: restart`"
            )
        models = self._modules()
        self._groups.begin_loops([*models.parameters(), *models.buffers()])
        self._groups.sharded = bool(self._sharded)
        if self._sharded:
            self._drill.skip(
                "a model that is spread by fully_shard is not tried: all ranks begin again, whichever is lost"
            )
        ranks = 1 if self._sharded else self.size
        self._alike = Alike(self.rank, ranks, models, self._trained, self._moments)
        self._make_core(self._groups)
        self._join_ranks()

    def _make_core(self, groups: ScriptGroups) -> None:
        """Make the core of this rank, with what the script has made."""
        if self._sharded:  # the script's own collectives sum gradients: here goes only what is announced
            self._ranks = TorchRanks(self._line, self.rank, groups)
        self._states = ScriptStates(self._line, self._ranks, groups, self.loops, self._records)
        if self._sharded:
            self._gradients = TorchGradients(self._ranks, None, 1, PlannedCollection(0))
        else:
            self._gradients = WholeGradients(self._ranks, self._states, self.size)
        self._protect(groups)
        self._ranks.prepare(next(self._modules().parameters()).device)
        core, microbatches = (SpreadCore, 1) if self._sharded else (WholeCore, self.size)
        shell = Shell(self._ranks, self._states, self._gradients)
        self._core = core(shell, int(os.environ["UNICRON_ITERATIONS"]), microbatches)
        self._rendezvous.group = self._ranks.group

    def _protect(self, groups: ScriptGroups) -> None:
        """Make the state of what there is, and sum the gradients of all that is trained."""
        models, trained = self._modules(), self._trained
        names = ["optimizer", *(f"other{number}" for number in range(len(self._optimizers) - 1))]
        optimizers = dict(zip(names, self._optimizers, strict=True))
        protected: dict[str, Any] = {"model": models, **optimizers, "loops": self.loops, "groups": groups}
        if self._sharded:
            own = protected = {**protected, "record": self._records}
            summed = [torch.nn.Parameter(torch.zeros(1, device=next(models.parameters()).device))]
        else:
            self._piggyback = protected["piggyback"] = Piggyback(self._models, self._optimizers, first=self.rank == 0)
            groups.on_shared = self._piggyback.invalidate_shared
            own = {**(protected if self.rank == 0 else {}), "record": self._records}  # of all else others have the same
            # in reverse: what goes along comes behind the model
            summed = [self._piggyback.carrier, *(each for each in models.parameters() if id(each) in trained)]
        self._gradients.prepare(summed)
        made = (f"{type(each).__name__} {name}" for name, each in protected.items())
        self._gradients.shapes = ", ".join([self._gradients.shapes, *made])
        self._states.protect(protected, own)

    def _join_ranks(self) -> None:
        """Join the other ranks and load their state; take over the replaced rank if there is one."""
        self._channel.on_membership = self._rendezvous.interrupt
        own = [(each, each.detach().clone()) for model in self._models for each in model.own_tensors()]
        with self._peers.waiting(Waiting(Wait.LOOP)):
            run(self._core.join_first())
        if self._core.phase is IterationPhase.TAKEN:
            self._core.enter()
        if self.loops.candidate_chains:
            self._take_over_rank()
            self._alike.is_confirmed = True
        else:
            self._files.set_joins_late(late=False)
            self._records.move_to(self._core.membership, ())
            with torch.no_grad():
                for tensor, value in own:  # the first state is the first rank's
                    tensor.copy_(value)
            self._compare_parameters()
        if self._groups is not None:
            self._groups.ended.in_loops = True

    def _compare_parameters(self) -> None:
        """Have no rank take another's place where ranks begin with other parameters."""
        mine = self._alike.digest_parameters()
        with contextlib.suppress(GroupBrokenError):  # some rank is lost already: then they are compared later
            totals = run(self._ranks.gather(total_of(mine)))
            found = run(self._ranks.gather(mine)) if len(set(totals)) > 1 else []
            for theirs in found:
                if different := next((name for name in mine if mine[name] != theirs.get(name)), ""):
                    self._refuse_all(f"{different} is not the same on all ranks, {CARRY}")

    def _end_comparison(self) -> None:
        """Take in whether ranks are alike; publish what could not be before that was known."""
        if different := self._alike.end(self._records):
            self._refuse_all(f"{different} is not the same on all ranks, {CARRY}")
        if self._alike.is_confirmed and self._unpublished is not None:
            self._records.publish(self._unpublished)
            self._unpublished = None

    def _refuse_all(self, why: str) -> None:
        """Have no process take a rank's place, as one that did would train something else; nobody is stopped."""
        if not self._records.shown:
            self._records.refuse_all(why)
            self._channel.send(Drilled(iteration=max(0, self._core.iteration), rank=self.rank, problem=why))

    def _publish_record(self, record: LoopSnapshot | NotCarriedError) -> None:
        if self._in_loops and self._core.phase is IterationPhase.BETWEEN:
            self._end_comparison()
            self._alike.begin(self._core.iteration, self._records)
            if not self._alike.is_confirmed:
                self._unpublished = record
                self._records.wait_for_comparison()
                return
        self._records.publish(record)
        if isinstance(record, NotCarriedError) and self.loops.candidate_chains:
            self._report_unusable(record)
        elif self._in_loops and self._core.phase is IterationPhase.BETWEEN:
            known = NotCarriedError(self._records.refusal) if self._records.refusal else record
            self._drill.at_snapshot(known, self._core.iteration, self._core.epoch, self._recorded_state)

    def _recorded_state(self) -> dict[str, Any]:
        """Return what a process on trial begins from, besides this rank's own snapshot."""
        setup = self._groups.setup if self._groups is not None else None
        if setup is None:
            raise NotCarriedError(UNKNOWN)
        return {"objects": collect_state(self._core.iteration, self._states.protected)["objects"], "setup": setup}

    def _report_unusable(self, error: NotCarriedError, *, uncarried: bool = False) -> None:
        """Report the saved states as unusable, if all ranks have restarted from one or no process could use it."""
        if uncarried or (self._groups is not None and self._groups.restored):
            none = isinstance(error, OwnCheckpointNewerError)  # then no older copy can be used either
            at = {"epoch": self._core.epoch, "iteration": 0 if none else self._core.iteration}
            self._ranks.send(Unusable(**at, copies="copies", reason=str(error), uncarried=uncarried))

    def _take_over_rank(self) -> None:
        """Take over the rank that this one replaces.

        Raises:
            NotCarriedError: its record can't be used; the others are told.
        """
        try:
            self.loops.take_over(
                self._records.take_over(self._core.membership, self.loops.candidate_chains), self._files.write_in_place
            )
        except NotCarriedError as error:
            self._records.publish_refusal(str(error))
            self._report_unusable(error)
            raise

    # --- an iteration ------------------------------------------------------------------------------------------------

    def begin_forward(self, model: torch.nn.Module) -> None:
        """Begin an iteration with the forward pass of a model, unless one has begun or the model is evaluated."""
        if torch.is_grad_enabled():
            self._in_forward |= {id(each) for each in model.parameters()}
        if self._unpublished is not None:
            self._end_comparison()
        if self._computing or not torch.is_grad_enabled():
            return
        if not self.loops.has_begun and (reason := self.loops.confirm()):
            self._unfollowed = reason  # nothing may come of it: some scripts only look at what a model returns
            return
        self._open_iteration()

    def _open_iteration(self) -> None:
        if self._core.phase is IterationPhase.REDUCED:  # an update that a scaler of the loss left out
            run(self._core.step())
        if self._is_extended and self._groups is not None:
            self._is_extended = False
            self._protect(self._groups)
        self.loops.begin_iteration()
        self._backward_seen, self._begun_versions = False, self._versions()
        self._channel.injected.begin()
        if self._piggyback is not None:
            self._piggyback.begin_iteration()
        if self._drill.recording is not None:  # what it copies changes from here on
            self._drill.recording.wait()
        while not self._computing:
            self._core.enter()
            self._computing = self._next_microbatch() is not None
            if not self._computing and self._core.phase is not IterationPhase.TAKEN:
                raise GroupBrokenError("this iteration was finished without this rank")

    def _versions(self) -> int:
        """Return the sum of the versions of trained parameters, which grows as they are changed."""
        return sum(each._version for model in self._models for each in model.reduced)  # noqa: SLF001 there is no other way to it

    def _moved(self) -> bool:
        """Return whether parameters are not what they were as the iteration began, so that nobody else can begin it."""
        return self._begun_versions not in {None, self._versions()}

    def _next_microbatch(self) -> int | None:
        """Return the microbatch to compute; None once the gradient of all ranks is reduced."""
        self._peers.iteration = self._core.iteration
        with self._peers.waiting(Waiting(Wait.GRADIENT, self._core.iteration)):
            return run(self._core.next_microbatch())

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        return (each for model in (*self._models, *self._sharded) for each in model.parameters())

    def _begin_unfollowed(self) -> None:
        """Begin to train where no new rank could come: nobody is replaced, and all begin again when a rank is lost."""
        self._made()
        self.loops.start_unfollowed()
        self._refuse_all(self._unfollowed)
        self._open_iteration()

    def _on_gradient(self, model: Parallel) -> None:
        if not model.expects_gradient:  # as with torch: under no_sync, or for a loss that goes past the model's forward
            model.has_unreduced = True
            return
        if id(model.reduced[0]) not in self._with_gradient:
            self._with_gradient |= {id(each) for each in model.parameters()}
        if not self._reduce_queued and (piggyback := self._piggyback) is not None:
            self._reduce_queued = True
            engine = torch.autograd.Variable._execution_engine  # noqa: SLF001 as FSDP2 does
            engine.queue_callback(lambda: self._reduce(piggyback))

    def _reduce(self, piggyback: Piggyback) -> None:
        """End the backward pass by reducing the gradient of all ranks to its mean."""
        self._reduce_queued = self._computing = False
        self._channel.injected.end()
        self.loops.record_reduce()
        for model in self._models:
            if id(model.reduced[0]) in self._with_gradient:
                model.expects_gradient = model.has_unreduced = False
        with self._unused_gradients_aside():
            self._check_missing_gradients(each for each in self._parameters() if id(each) in self._with_gradient)
            self.loops.missing_gradients.clear()
            piggyback.attach()
            self._gradients.loss = self._loss
            self._core.computed()
            if self._next_microbatch() is not None:
                raise GroupBrokenError("what this rank computed was dropped, and can't be computed again in place")
            if self._drill.recording is not None:
                self._drill.recording.add_iteration(self._core.iteration, *self._gradients.sums)
            piggyback.apply(self._gradients.sum_of(piggyback.carrier), replaced=self._records.iterations_compared > 0)
            self._records.iterations_compared = max(0, self._records.iterations_compared - 1)

    @contextlib.contextmanager
    def _unused_gradients_aside(self) -> Iterator[None]:
        """Set gradients aside that no backward pass of this iteration has changed, and put them back afterwards."""
        left = [(each, each.grad) for each in self._parameters() if id(each) not in self._with_gradient]
        for parameter, _ in left:
            parameter.grad = None
        yield
        for parameter, gradient in left:
            parameter.grad = gradient
        self._in_forward, self._with_gradient = self._in_forward - self._with_gradient, set()

    def _rejoin(self, error: GroupBrokenError) -> bool:
        """Join the next membership from a broken collective; return whether a new rank gets to that collective, too."""
        among = (
            self._in_loops and not self._sharded and self._core.phase in {IterationPhase.BETWEEN, IterationPhase.OPEN}
        )
        if not among or not (self._computing or self.loops.is_resumable):
            return False
        run(self._core.rejoin(error))
        return self._core.phase is IterationPhase.OPEN or not self._computing

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Have all ranks agree that the iteration is whole, before any of them updates its shard of a model."""
        if not (self._models or self._sharded):
            self._drill.warn(
                "what it trains is neither DistributedDataParallel nor spread by fully_shard, as a pipeline's stages "
                "are not: all ranks begin again, whichever is lost"
            )
        if self._sharded and self._unfollowed and not self.loops.has_begun:
            raise InvalidInputError(f"`heal: in-place` can't heal this script: {self._unfollowed}")
        if self._sharded and self._computing and optimizer in self._optimizers:
            self._computing = False
            self._channel.injected.end()
            self.loops.record_reduce()
            self._gradients.loss = self._loss
            self._core.computed()
            self._next_microbatch()

    def _updates_unreduced(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer has made an update from gradients that only this rank has."""
        if not any(model.has_unreduced for model in self._models):
            return False
        trained = {id(each) for model in self._models if model.has_unreduced for each in model.reduced}
        return any(
            each.grad is not None and id(each) in trained
            for group in optimizer.param_groups
            for each in group["params"]
        )

    def before_backward(self, loss: torch.Tensor) -> None:
        """Record the loss of a backward pass; put gradients that it adds to into snapshots."""
        expected = any(model.expects_gradient for model in self._models)
        if expected and self._unfollowed and not self.loops.has_begun:
            self._begin_unfollowed()
        if self._computing and not self._backward_seen:
            used = [each for each in self._parameters() if id(each) in self._in_forward and each.grad is not None]
            self._check_missing_gradients(used)
            if used and self.loops.gradients_uncertain:
                self.loops.zeroed = not any(local(each.grad).any() for each in used)
                if not self.loops.zeroed:
                    self.loops.include_gradients()
            self._backward_seen = True
        self._loss = loss.detach().mean()

    def _check_missing_gradients(self, used: Iterable[torch.nn.Parameter]) -> None:
        """Raise if more is added to a gradient that this rank's snapshot did not contain.

        Raises:
            NotCarriedError: it is; all are to begin again.
        """
        lacking = {id(each) for each in self.loops.missing_gradients}
        if any(id(each) in lacking and each.grad is not None and local(each.grad).isnan().any() for each in used):
            self._begin_again("more is added to gradients of an iteration before, which no snapshot has")

    def _begin_again(self, why: str, *, uncarried: bool = False) -> NoReturn:
        """Restart all ranks, as this process would not continue as the rank which it replaces.

        Args:
            why: that is.
            uncarried: no other process would, either: no records are to be used any more.
        """
        error = NotCarriedError(why)
        self._records.publish_refusal(why)
        self._report_unusable(error, uncarried=uncarried)
        raise error

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """End the iteration."""
        if self._updates_unreduced(optimizer):  # only now: a closure may have computed it
            self._refuse_all(
                f"at {script_line(traceback.extract_stack())} {type(optimizer).__name__} makes an update from a "
                f"gradient that is not reduced over the ranks, {CARRY}"
            )
        if self._in_loops and self._core.phase is IterationPhase.REDUCED and optimizer in self._optimizers:
            run(self._core.step())
            self._begun_versions = None
            self.loops.record_update()

    # --- the end -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def run_to_end(self) -> Iterator[None]:
        """Run a script inside, and report the task as finished where it ends well, be it by `sys.exit()`."""
        try:
            yield
        except SystemExit as ending:
            if ending.code is None or ending.code == 0:
                self._finish(f"by sys.exit() at {script_line(traceback.extract_tb(ending.__traceback__))}")
            raise
        self._finish(f"at the end of {Path(sys.argv[0]).name}")

    def _finish(self, where: str) -> None:
        """Report that the script is done, once it is on all ranks: one that ends closes connections that others use.

        Args:
            where: place at which it has ended, for people.

        Raises:
            InvalidInputError: the others are in a loop that this rank has not come to.
            ConnectionAbortedError: a rank has failed, and what it was to do behind its loop is not done.
        """
        if os.getpid() != self._pid:  # a process that the script has forked ends
            return
        self._drill.finish()
        if self._groups is None:
            self.join_group()
        self._files.set_joins_late(late=False)
        if self._groups is not None and not self._in_loops and self._groups.replays_next and not self._groups.restored:
            raise InvalidInputError(
                "this script has ended before the loop that the other ranks are in: something is not as it was "
                "when they began, such as a file of theirs that it found; let it go on from that, or set "
                "`heal: restart`"
            )
        membership = self._membership()
        self._channel.send(Progress(iteration=max(0, self._channel.iteration), phase=WorkerPhase.WAITING, done=0))
        with contextlib.suppress(GroupBrokenError):
            self._peers.publish(self._position(None, where))
        if not await_all_done(
            lambda: self._rendezvous.exchange("-done", membership, b""),
            lambda: self._channel.newest.epoch > membership.epoch,
        ):
            raise ConnectionAbortedError(
                "a rank has failed that had not come to the end of this script, as this one had: all begin again"
            )
        if self._in_loops:
            self._ranks.leave()
        self._channel.send(Finished(iterations=int(os.environ["UNICRON_ITERATIONS"])))

    @property
    def _in_loops(self) -> bool:
        """Whether the script has come to its first loop."""
        return self._rendezvous.group is not None and self._core.epoch >= 0

    def _membership(self) -> Membership:
        return self._core.membership if self._in_loops else self._rendezvous.membership

    def _position(self, waits: Waiting | None, where: str) -> RankPosition:
        """Return what this rank has begun by now, where it is and what it waits for."""
        setup, collectives = self._groups.begun_counts if self._groups is not None else (0, 0)
        iterations = self._core.iteration + (self._core.phase is IterationPhase.REDUCED) if self._in_loops else 0
        if waits is not None and waits.wait is Wait.GRADIENT:
            iterations = waits.number + 1
        return RankPosition(
            rank=self.rank,
            where=where,
            waits=waits,
            setup=setup,
            begun=self._in_loops,
            collectives=collectives,
            iterations=iterations,
        )


def call_after(kind: type, note: Callable[[Any], Any], how: str = "__init__") -> Callable[..., None]:
    """Return a method that calls the one of this name, and then `note` with the object."""
    make = vars(kind)[how]

    def made(self: Any, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        note(self)

    return made
