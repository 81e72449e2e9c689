"""The shell around a core, on the bus in memory and in virtual time: what it takes in, and what comes of it, once."""

import asyncio
import contextlib
import re
import time

import msgspec
import pytest
from helpers import tally
from helpers.shell import (
    FAILED,
    CutBus,
    CutError,
    StuckBus,
    ask,
    attempts,
    current_outcomes,
    exited,
    feed,
    let_go,
    newest,
    outcomes,
    running,
    service,
    serving,
)
from helpers.waiting import elapse, in_virtual_time, insist, until
from helpers.worlds import LEASE_TTL_S

from unicron import codec, subjects
from unicron.contracts import answers, queries
from unicron.contracts.events import (
    Alert,
    DeadLetter,
    FailureDetected,
    NodeHeartbeat,
    NodeJoined,
    NodeLeft,
    WorkerExited,
)
from unicron.contracts.tasks import TaskSpec
from unicron.errors import BusUnavailableError, InvalidInputError
from unicron.service.service import COMMIT_EVERY


@in_virtual_time
async def test_outcomes_come_once_and_in_order_wherever_the_process_is_cut_off(world, bus):
    """Cut at point 0, then at point 1, and so on; each time a new instance goes on, and one more fact comes in."""
    facts = 0
    for point in range(16):
        for _ in range(point // 2 + 1):  # enough to write for that many points
            await feed(bus, exited(), facts)
            facts += 1
        with pytest.raises(CutError):
            await service(CutBus(await world.connect(), point), world.clock).run()
        await let_go(bus)
    async with running(await serving(world)):
        found = await outcomes(world, facts)
    assert attempts(found) == list(range(1, facts + 1))
    assert [message.correlation for message in found] == [f"fact-{number}" for number in range(facts)]


@in_virtual_time
async def test_two_instances_that_both_believe_to_be_active_do_nothing_twice(world, bus):
    stale, fresh = await serving(world), await serving(world)
    async with running(stale, fresh):
        for number in range(60):
            await feed(bus, exited(), number)
            if number % 10 == 5:
                await let_go(bus)
        found = await outcomes(world, 60)
    assert attempts(found) == list(range(1, 61))


@in_virtual_time
async def test_an_instance_that_becomes_active_shuts_out_its_predecessor_with_its_first_commit(world, bus):

    async def revision(above):
        stored = await bus.bucket("state").get(tally.NAME)
        return stored and stored.revision > above and stored.revision

    async with running(await serving(world), await serving(world)):
        first = await until(lambda: revision(0))
        await let_go(bus)
        await until(lambda: revision(first))
        await elapse(2 * LEASE_TTL_S)
        for _ in range(20):  # queries go to the one that is active, never to the one that was
            await bus.ask(subjects.rpc(tally.NAME), codec.encode(queries.GetStatus()), 5.0)


@in_virtual_time
async def test_an_instance_that_was_held_up_since_it_took_the_lease_does_not_serve_with_its_old_token(world, bus):
    late = await serving(world)
    read, held = late._ledger.read, asyncio.Event()

    async def hold_up():
        if not held.is_set():
            await held.wait()
        return await read()

    late._ledger.read = hold_up

    async def written(above):
        token = (await newest(bus)).token
        return token if token > above else 0

    async with running(late):
        holder = await until(lambda: bus.bucket("lease").get(tally.NAME))
        await let_go(bus)
        async with running(await serving(world)):
            await feed(bus, exited(), 1)
            newer = await until(lambda: written(holder.revision))
        held.set()
        await feed(bus, exited(), 2)
        assert attempts(await outcomes(world, 2)) == [1, 2]
        assert await until(lambda: written(newer)) > newer


@in_virtual_time
async def test_a_second_instance_stands_by_and_takes_over_when_the_first_dies(world, bus):
    doomed = CutBus(await world.connect(), 10**6)
    first = asyncio.create_task(service(doomed, world.clock).run())
    await insist(lambda: bus.ask(subjects.rpc(tally.NAME), codec.encode(queries.GetStatus()), 5.0))
    async with running(await serving(world)):
        await feed(bus, exited(), 0)
        await outcomes(world, 1)
        assert not first.done()
        doomed.dead = True
        await feed(bus, exited(), 1)
        assert attempts(await outcomes(world, 2)) == [1, 2]
    with pytest.raises(CutError):
        await first


@in_virtual_time
async def test_a_service_with_much_to_do_keeps_its_lease(world, bus, caplog):
    count = round(3 * LEASE_TTL_S)

    class Slow(tally.Tally):
        """Takes a second for each exit."""

        def handle(self, message):
            if isinstance(message, WorkerExited):
                world.clock.advance(1.0)
            return super().handle(message)

    own = await serving(world, core=Slow)
    async with running(own):
        await ask(bus, queries.GetStatus())
        for _ in range(count):
            own.queue_input(exited())
        assert attempts(await outcomes(world, count)) == list(range(1, count + 1))
    assert "steps down" not in caplog.text


# --- queries ----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_queries_are_answered_and_orders_have_outcomes(world, bus):
    spec = TaskSpec(name="gpt", command=["true"])
    async with running(await serving(world), await serving(world)):
        for _ in range(5):  # never by the instance that stands by
            assert (await ask(bus, queries.GetStatus())).text == "0 0"
        assert (await ask(bus, queries.SubmitTask(spec=spec, by="Åda@laptop"))).text == "submitted"
        taken, submitted = await outcomes(world, 2)
    assert submitted.spec == spec
    assert (taken.order, taken.text, taken.by, taken.task) == ("SubmitTask", "submitted", "Åda@laptop", "gpt")
    assert taken.correlation == submitted.correlation != ""


@pytest.mark.parametrize("by", ["two\nlines", "\x1b[2J", "\u202eada", "a" * 257])
@in_virtual_time
async def test_an_order_by_what_is_no_name_is_refused_and_not_current_outcomes(world, bus, by):
    order = queries.SubmitTask(spec=TaskSpec(name="gpt", command=["true"]), by=by)
    async with running(await serving(world)):
        assert "at `$.by`" in (await ask(bus, order)).error
        assert await outcomes(world, 0) == []


@in_virtual_time
async def test_queries_that_can_not_be_answered_get_an_error_and_change_nothing(world, bus):
    async with running(await serving(world)):
        garbage = await insist(lambda: bus.ask(subjects.rpc(tally.NAME), b"\xc1", 5.0))
        assert "not a valid query" in codec.decode(garbage, answers.Reply).error
        reply = await ask(bus, queries.GetPlan())
        assert "no answer to that" in reply.error
        assert (await ask(bus, queries.GetStatus())).text == "0 0"
        letter, _ = await outcomes(world, 2)
    assert letter.subject == "GetPlan"


@in_virtual_time
async def test_who_waits_for_an_answer_hears_that_the_service_stepped_down(world, bus):
    stuck = StuckBus(await world.connect())
    async with running(service(stuck, world.clock)):
        await ask(bus, queries.GetStatus())
        stuck.stuck = True
        order = codec.encode(queries.SubmitTask(spec=TaskSpec(name="gpt", command=["true"])))
        asking = asyncio.create_task(bus.ask(subjects.orders(tally.NAME), order, 10 * LEASE_TTL_S))
        await elapse(0.1)
        await let_go(bus)
        with pytest.raises(BusUnavailableError, match="stepped down; try again"):
            await asking
        stuck.stuck = False


@in_virtual_time
async def test_a_service_without_answers_says_so(world, bus):
    async with running(await serving(world, core=tally.Mute)):
        assert "it answers no queries" in (await ask(bus, queries.GetStatus())).error


# --- what it has committed --------------------------------------------------------------------------------------------


@in_virtual_time
async def test_the_position_is_committed_even_when_nothing_follows(world, bus):
    joined = NodeJoined(node="n1", incarnation="i", host="h", slots=[])
    for number in range(COMMIT_EVERY + 10):
        await feed(bus, joined, number)
    async with running(await serving(world)):

        async def committed():
            return (await newest(bus)).sequence >= COMMIT_EVERY

        await until(committed)


@in_virtual_time
async def test_the_outbox_is_cleared_when_idle(world, bus):
    """Its ids are known to the journal for a while only; whoever starts later must not publish it again."""
    async with running(await serving(world)):
        await feed(bus, exited(), 0)
        await outcomes(world, 1)
        await feed(bus, NodeJoined(node="n1", incarnation="a", host="", slots=[]), 1)  # nothing follows from it
        await elapse(1)
        before = await newest(bus)
        await elapse(60)
        after = await newest(bus)
    assert [message.subject for message in before.outbox] == ["unicron.v1.evt.tally.FailureDetected.gpt"]
    assert (after.outbox, after.state) == ([], before.state)


MANY = {"state": msgspec.msgpack.encode({"exits": "many"})}
SPOILT = [
    (MANY, r"Expected `int`, got `str` - at `\$.exits`, which is 'many'"),
    ({"state": b"\x81"}, "Input data was truncated"),
    ({"version": 9}, "it has version 9, this one reads up to 1"),
    ({"sequence": 10**6}, "it is of position 1000000, and the journal ends at "),
    ({"parts": [[3, 1]]}, "it lacks its part 3"),
    ({"timers": {"t": {"due": float("nan"), "cause": "", "correlation": ""}}}, "not a valid Commit .* - at `.*due`"),
    (None, "not a valid Commit .*truncated"),
]


async def spoil(bus, changes):
    """Write over the newest commit, as who has the key of the service can; None cuts it off."""
    bucket = bus.bucket("state")
    stored = await insist(lambda: bucket.get(tally.NAME))
    value = stored.value[:-3]
    if changes is not None:
        value = msgspec.msgpack.encode(msgspec.msgpack.decode(stored.value) | changes)
    await insist(lambda: bucket.update(tally.NAME, value, stored.revision))


@pytest.mark.parametrize(("changes", "error"), SPOILT)
@in_virtual_time
async def test_a_service_whose_newest_commit_is_spoilt_goes_on_from_the_one_before_and_says_nothing_twice(
    world, bus, changes, error
):
    for number in range(3):
        await feed(bus, exited(), number)
    async with running(await serving(world)):
        assert attempts(await outcomes(world, 3)) == [1, 2, 3]
    await feed(bus, exited(), 3)
    await spoil(bus, changes)
    async with running(await serving(world)):
        found = await outcomes(world, 5)
        assert attempts(found) == [1, 2, 3, 4]
        (alert,) = [each for each in found if isinstance(each, Alert)]
        assert re.search(f"^the stored state of tally can't be used: .*{error}.*; it goes on from the one ", alert.text)
        assert (await ask(bus, queries.GetStatus())).text == "4 0"
    async with running(await serving(world)):  # what it wrote is in order again
        assert len(await outcomes(world, 5)) == 5


@in_virtual_time
async def test_a_service_that_can_use_no_commit_names_both_troubles_and_the_cure_and_changes_nothing(world, bus):
    await feed(bus, exited(), 0)
    async with running(await serving(world)):
        await outcomes(world, 1)
    await spoil(bus, {"version": 9})
    await spoil(bus, MANY | {"version": 1})
    before = await bus.bucket("state").get(tally.NAME)
    for _ in range(2):
        with pytest.raises(
            InvalidInputError,
            match=r"^the stored state of tally can't be used: .*\$.exits.*; nor can the one before it: it has version 9"
            r".*; run the version that wrote it, or begin with a backup",
        ):
            await (await serving(world)).run()
    assert await bus.bucket("lease").get(tally.NAME) is None
    assert await bus.bucket("state").get(tally.NAME) == before


@in_virtual_time
async def test_a_token_that_nobody_was_given_stops_no_service(world, bus):
    await feed(bus, exited(), 0)
    async with running(await serving(world)):
        await outcomes(world, 1)
    await spoil(bus, {"token": 2**53})
    async with running(await serving(world)):
        assert (await ask(bus, queries.GetStatus())).text == "1 0"
        await feed(bus, exited(), 1)
        assert attempts(await outcomes(world, 2)) == [1, 2]
    assert (await newest(bus)).token < 2**53


# --- what can't be used -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"\xc1 not msgpack", "not a valid message"),
        (b"", "not a valid message"),
        (codec.encode(queries.GetStatus()), "Invalid value 'GetStatus'"),
        (b"\x81\xa4type\xacWorkerExited", "missing required field `node`"),
        (b"\x82\xa4type\xacWorkerExited\xa4node\x05", r"Expected `str`, got `int` - at `\$.node`"),
        (codec.encode(exited(id="x", source="n2")), r"it belongs on unicron\.v1\.evt\.n2"),
        (codec.encode(exited(id="x", source="n.1")), "use 1 to 64 letters"),
    ],
)
@in_virtual_time
async def test_corrupt_unknown_and_misplaced_messages_become_dead_letters_and_the_service_lives_on(
    world, bus, data, error
):
    async with running(await serving(world)):
        await bus.append("unicron.v1.evt.n1.WorkerExited.gpt", data, "bad")
        await feed(bus, exited(), 1)
        letter, alert, failure = await outcomes(world, 3)
    assert isinstance(letter, DeadLetter)
    assert (letter.subject, letter.payload) == ("unicron.v1.evt.n1.WorkerExited.gpt", data)
    assert re.search(error, letter.error)
    assert isinstance(alert, Alert)
    assert letter.error in alert.text
    assert attempts([failure]) == [1]


