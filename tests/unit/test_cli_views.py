import pytest
from rich.console import Console

from unicron.cli.views import ago, plan_view, si, status_view
from unicron.contracts.plans import Plan, TaskShare
from unicron.contracts.queries import NodeView, PlanView, Status, TableRow, TaskView
from unicron.contracts.tasks import Member, NodeState, Slot, SlotRef, TaskSpec, TaskState

SPEC = TaskSpec(name="gpt", command=["x"], weight=2.0, min_workers=1, max_workers=4, iterations=10)


def shown(view):
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    console.print(view)
    return " ".join(console.export_text().split())


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 FLOP/s"), (999, "999 FLOP/s"), (999.9, "1 kFLOP/s"), (1.21e9, "1.21 GFLOP/s"), (4e21, "4e+03 EFLOP/s")],
)
def test_numbers_have_the_prefix_that_fits(number, text):
    assert si(number, "FLOP/s") == text


def test_durations_are_told_in_their_largest_unit():
    assert [ago(seconds) for seconds in (-1, 59, 61, 7200, 200000)] == ["0 s", "59 s", "1 min", "2 h", "2 d"]


def test_status_shows_who_computes_where_and_why_a_task_waits():
    slots = [Slot(index=0), Slot(index=1)]
    nodes = [
        NodeView(node="node-1", state=NodeState.UP, host="10.0.0.1", slots=slots, since=90.0),
        NodeView(node="node-2", state=NodeState.LOST, slots=slots, since=40.0),
    ]
    running = TaskView(
        spec=SPEC,
        state=TaskState.RUNNING,
        members=[Member(worker="w", node="node-1", slot=1)],
        iteration=4,
        loss=2.5,
        iteration_s=0.25,
        waf=2e9,
    )
    waiting = TaskView(spec=SPEC, state=TaskState.WAITING, reason="needs [4] workers")
    text = shown(status_view(Status(nodes=nodes, tasks=[running, waiting]), now=100.0))
    assert "node-1 up 10 s 10.0.0.1 cpu0=free cpu1=gpt:0" in text
    assert "node-2 lost 1 min gpt" not in text
    assert "gpt running 2 1 (1-4) 5/10 2.5000 0.250 2 GFLOP/s" in text
    assert "gpt waiting 2 0 (1-4) 0/10 needs [4] workers" in text
    assert "no plan yet" in text


def test_status_shows_the_traceback_of_a_failed_task():
    trace = "Traceback (most recent call last):\n  File x\nValueError: [bad]"
    text = shown(status_view(Status(tasks=[TaskView(spec=SPEC, state=TaskState.FAILED, traceback=trace)])))
    assert "gpt failed: Traceback (most recent call last): File x ValueError: [bad]" in text


def test_a_plan_shows_shares_table_and_distance_to_the_runner_up():
    share = TaskShare(task="gpt", slots=[SlotRef(node="node-1", slot=0)], waf=3e9, before=2)
    idle = TaskShare(task="bert", reason="needs 2 workers")
    plan = Plan(
        number=3,
        trigger="node_lost:node-2",
        workers=1,
        shares=[share, idle],
        waf=3e9,
        reward=5e9,
        runner_up_reward=4e9,
        prepared=True,
    )
    row = TableRow(event="node_joined", workers=3, sizes={"gpt": 1, "bert": 2}, reward=9e9)
    text = shown(plan_view(PlanView(plan=plan, table=[row])))
    assert "plan 3, after node_lost:node-2, from the lookup table" in text
    assert "1 GFLOP above the runner-up" in text
    assert "gpt 1 2 3 GFLOP/s node-1:0" in text
    assert "bert 0 0 0 FLOP/s needs 2 workers" in text
    assert "node_joined 3 gpt=1 bert=2 9 GFLOP" in text
    assert "no plan yet" in shown(plan_view(PlanView(plan=None, table=[])))
