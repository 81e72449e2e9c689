"""Says whether a process of Unicron does its work, for health checks: `python -m unicron.service.health OWNER`.

The owner is a service, such as the registry, the console, or a node. A service is healthy while somebody holds its
lease, a console while it answers here and has read the journal, a node while its agent reports to the bus, for
which no network is needed.
"""

import asyncio
import http.client
import logging
import sys
import time
from pathlib import Path

from unicron.errors import BusUnavailableError, InvalidInputError, UnicronError
from unicron.service.bootstrap import connected
from unicron.services import CONSOLE, NAMED
from unicron.settings import Settings

ALIVE = "alive"
"""Name of the file in an agent's run folder that it touches whenever it has sent the bus something."""

CONSOLE_S = 3.0
"""How long the console may take to answer."""

SILENT_S = 10.0
"""How long an agent may send nothing; it does so twice a second, in a very large cluster every 9 s."""


class HealthSettings(Settings, kw_only=True, frozen=True):
    """Whether a service or a node does its work.

    Attributes:
        run_dir: that of the node's agent.
        console_port: at which the console answers browsers.
        connect_timeout_s: how long it waits for the bus.
    """

    run_dir: str = ".unicron/node"
    console_port: int = 8080
    connect_timeout_s: float = 3.0


async def check(settings: HealthSettings, owner: str) -> None:
    """Return if `owner` is healthy.

    Raises:
        BusUnavailableError: it is not, or the bus is away.
    """
    if owner in NAMED:
        async with connected(settings, "health", patient=False) as bus:
            if await bus.bucket("lease").get(owner) is None:
                raise BusUnavailableError(f"no instance of {owner} is active; see its log")
    elif owner == CONSOLE:
        await asyncio.to_thread(_check_console, settings.console_port)
    else:
        _check_agent(Path(settings.run_dir) / ALIVE, time.time())


def _check_console(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=CONSOLE_S)
    try:
        connection.request("GET", "/healthz")
        answer = connection.getresponse()
        if answer.status != http.HTTPStatus.OK:
            raise BusUnavailableError(f"the console is not ready: {answer.read(1000).decode(errors='replace')}")
    except (OSError, http.client.HTTPException) as error:
        raise BusUnavailableError(f"the console does not answer on port {port}: {error}; see its log") from error
    finally:
        connection.close()


def _check_agent(alive: Path, now: float) -> None:
    try:
        silent_s = now - alive.stat().st_mtime
    except OSError as error:
        raise BusUnavailableError(
            f"{alive}: {error.strerror}: its agent has sent the bus nothing; see its log"
        ) from error
    if silent_s > SILENT_S:
        raise BusUnavailableError(f"its agent has sent the bus nothing for {silent_s:.0f} s; see its log")


def main() -> int:
    """Return 0 if the owner named by the first argument is healthy, else 1."""
    logging.getLogger().addHandler(logging.NullHandler())  # what the bus logs, the error says too
    try:
        if len(sys.argv) < 2:
            raise InvalidInputError("name a service or a node: python -m unicron.service.health OWNER")
        asyncio.run(check(HealthSettings.load(sys.argv[2:]), sys.argv[1]))
    except UnicronError as error:
        print(f"unhealthy: {error}", file=sys.stderr)  # noqa: T201 what the container's log of checks shows
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
