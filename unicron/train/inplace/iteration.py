"""An iteration of a script that is healed in place: from a forward pass by the reduction of gradients to the update."""

import contextlib
import traceback
from collections.abc import Iterable, Iterator

import torch

from unicron.errors import GroupBrokenError, InvalidInputError
from unicron.train.inplace.abandon import abandons
from unicron.train.inplace.member import Member
from unicron.train.inplace.parallel import Parallel
from unicron.train.inplace.peers import script_line
from unicron.train.inplace.piggyback import Piggyback
from unicron.train.inplace.takeover import Takeover
from unicron.train.snapshots.shards import local
from unicron.train.worker.phases import IterationPhase
from unicron.train.worker.shell import run


class ScriptIteration:
    """The iteration that a script is in.

    Args:
        member: this rank.
        takeover: of this rank by another process.

    Attributes:
        abandon: ends this process, for an error that the script is not to see.
    """

    def __init__(self, member: Member, takeover: Takeover) -> None:
        self._member, self._takeover = member, takeover
        self._trained, self._loops, self._injected = member.trained, member.loops, member.channel.injected
        self._loss: torch.Tensor | None = None
        self._unfollowed, self._is_extended = "", False
        self._reduce_queued = self._computing = self._backward_seen = False
        self._in_forward, self._with_gradient = dict[int, torch.nn.Parameter](), set[int]()
        self.abandon = member.abandon
        member.loops.taker.trained_versions = member.trained.versions
        member.records.moved = lambda: member.loops.taker.has_other_trained

    @abandons(Exception)
    def begin_forward(self, model: torch.nn.Module) -> None:
        """Begin an iteration with the forward pass of a model, unless one has begun or the model is evaluated."""
        trains = torch.is_grad_enabled() and any(each.requires_grad for each in model.parameters())
        if trains:
            # themselves, too: those of a module that is spread are others until its backward pass, without gradients
            self._in_forward |= {id(each): each for each in model.parameters()}
        self._takeover.publish_unpublished()
        if self._computing or not trains:
            return
        if not self._loops.has_begun and (reason := self._loops.confirm()):
            self._unfollowed = reason  # nothing may come of it: some scripts only look at what a model returns
            return
        self._open_iteration()

    def _open_iteration(self) -> None:
        if self._member.core.phase is IterationPhase.REDUCED:  # an update that a scaler of the loss left out
            run(self._member.core.step())
        if self._is_extended and self._member.groups is not None:
            self._is_extended = False
            self._member.protect(self._member.groups)
        self._loops.begin_iteration()
        self._backward_seen = False
        self._injected.begin()
        if self._member.piggyback is not None:
            self._member.piggyback.begin_iteration()
        if self._takeover.drill.recording is not None:  # what it copies changes from here on
            self._takeover.drill.recording.wait()
        while not self._computing:
            self._member.core.enter(late=True)  # at its first forward pass
            self._computing = self._member.next_microbatch() is not None
            if not self._computing and self._member.core.phase is not IterationPhase.TAKEN:
                raise GroupBrokenError("this iteration was finished without this rank")

    def _begin_unfollowed(self) -> None:
        """Begin to train where no new rank could come: nobody is replaced, and all begin again when a rank is lost.

        A forward pass is over, whose backward pass comes: parameters get the first rank's values, which are theirs.

        Raises:
            InvalidInputError: they are not.
        """
        self._trained.record()
        there = [(name, each) for model in self._trained.models for name, each in model.module.named_parameters()]
        before = [each.detach().clone() for _, each in there]
        kept = (
            *(each for _, each in there),
            *(each for model in self._trained.models for each in model.module.buffers()),
        )
        with torch.autograd._unsafe_preserve_version_counter(kept):  # type: ignore[attr-defined]  # noqa: SLF001 as torch does
            self._loops.start_unfollowed()
        if other := [name for (name, each), own in zip(there, before, strict=True) if not torch.equal(each, own)]:
            raise InvalidInputError(
                f"parameter {other[0]} is not the same on all ranks as the first iteration begins: make it so before "
                "the model is made DistributedDataParallel"
            )
        self._takeover.refuse_all(self._unfollowed)
        self._open_iteration()

    @abandons(Exception)
    def extend(self, what: str) -> None:
        """Train something more from the next iteration on; a new rank, which begins in the loops, would not make it.

        Raises:
            InvalidInputError: models are spread over the ranks.
        """
        if not self._loops.has_begun:
            return
        why = (
            f"{what} after the first training loop has begun, and a rank that is replaced would not have it: do that "
            "before the loop"
        )
        if self._member.piggyback is None:
            raise InvalidInputError(why)
        self._takeover.refuse_all(why)
        self._is_extended = True

    @abandons(Exception)
    def check_extension(self, optimizer: torch.optim.Optimizer) -> None:
        """Take in that an optimizer of the script is given parameters."""
        if any(each is optimizer for each in self._trained.optimizers):
            self.extend(f"{type(optimizer).__name__} is given parameters")

    @abandons(Exception)
    def on_gradient(self, model: Parallel, parameter: torch.Tensor) -> None:
        """Have the gradient reduced as the backward pass ends, of which a model's parameter has just got its part."""
        if not model.expects_gradient:  # as with torch: under no_sync, or for a loss that goes past the model's forward
            model.has_unreduced = True
            return
        model.ready.note(parameter)
        if id(model.reduced[0]) not in self._with_gradient:
            self._with_gradient |= {id(each) for each in model.parameters()}
        if not self._reduce_queued and (piggyback := self._member.piggyback) is not None:
            self._reduce_queued = True
            engine = torch.autograd.Variable._execution_engine  # noqa: SLF001 as FSDP2 does
            engine.queue_callback(lambda: self._reduce(piggyback))

    @abandons(Exception)
    def _reduce(self, piggyback: Piggyback) -> None:
        """End the backward pass by reducing the gradient of all ranks to its mean."""
        gradients, records = self._member.gradients, self._member.records
        self._reduce_queued = self._computing = False
        self._injected.end()
        self._loops.record_reduce()
        for model in self._trained.models:
            if id(model.reduced[0]) in self._with_gradient:
                model.expects_gradient = model.has_unreduced = False
        with self._unused_gradients_aside():
            changed = (each for each in self._trained.parameters() if id(each) in self._with_gradient)
            self._check_missing_gradients(changed)
            self._loops.missing_gradients.clear()
            piggyback.attach()
            if self._end_microbatch() is not None:
                raise GroupBrokenError("what this rank computed was dropped, and can't be computed again in place")
            if self._takeover.drill.recording is not None:
                self._takeover.drill.recording.add_iteration(self._member.core.iteration, *gradients.sums)
            piggyback.apply(gradients.sum_of(piggyback.carrier), replaced=records.iterations_compared > 0)
            records.iterations_compared = max(0, records.iterations_compared - 1)

    def _end_microbatch(self) -> int | None:
        """Have the gradient reduced that this rank has computed; return the microbatch if it is to compute it anew."""
        self._member.gradients.loss = self._loss
        self._member.core.computed()
        return self._member.next_microbatch()

    @contextlib.contextmanager
    def _unused_gradients_aside(self) -> Iterator[None]:
        """Set gradients aside that no backward pass of this iteration has changed, and put them back afterwards."""
        left = [(each, each.grad) for each in self._trained.parameters() if id(each) not in self._with_gradient]
        for parameter, _ in left:
            parameter.grad = None
        yield
        for parameter, gradient in left:
            parameter.grad = gradient
        self._in_forward = {one: each for one, each in self._in_forward.items() if one not in self._with_gradient}
        self._with_gradient = set()

    @abandons(Exception)
    def rejoin(self, error: GroupBrokenError) -> bool:
        """Join the next membership from a broken collective; return whether a new rank gets to that collective, too."""
        if self._trained.sharded or not self._member.in_loops:
            return False
        core = self._member.core
        among = core.phase in {IterationPhase.BETWEEN, IterationPhase.OPEN}
        if not among or not (self._computing or self._loops.is_resumable):
            return False
        run(core.rejoin(error))
        return core.phase is IterationPhase.OPEN or not self._computing

    @abandons(Exception)
    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Have all ranks agree that the iteration is whole, before any of them updates its shard of a model."""
        if not (self._trained.models or self._trained.sharded):
            self._member.join_unhealed(trains=True)
            updated = (each for group in optimizer.param_groups for each in group["params"])
            flat = any(type(each).__name__ == "FlatParameter" for each in updated)
            how = "is FullyShardedDataParallel" if flat else "is its own to sum over the ranks, or is not summed"
            self._takeover.drill.warn(
                f"what it trains {how}, and only DistributedDataParallel is healed in place: all ranks begin again, "
                "whichever is lost"
            )
        if self._trained.sharded and self._unfollowed and not self._loops.has_begun:
            raise InvalidInputError(self._unfollowed)
        if self._trained.sharded and self._computing and optimizer in self._trained.optimizers:
            self._computing = False
            self._injected.end()
            self._loops.record_reduce()
            self._end_microbatch()

    @abandons(Exception)
    def before_backward(self, loss: torch.Tensor) -> None:
        """Record the loss of a backward pass; put gradients that it adds to into snapshots."""
        if not (self._trained.models or self._trained.sharded):
            self._member.join_unhealed(trains=True)
        expected = any(model.expects_gradient for model in self._trained.models)
        if expected and self._unfollowed and not self._loops.has_begun:
            self._begin_unfollowed()
        if self._computing and not self._backward_seen:
            used = [each for each in self._in_forward.values() if each.grad is not None]
            self._check_missing_gradients(used)
            missing = self._loops.missing_gradients  # those that are NaN from here on this script has made so
            missing[:] = [each for each in missing if id(each) not in self._in_forward]
            if used and self._loops.gradients_uncertain:
                self._loops.zeroed = not any(local(each.grad).any() for each in used)
                if not self._loops.zeroed:
                    self._loops.include_gradients()
            self._backward_seen = True
        self._loss = loss.detach().mean()

    def _check_missing_gradients(self, used: Iterable[torch.nn.Parameter]) -> None:
        """Raise if more is added to a gradient that this rank's snapshot did not contain.

        Raises:
            NotCarriedError: it is; all are to begin again.
        """
        lacking = {id(each) for each in self._loops.missing_gradients}
        if any(id(each) in lacking and each.grad is not None and local(each.grad).isnan().any() for each in used):
            self._takeover.begin_again("more is added to gradients of an iteration before, which no snapshot has")

    @abandons(Exception)
    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """End the iteration."""
        if self._trained.updates_unreduced(optimizer):  # only now: a closure may have computed it
            self._takeover.refuse_all(
                f"at {script_line(traceback.extract_stack())} {type(optimizer).__name__} makes an update from a "
                "gradient that is not reduced over the ranks, so that no other one has it: have all backward passes "
                "for an update, or the last of them, go through DistributedDataParallel, and keep what is a rank's own "
                "out of that"
            )
        reduced = self._member.in_loops and self._member.core.phase is IterationPhase.REDUCED
        if reduced and optimizer in self._trained.optimizers:
            run(self._member.core.step())
            self._loops.record_update()
