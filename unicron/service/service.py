"""The shell around a pure core: it feeds messages in, commits state and outcomes together, and publishes the outcomes.

A commit is one compare-and-set: of the core's state, the position in the journal up to which it has been applied, the
pending timers, and the messages to send (the outbox). After it, the outbox is published under
ids derived from what caused it, so a crash at any point neither loses an outcome nor doubles it: the next instance
publishes the outbox again and reads the journal on from the committed position.
"""

import asyncio
import contextlib
import logging
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any

import msgspec

from unicron import codec, subjects
from unicron.aio import gather_or_cancel, retry_until_available, shielded
from unicron.bus.lease import Lease, token_in_force
from unicron.bus.protocol import Bus, TelemetryEntry
from unicron.clock import Clock, Watch
from unicron.contracts.answers import Load, Reply
from unicron.contracts.base import BusReconnected, CancelTimer, Message, Probed, SetTimer, Started, TimerFired
from unicron.contracts.events import Alert, DeadLetter
from unicron.contracts.queries import GetHealth, GetLoad, Order, Query
from unicron.errors import BusUnavailableError, ConflictError, InvalidInputError
from unicron.service.commit import Commit, Migration, Outgoing
from unicron.service.commit_store import CommitStore, Sizes
from unicron.service.core import Core, order_taken
from unicron.service.intake import Input, Intake
from unicron.service.moments import move
from unicron.service.roundtrip import RoundTrips
from unicron.service.timers import Timer, Timers

log = logging.getLogger(__name__)

COMMIT_EVERY = 1000
"""Inputs without an outcome after which the position is committed all the same: so many are read again at most."""

BATCH = 500
"""Inputs that one commit takes in at most."""

TURN_S = 0.1
"""Seconds after which what is left of them waits for its next turn: a lease is to be renewed, and a ping answered."""

WAITING = 5000
"""Inputs that may wait; then the journal is read no further, telemetry is dropped and queries are refused."""

CURE = (
    "run the version that wrote it, or begin with a backup on empty servers (docs/howto/backup.md, 'A state that can't "
    "be read')"
)
"""The cure where a service can use none of its commits."""

TIDY_S = 10.0
"""Seconds after which a published outbox is cleared: the journal knows its ids for an hour only."""


REST_S = 60.0
"""Seconds after which the position is committed all the same, too: a successor knows until when this one served."""

LOOK_S = 1.0
"""Seconds after which the clock is looked at while timers are pending."""


@dataclass(frozen=True)
class Wiring:
    """The parts of a service.

    Attributes:
        name: of the service, as in subjects.
        core: makes the core from a restored state, or from None at the very first start.
        state: type of the core's state.
        facts: filters on the journal.
        telemetry: filters on telemetry.
        translate: turns telemetry that is not one of our messages into one (server advisories); None drops it.
        migrations: from older forms of the state, in order: the first turns version 1 into version 2. A change of the
            state's form adds one; today's version is one more than there are.
        provisions: whether it makes the streams and buckets; the others wait until they are there.
        learnt: fields of the state that can be learnt anew where something impossible stands in them.
    """

    name: str
    core: Callable[[Any], Core]
    state: Any
    facts: list[str]
    telemetry: list[str]
    translate: Callable[[str, bytes], Message | None] | None = None
    migrations: tuple[Migration, ...] = ()
    provisions: bool = False
    learnt: tuple[str, ...] = ()


class _CoreError(Exception):
    """The core raised while it took in `item`."""

    def __init__(self, item: Input) -> None:
        super().__init__()
        self.item = item


