"""Facts become incidents, one message for each cause; rules, quiet hours, escalation."""

from datetime import UTC, datetime

import pytest
from helpers.notifier import NOON, Desk, changed, failed, lost, recovered, rule, running
from hypothesis import given, settings
from hypothesis import strategies as st
from unicron_notifier.rules import Quiet
from unicron_notifier.state import FULL, MOST_INCIDENTS

from unicron.contracts import events
from unicron.contracts.events import Alert
from unicron.contracts.notices import IncidentAcknowledged, IncidentKind, NotificationFailed, NotificationSent, Phase
from unicron.contracts.plans import Plan, TaskShare
from unicron.contracts.queries import AcknowledgeIncident
from unicron.contracts.slowdowns import SlowdownDetected, SlowdownEnded, SlowWorker
from unicron.contracts.stragglers import StragglerDetected
from unicron.contracts.tasks import SlotRef, TaskSpec, TaskState
from unicron.contracts.watchdogs import AlertKind

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
    assert desk.notices_after(9.0) == []
    [notice] = [*desk.notices_after(1.0), *desk.sent][1:]
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
    desk.notices_after(10.0)
    desk.say(recovered("gpt", 1), recovered("llama"), chain="other", after=20.0)
    assert desk.notices_after(60.0) == []
    desk.say(recovered("bert", 1))
    [(phase, title)] = desk.notices_after()
    assert (phase, title) == ("over", "n2 is lost: 8 workers of 3 tasks (gpt, llama, bert)")
    [*_, notice] = desk.sent
    assert notice.lines[0] == "Over after 90 s."
    assert "gpt (had 5 workers): goes on with 1 worker" in notice.lines
    assert "n2 is not back yet: somebody should see why." in notice.lines
    assert notice.ended - notice.began == 90.0
    assert notice.lost_worker_s == pytest.approx(7 * 30 + 2 * 90)
    desk.say(ADMITTED, chain="back")
    assert desk.notices_after(3600.0) == []


def test_what_is_over_before_anybody_was_told_is_one_message():
    desk = three_tasks()
    lose_node(desk)
    desk.say(recovered("gpt"), recovered("llama"), recovered("bert"), after=4.0)
    assert desk.notices_after(3600.0) == [("over", "n2 is lost: 8 workers of 3 tasks (gpt, llama, bert)")]


def test_a_lost_node_without_workers_is_over_when_it_is_back_or_says_goodbye():
    for end in (ADMITTED, events.NodeGone(node="n2", source="registry")):
        desk = Desk()
        desk.say(events.NodeSuspected(node="n2", reason="eof", grace_s=2.0))
        desk.say(lost("n2"), after=2.0)
        assert desk.notices_after(10.0) == [("opened", "n2 is lost, and no task had workers there")]
        desk.say(end, chain="back", after=5.0)
        assert desk.notices_after() == [("over", "n2 is lost, and no task had workers there")]
        assert desk.sent[-1].lines[0] == "Over after 17 s.", "since it was suspected"
        assert not any("not back" in line for line in desk.sent[-1].lines)


def test_a_suspicion_alone_is_not_told():
    desk = Desk(rule(wait_s=0.0))
    desk.say(events.NodeSuspected(node="n2", reason="eof", grace_s=2.0))
    assert desk.notices_after(3600.0) == []
    assert desk.view().incidents == []
    desk.say(ADMITTED, chain="back")
    assert desk.core.state.incidents == {}


def test_a_failed_worker_is_told_with_what_is_done_about_it():
    desk = failing()
    assert desk.notices_after(10.0) == [("opened", "gpt-2 on n2 failed: exited_abnormally, severity 2")]
    assert any("starts the process again" in line for line in desk.sent[0].lines)
    desk.say(running("gpt", "n1", "n2"), after=5.0)
    assert desk.notices_after() == [("over", "gpt-2 on n2 failed: exited_abnormally, severity 2")]


