"""The journal and the services' state in a file, and made anew from it on other servers."""

import asyncio
import zipfile

import pytest
from helpers.cli import KEYS, data, unicron
from helpers.ports import free_port
from helpers.worlds import PATIENT_PING_S
from unicron_deploy.keys import Keyring
from unicron_deploy.nats_server import NatsServer

from unicron.bus import backup, nats, topology
from unicron.errors import InvalidInputError
from unicron.settings import Settings


@pytest.fixture
def servers(tmp_path):
    """Two servers that know the same keys; each has its own disk."""
    keys = Keyring(tmp_path / "keys")
    keys.ensure(["node-1"])
    made = [NatsServer(tmp_path / name, free_port(), accounts=keys.accounts, ping_s=PATIENT_PING_S) for name in "ab"]
    for server in made:
        server.start()
        KEYS[server.url] = str(keys.path("operator"))
    yield keys, *made
    for server in made:
        server.kill()


def settings(server, keys, name="operator"):
    return Settings(nats_url=server.url, nats_nkey=str(keys.path(name)))


async def written(server, keys):
    """Have a service and a node write; return what is stored."""
    bus = await nats.connect(settings(server, keys), "test")
    await topology.provision(bus.jetstream)
    await bus.close()
    node = await nats.connect(settings(server, keys, "node-1"), "node")
    for number in range(300):
        await node.append("unicron.v1.evt.node-1.T.k", b"x" * 2000 + b"%d" % number, f"m{number}")
    await node.close()
    service = await nats.connect(settings(server, keys, "planner"), "planner")
    state = service.bucket("state")
    await state.update("planner", b"2", await state.create("planner", b"1"))
    await service.close()
    return await stored(server, keys)


async def stored(server, keys):
    service = await nats.connect(settings(server, keys, "planner"), "planner")
    end, found = await service.tail(), []
    async for entry in service.follow(["unicron.v1.evt.>"], 0):
        found.append(entry)
        if entry.sequence == end:
            break
    state = await service.bucket("state").get("planner")
    await service.close()
    return found, state


async def operated(server, keys, job, *arguments):
    bus = await nats.connect(settings(server, keys), "operator")
    try:
        return await job(bus, *arguments)
    finally:
        await bus.close()


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
        node = await nats.connect(settings(second, keys, "node-1"), "node")
        said = [await node.append("unicron.v1.evt.node-1.T.k", b"again", f"m{number}") for number in (0, 299)]
        new = await node.append("unicron.v1.evt.node-1.T.k", b"new", "m300")
        await node.close()
        return said, new

    assert asyncio.run(say_again()) == ([1, 300], 301)


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
