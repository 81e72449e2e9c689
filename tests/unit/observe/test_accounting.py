"""Accounts of each second, and costs of a failure over time, compared with results worked out by hand."""

import msgspec
import pytest
from helpers.accounts import (
    FAILED,
    FOUR,
    NEW,
    SPEC,
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
    spent,
    stalled,
    start,
    taken,
)
from replay import replayer

from unicron.contracts import commands, events
from unicron.contracts.failures import FailureStatus
from unicron.contracts.tasks import Healing, TaskState
from unicron.observe.accounts import book


def of(goodput, until, task="gpt"):
    return goodput.report(until).row(task)


def test_a_killed_worker_costs_what_can_be_counted_by_hand():
    goodput = account([*began(), *killed()])
    row = of(goodput, 200)
    assert spent(row) == {
        "start_up": 4 * 11,
        # an iteration takes 10 s on four slots, so 40 slot-seconds; 2 of its 8 microbatches are 10 of them
        "recomputed": 10,
        "training": 4 * 100 + (3 * 15 - 10) + 4 * 50,
        "detection": 4 * 1,
        "decision": 4 * 2,
        "transition": 4 * 6 + 3 * 5,  # of the second, who computed was interrupted 5 s before
        "sub_healthy": 20,  # the slot of w4, from when the others computed until w5 did
    }
    assert row.total_s == pytest.approx(row.whole_s) == pytest.approx(4 * 190)
    assert row.goodput == pytest.approx((400 + 35 + 200) / 760)
    assert row.failures == 1
    # the task as a whole trained from 21 to 121, from 130 to 145 but for 10/3 s, and from 150 on
    assert row.effective_time == pytest.approx((100 + 15 - 10 / 3 + 50) / 190)


def test_all_that_follows_from_a_failure_is_its_cost_and_its_nodes():
    report = account([*began(), *killed()]).report(200)
    costs = {row.name: (row.failures, spent(row)) for row in report.causes}
    of_failure = {"recomputed": 10, "detection": 4, "decision": 8, "transition": 39, "sub_healthy": 20}
    assert costs["exited_abnormally"] == (1, of_failure)
    assert costs["task_submitted"] == (0, {"start_up": 44})
    assert [(row.name, row.failures, row.total_s) for row in report.nodes] == [("n2", 1, pytest.approx(81))]


def test_a_hang_began_when_its_worker_last_made_progress():
    lines = [
        *began(),
        (121, FAILED, stalled("w3", "n2", 0, iteration=8, waited_s=25.0)),  # a victim, that had come to wait for it
        (121, FAILED, stalled("w4", "n2", 1, iteration=8, waited_s=20.0)),
        (121, FAILED, failure(status=FailureStatus.TASK_HANG)),
        (122, FAILED, *regroup(1, THREE)),
        (123, FAILED, *regrouped(1, THREE, iteration=10)),
    ]
    row = of(account(lines), 123)
    assert spent(row) == {"start_up": 44, "training": 4 * 80, "detection": 4 * 20, "decision": 4, "transition": 4}


ROLLED_BACK = [
    (121, FAILED, exited("w4", "n2", 1, iteration=10, signal=9), failure()),
    (121, FAILED, start("w5", "n2", 1)),
    (131, FAILED, ready("w5", "n2", 1), *regroup(1, NEW)),
    (132, FAILED, *regrouped(1, NEW, iteration=6)),
]
"""Nobody can compute before w5 is ready, and then all go on from an older state."""


def test_iterations_that_were_done_before_are_recomputed_and_who_waits_for_a_worker_waits():
    row = of(account([*began(), *ROLLED_BACK]), 200)
    assert spent(row) == {
        "start_up": 44,
        "waiting": 4 * 10,
        "transition": 4,
        "recomputed": 4 * 40,  # iterations 6 to 9, 10 s each on four slots
        "training": 400 + 4 * (68 - 40),
    }


def test_what_was_lost_is_no_goodput_from_when_that_is_known_and_no_less_once_it_is_computed_again():
    goodput = account([*began(), *ROLLED_BACK])
    known = of(goodput, 132)
    assert known.seconds["training"] == 400
    assert known.goodput == pytest.approx((400 - 160) / known.total_s)
    assert known.effective_time == pytest.approx((100 - 40) / sum(known.wall_s.values()))
    assert of(goodput, 152).goodput == pytest.approx((400 - 80) / of(goodput, 152).total_s)
    assert of(goodput, 200).goodput == pytest.approx(512 / of(goodput, 200).total_s)
    ended = [(142, events.TaskStateChanged(task="gpt", state=TaskState.FAILED))]
    assert of(account([*began(), *ROLLED_BACK, *ended]), 200).goodput == pytest.approx((400 - 120) / 760)


