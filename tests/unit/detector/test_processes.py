"""Process supervision, exception propagation, stalls, the user's own errors, and echoes of others."""

import signal

import pytest
from helpers.detector import DetectorHarness, brief, scene_of
from unicron_detector.books import RecordIndex
from unicron_detector.processes import REPLACED_S, SIGNATURES, script_line
from unicron_detector.state import DetectorLimits

from unicron.contracts.commands import Regroup, StartWorker
from unicron.contracts.events import (
    FailureDetected,
    IterationFinished,
    TaskStateChanged,
    TaskSubmitted,
    WorkerFinished,
    WorkerReady,
)
from unicron.contracts.failures import Severity
from unicron.contracts.tasks import Healing, TaskSpec, TaskState
from unicron.contracts.worker import NO_SNAPSHOT_NOW, SNAPSHOT_AGAIN

SUBMITTED = TaskSubmitted(task="gpt", spec=TaskSpec(name="gpt", command=["train"]))
W1 = {"task": "gpt", "node": "n1", "slot": 0, "worker": "w1"}


@pytest.fixture
def scene():
    return scene_of("n1", "n2", "n3", w1="n1", w2="n2")


# --- exits -----------------------------------------------------------------------------------------------------------


def test_an_order_of_an_earlier_instance_that_comes_late_hides_no_worker(scene):
    scene.start("w5", "n3", token=8)
    scene.start("w4", "n3", token=7)  # no agent obeys it
    [failure] = scene.exit("w5", exit_code=1)
    assert (failure.severity, failure.worker) == (Severity.SEV2, "w5")


def test_a_killed_worker_is_severity_2(scene):
    told = {"method": "process_supervision", "status": "exited_abnormally", **W1}
    reason = 'w1 was ended by SIGKILL; its last line was "step 3"'
    out = scene.exit("w1", signal=9, iteration=3, stderr=["loading", "step 3", ""])
    assert out == [FailureDetected(severity=Severity.SEV2, **told, reason=reason)]


@pytest.mark.parametrize(
    ("how", "wrote", "said"),
    [
        ({"signal": 9}, "unicron: it is skipped", "step 3"),
        ({"exit_code": 1}, f"{NO_SNAPSHOT_NOW}x", "step 3"),
        ({"exit_code": 1}, SNAPSHOT_AGAIN, "step 3"),
        ({"exit_code": 1}, "unicron: no room", "unicron: no room"),
    ],
)
def test_the_last_line_is_the_programs_own_unless_ours_says_why_it_has_ended(scene, how, wrote, said):
    [failure] = scene.exit("w1", **how, stderr=["loading", "step 3", wrote])
    assert failure.reason.endswith(f'; its last line was "{said}"')


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"exit_code": 3}, "w1 exited with code 3"),
        ({"exit_code": 0}, "w1 exited with code 0"),
        ({"signal": 63}, "w1 was ended by signal 63"),
        ({}, "w1 ended, nobody knows how"),
    ],
)
def test_the_reason_tells_how_it_ended(scene, how, reason):
    (failure,) = scene.exit("w1", **how)
    assert failure.reason == reason


@pytest.mark.parametrize("how", [{"signal": 15, "expected": True}, {"exit_code": 0, "finished": True}])
def test_the_exit_of_a_worker_that_was_stopped_or_is_finished_is_nothing(scene, how):
    assert scene.exit("w1", **how) == []


def test_a_worker_that_said_it_was_finished_may_go(scene):
    scene.feed(WorkerFinished(**scene.places["w1"], iterations=10))
    assert scene.exit("w1", exit_code=0) == []


def test_a_crash_after_the_last_iteration_alerts_a_person(scene):
    assert brief(scene.exit("w1", exit_code=1, finished=True)) == ["Alert"]


def test_a_worker_that_never_was_ready_is_missed_too(scene):
    scene.start("w7", "n1", slot=1)
    assert brief(scene.exit("w7", exit_code=1)) == [(2, "exited_abnormally", "w7")]


def test_an_exit_told_twice_is_one_failure_though_a_late_ready_comes_between(scene):
    scene.exit("w1", signal=9)
    assert scene.exit("w1", signal=9) == []
    scene.feed(WorkerReady(**scene.places["w1"], pid=1))
    assert scene.exit("w1", signal=9) == []


# --- exceptions ------------------------------------------------------------------------------------------------------


