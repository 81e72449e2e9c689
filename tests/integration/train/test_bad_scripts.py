"""Scripts without a session that do what they should not: each is healed, or told what is wrong with it."""

import re
import socket
import time
from pathlib import Path

import pytest
import torch
from helpers.scripts import ends, program, strike
from helpers.training import running_cluster
from msgspec.structs import replace
from unicron_agent.activity import children_of, start_time
from unicron_agent.output import LOG_BYTES

from unicron.contracts.events import FailureDetected
from unicron.contracts.tasks import Healing, ParallelLayout, TaskState

pytestmark = pytest.mark.slow

FORKS = """
    import os, time
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler

    dist.init_process_group("gloo")
    child = os.fork()
    if child == 0:
        time.sleep(1000)
        os._exit(0)
    torch.manual_seed(1)
    x = torch.randn(160, 16)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False), num_workers=2)
    model = DistributedDataParallel(torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(3):
        for number, (x, y) in enumerate(loader):
            time.sleep(float(os.environ["PACE"]))
            (model(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            print("began", dist.get_rank(), flush=True)
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), os.environ["OUT"])
    dist.destroy_process_group()
"""

TWICE = """
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.init_process_group("gloo")
"""

PORT = """
    import os
    import torch.distributed as dist

    where = {"rank": int(os.environ["RANK"]), "world_size": 2}
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{os.environ['PORT']}", **where)
"""

FLOODS = """
    import os, time

    block = b"x" * 99 + b"\\n"
    while os.environ["RANK"] == "0" and not os.environ["UNICRON_RESTART_CAUSE"]:
        os.write(1, block * 50_000)
        time.sleep(0.05)
    while os.environ["RANK"] == "1" and not os.environ["UNICRON_RESTART_CAUSE"]:
        time.sleep(0.1)
"""

NEVER = """
    import os, time
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    def prepare():
        if not os.path.exists(os.environ["DONE"]):
            open(os.environ["DONE"], "w").close()
            time.sleep(1000)

    early = "EARLY" in os.environ and os.environ["UNICRON_PLACE"] == "1"
    if early:
        prepare()
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if dist.get_rank() == 1:
        prepare()
    for step in range(3):
        model(torch.randn(2, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""

RETURNS = """
    import os, time
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    def main():
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            if os.path.exists(os.environ["DONE"]):
                return
            open(os.environ["DONE"], "w").close()
        model = DistributedDataParallel(torch.nn.Linear(16, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        while True:
            time.sleep(0.05)
            model(torch.randn(2, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    main()
"""


def restarted(spec):
    """Return a task as one that is run again after a failure."""
    return replace(spec, heal=Healing.RESTART, layout=ParallelLayout())


def logs_of(folder, name):
    return sorted(folder.glob(f"cluster/nodes/*/logs/{name}-*"))


def forked(folder):
    """Return the processes that the script of a folder has forked, or that were forked from it."""
    found = []
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdigit() and str(path.joinpath("cwd").readlink()) == str(folder):
                found.append(int(path.name))
        except OSError:
            continue
    return found


async def fails(scene, name):
    view = await scene.until_state(name, TaskState.FINISHED, TaskState.FAILED)
    assert view.state is TaskState.FAILED
    return view


async def test_scripts_that_fork_are_healed_and_leave_nobody_behind(tmp_path):
    async with running_cluster(tmp_path, nodes=1, slots=4) as scene:
        for spec in (
            program(tmp_path, "in-place", FORKS, ranks=2),
            restarted(program(tmp_path, "again", FORKS, ranks=2)),
        ):
            await scene.client.submit(spec)
            logs = lambda name=spec.name: [path.read_text() for path in logs_of(tmp_path, name)]  # noqa: E731
            await scene.until(lambda logs=logs: any("began 1" in each for each in logs()))
            # of each rank itself, its child, and two that load data, which are others in the next epoch
            await scene.until(lambda name=spec.name: len(forked(tmp_path / name)) >= 8)
            await strike(scene, spec.name, 1)
        for name in ("in-place", "again"):
            await ends(scene, name)
            await scene.until(lambda name=name: not forked(tmp_path / name))
        agent = scene.cluster.processes["node-1"].pid
        await scene.until(lambda: not zombies_of(agent))
    ours, theirs = (torch.load(tmp_path / name / "out.pt", weights_only=True) for name in ("in-place", "again"))
    assert all(torch.allclose(value, theirs[name], atol=1e-6) for name, value in ours.items())


def zombies_of(pid):
    """Return the children of a process that have ended, and of which it takes no notice."""
    return [child for child in children_of(pid) if start_time(child) is None and Path(f"/proc/{child}").exists()]


async def test_what_is_wrong_with_a_script_is_told_and_what_never_comes_is_found(tmp_path):
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        async with running_cluster(tmp_path, nodes=2, slots=2) as scene:
            port = restarted(program(tmp_path, "port", PORT, ranks=2))
            for spec in (
                program(tmp_path, "twice", TWICE, ranks=2),
                restarted(program(tmp_path, "twice-again", TWICE, ranks=2)),
                replace(port, env={**port.env, "PORT": f"{taken.getsockname()[1]}"}),
            ):
                await scene.client.submit(spec)
            for name in ("twice", "twice-again"):
                assert "trying to initialize the default process group twice" in (await fails(scene, name)).reason
            view = await fails(scene, "port")
            assert "EADDRINUSE" in view.reason
            assert f"in {tmp_path}/port/script.py:6: another program on that node has this port" in view.reason
            never = replace(program(tmp_path, "never", NEVER, ranks=2), silence_s=1.5)
            early = replace(program(tmp_path, "early", NEVER, ranks=2), silence_s=1.5)
            await scene.client.submit(never)
            await scene.client.submit(replace(early, env={**early.env, "EARLY": "1"}))
            for name in ("never", "early"):
                await ends(scene, name)
            await scene.client.submit(program(tmp_path, "returns", RETURNS, ranks=2))
            await scene.reached("returns", 3)
            await strike(scene, "returns", 1)
            assert "has ended before the loop that the other ranks are in" in (await fails(scene, "returns")).reason
        for name in ("never", "early"):
            reasons = [each.reason for each in scene.of(FailureDetected, task=name)]
            assert len(reasons) == 1, reasons
            assert re.match(rf"{name}-\d is at MainThread: prepare \(script.py:10\)", reasons[0])


async def test_one_that_floods_its_log_fills_no_disk_and_delays_nobody(tmp_path):
    async with running_cluster(tmp_path, nodes=1, slots=2) as scene:
        agent = scene.cluster.processes["node-1"].pid
        before = memory_of(agent)
        await scene.client.submit(restarted(program(tmp_path, "floods", FLOODS, ranks=2)))
        await scene.until(lambda: list(tmp_path.glob("cluster/nodes/*/logs/floods-*.log.1")))
        struck = time.monotonic()
        await strike(scene, "floods", 1)
        await scene.until(lambda: scene.of(FailureDetected))
        assert time.monotonic() - struck < 15.0, "even where each who has a part in it waits for a core"
        await ends(scene, "floods")
        assert sum(path.stat().st_size for path in logs_of(tmp_path, "floods")) < 3 * LOG_BYTES
        assert memory_of(agent) - before < 64 << 20


def memory_of(pid):
    """Return the most that a process has had in memory, in bytes."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) * 1024