def test_nobody_sees_what_a_program_repeats_that_is_run_again():
    spec = msgspec.structs.replace(SPEC, heal=Healing.RESTART)
    for heal, lines in ((spec, began()), (SPEC, [*began(), *killed()]), (spec, [*began(), *killed()])):
        starts = [
            (at, *(msgspec.structs.replace(m, spec=heal) if isinstance(m, commands.StartWorker) else m for m in each))
            for at, *each in lines
        ]
        assert of(account(starts), 200).at_most == (heal is spec and len(lines) > len(began()))


def test_telemetry_says_when_the_recomputed_iterations_were_over():
    iterations = [(132 + 5 * number, finished(5 + number, epoch=1, seconds=5.0)) for number in range(1, 6)]
    row = of(account([*began(), *ROLLED_BACK, *iterations]), 200)
    assert row.seconds["recomputed"] == pytest.approx(4 * 20)
    assert row.total_s == pytest.approx(row.whole_s)


def test_a_lost_node_counts_from_when_it_was_suspected_until_a_plan_takes_its_slots():
    two = FOUR[:2]
    lines = [
        *began(),
        (121, events.NodeSuspected(node="n2", reason="closed", grace_s=1.0)),
        (122, FAILED, failure(worker="", slot=-1, status=FailureStatus.LOST_CONNECTION, sev=1, task="")),
        (123, FAILED, *regroup(1, two)),
        (125, FAILED, plan("node_lost:n2", slots=[("n1", 0), ("n1", 1)])),
        (126, FAILED, *regrouped(1, two, iteration=10)),
    ]
    report = account(lines).report(136)
    row = report.row("gpt")
    assert spent(row) == {
        "start_up": 44,
        "training": 400 + 2 * 10,
        "detection": 4,
        "decision": 4,
        "transition": 2 * 2 + 2 * 3,  # n2's two slots are the task's up to 125
    }
    assert row.whole_s == pytest.approx(4 * 115 + 2 * 11)
    assert [(each.name, each.failures, each.total_s) for each in report.nodes] == [("n2", 1, pytest.approx(18))]
    assert spent(report.row("")) == {"idle": 4 * 10}, "slots of a node that is gone are nobody's"


def test_a_search_for_a_checkpoint_is_no_wait_for_workers():
    lines = [
        *began(),
        (121, FAILED, exited("w4", "n2", 1, iteration=10, signal=9), failure()),
        (122, FAILED, commands.FindCheckpoint(node="n1", task="gpt", search=1, root="/c", since=0.0)),
        (125, FAILED, events.CheckpointFound(node="n1", task="gpt", search=1, stored=None, skipped=[])),
        (131, FAILED, *regroup(1, THREE)),
    ]
    row = of(account(lines), 132)
    assert spent(row) == {
        "start_up": 44, "training": 400, "decision": 4, "checkpoint": 12, "waiting": 24, "transition": 4,
    }  # fmt: skip


def test_a_failure_of_a_membership_that_is_replaced_already_costs_nothing_and_there_is_nothing_to_heal():
    lines = [*began(), (50, *regroup(1, FOUR)), (51, "late", failure("w1", "n1", 0, sev=3, epoch=0))]
    goodput = account([*lines, (52, *regrouped(1, FOUR, iteration=3, seconds=1.0))])
    row, cost = of(goodput, 60), goodput.chain("late", 60)
    assert spent(row) == {"start_up": 44, "training": 4 * (39 - 1), "transition": 4}
    assert row.failures == 1
    assert (cost.tasks, cost.whole_s, cost.detected_at, cost.recovered_at) == (["gpt"], 0, 51, 51)


def test_who_is_regrouped_again_before_it_computed_is_in_transition_all_the_time():
    lines = [
        *began(),
        *killed()[:4],
        (126, FAILED, ready("w5", "n2", 1), *regroup(2, NEW)),
        (127, FAILED, *regrouped(1, THREE, iteration=10, recomputed=2)),
        (130, FAILED, *regrouped(2, NEW, iteration=10)),
    ]
    row = of(account(lines), 130)
    assert spent(row) == {"start_up": 44, "training": 400, "detection": 4, "decision": 8, "transition": 4 * 6}


