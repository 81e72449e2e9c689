"""Programs that know nothing of Unicron: run again after a failure, from checkpoints of their own."""

import asyncio
import pickle
import re

import pytest
import torch
from helpers.gate import gate
from helpers.local_cluster import local_cluster
from helpers.scripts import Run
from helpers.training import plain_run, running_cluster, task, write_script
from msgspec.structs import replace
from unicron_agent.workers import timings
from unicron_detector.main import DetectorSettings, watch_statistics

from unicron.contracts.events import (
    FailureDetected,
    NodeJoined,
    Regrouped,
    TaskStateChanged,
    WorkerExited,
    WorkerRaised,
)
from unicron.contracts.slowdowns import SlowdownDetected
from unicron.contracts.tasks import Healing, TaskState
from unicron.errors import InvalidInputError

pytestmark = pytest.mark.slow

ITERATIONS = 40

PLAIN = f"""
    import os
    import gate
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    folder = os.environ["FOLDER"]
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    own, begin = os.path.join(os.environ["UNICRON_CHECKPOINT_DIR"], "own.pt"), 0
    if os.path.exists(own):
        found = torch.load(own, weights_only=True)
        model.module.load_state_dict(found["model"])
        begin = found["iteration"]
    print("begins", rank, world, begin, os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
    for iteration in range(begin, {ITERATIONS}):
        generator = torch.Generator().manual_seed(iteration)
        x = torch.randn(8, 32, generator=generator)[rank % 4 :: 4]
        restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if os.path.exists(os.path.join(folder, "raise")) and iteration == 22 and rank == 1 and restarts:
            os.remove(os.path.join(folder, "raise"))
            raise ArithmeticError("no more numbers")
        gate.at(iteration, rank=rank)
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            if iteration % 5 == 4:
                state = {{"model": model.module.state_dict(), "iteration": iteration + 1}}
                torch.save(state, own + ".part")
                os.rename(own + ".part", own)
            with open(os.path.join(folder, "done"), "a") as done:
                print(iteration, world, file=done)
    unclosed = open(os.path.join(folder, f"left-{{rank}}"), "w")
    unclosed.write("what a script leaves open is not lost")
    if rank == 0:
        torch.save({{"model": model.module.state_dict()}}, os.environ["OUT"])
    dist.destroy_process_group()
"""


def program(folder, text=PLAIN, **fields):
    """Return a task that runs it, with places for what it writes."""
    own = folder / "checkpoints"
    own.mkdir()
    env = {"FOLDER": str(folder), "OUT": str(folder / "out.pt"), **fields.pop("env", {})}
    fields = {"max_workers": 4, "min_workers": 4, "iterations": 10**9, "checkpoints": str(own), **fields}
    return task(write_script(folder, text), "t", heal=Healing.RESTART, env=env, **fields)


def done(folder):
    """Return the iterations that the first rank has done, each with the number of ranks."""
    path = folder / "done"
    lines = path.read_text().splitlines() if path.exists() else []
    return [tuple(map(int, line.split())) for line in lines]


def begun(folder):
    """Return rank, ranks, first iteration and count of restarts of each beginning, as the logs of workers tell."""
    logs = "".join(path.read_text() for path in folder.glob("cluster/**/logs/t-*.log"))
    return {tuple(map(int, found)) for found in re.findall(r"begins (\d+) (\d+) (\d+) (\d+)", logs)}


async def test_a_rank_is_killed_and_another_raises_and_the_result_is_that_of_an_undisturbed_run(tmp_path, monkeypatch):
    monkeypatch.setenv("UNICRON_COLLECTIVE_HOLD_S", "60")  # its cause may take long to come to light on a busy machine
    alone = tmp_path / "alone"
    alone.mkdir()
    (tmp_path / "raise").touch()
    async with local_cluster(tmp_path, nodes=2, slots=2) as scene, gate() as held:
        run = Run(scene, "t", 4, held)
        held.close(12)
        await scene.client.submit(program(tmp_path, env=held.env))
        await held.held(4)
        victim = (await scene.view("t")).members[2]
        with pytest.raises(InvalidInputError, match="slow-worker needs a script with a Session"):
            await scene.client.inject(victim.node, "slow-worker", victim.worker, "2")
        killed = await run.strike(2)
        held.open()
        await scene.ends("t")

    assert len(run.failures) == 2, run.failures
    raised = run.failures[1]  # whoever lost a peer is none: no echo is healed
    assert (killed.worker, killed.reason.partition(";")[0]) == (victim.worker, f"{victim.worker} was ended by SIGKILL")
    assert raised.reason == "ArithmeticError: no more numbers"
    assert "raise ArithmeticError" in scene.of(WorkerRaised)[0].traceback
    survivors = {fact.worker for fact in scene.of(Regrouped, epoch=0)} - {killed.worker, raised.worker}
    last = scene.of(Regrouped)[-1].epoch
    assert last == 2
    assert survivors <= {fact.worker for fact in scene.of(Regrouped, epoch=last)}
    again = [*range(12), *range(10, 22), *range(20, ITERATIONS)]
    assert [number for number, _ in done(tmp_path)] == again, "all from the last checkpoint on"
    assert {count for *_, count in begun(tmp_path)} == {0, 1, 2}

    assert all((tmp_path / f"left-{rank}").read_text().endswith("not lost") for rank in range(4))

    single = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RESTART_COUNT": "0"}
    more = {"FOLDER": str(alone), "UNICRON_CHECKPOINT_DIR": str(alone)}
    text = PLAIN.replace("[rank % 4 :: 4]", "")
    theirs = await asyncio.to_thread(
        plain_run, write_script(alone, text), alone / "out.pt", **single, **more, MASTER_PORT="0"
    )
    ours = torch.load(tmp_path / "out.pt", weights_only=True)
    for name, value in ours["model"].items():
        assert torch.allclose(value, theirs["model"][name], rtol=1e-5, atol=1e-7)


