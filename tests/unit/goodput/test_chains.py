"""What one failure cost, and when what of it was, where the right answer is worked out by hand."""

import pytest
from helpers.accounts import (
    FAILED,
    FOUR,
    NEW,
    THREE,
    account,
    admitted,
    began,
    exited,
    failure,
    finished,
    grown,
    journal,
    killed,
    plan,
    ready,
    regroup,
    regrouped,
    slowed,
    start,
    taken,
)
from replay import replayer
from unicron_goodput import book

from unicron.contracts import events
from unicron.contracts.tasks import TaskState


def recovered(task="gpt"):
    return events.TaskRecovered(task=task, epoch=2, workers=4, seconds=1.0)


def paid(seconds):
    return {phase: round(spent, 6) for phase, spent in seconds.items() if spent}


def drawn(spans):
    """Return what is to be seen of each slot, in the order of time."""
    found = {}
    for each in sorted(spans, key=lambda span: (span.node, span.slot, span.begin)):
        found.setdefault((each.node, each.slot), []).append((each.worker, str(each.phase), each.begin, each.end))
    return found


HEALED = [*began(), *killed(), (150, FAILED, recovered())]


def test_a_killed_worker_costs_what_can_be_counted_by_hand_and_it_is_told_when():
    cost = account(HEALED).chain(FAILED, 200)
    assert (cost.what, cost.node, cost.tasks) == ("exited_abnormally", "n2", ["gpt"])
    assert (cost.begun, cost.detected_at, cost.decided_at, cost.recovered_at) == (121, 122, 124, 150)
    assert paid(cost.seconds) == {
        "recomputed": 10, "detection": 4, "decision": 8, "transition": 39, "sub_healthy": 20,
    }  # fmt: skip
    assert cost.whole_s == pytest.approx(81)
    stood = [("detection", 121, 122), ("decision", 122, 124), ("transition", 124, 130)]
    again = pytest.approx(130 + 10 / 3)
    assert drawn(cost.spans) == {
        (node, slot): [*((worker, *each) for each in stood), *later]
        for worker, node, slot, later in [
            *((*each, [(each[0], "recomputed", 130, again), (each[0], "transition", 145, 150)]) for each in THREE),
            ("w4", "n2", 1, [("w5", "sub_healthy", 130, 150)]),
        ]
    }


def test_the_task_as_a_whole_stood_still_for_the_time_between_fault_and_recovery_but_for_what_it_trained():
    [course] = account(HEALED).chain(FAILED, 200).courses
    assert paid(course.seconds) == {
        "detection": 1,
        "decision": 2,
        "transition": 6 + 5,
        "recomputed": round(10 / 3, 6),
        "training": round(15 - 10 / 3, 6),
    }
    assert course.whole_s == pytest.approx(150 - 121)
    assert [(str(each.phase), each.begin, each.end) for each in course.spans] == [
        ("detection", 121, 122),
        ("decision", 122, 124),
        ("transition", 124, 130),
        ("recomputed", 130, pytest.approx(130 + 10 / 3)),
        ("training", pytest.approx(130 + 10 / 3), 145),
        ("transition", 145, 150),
    ]
    assert {(each.node, each.slot, each.worker) for each in course.spans} == {("", -1, "")}


def test_telemetry_that_overtakes_the_journal_makes_no_recovery_longer():
    cost = account([*began(), *killed(), (151, finished(14, epoch=2)), HEALED[-1]]).chain(FAILED, 200)
    assert cost.recovered_at == 150
    assert cost.courses[0].whole_s == pytest.approx(150 - 121)


def test_telemetry_of_a_task_that_the_journal_has_not_told_of_yet_counts_for_nothing():
    report = account([(100, finished(3)), (101, admitted("n1"))]).report(111)
    assert report.since == 101
    assert [(row.name, row.total_s) for row in report.tasks] == [("", 20.0)]


