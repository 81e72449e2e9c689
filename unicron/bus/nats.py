"""The bus on NATS: JetStream for the journal and the buckets, core NATS for telemetry, micro services for queries."""

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import nats.errors
import nats.js.errors
import nats.micro
import nats.micro.service
from nats.aio.msg import Msg
from nats.js.api import PeerInfo, StreamInfo
from nats.js.kv import KeyValue
from nats.micro.request import Request

import unicron
from unicron import subjects
from unicron.bus import replies, topology
from unicron.bus.bucket import NatsBucket
from unicron.bus.connection import ANSWER_S, RECONNECT_S, NatsConnection
from unicron.bus.journal import DIGITS, GET, JournalReader, patterns
from unicron.bus.protocol import Handler, JournalEntry, TelemetryEntry
from unicron.errors import BusUnavailableError, NobodyAnswersError
from unicron.settings import Settings

log = logging.getLogger(__name__)

HEARD_LIMIT = 65536
"""Pieces of telemetry that wait for a slow reader; then the oldest are dropped."""


SILENT_NS = 3_000_000_000
"""After which the journal's leader has not heard of a server for too long; they speak once a second at least."""


async def connect(settings: Settings, name: str, secret: str = "", *, patient: bool = True) -> "NatsBus":
    """Connect to the bus as `name`; afterwards interruptions are bridged without an end.

    Args:
        settings: address of the bus, and the credentials.
        name: of the connection.
        secret: ends the name as the server has it, and as those may read it who may know when the connection has ended.
        patient: whether to try again until the time is up, where every server fails.

    Raises:
        BusUnavailableError: nothing answers at the address, or it refuses us.
        InvalidInputError: the address is not one.
    """
    bus = NatsBus()
    await bus.connect(settings, name, secret, patient=patient)
    return bus


def _is_silent(peer: PeerInfo) -> bool:
    """Return whether the leader does not hear a server; of one that it never heard the last time is 0."""
    return bool(peer.offline or not (peer.active or peer.current) or (peer.active or 0) > SILENT_NS)


