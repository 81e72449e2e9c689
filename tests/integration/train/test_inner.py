"""The groups inside of a replica: formed, interrupted and formed anew in the objects that a model holds."""

import asyncio
import textwrap

import pytest
from helpers import standby
from unicron_agent.fabric import Fabric
from unicron_agent.workers.rendezvous import RendezvousServer

pytestmark = pytest.mark.slow

RANK = """
    import json, os, sys, threading, time
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Shard
    from msgspec.structs import replace
    from unicron.contracts.tasks import ParallelLayout
    from unicron.contracts.worker import NOWHERE
    from unicron.errors import GroupBrokenError
    from unicron.train.groups.inner import InnerGroups
    from unicron.train.groups.rendezvous import Rendezvous

    address, place = sys.argv[1], int(sys.argv[2])
    found = {}
    inner = InnerGroups(ParallelLayout(tensor=2, shard=2), place, torch.device("cpu"))
    tensor, shard = inner.mesh["tensor"].get_group(), inner.mesh["shard"].get_group()
    again = dist.new_group([0, 1, 2, 3])  # as libraries make groups of ranks that have one

    def summed(group=None):
        value = torch.tensor([float(place)])
        dist.all_reduce(value, group=group)
        return value.item()

    def say(name, value):
        found.setdefault(name, []).append(value)

    def form(epoch):
        inner.form(epoch, lambda: Rendezvous(replace(NOWHERE, rendezvous=address, rendezvous_id="inner", epoch=epoch)))

    def work():
        say("sums", [summed(), summed(tensor), summed(shard), summed(again)])
        rows = [torch.zeros(1) for _ in range(2)]
        gathered = dist.all_gather(rows, torch.tensor([float(place)]), group=shard, async_op=True)
        say("gathered", gathered.get_future().then(lambda done: [row.item() for row in done.value()]).wait())
        sent, got = torch.tensor([float(place)]), torch.zeros(1)
        next_, last = (place + 1) % 4, (place - 1) % 4
        for each in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, next_), dist.P2POp(dist.irecv, got, last)]):
            each.wait()
        say("received", got.item())
        whole = DTensor.from_local(torch.full((2,), float(place)), inner.mesh["tensor"], [Shard(0)]).full_tensor()
        say("whole", whole.tolist())

    say("ghost", summed())
    say("gathered by ghosts", [None] * 4)
    dist.all_gather_object(found["gathered by ghosts"][0], place)
    say("epoch", inner.epoch)
    form(3)
    work()
    say("insides", len({id(group.inside) for group in inner._groups if group.size() > 1}))
    if place == 3:  # takes no part, so that the others wait for it
        time.sleep(0.05)
        inner.interrupt(4)
    began = time.monotonic()
    summed(tensor if place >= 2 else None)
    say("woken", time.monotonic() - began < 20.0)  # else for ever
    for _ in range(20):
        if inner.epoch < 0:
            break
        summed()
    say("epoch", inner.epoch)
    say("broken", summed())
    try:
        inner.gather([0.0])
    except GroupBrokenError:
        say("told", True)
    inner.interrupt(4)
    form(4)
    say("epoch", inner.epoch)
    work()
    say("conferred", inner.gather([float(place), 7.0]))
    inner.muted = True
    say("muted", summed())
    inner.muted, inner.strict = False, True
    say("not interrupted", inner.interrupt(9))
    inner.gather([0.0])
    if place == 3:
        inner._connections.cut_below(9)  # as if it had ended
    try:
        summed()
        summed()
    except GroupBrokenError:
        say("strict", True)
    print(json.dumps(found), flush=True)
    os._exit(0)
"""


async def test_they_are_formed_anew_in_the_same_objects(tmp_path):
    path = tmp_path / "rank.py"
    path.write_text(textwrap.dedent(RANK))
    server, address = await RendezvousServer(Fabric("", "n1")).serve("127.0.0.1")
    ranks = (asyncio.to_thread(standby.run, path, address, str(place)) for place in range(4))
    try:
        told = [standby.printed(written) for _, written in await asyncio.gather(*ranks)]
    finally:
        server.close()
    for place, found in enumerate(told):
        pair, across = place // 2 * 2, place % 2
        assert found["ghost"] == [place], "before it has met others, a rank's collectives leave its values as they are"
        assert found["gathered by ghosts"] == [[place] * 4]
        assert found["epoch"] == [-1, -1, 4]
        assert found["sums"] == [[6, 2 * pair + 1, 2 * across + 2, 6]] * 2, "right in either membership"
        assert found["gathered"] == [[across, across + 2]] * 2
        assert found["received"] == [(place - 1) % 4] * 2
        assert found["whole"] == [[pair, pair, pair + 1, pair + 1]] * 2
        assert found["insides"] == [3], "groups of the same ranks share what is inside of them"
        assert found["woken"] == found["told"] == found["strict"] == [True]
        assert found["broken"] == found["muted"] == [place], "what broke returns at once"
        assert found["conferred"] == [[[other, 7] for other in range(4)]]
        assert found["not interrupted"] == [False]