def test_a_worker_that_fails_before_it_computes_interrupts_nobody():
    lines = [
        *began(),
        *killed()[:5],
        (135, "again", exited("w5", "n2", 1, iteration=-1, exit_code=1), failure(worker="w5")),
        (135, "again", start("w6", "n2", 1)),
    ]
    row = of(account(lines), 140)
    assert row.seconds["sub_healthy"] == pytest.approx(10)
    assert row.seconds["decision"] == pytest.approx(8)
    assert row.failures == 2


def test_a_task_that_ends_gives_its_slots_back_and_its_wall_time_ends():
    lines = [
        *began(),
        (121, *(events.WorkerFinished(node=n, slot=s, task="gpt", worker=w, iterations=10) for w, n, s in FOUR)),
        (122, events.TaskStateChanged(task="gpt", state=TaskState.FINISHED)),
        (123, *(exited(w, n, s, iteration=9, exit_code=0, finished=True) for w, n, s in FOUR)),
    ]
    report = account(lines).report(200)
    row = report.row("gpt")
    assert spent(row) == {"start_up": 44, "training": 400, "idle": 8}
    assert sum(row.wall_s.values()) == pytest.approx(112)
    assert spent(report.row("")) == {"idle": 40 + 4 * 77}


def test_slots_that_a_plan_takes_back_before_anything_computes_are_free_when_their_workers_are_gone():
    gone = (exited(*worker, iteration=-1, expected=True) for worker in FOUR)
    report = account([*began()[:3], (15, plan("task_paused:gpt")), (16, *gone)]).report(30)
    assert spent(report.row("gpt")) == {"start_up": 4 * 6}
    assert spent(report.row("")) == {"idle": 4 * 10 + 4 * 14}


def test_an_order_that_comes_after_its_node_has_left_costs_nothing():
    """As when a cluster is stopped: the slot would start up until the next day."""
    gone = [(50, events.NodeGone(node="n2")), (51, start("w9", "n2", 1))]
    left = [(52, plan("node_left:n2", slots=[("n1", 0), ("n1", 1)])), (1000, events.NodeGone(node="n1"))]
    assert of(account([*began(), *gone, *left]), 1000).total_s == pytest.approx(2 * 42 + 2 * 990)


def test_what_comes_late_of_a_task_that_has_ended_begins_nothing():
    lines = [
        *began(),
        (50, *regroup(1, FOUR)),
        (51, events.TaskStateChanged(task="gpt", state=TaskState.REMOVED), *regrouped(1, FOUR, iteration=3)),
        (52, *(exited(w, n, s, iteration=3, expected=True) for w, n, s in FOUR)),
    ]
    row = of(account(lines), 100)
    assert spent(row) == {"start_up": 44, "training": 4 * 30, "idle": 4}


def test_a_slot_that_another_task_still_uses_is_not_given_to_one_that_lost_it_meanwhile():
    lines = [
        *began(),
        (50, plan("task_submitted:bert", slots=[("n1", 0)]), plan("x", task="bert", slots=[("n1", 1), ("n2", 0)])),
        (51, plan("task_removed:bert", task="bert"), plan("x", slots=[("n1", 0)])),
        (55, exited("w2", "n1", 1, iteration=3, expected=True), exited("w3", "n2", 0, iteration=3, expected=True)),
    ]
    assert account(lines).report(60).row("bert") is None


def test_a_task_of_the_same_name_begins_anew():
    ended = [(122, events.TaskStateChanged(task="gpt", state=TaskState.REMOVED))]
    gone = [(123, *(exited(w, n, s, iteration=9, expected=True) for w, n, s in FOUR))]
    again = [(at + 200, *messages) for at, *messages in began()[1:]]
    row = of(account([*began(), *ended, *gone, *again]), 231)
    assert spent(row) == {"start_up": 88, "training": 4 * 101 + 4 * 10, "idle": 4}


def test_what_was_before_since_is_not_counted_but_known():
    row = of(account([*began(), *killed()], since=140.0), 200)
    assert spent(row) == {"training": 3 * 5 + 4 * 50, "transition": 3 * 5, "sub_healthy": 10}
    assert row.whole_s == pytest.approx(4 * 60)


