"""The shell around a pure core: it feeds messages in, commits state and outcomes together, and publishes the outcomes.

A commit is one compare-and-set of one value that holds the core's state, the position in the journal up to which it
has been applied, the pending timers, and the messages to send (the outbox). After it, the outbox is published under
ids derived from what caused it, so a crash at any point neither loses an outcome nor doubles it: the next instance
publishes the outbox again and reads the journal on from the committed position.
"""

import asyncio
import contextlib
import logging
import os
import signal
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

import msgspec

from unicron import codec, subjects
from unicron.bus.lease import Lease
from unicron.bus.protocol import Bus, Handler
from unicron.clock import Clock
from unicron.contracts.base import BusReconnected, CancelTimer, Message, Record, SetTimer, Started, TimerFired
from unicron.contracts.events import Alert, DeadLetter
from unicron.contracts.queries import Query, Reply
from unicron.errors import BusUnavailableError, ConflictError, InvalidInputError

log = logging.getLogger(__name__)

COMMIT_EVERY = 200
"""Journal messages without an outcome after which the position is committed all the same."""


class Core(Protocol):
    """Decisions of a service: a function of messages. It opens nothing, awaits nothing, reads no clock.

    `state` is everything it remembers, in a type that msgspec can encode.
    """

    state: Any

    def handle(self, message: Message) -> list[Message]:
        """Take one message in; return what follows from it."""


class QueryCore(Core, Protocol):
    """A core that also answers queries."""

    def answer(self, query: Query) -> tuple[Reply, list[Message]]:
        """Return the reply to `query`, and what follows from it."""


@dataclass(frozen=True)
class Wiring:
    """What a service is made of.

    Attributes:
        name: of the service, as in subjects.
        core: makes the core from a restored state, or from None at the very first start.
        state: type of the core's state.
        facts: filters on the journal.
        telemetry: filters on telemetry.
        translate: turns telemetry that is not one of our messages into one (server advisories); None drops it.
        answers: whether the core answers queries.
    """

    name: str
    core: Callable[[Any], Core]
    state: Any
    facts: list[str]
    telemetry: list[str]
    translate: Callable[[str, bytes], Message | None] | None = None
    answers: bool = False


class Timer(Record, kw_only=True, frozen=True):
    """A pending timer; `cause` and `correlation` tie what follows to the chain that asked for it."""

    due: float
    cause: str
    correlation: str


class Outgoing(Record, kw_only=True, frozen=True):
    """A message of the outbox."""

    subject: str
    id: str
    data: bytes


class Commit(Record, kw_only=True, frozen=True):
    """The one value that a service writes."""

    sequence: int = 0
    timers: dict[str, Timer] = {}
    outbox: list[Outgoing] = []
    state: msgspec.Raw = msgspec.Raw(b"\xc0")


@dataclass
class _Input:
    """Something for the core, with what the shell must do about it afterwards."""

    message: Message | None = None
    sequence: int = 0
    query: Query | None = None
    reply: asyncio.Future[Reply] | None = None


