"""A node's copy of another's snapshot: complete, or absent."""

import asyncio
import math
import os
import struct

import grpc
import grpc.aio
import msgspec
import pytest
from helpers.fabric import Node, fabric, fetched, state_ref
from helpers.waiting import until
from unicron_agent.fabric import Fabric
from unicron_agent.snapshots.sending import send_copy
from unicron_agent.snapshots.server import FETCH, KEEP, LIMITS, SnapshotServer
from unicron_agent.snapshots.sources import OtherNode, OwnMemory
from unicron_agent.traffic import NodeTraffic

from unicron.contracts import states
from unicron.contracts.states import StateRef, label
from unicron.contracts.traffic import Forecast
from unicron.errors import StateTransferError, UnsoundStateError
from unicron.snapshots.memory import SnapshotMemory

NAME, OLDER = "gpt-1.1.saved", "gpt-1.0.saved"
CONTENT = os.urandom(5 * 1024 * 1024 + 17)


def ref(content=CONTENT, name=NAME, **fields):
    return state_ref(content, name, **fields)


class Keeper(Node):
    """Node n2, which keeps copies; and the memory of n1, whose worker saves."""

    def __init__(self, tmp_path, limit=0):
        super().__init__("n2", tmp_path / "n2", fabric(tmp_path, "n2"), limit)
        self.own, self.own_fabric = tmp_path / "n1", fabric(tmp_path, "n1")
        self.own.mkdir()
        self.sender = SnapshotMemory(self.own, 0)

    def save(self, content=CONTENT, **fields):
        """Have a worker of n1 save something."""
        saved = ref(content, **fields)
        (self.own / saved.location.name).write_bytes(content + label(saved))
        return saved

    async def send(self, saved, traffic=None, *, paced=True):
        traffic = traffic or NodeTraffic(self.own)
        keeper = states.Keeper(node="n2", address=self.address)
        await send_copy(self.sender, saved, keeper, traffic, self.own_fabric, paced=paced)

    async def stream(self, *pieces, cut=None):
        """Send a stream of just these pieces; it is cut off when `cut` returns something true."""
        async with Fabric("", "").channel(self.address, "", LIMITS) as channel:
            call = channel.stream_unary(KEEP)(metadata=self.own_fabric.proof_metadata(KEEP, self.address, pieces[0]))
            await call.write(pieces[0])
            if dict(await call.initial_metadata()):
                for piece in pieces[1:]:
                    await call.write(piece)
                if cut:
                    await until(cut)
                    call.cancel()
                    return
                await call.done_writing()
            await call

    def files(self):
        return {path.name: path.read_bytes() for path in self.folder.iterdir()}


@pytest.fixture
async def keeper(tmp_path):
    async with Keeper(tmp_path).served() as keeper:
        yield keeper


def first(saved):
    return msgspec.msgpack.encode(saved)


async def test_a_copy_arrives_whole_and_says_where_it_lies(keeper):
    saved = keeper.save()
    await keeper.send(saved)
    here = saved.at("n2", keeper.address)
    assert keeper.reports == [(NAME, None), (NAME, here)]
    assert keeper.files() == {NAME: CONTENT + label(here)}
    assert keeper.memory.saved() == [here], "an agent that is started again finds it"


async def test_what_was_left_behind_arrives_whole_too_and_is_written_once(keeper):
    left = ref(name="gpt-1.7.kept")
    (keeper.own / left.location.name).write_bytes(CONTENT)
    await keeper.send(left)
    here = left.at("n2", keeper.address)
    assert keeper.reports == [("gpt-1.7.kept", None), ("gpt-1.7.kept", here)]
    assert keeper.memory.kept() == ["gpt-1.7.kept"], "an agent that is started again finds it"
    taken = await OwnMemory(keeper.memory).obtain(here, keeper.folder / "gpt-2.fetched")
    assert taken.read_bytes()[: here.size] == CONTENT
    assert (await OtherNode(keeper.own_fabric).obtain(here, keeper.own / "taken")).read_bytes() == CONTENT
    keeper.reports.clear()
    await keeper.send(left)
    assert keeper.reports == [], "who takes it meanwhile is not disturbed"


