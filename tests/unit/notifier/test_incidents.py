"""Facts become incidents: one message for each cause, and one when it is over."""

import pytest
from helpers.notifier import Desk, changed, failed, lost, recovered, rule, running

from unicron.contracts import events
from unicron.contracts.notices import IncidentKind, Phase
from unicron.contracts.plans import Plan, TaskShare
from unicron.contracts.slowdowns import SlowdownDetected, SlowdownEnded, SlowWorker
from unicron.contracts.stragglers import StragglerDetected
from unicron.contracts.tasks import SlotRef, TaskSpec

OF_FOUR = {"task": "gpt", "epoch": 1, "world_size": 4}
CULPRIT = SlowWorker(worker="gpt-1", node="n1", rank=1, factor=2.0)
SLOW = SlowdownDetected(**OF_FOUR, iteration=9, usual_s=1.0, recent_s=2.0, workers=[CULPRIT])
FOUND = {"slowdown": 1.5, "waste": 0.3, "diagnosis": "slow-worker", "node": "n1", "worker": "gpt-1"}
STRAGGLER = StragglerDetected(**OF_FOUR, first=1, last=9, steps=9, **FOUND, cure="Drain n1.")
ADMITTED = events.NodeAdmitted(node="n2", incarnation="1", host="n2", slots=[], source="registry")


def failing():
    desk = Desk()
    desk.say(running("gpt", "n1", "n2"), failed(), changed("gpt", "recovering"))
    return desk


def three_tasks(**fields):
    desk = Desk(rule(**fields))
    desk.say(running("gpt", "n1", "n2", "n2", "n2", "n2"), running("llama", "n2", "n2"), running("bert", "n2", "n2"))
    return desk


def lose_node(desk, after=0.0):
    desk.say(lost("n2"), *(changed(task, "recovering") for task in ("gpt", "llama", "bert")), after=after)


def test_a_lost_node_is_one_message_that_names_all_its_workers_and_tasks():
    desk = three_tasks()
    lose_node(desk)
    shares = [
        TaskShare(task="gpt", slots=[SlotRef(node="n1", slot=0)], before=5),
        TaskShare(task="bert", slots=[], before=2, reason="no node is free"),
    ]
    plan = Plan(number=2, trigger="node_lost:n2", workers=1, shares=shares)
    desk.say(events.PlanDecided(plan=plan, source="planner"))
    assert desk.told(9.0) == []
    [notice] = [*desk.told(1.0), *desk.sent][1:]
    assert (notice.phase, notice.severity, notice.kind) == (Phase.OPENED, 1, IncidentKind.NODE_LOST)
    assert notice.title == "n2 is lost: 8 workers of 3 tasks (gpt, llama, bert)"
    text = "\n".join(notice.lines)
    for part in (
        "Why: its connection ended",
        "gpt (had 5 workers): is recovering; is given 1 of its 5 workers",
        "bert (had 2 workers): is recovering; waits for workers (no node is free)",
        "its tasks go on elsewhere",
        "Cost so far: about 0.03 worker-hours",  # 9 workers for 10 s
        "unicron notify ack c1",
    ):
        assert part in text
    assert len(desk.decided()) == 1


def test_it_is_over_when_all_its_tasks_are_well_and_says_how_long_that_took():
    desk = three_tasks()
    lose_node(desk)
    desk.told(10.0)
    desk.say(recovered("gpt", 1), recovered("llama"), chain="other", after=20.0)
    assert desk.told(60.0) == []
    desk.say(recovered("bert", 1))
    [(phase, title)] = desk.told()
    assert (phase, title) == ("over", "n2 is lost: 8 workers of 3 tasks (gpt, llama, bert)")
    [*_, notice] = desk.sent
    assert notice.lines[0] == "Over after 90 s."
    assert "gpt (had 5 workers): goes on with 1 worker" in notice.lines
    assert "n2 is not back yet: somebody should see why." in notice.lines
    assert notice.ended - notice.began == 90.0
    assert notice.lost_worker_s == pytest.approx(7 * 30 + 2 * 90)
    desk.say(ADMITTED, chain="back")
    assert desk.told(3600.0) == []


def test_what_is_over_before_anybody_was_told_is_one_message():
    desk = three_tasks()
    lose_node(desk)
    desk.say(recovered("gpt"), recovered("llama"), recovered("bert"), after=4.0)
    assert desk.told(3600.0) == [("over", "n2 is lost: 8 workers of 3 tasks (gpt, llama, bert)")]


def test_a_lost_node_without_workers_is_over_when_it_is_back_or_says_goodbye():
    for end in (ADMITTED, events.NodeGone(node="n2", source="registry")):
        desk = Desk()
        desk.say(events.NodeSuspected(node="n2", reason="eof", grace_s=2.0))
        desk.say(lost("n2"), after=2.0)
        assert desk.told(10.0) == [("opened", "n2 is lost, and no task had workers there")]
        desk.say(end, chain="back", after=5.0)
        assert desk.told() == [("over", "n2 is lost, and no task had workers there")]
        assert desk.sent[-1].lines[0] == "Over after 17 s.", "since it was suspected"
        assert not any("not back" in line for line in desk.sent[-1].lines)


def test_a_suspicion_alone_is_not_told():
    desk = Desk(rule(wait_s=0.0))
    desk.say(events.NodeSuspected(node="n2", reason="eof", grace_s=2.0))
    assert desk.told(3600.0) == []
    assert desk.view().incidents == []
    desk.say(ADMITTED, chain="back")
    assert desk.core.state.incidents == {}


