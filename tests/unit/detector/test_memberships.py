"""Broken collectives: held until explained, reported only where nothing explains them; and the ladder."""

import pytest
from helpers.detector import brief, scene_of
from unicron_detector.ladder import Ladder
from unicron_detector.state import DetectorLimits

from unicron.contracts import events
from unicron.contracts.base import BusReconnected
from unicron.contracts.commands import Regroup
from unicron.contracts.failures import Severity
from unicron.contracts.tasks import Member, TaskSpec, TaskState


@pytest.fixture
def scene():
    return scene_of("n1", "n2", "n3", w1="n1", w2="n2", w3="n3")


def test_an_unexplained_broken_collective_is_severity_3_and_a_reattempt_that_fails_costs_a_restart(scene):
    about = {"method": "exception_propagation", "status": "connection_reset", **scene.places["w1"]}
    assert scene.collective("w1") == []
    broke = events.FailureDetected(severity=Severity.SEV3, **about, reason="Connection closed by peer", epoch=0)
    assert scene.wait(0.4) == [broke]
    about |= {"reason": "reattempt failed: no answer", "escalated": Severity.SEV3}
    in_vain = events.FailureDetected(severity=Severity.SEV2, **about)
    assert scene.give_up("reattempt", "w1", reason="no answer") == [in_vain]
    assert scene.give_up("reattempt", "w1") == []


def test_a_state_that_nobody_could_hand_over_is_tried_again_in_place_and_climbs_the_ladder(scene):
    for epoch in range(3):
        scene.run(epoch=epoch, w1="n1", w2="n2")
        assert scene.stateless("w2", epoch=epoch) == []
        (failure,) = scene.wait(1)
        assert brief([failure]) == [(3, "state_transfer_failed", "w2")]
        assert failure.reason == "no source of the state answers"
        assert scene.wait(10) == []
    scene.run(epoch=3, w1="n1", w2="n2")
    scene.stateless("w2", epoch=3)
    (failure,) = scene.wait(1)
    assert brief([failure]) == [(2, "state_transfer_failed", "w2")]
    assert failure.escalated is Severity.SEV3


def test_a_failed_state_transfer_does_not_prove_that_a_suspect_node_is_lost(scene):
    scene.disconnect("n1")  # its agent, which serves the states, is started again; its workers live on
    assert scene.stateless("w2") == []
    assert brief(scene.wait(1)) == [(3, "state_transfer_failed", "w2")]


def test_a_collective_that_breaks_as_well_is_the_better_account(scene):
    scene.stateless("w1")
    scene.collective("w2")
    assert brief(scene.wait(1)) == [(3, "connection_reset", "w2")]


def test_several_broken_collectives_of_an_epoch_are_one_failure_and_every_epoch_may_break(scene):
    scene.collective("w1")
    scene.collective("w2")
    assert brief(scene.wait(0.4)) == [(3, "connection_reset", "w1")]
    assert scene.collective("w3") == []
    assert scene.wait(10) == []
    scene.run(epoch=1, w1="n1", w2="n2", w3="n3")
    scene.collective("w2", epoch=1)
    assert brief(scene.wait(1)) == [(3, "connection_reset", "w2")]


def test_a_peers_exit_explains_it_whichever_is_told_first(scene):
    scene.collective("w1")
    assert brief(scene.exit("w2", signal=9)) == [(2, "exited_abnormally", "w2")]
    assert scene.collective("w3") == []
    assert scene.wait(10) == []


def test_the_exit_of_another_tasks_worker_explains_nothing(scene):
    scene.run(task="other", o1="n1")
    scene.collective("w1")
    scene.exit("o1", signal=9)
    assert brief(scene.wait(10)) == [(3, "connection_reset", "w1")]


@pytest.mark.parametrize(("node", "told"), [("n3", []), ("n4", [(3, "connection_reset", "w1")])])
def test_a_lost_node_explains_it_if_it_hosts_the_task(scene, node, told):
    scene.join("n4")
    scene.silence(node)
    scene.wait(4)
    assert scene.collective("w1") == []
    assert brief(scene.wait(10)) == told


@pytest.mark.parametrize("told", ["a worker is in the next", "the next was decided"])
def test_a_newer_membership_makes_it_a_thing_of_the_past(scene, told):
    scene.collective("w1")
    if told == "the next was decided":
        scene.feed(events.TaskStateChanged(task="gpt", state=TaskState.RECONFIGURING, epoch=1))
    else:
        scene.run(epoch=1, w2="n2")
    assert scene.collective("w3") == []
    assert scene.wait(10) == []


def test_the_verdict_about_a_suspect_is_waited_for(scene):
    scene.disconnect("n1")
    scene.silence("n1")
    scene.collective("w1")  # from the suspect itself, so it proves nothing
    assert brief(scene.wait(10)) == [(1, "lost_connection", "n1")]


