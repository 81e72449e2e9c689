"""Scripts that know nothing of Unicron: survivors stay where they are, and replacements join them."""

import asyncio
import contextlib
import os
import re
import signal
import textwrap
from pathlib import Path

import pytest
import torch
from helpers import likenccl
from helpers.gate import gate
from helpers.local_cluster import local_cluster
from helpers.scripts import GATHERS, Run, disturbed, program, same
from helpers.training import kill_at_once, shared
from msgspec.structs import replace
from unicron_transition.deadlines import TIMEOUT_S, WaitKind

from unicron.contracts.events import Alert, FailureDetected, Regrouped, ScriptDrilled, TaskRecovered
from unicron.contracts.tasks import Healing, ParallelLayout
from unicron.contracts.time_limits import TRIAL_S

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

scene = shared(local_cluster, nodes=2, slots=2)

ENGINE = """
    import gate
    import torch
    import torch.distributed as dist

    seen = 0

    def train(epoch, model, loader, optimizer, scheduler, average):
        global seen
        for number, (x, y) in enumerate(loader):
            gate.at(epoch, number, rank=dist.get_rank())
            loss = (model(x) - y).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            average.data.mul_(0.9).add_(next(model.parameters()).detach().sum())
            seen += len(x)
            gate.at(epoch, number, "done", dist.get_rank())
        scheduler.step()
"""

PLAIN = """
    import gate
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler
    import engine

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    x = torch.randn(240, 32)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    torch.manual_seed(rank)
    layers = [torch.nn.Linear(32, 64), torch.nn.Dropout(0.1), torch.nn.Tanh(), torch.nn.Linear(64, 1)]
    layers[0].bias.requires_grad_(False)  # as the first rank has drawn it, like the next
    layers[2].register_buffer("drawn", torch.randn(64))
    model = DDP(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    average = torch.zeros((1 << 20) + 1)
    gate.at(-1, phase="begins", rank=rank)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        engine.train(epoch, model, loader, optimizer, scheduler, average)
    dist.barrier()
    if rank == 0:
        state = {"model": model.module.state_dict(), "lr": scheduler.get_last_lr()[0], "seen": engine.seen}
        state["average"] = average
        torch.save(state, "out.pt")
    dist.destroy_process_group()
"""


async def neighbours(scene, name):
    """Return a rank of a task, and the worker that is on the same node."""
    members = (await scene.view(name)).members
    ranks = range(len(members))
    return next((a, members[b].worker) for a in ranks for b in ranks if a != b and members[a].node == members[b].node)


async def test_ranks_are_killed_stopped_and_raise_and_the_result_is_bitwise_that_of_an_undisturbed_run(scene):
    async with disturbed(scene, PLAIN, (0, 6), ranks=3, beside=ENGINE) as run:
        await run.at(0, 6, rank=1)  # the others wait for it
        await run.strike(1)
        await run.at(1, 2)
        await run.strike(0)
        await run.at(1, 8, rank=2)
        await run.strike(2, "raise")
        stopped, beside = await neighbours(scene, run.name)
        await run.at(2, 4, phase="", rank=stopped)
        await run.gate.reached(2, 4)
        hang = await run.strike(stopped, "stop-worker")
    waits = (
        rf"under way: {beside}: \w+ #\d+.*, \d+ x \w+, scheduled, engine.py:13; the last of them that was done: \w+ #"
    )
    if not likenccl.is_used():  # of whose collectives torch keeps no record
        assert re.search(waits, hang.reason), hang.reason
    assert hang.correlation in {fact.correlation for fact in scene.of(Regrouped)}, "in the chain of what came of it"
    done = [(at["iteration"], at["microbatch"]) for at in run.gate.passed if at["phase"] == "done" and at["rank"] == 0]
    assert done == [(epoch, number) for epoch in range(4) for number in range(10)]
    assert run.begun == sorted([0, 1, 2, 1, 0, 2, stopped]), "nobody else begins again"
    assert len(run.failures) == 4


async def test_a_new_rank_sums_all_of_an_iteration_and_is_given_what_collectives_gave_before(scene):
    async with disturbed(scene, GATHERS, (0, 13)) as run:  # three iterations after ranks begin to be compared
        for rank, *point in ((1, 0, 13), (1, 1, 7)):  # in the second and the last part of an iteration
            await run.at(*point)
            await run.strike(rank)
        await run.at(1, 11, phase="updated", rank=0)  # behind an update, while the other goes on to a collective
        await run.strike(0)
    assert len(run.failures) == 3
    assert run.begun == [0, 0, 1, 1, 1], "nobody else begins again"
    last = next(at["worker"] for at in reversed(run.gate.passed) if at["rank"] == 0)
    begun, first = [at for at in run.gate.passed if at["worker"] == last][:2]
    assert (begun["phase"], first["microbatch"], first["phase"]) == ("begins", 11, "updated"), "not the body once more"


