"""Scripts without a session that break the rules: each is healed, or refused with the reason."""

import re
import socket
from pathlib import Path

import pytest
import torch
from helpers.gate import gate
from helpers.local_cluster import local_cluster
from helpers.scripts import Run, program
from helpers.training import running_cluster, shared
from msgspec.structs import replace
from unicron_agent.workers.activity import children_of, start_time
from unicron_agent.workers.output import LOG_BYTES

from unicron.contracts.events import FailureDetected
from unicron.contracts.tasks import Healing, ParallelLayout

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

scene = shared(running_cluster, nodes=1, slots=4)
"""A cluster whose agent is a process of its own: what it leaves behind, and its memory, are to be seen."""


FORKS = """
    import os, signal
    import gate
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler

    dist.init_process_group("gloo")
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    torch.manual_seed(1)
    x = torch.randn(160, 16)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False), num_workers=2)
    model = DistributedDataParallel(torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(3):
        for number, (x, y) in enumerate(loader):
            gate.at(epoch, number, rank=dist.get_rank())
            (model(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "out.pt")
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

    rank = int(os.environ["RANK"])
    store = dist.TCPStore("127.0.0.1", int(os.environ["PORT"]), 2, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
"""

FLOODS = """
    import os, time
    import gate

    block = b"x" * 99 + b"\\n"
    while os.environ["RANK"] == "0" and not os.environ["UNICRON_RESTART_CAUSE"]:
        os.write(1, block * 50_000)
        time.sleep(0.05)
    if os.environ["RANK"] == "1" and not os.environ["UNICRON_RESTART_CAUSE"]:
        gate.at(0, rank=1)
"""

NEVER = """
    import os, signal
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    def prepare():
        if not os.path.exists("begun"):
            open("begun", "w").close()
            signal.pause()

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
    import itertools, os
    import gate
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    def main():
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            if os.path.exists("begun"):
                return
            open("begun", "w").close()
        model = DistributedDataParallel(torch.nn.Linear(16, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in itertools.count():
            gate.at(step, rank=dist.get_rank())
            model(torch.randn(2, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    main()
"""


UNEVEN = """
    import sys
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    def main():
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        BEFORE
        model = DistributedDataParallel(torch.nn.Linear(16, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(6):
            if step == 4:
                WITHIN
            model(torch.randn(2, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        BEHIND

    sys.exit(main())
"""
ENDED = r"it has ended its script by sys.exit\(\) at script.py:"
UNEVEN_RANKS = {
    "fewer": ("if rank == 1: break", "pass", rf":16 for the gradient of iteration 4, and rank 1 .* {ENDED}21, after 4"),
    "skips": ("if rank == 1: continue", "pass", rf":16 for the gradient of iteration 5, .* {ENDED}21, after 5"),
    "exits": ("if rank == 1: sys.exit()", "pass", rf":16 for the gradient of iteration 4, .* {ENDED}15, after 4"),
    "barrier": ("pass", "if rank == 0: dist.barrier()", rf":19 for collective 1 since the .* {ENDED}21, after 6"),
    "crossed": ("if rank == 1: break", "dist.barrier()", "rank .* never comes there: it waits at script.py:1[69] for "),
}
"""Lines within and behind a loop by which ranks do not do the same, and what is told of that."""


def uneven(within="pass", behind="pass", before="pass"):
    """Return a script that has these lines."""
    return UNEVEN.replace("WITHIN", within).replace("BEHIND", behind).replace("BEFORE", before)


def restarted(spec):
    """Return a task as one that is run again after a failure."""
    return replace(spec, heal=Healing.RESTART, layout=ParallelLayout())


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


