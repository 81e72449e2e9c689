"""What a service decides by: its own clock as far as that only runs, whoever sets it, and no sender's."""

import msgspec
import pytest
from helpers.buses import say
from helpers.shell import FAILED, current_outcomes, exited, feed, let_go, newest, outcomes, running, service
from helpers.waiting import elapse, in_virtual_time, until
from helpers.worlds import LEASE_TTL_S
from hypothesis import given
from hypothesis import strategies as st
from unicron_detector.ladder import Ladder
from unicron_detector.state import DetectorState, LoggedLine, LostNode, SilentWorker, TaskRecord
from unicron_simulator.storms.clocks import OFFSETS_S, PartyClock

from unicron.contracts.base import BusReconnected
from unicron.contracts.events import FailureDetected, NodeLeft
from unicron.service.moments import move
from unicron.service.service import REST_S

AWAY_S = LEASE_TTL_S / 2
"""So long it does not lose its lease."""

SOME_S = st.floats(1e6, 2e9)


async def by_clock(world, ahead_s=0.0):
    """Return a service with a clock of its own, and that clock."""
    clock = PartyClock(world.clock)
    clock.ahead_s = ahead_s
    return service(await world.connect(), clock), clock


def heard(running_service):
    return running_service._core.seen


@pytest.mark.parametrize("ahead_s", [*OFFSETS_S, -1e9, 8e9])
@in_virtual_time
async def test_no_fact_is_thrown_away_for_its_time_and_the_core_gets_our_own(world, bus, ahead_s):
    one, _ = await by_clock(world)
    async with running(one):
        await until(lambda: one.token)
        await say(bus, msgspec.structs.replace(exited(), id="f", source="n1", at=world.clock.now() + ahead_s))
        [found] = await outcomes(world, 1)
        [fact] = [each for each in heard(one) if each.id == "f"]
    assert isinstance(found, FailureDetected)
    assert abs(fact.at - found.at) < 1.0


@in_virtual_time
async def test_facts_from_before_it_began_are_in_the_order_of_the_journal_whatever_their_times(world, bus):
    began = world.clock.now()
    for number, ahead_s in enumerate((-90.0, 7200.0, -7200.0, -30.0, 0.0)):
        fact = msgspec.structs.replace(exited(), id=f"f{number}", source="n1", at=began + ahead_s)
        await say(bus, fact)
    await elapse(5.0)
    one, _ = await by_clock(world)
    async with running(one):
        await outcomes(world, 5)
        times = [each.at for each in heard(one) if each.id.startswith("f")]
    assert times == sorted(times)
    assert times[0] == pytest.approx(began - 90.0)
    assert times[-1] <= world.clock.now()


@pytest.mark.parametrize("by_s", OFFSETS_S)
@in_virtual_time
async def test_a_timer_comes_when_its_seconds_have_passed_whoever_sets_the_clock_meanwhile(world, bus, by_s):
    one, clock = await by_clock(world)
    async with running(one):
        await until(lambda: one.token)
        await feed(bus, NodeLeft(node="n1", incarnation="20"), 1)
        began = world.clock.now()
        await elapse(9.0)
        clock.ahead_s = by_s
        await elapse(10.0)
        assert not current_outcomes(world, FAILED)
        await until(lambda: current_outcomes(world, FAILED))
    assert 19.9 <= world.clock.now() - began <= 22.0


@pytest.mark.parametrize("by_s", OFFSETS_S)
@in_virtual_time
async def test_what_a_predecessor_with_another_clock_remembers_is_as_long_ago_and_its_timers_come(world, bus, by_s):
    one, _ = await by_clock(world)
    async with running(one):
        await feed(bus, NodeLeft(node="n1", incarnation="20"), 1)
        await feed(bus, exited(), 2)  # leads to a commit
        await until(lambda: current_outcomes(world))
        began = world.clock.now()
        assert (await newest(bus)).timers
    await let_go(bus)
    await feed(bus, exited(), 3)  # what is yet to be read is no older
    other, clock = await by_clock(world, by_s)
    async with running(other):
        await elapse(15.0)
        [fact] = [each for each in heard(other) if each.id == "fact-3"]
        assert 0.0 <= clock.now() - fact.at <= 45.0
        assert 0.0 <= clock.now() - other._core.state.left_at <= 45.0
        assert not current_outcomes(world, FAILED)
        await until(lambda: current_outcomes(world, FAILED))
    assert world.clock.now() - began <= 45.0


@pytest.mark.parametrize("how", ["stopped", "asleep"])
@in_virtual_time
async def test_a_service_that_stood_still_says_so_before_anything_that_is_due_counts(world, bus, how):
    one, clock = await by_clock(world)
    async with running(one):
        await until(lambda: one.token)
        await feed(bus, NodeLeft(node="n1", incarnation="20"), 1)
        await elapse(9.0)
        if how == "stopped":
            world.clock.advance(AWAY_S)  # nothing of this process ran
        else:
            clock.ahead_s += AWAY_S  # nor did its monotonic clock
        await until(lambda: any(isinstance(each, BusReconnected) for each in heard(one)))
        await elapse(5.0)
        assert not current_outcomes(world, FAILED)
        await until(lambda: current_outcomes(world, FAILED))
    [told] = [each for each in heard(one) if isinstance(each, BusReconnected)]
    assert AWAY_S - 2.0 < told.down_s <= AWAY_S


@in_virtual_time
async def test_a_service_at_rest_leaves_behind_until_when_it_served(world, bus):
    one, clock = await by_clock(world)
    async with running(one):
        await feed(bus, NodeLeft(node="n1", incarnation="9000"), 1)
        await elapse(3 * REST_S)
        assert (await newest(bus)).at >= clock.now() - 2 * REST_S


@given(st.lists(SOME_S, min_size=1, max_size=4), SOME_S, st.sampled_from(OFFSETS_S))
def test_all_that_is_remembered_moves_together_and_what_holds_it_still_does(times, now, by_s):
    ladder = Ladder(reattempts=list(times), restarts={"n1": list(times)}, climbs={"n2": times[0]})
    silent = {"w": SilentWorker(since=times[0], at=now, stopped=False, where="")}
    tasks = {"t": TaskRecord(ladder=ladder, silent=silent, ended_at=None, sleepers={"w": now})}
    state = DetectorState(now=now, tasks=tasks, lost={"n1": LostNode(at=now)}, said={"n1": LoggedLine(text="", at=now)})
    before = msgspec.to_builtins(state)
    assert move(state, by_s) is state
    assert (state.tasks, state.tasks["t"].ladder) == (tasks, ladder)
    moved = [each - by_s for each in (*ladder.reattempts, *ladder.restarts["n1"], ladder.climbs["n2"], state.now)]
    assert moved == pytest.approx([*times, *times, times[0], now])
    assert state.tasks["t"].ended_at is None
    assert state.tasks["t"].replaced_at == 0.0, "it never was"
    assert before != msgspec.to_builtins(state)
    move(state, -by_s)
    assert state.said["n1"].at == pytest.approx(now)
