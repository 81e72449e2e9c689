"""The key of a cluster's nodes, while these train: replaced, never shown, and what nobody without it gets past."""

import asyncio
import time

import grpc
import grpc.aio
import pytest
from helpers.fabric import fabric
from helpers.training import difference, plain_run, running_cluster, task, write_script
from unicron_agent.fabric import Fabric
from unicron_agent.state_server import FETCH

from unicron import proofs
from unicron.contracts.commands import Regroup
from unicron.contracts.events import FailureDetected, Regrouped
from unicron.contracts.tasks import TaskState

pytestmark = pytest.mark.slow


async def fetch(own, ref):
    """Return what the node that holds `ref` hands out to who has this key."""
    name, address = ref.location.name.encode(), ref.location.address
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_stream(FETCH)(name, metadata=own.header(FETCH, address, name))
        return b"".join([piece async for piece in call])


def written(root):
    """Return all that the processes of a cluster have logged."""
    return b"".join(path.read_bytes() for path in root.rglob("*.log"))


async def test_it_is_replaced_while_a_task_trains_and_nobody_without_it_gets_a_state(tmp_path):
    script, out = write_script(tmp_path), tmp_path / "healed.pt"
    async with running_cluster(tmp_path) as scene:
        keys, name, known = scene.cluster.keys, "t", []

        async def rotate():
            keys.rotate_fabric()
            known.append(proofs.keys_in(keys.fabric("node-1").read_bytes(), time.time()))

        async def lose_one():
            view = await scene.view(name)
            victim = view.members[1]
            await scene.client.inject(victim.node, "kill-worker", victim.worker)
            later = lambda: [m for m in scene.of(Regrouped, task=name) if m.epoch > view.epoch]  # noqa: E731
            await scene.until(lambda: [m for m in later() if m.world_size == 3 and m.state_from])
            return victim.worker

        known.append(proofs.keys_in(keys.fabric("node-1").read_bytes(), time.time()))
        [[first]] = known
        env = {"OUT": str(out), "ACCUMULATE": "float64", "PACE": "0.1", "HURRY": str(tmp_path / "hurry")}
        await scene.client.submit(task(script, name, iterations=150, env=env))
        await scene.until(lambda: [m for m in scene.of(Regrouped, task=name) if m.world_size == 3])
        await scene.reached(name, 5)
        await rotate()
        victims = [await lose_one()]
        await rotate()
        victims.append(await lose_one())
        held = await scene.client.states((await scene.view(name)).members[0].node)
        newest, _ = known[-1]
        assert first not in known[-1]
        assert await fetch(fabric(tmp_path, "node-3", newest), held[0])
        for stranger in (Fabric("", "node-3"), fabric(tmp_path, "node-3", first)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await fetch(stranger, held[0])
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        (tmp_path / "hurry").touch()
        view = await scene.until_state(name, TaskState.FINISHED, TaskState.FAILED)
        assert view.state is TaskState.FINISHED, view
        assert {m.worker for m in scene.of(FailureDetected, task=name)} == {*victims}, "nothing else failed"
        assert await scene.finished(name) == list(range(150)), "each iteration is finished exactly once"
        healed = await scene.saved(out)
        every = {key for keys in known for key in keys}
        for order in scene.of(Regroup, task=name):
            every |= {*proofs.epoch_secrets(every, order.rendezvous_id, order.epoch)}
        assert len(every) > 9
        logs, said = written(scene.cluster.root), repr(scene.journal)
        assert b"turned" in logs, "they do tell of the strangers"
        assert not any(each in logs or each.hex().encode() in logs or repr(each).encode() in logs for each in every)
        assert not any(each.hex() in said or repr(each) in said for each in every)
    plain = await asyncio.to_thread(plain_run, script, tmp_path / "plain.pt", ITERATIONS="150", ACCUMULATE="float64")
    assert difference(healed, plain) <= 1e-5
