"""Scripts that know nothing of Unicron: those that live stay where they are, whoever is replaced goes on with them."""

import asyncio
import re

import pytest
from helpers.scripts import GATHERS, begun, done, ends, past, program, same, strike
from helpers.training import kill_at_once, running_cluster

from unicron.contracts.events import FailureDetected, Regrouped
from unicron.contracts.tasks import TaskState

pytestmark = pytest.mark.slow

ENGINE = """
    import os, time
    import torch
    import torch.distributed as dist

    seen = 0

    def train(epoch, model, loader, optimizer, scheduler):
        global seen
        for number, (x, y) in enumerate(loader):
            time.sleep(float(os.environ["PACE"]))
            loss = (model(x) - y).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            seen += len(x)
            if dist.get_rank() == 0:
                with open(os.environ["DONE"], "a") as done:
                    print(epoch, number, seen, file=done)
        scheduler.step()
"""

PLAIN = """
    import os
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
    model = DDP(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    print("begins", rank, dist.get_world_size(), os.getpid(), flush=True)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        engine.train(epoch, model, loader, optimizer, scheduler)
    dist.barrier()
    if rank == 0:
        state = {"model": model.module.state_dict(), "lr": scheduler.get_last_lr()[0], "seen": engine.seen}
        torch.save(state, os.environ["OUT"])
    dist.destroy_process_group()
"""


async def neighbours(scene, name):
    """Return a rank of a task, and the worker that is on the same node."""
    members = (await scene.view(name)).members
    ranks = range(len(members))
    return next((a, members[b].worker) for a in ranks for b in ranks if a != b and members[a].node == members[b].node)


async def test_ranks_are_killed_stopped_and_raise_and_the_result_is_bitwise_that_of_an_undisturbed_run(tmp_path):
    async with running_cluster(tmp_path, nodes=2, slots=2) as scene:
        scene.folder = tmp_path
        await scene.client.submit(program(tmp_path, "calm", PLAIN, pace=0.0, beside=ENGINE))
        await ends(scene, "calm")
        await scene.client.submit(program(tmp_path, "t", PLAIN, beside=ENGINE))
        struck = [(1, "kill-worker"), (0, "kill-worker"), (2, "raise")]
        for number in range(1, 5):
            await past(scene, "t", 6 * number)
            if number > len(struck):
                stopped, beside = await neighbours(scene, "t")
                struck.append((stopped, "stop-worker"))
            rank, fault = struck[number - 1]
            await strike(scene, "t", rank, fault)
            await scene.until(lambda number=number: len(scene.of(FailureDetected)) == number)
        await ends(scene, "t")
    [*_, hang] = scene.of(FailureDetected)
    waits = (
        rf"under way: {beside}: \w+ #\d+.*, \d+ x \w+, scheduled, engine.py:13; the last of them that was done: \w+ #"
    )
    assert re.search(waits, hang.reason), hang.reason
    assert hang.correlation in {fact.correlation for fact in scene.of(Regrouped)}, "in the chain of what came of it"
    same(tmp_path, "t", "calm")
    assert [each[:2] for each in done(tmp_path, "t")] == [(epoch, number) for epoch in range(4) for number in range(10)]
    assert begun(tmp_path, "t") == sorted([0, 1, 2, *(rank for rank, _ in struck)]), "nobody else begins again"


async def test_a_new_rank_sums_all_of_an_iteration_and_is_given_what_collectives_gave_before(tmp_path):
    async with running_cluster(tmp_path, nodes=2, slots=2) as scene:
        scene.folder = tmp_path
        await scene.client.submit(program(tmp_path, "calm", GATHERS, pace=0.0, ranks=2))
        await ends(scene, "calm")
        await scene.client.submit(program(tmp_path, "t", GATHERS, ranks=2))
        struck = [(1, 0.03), (0, 0.18), (1, 0.48)]
        for number, (rank, seconds) in enumerate(struck, 1):  # within an iteration, whose four parts take 0.6 s
            await past(scene, "t", 4 * number)
            await asyncio.sleep(seconds)
            await strike(scene, "t", rank)
            await scene.until(lambda number=number: len(scene.of(FailureDetected, task="t")) == number)
        await ends(scene, "t")
        assert len(scene.of(FailureDetected, task="t")) == len(struck)
    same(tmp_path, "t", "calm")
    assert begun(tmp_path, "t") == sorted([0, 1, *(rank for rank, _ in struck)]), "nobody else begins again"


