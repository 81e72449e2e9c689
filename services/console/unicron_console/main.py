"""Runs the console: reads the journal, listens to telemetry, and answers browsers."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Iterator
from typing import ClassVar

import uvicorn

from unicron.addresses import MOST_PORT, Address
from unicron.aio import gather_or_cancel, retry_until_available
from unicron.bus.protocol import Bus
from unicron.client import Client
from unicron.errors import InvalidInputError, UnicronError
from unicron.metric_definitions import MetricSample
from unicron.observe.accounts.otel import Traces, endpoint
from unicron.observe.cluster import TELEMETRY, ClusterPicture
from unicron.service.bootstrap import connected
from unicron.service.metrics import Metrics
from unicron.service.runner import run_process
from unicron.settings import PREFIX, Settings
from unicron_console.live import Hub
from unicron_console.tokens import Tokens
from unicron_console.web import Web

log = logging.getLogger(__name__)

TURN = 100
"""Entries of the journal that are read before browsers get an answer."""

TRACE_S = 1.0
"""Between two looks at which recoveries are over."""

SEED_S = 10.0
"""How long the registry is waited for before the journal is read without it."""

HEALTH_S, REST_LOOKS = 1.5, 8
"""Time to the next look at what gets through, and how many of them are left out while all is well and nobody looks."""

WATCHED_S = 60.0
"""Time after which nobody watches who has asked whether all is well: machines do so again and again."""

ANSWERS_S, LOOK_S = 3.0, 1.0
"""Time limit of an answer of the bus, and time to the next question."""

FILL_S = 5.0
"""Pause before the registry is asked again, where it did not answer."""


class ConsoleSettings(Settings, kw_only=True, frozen=True):
    """The console: the cluster on a page.

    Attributes:
        console_host: address at which browsers are answered. For other machines put a proxy with TLS before it.
        console_port: port at which browsers are answered.
        console_hosts: host names that browsers may use, with commas between; `*` for any.
        console_tokens: file with a line for each person who may give orders: a name, a blank, a token of at least 20
            characters. Empty: nobody may.
        console_chaos: whether these people may inject faults too.
        traces: URL of an OpenTelemetry collector (OTLP over HTTP) that gets each recovery as a trace.
    """

    process: ClassVar[str] = "console"

    console_host: str = "127.0.0.1"
    console_port: int = 8080
    console_hosts: str = "localhost,127.0.0.1"
    console_tokens: str = ""
    console_chaos: bool = False
    traces: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.console_port <= MOST_PORT:
            raise InvalidInputError(f"{PREFIX}CONSOLE_PORT {self.console_port}: give a port from 1 to {MOST_PORT}")
        if self.traces:
            endpoint(self.traces)


class _Server(uvicorn.Server):
    """A server that leaves signals to the process that it runs in."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(settings: ConsoleSettings) -> None:
    """Run the console until it is cancelled.

    Raises:
        InvalidInputError: nobody can listen where the settings say, or the tokens can't be used.
    """
    tokens, traces = Tokens(settings.console_tokens), Traces(settings)
    picture = ClusterPicture()
    hub = Hub(picture, time.time)
    hub.behind = 1  # as long as nobody knows how much there is to read
    async with connected(settings, settings.process) as bus:
        client = Client(bus)
        hosts = [each.strip() for each in settings.console_hosts.split(",") if each.strip()]
        web = Web(hub, client, tokens, hosts, chaos=settings.console_chaos)
        _serve_metrics(settings, hub)
        await gather_or_cancel(
            listen(settings, web),
            read(client, hub),
            _read_telemetry(client, hub),
            _fetch_older_state(client, hub),
            _export_traces(hub, traces),
            hub.run(),
            _watch_bus(bus, hub),
            _watch_health(client, hub),
        )


