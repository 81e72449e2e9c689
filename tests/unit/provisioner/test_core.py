"""The provisioner's decisions: how many nodes there are to be, and what is asked for, replaced and given back."""

import itertools

import pytest
from helpers.provisioner import Yard, lost, pool
from hypothesis import given, settings
from hypothesis import strategies as st
from unicron_provisioner.core import ProvisionerCore

from unicron.contracts.base import Answer
from unicron.contracts.events import (
    Alert,
    MachineAsked,
    MachineDelivered,
    MachineRefused,
    MachineReleased,
    MachineRetired,
    NodeAdmitted,
    NodeDrained,
    NodeLeaving,
    ReplacementDelayed,
    TaskPaused,
    TaskRemoved,
)
from unicron.contracts.failures import Severity
from unicron.contracts.pools import Stage
from unicron.contracts.tasks import Slot

HOUR_S = 3600.0


def three(**fields):
    """Return a yard with three nodes, n1 to n3."""
    yard = Yard(pool(**{"min": 3, "max": 8, **fields}))
    if "min" in fields:
        yard.submit("first", most=3)
        yard.say(TaskRemoved(task="first"))
    assert yard.nodes == ["n1", "n2", "n3"]
    yard.said.clear()
    yard.calls.clear()
    return yard


# --- how many ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "most", "nodes"),
    [
        pytest.param({"min": 2}, 0, 2, id="at-least-the-minimum"),
        pytest.param({}, 5, 5, id="what-tasks-can-use"),
        pytest.param({"slots": 2}, 5, 3, id="by-the-slots-of-a-node"),
        pytest.param({"spares": 2}, 3, 5, id="and-spares"),
        pytest.param({"max": 4, "spares": 2}, 9, 4, id="at-most-the-maximum"),
    ],
)
def test_a_pool_has_as_many_nodes_as_tasks_can_use_and_its_spares(fields, most, nodes):
    yard = Yard(pool(**fields))
    if most:
        yard.submit(most=most)
    yard.wait(20)
    assert len(yard.nodes) == len(yard.there) == nodes
    assert yard.view.wanted == nodes


def test_nodes_outside_of_all_pools_serve_first_and_pools_in_their_order():
    yard = Yard(pool("a", max=2), pool("b"))
    yard.join(node="own", pool_name="", slots=3)
    yard.submit(most=9)
    assert sorted(id_[0] for id_ in yard.there) == ["a", "a", "b", "b", "b", "b"]


def test_a_paused_or_removed_task_can_use_nothing():
    yard = Yard()
    yard.submit("gpt", 2)
    yard.submit("bert", 3)
    yard.say(TaskPaused(task="gpt"), TaskRemoved(task="bert"))
    assert yard.view.wanted == 0


def test_without_pools_it_listens_to_nothing():
    assert len(Yard(pool()).core.handlers) > 2
    assert len(ProvisionerCore().handlers) == 1


def test_machines_are_spread_over_the_racks():
    yard = Yard(pool(min=4, racks=["r1", "r2"]))
    assert sorted(each.rack for each in yard.heard(MachineAsked)) == ["r1", "r1", "r2", "r2"]


# --- replacing --------------------------------------------------------------------------------------------------------


def test_a_lost_node_is_replaced_once_and_its_machine_given_back_first():
    yard = three()
    lost_machine = yard.core.state.nodes["n2"].machine
    yard.lose("n2")
    [(verb, machine, replaced)] = yard.calls
    assert (verb, replaced) == ("replace", lost_machine)
    assert yard.nodes == ["n1", "n3", "n4"]
    [asked], [delivered], [released] = map(yard.heard, (MachineAsked, MachineDelivered, MachineReleased))
    assert asked.reason == "n2 is lost: lost_connection"
    assert (delivered.machine, delivered.node, delivered.replaces) == (machine, "n4", lost_machine)
    assert released.machine == lost_machine
    yard.say(lost("n2"))
    yard.wait(HOUR_S)
    assert len(yard.calls) == 1


def test_what_is_no_loss_of_a_node_replaces_none():
    yard = three()
    yard.say(lost("n2", Severity.SEV2), lost("n9"))
    assert not yard.calls


def test_a_drained_node_is_replaced_and_given_back_when_it_holds_no_work():
    yard = three(idle_s=60.0)
    yard.submit(most=3)
    yard.place("gpt", "n1", "n2", "n3")
    yard.say(NodeDrained(node="n2"))
    assert yard.made("ask")
    assert yard.nodes == ["n1", "n3", "n4"]
    yard.wait(200)
    assert not yard.made("release"), "its workers are still there"
    yard.place("gpt", "n1", "n4", "n3")
    yard.wait(40)
    assert not yard.made("release")
    yard.wait(40)
    assert len(yard.made("release")) == 1
    assert len(yard.there) == 3


