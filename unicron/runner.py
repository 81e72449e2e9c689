"""Runs one service as a process: logging, connection, provisioning, and an orderly end."""

import asyncio
import logging
import sys
from typing import TYPE_CHECKING

from unicron.aio import run_until_signal
from unicron.bus import nats, topology
from unicron.clock import SystemClock
from unicron.errors import InvalidInputError, UnicronError
from unicron.service import Service, Wiring

if TYPE_CHECKING:
    from unicron.settings import Settings

LEVELS = ("debug", "info", "warning", "error")


def set_up_logging(level: str, name: str) -> None:
    """Log one line per record to stderr: time, process, level, text.

    Raises:
        InvalidInputError: there is no such level.
    """
    if level not in LEVELS:
        raise InvalidInputError(f"setting log_level {level!r}: use one of {', '.join(LEVELS)}")
    logging.basicConfig(
        level=level.upper(), format=f"%(asctime)s {name} %(levelname)s %(message)s", stream=sys.stderr, force=True
    )


def run_service(wiring: Wiring, settings: "Settings") -> int:
    """Run the service until SIGTERM or SIGINT; return the exit status of the process.

    Errors that a person can mend are printed as one line.
    """
    try:
        set_up_logging(settings.log_level, wiring.name)
        run_until_signal(_serve(wiring, settings))
    except UnicronError as error:
        print(f"{wiring.name}: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


async def _serve(wiring: Wiring, settings: "Settings") -> None:
    bus = await nats.connect(settings, wiring.name)
    try:
        await topology.provision(bus.jetstream, lease_ttl_s=settings.lease_ttl_s)
        await Service(wiring, bus, SystemClock(), settings.lease_ttl_s).run()
    finally:
        await asyncio.shield(bus.close())
