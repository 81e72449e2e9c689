"""Each fault on a real cluster: it is detected as what it is, and the task goes on."""

import asyncio
import itertools

import pytest
import pytest_asyncio
from helpers.local_cluster import local_cluster
from helpers.training import TRAIN, difference, plain_run, running_cluster, shared, task, write_script
from unicron_agent.hardware.network import memory_dir
from unicron_chaos.injection import inject
from unicron_chaos.script import RankTarget
from unicron_deploy.nats_server import PING_S

from unicron.contracts.events import (
    FailureDetected,
    NodeJoined,
    Regrouped,
    StandbyDied,
    StandbyRevived,
    StateSecured,
    StateUnprotected,
    WorkerExited,
    WorkerReady,
)
from unicron.contracts.failures import Severity
from unicron.contracts.hardware import FaultLogged
from unicron.contracts.slowdowns import SlowdownDetected, SlowdownEnded
from unicron.contracts.stragglers import RecordingSwitched
from unicron.contracts.tasks import NodeState, TaskState
from unicron.contracts.timings import DEFAULT_SHARE
from unicron.errors import InvalidInputError
from unicron.snapshots.memory import FILLER

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

WORKERS = 3
LONG = 100_000
SLOWLY = TRAIN.replace("            session.backward(", "            time.sleep(0.01)\n            session.backward(")

scene = shared(local_cluster, nodes=WORKERS, kernel_logs=True)

remote = shared(running_cluster, nodes=WORKERS, ping_s=PING_S)
"""A cluster of processes: an agent that stops must not be this one, and only there slowness is looked for."""


names = (f"t{number}" for number in itertools.count())


async def whole(scene, name, above=-1):
    """Wait until all workers compute in an epoch above that, and an iteration of theirs is done; return the epoch."""
    [first, *_] = await scene.until(
        lambda: [m for m in scene.of(Regrouped, task=name) if m.world_size == WORKERS and m.epoch > above]
    )
    await scene.until(lambda: [m for m in scene.iterations if m.task == name and m.epoch >= first.epoch])
    await scene.until_state(name, TaskState.RUNNING)
    return (await scene.view(name)).epoch


@pytest_asyncio.fixture(loop_scope="module")
async def name(scene, held, tmp_path):
    """A task of all nodes, whose workers are held."""
    name = next(names)
    held.close(1)
    await scene.client.submit(task(write_script(tmp_path), name, iterations=LONG, env=held.env))
    await held.held(WORKERS)
    yield name
    await scene.client.remove(name)


async def struck(scene, held, name, node, fault, value=""):
    """Inject a fault into the worker on a node; return the failure. All are held again when it is replaced."""
    view = await scene.view(name)
    epoch, rank = view.epoch, [member.node for member in view.members].index(node)
    before = len(scene.of(FailureDetected, worker=view.members[rank].worker))  # it may have seen another end first
    made = await inject(scene.client, fault, RankTarget(task=name, rank=rank), value=value)
    held.open()
    failure, *_ = await scene.until(lambda: scene.of(FailureDetected, worker=made.worker)[before:])
    await whole(scene, name, epoch)
    held.close_next()
    await held.held(WORKERS)
    return failure


ENDS = {
    ("exit-worker", "3"): "exited_abnormally",
    ("oom-worker", ""): "out_of_memory",
    ("xid", "13"): "cuda_error",
    ("ecc", "94"): "cuda_error",
    ("raise", "cuda-illegal-access"): "illegal_memory_access",
    ("raise", "cuda-oom"): "other_software_error",
    ("raise", "nccl-timeout"): "nccl_timeout",  # it would be attempted again in place, had it still a process
    ("raise", "connection-reset"): "connection_reset",
}


@pytest.mark.parametrize("ends", [list(ENDS)[:4], list(ENDS)[4:]], ids=["outside", "raised"])
async def test_what_ends_a_worker_is_told_apart_and_it_is_replaced(scene, held, name, ends):
    found, reasons = {}, {}
    for fault, value in ends:
        node = f"node-{1 + len(found) % WORKERS}"  # where one task is restarted too often, it is given up
        failure = await struck(scene, held, name, node, fault, value)
        found[fault, value], reasons[fault] = (failure.status, failure.severity), failure.reason
    assert found == {each: (ENDS[each], Severity.SEV2) for each in ends}, reasons
    assert "exited with code 3" in reasons.get("exit-worker", "exited with code 3")
    assert "Xid (PCI:" in reasons.get("xid", "Xid (PCI:")


async def test_a_reset_connection_is_reattempted_in_place_and_makes_no_difference_to_the_parameters(
    scene, held, tmp_path
):
    script, name, out = write_script(tmp_path), next(names), tmp_path / "healed.pt"
    held.close(5)
    await scene.client.submit(task(script, name, iterations=10, env={"OUT": str(out), **held.env}))
    await held.held(WORKERS)
    before = await scene.view(name)
    made = await inject(scene.client, "reset-connection", RankTarget(task=name, rank=1))
    held.open()
    [failure] = await scene.until(lambda: scene.of(FailureDetected, task=name))
    assert (failure.status, failure.severity) == ("connection_reset", Severity.SEV3)
    await scene.ends(name)
    again = [m.worker for m in scene.of(Regrouped, task=name) if m.epoch > before.epoch]
    assert made.worker in again
    assert set(again) == {member.worker for member in before.members}, "nobody was replaced"
    undisturbed = await asyncio.to_thread(plain_run, script, tmp_path / "plain.pt", ITERATIONS="10")
    assert difference(await scene.saved(out), undisturbed) <= 1e-5


