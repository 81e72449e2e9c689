"""A model's own groups while ranks of its replica die or stop: real ranks, real gloo, and torch's own parallelism."""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import textwrap

import pytest
from unicron_agent.rendezvous import RendezvousServer

pytestmark = pytest.mark.slow

RANK = """
    import hashlib, json, os, signal, sys, threading, time
    import torch
    from torch import nn
    from torch.distributed.tensor import DTensor
    from unicron.contracts.tasks import ParallelLayout
    from unicron.train.inner import InnerGroups
    from unicron.train.rendezvous import Rendezvous

    address, place, kind, folder, fault, where = sys.argv[1], int(sys.argv[2]), *sys.argv[3:7]
    layouts = {"tensor": dict(tensor=2), "shard": dict(shard=2), "pipeline": dict(pipeline=2),
               "mixed": dict(tensor=2, shard=2), "deep": dict(pipeline=2, tensor=2)}
    torch.manual_seed(0)
    inner = InnerGroups(ParallelLayout(**layouts[kind]), place, torch.device("cpu"))
    inner.tried = -1
    newest, changed = [-1], threading.Condition()

    def listen():
        for line in sys.stdin:
            with changed:
                newest[0] = int(line)
                changed.notify_all()
            inner.interrupt(newest[0])

    threading.Thread(target=listen, daemon=True).start()

    def strike(point):
        if where == point and now == 3:
            print(json.dumps({"struck": place}), flush=True)
            os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x):
            strike("forward")
            hidden = nn.functional.gelu(self.a(x))
            if hidden.requires_grad:
                hidden.register_hook(lambda _: strike("backward"))
            return x + self.b(hidden)

    blocks = [Block() for _ in range(4)]
    stage = schedule = None
    if "pipeline" in layouts[kind]:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B
        blocks = blocks[:2] if inner.mesh["pipeline"].get_local_rank() == 0 else blocks[2:]
    model = nn.Sequential(*blocks)
    if "tensor" in layouts[kind]:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
        for block in model:
            parallelize_module(block, inner.mesh["tensor"], {"a": ColwiseParallel(), "b": RowwiseParallel()},
                               src_data_rank=None)
    if "shard" in layouts[kind]:
        from torch.distributed.fsdp import fully_shard
        for block in model:
            fully_shard(block, mesh=inner.mesh["shard"])
        fully_shard(model, mesh=inner.mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def pipeline(x):
        global stage, schedule
        if stage is None:
            stage = PipelineStage(model, inner.mesh["pipeline"].get_local_rank(), 2, torch.device("cpu"),
                                  group=inner.mesh["pipeline"].get_group())
            schedule = Schedule1F1B(stage, 4, loss_fn=lambda y, t: (y - t).square().mean())
        schedule.step(*([x] if stage.is_first else []), **({"target": x.roll(1, 1)} if stage.is_last else {}))

    def compute(iteration):
        generator = torch.Generator().manual_seed(iteration * 10)
        x = torch.randn(8, 32, generator=generator)
        if kind == "shard":
            x = x[place::2]
        if "pipeline" in layouts[kind]:
            pipeline(x)
        else:
            (model(x) - x.roll(1, 1)).square().mean().backward()

    path = f"{folder}/{kind}-{place}.pt"
    now = 0
    if os.path.exists(path):
        found = torch.load(path, weights_only=False)
        now = found["now"]
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        where = ""
    reformed = 0
    while now < 6:
        if inner.epoch < 0:
            with changed:
                changed.wait_for(lambda: newest[0] > inner.tried)
            inner.tried = newest[0]
            try:
                inner.form(newest[0], lambda: Rendezvous(address, f"{kind}-{newest[0]}"))
            except RuntimeError as error:
                continue
            schedule = stage = None
            reformed += 1
        torch.save({"now": now, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, path + ".part")
        os.rename(path + ".part", path)
        compute(now)
        strike("vote")
        try:
            inner.gather([1.0])
        except RuntimeError:
            pass
        else:
            optimizer.step()
            now += 1
        optimizer.zero_grad()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        digest.update(local.detach().numpy().tobytes())
    print(json.dumps({"place": place, "digest": digest.hexdigest(), "reformed": reformed}), flush=True)
    os._exit(0)
"""

SIZES = {"tensor": 2, "shard": 2, "pipeline": 2, "mixed": 4, "deep": 4}


class Ranks:
    """The ranks of a replica, each told of epochs over its standard input."""

    def __init__(self, folder, address, kind, fault="", where="", at=-1):
        self.folder, self.address, self.kind = folder, address, kind
        self.fault, self.where, self.at = fault, where, at
        self.epoch, self.processes, self.said = 0, {}, asyncio.Queue()

    async def start(self, place, *, disturbed):
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(self.folder / "rank.py"), self.address, str(place), self.kind, str(self.folder),
            self.fault if disturbed else "", self.where if disturbed else "",
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.processes[place] = process
        process.job = asyncio.create_task(self.hear(place, process))

    async def hear(self, place, process):
        async for line in process.stdout:
            await self.said.put((place, json.loads(line)))
        await process.wait()
        await self.said.put((place, {"exit": process.returncode}))

    def tell(self):
        self.epoch += 1
        for process in self.processes.values():
            with contextlib.suppress(ConnectionError):
                process.stdin.write(f"{self.epoch}\n".encode())

    async def run(self):
        for place in range(SIZES[self.kind]):
            await self.start(place, disturbed=place == self.at)
        self.tell()
        found = {}
        while len(found) < SIZES[self.kind]:
            place, said = await self.said.get()
            if "digest" in said:
                found[place] = said
            elif "struck" in said:
                if self.fault == "stop":
                    await asyncio.sleep(0.2)
                    self.processes[place].send_signal(signal.SIGKILL)
            elif said["exit"]:
                await self.start(place, disturbed=False)
                self.tell()
        for process in self.processes.values():
            await process.wait()
        return found


async def train(folder, kind, **fault):
    folder.mkdir(exist_ok=True)
    (folder / "rank.py").write_text(textwrap.dedent(RANK))
    server, address = await RendezvousServer().serve("127.0.0.1")
    ranks = Ranks(folder, address, kind, **fault)
    try:
        async with asyncio.timeout(150):
            return await ranks.run()
    finally:
        for process in ranks.processes.values():
            if process.returncode is None:
                process.kill()
        server.close()


@pytest.mark.parametrize("kind", SIZES)
async def test_a_lost_rank_leaves_no_trace_in_the_parameters(tmp_path, kind):
    undisturbed = await train(tmp_path / "undisturbed", kind)
    for fault, where, at in (
        ("kill", "forward", 1),
        ("kill", "backward", 0),
        ("stop", "backward", 1),
        ("kill", "vote", 1),
    ):
        found = await train(tmp_path / f"{fault}-{where}", kind, fault=fault, where=where, at=at)
        digests = [{place: each["digest"] for place, each in ranks.items()} for ranks in (undisturbed, found)]
        assert digests[0] == digests[1], (fault, where)
        assert max(each["reformed"] for each in found.values()) > 1
