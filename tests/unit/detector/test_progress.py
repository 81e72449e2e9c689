"""Tasks that run, or are restarted, and come no further."""

import errno

import pytest
from helpers.detector import brief, scene_of
from unicron_detector import report
from unicron_detector.memberships import NOT_FINITE
from unicron_detector.state import DetectorLimits

from unicron.contracts.commands import Regroup
from unicron.contracts.events import (
    Alert,
    FailureDetected,
    IterationFinished,
    Regrouped,
    TaskBroken,
    TaskSubmitted,
)
from unicron.contracts.failures import Severity
from unicron.contracts.tasks import UNCOUNTED, Healing, Member, TaskSpec
from unicron.errors import explain_lack

TIMES = 4
NODES = [f"n{number}" for number in range(12)]


@pytest.fixture
def scene():
    return scene_of(*NODES, limits=DetectorLimits(no_progress=TIMES, attempts=3, count_all=True))


def fall(scene, epoch, iteration=3, kept=0):
    """Let a worker meet the others on a node of its own, and be ended in an iteration."""
    name, node = f"w{epoch}", NODES[epoch]
    scene.run(epoch=epoch, **{name: node})
    place = scene.places[name]
    scene.feed(Regrouped(**place, epoch=epoch, rank=0, world_size=1, iteration=iteration, kept=kept))
    return scene.exit(name, signal=9, iteration=iteration)


def order_into(scene, epoch, worker):
    """Order a worker into a membership."""
    at = scene.places[worker]
    member = Member(worker=worker, node=at["node"], slot=at["slot"])
    where = {"rendezvous": "h:1", "rendezvous_id": worker, "world_size": 1, "members": [member], "ranks": [0]}
    return scene.feed(Regroup(node=at["node"], task=at["task"], epoch=epoch, **where))


def finish(scene, epoch, iteration, loss=1.0):
    place = scene.places[f"w{epoch}"]
    told = {"world_size": 1, "seconds": 1.0, "loss": loss}
    return scene.feed(IterationFinished(**place, epoch=epoch, iteration=iteration, **told))


def test_a_task_that_never_passes_an_iteration_is_stopped_with_what_was_tried(scene):
    # each time on another node, so that no node's count climbs: a sample that no process survives
    for epoch in range(TIMES - 1):
        assert brief(fall(scene, epoch)) == [(2, "exited_abnormally", f"w{epoch}")]
    [broken] = fall(scene, TIMES - 1)
    assert isinstance(broken, TaskBroken)
    assert broken.reason.startswith("no progress: 4 attempts in a row failed in iteration 3, the last by w1 on n1: ")
    assert "w3 on n3: w3 was ended by SIGKILL" in broken.reason
    assert fall(scene, TIMES) == []


def test_one_blow_that_strikes_many_counts_once(scene):
    workers = {f"w{number}": NODES[number] for number in range(8)}
    scene.run(**workers)
    assert len([scene.exit(name, signal=9, iteration=3) for name in workers]) == len(workers)
    assert not scene.detector.state.tasks["gpt"].broken


@pytest.mark.parametrize("how", ["finished", "goes on", "microbatches"])
def test_who_comes_further_has_made_progress(scene, how):
    few = TIMES - 1
    for epoch in range(3 * few):
        further = epoch // few
        if how == "finished" and epoch and epoch % few == 0:
            finish(scene, epoch - 1, 3)
        iteration, kept = 3 + further * (how == "goes on"), further * (how == "microbatches")
        assert brief(fall(scene, epoch, iteration, kept)) == [(2, "exited_abnormally", f"w{epoch}")]


def test_failures_on_the_way_back_to_it_tell_nothing_of_it(scene):
    for epoch in range(3):
        fall(scene, epoch, iteration=9)
    for epoch in range(3, 8):  # it was set back to a checkpoint
        assert brief(fall(scene, epoch, iteration=epoch))[0][0] == 2
    assert brief(fall(scene, 8, iteration=9)) == ["TaskBroken"]


def test_one_that_was_set_back_and_never_passes_an_iteration_before_is_stopped(scene):
    fall(scene, 0, iteration=9)
    told = [brief(fall(scene, epoch, iteration=5))[0] for epoch in range(1, 1 + TIMES)]
    assert told[-1] == "TaskBroken"
    assert told[-2] != "TaskBroken"


def test_a_state_that_can_never_be_handed_over_ends_the_task_whoever_says_so(scene):
    scene.run(a="n0", b="n1")
    told = []
    for epoch in range(1, 1 + TIMES):
        scene.start("new", "n2")
        scene.stateless("new" if epoch % 2 else "b", epoch=epoch)
        told += scene.wait(1.0)
    assert brief(told) == [(3, "state_transfer_failed", each) for each in ("new", "b", "new")] + ["TaskBroken"]
    assert told[-1].reason.startswith("no progress: 4 attempts in a row failed in iteration 3, the last by b on n1: ")


