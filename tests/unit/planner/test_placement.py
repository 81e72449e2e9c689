"""Slots of a task: few moves, and peers on other nodes; and holdings from plan to plan."""

import pytest
from helpers.planner import grouped, inside, refs
from hypothesis import given, settings
from hypothesis import strategies as st
from unicron_planner import placement
from unicron_planner.holdings import PlannedSlots

from unicron.contracts.tasks import ParallelLayout, SlotRef


def place(usable, held, sizes, groups=None):
    """Place tasks, some of them in tensor-parallel groups of so many workers."""
    shapes = {task: ParallelLayout(tensor=width) for task, width in (groups or {}).items()}
    return place_shapes(usable, held, sizes, shapes)


def place_shapes(usable, held, sizes, shapes):
    holdings = PlannedSlots(held)
    for task in held.keys() - sizes.keys():
        holdings.drop(task)
    return placement.place(usable, holdings, sizes, shapes)


def texts(slots):
    return [str(slot) for slot in slots]


THREE = {"n1": [0, 1], "n2": [0, 1], "n3": [0, 1]}


def test_new_workers_spread_over_nodes_and_take_the_emptiest_first():
    placed = place(THREE, {}, {"a": 2, "b": 4})
    assert texts(placed["a"]) == ["n1:0", "n2:0"]
    assert texts(placed["b"]) == ["n3:0", "n1:1", "n2:1", "n3:1"]


def test_a_task_of_two_that_sits_on_one_node_grows_on_another():
    held = {"a": refs("n1:0"), "b": refs("n3:0", "n3:1", "n2:0")}
    placed = place(THREE, held, {"a": 2, "b": 3})
    assert texts(placed["a"]) == ["n1:0", "n2:1"]
    assert placed["b"] == held["b"]


def test_a_task_that_does_not_span_nodes_yet_chooses_before_one_that_can_live_anywhere():
    held = {"a": [], "b": refs("n2:0"), "c": refs("n2:1")}
    placed = place({"n1": [0], "n2": [0, 1, 2]}, held, {"a": 1, "b": 2, "c": 1})
    assert texts(placed["b"]) == ["n2:0", "n1:0"]
    assert texts(placed["a"]) == ["n2:2"]


def test_a_shrinking_task_gives_up_the_slot_that_lets_another_span_nodes():
    held = {"a": refs("n1:0", "n2:0"), "b": refs("n2:1")}
    placed = place({"n1": [0], "n2": [0, 1]}, held, {"a": 1, "b": 2})
    assert texts(placed["a"]) == ["n2:0"]
    assert texts(placed["b"]) == ["n2:1", "n1:0"]


def test_a_task_that_is_no_more_frees_its_slots():
    assert place({"n1": [0]}, {"old": refs("n1:0")}, {"new": 1}) == {"new": refs("n1:0")}


@st.composite
def clusters(draw):
    """Return nodes before, nodes after, slots held on the nodes before, and new sizes that fit."""
    nodes = {f"n{number}": list(range(draw(st.integers(1, 4)))) for number in range(draw(st.integers(1, 5)))}
    every = draw(st.permutations([SlotRef(node=node, slot=slot) for node, slots in nodes.items() for slot in slots]))
    names = [f"t{number}" for number in range(draw(st.integers(1, 4)))]
    held: dict = {name: [] for name in names}
    for slot in every:
        owner = draw(st.sampled_from([*names, None]))
        if owner:
            held[owner].append(slot)
    usable = {node: slots for node, slots in nodes.items() if draw(st.integers(0, 3))}
    free = sum(map(len, usable.values()))
    sizes = {}
    for name in names:
        sizes[name] = draw(st.one_of(st.just(min(len(held[name]), free)), st.integers(0, free)))
        free -= sizes[name]
    return usable, held, sizes


def alive(slots, usable):
    return [slot for slot in slots if slot.slot in usable.get(slot.node, ())]


def check_sums(placed, usable, sizes):
    assert {name: len(slots) for name, slots in placed.items()} == sizes
    used = [slot for slots in placed.values() for slot in slots]
    assert len(set(used)) == len(used)
    assert alive(used, usable) == used


