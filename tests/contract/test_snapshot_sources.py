"""Each source of snapshots returns a complete one, or nothing and the reason."""

import asyncio
import os
import threading

import pytest
from helpers.fabric import Node, fabric, state_ref
from unicron_agent.snapshots import sources
from unicron_agent.snapshots.sources import OtherNode, OwnMemory, source_of

from unicron.errors import StateTransferError, UnsoundStateError

CONTENT = os.urandom(5 * 1024 * 1024 + 17)
LENT = "gpt-1.3.state"


class Holder:
    """A node that holds a state, a taker's directory, and the source between them."""

    def __init__(self, node, source, taken):
        self.node, self.held, self.source = node, node.folder, source
        self.target = taken / "gpt-2.fetched"
        self.export(CONTENT)

    def export(self, content):
        (self.held / LENT).write_bytes(content)

    async def obtain(self, name=LENT):
        return await self.source.obtain(state_ref(CONTENT, name, address=self.node.address), self.target)

    def left_behind(self):
        return sorted({*self.held.iterdir(), *self.target.parent.iterdir()} - {self.held / LENT})


@pytest.fixture(params=["own memory", "other node"])
async def scene(request, tmp_path):
    taken = tmp_path / "taken"
    taken.mkdir()
    async with Node("n1", tmp_path / "held", fabric(tmp_path)).served() as node:
        if request.param == "other node":
            yield Holder(node, OtherNode(fabric(tmp_path, "n2")), taken)
        else:  # both are of one node
            yield Holder(node, OwnMemory(node.memory), node.folder)


async def test_a_state_arrives_whole_is_the_takers_to_remove_and_stays_when_its_holder_is_done_with_it(scene):
    (await scene.obtain()).unlink()
    assert (scene.held / LENT).read_bytes() == CONTENT
    path = await scene.obtain()
    (scene.held / LENT).unlink()
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
    (scene.held / LENT).unlink() if content is None else scene.export(content)
    with pytest.raises(StateTransferError if content is None else UnsoundStateError, match=LENT):
        await scene.obtain()
    assert scene.left_behind() == []


async def test_one_that_was_to_last_and_is_gone_is_unsound_so_that_nobody_counts_on_it_any_more(scene):
    with pytest.raises(UnsoundStateError, match="not there"):
        await scene.obtain("gpt-1.0.saved")


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
    await scene.node.server.stop(0)
    (scene.held / LENT).unlink()
    try:
        assert (await obtaining).read_bytes() == CONTENT
    except StateTransferError:
        assert scene.left_behind() == []
    else:
        assert isinstance(scene.source, OwnMemory), "what comes from another node can't be whole"


async def test_a_taker_that_gives_up_leaves_nothing(scene, monkeypatch):
    release = threading.Event()
    verify = sources.verify
    # else it may be through before we look: the check is made in a thread
    monkeypatch.setattr(sources, "verify", lambda *args: (release.wait(), verify(*args)))
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

    if isinstance(scene.source, OwnMemory):
        monkeypatch.setattr(os, "link", full)
    else:
        scene.target = scene.target.with_name("full")
        monkeypatch.setattr(type(scene.target), "unlink", lambda *_args, **_fields: None)
        scene.target.with_suffix(".part").symlink_to("/dev/full")
    with pytest.raises(StateTransferError, match=f"into {scene.target.parent}: No space left on device"):
        await scene.obtain()


def test_the_location_chooses_the_source(tmp_path):
    for node, kind in (("n1", OwnMemory), ("n2", OtherNode)):
        assert isinstance(source_of(state_ref(b"x", LENT, node), "n1", tmp_path, None), kind)