def test_a_failed_worker_is_told_with_what_is_done_about_it():
    desk = failing()
    assert desk.told(10.0) == [("opened", "gpt-2 on n2 failed: exited_abnormally, severity 2")]
    assert any("starts the process again" in line for line in desk.sent[0].lines)
    desk.say(running("gpt", "n1", "n2"), after=5.0)
    assert desk.told() == [("over", "gpt-2 on n2 failed: exited_abnormally, severity 2")]


def test_a_failure_that_changed_nothing_is_over_and_an_ended_chain_goes_on_where_it_fails_again():
    desk = Desk()
    desk.say(running("gpt", "n1", "n2"), failed(severity=3))
    assert [phase for phase, _ in desk.told(60.0)] == ["over"]
    desk.say(failed(severity=2), changed("gpt", "recovering"))
    assert desk.told(10.0) == [("updated", "gpt-2 on n2 failed: exited_abnormally, severity 2")]
    desk.say(recovered("gpt"))
    assert [phase for phase, _ in desk.told()] == ["over"]


def test_what_gets_worse_is_told_again_as_an_update():
    desk = failing()
    desk.told(10.0)
    desk.say(lost("n2"))
    assert desk.told(10.0) == [("updated", "n2 is lost: 1 worker of 1 task (gpt)")]
    sent = [(each.first_severity, each.severity, str(each.label)) for each in desk.sent]
    assert sent == [(2, 2, "failure"), (2, 1, "failure")], "what receivers route by does not change"


def test_a_failed_task_stays_until_a_user_has_seen_to_it():
    for end in (
        events.TaskRemoved(task="gpt", source="registry"),
        events.TaskSubmitted(task="gpt", spec=TaskSpec(name="gpt", command=["x"]), source="registry"),
    ):
        desk = Desk()
        desk.say(running("gpt", "n1"), events.TaskBroken(task="gpt", reason="ValueError: x"))
        desk.say(changed("gpt", "failed", "ValueError: x"))
        assert desk.told(3600.0) == [("opened", "gpt has failed: ValueError: x")]
        desk.say(end, chain="user")
        assert desk.told() == [("over", "gpt has failed: ValueError: x")]


def test_a_task_that_is_paused_or_ends_is_waited_for_no_longer():
    for end in (events.TaskPaused(task="gpt", source="registry"), changed("gpt", "finished")):
        desk = failing()
        desk.told(10.0)
        desk.say(end, chain="user")
        assert [phase for phase, _ in desk.told()] == ["over"]


def test_a_slow_task_is_one_incident_with_whoever_slows_it_down():
    desk = Desk()
    desk.say(SLOW)
    [(phase, title)] = desk.told(10.0)
    assert (phase, title[:12]) == ("opened", "gpt is slow:")
    desk.say(STRAGGLER, chain="of the straggler", after=60.0)
    [(phase, _)] = desk.told(10.0)
    assert phase == "updated"
    assert "Drain n1." in desk.sent[-1].lines
    ended = SlowdownEnded(**OF_FOUR, iteration=99, usual_s=1, recent_s=1, reason="as before")
    desk.say(ended, chain="end", after=20.0)
    assert [phase for phase, _ in desk.told()] == ["over"]
    assert desk.sent[-1].lost_worker_s == pytest.approx(0.3 * 4 * 100.0)


def test_alerts_are_told_once_while_they_say_the_same_and_stand_with_their_chain():
    desk = Desk()
    for number in range(5):
        desk.say(events.Alert(text=f"saving failed {number} times", task="gpt"), chain=f"a{number}", after=1.0)
    assert desk.told(10.0) == [("opened", "saving failed 0 times")]
    assert "The same again: 4 more." in desk.sent[0].lines
    desk.say(running("gpt", "n1"), failed(), changed("gpt", "recovering"), events.Alert(text="look at n2"), chain="f")
    assert [phase for phase, _ in desk.told(10.0)] == ["opened"]
    assert "look at n2" in desk.sent[-1].lines


def test_a_dead_letter_and_its_alert_of_however_many_services_are_one_message():
    desk = Desk()
    letter = events.DeadLetter(subject="unicron.v1.evt.n1.X.y", error="it is no message")
    alert = events.Alert(text=f"a message on {letter.subject} could not be used: {letter.error}")
    for service in ("registry", "detector", "notifier"):
        desk.say(letter, alert, chain=f"of {service}")
    assert [phase for phase, _ in desk.told(3600.0)] == ["opened"]


def test_what_happened_before_anybody_asked_to_be_told_is_not_told():
    desk = Desk()
    desk.now -= 1000.0
    old = (failed(), changed("gpt", "recovering"), events.Alert(text="old"))
    desk.say(running("gpt", "n1", "n2", "n2"), *old, chain="old")
    desk.now += 1000.0
    assert desk.told(3600.0) == []
    desk.say(running("gpt", "n1", "n2", "n2"), lost("n2"), changed("gpt", "recovering"))
    assert desk.told(10.0) == [("opened", "n2 is lost: 2 workers of 1 task (gpt)")]


def test_text_from_the_bus_steers_nothing_and_ids_are_safe_to_name():
    desk = Desk(link="https://unicron.example/")
    text = "bad \x1b[2J\r\nSubject: you won\u202e"
    desk.say(events.Alert(text=text), chain="../x y\n")
    desk.told(10.0)
    [notice] = desk.sent
    assert notice.title == r"bad \u001b[2J\u000d Subject: you won\u202e"
    assert notice.title.isprintable()
    assert notice.incident.isalnum()
    assert notice.link == "https://unicron.example/failures/..%2Fx%20y%0A"
