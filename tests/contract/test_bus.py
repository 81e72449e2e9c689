"""One contract for both buses; then what only a real server can do to a connection."""

import asyncio
import contextlib
import random
import time
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.aio.transport import TcpTransport
from unicron_deploy.nats_server import NatsServer, Routes, config_text, free_port
from unicron_simulator.bus import MemoryWorld

from unicron import subjects
from unicron.bus import journal, nats, topology
from unicron.clock import VirtualClock
from unicron.errors import BusUnavailableError, ConflictError, InvalidInputError
from unicron.settings import Settings

ALL = ["unicron.v1.evt.>", "unicron.v1.cmd.>"]


async def take(entries, count):
    """Return the next `count` items."""
    taken = []
    async with asyncio.timeout(20), contextlib.aclosing(entries):
        async for entry in entries:
            taken.append(entry)
            if len(taken) == count:
                return taken
    return taken


async def insist(call):
    """Repeat a call until the bus answers."""
    async with asyncio.timeout(20):
        while True:
            try:
                return await call()
            except BusUnavailableError:
                await asyncio.sleep(0.02)


async def write(bus, count, prefix="m", subject="unicron.v1.evt.n1.T.k"):
    for number in range(count):
        data = f"{prefix}{number}"
        await insist(lambda data=data: bus.append(subject, data.encode(), data))


# --- the journal -----------------------------------------------------------------------------------------------------


async def test_journal_keeps_order_and_positions(bus):
    assert await bus.tail() == 0
    assert [await bus.append("unicron.v1.evt.n1.T.k", b"%d" % i, f"id{i}") for i in range(5)] == [1, 2, 3, 4, 5]
    entries = await take(bus.follow(ALL, 0), 5)
    assert [(e.sequence, e.subject, e.data) for e in entries] == [
        (i + 1, "unicron.v1.evt.n1.T.k", b"%d" % i) for i in range(5)
    ]
    assert await bus.tail() == 5


async def test_follow_starts_after_a_position_and_goes_on_with_what_is_new(bus):
    await write(bus, 3)
    following = asyncio.create_task(take(bus.follow(ALL, 2), 3))
    await asyncio.sleep(0.05)
    assert not following.done()
    await write(bus, 2, "new")
    assert [(e.sequence, e.data) for e in await following] == [(3, b"m2"), (4, b"new0"), (5, b"new1")]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (["unicron.v1.evt.*.Exited.*"], [1, 3]),
        (["unicron.v1.evt.n1.>"], [1, 2]),
        (["unicron.v1.cmd.n1.>"], [4]),
        (["unicron.v1.evt.*.Exited.*", "unicron.v1.cmd.n2.>"], [1, 3, 5]),
        (["unicron.v1.evt.n1.Exited.gpt", "unicron.v1.evt.n1.Exited.gpt"], [1]),
    ],
)
async def test_follow_delivers_what_matches_a_filter_and_nothing_else(bus, filters, expected):
    for number, subject in enumerate(
        ["evt.n1.Exited.gpt", "evt.n1.Joined.n1", "evt.n2.Exited.bert", "cmd.n1.Stop.gpt", "cmd.n2.Stop.gpt"]
    ):
        await bus.append(f"unicron.v1.{subject}", b"", f"id{number}")
    entries = await take(bus.follow(filters, 0), len(expected))
    assert [entry.sequence for entry in entries] == expected
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await anext(bus.follow(filters, expected[-1]))


async def test_a_second_message_with_the_same_id_is_not_stored_again(bus):
    first = await bus.append("unicron.v1.evt.n1.T.k", b"one", "same")
    assert await bus.append("unicron.v1.evt.n1.T.k", b"two", "same") == first
    # who may not use this subject can't keep a message out by using its id: it is another one there
    assert await bus.append("unicron.v1.evt.n2.T.k", b"three", "same") == first + 1
    assert await bus.tail() == 2


async def test_a_subject_outside_the_journal_is_refused(bus):
    with pytest.raises(BusUnavailableError, match="no stream"):
        await bus.append("elsewhere.v1", b"", "id")