async def test_scripts_that_fork_are_healed_and_leave_nobody_behind(scene, tmp_path):
    async with gate() as held:
        for name, kind in (("in-place", replace), ("again", restarted)):
            held.close(0, 5)
            spec = kind(program(tmp_path, name, FORKS, ranks=2, **held.env))
            await scene.client.submit(spec)
            await held.held(2)
            # of each rank itself, its child, and two that load data, which are others in the next epoch
            assert len(forked(tmp_path / name)) >= 8
            await Run(scene, name, 2, held).strike(1)
            held.open()
            await scene.ends(name)
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
        async with local_cluster(tmp_path, nodes=2, slots=2) as scene, gate() as held:
            for spec in (
                program(tmp_path, "twice", TWICE, ranks=2),
                restarted(program(tmp_path, "twice-again", TWICE, ranks=2)),
                restarted(program(tmp_path, "port", PORT, ranks=2, PORT=f"{taken.getsockname()[1]}")),
            ):
                await scene.client.submit(spec)
            for name in ("twice", "twice-again"):
                assert "trying to initialize the default process group twice" in (await scene.fails(name)).reason
            view = await scene.fails("port")
            assert "EADDRINUSE" in view.reason
            assert f"in {tmp_path}/port/script.py:6: another program on that node has this port" in view.reason
            for name, environment in (("never", {}), ("early", {"EARLY": "1"})):
                spec = program(tmp_path, name, NEVER, ranks=2, **environment)
                await scene.client.submit(replace(spec, silence_s=1.5))
            for name in ("never", "early"):
                await scene.ends(name)
            held.close(3)
            await scene.client.submit(program(tmp_path, "returns", RETURNS, ranks=2, **held.env))
            await held.held(2)
            await Run(scene, "returns", 2, held).strike(1)
            held.open()
            assert "has ended before the loop that the other ranks are in" in (await scene.fails("returns")).reason
        for name in ("never", "early"):
            reasons = [each.reason for each in scene.of(FailureDetected, task=name)]
            assert len(reasons) == 1, reasons
            assert re.match(rf"{name}-\d is at MainThread: prepare \(script.py:10\)", reasons[0])


async def test_who_waits_for_a_rank_that_never_comes_is_told_of_and_ends_the_task(tmp_path):
    async with local_cluster(tmp_path, nodes=2, slots=6) as scene:
        for name, (within, behind, _) in UNEVEN_RANKS.items():
            await scene.client.submit(program(tmp_path, name, uneven(within, behind), ranks=2))
        await scene.client.submit(program(tmp_path, "early", uneven(before="if rank == 1: return"), ranks=2))
        for name, (*_, told) in {
            **UNEVEN_RANKS,
            "early": (f":11 for collective 1 before the training loop, .* {ENDED}21",),
        }.items():
            reason = (await scene.fails(name)).reason
            assert re.search(told, reason), reason
            assert not scene.of(FailureDetected, task=name), "nothing is begun again"


async def test_a_script_ends_as_its_exit_status_says_and_not_well_where_a_rank_fails_behind_its_loop(tmp_path):
    well = {"nothing": ("sys.exit()",), "zero": ("sys.exit(0)",), "returns": ()}
    ill = {
        "status": (uneven(behind="return 3"), "exited with code 3"),
        "raises": (uneven(behind="if rank == 0: raise OSError('no room')"), "OSError: no room"),
    }
    async with local_cluster(tmp_path, nodes=2, slots=5) as scene:
        texts = {name: uneven(*lines) for name, lines in well.items()} | {name: text for name, (text, _) in ill.items()}
        for name, text in texts.items():
            await scene.client.submit(program(tmp_path, name, text, ranks=2))
        for name in well:
            await scene.ends(name)
            assert not scene.of(FailureDetected, task=name)
        for name, (_, told) in ill.items():
            assert told in (await scene.fails(name)).reason


async def test_one_that_floods_its_log_fills_no_disk_and_hides_no_failure(scene, tmp_path):
    agent = scene.cluster.processes["node-1"].pid
    logs = lambda: [*scene.cluster.root.glob("nodes/*/logs/floods-*")]  # noqa: E731
    before = memory_of(agent)
    async with gate() as held:
        held.close()
        await scene.client.submit(restarted(program(tmp_path, "floods", FLOODS, ranks=2, **held.env)))
        await scene.until(lambda: [path for path in logs() if path.suffix == ".1"])
        await held.held(1)
        await Run(scene, "floods", 2, held).strike(1)
        await scene.ends("floods")
    assert sum(path.stat().st_size for path in logs()) < 3 * LOG_BYTES
    assert memory_of(agent) - before < 64 << 20


def memory_of(pid):
    """Return the most that a process has had in memory, in bytes."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) * 1024
