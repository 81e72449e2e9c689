"""Slots of tasks where NVLink domains and racks are known, and of tasks that are confined to domains."""

from collections import Counter

import pytest
from helpers.planner import admitted, ended, feed, grouped, reasons, refs, sizes, spec
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from unicron_planner import placement
from unicron_planner.core import PlannerCore
from unicron_planner.holdings import PlannedSlots
from unicron_planner.neighbours import Neighbours
from unicron_planner.state import AdmittedNode

from unicron.contracts.events import TaskSubmitted
from unicron.contracts.queries import GetPlan
from unicron.contracts.tasks import ParallelLayout, SlotRef


def near(**where):
    """Return the neighbours of nodes, each given as "rack/domain"."""
    both = {node: text.partition("/") for node, text in where.items()}
    return Neighbours.among(
        {node: AdmittedNode(slots=[], rack=rack, domain=domain) for node, (rack, _, domain) in both.items()}
    )


def place(usable, held, wanted, shapes, neighbours, confined=()):
    return placement.place(usable, PlannedSlots(held), wanted, shapes, neighbours, confined)


def texts(slots):
    return [str(slot) for slot in slots]


PAIRS = {f"n{number}": [0, 1] for number in range(1, 7)}
TWO_DOMAINS = near(n1="/a", n2="/b", n3="/a", n4="/b")


def test_a_group_for_which_no_node_has_room_is_inside_of_one_domain():
    four = {node: PAIRS[node] for node in ("n1", "n2", "n3", "n4")}
    placed = place(four, {}, {"a": 8}, {"a": ParallelLayout(tensor=4)}, TWO_DOMAINS)["a"]
    assert [{slot.node for slot in group} for group in grouped(placed, 4)] == [{"n1", "n3"}, {"n2", "n4"}]


def test_a_replica_is_inside_of_one_domain_with_its_tensor_ranks_on_one_node():
    four = {node: PAIRS[node] for node in ("n1", "n2", "n3", "n4")}
    placed = place(four, {}, {"a": 4}, {"a": ParallelLayout(tensor=2, pipeline=2)}, TWO_DOMAINS)["a"]
    assert texts(placed) == ["n1:0", "n1:1", "n3:0", "n3:1"]


def test_a_group_in_one_domain_stays_and_only_the_broken_one_moves():
    six, where = PAIRS, near(n1="/a", n2="/a", n3="/b", n4="/b", n5="/b", n6="/b")
    held = {"a": refs("n1:0", "n1:1", "n2:0", "n2:1", "n3:0", "n3:1", "n4:0", "n4:1")}
    left = {node: slots for node, slots in six.items() if node != "n4"}
    placed = place(left, held, {"a": 8}, {"a": ParallelLayout(tensor=4)}, where)["a"]
    assert texts(placed) == [*texts(held["a"][:6]), "n5:0", "n5:1"]


def test_groups_of_wide_tensors_choose_before_those_of_long_pipelines():
    nodes = {f"n{number}": [0] for number in range(1, 6)}
    shapes = {"long": ParallelLayout(pipeline=3), "wide": ParallelLayout(tensor=2)}
    where = near(n1="/a", n2="/a", n3="/b", n4="/c", n5="/d")
    placed = place(nodes, {}, {"long": 3, "wide": 2}, shapes, where)
    assert texts(placed["wide"]) == ["n1:0", "n2:0"]


def test_only_a_confined_task_moves_because_its_group_is_in_two_domains():
    held, shapes = {"a": refs("n1:0", "n1:1", "n2:0", "n2:1")}, {"a": ParallelLayout(tensor=4)}
    three = {node: PAIRS[node] for node in ("n1", "n2", "n3")}
    assert place(three, held, {"a": 4}, shapes, TWO_DOMAINS)["a"] == held["a"]
    assert texts(place(three, held, {"a": 4}, shapes, TWO_DOMAINS, ["a"])["a"]) == ["n1:0", "n1:1", "n3:0", "n3:1"]