async def test_concurrent_writers_and_readers_all_see_one_order(world):
    writers = [await world.connect() for _ in range(3)]
    reader, late = await world.connect(), await world.connect()
    following = asyncio.create_task(take(reader.follow(ALL, 0), 150))
    await asyncio.gather(*(write(writer, 50, f"w{number}-") for number, writer in enumerate(writers)))
    seen = await following
    assert seen == await take(late.follow(ALL, 0), 150)
    assert [entry.sequence for entry in seen] == list(range(1, 151))
    for number in range(3):
        own = [entry.data for entry in seen if entry.data.startswith(b"w%d-" % number)]
        assert own == [b"w%d-%d" % (number, i) for i in range(50)]


# --- telemetry and queries -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("unicron.v1.tel.*.Beat.*", [b"a", b"b"]),
        ("unicron.v1.tel.n1.>", [b"a", b"c"]),
        ("unicron.v1.tel.n1.Beat.n1", [b"a"]),
        (">", [b"a", b"b", b"c", b"d"]),
    ],
)
async def test_telemetry_reaches_whoever_listens_on_a_wildcard(world, pattern, expected):
    speaker, hearer = await world.connect(), await world.connect()
    hearing = asyncio.create_task(take(hearer.hear([pattern]), len(expected)))
    await asyncio.sleep(0.05)
    await hearer.flush()
    for subject, data in [
        ("unicron.v1.tel.n1.Beat.n1", b"a"),
        ("unicron.v1.tel.n2.Beat.n2", b"b"),
        ("unicron.v1.tel.n1.Iteration.gpt", b"c"),
        ("unicron.v1.tel.n1", b"d"),
    ]:
        await speaker.tell(subject, data)
    await speaker.flush()
    heard = await hearing
    assert [item.data for item in heard] == expected
    assert heard[0].subject == "unicron.v1.tel.n1.Beat.n1"


async def test_several_filters_are_merged_into_one_stream(bus):
    hearing = asyncio.create_task(take(bus.hear(["unicron.v1.tel.n1.>", "unicron.v1.tel.n2.>"]), 4))
    await asyncio.sleep(0.05)
    await bus.flush()
    for node in ("n1", "n2", "n3", "n1", "n2"):
        await bus.tell(f"unicron.v1.tel.{node}.Beat.{node}", node.encode())
    assert sorted(item.data for item in await hearing) == [b"n1", b"n1", b"n2", b"n2"]


async def test_queries_are_answered_side_by_side(world):
    server, client = await world.connect(), await world.connect()
    release = asyncio.Event()

    async def handler(data):
        if data == b"slow":
            await release.wait()
        return data.upper()

    await server.serve("unicron.v1.rpc.registry", "registry", handler)
    slow = asyncio.create_task(client.ask("unicron.v1.rpc.registry", b"slow", 10.0))
    assert await client.ask("unicron.v1.rpc.registry", b"quick", 10.0) == b"QUICK"
    release.set()
    assert await slow == b"SLOW"


async def test_nobody_answers_is_said_with_the_name_of_who_should(bus):
    with pytest.raises(BusUnavailableError, match=r"unicron\.v1\.rpc\.registry; is registry running\?"):
        await bus.ask("unicron.v1.rpc.registry", b"", 5.0)


async def test_no_answer_in_time(bus):
    async def handler(_data):
        await asyncio.sleep(60)
        return b""

    await bus.serve("unicron.v1.rpc.planner", "planner", handler)
    with pytest.raises(BusUnavailableError, match="asking planner: no answer"):
        await bus.ask("unicron.v1.rpc.planner", b"", 0.1)


@pytest.mark.parametrize("size", [0, 1, 524_288, 524_289, 5_000_000])
async def test_a_reply_of_any_size_comes_whole(world, size):
    server, client = await world.connect(), await world.connect()
    block = random.Random(size).randbytes(size)

    async def handler(data: bytes) -> bytes:
        return data + block

    await server.serve("unicron.v1.rpc.registry", "registry", handler)
    asked = [client.ask("unicron.v1.rpc.registry", bytes([number]), 10.0) for number in range(3)]
    assert await asyncio.gather(*asked) == [bytes([number]) + block for number in range(3)]