LATE = """            gate.at(epoch, number, "late", rank)
            while os.environ.get("GATE") and (rank, epoch, number) == (1, 0, 8) and dist.group.WORLD.groups.epoch >= 0:
                pass  # until it is interrupted: nothing that was sent before reaches it
            dist.broadcast(chosen, 0)
            gate.at(epoch, number, "told", rank)
"""


@pytest.mark.skipif(likenccl.is_used(), reason="a collective of GPUs ends nowhere before all ranks have come to it")
async def test_a_rank_is_given_what_a_collective_gave_that_has_ended_elsewhere_when_it_breaks_here(scene):
    batch = "            x, y, which = next(batches)\n"
    script = "import os\n" + textwrap.dedent(GATHERS.replace(batch, batch + LATE))
    async with disturbed(scene, script, (0, 8), ranks=3) as run:
        run.gate.close(0, 8, phase="late", rank=1)
        await run.gate.held()
        told = {"iteration": 0, "microbatch": 8, "phase": "told", "rank": 2}
        await scene.until(lambda: any(told.items() <= at.items() for at in run.gate.passed))
        await run.strike(0)
    assert run.begun == [0, 0, 1, 2], "nobody else begins again"


async def test_where_a_new_rank_can_not_be_given_what_collectives_gave_all_begin_again(scene):
    later = "dist.reduce(count.clone(), 0, async_op=True).wait(); ends = number"
    unlike = GATHERS.replace("ends = number", later)  # who waits for that, and when, nobody knows
    async with disturbed(scene, unlike, (0, 5), calm=GATHERS) as run:
        await run.at(0, 5)
        await run.strike(1)
    assert run.begun == [0, 0, 1, 1], "all of them"


@pytest.mark.exhaustive("tests/unit/train/test_records.py has what is compared")
async def test_where_a_rank_is_lost_before_its_update_no_new_one_is_begun_for_it_in_vain(scene):
    step = "            optimizer.step()"
    engine = ENGINE.replace(step, f'            gate.at(epoch, number, "reduced", dist.get_rank())\n{step}')
    async with disturbed(scene, PLAIN, (0, 6), beside=engine) as run:
        run.gate.close(1, 2, phase="reduced", rank=1)
        await run.gate.held()
        ahead = {"iteration": 1, "microbatch": 3, "rank": 0}
        await scene.until(lambda: any(ahead.items() <= at.items() for at in run.gate.passed))
        await run.strike(1)
    assert run.begun == [0, 0, 1, 1, 1], "one for the rank that is lost, then all of them"


CHOOSES = """
    import os
    import gate
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    first = not os.environ.get("UNICRON_RESTART_CAUSE")  # the others, later, find something else
    if os.path.exists("own.pt"):
        raise FileExistsError("a checkpoint that none of the others has begun from")
    chosen = [{"seed": 7 if first and rank == 0 else 8}]
    dist.broadcast_object_list(object_list=chosen, src=0)
    rates = [None] * dist.get_world_size()
    dist.all_gather_object(rates, 0.05 if first else 1.0)
    torch.manual_seed(chosen[0]["seed"])
    model = torch.nn.Linear(30000, 10)
    dist.broadcast(model.weight.data, 0)
    for each in model.weight.data.split(2) * 10:  # small ones, of more than 8 MiB together
        dist.broadcast(each, 0)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=rates[rank] / 10000)
    data = torch.randn(40, 30000)
    gate.at(-1, phase="begins", rank=rank)
    for step in range(30):
        gate.at(step, rank=rank)
        (model(data[torch.randint(40, (4,))]) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            torch.save(step, "own.pt")
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "lr": rates, "seen": chosen}, "out.pt")
"""


async def test_a_new_rank_is_given_what_collectives_gave_before_the_loop(scene):
    async with disturbed(scene, CHOOSES, (9,)) as run:
        for rank, step in ((0, 9), (1, 18)):
            await run.at(step)
            await run.strike(rank)
    assert run.begun == [0, 0, 1, 1]


async def test_where_all_ranks_are_lost_they_go_on_from_what_was_saved(scene):
    async with disturbed(scene, CHOOSES, (15,)) as run:
        await run.at(15)
        kill_at_once(scene, (await scene.view(run.name)).members)
    assert run.begun == [0, 0, 1, 1]
    again = [each for each in scene.of(Regrouped, task=run.name) if each.epoch]
    assert again
    assert all(each.state_from for each in again), again  # of which iteration: a slow machine saves some only


