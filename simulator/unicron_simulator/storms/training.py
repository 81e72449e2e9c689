"""Modelled workers: processes, gradients and time are modelled, all else is the core of the real ones.

A gradient is modelled as the microbatches that are in it, so that each update can be checked: every microbatch of the
iteration once, on any worker and after any fault. Parameters are modelled as the updates in them.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from random import Random
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from unicron.contracts.commands import StartWorker
from unicron.contracts.states import SAVED, StateLocation, StateRef
from unicron.contracts.storage import StoredState
from unicron.contracts.tasks import TaskSpec, WorkerPhase
from unicron.contracts.worker import Hello, Joined, Progress, Raised, Save, Saved, Secured, ToAgent, Unprotected
from unicron.errors import GroupBrokenError, StateLostError, StateTransferError
from unicron.snapshots.names import exported_name, saved_name
from unicron.train.worker.iteration import WorkerCore
from unicron.train.worker.phases import FORGOTTEN, Due, ReducedValues, greeting
from unicron.train.worker.shell import Shell
from unicron_simulator.storms import resources
from unicron_simulator.storms.collectives import SimulatedGroup
from unicron_simulator.storms.rank import SimulatedRank
from unicron_simulator.storms.storage import SharedStorage

BUCKETS = 2
"""Buckets of the modelled gradient."""

CLIP_S = 0.2
"""How long ranks of a replica are busy with the reduced gradient, before a collective that clips it."""

SAVE_S = 0.05
"""How long a rank needs on average until it puts its results together with those of its replica."""

SAVE_LIMIT_S = 5.0

MODEL_S = 8.0
"""How long writing the model takes at most."""

INFINITE = b"infinite"
"""How a flaw begins that makes a gradient infinite."""


class WorkerDelays(NamedTuple):
    """How long things take a worker, in seconds; a storm's are short, so that much happens in little time.

    Attributes:
        start: from the start of the process until its model is built, at least and at most.
        meet: until the members of a new membership have found one another and can compute together.
        transfer: for the state from one worker to another.
        save: for the state to its node's memory, at least and at most.
        copy: from there to another node's.
        microbatch: to compute one, at least and at most.
    """

    start: tuple[float, float] = (0.2, 0.8)
    meet: float = 0.02
    transfer: float = 0.1
    save: tuple[float, float] = (0.01, 0.1)
    copy: tuple[float, float] = (0.02, 1.5)
    microbatch: tuple[float, float] = (0.1, 0.2)


STORM = WorkerDelays()

Gradient = Counter[int]


NOISE = -1
"""Stands for a microbatch, in the sum of a collective that one of its ranks has left."""


def on_streams(spec: TaskSpec) -> bool:
    """Return whether GPUs train a task: then a collective that broke ends as if nothing were wrong, but with noise."""
    return spec.microbatches % 2 == 0


def saves_model(spec: TaskSpec) -> bool:
    """Return whether a task's script has its model saved in the end."""
    return spec.iterations % 2 == 0


class Host(Protocol):
    """The machine that a worker runs on: its name, its memory, and the storage that all machines see."""

    name: str
    kept: dict[str, StateRef]
    saved: dict[str, StateRef]
    storage: SharedStorage

    @property
    def machines(self) -> Mapping[str, "Host"]:
        """All machines, by name."""

    def meeting(self, place: str, name: str, size: int) -> SimulatedGroup | None:
        """Return the group that meets at an address under a name; None where nobody can meet."""

    def deliver_to_agent(self, worker: str, message: ToAgent) -> bool:
        """Give a worker's message to its agent; return whether there is one."""

    def exited(self, worker: str, exit_code: int | None, signal: int | None) -> None:
        """Have the agent see that a process ended."""

    def lacking(self, what: str) -> str:
        """Return what the system says of what this machine has none left of; empty where it has."""

    def lies(self, ref: StateRef) -> bool:
        """Return whether a state is in this machine's memory, whole."""

    def hands_over(self, ref: StateRef) -> bool:
        """Return whether a state can be had from the machine that holds it."""


