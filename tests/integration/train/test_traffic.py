"""Copies of states on their way to another node, between what a model's parts send each other."""

import json
import re

import pytest
import pytest_asyncio
from helpers.training import running_cluster, task, write_script

from unicron.contracts.events import StateSecured
from unicron.contracts.tasks import ParallelLayout, TaskState

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

ITERATIONS, FIRST = 18, 6
SHARDED = """
    import json, os, time
    import torch
    from unicron.train import Session
    from unicron.train.traffic import Traffic

    class Noted(Traffic):
        sent = []

        def begins(self):
            super().begins()
            if self._under_way == 1:
                self.sent.append([session.iteration, time.monotonic()])

        def ends(self):
            if self._under_way == 1:
                self.sent[-1].append(time.monotonic())
            super().ends()

    from unicron.train import torch_shell
    torch_shell.Traffic = Noted
    session = Session(seed=3)
    from torch.distributed.fsdp import fully_shard
    shard = session.mesh["shard"]
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4)))
    for layer in model:
        fully_shard(layer, mesh=shard)
    fully_shard(model, mesh=shard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    session.protect(model=model, optimizer=optimizer)
    for iteration in session.iterations():
        for microbatch in session.microbatches():
            session.backward(model(torch.randn(4, 1024)).square().mean())
            time.sleep(0.1)
        session.step()
    with open(os.environ["UNICRON_NODE"], "w") as file:
        json.dump(Noted.sent, file)
    os.rename(os.environ["UNICRON_NODE"], os.environ["NOTES"] + os.environ["UNICRON_NODE"])
"""
ARRIVED = re.compile(r"a piece of (\d+) bytes was on its way from ([\d.]+) to ([\d.]+)")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNICRON_LOG_LEVEL", "debug")
        async with running_cluster(tmp_path_factory.mktemp("cluster"), nodes=2) as scene:
            yield scene


async def test_copies_go_while_the_parts_of_a_model_send_each_other_nothing(scene, tmp_path):
    script = write_script(tmp_path, SHARDED)
    notes = {node: tmp_path / f"sent-{node}" for node in ("node-1", "node-2")}
    spec = task(
        script,
        "sharded",
        min_workers=2,
        max_workers=2,
        microbatches=2,
        iterations=ITERATIONS,
        layout=ParallelLayout(shard=2),
        env={"NOTES": str(tmp_path / "sent-")},
    )
    await scene.client.submit(spec)
    view = await scene.until_state("sharded", TaskState.FINISHED, TaskState.FAILED, timeout_s=120.0)
    assert view.state is TaskState.FINISHED, (view.reason, view.traceback)
    secured = scene.of(StateSecured, task="sharded")
    assert {node for each in secured for node in each.nodes} == {"node-1", "node-2"}, "copies went both ways"
    await scene.until(lambda: all(path.exists() for path in notes.values()))
    for node, path in notes.items():
        noted = json.loads(path.read_text())
        sent = [each[1:] for each in noted if each[0] >= FIRST and len(each) == 3]
        began, ended = sent[0][0], sent[-1][1]
        log = scene.cluster.log(node).read_text()
        pieces = [(float(start), float(end)) for _, start, end in ARRIVED.findall(log) if began < float(start) < ended]
        busy_share = sum(end - start for start, end in sent) / (ended - began)
        met = [piece for piece in pieces if any(start < piece[0] < end for start, end in sent)]
        late = [piece for piece in pieces if any(piece[0] < start < piece[1] for start, end in sent)]
        assert len(pieces) > ITERATIONS
        assert len(met) <= len(pieces) * busy_share / 5, "begun while something was sent: as many as by chance"
        assert len(late) <= len(pieces) * busy_share / 2, "still on their way when a collective began"
