"""What holds for every source of states: one arrives whole and checked, or not at all and nothing is left behind."""

import asyncio
import os
import threading
from contextlib import asynccontextmanager

import pytest
from unicron_agent import state_sources
from unicron_agent.memory import StateMemory
from unicron_agent.state_server import StateServer
from unicron_agent.state_sources import Peer, SharedMemory, source_of
from unicron_agent.traffic import NodeTraffic
from xxhash import xxh3_128

from tests.helpers.fabric import fabric
from unicron.contracts.states import StateLocation, StateRef
from unicron.errors import StateTransferError

NAME = "gpt-1.3.state"
CONTENT = os.urandom(5 * 1024 * 1024 + 17)


class Holder:
    """A holder's directory, a taker's, and the source between them."""

    def __init__(self, source, held, taken, server, address):
        self.source, self.held, self.server, self.address = source, held, server, address
        self.target = taken / "gpt-2.fetched"
        self.export(CONTENT)

    def export(self, content):
        (self.held / NAME).write_bytes(content)

    def ref(self, name=NAME):
        location = StateLocation(node="n1", worker="gpt-1", name=name, address=self.address)
        checksum = xxh3_128(CONTENT).digest()
        return StateRef(task="gpt", iteration=3, place=0, location=location, size=len(CONTENT), checksum=checksum)

    async def obtain(self, name=NAME):
        return await self.source.obtain(self.ref(name), self.target)

    def left_behind(self):
        return sorted({*self.held.iterdir(), *self.target.parent.iterdir()} - {self.held / NAME})


@asynccontextmanager
async def serving(directory):
    memory, traffic, own = StateMemory(directory, 0), NodeTraffic(directory), fabric(directory.parent, "n1")
    server, address = await StateServer(memory, "n1", lambda *_: None, traffic, own).serve("127.0.0.1")
    try:
        yield server, address
    finally:
        await server.stop(0)


@pytest.fixture(params=["shared-memory", "peer"])
async def scene(request, tmp_path):
    held, taken = tmp_path / "held", tmp_path / "taken"
    held.mkdir()
    taken.mkdir()
    async with serving(held) as (server, address):
        if request.param == "peer":
            yield Holder(Peer(fabric(tmp_path, "n2")), held, taken, server, address)
        else:  # both are of one node
            yield Holder(SharedMemory(StateMemory(held, 0)), held, held, server, address)


async def test_a_state_arrives_whole_is_the_takers_to_remove_and_stays_when_its_holder_is_done_with_it(scene):
    (await scene.obtain()).unlink()
    assert (scene.held / NAME).read_bytes() == CONTENT
    path = await scene.obtain()
    (scene.held / NAME).unlink()
    assert path.read_bytes() == CONTENT
    assert scene.left_behind() == [path]


async def test_a_state_obtained_anew_takes_the_place_of_an_old_one(scene):
    scene.target.write_bytes(b"of an earlier time")
    scene.target.with_suffix(".part").write_bytes(b"half of one")
    assert (await scene.obtain()).read_bytes() == CONTENT
    assert scene.left_behind() == [scene.target]


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(None, id="missing"),
        pytest.param(CONTENT[:-1], id="truncated"),
        pytest.param(b"", id="empty"),
        pytest.param(CONTENT[:-1] + bytes([CONTENT[-1] ^ 1]), id="another"),
    ],
)
async def test_what_is_not_what_was_exported_is_refused_by_name(scene, content):
    (scene.held / NAME).unlink() if content is None else scene.export(content)
    with pytest.raises(StateTransferError, match=NAME):
        await scene.obtain()
    assert scene.left_behind() == []


@pytest.mark.parametrize(
    "name", ["../secret.1.state", "/etc/passwd", "", "a.b.state", "x/../gpt-1.3.state", "\0.1.state"]
)
async def test_a_hostile_name_reaches_no_file(scene, name):
    (scene.held.parent / "secret.1.state").write_bytes(CONTENT)
    with pytest.raises(StateTransferError, match="state"):
        await scene.obtain(name)
    assert scene.left_behind() == []


async def test_a_source_that_goes_away_in_the_middle_leaves_all_or_nothing(scene):
    obtaining = asyncio.ensure_future(scene.obtain())
    while not scene.target.with_suffix(".part").exists() and not obtaining.done():
        await asyncio.sleep(0)
    await scene.server.stop(0)
    (scene.held / NAME).unlink()
    try:
        assert (await obtaining).read_bytes() == CONTENT
    except StateTransferError:
        assert scene.left_behind() == []
    else:
        assert isinstance(scene.source, SharedMemory), "what comes from another node can't be whole"


async def test_a_taker_that_gives_up_leaves_nothing(scene, monkeypatch):
    release = threading.Event()
    check = state_sources.check
    # else it may be through before we look: the check is made in a thread
    monkeypatch.setattr(state_sources, "check", lambda *args: (release.wait(), check(*args)))
    obtaining = asyncio.ensure_future(scene.obtain())
    while not scene.target.with_suffix(".part").exists():
        await asyncio.sleep(0)
    obtaining.cancel()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await obtaining
    assert scene.left_behind() == []


async def test_no_room_is_said_with_its_place(scene, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    if isinstance(scene.source, SharedMemory):
        monkeypatch.setattr(os, "link", full)
    else:
        scene.target = scene.target.with_name("full")
        monkeypatch.setattr(type(scene.target), "unlink", lambda *_args, **_fields: None)
        scene.target.with_suffix(".part").symlink_to("/dev/full")
    with pytest.raises(StateTransferError, match=f"into {scene.target.parent}: No space left on device"):
        await scene.obtain()


def test_the_location_chooses_the_source(tmp_path):
    def ref(node):
        location = StateLocation(node=node, worker="gpt-1", name=NAME, address="h:1")
        return StateRef(task="gpt", iteration=3, place=0, location=location, size=1, checksum=b"")

    assert isinstance(source_of(ref("n1"), "n1", tmp_path, None), SharedMemory)
    assert isinstance(source_of(ref("n2"), "n1", tmp_path, None), Peer)
