"""The shell around a core: every outcome once and in order, whatever is cut off when."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from helpers import tally
from helpers.worlds import LEASE_TTL_S
from unicron_deploy.nats_server import free_port
from unicron_simulator.bus import MemoryWorld

from unicron import aio, codec, subjects
from unicron.clock import SystemClock, VirtualClock
from unicron.commit import Commit
from unicron.contracts import queries
from unicron.contracts.events import (
    Alert,
    AttemptFailed,
    DeadLetter,
    FailureDetected,
    NodeHeartbeat,
    NodeJoined,
    NodeLeft,
    OrderTaken,
    TaskSubmitted,
    WorkerExited,
)
from unicron.contracts.tasks import TaskSpec
from unicron.errors import BusUnavailableError, InvalidInputError
from unicron.intake import NONE
from unicron.service import COMMIT_EVERY, Service

NOW = time.time()

OUTCOMES = subjects.events(FailureDetected, AttemptFailed, TaskSubmitted, DeadLetter, OrderTaken, Alert)


# --- helpers ---------------------------------------------------------------------------------------------------------


async def insist(call):
    async with asyncio.timeout(30):
        while True:
            try:
                return await call()
            except BusUnavailableError:
                await asyncio.sleep(0.02)


async def feed(bus, message, number):
    """Put a fact of its node into the journal."""
    fact = msgspec.structs.replace(message, id=f"fact-{number}", at=NOW + number, source=message.node)
    await insist(lambda: bus.append(subjects.of(fact), codec.encode(fact), fact.id))


def exited(worker="w", **fields):
    return WorkerExited(node="n1", slot=0, task="gpt", worker=worker, **fields)


async def outcomes(bus, count, filters=OUTCOMES, settle=0.0):
    """Return the first `count` outcomes, and whatever more comes within `settle` seconds."""
    found = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(30) as limit, contextlib.aclosing(bus.follow(filters, 0)) as entries:
            if count == 0:
                limit.reschedule(asyncio.get_running_loop().time() + settle)
            async for entry in entries:
                found.append(codec.decode_message(entry.data))
                if len(found) == count:
                    if not settle:
                        break
                    limit.reschedule(asyncio.get_running_loop().time() + settle)
    assert len(found) >= count, f"only {found}"
    return found


async def ask(bus, query):
    data = await insist(lambda: bus.ask(subjects.asked(tally.NAME, query), codec.encode(query), 5.0))
    return codec.decode(data, queries.Reply)


def service(bus, **changes):
    return Service(tally.wiring(**changes), bus, SystemClock(), LEASE_TTL_S)


@contextlib.asynccontextmanager
async def running(*services):
    tasks = [asyncio.create_task(each.run()) for each in services]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome


def attempts(found):
    return [message.attempt for message in found if isinstance(message, FailureDetected)]


class CutError(Exception):
    """The process is gone."""


class CutBus:
    """A bus whose user dies at a given point: points lie before and after each write of state or journal."""

    def __init__(self, bus, point):
        self._bus = bus
        self._left = point
        self.dead = False

    def __getattr__(self, name):
        self.check()
        return getattr(self._bus, name)

    async def append(self, *args):
        return await self.write(self._bus.append, *args)

    def bucket(self, name):
        return CutBucket(self._bus.bucket(name), self, counted=name == "state")

    async def write(self, call, *args):
        self._pass_point()
        outcome = await call(*args)
        self._pass_point()
        return outcome

    def _pass_point(self):
        self._left -= 1
        self.dead = self.dead or self._left < 0
        self.check()

    def check(self):
        if self.dead:
            raise CutError


class StuckBus:
    """A bus whose commits get no answer while `stuck`."""

    def __init__(self, bus):
        self._bus = bus
        self.stuck = False

    def __getattr__(self, name):
        return getattr(self._bus, name)

    def bucket(self, name):
        return StuckBucket(self._bus.bucket(name), self) if name == "state" else self._bus.bucket(name)


class StuckBucket:
    def __init__(self, bucket, bus):
        self._bucket = bucket
        self._bus = bus

    def __getattr__(self, name):
        return getattr(self._bucket, name)

    async def update(self, *args):
        if self._bus.stuck:
            raise BusUnavailableError("no answer")
        return await self._bucket.update(*args)


class CutBucket:
    def __init__(self, bucket, bus, *, counted):
        self._bucket = bucket
        self._bus = bus
        self._counted = counted

    def __getattr__(self, name):
        self._bus.check()
        return getattr(self._bucket, name)

    async def update(self, *args):
        self._bus.check()
        if self._counted:
            return await self._bus.write(self._bucket.update, *args)
        return await self._bucket.update(*args)


# --- once and in order -----------------------------------------------------------------------------------------------


async def test_outcomes_come_once_and_in_order_wherever_the_process_is_cut_off(world):
    """Cut at point 0, then at point 1, and so on; each time a new instance goes on, and one more fact comes in."""
    bus = await world.connect()
    facts = 0
    for point in range(16):
        for _ in range(point // 2 + 1):  # enough to write for that many points
            await feed(bus, exited(), facts)
            facts += 1
        with pytest.raises(CutError):
            await asyncio.wait_for(service(CutBus(await world.connect(), point)).run(), 20)
        await bus.bucket("lease").delete(tally.NAME)  # as if it had run out
    async with running(service(await world.connect())):
        found = await outcomes(bus, facts, settle=0.2)
    assert attempts(found) == list(range(1, facts + 1))
    assert [message.correlation for message in found] == [f"fact-{number}" for number in range(facts)]


@pytest.mark.slow
async def test_outcomes_come_once_and_in_order_while_processes_and_server_are_killed(private_world, private_server):
    bus = await private_world.connect()
    facts = 300

    def start():
        return subprocess.Popen(
            [sys.executable, Path(tally.__file__), "--nats-url", private_server.url, "--lease-ttl-s", str(LEASE_TTL_S)]
        )

    process = start()
    try:
        for number in range(facts):
            await feed(bus, exited(), number)
            await asyncio.sleep(0.004)
            if number % 60 == 50:
                process.send_signal(signal.SIGKILL)
                process.wait()
                process = start()
            if number in {120, 220}:
                private_server.kill()
                private_server.start()
        found = await outcomes(bus, facts, settle=0.3)
        assert attempts(found) == list(range(1, facts + 1))
        assert [message.correlation for message in found] == [f"fact-{number}" for number in range(facts)]
        assert len({message.id for message in found}) == facts
        process.terminate()
        assert process.wait(20) == 0
        assert await insist(lambda: bus.bucket("lease").get(tally.NAME)) is None, "it gives its lease back"
    finally:
        process.kill()
        process.wait()


async def test_two_instances_that_both_believe_to_be_active_do_nothing_twice(world):
    bus = await world.connect()
    stale, fresh = service(await world.connect()), service(await world.connect())
    async with running(stale, fresh):
        for number in range(60):
            await feed(bus, exited(), number)
            if number % 10 == 5:
                await bus.bucket("lease").delete(tally.NAME)
        found = await outcomes(bus, 60, settle=0.3)
    assert attempts(found) == list(range(1, 61))


async def test_an_instance_that_becomes_active_shuts_out_its_predecessor_with_its_first_commit(world):
    bus = await world.connect()

    async def revision(above):
        stored = await bus.bucket("state").get(tally.NAME)
        if stored is None or stored.revision <= above:
            raise BusUnavailableError("not yet")
        return stored.revision

    async with running(service(await world.connect()), service(await world.connect())):
        first = await insist(lambda: revision(0))
        await bus.bucket("lease").delete(tally.NAME)
        await insist(lambda: revision(first))
        await asyncio.sleep(2 * LEASE_TTL_S)
        for tries_left in reversed(range(5)):
            try:
                for _ in range(20):  # queries go to the one that is active, never to the one that was
                    await bus.ask(subjects.rpc(tally.NAME), codec.encode(queries.GetStatus()), 5.0)
                break
            except BusUnavailableError:  # but one that had to wait for a core may have lost its lease meanwhile
                if not tries_left:
                    raise
                await asyncio.sleep(2 * LEASE_TTL_S)


async def test_an_instance_that_was_held_up_since_it_took_the_lease_does_not_serve_with_its_old_token(world):
    bus = await world.connect()
    late = service(await world.connect())
    read, held = late._ledger.read, asyncio.Event()

    async def hold_up():
        if not held.is_set():
            await held.wait()
        return await read()

    late._ledger.read = hold_up

    async def written(above):
        stored = await bus.bucket("state").get(tally.NAME)
        found = codec.decode(stored.value, Commit) if stored else Commit()
        if found.token <= above:
            raise BusUnavailableError("not yet")
        return found.token

    async with running(late):
        holder = await insist(lambda: held_by(bus, 0))
        await bus.bucket("lease").delete(tally.NAME)  # as if it had expired
        async with running(service(await world.connect())):
            await feed(bus, exited(), 1)
            newer = await insist(lambda: written(holder))
        held.set()
        await feed(bus, exited(), 2)
        assert attempts(await outcomes(bus, 2)) == [1, 2]
        assert await insist(lambda: written(newer)) > newer


async def held_by(bus, above):
    """Return the revision of the service's lease, once it is held."""
    stored = await bus.bucket("lease").get(tally.NAME)
    if stored is None or stored.revision <= above:
        raise BusUnavailableError("not yet")
    return stored.revision