async def test_an_answer_that_fails_reaches_the_asker_as_an_error(bus):
    async def handler(data):
        if data == b"busy":
            raise BusUnavailableError("planner is busy")
        raise RuntimeError("broken")

    await bus.serve("unicron.v1.rpc.planner", "planner", handler)
    with pytest.raises(BusUnavailableError, match="planner could not answer: planner is busy"):
        await bus.ask("unicron.v1.rpc.planner", b"busy", 5.0)
    with pytest.raises(BusUnavailableError, match=r"planner could not answer.*broken"):
        await bus.ask("unicron.v1.rpc.planner", b"", 5.0)


async def test_who_stops_serving_is_not_asked_any_more(world):
    first, second = await world.connect(), await world.connect()

    async def one(_data):
        return b"one"

    async def two(_data):
        return b"two"

    stop = await first.serve("unicron.v1.rpc.registry", "registry", one)
    await second.serve("unicron.v1.rpc.registry", "registry", two)
    await stop()
    await first.flush()
    assert {await second.ask("unicron.v1.rpc.registry", b"", 5.0) for _ in range(10)} == {b"two"}


# --- buckets ---------------------------------------------------------------------------------------------------------


async def test_bucket_writes_are_compare_and_set(bus):
    bucket = bus.bucket("state")
    assert await bucket.get("planner") is None
    first = await bucket.create("planner", b"1")
    with pytest.raises(ConflictError, match="state/planner"):
        await bucket.create("planner", b"2")
    second = await bucket.update("planner", b"2", first)
    assert second > first
    for stale in (first, second + 1, 0):
        with pytest.raises(ConflictError):
            await bucket.update("planner", b"3", stale)
    assert await bucket.get("planner") == (b"2", second)


async def test_what_stood_in_a_bucket_of_states_before_is_kept_once(bus):
    bucket = bus.bucket("state")
    assert await bucket.before("planner", 2**40) is None
    revisions = [await bucket.create("planner", b"0")]
    assert await bucket.before("planner", revisions[0]) is None
    for value in (b"1", b"2", b"3"):
        await bucket.update("planner.7", value, (await bucket.get("planner.7") or (b"", 0))[1])
        revisions.append(await bucket.update("planner", value, revisions[-1]))
        assert await bucket.before("planner", revisions[-1]) == (b"%d" % (int(value) - 1), revisions[-2])
    assert await bucket.before("planner", revisions[-2]) is None
    await bucket.delete("planner", revisions[-1])
    revision = await bucket.update("planner", b"4", 0)
    assert await bucket.before("planner", revision) is None, "it was not there"


async def test_bucket_keys_are_independent_and_revisions_grow_over_all(bus):
    bucket = bus.bucket("state")
    revisions = [await bucket.update(key, b"", 0) for key in ("a", "b", "c")]
    assert revisions == sorted(set(revisions))
    assert await bucket.update("a", b"x", revisions[0]) > revisions[-1]


async def test_a_deleted_key_can_be_made_again_and_its_revision_grows(bus):
    bucket = bus.bucket("state")
    first = await bucket.create("k", b"1")
    with pytest.raises(ConflictError):
        await bucket.delete("k", first + 7)
    await bucket.delete("k", first)
    assert await bucket.get("k") is None
    await bucket.delete("never-there")
    second = await bucket.update("k", b"2", 0)
    assert second > first
    assert await bucket.get("k") == (b"2", second)


async def test_one_of_many_concurrent_writers_wins(world):
    buckets = [(await world.connect()).bucket("state") for _ in range(4)]
    first = await buckets[0].create("k", b"")
    outcomes = await asyncio.gather(
        *(bucket.update("k", b"%d" % i, first) for i, bucket in enumerate(buckets)), return_exceptions=True
    )
    assert sum(isinstance(outcome, int) for outcome in outcomes) == 1
    assert sum(isinstance(outcome, ConflictError) for outcome in outcomes) == 3