@in_virtual_time
async def test_corrupt_telemetry_becomes_a_dead_letter_and_good_telemetry_counts(world, bus):
    beat = NodeHeartbeat(node="n1", incarnation="i", source="n1")
    async with running(await serving(world)):
        await ask(bus, queries.GetStatus())
        await bus.publish_telemetry("unicron.v1.tel.n1.NodeHeartbeat.n1", b"\xc1")
        await bus.publish_telemetry(subjects.for_message(beat), codec.encode(beat))
        letter, _ = await outcomes(world, 2)
        assert (await ask(bus, queries.GetStatus())).text == "0 1"
    assert letter.subject == "unicron.v1.tel.n1.NodeHeartbeat.n1"


@in_virtual_time
async def test_telemetry_that_is_dropped_is_counted_and_the_core_and_everybody_are_current_outcomes(world, monkeypatch):
    monkeypatch.setattr("unicron.service.service.WAITING", 5)
    bus = await world.connect()
    beat = NodeHeartbeat(node="n1", incarnation="i", source="n1")
    alerts = []
    async with running(await serving(world)):
        await ask(bus, queries.GetStatus())
        await asyncio.gather(
            *(bus.publish_telemetry(subjects.for_message(beat), codec.encode(beat)) for _ in range(900))
        )
        async with contextlib.aclosing(bus.follow(subjects.events(Alert), 0)) as entries:
            async for entry in entries:
                alerts.append(codec.decode_message(entry.data).text)
                heard = int((await ask(bus, queries.GetStatus())).text.split()[1])
                told = re.findall(r"the tally can't keep up: it has dropped (\d+) pieces of telemetry", "".join(alerts))
                if told and heard + sum(map(int, told)) == 900:
                    break
        assert (await ask(bus, queries.GetLoad())).load == answers.Load(waiting=0, position=0, dropped=900 - heard)
    assert alerts[0] == "TelemetryDropped", "the core knows at once, others when a while is over"


