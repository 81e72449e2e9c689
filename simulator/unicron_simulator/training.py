"""Modelled workers: they compute in virtual time, and keep the rules of `unicron.train.Session`.

A gradient is modelled as the microbatches that are in it, so that each update can be checked: every microbatch of the
iteration once, whoever computed it and whatever struck meanwhile.
"""

import asyncio
from collections import Counter
from random import Random
from typing import Any, NamedTuple, Protocol

from unicron.contracts.tasks import TaskSpec, WorkerPhase
from unicron.contracts.worker import (
    NOWHERE,
    Broken,
    Finished,
    Hello,
    Iterated,
    Joined,
    Membership,
    Progress,
    Raised,
    Ready,
    ToAgent,
)
from unicron.train import redistribute

BUCKETS = 2
"""Buckets of the modelled gradient."""

LOOK_S = 0.1
"""How often whoever forms a group looks whether a newer membership has made it void."""


class Pace(NamedTuple):
    """How long things take a worker, in seconds; a storm's are short, so that much happens in little time.

    Attributes:
        start: from the start of the process until its model is built, at least and at most.
        meet: until the members of a new membership have found one another and can compute together.
        transfer: for the state from one worker to another.
        microbatch: to compute one, at least and at most.
    """

    start: tuple[float, float] = (0.2, 0.8)
    meet: float = 0.02
    transfer: float = 0.1
    microbatch: tuple[float, float] = (0.1, 0.2)


STORM = Pace()

Gradient = Counter[int]


class GroupBrokenError(RuntimeError):
    """A collective ended because a peer died or left it."""