class NatsBus(NatsConnection):
    """The bus on a connection to NATS; make one with `connect`."""

    def __init__(self) -> None:
        super().__init__()
        self._hearing: set[asyncio.Queue[TelemetryEntry | None]] = set()
        self._answering: set[asyncio.Task[None]] = set()

    # --- journal -----------------------------------------------------------------------------------------------------

    async def append(self, subject: str, data: bytes, message_id: str) -> int:
        """Put a message into the journal; see `Bus.append`."""
        headers = {"Nats-Msg-Id": message_id}
        if subjects.is_pulse(subject):
            headers["Nats-TTL"] = topology.PULSE_TTL
        storing = self.jetstream.publish(subject, data, stream=topology.STREAM, headers=headers)
        try:
            ack = await self._call(storing, f"storing on {subject}", subject)
        except nats.js.errors.APIError as error:  # it is full, for one: room may be made
            raise BusUnavailableError(f"storing on {subject}: the journal does not take it: {error}") from error
        if ack.duplicate and await self._subject_of(ack.seq) != subject:  # an unauthorised sender used our id
            return await self.append(subject, data, f"{message_id}.{secrets.token_hex(8)}")
        return ack.seq

    async def _subject_of(self, sequence: int) -> str:
        getting = self.jetstream.get_msg(topology.STREAM, sequence, direct=True)
        try:
            found = await self._call(getting, "looking at what came before", f"$JS.API.DIRECT.GET.{topology.STREAM}")
        except nats.js.errors.NotFoundError as error:  # the server that answers is behind
            raise BusUnavailableError(f"looking at entry {sequence}: it is not there yet") from error
        return str(found.subject)

    async def follow(self, filters: Sequence[str], after: int) -> AsyncIterator[JournalEntry]:
        """Read the journal in order; see `Bus.follow`."""
        positions, logged = dict.fromkeys(patterns(filters), after), ""
        while not self._closing:
            reader = JournalReader(self._nc, self.tail, self._call, filters, positions)
            self._readers.add(reader)
            try:
                await self._call(reader.open(), "reading the journal", *map(subjects.stored, filters))
                logged = ""
                async for entry in reader.entries():
                    yield entry
            except BusUnavailableError as error:
                if logged != str(error):  # once, and not ten times a second for as long as the server is away
                    logged = str(error)
                    log.info("%s: the journal is out of reach: %s", self._name, logged)
                await asyncio.sleep(RECONNECT_S)
            finally:
                self._readers.discard(reader)
                await reader.close()

    async def _journal(self) -> StreamInfo:
        subject = f"{topology.API}.STREAM.INFO.{topology.STREAM}"
        return await self._call(self._reading.stream_info(topology.STREAM), "reading the journal's end", subject)

    async def silent_servers(self) -> list[str]:
        """Return the names of the servers that the journal's leader does not hear; see `Bus.silent_servers`."""
        cluster = (await self._journal()).cluster
        peers = cluster.replicas if cluster is not None and cluster.leader else None
        return [str(peer.name) for peer in peers or [] if _is_silent(peer)]

    async def tail(self) -> int:
        """Return the last sequence of the journal."""
        info = await self._journal()
        if info.cluster is not None and not info.cluster.leader:  # a server that comes back with an empty disk says 0
            raise BusUnavailableError("reading the journal's end: none of its servers leads now; try again")
        return int(info.state.last_seq)

    async def last(self, filters: Sequence[str]) -> int:
        """Return the last sequence of the journal that matches."""
        return max(await asyncio.gather(*map(self._last, filters)))

    async def _last(self, pattern: str) -> int:
        request = json.dumps({"last_by_subj": pattern}).encode()
        asked = self._nc.request(GET, request, timeout=ANSWER_S)
        headers = (await self._call(asked, "reading the journal's end", GET)).headers or {}
        if headers.get("Status") == "404":
            return 0
        sequence = headers.get("Nats-Sequence", "")
        if not (sequence.isascii() and sequence.isdigit() and len(sequence) < DIGITS):
            raise BusUnavailableError("reading the journal's end: something else than an entry came")
        return int(sequence)

    # --- telemetry ---------------------------------------------------------------------------------------------------

    async def stream(self, name: str) -> StreamInfo:
        """Return what the servers say of one of the streams of `topology`: its configuration, and where it lies.

        Raises:
            NotAllowedError: we may not ask for that.
            BusUnavailableError: no server answers, or there is no such stream.
        """
        asking = self.jetstream.stream_info(name)
        return await self._call(asking, f"looking at stream {name}", f"$JS.API.STREAM.INFO.{name}")

    async def publish_telemetry(self, subject: str, data: bytes) -> None:
        """Send telemetry."""
        await self._call(self._nc.publish(subject, data), f"sending on {subject}")

    async def receive_telemetry(self, filters: Sequence[str]) -> AsyncIterator[TelemetryEntry]:
        """Receive telemetry; see `Bus.receive_telemetry`."""
        queue: asyncio.Queue[TelemetryEntry | None] = asyncio.Queue()
        self._hearing.add(queue)

        async def take(message: Msg) -> None:
            if queue.qsize() >= HEARD_LIMIT:
                queue.get_nowait()
                if self._complaints.admit("telemetry", time.monotonic()):
                    log.warning("%s: telemetry was dropped: %d pieces wait to be read", self._name, HEARD_LIMIT)
            queue.put_nowait(TelemetryEntry(message.subject, message.data))

        try:
            subscriptions = [await self._nc.subscribe(subject, cb=take) for subject in dict.fromkeys(filters)]
        except nats.errors.Error as error:
            raise BusUnavailableError(f"listening on {', '.join(filters)}: {error}") from error
        try:
            while (heard := await queue.get()) is not None:
                yield heard
        finally:
            self._hearing.discard(queue)
            for subscription in subscriptions:
                with contextlib.suppress(nats.errors.Error):
                    await subscription.unsubscribe()

    # --- queries -----------------------------------------------------------------------------------------------------

    async def serve(self, subject: str, name: str, handler: Handler) -> Callable[[], Awaitable[None]]:
        """Answer queries as a NATS micro service; see `Bus.serve`."""

        async def answer(request: Request) -> None:
            if not request._msg.reply:  # noqa: SLF001 - a reply of the server's, directed here: asked by nobody
                return
            with contextlib.suppress(
                nats.errors.Error
            ):  # the connection broke: the requester gets no answer and asks again
                try:
                    reply = await handler(request.data)
                except BusUnavailableError as error:
                    await request.respond_error("503", str(error))
                except Exception as error:
                    log.exception("%s: no answer to a query on %s", name, subject)
                    await request.respond_error("500", repr(error))
                else:
                    await replies.respond(request, reply)

        async def take(request: Request) -> None:
            task = asyncio.create_task(answer(request))  # a slow query must not hold up the next one
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

        async def start() -> nats.micro.service.Service:
            service = await nats.micro.add_service(self._nc, name=name, version=unicron.__version__)
            await service.add_endpoint(name="queries", subject=subject, handler=take)
            return service

        async def start_whole() -> nats.micro.service.Service:
            service = await self._shielded(start())
            await self._shielded(self._nc.flush())
            return service

        service = await self._call(start_whole(), f"serving {subject}", subject)

        async def stop() -> None:
            with contextlib.suppress(nats.errors.Error, TimeoutError):
                await asyncio.wait_for(self._shielded(service.stop()), ANSWER_S)

        return stop

    async def ask(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        """Send a query; see `Bus.ask`."""
        owner = subject.rsplit(".", 1)[-1]
        try:
            reply = await self._call(replies.request(self._nc, subject, data, timeout_s), f"asking {owner}", subject)
        except BusUnavailableError as error:
            if isinstance(error.__cause__, nats.errors.NoRespondersError):
                raise NobodyAnswersError(f"nobody answers on {subject}; is {owner} running?") from error
            raise
        trouble = (reply.headers or {}).get("Nats-Service-Error")
        if trouble:
            raise BusUnavailableError(f"{owner} could not answer: {trouble}")
        return reply.data

    # --- buckets -----------------------------------------------------------------------------------------------------

    def bucket(self, name: str) -> "NatsBucket":
        """Return the bucket `name`."""
        full = topology.BUCKETS[name]
        raw = KeyValue(name=full, stream=f"KV_{full}", pre=f"$KV.{full}.", js=self._reading, direct=False)
        return NatsBucket(name, raw, self._call)

    async def close(self) -> None:
        """Send what waits, say goodbye and release the connection."""
        try:
            await super().close()
        finally:
            for task in self._answering:
                task.cancel()
            for hearing in self._hearing:
                hearing.put_nowait(None)
