"""A real cluster in which machines and workers tell what is wrong with them."""

import pytest
import pytest_asyncio
from helpers.training import TRAIN, running_cluster, task, write_script
from unicron_deploy.embedded import Cluster

from unicron.contracts.events import FailureDetected, Regrouped, WorkerExited
from unicron.contracts.hardware import FaultLogged

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

WARNING = "n1:17:99 [0] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer with status=12"
WARNS = f"""
        import pathlib
        if iteration == 5 and session.rank == 1 and not pathlib.Path(os.environ["ONCE"]).exists():
            pathlib.Path(os.environ["ONCE"]).touch()
            print("{WARNING}", *["a frame of a stack"] * 50, sep="\\n", flush=True)
            if os.environ["ENDS"] == "exits":
                os._exit(3)
            raise ConnectionResetError("connection reset by peer")
"""
SCRIPT = TRAIN.replace("\n        schedule.step()\n", f"\n        schedule.step()\n{WARNS}")


class LoggedCluster(Cluster):
    """One whose nodes have a kernel's log each."""

    def _environment(self, name):
        return super()._environment(name) | {"UNICRON_KERNEL_LOG": str(self.root.parent / f"{name}.log")}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory):
    async with running_cluster(tmp_path_factory.mktemp("cluster"), kind=LoggedCluster) as scene:
        yield scene


@pytest.mark.parametrize("ends", ["exits", "raises"])
async def test_what_a_worker_wrote_before_its_end_is_told_with_it(scene, tmp_path, ends):
    env = {"ONCE": str(tmp_path / "once"), "PACE": "0.02", "ENDS": ends}
    await scene.client.submit(task(write_script(tmp_path, SCRIPT), ends, iterations=400, env=env))
    [failure] = await scene.until(lambda: scene.of(FailureDetected, task=ends))
    [logged] = scene.of(FaultLogged, printed=True, task=ends)
    assert (logged.worker, logged.text) == (failure.worker, WARNING)
    [exited] = await scene.until(lambda: scene.of(WorkerExited, worker=failure.worker))
    assert WARNING not in exited.stderr, "it is not of the last lines"
    assert f"{failure.node}'s {failure.worker} said: {WARNING}" in failure.reason
    await scene.client.remove(ends)


async def test_a_sick_node_is_given_up_and_its_worker_ended(scene, tmp_path):
    await scene.client.submit(task(write_script(tmp_path), "t", iterations=400, env={"PACE": "0.02"}))
    await scene.reached("t", 5)
    victim = (await scene.view("t")).members[1]
    (scene.cluster.root.parent / f"{victim.node}.log").write_text(
        "NVRM: Xid (PCI:0000:2b:00): 79, fallen off the bus\n"
    )
    [failure] = await scene.until(lambda: scene.of(FailureDetected, node=victim.node, severity=1))
    assert failure.method == "device_health"
    await scene.until(lambda: [m for m in scene.of(Regrouped, task="t") if m.world_size == 2])
    await scene.until(lambda: scene.of(WorkerExited, worker=victim.worker, expected=True))
    await scene.client.remove("t")