def test_a_failure_that_changed_nothing_is_over_and_an_ended_chain_goes_on_where_it_fails_again():
    desk = Desk()
    desk.say(running("gpt", "n1", "n2"), failed(severity=3))
    assert [phase for phase, _ in desk.notices_after(60.0)] == ["over"]
    desk.say(failed(severity=2), changed("gpt", "recovering"))
    assert desk.notices_after(10.0) == [("updated", "gpt-2 on n2 failed: exited_abnormally, severity 2")]
    desk.say(recovered("gpt"))
    assert [phase for phase, _ in desk.notices_after()] == ["over"]


def test_what_gets_worse_is_told_again_as_an_update():
    desk = failing()
    desk.notices_after(10.0)
    desk.say(lost("n2"))
    assert desk.notices_after(10.0) == [("updated", "n2 is lost: 1 worker of 1 task (gpt)")]
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
        assert desk.notices_after(3600.0) == [("opened", "gpt has failed: ValueError: x")]
        desk.say(end, chain="user")
        assert desk.notices_after() == [("over", "gpt has failed: ValueError: x")]


def test_a_task_that_is_paused_or_ends_is_waited_for_no_longer():
    for end in (events.TaskPaused(task="gpt", source="registry"), changed("gpt", "finished")):
        desk = failing()
        desk.notices_after(10.0)
        desk.say(end, chain="user")
        assert [phase for phase, _ in desk.notices_after()] == ["over"]


def test_a_slow_task_is_one_incident_with_whoever_slows_it_down():
    desk = Desk()
    desk.say(SLOW)
    [(phase, title)] = desk.notices_after(10.0)
    assert (phase, title[:12]) == ("opened", "gpt is slow:")
    desk.say(STRAGGLER, chain="of the straggler", after=60.0)
    [(phase, _)] = desk.notices_after(10.0)
    assert phase == "updated"
    assert "Drain n1." in desk.sent[-1].lines
    ended = SlowdownEnded(**OF_FOUR, iteration=99, usual_s=1, recent_s=1, reason="as before")
    desk.say(ended, chain="end", after=20.0)
    assert [phase for phase, _ in desk.notices_after()] == ["over"]
    assert desk.sent[-1].lost_worker_s == pytest.approx(0.3 * 4 * 100.0)


def test_alerts_are_told_once_while_they_say_the_same_and_stand_with_their_chain():
    desk = Desk()
    for number in range(5):
        desk.say(events.Alert(text=f"saving failed {number} times", task="gpt"), chain=f"a{number}", after=1.0)
    assert desk.notices_after(10.0) == [("opened", "saving failed 0 times")]
    assert "The same again: 4 more." in desk.sent[0].lines
    desk.say(running("gpt", "n1"), failed(), changed("gpt", "recovering"), events.Alert(text="look at n2"), chain="f")
    assert [phase for phase, _ in desk.notices_after(10.0)] == ["opened"]
    assert "look at n2" in desk.sent[-1].lines


def test_a_clock_that_is_wrong_is_one_incident_which_ends_when_it_is_right():
    desk = Desk()
    about, wrong = {"node": "n1", "kind": AlertKind.CLOCK}, "the clock of n1 is 7200 s ahead of the detector's"
    right = events.Alert(text="the clock of n1 is right again", over=True, **about)
    desk.say(events.Alert(text=wrong, **about), chain="a")
    assert desk.notices_after(60.0) == [("opened", wrong)]
    desk.say(right, chain="b")
    assert [phase for phase, _ in desk.notices_after(60.0)] == ["over"]
    desk.say(right, chain="c")
    assert desk.notices_after(3600.0) == []


