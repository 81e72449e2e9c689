"""Who is told when: rules, quiet hours, escalation, acknowledging, and what became of deliveries."""

from datetime import UTC, datetime

import pytest
from helpers.notifier import NOON, Desk, changed, failed, lost, recovered, rule, running
from hypothesis import given, settings
from hypothesis import strategies as st
from unicron_notifier.rules import Quiet
from unicron_notifier.state import FULL, MOST_INCIDENTS

from unicron.contracts.events import Alert
from unicron.contracts.notices import IncidentAcknowledged, NotificationFailed, NotificationSent
from unicron.contracts.queries import AcknowledgeIncident

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
    assert bool(desk.told(60.0)) == told


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
    assert desk.told(4 * HOUR) == []
    assert all(each.held == ["ops"] for each in desk.view().incidents)
    desk.restart()
    assert desk.told(4 * HOUR) == []
    [(phase, title)] = desk.told(HOUR)
    assert (phase, title) == ("summary", "3 messages held back in quiet hours")
    [notice] = desk.sent
    assert datetime.fromtimestamp(notice.decided, UTC).hour == 5
    assert notice.lines[0] == "3 messages held back: 1 incident over, 1 going on."
    assert "bert-1 on n2 failed: exited_abnormally, severity 2 (going on) [b]" in notice.lines
    assert any("(over after" in line and "[a]" in line for line in notice.lines)
    assert desk.told(12 * HOUR) == [], "once"
    desk.say(recovered("bert"))
    assert [phase for phase, _ in desk.told()] == ["over"]


def test_severity_1_goes_through_where_the_rule_says_so():
    for through, told in ([1], 1), ([], 0):
        desk = Desk(rule(quiet=NIGHT | {"through": through}), at=at("2026-07-24T20:30"))
        desk.say(running("gpt", "n1", "n2"), lost("n2"), changed("gpt", "recovering"))
        assert len(desk.told(HOUR)) == told


def test_what_was_told_in_the_evening_and_is_over_at_night_waits_for_the_morning():
    desk = Desk(rule(quiet=NIGHT), at=at("2026-07-24T19:50"))
    fail(desk)
    assert [phase for phase, _ in desk.told(60.0)] == ["opened"]
    desk.say(recovered("gpt"), after=HOUR)
    assert desk.told(HOUR) == []
    assert [phase for phase, _ in desk.told(8 * HOUR)] == ["summary"]


def test_what_gets_worse_at_night_is_told_then():
    desk = Desk(rule(quiet=NIGHT), at=at("2026-07-24T20:30"))
    fail(desk)
    assert desk.told(60.0) == []
    desk.say(lost("n2"))
    assert desk.told(10.0) == [("opened", "n2 is lost: 1 worker of 1 task (gpt)")]
    assert desk.told(12 * HOUR) == []


# --- escalation and acknowledging ------------------------------------------------------------------------------------

CALLS = {"escalate": {"after_min": 15, "channels": ["boss"]}}


def test_others_are_called_where_nobody_acknowledges():
    desk = Desk(rule(**CALLS))
    fail(desk)
    desk.told(10.0)
    desk.restart()
    assert desk.told(15 * 60 - 1.0) == []
    assert [phase for phase, _ in desk.told(1.0)] == ["escalated"]
    assert desk.sent[-1].channel == "boss"
    assert any("Nobody has acknowledged it for 15 min" in line for line in desk.sent[-1].lines)
    desk.ack("c1")
    desk.wait(0.0)
    assert {(each.channel, each.by) for each in desk.deliver()} == {("ops", "ada"), ("boss", "ada")}
    desk.say(recovered("gpt"))
    desk.wait(0.0)
    assert {each.channel for each in desk.deliver()} == {"ops", "boss"}
    assert desk.told(24 * HOUR) == []


def test_nobody_else_is_called_once_it_is_acknowledged_or_over():
    desk = Desk(rule(**CALLS))
    fail(desk)
    desk.told(10.0)
    reply = desk.ack("c1", "ada\x1b[1m")
    assert r"ada\u001b[1m sees to c1" in reply.text
    assert [each.by for each in desk.said if isinstance(each, IncidentAcknowledged)] == [r"ada\u001b[1m"]
    [(phase, _)] = desk.told(0.0)
    assert (phase, desk.sent[-1].by) == ("acknowledged", r"ada\u001b[1m")
    assert desk.told(24 * HOUR) == []
    desk = Desk(rule(**CALLS))
    fail(desk)
    desk.told(10.0)
    desk.say(recovered("gpt"))
    assert [phase for phase, _ in desk.told(24 * HOUR)] == ["over"]


def test_no_one_is_called_in_quiet_hours_before_they_are_over():
    desk = Desk(rule(quiet=NIGHT, **CALLS), at=at("2026-07-24T19:55"))
    fail(desk)
    assert [phase for phase, _ in desk.told(60.0)] == ["opened"]
    assert desk.told(9 * HOUR) == []
    assert [phase for phase, _ in desk.told(0.1 * HOUR)] == ["escalated"]


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
    assert "who acknowledges it?" in desk.core.answer(AcknowledgeIncident(incident="abc", by=" \n"))[0].error
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
    desk.told(60.0)
    desk.restart(rule("mail"))
    assert [each.channel for each in desk.pending()] == []
    desk.wait(10.0)
    assert [(each.channel, each.incident) for each in desk.deliver()] == [("mail", "now")]


def test_without_rules_nothing_is_done_and_nothing_is_told_later():
    desk = Desk()
    fail(desk)
    desk.told(60.0)
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
    assert desk.told(60.0) == []


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