def test_states_that_are_never_the_same_end_the_task(scene):
    told = []
    for epoch in range(TIMES):
        scene.run(epoch=epoch, a="n0", **{f"b{epoch}": "n1"})
        told += scene.diverge(f"b{epoch}", epoch=epoch)
    assert brief(told) == [(3, "state_diverged", f"b{epoch}") for epoch in range(TIMES - 1)] + ["TaskBroken"]


@pytest.mark.parametrize("ordered", [True, False], ids=["in their first membership", "before it"])
def test_workers_that_end_one_after_the_other_before_they_have_joined_the_others_end_the_task(scene, ordered):
    scene.run(a="n0")
    told = []
    for number in range(TIMES):
        scene.start(f"w{number}", NODES[number if ordered else 1])
        if ordered:
            order_into(scene, number + 1, f"w{number}")
        told += scene.exit(f"w{number}", signal=9)
    assert brief(told) == [(2, "exited_abnormally", f"w{number}") for number in range(TIMES - 1)] + ["TaskBroken"]
    what = "attempts in a row failed before the first iteration"
    assert f"no progress: 4 {what if ordered else 'workers in a row failed to start on n1:0'}" in told[-1].reason


@pytest.mark.parametrize("begins", [1.0, float("nan")])
def test_a_loss_that_stays_no_number_is_told_once_and_the_task_goes_on(scene, begins):
    scene.run(w0="n0")
    told = finish(scene, 0, 0, begins)
    for bout in range(2):
        for iteration in range(1, 2 * NOT_FINITE):
            told += finish(scene, 0, bout * 2 * NOT_FINITE + iteration, float("inf"))
        told += finish(scene, 0, (bout + 1) * 2 * NOT_FINITE, 1.0)
    assert [type(each) for each in told] == [Alert]
    first = 1 if begins == 1.0 else 0
    assert f"was inf in all of the iterations {first} to {first + 19}; it goes on" in told[0].text


def test_one_that_comes_to_its_senses_goes_on(scene):
    scene.run(w0="n0")
    for iteration in range(3 * NOT_FINITE):
        loss = 1.0 if iteration % NOT_FINITE == NOT_FINITE - 1 else float("nan")
        assert finish(scene, 0, iteration, loss) == []


def test_what_another_node_says_of_the_loss_counts_for_nothing(scene):
    scene.run(w0="n0")
    liar = {**scene.places["w0"], "node": "n1"}
    told = {"epoch": 0, "world_size": 1, "seconds": 1.0, "loss": float("nan")}
    for iteration in range(2 * NOT_FINITE):
        assert scene.feed(IterationFinished(**liar, iteration=iteration, **told)) == []


@pytest.fixture
def program(scene):
    """A program that runs again after each failure, and tells of no iterations."""
    spec = TaskSpec(name="gpt", command=["train"], iterations=UNCOUNTED, heal=Healing.RESTART)
    scene.feed(TaskSubmitted(task="gpt", spec=spec))
    return scene


def test_a_program_of_which_nothing_is_known_has_come_further_if_it_ran_for_long(program, monkeypatch):
    monkeypatch.setattr(report, "LASTED_S", 5.0)
    for epoch in range(10):
        name, node = f"w{epoch}", NODES[epoch % len(NODES)]
        program.run(epoch=epoch, **{name: node})
        program.feed(Regrouped(**program.places[name], epoch=epoch, rank=0, world_size=1, iteration=0, kept=0))
        program.wait(6.0 if epoch % (TIMES - 1) == 0 else 1.0)
        assert brief(program.exit(name, signal=9, iteration=0)) == [(2, "exited_abnormally", name)]


def test_a_program_of_which_nothing_is_known_is_stopped_where_it_fails_again_and_again(program):
    assert [brief(fall(program, epoch, iteration=0))[0] for epoch in range(TIMES)][-1] == "TaskBroken"


def test_one_whose_ranks_lose_each_other_again_and_again_is_stopped_though_none_of_them_fails(program):
    told = fall(program, 0, iteration=0)
    program.run(a="n1", b="n2")
    for epoch in range(1, TIMES):
        for worker in ("a", "b"):
            place = program.places[worker]
            program.feed(Regrouped(**place, epoch=epoch, rank=0, world_size=2, iteration=0, kept=0))
        program.collective("b", epoch=epoch, iteration=0)
        program.collective("a", epoch=epoch, iteration=0)  # of the same blow
        told += program.wait(1.0)
    assert [each[1] if isinstance(each, tuple) else each for each in brief(told)] == [
        "exited_abnormally",
        *["connection_reset"] * (TIMES - 2),
        "TaskBroken",
    ]


def test_the_same_exception_later_is_no_error_of_the_program_where_nobody_knows_how_far_it_was(program):
    program.run(epoch=0, a="n0", b="n1")
    assert brief(program.throw("a", iteration=0)) == [(2, "other_software_error", "a")]
    program.run(epoch=1, c="n0", b="n1")
    assert brief(program.throw("c", iteration=0)) == [(2, "other_software_error", "c")]
    assert brief(program.throw("b", iteration=0)) == ["TaskBroken"]  # of two ranks at once


