"""Runs one service as a process: logging, connection, provisioning, and an orderly end."""

import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any, TypeVar

from unicron.aio import retry_until_available, run_until_signal
from unicron.bus import nats, topology
from unicron.bus.protocol import Bus
from unicron.clock import SystemClock
from unicron.contracts.queries import GetStatus
from unicron.errors import InvalidInputError, UnicronError
from unicron.metric_definitions import MetricSample
from unicron.printable import one_line, printable
from unicron.service.intake import Input
from unicron.service.metrics import Metrics, load_samples, status_samples
from unicron.service.roundtrip import Inactive
from unicron.service.service import Service, Wiring
from unicron.settings import PREFIX, Settings

log = logging.getLogger(__name__)

S = TypeVar("S", bound=Settings)

REGISTRY = "registry"
"""The services that know nodes, tasks and the plan in force."""

LEVELS = ("debug", "info", "warning", "error")

Beside = Callable[[S, Bus, Service], Coroutine[Any, Any, None]]
"""Work beside a service, by its settings and on its bus."""


def set_up_logging(level: str, name: str) -> None:
    """Log one line per record to stderr: time, process, level, text.

    Raises:
        InvalidInputError: there is no such level.
    """
    if level not in LEVELS:
        raise InvalidInputError(f"{PREFIX}LOG_LEVEL {level!r}: use one of {', '.join(LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines(f"%(asctime)s {name} %(levelname)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class _Lines(logging.Formatter):
    """Records name what came from elsewhere: it neither steers a terminal nor passes for a record of its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 the name is logging's
        record.message = one_line(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802 likewise
        return printable(super().formatException(ei))


def run_process(settings_type: type[S], job: Callable[[S], Coroutine[Any, Any, None]]) -> int:
    """Load the settings, begin to log, and run `job` until SIGTERM or SIGINT; return the exit status of the process.

    An error that a person can mend, such as a bad setting, is printed as one line.
    """
    try:
        settings = settings_type.load()
        set_up_logging(settings.log_level, settings.log_name)
        run_until_signal(job(settings))
    except UnicronError as error:
        print(printable(f"{settings_type.process}: {error}"), file=sys.stderr)  # noqa: T201
        return 1
    return 0


def run_service(settings_type: type[S], wiring: Callable[[S], Wiring], beside: Beside[S] | None = None) -> int:
    """Run a service until SIGTERM or SIGINT; return the exit status of the process.

    Args:
        settings_type: of the service.
        wiring: says what the service is made of, by its settings.
        beside: work on the same bus in the same event loop; its end, even by an error, does not end the service.
    """
    return run_process(settings_type, lambda settings: _serve(wiring(settings), settings, beside))


async def _serve(wiring: Wiring, settings: S, beside: Beside[S] | None) -> None:
    bus = await nats.connect(settings, wiring.name)
    try:
        if wiring.provisions:
            copies = topology.copies(settings.nats_servers)
            make = partial(topology.provision, bus.jetstream, copies, settings.lease_ttl_s)
            await retry_until_available(
                make, "making the streams"
            )  # of several servers two have to find one another first
        service = Service(wiring, bus, SystemClock(), settings.lease_ttl_s)
        measure(service, wiring.name, settings)
        explaining = asyncio.create_task(
            _guarded(
                Inactive(wiring.name, bus, lambda: service.token, lambda: service.trouble, settings.lease_ttl_s).run(),
                wiring.name,
            )
        )
        extra = asyncio.create_task(_guarded(beside(settings, bus, service), wiring.name)) if beside else None
        try:
            await service.run()
        finally:
            explaining.cancel()
            if extra:
                extra.cancel()
                await asyncio.wait({extra}, timeout=3.0)
    finally:
        await asyncio.shield(bus.close())


def measure(service: Service, name: str, settings: Settings) -> None:
    """Export a service's metrics, where its settings want that.

    Raises:
        InvalidInputError: prometheus-client is not installed, or nobody can listen where the settings say.
    """
    if settings.metrics_address is None:
        return

    def read() -> Iterator[MetricSample]:
        yield from load_samples(name, service.load())
        reply = service.peek(GetStatus()) if name == REGISTRY else None
        if reply and reply.status:
            yield from status_samples(reply.status)

    metrics = Metrics(name, read)

    def observe(item: Input) -> None:
        if item.sound:
            metrics.count_received(item.message, item.taken - item.stamp if item.sequence else None)
        for message in item.said:
            metrics.count_sent(item.message, message)

    service.observe = observe
    metrics.serve(settings.metrics_address)


async def _guarded(job: Coroutine[Any, Any, None], name: str) -> None:
    try:
        await job
    except Exception:
        log.exception("%s goes on without what ran beside it", name)