async def test_a_second_instance_stands_by_and_takes_over_when_the_first_dies(world):
    bus = await world.connect()
    doomed = CutBus(await world.connect(), 10**6)
    first = asyncio.create_task(service(doomed).run())
    await insist(lambda: bus.ask(subjects.rpc(tally.NAME), codec.encode(queries.GetStatus()), 5.0))
    async with running(service(await world.connect())):
        await feed(bus, exited(), 0)
        await outcomes(bus, 1)
        assert not first.done()
        doomed.dead = True
        await feed(bus, exited(), 1)
        assert attempts(await outcomes(bus, 2, settle=0.2)) == [1, 2]
    with pytest.raises(CutError):
        await first


async def test_a_long_outage_of_the_server_ends_with_the_service_at_work_again(private_world, private_server):
    bus = await private_world.connect()
    async with running(service(await private_world.connect())):
        await feed(bus, exited(), 0)
        await outcomes(bus, 1)
        private_server.kill()
        await asyncio.sleep(3 * LEASE_TTL_S)
        private_server.start()
        await feed(bus, exited(), 1)
        assert attempts(await outcomes(bus, 2, subjects.events(FailureDetected), settle=0.3)) == [1, 2]
        assert (await ask(bus, queries.GetStatus())).text == "2 0"