def test_a_report_of_one_task_has_nothing_of_others():
    places = [("n1", 0)]
    other = [(5, "other", plan("task_submitted:bert", task="bert", slots=places), start("b1", "n1", 0, task="bert"))]
    goodput = account([began()[0], *other])
    assert [row.name for row in goodput.report(10).tasks] == ["", "bert"]
    assert [row.name for row in goodput.report(10, "bert").tasks] == ["bert"]
    assert goodput.report(10, "gpt").row("gpt") is None
    assert SPEC.name == "gpt"


# --- what one failure cost --------------------------------------------------------------------------------------------


def recovered(task="gpt"):
    return events.TaskRecovered(task=task, epoch=2, workers=4, seconds=1.0)


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
    assert spent(cost) == {
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
    assert spent(course) == {
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
    assert spent(at_126) == {"detection": 4, "decision": 8, "transition": 8}
    assert spent(at_128) == {"detection": 4, "decision": 8, "transition": 16}
    assert {each.end for each in at_128.spans if each.phase == "transition"} == {128}
    assert at_128.courses[0].whole_s == pytest.approx(7)
    assert spent(goodput.chain(FAILED)) == {"detection": 4, "decision": 8}


def test_each_of_two_failures_has_its_own_costs():
    again = "again"
    lines = [
        *HEALED,
        (160, again, exited("w1", "n1", 0, iteration=12, signal=9)),
        (161, again, failure("w1", "n1", 0), *regroup(3, NEW[1:])),
        (162, again, *regrouped(3, NEW[1:], iteration=12), start("w6", "n1", 0)),
    ]
    goodput = account(lines)
    assert list(goodput.incidents.known) == ["submitted", FAILED, again]
    assert goodput.chain(FAILED, 170).whole_s == pytest.approx(81)
    assert spent(goodput.chain(again, 170)) == {"detection": 4, "transition": 4, "sub_healthy": 8}
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
    assert spent(cost.courses[0])["idle"] == 18
    assert goodput.chain("joined").recovered_at == 152


def test_a_plan_costs_the_start_up_of_the_slots_that_it_adds_while_the_others_train_and_the_joining():
    goodput = account([*began(), *grown(recovered())])
    report, cost = goodput.report(100), goodput.chain("joined", 100)
    trained = 4 * (88 - 21) + 6 * 10
    assert spent(report.row("gpt")) == {"start_up": 44 + 2 * 30, "training": trained, "transition": 4 * 2}
    assert spent(next(row for row in report.causes if row.name == "node_joined")) == {"start_up": 60, "transition": 8}
    assert spent(report.row("")) == {"idle": 4 * 10 + 2 * 10}
    assert (cost.what, cost.detected_at, cost.decided_at, cost.recovered_at) == ("node_joined", None, 60, 90)
    assert spent(cost) == {"start_up": 60, "transition": 8}
    assert spent(cost.courses[0]) == {"transition": 2}


def test_a_slowdown_costs_the_share_that_is_beyond_the_usual_time_until_it_is_over():
    begins, ends = slowed()
    assert account([*began(), begins]).chain("slow", 71).recovered_at is None
    goodput = account([*began(), begins, ends])
    report, cost = goodput.report(121), goodput.chain("slow", 99)
    assert spent(report.row("gpt")) == {"start_up": 44, "training": 4 * (100 - 8), "sub_healthy": 4 * 8}
    assert [(row.name, row.total_s) for row in report.nodes] == [("n2", pytest.approx(32))]
    assert (cost.what, cost.node, cost.detected_at, cost.recovered_at) == ("slowdown", "n2", 61, 81)
    assert spent(cost) == {"sub_healthy": 32}
    assert {(each.begin, each.end, round(each.share, 6)) for each in cost.spans} == {(61, 81, 0.4)}


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
    assert spent(cost) == {"detection": 4}


def test_older_chains_are_no_longer_told_apart_and_their_costs_stay():
    goodput = taken(account_messages(), chains=1)
    assert list(goodput.incidents.known) == ["second"]
    assert goodput.chain(FAILED) is None
    rest = goodput.chain("", 200)
    assert rest.seconds["sub_healthy"] == pytest.approx(20)
    assert goodput.report(200).row("gpt").seconds["sub_healthy"] == pytest.approx(20)
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
    for cost in map(goodput.chain, goodput.incidents.known):
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
