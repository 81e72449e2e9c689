"""A real worker's forecast of its traffic, which copies of states avoid: when its model's parts send."""

import pytest
from helpers.gate import gate
from helpers.local_cluster import local_cluster
from helpers.training import task, write_script
from unicron_agent.hardware.network import memory_dir

from unicron.contracts.events import StateSecured
from unicron.contracts.tasks import ParallelLayout
from unicron.contracts.traffic import decode_forecast, forecast_name

pytestmark = pytest.mark.slow

SHARDED = """
    import gate
    import torch
    from torch.distributed.fsdp import fully_shard
    from unicron.train import Session
    from unicron.train.session import ranks

    class Watched(ranks.Traffic):
        def begin(self):
            super().begin()
            gate.at(session.iteration, microbatch, "sending")

    ranks.Traffic = Watched
    session, microbatch = Session(seed=3), 0
    model = torch.nn.Linear(32, 32)
    fully_shard(model, mesh=session.mesh["shard"])
    session.protect(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for iteration in session.iterations():
        for microbatch in session.microbatches():
            gate.at(iteration, microbatch, "computing")
            session.backward(model(torch.randn(4, 32)).square().mean())
        session.step()
"""


async def test_a_worker_says_that_the_network_is_not_idle_while_parts_of_its_model_send_each_other_something(tmp_path):
    nodes = ("node-1", "node-2")
    async with local_cluster(tmp_path, nodes=2) as scene, gate() as held:
        fields = {"min_workers": 2, "max_workers": 2, "microbatches": 2, "iterations": 8, "env": held.env}
        held.close(4, 1, phase="computing")
        await scene.client.submit(task(write_script(tmp_path, SHARDED), layout=ParallelLayout(shard=2), **fields))
        folders = [memory_dir((scene.cluster.root / "nodes" / node).resolve()) for node in nodes]
        idle_until = lambda: [decode_forecast((each / forecast_name(0)).read_bytes()).idle_until for each in folders]  # noqa: E731
        await held.held(2)
        assert min(idle_until()) > 0.0
        await scene.until(lambda: {node for each in scene.of(StateSecured) for node in each.nodes} == {*nodes})
        held.close(4, 1, phase="sending")
        await held.held(2)
        assert idle_until() == [0.0, 0.0]
        held.open()
        await scene.ends("t")
