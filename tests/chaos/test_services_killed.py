"""The main job goes on though a control service, or the bus itself, is killed when it is needed most."""

import asyncio
import shutil
import sysconfig
import time
from pathlib import Path

import msgspec
import pytest
from unicron_chaos.script import Fault, Rank
from unicron_cli.demo import Demo
from unicron_deploy.embedded import NATS

from unicron.contracts.events import FailureDetected, IterationFinished
from unicron.services import SERVICES

pytestmark = pytest.mark.slow

FAULT_AT = 8
SCRIPT = [
    Fault(task="gpt-b", iteration=FAULT_AT, fault="kill-worker", target=Rank(task="gpt-b", rank=1)),
    Fault(task="gpt-a", iteration=FAULT_AT + 8, fault="raise", target=Rank(task="gpt-a", rank=0)),
]


class Compared(Demo):
    """A demo that is compared with the same runs without failures whoever is killed: they are made once."""

    async def _run_undisturbed(self):
        if not any(self.undisturbed.iterdir()):
            await super()._run_undisturbed()
            for path in self._root.glob("*.undisturbed.pt"):
                shutil.copy(path, self.undisturbed)
        for path in self.undisturbed.iterdir():
            shutil.copy(path, self._root)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return tmp_path_factory.mktemp("undisturbed")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", [*(name for name in SERVICES if name != "straggler"), NATS])
async def test_the_main_job_ends_well_though_this_is_killed(victim, tmp_path, undisturbed):
    killed_at = []

    async def kill_and_restart(cluster, client):
        """Kill the victim just before the first fault, so that the fault strikes while it is away."""
        async for done in client.telemetry(IterationFinished):
            if done.task == "gpt-b" and done.iteration >= FAULT_AT - 2:
                break
        before = cluster.processes[victim].pid
        cluster.kill(victim)
        killed_at.append(time.time())
        await asyncio.sleep(0.5)
        await asyncio.to_thread(cluster.start_process, victim)
        assert cluster.processes[victim].pid != before

    demo = Compared(tmp_path, Path(sysconfig.get_path("stdlib")), SCRIPT, kill_and_restart, iterations=30)
    demo.undisturbed = undisturbed
    report = await demo.run(time.monotonic())
    assert killed_at
    assert report.ok, msgspec.json.format(msgspec.json.encode(report)).decode()
    assert [fault.iterations_redone for fault in report.faults] == [0, 0]
    failures = [
        message for message in demo.journal if isinstance(message, FailureDetected) and message.at > killed_at[0]
    ]
    assert failures