HUB = {"exception": "huggingface_hub.errors.HfHubHTTPError", "text": "429 Client Error: Too Many Requests for url: x"}


def test_what_waits_for_a_server_outside_is_tried_again_after_longer_and_longer_waits_and_no_node_is_given_up(scene):
    waits = []
    for number in range(1, 15):
        scene.start(f"gpt-{number}", "n0")
        [failure] = scene.throw(f"gpt-{number}", **HUB, iteration=-1)
        if isinstance(failure, TaskBroken) or failure.severity is Severity.SEV1:
            break
        waits.append(failure.wait_s)
        assert (f"tried again in {failure.wait_s:g} s" in failure.reason) == (failure.wait_s > 0)
        scene.wait(failure.wait_s + 5.0)
    assert waits[:9] == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    scene.feed(Regrouped(**scene.places["gpt-1"], epoch=1, rank=0, world_size=1, iteration=3))
    scene.start("gpt-20", "n0")
    [failure] = scene.throw("gpt-20", **HUB, iteration=7)
    assert failure.wait_s == 0, "it had come further"


def test_all_ranks_that_a_server_refuses_at_once_count_once(scene):
    scene.submit()
    for wave in range(3):
        for rank in range(4):
            scene.start(f"gpt-{4 * wave + rank}", f"n{rank}")
        told = [scene.throw(f"gpt-{4 * wave + rank}", **HUB, iteration=-1)[0] for rank in range(4)]
        assert [(each.severity, each.wait_s) for each in told] == [(Severity.SEV2, (0, 1, 2)[wave])] * 4
        scene.wait(2.0)


def test_what_a_machine_lacks_is_nobodys_fault_and_tried_again_after_longer_and_longer_waits(scene):
    """Whoever has the state tells as well that it could not be handed over, and is not blamed in turn."""
    scene.run(a="n0", b="n1")
    waits = []
    for epoch in range(1, 40):
        new = f"gpt-{epoch}"
        scene.run(epoch=epoch, **{new: "n2"})
        early = scene.stateless("a", epoch)
        [failure] = [each for each in scene.lack(new, epoch) if isinstance(each, FailureDetected)]
        assert (failure.severity, failure.status) == (Severity.SEV2, "out_of_resources")
        assert failure.worker == new
        assert "the machine lacks room; make room there" in failure.reason
        waits.append(failure.wait_s)
        later = scene.stateless("b", epoch) + scene.wait(failure.wait_s + 1)
        assert not [each for each in early + later if isinstance(each, FailureDetected | TaskBroken)]
        scene.feed(
            IterationFinished(**scene.places["a"], epoch=epoch, iteration=epoch, world_size=2, seconds=1.0, loss=1.0)
        )
    assert waits[:8] == [1, 2, 4, 8, 16, 32, 60, 60]


def test_who_only_says_that_another_lacks_something_is_not_replaced_however_often_the_other_is_not_heard(scene):
    scene.run(a="n0", b="n1")
    why = explain_lack(OSError(errno.ENOSPC, "No space left on device"))
    for epoch in range(1, 20):
        scene.run(epoch=epoch, b="n1")
        told = scene.stateless("b", epoch, why) + scene.wait(2.0)
        [failure] = [each for each in told if isinstance(each, FailureDetected)]
        assert (failure.severity, failure.status) == (Severity.SEV3, "out_of_resources")


def test_a_process_that_could_not_be_started_for_want_of_something_is_nobodys_fault(scene):
    for number in range(12):
        scene.start(f"gpt-{number}", "n0")
        why = f"n0 can't start: {explain_lack(OSError(errno.EMFILE, 'Too many open files'))}"
        [failure] = scene.exit(f"gpt-{number}", exit_code=127, stderr=[why])
        assert (failure.severity, failure.status, failure.wait_s > 0) == (Severity.SEV2, "out_of_resources", True)
        assert "raise `ulimit -n`" in failure.reason
        scene.wait(failure.wait_s)


def test_a_task_that_others_end_in_one_iteration_waits_and_one_that_hangs_there_by_itself_is_stopped():
    scene = scene_of(*NODES, limits=DetectorLimits(no_progress=TIMES, attempts=3))
    out = []
    for epoch in range(TIMES + 3):
        scene.run(epoch=epoch, **{f"gpt-{epoch}": NODES[epoch]})
        out += scene.exit(f"gpt-{epoch}", signal=9, iteration=3)
    assert [each.wait_s for each in out] == [0, 0, 0, 1, 2, 4, 8]
    assert "no progress: 7 attempts in a row failed in iteration 3" in out[-1].reason
    assert out[-1].reason.endswith("tried again in 8 s")
    hung = scene_of(*NODES, limits=DetectorLimits(no_progress=TIMES, attempts=3))
    for epoch in range(TIMES):
        hung.run(epoch=epoch, **{f"w{epoch}": NODES[epoch]})
        [last] = hung.stall(f"w{epoch}", epoch=epoch, responsive=False)
    assert isinstance(last, TaskBroken)