class Observer(Protocol):
    """A check of a worker at each of its steps."""

    def check(self, holds: bool, otherwise: str) -> None:
        """Note a violation where something does not hold."""

    def joined(self, worker: "Trainer", joined: Joined, *, established: bool) -> None:
        """Check with which iteration a worker goes on."""

    def counted(self, worker: "Trainer") -> None:
        """Check a worker that counts a microbatch."""

    def stepped(self, worker: "Trainer", iteration: int, gradients: list[Gradient]) -> None:
        """Check an update."""

    def wrote_model(self, worker: "Trainer", updates: int) -> None:
        """Check a model that a worker has written."""

    def compared(self, worker: "Trainer") -> None:
        """Check that all replicas have the same state."""


class Trainer(SimulatedRank):
    """A worker process: the shell of a core in virtual time, and a script that trains.

    Attributes:
        core: of the worker, the same as in real ones.
        living: the process is there.
        asleep: it waits, and uses no processor.
        computes: it is in its membership, and not on its way to one.
        layout: the shape of the replica that has this place.
        spoilt: what its script did to the gradient is noise.
        flaw: of its state, which is that of others where this is the same; empty for one that nothing struck.
        saves: its agent wants its state saved.
        store_s: seconds from one state that goes to storage to the next; 0 where none does.
        store_asked: counts orders to store the next.
    """

    buckets = BUCKETS
    shapes = ""

    def __init__(
        self,
        command: StartWorker,
        host: Host,
        book: Observer,
        random: Random,
        pace: WorkerDelays = STORM,
        make_core: type[WorkerCore] = WorkerCore,
    ) -> None:
        super().__init__(command.worker, command.place, host.meeting, pace.meet, partial(host.lacking, resources.PORTS))
        self.spec, self.slot, self.layout, self.host = command.spec, command.slot, command.layout, host
        self.living, self.asleep, self.computes = True, False, False
        self.core = make_core(Shell(self, self, self), self.spec.iterations, self.spec.microbatches)
        self._book, self._random, self._pace = book, random, pace
        self._hello = Hello(worker=self.name, pid=1)
        self.flaw, self._updates, self._taken = b"", 0, (0, b"")
        self._saved: Saved | None = None
        self._files, self._unsaved = set[str](), False
        self._flip, self._tries = b"", False
        self._announces, self._announced, self._finite = frozenset[Due](), frozenset[Due](), True
        self._sums: Gradient = Counter()
        self._reduced: list[Gradient] = [Counter() for _ in range(BUCKETS)]
        self._unsent: list[ToAgent] = []
        self._computed, self.spoilt, self._muted = -1, False, False
        self.is_asynchronous, self._noisy = on_streams(self.spec), False
        self.store_asked = 0
        self.saves, self.save_cost_s, self.store_s, self._turn, self._saving = (
            False,
            0.0,
            0.0,
            0,
            asyncio.ensure_future(asyncio.sleep(0)),
        )
        self._unsecured: tuple[str, int] | None = None
        self._at_risk = ""
        self._micro_s = random.uniform(*pace.microbatch)
        self._task = asyncio.ensure_future(self._main())

    # --- its agent ---------------------------------------------------------------------------------------------------

    def hello(self) -> tuple[Hello, list[ToAgent]] | None:
        """Greet a new agent, and say what nobody was there to hear; a stopped process says nothing."""
        if self.paused or not self.living:
            return None
        unsent, self._unsent = self._unsent, []
        return self._hello, unsent

    def save_from_now(self, message: Save) -> None:
        """Take in whether to save; what was saved before need not be secured."""
        self.saves, self.store_s, self.store_asked = message.on, message.store_s, message.store_asked
        self._unsecured, self._at_risk = None, ""

    def secure(self, message: Secured) -> None:
        """Take in that a state's copies are whole."""
        if self._unsecured == (message.name, message.iteration):
            self._unsecured, self._at_risk = None, ""

    def send(self, message: ToAgent) -> None:
        """Send a message to the agent; the book gets memberships too."""
        self._hello = greeting(self._hello, message)
        if isinstance(message, Progress):
            self.computes = message.phase is not WorkerPhase.WAITING
        if isinstance(message, Joined):
            self._book.joined(self, message, established=self.core.established)
        if not self.host.deliver_to_agent(self.name, message) and not isinstance(message, FORGOTTEN):
            self._unsent.append(message)

    # --- faults ------------------------------------------------------------------------------------------------------

    def end(self, exit_code: int | None, signal: int | None, *, silently: bool = False) -> None:
        """End the process; `silently`: its machine is gone, so that no peer sees a connection close."""
        if not self.living:
            return
        self.living = self.computes = False
        self._task.cancel()
        self._saving.cancel()
        if not silently:
            self._leave(f"connection to {self.name} closed by peer")
            self._break(f"connection to {self.name} closed by peer")
        self.host.exited(self.name, exit_code, signal)

    def throw(self, text: str) -> None:
        """Raise an exception in the script, which ends it; in one that is stopped, nothing runs that could raise."""
        if self.paused or not self.living:
            return
        self.send(Raised(iteration=self.core.iteration, exception="RuntimeError", text=text, traceback=text))
        self.end(1, None)

    def flip(self, flaw: bytes) -> None:
        """Have a bit of the parameters flipped when the next iteration begins."""
        self._flip = flaw

    def _peer_left(self, epoch: int) -> None:
        if self.living and not self.paused:
            self.core.peer_left(epoch)

    # --- the script --------------------------------------------------------------------------------------------------

    async def _main(self) -> None:
        await self._pass(self._random.uniform(*self._pace.start))
        try:
            await self._train()
        except StateLostError as error:
            self.throw(f"StateLostError: {error}")

    async def _train(self) -> None:
        await self.core.start()
        while self.core.enter() or not await self.core.finish():
            self.flaw, self._flip = self._flip or self.flaw, b""
            while (microbatch := await self.core.next_microbatch()) is not None:
                await self._pass(self._micro_s)
                self._noisy = not await self._beside(f"compute {self.core.iteration} {microbatch}")
                self._computed = microbatch
                self.core.computed()
            await self._pass(CLIP_S if self.layout.replica_workers > 1 else 0.005)
            self.spoilt = not await self._beside(f"clip {self.core.iteration}")
            await self.core.step()
        await self._save()
        self.end(0, None)

    async def _beside(self, what: str) -> bool:
        """Have a collective inside of the replica, as a model's layers do; False where all that came of it is noise."""
        try:
            if self.layout.replica_workers > 1 and not self._muted:
                if self.is_asynchronous and self.formed >= 0:  # it is not noticed here
                    await self._replica.gather(what, self.place, None)
                else:
                    await self._together(what, None)
        except GroupBrokenError:
            return False
        return True

    async def _save(self) -> None:
        """Put results together with the other ranks of the replica; one whose machine is gone is not waited for."""
        await self._pass(self._random.uniform(0.0, 2 * SAVE_S))
        with contextlib.suppress(asyncio.TimeoutError):
            whole = self.formed < 0 or await asyncio.wait_for(self._beside("save"), SAVE_LIMIT_S)
            self._book.check(
                whole or "closed by peer" in self._replica.broken,
                f"{self.name} could not save its results: {self._replica.broken}",
            )

    # --- what its core wants done (`unicron.train.worker.shell`) ---------------------------------------------------

    def now(self) -> float:
        """Return the virtual seconds."""
        return asyncio.get_running_loop().time()

    async def export(self, place: int, iteration: int, *, taken: bool = False, kept: bool = False) -> StateRef:  # noqa: ARG002
        """Say which updates are in the state, whatever the core takes them for."""
        if why := self.host.lacking(resources.ROOM):
            raise StateTransferError(f"worker {self.name} can't write its state on {self.host.name}: {why}")
        ref = self._described(exported_name(self.name, self.core.epoch, kept=kept))
        if taken:
            ref = replace(ref, iteration=self._taken[0], checksum=self._taken[1])
        if kept:
            await self._pass(self._pace.transfer)
            self.host.kept[ref.location.name] = ref
        return ref

    def _described(self, name: str) -> StateRef:
        member = self.core.membership.member
        return StateRef(
            task=self.spec.name,
            iteration=self._updates,
            place=self.place,
            location=StateLocation(node=self.host.name, worker=self.name, name=name, address=member.state_server),
            size=0,
            checksum=self.flaw,
            layout=self.layout,
        )

    @property
    def secured(self) -> bool:
        """Whether all copies of what was saved last are whole."""
        return self._unsecured is None

    def save(self, iteration: int) -> None:
        """Write to the file that is not the newest; from here on that holds no state."""
        self._turn = 1 - self._turn
        ref = self._described(saved_name(self.name, self._turn))
        self._book.check(not self._at_risk, f"{self.name} saves again before the last one is safe: {self._at_risk}")
        self._at_risk = ref.location.name
        self._unsecured = (ref.location.name, iteration)
        self.host.saved.pop(ref.location.name, None)
        self._saving = asyncio.ensure_future(self._save_state(ref, self.core.epoch))

    async def _save_state(self, ref: StateRef, epoch: int) -> None:
        await self._pass(self._random.uniform(*self._pace.save))
        self._book.check(ref.iteration == self._updates, f"{self.name} updated what it was still saving")
        if ref.location.name not in self._files and (why := self.host.lacking(resources.ROOM)):
            self._turn = 1 - self._turn  # the other one is the newest still
            self._unsaved, self._unsecured, self._at_risk = True, None, ""
            self.send(Unprotected(reason=f"{ref.location.name}: {why}"))
            return
        self._files.add(ref.location.name)
        self._unsaved = False
        self.host.saved[ref.location.name] = ref
        self._saved = Saved(state=ref, epoch=epoch)
        self.send(self._saved)

    async def await_saved(self) -> None:
        """Wait for it."""
        await self._saving

    @property
    def saves_model(self) -> bool:
        """Whether its script asks for that: every second one's does."""
        return saves_model(self.spec)

    async def save_model(self) -> None:
        """Write it, which takes a moment; it is there at the end of that."""
        if self.place == 0:
            await self._pass(self._random.uniform(0.0, MODEL_S))
            self._book.wrote_model(self, self._updates)
        if self.layout.replica_workers > 1:
            await self.gather_in_replica()

    def store(self) -> None:
        """Have what was saved written to storage."""
        self._book.compared(self)
        if self._saved is not None and not self._unsaved:
            self.send(replace(self._saved, store=True))

    def digest(self) -> int:
        """Return what updates and flaws are in the state."""
        return int.from_bytes(self.flaw) << 32 | self._updates

    def remove_export(self, ref: StateRef) -> None:
        """Take what was left behind back; other states take no room here."""
        self.host.kept.pop(ref.location.name, None)

    async def fetch(self, sources: Sequence[Sequence[StateRef]]) -> None:
        """Let the time of a transfer pass; each part is needed, and from one update."""
        await self._pass(self._pace.transfer)
        self._check()
        flaws = set[bytes]()
        for copies in sources:
            given = next(filter(self.host.hands_over, copies), None)
            if given is None:
                nodes = ", ".join(ref.location.node for ref in copies)
                raise StateTransferError(f"place {copies[0].place} can't be had from {nodes} on {self.host.name}")
            if given.location.node != self.host.name and (why := self.host.lacking(resources.ROOM)):
                raise StateTransferError(f"state {given.location.name} into the memory of {self.host.name}: {why}")
            flaws.add(given.checksum)
        [iteration] = {ref.iteration for copies in sources for ref in copies}
        self._taken = iteration, max(flaws)
        self._tries = any(ref.location.name.endswith(SAVED) for copies in sources for ref in copies)
        self._muted = True

    def read_stored(self, stored: StoredState) -> None:
        """Have a state from storage."""
        if stored.folder not in self.host.storage.whole:
            raise StateTransferError(f"{stored.folder} is not there any more")
        self._tries = True
        self._taken, self._muted = (stored.iteration, self.host.storage.flaws[stored.folder]), True

    def load(self) -> None:
        """Have the updates that are in the state."""
        (self._updates, self.flaw), self._muted = self._taken, False

    def keep_others(self) -> None:
        """Be alone until the script begins again: all that is modelled of its state are updates."""
        self._muted = True

    def restore_others(self) -> None:
        """Be with the others again."""
        self._muted = False

    def clear(self) -> None:
        """Have no microbatch in the gradient."""
        self._sums, self._reduced, self._announces = Counter(), [Counter() for _ in range(BUCKETS)], frozenset()

    def begin(self, iteration: int, buckets: Sequence[int]) -> None:
        """Nothing is under way here before it is waited for."""

    async def reduce(self, bucket: int) -> None:
        """Add up the microbatches of all."""
        seconds = self._random.uniform(0.001, 0.01)
        mine = self._sums.copy(), self._announces, self.is_sum_finite
        try:
            given = await self._over_replicas(mine, f"reduce {self.core.iteration} {bucket}", seconds)
        except GroupBrokenError:
            if not self.is_asynchronous:
                raise
            self._reduced[bucket] = Counter([NOISE])
            return
        self._reduced[bucket] = Counter()
        for each, _, _ in given:
            self._reduced[bucket].update(each)
        self._announced = frozenset().union(*(announces for _, announces, _ in given))
        self._finite = all(finite for *_, finite in given)

    def abandon(self) -> None:
        """Do nothing, likewise."""

    async def share(self, bucket: int, replica: int) -> None:
        """Have what `replica` has."""
        try:
            given = await self._over_replicas(self._reduced[bucket], f"share {bucket}")
        except GroupBrokenError:
            if not self.is_asynchronous:
                raise
            if self._seat.replica != replica:
                self._reduced[bucket] = Counter([NOISE])
            return
        self._reduced[bucket] = given[replica]

    async def confirm(self) -> None:
        """Wait for all with this place."""
        if self.is_asynchronous:
            await self.barrier()

    async def settle(self) -> None:
        """See whether the replica broke."""
        if self.is_asynchronous and self._replica.broken:
            self._break(self._replica.broken)
            raise GroupBrokenError(self._replica.broken)

    def accumulate(self) -> None:
        """Have the microbatch in the gradient."""
        self._book.counted(self)
        self._sums[NOISE if self._noisy else self._computed] += 1

    def discard(self) -> None:
        """Forget the microbatch."""

    async def keep_pace(self, behind: int) -> None:
        """Do nothing: what is computed here is done."""

    @property
    def finite(self) -> bool:
        """Whether no replica has a flaw that makes its gradient infinite."""
        return self._finite

    @property
    def is_sum_finite(self) -> bool:
        """Whether its own state has none."""
        return not self.flaw.startswith(INFINITE)

    def announce(self, due: Due) -> None:
        """Say with the gradient what is due with the next state."""
        self._announces |= {due}

    @property
    def outcome(self) -> ReducedValues:
        """No loss, and what others announced."""
        return ReducedValues(0.0, self._announced)

    def publish(self, *, void: bool = False) -> None:
        """Do nothing: `update` takes what was reduced."""

    def update(self, *, void: bool = False) -> None:  # noqa: ARG002
        """Make the update, and have it checked."""
        self._book.stepped(self, self._updates, self._reduced)
        self._book.check(self.finite or not self._tries, f"{self.name} went on from copies of a state that is no good")
        self._tries = False
        self._updates += 1