async def test_the_core_is_told_that_the_connection_was_interrupted(private_world, private_server):
    bus = await private_world.connect()
    slow_lease = Service(tally.wiring(), await private_world.connect(), SystemClock(), 20.0)
    async with running(slow_lease):
        await ask(bus, queries.GetStatus())
        private_server.kill()
        private_server.start()
        (alert,) = await outcomes(bus, 1, subjects.events(Alert))
    assert alert.text == "BusReconnected"


# --- what can't be used ----------------------------------------------------------------------------------------------


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
async def test_corrupt_unknown_and_misplaced_messages_become_dead_letters_and_the_service_lives_on(world, data, error):
    bus = await world.connect()
    async with running(service(await world.connect())):
        await bus.append("unicron.v1.evt.n1.WorkerExited.gpt", data, "bad")
        await feed(bus, exited(), 1)
        letter, alert, failure = await outcomes(bus, 3, settle=0.1)
    assert isinstance(letter, DeadLetter)
    assert (letter.subject, letter.payload) == ("unicron.v1.evt.n1.WorkerExited.gpt", data)
    assert re.search(error, letter.error)
    assert isinstance(alert, Alert)
    assert letter.error in alert.text
    assert attempts([failure]) == [1]


async def test_corrupt_telemetry_becomes_a_dead_letter_and_good_telemetry_counts(world):
    bus = await world.connect()
    beat = NodeHeartbeat(node="n1", incarnation="i", source="n1")
    async with running(service(await world.connect())):
        await ask(bus, queries.GetStatus())
        await bus.tell("unicron.v1.tel.n1.NodeHeartbeat.n1", b"\xc1")
        await bus.tell(subjects.of(beat), codec.encode(beat))
        letter, _ = await outcomes(bus, 2, settle=0.1)
        assert (await ask(bus, queries.GetStatus())).text == "0 1"
    assert letter.subject == "unicron.v1.tel.n1.NodeHeartbeat.n1"


