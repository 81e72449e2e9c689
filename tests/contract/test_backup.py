"""The journal and the services' state in a file, and made anew from it; and what a server does without room."""

import asyncio
import os
import zipfile

import pytest
from helpers.buses import take
from helpers.cli import KEYS, data, unicron
from helpers.worlds import known, serving
from unicron_deploy import nats_server
from unicron_deploy.keys import Keyring

from unicron.bus import backup, nats, topology
from unicron.errors import InvalidInputError
from unicron.service.bootstrap import connected

pytestmark = pytest.mark.real


@pytest.fixture
def servers(tmp_path):
    """Two servers that know the same keys; each has its own disk."""
    keys = Keyring(tmp_path / "keys")
    keys.ensure(["node-1"])
    one, other = (serving(tmp_path / name, accounts=keys.accounts) for name in "ab")
    with one as first, other as second:
        KEYS.update({each.url: str(keys.path("operator")) for each in (first, second)})
        yield keys, first, second


async def written(server, keys):
    """Have a service and a node write; return what is stored."""
    async with connected(known(server, keys, "operator"), "test") as bus:
        await topology.provision(bus.jetstream)
    async with connected(known(server, keys, "node-1"), "node") as node:
        for number in range(300):
            await node.append("unicron.v1.evt.node-1.T.k", b"x" * 2000 + b"%d" % number, f"m{number}")
    async with connected(known(server, keys, "planner"), "planner") as service:
        state = service.bucket("state")
        await state.update("planner", b"2", await state.create("planner", b"1"))
    return await stored(server, keys)


async def stored(server, keys):
    async with connected(known(server, keys, "planner"), "planner") as service:
        found = await take(service.follow(["unicron.v1.evt.>"], 0), await service.tail())
        return found, await service.bucket("state").get("planner")


async def operated(server, keys, job, *arguments):
    async with connected(known(server, keys, "operator"), "operator") as bus:
        return await job(bus, *arguments)


def test_what_was_backed_up_is_there_again_with_its_sequences_and_what_came_before_is_known(servers, tmp_path):
    keys, first, second = servers
    before = asyncio.run(written(first, keys))
    file = tmp_path / "journal.backup"
    assert data("backup", str(file), url=first.url)["streams"]["UNICRON"] == 300
    with pytest.raises(InvalidInputError, match="is there already"):
        asyncio.run(operated(first, keys, backup.backup, file))
    with pytest.raises(InvalidInputError, match="what it holds would be lost"):
        asyncio.run(operated(first, keys, backup.restore, file, None))
    assert asyncio.run(stored(first, keys)) == before
    assert "restart the servers" in unicron("restore", str(file), url=second.url)
    second.restart()
    assert asyncio.run(stored(second, keys)) == before

    async def say_again():
        async with connected(known(second, keys, "node-1"), "node") as node:
            return [await node.append("unicron.v1.evt.node-1.T.k", b"again", f"m{number}") for number in (0, 299, 300)]

    assert asyncio.run(say_again()) == [1, 300, 301], "the last is new"


def test_a_damaged_file_changes_nothing(servers, tmp_path):
    keys, first, second = servers
    asyncio.run(written(first, keys))
    file, damaged = tmp_path / "good", tmp_path / "damaged"
    asyncio.run(operated(first, keys, backup.backup, file))
    with zipfile.ZipFile(file) as good, zipfile.ZipFile(damaged, "w") as bad:
        for name in good.namelist():
            content = bytearray(good.read(name))
            if name == topology.STREAM:
                content[len(content) // 2] ^= 1
            bad.writestr(name, bytes(content))
    with pytest.raises(InvalidInputError, match=r"UNICRON is damaged"):
        backup.verify(damaged)
    with pytest.raises(InvalidInputError, match=r"UNICRON is damaged"):
        asyncio.run(operated(second, keys, backup.restore, damaged, None))
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InvalidInputError, match="is no backup"):
        backup.verify(file)
    said = unicron("restore", str(tmp_path / "nothing"), url=second.url, code=1)
    assert "give a file that `unicron backup` wrote" in said
    asyncio.run(written(second, keys))  # no stream was left there half


# --- no room ----------------------------------------------------------------------------------------------------------


MB = 1024**2


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A server with room for 40 MB, and its keys."""
    whole = nats_server.config_text
    monkeypatch.setattr(
        nats_server,
        "config_text",
        lambda *words, **more: whole(*words, **more).replace("jetstream {", "jetstream {\n  max_file_store: 40MB", 1),
    )
    keys = Keyring(tmp_path / "keys")
    keys.ensure(["n1"])
    with serving(tmp_path / "nats", accounts=keys.accounts) as server:
        yield server, keys


async def test_who_has_much_to_say_pushes_out_what_is_old_and_keeps_nobody_from_storing(small):
    registry, node = [await nats.connect(known(*small, user), user) for user in ("registry", "n1")]
    for _ in range(2):  # again, as at each start
        await topology.provision(registry.jetstream)
        kept = (await registry.jetstream.stream_info(topology.STREAM)).config.max_bytes
        assert kept == 32 * MB
    for number in range(600):
        await node.append("unicron.v1.evt.n1.T.k", os.urandom(90_000), str(number))
    assert await registry.tail() == 600
    state = (await registry.jetstream.stream_info(topology.STREAM)).state
    assert state.first_seq > 1
    assert state.bytes <= 32 * MB
    for name in ("state", "lease"):
        await registry.bucket(name).create("registry", b"mine")
    for bus in (registry, node):
        await bus.close()
