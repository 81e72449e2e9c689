import json

import pytest
from helpers.cli import printed
from msgspec.structs import replace
from unicron_cli import watch
from unicron_cli.views import status_view, tasks_table

from unicron.contracts.answers import NodeView, SaverView, Status, TaskView
from unicron.contracts.events import NodeDrained, TaskStateChanged
from unicron.contracts.plans import Plan, TaskShare
from unicron.contracts.tasks import (
    UNCOUNTED,
    Healing,
    Member,
    NodeState,
    ParallelLayout,
    Slot,
    SlotRef,
    TaskSpec,
    TaskState,
)
from unicron.errors import InvalidInputError
from unicron.healing import healed_by
from unicron.observe.words.configuration import configuration
from unicron.observe.words.units import ago, percent, si

SPEC = TaskSpec(name="gpt", command=["x"], weight=2.0, min_workers=1, max_workers=4, iterations=10)


def shown(view):
    return " ".join(printed(view).split())


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 "), (999, "999 "), (999.9, "1 k"), (1.21e9, "1.21 G"), (4e21, "4 Z"), (4e27, "4e+03 Y")]
)
def test_numbers_have_the_prefix_that_fits(number, text):
    assert si(number, "FLOP/s") == f"{text}FLOP/s"


def test_durations_are_told_in_their_largest_unit():
    assert [ago(seconds) for seconds in (-1, 59, 61, 7200, 200000)] == ["0 s", "59 s", "1 min", "2 h", "2 d"]


def test_status_shows_who_computes_where_and_why_a_task_waits():
    slots = [Slot(index=0), Slot(index=1)]
    nodes = [
        NodeView(node="node-1", state=NodeState.UP, host="10.0.0.1", slots=slots, since=90.0),
        NodeView(node="node-2", state=NodeState.LOST, slots=slots, since=40.0),
    ]
    members = [Member(worker="w", node="node-1", slot=1)]
    rates = {"iteration": 4, "loss": 2.5, "iteration_s": 0.4, "recent_s": [0.25, 0.2, 0.4], "waf": 2e9}
    running = TaskView(spec=SPEC, state=TaskState.RUNNING, members=members, **rates)
    waiting = TaskView(spec=SPEC, state=TaskState.WAITING, reason="needs [4] workers")
    text = shown(status_view(Status(nodes=nodes, tasks=[running, waiting]), now=100.0))
    assert "node-1 up 10 s 10.0.0.1 cpu0=free cpu1=gpt:0" in text
    assert "node-2 lost 1 min gpt" not in text
    assert "gpt running 2 1 (1-4) 5/10 2.5000 0.400 1.25 s 2 GFLOP/s" in text
    assert "gpt waiting 2 0 (1-4) 0/10 needs [4] workers" in text
    assert "no plan yet" in text


def test_of_a_task_that_starts_again_nothing_is_shown_that_may_be_over():
    rates = {"iteration": 4, "loss": 2.5, "iteration_s": 0.4, "drill": "computed the same"}
    own = replace(SPEC, iterations=UNCOUNTED)
    for done, seen in ((-1, ""), (4, "5 ")):  # its program may not tell how far it is
        text = shown(status_view(Status(tasks=[TaskView(spec=own, state=TaskState.RUNNING, iteration=done)])))
        assert f"gpt running 2 0 (1-4) {seen}no plan yet" in text
    for state, seen in ((TaskState.RUNNING, True), (TaskState.STARTING, False)):
        text = shown(status_view(Status(tasks=[TaskView(spec=SPEC, state=state, **rates)])))
        assert [each in text for each in ("5/10", "2.5000", "0.400", "in its drill")] == [seen] * 4


def test_racks_and_domains_of_nodes_are_shown_where_any_is_known():
    up, slots = {"state": NodeState.UP, "since": 90.0}, [Slot(index=0)]
    nodes = [NodeView(node="n1", rack="r1", slots=slots, **up), NodeView(node="n2", domain="d[2]", slots=slots, **up)]
    text = shown(status_view(Status(nodes=nodes), now=100.0))
    assert "NODE STATE FOR HOST RACK DOMAIN SLOTS" in text
    assert "n1 up 10 s r1 cpu0=free" in text
    assert "n2 up 10 s d[2] cpu0=free" in text
    assert "RACK" not in shown(status_view(Status(nodes=[NodeView(node="n1", **up)]), now=100.0))