async def test_leases_expire_and_states_do_not(bus):
    lease, state = bus.bucket("lease"), bus.bucket("state")
    first = await lease.create("k", b"1")
    await state.create("k", b"1")
    async with asyncio.timeout(20):
        while await lease.get("k") is not None:
            await asyncio.sleep(0.05)
    with pytest.raises(ConflictError):
        await lease.update("k", b"2", first)
    assert await lease.create("k", b"2") > first
    assert await state.get("k") is not None


def test_expiry_follows_the_virtual_clock():
    clock = VirtualClock()
    lease = MemoryWorld(clock, lease_ttl_s=2.0).connect().bucket("lease")

    async def story():
        await lease.create("k", b"1")
        await asyncio.sleep(1.9)
        assert await lease.get("k") is not None
        await asyncio.sleep(0.2)
        assert await lease.get("k") is None
        await asyncio.sleep(86400)

    clock.run(story())
    assert clock.now() == pytest.approx(86402.1)


async def test_iterators_end_when_the_connection_is_closed(world):
    bus = await world.connect()

    async def drain(items):
        return [item async for item in items]

    tasks = [
        asyncio.create_task(drain(it)) for it in (bus.follow(ALL, 0), bus.hear(["unicron.v1.tel.>"]), bus.reconnected())
    ]
    await asyncio.sleep(0.1)
    await bus.close()
    async with asyncio.timeout(20):
        assert await asyncio.gather(*tasks) == [[], [], []]
    with pytest.raises(BusUnavailableError):
        await bus.append("unicron.v1.evt.n1.T.k", b"", "id")


# --- the real server -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["kill", "stop"])
async def test_reading_neither_skips_nor_repeats_across_restarts_of_the_server(private_world, private_server, how):
    writer, reader = await private_world.connect("writer"), await private_world.connect("reader")
    outages = asyncio.create_task(take(reader.reconnected(), 3))
    following = asyncio.create_task(take(reader.follow(ALL, 0), 400))
    writing = asyncio.create_task(write(writer, 400))
    for seen in (50, 150, 250):
        await insist(lambda seen=seen: reached(writer, seen))
        getattr(private_server, how)()
        await asyncio.sleep(0.2)
        private_server.start()
    await writing
    entries = await following
    assert [entry.data for entry in entries] == [b"m%d" % i for i in range(400)]
    assert [entry.sequence for entry in entries] == list(range(1, 401))
    assert all(0 < down_s < 20 for down_s in await outages)


async def reached(bus, sequence):
    if await bus.tail() < sequence:
        raise BusUnavailableError("not yet")


async def test_a_slow_reader_gets_everything(nats_world):
    bus = await nats_world.connect()
    payload = bytes(4000)
    for first in range(0, 3000, 300):  # not all at once: on a busy machine the last would wait too long for an answer
        numbers = range(first, first + 300)
        await asyncio.gather(*(bus.append("unicron.v1.evt.n1.T.k", payload, f"m{i}") for i in numbers))
    entries = []
    async with contextlib.aclosing(bus.follow(ALL, 0)) as following:
        async for entry in following:
            entries.append(entry.sequence)
            if entry.sequence % 1000 == 0:
                await asyncio.sleep(0.5)
            if entry.sequence == 3000:
                break
    assert entries == list(range(1, 3001))


async def test_readers_make_nothing_on_the_server(nats_world):
    bus = await nats_world.connect()
    following = asyncio.create_task(take(bus.follow(ALL, 0), 20))
    await write(bus, 10)
    assert await bus.jetstream.consumers_info(topology.STREAM) == []
    await write(bus, 10, "later")
    assert [entry.sequence for entry in await following] == list(range(1, 21))


def losing_once(monkeypatch, lost):
    """Have what `lost` says of a message's data and headers get lost on its way to the client, once."""
    deliver, dropped = Client._process_msg, []

    async def drop_once(self, sid, subject, reply, data, headers):
        if not dropped and lost(data, headers):
            dropped.append(data)
        else:
            await deliver(self, sid, subject, reply, data, headers)

    monkeypatch.setattr(Client, "_process_msg", drop_once)
    return dropped