def test_an_exception_is_classified(scene):
    kind, text = "torch.AcceleratorError", "CUDA error: an illegal memory access was encountered"
    told = {"method": "exception_propagation", "status": "illegal_memory_access", **W1}
    out = scene.throw("w1", kind, text)
    assert out == [FailureDetected(severity=Severity.SEV2, **told, reason=f"{kind}: {text}")]


def test_an_exception_after_its_exit_is_swallowed(scene):
    scene.exit("w1", exit_code=1)
    assert scene.throw("w1") == []


def test_a_network_exception_has_ended_its_process_so_it_is_severity_2(scene):
    (failure,) = scene.throw("w1", "ConnectionResetError", "[Errno 104] Connection reset by peer")
    assert (failure.severity, failure.escalated) == (Severity.SEV2, Severity.SEV3)
    assert failure.status == "connection_reset"


def test_a_hardware_exception_takes_the_node_out(scene):
    scene.run(epoch=1, w1="n1", w3="n1", w2="n2")
    out = scene.throw("w1", "RuntimeError", "CUDA error: uncorrectable ECC error encountered")
    assert brief(out) == [(1, "ecc_error", "w1")]
    assert out[0].node == "n1"
    assert scene.exit("w3", signal=9) == []
    assert scene.disconnect("n1") == []
    assert scene.wait(10) == []


@pytest.mark.parametrize(
    ("exception", "text", "severity", "status"),
    [
        ("RuntimeError", "CUDA error: uncorrectable ECC error encountered", 1, "ecc_error"),
        ("RuntimeError", "CUDA error: unspecified launch failure", 2, "cuda_error"),
        ("ConnectionResetError", "reset", 2, "connection_reset"),
    ],
)
def test_hardware_and_network_errors_on_two_nodes_are_not_the_tasks_fault(scene, exception, text, severity, status):
    for worker in ("w1", "w2"):
        assert brief(scene.throw(worker, exception, text)) == [(severity, status, worker)]


# --- the user's own error --------------------------------------------------------------------------------------------


def test_the_same_exception_on_another_node_breaks_the_task_whatever_its_numbers(scene):
    scene.throw("w1", text="bad <Batch object at 0x7f11> of 15.25 GiB")
    scene.run(epoch=1, w1b="n1", w2="n2")
    assert brief(scene.throw("w1b", text="bad <Batch object at 0x7f11> of 15.25 GiB")) == [
        (2, "other_software_error", "w1b")
    ], "it may be the node's"
    (broken,) = scene.throw("w2", text="bad <Batch object at 0x7e22> of 9.5 GiB", traceback="Traceback: line 7")
    assert (broken.task, broken.traceback) == ("gpt", "Traceback: line 7")
    for part in ("ValueError: bad", "iteration 3", "w2", "w1"):
        assert part in broken.reason


@pytest.mark.parametrize("how", [{"text": "CUDA out of memory"}, {"exception": "RuntimeError", "text": "Error 802:"}])
@pytest.mark.parametrize("further", [1, 0])
def test_what_a_program_does_by_itself_again_and_again_costs_it_and_no_node(how, further):
    """It ends where it comes no further, and waits for longer and longer where it does."""
    scene = scene_of("n1", limits=DetectorLimits(attempts=3, no_progress=9))
    out = []
    for number in range(4):
        scene.run(epoch=number, **{f"v{number}": "n1"})
        out += scene.throw(f"v{number}", iteration=number * further, **how)
    own = "memory" in how["text"]
    assert not own or further or out[-1].traceback == "Traceback ..."
    waits = (2, "other_software_error", "v3")
    assert brief(out)[-1] == ((waits if further else "TaskBroken") if own else (1, "gpu_driver_error", "v0"))
    assert not (own and further) or out[-1].wait_s
    assert set(scene.detector.state.lost) == (set() if own else {"n1"})


ODD = {"exception": "RuntimeError", "text": "odd"}


def test_what_no_rule_knows_costs_neither_task_nor_node_and_is_tried_again_ever_more_rarely(scene):
    out = []
    for number in range(8):
        scene.run(epoch=number, **{f"v{number}": "n1", "w2": "n2"})
        out += scene.throw(f"v{number}", iteration=number, **ODD)
    assert {(each[0], each[1]) for each in brief(out)} == {(2, "unexplained")}
    assert [failure.wait_s for failure in out] == [0, 0, 0, 1, 2, 4, 8, 16]
    assert "odd; no rule knows the cause, so nobody is blamed; tried again in 16 s" in out[-1].reason
    assert scene.detector.state.lost == {}