def test_nodes_come_in_the_order_of_their_numbers_and_a_lost_one_waits_for_somebody():
    nodes = [NodeView(node=f"node-{n}", state=NodeState.LOST if n == 4 else NodeState.UP, slots=[]) for n in (10, 4, 2)]
    shows = shown(status_view(Status(nodes=nodes)))
    assert shows.index("node-2 ") < shows.index("node-4 ") < shows.index("node-10 ")
    assert "node-4 waits for you: see to the machine, then start its agent" in shows


def test_ranks_that_are_healed_in_place_are_whole_models_for_people():
    spec = healed_by(Healing.IN_PLACE, TaskSpec(name="mine", command=["python", "x.py"], min_workers=2, max_workers=2))
    members = [Member(worker=f"mine-{number}", node="n", slot=number) for number in (0, 1)]
    view = TaskView(spec=spec, state=TaskState.RUNNING, members=members)
    nodes = [NodeView(node="n", state=NodeState.UP, slots=[Slot(index=0), Slot(index=1)])]
    text = shown(status_view(Status(nodes=nodes, tasks=[view])))
    assert "cpu0=mine:0 cpu1=mine:1" in text
    assert "mine running 1 2 (2-2)" in text
    assert dict(configuration(spec))["replica"] == "whole models"


def test_status_says_which_task_is_slow_and_why_and_what_came_of_its_drill():
    told = {"slow": "gpt-2 computes slowly", "drill": "computed the same"}
    view = TaskView(spec=TaskSpec(name="gpt", command=["x"]), state=TaskState.RUNNING, **told)
    shows = shown(status_view(Status(tasks=[view])))
    assert "gpt is slow: gpt-2 computes slowly gpt in its drill: computed the same" in shows


def test_status_shows_the_end_of_the_traceback_of_a_failed_task_and_where_all_of_it_is():
    trace = "Traceback (most recent call last):\n  File x\nValueError: [bad]"
    text = shown(status_view(Status(tasks=[TaskView(spec=SPEC, state=TaskState.FAILED, traceback=trace)])))
    assert "gpt failed: ValueError: [bad] (all of it: `unicron task show gpt`)" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"slots": [SlotRef(node="node-1", slot=0)], "waf": 3e9}, "3 GFLOP/s expected"),
        ({"slots": [SlotRef(node="node-1", slot=0)], "waf": 6.0}, "nothing is known of the tasks' FLOP/s"),
        ({"reason": "needs 2 workers"}, "no task runs"),
    ],
)
def test_status_tells_what_the_plan_is_expected_to_bring_or_that_nothing_is_known(fields, line):
    share = TaskShare(task="gpt", **fields)
    plan = Plan(number=3, trigger="node_lost:node-2", workers=6, shares=[share], waf=share.waf)
    assert f"plan 3 after node_lost:node-2: {line}, 6 slots" in shown(status_view(Status(plan=plan)))


def test_status_shows_no_rate_of_a_task_that_did_not_say_its_flops():
    unknown = TaskView(spec=SPEC, state=TaskState.RUNNING, iteration=4, iteration_s=0.25, waf=8.0)
    text = shown(status_view(Status(tasks=[unknown])))
    assert "FLOP/s" not in text
    both = shown(status_view(Status(tasks=[unknown, TaskView(spec=SPEC, state=TaskState.RUNNING, waf=2e9)])))
    assert "WAF 2 GFLOP/s achieved by all tasks together; no plan yet" in both


@pytest.mark.parametrize(("part", "text"), [(0.25, "25 %"), (0.0314, "3.1 %"), (-0.2, "-20 %"), (0.00012, "0.012 %")])
def test_percentages_keep_two_digits(part, text):
    assert percent(part) == text


def test_status_tells_replicas_and_places_in_the_layout_of_the_size_that_computes():
    spec = replace(SPEC, layouts={2: ParallelLayout(tensor=2), 3: ParallelLayout()})
    slots = [Slot(index=index) for index in range(3)]
    nodes = [NodeView(node="node-1", state=NodeState.UP, slots=slots, since=90.0)]

    def text(count):
        members = [Member(worker=f"w{slot}", node="node-1", slot=slot) for slot in range(count)]
        task = TaskView(spec=spec, state=TaskState.RUNNING, members=members)
        return shown(status_view(Status(nodes=nodes, tasks=[task]), now=100.0))

    assert "cpu0=gpt:0(r0p0) cpu1=gpt:1(r0p1) cpu2=free" in text(2)
    assert "gpt running 2 1x2 (1-4)" in text(2)
    assert "cpu0=gpt:0 cpu1=gpt:1 cpu2=gpt:2" in text(3)
    assert "gpt running 2 3 (1-4)" in text(3)