async def test_an_agent_ends_and_nothing_begins_again_and_a_node_is_lost_and_it_goes_on_with_fewer_ranks(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("UNICRON_GRACE_S", "30")  # a busy machine takes long to start an agent again
    monkeypatch.setenv("UNICRON_HEARTBEAT_TIMEOUT_S", "40")
    async with running_cluster(tmp_path, nodes=2, slots=2) as scene, gate() as held:
        held.close(12)
        await scene.client.submit(program(tmp_path, min_workers=2, unit=2, env=held.env))
        await held.held(4)
        joined = len(scene.of(NodeJoined, node="node-1"))
        await asyncio.to_thread(scene.cluster.kill, "node-1")  # the agent alone: what it has started goes on
        await asyncio.to_thread(scene.cluster.start_process, "node-1")
        [back] = await scene.until(lambda: scene.of(NodeJoined, node="node-1")[joined:])
        assert len(back.workers) == 2
        held.close(13)
        await held.held(4)
        assert {fact.epoch for fact in scene.of(Regrouped)} == {0}
        await asyncio.to_thread(scene.cluster.kill_node, "node-2")
        held.open()
        await scene.ends("t")
    again = [rank for rank, ranks, first, _ in begun(tmp_path) if ranks == 2 and first == 10]
    assert sorted(again) == [0, 1]
    assert done(tmp_path)[-1] == (ITERATIONS - 1, 2)


STUCK = {
    "record_id": 6,
    "process_group": ("0", "default_pg"),
    "profiling_name": "nccl:all_reduce",
    "collective_seq_id": 7,
    "p2p_seq_id": 0,
    "is_p2p": False,
    "state": "started",
    "retired": False,
    "input_sizes": [[1024]],
    "input_dtypes": ["Float"],
    "frames": [{"name": "main", "filename": "/home/me/train.py", "line": 31}],
}


async def test_a_program_that_is_no_python_and_what_torch_wrote_of_one_before_it_ended(tmp_path):
    (tmp_path / "written").write_bytes(pickle.dumps({"version": "2.10", "entries": [STUCK]}, protocol=2))
    async with local_cluster(tmp_path, nodes=2, slots=2) as scene:
        fails = "cp written $TORCH_FR_DUMP_TEMP_FILE$RANK; exit 7"
        left = "! [ -s once-$each ] || kill -0 $(cat once-$each) 2>&-"
        others = f"for each in 0 1 2; do while {left}; do sleep 0.02; done; done"
        once = f"echo $$ > once-$RANK; if [ $RANK = 3 ]; then {others}; {fails}; fi; exit 0"
        words = f"if [ ! -e once-$RANK ]; then {once}; fi; echo $WORLD_SIZE > $RANK"
        await scene.client.submit(replace(program(tmp_path), command=["bash", "-c", words]))
        await scene.ends("t")
    assert [(tmp_path / str(rank)).read_text() for rank in range(4)] == ["4\n"] * 4  # none was done before all were
    [exited] = [fact for fact in scene.of(WorkerExited) if fact.exit_code == 7]
    assert exited.collectives == ["all_reduce #7 of default_pg, 1024 x Float, started, train.py:31"]
    [failure] = scene.of(FailureDetected, worker=exited.worker)
    assert failure.reason == f"{exited.worker} exited with code 7; under way: {exited.collectives[0]}"


@pytest.mark.exhaustive("it waits for the launcher's own grace of 5 s")
async def test_a_program_that_does_not_end_when_it_is_told_to_is_killed(tmp_path):
    """Its first rank would stay for ever, and its second one ends once with an error."""
    first = "if [ ! -e first ]; then touch first; while true; do sleep 0.05; done; fi"
    second = "if [ ! -e second ]; then while [ ! -e first ]; do sleep 0.05; done; touch second; exit 7; fi"
    words = f"trap '' TERM; if [ $RANK = 0 ]; then {first}; else {second}; fi; echo $RANK > $RANK"
    async with local_cluster(tmp_path, nodes=2, slots=1) as scene:
        spec = program(tmp_path, min_workers=2, max_workers=2)
        await scene.client.submit(replace(spec, command=["bash", "-c", words]))
        await scene.ends("t")
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["0\n", "1\n"]
    assert len(scene.of(FailureDetected)) == 1, "it was no failure of its own"


WATCHED = """
    from types import SimpleNamespace
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    import unicron.train
    from unicron.train import watching as module

    now, longest = 0.0, 0.05
    module.time = SimpleNamespace(monotonic=lambda: now)

    class Slow(torch.nn.Linear):
        pace = longest

        def forward(self, x):
            global now
            now += self.pace
            return super().forward(x)

    dist.init_process_group("gloo")
    model = DistributedDataParallel(Slow(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with unicron.train.watch(model) as watching:
        for iteration in range(180):
            if iteration == 115:
                longest *= 1.6
                if dist.get_rank() == 1:
                    model.module.pace = longest
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            now += longest - model.module.pace  # all wait for the slowest
            optimizer.step()
            optimizer.zero_grad()
            watching.tick(loss)
    dist.destroy_process_group()
"""


async def test_who_is_slow_is_named_where_the_loop_is_watched(tmp_path, monkeypatch):
    monkeypatch.setattr(timings, "SHORTEST_S", 0.0)  # all of it is over sooner than that
    async with local_cluster(tmp_path, nodes=2, slots=1) as scene:
        service = scene.cluster.services[DetectorSettings.process]
        statistics = asyncio.create_task(watch_statistics(DetectorSettings(), scene.cluster.world.connect(), service))
        await scene.client.submit(program(tmp_path, WATCHED, min_workers=2, max_workers=2))
        await scene.ends("t")
        [*_, done] = await scene.until(lambda: scene.of(TaskStateChanged, state=TaskState.FINISHED))
        slow = await scene.until(lambda: scene.of(SlowdownDetected))
        statistics.cancel()
    assert {each.rank for fact in slow for each in fact.workers} == {1}
    assert max(fact.iteration for fact in scene.iterations) == 179
    assert not scene.of(FailureDetected)
    assert done.reason == "its program is done"


HANGS = """
    import os, signal, time
    import torch.distributed as dist

    rank, cause = int(os.environ["RANK"]), os.environ["UNICRON_RESTART_CAUSE"]
    print("cause", rank, repr(cause), flush=True)
    dist.init_process_group("gloo")
    number = len(os.listdir(os.environ["FOLDER"] + "/begun"))
    dist.barrier()
    if rank == 0:
        open(os.environ["FOLDER"] + f"/begun/{number}", "w").close()
    if number == 0 and rank == 1:
        signal.pause()
    elif number == 1 and rank == 1:
        dist.all_gather_object([None] * 2, 1)
    elif number == 2:
        for _ in range(45 * rank):  # one rank that does something is enough, for longer than all may be silent
            sum(range(1_000_000))
            time.sleep(0.05)
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.exhaustive("it waits for the launcher's own limits of seconds; the rule is shown in virtual time")
async def test_a_program_of_which_nothing_is_heard_begins_again_and_is_told_why(tmp_path):
    """First one rank sleeps while the other waits, then each waits in another collective, then one computes."""
    (tmp_path / "begun").mkdir()
    async with local_cluster(tmp_path, nodes=2, slots=1) as scene:
        await scene.client.submit(program(tmp_path, HANGS, min_workers=2, max_workers=2, silence_s=1.5))
        await scene.ends("t")
    assert len(list((tmp_path / "begun").iterdir())) == 3
    [first, second] = scene.of(FailureDetected)
    assert (first.severity, second.severity) == (2, 3)
    assert first.reason.startswith(f"{first.worker} is at ")
    assert "script.py:13" in first.reason.partition(";")[0]
    assert "all 2 workers of t have written nothing and waited for 1." in second.reason
    assert second.reason.count("distributed_c10d.py") >= 2
    logs = "".join(path.read_text() for path in tmp_path.glob("cluster/**/logs/t-*.log"))
    causes = re.findall(r"cause (\d) '(.*)'\n", logs)
    assert [cause for _, cause in causes if not cause] == ["", ""]
    told = [cause for _, cause in causes if cause]
    assert len(told) == 4
    assert sum(cause.startswith(f"{first.worker} is at ") for cause in told) == 2
    assert sum(cause.startswith("all 2 workers of t") for cause in told) == 2
