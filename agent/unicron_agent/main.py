"""Wires the agent up."""

import asyncio
import fcntl
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from secrets import token_hex

from unicron.bus.nats import connect
from unicron.clock import SystemClock
from unicron.errors import InvalidInputError
from unicron.fabric_proofs import boot_id
from unicron.service.runner import run_process
from unicron_agent.departure import wait_for_departure
from unicron_agent.enrolment import enrol
from unicron_agent.hardware.slots import find_slots
from unicron_agent.node import NodeShell
from unicron_agent.settings import AgentSettings
from unicron_agent.workers.warm import Standby, WarmStandby

DYING_S = 5.0
"""How long an agent that was killed may take to be gone."""


async def _run(make_standby: Callable[[Path], Standby], settings: AgentSettings) -> None:
    await lock_run_folder(Path(settings.run_dir))
    settings = await enrol(settings)
    slots = find_slots(settings.slots)
    secret = token_hex()  # a client that could name its connection like ours could have this node given up
    bus = await connect(settings, f"agent.{settings.node}", secret)
    try:
        clock, standby = SystemClock(), make_standby(Path(settings.run_dir, "logs", "standby.log").resolve())
        leaving = partial(wait_for_departure, clock.now(), settings.leave_s)
        await NodeShell(settings, bus, clock, slots, boot_id(secret), standby, leaving, bus.cut).run()
    finally:
        await bus.close()


async def lock_run_folder(folder: Path) -> None:
    """Have a run folder for this process alone, for as long as it lives.

    Raises:
        InvalidInputError: another agent has it, and does not end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    held = os.open(folder / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        async with asyncio.timeout(DYING_S):  # one that was killed is not gone at once
            while not _try_lock(held):
                await asyncio.sleep(DYING_S / 50)
    except TimeoutError:
        number = os.pread(held, 20, 0).decode(errors="replace").strip()
        os.close(held)
        raise InvalidInputError(
            f"another agent (process {number}) works in {folder}: end that first, or give this one another --run-dir"
        ) from None
    os.ftruncate(held, 0)
    os.pwrite(held, f"{os.getpid()}\n".encode(), 0)


def _try_lock(held: int) -> bool:
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def main(make_standby: Callable[[Path], Standby] = WarmStandby) -> int:
    """Run the agent of this node until it is stopped; return the exit status.

    Args:
        make_standby: makes what forks workers, by the file that it logs to.
    """
    return run_process(AgentSettings, partial(_run, make_standby))