@pytest.mark.parametrize("lost", [b"m4", b"m9"])  # one in the middle; the last
async def test_a_delivery_that_got_lost_is_noticed_and_read_again(nats_world, monkeypatch, lost):
    dropped = losing_once(monkeypatch, lambda data, headers: data == lost)
    bus = await nats_world.connect()
    await write(bus, 10)
    entries = await take(bus.follow(ALL, 0), 10)
    assert [entry.sequence for entry in entries] == list(range(1, 11))
    assert dropped == [lost]


async def test_what_the_server_forgot_to_tell_is_read_all_the_same(nats_world, monkeypatch):
    monkeypatch.setattr(journal, "CHECK_S", 0.2)
    bus = await nats_world.connect()
    following = asyncio.create_task(take(bus.follow(ALL, 0), 2))
    await write(bus, 1)
    await asyncio.sleep(0.1)
    dropped = losing_once(monkeypatch, lambda data, headers: b"Nats-Msg-Size" in (headers or b""))
    await write(bus, 1, "later")
    assert [entry.data for entry in await following] == [b"m0", b"later0"]
    assert dropped == [b""]


async def test_at_rest_the_journal_is_looked_at_ever_more_rarely_and_where_it_ends_is_not_asked(
    private_world, private_server, monkeypatch
):
    monkeypatch.setattr(journal, "CHECK_S", 0.1)
    monkeypatch.setattr(journal, "REST_S", 0.4)
    bus, asked = await private_world.connect(), []
    publish = Client.publish

    async def noted(self, subject, *arguments, **more):
        asked.append((subject, time.monotonic()))
        await publish(self, subject, *arguments, **more)

    monkeypatch.setattr(Client, "publish", noted)
    filters = subjects.read_by("node-1")
    following = asyncio.create_task(take(bus.follow(filters, 0), 1))

    def looks():
        return [at for subject, at in asked if subject.startswith("$JS.API.DIRECT.GET.")][:: len(filters)]

    async with asyncio.timeout(20):
        while len(looks()) < 6:
            await asyncio.sleep(0.01)
    # a tenth of a second behind the first, then twice that, and ever after four times; on a busy machine later
    least = [0.1, 0.2, 0.4, 0.4, 0.4]
    assert all(later - one > 0.9 * wait for one, later, wait in zip(looks(), looks()[1:], least, strict=False))
    assert not [subject for subject, _ in asked if "STREAM.INFO" in subject]
    dropped = losing_once(monkeypatch, lambda data, headers: b"Nats-Msg-Size" in (headers or b""))
    await bus.append("unicron.v1.cmd.node-1.StopWorker.k", b"untold", "untold")
    assert [entry.data for entry in await following] == [b"untold"]
    assert dropped == [b""]


async def test_an_interruption_is_noticed_without_waiting_for_the_next_check(
    private_world, private_server, monkeypatch
):
    monkeypatch.setattr(journal, "CHECK_S", 60.0)
    bus = await private_world.connect()
    following = asyncio.create_task(take(bus.follow(ALL, 0), 2))
    await write(bus, 1)
    private_server.kill()
    private_server.start()
    await write(bus, 1, "later")
    assert [entry.data for entry in await following] == [b"m0", b"later0"]


async def test_a_call_in_flight_fails_when_the_connection_breaks(private_world, private_server):
    bus = await private_world.connect()
    called = asyncio.Event()

    async def handler(_data):
        called.set()
        await asyncio.sleep(60)
        return b""

    await bus.serve("unicron.v1.rpc.planner", "planner", handler)
    asking = asyncio.create_task(bus.ask("unicron.v1.rpc.planner", b"", 60.0))
    await called.wait()
    private_server.kill()
    async with asyncio.timeout(20):
        with pytest.raises(BusUnavailableError, match="connection to NATS is down"):
            await asking


async def test_the_server_tells_when_a_connection_ends(private_world):
    bus = await private_world.connect()
    hearing = asyncio.create_task(take(bus.hear([topology.DISCONNECTS]), 1))
    await asyncio.sleep(0.05)
    await bus.flush()
    await (await private_world.connect("agent.node-7")).close()
    (advisory,) = await hearing
    assert b"agent.node-7" in advisory.data


