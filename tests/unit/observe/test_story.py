"""Messages for people: each in a line, a chain as a story, and its headline."""

import msgspec
import pytest
from unicron_cli.samples import sample

from unicron import codec
from unicron.contracts.events import (
    Alert,
    FailureDetected,
    NodeDrained,
    NodeJoined,
    OrderTaken,
    PlanDecided,
    TaskBroken,
    TaskRecovered,
    TaskRemoved,
    TaskStateChanged,
    WorkerExited,
    WorkerFinished,
    WorkerReady,
)
from unicron.contracts.failures import Severity
from unicron.contracts.plans import Plan, TaskShare
from unicron.contracts.stragglers import RecordingSwitched, StragglerDetected
from unicron.contracts.tasks import ParallelLayout, SlotRef, TaskState
from unicron.errors import InvalidInputError
from unicron.observe.incidents import TaskOutcome, chain_of
from unicron.observe.words.headline import about, headline
from unicron.observe.words.ranks import RankNames
from unicron.observe.words.story import LONGEST, describe, find_chain, line, story


def message(own, chain="", at=100.0, text="hello"):
    return Alert(id=own, correlation=chain, at=at, source="detector", text=text)


@pytest.mark.parametrize("kind", codec.MESSAGES.values(), ids=lambda kind: kind.__name__)
def test_every_message_can_be_said_in_one_line(kind):
    said = describe(sample(kind))
    assert said
    assert "\n" not in said
    assert len(said) <= 160
    assert "(" not in said.partition(" ")[0], "no raw struct"


def test_a_straggler_says_who_it_is_and_what_to_do():
    found = msgspec.structs.replace(sample(StragglerDetected), slowdown=1.3333, drain=False)
    assert describe(found) == (
        "gpt is 1.33 times as slow as it could be: slow-worker gpt-w3 on node-1:1: Drain the node of rank 1."
    )
    assert "its node is drained" in describe(msgspec.structs.replace(found, drain=True))
    assert describe(sample(RecordingSwitched)) == "gpt: 0.1 of the iterations are recorded"


def test_the_shape_of_replicas_is_told_where_it_says_more_than_how_many_workers_there_are():
    slots = [SlotRef(node="n1", slot=number) for number in range(4)]
    for layout, told in (
        (ParallelLayout(tensor=2, replicas=2), "gpt=4 (tensor 2)"),
        (ParallelLayout(shard=4), "gpt=4"),
        (ParallelLayout(), "gpt=4"),
    ):
        share = TaskShare(task="gpt", slots=slots, layout=layout)
        assert describe(PlanDecided(plan=Plan(number=1, trigger="x", workers=4, shares=[share]))).endswith(f": {told}")


def test_a_worker_that_is_ready_or_through_is_named_with_its_place():
    assert describe(sample(WorkerReady)) == "gpt-w3 on node-1:1 is ready"
    assert describe(sample(WorkerFinished)) == "gpt-w3 on node-1:1 has done all 50 iterations"


def test_a_failure_says_what_a_person_wants_to_know():
    failure = FailureDetected(
        severity=Severity.SEV1,
        escalated=Severity.SEV2,
        method="m",
        status="exited_abnormally",
        task="gpt",
        node="node-2",
        worker="w3",
        reason="killed",
    )
    assert describe(failure) == "sev1 exited_abnormally w3 node-2, raised from sev2: killed"
    named = msgspec.structs.replace(failure, reason="w3 was ended by SIGKILL", escalated=None)
    assert describe(named) == "sev1 exited_abnormally node-2: w3 was ended by SIGKILL"
    exited = WorkerExited(node="node-2", slot=1, task="gpt", worker="w3", signal=9, iteration=7)
    assert describe(exited) == "w3 on node-2:1 ended by signal 9, in iteration 7"
    exited = msgspec.structs.replace(exited, signal=None, exit_code=0, expected=True)
    assert describe(exited) == "w3 on node-2:1 ended by exit code 0, as ordered, in iteration 7"
    unseen = WorkerExited(node="node-2", slot=1, task="gpt", worker="w3")  # by an agent that was started again
    assert describe(unseen) == "w3 on node-2:1 ended, nobody knows how, nor in which iteration"


def test_long_and_many_lined_texts_become_one_short_line():
    said = describe(message("a", text="one\ntwo " + "x" * 500))
    assert said.startswith("one two xxx")
    assert said.endswith("…")


def test_a_line_of_the_list_has_the_id_to_ask_the_chain_with():
    assert "deadbeef" in line(message("a", "deadbeef"), RankNames())
    assert chain_of(message("a")) == "a"


def test_the_story_has_its_chain_only_in_order_with_offsets():
    journal = [
        message("f1", at=100.0, text="first"),
        message("x1", at=100.1, text="other"),
        message("a1", "f1", at=100.25, text="second"),
        message("a2", "f1", at=101.5, text="third"),
    ]
    for wanted in ("f1", "a2", "a1"):
        chain = find_chain(journal, wanted)
        assert [each.id for each in chain] == ["f1", "a1", "a2"]
    lines = story(chain)
    assert [text.split()[0] for text in lines] == ["+0.000", "+0.250", "+1.500"]
    assert [text.split()[-1] for text in lines] == ["first", "second", "third"]


def test_the_beginning_of_an_id_will_do_where_it_fits_one_chain():
    journal = [message("abc1"), message("abd2"), message("zz", "abc1")]
    assert [each.id for each in find_chain(journal, "abc")] == ["abc1", "zz"]
    with pytest.raises(InvalidInputError, match="fits 2 chains"):
        find_chain(journal, "ab")
    for unknown in ("nope", ""):
        with pytest.raises(InvalidInputError, match="unicron events"):
            find_chain(journal, unknown)


# --- what a chain is about, in one line ------------------------------------------------------------------------------


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
    return TaskRecovered(task=task, epoch=2, workers=workers, seconds=0.3, at=0.589)


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
    kept = [each for each in chain[1:] if isinstance(each, FailureDetected | TaskOutcome)]
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
    line = headline([message])
    assert line.startswith(about(message))
    assert (line != about(message)) is isinstance(message, TaskOutcome)