async def test_a_shorter_copy_over_a_longer_one_has_nothing_of_it(keeper):
    await keeper.send(keeper.save())
    shorter = keeper.save(CONTENT[:1000], iteration=5)
    await keeper.send(shorter)
    assert keeper.files() == {NAME: CONTENT[:1000] + label(shorter.at("n2", keeper.address))}


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param([CONTENT[:1_000_000]], id="too little"),
        pytest.param([CONTENT[:2_000_000]] * 3, id="more"),
        pytest.param([bytes(1_000_000)] * 5 + [bytes(len(CONTENT) - 5_000_000)], id="something else"),
        pytest.param([], id="nothing"),
    ],
)
async def test_what_is_not_what_was_announced_is_not_kept_and_the_older_copy_stays(keeper, sent):
    older = keeper.save(b"older", name=OLDER, iteration=2)
    await keeper.send(older)
    before = keeper.files()
    with pytest.raises(grpc.aio.AioRpcError, match="bytes of"):
        await keeper.stream(first(ref()), *sent)
    assert keeper.files() == before
    assert keeper.reports[-1] == (NAME, None)
    assert keeper.memory.saved() == [older.at("n2", keeper.address)]


async def test_a_stream_that_is_cut_leaves_nothing_and_the_older_copy_stays(keeper):
    older = keeper.save(b"older", name=OLDER, iteration=2)
    await keeper.send(older)
    before, keeper.reports = keeper.files(), []
    await keeper.stream(first(ref()), CONTENT[:1_000_000], cut=lambda: keeper.reports)
    await until(lambda: keeper.files() == before)
    assert keeper.reports == [(NAME, None)]
    await keeper.send(keeper.save())  # and it can be sent again
    assert len(keeper.memory.saved()) == 2