@pytest.mark.parametrize(("texts", "count"), [(["odd"] * 9, 4), (["odd", "odder"] * 5, 10)])
@pytest.mark.parametrize("others", [False, True])
def test_what_no_rule_knows_is_no_progress_sooner_on_one_machine_where_it_is_the_same_each_time(texts, count, others):
    scene = scene_of("n1", "n2")
    told = []
    for number in range(10):
        scene.run(epoch=number, **{f"v{number}": "n1", **({"w2": "n2"} if others else {})})
        told += scene.throw(f"v{number}", **ODD | {"text": texts[number % len(texts)]})
        if brief(told)[-1] == "TaskBroken":
            break
    assert len(told) == (10 if others else count)
    assert told[-1].reason.startswith(f"no progress: {len(told)} attempts in a row failed in iteration 3")


@pytest.mark.parametrize("tail", [["odd"], []])
def test_an_end_that_no_rule_knows_costs_neither_task_nor_node(scene, tail):
    out = []
    for number in range(5):
        scene.run(epoch=number, **{f"v{number}": "n1", "w2": "n2"})
        out += scene.exit(f"v{number}", exit_code=1, iteration=number, stderr=tail)
    assert [each[:2] for each in brief(out)] == [(2, "exited_abnormally")] * 5
    assert out[-1].wait_s == 2


@pytest.mark.parametrize(("line", "found"), [(7, "TaskBroken"), (8, (2, "unexplained", "w2"))])
def test_what_no_rule_knows_is_the_programs_own_where_it_happens_in_the_same_place_elsewhere(scene, line, found):
    scene.throw("w1", **ODD, traceback='  File "train.py", line 7, in f\n')
    assert brief(scene.throw("w2", **ODD, traceback=f'  File "train.py", line {line}, in f\n')) == [found]


@pytest.mark.parametrize(("line", "found"), [(7, "TaskBroken"), (8, (2, "exited_abnormally", "w2"))])
def test_a_process_that_ends_at_another_line_has_ended_by_something_else(scene, line, found):
    scene.exit("w1", exit_code=1, iteration=3, stderr=['  File "train.py", line 7, in f', "RuntimeError: odd"])
    tail = [f'  File "train.py", line {line}, in f', "RuntimeError: odd"]
    assert brief(scene.exit("w2", exit_code=1, iteration=3, stderr=tail)) == [found]


LINE = '  File "train.py", line 7, in f\n'
SENDS = {"exception": "RuntimeError", "text": "NCCL error: remote process exited or there was a network error"}


@pytest.mark.parametrize(
    ("how", "times"),
    [
        ({}, 2),
        ({"exception": "MemoryError", "text": ""}, 2),
        ({"exception": "numpy._core._exceptions._ArrayMemoryError", "text": "Unable to allocate 8. EiB"}, 2),
        (ODD, 4),
        ({"traceback": "Traceback ..."}, 5),  # where that was is not known
        (SENDS, 9),
        ({"exception": "OSError", "text": "[Errno 12] Cannot allocate memory"}, 9),
        ({"exception": "RuntimeError", "text": "DefaultCPUAllocator: can't allocate memory: you tried to"}, 4),
    ],
)
@pytest.mark.parametrize("others", [False, True])
def test_the_same_exception_in_the_same_line_and_iteration_of_a_slot_is_the_programs_own(how, times, others):
    """On a cluster as with `unicron run`, where no node is given up; what machines do to a program is none."""
    limits = DetectorLimits(no_progress=5, attempts=3 if others else 1000)
    scene, told = scene_of("n1", "n2", limits=limits), []
    for number in range(8):
        scene.run(epoch=number, **{f"v{number}": "n1", **({"w2": "n2"} if others else {})})
        told += scene.throw(f"v{number}", **{"traceback": LINE} | how)
        if brief(told)[-1] == "TaskBroken":
            break
    assert len(told) == times if times < 5 else len(told) > 3
    assert times > 4 or "(in train.py:7, at iteration 3, as v0 did before it)" in told[-1].reason


@pytest.mark.parametrize("how", [{"text": "worse"}, {"traceback": LINE.replace("7", "8")}, {"iteration": 4}])
def test_another_failure_of_a_slot_is_no_proof_against_the_program(scene, how):
    for number, told in enumerate([{}, how, {}]):
        scene.run(epoch=number, **{f"v{number}": "n1", "w2": "n2"})
        assert brief(scene.throw(f"v{number}", **{"traceback": LINE} | told))[0][1] == "other_software_error"


