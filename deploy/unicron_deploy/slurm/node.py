"""`python -m unicron_deploy.slurm.node`: the agent of one node of a job, started again where it fails.

What starts it on all nodes, srun, passes on what its own input has: a line `leave` has the agents hand over what they
have, `end` has them end at once. Signals would reach the workers as well.
"""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from unicron.errors import InvalidInputError, UnicronError
from unicron.slurm import tools
from unicron_deploy.keys import Keyring
from unicron_deploy.slurm.allocation import JOB, node_name

PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Before an agent that has failed is started again: twice as long each time."""

LOOK_S, MISSES = 10.0, 3
"""How often the servers are looked for, and how often in a row they may not be there: Slurm lets a job go on that has
lost its first node, if it is to survive the loss of others."""

LAST_S = 20.0
"""How much later than the first node that is left the last one asks for the job to be requeued."""

LEAVE, END = "leave", "end"
ORDERS = {LEAVE: signal.SIGUSR1, END: signal.SIGINT}
"""By which signal the agent is told."""


def agent_command(root: Path, url: str, slots: int, node: str) -> list[str]:
    """Return the command of an agent, whose keys and folder are below `root`."""
    keys = Keyring(root / "keys")
    flags = {
        "--node": node,
        "--nats-url": url,
        "--nats-nkey": str(keys.path(node)),
        "--fabric-key": str(keys.fabric(node)),
        "--run-dir": str(root / "nodes" / node),
        "--slots": str(slots),
    }
    return [sys.executable, "-m", "unicron_agent", *(word for pair in flags.items() for word in pair)]


class Supervised:
    """A process that is started again whenever it fails, until it was told to end.

    Args:
        command: of it.
        log: is told when it has failed.
    """

    def __init__(self, command: list[str], log: Callable[[str], None]) -> None:
        self._command, self._log = command, log
        self._process: asyncio.subprocess.Process | None = None
        self._told = asyncio.Event()

    def tell(self, number: signal.Signals) -> None:
        """Send it a signal that ends it; it is not started again."""
        self._told.set()
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def run(self) -> int:
        """Run it until it ends by itself, or was told to; return its exit status."""
        pause_s = PAUSE_S
        while not self._told.is_set():
            # without input, so that it does not take ours
            self._process = await asyncio.create_subprocess_exec(*self._command, stdin=asyncio.subprocess.DEVNULL)
            status = await self._process.wait()
            if status == 0 or self._told.is_set():
                return status
            self._log(f"the agent ended with status {status}; it is started again in {pause_s:g} s")
            try:
                async with asyncio.timeout(pause_s):
                    await self._told.wait()
            except TimeoutError:
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return 0


async def supervise(command: list[str], log: Callable[[str], None]) -> int:
    """Run an agent, and pass on what our input and our signals say; return its exit status."""
    supervised, loop = Supervised(command, log), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        loop.add_signal_handler(number, supervised.tell, number)
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    orders = asyncio.create_task(_obey(reader, supervised))
    try:
        return await supervised.run()
    finally:
        orders.cancel()


async def until_gone(host: str, port: int) -> None:
    """Return when nobody listens at an address any more."""
    missed = 0
    while missed < MISSES:
        await asyncio.sleep(LOOK_S)
        try:
            async with asyncio.timeout(LOOK_S):
                _, writer = await asyncio.open_connection(host, port)
            writer.close()
            missed = 0
        except (OSError, TimeoutError):
            missed += 1


async def requeue_without(url: str, environ: Mapping[str, str], log: Callable[[str], None]) -> None:
    """Have Slurm requeue this job once its servers are gone; of all nodes that do so, the first to ask is heard."""
    address = urlsplit(url)
    await until_gone(address.hostname or "", address.port or 0)
    log("the servers of this job are gone: it is requeued")
    await asyncio.sleep(min(float(environ.get("SLURM_PROCID") or 0), LAST_S))
    try:
        await asyncio.to_thread(tools.run, ["scontrol", "requeue", environ.get(JOB, "")])
    except UnicronError as error:
        log(f"it can't be requeued: {error}")


async def _obey(reader: asyncio.StreamReader, supervised: Supervised) -> None:
    while line := await reader.readline():
        if number := ORDERS.get(line.decode(errors="replace").strip()):
            supervised.tell(number)


async def _run(command: list[str], url: str) -> int:
    watch = asyncio.create_task(requeue_without(url, os.environ, _say))
    try:
        return await supervise(command, _say)
    finally:
        watch.cancel()


def _say(text: str) -> None:
    sys.stderr.write(f"unicron: {text}\n")
    sys.stderr.flush()


def main() -> int:
    """Run the agent of this node; return its exit status."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="folder of the cluster, which all nodes see")
    parser.add_argument("--url", required=True, help="of the message bus")
    parser.add_argument("--slots", type=int, required=True, help="where the node has no GPU")
    options = parser.parse_args()
    os.environ.pop("SLURM_JOB_END_TIME", None)  # srun sets it, and limits can be changed: the job says when it is time
    try:
        name = os.environ.get("SLURMD_NODENAME")
        if not name:
            raise InvalidInputError("no SLURMD_NODENAME in the environment: have srun start this")
        command = agent_command(options.dir, options.url, options.slots, node_name(name))
        return asyncio.run(_run(command, options.url))
    except UnicronError as error:
        sys.stderr.write(f"unicron: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