@given(st.lists(st.floats(-1e10, 1e10), min_size=2, max_size=20))
def test_texts_that_differ_in_a_time_only_are_one_message(times):
    desk = Desk()
    for number, at in enumerate(times):
        error = f"Expected a time - at `$.at`, which is {at!r}, {at:+.0f} s from now"
        letter = events.DeadLetter(subject="unicron.v1.evt.n1.WorkerExited.gpt", error=error)
        alert = events.Alert(text=f"a message on {letter.subject} could not be used: {error}")
        desk.say(letter, alert, chain=f"l{number}", after=1.0)
    desk.notices_after(60.0)
    assert len(desk.sent) == 1


def test_a_dead_letter_and_its_alert_of_however_many_services_are_one_message():
    desk = Desk()
    letter = events.DeadLetter(subject="unicron.v1.evt.n1.X.y", error="it is no message")
    alert = events.Alert(text=f"a message on {letter.subject} could not be used: {letter.error}")
    for service in ("registry", "detector", "notifier"):
        desk.say(letter, alert, chain=f"of {service}")
    assert [phase for phase, _ in desk.notices_after(3600.0)] == ["opened"]


def test_what_happened_before_anybody_asked_to_be_told_is_not_told():
    desk = Desk()
    desk.now -= 1000.0
    old = (failed(), changed("gpt", "recovering"), events.Alert(text="old"))
    desk.say(running("gpt", "n1", "n2", "n2"), *old, chain="old")
    desk.now += 1000.0
    assert desk.notices_after(3600.0) == []
    desk.say(running("gpt", "n1", "n2", "n2"), lost("n2"), changed("gpt", "recovering"))
    assert desk.notices_after(10.0) == [("opened", "n2 is lost: 2 workers of 1 task (gpt)")]


def test_text_from_the_bus_steers_nothing_and_ids_are_safe_to_name():
    desk = Desk(link="https://unicron.example/")
    text = "bad \x1b[2J\r\nSubject: you won\u202e"
    desk.say(events.Alert(text=text), chain="../x y\n")
    desk.notices_after(10.0)
    [notice] = desk.sent
    assert notice.title == r"bad \u001b[2J\u000d Subject: you won\u202e"
    assert notice.title.isprintable()
    assert notice.incident.isalnum()
    assert notice.link == "https://unicron.example/failures/..%2Fx%20y%0A"


# --- routing ----------------------------------------------------------------------------------------------------------


NIGHT = {"from": "22:00", "to": "07:00", "zone": "Europe/Berlin", "through": [1]}
HOUR = 3600.0


def fail(desk, chain="c1", after=0.0, task="gpt", **fields):
    """A worker of a task of two fails."""
    desk.say(running(task, "n1", "n2"), chain="before", after=after)
    desk.say(failed(task=task, **fields), changed(task, "recovering"), chain=chain)


# --- rules -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, True),
        ({"severity": [2]}, True),
        ({"severity": [1, 3]}, False),
        ({"kinds": ["failure"]}, True),
        ({"kinds": ["node_lost", "alert"]}, False),
        ({"status": ["exited_abnormally"]}, True),
        ({"status": ["ecc_error"]}, False),
        ({"tasks": ["bert", "g?t*"]}, True),
        ({"tasks": ["bert"]}, False),
        ({"tasks": ["gpt"], "severity": [2], "kinds": ["alert"]}, False),
    ],
)
def test_a_rule_is_about_what_meets_all_its_conditions(fields, told):
    desk = Desk(rule(**fields))
    fail(desk)
    assert bool(desk.notices_after(60.0)) == told


def test_a_channel_that_several_rules_name_is_told_once():
    desk = Desk(rule("ops"), rule("ops", "mail", wait_s=30.0), rule("late", wait_s=60.0))
    fail(desk)
    desk.wait(10.0)
    assert [each.channel for each in desk.deliver()] == ["ops"]
    desk.wait(20.0)
    assert [each.channel for each in desk.deliver()] == ["mail"]
    desk.say(recovered("gpt"))
    desk.wait(0.0)
    assert {each.channel for each in desk.deliver()} == {"ops", "mail"}
    desk.wait(30.0)
    assert [(each.channel, str(each.phase)) for each in desk.deliver()] == [("late", "over")]


