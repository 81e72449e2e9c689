"""What the shell around a core takes in, on the bus in memory and in virtual time: facts, telemetry and timers."""

import asyncio
import contextlib
import re

import msgspec
import pytest
from helpers.shell import (
    FAILED,
    NOW,
    CutBus,
    CutError,
    ask,
    attempts,
    exited,
    feed,
    let_go,
    newest,
    outcomes,
    running,
    service,
    serving,
    told,
)
from helpers.waiting import elapse, in_virtual_time, until

from unicron import codec, subjects
from unicron.contracts import queries
from unicron.contracts.events import (
    Alert,
    DeadLetter,
    FailureDetected,
    NodeHeartbeat,
    NodeJoined,
    NodeLeft,
    WorkerExited,
)

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
        await bus.tell("unicron.v1.tel.n1.NodeHeartbeat.n1", b"\xc1")
        await bus.tell(subjects.of(beat), codec.encode(beat))
        letter, _ = await outcomes(world, 2)
        assert (await ask(bus, queries.GetStatus())).text == "0 1"
    assert letter.subject == "unicron.v1.tel.n1.NodeHeartbeat.n1"


@in_virtual_time
async def test_telemetry_that_is_dropped_is_counted_and_the_core_and_everybody_are_told(world, monkeypatch):
    monkeypatch.setattr("unicron.service.WAITING", 5)
    bus = await world.connect()
    beat = NodeHeartbeat(node="n1", incarnation="i", source="n1")
    alerts = []
    async with running(await serving(world)):
        await ask(bus, queries.GetStatus())
        await asyncio.gather(*(bus.tell(subjects.of(beat), codec.encode(beat)) for _ in range(900)))
        async with contextlib.aclosing(bus.follow(subjects.events(Alert), 0)) as entries:
            async for entry in entries:
                alerts.append(codec.decode_message(entry.data).text)
                heard = int((await ask(bus, queries.GetStatus())).text.split()[1])
                told = re.findall(r"the tally can't keep up: it has dropped (\d+) pieces of telemetry", "".join(alerts))
                if told and heard + sum(map(int, told)) == 900:
                    break
        assert (await ask(bus, queries.GetLoad())).load == queries.Load(waiting=0, position=0, dropped=900 - heard)
    assert alerts[0] == "TelemetryDropped", "the core knows at once, others when a while is over"


@in_virtual_time
async def test_telemetry_of_others_is_translated_and_what_breaks_the_translation_is_put_aside(world, bus):
    async with running(await serving(world)):
        await ask(bus, queries.GetStatus())
        for data in (b"", b"n1", b"n2", b"\xff"):  # nothing; two of the same kind; not UTF-8
            await bus.tell("elsewhere.node", data)
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
        await bus.append(subjects.of(nameless), codec.encode(nameless), f"{number}")
    async with running(await serving(world)):
        assert attempts(await outcomes(world, 3)) == [1, 2, 3]


@in_virtual_time
async def test_a_fact_said_again_under_its_id_leads_to_outcomes_of_its_own(world, bus):
    fact = msgspec.structs.replace(exited(), id="fact-0", at=NOW, source="n1")
    for name in ("once", "again"):  # who sends it chooses what the bus takes for its id
        await bus.append(subjects.of(fact), codec.encode(fact), name)
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
    await bus.tell(subjects.of(beat), codec.encode(beat))
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
            await bus.tell(subjects.of(beat), codec.encode(beat))
        await elapse(0.1)
        assert (await ask(bus, queries.GetStatus())).text == "0 2"
        await feed(bus, exited("poison"), 0)
        await elapse(60.0)
        assert told(world, FAILED) == []


@in_virtual_time
async def test_a_timer_of_a_day_fires_after_a_day(world):
    bus, began = await world.connect(), world.clock.now()
    async with running(await serving(world)):
        await feed(bus, NodeLeft(node="n1", incarnation="86400"), 0)
        await elapse(86_000)
        assert told(world) == []
        await elapse(1_000)
    [fired] = told(world)
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