@settings(max_examples=400, deadline=None)
@given(clusters())
def test_every_slot_is_usable_and_used_once_and_no_worker_moves_that_need_not(cluster):
    usable, held, sizes = cluster
    placed = place(usable, held, sizes)
    check_sums(placed, usable, sizes)
    for name, slots in placed.items():
        living = alive(held[name], usable)
        kept = [slot for slot in slots if slot in living]
        assert len(kept) == min(len(living), sizes[name])
        assert slots[: len(kept)] == [slot for slot in living if slot in kept]
        if len(living) == sizes[name]:
            assert slots == living
    assert placed == place(usable, held, sizes)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=5), st.integers(2, 20))
def test_a_lone_task_of_two_or_more_always_spans_two_nodes(counts, size):
    usable = {f"n{number}": list(range(count)) for number, count in enumerate(counts)}
    placed = place(usable, {}, {"a": min(size, sum(counts))})
    assert len({slot.node for slot in placed["a"]}) > 1


# --- tensor-parallel groups ------------------------------------------------------------------------------------------

FOUR = {f"n{number}": [0, 1, 2, 3] for number in range(1, 5)}


def test_a_task_with_groups_fills_whole_nodes_while_one_without_spreads():
    placed = place(FOUR, {}, {"a": 3, "b": 8}, {"b": 2})
    assert texts(placed["b"]) == [*("n1:0", "n1:1", "n1:2", "n1:3"), *("n2:0", "n2:1", "n2:2", "n2:3")]
    assert texts(placed["a"]) == ["n3:0", "n4:0", "n3:1"]


def test_a_group_that_needs_no_whole_node_goes_where_it_fits_best():
    held = {"a": refs("n1:0", "n1:1", "n2:0")}
    placed = place(FOUR, held, {"a": 3, "b": 2}, {"b": 2})
    assert texts(placed["b"]) == ["n1:2", "n1:3"]
    placed = place(FOUR, held, {"a": 3, "b": 6}, {"b": 2})
    assert texts(placed["b"]) == ["n3:0", "n3:1", "n3:2", "n3:3", "n1:2", "n1:3"]


def test_groups_that_are_whole_stay_and_keep_their_order_when_a_node_is_lost():
    held = {"a": [SlotRef(node=node, slot=slot) for node in ("n3", "n1", "n2") for slot in range(4)]}
    left = {node: slots for node, slots in FOUR.items() if node not in {"n1", "n4"}}
    assert place(left, held, {"a": 8}, {"a": 4})["a"] == held["a"][:4] + held["a"][8:]
    spare = left | {"n4": FOUR["n4"]}
    new = refs("n4:0", "n4:1", "n4:2", "n4:3")
    assert place(spare, held, {"a": 12}, {"a": 4})["a"] == held["a"][:4] + held["a"][8:] + new


def test_the_incomplete_last_group_stays_on_one_node_too():
    held = {"a": refs("n1:0", "n1:1", "n1:2")}
    placed = place(FOUR, held, {"a": 3, "b": 7}, {"b": 4})
    assert texts(placed["b"]) == [*("n2:0", "n2:1", "n2:2", "n2:3"), *("n3:0", "n3:1", "n3:2")]


def test_a_group_spans_nodes_only_where_no_node_has_room():
    split = {"n1": [0, 1, 2], "n2": [0, 1, 2]}
    assert texts(place(split, {}, {"a": 6}, {"a": 2})["a"]) == ["n1:0", "n1:1", "n2:0", "n2:1", "n1:2", "n2:2"]
    assert sorted(texts(place(split, {}, {"a": 4}, {"a": 4})["a"])) == ["n1:0", "n1:1", "n1:2", "n2:0"]


def test_a_task_that_shrinks_makes_room_for_the_groups_of_another():
    held = {"b": [], "a": [SlotRef(node=node, slot=slot) for node in FOUR for slot in range(4)]}
    placed = place(FOUR, held, {"b": 4, "a": 12}, {"a": 4, "b": 4})
    assert placed["a"] == held["a"][:12]
    assert texts(placed["b"]) == ["n4:0", "n4:1", "n4:2", "n4:3"]


