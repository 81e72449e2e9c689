"""The key of a cluster's nodes, while these train: replaced, never shown, and what nobody without it gets past."""

import asyncio
import logging
import time

import grpc
import grpc.aio
import pytest
from helpers.fabric import fabric, fetched
from helpers.gate import gate
from helpers.local_cluster import local_cluster
from helpers.training import difference, plain_run, task, write_script
from unicron_agent.fabric import Fabric
from unicron_agent.snapshots.server import FETCH
from unicron_deploy.keys import Keyring

from unicron import fabric_proofs
from unicron.contracts.commands import Regroup
from unicron.contracts.events import FailureDetected, StateSecured

pytestmark = pytest.mark.slow


async def fetch(own, ref):
    """Return what the node that holds `ref` hands out to who has this key."""
    name, address = ref.location.name, ref.location.address
    return await fetched(address, name, own.header(FETCH, address, name.encode()))


async def test_it_is_replaced_while_a_task_trains_and_nobody_without_it_gets_a_state(tmp_path, monkeypatch, caplog):
    script, out = write_script(tmp_path), tmp_path / "healed.pt"
    keys, name, known = Keyring(tmp_path / "keys"), "t", []
    keys.ensure(["node-1"])
    monkeypatch.setenv("UNICRON_FABRIC_KEY", str(keys.fabric("node-1")))
    caplog.set_level(logging.INFO)

    def note():
        known.append(fabric_proofs.keys_in(keys.fabric("node-1").read_bytes(), time.time()))

    async with local_cluster(tmp_path) as scene, gate() as held:

        async def lose_one(until):
            """Lose one of those who are held; they are held again, with another, when `until` is reached."""
            keys.rotate_fabric()
            note()
            epoch, victim = (await scene.view(name)).epoch, await scene.lose_worker(name, 1)
            await scene.until(lambda: [m for m in scene.of(Regroup, task=name, world_size=3) if m.epoch > epoch])
            held.close(until)
            await held.held(3)
            return victim.worker

        note()
        [[first]] = known
        held.close(3)
        env = {"OUT": str(out), "ACCUMULATE": "float64", **held.env}
        await scene.client.submit(task(script, name, iterations=10, env=env))
        await held.held(3)
        victims = {await lose_one(5), await lose_one(7)}
        [secured, *_] = await scene.until(lambda: scene.of(StateSecured, task=name))
        state, *_ = await scene.client.states(secured.node)
        newest, _ = known[-1]
        assert first not in known[-1]
        assert await fetch(fabric(tmp_path, "node-3", newest), state)
        for stranger in (Fabric("", "node-3"), fabric(tmp_path, "node-3", first)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await fetch(stranger, state)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        held.open()
        await scene.ends(name)
        assert {m.worker for m in scene.of(FailureDetected, task=name)} == victims, "nothing else failed"
        scene.assert_none_twice(name)
        healed = await scene.saved(out)
        every = {key for keys in known for key in keys}
        for order in scene.of(Regroup, task=name):
            every |= {*fabric_proofs.epoch_secrets(every, order.rendezvous_id, order.epoch)}
        assert len(every) > 9
    logs, said = b"".join(path.read_bytes() for path in tmp_path.rglob("*.log")), repr(scene.journal)
    logs += caplog.text.encode()
    assert b"turned" in logs, "they do tell of the strangers"
    assert not any(each in logs or each.hex().encode() in logs or repr(each).encode() in logs for each in every)
    assert not any(each.hex() in said or repr(each) in said for each in every)
    plain = await asyncio.to_thread(plain_run, script, tmp_path / "plain.pt", ITERATIONS="10", ACCUMULATE="float64")
    assert difference(healed, plain) <= 1e-5