def test_a_start_that_fails_by_the_same_is_no_proof_where_the_task_came_further_in_between(scene):
    """As a file may be missing for a moment only that others write."""
    for number in range(3):
        scene.start(f"v{number}", "n3")
        told = scene.throw(f"v{number}", traceback=LINE, iteration=-1)
        assert brief(told) == [(2, "other_software_error", f"v{number}")]
        further = {"world_size": 1, "seconds": 1.0, "loss": 1.0}
        scene.feed(IterationFinished(**scene.places["w2"], epoch=number, iteration=number, **further))


def test_two_slots_of_a_machine_that_fail_at_once_are_no_proof_against_the_program(scene):
    scene.start("v2", "n1", slot=1)
    scene.run(epoch=1, v1="n1", w2="n2")
    told = scene.throw("v1", traceback=LINE) + scene.throw("v2", traceback=LINE)
    assert "TaskBroken" not in brief(told)


def test_two_nodes_of_one_machine_are_no_proof_where_the_task_is_on_others_too():
    scene = DetectorHarness()
    scene.join("n1", "n2", host="one")
    scene.join("n3")
    scene.run(w1="n1", w2="n2", w3="n3")
    scene.throw("w1")
    assert brief(scene.throw("w2")) == [(2, "other_software_error", "w2")]
    assert brief(scene.throw("w3")) == ["TaskBroken"]


def test_two_nodes_of_one_machine_are_a_proof_where_the_task_is_there_alone():
    scene = DetectorHarness()
    scene.join("n1", "n2", host="one")
    scene.run(w1="n1", w2="n2")
    scene.throw("w1")
    assert brief(scene.throw("w2")) == ["TaskBroken"]


def test_the_cause_of_an_exception_is_judged_and_not_the_one_that_it_led_to(scene):
    chain = (
        "RuntimeError: CUDA error: uncorrectable ECC error encountered\n\n"
        "The above exception was the direct cause of the following exception:\n\nRuntimeError: odd\n"
    )
    assert brief(scene.throw("w1", **ODD, traceback=f"Traceback (most recent call last):\n{chain}")) == [
        (1, "ecc_error", "w1")
    ]


def test_the_same_exception_in_other_workers_breaks_the_task_once_however_many_raise():
    scene = scene_of("n1", "n2", **{f"v{n}": f"n{1 + n % 2}" for n in range(8)})
    out = [outcome for n in range(8) for outcome in scene.throw(f"v{n}")]
    assert brief(out) == [(2, "other_software_error", "v0"), "TaskBroken"]


@pytest.mark.parametrize("other", [{"text": "worse"}, {"exception": "KeyError"}, {"iteration": 4}])
def test_another_exception_does_not_break_the_task(scene, other):
    scene.throw("w1")
    assert brief(scene.throw("w2", **other)) == [(2, "other_software_error", "w2")]


def test_the_exit_after_an_exception_and_the_exception_told_again_are_swallowed(scene):
    assert brief(scene.throw("w1")) == [(2, "other_software_error", "w1")]
    assert scene.throw("w1") == [], "one worker alone does not break its task"
    assert scene.exit("w1", exit_code=1) == []


CRASHES = ({"signal": int(signal.SIGSEGV)}, {"signal": int(signal.SIGABRT)}, {"exit_code": 128 + signal.SIGSEGV})


@pytest.mark.parametrize("how", [{"exit_code": 3}, {"exit_code": 0}, *CRASHES])
@pytest.mark.parametrize("iteration", [-1, 3])
def test_the_same_end_at_the_same_iteration_breaks_the_task(scene, how, iteration):
    assert brief(scene.exit("w1", **how, iteration=iteration)) == [(2, "exited_abnormally", "w1")]
    (broken,) = scene.exit("w2", **how, iteration=iteration, stderr=["one", "two"])
    assert brief([broken]) == ["TaskBroken"]
    assert broken.traceback == "one\ntwo"


@pytest.mark.parametrize(
    "how",
    [
        {"signal": int(signal.SIGKILL)},
        {"signal": int(signal.SIGTERM)},
        {"exit_code": 128 + signal.SIGKILL},
        {"exit_code": None},
        {"signal": int(signal.SIGABRT), "stderr": ["Watchdog caught collective operation timeout"]},
    ],
)
def test_what_comes_from_outside_is_not_the_users_error(scene, how):
    scene.exit("w1", **how, iteration=3)
    assert brief(scene.exit("w2", **how, iteration=3)) == [(2, "exited_abnormally", "w2")]


