"""The phases add up to the whole, whatever comes in whatever order."""

import pytest
from helpers.accounts import (
    FOUR,
    SPEC,
    admitted,
    began,
    exited,
    failure,
    finished,
    journal,
    plan,
    ready,
    regroup,
    regrouped,
    stalled,
    start,
    taken,
)
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from replay import replayer
from unicron_cli.samples import sample

from unicron import codec
from unicron.contracts import commands, events, slowdowns
from unicron.contracts.tasks import TaskState
from unicron.observe.accounts.goodput import Goodput
from unicron.observe.accounts.phases import Phase

NODES, TASKS = ("n1", "n2", "n3"), ("gpt", "bert")
WORKERS = ("a", "b", "c", "d")
places = st.tuples(st.sampled_from(NODES), st.integers(0, 1))
nodes = st.sampled_from(NODES)
workers = st.tuples(st.sampled_from(WORKERS), nodes, st.integers(0, 1))
SLOW = {"epoch": 0, "iteration": 1, "world_size": 1, "usual_s": 1.0}
members = st.lists(workers, min_size=1, max_size=4)
tasks, small = st.sampled_from(TASKS), st.integers(0, 5)


def struck(worker, sev, task, epoch):
    name, node, slot = worker
    return [failure(worker=name if sev > 1 else "", node=node, slot=slot, sev=sev, task=task, epoch=epoch)]


def place_of(worker):
    return dict(zip(("worker", "node", "slot"), worker, strict=True))


anything = st.one_of(
    st.builds(lambda node: [admitted(node)], nodes),
    st.builds(lambda node: [events.NodeGone(node=node)], nodes),
    st.builds(lambda node: [events.NodeSuspected(node=node, reason="", grace_s=1.0)], nodes),
    st.builds(lambda task: [events.TaskSubmitted(task=task, spec=SPEC)], tasks),
    st.builds(lambda task, slots: [plan("node_joined:n1", task, slots)], tasks, st.lists(places, unique=True)),
    st.builds(lambda task, state: [events.TaskStateChanged(task=task, state=state)], tasks, st.sampled_from(TaskState)),
    st.builds(lambda worker, task: [start(*worker, task=task)], workers, tasks),
    st.builds(lambda worker, task: [commands.StopWorker(**place_of(worker), task=task)], workers, tasks),
    st.builds(lambda worker, task: [ready(*worker, task=task)], workers, tasks),
    st.builds(regroup, small, members, tasks),
    st.builds(regrouped, small, members, small, tasks, recomputed=small, seconds=st.floats(0, 9)),
    st.builds(
        lambda worker, at, task, known: [exited(*worker, iteration=at, task=task, expected=known)],
        *(workers, small, tasks, st.booleans()),
    ),
    st.builds(struck, workers, st.integers(1, 3), st.sampled_from([*TASKS, ""]), st.integers(-1, 5)),
    st.builds(
        lambda task, recent_s: [slowdowns.SlowdownDetected(**SLOW, task=task, recent_s=recent_s)],
        *(tasks, st.floats(0.5, 5)),
    ),
    st.builds(
        lambda worker, epoch, at, task: [finished(at, *worker, task=task, epoch=epoch)], *(workers, small, small, tasks)
    ),
)


class Life:
    """What befalls a task that four workers have begun: whatever is told, it could be so."""

    def __init__(self):
        self.epoch, self.iteration = 0, 0

    def happens(self, what, which, after):
        """Return the messages of one thing; `which` is a number of a worker."""
        worker = FOUR[which % 4]
        name, node, slot = worker
        members = [each for each in FOUR if each != worker] if which > 3 else list(FOUR)
        self.iteration += which
        match what:
            case "killed":
                found = [exited(*worker, iteration=self.iteration, signal=9), failure(name, node, slot)]
            case "hangs":
                found = [stalled(*worker, self.iteration, after), failure(name, node, slot)]
            case "lost":
                found = [failure("", node, -1, sev=1, task="")]
            case "suspected" | "back":
                suspected = events.NodeSuspected(node=node, reason="", grace_s=1.0)
                found = [admitted(node) if what == "back" else suspected]
            case "ordered":
                self.epoch += 1
                found = regroup(self.epoch, members)
            case "met":
                back = max(0, self.iteration - which)
                found = regrouped(self.epoch, members, back, seconds=after, recomputed=which)
            case "planned":
                found = [plan("node_joined:n2", slots=[(node, slot) for _, node, slot in members])]
            case "started":
                found = [start(*worker), ready(*worker)]
            case "slow":
                of_task = {"task": "gpt", "epoch": self.epoch, "iteration": 1, "world_size": 4}
                found = [slowdowns.SlowdownDetected(**of_task, usual_s=1.0, recent_s=1.0 + after)]
        return found