async def test_where_a_rank_is_lost_behind_the_loop_all_go_on_from_what_was_saved(scene):
    saves = "    if rank == 0:\n        torch.save"
    async with disturbed(scene, CHOOSES.replace(saves, f"    gate.at(30, rank=rank)\n{saves}"), (30,)) as run:
        await run.at(30)
        await run.strike(0)
    assert run.begun == [0, 0, 1, 1]


LOOSE = """
    import gate
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    def microbatches(step):
        generator = torch.Generator().manual_seed(step)
        return torch.randn(4, 6, 16, generator=generator)[:, rank::2]

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1 + rank)
    gate.at(-1, phase="begins", rank=rank)
    model = DistributedDataParallel(torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    seen = step = 0
    while step < 30:
        *first, last = microbatches(step)
        with model.no_sync():
            for x in first:
                (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        gate.at(step, rank=rank)
        (model(last) - last.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step, seen = step + 1, seen + 1
    gate.at(step, rank=rank)
    mean = torch.tensor([float(step)])
    dist.all_reduce(mean)
    if rank == 0:
        lr = optimizer.param_groups[0]["lr"]
        torch.save({"model": model.module.state_dict(), "lr": lr, "seen": seen}, "out.pt")
"""


async def test_a_while_loop_that_accumulates_is_healed_and_so_is_what_comes_behind_its_last_update(scene):
    async with disturbed(scene, LOOSE, (10,)) as run:
        await run.at(10)
        await run.strike(1)
        await run.at(30)
        run.gate.close(30, rank=0)  # the other waits for it in a collective of the script
        await run.strike(0)
    assert run.begun == [0, 0, 1, 1]


BESIDE = """
    import os

    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    told = os.open("beside", os.O_APPEND | os.O_CREAT | os.O_WRONLY)  # a file of a new rank's own would be left alone
    os.write(told, (" ".join(os.environ[name] for name in names) + chr(10)).encode())
    os.close(told)
"""


async def test_ranks_are_told_who_is_beside_them_on_their_node_before_they_meet(scene):
    async with disturbed(scene, textwrap.dedent(BESIDE) + textwrap.dedent(LOOSE), (10,), ranks=3) as run:
        await run.at(10)
        nodes = [member.node for member in (await scene.view(run.name)).members]
        await run.strike(1)
    by_rank = dict.fromkeys(nodes)
    told = sorted(
        f"{rank} {nodes[:rank].count(node)} {nodes.count(node)} {list(by_rank).index(node)} {len(by_rank)}"
        for rank, node in [*enumerate(nodes), (1, nodes[1])]
    )
    assert sorted((scene.cluster.root.parent / run.name / "beside").read_text().splitlines()) == told


async def test_ranks_that_are_lost_while_others_build_and_one_after_the_other_are_replaced(scene):
    async with disturbed(scene, LOOSE, (-1,)) as run:
        await run.at(-1, phase="begins")
        await run.strike(1)  # while they build
        await run.at(8)
        await run.strike(0)
        await run.at(-1, phase="begins", rank=0)
        await run.strike(1)  # while the replacement of the other builds


SWAPS = """
    import gate
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(16, 1))
    average = torch.nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = torch.randn(4, 16)

    def swap():
        for one, other in zip(model.parameters(), average.parameters()):
            kept = one.data.clone()
            one.data.copy_(other.data)
            other.data.copy_(kept)

    gate.at(-1, phase="begins", rank=rank)
    for epoch in range(6):
        for step in range(4):
            (model(data) - rank - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for one, other in zip(model.parameters(), average.parameters()):
                other.data.lerp_(one.data, 0.1)
        gate.at(epoch, phase="validates", rank=rank)
        swap()
        loss = model.module(data).mean().detach()
        dist.all_reduce(loss)
        swap()
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "lr": 0, "seen": float(loss)}, "out.pt")
"""


async def test_where_a_rank_is_lost_while_another_has_an_average_in_its_parameters_all_begin_again(scene):
    async with disturbed(scene, SWAPS, (3,)) as run:
        await run.at(3, phase="validates", rank=1)  # the other validates, and waits for it
        await run.strike(1)
    assert run.begun == [0, 0, 1, 1, 1], "one for the rank that is lost, then all of them"


FOLLOWS = """
    import gate
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    class Contrast(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key = (torch.nn.Linear(16, 80_000) for _ in range(2))  # of 5 MiB each
            self.key.requires_grad_(False)

        def forward(self, x):
            self.key.weight.data = 0.9 * self.key.weight.data + 0.1 * self.query.weight.data
            return (self.query(x) - self.key(x)).square().mean()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DistributedDataParallel(Contrast())
    optimizer = torch.optim.SGD(model.module.query.parameters(), lr=0.05)
    data = torch.randn(20, 4, 16)
    gate.at(-1, phase="begins", rank=rank)
    for step, x in enumerate(data):
        loss = model(x + rank)
        gate.at(step, rank=rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "lr": 0, "seen": float(loss)}, "out.pt")
"""