def test_a_node_that_is_to_go_is_replaced_before_it_goes_and_forgotten_when_it_is_gone():
    yard = three()
    yard.say(NodeLeaving(node="n1", incarnation="n1-1", seconds=20.0), NodeDrained(node="n1"))
    assert yard.made("ask")
    assert not yard.made("release")
    yard.leave("n1")
    assert len(yard.calls) == 2
    assert yard.made("release")
    assert yard.nodes == ["n2", "n3", "n4"]


def test_a_node_that_is_used_again_before_another_was_asked_for_is_not_replaced():
    yard = three(replacements=1)
    yard.lose("n1")
    yard.lose("n2")  # beyond the budget, so it waits
    yard.calls.clear()
    yard.join(yard.core.state.nodes["n2"].machine, "n2")
    yard.wait(HOUR_S + 60)
    assert not yard.calls
    assert sorted(yard.nodes) == ["n2", "n3", "n4"]


def test_a_lost_node_that_comes_back_when_it_was_replaced_gets_no_work_and_is_given_back():
    yard = three()
    yard.joins = False
    machine = yard.core.state.nodes["n1"].machine
    yard.lose("n1")
    yard.said.clear()
    yard.join(machine, "n1")
    yard.work()
    yard.wait(20)
    assert [each.node for each in yard.heard(MachineRetired)] == ["n1"]
    assert yard.calls[-1][:2] == ("release", machine)
    assert "n1" not in yard.nodes


def test_nodes_that_people_started_are_counted_and_replaced_and_never_given_back():
    yard = Yard(pool(max=3, idle_s=10.0))
    for _ in range(3):
        yard.join()
    yard.submit(most=2)
    yard.place("gpt", "n1", "n2")
    assert not yard.calls
    yard.lose("n1")
    assert not yard.calls, "n3 is there for it"
    yard.lose("n2")
    assert yard.made("ask")
    yard.say(TaskRemoved(task="gpt"))
    yard.wait(HOUR_S)
    assert yard.nodes == ["n3"]


# --- giving back ------------------------------------------------------------------------------------------------------


def test_an_idle_node_beyond_the_spares_is_drained_and_given_back_after_a_time():
    yard = Yard(pool(spares=1, idle_s=60.0))
    yard.submit(most=3)
    yard.place("gpt", "n2", "n3", "n4")
    yard.submit(most=2)
    yard.place("gpt", "n2", "n3")
    yard.wait(40)
    assert len(yard.nodes) == 4
    yard.wait(40)
    assert yard.nodes == ["n2", "n3", "n4"], "the one that was idle for longest goes"
    [retired], [released] = yard.heard(MachineRetired), yard.heard(MachineReleased)
    assert (retired.node, released.node) == ("n1", "n1")


def test_a_node_that_gets_work_before_it_is_drained_is_waited_for():
    yard = three(min=0, idle_s=30.0)
    yard.submit(most=2)
    yard.place("gpt", "n1", "n2")
    yard.wait(25)
    yard.submit("bert", most=0)
    yard.say()
    yard.wait(8)
    [retired] = yard.heard(MachineRetired)
    assert retired.node == "n3"
    yard.place("bert", "n3")
    yard.wait(60)
    assert not yard.made("release")
    yard.place("bert")
    yard.wait(20)
    assert yard.made("release")


def test_a_node_that_a_person_puts_back_into_use_while_it_is_to_go_stays():
    yard = three(min=2, idle_s=10.0)
    while not yard.heard(MachineRetired):
        yard.wait(1)
    [retired] = yard.heard(MachineRetired)
    yard.say(NodeDrained(node=retired.node, drain=False))
    yard.wait(8)
    assert retired.node in yard.nodes


# --- budget -----------------------------------------------------------------------------------------------------------


def test_no_more_is_replaced_within_an_hour_than_the_pool_allows():
    yard = three(replacements=2)
    for node in ("n1", "n2", "n3"):
        yard.lose(node)
        yard.wait(60)
    assert len(yard.made("replace")) == 2
    [delayed], [alert] = yard.heard(ReplacementDelayed), yard.heard(Alert)
    assert delayed.missing == 1
    assert "2 times within an hour" in alert.text
    yard.wait(HOUR_S - 200)
    assert len(yard.made("replace")) == 2
    yard.wait(100)
    assert len(yard.nodes) == 3