# --- quiet hours -----------------------------------------------------------------------------------------------------


def at(text):
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("moment", "holds", "left_h"),
    [
        ("2026-07-24T19:59", False, None),
        ("2026-07-24T20:00", True, 9.0),
        ("2026-07-25T04:59:30", True, 0.5 / 60),
        ("2026-07-25T05:00", False, None),
        ("2026-01-24T20:59", False, None),
        ("2026-01-24T21:00", True, 9.0),
        ("2026-03-28T21:00", True, 8.0),  # the clock is put forward
        ("2026-10-24T20:00", True, 10.0),  # and back
    ],
)
def test_quiet_hours_go_by_their_time_zone(moment, holds, left_h):
    quiet = Quiet(begin="22:00", end="07:00", zone="Europe/Berlin", through=[1])
    assert quiet.holds(2, at(moment)) == holds
    assert not quiet.holds(1, at(moment))
    if left_h is not None:
        assert quiet.left_s(at(moment)) == pytest.approx(left_h * HOUR)


def test_hours_of_one_day():
    quiet = Quiet(begin="12:00", end="13:30", zone="UTC")
    assert [quiet.holds(1, NOON + minutes * 60) for minutes in (-1, 0, 89, 90)] == [False, True, True, False]


def test_what_comes_in_quiet_hours_is_one_summary_when_they_are_over():
    desk = Desk(rule(quiet=NIGHT), at=at("2026-07-24T20:30"))
    fail(desk, "a")
    desk.say(recovered("gpt"), after=60.0)
    fail(desk, "b", task="bert", worker="bert-1", after=60.0)
    desk.say(Alert(text="saving fails", task="bert"), chain="s", after=60.0)
    assert desk.notices_after(4 * HOUR) == []
    assert all(each.held == ["ops"] for each in desk.view().incidents)
    desk.restart()
    assert desk.notices_after(4 * HOUR) == []
    [(phase, title)] = desk.notices_after(HOUR)
    assert (phase, title) == ("summary", "3 messages held back in quiet hours")
    [notice] = desk.sent
    assert datetime.fromtimestamp(notice.decided, UTC).hour == 5
    assert notice.lines[0] == "3 messages held back: 1 incident over, 1 going on."
    assert "bert:1 (bert-1) on n2 failed: exited_abnormally, severity 2 (going on) [b]" in notice.lines
    assert any("(over after" in line and "[a]" in line for line in notice.lines)
    assert desk.notices_after(12 * HOUR) == [], "once"
    desk.say(recovered("bert"))
    assert [phase for phase, _ in desk.notices_after()] == ["over"]


def test_severity_1_goes_through_where_the_rule_says_so():
    for through, told in ([1], 1), ([], 0):
        desk = Desk(rule(quiet=NIGHT | {"through": through}), at=at("2026-07-24T20:30"))
        desk.say(running("gpt", "n1", "n2"), lost("n2"), changed("gpt", "recovering"))
        assert len(desk.notices_after(HOUR)) == told


def test_what_was_told_in_the_evening_and_is_over_at_night_waits_for_the_morning():
    desk = Desk(rule(quiet=NIGHT), at=at("2026-07-24T19:50"))
    fail(desk)
    assert [phase for phase, _ in desk.notices_after(60.0)] == ["opened"]
    desk.say(recovered("gpt"), after=HOUR)
    assert desk.notices_after(HOUR) == []
    assert [phase for phase, _ in desk.notices_after(8 * HOUR)] == ["summary"]


def test_what_gets_worse_at_night_is_told_then():
    desk = Desk(rule(quiet=NIGHT), at=at("2026-07-24T20:30"))
    fail(desk)
    assert desk.notices_after(60.0) == []
    desk.say(lost("n2"))
    assert desk.notices_after(10.0) == [("opened", "n2 is lost: 1 worker of 1 task (gpt)")]
    assert desk.notices_after(12 * HOUR) == []