async def test_where_a_new_rank_can_not_be_given_what_collectives_gave_all_begin_again(tmp_path):
    unlike = GATHERS.replace("ends = number", "dist.reduce(count.clone(), 0); ends = number")
    async with running_cluster(tmp_path, nodes=2, slots=2) as scene:
        scene.folder = tmp_path
        await scene.client.submit(program(tmp_path, "calm", unlike, pace=0.0, ranks=2))
        await ends(scene, "calm")
        await scene.client.submit(program(tmp_path, "t", unlike, ranks=2))
        await past(scene, "t", 5)
        await strike(scene, "t", 1)
        await ends(scene, "t")
    same(tmp_path, "t", "calm")
    assert begun(tmp_path, "t") == [0, 0, 1, 1], "all of them"


CHOOSES = """
    import os, time
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    first = not os.path.exists(os.environ["DONE"])  # the others, later, find something else
    chosen = [{"seed": 7 if first and rank == 0 else 8}]
    dist.broadcast_object_list(chosen)
    rates = [None] * dist.get_world_size()
    dist.all_gather_object(rates, 0.05 if first else 1.0)
    torch.manual_seed(chosen[0]["seed"])
    model = torch.nn.Linear(3000, 10)
    dist.broadcast(model.weight.data, 0)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=rates[rank] / 1000)
    data = torch.randn(40, 3000)
    print("begins", rank, flush=True)
    for step in range(40):
        time.sleep(float(os.environ["PACE"]))
        (model(data[torch.randint(40, (4,))]) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            with open(os.environ["DONE"], "a") as done:
                print(0, step, 0, file=done)
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "lr": rates, "seen": chosen}, os.environ["OUT"])
"""


async def test_a_new_rank_is_given_what_collectives_gave_before_the_loop(tmp_path):
    async with running_cluster(tmp_path, nodes=1, slots=2) as scene:
        scene.folder = tmp_path
        await scene.client.submit(program(tmp_path, "calm", CHOOSES, pace=0.0, ranks=2))
        await ends(scene, "calm")
        await scene.client.submit(program(tmp_path, "t", CHOOSES, ranks=2))
        for number, rank in enumerate((0, 1), 1):
            await past(scene, "t", 9 * number)
            await strike(scene, "t", rank)
        await ends(scene, "t")
    same(tmp_path, "t", "calm")
    assert begun(tmp_path, "t") == [0, 0, 1, 1]


async def test_where_all_ranks_are_lost_they_go_on_from_what_was_saved(tmp_path):
    async with running_cluster(tmp_path, nodes=1, slots=2) as scene:
        scene.folder = tmp_path
        await scene.client.submit(program(tmp_path, "calm", CHOOSES, pace=0.0, ranks=2))
        await ends(scene, "calm")
        await scene.client.submit(program(tmp_path, "t", CHOOSES, ranks=2))
        await past(scene, "t", 15)
        kill_at_once(scene, (await scene.view("t")).members)
        await ends(scene, "t")
    same(tmp_path, "t", "calm")
    assert begun(tmp_path, "t") == [0, 0, 1, 1]
    again = [each for each in scene.of(Regrouped, task="t") if each.epoch]
    assert again
    assert all(each.state_from and each.iteration > 0 for each in again)