class Group:
    """A membership whose members compute together; all they have is an all-gather.

    Attributes:
        broken: why it ended; empty while it has not.
        complete: all members have found one another, so they no longer need the meeting place.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._given: dict[str, dict[int, Any]] = {}
        self._waiting: dict[str, list[asyncio.Future[list[Any]]]] = {}
        self.broken = ""
        self.complete = False

    async def gather(self, key: str, rank: int, value: Any) -> list[Any]:
        """Return what every rank gave under `key`, once all have.

        Raises:
            GroupBrokenError: a member died or left before.
        """
        if self.broken:
            raise GroupBrokenError(self.broken)
        given = self._given.setdefault(key, {})
        given[rank] = value
        if len(given) < self._size:
            future: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(key, []).append(future)
            return await future
        everything = [given[rank] for rank in range(self._size)]
        self.complete = True
        for waiting in self._waiting.pop(key, []):
            if not waiting.done():
                waiting.set_result(everything)
        return everything

    def end(self, why: str) -> None:
        """Wake whoever waits."""
        self.broken = self.broken or why
        for waiting in [each for several in self._waiting.values() for each in several if not each.done()]:
            waiting.set_exception(GroupBrokenError(why))


class Host(Protocol):
    """What a worker needs of its node."""

    name: str

    def said(self, worker: str, message: ToAgent) -> bool:
        """Take a message to the agent; False where none is there."""

    def exited(self, worker: str, exit_code: int | None, signal: int | None) -> None:
        """Hear that the process is gone."""

    def meeting(self, place: str, name: str, size: int) -> Group | None:
        """Return the group that meets under `name` at the agent `place`; None where that is away."""

    def hands_over(self, node: str) -> bool:
        """Return whether states can be fetched from `node` now."""


class Book(Protocol):
    """Who is told what the workers do, and checks it."""

    def joined(self, worker: "Trainer", joined: Joined, *, established: bool) -> None:
        """Note a new membership; `established`: somebody in it had a state."""

    def stepped(self, worker: "Trainer", iteration: int, gradients: list[Gradient]) -> None:
        """Note an update."""


class Trainer:
    """A worker process.

    Attributes:
        iteration: that it computes, or has computed up to (exclusive).
        has_state: whether its parameters are those of its task.
        epoch: of the membership that it last tried to join.
        living: the process is there.
        paused: it is stopped by a signal.
        computes: it is in its membership, and not on its way to one.
    """

    def __init__(
        self, name: str, spec: TaskSpec, host: Host, slot: int, book: Book, random: Random, pace: Pace = STORM
    ) -> None:
        self.name, self.spec, self.host, self.slot = name, spec, host, slot
        self.epoch, self.iteration = -1, 0
        self.has_state, self.ready, self.living, self.paused, self.computes = False, False, True, False, False
        self.size = 0
        self._book, self._random, self._pace = book, random, pace
        self._told_epoch, self._told_iteration = -1, -1
        self._newest = NOWHERE
        self._group, self._rank = Group(1), 0
        self._todo: list[int] = []
        self._done: set[int] = set()
        self._open = False
        self._buckets: list[Gradient | None] = [None] * BUCKETS
        self._unsent: list[ToAgent] = []
        self._changed = asyncio.Event()
        self._resumed = asyncio.Event()
        self._micro_s = random.uniform(*pace.microbatch)
        self._task = asyncio.ensure_future(self._main())

    @property
    def done(self) -> int:
        """Microbatches that are in its gradient."""
        return len(self._done)

    # --- its agent ---------------------------------------------------------------------------------------------------

    def hello(self) -> tuple[Hello, list[ToAgent]] | None:
        """Greet a new agent, and say what nobody was there to hear; a stopped process says nothing."""
        if self.paused or not self.living:
            return None
        unsent, self._unsent = self._unsent, []
        return (
            Hello(worker=self.name, pid=1, epoch=self._told_epoch, iteration=self._told_iteration, ready=self.ready),
            unsent,
        )

    def tell(self, membership: Membership) -> None:
        """Take a newer membership in, which interrupts whatever collective waits."""
        if membership.epoch > self._newest.epoch:
            self._newest = membership
        if not self.paused:
            self._interrupt()

    def _interrupt(self) -> None:
        if self._newest.epoch > self.epoch:
            self._group.end(f"{self.name} left for epoch {self._newest.epoch}")
        self._changed.set()

    def _say(self, message: ToAgent) -> None:
        if not self.host.said(self.name, message) and not isinstance(message, Progress):
            self._unsent.append(message)

    # --- faults ------------------------------------------------------------------------------------------------------

    def end(self, exit_code: int | None, signal: int | None, *, silently: bool = False) -> None:
        """End the process; `silently`: its machine is gone, so that no peer sees a connection close."""
        if not self.living:
            return
        self.living = self.computes = False
        self._task.cancel()
        if not silently:
            self._group.end(f"connection to {self.name} closed by peer")
        self.host.exited(self.name, exit_code, signal)

    def pause(self) -> None:
        """Stop the process, as SIGSTOP does."""
        self.paused = True

    def go_on(self) -> None:
        """Let it go on, as SIGCONT does."""
        self.paused = False
        self._resumed.set()
        self._interrupt()

    def throw(self, text: str) -> None:
        """Raise an exception in the script, which ends it; in one that is stopped, nothing runs that could raise."""
        if self.paused or not self.living:
            return
        self._say(Raised(iteration=self.iteration, exception="RuntimeError", text=text, traceback=text))
        self.end(1, None)

    async def _pass(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        while self.paused:
            self._resumed.clear()
            await self._resumed.wait()

    # --- the script --------------------------------------------------------------------------------------------------

    async def _main(self) -> None:
        await self._pass(self._random.uniform(*self._pace.start))
        self.ready = True
        self._say(Ready())
        await self._regroup()
        while self.iteration < self.spec.iterations:
            await self._iterate()
        self._group.end(f"{self.name} is done")
        self._say(Finished(iterations=self.spec.iterations))
        await self._pass(0.05)
        self.end(0, None)

    async def _iterate(self) -> None:
        """Compute and reduce until the update is made, with this membership or with later ones."""
        began = asyncio.get_running_loop().time()
        if not self._open:
            self._open, self._done = True, set()
            self._buckets = [None] * BUCKETS
            self._todo = list(range(self._rank, self.spec.microbatches, self.size))
            self._progress(WorkerPhase.COMPUTE)
        while True:
            if self._newest.epoch > self.epoch:
                await self._regroup()
            elif self._todo:
                await self._pass(self._micro_s)
                self._done.add(self._todo.pop(0))
                self._progress(WorkerPhase.COMPUTE)
            elif await self._reduce():
                break
        await self._pass(0.005)
        self._book.stepped(self, self.iteration, [bucket for bucket in self._buckets if bucket is not None])
        self.iteration += 1
        self._told_iteration, self._open = self.iteration, False
        seconds = asyncio.get_running_loop().time() - began
        self._say(
            Iterated(
                iteration=self.iteration - 1,
                epoch=self.epoch,
                rank=self._rank,
                world_size=self.size,
                seconds=seconds,
                loss=0.0,
            )
        )

    async def _reduce(self) -> bool:
        self._progress(WorkerPhase.REDUCE)
        try:
            for bucket in range(BUCKETS):
                if self._buckets[bucket] is None:
                    key = f"reduce-{self.iteration}-{bucket}"
                    given = await self._group.gather(key, self._rank, frozenset(self._done))
                    total: Gradient = Counter()
                    for done in given:
                        total.update(done)
                    await self._pass(self._random.uniform(0.001, 0.01))
                    if self._newest.epoch > self.epoch:
                        raise GroupBrokenError("interrupted by a newer membership")  # noqa: TRY301
                    self._buckets[bucket] = total
        except GroupBrokenError as error:
            self._report(error)
            await self._regroup()
            return False
        return True

    def _progress(self, phase: WorkerPhase) -> None:
        self._say(Progress(iteration=self.iteration, phase=phase, done=len(self._done)))

    def _report(self, error: GroupBrokenError) -> None:
        if self._newest.epoch <= self.epoch:
            self._say(Broken(epoch=self.epoch, iteration=self.iteration, error=str(error)))

    # --- a new membership --------------------------------------------------------------------------------------------

    async def _regroup(self) -> None:
        """Wait for a newer membership and go on in it, however many it takes."""
        self.computes = False
        began = asyncio.get_running_loop().time()
        while True:
            self._progress(WorkerPhase.WAITING)
            while self._newest.epoch <= self.epoch:
                self._changed.clear()
                await self._changed.wait()
            try:
                joined, established = await self._join(self._newest)
            except GroupBrokenError as error:
                await self._pass(0.001)
                self._report(error)
                continue
            self._told_epoch, self._told_iteration, self.computes = self.epoch, self.iteration, True
            self._book.joined(self, joined, established=established)
            self._say(_timed(joined, asyncio.get_running_loop().time() - began))
            self._progress(WorkerPhase.COMPUTE)
            return

    async def _join(self, membership: Membership) -> tuple[Joined, bool]:
        self._group.end(f"{self.name} left for epoch {membership.epoch}")
        self.epoch, self._rank, self.size = membership.epoch, membership.rank, membership.world_size
        self._group = Group(1)
        await self._meet()
        group = self.host.meeting(membership.rendezvous, f"{membership.rendezvous_id}-{membership.epoch}", self.size)
        if group is None:
            raise GroupBrokenError("the meeting place refused the connection")
        self._group = group
        if self._newest.epoch > self.epoch:
            raise GroupBrokenError("interrupted by a newer membership")
        told = await group.gather("rows", self._rank, (self._row(), self.host.name, self.name))
        rows, nodes, names = ([each[place] for each in told] for place in range(3))
        plan = redistribute.resume(rows, self.spec.microbatches, nodes)
        taken = await self._exchange(plan, nodes)
        if plan.stale[self._rank]:
            self._done = set()
        shared = await group.gather("buckets", self._rank, list(self._buckets))
        self._buckets = [None if source is None else shared[source][at] for at, source in enumerate(plan.bucket_from)]
        await self._pass(0.0)
        if self._newest.epoch > self.epoch:
            raise GroupBrokenError("interrupted by a newer membership")
        self._todo, self.has_state, self._open = list(plan.todo[self._rank]), True, True
        joined = Joined(
            epoch=self.epoch,
            rank=self._rank,
            world_size=self.size,
            iteration=plan.iteration,
            kept=plan.kept,
            recomputed=plan.recomputed,
            state_from=names[taken] if taken is not None else "",
            seconds=0.0,
        )
        return joined, any(row.has_state for row in rows)

    async def _meet(self) -> None:
        """Let the time pass that a group takes to form; a newer membership ends the wait."""
        left = self._pace.meet
        while left > 0 and self._newest.epoch <= self.epoch:
            await self._pass(min(left, LOOK_S))
            left -= LOOK_S

    def _row(self) -> redistribute.Progress:
        return redistribute.Progress(
            iteration=self.iteration,
            has_state=self.has_state,
            done=frozenset(self._done),
            todo=tuple(self._todo),
            buckets=tuple(bucket is not None for bucket in self._buckets),
        )

    async def _exchange(self, plan: redistribute.Resumption, nodes: list[str]) -> int | None:
        """Take the state from the nearest holder that can hand it over; return which."""
        taken, sources = None, plan.sources[self._rank]
        for attempt in range(max(map(len, plan.sources), default=0)):
            if taken is None and attempt < len(sources):
                await self._pass(self._pace.transfer)
                if self.host.hands_over(nodes[sources[attempt]]):
                    taken = sources[attempt]
                    self._done, self._todo, self.iteration, self.has_state = set(), [], plan.iteration, True
                    self._buckets = [None] * BUCKETS
            got = await self._group.gather(f"got-{attempt}", self._rank, not sources or taken is not None)
            if all(got):
                return taken
        if any(plan.sources):
            raise GroupBrokenError("no holder could hand its state over")
        return taken


def _timed(joined: Joined, seconds: float) -> Joined:
    fields: dict[str, Any] = {field: getattr(joined, field) for field in joined.__struct_fields__}
    return Joined(**{**fields, "seconds": seconds})