@pytest.mark.parametrize("shape", [ParallelLayout(), ParallelLayout(tensor=2)])
def test_two_replicas_are_where_they_do_not_fail_together(shape):
    where = near(n1="r1/a", n2="r1/b", n3="r2/c", n4="r1/a")
    four = {node: PAIRS[node] for node in ("n1", "n2", "n3", "n4")}
    placed = place(four, {}, {"a": 2 * shape.replica_workers}, {"a": shape}, where)["a"]
    assert {slot.node for slot in placed} == {"n1", "n3"}
    smaller = place(four, {"a": refs("n1:0", "n4:0", "n3:0")}, {"a": 2}, {}, where)["a"]
    assert texts(smaller) == ["n1:0", "n3:0"], "who shrinks does not leave the other rack"


@st.composite
def clusters(draw):
    """Return nodes with their domains, what two tasks hold, and how many workers the first is to have."""
    nodes = {f"n{number}": list(range(draw(st.integers(1, 4)))) for number in range(draw(st.integers(2, 7)))}
    domains = {node: draw(st.sampled_from(["d1", "d2", "d3", ""])) for node in nodes}
    held = {"a": [], "b": []}
    for slot in draw(st.permutations([SlotRef(node=node, slot=slot) for node in nodes for slot in nodes[node]])):
        if owner := draw(st.sampled_from(["a", "b", None])):
            held[owner].append(slot)
    usable = {node: slots for node, slots in nodes.items() if draw(st.integers(0, 4))}
    others = [slot for slot in held["b"] if slot.node in usable]
    size = draw(st.integers(0, sum(map(len, usable.values())) - len(others)))
    shape = ParallelLayout(tensor=draw(st.integers(2, 5)), pipeline=draw(st.integers(1, 2)))
    return usable, domains, {"a": held["a"], "b": others}, size, shape


def neighbours(domains):
    return Neighbours.among({node: AdmittedNode(slots=[], domain=domain) for node, domain in domains.items()})