async def test_a_large_key_encoder_that_follows_in_each_forward_pass_is_healed(scene):
    async with disturbed(scene, FOLLOWS, (9,)) as run:
        await run.at(9, rank=1)  # the other has computed, and waits for its gradient
        await run.strike(1)
    assert run.begun == [0, 1, 1], "nobody else begins again"


VARIES = """
    import gate
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    class Heads(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh())
            self.heads = torch.nn.ModuleList(torch.nn.Linear(8, 1) for _ in range(3))
            self.register_buffer("ring", torch.zeros(16, 8), persistent=False)
            self.register_buffer("place", torch.tensor(0))

        def forward(self, x, head):
            y = self.trunk(x)
            if self.training:
                self.ring[self.place : self.place + len(x)] = y.detach()
                self.place = (self.place + len(x)) % 16
            return self.heads[head](y + self.ring.mean(0))

    def data(number):
        return torch.randn(4, 8, generator=torch.Generator().manual_seed(number))

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DistributedDataParallel(Heads(), find_unused_parameters=True)
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=0, threshold=0.5)
    mine = torch.nn.Parameter(torch.ones(4))
    own = torch.optim.SGD([mine], lr=0.01 * (rank + 1), momentum=0.9)
    gate.at(-1, phase="begins", rank=rank)
    for step in range(24):
        if step == 8:
            model.module.trunk[0].requires_grad_(False)
        gate.at(step, rank=rank)
        loss = (model(data(2 * step + rank), step % 2) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mine.square().sum().backward()
        own.step()
        own.zero_grad()
        average.update_parameters(model)
        if step % 4 == 3:
            kept = [each.requires_grad for each in model.parameters()]
            model.requires_grad_(False)  # as where forces are asked for, so that there is a graph all the same
            loss = (model.eval()(data(1000).requires_grad_(True), 0) - 1).square().mean().detach()
            for each, required in zip(model.parameters(), kept):
                each.requires_grad_(required)
            model.train()
            plateau.step(loss)
    buffers = torch.cat([each.detach().reshape(-1).double() for each in (*model.module.buffers(), mine)])
    both = [torch.zeros_like(buffers) for _ in range(2)]
    dist.all_gather(both, buffers)
    if rank == 0:
        state = {**average.state_dict(), **model.state_dict(), "first": both[0], "other": both[1]}
        lr = optimizer.param_groups[0]["lr"]
        torch.save({"model": state, "lr": lr, "seen": plateau.num_bad_epochs}, "out.pt")
    dist.destroy_process_group()
"""


async def test_unused_and_frozen_parameters_buffers_and_averages_are_what_torch_itself_makes_of_them(scene, tmp_path):
    spec = program(tmp_path, "torchs", VARIES, ranks=2)
    await scene.client.submit(replace(spec, heal=Healing.RESTART, layout=ParallelLayout()))
    await scene.ends("torchs")
    async with disturbed(scene, VARIES, (6,)) as run:
        for rank, step in ((1, 6), (0, 12), (1, 14)):
            await run.at(step)
            await run.strike(rank)
    assert run.begun == [0, 0, 1, 1, 1]
    (tmp_path / "ours").symlink_to(scene.cluster.root.parent / run.name)
    same(tmp_path, "ours", "torchs")