async def test_a_service_with_much_to_do_keeps_its_lease(world, caplog):
    bus = await world.connect()
    count = round(30 * LEASE_TTL_S)
    for number in range(count):
        await feed(bus, exited("slow"), number)
    async with running(service(await world.connect())):
        assert attempts(await outcomes(bus, count)) == list(range(1, count + 1))
    assert "steps down" not in caplog.text


async def test_telemetry_that_is_dropped_is_counted_and_the_core_and_everybody_are_told(world, monkeypatch):
    monkeypatch.setattr("unicron.service.WAITING", 5)
    monkeypatch.setattr("unicron.intake.NONE", NONE._replace(period_s=0.5))
    bus = await world.connect()
    beat = NodeHeartbeat(node="n1", incarnation="i", source="n1")
    alerts = []
    async with running(service(await world.connect())):
        await ask(bus, queries.GetStatus())
        await asyncio.gather(*(bus.tell(subjects.of(beat), codec.encode(beat)) for _ in range(900)))
        async with asyncio.timeout(30), contextlib.aclosing(bus.follow(subjects.events(Alert), 0)) as entries:
            async for entry in entries:
                alerts.append(codec.decode_message(entry.data).text)
                heard = int((await ask(bus, queries.GetStatus())).text.split()[1])
                told = re.findall(r"the tally can't keep up: it has dropped (\d+) pieces of telemetry", "".join(alerts))
                if told and heard + sum(map(int, told)) == 900:
                    break
        assert (await ask(bus, queries.GetLoad())).load == queries.Load(waiting=0, position=0, dropped=900 - heard)
    assert alerts[0] == "TelemetryDropped", "the core knows at once, others when a while is over"


async def test_telemetry_of_others_is_translated_and_what_breaks_the_translation_is_put_aside(world):
    bus = await world.connect()
    async with running(service(await world.connect())):
        await ask(bus, queries.GetStatus())
        for data in (b"", b"n1", b"n2", b"\xff"):  # nothing; two of the same kind; not UTF-8
            await bus.tell("elsewhere.node", data)
        found = await outcomes(bus, 4, settle=0.1)
    assert [message.text for message in found if isinstance(message, Alert)][:2] == ["ConnectionLost"] * 2
    assert len({message.id for message in found}) == 4
    assert [message.subject for message in found if isinstance(message, DeadLetter)] == ["elsewhere.node"]


@pytest.mark.parametrize("worker", ["poison", "misnamed"])
async def test_a_message_that_the_core_can_not_handle_is_put_aside_once_and_leaves_no_trace(world, worker):
    bus = await world.connect()
    await feed(bus, exited(), 0)
    await feed(bus, exited(worker), 1)
    await feed(bus, exited(), 2)
    async with running(service(await world.connect())):
        first, letter, alert, second = await outcomes(bus, 4, settle=0.2)
    assert attempts([first, second]) == [1, 2], "what the core did before it raised is undone"
    assert isinstance(letter, DeadLetter)
    assert isinstance(alert, Alert)
    assert codec.decode_message(letter.payload).worker == worker
    async with running(service(await world.connect())):
        assert len(await outcomes(bus, 4, settle=0.2)) == 4, "nor does the next instance stumble"