# --- escalation and acknowledging ------------------------------------------------------------------------------------

CALLS = {"escalate": {"after_min": 15, "channels": ["boss"]}}


def test_others_are_called_where_nobody_acknowledges():
    desk = Desk(rule(**CALLS))
    fail(desk)
    desk.notices_after(10.0)
    desk.restart()
    assert desk.notices_after(15 * 60 - 1.0) == []
    assert [phase for phase, _ in desk.notices_after(1.0)] == ["escalated"]
    assert desk.sent[-1].channel == "boss"
    assert any("Nobody has acknowledged it for 15 min" in line for line in desk.sent[-1].lines)
    desk.ack("c1")
    desk.wait(0.0)
    assert {(each.channel, each.by) for each in desk.deliver()} == {("ops", "ada"), ("boss", "ada")}
    desk.say(recovered("gpt"))
    desk.wait(0.0)
    assert {each.channel for each in desk.deliver()} == {"ops", "boss"}
    assert desk.notices_after(24 * HOUR) == []


def test_nobody_else_is_called_once_it_is_acknowledged_or_over():
    desk = Desk(rule(**CALLS))
    fail(desk)
    desk.notices_after(10.0)
    reply = desk.ack("c1", "ada\x1b[1m")
    assert r"ada\u001b[1m sees to c1" in reply.text
    assert [each.by for each in desk.said if isinstance(each, IncidentAcknowledged)] == [r"ada\u001b[1m"]
    [(phase, _)] = desk.notices_after(0.0)
    assert (phase, desk.sent[-1].by) == ("acknowledged", r"ada\u001b[1m")
    assert desk.notices_after(24 * HOUR) == []
    desk = Desk(rule(**CALLS))
    fail(desk)
    desk.notices_after(10.0)
    desk.say(recovered("gpt"))
    assert [phase for phase, _ in desk.notices_after(24 * HOUR)] == ["over"]


def test_no_one_is_called_in_quiet_hours_before_they_are_over():
    desk = Desk(rule(quiet=NIGHT, **CALLS), at=at("2026-07-24T19:55"))
    fail(desk)
    assert [phase for phase, _ in desk.notices_after(60.0)] == ["opened"]
    assert desk.notices_after(9 * HOUR) == []
    assert [phase for phase, _ in desk.notices_after(0.1 * HOUR)] == ["escalated"]


def test_an_acknowledgement_is_refused_with_what_there_is():
    desk = Desk(rule(), rule("mail"))
    fail(desk, "abc1")
    fail(desk, "abd2", task="bert")
    for name, says in (
        ("x", "there is no incident 'x'; going on are abc1, abd2"),
        ("ab", "2 incidents begin with 'ab'"),
        ("", "there is no incident ''"),
    ):
        assert says in desk.ack(name).error
    assert "no name acknowledges it" in desk.core.answer(AcknowledgeIncident(incident="abc", by=" \n"))[0].error
    assert desk.core.state.incidents["abc1"].by == ""
    assert "sees to abc1" in desk.ack("abc").text
    assert "ada sees to abc1 already" in desk.ack("abc", "bob").text
    desk.say(recovered("gpt"))
    assert "abc1 is over" in desk.ack("abc1").error


# --- deliveries ------------------------------------------------------------------------------------------------------


def test_what_became_of_a_delivery_is_a_fact_and_said_once():
    desk = Desk(rule("ops", "mail"))
    fail(desk)
    desk.wait(10.0)
    first, second = desk.pending()
    desk.deliver(first.channel)
    desk.give_up(second)
    [sent] = [each for each in desk.said if isinstance(each, NotificationSent)]
    assert (sent.delivery, sent.channel, sent.attempts) == (first.id, first.channel, 1)
    [not_sent] = [each for each in desk.said if isinstance(each, NotificationFailed)]
    assert not_sent.delivery == second.id
    before = len(desk.said)
    desk.give_up(second)
    desk.give_up(first)
    assert len(desk.said) == before, "nobody waits for these any more"
    assert desk.pending() == []