HAPPENINGS = "killed hangs lost suspected back ordered met met planned started slow"
happenings = st.sampled_from(HAPPENINGS.split())
lives = st.lists(st.tuples(st.floats(0, 20), happenings, st.integers(0, 7)), max_size=40)
steps = st.lists(st.tuples(st.floats(-2, 20), st.sampled_from("xyz"), anything), max_size=60)


def written(given_steps):
    """Return messages with times that mostly grow, and chains."""
    now, found = 100.0, []
    for after, chain, messages in given_steps:
        now += after
        found += [replace(each, id=f"m{len(found)}", at=now, correlation=chain) for each in messages]
    return found


def messages_of(life):
    """Return the messages of a life, after its beginning."""
    task, now, found = Life(), 30.0, journal(began())
    for after, what, which in life:
        now += after
        messages = task.happens(what, which, after)
        found += [replace(each, id=f"l{len(found)}", at=now, correlation=what) for each in messages]
    return found


def check(goodput, until=None):
    """All phases add up to what was counted apart; nothing is negative. Return the report."""
    report = goodput.report(until)
    for row in report.tasks:
        assert set(row.seconds) == set(map(str, Phase))
        assert min(row.seconds.values()) >= 0
        assert row.total_s == pytest.approx(row.whole_s, abs=1e-6)
    tasks_s = sum(row.total_s for row in report.tasks)
    causes_s = sum(row.total_s for row in report.causes)
    assert causes_s <= tasks_s + 1e-6
    costs = [goodput.chain(chain, until) for chain in ["", *goodput.incidents.known]]
    assert goodput.costs(until) == costs[1:]
    for phase in Phase:
        of_tasks_s = sum(row.seconds[phase] for row in report.tasks)
        assert sum(cost.seconds[phase] for cost in costs) == pytest.approx(of_tasks_s, abs=1e-6)
    for cost in costs:
        check_cost(cost)
    walls = {row.name: sum(row.wall_s.values()) for row in report.tasks if row.name}
    for task, wall_s in walls.items():
        of_chains_s = sum(course.whole_s for cost in costs for course in cost.courses if course.task == task)
        assert of_chains_s == pytest.approx(wall_s, abs=1e-6)
    return report


def check_cost(cost):
    """What is drawn is what was paid for; nothing is drawn twice in one place."""
    assert min(cost.seconds.values()) >= 0
    assert cost.recovered_at is None or cost.recovered_at >= cost.begun - 1e-6
    drawn = [(cost, cost.spans), *((course, course.spans) for course in cost.courses)]
    for paid, spans in drawn if cost.chain else ():
        if paid.more == 0:
            for phase in Phase:
                seconds = sum((each.end - each.begin) * each.share for each in spans if each.phase is phase)
                assert seconds == pytest.approx(paid.seconds[phase], abs=1e-6)
        ends = {}
        for each in spans:
            place = each.node, each.slot, each.task
            assert ends.get(place, 0.0) <= each.begin < each.end
            ends[place] = each.end


def slots_of(goodput):
    return sum(len(node.slots) for node in goodput._all.nodes.values())