@in_virtual_time
async def test_telemetry_of_others_is_translated_and_what_breaks_the_translation_is_put_aside(world, bus):
    async with running(await serving(world)):
        await ask(bus, queries.GetStatus())
        for data in (b"", b"n1", b"n2", b"\xff"):  # nothing; two of the same kind; not UTF-8
            await bus.publish_telemetry("elsewhere.node", data)
        found = await outcomes(world, 4)
    assert [message.text for message in found if isinstance(message, Alert)][:2] == ["ConnectionLost"] * 2
    assert len({message.id for message in found}) == 4
    assert [message.subject for message in found if isinstance(message, DeadLetter)] == ["elsewhere.node"]


@pytest.mark.parametrize("worker", ["poison", "misnamed"])
@in_virtual_time
async def test_a_message_that_the_core_can_not_handle_is_put_aside_once_and_leaves_no_trace(world, bus, worker):
    await feed(bus, exited(), 0)
    await feed(bus, exited(worker), 1)
    await feed(bus, exited(), 2)
    async with running(await serving(world)):
        first, letter, alert, second = await outcomes(world, 4)
    assert attempts([first, second]) == [1, 2], "what the core did before it raised is undone"
    assert isinstance(letter, DeadLetter)
    assert isinstance(alert, Alert)
    assert codec.decode_message(letter.payload).worker == worker
    async with running(await serving(world)):
        assert len(await outcomes(world, 4)) == 4, "nor does the next instance stumble"


