"""Observe only, message by message: nothing leaves that no user has ordered, and nothing of it is lost."""

import msgspec
from helpers.transition import TOKEN, Cluster, failure, of, slot, spec
from hypothesis import given, settings
from hypothesis import strategies as st
from unicron_transition.core import TransitionCore
from unicron_transition.observing import INTRUSIVE, USERS, ObservingCore

from unicron.contracts import events
from unicron.contracts.base import Started
from unicron.contracts.commands import Regroup, StartWorker, StopWorker
from unicron.contracts.failures import Severity
from unicron.contracts.stragglers import StragglerDetected
from unicron.contracts.tasks import TaskState

CAUSES = (events.FailureDetected, events.NodeGone, events.NodeAdmitted, events.TaskBroken, events.StateUnusable)
"""What a cluster that heals answers with orders."""

NODES = {"n1": 2, "n2": 2}
SLOTS = [slot(f"{node}:{index}") for node in NODES for index in range(2)]


class ObservedCluster(Cluster):
    """A cluster of which each message is checked: no order leaves that no user has given."""

    make = ObservingCore

    def tell(self, message):
        held = {task for task, kept in self.core.state.withheld.items() if kept.orders}
        out = super().tell(message)
        if self.make is ObservingCore:
            orders = of(INTRUSIVE, out)
            assert not (orders and isinstance(message, CAUSES)), f"{message} is answered with {orders}"
            free = {message.key} if isinstance(message, USERS) else set()
            assert not [order for order in orders if order.key in held - free]
        return out

    def heal(self):
        """Observe only no more."""
        self.make = TransitionCore
        return self.tell(Started(token=TOKEN + 1))


def running():
    """Return a cluster in which task a runs on three slots, and task b waits."""
    cluster = ObservedCluster(NODES, [spec("a"), spec("b")])
    cluster.settle(a=SLOTS[:3])
    assert cluster.run("a").state is TaskState.RUNNING
    return cluster


EVENTS = st.one_of(
    st.tuples(st.sampled_from(["kill", "resume", "pause"]), st.integers(0, 30)),
    st.tuples(st.sampled_from(["lose", "cut off", "return", "drain", "undrain"]), st.sampled_from(sorted(NODES))),
    st.tuples(st.just("plan"), st.integers(0, 4)),
    st.tuples(st.just("step"), st.integers(1, 4)),
)


def befall(cluster, kind, what):
    living = [process.name for process in cluster.processes.values() if process.living]
    match kind:
        case "kill" if living:
            cluster.kill(living[what % len(living)])
        case "resume" | "pause":
            cluster.tell(events.TaskPaused(task="ab"[what % 2], paused=kind == "pause"))
        case "lose" | "cut off" if what in cluster.up:
            cluster.lose(what, alive=kind == "cut off")
        case "return" if what not in cluster.up:
            cluster.join(what)
        case "drain" | "undrain":
            cluster.drain(what, drain=kind == "drain")
        case "plan":
            there = [each for each in SLOTS if each.node in cluster.up]
            cluster.plan(a=there[:what], b=there[what:])
        case "step":
            for _ in range(what):
                cluster.step()


@settings(max_examples=100, deadline=None)
@given(st.lists(EVENTS, max_size=30))
def test_whatever_happens_no_order_leaves_by_itself_and_all_is_carried_out_once_it_may_be(happened):
    cluster = running()
    for each in happened:
        befall(cluster, *each)
    cluster.heal()
    for node in NODES:
        if node not in cluster.up:
            cluster.join(node)
        cluster.drain(node, drain=False)
    for task in "ab":
        cluster.tell(events.TaskPaused(task=task, paused=False))
    for name in [name for name, process in cluster.processes.items() if not process.living]:
        cluster.report(name)
    cluster.settle(a=SLOTS[:1], b=SLOTS[1:])
    assert {task: cluster.places(task) for task in cluster.specs} == {
        "a": ["n1:0"],
        "b": ["n1:1", "n2:0", "n2:1"],
    }
    assert not cluster.core.state.withheld


def test_what_was_withheld_is_ordered_once_the_cluster_heals_again_by_the_instance_that_does():
    cluster = running()
    [said] = of(events.OrdersWithheld, cluster.kill("a-1"))
    assert [order.partition(" ")[0] for order in said.orders] == ["stop", "form", "form", "save", "start"]
    out = cluster.heal()
    assert of(events.ObserveOnlySwitched, out) == [events.ObserveOnlySwitched(on=False)]
    orders = of(INTRUSIVE, out)
    assert {type(order) for order in orders} == {StopWorker, Regroup, StartWorker}
    assert {order.token for order in orders} == {TOKEN + 1}
    cluster.rest()
    assert cluster.run("a").state is TaskState.RUNNING


def test_the_mode_is_said_when_it_changes_and_not_at_each_start():
    cluster = running()
    assert cluster.core.state.observe_only
    assert not of(events.ObserveOnlySwitched, cluster.tell(Started(token=TOKEN + 1)))
    assert of(events.ObserveOnlySwitched, cluster.heal())
    assert not of(events.ObserveOnlySwitched, cluster.heal())


def test_a_plan_that_takes_back_what_was_withheld_is_said_and_leaves_nothing_to_do():
    cluster = running()
    [said] = of(events.OrdersWithheld, cluster.plan(a=SLOTS[:2]))
    assert said.orders == ["give a 2 slots instead of 3"]
    [said] = of(events.OrdersWithheld, cluster.plan(a=SLOTS[:3]))
    assert (said.orders, str(said)) == ([], "observe only: nothing is withheld any more")
    assert not cluster.core.state.withheld
    assert not of(events.OrdersWithheld, cluster.plan(a=SLOTS[:3]))


def test_a_task_at_fault_is_said_to_be_and_what_is_left_of_it_ends_when_its_user_removes_it():
    cluster = running()
    out = cluster.tell(events.TaskBroken(task="a", reason="it raised the same again"))
    [change] = of(events.TaskStateChanged, out)
    assert change.state is TaskState.FAILED
    assert change.reason.startswith("observe only, until `unicron task stop a`: ")
    stops = of(StopWorker, cluster.tell(events.TaskRemoved(task="a")))
    assert {stop.worker for stop in stops} == {"a-1", "a-2", "a-3"}


def test_a_membership_of_many_nodes_is_said_in_a_few_orders():
    nodes = {f"n{number}": 1 for number in range(40)}
    cluster = ObservedCluster(nodes, [spec("a", max_workers=40)])
    cluster.settle(a=[slot(f"{node}:0") for node in nodes])
    [said] = of(events.OrdersWithheld, cluster.kill("a-1"))
    assert (len(said.orders), said.more) == (20, 23)
    assert str(said).endswith("; and 23 more")


def test_the_drain_of_a_straggler_is_said():
    fields = {
        "task": "a",
        "epoch": 0,
        "world_size": 3,
        "first": 1,
        "last": 9,
        "steps": 8,
        "slowdown": 2.0,
        "waste": 0.5,
    }
    found = StragglerDetected(**fields, diagnosis="slow-worker", node="n1")
    cluster = running()
    assert not cluster.tell(found)
    [said] = cluster.tell(msgspec.structs.replace(found, drain=True))
    assert (said.node, said.orders) == ("n1", ["drain n1: slow-worker"])


def test_a_failure_that_concerns_no_task_is_nothing_to_withhold():
    assert not running().tell(failure(Severity.SEV2, task="unknown", worker="x", node="n1"))