MANY = """
    import os
    import gate
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.first = torch.nn.Linear(64, 1), torch.nn.Linear(16, 512)  # not in the order of their use
            self.inner, self.norm = torch.nn.Linear(512, 512), torch.nn.BatchNorm1d(512)  # a bucket by itself
            self.next, self.left_out = torch.nn.Linear(512, 64), torch.nn.Linear(8, 8)

        def forward(self, x):
            return self.last(self.next(self.norm(self.inner(self.first(x))).relu()))

    how = os.environ["HOW"]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    net = Net()
    if how != "left out":
        del net.left_out
    dtype = torch.bfloat16 if how == "bfloat16" else torch.float32
    model = DistributedDataParallel(
        net.to(dtype), find_unused_parameters=how == "left out", static_graph=how == "static",
        bucket_cap_mb=0.2 if how == "cap" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    for step in range(12):
        gate.at(step, rank=rank)
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(3 * step + rank)).to(dtype)
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "lr": 0, "seen": 0}, "out.pt")
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("how", ["", "bfloat16", "left out", "static", "cap"])
async def test_three_ranks_come_to_the_bits_of_torch_as_they_sum_the_same_pieces_in_its_order(scene, tmp_path, how):
    name = f"torchs-{how.replace(' ', '-')}"
    spec = program(tmp_path, name, MANY, HOW=how)
    await scene.client.submit(replace(spec, heal=Healing.RESTART, layout=ParallelLayout()))
    await scene.ends(name)
    async with disturbed(scene, MANY, (1,), ranks=3, HOW=how) as run:
        await run.at(1)
        await run.strike(0)  # the rank whose order counts
        await run.at(6)
        await run.strike(2)
    (tmp_path / "ours").symlink_to(scene.cluster.root.parent / run.name)
    same(tmp_path, "ours", name)


HOOK = "lambda _, bucket: dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future().then(FIRST)"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (f"model.register_comm_hook(None, {HOOK})", "register_comm_hook"),
        ("rank or torch.optim.SGD(model.parameters())", "have not made the same"),
        (
            "import sys; sys.modules['unicron.train.inplace.piggyback'].Piggyback.attach = lambda self: self.nothing",
            "a fault of Unicron's own, please report it: AttributeError at script.py:",
        ),
    ],
    ids=["refused", "ranks differ", "fault of ours"],
)
async def test_what_can_not_be_had_in_place_is_told_and_begins_again_as_torchrun_would_run_it(scene, line, told):
    first = "FIRST = lambda future: future.value()[0]"
    text = LOOSE.replace("seen = step = 0", f"{first}; {line}; seen = step = 0")
    async with disturbed(scene, text, (10,), calm=LOOSE) as run:
        await run.at(10)
        drill = (await scene.view(run.name)).drill
        assert told in drill
        assert "begins again as torchrun runs it, now and whenever a rank is lost" in drill
        await run.strike(1)


APART = """
    import os
    import gate
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    total = torch.full((1,), float(rank + 1))
    for step in range(4):
        gate.at(step, rank=rank)
        dist.all_reduce(total)
    torch.save({"model": {"total": total}, "lr": dist.get_world_size(), "seen": dist.get_rank()}, f"out-{rank}.pt")
    if rank == 1:
        os.replace("out-1.pt", "out.pt")
