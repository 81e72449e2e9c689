"""One contract for both buses."""

import asyncio
import random

import pytest
from helpers.buses import ALL, heard, say, take, write
from helpers.waiting import PATIENT_S, elapse, in_virtual_time, until
from helpers.worlds import LEASE_TTL_S

from unicron import subjects
from unicron.client import Client
from unicron.contracts.events import Alert
from unicron.errors import BusUnavailableError, ConflictError

# --- the journal -----------------------------------------------------------------------------------------------------


async def test_journal_keeps_order_and_positions(bus):
    assert await bus.tail() == 0
    assert [await bus.append("unicron.v1.evt.n1.T.k", b"%d" % i, f"id{i}") for i in range(5)] == [1, 2, 3, 4, 5]
    entries = await take(bus.follow(ALL, 0), 5)
    assert [(e.sequence, e.subject, e.data) for e in entries] == [
        (i + 1, "unicron.v1.evt.n1.T.k", b"%d" % i) for i in range(5)
    ]
    assert await bus.tail() == 5


async def test_who_reads_to_the_end_is_through_though_a_pulse_is_behind_it(bus):
    client = Client(bus)
    assert await client.tail() == 0
    await say(bus, Alert(text="x", id="a", source="n1"))
    at = await bus.tail()
    await bus.append(subjects.pulse("registry"), b"", "p")
    assert await bus.tail() == at + 1
    assert await client.tail() == at
    assert [position async for position, _ in client.follow(0, await client.tail())] == [at]


async def test_follow_starts_after_a_position_and_goes_on_with_what_is_new(bus):
    await write(bus, 3)
    entries = bus.follow(ALL, 2)
    assert (await anext(entries)).data == b"m2"
    following = asyncio.create_task(take(entries, 2))
    await write(bus, 2, "new")
    assert [(e.sequence, e.data) for e in await following] == [(4, b"new0"), (5, b"new1")]


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
    last = filters[-1].replace("*", "n9").replace(">", "Stop.gpt")
    await bus.append(f"{last}", b"", "last")
    entries = await take(bus.follow(filters, 0), len(expected) + 1)
    assert [entry.sequence for entry in entries] == [*expected, 6]


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
    hearing = await heard(hearer, [pattern])
    for subject, data in [
        ("unicron.v1.tel.n1.Beat.n1", b"a"),
        ("unicron.v1.tel.n2.Beat.n2", b"b"),
        ("unicron.v1.tel.n1.Iteration.gpt", b"c"),
        ("unicron.v1.tel.n1", b"d"),
    ]:
        await speaker.publish_telemetry(subject, data)
    await speaker.flush()
    items = await take(hearing, len(expected))
    assert [item.data for item in items] == expected
    assert items[0].subject == "unicron.v1.tel.n1.Beat.n1"


async def test_several_filters_are_merged_into_one_stream(bus):
    hearing = await heard(bus, ["unicron.v1.tel.n1.>", "unicron.v1.tel.n2.>"])
    for node in ("n1", "n2", "n3", "n1", "n2"):
        await bus.publish_telemetry(f"unicron.v1.tel.{node}.Beat.{node}", node.encode())
    assert sorted(item.data for item in await take(hearing, 4)) == [b"n1", b"n1", b"n2", b"n2"]


async def test_queries_are_answered_side_by_side(world):
    server, client = await world.connect(), await world.connect()
    release = asyncio.Event()

    async def handler(data):
        if data == b"slow":
            await release.wait()
        return data.upper()

    await server.serve("unicron.v1.rpc.registry", "registry", handler)
    slow = asyncio.create_task(client.ask("unicron.v1.rpc.registry", b"slow", PATIENT_S))
    assert await client.ask("unicron.v1.rpc.registry", b"quick", PATIENT_S) == b"QUICK"
    release.set()
    assert await slow == b"SLOW"


async def test_nobody_answers_is_said_with_the_name_of_who_should(bus):
    with pytest.raises(BusUnavailableError, match=r"unicron\.v1\.rpc\.registry; is registry running\?"):
        await bus.ask("unicron.v1.rpc.registry", b"", PATIENT_S)


async def test_no_answer_in_time(bus):
    async def handler(_data):
        await asyncio.Event().wait()
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
    asked = [client.ask("unicron.v1.rpc.registry", bytes([number]), PATIENT_S) for number in range(3)]
    assert await asyncio.gather(*asked) == [bytes([number]) + block for number in range(3)]


async def test_an_answer_that_fails_reaches_the_asker_as_an_error(bus):
    async def handler(data):
        if data == b"busy":
            raise BusUnavailableError("planner is busy")
        raise RuntimeError("broken")

    await bus.serve("unicron.v1.rpc.planner", "planner", handler)
    with pytest.raises(BusUnavailableError, match="planner could not answer: planner is busy"):
        await bus.ask("unicron.v1.rpc.planner", b"busy", PATIENT_S)
    with pytest.raises(BusUnavailableError, match=r"planner could not answer.*broken"):
        await bus.ask("unicron.v1.rpc.planner", b"", PATIENT_S)


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
    assert {await second.ask("unicron.v1.rpc.registry", b"", PATIENT_S) for _ in range(10)} == {b"two"}


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


@in_virtual_time
async def test_leases_expire_and_states_do_not(world, bus):
    lease, state = bus.bucket("lease"), bus.bucket("state")
    first = await lease.create("k", b"1")
    await state.create("k", b"1")
    await elapse(0.99 * LEASE_TTL_S)
    assert await lease.get("k") is not None
    await elapse(0.02 * LEASE_TTL_S)
    assert await lease.get("k") is None
    with pytest.raises(ConflictError):
        await lease.update("k", b"2", first)
    assert await lease.create("k", b"2") > first
    assert await state.get("k") is not None


async def test_iterators_end_when_the_connection_is_closed(world):
    bus, found = await world.connect(), []

    async def drain(items):
        async for item in items:
            found.append(item)  # noqa: PERF401 - it is looked at before it ends

    hearing = await heard(bus, ["unicron.v1.tel.>"])
    tasks = [asyncio.create_task(drain(items)) for items in (bus.reconnected(), hearing, bus.follow(ALL, 0))]
    await write(bus, 1)
    await until(lambda: found)
    await bus.close()
    await asyncio.gather(*tasks)
    assert [item.data for item in found] == [b"m0"]
    with pytest.raises(BusUnavailableError):
        await bus.append("unicron.v1.evt.n1.T.k", b"", "id")