def test_another_iteration_or_another_code_does_not_break_the_task(scene):
    scene.run(epoch=1, w1="n1", w2="n2", w3="n3")
    scene.exit("w1", exit_code=3, iteration=3)
    assert brief(scene.exit("w2", exit_code=3, iteration=4)) == [(2, "exited_abnormally", "w2")]
    assert brief(scene.exit("w3", exit_code=4, iteration=3)) == [(2, "exited_abnormally", "w3")]


def test_nothing_more_is_said_of_a_broken_task(scene):
    scene.run(epoch=1, w1="n1", w2="n2", w3="n3", w4="n3")
    scene.throw("w1")
    scene.throw("w2")
    assert scene.throw("w3") == []
    assert scene.exit("w4", signal=9) == []
    assert scene.collective("w4", epoch=1) == []
    assert scene.stall("w4", epoch=1) == []
    assert scene.give_up("restart", "w4") == []
    assert scene.wait(10) == []


def test_a_task_under_the_name_of_a_broken_one_starts_afresh(scene):
    scene.throw("w1")
    scene.throw("w2")
    scene.feed(TaskStateChanged(task="gpt", state=TaskState.RECOVERING))  # said before it heard of the verdict
    scene.feed(TaskStateChanged(task="gpt", state=TaskState.FAILED))
    scene.feed(SUBMITTED)
    scene.run(v1="n1", v2="n2")
    assert brief(scene.throw("v1")) == [(2, "other_software_error", "v1")]
    assert brief(scene.throw("v2")) == ["TaskBroken"]


def test_workers_are_watched_that_are_heard_of_before_their_tasks_state(scene):
    scene.feed(TaskStateChanged(task="gpt", state=TaskState.FINISHED, epoch=9))
    scene.feed(SUBMITTED)
    scene.run(v1="n1", v2="n2")
    scene.feed(TaskStateChanged(task="gpt", state=TaskState.STARTING))
    assert brief(scene.exit("v1", signal=9)) == [(2, "exited_abnormally", "v1")]


def test_what_workers_of_an_earlier_task_say_late_does_not_touch_that_of_its_name(scene):
    scene.run(epoch=7, w1="n1", w2="n2")
    scene.feed(TaskStateChanged(task="gpt", state=TaskState.REMOVED, epoch=7))
    scene.feed(SUBMITTED)
    assert scene.collective("w1", epoch=7) == []
    scene.run(epoch=8, w2="n2")
    scene.run(epoch=0, v1="n1", v2="n2")
    scene.collective("v1", epoch=0)
    assert brief(scene.wait(1)) == [(3, "connection_reset", "v1")]


def test_ended_tasks_are_forgotten(scene):
    scene.collective("w1")
    scene.feed(TaskStateChanged(task="gpt", state=TaskState.REMOVED))
    assert scene.wait(1) == []
    assert scene.exit("w1", signal=9) == []
    assert scene.stall("w2") == []
    scene.wait(scene.limits.window_s + 2)
    assert scene.detector.state.tasks == {}
    assert scene.detector.state.workers == {}


def test_the_end_of_a_task_is_none_of_others(scene):
    scene.run(task="other", o1="n1")
    scene.feed(TaskStateChanged(task="gpt", state=TaskState.FINISHED))
    assert scene.exit("w1", signal=9) == []
    assert brief(scene.exit("o1", signal=9)) == [(2, "exited_abnormally", "o1")]


def test_records_of_processes_that_are_gone_are_dropped_in_time_and_no_others():
    scene = scene_of("n1", "n2", w1="n1", w2="n1", w3="n2")
    scene.exit("w2", signal=9)
    scene.wait(scene.limits.window_s / 2)
    scene.exit("w1", signal=9)
    scene.wait(scene.limits.window_s / 2 + 1)
    assert list(scene.detector.state.workers) == ["w1", "w3"]
    assert RecordIndex(scene.detector.state).watched_on("n1") == []
    assert RecordIndex(scene.detector.state).watched_on("n2") == ["w3"]


def test_possible_user_errors_are_remembered_in_bounded_number():
    scene = scene_of("n1", limits=DetectorLimits(attempts=1000, no_progress=1000))
    scene.submit()
    for number in range(200):
        scene.start(f"x{number}", "n1")
        scene.throw(f"x{number}", text="number " + "i" * number)
    assert len(scene.detector.state.tasks["gpt"].seen) == SIGNATURES