class Service:
    """Runs one core on the bus; `run` returns only when cancelled.

    Args:
        wiring: what the service is made of.
        bus: its own connection.
        clock: what the time is.
        lease_ttl_s: how long the lease outlives its last renewal, in seconds.
        fresh_id: makes ids for what has none: queries, foreign telemetry. A simulation gives a repeatable one.
        sizes: how large commits are cut.

    Attributes:
        overhear: is given each piece of telemetry that the core has taken in and believes; returns whether it has room
            for it. It must not raise.
        observe: is given each input that was taken in, once what followed from it is committed. It must not raise.
        token: fencing token of this instance while it is active, else 0.
    """

    def __init__(
        self,
        wiring: Wiring,
        bus: Bus,
        clock: Clock,
        lease_ttl_s: float = 2.0,
        fresh_id: Callable[[], str] = lambda: uuid.uuid4().hex[:16],
        sizes: Sizes | None = None,
    ) -> None:
        self._wiring = wiring
        self._fresh_id = fresh_id
        self._bus = bus
        self._clock = clock
        instance = fresh_id()
        self._ledger = CommitStore(bus.bucket("state"), wiring.name, instance, sizes)
        self._lease = Lease(bus.bucket("lease"), wiring.name, f"{os.getpid()}-{instance}", lease_ttl_s)
        self._inputs: asyncio.Queue[Input] = asyncio.Queue(WAITING)
        self._left: list[Input] = []
        self._asked: dict[asyncio.Future[Reply], None] = {}  # not a set, whose order is another in each process
        self._active = False
        self._intake = Intake(wiring.name, clock, fresh_id)
        self._disbelieved = 0
        self._trips = RoundTrips(wiring.name, self._send_pulse, self._waiting)
        self.overhear: Callable[[Message], bool] = lambda _: True
        self.observe: Callable[[Input], None] = lambda _: None

    def peek(self, query: Query) -> Reply | None:
        """Return what the core answers to a query that changes nothing; None while another instance is active."""
        return self._core.answer(query)[0] if self._active else None

    @property
    def token(self) -> int:  # noqa: D102 see above
        return self._token if self._active else 0

    @property
    def trouble(self) -> str:
        """Return why no instance can be active, as nothing is stored; empty where that is not so."""
        return "" if self._active else self._lease.trouble

    async def run(self) -> None:
        """Take the lease and serve; when the lease is lost, start over as a standby.

        Raises:
            InvalidInputError: neither the stored state nor the one before it is one that this version can read.
        """
        await gather_or_cancel(self._read_telemetry(), self._watch_connection(), self._take_turns())

    async def _take_turns(self) -> None:
        while True:
            token = await self._lease.acquire()
            log.info("%s is active with fencing token %d", self._wiring.name, token)
            try:
                await self._serve(token)
            except ConflictError as error:
                log.warning("%s steps down: %s", self._wiring.name, error)
            finally:
                await self._lease.release()

    async def _serve(self, token: int) -> None:
        name = self._wiring.name
        trouble = await self._read(token)
        self._token = token
        self._committed_at = self._clock.now()
        self._watch = Watch(self._clock)
        self._uncommitted: list[Input] = []
        await self._publish(self._committed.outbox)
        self._inputs, self._left = asyncio.Queue(WAITING), []
        if trouble:
            log.error(trouble)
            self._inputs.put_nowait(self._intake.alert(trouble))
        self.queue_input(Started(token=token, id=f"{name}-{token}"))
        self._active = True
        stops = [
            await retry_until_available(
                partial(self._bus.serve, subjects.rpc(name), name, self._on_query), "announcing the service"
            ),
            await retry_until_available(
                partial(self._bus.serve, subjects.orders(name), name, self._on_order), "taking orders"
            ),
        ]
        try:
            await gather_or_cancel(self._follow(self._committed.sequence), self._keep_lease(), self._loop())
        finally:
            self._active = False
            for reply in [reply for reply in self._asked if not reply.done()]:
                reply.set_exception(BusUnavailableError(f"{name} stepped down; try again in a moment"))
            for stop in stops:
                await stop()

    async def _keep_lease(self) -> None:
        await self._lease.keep()
        raise ConflictError("its lease has run out or went to another instance")

    async def _read(self, token: int) -> str:
        """Go to the newest commit, or to the one before it where that can't be used; return why, if so.

        That is as if the service had ended before it wrote the newest one: it reads on from there, and what it says
        again has the ids that it had.

        Raises:
            ConflictError: another instance has served since we took the lease.
            InvalidInputError: neither can be used; names the fields, and the cure.
        """
        name = self._wiring.name
        try:
            await self._restore_commit(await self._ledger.read(), token)
        except InvalidInputError as error:
            trouble = f"the stored state of {name} can't be used: {error}"
        else:
            return f"the stored state of {name} was damaged: {self._ledger.damage}" if self._ledger.damage else ""
        try:
            await self._restore_commit(await self._ledger.read(former=True), token)
        except InvalidInputError as error:
            raise InvalidInputError(f"{trouble}; nor can the one before it: {error}; {CURE}") from error
        return f"{trouble}; it goes on from the one before it, at position {self._sequence} of the journal"

    async def _restore_commit(self, commit: Commit, token: int) -> None:
        """Make a commit the last one, if it can be."""
        if commit.token > token:  # it may take a while from taking the lease to here, and that ends meanwhile
            if (
                await retry_until_available(
                    partial(token_in_force, self._bus.bucket("lease"), self._wiring.name), "a look"
                )
                != token
            ):
                raise ConflictError(f"an instance with token {commit.token} has served since it took {token}")
            log.error("%s: nobody was given the token %d of its stored state", self._wiring.name, commit.token)
        tail = await retry_until_available(self._bus.tail, "asking for the end of the journal")
        if commit.sequence > tail:
            raise InvalidInputError(f"it is of position {commit.sequence}, and the journal ends at {tail}")
        now = self._clock.now()
        passed_s = now - commit.at if commit.at else 0.0
        # the clock of who wrote it was ahead of this one, or all slept; else it is the time of a takeover
        self._moved = 0.0 if 0.0 <= passed_s <= 2 * REST_S else passed_s
        # nobody waited meanwhile, and what others said is yet to be read: what was left of a wait begins now
        self._committed = move(commit, passed_s - self._moved)
        self._restore()
        self._intake.begin(min(commit.at + self._moved, now), now, tail)

    def _restore(self) -> None:
        """Go back to the last commit."""
        wiring = self._wiring
        state = self._committed.decode_state(wiring.name, wiring.state, wiring.migrations, wiring.learnt)
        self._core = wiring.core(move(state, self._moved))
        self._sequence = self._committed.sequence
        self._timers = Timers(move(self._committed, self._moved).timers)
        self._fleeting = False

    # --- inputs ------------------------------------------------------------------------------------------------------

    async def _follow(self, after: int) -> None:
        async for entry in self._bus.follow([*self._wiring.facts, subjects.PULSES], after):
            if subjects.is_pulse(entry.subject):
                own = Probed(id=self._fresh_id(), at=self._clock.now(), source=self._wiring.name)
                await self._inputs.put(Input(own, entry.sequence))
            else:
                await self._inputs.put(self._intake.read(entry.subject, entry.data, entry.sequence))

    def _waiting(self) -> int:
        return self._inputs.qsize()

    async def _send_pulse(self) -> None:
        await self._bus.append(subjects.pulse(self._wiring.name), b"", self._fresh_id())

    async def _read_telemetry(self) -> None:
        if not self._wiring.telemetry:
            return
        async for heard in self._bus.receive_telemetry(self._wiring.telemetry):
            if not self._active:
                continue
            ours = heard.subject.startswith(subjects.ROOT)
            if ours and not self._intake.admits_telemetry(heard.subject):
                continue
            if self._inputs.full():
                self._intake.drop_telemetry()
            elif ours:
                self._inputs.put_nowait(self._intake.read(heard.subject, heard.data))
            elif self._wiring.translate:
                self._translate(self._wiring.translate, heard)

    def _translate(self, translate: Callable[[str, bytes], Message | None], heard: TelemetryEntry) -> None:
        try:
            message = translate(heard.subject, heard.data)
        except Exception as error:  # noqa: BLE001 - the sender is not ours, so anything may be wrong with it
            self._inputs.put_nowait(self._intake.dead_letter(heard.subject, heard.data, repr(error)))
        else:
            if message is not None:
                self.queue_input(message)

    async def _watch_connection(self) -> None:
        async for down_s in self._bus.reconnected():
            if self._active:
                self.queue_input(BusReconnected(down_s=down_s))

    def queue_input(self, message: Message) -> bool:
        """Queue a message of the shell's own making for the core; return whether there was room."""
        try:
            self._inputs.put_nowait(self._made(message))
        except asyncio.QueueFull:
            return False
        return True

    def _made(self, message: Message) -> Input:
        own_id, now = message.id or self._fresh_id(), message.at or self._clock.now()
        return Input(msgspec.structs.replace(message, id=own_id, at=now))

    def load(self) -> Load | None:
        """Return whether it keeps up; None while another instance is active."""
        if not self._active:
            return None
        return Load(
            waiting=self._waiting(),
            position=self._sequence,
            dropped=self._intake.dropped,
            disbelieved=self._disbelieved,
        )

    async def _on_query(self, data: bytes) -> bytes:
        return await self._on_request(data, orders=False)

    async def _on_order(self, data: bytes) -> bytes:
        return await self._on_request(data, orders=True)

    async def _on_request(self, data: bytes, *, orders: bool) -> bytes:
        name = self._wiring.name
        try:
            query = codec.decode_asked(data, orders=orders)
        except InvalidInputError as error:
            return codec.encode(Reply(error=str(error)))
        if isinstance(query, GetLoad) and (load := self.load()):
            return codec.encode(Reply(load=load))
        if isinstance(query, GetHealth) and self._active:
            return codec.encode(Reply(health=await self._trips.prove(self._clock.now())))
        if not self._active or self._inputs.full():
            raise BusUnavailableError(f"{name} is busy; try again in a moment")
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        cause = Message(id=self._fresh_id(), at=self._clock.now(), source=name)
        self._inputs.put_nowait(Input(cause, query=query, reply=reply))
        self._asked[reply] = None
        reply.add_done_callback(self._asked.pop)
        return codec.encode(await reply)

    # --- the loop ----------------------------------------------------------------------------------------------------

    async def _loop(self) -> None:
        while True:
            batch = self._left or await self._next_batch()
            await shielded(self._process_batch(batch))

    async def _next_batch(self) -> list[Input]:
        """Return inputs and due timers; nothing at all after a while without any."""
        due = self._timers.next_due()
        wait = TIDY_S if due is None else min(LOOK_S, max(0.0, due - self._clock.now()))
        batch: list[Input] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait):
                batch.append(await self._inputs.get())
        batch = [*self._look_at_clock(wait), *batch]
        while not self._inputs.empty() and len(batch) < BATCH:
            batch.append(self._inputs.get_nowait())
        now = self._clock.now()
        for name, timer in self._timers.due(now):
            digest = blake2b(f"{timer.cause}:{name}:{timer.due}".encode(), digest_size=8).hexdigest()
            fired = TimerFired(name=name, id=digest, at=now, source=self._wiring.name, correlation=timer.correlation)
            batch.append(Input(fired, timer=timer))
        return batch + self._intake.held_back()

    def _look_at_clock(self, meant_s: float) -> list[Input]:
        """Move all that is remembered with the clock where that was set, or this process stood still.

        Returns:
            That it stood still, for the core: what others said meanwhile may still be on its way here.
        """
        step_s, still_s = self._watch.look(meant_s)
        by = step_s + still_s
        if not by:
            return []
        name = self._wiring.name
        log.warning("%s: its clock was set by %+.1f s, and it stood still for %.1f s", name, step_s, still_s)
        self._moved += by
        self._core.state = move(self._core.state, by)
        self._timers = Timers(move(Commit(timers=self._timers.pending), by).timers)
        self._intake.move(by)
        self._committed_at += by
        missed_s = max(0.0, step_s) + still_s  # a machine that slept finds its clock ahead
        return [self._made(BusReconnected(down_s=missed_s))] if missed_s else []

    async def _process_batch(self, batch: list[Input]) -> None:
        """Apply `batch`, or what of it there is time for, commit when that led to anything, then publish and answer.

        Facts, and timers that were set for them, need no commit of their own: a restarted service reads them again.
        """
        outbox = self._apply_all(batch)
        batch = batch[: len(batch) - len(self._left)]
        self._uncommitted += [item for item in batch if item.sequence or item.timer or item.query]
        started = any(isinstance(item.message, Started) for item in batch)
        rested_s = self._clock.now() - self._committed_at
        tidy = (self._committed.outbox and rested_s >= TIDY_S) or (self._uncommitted and rested_s >= REST_S)
        if outbox or self._fleeting or started or tidy or len(self._uncommitted) >= COMMIT_EVERY:
            await self._commit(outbox)
        if any(isinstance(item.message, Probed) and item.sequence for item in batch):
            self._trips.came_back()
        for item in batch:
            self.observe(item)
            if item.reply and item.answer and not item.reply.done():
                item.reply.set_result(item.answer)

    def _apply_all(self, batch: list[Input]) -> list[Outgoing]:
        """Hand `batch` to the core while its turn lasts; where it raises, go back to the last commit without that."""
        items, over = batch, self._clock.now() + TURN_S
        while True:
            outbox, self._left = list[Outgoing](), []
            try:
                for number, item in enumerate(items, 1):
                    outbox += self._apply(item)
                    if self._clock.now() > over and number > len(items) - len(batch):  # what came before comes first
                        self._left = items[number:]
                        break
            except _CoreError as trouble:
                error = trouble.__cause__
                log.error("%s can't handle %s", self._wiring.name, trouble.item, exc_info=error)  # noqa: TRY400
                self._restore()
                self._set_aside(trouble.item, repr(error))
                items = [*self._uncommitted, *batch]
            else:
                return outbox

    def _set_aside(self, item: Input, error: str) -> None:
        unused = item.query or item.message
        payload = codec.encode(unused)[:4096]
        self._intake.admit_dead_letter(item, DeadLetter(subject=type(unused).__name__, error=error, payload=payload))
        item.answer = Reply(error=f"{self._wiring.name} could not handle it: {error}; see its log")

    def _apply(self, item: Input) -> list[Outgoing]:
        """Hand one input to the core; carry out what it says about timers and return the rest."""
        cause, item.taken = item.message, item.taken or self._clock.now()
        self._sequence = item.sequence or self._sequence
        if item.timer is not None:
            if self._timers.pending.get(cause.name) != item.timer:  # type: ignore[attr-defined]
                return []
            self._timers.cancel(cause.name)  # type: ignore[attr-defined]
        if item.silent:
            return []
        if item.says:
            if isinstance(cause, DeadLetter | Alert):
                return []  # no dead letters about dead letters: that would never end
            return self._outgoing(item, item.says)
        if item.subject and (doubt := self._core.find_contradiction(cause)):
            said = msgspec.structs.replace(cause, at=item.stamp or cause.at)
            self._intake.admit_dead_letter(
                item, DeadLetter(subject=item.subject, error=doubt, payload=codec.encode(said)[:4096])
            )
            return self._apply(item)
        changes = self._timers.changes
        try:
            if item.query is None:
                outcomes = self._core.handle(cause)
                self._pass_on(item)
            else:
                item.answer, outcomes = self._answer(item.query)
            outgoing = self._outgoing(item, outcomes)
        except Exception as error:
            raise _CoreError(item) from error
        if self._timers.changes > changes and not (item.sequence or item.timer):
            self._fleeting = True  # nobody will say this again, and a timer that fires again sets its next one again
        return outgoing

    def _answer(self, query: Query) -> tuple[Reply, list[Message]]:
        """Return the core's answer, and what follows from it: first of all, that an order was taken."""
        answer, outcomes = self._core.answer(query)
        if isinstance(query, Order) and not answer.error:
            outcomes = [order_taken(query, answer.text), *outcomes]
        return answer, outcomes

    def _pass_on(self, item: Input) -> None:
        if not item.subject or item.sequence:
            return
        if not self._core.is_credible(item.message):
            self._disbelieved += 1
            item.believed = False
        elif not self.overhear(item.message):
            self._intake.drop_telemetry()

    def _outgoing(self, item: Input, outcomes: list[Message]) -> list[Outgoing]:
        cause, now, found = item.message, item.taken, []
        item.said = []
        for index, outcome in enumerate(outcomes):
            match outcome:
                case SetTimer(name=name, after_s=after_s):
                    chain = cause.correlation or cause.id
                    self._timers.set(name, Timer(due=now + after_s, cause=cause.id, correlation=chain))
                case CancelTimer(name=name):
                    self._timers.cancel(name)
                case Alert() if cause.source != self._wiring.name and not self._intake.admits_alert(cause):
                    pass  # it is summed up with the others
                case _:
                    message = outcome.descend(cause, index, self._wiring.name, now, item.sequence)
                    item.said.append(message)
                    found.append(
                        Outgoing(subject=subjects.for_message(message), id=message.id, data=codec.encode(message))
                    )
        return found

    # --- commit ------------------------------------------------------------------------------------------------------

    async def _commit(self, outbox: list[Outgoing]) -> None:
        version = len(self._wiring.migrations) + 1
        commit = Commit(
            sequence=self._sequence,
            timers=dict(self._timers.pending),
            outbox=outbox,
            version=version,
            token=self._token,
            at=self._clock.now(),
        )
        self._committed = await self._ledger.write(commit, self._core.state)
        self._committed_at = self._clock.now()
        self._moved = 0.0
        self._uncommitted = []
        self._fleeting = False
        await self._publish(outbox)

    async def _publish(self, outbox: list[Outgoing]) -> None:
        for each in outbox:
            try:
                await retry_until_available(partial(self._bus.append, each.subject, each.data, each.id), "publishing")
            except InvalidInputError as error:  # it will never be taken, and the next must not wait for that
                log.error("%s can't say what is on %s: %s", self._wiring.name, each.subject, error)  # noqa: TRY400