async def test_without_room_for_copies_a_task_is_told_to_be_unprotected_until_there_is_again(scene, held, tmp_path):
    name = next(names)
    held.close(1)
    await scene.client.submit(task(write_script(tmp_path), name, iterations=LONG, max_workers=1, env=held.env))
    [secured, *_] = await scene.until(lambda: [m for m in scene.of(StateSecured, task=name) if m.nodes])
    node = secured.nodes[-1]
    await inject(scene.client, "full-disk", node, value="600")
    held.open()
    [unprotected, *_] = await scene.until(lambda: scene.of(StateUnprotected, task=name))
    assert "more than the limit" in unprotected.reason
    (memory_dir((scene.cluster.root / "nodes" / node).resolve()) / FILLER).unlink()
    again = lambda: [m for m in scene.of(StateSecured, task=name, worker=unprotected.worker) if m.at > unprotected.at]  # noqa: E731
    await scene.until(again)
    await scene.client.remove(name)


async def test_a_worker_that_is_due_starts_from_the_next_standby(remote, tmp_path):
    name = next(names)
    await remote.client.submit(task(write_script(tmp_path, SLOWLY), name, iterations=LONG))
    epoch = await whole(remote, name)
    [victim, *_] = (await remote.view(name)).members
    await inject(remote.client, "kill-standby", victim.node)
    await inject(remote.client, "kill-worker", RankTarget(task=name, rank=0))
    await whole(remote, name, epoch)
    [died], [revived] = remote.of(StandbyDied), remote.of(StandbyRevived)
    assert (died.node, died.how, died.deaths) == (victim.node, "was ended by SIGKILL", 1)
    assert max(ready.at for ready in remote.of(WorkerReady, task=name)) > revived.at, "from the next one"
    assert [failure.worker for failure in remote.of(FailureDetected, task=name)] == [victim.worker]
    await remote.client.remove(name)


@pytest.mark.exhaustive("how slow a process is can be measured on a quiet machine only; the rules have unit tests")
async def test_a_slow_worker_is_named_and_recorded_closely_until_it_is_over(remote, tmp_path):
    name = next(names)
    await remote.client.submit(task(write_script(tmp_path, SLOWLY), name, iterations=LONG))
    await remote.reached(name, 40)
    while (await remote.view(name)).slow:  # by itself, on a busy machine
        await asyncio.sleep(0.02)
    made = await inject(remote.client, "slow-worker", RankTarget(task=name, rank=1), value="12")
    after = lambda kind: [m for m in remote.of(kind, task=name) if m.at > made.at]  # noqa: E731
    [told, *_] = await remote.until(lambda: after(SlowdownDetected))
    await remote.until(lambda: [m for m in after(RecordingSwitched) if m.share == 1.0])
    await inject(remote.client, "slow-worker", RankTarget(task=name, rank=1), value="1")
    await remote.until(lambda: after(SlowdownEnded))
    await remote.until(lambda: [m for m in after(RecordingSwitched) if m.share == DEFAULT_SHARE])
    assert (told.workers[0].worker, told.workers[0].rank) == (made.worker, 1)
    assert told.workers[0].factor > 2
    await remote.client.remove(name)


async def test_a_node_that_is_silent_is_given_up_and_comes_back(remote, tmp_path):
    name = next(names)
    await remote.client.submit(task(write_script(tmp_path, SLOWLY), name, iterations=LONG))
    epoch = await whole(remote, name)
    for fault, seconds, node in (("cut-node", "2.5", "node-1"), ("silence-node", "5", "node-2")):
        await inject(remote.client, fault, node, value=seconds)
        [failure] = await remote.until(lambda node=node: remote.of(FailureDetected, node=node, task=""))
        assert (failure.status, failure.severity) == ("lost_connection", Severity.SEV1)
        await remote.until(lambda node=node: remote.of(NodeJoined, node=node)[1:])
        epoch = await whole(remote, name, epoch)
    assert {view.state for view in (await remote.client.status()).nodes} == {NodeState.UP}


async def test_an_agent_refuses_what_it_can_not_do(scene, name):
    inject = scene.client.inject
    member = (await scene.view(name)).members[0]
    with pytest.raises(InvalidInputError, match="silence-node hits a whole node"):
        await inject(member.node, "silence-node", member.worker)
    with pytest.raises(InvalidInputError, match=f"worker 'none-7' does not run on {member.node}"):
        await inject(member.node, "kill-worker", "none-7")
    with pytest.raises(InvalidInputError, match=f"worker '' does not run on {member.node}"):
        await inject(member.node, "kill-worker")
    with pytest.raises(InvalidInputError, match="restart-node is for one that was killed"):
        await inject(member.node, "restart-node")


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