HOLE = {"n1": [0, 2, 3], "n2": [0, 1], "n3": [0, 1]}


@pytest.mark.parametrize(
    ("usable", "width", "held", "expected"),
    [
        pytest.param(THREE, 1, "n1:0 n1:1 n2:0", "n1:0 n2:0", id="shrinks where it is crowded and keeps its span"),
        pytest.param({"n1": [0], "n2": [0]}, 1, "n9:0 n1:1 n2:0", "n2:0 n1:0", id="leaves slots that are gone"),
        pytest.param(HOLE, 2, "n1:0 n1:1 n2:0 n2:1", "n1:0 n1:2 n2:0 n2:1", id="completes a group on its own node"),
        pytest.param(FOUR, 2, "n1:0 n1:1 n2:0 n2:1 n2:2 n2:3", "n2:0 n2:1 n2:2 n2:3", id="leaves where it has least"),
        pytest.param(FOUR, 2, "n2:0 n2:1", "n2:0 n2:1 n2:2 n2:3", id="grows on its own node first"),
    ],
)
def test_a_task_alone(usable, width, held, expected):
    expected = expected.split()
    assert texts(place(usable, {"a": refs(*held.split())}, {"a": len(expected)}, {"a": width})["a"]) == expected


@st.composite
def with_groups(draw):
    """Return a cluster, and the width of each task's groups."""
    usable, held, sizes = draw(clusters())
    return usable, held, sizes, {name: draw(st.integers(1, 4)) for name in sizes}