async def test_there_are_no_dead_letters_about_dead_letters(world):
    bus = await world.connect()
    facts = subjects.events(WorkerExited, DeadLetter)
    async with running(service(await world.connect(), facts=facts)):
        await feed(bus, exited("poison"), 0)
        await outcomes(bus, 2, settle=0.2)
        await feed(bus, exited(), 1)
        found = await outcomes(bus, 3, settle=0.1)
    assert [type(message) for message in found] == [DeadLetter, Alert, FailureDetected]


async def test_messages_whose_sender_gave_them_no_id_have_outcomes_all_the_same(world):
    bus = await world.connect()
    nameless = exited(source="n1")
    for number in range(3):
        await bus.append(subjects.of(nameless), codec.encode(nameless), f"{number}")
    async with running(service(await world.connect())):
        assert attempts(await outcomes(bus, 3, settle=0.1)) == [1, 2, 3]


async def test_a_timer_that_the_core_can_not_handle_does_not_loop(world):
    bus = await world.connect()
    async with running(service(await world.connect())):
        await feed(bus, NodeLeft(node="poison", incarnation="0.01"), 0)
        letter, _ = await outcomes(bus, 2, settle=0.3)
        await feed(bus, exited(), 1)
        await outcomes(bus, 3)
    assert letter.subject == "TimerFired"


# --- timers ----------------------------------------------------------------------------------------------------------


async def commit_with_timers(bus, names):
    stored = await bus.bucket("state").get(tally.NAME)
    if stored is None or set(codec.decode(stored.value, Commit).timers) != names:
        raise BusUnavailableError("not yet")


@pytest.mark.parametrize("committed", [True, False], ids=["committed", "read-again"])
async def test_timers_fire_once_survive_a_restart_and_can_be_replaced_and_cancelled(world, committed):
    bus = await world.connect()
    async with running(service(await world.connect())):
        for number, (node, after_s) in enumerate(
            [("kept", "2.0"), ("gone", "2.0"), ("moved", "1.5"), ("moved", "2.5")]
        ):
            await feed(bus, NodeLeft(node=node, incarnation=after_s), number)
        await feed(bus, NodeJoined(node="gone", incarnation="i", host="h", slots=[]), 9)
        if committed:
            await feed(bus, exited(), 10)
            await insist(lambda: commit_with_timers(bus, {"kept", "moved"}))
    async with running(service(await world.connect())):
        found = await outcomes(bus, 2, subjects.events(AttemptFailed), settle=0.4)
    assert [(message.node, message.correlation) for message in found] == [("kept", "fact-0"), ("moved", "fact-3")]


async def test_a_timer_cancelled_in_the_moment_in_which_it_is_due_does_not_fire():
    clock = VirtualClock(NOW)
    world = MemoryWorld(clock, 1000.0)
    bus = world.connect()
    async with running(Service(tally.wiring(), world.connect(), clock, LEASE_TTL_S)):
        await feed(bus, NodeLeft(node="n1", incarnation="5"), 0)
        await feed(bus, exited(), 9)
        await insist(lambda: commit_with_timers(bus, {"n1"}))
        clock.advance(10.0)
        await feed(bus, NodeJoined(node="n1", incarnation="i", host="h", slots=[]), 1)
        await feed(bus, exited(), 2)
        assert attempts(await outcomes(bus, 2, settle=0.1)) == [1, 2], "and nothing but these"


async def test_a_timer_set_for_telemetry_survives_a_crash(world):
    """A fact is read again; telemetry is not."""
    bus = await world.connect()
    doomed = CutBus(await world.connect(), 10**6)
    first = asyncio.create_task(service(doomed).run())
    await ask(bus, queries.GetStatus())
    beat = NodeHeartbeat(node="armed", incarnation="2.0", source="armed")
    await bus.tell(subjects.of(beat), codec.encode(beat))
    await insist(lambda: commit_with_timers(bus, {"armed"}))
    doomed.dead = True
    await feed(bus, exited(), 0)
    with pytest.raises(CutError):
        await first
    await bus.bucket("lease").delete(tally.NAME)
    async with running(service(await world.connect())):
        (failed,) = await outcomes(bus, 1, subjects.events(AttemptFailed), settle=0.4)
    assert failed.node == "armed"