def test_a_failure_that_is_being_healed_shows_what_it_has_cost_so_far():
    goodput = account([*began(), *killed()[:3]])  # it is ordered at 124
    at_126, at_128 = goodput.chain(FAILED, 126), goodput.chain(FAILED, 128)
    assert at_126.recovered_at is None
    assert paid(at_126.seconds) == {"detection": 4, "decision": 8, "transition": 8}
    assert paid(at_128.seconds) == {"detection": 4, "decision": 8, "transition": 16}
    assert {each.end for each in at_128.spans if each.phase == "transition"} == {128}
    assert at_128.courses[0].whole_s == pytest.approx(7)
    assert paid(goodput.chain(FAILED).seconds) == {"detection": 4, "decision": 8}


def test_each_of_two_failures_has_its_own_costs():
    again = "again"
    lines = [
        *HEALED,
        (160, again, exited("w1", "n1", 0, iteration=12, signal=9)),
        (161, again, failure("w1", "n1", 0), *regroup(3, NEW[1:])),
        (162, again, *regrouped(3, NEW[1:], iteration=12), start("w6", "n1", 0)),
    ]
    goodput = account(lines)
    assert list(goodput.chains()) == ["submitted", FAILED, again]
    assert goodput.chain(FAILED, 170).whole_s == pytest.approx(81)
    assert paid(goodput.chain(again, 170).seconds) == {"detection": 4, "transition": 4, "sub_healthy": 8}
    assert goodput.chain(again, 170).recovered_at is None
    assert goodput.chain("unheard of") is None


def test_a_lost_node_is_healed_when_all_of_its_tasks_are():
    bert = [("b1", "n1", 0), ("b2", "n2", 0)]
    gpt = [("g1", "n1", 1), ("g2", "n2", 1)]
    lines = [
        (0, admitted("n1"), admitted("n2")),
        (10, *regroup(0, bert, task="bert"), *regroup(0, gpt)),
        (11, *regrouped(0, bert, 0, task="bert"), *regrouped(0, gpt, 0)),
        (20, "lost", failure(worker="", slot=-1, sev=1, task="")),
        (21, "lost", *regroup(1, bert[:1], task="bert"), *regroup(1, gpt[:1])),
        (23, "lost", *regrouped(1, bert[:1], 1, task="bert"), recovered("bert")),
    ]
    cost = account(lines).chain("lost", 30)
    assert {each.task: each.recovered_at for each in cost.courses} == {"bert": 23, "gpt": None}
    assert cost.recovered_at is None
    cost = account([*lines, (25, "lost", *regrouped(1, gpt[:1], 1), recovered())]).chain("lost", 30)
    assert cost.recovered_at == 25
    assert {each.task: round(each.whole_s, 6) for each in cost.courses} == {"bert": 3, "gpt": 5}


def test_a_task_that_ends_is_healed_of_all():
    lines = [*began(), *killed()[:3], (126, events.TaskStateChanged(task="gpt", state=TaskState.REMOVED))]
    assert account(lines).chain(FAILED, 200).recovered_at == 126


def test_a_task_without_any_slots_waits_for_its_failure():
    lines = [
        *began(),
        (121, FAILED, failure(worker="", slot=-1, sev=1, task="gpt"), plan("node_lost:n2")),
        (122, FAILED, events.TaskStateChanged(task="gpt", state=TaskState.WAITING)),
        (140, "joined", plan("node_joined:n2", slots=[("n2", 0)]), start("w9", "n2", 0)),
        (140, "joined", events.TaskStateChanged(task="gpt", state=TaskState.STARTING)),
        (150, "joined", ready("w9", "n2", 0), *regroup(1, [("w9", "n2", 0)])),
        (152, "joined", *regrouped(1, [("w9", "n2", 0)], 5), recovered()),
    ]
    goodput = account(lines)
    cost = goodput.chain(FAILED, 200)
    assert (cost.begun, cost.recovered_at) == (121, 152)
    assert paid(cost.courses[0].seconds)["idle"] == 18
    assert goodput.chain("joined").recovered_at == 152


def test_a_plan_costs_the_start_up_of_what_it_adds_and_the_joining():
    cost = account([*began(), *grown(recovered())]).chain("joined", 100)
    assert (cost.what, cost.detected_at, cost.decided_at, cost.recovered_at) == ("node_joined", None, 60, 90)
    assert paid(cost.seconds) == {"start_up": 60, "transition": 8}
    assert paid(cost.courses[0].seconds) == {"transition": 2}