LOOSE = """
    import os, time
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    def microbatches(step):
        generator = torch.Generator().manual_seed(step)
        return torch.randn(4, 6, 16, generator=generator)[:, rank::2]

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1 + rank)
    model = DistributedDataParallel(torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    seen = step = 0
    print("begins", rank, flush=True)
    while step < 40:
        *first, last = microbatches(step)
        with model.no_sync():
            for x in first:
                (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        time.sleep(float(os.environ["PACE"]))
        (model(last) - last.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step, seen = step + 1, seen + 1
        if rank == 0:
            with open(os.environ["DONE"], "a") as done:
                print(0, step, seen, file=done)
        if os.path.exists(os.environ["DONE"] + ".wait") and step == 40 and rank == 0:
            while os.path.exists(os.environ["DONE"] + ".wait"):
                sum(range(100_000))
    mean = torch.tensor([float(step)])
    dist.all_reduce(mean)
    if rank == 0:
        lr = optimizer.param_groups[0]["lr"]
        torch.save({"model": model.module.state_dict(), "lr": lr, "seen": seen}, os.environ["OUT"])
"""


async def test_a_while_loop_that_accumulates_is_healed_and_what_its_other_collectives_lose_begins_again(tmp_path):
    async with running_cluster(tmp_path, nodes=2, slots=2) as scene:
        scene.folder = tmp_path
        await scene.client.submit(program(tmp_path, "calm", LOOSE, pace=0.0, ranks=2))
        await ends(scene, "calm")
        await scene.client.submit(program(tmp_path, "t", LOOSE, ranks=2))
        await past(scene, "t", 10)
        await strike(scene, "t", 1)
        (tmp_path / "t" / "done.wait").touch()
        await past(scene, "t", 40)
        assert begun(tmp_path, "t") == [0, 1, 1]
        await strike(scene, "t", 0)  # the other waits for it in a collective of the script
        (tmp_path / "t" / "done.wait").unlink()
        await ends(scene, "t")
    same(tmp_path, "t", "calm")
    assert begun(tmp_path, "t") == [0, 0, 1, 1, 1]


async def test_ranks_that_are_lost_while_others_build_and_one_after_the_other_are_replaced(tmp_path):
    slow = LOOSE.replace("    model = D", '    time.sleep(1.0 if os.environ["PACE"] != "0.0" else 0.0)\n    model = D')
    slow = slow.replace('print("begins", rank, flush=True)', "pass").replace(
        "    model = D", '    print("begins", rank, flush=True)\n    model = D', 1
    )
    async with running_cluster(tmp_path, nodes=2, slots=2) as scene:
        scene.folder = tmp_path
        await scene.client.submit(program(tmp_path, "calm", slow, pace=0.0, ranks=2))
        await ends(scene, "calm")
        await scene.client.submit(program(tmp_path, "t", slow, ranks=2))
        for rank, count in ((1, 2), (0, 3)):  # while they build; then another, while the first one's replacement builds
            await scene.until(lambda count=count: len(begun(tmp_path, "t")) >= count)
            await strike(scene, "t", rank)
        await past(scene, "t", 8)
        for rank in (0, 1):
            await strike(scene, "t", rank)
            await asyncio.sleep(0.3)
        await ends(scene, "t")
    same(tmp_path, "t", "calm")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("torch.nn.Linear(16, 1)", ("torch.nn.BatchNorm1d(16, dtype=torch.bfloat16)", "running means of BatchNorm")),
        ("step < 40:", ("next(batches) < 40:", "uses `batches`, an iterator")),
        ("optimizer.zero_grad()", ("pass", "no_sync")),
        ("step, seen = step", ("model(last).sum().backward(); step, seen = step", "makes more than one update")),
    ],
)
async def test_what_can_not_be_healed_in_place_is_refused_at_the_start(tmp_path, line, told):
    text = LOOSE.replace(line, told[0]).replace(
        "seen = step = 0", "seen = step = 0; batches = (each for each in range(50))"
    )
    text = text if "batches" in told[0] else text.replace("; batches = (each for each in range(50))", "")
    async with running_cluster(tmp_path, nodes=1, slots=2) as scene:
        await scene.client.submit(program(tmp_path, "t", text, ranks=2))
        view = await scene.until_state("t", TaskState.FINISHED, TaskState.FAILED)
    assert view.state is TaskState.FAILED
    assert told[1] in view.reason