async def test_calls_fail_in_time_while_the_server_is_away_and_work_afterwards(private_world, private_server):
    bus = await private_world.connect()
    bucket = bus.bucket("state")
    revision = await bucket.create("k", b"1")

    async def answer(data):
        return data

    await bus.serve("unicron.v1.rpc.registry", "registry", answer)
    private_server.kill()
    for call in (
        lambda: bus.append("unicron.v1.evt.n1.T.k", b"", "id"),
        lambda: bus.tell("unicron.v1.tel.n1.T.k", b""),
        lambda: bus.ask("unicron.v1.rpc.registry", b"", 1.0),
        lambda: bucket.update("k", b"2", revision),
        lambda: bucket.get("k"),
        bus.tail,
        bus.flush,
    ):
        with pytest.raises(BusUnavailableError):
            await call()
    private_server.start()
    await insist(lambda: bus.append("unicron.v1.evt.n1.T.k", b"", "id"))
    assert await bus.tail() == 1
    assert await bucket.update("k", b"2", revision) > revision
    assert await bus.ask("unicron.v1.rpc.registry", b"again", 5.0) == b"again"


async def test_a_connection_closed_while_the_server_is_away_leaves_no_task_behind(private_server, monkeypatch):
    async def connect(*_args, **_kwargs):
        # What asyncio.wait_for does before Python 3.12 when its job fails while it is being cancelled.
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.05)
        raise ConnectionRefusedError

    before = asyncio.all_tasks()
    bus = await nats.connect(Settings(nats_url=private_server.url), "test")
    monkeypatch.setattr(TcpTransport, "connect", connect)
    private_server.kill()
    await asyncio.sleep(0.3)
    await bus.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(20):
            while asyncio.all_tasks() - before:
                await asyncio.sleep(0.05)
    assert asyncio.all_tasks() - before == set()


async def test_calls_that_are_cut_short_do_no_harm_to_the_connection(private_world):
    bus = await private_world.connect()
    interrupted = asyncio.create_task(take(bus.reconnected(), 1))

    async def answer(data):
        return data

    async def serve_and_stop():
        await (await bus.serve("unicron.v1.rpc.registry", "registry", answer))()

    for number in range(150):
        call = (serve_and_stop, bus.flush, bus.tail)[number % 3]
        task = asyncio.create_task(call())
        await asyncio.sleep(0.00003 * number)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(0.2)
    await bus.flush()
    assert await bus.tail() == 0
    assert not interrupted.done()
    interrupted.cancel()


async def test_a_connection_that_the_server_ends_for_good_is_an_error_and_not_an_endless_wait(private_world):
    bus = await private_world.connect()
    watching = asyncio.create_task(take(bus.reconnected(), 1))
    await asyncio.sleep(0.05)
    bus._nc._transport.write(b"NONSENSE\r\n")
    with pytest.raises(BusUnavailableError, match=r"for good.*unknown protocol operation"):
        await watching
    with pytest.raises(BusUnavailableError):
        await take(bus.hear(["unicron.v1.tel.>"]), 1)


async def test_a_server_that_does_not_answer_is_named_with_the_cure():
    url = f"nats://127.0.0.1:{free_port()}"
    with pytest.raises(
        BusUnavailableError, match=rf"{url} within 0.3 s.*start the server there, or set UNICRON_NATS_URL"
    ):
        await nats.connect(Settings(nats_url=url, connect_timeout_s=0.3), "test")


async def test_a_connection_that_never_finishes_closing_holds_nobody_up(monkeypatch):
    async def never_ends(self, *_):
        await asyncio.Event().wait()

    monkeypatch.setattr(Client, "close", never_ends)
    monkeypatch.setattr(nats, "CLOSE_S", 0.1)
    settings = Settings(nats_url=f"nats://127.0.0.1:{free_port()}", connect_timeout_s=0.3)
    async with asyncio.timeout(30):
        with pytest.raises(BusUnavailableError, match="no NATS server answers"):
            await nats.connect(settings, "test")


