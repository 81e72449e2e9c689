"""Node health: what makes a node lost, and what doesn't."""

import pytest
from helpers.detector import brief, scene_of
from unicron_detector.nodes import STALE
from unicron_detector.state import DetectorLimits

from unicron.contracts import events
from unicron.contracts.base import BusReconnected, TelemetryDropped, TimerFired
from unicron.contracts.failures import Severity


@pytest.fixture
def scene():
    return scene_of("n1", "n2", "n3", w1="n1", w2="n2")


def lost(node):
    return [(1, "lost_connection", node)]


def cut_off(scene, node="n1"):
    """End a machine: it beats no more, and its connection ends."""
    scene.silence(node)
    return scene.disconnect(node)


def test_a_node_whose_connection_ends_is_lost_after_the_grace(scene):
    scene.silence("n1")
    suspected = events.NodeSuspected(node="n1", reason="Client Closed", grace_s=1.0)
    assert scene.disconnect("n1", "Client Closed") == [suspected]
    assert scene.wait(0.9) == []
    told = {"method": "node_health", "status": "lost_connection", "node": "n1"}
    reason = "its connection ended (Client Closed) and was not back within 1 s"
    assert scene.wait(0.3) == [events.FailureDetected(severity=Severity.SEV1, **told, reason=reason)]


@pytest.mark.parametrize("still_s", [1.0, 2.0, 2.9])
def test_a_node_that_stands_still_has_as_long_as_any_silent_one_though_its_server_gives_it_up_sooner(scene, still_s):
    scene.silence("n1")
    scene.wait(0.9)
    scene.disconnect("n1", STALE)
    assert scene.wait(still_s - 0.9) == []
    scene.join("n1", incarnation="b")
    assert scene.wait(5.0) == []


def test_a_node_that_is_silent_for_longer_is_lost_with_its_connection(scene):
    scene.silence("n1")
    scene.wait(0.9)
    scene.disconnect("n1", STALE)
    assert brief(scene.wait(3.0)) == lost("n1")


def test_the_grace_is_a_setting():
    scene = scene_of("n1", limits=DetectorLimits(grace_s=0.2))
    cut_off(scene)
    assert brief(scene.wait(0.3)) == lost("n1")


def test_a_heartbeat_within_the_grace_clears_the_node(scene):
    scene.disconnect("n1")
    assert scene.disconnect("n9") == [], "it never joined"
    assert scene.wait(5) == []


def clocks(scene, seconds=5.0):
    """Let time pass; return the nodes of whose clocks something is told, what, and whether they are right again."""
    return [(alert.node, alert.text, alert.over) for alert in scene.wait(seconds)]


@pytest.mark.parametrize("ahead_s", [-7200.0, -300.0, 300.0, 7200.0])
def test_a_clock_that_is_wrong_is_told_once_however_it_jumps_and_once_that_it_is_right(scene, ahead_s):
    assert clocks(scene) == []
    scene.ahead["n2"] = ahead_s
    side = "ahead of" if ahead_s > 0 else "behind"
    [(node, told, over)] = clocks(scene)
    assert (node, over, f"the clock of n2 is {abs(ahead_s):.0f} s {side} the detector's" in told) == ("n2", False, True)
    scene.ahead["n2"] = -ahead_s * 3
    assert clocks(scene) == []
    scene.ahead["n2"] = 20.0
    assert clocks(scene) == [("n2", "the clock of n2 is right again", True)]
    assert clocks(scene) == []


@pytest.mark.parametrize("ahead_s", [-7200.0, 90.0])
def test_where_all_clocks_step_together_it_is_the_detectors_own(scene, ahead_s):
    scene.ahead = dict.fromkeys(("n1", "n2", "n3"), ahead_s)
    [(node, told, over)] = clocks(scene)
    assert (node, "the machine that the detector runs on is" in told, over) == ("", True, False)
    scene.ahead = {}
    [(node, told, over)] = clocks(scene)
    assert (node, "right again" in told, over) == ("", True, True)


@pytest.mark.parametrize("late", ["n1", "n2", "n3"])
@pytest.mark.parametrize("ahead_s", [-7200.0, 7200.0])
def test_no_node_is_named_for_the_detectors_own_clock_though_one_is_heard_late(scene, late, ahead_s):
    told = []
    for ahead in (dict.fromkeys(scene.beating, ahead_s), {}):
        scene.ahead = {**ahead, late: scene.ahead.get(late, 0.0)}
        told += clocks(scene, 1.4)  # what it has sent before is still on its way
        scene.ahead = ahead
        told += clocks(scene)
    assert [(node, over) for node, _, over in told] == [("", False), ("", True)]


def test_a_node_that_is_wrong_beside_the_detectors_own_clock_is_named_once_that_is_right(scene):
    scene.ahead = {"n1": 7200.0, "n2": 7200.0, "n3": 7200.0}
    clocks(scene)
    scene.ahead = {"n3": 300.0}
    assert [(node, over) for node, _, over in clocks(scene, 10.0)] == [("", True), ("n3", False)]