def test_the_collective_that_never_ended_is_named_with_the_end_of_its_process(scene):
    [failure] = scene.exit("w1", signal=6, stderr=["terminate called"], collectives=["all_reduce #7 of dp", "send #1"])
    under_way = "under way: all_reduce #7 of dp"
    assert failure.reason == f'w1 was ended by SIGABRT; {under_way}; its last line was "terminate called"'


# --- stalls ----------------------------------------------------------------------------------------------------------


def test_a_worker_that_does_not_answer_hangs(scene):
    (failure,) = scene.stall("w1", responsive=False)
    assert brief([failure]) == [(2, "task_hang", "w1")]
    assert failure.method == "online_statistics"
    phase = "w1 made no progress in its compute phase for 3.00 s, where 2.00 s are allowed"
    assert failure.reason == f"{phase}, and it does not answer"


def test_the_collective_in_which_others_wait_for_it_is_named_with_a_hang(scene):
    [failure] = scene.stall("w1", responsive=False, collectives=["w0: all_reduce #7 of dp", "w2: all_reduce #7 of dp"])
    assert failure.reason.endswith("does not answer; under way: w0: all_reduce #7 of dp")


@pytest.mark.parametrize("how", [{"phase": "reduce", "responsive": False}, {"phase": "compute"}])
def test_who_does_not_answer_hangs_in_any_phase_and_who_answers_where_it_should_compute_and_once(scene, how):
    assert brief(scene.stall("w1", **how)) == [(2, "task_hang", "w1")]
    assert scene.stall("w1", **how) == []
    assert scene.exit("w1", signal=9) == []


def test_one_that_sleeps_hangs(scene):
    assert scene.sleep("w1") == []
    scene.wait(1.2)
    [failure] = scene.stall("w1", asleep=True)
    assert brief([failure]) == [(2, "task_hang", "w1")]
    assert failure.reason.endswith("and it still answers while all its processes sleep")


def test_of_several_that_sleep_at_once_only_that_is_told_and_they_may_hang_later_like_any_other(scene):
    scene.sleep("w1")
    scene.wait(0.7)
    scene.sleep("w2")
    scene.wait(0.5)
    [alert] = scene.stall("w1", asleep=True)
    assert alert.text == "2 workers of gpt sleep at once in iteration 3: look at what they share (w1, w2)"
    assert scene.stall("w2", asleep=True) == []
    assert brief(scene.stall("w2")) == [(2, "task_hang", "w2")]


def test_who_slept_long_ago_excuses_nobody(scene):
    scene.sleep("w2")
    scene.wait(7.0)
    scene.sleep("w1")
    scene.wait(1.2)
    assert brief(scene.stall("w1", asleep=True)) == [(2, "task_hang", "w1")]


def test_a_hang_that_its_worker_has_left_behind_is_none_but_one_that_keeps_it_from_following_is(scene):
    scene.run(epoch=1, w2="n2")
    assert brief(scene.stall("w1", epoch=0, responsive=False)) == [(2, "task_hang", "w1")]
    assert scene.stall("w2", epoch=0) == []


def test_who_waits_for_one_whose_script_is_busy_does_not_hang(scene):
    assert scene.away("w2") == []
    assert scene.stall("w1", phase="reduce") == []
    scene.restart()
    assert scene.wait(5.0) == []
    assert brief(scene.exit("w2", signal=9)) == [(2, "exited_abnormally", "w2")], "if it dies, it does"


@pytest.mark.parametrize("place", [{"iteration": 2}, {"iteration": 4}, {"epoch": 1}])
def test_that_holds_for_that_iteration_only(scene, place):
    scene.run(epoch=1, w1="n1", w2="n2")
    scene.away("w2", **{"epoch": 0, **place})
    scene.stall("w1", phase="reduce", epoch=1 if "epoch" not in place else 2)
    assert len(scene.wait(0.4)) == 1


def test_one_that_is_back_and_waits_itself_excuses_nobody(scene):
    scene.away("w2")
    assert scene.stall("w1", phase="reduce") == []
    assert scene.stall("w2", phase="reduce") == []
    assert len(scene.wait(0.4)) == 1


def test_who_was_busy_in_an_earlier_membership_is_forgotten(scene):
    scene.away("w1")
    scene.away("w2")
    scene.run(epoch=1, w1="n1", w2="n2")
    scene.away("w2", epoch=1)
    assert scene.detector.state.tasks["gpt"].away == {"w2": (1, 3)}