async def test_a_server_without_streams_is_said_so(private_server):
    bus = await nats.connect(Settings(nats_url=private_server.url), "test")
    with pytest.raises(BusUnavailableError, match="unicron provision"):
        await bus.append("unicron.v1.evt.n1.T.k", b"", "id")
    with pytest.raises(BusUnavailableError, match="unicron provision"):
        await bus.tail()
    await bus.close()


async def test_an_address_that_is_none(tmp_path):
    with pytest.raises(InvalidInputError, match="UNICRON_NATS_URL"):
        await nats.connect(Settings(nats_url="nats://127.0.0.1:notaport", connect_timeout_s=1.0), "test")


async def test_provisioning_again_changes_what_is_declared_otherwise_and_nothing_else(nats_world):
    bus = await nats_world.connect()
    await bus.append("unicron.v1.evt.n1.T.k", b"kept", "id")
    await topology.provision(bus.jetstream, lease_ttl_s=5.0)
    info = await bus.jetstream.stream_info("KV_unicron_lease")
    assert info.config.max_age == 5.0
    journal = await bus.jetstream.stream_info(topology.STREAM)
    assert (journal.config.max_age, journal.config.duplicate_window) == (7 * 86400, 3600)
    assert await bus.tail() == 1


def test_a_port_that_is_taken_is_named_with_the_cure(private_server, tmp_path):
    second = NatsServer(tmp_path / "second", private_server.port)
    with pytest.raises(InvalidInputError, match=rf"port {private_server.port} on 127.0.0.1.*choose another port"):
        second.start()
    assert private_server.pid is not None


async def test_a_restarted_server_keeps_everything(private_world, private_server):
    bus = await private_world.connect()
    await write(bus, 10)
    revision = await bus.bucket("state").create("k", b"1")
    private_server.kill()
    private_server.start()
    later = await private_world.connect()
    assert await later.tail() == 10
    assert await later.bucket("state").get("k") == (b"1", revision)
    assert await later.append("unicron.v1.evt.n1.T.k", b"", "m3") == 4


def test_the_deployed_configuration_is_the_embedded_one(request):
    assert (request.config.rootpath / "deploy" / "nats.conf").read_text() == config_text(
        "/data", accounts=Path("server/accounts.conf"), monitor=8222, tls=Path("/etc/unicron/server")
    )
    assert (request.config.rootpath / "deploy" / "nats-ha.conf").read_text() == config_text(
        "/data/ha",  # another folder: a server of a cluster removes what it finds of one that was alone
        accounts=Path("server/accounts.conf"),
        name="$UNICRON_SERVER",
        monitor=8222,
        tls=Path("/etc/unicron/server"),
        routes=Routes(6222, Path("server/routes.conf")),
    )


async def test_a_stopped_client_is_noticed(tmp_path):
    # The server's own pings end a connection that does not answer; a raw socket that never does stands for it.
    server = NatsServer(tmp_path / "nats", free_port(), ping_s=2.0)  # our own must not end where we wait for a core
    server.start()
    try:
        bus = await nats.connect(Settings(nats_url=server.url), "test")
        hearing = asyncio.create_task(take(bus.hear([topology.DISCONNECTS]), 1))
        await asyncio.sleep(0.05)
        await bus.flush()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        await reader.readline()
        writer.write(b'CONNECT {"verbose":false,"name":"frozen"}\r\nPING\r\n')
        (advisory,) = await hearing
        assert b"Stale Connection" in advisory.data
        writer.close()
        await bus.close()
    finally:
        server.stop()


async def test_when_a_flush_is_over_the_server_has_heard_of_a_subscription(nats_world):
    client = (await nats_world.connect()).client
    written, transport = [], client._transport
    write, writelines = transport.write, transport.writelines
    transport.write = lambda data: (written.append(data), write(data))
    transport.writelines = lambda lines: (written.extend(lines), writelines(lines))
    await client.subscribe("unicron.v1.tel.node-1.T.k")
    await client.flush()
    said = b"".join(written)
    assert said.index(b"SUB unicron.v1.tel.node-1.T.k") < said.index(b"PING")