def test_after_the_suspect_is_cleared_it_is_reported(scene):
    scene.silence("n1")
    scene.disconnect("n1")
    scene.collective("w1")
    assert scene.wait(0.7) == []
    scene.join("n1", incarnation="b", workers=[("w1", "gpt")])
    assert brief(scene.wait(1)) == [(3, "connection_reset", "w1")]


def test_the_hold_off_starts_anew_after_a_restart(scene):
    scene.collective("w1")
    scene.now += 10  # the exit that explains it waits in the journal
    out = scene.restart()
    assert out == []
    assert brief(scene.exit("w2", signal=9)) == [(2, "exited_abnormally", "w2")]
    assert scene.wait(10) == []


def test_the_hold_off_starts_anew_when_the_bus_is_back(scene):
    scene.collective("w1")
    scene.wait(0.2)
    scene.feed(BusReconnected(down_s=0.1, at=scene.now))
    assert scene.wait(0.2) == []
    assert brief(scene.wait(0.2)) == [(3, "connection_reset", "w1")]


# --- the ladder ------------------------------------------------------------------------------------------------------


def break_links(scene, times, epoch=0):
    """Break the membership again and again; return the failures, and the next epoch."""
    out = []
    for _ in range(times):
        scene.run(epoch=epoch, w1="n1", w2="n2", w3="n3")
        scene.collective("w1", epoch=epoch)
        out += scene.wait(1)
        epoch += 1
    return out, epoch


def kill(scene, times, node="n1", start=0, task="gpt"):
    out = []
    for number in range(start, start + times):
        scene.run(task=task, epoch=number, **{f"{task}-{node}-{number}": node})
        out += scene.exit(f"{task}-{node}-{number}", signal=9)
    return out


def test_a_link_that_keeps_breaking_costs_a_restart(scene):
    out, _ = break_links(scene, 4)
    assert [each.attempt for each in out] == [1, 2, 3, 4]
    assert [int(each.severity) for each in out] == [3, 3, 3, 2]
    assert out[-1].escalated is Severity.SEV3
    assert out[-1].worker == "w1"


def test_links_that_break_rarely_are_mended_in_place(scene):
    out, epoch = break_links(scene, 3)
    scene.wait(scene.limits.window_s)
    more, _ = break_links(scene, 3, epoch)
    assert {int(each.severity) for each in out + more} == {3}


def test_a_worker_that_keeps_dying_costs_its_node(scene):
    out = kill(scene, 4)
    assert [int(each.severity) for each in out] == [2, 2, 2, 1]
    assert [each.attempt for each in out] == [1, 2, 3, 4]
    assert out[-1].escalated is Severity.SEV2
    assert (out[-1].node, out[-1].task) == ("n1", "gpt")
    assert scene.exit("w1", signal=9) == []  # that node is given up


def test_workers_that_die_rarely_do_not_cost_their_node(scene):
    out = kill(scene, 3)
    scene.wait(scene.limits.window_s + 1)
    out += kill(scene, 3, start=3)
    assert {int(each.severity) for each in out} == {2}


def test_deaths_are_counted_for_each_node_and_task(scene):
    out = kill(scene, 3, "n1") + kill(scene, 3, "n2", start=3) + kill(scene, 3, "n1", task="other")
    assert {int(each.severity) for each in out} == {2}


@pytest.mark.parametrize(("host", "severity"), [("", 1), ("one", 2)])
def test_the_number_of_attempts_is_a_setting_and_where_all_nodes_are_one_machine_none_is_given_up(host, severity):
    scene = scene_of(limits=DetectorLimits(attempts=1))
    scene.join("n1", "n2", host=host)
    out = kill(scene, 2)
    assert [int(each.severity) for each in out] == [2, severity]
    assert not host or "fails again and again on the only machine; tried again in" in out[-1].reason


def test_a_task_that_others_kill_costs_one_node_and_waits_longer_and_longer(scene):
    out = []
    for number in range(13):
        scene.run(epoch=number, **{f"gpt-{number}": "n1" if number < 4 else "n2"})
        out += scene.exit(f"gpt-{number}", signal=9, iteration=10 * number)
    assert brief(out[3:]) == [(1 if n == 3 else 2, "exited_abnormally", f"gpt-{n}") for n in range(3, 13)]
    assert [each.wait_s for each in out[4:]] == [0, 0, 0, 1, 2, 4, 8, 16, 32]
    assert "again and again on several nodes (n1, n2); tried again in 32 s" in out[-1].reason


@pytest.mark.parametrize("further", [1, 0])
def test_a_task_that_costs_a_second_node_is_at_fault_itself_where_it_comes_no_further(scene, further):
    out = []
    for number in range(12):
        scene.run(epoch=number, **{f"v{number}": f"n{1 + number // 4}"})
        fault = {"exception": "RuntimeError", "text": "CUDA error: misaligned address"}
        out += scene.throw(f"v{number}", **fault, iteration=number * further)
    assert ("TaskBroken" in brief(out)) == (not further)
    assert set(scene.detector.state.lost) == {"n1"}


