"""Which slots a task gets: few moves, and peers on other nodes."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from unicron_planner.placement import place

from unicron.contracts.tasks import SlotRef


def refs(*texts):
    return [SlotRef(node=text.split(":")[0], slot=int(text.split(":")[1])) for text in texts]


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


def test_a_shrinking_task_leaves_its_crowded_node_and_keeps_its_span():
    held = {"a": refs("n1:0", "n1:1", "n2:0")}
    assert texts(place(THREE, held, {"a": 2})["a"]) == ["n1:0", "n2:0"]


def test_a_shrinking_task_gives_up_the_slot_that_lets_another_span_nodes():
    held = {"a": refs("n1:0", "n2:0"), "b": refs("n2:1")}
    placed = place({"n1": [0], "n2": [0, 1]}, held, {"a": 1, "b": 2})
    assert texts(placed["a"]) == ["n2:0"]
    assert texts(placed["b"]) == ["n2:1", "n1:0"]


def test_slots_of_nodes_that_are_gone_or_shrank_are_left():
    held = {"a": refs("n9:0", "n1:1", "n2:0")}
    assert texts(place({"n1": [0], "n2": [0]}, held, {"a": 2})["a"]) == ["n2:0", "n1:0"]


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


@settings(max_examples=400, deadline=None)
@given(clusters())
def test_every_slot_is_usable_and_used_once_and_no_worker_moves_that_need_not(cluster):
    usable, held, sizes = cluster
    placed = place(usable, held, sizes)
    assert {name: len(slots) for name, slots in placed.items()} == sizes
    used = Counter(slot for slots in placed.values() for slot in slots)
    assert set(used.values()) <= {1}
    assert all(slot.slot in usable.get(slot.node, ()) for slot in used)
    for name, slots in placed.items():
        living = [slot for slot in held[name] if slot.slot in usable.get(slot.node, ())]
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
