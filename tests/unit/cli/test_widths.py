"""`status` and `top` in terminals of all widths: what tells things apart is whole; what matters less goes first."""

import pytest
from helpers.cli import printed
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from unicron_cli.glance import glance
from unicron_cli.topview import top_view
from unicron_cli.views import status_view

from unicron.contracts.answers import NodeView, Status, TaskView
from unicron.contracts.tasks import UNCOUNTED, Member, NodeState, Slot, TaskSpec, TaskState
from unicron.observe.cluster import ClusterPicture

WIDTHS = (80, 100, 120, 200)
NAMES = st.from_regex(r"[a-z]{1,8}(-[a-z0-9]{1,8}){0,2}", fullmatch=True)
LIVE = [state for state in TaskState if state is not TaskState.REMOVED]
ALL = ["WEIGHT", "WORKERS", "ITERATION", "LOSS", "SECONDS", "LEFT", "WAF", "SAVED", "REASON"]


@st.composite
def clusters(draw):
    """Clusters of nodes and tasks with names of up to 26 letters, and reasons of many words."""
    names = draw(st.lists(NAMES, min_size=1, max_size=6, unique=True))
    nodes = []
    for number, name in enumerate(draw(st.lists(NAMES, min_size=1, max_size=4, unique=True))):
        slots = [Slot(index=index, kind=draw(st.sampled_from(["cpu", "NVIDIA H100 80GB HBM3"]))) for index in range(8)]
        host, rack = f"{name}.cluster.example.org", draw(st.sampled_from(["", "rack-7"]))
        node = NodeView(node=f"n-{name}", state=draw(st.sampled_from(NodeState)), host=host, rack=rack, slots=slots)
        nodes.append(node if number else NodeView(node="n-up", state=NodeState.UP, slots=slots))
    tasks = []
    for index, name in enumerate(names):
        counted = draw(st.sampled_from([UNCOUNTED, 100, 400_000]))
        spec = TaskSpec(name=name, command=["x"], max_workers=64, iterations=counted, weight=1.25)
        there = [Member(worker=f"{name}-{index}", node="n-up", slot=index)] * draw(st.booleans())
        reason = draw(st.sampled_from(["", "needs 9 " * 20]))
        told = {"loss": 2.5, "iteration_s": 12.25, "recent_s": [12.25], "waf": 3e12, "reason": reason}
        state = draw(st.sampled_from(LIVE))
        tasks.append(TaskView(spec=spec, state=state, members=there, iteration=draw(st.integers(-1, 99)), **told))
    return Status(nodes=nodes, tasks=tasks)


def rows(text, name):
    return [line.split() for line in text.splitlines() if line.split()[:1] == [name]]


@pytest.mark.parametrize("width", WIDTHS)
@given(found=clusters())
@settings(max_examples=25)
def test_status_cuts_nothing(found, width):
    text = printed(status_view(found, now=100.0), width)
    assert "…" not in text
    assert max(map(cell_len, text.splitlines())) <= width
    assert all(rows(text, node.node)[0][1] == node.state for node in found.nodes)
    for task in found.tasks:
        told = rows(text, task.spec.name)[0]
        assert told[1] == task.state
        assert f"({task.spec.min_workers}-{task.spec.max_workers})" in told
        counted = any(word.partition("/")[0] == f"{task.iteration + 1}" for word in told)
        unknown = task.spec.iterations == UNCOUNTED and task.iteration < 0
        assert counted or unknown or task.state is TaskState.STARTING
        assert all(f"{task.spec.name}:0" in text for _ in task.members)
    assert text.count("needs") == 20 * sum(bool(task.reason) for task in found.tasks), "reasons are whole"


@pytest.mark.parametrize("width", WIDTHS)
@given(found=clusters())
@settings(max_examples=25)
def test_top_cuts_no_name_and_no_figure(found, width):
    seen = ClusterPicture()
    seen.fill(found)
    text = printed(top_view(glance(seen, dict.fromkeys(seen.tasks, 0.97), 100.0), width, 60), width)
    assert "…" not in text
    assert max(map(cell_len, text.splitlines())) <= width
    for task in found.tasks:
        workers = 0 if task.state.ended or task.state is TaskState.WAITING else len(task.members)
        assert rows(text, task.spec.name)[0][1:3] == [task.state, f"{workers}"]


def test_what_matters_less_goes_first():
    spec = TaskSpec(name="gpt", command=["x"], max_workers=6, iterations=4000)
    reason = "resized from 6 to 4 workers, as node-3 was lost"
    told = {"loss": 2.5, "iteration_s": 0.25, "recent_s": [0.25], "waf": 3e12, "reason": reason}
    found = Status(tasks=[TaskView(spec=spec, state=TaskState.RUNNING, iteration=9, **told)])
    heads = {width: printed(status_view(found), width).partition("TASK")[2].split("\n")[0].split() for width in WIDTHS}
    assert heads[200] == ["STATE", *ALL]
    assert [[each for each in ALL if each not in heads[width]] for width in WIDTHS[:3]] == [
        ["WEIGHT", "LOSS", "SECONDS", "WAF", "SAVED"],
        ["WEIGHT", "SECONDS", "WAF"],
        ["WEIGHT"],
    ]
    shown = printed(status_view(found), 60)
    assert "    resized from 6 to 4 workers, as node-3 was lost" in shown.splitlines(), (
        "a sentence without room stands below"
    )