def test_a_slowdown_costs_a_share_of_the_time_until_it_is_over():
    begins, ends = slowed()
    assert account([*began(), begins]).chain("slow", 71).recovered_at is None
    cost = account([*began(), begins, ends]).chain("slow", 99)
    assert (cost.what, cost.node, cost.detected_at, cost.recovered_at) == ("slowdown", "n2", 61, 81)
    assert paid(cost.seconds) == {"sub_healthy": 32}
    assert {(each.begin, each.end, round(each.share, 6)) for each in cost.spans} == {(61, 81, 0.4)}


def test_a_failure_of_what_is_replaced_already_has_nothing_to_heal():
    lines = [*began(), (50, *regroup(1, FOUR)), (51, "late", failure("w1", "n1", 0, sev=3, epoch=0))]
    cost = account(lines).chain("late", 60)
    assert (cost.tasks, cost.whole_s, cost.detected_at, cost.recovered_at) == (["gpt"], 0, 51, 51)


def test_what_a_process_showed_that_never_computed_is_no_sign_of_its_successors_end():
    later = [*THREE, ("w6", "n2", 1)]
    lines = [
        *began(),
        *killed()[:5],
        (135, "again", exited("w5", "n2", 1, iteration=-1, exit_code=1), failure(worker="w5"), start("w6", "n2", 1)),
        (141, "again", ready("w6", "n2", 1), *regroup(2, later)),
        (143, "third", exited("w6", "n2", 1, iteration=-1, exit_code=1)),
        (144, "third", failure(worker="w6")),
    ]
    cost = account(lines).chain("third", 144)
    assert cost.begun == 143
    assert paid(cost.seconds) == {"detection": 4}


def test_older_chains_are_no_longer_told_apart_and_their_costs_stay():
    goodput = taken(account_messages(), chains=1)
    assert list(goodput.chains()) == ["second"]
    assert goodput.chain(FAILED) is None
    rest = goodput.chain("", 200)
    assert rest.seconds["sub_healthy"] == pytest.approx(20)
    assert goodput.report(200).of("gpt").seconds["sub_healthy"] == pytest.approx(20)
    [cause] = [row for row in goodput.report(200).causes if row.name == "exited_abnormally"]
    assert cause.failures == 2


def account_messages():
    return journal([*HEALED, (160, "second", failure("w1", "n1", 0), *regroup(3, NEW))])


def test_spans_beyond_what_is_kept_are_counted_and_paid_for(monkeypatch):
    monkeypatch.setattr(book, "FULL", 2)
    goodput = taken(account_messages(), spans=4)
    cost = goodput.chain(FAILED)
    assert (len(cost.spans), cost.more) == (4, 4 * 3 + 3 * 2 + 1 - 4)
    assert cost.whole_s == pytest.approx(81)
    assert sum(map(len, goodput._all.book.spans.values())) <= 2 * 4


@pytest.mark.parametrize(("name", "failures"), [("demo", 4), ("demo-before", 4), ("storm", 0)])
def test_in_recorded_journals_phases_add_up_to_the_time_from_fault_to_recovery(name, failures):
    messages = replayer.read(name)
    goodput = taken(messages)
    # in the storm, only after the next node has joined, in another chain
    back = {(each.correlation, each.task): each.at for each in messages if isinstance(each, events.TaskRecovered)}
    compared = 0
    for cost in map(goodput.chain, goodput.chains()):
        for course in cost.courses:
            at = back.get((cost.chain, course.task))
            if at is None or not course.seconds["detection"]:
                continue
            stood = [each.end - each.begin for each in course.spans if each.end <= at]
            assert sum(stood) == pytest.approx(at - signs(messages, cost), rel=0.01)
            compared += 1
    assert compared == failures


def signs(messages, cost):
    """Return when the fault was, as a person reads it in the journal."""
    chain = [each for each in messages if each.correlation == cost.chain]
    waited_s = [each.waited_s for each in chain if isinstance(each, events.WorkerStalled)]
    return chain[0].at - max(waited_s, default=0.0)
