"""A real cluster in which workers tell what is wrong with them."""

import pytest
from helpers.local_cluster import local_cluster
from helpers.training import TRAIN, shared, task, write_script

from unicron.contracts.events import FailureDetected, WorkerExited
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

scene = shared(local_cluster)


@pytest.mark.parametrize("ends", ["exits", "raises"])
async def test_what_a_worker_wrote_before_its_end_is_told_with_it(scene, tmp_path, ends):
    env = {"ONCE": str(tmp_path / "once"), "ENDS": ends}
    await scene.client.submit(task(write_script(tmp_path, SCRIPT), ends, iterations=400, env=env))
    [failure] = await scene.until(lambda: scene.of(FailureDetected, task=ends))
    [logged] = scene.of(FaultLogged, printed=True, task=ends)
    assert (logged.worker, logged.text) == (failure.worker, WARNING)
    [exited] = await scene.until(lambda: scene.of(WorkerExited, worker=failure.worker))
    assert WARNING not in exited.stderr, "it is not of the last lines"
    assert f"{failure.node}'s {failure.worker} said: {WARNING}" in failure.reason
    await scene.client.remove(ends)
