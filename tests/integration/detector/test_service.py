"""The detector as a process of its own, on a real server."""

import asyncio
import signal
import subprocess
import sys
import time

import pytest
from helpers.buses import say
from helpers.waiting import PATIENT_S
from helpers.worlds import LEASE_TTL_S
from msgspec.structs import replace

from unicron import codec, fabric_proofs, subjects
from unicron.aio import retry_until_available
from unicron.contracts.answers import Reply
from unicron.contracts.base import AGENT
from unicron.contracts.commands import Regroup, StartWorker
from unicron.contracts.events import FailureDetected, IterationFinished, NodeAdmitted, TaskSubmitted, WorkerExited
from unicron.contracts.queries import GetLoad
from unicron.contracts.slowdowns import Computed, ComputeTimed, SlowdownDetected
from unicron.contracts.tasks import Member, TaskSpec

pytestmark = pytest.mark.slow


@pytest.fixture
def detector(nats_world):
    """A detector to which a node that says nothing is not silent yet."""
    where = ["--nats-url", nats_world.settings.nats_url, "--lease-ttl-s", str(LEASE_TTL_S)]
    command = [sys.executable, "-m", "unicron_detector", *where, "--heartbeat-timeout-s", str(PATIENT_S)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    yield process
    if process.poll() is None:
        process.kill()
    process.communicate()


class Cluster:
    """Speaks as agents do, and listens to what is said of them."""

    def __init__(self, bus):
        self.bus = bus
        self.count = 0

    async def say(self, fact):
        self.count += 1
        source = fact.node if fact.SENDER == AGENT else fact.SENDER
        fact = replace(fact, id=f"{self.count}", source=source, at=time.time())
        if isinstance(fact, subjects.TELEMETRY):
            await retry_until_available(
                lambda: self.bus.publish_telemetry(subjects.for_message(fact), codec.encode(fact)), "telling"
            )
        else:
            await say(self.bus, fact)

    async def start_worker(self, worker, task):
        spec = TaskSpec(name=task, command=["x"])
        await self.say(TaskSubmitted(task=task, spec=spec))
        await self.say(StartWorker(node="n2", slot=0, worker=worker, task=task, spec=spec))

    async def first(self, kind):
        return codec.decode_message((await anext(self.bus.follow(subjects.events(kind), 0))).data)


@pytest.fixture
async def cluster(nats_world, detector):
    """A cluster of two nodes; the detector has taken both of them in."""
    cluster = Cluster(await nats_world.connect("cluster"))
    for node in ("n1", "n2"):
        await cluster.say(NodeAdmitted(node=node, incarnation=f"{fabric_proofs.boot_id(node)}.1", host="h", slots=[]))
    await cluster.start_worker("other-0", "other")
    await cluster.say(WorkerExited(node="n2", slot=0, task="other", worker="other-0", signal=9))
    await cluster.first(FailureDetected)  # it has read so far
    return cluster


async def test_it_watches_iteration_times_and_ends_cleanly(cluster, detector):
    await cluster.start_worker("gpt-1", "gpt")
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
    slow = await cluster.first(SlowdownDetected)
    reply = codec.decode(await cluster.bus.ask(subjects.rpc("detector"), codec.encode(GetLoad()), PATIENT_S), Reply)
    training.cancel()
    assert (slow.task, slow.computing > 1.3) == ("gpt", True)
    assert reply.load.disbelieved > 10
    detector.send_signal(signal.SIGTERM)
    _, log = await asyncio.to_thread(detector.communicate)
    assert detector.returncode == 0
    assert "Traceback" not in log
    assert "ERROR" not in log