"""


async def test_ranks_that_are_in_no_group_together_stay_apart_and_all_begin_again(scene):
    async with disturbed(scene, APART, (2,)) as run:
        await run.at(2)
        await run.strike(1)
    out = torch.load(scene.cluster.root.parent / run.name / "out.pt", weights_only=True)
    assert (float(out["model"]["total"]), out["lr"], out["seen"]) == (2.0, 1, 0)
    assert sorted(at["rank"] for at in run.gate.passed if at["iteration"] == 0) == [0, 0, 1, 1]
    assert len(scene.of(TaskRecovered, task=run.name)) == 2, "as it began, and once more"


BY_HAND = """
    import gate
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1)

    def reduce(parameter):
        dist.all_reduce(parameter.grad, async_op=True).get_future().wait()

    for each in model.parameters():
        each.register_post_accumulate_grad_hook(reduce)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gate.at(-1, phase="begins", rank=rank)
    for step in range(4):
        gate.at(step, rank=rank)
        model(torch.full((1, 4), step + rank + 1.0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        torch.save({"model": model.state_dict(), "lr": 0.1, "seen": step}, "out.pt")
"""


async def test_where_gradients_are_reduced_by_hand_all_end_at_once_and_it_is_said_that_they_begin_and_are_back(
    scene, tmp_path
):
    await scene.client.submit(program(tmp_path, "calm-by-hand", BY_HAND, ranks=2))
    await scene.ends("calm-by-hand")
    async with gate() as held:
        await scene.client.submit(replace(program(tmp_path, "by-hand", BY_HAND, ranks=2, **held.env), drill=True))
        run = Run(scene, "by-hand", 2, held)
        held.close(2, rank=1)
        await held.held()
        await run.strike(1)  # the other waits for it
        held.open()
        await scene.ends("by-hand")
    assert run.begun == [0, 0, 1, 1]
    begins = [each.text for each in scene.of(Alert, task="by-hand") if "begins again" in each.text]
    assert len(begins) == 1
    assert "as it did at first: up to its first loop it finds no file made since" in begins[0]
    assert len(scene.of(TaskRecovered, task="by-hand")) == 2, "as it began, and once more"
    same(tmp_path, "by-hand", "calm-by-hand")


BUSY = """
    import os

    if rank == 1:
        told = os.open("tries", os.O_APPEND | os.O_CREAT | os.O_WRONLY)
        os.write(told, b"x")
        if os.fstat(told).st_size == 2:
            raise OSError("the server has no licence left")
"""


async def test_where_a_new_rank_fails_before_the_loop_of_the_others_all_begin_again(scene):
    joined = "    rank = dist.get_rank()\n"
    async with disturbed(scene, LOOSE.replace(joined, joined + BUSY), (10,), calm=LOOSE) as run:
        await run.at(10)
        await run.strike(1)
    assert run.begun == [0, 0, 1, 1], "none for the rank that is lost, then all of them"
    reasons = [each.reason for each in scene.of(FailureDetected, task=run.name) if "licence" in each.reason]
    told = "a new rank failed before their loop with OSError: the server has no licence left at script.py:"
    assert reasons
    assert all(told in each for each in reasons)


CATCHES = LOOSE.replace(
    "        gate.at(step, rank=rank)\n        (model(last)",
    "        try:\n            gate.at(step, rank=rank)\n            (model(last)",
).replace(
    "        optimizer.step()\n",
    "            gate.at(step, 1, 'reduced', rank)\n"
    "        except Exception:\n"
    "            print('a batch that can not be trained is left out')\n"
    "        optimizer.step()\n",
)


async def test_a_script_that_catches_all_errors_does_not_go_on_by_itself_where_all_are_to_begin_again(scene):
    async with disturbed(scene, CATCHES, (10, 1), calm=LOOSE) as run:
        run.gate.close(10, 1, phase="reduced", rank=1)
        await run.gate.held()
        ahead = {"iteration": 11, "microbatch": 0, "rank": 0}
        await scene.until(lambda: any(ahead.items() <= at.items() for at in run.gate.passed))
        await run.strike(1)
    assert run.begun == [0, 0, 1, 1, 1], "one for the rank that is lost, then all of them"


LOOKS = "    def microbatches(step):\n"
LOOKS_EARLY = (
    "    import os\n    there = os.path.exists('mark')\n"
    f"{LOOKS}        if step:\n            open('mark', 'a').close()\n"
)


async def test_who_has_found_what_the_loop_has_made_before_that_was_known_takes_no_place(scene):
    async with disturbed(scene, LOOSE.replace(LOOKS, LOOKS_EARLY), (10,), calm=LOOSE) as run:
        await run.at(10)
        await run.strike(1)
    assert run.begun.count(0) > 1, "all of them, once more where a state was saved, which they can't go on from either"


@pytest.mark.parametrize(
    ("line", "instead", "told"),
    [
        (LOOKS, LOOKS_EARLY, "mark before init_process_group(), and its own loop has made that"),
        ("    *first", "    DistributedDataParallel(model.module); *first", "made DistributedDataParallel after"),
        ("optimizer.step()", "optimizer.add_param_group({'params': [torch.nn.Parameter(last)]})", "SGD is given"),
        (
            "torch.manual_seed(1 + rank)",
            "torch.manual_seed(1); dist.broadcast(torch.ones(1 << 22), 0)",
            "more than 8 MiB",
        ),
        ("(model(last)", "(model.module(last)", "from a gradient that is not reduced over the ranks"),
        ("(model(", "(model.module(", "from a gradient that is not reduced over the ranks"),
    ],
)
async def test_what_no_replacement_would_have_is_trained_and_said(scene, tmp_path, line, instead, told):
    name = f"said-{abs(hash(line))}"
    spec = program(tmp_path, name, LOOSE.replace(line, instead), ranks=2)
    await scene.client.submit(replace(spec, drill=True))
    await scene.ends(name)
    assert not scene.of(FailureDetected, task=name)
    assert any(told in each.problem + each.unproven for each in scene.of(ScriptDrilled, task=name))


INFINITE = (
    LOOSE[: LOOSE.index("    while step < 30:")]
    + """\
    def compute(x):
        optimizer.zero_grad()
        gate.at(step, rank=rank)
        ((model(x) - x.sum(1, keepdim=True)).square().mean() * (float("inf") if step == 10 else 1)).backward()
    while step < 30:
        compute(microbatches(step)[0])
        if step != 10:
            optimizer.step()
"""
    + LOOSE[LOOSE.index("        step, seen = ") :]
)


async def test_a_gradient_that_is_not_finite_in_the_first_iteration_of_a_new_rank_is_its_own(scene):
    async with disturbed(scene, INFINITE, (10,)) as run:
        await run.at(10)
        await run.strike(1)
    assert run.begun == [0, 1, 1]


MOVES = LOOSE.replace(
    "        gate.at(step, rank=rank)\n        (model(last)",
    "        kept = [each.detach().clone() for each in model.parameters()]\n"
    "        with torch.no_grad():\n"
    "            for each in model.parameters():\n"
    "                each.add_(each.grad, alpha=0.01)\n"
    "        optimizer.zero_grad()\n"
    "        gate.at(step, rank=rank)\n"
    "        (model(last)",
).replace(
    "        optimizer.step()\n",
    "        with torch.no_grad():\n"
    "            for each, before in zip(model.parameters(), kept):\n"
    "                each.copy_(before)\n"
    "        optimizer.step()\n",
)


BY_DATA = MOVES.replace("each.add_(each.grad,", "each.data.add_(each.grad,").replace("each.copy_(", "each.data.copy_(")


@pytest.mark.parametrize("text", [MOVES, BY_DATA], ids=["in place", "by .data"])
async def test_where_parameters_are_moved_amid_an_iteration_all_begin_again_and_no_copy_is_of_that_moment(scene, text):
    async with disturbed(scene, text, (10,), calm=MOVES) as run:
        await run.at(10)
        await run.strike(1)
    assert run.begun.count(0) == 2, "nobody takes a place there"


HIDES = LOOSE.replace("[:, rank::2]", "[:, rank::2] + __import__('os').getpid() / 1e6")


RESUMES = (
    LOOSE.replace("    import gate\n", "    import gate\n    import os\n")
    .replace(
        "    seen = step = 0\n",
        "    seen = step = 0\n"
        "    if os.path.exists('own.pt'):\n"
        "        step, seen, kept = torch.load('own.pt')\n"
        "        model.module.load_state_dict(kept)\n",  # without momentum
    )
    .replace(
        "        step, seen = step + 1, seen + 1\n",
        "        step, seen = step + 1, seen + 1\n"
        "        if rank == 0:\n"
        "            torch.save((step, seen, model.module.state_dict()), 'own.pt')\n",
    )
)


SHELL = 'os.system("test -f settings || echo 1 > settings"); open("settings").close()'
"""Lines that fail where a file is there for programs, but not for Python."""


@pytest.mark.parametrize("setup", ["", SHELL])
async def test_a_script_that_resumes_by_itself_begins_as_it_did_at_first_where_a_rank_is_lost_early(
    scene, tmp_path, setup
):
    text = RESUMES.replace("    seen = step = 0\n", f"    {setup}\n    seen = step = 0\n")
    await scene.client.submit(program(tmp_path, "calm", text, ranks=2))
    await scene.ends("calm")
    async with gate() as held:
        held.close(1)  # before a drill begins
        await scene.client.submit(replace(program(tmp_path, "resumes", text, ranks=2, **held.env), drill=True))
        run = Run(scene, "resumes", 2, held)
        await run.at(1)
        assert (tmp_path / "resumes/own.pt").is_file()
        await run.strike(1)
        held.open()
        await scene.ends("resumes")
    drill = (await scene.view("resumes")).drill
    if setup:
        assert "it was to begin as it did at first, and failed before its loop with FileNotFoundError" in drill
        assert run.begun == [0, 0, 0, 1, 1, 1], "as torchrun would run it, from what it has saved"
    else:
        assert run.begun == [0, 0, 1, 1]
        same(tmp_path, "resumes", "calm")


SLOW_ON_TRIAL = LOOSE.replace(
    "    import gate\n",
    "    import gate, os, signal\n"
    "    on_trial = 'UNICRON_GHOST' in os.environ\n"
    "    if on_trial:\n"
    "        os.kill(os.getpid(), signal.SIGSTOP)\n",
)


async def resume_trials(folder):
    """Have each process of a task go on that is on trial and has stopped."""
    while True:
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                name, _, rest = (process / "stat").read_text().partition(") ")
                is_stopped = name.endswith("(unicron trial") and rest.startswith("T")
                if is_stopped and (process / "cwd").readlink() == folder:
                    os.kill(int(process.name), signal.SIGCONT)
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("differs", [False, True], ids=["alike", "differs"])
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_lost_while_a_process_is_on_trial_is_waited_for_until_that_has_shown_what_it_can(
    scene, monkeypatch, rank, differs
):
    monkeypatch.setitem(TIMEOUT_S, WaitKind.TRIAL, TRIAL_S)  # how long they wait is played in virtual time elsewhere
    text = SLOW_ON_TRIAL.replace("[:, rank::2]", "[:, rank::2] + on_trial") if differs else SLOW_ON_TRIAL
    async with disturbed(scene, text, (20,), calm=LOOSE, drill=True) as run:
        await run.at(20)
        told = scene.of(ScriptDrilled, task=run.name)
        assert [(each.under_way, each.iteration) for each in told] == [(True, 2)]
        await run.strike(rank)
        await scene.until(lambda: scene.of(Alert, task=run.name))
        assert run.begun == [0, 1], "nobody begins before that is known"
        going_on = asyncio.create_task(resume_trials(scene.cluster.root.parent / run.name))
        run.gate.open()
        await scene.ends(run.name)
        going_on.cancel()
    assert "wait for the trial that is under way" in scene.of(Alert, task=run.name)[0].text
    assert run.begun == ([0, 0, 1, 1] if differs else sorted([0, 1, rank]))


def outcomes(scene, task):
    """Return what came of trials."""
    return [each for each in scene.of(ScriptDrilled, task=task) if not each.under_way]


EDGES = """
    def edges():
        step = 0
        while True:
            told = torch.full((1,), float(step))
            dist.broadcast(told, 0)  # as Accelerate tells states of generators
            for _ in range(3):
                yield microbatches(int(told) + step % 3)
                step += 1

    dist.init_process_group("gloo")
"""
DRILLED = (
    LOOSE.replace('\n    dist.init_process_group("gloo")\n', EDGES)
    .replace("    seen = step = 0\n", "    seen = step = 0\n    batches = iter(edges())\n")
    .replace("microbatches(step)\n        with", "next(batches)\n        with")
)


async def test_a_drill_harms_nobody_and_a_script_that_it_shows_to_be_no_good_begins_again_when_struck(scene, tmp_path):
    async with gate() as held:
        held.close(20)
        for name, text, env in (("drilled", DRILLED, {}), ("hides", HIDES, held.env)):
            await scene.client.submit(replace(program(tmp_path, name, text, ranks=2, **env), drill=True))
        await scene.ends("drilled")
        told, *more = outcomes(scene, "drilled")  # a quick one is tried once more before it ends
        assert (told.iteration, told.rank) == (2, 1)
        assert not any(each.problem or each.unproven for each in (told, *more))
        await held.held(2)
        await scene.until(lambda: outcomes(scene, "hides"))
        [told] = outcomes(scene, "hides")
        assert told.problem == "the gradient of weight is another one in iteration 2"
        run = Run(scene, "hides", 2, held)
        assert run.begun == [0, 1], "nobody has begun again"
        assert not [each for name in ("drilled", "hides") for each in scene.of(FailureDetected, task=name)]
        await run.strike(1)
        held.open()
        await scene.ends("hides")
    assert run.begun.count(0) == 2, "nobody takes a place any more"


COPIES = (
    LOOSE.replace("    import gate\n", "    import copy\n    import gate\n")
    .replace("torch.nn.Linear(16, 1)", "torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 1))")
    .replace("lr=0.05", "lr=0.002")
    .replace(
        "    optimizer = ",
        "    frozen, average = copy.deepcopy(model.module), copy.deepcopy(model.module)\n"
        "    kept = {name: each.clone() for name, each in model.module.state_dict().items()}\n"
        "    optimizer = ",
    )
    .replace("(model(last) - last.sum(1, keepdim=True))", "(model(last) - frozen(last) - kept['1.bias'])")
    .replace(
        "        step, seen = step + 1, seen + 1\n",
        "        step, seen = step + 1, seen + 1\n"
        "        with torch.no_grad():\n"
        "            for each, now in zip(average[0].parameters(), model.module[0].parameters()):\n"
        "                each.lerp_(now, 0.1)\n",
    )
    .replace('"model": model.module', '"model": torch.nn.ModuleList([model.module, frozen, average])')
)


async def test_copies_of_what_a_model_was_given_as_it_was_made_are_what_they_were(scene):
    """Ranks draw their own weights, are given the first rank's, and copy those; a new rank has drawn others."""
    async with disturbed(scene, COPIES, (10,)) as run:
        await run.at(10)
        await run.strike(1)
        await run.at(20)
        await run.strike(0)
    assert run.begun == [0, 0, 1, 1]


CLUSTERS = """
    import gate
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    def cluster(bank):
        for number in (3, 4):
            centers = bank[torch.randperm(len(bank))[:number]] if rank == 0 else torch.empty(number, 16)
            dist.broadcast(centers, 0)
            for _ in range(3):
                nearest = torch.cdist(bank, centers).argmin(1)
                sums, counts = torch.zeros(number, 16).index_add_(0, nearest, bank), nearest.bincount(minlength=number)
                dist.all_reduce(sums)
                dist.all_reduce(counts, group=dist.new_group([0, 1]))  # one of all ranks
                centers = sums / counts.clamp(min=1).unsqueeze(1)
        return centers

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1 + rank)
    gate.at(-1, phase="begins", rank=rank)
    model = DistributedDataParallel(torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    bank = torch.randn(20, 16)
    for epoch in range(3):
        for each in (0, 1):  # after which nothing is trained, either
            dist.all_reduce(torch.ones(1))
        centers = cluster(bank)
        for number in range(8):
            gate.at(epoch, number, rank=rank)
            x = torch.randn(4, 16)
            (model(x) - x.sum(1, keepdim=True) - centers.sum()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            bank[number] = x[0]
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "lr": 0.01, "seen": bank.sum().item()}, "out.pt")
"""


async def test_what_collectives_gave_in_loops_that_do_not_train_is_given_to_a_new_rank(scene):
    async with disturbed(scene, CLUSTERS, (0, 6)) as run:
        await run.at(0, 6)  # in the first epoch nobody knew that those loops do not
        await run.strike(1)
        await run.at(2, 3)
        await run.strike(0)
    assert run.begun == [0, 0, 1, 1]