@settings(max_examples=300, deadline=None)
@given(clusters())
def test_no_tensor_group_is_in_two_domains_while_one_has_room_and_nobody_else_moves(cluster):
    usable, domains, held, size, shape = cluster
    living = [slot for slot in held["a"] if slot.node in usable]
    wanted, where = {"a": size, "b": len(held["b"])}, neighbours(domains)
    placed = place(usable, held, wanted, {"a": shape}, where)
    assert len(set(placed["a"])) == len(placed["a"]) == size
    assert placed["b"] == held["b"]
    if living == held["a"] and len(living) == size:
        assert placed["a"] == living, "it is not touched"
        return
    taken = {*placed["a"], *placed["b"]}
    free = [SlotRef(node=node, slot=slot) for node in usable for slot in usable[node]]
    room = Counter(domains[slot.node] for slot in free if slot not in taken)
    whole = placed["a"][: size // shape.tensor * shape.tensor]
    crossing = [group for group in grouped(whole, shape.tensor) if not where.are_near(group)]
    room += Counter(domains[slot.node] for group in crossing for slot in group)
    if crossing:
        assert max((count for domain, count in room.items() if domain), default=0) < shape.tensor


@settings(max_examples=200, deadline=None)
@given(clusters())
def test_replicas_whose_groups_are_in_one_domain_each_are_never_torn_apart(cluster):
    usable, domains, held, size, shape = cluster
    width, where = shape.replica_workers, neighbours(domains)
    placed = place(usable, held, {"a": size, "b": len(held["b"])}, {"a": shape}, where)["a"]
    known = [group for group in grouped(held["a"], width) if len(group) == width]
    whole = [group for group in known if all(slot.node in usable for slot in group)]
    whole = [group for group in whole if all(map(where.are_near, grouped(group, shape.tensor)))]
    kept = [group for group in whole if set(group) <= set(placed)]
    assert len(kept) >= min(len(whole), size // width)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from("abc")), min_size=2, max_size=8), st.data())
def test_several_new_tasks_use_up_the_domains_before_a_group_is_in_two(nodes, data):
    usable = {f"n{number}": list(range(count)) for number, (count, _) in enumerate(nodes)}
    domains = {f"n{number}": domain for number, (_, domain) in enumerate(nodes)}
    left, wanted, shapes = sum(map(len, usable.values())), {}, {}
    for name in "xyz":
        shapes[name] = ParallelLayout(tensor=data.draw(st.sampled_from([1, 2, 4, 8])))
        width = shapes[name].tensor
        wanted[name] = data.draw(st.integers(0, left // width)) * width
        left -= wanted[name]
    where = neighbours(domains)
    placed = place(usable, {}, wanted, shapes, where)
    space = Counter(domains[node] for node, slots in usable.items() for _ in slots)
    for width in (8, 4, 2):  # wide ones first, as each narrow one fits wherever a wide one did
        groups = [group for name in wanted if shapes[name].tensor == width for group in grouped(placed[name], width)]
        room = sum(count // width for count in space.values())
        near_ones = [group for group in groups if where.are_near(group)]
        assert len(near_ones) == min(len(groups), room)
        for group in groups:
            space.subtract(Counter(domains[slot.node] for slot in group))


# --- tasks that are confined to domains -------------------------------------------------------------------------------


def confined(name, tensor, most, **fields):
    table = {size: 1e9 * size for size in range(1, most + 1)}
    task = spec(name, most=most, throughput=table, **fields)
    return TaskSubmitted(task=name, spec=replace(task, layout=ParallelLayout(tensor=tensor), within_domain=True))


def test_a_confined_task_gets_what_the_domains_have_room_for_and_others_get_the_rest():
    planner = PlannerCore()
    feed(planner, *(admitted(f"n{number}", domain=f"d{number % 2}") for number in range(6)))
    [plan] = feed(planner, confined("a", 4, 12))
    assert sizes(plan) == {"a": 8}, "twelve slots, of which each domain has six"
    rest = spec("b", throughput={size: 1e6 * size for size in range(1, 5)})
    assert sizes(feed(planner, TaskSubmitted(task="b", spec=rest))[-1]) == {"a": 8, "b": 4}
    feed(planner, ended("b"))
    assert planner.answer(GetPlan())[0].plan.runner_up.changes == {"a": 4}, "among the sizes that have room"


def test_a_confined_task_waits_where_no_domain_has_room_and_says_so():
    planner = PlannerCore()
    feed(planner, *(admitted(f"n{number}", domain=f"d{number % 2}") for number in range(4)))
    [plan] = feed(planner, confined("a", 8, 8))
    assert sizes(plan) == {"a": 0}
    where = "in tensor-parallel groups inside of one NVLink domain each"
    assert reasons(plan) == {"a": f"needs 8 workers {where}; there is room for 0 such workers"}
    [plan] = feed(planner, *(admitted(f"m{number}", domain="d1") for number in range(2)))[-1:]
    assert sizes(plan) == {"a": 8}
    assert {slot.node for slot in plan.shares[0].slots} == {"n1", "n3", "m0", "m1"}


def test_a_confined_task_whose_group_is_found_to_be_in_two_domains_moves():
    planner = PlannerCore()
    feed(planner, *(admitted(f"n{number}") for number in range(3)), confined("a", 4, 4))
    assert {slot.node for slot in planner.state.plan.shares[0].slots} == {"n0", "n1"}, "as no domain is known"
    again = [admitted("n0", domain="d1"), admitted("n1", domain="d2"), admitted("n2", domain="d1")]
    feed(planner, *again)
    assert {slot.node for slot in planner.state.plan.shares[0].slots} == {"n0", "n2"}


def test_without_confinement_a_group_may_be_in_two_domains_if_it_has_to():
    planner = PlannerCore()
    feed(planner, *(admitted(f"n{number}", domain=f"d{number % 2}") for number in range(4)))
    task = confined("a", 8, 8)
    assert sizes(feed(planner, replace(task, spec=replace(task.spec, within_domain=False)))[-1]) == {"a": 8}