async def listen(settings: ConsoleSettings, web: Web) -> None:
    """Answer browsers until it is cancelled.

    Raises:
        InvalidInputError: nobody can listen where the settings say.
    """
    config = uvicorn.Config(
        web.app,
        settings.console_host,
        settings.console_port,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        server_header=False,
        ws="websockets-sansio",
        ws_max_size=1024,  # nobody has to say anything
        ws_per_message_deflate=False,  # it would compress the same for each who looks
        timeout_graceful_shutdown=1,
    )
    server = _Server(config)
    where = Address(settings.console_host, settings.console_port)
    log.info("http://%s", where)
    try:
        await server.serve()
    except SystemExit as error:  # it says what was wrong in its log, and would end the process
        raise InvalidInputError(f"can't listen on {where}: give {PREFIX}CONSOLE_PORT another port") from error


async def read(client: Client, hub: Hub) -> None:
    """Read the journal from its beginning, for ever; what began before that the registry knows."""
    with contextlib.suppress(UnicronError, TimeoutError):  # then what is missing is added later
        async with asyncio.timeout(SEED_S):
            hub.picture.fill(await retry_until_available(client.status, "asking the registry"))
    tail = await retry_until_available(client.tail, "asking for the end of the journal")
    hub.behind = tail
    if not tail:
        hub.caught_up()
    count = 0
    async for position, message in client.follow():
        hub.picture.handle(position, message)
        count += 1
        if hub.behind:
            hub.behind = tail - position
            if hub.behind <= 0:
                hub.caught_up()
        if not hub.behind or count % TURN == 0:
            hub.wake()
            await asyncio.sleep(0)


async def _watch_bus(bus: Bus, hub: Hub) -> None:
    """See again and again whether the bus answers: what is shown of a cluster that is not heard of is old."""
    while True:
        try:
            async with asyncio.timeout(ANSWERS_S):
                await bus.flush()
        except (UnicronError, TimeoutError):
            hub.set_available(available=False)
        else:
            hub.set_available(available=True)
        await asyncio.sleep(LOOK_S)


async def _watch_health(client: Client, hub: Hub) -> None:
    """See again and again what gets through the cluster; more rarely while nobody looks."""
    while True:
        with contextlib.suppress(UnicronError):  # then nothing gets through at all, which is seen anyway
            hub.set_health(await client.health())
        for _ in range(REST_LOOKS):
            await asyncio.sleep(HEALTH_S)
            if hub.is_watched(WATCHED_S) or hub.ailing:
                break


async def _read_telemetry(client: Client, hub: Hub) -> None:
    async for message in client.telemetry(*TELEMETRY):
        hub.picture.handle_telemetry(message)
        hub.wake()


async def _fetch_older_state(client: Client, hub: Hub) -> None:
    """Get from the registry what the journal no longer keeps, once that is read."""
    while True:
        try:
            status = await client.status()
        except UnicronError as error:
            log.info("the registry is asked again: %s", error)
        else:
            if not hub.behind:
                hub.picture.fill(status)
                hub.wake()
                return
        await asyncio.sleep(FILL_S if hub.behind == 0 else 0.2)


async def _export_traces(hub: Hub, traces: Traces) -> None:
    """Export recoveries as they end; another process has exported those before this one was there."""
    while True:
        export_recoveries(hub.picture, None if hub.behind else traces)
        await asyncio.sleep(TRACE_S)


def export_recoveries(picture: ClusterPicture, traces: Traces | None) -> None:
    """Export each recovery that is over, and forget what only that was kept for; None: only forget it."""
    while picture.healed:
        chain = picture.healed.popleft()
        story = picture.stories.get(chain)
        if story is None:
            continue
        cost = picture.goodput.chain(chain) if traces and story.messages else None
        if traces and cost:
            traces.export(cost, story.messages)
        story.messages.clear()


def _serve_metrics(settings: ConsoleSettings, hub: Hub) -> None:
    if settings.metrics_address is None:
        return

    def read() -> Iterator[MetricSample]:
        yield MetricSample("unicron_console_pages", (), len(hub))
        for part in hub.parts:
            yield MetricSample("unicron_round_trip_seconds", (part.name,), math.inf if part.problem else part.seconds)
        for row in hub.pages.report.tasks:
            for phase, seconds in row.seconds.items():
                if seconds:
                    yield MetricSample("unicron_task_gpu_seconds_total", (row.name, phase), seconds)

    Metrics(settings.process, read).serve(settings.metrics_address)


def main() -> int:
    """Run the console until it is stopped; return the exit status."""
    return run_process(ConsoleSettings, serve)