def test_who_waits_in_a_reduce_is_reported_after_the_hold_off(scene):
    assert scene.stall("w1", phase="reduce") == []
    (failure,) = scene.wait(0.4)
    assert brief([failure]) == [(3, "nccl_timeout", "w1")]
    assert scene.stall("w2", phase="reduce") == []
    assert scene.wait(10) == []


def test_who_waits_for_a_hanging_peer_is_not_to_blame(scene):
    scene.stall("w1", phase="reduce")
    assert brief(scene.stall("w2", responsive=False)) == [(2, "task_hang", "w2")]
    assert scene.wait(10) == []


def test_a_worker_that_somebody_waits_for_in_vain_fails_though_nothing_was_expected_of_it(scene):
    assert scene.exit("w1", expected=True) == []
    assert brief(scene.give_up("regroup", "w1")) == [(2, "task_hang", "w1")]
    assert scene.give_up("regroup", "w1") == [], "it was reported now"


def test_a_gradient_that_is_not_finite_ends_a_task_that_is_to_stop_then_at_once_and_once(scene):
    text = "iteration 3: the gradient is not finite: that of microbatch 1 on rank 0 (w1)"
    [broken] = scene.throw("w2", "unicron.errors.NonFiniteGradientError", text)
    assert brief([broken]) == ["TaskBroken"]
    assert text in broken.reason
    assert broken.traceback == "Traceback ..."
    assert scene.throw("w1", "unicron.errors.NonFiniteGradientError", text) == []
    assert scene.exit("w1", exit_code=1) == scene.exit("w2", exit_code=1) == []


IN_USE = "The server socket has failed to listen on any local network address. port: 29500, name: EADDRINUSE"
TRACE = """Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/runner.py", line 3, in run
  File "/job/train.py", line 7, in <module>
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29500")
  File "/venv/lib/python3.11/site-packages/torch/distributed/rendezvous.py", line 199, in _create_c10d_store
"""


def test_a_port_that_is_taken_is_told_with_its_line_and_the_second_time_ends_the_task():
    scene = scene_of("a")
    scene.feed(TaskSubmitted(task="gpt", spec=TaskSpec(name="gpt", command=["x"], heal=Healing.RESTART)))
    scene.run(**{"gpt-1": "a"})
    thrown = {"exception": "torch.distributed.DistNetworkError", "text": IN_USE, "iteration": 0, "traceback": TRACE}
    [first] = scene.throw("gpt-1", **thrown)
    assert brief([first]) == [(2, "address_in_use", "gpt-1")]
    assert "EADDRINUSE; in /job/train.py:7: another program on that node has this port; let" in first.reason
    scene.run(epoch=1, **{"gpt-2": "a"})
    [broken] = scene.throw("gpt-2", **thrown)
    assert brief([broken]) == ["TaskBroken"]
    assert "in /job/train.py:7" in broken.reason
    assert script_line("nothing") == "a line that is not known"


@pytest.mark.parametrize(
    ("heal", "when"), [(Healing.IN_PLACE, "before the first iteration, as gpt-1"), (Healing.RESTART, "(as gpt-1 did")]
)
def test_of_a_script_that_is_run_as_torchrun_would_nobody_says_how_far_it_was(heal, when):
    scene = scene_of("a", "b")
    scene.feed(TaskSubmitted(task="gpt", spec=TaskSpec(name="gpt", command=["x"], heal=Healing.IN_PLACE)))
    scene.run(**{"gpt-1": "a", "gpt-2": "b"})
    as_ordered = TaskSpec(name="gpt", command=["x"], heal=heal)
    scene.feed(StartWorker(**scene.places["gpt-1"], spec=as_ordered))
    scene.throw("gpt-1", iteration=-1)
    [broken] = scene.throw("gpt-2", iteration=-1)
    assert when in broken.reason


# --- several ranks fail by one: the others are its echoes -------------------------------------------------------------


CUDA = {"exception": "RuntimeError", "text": "CUDA error: unspecified launch failure"}
RESET = {"exception": "ConnectionResetError", "text": "[Errno 104] Connection reset by peer"}
TIMEOUT = ("[Rank 1] Watchdog caught collective operation timeout", "Fatal Python error: Aborted")


