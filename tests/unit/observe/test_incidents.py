"""Open failures, the tasks that they hit, and how each ended."""

import pytest
from helpers.accounts import FAILED, FOUR, SPEC, account, began, failure, plan, regroup, regrouped

from unicron.contracts import events
from unicron.contracts.tasks import TaskState
from unicron.observe.words.headline import outcome


def changed(state, task="gpt"):
    return events.TaskStateChanged(task=task, state=state)


def back(task="gpt"):
    return events.TaskRecovered(task=task, epoch=2, workers=4, seconds=0.589)


def lost():
    return failure(worker="", node="n2", slot=-1, sev=1, task="")


def after(*lines):
    """Return the failure that began at 122, after these lines."""
    return account([*began(), (122, FAILED, failure()), *lines]).incidents.failures[FAILED]


ENDS = [
    (back(), "back at 4 workers after 8.00 s"),
    (changed(TaskState.FINISHED), "finished"),
    (changed(TaskState.FAILED), "failed"),
    (events.TaskRemoved(task="gpt"), "removed"),
    (events.TaskPaused(task="gpt", paused=True), "recovering"),
]


@pytest.mark.parametrize("chain", [FAILED, "another"])
@pytest.mark.parametrize(("end", "words"), ENDS, ids=[type(end).__name__ + words[:4] for end, words in ENDS])
def test_it_is_open_until_its_task_is_back_or_over_by_whatever_chain(end, words, chain):
    struck = (124, FAILED, changed(TaskState.RECOVERING))
    assert (after(struck).is_open, after(struck).recovered_at()) == (True, None)
    healed = after(struck, (130, chain, end))
    assert (healed.is_open, healed.recovered_at()) == (False, 130)
    assert outcome(healed, healed.first) == words
    later = after(struck, (130, chain, end), (140, "later", changed(TaskState.RECOVERING)))
    assert later == healed, "what comes later is another's"


@pytest.mark.parametrize("state", [TaskState.RUNNING, TaskState.WAITING, TaskState.STARTING])
def test_a_task_that_runs_with_what_is_left_or_waits_for_slots_is_not_back(state):
    resized = events.TaskSubmitted(task="gpt", spec=SPEC)
    failed = after((124, FAILED, changed(TaskState.RECOVERING)), (130, FAILED, changed(state)), (140, resized))
    assert failed.is_open
    assert outcome(failed, failed.first) == ("recovering" if state is TaskState.RUNNING else state)


def test_a_node_that_is_given_up_hits_all_that_have_slots_there_and_whom_its_chain_stops():
    lines = [*began(), (122, FAILED, lost(), changed(TaskState.RECOVERING, "bert"), changed(TaskState.RUNNING, "tiny"))]
    failed = account(lines).incidents.failures[FAILED]
    assert failed.tasks.keys() == {"gpt", "bert", "tiny"}
    assert {task for task, hit in failed.tasks.items() if hit.over_at is None} == {"gpt", "bert"}
    failed = account([*lines, (130, back("bert"), back())]).incidents.failures[FAILED]
    assert not failed.is_open


def test_a_later_failure_of_the_chain_opens_it_again_and_the_worst_counts():
    again = (150, FAILED, failure(worker="w3", node="n2", slot=0, sev=3), lost())
    failed = after((130, FAILED, back()), again)
    assert (failed.is_open, failed.severity, failed.first.worker) == (True, 1, "w4")


def test_a_plan_that_moves_a_task_is_an_incident_but_no_failure():
    three = FOUR[:3]
    lines = [(50, "left", plan("node_left:n2", slots=[(node, slot) for _, node, slot in three]), *regroup(1, three))]
    lines = [*began(), *lines, (60, "left", *regrouped(1, three, iteration=3))]
    incidents = account(lines).incidents
    assert (incidents.known["left"].is_open, "left" in incidents.failures) == (True, False)
    assert account([*lines, (70, "left", back())]).incidents.known["left"].recovered_at() == 70