async def test_an_agent_that_ends_in_the_middle_has_half_a_file_that_the_next_takes_for_none(keeper):
    await keeper.send(keeper.save())
    half = keeper.files()[NAME][: len(CONTENT) // 2]
    (keeper.folder / NAME).write_bytes(half)
    assert keeper.memory.saved() == []
    keeper.memory.clean()
    assert keeper.files() == {}


@pytest.mark.parametrize("name", ["../n1/gpt-1.1.saved", "/etc/passwd", "gpt-1.1.saved/../x.1.saved", "", "agent.sock"])
async def test_a_name_that_leads_elsewhere_is_refused(keeper, name):
    (keeper.folder / "agent.sock").write_bytes(b"the agent's own")
    saved = keeper.save()
    with pytest.raises(grpc.aio.AioRpcError, match=r"expected WORKER\.NUMBER"):
        await keeper.stream(first(ref(name=name)), CONTENT)
    with pytest.raises(grpc.aio.AioRpcError, match=r"expected WORKER\.NUMBER"):
        await fetched(keeper.address, name, keeper.own_fabric.proof_metadata(FETCH, keeper.address, name.encode()))
    assert keeper.files() == {"agent.sock": b"the agent's own"}
    assert (keeper.own / NAME).read_bytes() == CONTENT + label(saved)
    assert keeper.reports == []


NOT_SAVED, NOT_SAID = "nothing that a worker has saved", "does not say what it is"


@pytest.mark.parametrize(
    ("start", "says"),
    [
        pytest.param(first(ref(name="gpt-2.1.saved")), NOT_SAVED, id="of another worker"),
        pytest.param(first(ref(name="gpt-1.1.state")), NOT_SAVED, id="lent, not saved"),
        pytest.param(first(ref(b"")), NOT_SAVED, id="of an empty state"),
        pytest.param(b"", NOT_SAID, id="empty"),
        pytest.param(b"\xc1", NOT_SAID, id="no msgpack"),
        pytest.param(CONTENT[:99], NOT_SAID, id="content"),
        pytest.param(first(ref()).replace(b"gpt-1.1", b"\xff\xff\xff-1.1"), NOT_SAID, id="a name that is no text"),
    ],
)
async def test_what_no_worker_has_saved_or_does_not_say_what_it_is_is_refused(keeper, start, says):
    with pytest.raises(grpc.aio.AioRpcError, match=says):
        await keeper.stream(start, CONTENT)
    assert (keeper.files(), keeper.reports) == ({}, [])


async def test_a_copy_that_does_not_fit_is_refused_before_anything_is_written(tmp_path):
    async with Keeper(tmp_path, limit=len(CONTENT) + 1000).served() as keeper:
        await keeper.send(keeper.save())
        before = keeper.files()
        with pytest.raises(StateTransferError, match="raise UNICRON_STATE_LIMIT"):
            await keeper.send(keeper.save(CONTENT[:2000], name=OLDER, iteration=4))
        assert keeper.files() == before
        await keeper.send(keeper.save(CONTENT[::-1], iteration=5))  # over the one that is there it fits


async def test_what_stops_the_writing_is_told_to_the_sender_and_nothing_is_on_its_way_any_more(keeper):
    traffic = NodeTraffic(keeper.own)
    (keeper.folder / NAME).symlink_to("/dev/full")
    with pytest.raises(StateTransferError, match=f"{keeper.folder}: (Invalid argument|No space left)"):
        await keeper.send(keeper.save(), traffic)
    assert keeper.files() == {}
    assert traffic.line.on_its_way == 0


async def test_a_keeper_that_is_gone_is_an_error_like_any_other(keeper):
    keeper.address = "127.0.0.1:1"
    with pytest.raises(StateTransferError, match=f"no copy of {NAME} for 127.0.0.1:1"):
        await keeper.send(keeper.save())


async def test_two_do_not_write_the_same_copy_at_once(keeper):
    saved = keeper.save()
    refused = []
    writing = asyncio.ensure_future(keeper.stream(first(ref()), CONTENT[:1_000_000], cut=lambda: refused))
    await until(lambda: keeper.reports)
    with pytest.raises(StateTransferError, match="is being written already") as refusal:
        await keeper.send(saved)
    refused.append(refusal)
    await writing
    await until(lambda: not keeper.files())
    await keeper.send(saved)


async def test_a_senders_own_file_that_is_not_what_was_saved_is_told_apart_from_a_bad_line(keeper):
    saved = keeper.save()
    data = bytearray((keeper.own / NAME).read_bytes())
    data[100] ^= 1
    (keeper.own / NAME).write_bytes(data)
    with pytest.raises(UnsoundStateError, match="wrong checksum"):
        await keeper.send(saved)
    assert keeper.files() == {}


async def test_a_copy_that_somebody_reads_stays_what_it_was_while_a_newer_one_comes(keeper):
    """A worker has taken the copy under a second name: what it maps must neither change nor shrink."""
    await keeper.send(keeper.save())
    here = keeper.memory.saved()[0]
    taken = await OwnMemory(keeper.memory).obtain(here, keeper.folder / "gpt-2.fetched")
    newer = keeper.save(CONTENT[:1000], iteration=5)
    await keeper.send(newer)
    assert taken.read_bytes()[: here.size] == CONTENT
    assert keeper.memory.saved() == [newer.at("n2", keeper.address)]


class Older(SnapshotServer):
    """A keeper of before there were receipts."""

    def service(self, details):
        return grpc.stream_unary_rpc_method_handler(self.take)

    async def take(self, pieces, context):
        saved = msgspec.msgpack.decode(await anext(pieces), type=StateRef)
        await context.send_initial_metadata((("admitted", "yes"),))
        self.taken = saved, b"".join([piece async for piece in pieces])
        return b""


async def test_a_keeper_of_an_older_version_gets_its_copy_too(keeper):
    saved = keeper.save()
    async with keeper.served(Older):
        await keeper.send(saved)
    assert keeper.made.taken == (saved, CONTENT)


class Babbling(SnapshotServer):
    """A keeper that answers something, before it has been sent anything."""

    answer = b""

    def service(self, details):
        return grpc.stream_stream_rpc_method_handler(self.talk)

    async def talk(self, pieces, context):
        await context.send_initial_metadata((("admitted", "yes"), ("receipts", "yes")))
        await context.write(self.answer)
        async for _ in pieces:
            pass


@pytest.mark.parametrize("answer", [b"x", struct.pack("<d", math.nan), struct.pack("<d", -1.0), struct.pack("<d", 1e9)])
async def test_answers_that_are_no_receipts_are_not_believed(keeper, answer):
    async with keeper.served(Babbling):
        keeper.made.answer = answer
        with pytest.raises(StateTransferError, match="no receipt"):
            await keeper.send(keeper.save())


class Told(NodeTraffic):
    """A node whose workers send while they are `busy`."""

    busy, looks = True, 0

    def forecast(self):
        self.looks += 1
        return Forecast(0.0 if self.busy else math.inf, 30.0)


class Short(Told):
    """A node whose workers send whenever a copy has a piece on its way; spans have room for a part of it."""

    busy = False

    def forecast(self):
        if self.line.on_its_way:
            self.busy = True
        return Forecast(0.0 if self.busy else asyncio.get_running_loop().time() + 1.0, 30.0)


async def waits(sending, traffic, keeper):
    """See a copy wait for who is busy, and arrive when they are no more."""
    sending = asyncio.create_task(sending)
    await until(lambda: traffic.looks > 5 or sending.done())
    assert keeper.memory.saved() == []
    traffic.busy = False
    await sending
    assert len(keeper.memory.saved()) == 1


async def test_a_copy_waits_until_the_senders_workers_send_nothing(keeper):
    traffic = Told(keeper.own)
    await waits(keeper.send(keeper.save(), traffic), traffic, keeper)
    assert traffic.line.on_its_way == 0


async def test_a_copy_that_is_not_paced_waits_for_nobody(keeper):
    keeper.traffic.forecast = lambda: Forecast(0.0, 30.0)
    traffic = NodeTraffic(keeper.own)
    traffic.forecast = keeper.traffic.forecast
    await keeper.send(keeper.save(), traffic, paced=False)
    assert len(keeper.memory.saved()) == 1
    assert traffic.line.on_its_way == 0


async def test_a_copy_of_which_the_rest_must_wait_goes_on_in_the_next_span(keeper):
    traffic = Short(keeper.own)
    traffic.line.arrived(1_000_000, 1.0)
    traffic.line.arrived = lambda *_: None  # it stays that slow
    sending, spans = asyncio.create_task(keeper.send(keeper.save(), traffic)), 1
    while not sending.done():
        await until(lambda: sending.done() or (traffic.busy and not traffic.line.on_its_way))
        traffic.busy = False
        spans += 1
    await sending
    assert spans > 5, "each second has room for a megabyte"
    assert len(keeper.memory.saved()) == 1


async def test_a_keeper_whose_workers_send_has_the_copy_wait_but_not_for_ever(tmp_path):
    keeper = Keeper(tmp_path)
    keeper.traffic = Told(keeper.folder)
    async with keeper.served():
        await waits(keeper.send(keeper.save()), keeper.traffic, keeper)
        keeper.traffic.forecast = lambda: Forecast(0.0, 0.001)
        await keeper.send(keeper.save(CONTENT[::-1], iteration=4))


async def test_a_copy_that_is_given_up_while_it_waits_leaves_nothing(keeper):
    keeper.traffic.forecast = lambda: Forecast(0.0, 30.0)
    traffic = NodeTraffic(keeper.own)
    sending = asyncio.create_task(keeper.send(keeper.save(), traffic))
    await until(keeper.files)
    sending.cancel()
    await until(lambda: not keeper.files())
    assert traffic.line.on_its_way == 0
    del keeper.traffic.forecast
    await keeper.send(keeper.save())
    assert len(keeper.memory.saved()) == 1
