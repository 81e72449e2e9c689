"""The detector as a process of its own, on a real server whose clients are really killed."""

import asyncio
import contextlib
import signal
import subprocess
import sys
import time

import pytest
from helpers.waiting import PATIENT_S
from helpers.worlds import LEASE_TTL_S
from msgspec.structs import replace

from unicron import codec, proofs, subjects
from unicron.aio import insist
from unicron.contracts.commands import Regroup, StartWorker
from unicron.contracts.events import (
    CollectiveFailed,
    FailureDetected,
    IterationFinished,
    NodeAdmitted,
    NodeHeartbeat,
    Regrouped,
    TaskSubmitted,
    WorkerExited,
)
from unicron.contracts.queries import GetLoad, Reply
from unicron.contracts.slowdowns import Computed, ComputeTimed, SlowdownDetected
from unicron.contracts.tasks import Member, TaskSpec
from unicron.said import OF_SERVICES

pytestmark = pytest.mark.slow

CLIENT = """
import asyncio, sys
import nats

async def main():
    await nats.connect(sys.argv[1], name=sys.argv[2])
    print("connected", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def start(*command):
    return subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@contextlib.asynccontextmanager
async def client(url, name):
    """A connection in a process of its own."""
    process = start("-c", CLIENT, url, name)
    try:
        assert (await asyncio.to_thread(process.stdout.readline)).strip() == "connected"
        yield process
    finally:
        process.kill()
        process.communicate()


def start_detector(world, **limits):
    where = ["--nats-url", world.settings.nats_url, "--lease-ttl-s", str(LEASE_TTL_S)]
    words = [word for name, seconds in limits.items() for word in (f"--{name.replace('_', '-')}", str(seconds))]
    return start("-m", "unicron_detector", *where, *words)


@pytest.fixture
def limits():
    """Nodes beat from the process of the test: that it waits for a turn on a core is no silence."""
    return {"heartbeat_timeout_s": 30.0}


@pytest.fixture
def detector(nats_world, limits):
    process = start_detector(nats_world, **limits)
    yield process
    if process.poll() is None:
        process.kill()
    process.communicate()


class Cluster:
    """Speaks as agents do, and listens to what is said of them."""

    def __init__(self, bus):
        self.bus = bus
        self.count = 0
        self.beating = set()
        self.tasks = set()

    async def say(self, fact):
        self.count += 1
        fact = replace(fact, id=f"{self.count}", source=OF_SERVICES.get(type(fact)) or fact.node, at=time.time())
        subject, data = subjects.of(fact), codec.encode(fact)
        if isinstance(fact, subjects.TELEMETRY):
            await insist(lambda: self.bus.tell(subject, data), "telling")
        else:
            await insist(lambda: self.bus.append(subject, data, fact.id), "saying a fact")

    async def join(self, node):
        await self.say(NodeAdmitted(node=node, incarnation=f"{proofs.boot(node)}.1", host="h", slots=[]))
        self.beating.add(node)

    async def beat(self):
        while True:
            for node in list(self.beating):
                await self.say(NodeHeartbeat(node=node, incarnation=f"{proofs.boot(node)}.1"))
            await asyncio.sleep(0.05)

    async def start_worker(self, worker, task, node, slot=0):
        spec = TaskSpec(name=task, command=["x"])
        if task not in self.tasks:
            await self.say(TaskSubmitted(task=task, spec=spec))
            self.tasks.add(task)
        await self.say(StartWorker(node=node, slot=slot, worker=worker, task=task, spec=spec))

    async def kill_worker(self, worker, task="other"):
        await self.start_worker(worker, task, "n2")
        await self.say(WorkerExited(node="n2", slot=0, task=task, worker=worker, signal=9))

    async def failures(self, last):
        """Return the failures in the journal up to the one of the worker or node `last`, which may be yet to come."""
        found = []
        entries = self.bus.follow(subjects.events(FailureDetected), 0)
        while not found or last not in {found[-1].worker, found[-1].node if found[-1].severity == 1 else ""}:
            found.append(codec.decode_message((await anext(entries)).data))
        return found


@contextlib.asynccontextmanager
async def two_nodes(world):
    """A cluster of two nodes; the detector has taken both of them in."""
    cluster = Cluster(await world.connect("cluster"))
    await cluster.join("n1")
    await cluster.join("n2")
    beating = asyncio.create_task(cluster.beat())
    await cluster.kill_worker("other-0")
    await cluster.failures("other-0")  # it has read so far
    try:
        yield cluster
    finally:
        beating.cancel()
        await asyncio.wait({beating})


@pytest.fixture
async def cluster(nats_world, detector):
    async with two_nodes(nats_world) as cluster:
        yield cluster


async def test_a_killed_agent_is_lost_by_the_servers_advisory(nats_world, cluster):
    async with client(nats_world.settings.nats_url, "agent.n1.n1") as agent:
        cluster.beating.discard("n1")
        agent.send_signal(signal.SIGKILL)
        lost = (await cluster.failures("n1"))[-1]
    assert (lost.severity, lost.method, lost.status, lost.node) == (1, "node_health", "lost_connection", "n1")
    assert lost.reason == "its connection ended (Client Closed) and was not back within 1 s"


@pytest.mark.parametrize("limits", [{"heartbeat_timeout_s": 30.0, "grace_s": 25.0, "collective_hold_s": 25.0}])
async def test_a_broken_collective_makes_it_lost_at_once(nats_world, cluster, limits):
    place = {"slot": 0, "task": "gpt", "epoch": 0}
    for worker, node in (("gpt-1", "n1"), ("gpt-2", "n2")):
        await cluster.start_worker(worker, place["task"], node, place["slot"])
        await cluster.say(Regroup(node=node, task=place["task"], epoch=place["epoch"], rendezvous="", members=[]))
        await cluster.say(Regrouped(node=node, worker=worker, rank=0, world_size=2, iteration=0, **place))
    async with client(nats_world.settings.nats_url, "agent.n1.n1") as agent:
        cluster.beating.discard("n1")
        agent.send_signal(signal.SIGKILL)
        await cluster.say(CollectiveFailed(node="n2", worker="gpt-2", iteration=0, error="closed by peer", **place))
        lost = (await cluster.failures("n1"))[-1]
    assert "a collective of gpt with it broke" in lost.reason


async def test_what_happened_while_it_was_away_is_reported_once(nats_world, cluster, detector, limits):
    detector.kill()
    detector.wait()
    await cluster.bus.bucket("lease").delete("detector")  # as if it had run out
    await cluster.kill_worker("other-1")
    again = start_detector(nats_world, **limits)
    try:
        await cluster.failures("other-1")
        await cluster.kill_worker("other-2")
        assert [each.worker for each in await cluster.failures("other-2")] == ["other-0", "other-1", "other-2"]
    finally:
        again.kill()
        again.communicate()


async def test_it_watches_iteration_times_and_ends_cleanly(cluster, detector):
    await cluster.start_worker("gpt-1", "gpt", "n2")
    member = Member(node="n2", slot=0, worker="gpt-1")
    await cluster.say(
        Regroup(node="n2", task="gpt", epoch=0, rendezvous="h:1", members=[member], ranks=[0], world_size=1)
    )

    async def train():
        for iteration in range(100_000):
            seconds = 1.0 if iteration < 60 else 1.5 if iteration < 120 else 2.5
            told = {"task": "gpt", "epoch": 0, "iteration": iteration}
            for node in ("n2", "n1"):  # the second speaks of a worker that is not its own, and says that it is fast
                took = seconds / 4 if node == "n2" else 0.001
                workers = [Computed(worker="gpt-1", rank=0, place=0, seconds=took)]
                await cluster.say(ComputeTimed(node=node, **told, workers=workers))
            finished = {**told, "worker": "gpt-1", "slot": 0, "world_size": 1, "seconds": seconds, "loss": 1.0}
            await cluster.say(IterationFinished(node="n2", **finished))
            await asyncio.sleep(0.005)

    training = asyncio.create_task(train())
    slow = codec.decode_message((await anext(cluster.bus.follow(subjects.events(SlowdownDetected), 0))).data)
    reply = codec.decode(await cluster.bus.ask(subjects.rpc("detector"), codec.encode(GetLoad()), PATIENT_S), Reply)
    training.cancel()
    assert (slow.task, slow.computing > 1.3) == ("gpt", True)
    assert reply.load.disbelieved > 10
    detector.send_signal(signal.SIGTERM)
    _, log = await asyncio.to_thread(detector.communicate)
    assert detector.returncode == 0
    assert "Traceback" not in log
    assert "ERROR" not in log