def test_of_a_node_that_is_gone_it_is_told_that_its_clock_is_not_heard_any_more(scene):
    scene.ahead["n2"] = 300.0
    clocks(scene)
    scene.silence("n2")
    scene.feed(events.NodeGone(node="n2"))
    assert clocks(scene) == [("n2", "the clock of n2 is not heard any more", True)]


def test_heartbeats_that_waited_while_the_detector_was_held_up_tell_nothing_of_clocks(scene):
    scene.ahead["n1"] = -120.0
    scene.wait(1.2)
    scene.ahead["n1"] = 0.0
    assert clocks(scene) == []


def test_an_agent_that_comes_back_within_the_grace_clears_the_node(scene):
    cut_off(scene)
    scene.wait(0.5)
    assert scene.join("n1", incarnation="b", workers=[("w1", "gpt")]) == []
    assert scene.wait(5) == []


def test_the_same_incarnation_said_again_is_no_sign_of_life(scene):
    cut_off(scene)
    scene.join("n1")
    scene.silence("n1")
    assert brief(scene.wait(1.2)) == lost("n1")


def test_workers_that_died_with_an_agent_that_came_back_are_missed(scene):
    scene.run(epoch=1, w1="n1", w3="n1", w2="n2")
    cut_off(scene)
    out = scene.join("n1", incarnation="b", workers=[("w3", "gpt")])
    assert brief(out) == [(2, "exited_abnormally", "w1")]
    assert scene.exit("w1", exit_code=None) == []


def test_a_node_may_be_given_up_for_the_workers_that_it_lost_by_coming_back():
    scene = scene_of("n1", "n2", limits=DetectorLimits(attempts=1))
    scene.run(epoch=1, w1="n1", w2="n2")
    scene.start("w1b", "n1")
    out = scene.exit("w1b", exit_code=None)  # the last attempt
    out += scene.join("n1", incarnation="b")
    assert 1 in {severity for severity, *_ in brief(out)}
    assert "n1" not in scene.detector.state.nodes


def test_a_worker_that_waits_for_its_first_membership_is_missed_too(scene):
    scene.start("w4", "n1", slot=1)
    scene.feed(events.WorkerReady(node="n1", slot=1, task="gpt", worker="w4", pid=4))
    out = scene.join("n1", incarnation="b", workers=[("w1", "gpt")])
    assert brief(out) == [(2, "exited_abnormally", "w4")]


def test_an_advisory_that_comes_after_the_new_join_does_no_harm(scene):
    scene.join("n1", incarnation="a.2", workers=[("w1", "gpt")])
    assert brief(scene.disconnect("n1")) == ["NodeSuspected"]
    assert scene.wait(5) == []


@pytest.mark.parametrize("boot", ["b", "a.1", ""])
def test_the_end_of_a_connection_that_the_admitted_agent_never_had_does_no_harm(scene, boot):
    scene.join("n1", incarnation="a.1", workers=[("w1", "gpt")])
    scene.silence("n1")
    assert scene.disconnect("n1", boot=boot) == []
    assert scene.wait(2) == []


def test_a_second_advisory_does_not_prolong_the_grace(scene):
    cut_off(scene)
    scene.wait(0.8)
    scene.disconnect("n1")
    assert brief(scene.wait(0.3)) == lost("n1")


def test_an_old_grace_timer_says_nothing_about_a_new_suspicion(scene):
    cut_off(scene)
    (old,) = [name for name in scene.timers if name.startswith("grace:n1")]
    scene.feed(events.NodeHeartbeat(node="n1", incarnation="a"))
    scene.disconnect("n1")
    assert scene.feed(TimerFired(name=old, at=scene.now)) == []


def test_a_silent_node_is_lost_without_any_advisory(scene):
    scene.silence("n1")
    assert scene.wait(2.9) == []
    (failure,) = scene.wait(1.2)
    assert brief([failure]) == lost("n1")
    assert failure.reason == "no heartbeat for 3 s"


@pytest.mark.parametrize(
    ("told", "fields"),
    [(events.NodeAdmitted, {"host": "h", "slots": []}), (events.NodePaced, {})],
    ids=["as it joins", "later"],
)
def test_a_node_that_is_to_beat_rarely_may_be_silent_for_longer(scene, told, fields):
    told = told(node="n1", incarnation="a", heartbeat_s=2.0, **fields)
    scene.feed(told, events.NodePaced(node="n2", incarnation="of another start", heartbeat_s=2.0))
    scene.silence("n1")
    scene.silence("n2")
    assert brief(scene.wait(5.9)) == lost("n2")
    (failure,) = scene.wait(1.2)
    assert brief([failure]) == lost("n1")
    assert failure.reason == "no heartbeat for 6 s"


