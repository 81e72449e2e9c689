"""Says whether a process of Unicron does its work, for health checks: `python -m unicron.health OWNER`.

The owner is a service (registry, detector, planner, transition, straggler) or a node. A service is healthy while
somebody holds its lease, a node while its agent answers.
"""

import asyncio
import logging
import sys

from unicron.bootstrap import connected
from unicron.errors import BusUnavailableError, InvalidInputError, UnicronError
from unicron.services import SERVICES
from unicron.settings import Settings

ANSWER_S = 2.0
"""How long an agent may take to answer."""


class HealthSettings(Settings, kw_only=True, frozen=True):
    """Whether a service or a node does its work.

    Attributes:
        connect_timeout_s: how long it waits for the bus.
    """

    connect_timeout_s: float = 3.0


async def check(settings: Settings, owner: str) -> None:
    """Return if `owner` is healthy.

    Raises:
        BusUnavailableError: it is not, or the bus is away.
    """
    async with connected(settings, "health") as bus:
        if owner not in SERVICES:
            await bus.ask(f"$SRV.PING.agent-{owner}", b"", ANSWER_S)
        elif await bus.bucket("lease").get(owner) is None:
            raise BusUnavailableError(f"no instance of {owner} is active; see its log")


def main() -> int:
    """Return 0 if the owner named by the first argument is healthy, else 1."""
    logging.getLogger().addHandler(logging.NullHandler())  # what the bus logs, the error says too
    try:
        if len(sys.argv) < 2:
            raise InvalidInputError("name a service or a node: python -m unicron.health OWNER")
        asyncio.run(check(HealthSettings.load(sys.argv[2:]), sys.argv[1]))
    except UnicronError as error:
        print(f"unhealthy: {error}", file=sys.stderr)  # noqa: T201 what the container's log of checks shows
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
