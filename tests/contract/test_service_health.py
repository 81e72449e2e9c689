"""Health is a round trip: a fact goes in and comes out; what it does not get through is named."""

import asyncio

import pytest
from helpers import tally
from helpers.shell import StuckBus, ask, exited, feed, running, service, serving
from helpers.waiting import elapse, in_virtual_time, until
from helpers.worlds import LEASE_TTL_S

from unicron import codec, subjects, vitality
from unicron.contracts.answers import Health, Reply
from unicron.contracts.queries import GetHealth
from unicron.errors import BusUnavailableError
from unicron.service.roundtrip import PROOF_S, Inactive
from unicron.services import SERVICES


def pulses(world):
    return [entry for entry in world.memory.journal if subjects.is_pulse(entry.subject)]


class ReadOnly:
    """A bus that stores nothing: with an error, or without an answer."""

    def __init__(self, bus, *, silent):
        self._bus, self._silent, self.broken = bus, silent, False

    def __getattr__(self, name):
        return getattr(self._bus, name)

    async def append(self, *args):
        if self.broken and self._silent:
            await asyncio.Event().wait()
        if self.broken:
            raise BusUnavailableError("storing on unicron.v1.pulse.tally: read-only file system")
        return await self._bus.append(*args)


@in_virtual_time
async def test_a_fact_goes_in_and_comes_out_once_however_many_ask_and_is_no_message(world, bus):
    one = await serving(world)
    async with running(one):
        await until(lambda: one.token)
        found = await asyncio.gather(*(ask(bus, GetHealth()) for _ in range(5)))
        assert [(each.health.problem, each.health.seconds < 1.0) for each in found] == [("", True)] * 5
        assert len(pulses(world)) == 1
        assert not [message for message in one._core.seen if subjects.is_pulse(getattr(message, "subject", ""))]
        assert not [entry for entry in world.memory.journal if subjects.matches(subjects.JOURNAL, entry.subject)]


@in_virtual_time
async def test_what_another_service_puts_in_counts_too(world, bus):
    one = await serving(world)
    async with running(one):
        await until(lambda: one.token)
        asked = asyncio.create_task(ask(bus, GetHealth()))
        await elapse(0.1)
        await bus.append(subjects.pulse("registry"), b"", "p1")
        assert (await asked).health.problem == ""
        assert [entry.subject for entry in pulses(world)] == [subjects.pulse("registry")]


@in_virtual_time
async def test_a_service_whose_inputs_wait_says_so(world, bus):
    stuck = StuckBus(await world.connect())
    one = service(stuck, world.clock)
    async with running(one):
        await until(lambda: one.token)
        stuck.stuck = True
        await feed(bus, exited(), 1)
        await elapse(1.0)
        assert "does not get through" in (await ask(bus, GetHealth())).health.problem
        stuck.stuck = False
        await elapse(1.0)
        assert (await ask(bus, GetHealth())).health.problem == ""


@pytest.mark.parametrize("silent", [False, True])
@in_virtual_time
async def test_a_journal_that_takes_nothing_is_named_in_time(world, bus, silent):
    broken = ReadOnly(await world.connect(), silent=silent)
    one = service(broken, world.clock)
    async with running(one):
        await until(lambda: one.token)
        broken.broken = True
        found = (await ask(bus, GetHealth())).health
        assert found.problem.startswith(vitality.STORES_NOTHING)
        assert ("read-only" in found.problem) is not silent
        assert found.seconds < vitality.ASK_S


@in_virtual_time
async def test_where_the_lease_of_one_that_is_gone_never_runs_out_the_others_say_so(world, bus):
    """Even removing is writing: a disk that is read-only keeps everybody from being active."""
    await bus.bucket("lease").create(tally.NAME, b"somebody-1")
    inactive = Inactive(tally.NAME, await world.connect(), lambda: 0, lambda: "", LEASE_TTL_S / 4)
    explaining = asyncio.create_task(inactive.run())
    await elapse(LEASE_TTL_S / 8)
    assert not world.memory.handlers.get(subjects.standby(tally.NAME))
    await elapse(LEASE_TTL_S / 4)
    data = await bus.ask(subjects.standby(tally.NAME), codec.encode(GetHealth()), 1.0)
    assert "has not run out" in codec.decode(data, Reply).health.problem
    explaining.cancel()


async def examined(bus, **answers):
    """Return what is wrong with which parts, where all services but these are well; None: nobody answers."""
    for name in SERVICES:
        problem = answers.get(name, "")

        async def answer(_, problem=problem):
            if problem == "hangs":
                await asyncio.Event().wait()
            return codec.encode(Reply(health=Health(seconds=0.01, problem=problem)))

        if problem is not None:
            await bus.serve(subjects.rpc(name), name, answer)
    return {part.name: part.problem for part in await vitality.examine(bus) if part.problem}


@in_virtual_time
async def test_of_a_cluster_in_which_all_gets_through_nothing_is_named(world, bus):
    assert await examined(bus) == {}


@pytest.mark.parametrize("victim", SERVICES)
@pytest.mark.parametrize(
    ("how", "said"),
    [("hangs", "does not answer within"), (None, vitality.NONE_ACTIVE), ("9 inputs wait", "9 inputs wait")],
)
@in_virtual_time
async def test_a_service_through_which_nothing_gets_is_named_alone(world, bus, victim, how, said):
    [(name, problem)] = (await examined(bus, **{victim: how})).items()
    assert (name, said in problem) == (victim, True)


@in_virtual_time
async def test_a_journal_that_takes_nothing_is_named_once_and_who_does_not_even_answer_beside_it(world, bus):
    full = f"{vitality.STORES_NOTHING}: it is full"
    found = await examined(bus, **{**dict.fromkeys(SERVICES, full), "planner": "hangs"})
    assert found.keys() == {vitality.JOURNAL, "planner"}
    assert found[vitality.JOURNAL] == "takes no facts: it is full"


@in_virtual_time
async def test_a_journal_without_a_leader_is_named_and_not_the_services_that_stepped_down_for_it(world, bus):
    async def tail():
        raise BusUnavailableError("reading the journal's end: JetStream is not ready")

    bus.tail = tail
    assert (await examined(bus, **dict.fromkeys(SERVICES))).keys() == {vitality.JOURNAL}


@in_virtual_time
async def test_a_server_that_the_others_do_not_hear_is_named_and_nothing_else(world, bus):
    async def silent_servers():
        return ["nats-2"]

    bus.silent_servers = silent_servers
    assert await examined(bus) == {"nats-2": vitality.SILENT_SERVER}


def test_a_service_asks_itself_for_no_longer_than_others_ask_it():
    assert PROOF_S < vitality.ASK_S < 5.0