async def test_a_timer_that_telemetry_cancelled_stays_so_when_the_core_stumbles(world):
    """The core goes back to the last commit then, and telemetry is not said again."""
    bus = await world.connect()
    async with running(service(await world.connect())):
        await ask(bus, queries.GetStatus())
        for node in ("armed", "disarmed"):
            beat = NodeHeartbeat(node=node, incarnation="1.0", source=node)
            await bus.tell(subjects.of(beat), codec.encode(beat))
        while (await ask(bus, queries.GetStatus())).text != "0 2":
            await asyncio.sleep(0.01)
        await feed(bus, exited("poison"), 0)
        assert await outcomes(bus, 0, subjects.events(AttemptFailed), settle=1.5) == []


def test_a_timer_of_a_day_in_virtual_time():
    clock = VirtualClock(NOW)
    world = MemoryWorld(clock, 60.0)

    async def story():
        bus = world.connect()
        async with running(Service(tally.wiring(), world.connect(), clock, 60.0)):
            await feed(bus, NodeLeft(node="n1", incarnation="86400"), 0)
            return await anext(bus.follow(subjects.events(AttemptFailed), 0))

    fired = codec.decode_message(clock.run(story()).data)
    assert fired.at == pytest.approx(NOW + 86_400.0, abs=1.0)
    assert fired.correlation == "fact-0"


def test_the_outbox_is_cleared_when_idle():
    """Its ids are known to the journal for a while only; whoever starts later must not publish it again."""
    clock = VirtualClock(NOW)
    world = MemoryWorld(clock, 60.0)

    async def story():
        bus = world.connect()
        async with running(Service(tally.wiring(), world.connect(), clock, 60.0)):
            await feed(bus, exited(), 0)
            await outcomes(bus, 1)
            await feed(bus, NodeJoined(node="n1", incarnation="a", host="", slots=[]), 1)  # nothing follows from it
            await asyncio.sleep(1)
            before = codec.decode((await bus.bucket("state").get(tally.NAME)).value, Commit)
            await asyncio.sleep(60)
            after = codec.decode((await bus.bucket("state").get(tally.NAME)).value, Commit)
        return before, after

    before, after = clock.run(story())
    assert [message.subject for message in before.outbox] == ["unicron.v1.evt.tally.FailureDetected.gpt"]
    assert (after.outbox, after.state) == ([], before.state)


# --- the rest of the shell -------------------------------------------------------------------------------------------


async def test_queries_are_answered_and_orders_have_outcomes(world):
    bus = await world.connect()
    spec = TaskSpec(name="gpt", command=["true"])
    async with running(service(await world.connect()), service(await world.connect())):
        for _ in range(5):  # never by the instance that stands by
            assert (await ask(bus, queries.GetStatus())).text == "0 0"
        assert (await ask(bus, queries.SubmitTask(spec=spec, by="Åda@laptop"))).text == "submitted"
        taken, submitted = await outcomes(bus, 2, settle=0.1)
    assert submitted.spec == spec
    assert (taken.order, taken.text, taken.by, taken.task) == ("SubmitTask", "submitted", "Åda@laptop", "gpt")
    assert taken.correlation == submitted.correlation != ""


@pytest.mark.parametrize("by", ["two\nlines", "\x1b[2J", "\u202eada", "a" * 257])
async def test_an_order_by_what_is_no_name_is_refused_and_not_told(world, by):
    bus = await world.connect()
    order = queries.SubmitTask(spec=TaskSpec(name="gpt", command=["true"]), by=by)
    async with running(service(await world.connect())):
        assert "at `$.by`" in (await ask(bus, order)).error
        await outcomes(bus, 0, settle=0.1)


