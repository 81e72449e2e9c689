"""The output of `unicron top`, from statuses and messages to the lines of a terminal of any size."""

import functools
import io
import itertools

import pytest
from rich.cells import cell_len
from rich.console import Console
from unicron_cli.glance import EVENTS, FAILURES, glance
from unicron_cli.topview import top_view
from unicron_registry.core import RegistryCore

from unicron.contracts.answers import NodeView, Status, TaskView
from unicron.contracts.events import FailureDetected, TaskRecovered, TaskStateChanged, TaskSubmitted
from unicron.contracts.failures import Severity
from unicron.contracts.plans import Plan, TaskShare
from unicron.contracts.queries import SubmitTask
from unicron.contracts.tasks import UNCOUNTED, Member, NodeState, Slot, SlotRef, TaskSpec, TaskState
from unicron.observe.cluster import ClusterPicture

NOW = 1_000_000.0
EVIL = "\x1b[2J\x07\u202e\tx"


def spec(name, **fields):
    return TaskSpec(name=name, command=["x"], max_workers=4, **{"iterations": 100, **fields})


def node(number, state=NodeState.UP, slots=2):
    return NodeView(node=f"node-{number}", state=state, slots=[Slot(index=each) for each in range(slots)], since=NOW)


def failed(chain="c1", at=NOW - 60, **fields):
    known = {"severity": Severity.SEV2, "method": "m", "status": "exited_abnormally", "task": "gpt", "node": "node-2"}
    known |= {"worker": "gpt-2", "reason": 'gpt-2 was ended by SIGKILL; its last line was "x"'}
    return FailureDetected(id=f"f{chain}", correlation=chain, at=at, **known | fields)


def changed(state, chain="c1", task="gpt"):
    return TaskStateChanged(correlation=chain, at=NOW - 59, task=task, state=state)


def back(chain="c1", task="gpt"):
    return TaskRecovered(correlation=chain, at=NOW - 58, task=task, epoch=2, workers=6, seconds=0.59)


def cluster(status, messages=()):
    """Return a cluster of which these messages and then a status were read."""
    found = ClusterPicture()
    for position, message in enumerate(messages, 1):
        found.handle(position, message)
    found.fill(status)
    return found


def small():
    members = [Member(worker=f"gpt-{each}", node=f"node-{each}", slot=0) for each in (1, 2)]
    running = {"state": TaskState.RUNNING, "members": members, "iteration": 49, "loss": 2.5, "iteration_s": 0.25}
    share = TaskShare(task="gpt", slots=[SlotRef(node=each.node, slot=each.slot) for each in members])
    status = Status(
        nodes=[node(1), node(2), node(3, NodeState.LOST), node(4, NodeState.DRAINING)],
        tasks=[
            TaskView(spec=spec("done"), state=TaskState.FINISHED, iteration=99),
            TaskView(spec=spec("gpt"), waf=1.5e12, **running),
            TaskView(spec=spec("open", iterations=UNCOUNTED), state=TaskState.WAITING),
            TaskView(spec=spec("hurt"), state=TaskState.RECOVERING),
        ],
        plan=Plan(number=3, trigger="node_lost:node-3", workers=4, waf=2e12, shares=[share]),
    )
    return cluster(status, (failed(), changed(TaskState.RECOVERING), changed(TaskState.RUNNING), back()))


@functools.cache
def large():
    states = [*[NodeState.UP] * 16_380, NodeState.LOST, *[NodeState.DRAINING] * 3]
    tasks = [
        TaskView(spec=spec(f"task-{each}"), state=TaskState.RUNNING, iteration=each % 100) for each in range(9_999)
    ]
    tasks.append(TaskView(spec=spec("broken"), state=TaskState.FAILED))
    status = Status(nodes=[node(*each, 8) for each in enumerate(states)], tasks=tasks)
    return cluster(status, [failed(f"c{each}", NOW - each) for each in range(1000)])


def hostile():
    name = f"火火{EVIL}" + "n" * 300
    waiting = [TaskView(spec=spec(f"{name}{each}"), state=TaskState.WAITING) for each in range(40)]
    status = Status(nodes=[NodeView(node=name, state=NodeState.UP)], tasks=waiting)
    return cluster(status, [failed(f"c{each}", worker=name, node=name, reason=f"{EVIL}\n" * 50) for each in range(60)])


ERRORS = {hostile: f"{EVIL} nobody answers\n" * 20}


def drawn(seen, width, height, error=""):
    """Return the lines of a terminal of that size, with what steers it left in."""
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, color_system=None, force_terminal=False, emoji=False)
    console.print(top_view(glance(seen, {"gpt": 0.971}, NOW, error), width, height))
    return out.getvalue().rstrip("\n").split("\n")