def test_that_a_channel_is_broken_is_told_by_the_others_once_and_never_without_end():
    desk = Desk(rule("ops", "mail"))
    fail(desk, "a")
    fail(desk, "b", task="bert")
    desk.wait(10.0)
    alerts = []
    for _ in range(50):  # all that either is to say is given up, and what that leads to comes back by the journal
        for notice in desk.pending():
            out = desk.give_up(notice)
            for each in [each for each in out if isinstance(each, Alert)]:
                alerts.append(each.text)
                desk.say(Alert(text=each.text, source="notifier", id=f"alert{len(alerts)}"), chain="a")
        desk.wait(60.0)
    assert len(alerts) == 2, "one for each channel"
    assert "channel mail does not deliver: it burns" in alerts[0] + alerts[1]
    assert desk.pending() == []


def test_a_broken_channel_is_named_by_another_one_and_is_whole_when_it_delivers_again():
    desk = Desk(rule("ops", "mail"))
    fail(desk, "a")
    desk.wait(10.0)
    desk.give_up(desk.pending("mail")[0])
    desk.say(Alert(text="channel mail does not deliver: it burns", source="notifier", id="own"), chain="a")
    desk.deliver("ops")
    desk.wait(10.0)
    [notice] = desk.pending()
    assert (notice.channel, notice.title) == ("ops", "channel mail does not deliver: it burns")
    assert [each.broken for each in desk.view().channels] == ["it burns", ""]
    desk.say(recovered("gpt"))
    desk.wait(0.0)
    desk.deliver()
    assert [each.broken for each in desk.view().channels] == ["", ""]


def test_what_a_channel_has_not_taken_yet_is_replaced_by_what_it_has_become():
    desk = Desk()
    fail(desk)
    desk.wait(10.0)
    assert [str(each.phase) for each in desk.pending()] == ["opened"]
    desk.say(recovered("gpt"))
    desk.wait(0.0)
    assert [str(each.phase) for each in desk.pending()] == ["over"]


def test_a_channel_that_takes_nothing_has_a_bounded_queue_and_the_rest_is_summed_up():
    desk = Desk(rule("ops"), rule("mail"))
    for number in range(FULL + 7):
        fail(desk, f"c{number}", task=f"t{number}", worker=f"t{number}-1")
    desk.wait(10.0)
    assert len(desk.pending("ops")) == len(desk.pending("mail")) == FULL
    desk.deliver("ops")
    [notice] = desk.deliver("ops")
    assert notice.title == "7 messages held back since too much waited"
    assert len(notice.lines) == 8
    assert len(desk.pending("mail")) == FULL


def test_incidents_are_forgotten_when_there_are_too_many():
    desk = Desk(rule(severity=[1]))
    for number in range(MOST_INCIDENTS + 50):
        desk.say(Alert(text=f"{'x' * number} is odd"), chain=f"c{number}")
    assert len(desk.core.state.incidents) == MOST_INCIDENTS


# --- other rules -----------------------------------------------------------------------------------------------------


def test_new_rules_tell_what_goes_on_and_not_what_is_over():
    desk = Desk()
    fail(desk, "old")
    desk.say(recovered("gpt"))
    fail(desk, "now", task="bert")
    desk.notices_after(60.0)
    desk.restart(rule("mail"))
    assert [each.channel for each in desk.pending()] == []
    desk.wait(10.0)
    assert [(each.channel, each.incident) for each in desk.deliver()] == [("mail", "now")]


