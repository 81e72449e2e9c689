"""Wires the agent up."""

import sys

from unicron.bus.nats import connect
from unicron.clock import SystemClock
from unicron.errors import UnicronError
from unicron.runner import set_up_logging
from unicron.service import run_until_signal
from unicron_agent.agent import Agent
from unicron_agent.settings import AgentSettings
from unicron_agent.slots import find_slots


async def _run(settings: AgentSettings) -> None:
    slots = find_slots(settings.slots)
    bus = await connect(settings, f"agent.{settings.node}")
    try:
        await Agent(settings, bus, SystemClock(), slots).run()
    finally:
        await bus.close()


def main() -> int:
    """Run the agent of this node until SIGTERM; return the exit code."""
    try:
        settings = AgentSettings.load()
        set_up_logging(settings.log_level, f"agent.{settings.node}")
        run_until_signal(_run(settings))
    except UnicronError as error:
        print(f"unicron-agent: {error}", file=sys.stderr)  # noqa: T201 the one line a person gets
        return 1
    return 0