def test_a_node_that_joins_again_starts_with_a_clean_record(scene):
    kill(scene, 4, "n1")
    scene.join("n1", incarnation="b")
    out = kill(scene, 4, "n1", start=4)
    assert [int(each.severity) for each in out] == [2, 2, 2, 1]  # the same node again, so not the task's fault


def test_another_task_or_the_same_after_the_window_may_cost_another_node(scene):
    kill(scene, 4, "n1")
    assert kill(scene, 4, "n2", task="other")[-1].severity is Severity.SEV1
    scene.wait(scene.limits.window_s + 1)
    scene.join("n2", incarnation="b")
    assert kill(scene, 4, "n2", start=4)[-1].severity is Severity.SEV1


def test_a_reattempt_of_nobody_in_particular_falls_back_on_the_last_failure_or_alerts_a_person(scene):
    in_vain = events.AttemptFailed(task="gpt", action="reattempt", reason="no answer")
    assert brief(scene.feed(in_vain)) == ["Alert"]
    scene.collective("w2")
    scene.wait(1)
    assert brief(scene.feed(in_vain)) == [(2, "connection_reset", "w2")]


def test_a_restart_that_fails_costs_the_node(scene):
    scene.exit("w1", signal=9)
    scene.places["w1b"] = {**scene.places["w1"], "worker": "w1b"}
    (failure,) = scene.give_up("restart", "w1b")
    assert (failure.severity, failure.escalated) == (Severity.SEV1, Severity.SEV2)
    assert (failure.node, failure.worker, failure.task) == ("n1", "w1b", "gpt")
    assert scene.give_up("restart", "w1b") == []


def test_a_restart_that_fails_on_a_second_node_too_costs_it_no_more_and_waits(scene):
    scene.give_up("restart", "w1")
    [failure] = scene.give_up("restart", "w2")
    assert (failure.severity, failure.worker, failure.wait_s) == (Severity.SEV2, "w2", 1.0)


def test_a_worker_that_does_not_regroup_is_restarted(scene):
    assert brief(scene.give_up("regroup", "w2")) == [(2, "task_hang", "w2")]
    assert scene.give_up("regroup", "w2") == []


def test_the_ladder_forgets(scene):
    kill(scene, 4, "n1")
    break_links(scene, 3, epoch=10)
    scene.wait(scene.limits.window_s + 2)
    ladder = scene.detector.state.tasks["gpt"].ladder
    assert (ladder.reattempts, ladder.restarts, ladder.climbs) == ([], {}, {})
    assert scene.detector.state.lost == {}


def test_a_state_that_diverged_is_taken_anew_without_delay_and_what_broke_by_that_needs_no_report(scene):
    assert scene.collective("w1") == []
    assert brief(scene.diverge("w2")) == [(3, "state_diverged", "w2")]
    assert scene.collective("w3") == []
    assert scene.diverge("w3") == [], "one new membership is enough for both"
    assert scene.wait(10) == []


def test_who_diverges_again_is_restarted_and_the_node_on_which_that_goes_on_is_given_up(scene):
    scene.diverge("w2")
    scene.run(epoch=1, w1="n1", w2="n2", w3="n3")
    [failure] = scene.diverge("w2", epoch=1)
    assert brief([failure]) == [(2, "state_diverged", "w2")]
    assert failure.escalated is Severity.SEV3
    severities = []
    for number in range(4, 7):
        for epoch in (2 * number, 2 * number + 1):
            scene.run(epoch=epoch, w1="n1", w3="n3", **{f"w{number}": "n2"})
            severities += [each.severity for each in scene.diverge(f"w{number}", epoch=epoch)]
    assert severities[-1] is Severity.SEV1
    assert Severity.SEV1 not in severities[:-1]


def test_who_was_restarted_may_diverge_once_more_itself(scene):
    scene.diverge("w2")
    scene.restart()
    scene.run(epoch=1, w1="n1", w2="n2", w3="n3")
    assert brief(scene.diverge("w2", epoch=1)) == [(2, "state_diverged", "w2")], "remembered over a restart"
    scene.run(epoch=2, w1="n1", w4="n2", w3="n3")
    assert brief(scene.diverge("w4", epoch=2)) == [(3, "state_diverged", "w4")]
    assert scene.diverge("w1", epoch=1) == [], "of an older membership"