SLOTS = [Slot(index=index) for index in range(4)]
UP = [NodeView(node=f"n{number}", state=NodeState.UP, slots=SLOTS, since=90.0) for number in range(4)]


def saved(savers, spec=SPEC, nodes=UP, members=2, state=TaskState.RUNNING):
    """Return what status says of a task whose workers w0, w1, and so on are in the slots of n0."""
    there = [Member(worker=f"w{slot}", node="n0", slot=slot) for slot in range(members)]
    told = {name: SaverView(nodes=each) if isinstance(each, list) else SaverView(problem=each) for name, each in savers}
    task = TaskView(spec=spec, state=state, members=there, savers=told, reason="R")
    table = shown(tasks_table(Status(nodes=nodes, tasks=[task])))
    return table.partition("0.000 ")[0].partition("/10 ")[2]


def test_status_tells_on_how_many_nodes_a_state_is_saved():
    assert saved([("w0", ["n0", "n1"])]) == "2 nodes R"
    assert saved([("w0", ["n0"]), ("w1", ["n1"])]) == "2 nodes R", "two replicas, each its own"
    assert saved([("w0", ["n0"])]) == "1 node R"
    assert saved([]) == "R", "nothing is known yet"
    lost = [UP[0], replace(UP[1], state=NodeState.LOST)]
    assert saved([("w0", ["n0", "n1"])], nodes=lost) == "1 node R"
    assert saved([("w0", ["n0", "n1"])], state=TaskState.WAITING) == "R", "what it left may be on storage by now"


def test_of_a_model_in_parts_the_least_safe_part_counts():
    spec = replace(SPEC, layout=ParallelLayout(tensor=2), min_workers=2)
    assert saved([("w0", ["n0", "n1"]), ("w1", ["n0", "n2"])], spec) == "2 nodes R"
    assert saved([("w0", ["n0", "n1"]), ("w1", ["n0"])], spec) == "1 node R"
    assert saved([("w0", ["n0", "n1"])], spec) == "no R"
    assert saved([("w0", ["n0"]), ("w1", ["n0"]), ("w2", ["n1"]), ("w3", ["n1"])], spec, members=4) == "2 nodes R"


def test_status_tells_why_a_state_is_not_saved():
    assert saved([("w0", ["n0"]), ("w1", "no room")]) == "no w1 can't be saved: no room"


async def test_as_many_of_the_last_events_are_shown_as_were_asked_for_whatever_lies_between_them(capsys):
    class Journal:
        """Four messages at places far apart: others are no messages, or are gone."""

        places = (1, 40, 90, 100)

        async def tail(self):
            return self.places[-1]

        async def status(self):
            return Status()

        async def follow(self, after=0, until=None):
            for place in self.places:
                if after < place <= until:
                    yield place, NodeDrained(node=f"n{place}", drain=True)

    await watch._list(Journal(), follow=False, last=3, wanted={}, as_json=True)
    assert [json.loads(line)["sequence"] for line in capsys.readouterr().out.splitlines()] == [40, 90, 100]


@pytest.mark.parametrize("state", [TaskState.RUNNING, TaskState.FAILED])
async def test_output_is_asked_for_by_rank_also_when_the_task_has_ended(state):
    members = [Member(worker=worker, node="n0", slot=slot) for slot, worker in enumerate(("gpt-1", "gpt-7"))]

    class Cluster:
        async def status(self):
            return Status(tasks=[TaskView(spec=SPEC, state=state, members=members * (state is TaskState.RUNNING))])

        async def tail(self):
            return 2

        async def follow(self, after=0, until=None):
            yield 1, TaskStateChanged(task="gpt", state=TaskState.RUNNING, members=members)
            yield 2, TaskStateChanged(task="gpt", state=state, members=members)

    assert await watch._of_rank(Cluster(), "gpt:1") == "gpt-7"
    with pytest.raises(InvalidInputError, match="gpt:2: gpt has"):
        await watch._of_rank(Cluster(), "gpt:2")
