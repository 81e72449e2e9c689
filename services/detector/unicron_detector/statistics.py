"""Online statistics on a Faust app without Kafka: what the core has believed comes in through a channel.

Faust gives the agent, its life cycle and its sensors; NATS stays the only broker. What the statistics know of each task
is a few numbers. They are written down now and then, beside the state of the core, and the next instance goes on from
there; telemetry of the seconds between is lost, and that changes no mean. Nothing here decides on a cure: a trouble in
it is logged and the app is started again, while the core beside it goes on.
"""

import asyncio
import contextlib
import logging
import tempfile

import faust
import msgspec
from faust.app.base import BootStrategy

from unicron import codec, subjects
from unicron.aio import retry_until_available
from unicron.bus.protocol import Bus
from unicron.clock import Clock
from unicron.contracts.base import Message
from unicron.contracts.events import IterationFinished
from unicron.contracts.slowdowns import ComputeTimed
from unicron.errors import ConflictError
from unicron.service.service import Service
from unicron_detector.window import StoredSeries, Windows

log = logging.getLogger(__name__)

SOURCE, KEY = "detector", "detector.statistics"

RESTART_S = 5.0
"""Pause before a failed app is started again."""

SAVE_S = 10.0
"""How often what is known is written down, where anything has changed."""

WAITING = 20_000
"""Pieces of telemetry that may wait; the next are dropped."""


class WithoutKafka(BootStrategy):
    """Starts agents and sensors, and neither consumers and producers nor the web server."""

    enable_kafka = False
    enable_web = False


class App(faust.App):
    """A Faust app that needs no broker."""

    BootStrategy = WithoutKafka


class Statistics:
    """Watches how long iterations take; publishes `SlowdownDetected` and `SlowdownEnded`.

    Args:
        bus: of the service.
        clock: what the time is.
        service: gives what its core has believed, as long as it is the active one.
    """

    def __init__(self, bus: Bus, clock: Clock, service: Service) -> None:
        self._bus, self._clock, self._service = bus, clock, service
        self._bucket = bus.bucket("state")
        self._waiting: asyncio.Queue[Message] = asyncio.Queue(WAITING)
        self._windows = Windows()
        self._token = self._revision = 0
        self._changed = False
        self._reported = asyncio.Event()

    async def run(self) -> None:
        """Watch until cancelled."""
        self._service.overhear = self._take
        saving = asyncio.create_task(self._save_now_and_then())
        try:
            while True:
                try:
                    await self._watch()
                except Exception:
                    log.exception("the statistics failed; they start again in %g s", RESTART_S)
                await asyncio.sleep(RESTART_S)
        finally:
            saving.cancel()

    def _take(self, message: Message) -> bool:
        if not isinstance(message, IterationFinished | ComputeTimed):
            return True
        if self._waiting.full():
            return False
        self._waiting.put_nowait(message)
        return True

    async def _watch(self) -> None:
        with tempfile.TemporaryDirectory(prefix="unicron-statistics-") as directory:
            app = App("unicron-statistics", datadir=directory, autodiscover=False, web_enabled=False)
            channel = app.channel()
            app.agent(channel, name="iterations")(self._iterations)
            await app.start()
            try:
                app.flow_control.resume()  # else an agent on a channel is given nothing
                while True:
                    message = await self._waiting.get()
                    if app.should_stop:
                        raise RuntimeError(f"the faust app stopped: {app.crash_reason!r}")
                    await channel.send(value=message)
            finally:
                await app.stop()

    async def _iterations(self, stream: "faust.StreamT[Message]") -> None:
        async for message in stream:
            if not self._service.token:
                continue  # another instance goes on with what was written down
            if self._token != self._service.token:
                await self._load()
            if isinstance(message, ComputeTimed):
                self._windows.add_timings(message)
            elif isinstance(message, IterationFinished):
                self._changed = True
                for index, fact in enumerate(self._windows.add_iteration(message)):
                    await self._publish(fact.descend(message, index, SOURCE, self._clock.now()))
                    self._reported.set()

    async def _publish(self, fact: Message) -> None:
        log.info("%s", fact)
        await retry_until_available(
            lambda: self._bus.append(subjects.for_message(fact), codec.encode(fact), fact.id),
            f"publishing {type(fact).__name__}",
        )

    # --- what outlives this instance ---------------------------------------------------------------------------------

    async def _load(self) -> None:
        """Go on from what the last active instance has written down; where that can't be read, begin anew."""
        self._token, known = self._service.token, StoredSeries()
        found = await retry_until_available(lambda: self._bucket.get(KEY), "reading the statistics")
        self._revision = found.revision if found else 0
        if found and found.value:
            try:
                known = msgspec.msgpack.decode(found.value, type=StoredSeries)
            except msgspec.MsgspecError as error:
                log.warning("the statistics that were written down can't be used, and begin anew: %s", error)
        self._windows, self._changed = Windows(known), False

    async def _save_now_and_then(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SAVE_S):
                    await self._reported.wait()  # at once then: a slowdown that is forgotten would never end
            self._reported.clear()
            if self._changed and self._token and self._token == self._service.token:
                self._changed = False
                await self._save()

    async def _save(self) -> None:
        value = msgspec.msgpack.encode(self._windows.known)
        try:
            self._revision = await retry_until_available(
                lambda: self._bucket.update(KEY, value, self._revision), "writing the statistics down"
            )
        except ConflictError:  # another instance is active, or this write was repeated
            self._token = 0
