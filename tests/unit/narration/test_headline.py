"""What a chain is about, in one line."""

import pytest
from unicron_cli.samples import sample
from unicron_narration.headline import ENDS, about, headline, outcome
from unicron_narration.story import LONGEST

from unicron import codec
from unicron.contracts.events import (
    FailureDetected,
    NodeDrained,
    NodeJoined,
    OrderTaken,
    TaskBroken,
    TaskRecovered,
    TaskRemoved,
    TaskStateChanged,
    WorkerExited,
)
from unicron.contracts.failures import Severity
from unicron.contracts.tasks import TaskState

KILLED = 'gpt-2 was ended by SIGKILL; its last line was "iteration 10"'
EXITED = WorkerExited(node="node-2", slot=0, task="gpt", worker="gpt-2", signal=9)
JOINED = NodeJoined(node="node-3", incarnation="a", host="h", slots=[])
TAKEN = OrderTaken(order="DrainNode", text="node-3 gets no more work", by="ada@laptop", node="node-3")


def failed(**fields):
    known = {"task": "gpt", "node": "node-2", "worker": "gpt-2", "reason": KILLED}
    return FailureDetected(severity=Severity.SEV2, method="m", status="exited_abnormally", **known | fields)


def lost(reason="its connection ended"):
    return failed(task="", worker="", node="node-3", reason=reason)


def state(state, task="gpt"):
    return TaskStateChanged(task=task, state=state)


def back(task="gpt", workers=6):
    return TaskRecovered(task=task, epoch=2, workers=workers, seconds=0.589)


RECOVERING, RUNNING = state(TaskState.RECOVERING), state(TaskState.RUNNING)


@pytest.mark.parametrize(
    ("chain", "told"),
    [
        (
            [EXITED, failed(), RECOVERING, RUNNING, RUNNING, back()],
            "gpt-2 on node-2 was ended by SIGKILL: back at 6 workers after 0.59 s",
        ),
        ([EXITED, failed(), RECOVERING], "gpt-2 on node-2 was ended by SIGKILL: recovering"),
        ([EXITED, failed(), RECOVERING, RUNNING], "gpt-2 on node-2 was ended by SIGKILL: recovering"),
        ([failed(), back(), state(TaskState.RECOVERING)], "gpt-2 on node-2 was ended by SIGKILL: recovering"),
        ([failed(), RECOVERING, state(TaskState.FAILED)], "gpt-2 on node-2 was ended by SIGKILL: failed"),
        (
            [failed(), TaskBroken(task="gpt", reason="x")],
            "gpt-2 on node-2 was ended by SIGKILL: broken by its own program",
        ),
        ([failed(reason="cuda: gpt-2 x")], "gpt-2 on node-2: cuda: gpt-2 x"),
        ([failed(reason="gpt-21 is meant")], "gpt-2 on node-2: gpt-21 is meant"),
        ([failed(reason="")], "gpt-2 on node-2: exited_abnormally"),
        ([failed(worker="", node="", reason="no progress")], "gpt: no progress"),
        ([lost()], "node-3: its connection ended"),
        (
            [lost(), RECOVERING, state(TaskState.WAITING, "bert")],
            "node-3: its connection ended: gpt recovering, bert waiting",
        ),
        ([lost(), back(workers=1)], "node-3: its connection ended: gpt back at 1 worker after 0.59 s"),
        (
            [lost(), *(back(f"t{each}") for each in range(50)), *(state(TaskState.WAITING, f"t{n}") for n in (1, 2))],
            "node-3: its connection ended: 50 tasks: 48 back, 2 waiting",
        ),
        ([TAKEN, NodeDrained(node="node-3")], "ada@laptop ordered DrainNode: node-3 gets no more work"),
        (
            [OrderTaken(order="RemoveTask", text="task gpt removed", task="gpt"), TaskRemoved(task="gpt")],
            "somebody ordered RemoveTask: task gpt removed: removed",
        ),
        ([JOINED, back()], "node-3 joined with 0 slots, 0 workers alive: gpt back at 6 workers after 0.59 s"),
        ([JOINED], "node-3 joined with 0 slots, 0 workers alive"),
    ],
)
def test_a_chain_in_one_line(chain, told):
    assert headline(chain) == told
    kept = [each for each in chain[1:] if isinstance(each, (FailureDetected, *ENDS))]
    assert headline([chain[0], *kept]) == told, "nothing else is needed"


def test_what_is_long_is_cut_before_how_it_ended():
    told = headline([failed(reason="x" * 10_000), RECOVERING, back()])
    assert told.endswith("…: back at 6 workers after 0.59 s")
    assert len(told) == LONGEST
    names = ["n" * 64 + str(each) for each in (1, 2)]
    told = headline([failed(reason="x" * 10_000), *map(back, names)])
    assert told[LONGEST // 2 - 1 :].startswith("…: nnn")
    assert len(told) == LONGEST


@pytest.mark.parametrize("kind", codec.MESSAGES.values(), ids=lambda kind: kind.__name__)
def test_any_message_may_begin_a_chain(kind):
    message = sample(kind)
    assert headline([message]).startswith(about([message]))
    assert (outcome([message]) != "") is isinstance(message, ENDS)