async def test_queries_that_can_not_be_answered_get_an_error_and_change_nothing(world):
    bus = await world.connect()
    async with running(service(await world.connect())):
        garbage = await insist(lambda: bus.ask(subjects.rpc(tally.NAME), b"\xc1", 5.0))
        assert "not a valid query" in codec.decode(garbage, queries.Reply).error
        reply = await ask(bus, queries.GetPlan())
        assert "no answer to that" in reply.error
        assert (await ask(bus, queries.GetStatus())).text == "0 0"
        letter, _ = await outcomes(bus, 2, settle=0.1)
    assert letter.subject == "GetPlan"


async def test_who_waits_for_an_answer_hears_that_the_service_stepped_down(world, monkeypatch):
    monkeypatch.setattr(aio, "DRAIN_S", 0.1)
    bus = await world.connect()
    stuck = StuckBus(await world.connect())
    async with running(service(stuck)):
        await ask(bus, queries.GetStatus())
        stuck.stuck = True
        order = codec.encode(queries.SubmitTask(spec=TaskSpec(name="gpt", command=["true"])))
        asking = asyncio.create_task(bus.ask(subjects.orders(tally.NAME), order, 20.0))
        await asyncio.sleep(0.1)
        await bus.bucket("lease").delete(tally.NAME)
        with pytest.raises(BusUnavailableError, match="stepped down; try again"):
            await asking
        stuck.stuck = False


async def test_a_fact_said_again_under_its_id_leads_to_outcomes_of_its_own(world):
    bus = await world.connect()
    fact = msgspec.structs.replace(exited(), id="fact-0", at=NOW, source="n1")
    for name in ("once", "again"):  # who sends it chooses what the bus takes for its id
        await bus.append(subjects.of(fact), codec.encode(fact), name)
    async with running(service(await world.connect())):
        assert attempts(await outcomes(bus, 2)) == [1, 2]


async def test_a_service_without_answers_says_so(world):
    bus = await world.connect()
    async with running(service(await world.connect(), core=tally.Mute)):
        assert "it answers no queries" in (await ask(bus, queries.GetStatus())).error


async def test_the_position_is_committed_even_when_nothing_follows(world):
    bus = await world.connect()
    joined = NodeJoined(node="n1", incarnation="i", host="h", slots=[])
    for number in range(COMMIT_EVERY + 10):
        await feed(bus, joined, number)
    async with running(service(await world.connect())):

        async def committed():
            stored = await bus.bucket("state").get(tally.NAME)
            if stored is None or codec.decode(stored.value, Commit).sequence < COMMIT_EVERY:
                raise BusUnavailableError("not yet")

        await insist(committed)


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
async def test_a_service_whose_newest_commit_is_spoilt_goes_on_from_the_one_before_and_says_nothing_twice(
    world, changes, error
):
    bus = await world.connect()
    for number in range(3):
        await feed(bus, exited(), number)
    async with running(service(await world.connect())):
        assert attempts(await outcomes(bus, 3)) == [1, 2, 3]
    await feed(bus, exited(), 3)
    await spoil(bus, changes)
    async with running(service(await world.connect())):
        found = await outcomes(bus, 5, settle=0.3)
        assert attempts(found) == [1, 2, 3, 4]
        (alert,) = [each for each in found if isinstance(each, Alert)]
        assert re.search(f"^the stored state of tally can't be used: .*{error}.*; it goes on from the one ", alert.text)
        assert (await ask(bus, queries.GetStatus())).text == "4 0"
    async with running(service(await world.connect())):  # what it wrote is in order again
        assert len(await outcomes(bus, 5, settle=0.3)) == 5


async def test_a_service_that_can_use_no_commit_names_both_troubles_and_the_cure_and_changes_nothing(world):
    bus = await world.connect()
    await feed(bus, exited(), 0)
    async with running(service(await world.connect())):
        await outcomes(bus, 1)
    await spoil(bus, {"version": 9})
    await spoil(bus, MANY | {"version": 1})
    before = await bus.bucket("state").get(tally.NAME)
    for _ in range(2):
        with pytest.raises(
            InvalidInputError,
            match=r"^the stored state of tally can't be used: .*\$.exits.*; nor can the one before it: it has version 9"
            r".*; run the version that wrote it, or begin with a backup",
        ):
            await asyncio.wait_for(service(await world.connect()).run(), 20)
    assert await bus.bucket("lease").get(tally.NAME) is None
    assert await bus.bucket("state").get(tally.NAME) == before