@settings(max_examples=400, deadline=None)
@given(with_groups())
def test_with_groups_sums_are_right_and_untouched_tasks_do_not_move(cluster):
    usable, held, sizes, groups = cluster
    placed = place(usable, held, sizes, groups)
    check_sums(placed, usable, sizes)
    assert placed == place(usable, held, sizes, groups)
    for name, slots in placed.items():
        living = alive(held[name], usable)
        if living == held[name] and len(living) == sizes[name]:
            assert slots == living
        width = groups[name]
        whole = [held[name][first : first + width] for first in range(0, len(held[name]) - width + 1, width)]
        whole = [group for group in whole if set(group) <= set(living) and inside(group)]
        kept = [group for group in whole if set(group) <= set(slots)]
        if sizes[name] >= len(living):
            assert kept == whole, "a group that is whole stays"
        assert len(kept) >= min(len(whole), sizes[name] // width)


@settings(max_examples=400, deadline=None)
@given(with_groups())
def test_as_many_groups_are_inside_a_node_as_space_allows(cluster):
    usable, held, sizes, groups = cluster
    name, others = next(iter(sizes)), list(sizes)[1:]
    kept = {other: alive(held[other], usable) for other in others}
    there = {slot for slots in kept.values() for slot in slots}
    space = {node: sum(SlotRef(node=node, slot=slot) not in there for slot in slots) for node, slots in usable.items()}
    width, living = groups[name], alive(held[name], usable)
    size = min(sizes[name], sum(space.values()))
    if (living == held[name] and len(living) == size) or width == 1:
        return  # it stays where it is, or has no groups
    slots = place(usable, held, {name: size, **{other: len(kept[other]) for other in others}}, {name: width})[name]
    formed = [slots[first : first + width] for first in range(0, size - width + 1, width)]
    room = sum(count // width for count in space.values())
    assert sum(map(inside, formed)) >= min(size // width, room)


# --- replicas of several tensor-parallel groups -----------------------------------------------------------------------

TWO_BY_TWO = ParallelLayout(tensor=2, pipeline=2)


def test_each_replica_is_on_one_node_where_that_is_possible():
    placed = place_shapes(FOUR, {}, {"a": 12}, {"a": TWO_BY_TWO})["a"]
    assert all(map(inside, grouped(placed, 4)))


def test_a_replica_that_fits_on_no_node_keeps_its_tensor_ranks_together():
    three = {f"n{number}": [0, 1, 2] for number in range(1, 5)}
    placed = place_shapes(three, {}, {"a": 8}, {"a": TWO_BY_TWO})["a"]
    assert len(set(placed)) == 8
    assert all(map(inside, grouped(placed, 2)))
    wide = ParallelLayout(tensor=4, pipeline=2)
    placed = place_shapes(FOUR, {}, {"a": 16}, {"a": wide})["a"]
    assert all(map(inside, grouped(placed, 4)))


def test_replicas_that_are_whole_stay_in_their_order_and_the_rest_of_a_broken_one_comes_last():
    wide = ParallelLayout(tensor=4, pipeline=2)
    held = {"a": [SlotRef(node=node, slot=slot) for node in ("n3", "n1", "n2", "n4") for slot in range(4)]}
    left = {node: slots for node, slots in FOUR.items() if node != "n1"} | {"n5": [0, 1, 2, 3]}
    placed = place_shapes(left, held, {"a": 16}, {"a": wide})["a"]
    assert placed[:8] == held["a"][8:], "a replica over two nodes is whole"
    assert placed[8:12] == held["a"][:4], "what is left of the broken one is used again"
    assert {slot.node for slot in placed[12:]} == {"n5"}
    assert place_shapes(left, held, {"a": 8}, {"a": wide})["a"] == held["a"][8:], "it makes way first"


@settings(max_examples=300, deadline=None)
@given(clusters(), st.integers(1, 3), st.integers(1, 3))
def test_replicas_that_are_whole_are_never_torn_apart(cluster, tensor, pipeline):
    usable, held, sizes = cluster
    shape = ParallelLayout(tensor=tensor, pipeline=pipeline)
    each = shape.replica_workers
    sizes = {name: size // each * each for name, size in sizes.items()}
    held = {name: slots[: len(slots) // each * each] for name, slots in held.items()}
    placed = place_shapes(usable, held, sizes, dict.fromkeys(sizes, shape))
    check_sums(placed, usable, sizes)
    for name, slots in placed.items():
        whole = [one for one in grouped(held[name], each) if set(one) <= set(alive(one, usable))]
        whole = [one for one in whole if all(map(inside, grouped(one, tensor)))]
        kept = [one for one in grouped(slots, each) if one in whole]
        assert len(kept) >= min(len(whole), sizes[name] // each)
        assert kept == [one for one in whole if one in kept], "in their order"


# --- who has which slots ----------------------------------------------------------------------------------------------


SLOTS = [SlotRef(node=f"n{node}", slot=slot) for node in range(3) for slot in range(2)]


@st.composite
def plans(draw):
    """Return what each task has, plan after plan; who keeps all has the same list."""
    found = [{}]
    for _ in range(draw(st.integers(1, 5))):
        owner = {slot: draw(st.sampled_from(["a", "b", "c", ""])) for slot in SLOTS}
        tasks = draw(st.sets(st.sampled_from("abc")))
        given = {task: [slot for slot in SLOTS if owner[slot] == task] for task in tasks}
        before = found[-1]
        found.append({task: before[task] if before.get(task) == slots else slots for task, slots in given.items()})
    return found


@given(plans())
def test_what_is_followed_is_what_stands_in_the_last_plan(plans):
    held = PlannedSlots()
    for slots in plans:
        held.replace(slots)
    fresh = PlannedSlots(plans[-1])
    assert (held.slots, held.on) == (fresh.slots, fresh.on)
    usable = {"n0": [0, 1], "n1": [1]}
    taken = {str(slot) for slots in plans[-1].values() for slot in slots}
    free = {f"{node}:{slot}" for node, there in held.free(usable).items() for slot in there}
    assert free == {"n0:0", "n0:1", "n1:1"} - taken
    gone = {task: sum(slot.node == "n2" or str(slot) == "n1:0" for slot in slots) for task, slots in plans[-1].items()}
    assert held.displaced(usable) == {task for task, count in gone.items() if count}
    on = {task: sum(slot.node in {"n0", "n2"} for slot in slots) for task, slots in plans[-1].items()}
    assert held.lost_with(["n0", "n2", "n9"]) == {task: count for task, count in on.items() if count}
