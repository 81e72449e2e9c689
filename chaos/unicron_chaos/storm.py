"""Random faults on a running cluster. A seed gives the same faults wherever the cluster's answers are the same."""

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from unicron.client import Client
from unicron.contracts.answers import NodeView, Status
from unicron.contracts.tasks import NodeState, TaskState
from unicron.errors import UnicronError
from unicron_chaos.injection import Injection, Restart, inject
from unicron_chaos.script import RankTarget

WHOLE_S = 120.0
"""How long the cluster may take to be whole again after the last fault."""


class Choice(NamedTuple):
    """A fault and its target."""

    fault: str
    target: RankTarget | str


WORKER_FAULTS = ("raise", "kill-worker", "stop-worker", "exit-worker", "oom-worker", "reset-connection")
"""Faults that a task heals from by itself, each at its default, and that need nothing of a node."""

_OWN = {"raise", "exit-worker"}
"""Faults that look like a program's own error."""

ATTEMPTS, WINDOW_S = 3, 600.0
"""So many failures of a task on one node in that time are met by restarts, and so many of its connections by reattempts
(the detector's defaults); one more costs the node, or the task."""

AWAY_FAULTS = ("silence-node", "cut-node")
"""Faults from which a node comes back by itself."""


class Storm:
    """Chooses faults; knows which nodes it took down or away, and what each task and node has gone through."""

    def __init__(self, seed: int, *, nodes: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._suffered: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        self._random = random.Random(seed)
        self._nodes = nodes
        self._raised: dict[str, int] = {}
        self._away: NodeView | None = None
        self.down: list[str] = []

    def choose(self, status: Status) -> Choice | None:
        """Return the next fault for a cluster in this state, or None where nothing can be struck now.

        A task gets no second exception, or exit, in an iteration: that would rightly be taken for an error of its own.
        And no more than it is to be healed of on that node.
        """
        found = [Choice("restart-node", node) for node in self.down]
        up = sorted(view.node for view in status.nodes if view.state == NodeState.UP)
        if self._nodes and not self.down and not self._someone_is_away(status) and len(up) > 1:
            node = self._random.choice(up)
            found += [Choice(fault, node) for fault in ("kill-node", *AWAY_FAULTS)]
        for view in status.tasks:
            if view.state != TaskState.RUNNING or len(view.members) < 2:
                continue
            target = RankTarget(task=view.spec.name, rank=self._random.randrange(len(view.members)))
            fresh = view.iteration > self._raised.get(target.task, -2) + 1
            found += [
                Choice(fault, target)
                for fault in WORKER_FAULTS
                if (fault not in _OWN or fresh) and self._bears(_where(fault, target, status))
            ]
        return self._random.choice(found) if found else None

    def _bears(self, where: tuple[str, str]) -> bool:
        since = self._clock() - WINDOW_S
        self._suffered[where] = [at for at in self._suffered[where] if at > since]
        return len(self._suffered[where]) < ATTEMPTS

    def _someone_is_away(self, status: Status) -> bool:
        """Return whether a node that was struck has not been given up and come back since."""
        before, now = self._away, {view.node: view for view in status.nodes}
        if before is None or before.node not in now:
            return False
        since = now[before.node]
        return since.state != NodeState.UP or since.since <= before.since

    def wait_s(self, mean_s: float) -> float:
        """Return how long it stays calm: faults come at a constant rate."""
        return self._random.expovariate(1 / mean_s)

    def record_hit(self, choice: Choice, status: Status) -> None:
        """Remember a fault that was carried out."""
        if isinstance(choice.target, RankTarget):
            self._suffered[_where(choice.fault, choice.target, status)].append(self._clock())
        if choice.fault in AWAY_FAULTS:
            self._away = next(view for view in status.nodes if view.node == choice.target)
        elif choice.fault == "kill-node":
            self.down.append(str(choice.target))
        elif choice.fault == "restart-node":
            self.down.remove(str(choice.target))
        elif choice.fault in _OWN and isinstance(choice.target, RankTarget):
            name = choice.target.task
            self._raised[name] = next(view.iteration for view in status.tasks if view.spec.name == name)


def _where(fault: str, target: RankTarget, status: Status) -> tuple[str, str]:
    """Return the task and the node whose failures a fault counts among; no node where only the task's are counted."""
    members = next(view.members for view in status.tasks if view.spec.name == target.task)
    return target.task, "" if fault == "reset-connection" else members[target.rank].node


async def rage(
    client: Client, storm: Storm, duration_s: float, mean_s: float, restart: Restart | None
) -> AsyncIterator[Injection | UnicronError]:
    """Inject faults for `duration_s`, then bring back what was killed; yield what was done.

    Where a fault can't be carried out, yield why: its target went away, or a service is just coming back.
    """
    clock = asyncio.get_running_loop()
    end = clock.time() + duration_s
    while (calm := storm.wait_s(mean_s)) < end - clock.time():
        await asyncio.sleep(calm)
        try:
            status = await client.status()
            if (choice := storm.choose(status)) is None:
                continue
            made = await inject(client, choice.fault, choice.target, restart)
        except UnicronError as error:
            yield error
            continue
        storm.record_hit(choice, status)
        yield made
    for node in list(storm.down):
        yield await inject(client, "restart-node", node, restart)
        storm.down.remove(node)


async def troubles(client: Client, killed: set[str]) -> list[str]:
    """Wait until the nodes in `killed` are back and every task runs or is through; return what is still wrong then."""
    clock = asyncio.get_running_loop()
    deadline = clock.time() + WHOLE_S
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
        if not found or clock.time() > deadline:
            return found
        await asyncio.sleep(0.5)
