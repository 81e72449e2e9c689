"""Ranks of groups without any cluster: processes that meet at a real rendezvous, each with a script of its own."""

import asyncio
import textwrap
from functools import partial

from unicron_agent.fabric import Fabric
from unicron_agent.workers.rendezvous import RendezvousServer

from helpers import standby

MEMBERSHIP = """
    import sys
    from msgspec.structs import replace
    from unicron.contracts.tasks import ParallelLayout
    from unicron.contracts.worker import NOWHERE

    def membership(name, epoch, world, **fields):
        fields = {"rendezvous": sys.argv[1], "rank": int(sys.argv[2]), **fields}
        return replace(NOWHERE, rendezvous_id=name, epoch=epoch, world_size=world, **fields)
"""
"""Prelude of every rank's script."""


async def run_ranks(tmp_path, script, count, *arguments, **environment):
    """Run `count` processes of the script that meet at a real rendezvous; return what each printed."""
    path = tmp_path / "rank.py"
    path.write_text(textwrap.dedent(MEMBERSHIP) + textwrap.dedent(script))
    server, address = await RendezvousServer(Fabric("", "n1")).serve("127.0.0.1")
    ranks = (
        partial(standby.run, path, address, str(rank), str(count), *arguments, **environment) for rank in range(count)
    )
    try:
        found = await asyncio.gather(*(asyncio.to_thread(rank) for rank in ranks))
    finally:
        server.close()
    assert [code for code, _ in found] == [0] * count, [written for _, written in found]
    return [standby.printed(written) for _, written in found]
