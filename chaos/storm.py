"""A storm of random faults on a running cluster: the same seed and the same answers of the cluster, the same faults.

    unicron up && unicron submit examples/gpt/task.yaml
    python chaos/storm.py --minutes 10 --seed 1 --dir .unicron

Nodes are only killed where they can be brought back, that is on the embedded cluster (--dir). After the last fault
every killed node is brought back. It ends with 0 if these nodes are up again then and no task has failed or waits. A
node that the detector took out of use because too much failed on it is none of its troubles.
"""

import argparse
import asyncio
import random
import sys
import time
from pathlib import Path
from typing import NamedTuple

from unicron.cli.chaos import restarter
from unicron.cli.faults import Rank
from unicron.cli.output import settings, to_json
from unicron.cli.strikes import Restart, Strike, strike
from unicron.client import Client
from unicron.contracts.queries import Status
from unicron.contracts.tasks import NodeState, TaskState
from unicron.errors import UnicronError

WHOLE_S = 120.0
"""How long the cluster may take to be whole again after the last fault."""

WORKER_FAULTS = ("raise", "kill-worker", "stop-worker")


class Choice(NamedTuple):
    """A fault and whom it strikes."""

    fault: str
    target: Rank | str


class Storm:
    """Chooses faults; knows which nodes it took down, and where it raised last."""

    def __init__(self, seed: int, *, nodes: bool) -> None:
        self._random = random.Random(seed)
        self._nodes = nodes
        self._raised: dict[str, int] = {}
        self.down: list[str] = []

    def choose(self, status: Status) -> Choice | None:
        """Return the next fault for a cluster in this state, or None where nothing can be struck now.

        A task gets no second exception in an iteration: that would rightly be taken for an error of its own.
        """
        found = [Choice("restart-node", node) for node in self.down]
        up = sorted(view.node for view in status.nodes if view.state == NodeState.UP)
        if self._nodes and not self.down and len(up) > 1:
            found.append(Choice("kill-node", self._random.choice(up)))
        for view in status.tasks:
            if view.state != TaskState.RUNNING or len(view.members) < 2:
                continue
            target = Rank(task=view.spec.name, rank=self._random.randrange(len(view.members)))
            fresh = view.iteration > self._raised.get(target.task, -2) + 1
            found += [Choice(fault, target) for fault in WORKER_FAULTS if fault != "raise" or fresh]
        return self._random.choice(found) if found else None

    def wait_s(self, mean_s: float) -> float:
        """Return how long it stays calm: faults come at a constant rate."""
        return self._random.expovariate(1 / mean_s)

    def struck(self, choice: Choice, status: Status) -> None:
        """Remember a fault that was carried out."""
        if choice.fault == "kill-node":
            self.down.append(str(choice.target))
        elif choice.fault == "restart-node":
            self.down.remove(str(choice.target))
        elif choice.fault == "raise" and isinstance(choice.target, Rank):
            name = choice.target.task
            self._raised[name] = next(view.iteration for view in status.tasks if view.spec.name == name)


async def rage(client: Client, storm: Storm, minutes: float, mean_s: float, restart: Restart | None) -> list[Strike]:
    """Strike for `minutes`, then bring back what was killed; return what was done."""
    done: list[Strike] = []
    end = time.monotonic() + minutes * 60
    while (calm := storm.wait_s(mean_s)) < end - time.monotonic():
        await asyncio.sleep(calm)
        try:
            status = await client.status()
            choice = storm.choose(status)
            if choice is None:
                continue
            done.append(await strike(client, choice.fault, choice.target, restart))
        except UnicronError as error:  # the target went away in between, or a service is just coming back
            print(f"no strike: {error}", file=sys.stderr)
            continue
        storm.struck(choice, status)
        print(f"{choice.fault} {choice.target}: {done[-1].text}", flush=True)
    for node in list(storm.down):
        done.append(await strike(client, "restart-node", node, restart))
        storm.down.remove(node)
    return done


async def troubles(client: Client, killed: set[str]) -> list[str]:
    """Wait until the nodes in `killed` are back and every task runs or is through; return what is still wrong then."""
    deadline = time.monotonic() + WHOLE_S
    while True:
        try:
            status = await client.status()
            down = [view for view in status.nodes if view.node in killed and view.state != NodeState.UP]
            found = [f"{view.node} is {view.state}" for view in down]
            found += [
                f"{view.spec.name} is {view.state}: {view.reason}"
                for view in status.tasks
                if view.state not in {TaskState.RUNNING, TaskState.FINISHED}
            ]
        except UnicronError as error:
            found = [str(error)]
        if not found or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.5)


async def main() -> int:
    """Run the storm that the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=10.0, metavar="SECONDS", help="mean time between faults")
    parser.add_argument("--nats", metavar="URL", help="where the message bus is")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="folder of the embedded cluster, to strike nodes too")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    restart = restarter(options.dir) if options.dir else None
    storm = Storm(options.seed, nodes=restart is not None)
    async with await Client.connect(settings(options.nats), "unicron-storm") as client:
        done = await rage(client, storm, options.minutes, options.every, restart)
        wrong = await troubles(client, {made.node for made in done if made.fault == "kill-node"})
    for line in wrong:
        print(f"not whole: {line}", file=sys.stderr)
    if options.json:
        print(to_json({"ok": not wrong, "seed": options.seed, "strikes": done, "troubles": wrong}))
    else:
        print(f"{len(done)} faults; " + ("the cluster is whole" if not wrong else "the cluster is not whole"))
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(main()))
    except UnicronError as problem:
        sys.exit(f"storm: {problem}")