def test_a_rack_that_loses_everything_at_once_is_one_event():
    yard = Yard(pool(max=8, replacements=1))
    for rack in ("r1", "r1", "r1", "r2"):
        yard.join(rack=rack)
    yard.submit(most=4)
    yard.lose("n1", "n2", "n3")
    assert len(yard.nodes) == 4
    assert not yard.heard(ReplacementDelayed)
    yard.lose("n4")
    assert len(yard.nodes) == 3
    assert yard.heard(ReplacementDelayed)


def test_what_tasks_need_beyond_is_asked_for_whatever_the_budget():
    yard = three(replacements=1)
    yard.lose("n1")
    yard.lose("n2")
    yard.submit(most=5)
    assert len(yard.nodes) == 4


# --- what providers do -----------------------------------------------------------------------------------------------


def test_after_a_refusal_the_same_machine_is_asked_for_again_later_and_later():
    yard = Yard()
    yard.answer = Answer.REFUSED
    yard.submit(most=1)
    moments = []
    for _ in range(1200):
        before = len(yard.calls)
        yard.wait(1)
        moments += [yard.now] * (len(yard.calls) - before)
    gaps = [round(b - a) for a, b in itertools.pairwise(moments)]
    assert gaps == sorted(gaps)
    assert gaps[-1] in {300, 301}
    assert len(set(yard.made("ask"))) == 1
    assert len(yard.heard(MachineRefused)) == len(yard.heard(Alert)) == 1, "said once"
    yard.answer = Answer.DONE
    yard.wait(301)
    assert len(yard.nodes) == 1


def test_that_a_provider_is_out_of_quota_is_said_once_with_when_it_is_asked_again():
    yard = Yard()
    yard.answer, yard.reason = Answer.QUOTA, "8 of 8 are in use"
    yard.submit(most=3)
    yard.wait(600)
    [refused] = yard.heard(MachineRefused)
    assert refused.quota
    assert str(refused).endswith("asked again in 2 s: 8 of 8 are in use")
    assert not yard.heard(Alert)


@pytest.mark.parametrize("does", [True, False])
def test_a_machine_whose_request_was_not_answered_is_looked_for_and_never_doubled(does):
    yard = Yard()
    yard.answer, yard.does, yard.joins = Answer.UNKNOWN, does, False
    yard.submit(most=1)
    yard.wait(30)
    assert len(set(yard.made("ask"))) == 1
    assert (len(yard.calls) == 1) == does, "only what is not there is asked for again"
    yard.answer = Answer.DONE
    yard.wait(300)
    assert len(set(yard.made("ask"))) == len(yard.there) == 1
    assert len(yard.heard(Alert)) == 1


def test_as_long_as_nobody_knows_the_fate_of_a_machine_no_other_is_asked_for():
    yard = Yard()
    yard.answer, yard.lists = Answer.UNKNOWN, False
    yard.submit(most=1)
    yard.wait(HOUR_S)
    assert len(yard.calls) == 1
    assert yard.view.trouble == "it hangs"
    yard.lists = True
    yard.wait(301)
    assert not yard.view.trouble


def test_a_new_instance_looks_before_it_asks_again():
    yard = Yard()
    yard.joins = False
    yard._do = lambda errand: setattr(yard, "stuck", errand)
    work, yard.work = yard.work, lambda: None
    yard.submit(most=1)
    [machine] = yard.core.state.machines
    yard.there[machine] = ""  # it was asked for, and the answer got lost with the instance
    del yard._do
    yard.work = work
    yard.start()
    yard.wait(5)
    assert not yard.calls
    assert yard.core.state.machines[machine].stage is Stage.ASKED


def test_a_machine_that_does_not_join_in_time_is_given_back_before_another_is_asked_for():
    yard = Yard(pool(join_s=60.0))
    yard.joins = False
    yard.submit(most=1)
    [first] = yard.there
    yard.wait(59)
    assert yard.made("ask") == [first]
    yard.wait(20)
    assert [each[:1] for each in yard.calls] == [("ask",), ("release",), ("ask",)]
    assert "has not joined within 60 s" in yard.heard(Alert)[0].text
    assert str(yard.heard(MachineRetired)[0]).startswith(f"{first} of pool gpu is given back")
    yard.join(first, "late")
    yard.wait(20)
    assert "late" not in yard.nodes
    assert yard.heard(MachineRetired)[-1].node == "late"
    assert yard.calls[-1][:2] == ("release", first)


def test_a_machine_that_has_ended_before_it_joined_is_given_back_and_replaced_within_the_budget():
    yard = Yard(pool(replacements=2))
    yard.joins, yard.broken = False, True
    yard.submit(most=1)
    yard.wait(600)
    assert len(set(yard.made("ask"))) == 3, "the first, and two in its place"
    assert len(yard.made("release")) == 3
    assert "has ended before it joined: its disk is full" in yard.heard(MachineReleased)[0].reason


