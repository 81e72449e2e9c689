"""A cluster in the test's own loop: services and nodes on the bus in memory, and only workers are processes.

It starts in a tenth of a second. No lease and no ping can starve: on a busy machine the loop stalls as a whole. Workers
are forked from a standby that all clusters of a pytest worker share.
"""

import asyncio
import contextlib
import secrets

from unicron_agent.hardware.slots import find_slots
from unicron_agent.node import NodeShell
from unicron_agent.settings import AgentSettings
from unicron_detector.main import DetectorSettings
from unicron_detector.main import wiring as detector
from unicron_planner.lookup import warm_up
from unicron_planner.main import PlannerSettings
from unicron_planner.main import wiring as planner
from unicron_registry.main import RegistrySettings
from unicron_registry.main import wiring as registry
from unicron_simulator.storms.bus import MemoryWorld
from unicron_straggler.main import StragglerSettings
from unicron_straggler.main import wiring as straggler
from unicron_transition.main import TransitionSettings
from unicron_transition.main import wiring as transition

from helpers import standby
from helpers.training import HELD, RunningCluster, environment
from unicron.client import Client
from unicron.clock import SystemClock
from unicron.contracts.tasks import NodeState
from unicron.errors import UnicronError
from unicron.fabric_proofs import boot_id
from unicron.service.service import Service

LEASE_TTL_S = 60.0
"""Nobody else wants it."""

DEFAULTS = {"UNICRON_HEARTBEAT_TIMEOUT_S": "60", "UNICRON_GRACE_S": "30", **HELD, "UNICRON_USE_MEASURED": "false"}
"""Defaults: long limits, since processes may wait for a core, and workers share the cores there are."""

SERVICES = [
    (registry, RegistrySettings),
    (detector, DetectorSettings),
    (planner, PlannerSettings),
    (transition, TransitionSettings),
    (straggler, StragglerSettings),
]


class SharedStandby:
    """A node's share of the standby that all nodes of this process have."""

    async def start(self, report):
        await asyncio.to_thread(standby.ready)

    async def fork(self, request):
        return await asyncio.to_thread(standby.fork, request)

    def kill_orphans(self, workers):
        """Other children of this process are its own business."""

    def kill(self):
        raise AssertionError("others need it: strike a real cluster with that")

    async def stop(self):
        """Others may need it."""


class LocalCluster:
    """Services and nodes, each a task of the running loop.

    Attributes:
        root: where the nodes keep their files.
        services: by the name of their process.
    """

    def __init__(self, root, nodes, slots, kernel_logs):
        self.root, self._slots, self._kernel_logs = root, slots, kernel_logs
        self.world = MemoryWorld(SystemClock(), LEASE_TTL_S)
        self._names = [f"node-{number}" for number in range(1, nodes + 1)]
        self._leave = {name: asyncio.Event() for name in self._names}
        self.services, self._services, self._nodes = {}, [], {}

    async def start(self):
        """Start everything; return a client when all nodes are up."""
        warm_up()
        self.root.mkdir(parents=True, exist_ok=True)
        with environment(DEFAULTS):
            for wiring, settings in SERVICES:
                service = Service(wiring(settings.load([])), self.world.connect(), SystemClock(), LEASE_TTL_S)
                self.services[settings.process] = service
                self._services.append(asyncio.create_task(service.run()))
        for name in self._names:
            self.start_node(name)
        client = Client(self.world.connect(), by="test")
        while not await _all_up(client, len(self._names)):
            for task in (*self._services, *self._nodes.values()):
                if task.done():
                    task.result()
            await asyncio.sleep(0.01)
        return client

    def _node(self, name):
        given = {"node": name, "slots": str(self._slots), "run-dir": str(self.root / "nodes" / name), "chaos": "true"}
        if self._kernel_logs:
            given["kernel-log"] = str(self.kernel_log(name))
            self.kernel_log(name).touch()
        flags = [f"--{flag}={value}" for flag, value in {**given, "host": "127.0.0.1"}.items()]
        settings = AgentSettings.load(flags)
        proof = boot_id(secrets.token_hex())
        leaving = self._leave[name].wait
        bus, cut = self.world.connect(), _cut
        return NodeShell(settings, bus, SystemClock(), find_slots(self._slots), proof, SharedStandby(), leaving, cut)

    def kernel_log(self, name):
        """Return the file that stands for the kernel's log of a node."""
        return self.root / f"{name}.kernel.log"

    def start_node(self, name):
        """Start a node, or start it again when it has gone."""
        self._leave[name].clear()
        with environment(DEFAULTS):
            self._nodes[name] = asyncio.create_task(self._node(name).run())

    def leave(self, name):
        """Order a node to leave."""
        self._leave[name].set()

    async def gone(self, name):
        """Wait until a node that was ordered to leave has ended."""
        await self._nodes[name]

    async def stop(self):
        for tasks in (self._nodes.values(), self._services):
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _cut(_):
    raise AssertionError("the bus in memory is never out of reach: strike a real cluster with that")


async def _all_up(client, count):
    with contextlib.suppress(UnicronError):
        return [each.state for each in (await client.status()).nodes] == [NodeState.UP] * count
    return False


@contextlib.asynccontextmanager
async def local_cluster(root, nodes=3, slots=1, *, kernel_logs=False):
    """Have a cluster in this loop, and a client that has heard of all that happens there."""
    cluster = LocalCluster(root / "cluster", nodes, slots, kernel_logs)
    try:
        client = await cluster.start()
        scene = RunningCluster(cluster, client)
        async with scene.listening():
            yield scene
    finally:
        await cluster.stop()