class Service:
    """Runs one core on the bus; `run` returns only when cancelled."""

    def __init__(self, wiring: Wiring, bus: Bus, clock: Clock, lease_ttl_s: float = 2.0) -> None:
        self._wiring = wiring
        self._bus = bus
        self._clock = clock
        self._bucket = bus.bucket("state")
        self._lease = Lease(bus.bucket("lease"), wiring.name, f"{os.getpid()}-{uuid.uuid4().hex[:8]}", lease_ttl_s)
        self._inputs: asyncio.Queue[_Input] = asyncio.Queue()
        self._poisoned: set[int] = set()
        self._active = False

    async def run(self) -> None:
        """Take the lease and serve; when the lease is lost, start over as a standby."""
        if self._wiring.answers:
            await self._bus.serve(subjects.rpc(self._wiring.name), self._wiring.name, self._on_query)
        async with _background(self._hear(), self._watch_connection()):
            while True:
                token = await self._lease.acquire()
                log.info("%s is active with fencing token %d", self._wiring.name, token)
                try:
                    await self._serve(token)
                except ConflictError as error:
                    log.warning("%s steps down: %s", self._wiring.name, error)
                except asyncio.CancelledError:
                    await self._lease.release()
                    raise
                finally:
                    self._active = False

    async def _serve(self, token: int) -> None:
        stored = await self._bucket.get(self._wiring.name)
        self._revision = stored.revision if stored else 0
        commit = codec.decode(stored.value, Commit) if stored else Commit()
        self._restore(commit)
        await self._publish(commit.outbox)
        self._inputs = asyncio.Queue()
        self._active = True
        started = Started(token=token, id=f"{self._wiring.name}-{token}", at=self._clock.now())
        self._inputs.put_nowait(_Input(message=started))
        kept = asyncio.ensure_future(self._lease.keep())
        async with _background(self._follow(commit.sequence)):
            try:
                await self._loop(kept)
            finally:
                kept.cancel()

    def _restore(self, commit: Commit) -> None:
        state = msgspec.msgpack.decode(commit.state, type=self._wiring.state | None)
        self._core = self._wiring.core(state)
        self._sequence = commit.sequence
        self._timers = dict(commit.timers)
        self._committed = commit
        self._pending = 0

    # --- inputs ------------------------------------------------------------------------------------------------------

    async def _follow(self, after: int) -> None:
        async for entry in self._bus.follow(self._wiring.facts, after):
            message = await self._checked(entry.subject, entry.data, f"{entry.sequence}")
            self._inputs.put_nowait(_Input(message=message, sequence=entry.sequence))

    async def _hear(self) -> None:
        if not self._wiring.telemetry:
            return
        async for heard in self._bus.hear(self._wiring.telemetry):
            if not self._active:
                continue
            if heard.subject.startswith(subjects.ROOT):
                message = await self._checked(heard.subject, heard.data, uuid.uuid4().hex[:12])
            else:
                message = self._wiring.translate(heard.subject, heard.data) if self._wiring.translate else None
            if message is not None:
                self._inputs.put_nowait(_Input(message=message))

    async def _watch_connection(self) -> None:
        async for down_s in self._bus.reconnected():
            self._inputs.put_nowait(_Input(message=BusReconnected(down_s=down_s, at=self._clock.now())))

    async def _on_query(self, data: bytes) -> bytes:
        try:
            query = codec.decode_query(data)
        except InvalidInputError as error:
            return codec.encode(Reply(error=str(error)))
        if not self._active:
            return codec.encode(Reply(error=f"{self._wiring.name} is starting; try again in a moment"))
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._inputs.put_nowait(_Input(query=query, reply=reply))
        return codec.encode(await reply)

    async def _checked(self, subject: str, data: bytes, place: str) -> Message | None:
        """Return the message, or put it aside as a dead letter and return None."""
        try:
            message = codec.decode_message(data)
            if subjects.of(message) != subject:
                raise InvalidInputError(f"belongs on {subjects.of(message)}: its source, type or key is not its own")
        except InvalidInputError as error:
            await self._put_aside(subject, data, str(error), place)
            return None
        return message

    async def _put_aside(self, subject: str, data: bytes, error: str, place: str) -> None:
        log.warning("dead letter on %s: %s", subject, error)
        cause = Started(token=0, id=f"dead-{place}")
        letter = DeadLetter(subject=subject, error=error, payload=data[:4096])
        alert = Alert(text=f"a message on {subject} could not be used: {error}")
        await self._publish(self._outgoing([(cause, letter), (cause, alert)]))

    # --- the loop ----------------------------------------------------------------------------------------------------

    async def _loop(self, kept: "asyncio.Future[None]") -> None:
        while True:
            batch = await self._next_batch(kept)
            outcomes: list[tuple[Message, Message]] = []
            replies: list[tuple[asyncio.Future[Reply], Reply]] = []
            for item in batch:
                outcomes += await self._apply(item, replies)
            outcomes = self._keep_timers(outcomes)
            if outcomes or self._pending >= COMMIT_EVERY or self._timers != self._committed.timers:
                await self._commit(outcomes)
            for future, reply in replies:
                if not future.done():
                    future.set_result(reply)

    async def _next_batch(self, kept: "asyncio.Future[None]") -> list[_Input]:
        """Wait for input or a due timer; return all there is."""
        due = min((timer.due for timer in self._timers.values()), default=None)
        wait = None if due is None else max(0.0, due - self._clock.now())
        getter = asyncio.ensure_future(self._inputs.get())
        await asyncio.wait({getter, kept}, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
        if kept.done():
            getter.cancel()
            raise ConflictError("the lease went to another instance")
        batch = []
        if getter.done():
            batch.append(getter.result())
        else:
            getter.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                batch.append(await getter)  # it may have got one just now
        while not self._inputs.empty():
            batch.append(self._inputs.get_nowait())
        now = self._clock.now()
        for name in sorted(name for name, timer in self._timers.items() if timer.due <= now):
            timer = self._timers.pop(name)
            digest = blake2b(f"{timer.cause}:{name}:{timer.due}".encode(), digest_size=8).hexdigest()
            batch.append(_Input(message=TimerFired(name=name, id=digest, at=now, correlation=timer.correlation)))
        return batch

    async def _apply(
        self, item: _Input, replies: list[tuple["asyncio.Future[Reply]", Reply]]
    ) -> list[tuple[Message, Message]]:
        """Hand one input to the core; return pairs of cause and outcome."""
        if item.sequence:
            self._sequence = item.sequence
            self._pending += 1
        cause: Message
        if item.query is not None and item.reply is not None:
            cause = Started(token=0, id=uuid.uuid4().hex[:16])
            try:
                reply, found = self._core.answer(item.query)  # type: ignore[attr-defined]
            except InvalidInputError as error:
                reply, found = Reply(error=str(error)), []
            replies.append((item.reply, reply))
        elif item.message is None or item.sequence in self._poisoned:
            return []
        else:
            cause = item.message
            try:
                found = self._core.handle(cause)
            except Exception as error:
                log.exception("%s can't handle %s", self._wiring.name, cause)
                await self._put_aside(type(cause).__name__, codec.encode(cause), repr(error), cause.id)
                if item.sequence:
                    self._poisoned.add(item.sequence)
                raise ConflictError("a message could not be handled; going on from the last commit") from error
        return [(cause, outcome) for outcome in found]

    def _keep_timers(self, outcomes: list[tuple[Message, Message]]) -> list[tuple[Message, Message]]:
        """Carry out what is about timers; return the rest."""
        rest = []
        for cause, outcome in outcomes:
            match outcome:
                case SetTimer(name=name, after_s=after_s):
                    self._timers[name] = Timer(
                        due=self._clock.now() + after_s, cause=cause.id, correlation=cause.correlation or cause.id
                    )
                case CancelTimer(name=name):
                    self._timers.pop(name, None)
                case _:
                    rest.append((cause, outcome))
        return rest

    def _outgoing(self, outcomes: list[tuple[Message, Message]]) -> list[Outgoing]:
        now, counts, found = self._clock.now(), dict[str, int](), []
        for cause, outcome in outcomes:
            index = counts[cause.id] = counts.get(cause.id, -1) + 1
            message = outcome.descend(cause, index, self._wiring.name, now)
            found.append(Outgoing(subject=subjects.of(message), id=message.id, data=codec.encode(message)))
        return found

    # --- commit ------------------------------------------------------------------------------------------------------

    async def _commit(self, outcomes: list[tuple[Message, Message]]) -> None:
        commit = Commit(
            sequence=self._sequence,
            timers=dict(self._timers),
            outbox=self._outgoing(outcomes),
            state=msgspec.Raw(msgspec.msgpack.encode(self._core.state)),
        )
        await self._write(codec.encode(commit))
        self._committed, self._pending = commit, 0
        await self._publish(commit.outbox)

    async def _write(self, value: bytes) -> None:
        """Write the commit; after a time-out it may be there already, which the next try finds out."""
        retried = False
        while True:
            try:
                self._revision = await self._bucket.update(self._wiring.name, value, self._revision)
            except BusUnavailableError as error:
                log.warning("commit waits for the bus: %s", error)
                retried = True
                await asyncio.sleep(0.1)
            except ConflictError:
                stored = await self._bucket.get(self._wiring.name) if retried else None
                if stored is None or stored.value != value:
                    raise
                self._revision = stored.revision
                return
            else:
                return

    async def _publish(self, outbox: list[Outgoing]) -> None:
        for outgoing in outbox:
            while True:
                try:
                    await self._bus.append(outgoing.subject, outgoing.data, outgoing.id)
                except BusUnavailableError as error:
                    log.warning("publishing waits for the bus: %s", error)
                    await asyncio.sleep(0.1)
                else:
                    break


@contextlib.asynccontextmanager
async def _background(*jobs: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `jobs` beside the body; end with it, and end it when one of them fails."""
    body = asyncio.current_task()
    failed: list[BaseException] = []

    def watch(task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and task.exception() and body:
            failed.append(task.exception())  # type: ignore[arg-type]
            body.cancel()

    tasks = [asyncio.create_task(job) for job in jobs]
    for task in tasks:
        task.add_done_callback(watch)
    try:
        yield
    except asyncio.CancelledError:
        if failed:
            raise failed[0] from None
        raise
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def run_until_signal(job: Coroutine[Any, Any, None]) -> None:
    """Run `job` until it ends, or until SIGTERM or SIGINT cancels it (it drains in its own `finally`)."""

    async def main() -> None:
        task = asyncio.ensure_future(job)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(main())


__all__ = ["Core", "Handler", "QueryCore", "Service", "Wiring", "run_until_signal"]