@pytest.fixture
def harness():
    return scene_of("n1", "n2", "n3", **{"gpt-1": "n1", "gpt-2": "n2", "gpt-3": "n3"})


def restarts(harness, node):
    return len(harness.detector.state.tasks["gpt"].ladder.restarts.get(node, []))


def test_what_follows_from_a_failure_names_it(harness):
    [first] = harness.throw("gpt-1", **CUDA)
    assert "echo" not in first.reason
    echo = "; echo of gpt-1 on n1: cuda_error: RuntimeError: CUDA error: unspecified launch failure"
    harness.restart()
    [second] = harness.throw("gpt-2", **RESET)
    assert brief([second]) == [(2, "connection_reset", "gpt-2")]
    assert second.reason == f"ConnectionResetError: {RESET['text']}{echo}"
    [third] = harness.exit("gpt-3", signal=6, stderr=TIMEOUT)
    assert third.reason.endswith(echo)
    assert brief([third]) == [(2, "exited_abnormally", "gpt-3")]
    assert [restarts(harness, node) for node in ("n1", "n2", "n3")] == [1, 0, 0]


def test_what_fails_by_itself_is_no_echo(harness):
    harness.throw("gpt-1", **CUDA)
    for [failure] in (harness.exit("gpt-2", signal=9), harness.exit("gpt-3", signal=11)):
        assert "echo" not in failure.reason
    assert [restarts(harness, node) for node in ("n1", "n2", "n3")] == [1, 1, 1]


def test_without_a_cause_it_counts_as_ever(harness):
    [first], [second] = harness.throw("gpt-2", **RESET), harness.throw("gpt-3", **RESET)
    assert "echo" not in first.reason + second.reason, "one echo is not the cause of another"
    assert restarts(harness, "n2") == restarts(harness, "n3") == 1


def test_a_cause_is_one_for_a_few_seconds(harness):
    harness.throw("gpt-1", **CUDA)
    harness.wait(7)
    [failure] = harness.throw("gpt-2", **RESET)
    assert "echo" not in failure.reason
    assert restarts(harness, "n2") == 1


def test_the_first_cause_counts(harness):
    harness.exit("gpt-1", signal=9)
    harness.exit("gpt-2", signal=9)
    [failure] = harness.throw("gpt-3", **RESET)
    assert failure.reason.endswith("echo of gpt-1 on n1: exited_abnormally: gpt-1 was ended by SIGKILL")


def test_a_lost_node_is_a_cause_for_the_tasks_that_it_breaks(harness):
    harness.run(task="other", **{"other-1": "n3"})
    harness.silence("n1")
    assert brief(harness.wait(4)) == [(1, "lost_connection", "n1")]
    [failure] = harness.throw("gpt-2", **RESET)
    assert "; echo of n1: lost_connection" in failure.reason
    [failure] = harness.throw("other-1", **RESET)
    assert "echo" not in failure.reason


def test_echoes_never_give_a_node_up(harness):
    for number in range(10, 20):
        culprit, victim = f"gpt-{number}", f"gpt-{number + 20}"
        harness.join(f"m{number}")
        harness.run(epoch=number, **{culprit: f"m{number}", victim: "n2"})
        harness.wait(6)
        harness.exit(culprit, signal=9)
        assert brief(harness.throw(victim, **RESET)) == [(2, "connection_reset", victim)]
    assert restarts(harness, "n2") == 0


# --- memory ----------------------------------------------------------------------------------------------------------


def test_a_worker_whose_memory_grows_without_end_is_replaced(scene):
    [failure] = scene.grow("w1")
    assert (failure.severity, failure.status, failure.worker) == (Severity.SEV2, "out_of_memory", "w1")
    grows = "w1 on n1:0 holds 8.0 GiB and grows by 60 MiB a minute; 2.0 GiB are left there"
    assert failure.reason == f"{grows}: it is replaced before the kernel ends it"
    assert scene.exit("w1", signal=9, expected=True) == []


def test_workers_that_grow_alike_are_replaced_one_after_the_other(scene):
    assert len(scene.grow("w1")) == 1
    assert scene.grow("w2") == [], "its task recovers"
    scene.wait(REPLACED_S + 1)
    assert scene.grow("w2", epoch=0, iteration=40) != []


def test_a_worker_that_grows_is_left_alone_while_its_task_forms_another_membership(scene):
    scene.feed(Regroup(node="n2", task="gpt", epoch=1, rendezvous="", world_size=1, members=[], ranks=[]))
    assert scene.grow("w1") == []