def lived(messages, since=0.0):
    """Return the accounts, and the slot-seconds of all slots there were, by another way of counting."""
    goodput, whole, now = Goodput(since), 0.0, None
    for message in messages:
        at = message.at if now is None else max(now, message.at)
        if now is not None:
            whole += slots_of(goodput) * max(0.0, at - max(now, since))
        goodput.handle(message)
        now = at
    return goodput, whole


@given(steps)
def test_every_slot_second_is_in_one_phase(given_steps):
    goodput, whole = lived(written(given_steps))
    assert sum(row.total_s for row in check(goodput).tasks) == pytest.approx(whole, abs=1e-6)


@given(lives)
def test_so_it_is_of_a_task_that_fails_and_is_healed_again_and_again(life):
    messages = messages_of(life)
    goodput, whole = lived(messages)
    report = check(goodput)
    assert sum(row.total_s for row in report.tasks) == pytest.approx(whole, abs=1e-6)
    assert sum(report.row("gpt").wall_s.values()) == pytest.approx(messages[-1].at - 10, abs=1e-6)


@given(lives, st.floats(0, 400))
def test_so_it_is_from_any_time_on(life, after):
    goodput, whole = lived(messages_of(life), after)
    assert sum(row.total_s for row in check(goodput).tasks) == pytest.approx(whole, abs=1e-6)


@given(lives, st.integers(1, 3), st.integers(0, 5))
def test_so_it_is_where_few_chains_are_told_apart(life, chains, spans):
    messages = messages_of(life)
    few, all_ = taken(messages, chains=chains, spans=spans), taken(messages)
    assert len(few.incidents.known) <= chains
    report = check(few)
    for mine, theirs in zip(report.tasks, check(all_).tasks, strict=True):
        assert mine.seconds == pytest.approx(theirs.seconds, abs=1e-6)
    kept = [few.chain(chain) for chain in few.incidents.known]
    assert all(len(cost.spans) <= spans + slots_of(few) for cost in kept)


@given(steps)
def test_to_ask_changes_nothing(given_steps):
    asked, silent = Goodput(), Goodput()
    for message in written(given_steps):
        asked.handle(message)
        asked.report(message.at + 50)
        for chain in asked.incidents.known:
            asked.chain(chain, message.at + 50)
        silent.handle(message)
    assert asked.report() == silent.report()
    assert [asked.chain(each) for each in asked.incidents.known] == [
        silent.chain(each) for each in silent.incidents.known
    ]


@pytest.mark.parametrize("name", replayer.NAMES)
def test_recorded_journals_add_up_wherever_they_end(name):
    messages = replayer.read(name)
    goodput, whole = lived(messages)
    assert sum(row.total_s for row in check(goodput).tasks) == pytest.approx(whole)
    partly = Goodput()
    for message in messages:
        partly.handle(message)
        check(partly)
    check(taken(messages[len(messages) // 2 :]))  # as if the journal had lost its older half


def test_the_recorded_demo_shows_what_its_times_say():
    """tests/replay/demo: the hang of gpt-b-4, on four workers, told 0.89 s after its last progress."""
    report = taken(replayer.read("demo")).report()
    costs = {row.name: row.seconds for row in report.causes}
    assert costs["task_hang"]["detection"] == pytest.approx(4 * 0.9, abs=0.05)
    assert 0 < costs["exited_abnormally"]["detection"] < 0.03, "an end of a process is known at once"
    assert report.row("gpt-b").failures == 3
    assert report.row("gpt-b").goodput == pytest.approx(0.61, abs=0.02)


def test_what_is_remembered_does_not_grow_with_the_messages():
    messages = replayer.read("demo")
    goodput = Goodput()
    sizes = []
    for round_ in range(3):
        for message in messages:
            goodput.handle(replace(message, at=message.at + round_ * 200))
        sizes.append((len(goodput._all.book.all()), len(goodput.incidents.known), slots_of(goodput)))
    assert sizes[0] == sizes[1] == sizes[2]


@pytest.mark.parametrize("kind", codec.MESSAGES.values(), ids=lambda kind: kind.__name__)
def test_every_kind_of_message_is_taken(kind):
    check(taken([replace(sample(kind), at=100.0)]), 110.0)
