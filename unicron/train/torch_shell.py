"""What the worker's core wants done, done by this process: torch, its process groups, and the line to the agent."""

import contextlib
import copy
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch

from unicron.contracts.states import StateRef
from unicron.contracts.storage import StoredState
from unicron.contracts.tasks import ParallelLayout
from unicron.contracts.traffic import forecast_name
from unicron.contracts.worker import NOWHERE, Iterated, Membership, Saved, ToAgent, Unprotected
from unicron.errors import GroupBrokenError, InvalidInputError
from unicron.train import nccl, saving, state, whole
from unicron.train.channel import Channel
from unicron.train.digest import digest, of_state
from unicron.train.gathering import Gathering, assembled, laid_out, loaded
from unicron.train.gradients import Gradients
from unicron.train.group import Group
from unicron.train.phases import Due, Outcome
from unicron.train.rendezvous import Rendezvous
from unicron.train.timing import GC, OPTIMIZER, REDUCE, PlannedCollection, Recorder
from unicron.train.traffic import Traffic

if TYPE_CHECKING:
    from unicron.train.inner import InnerGroups

T = TypeVar("T")


class TorchShell:
    """The shell of a real worker. Its calls block, and none suspends. See `unicron.train.shell`.

    Args:
        channel: to the agent; None outside a cluster.
        dtype: of the accumulated gradient; None means that of the parameters.
        microbatches: of a global batch.
        collection: of garbage.
    """

    gradients: Gradients
    group: Group
    recorder: Recorder
    lends = True
    """Whether the script gets the reduced gradient itself, and no copy of it."""

    def __init__(
        self, channel: Channel | None, dtype: torch.dtype | None, microbatches: int, collection: PlannedCollection
    ) -> None:
        self._channel, self._dtype = channel, dtype
        self._microbatches, self._collection = microbatches, collection
        self._membership = NOWHERE
        shared = state.directory() / forecast_name(os.environ["UNICRON_SLOT"]) if channel is not None else None
        self._traffic = Traffic(shared)
        self._inner: InnerGroups | None = None
        self._loss: torch.Tensor | None = None
        self._taken: dict[str, Any] | None = None
        self._fetcher = state.Fetcher(channel)
        self._remembered: dict[str, Any] = {}
        self._saver: saving.Saver | None = None
        self._unsecured: tuple[str, int] | None = None
        self._saved: Saved | None = None
        self._unprotected = ""
        self._rates: list[dict[str, Any]] = []
        self._under_way: deque[Any] = deque()
        self.protected: dict[str, Any] = {}
        self.model_file: Path | None = None
        self.peer_left: Callable[[int], None] = lambda _: None

    def protect(self, protected: dict[str, Any]) -> None:
        """Take the objects that make up the state; "model" and "optimizer" are among them."""
        parameters = self.trained(protected["model"])
        self.gradients = Gradients(parameters, self._dtype, lends=self.lends)
        self.group = Group(parameters[0].device, self._traffic, self.peer_left)
        self.recorder = Recorder(parameters[0].device)
        self.protected = protected
        if self._channel is not None:
            self._channel.interrupt, self._channel.reset = self._interrupt, self._reset

    def trained(self, model: torch.nn.Module) -> list[torch.nn.Parameter]:
        """Return the parameters whose gradients are summed over the replicas."""
        return [each for each in model.parameters() if each.requires_grad]

    def inner(self, layout: ParallelLayout) -> "InnerGroups":
        """Return the groups inside of the replica, which are made at the first call."""
        if self._inner is None:
            from unicron.train.inner import InnerGroups  # noqa: PLC0415 torch's meshes take half a second to import

            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            self._inner = InnerGroups(layout, self.place, device, self._traffic)
        return self._inner

    def _interrupt(self, membership: Membership) -> bool:
        """Leave what a newer membership replaces; the replica's own groups only where a rank of it was replaced."""
        left = self.group.abort_below(membership.epoch)
        return (self._inner is not None and self._inner.interrupt(membership.since)) or left

    def _reset(self) -> None:
        """Have all collectives break, as if each peer had reset its connection."""
        self.group.abort_below(sys.maxsize)
        if self._inner is not None:
            self._inner.interrupt(sys.maxsize)

    @property
    def place(self) -> int:
        """Part of the model that this process has built."""
        return int(os.environ.get("UNICRON_PLACE", "0"))

    @property
    def shapes(self) -> str:
        """A digest of the shapes of the gradient."""
        return self.gradients.shapes

    @property
    def formed(self) -> int:
        """Epoch in which the groups inside of the replica were formed."""
        return -1 if self._inner is None else self._inner.epoch

    @property
    def buckets(self) -> int:
        """How many there are of the gradient."""
        return self.gradients.buckets

    # --- the agent ---------------------------------------------------------------------------------------------------

    def now(self) -> float:
        """Return the monotonic seconds."""
        return time.monotonic()

    def say(self, message: ToAgent) -> None:
        """Tell the agent; an iteration that was recorded is followed by its record."""
        if self._channel is None:
            return
        self._channel.send(message)
        if isinstance(message, Iterated):
            self._traffic.iterated()
            if timed := self.recorder.end(message.iteration, message.epoch, message.rank, message.world_size):
                self._channel.send(timed)

    @property
    def newest(self) -> Membership:
        """The newest membership that the agent has sent."""
        return self._channel.newest if self._channel is not None else NOWHERE

    async def await_membership(self, above: int) -> Membership:
        """Block until there is a membership newer than epoch `above`."""
        self.recorder.drop()
        self._traffic.rests()
        if self._channel is None:
            raise RuntimeError("a collective failed outside a cluster")
        return self._channel.await_membership(above)

    # --- other ranks -------------------------------------------------------------------------------------------------

    async def form(self, membership: Membership) -> None:
        """Build the process groups of `membership`."""
        shape = membership.layout
        if shape.replica_workers > 1 and self._inner is None:
            raise InvalidInputError(
                f"layout of the task: {shape.tensor} x {shape.pipeline} x {shape.shard} workers share a replica, but "
                "this script trains a whole model: build it on session.mesh, or set tensor, pipeline and shard to 1"
            )
        self._membership = membership
        self.group.form(membership)

    async def form_replica(self, membership: Membership) -> None:
        """Build the process groups inside of the replica."""
        replica = membership.rank // membership.shape.replica_workers
        self._replica().form(membership.epoch, lambda: Rendezvous(membership, f"-replica-{replica}"))

    async def confer(self, *numbers: float) -> list[tuple[float, ...]]:
        """Return what every rank of the replica says."""
        return self._replica().gather(numbers)

    async def tally(self, *numbers: int) -> list[tuple[int, ...]]:
        """Return what this place's rank of every replica says."""
        return self.group.tally(numbers)

    def _replica(self) -> "InnerGroups":
        if self._inner is None:
            raise GroupBrokenError("this worker is no part of a replica")
        return self._inner

    def leave(self) -> None:
        """Give up the groups of replicas; those inside of one stay, to put results together, and tell what fails."""
        self.group.leave()
        self._traffic.rests()
        if self._inner is not None:
            self._inner.strict = True

    async def gather(self, value: T) -> list[T]:
        """Return what every rank gives."""
        rows = self.group.gather(msgspec.msgpack.encode(value))
        return [msgspec.msgpack.decode(row, type=type(value)) for row in rows]

    # --- states ------------------------------------------------------------------------------------------------------

    async def export(self, place: int, iteration: int, *, taken: bool = False, kept: bool = False) -> StateRef:
        """Write the state to the node's memory."""
        found = self._taken if taken else None
        return state.export(self._membership, place, found or laid_out(iteration, self.protected), kept=kept)

    @property
    def saves(self) -> bool:
        """Whether the agent wants the state saved, in every iteration that is long enough."""
        return self._channel is not None and self._channel.saves

    @property
    def save_cost_s(self) -> float:
        """Seconds of a processor that it takes to save a state, in this thread and the saver's."""
        return 0.0 if self._saver is None else self._saver.cost_s

    @property
    def secured(self) -> bool:
        """Whether all copies of the state that was saved last are whole; one that could not be saved has none."""
        if self._channel is None or self._saver is None or self._saver.failed:
            return True
        return self._channel.secured in {None, self._unsecured}

    @property
    def store_s(self) -> float:
        """How many seconds after one state that goes to storage the next is to."""
        return self._channel.store_s if self._channel is not None else 0.0

    @property
    def store_asked(self) -> int:
        """Which order to store the next state was the last."""
        return self._channel.store_asked if self._channel is not None else 0

    @property
    def own(self) -> dict[str, Any]:
        """What of the state this worker is to save."""
        return self.protected

    def described(self, iteration: int) -> StateRef:
        """Return what a state is that this worker saves."""
        return state.described(self._membership, self.place, iteration)

    def save(self, iteration: int) -> None:
        """Have a thread save the state."""
        began = time.thread_time()
        if self._saver is None:
            self._saver = saving.Saver(state.directory(), self._told_unprotected)
        found = saving.set_aside(laid_out(iteration, self.own), self.own)
        ref = self.described(iteration)
        if self._channel is not None:
            self._channel.secured = ("", -1)
        saved = partial(self._told_saved, self._membership.epoch)
        self._unsecured = (self._saver.begin(found, ref, saved, time.thread_time() - began), iteration)

    def _told_saved(self, epoch: int, ref: StateRef) -> None:
        self._unprotected, self._saved = "", Saved(state=ref, epoch=epoch)
        self.say(self._saved)

    def _told_unprotected(self, reason: str) -> None:
        """Say so once, and try again in the next iteration."""
        if reason != self._unprotected:
            self._unprotected = reason
            self.say(Unprotected(reason=reason))

    async def saved(self) -> None:
        """Wait for the thread."""
        if self._saver is not None:
            self._saver.wait()

    @property
    def saves_model(self) -> bool:
        """Whether the model is to be in a file before anybody is through."""
        return self.model_file is not None

    async def save_model(self) -> None:
        """Put the model together at the first place of the replica, and write it there."""
        part = laid_out(0, {"model": self.protected["model"]})["objects"]
        in_parts = self._membership.shape.replica_workers > 1
        found = assembled(whole.collected(part, self._replica()) if in_parts else [part])
        if self.model_file is not None and self.place == 0:
            whole.write(found["model"], self.model_file)
        if in_parts:
            await self.confer()

    async def meet(self) -> None:
        """Wait for those with this place."""
        self.group.meet()

    async def keep_pace(self, behind: int) -> None:
        """Wait for the oldest: a GPU that is far behind would look like a rank that hangs in what comes then."""
        while len(self._under_way) > behind:
            nccl.await_event(self._under_way.popleft(), self._is_cut)

    def _is_cut(self) -> bool:
        return self.group.is_cut or (self._inner is not None and self._inner.is_cut)

    @property
    def doubtful(self) -> bool:
        """Whether a GPU does them."""
        return self.group.on_streams

    async def confirm(self) -> None:
        """Wait for the GPU, and for what others say of theirs."""
        self.group.confirm()

    async def settle(self) -> None:
        """Wait for the GPU."""
        self._replica().settle()

    def store(self) -> None:
        """Tell the agent once more what was saved last, unless that failed."""
        if self._saver is not None and self._saved is not None and not self._saver.failed:
            self.say(msgspec.structs.replace(self._saved, store=True))

    def digest(self) -> int:
        """Return a digest of parameters and the optimizer's state."""
        return digest(of_state(self.protected))

    def withdraw(self, ref: StateRef) -> None:
        """Remove the file of a state."""
        state.path_of(ref.location).unlink(missing_ok=True)

    async def take(self, sources: Sequence[Sequence[StateRef]]) -> None:
        """Fetch a state by the agent, one part after the other."""
        self._fetcher.let_go()
        gathering = Gathering(self.protected)
        for copies in sources:
            if gathering.lacking:
                gathering.add(self._fetcher.fetch(copies, self._membership.epoch))
        self._taken = gathering.result(sources[0][0].iteration)
        self._mute()

    def take_stored(self, stored: StoredState) -> None:
        """Read a state from storage."""
        from unicron.train.stored.reading import restored  # noqa: PLC0415 hardly any worker needs it

        task = os.environ["UNICRON_TASK"]
        self._taken = restored(stored, task, self._membership.shape, self.place, self.protected)
        self._mute()

    def load(self) -> None:
        """Load the state that was taken."""
        if self._taken is not None:
            loaded(self._taken, self.protected)
            self._taken = None
            self._fetcher.let_go()
        self._mute(muted=False)

    def remember(self) -> None:
        """Keep what else is protected."""
        others = {name: each for name, each in self.protected.items() if name not in {"model", "optimizer"}}
        self._remembered = {name: copy.deepcopy(each.state_dict()) for name, each in others.items()}
        groups = self.protected["optimizer"].param_groups  # what schedulers change there
        self._rates = [{key: copy.deepcopy(group[key]) for key in group.keys() - {"params"}} for group in groups]
        self._mute()

    def restore(self) -> None:
        """Have what was remembered again."""
        for name, found in self._remembered.items():
            self.protected[name].load_state_dict(found)
        for group, rates in zip(self.protected["optimizer"].param_groups, self._rates, strict=True):
            group.update(rates)
        self._mute(muted=False)

    def _mute(self, *, muted: bool = True) -> None:
        """Let the script's own collectives run into nothing: the other ranks of the replica are elsewhere in it."""
        if self._inner is not None:
            self._inner.muted = muted

    # --- the gradient ------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Set the accumulated gradient to zero."""
        self.gradients.clear()

    @contextlib.contextmanager
    def overlapping(self, *, begins: bool) -> Iterator[None]:
        """Have a backward pass run inside, which begins to reduce what it has made where `begins` says so.

        Ranks of a replica of several first agree that none of what they computed is noise: only then it is added up.
        """
        shape = self._membership.shape
        begins = begins and shape.replicas > 1
        overlap = self.gradients.overlapping(self.group) if begins else contextlib.nullcontext()
        in_parts = shape.replica_workers > 1
        with contextlib.nullcontext() if in_parts else self.gradients.directly(), overlap:
            yield

    def computed(self, loss: torch.Tensor | None) -> None:
        """Keep the loss of the microbatch just computed; None where this rank has none."""
        self._loss = loss

    def accumulate(self) -> None:
        """Add the gradient of that microbatch."""
        self.gradients.accumulate(self._loss)
        if self.group.on_streams:
            self._under_way.append(nccl.mark())

    def discard(self) -> None:
        """Drop it."""
        self.gradients.discard()

    def begin(self, iteration: int, buckets: Sequence[int]) -> None:
        """Begin to sum buckets; garbage is collected before: ranks that wait there anyway lose no time."""
        if self._collection.due(iteration):
            self.recorder.start(GC)
            self._collection.collect(iteration)
        self.recorder.start(REDUCE)
        for bucket in buckets:
            self.gradients.begin(self.group, bucket)

    def abandon(self) -> None:
        """Give up what was begun."""
        self.gradients.abandon(self.group)

    async def reduce(self, bucket: int) -> None:
        """Wait for the sum of a bucket."""
        self.gradients.finish(self.group, bucket)

    async def share(self, bucket: int, replica: int) -> None:
        """Give a reduced bucket to all replicas."""
        self.gradients.share(self.group, bucket, replica)

    @property
    def finite(self) -> bool:
        """Whether gradient and loss are."""
        return self.gradients.finite

    @property
    def summed(self) -> object:
        """Whether this rank's sum is."""
        return self.gradients.summed

    def announce(self, due: Due) -> None:
        """Say with the gradient what is due with the next state."""
        self.gradients.announce(due)

    @property
    def outcome(self) -> Outcome:
        """What was reduced besides gradients."""
        return self.gradients.outcome

    def publish(self, *, void: bool = False) -> None:
        """Put the mean gradient into the parameters' `grad`."""
        self.recorder.start(OPTIMIZER)  # what the script does until the update, such as clipping, counts to it
        self.gradients.publish(self._microbatches, void=void)

    def update(self, *, void: bool = False) -> None:
        """Step the optimizer, unless the gradient is void."""
        optimizer = self.protected["optimizer"]
        if not void:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self.recorder.stop()