@in_virtual_time
async def test_there_are_no_dead_letters_about_dead_letters(world, bus):
    facts = subjects.events(WorkerExited, DeadLetter)
    async with running(await serving(world, facts=facts)):
        await feed(bus, exited("poison"), 0)
        await outcomes(world, 2)
        await feed(bus, exited(), 1)
        found = await outcomes(world, 3)
    assert [type(message) for message in found] == [DeadLetter, Alert, FailureDetected]


@in_virtual_time
async def test_a_flood_of_what_can_not_be_used_is_summed_up_and_others_are_heard(world, bus):
    async with running(await serving(world)):
        for number in range(4022):
            await bus.append("unicron.v1.evt.n2.WorkerExited.gpt", b"\xc1", f"flood-{number}")
        await feed(bus, exited(), 0)
        await outcomes(world, 21)
        await elapse(30)
        found = await outcomes(world, 23)
    letters = [message for message in found if isinstance(message, DeadLetter)]
    assert attempts(found) == [1]
    assert len(letters) == 11
    assert letters[-1].error == "4,012 more like this: dead letters of n2 that the tally has only counted"


# --- what has no id of its own ----------------------------------------------------------------------------------------


@in_virtual_time
async def test_messages_whose_sender_gave_them_no_id_have_outcomes_all_the_same(world, bus):
    nameless = exited(source="n1")
    for number in range(3):
        await bus.append(subjects.for_message(nameless), codec.encode(nameless), f"{number}")
    async with running(await serving(world)):
        assert attempts(await outcomes(world, 3)) == [1, 2, 3]