def test_what_the_transition_service_has_ordered_or_told_of_is_an_epoch_and_nothing_else(scene):
    def doubted(epoch):
        place = {"node": "n1", "slot": 0, "task": "new", "worker": "new-1"}
        return scene.detector.find_contradiction(
            events.Regrouped(**place, epoch=epoch, rank=0, world_size=1, iteration=0)
        )

    assert not doubted(5000), "nothing is known of that task"
    scene.feed(events.TaskSubmitted(task="new", spec=TaskSpec(name="new", command=["x"])))
    scene.start("new-1", "n1", "new")
    assert doubted(0)
    scene.feed(Regroup(task="new", node="n1", epoch=0, rendezvous="", members=[]))
    assert not doubted(0)
    assert doubted(1)
    scene.feed(events.TaskStateChanged(task="new", state=TaskState.RUNNING, epoch=2))
    assert not doubted(2)
    scene.feed(Regroup(task="new", node="n1", epoch=1, rendezvous="", members=[]))  # late
    assert not doubted(2)
    assert doubted(3)
    scene.restart()
    assert doubted(3)


def test_who_is_gone_moves_no_epoch(scene):
    assert brief(scene.exit("w1", signal=9)) == [(2, "exited_abnormally", "w1")]
    scene.run(epoch=1, w2="n2", w3="n3")
    assert scene.diverge("w1", epoch=5000) == []
    assert scene.collective("w2", epoch=1) == []
    assert brief(scene.wait(1)) == [(3, "connection_reset", "w2")], "what is told of epoch 1 is not late"


def test_who_is_in_no_membership_any_more_or_in_none_yet_breaks_none_by_failing(scene):
    scene.run(epoch=1, w1="n1", w2="n2")  # without w3
    assert brief(scene.exit("w3", signal=9)) == [(2, "exited_abnormally", "w3")]
    scene.start("w4", "n3", slot=1)
    scene.feed(events.WorkerReady(**scene.places["w4"], pid=4))
    assert brief(scene.exit("w4", signal=9)) == [(2, "exited_abnormally", "w4")]
    assert scene.collective("w1", epoch=1) == []
    assert brief(scene.wait(1)) == [(3, "connection_reset", "w1")]


def test_who_was_ordered_into_a_membership_breaks_it_by_failing(scene):
    members = [Member(worker="w3", node="n3", slot=0)]
    scene.feed(Regroup(task="gpt", node="n3", epoch=1, rendezvous="", members=members))
    assert brief(scene.exit("w3", signal=9)) == [(2, "exited_abnormally", "w3")]
    assert scene.collective("w1", epoch=1) == []
    assert scene.wait(10) == []


def test_the_loss_of_a_node_explains_only_the_memberships_that_it_had_a_part_in(scene):
    scene.run(task="bert", b1="n1", b2="n2")
    scene.run(epoch=1, w1="n1", w2="n2")  # w3 on n3 is left over
    scene.run(task="bert", epoch=1, b1="n1", b3="n3")
    scene.silence("n3")
    assert brief(scene.wait(10)) == [(1, "lost_connection", "n3")]
    assert scene.collective("b1", epoch=1) == []
    assert scene.collective("w1", epoch=1) == []
    assert brief(scene.wait(10)) == [(3, "connection_reset", "w1")]


# --- counting attempts in a sliding window ---------------------------------------------------------------------------


def test_reattempts_count_within_the_window():
    ladder = Ladder()
    assert [ladder.reattempt(at, 10) for at in (0, 5, 10, 16)] == [1, 2, 3, 2]


def test_restarts_count_for_each_node():
    ladder = Ladder()
    assert [ladder.restart(node, at, 10) for node, at in (("a", 0), ("b", 1), ("a", 2), ("a", 11))] == [1, 1, 2, 2]


def test_a_second_node_is_one_too_many_within_the_window_and_not_after_it():
    ladder, later = Ladder(), Ladder()
    assert [ladder.give_up_node(node, at, 10) for node, at in (("a", 0), ("a", 5), ("b", 9))] == [True, True, False]
    assert [later.give_up_node(node, at, 10) for node, at in (("a", 0), ("b", 11))] == [True, True]


def test_forgetting_leaves_nothing_behind():
    ladder = Ladder()
    ladder.reattempt(0, 10)
    ladder.restart("a", 0, 10)
    ladder.give_up_node("b", 0, 10)
    ladder.forget(5, 10)
    assert ladder != Ladder()
    ladder.forget(11, 10)
    assert ladder == Ladder()


def test_peers_that_leave_for_a_membership_that_was_ordered_are_no_failure_of_who_sees_it(scene):
    scene.run(epoch=1, w1="n1", w2="n2", w3="n3")
    members = [Member(worker="w1", node="n1", slot=0)]
    scene.feed(Regroup(task="gpt", node="n1", epoch=2, rendezvous="", members=members))
    assert scene.collective("w2", epoch=1) == []
    assert scene.wait(1) == []
    assert scene.collective("w2", epoch=2) == []
    assert brief(scene.wait(1)) == [(3, "connection_reset", "w2")]