@pytest.mark.slow
@pytest.mark.parametrize(("width", "height"), [*itertools.product((20, 40, 80, 132, 300), (5, 12, 24, 60))])
@pytest.mark.parametrize("seen", [ClusterPicture, small, large, hostile], ids=lambda each: each.__name__)
def test_it_fits_into_any_terminal_and_nothing_steers_it(seen, width, height):
    lines = drawn(seen(), width, height, ERRORS.get(seen, ""))
    assert len(lines) <= height
    assert max(map(cell_len, lines)) <= width
    assert not {*"\x1b\x07\u202e\t"} & {*"".join(lines)}


def test_a_small_cluster_is_told_whole():
    text = "\n".join(drawn(small(), 80, 24))
    assert "4 tasks, 4 slots, 2 spare" in text
    assert "WAF 1.5 TFLOP/s of 2 TFLOP/s planned, 75 %" in text
    assert "1 lost 1 draining 2 up\n■■■■" in text
    rows = [line.split() for line in text.splitlines()]
    names = [row[0] for row in rows if row and row[0] in {"hurt", "gpt", "open", "done"}]
    assert names == ["hurt", "gpt", "open", "done"], "those in trouble first"
    gpt = next(row for row in rows if row[:2] == ["gpt", "running"])
    assert (gpt[2], gpt[-4:]) == ("2", ["2.5", "0.25", "97", "%"])
    assert "2    1 min  gpt:1 (gpt-2) on node-2 was ended by SIGKILL" in text
    assert "gpt is back at 6 workers" in text, "the newest event, in words"
    wide = "\n".join(drawn(small(), 132, 24))
    assert "back at 6 workers after 2.00 s" in wide, "by the clock of what is shown beside it"
    assert wide.count(" after ") == 1, "one figure for one thing"
    assert "50/100" in "\n".join(drawn(small(), 132, 24))


def test_of_thousands_each_state_keeps_a_square_and_what_is_left_out_is_counted():
    lines = drawn(large(), 80, 24)
    names, first = next((line, after) for line, after in itertools.pairwise(lines) if line.startswith("NODES"))
    assert "1 lost 3 draining 16,380 up" in names
    assert "(■ is 64 nodes)" in names
    assert sum(line.count("■") for line in lines) - 1 == 1 + 1 + 256
    assert first == "■" * 80
    assert any("broken" in line for line in lines)
    [more] = [line for line in lines if "more tasks" in line]
    shown = sum("task-" in line for line in lines) + 1
    assert more.strip() == f"and {10_000 - shown:,} more tasks"


def test_a_glance_has_the_newest_and_how_they_stand():
    seen = cluster(Status(), [failed(f"c{each}", NOW - 1e5 + each) for each in range(500)])
    found = glance(seen, {}, NOW)
    assert (len(found.failures), len(found.events)) == (FAILURES, EVENTS)
    assert (found.failures[0].chain, found.failures[0].open, found.failures[0].outcome) == ("c499", True, "")
    [line] = glance(small(), {}, NOW).failures
    assert (line.open, line.outcome) == (False, "back at 6 workers after 2.00 s")


@pytest.mark.parametrize("state", TaskState)
def test_neither_status_nor_top_shows_workers_that_a_task_does_not_have(state):
    members = [Member(worker=f"gpt-{each}", node=f"node-{each}", slot=0) for each in (1, 2)]
    known, seen = RegistryCore(), ClusterPicture()
    known.answer(SubmitTask(spec=spec("gpt")))
    moves = [TaskStateChanged(task="gpt", state=each, members=members) for each in (TaskState.RUNNING, state)]
    for position, message in enumerate((TaskSubmitted(task="gpt", spec=spec("gpt")), *moves), 1):
        seen.handle(position, message)
        known.handle(message)
    has = 0 if state in {TaskState.WAITING, TaskState.FINISHED, TaskState.FAILED, TaskState.REMOVED} else 2
    assert [len(each.members) for each in known.state.tasks.values()] == [has]
    assert [each.workers for each in glance(seen, {}, NOW).tasks] == [has] * (state is not TaskState.REMOVED)
    assert ("on 2 workers" in str(moves[-1])) == bool(has)


def test_without_an_answer_it_says_so_and_keeps_what_it_knew():
    text = "\n".join(drawn(small(), 80, 24, "no answer from registry within 5 s: is registry running?"))
    assert "is registry running?" in text
    assert "gpt:1 (gpt-2) on node-2" in text
    assert "no plan yet" in "\n".join(drawn(ClusterPicture(), 80, 24))