@in_virtual_time
async def test_a_fact_said_again_under_its_id_leads_to_outcomes_of_its_own(world, bus):
    fact = msgspec.structs.replace(exited(), id="fact-0", at=time.time(), source="n1")
    for name in ("once", "again"):  # who sends it chooses what the bus takes for its id
        await bus.append(subjects.for_message(fact), codec.encode(fact), name)
    async with running(await serving(world)):
        assert attempts(await outcomes(world, 2)) == [1, 2]


# --- timers -----------------------------------------------------------------------------------------------------------


async def timers(bus, names):
    """Wait until these timers are committed."""

    async def committed():
        return set((await newest(bus)).timers) == names

    await until(committed)


@pytest.mark.parametrize("committed", [True, False], ids=["committed", "read-again"])
@in_virtual_time
async def test_timers_fire_once_survive_a_restart_and_can_be_replaced_and_cancelled(world, bus, committed):
    async with running(await serving(world)):
        for number, (node, after_s) in enumerate(
            [("kept", "2.0"), ("gone", "2.0"), ("moved", "1.5"), ("moved", "2.5")]
        ):
            await feed(bus, NodeLeft(node=node, incarnation=after_s), number)
        await feed(bus, NodeJoined(node="gone", incarnation="i", host="h", slots=[]), 9)
        if committed:
            await feed(bus, exited(), 10)
            await timers(bus, {"kept", "moved"})
    async with running(await serving(world)):
        found = await outcomes(world, 2, FAILED)
    assert [(message.node, message.correlation) for message in found] == [("kept", "fact-0"), ("moved", "fact-3")]