def test_a_machine_that_its_provider_does_not_list_is_asked_for_again_under_its_id():
    yard = Yard()
    yard.joins = False
    yard.submit(most=1)
    [new] = yard.there
    yard.there.clear()
    yard.wait(30)
    assert yard.made("ask") == [new, new]


def test_a_second_node_under_one_id_gets_no_work():
    yard = three()
    machine = yard.core.state.nodes["n1"].machine
    yard.join(machine, "copy")
    yard.there[machine] = "n1"
    yard.work()
    assert "copy" not in yard.nodes
    [retired], [alert] = yard.heard(MachineRetired), yard.heard(Alert)
    assert (retired.machine, retired.node) == (machine, "copy")
    assert "n1" in alert.text
    yard.leave("copy")
    yard.wait(60)
    assert yard.nodes == ["n1", "n2", "n3"]
    assert not yard.calls


def test_requests_that_are_not_needed_any_more_are_taken_back_if_nobody_has_made_them():
    yard = Yard()
    yard.answer = Answer.REFUSED
    yard.submit(most=3)
    yard.say(TaskRemoved(task="gpt"))
    assert not yard.core.state.machines
    assert len(yard.heard(MachineReleased)) == 3


# --- looking on -------------------------------------------------------------------------------------------------------


def test_a_pool_that_only_looks_on_says_once_what_it_would_do():
    yard = Yard(pool(max=4, observe=True))
    yard.join()
    yard.submit(most=2)
    yard.lose("n1")
    yard.wait(60)
    assert not yard.calls
    asked = yard.heard(MachineAsked)
    assert all(each.planned for each in asked)
    assert [each.reason for each in asked] == [
        "it has 1 nodes, and is to have 2",
        "n1 is lost: lost_connection",
        "n1 is lost: lost_connection",
    ]


# --- starting ---------------------------------------------------------------------------------------------------------


def test_nothing_is_decided_before_the_journal_was_read_to_where_it_ended():
    yard = Yard(pool(max=2))
    yard.join()
    yard.join()
    yard.submit(most=2)
    yard.start()
    old = [NodeAdmitted(node=f"n{each}", incarnation="1", host="h", slots=[Slot(index=0)], pool="gpu") for each in "12"]
    yard.now -= HOUR_S
    yard.lose("n1", "n2")
    yard.say(*old)
    yard.now += HOUR_S
    yard.wait(1.5)
    assert not yard.calls, "there may be more"
    yard.wait(5)
    assert not yard.calls, "they are back"


def test_machines_that_an_earlier_life_of_the_state_asked_for_are_taken_in():
    yard = Yard(pool())
    yard.joins = False
    yard.there["gpu-0badcafe"] = ""
    yard.wait(120)
    yard.submit(most=1)
    assert not yard.made("ask")
    yard.join("gpu-0badcafe")
    assert len(yard.nodes) == 1


# --- whatever comes ---------------------------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["lose", "leave", "drain", "undrain", "join", "submit", "wait", "restart", "answer", "back"]),
        st.integers(0, 6),
    ),
    max_size=25,
)


def strike(yard, what, number):
    """Do one of `STEPS`."""
    nodes, machines = sorted(yard.core.state.nodes), sorted(yard.core.state.machines)
    name = nodes[number % len(nodes)] if nodes else ""
    to_a_node = {
        "lose": lambda: yard.lose(name),
        "leave": lambda: yard.leave(name),
        "drain": lambda: yard.say(NodeDrained(node=name)),
        "undrain": lambda: yard.say(NodeDrained(node=name, drain=False)),
        "back": lambda: yard.join(machines[number % len(machines)], name) if machines else None,
    }
    others = {
        "join": yard.join,
        "submit": lambda: yard.submit(most=number),
        "wait": lambda: yard.wait(number * 10),
        "restart": yard.start,
        "answer": lambda: setattr(yard, "answer", [*Answer][number % 4]),
    }
    if what in others:
        others[what]()
    elif name:
        to_a_node[what]()


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_whatever_happens_there_are_never_too_many_and_in_the_end_enough(steps):
    yard = Yard(pool(max=5, replacements=1000, idle_s=20.0, join_s=50.0))
    for step in steps:
        strike(yard, *step)
        assert yard.core.state.coming("gpu") <= 5
    yard.answer = Answer.DONE
    yard.submit(most=4)
    yard.wait(1000)
    assert len(yard.nodes) >= 4
    assert not yard.core.state.coming("gpu")
