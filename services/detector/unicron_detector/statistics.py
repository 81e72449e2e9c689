"""Online statistics on a Faust app without Kafka: iterations come in from the bus through a channel.

Faust gives the agent, its life cycle and its sensors; NATS stays the only broker. Telemetry is not kept, so after a
restart the windows fill anew, which takes twenty iterations. Nothing here decides on a cure: a trouble in it is
logged and the app is started again, while the core beside it goes on.
"""

import asyncio
import contextlib
import logging
import tempfile
from collections.abc import AsyncGenerator

import faust
from faust.app.base import BootStrategy

from unicron import codec, subjects
from unicron.aio import insist
from unicron.bus.protocol import Bus
from unicron.clock import Clock
from unicron.contracts.events import IterationFinished, IterationsSlow
from unicron.errors import InvalidInputError
from unicron_detector.window import Windows

log = logging.getLogger(__name__)

SOURCE = "detector"

RESTART_S = 5.0
"""Pause before a failed app is started again."""


class WithoutKafka(BootStrategy):
    """Starts agents and sensors, and neither consumers and producers nor the web server."""

    enable_kafka = False
    enable_web = False


class App(faust.App):
    """A Faust app that needs no broker."""

    BootStrategy = WithoutKafka


class Statistics:
    """Watches iteration times, and publishes `IterationsSlow`."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock
        self._windows = Windows()

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            try:
                await self._watch()
            except Exception:
                log.exception("the statistics failed; they start again in %g s", RESTART_S)
            await asyncio.sleep(RESTART_S)

    async def _watch(self) -> None:
        with tempfile.TemporaryDirectory(prefix="unicron-statistics-") as directory:
            app = App("unicron-statistics", datadir=directory, autodiscover=False, web_enabled=False)
            channel = app.channel()
            app.agent(channel, name="iterations")(self._iterations)
            await app.start()
            try:
                app.flow_control.resume()  # else an agent on a channel is given nothing
                async with contextlib.aclosing(self._heard()) as heard:
                    async for finished in heard:
                        if app.should_stop:
                            raise RuntimeError(f"the faust app stopped: {app.crash_reason!r}")
                        await channel.send(value=finished)
            finally:
                await app.stop()

    async def _heard(self) -> AsyncGenerator[IterationFinished, None]:
        async for heard in self._bus.hear(subjects.events(IterationFinished)):
            try:
                message = codec.decode_message(heard.data)
                if subjects.of(message) == heard.subject and isinstance(message, IterationFinished):
                    yield message
            except InvalidInputError as error:
                log.debug("no iteration time on %s: %s", heard.subject, error)  # the registry puts it aside

    async def _iterations(self, stream: "faust.StreamT[IterationFinished]") -> None:
        async for finished in stream:
            slow = self._windows.observe(finished)
            if slow is not None:
                await self._publish(slow.descend(finished, 0, SOURCE, self._clock.now()))

    async def _publish(self, slow: IterationsSlow) -> None:
        """Append the fact; standbys that saw the same iteration give it the same id, so it is stored once."""
        log.info("iterations of %s take %.3f s instead of %.3f s", slow.task, slow.recent_s, slow.mean_s)
        await insist(
            lambda: self._bus.append(subjects.of(slow), codec.encode(slow), slow.id),
            f"telling that {slow.task} is slow",
        )