@in_virtual_time
async def test_a_timer_cancelled_in_the_moment_in_which_it_is_due_does_not_fire(world, bus):
    async with running(await serving(world)):
        await feed(bus, NodeLeft(node="n1", incarnation="5"), 0)
        await feed(bus, exited(), 9)
        await timers(bus, {"n1"})
        world.clock.advance(10.0)
        await feed(bus, NodeJoined(node="n1", incarnation="i", host="h", slots=[]), 1)
        await feed(bus, exited(), 2)
        assert attempts(await outcomes(world, 2)) == [1, 2], "and nothing but these"


@in_virtual_time
async def test_a_timer_that_the_core_can_not_handle_does_not_loop(world, bus):
    async with running(await serving(world)):
        await feed(bus, NodeLeft(node="poison", incarnation="0.01"), 0)
        letter, _ = await outcomes(world, 2)
        await feed(bus, exited(), 1)
        await outcomes(world, 3)
    assert letter.subject == "TimerFired"


@in_virtual_time
async def test_a_timer_set_for_telemetry_survives_a_crash(world, bus):
    """A fact is read again; telemetry is not."""
    doomed = CutBus(await world.connect(), 10**6)
    first = asyncio.create_task(service(doomed, world.clock).run())
    await ask(bus, queries.GetStatus())
    beat = NodeHeartbeat(node="armed", incarnation="2.0", source="armed")
    await bus.publish_telemetry(subjects.for_message(beat), codec.encode(beat))
    await timers(bus, {"armed"})
    doomed.dead = True
    await feed(bus, exited(), 0)
    with pytest.raises(CutError):
        await first
    await let_go(bus)
    async with running(await serving(world)):
        (failed,) = await outcomes(world, 1, FAILED)
    assert failed.node == "armed"


@in_virtual_time
async def test_a_timer_that_telemetry_cancelled_stays_so_when_the_core_stumbles(world, bus):
    """The core goes back to the last commit then, and telemetry is not said again."""
    async with running(await serving(world)):
        await ask(bus, queries.GetStatus())
        for node in ("armed", "disarmed"):
            beat = NodeHeartbeat(node=node, incarnation="1.0", source=node)
            await bus.publish_telemetry(subjects.for_message(beat), codec.encode(beat))
        await elapse(0.1)
        assert (await ask(bus, queries.GetStatus())).text == "0 2"
        await feed(bus, exited("poison"), 0)
        await elapse(60.0)
        assert current_outcomes(world, FAILED) == []


@in_virtual_time
async def test_a_timer_of_a_day_fires_after_a_day(world):
    bus, began = await world.connect(), world.clock.now()
    async with running(await serving(world)):
        await feed(bus, NodeLeft(node="n1", incarnation="86400"), 0)
        await elapse(86_000)
        assert current_outcomes(world) == []
        await elapse(1_000)
    [fired] = current_outcomes(world)
    assert fired.at == pytest.approx(began + 86_400.0, abs=1.0)
    assert fired.correlation == "fact-0"


# --- what is counted of it --------------------------------------------------------------------------------------------


@in_virtual_time
async def test_each_input_is_observed_once_with_what_followed_though_the_core_raises_meanwhile(world):
    bus, seen = await world.connect(), []
    counted = await serving(world)
    assert counted.load() is None
    assert counted.peek(queries.GetStatus()) is None, "it is not active yet"
    counted.observe = seen.append
    for number in range(3):
        await feed(bus, exited(worker="poison" if number == 1 else "w"), number)
    async with running(counted):
        found = await outcomes(world, 4)
        load = counted.load()
    facts = [item for item in seen if item.sequence]
    assert [item.message.id for item in facts] == ["fact-0", "fact-1", "fact-2"]
    said = [message for item in facts for message in item.said]
    stamps = [[(each.id, each.at, each.source, each.correlation) for each in list_] for list_ in (said, found)]
    assert stamps[0] == stamps[1], "as it went out"
    assert {type(message) for message in said} == {FailureDetected, DeadLetter, Alert}
    assert (load.position, load.waiting) == (facts[-1].sequence, 0)