@pytest.mark.parametrize(
    "deafened",
    [
        pytest.param(lambda scene: scene.feed(TelemetryDropped()), id="telemetry was dropped"),
        pytest.param(lambda scene: scene.restart(), id="the detector was away"),
        pytest.param(lambda scene: scene.feed(BusReconnected(down_s=2.0, at=scene.now)), id="the bus was away"),
    ],
)
def test_silence_while_nobody_could_be_heard_means_nothing(scene, deafened):
    scene.silence("n1")
    scene.wait(2.9)
    deafened(scene)
    assert scene.wait(2.9) == []
    assert brief(scene.wait(1.2)) == lost("n1")


def test_the_grace_starts_anew_when_the_bus_is_back(scene):
    cut_off(scene)
    scene.wait(0.9)
    scene.feed(BusReconnected(down_s=0.8, at=scene.now))
    assert scene.wait(0.9) == []
    assert brief(scene.wait(0.2)) == lost("n1")


def test_clocks_of_other_machines_do_not_matter(scene):
    scene.feed(events.NodeHeartbeat(node="n1", incarnation="a", at=9e9))
    scene.silence("n1")
    assert brief(scene.wait(4)) == lost("n1")
    scene.feed(events.NodeHeartbeat(node="n2", incarnation="a", at=0.0))
    assert scene.wait(4) == []


def test_a_lost_node_is_reported_once_until_it_joins_again(scene):
    cut_off(scene)
    assert brief(scene.wait(10)) == lost("n1")
    assert scene.disconnect("n1") == []
    assert scene.wait(10) == []
    scene.join("n1", incarnation="b")
    cut_off(scene)
    assert brief(scene.wait(10)) == lost("n1")


def test_a_goodbye_is_no_failure(scene):
    cut_off(scene)
    assert scene.feed(events.NodeLeft(node="n1", incarnation="a")) == []
    assert scene.wait(10) == []


def test_the_goodbye_of_an_earlier_incarnation_says_nothing(scene):
    scene.join("n1", incarnation="b", workers=[("w1", "gpt")])
    scene.feed(events.NodeLeft(node="n1", incarnation="a"))
    scene.silence("n1")
    assert brief(scene.wait(10)) == lost("n1")


def test_exits_on_a_lost_node_are_swallowed(scene):
    cut_off(scene)
    scene.wait(2)
    assert scene.exit("w1", signal=9) == []
    scene.places["w9"] = {**scene.places["w1"], "worker": "w9"}
    assert scene.exit("w9", signal=9) == []


@pytest.mark.parametrize("alive", [True, False])
def test_a_worker_is_watched_again_after_the_loss_of_its_node_if_it_outlived_that(scene, alive):
    cut_off(scene)
    scene.wait(2)
    scene.join("n1", incarnation="b", workers=[("w1", "gpt")] if alive else [])
    assert brief(scene.exit("w1", signal=9)) == ([(2, "exited_abnormally", "w1")] if alive else [])


# --- corroboration: an agent's crash alone breaks no collective ------------------------------------------------------


def test_a_broken_collective_condemns_a_suspect_at_once(scene):
    scene.run(task="other", o1="n1", o2="n2")
    cut_off(scene)
    assert brief(scene.collective("w2")) == lost("n1")
    assert scene.detector.state.tasks["other"].failed_epoch == 0, "it had a worker there"
    assert scene.wait(10) == []


def test_a_lost_connection_explains_a_collective_that_broke_before(scene):
    scene.silence("n1")
    assert scene.collective("w2") == []
    assert brief(scene.disconnect("n1")) == ["NodeSuspected", *lost("n1")]
    assert scene.wait(10) == []


def test_an_agent_that_was_too_slow_for_the_server_keeps_its_grace(scene):
    scene.disconnect("n1", "Stale Connection")
    assert scene.collective("w2") == []
    assert brief(scene.wait(1)) == [(3, "connection_reset", "w2")]


def test_the_suspect_itself_is_no_witness_and_one_after_it_is_heard(scene):
    cut_off(scene)
    assert scene.collective("w1") == []
    assert scene.wait(0.9) == []
    assert brief(scene.collective("w2")) == lost("n1")


def test_a_collective_of_a_task_that_is_not_there_proves_nothing(scene):
    scene.run(task="other", o2="n2", o3="n3")
    cut_off(scene)
    assert scene.collective("o2") == []
    assert brief(scene.wait(0.5)) == [(3, "connection_reset", "o2")]


def test_two_suspects_wait_for_their_own_verdicts(scene):
    scene.run(epoch=1, w1="n1", w2="n2", w3="n3")
    cut_off(scene)
    scene.disconnect("n3")  # this one comes back
    assert scene.collective("w2", epoch=1) == []
    assert brief(scene.wait(10)) == lost("n1")


def test_a_collective_of_an_earlier_epoch_or_that_is_explained_already_condemns_nobody(scene):
    scene.run(epoch=1, w1="n1", w2="n2", w3="n3")
    scene.disconnect("n1")
    assert scene.collective("w2", epoch=0) == []
    scene.exit("w3", signal=9)
    assert scene.collective("w2", epoch=1) == []
    assert scene.wait(10) == []
