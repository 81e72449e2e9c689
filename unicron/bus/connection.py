"""A connection to NATS: dialling, calls that fail in time, interruptions, and the end."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import nats.errors
import nats.js.errors
import nats.micro
import nats.micro.service
from nats.aio.client import DEFAULT_INBOX_PREFIX, Client
from nats.js import JetStreamContext

from unicron.bus import access, topology
from unicron.bus.client import KeyedClient
from unicron.bus.dialling import Dialling, start_cure
from unicron.bus.journal import JournalReader
from unicron.errors import BusUnavailableError, InvalidInputError, NotAllowedError, UnicronError
from unicron.rate_limits import LETTERS, RateLimiter
from unicron.settings import Settings

log = logging.getLogger(__name__)
T = TypeVar("T")

ANSWER_S = 2.0
"""How long a call waits for the server before it raises."""

GREETING_S = 2
"""How long a server may take to let us in; half as long where there are others: one that hangs answers nothing."""

CLOSE_S = 2.0
"""How long a connection may take to close."""

RECONNECT_S = 0.1
"""Pause between attempts to reach a server that went away."""


class NatsConnection:
    """A connection to NATS.

    Attributes:
        jetstream: the raw API, for `topology.provision` and for tools.
    """

    jetstream: JetStreamContext

    def __init__(self) -> None:
        self._nc = KeyedClient()
        self._name = ""
        self._dialling: Dialling | None = None
        self._last_error: Exception | None = None
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._refused: asyncio.Future[access.Refusal] = asyncio.get_running_loop().create_future()
        self._down_since = 0.0
        self._closing = False
        self._complaints = RateLimiter(LETTERS)
        self._outages: set[asyncio.Queue[float | None]] = set()
        self._readers: set[JournalReader] = set()
        self._uncuttable: set[asyncio.Task[Any]] = set()

    async def connect(self, settings: Settings, name: str, secret: str = "", *, patient: bool = True) -> None:
        """Connect, or raise as the function `connect` does."""
        self._name = name
        key = Path(settings.nats_nkey) if settings.nats_nkey else None
        if key:
            access.public_key(key)
        self._dialling = Dialling(settings, patient=patient)
        connecting = asyncio.ensure_future(self._connect(settings, f"{name}.{secret}" if secret else name, key))
        try:
            ends: set[asyncio.Future[None]] = {connecting, self._dialling.in_vain}
            await asyncio.wait(ends, timeout=settings.connect_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done():
                raise self._dialling.failure()
            connecting.result()
        except (nats.errors.Error, ValueError, OSError) as error:
            raise InvalidInputError(
                f"can't use the NATS address {settings.nats_url!r}: {error}; {start_cure()}"
            ) from error
        finally:
            self._dialling = None
            if not connecting.done():
                await self._hang_up()
                connecting.cancel()
                await asyncio.wait({connecting}, timeout=CLOSE_S)
                if connecting.done() and not connecting.cancelled():
                    connecting.exception()  # it failed while we hung up: asked for, or asyncio would print it
        self.jetstream = self._nc.jetstream(timeout=ANSWER_S)
        self._reading = self._nc.jetstream(prefix=topology.API, timeout=ANSWER_S)

    async def _connect(self, settings: Settings, name: str, key: Path | None) -> None:
        await self._nc.connect(
            settings.nats_servers,
            name=name,
            nkeys_seed=settings.nats_nkey or None,
            inbox_prefix=access.inbox(key.stem) if key else DEFAULT_INBOX_PREFIX,
            user_credentials=access.credentials(settings),
            tls=access.tls(settings),
            connect_timeout=GREETING_S if len(settings.nats_servers) == 1 else GREETING_S // 2,
            reconnect_time_wait=RECONNECT_S,  # type: ignore[arg-type]
            max_reconnect_attempts=-1,
            ping_interval=2,
            drain_timeout=2,
            pending_size=0,  # a call while the server is away fails at once; its caller repeats it
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_reconnected,
            closed_cb=self._on_closed,
        )

    async def _hang_up(self) -> None:
        """Close the client, and see to it that nothing of it goes on."""
        self._closing = True
        # An attempt to connect may swallow its cancellation (asyncio.wait_for before Python 3.12); this ends the next.
        self._nc.options["max_reconnect_attempts"] = 1
        # A task, since what it waits for may have been cancelled, which would look as if we were. And not for ever:
        # before Python 3.12 asyncio may never see the end of a TLS connection that the server refused.
        closing = asyncio.ensure_future(self._nc.close())
        await asyncio.wait({closing}, timeout=CLOSE_S)
        closing.cancel()

    @property
    def client(self) -> Client:
        """The raw connection, for tools."""
        return self._nc

    async def flush(self) -> None:
        """Wait until the server has seen everything sent so far."""

        async def flush() -> None:
            await asyncio.wait_for(self._shielded(self._nc.flush(timeout=60)), ANSWER_S)

        await self._call(flush(), "flushing")

    async def close(self) -> None:
        """Send what waits, say goodbye and release the connection."""
        self._closing = True
        try:
            if self._nc.is_connected:
                draining = asyncio.ensure_future(self._nc.drain())  # a task, as in `_hang_up`
                await asyncio.wait({draining}, timeout=3 * ANSWER_S)
                draining.add_done_callback(_retrieve_error)
                draining.cancel()
        finally:
            await self._hang_up()
            for task in self._uncuttable:
                task.cancel()
            for outages in self._outages:
                outages.put_nowait(None)

    def cut(self, seconds: float) -> None:
        """Lose the connection as if the network was gone, and take it up again after so many seconds (chaos)."""
        self._nc.cut(seconds)

    async def reconnected(self) -> AsyncIterator[float]:
        """Yield the length of each interruption in seconds."""
        queue: asyncio.Queue[float | None] = asyncio.Queue()
        self._outages.add(queue)
        try:
            while (down_s := await queue.get()) is not None:
                yield down_s
            if not self._closing:
                raise BusUnavailableError(f"NATS closed the connection for good: {self._nc.last_error}; start anew")
        finally:
            self._outages.discard(queue)

    async def _shielded(self, job: Coroutine[Any, Any, T]) -> T:
        """Await `job`, and let it run on when we are cancelled: nats-py reads no further once a flush is cut short."""
        task = asyncio.ensure_future(job)
        self._uncuttable.add(task)
        task.add_done_callback(self._uncuttable.discard)
        task.add_done_callback(_retrieve_error)
        return await asyncio.shield(task)

    async def _call(self, request: Coroutine[Any, Any, T], what: str, *on: str) -> T:
        """Return the outcome of `request`; fail at once when the connection breaks, and in time when nothing comes.

        Raises:
            NotAllowedError: the server refuses us one of the subjects `on`.
            BusUnavailableError, InvalidInputError: as `_translate_error` has it.
        """
        if self._lost.done():
            request.close()
            raise BusUnavailableError(f"{what}: {_DOWN}")
        task = asyncio.ensure_future(request)
        task.add_done_callback(_retrieve_error)  # it may fail while we are being cancelled
        lost, subject_of = self._lost, {access.normalized_subject(each): each for each in on}
        try:
            while not task.done():
                refused = self._refused
                each: set[asyncio.Future[Any]] = {task, lost, refused}
                await asyncio.wait(each, return_when=asyncio.FIRST_COMPLETED)
                if refused.done() and (subject := subject_of.get(refused.result().subject)):
                    raise NotAllowedError(f"{what}: {refused.result().explain(self._name, subject)}")
                if lost.done() and not task.done():
                    raise BusUnavailableError(f"{what}: {_DOWN}")
            return task.result()
        except (nats.errors.Error, TimeoutError, OSError) as error:
            meaning = _translate_error(error)
            if meaning is None:
                raise
            kind, text = meaning
            raise kind(f"{what}: {text}") from error
        finally:
            if not task.done():
                task.cancel()

    async def _on_error(self, error: Exception) -> None:
        again = str(error) == str(self._last_error)
        if self._last_error is None or not isinstance(error, OSError):
            self._last_error = error
        if self._dialling is not None and self._nc.dialled:
            self._dialling.record_attempt(self._nc.dialled, error, self._nc.given)
        refusal = access.Refusal.parse(error)
        if refusal:
            earlier, self._refused = self._refused, asyncio.get_running_loop().create_future()
            earlier.set_result(refusal)
        expected = isinstance(error, OSError | nats.errors.StaleConnectionError | TimeoutError)
        expected = expected or again or not self._complaints.admit(type(error).__name__, time.monotonic())
        log.log(logging.DEBUG if expected else logging.WARNING, "%s: NATS says: %s", self._name, error or repr(error))

    async def _on_disconnected(self) -> None:
        if not self._lost.done():
            self._lost.set_result(None)
            self._down_since = time.monotonic()
            if not self._closing:
                log.warning("%s: the connection to NATS is down", self._name)
        for reader in self._readers:
            reader.interrupt()

    async def _on_reconnected(self) -> None:
        down_s = time.monotonic() - self._down_since
        self._lost = asyncio.get_running_loop().create_future()
        self._last_error = None
        log.info("%s: connected to NATS again after %.2f s", self._name, down_s)
        for queue in self._outages:
            queue.put_nowait(down_s)

    async def _on_closed(self) -> None:
        if not self._closing:
            log.error("%s: NATS closed the connection for good: %s", self._name, self._nc.last_error)
            for outages in self._outages:
                outages.put_nowait(None)


_DOWN = "the connection to NATS is down; it is being restored"


def _retrieve_error(task: "asyncio.Task[Any]") -> None:
    """Take note of a task's error, so that asyncio does not complain about it."""
    if not task.cancelled():
        task.exception()


def _translate_error(error: Exception) -> tuple[type[UnicronError], str] | None:
    """Return our error for one of NATS, or None for one whose meaning only the caller knows."""
    match error:
        case nats.js.errors.ServiceUnavailableError() | nats.js.errors.ServerError():
            return BusUnavailableError, f"JetStream is not ready ({error}); try again"
        case nats.js.errors.NoStreamResponseError() | nats.js.errors.NotFoundError(err_code=10059):
            return BusUnavailableError, "no stream for it; run `unicron provision`"
        case nats.js.errors.APIError():
            return None
        case nats.errors.NoRespondersError():
            return BusUnavailableError, "nobody answers"
        case nats.errors.MaxPayloadError() | nats.errors.BadSubjectError():
            return InvalidInputError, str(error)
    return BusUnavailableError, f"no answer from NATS in time ({error or 'time-out'})"
