"""Wires the agent up."""

from secrets import token_hex

from unicron.bus.nats import connect
from unicron.clock import SystemClock
from unicron.proofs import boot
from unicron.runner import run_process
from unicron_agent.node import Node
from unicron_agent.settings import AgentSettings
from unicron_agent.slots import find_slots


async def _run(settings: AgentSettings) -> None:
    slots = find_slots(settings.slots)
    secret = token_hex()  # whoever could name a connection like ours could have this node given up
    bus = await connect(settings, f"agent.{settings.node}", secret)
    try:
        await Node(settings, bus, SystemClock(), slots, boot(secret)).run()
    finally:
        await bus.close()


def main() -> int:
    """Run the agent of this node until it is told to stop; return the exit status."""
    return run_process(AgentSettings, _run)