def test_without_rules_nothing_is_done_and_nothing_is_told_later():
    desk = Desk()
    fail(desk)
    desk.notices_after(60.0)
    desk.restart()
    desk.core.state.routed = True
    desk.restart(rule(severity=[3]))
    desk.routing = type(desk.routing)()
    desk.restart()
    assert list(desk.core.handlers) == [next(iter(desk.core.handlers))]
    assert desk.core.state.incidents == {}
    desk.restart(rule())
    desk.now -= 10.0
    fail(desk, "meanwhile")
    assert desk.notices_after(60.0) == []


# --- a property ------------------------------------------------------------------------------------------------------

STEPS = st.lists(
    st.one_of(
        *(st.tuples(st.just(what), st.integers(0, 3)) for what in ("fail", "lose", "recover", "ack")),
        st.tuples(st.just("wait"), st.sampled_from([0, 1, 5, 10, 20, 4000])),
        st.tuples(st.sampled_from(["deliver", "give up"]), st.sampled_from(["ops", "mail"])),
        st.tuples(st.just("again"), st.integers(0, 20)),
        st.just(("restart", 0)),
    ),
    max_size=30,
)


def again(desk, ended, which):
    """An answer comes twice."""
    before = desk.pending()
    if which < len(ended):
        desk.give_up(ended[which])
    assert desk.pending() == before


def lose(desk, which):
    desk.say(running(f"t{which}", "n1", f"m{which}"), chain="before")
    desk.say(lost(f"m{which}"), changed(f"t{which}", "recovering"), chain=f"c{which}")


def give_up(desk, ended, channel):
    for notice in desk.pending(channel):
        ended.append(notice)
        desk.give_up(notice)


DONE = {
    "fail": lambda desk, _, which: fail(desk, f"c{which}", task=f"t{which}", worker=f"t{which}-1"),
    "lose": lambda desk, _, which: lose(desk, which),
    "recover": lambda desk, _, which: desk.say(recovered(f"t{which}"), chain="elsewhere"),
    "ack": lambda desk, _, which: desk.ack(f"c{which}"),
    "wait": lambda desk, _, seconds: desk.wait(float(seconds)),
    "deliver": lambda desk, ended, channel: ended.extend(desk.deliver(channel)),
    "give up": give_up,
    "again": again,
    "restart": lambda desk, *_: desk.restart(),
}


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_each_channel_hears_of_each_cause_once_and_in_the_end_how_it_stands(steps):
    desk = Desk(rule("ops"), rule("ops", "mail", wait_s=0.0, severity=[1]))
    ended = []
    for what, which in steps:
        DONE[what](desk, ended, which)
        waiting = [each.id for each in desk.pending()]
        assert len(set(waiting)) == len(waiting)
        assert not {each.id for each in ended} & set(waiting), "what has ended is never delivered again"
        assert len({(each.channel, each.incident) for each in desk.pending()}) == len(waiting), "one of each cause"
    desk.wait(20.0)
    ended += desk.deliver()
    ids = [each.id for each in ended]
    assert len(set(ids)) == len(ids)
    for incident in desk.core.state.incidents.values():
        last = {each.channel: each for each in ended if each.incident == incident.id}
        assert "ops" in last, "nobody is left out"
        for each in last.values():
            assert bool(each.ended) == bool(incident.ended), "the last word is how it stands"
            assert each.id == f"{incident.id}.{incident.version}.{each.channel}"
        opened = [each for each in ended if each.incident == incident.id and str(each.phase) == "opened"]
        assert len(opened) == len({each.channel for each in opened}), "one message a cause"


def test_who_is_left_of_a_membership_is_told_by_the_rank_that_it_had():
    desk, both = Desk(), running("gpt", "n1", "n2")
    left = events.TaskStateChanged(task="gpt", state=TaskState.RECOVERING, members=both.members[1:])
    desk.say(both, left, failed(worker="gpt-1"))
    assert desk.notices_after(10.0) == [("opened", "gpt:1 (gpt-1) on n2 failed: exited_abnormally, severity 2")]