async def test_a_token_that_nobody_was_given_stops_no_service(world):
    bus = await world.connect()
    await feed(bus, exited(), 0)
    async with running(service(await world.connect())):
        await outcomes(bus, 1)
    await spoil(bus, {"token": 2**53})
    async with running(service(await world.connect())):
        assert (await ask(bus, queries.GetStatus())).text == "1 0"
        await feed(bus, exited(), 1)
        assert attempts(await outcomes(bus, 2)) == [1, 2]
    stored = await bus.bucket("state").get(tally.NAME)
    assert codec.decode(stored.value, Commit).token < 2**53


async def test_a_cancelled_service_leaves_no_task_behind(world):
    before = asyncio.all_tasks()
    bus = await world.connect()
    async with running(service(bus)):
        await ask(await world.connect(), queries.GetStatus())
    await world.close()
    await asyncio.sleep(0.05)
    assert asyncio.all_tasks() <= before


# --- as a process ----------------------------------------------------------------------------------------------------


def run(*flags, **environ):
    return subprocess.run(
        [sys.executable, Path(tally.__file__), *flags],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environ},
    )


def test_a_service_without_a_server_says_address_and_cure_and_no_traceback():
    url = f"nats://127.0.0.1:{free_port()}"
    ended = run(UNICRON_NATS_URL=url, UNICRON_CONNECT_TIMEOUT_S="0.2")
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"tally: no NATS server answers at {url} within 0.2 s")
    assert "UNICRON_NATS_URL" in line


def test_a_service_with_a_bad_setting_names_it():
    ended = run("--log-level", "loud")
    assert (ended.returncode, len(ended.stderr.splitlines())) == (1, 1)
    assert "UNICRON_LOG_LEVEL 'loud': use one of debug, info, warning, error" in ended.stderr


def test_a_flood_of_what_can_not_be_used_is_summed_up_and_others_are_heard():
    clock = VirtualClock(NOW)
    world = MemoryWorld(clock, 60.0)

    async def story():
        bus = world.connect()
        async with running(Service(tally.wiring(), world.connect(), clock, 60.0)):
            for number in range(4022):
                await bus.append("unicron.v1.evt.n2.WorkerExited.gpt", b"\xc1", f"flood-{number}")
            await feed(bus, exited(), 0)
            await outcomes(bus, 21)
            await asyncio.sleep(30)
            return await outcomes(bus, 23)

    found = clock.run(story())
    letters = [message for message in found if isinstance(message, DeadLetter)]
    assert attempts(found) == [1]
    assert len(letters) == 11
    assert letters[-1].error == "4,012 more like this: dead letters of n2 that the tally has only counted"


# --- what is counted of it -------------------------------------------------------------------------------------------


async def test_each_input_is_observed_once_with_what_followed_though_the_core_raises_meanwhile(world):
    bus, seen = await world.connect(), []
    counted = service(await world.connect())
    assert counted.load() is None
    assert counted.peek(queries.GetStatus()) is None, "it is not active yet"
    counted.observe = seen.append
    for number in range(3):
        await feed(bus, exited(worker="poison" if number == 1 else "w"), number)
    async with running(counted):
        found = await outcomes(bus, 4, settle=0.2)
        load = counted.load()
    facts = [item for item in seen if item.sequence]
    assert [item.message.id for item in facts] == ["fact-0", "fact-1", "fact-2"]
    said = [message for item in facts for message in item.said]
    stamps = [[(each.id, each.at, each.source, each.correlation) for each in list_] for list_ in (said, found)]
    assert stamps[0] == stamps[1], "as it went out"
    assert {type(message) for message in said} == {FailureDetected, DeadLetter, Alert}
    assert (load.position, load.waiting) == (facts[-1].sequence, 0)
