"""Tasks whose layout depends on their number of workers: what they earn, get, and cost when it changes."""

from collections import Counter

import pytest
from helpers.costmodel import gpt
from helpers.planner import CONCAVE, admitted, cluster, ended, feed, grouped, inside, lost, measure, refs, slots, spec
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from unicron_planner import placement, situation, throughput
from unicron_planner.core import PlannerCore
from unicron_planner.estimates import PlannerOptions
from unicron_planner.holdings import PlannedSlots

from unicron.contracts.events import FailureDetected, TaskRecovered, TaskSubmitted
from unicron.contracts.failures import Severity
from unicron.contracts.queries import GetCurve, GetPlan
from unicron.contracts.tasks import ParallelLayout, SlotRef
from unicron.costmodel import planning
from unicron.errors import InvalidInputError

TWO_BY_TWO, PAIR, PLAIN = ParallelLayout(tensor=2, pipeline=2), ParallelLayout(tensor=2), ParallelLayout()
LAYOUTS = {4: TWO_BY_TWO, 3: PLAIN, 2: PAIR}


def laid_out(name="a", layouts=LAYOUTS, **fields):
    one = replace(spec(name, **fields), layouts=layouts)
    return TaskSubmitted(task=name, spec=one)


def share(planner, task="a"):
    return next(share for share in planner.state.plan.shares if share.task == task)


def failed(task):
    return FailureDetected(severity=Severity.SEV2, method="process_supervision", status="x", task=task)


def recovered(task, seconds):
    return TaskRecovered(task=task, epoch=1, workers=2, seconds=seconds)


# --- plans -----------------------------------------------------------------------------------------------------------


def test_a_task_goes_from_two_nodes_to_three_workers_to_one_node_and_back():
    planner = cluster(laid_out(), nodes=2)
    assert share(planner).layout == ParallelLayout(tensor=2, pipeline=2, replicas=1)
    assert slots(planner.state.plan)["a"] == ["n1:0", "n1:1", "n2:0", "n2:1"]
    feed(planner, admitted("n2", slots=1))  # a GPU of it is gone
    assert share(planner).layout == ParallelLayout(replicas=3)
    assert slots(planner.state.plan)["a"] == ["n1:0", "n1:1", "n2:0"]
    feed(planner, lost("n2"))
    assert share(planner).layout == ParallelLayout(tensor=2, replicas=1)
    assert slots(planner.state.plan)["a"] == ["n1:0", "n1:1"]
    feed(planner, admitted("n2"))
    assert share(planner).layout == ParallelLayout(tensor=2, pipeline=2, replicas=1)
    assert [slot.node for slot in share(planner).slots] == ["n1", "n1", "n2", "n2"]
    feed(planner, lost("n1"), lost("n2"))
    assert (share(planner).slots, share(planner).layout.workers) == ([], 0)


def test_ranks_that_belong_together_are_placed_together_at_each_size():
    planner = cluster(laid_out(layouts={2: PAIR, 6: ParallelLayout(tensor=3)}), nodes=2)
    assert [slot.node for slot in share(planner).slots] == ["n1", "n1"], "plain ones would be spread"
    planner = cluster(laid_out(layouts={2: PLAIN}), nodes=2)
    assert [slot.node for slot in share(planner).slots] == ["n1", "n2"]


def test_only_sizes_with_a_layout_are_given():
    planner = cluster(laid_out(layouts={4: PLAIN, 1: PLAIN}), nodes=1)
    assert len(share(planner).slots) == 1
    feed(planner, admitted("n2", slots=1))
    assert len(share(planner).slots) == 1
    feed(planner, admitted("n3", slots=1))
    assert len(share(planner).slots) == 4


def test_only_where_a_task_declares_nothing_the_groups_of_its_model_are_placed():
    model = gpt("175B", accelerator="H200")
    free = TaskSubmitted(task="free", spec=replace(spec("free", most=48, throughput={}), model=model))
    planner = cluster(free, laid_out("bound", {48: ParallelLayout(tensor=4, pipeline=12)}, most=48))
    tasks = situation.situate(planner.state, planner._held, PlannerOptions()).tasks
    assert tasks["free"].tensor is not None
    bound = replace(planner.state.tasks["bound"], model=model, throughput={})
    planner.state.tasks["bound"] = bound
    planner.state.nodes |= {f"big-{n}": replace(planner.state.nodes["n1"], slots=list(range(8))) for n in range(6)}
    tasks = situation.situate(planner.state, planner._held, PlannerOptions()).tasks
    assert tasks["bound"].tensor is None
    assert tasks["bound"].sizes.tolist() == [0, 48]


# --- what a change of layout costs -----------------------------------------------------------------------------------


def test_changes_of_layout_are_learned_apart_from_other_transitions():
    planner = cluster(laid_out(), nodes=2)
    assert planner.state.disturbed == {"a": "resize"}, "it started"
    feed(planner, recovered("a", 2.0), admitted("n2", slots=1))
    assert planner.state.disturbed == {"a": "relayout"}
    feed(planner, failed("a"))
    assert planner.state.disturbed == {"a": "relayout"}, "a failure on the way is part of it"
    feed(planner, recovered("a", 35.0), failed("a"), recovered("a", 3.0))
    planner._refresh()
    now = planner._situate()
    assert (now.relayout_s, now.failure_s, now.resize_s) == pytest.approx((20.0, 4.0, 3.5))
    reply, _ = planner.answer(GetPlan())
    assert reply.plan.transitions == pytest.approx({"failure": 4.0, "resize": 3.5, "relayout": 20.0})


def dear(planner, seconds):
    """Let a change of layout have taken so long that `seconds` are believed."""
    planner.state.disturbed["a"] = "relayout"
    feed(planner, recovered("a", 2 * seconds - 5.0))
    planner._refresh()
    assert planner._situate().relayout_s == seconds


def test_a_lost_node_that_changes_the_layout_is_no_plain_failure():
    planner = cluster(laid_out(), nodes=2)
    dear(planner, 60.0)
    feed(planner, lost("n2"))
    assert planner.state.disturbed == {"a": "relayout"}
    assert planner.state.plan.transition_s == 60.0, "what was assumed for it"
    feed(planner, recovered("a", 60.0), failed("a"), laid_out("b", {}, least=3))
    assert planner.state.plan.transition_s == 5.0


def test_a_change_of_size_within_a_shape_is_a_resize_and_a_failure_a_failure():
    planner = cluster(laid_out(layouts={4: PAIR, 2: PAIR}), nodes=1)
    feed(planner, recovered("a", 2.0), admitted("n2"))
    assert planner.state.disturbed == {"a": "resize"}
    feed(planner, recovered("a", 2.0), lost("n2"))
    assert planner.state.disturbed == {"a": "failure"}


def test_a_task_that_stops_or_starts_hands_no_state_over():
    planner = cluster(laid_out(), nodes=2)
    feed(planner, recovered("a", 2.0), admitted("n2", slots=1))
    assert planner.state.disturbed == {"a": "relayout"}
    feed(planner, lost("n1"))
    assert share(planner).slots == []
    assert planner.state.disturbed == {"a": "failure"}, "not a change of layout any more"
    feed(planner, admitted("n1"))
    assert planner.state.disturbed == {"a": "resize"}
    feed(planner, ended("a"))
    assert planner.state.disturbed == {}


@pytest.mark.parametrize(("layouts", "after"), [(LAYOUTS, 2), ({3: PLAIN, 2: PLAIN}, 3)])
def test_where_failures_are_frequent_a_layout_is_not_changed_for_a_little_more(layouts, after):
    planner = PlannerCore(options=PlannerOptions(transition_s=5.0, prior_failures=1.0, prior_worker_s=300.0))
    feed(planner, admitted("n1"), laid_out(layouts=layouts, throughput=CONCAVE))
    dear(planner, 200.0)
    feed(planner, admitted("n2", slots=1))
    assert len(share(planner).slots) == after


# --- throughput ------------------------------------------------------------------------------------------------------

SEVEN = gpt("7B")
TABLE = {8: ParallelLayout(tensor=2, pipeline=4), 16: ParallelLayout(tensor=8), 48: PLAIN, 56: ParallelLayout(tensor=8)}


def modelled(layouts=TABLE, model=SEVEN, **fields):
    return replace(spec("a", most=64, throughput={}, **fields), model=model, layouts=layouts)


def test_each_size_achieves_what_its_own_layout_does():
    found = throughput.estimate(modelled(), {}, 64, 1.0)
    expected = planning.curve_of(SEVEN, TABLE)
    assert found.sizes.tolist() == [8, 16, 48], "56 divides no batch"
    assert found.flops.tolist() == expected.flops.tolist()
    degrees = [found.curve.configuration(at)[:2] for at in range(3)]
    assert degrees == [(2, 4), (8, 1), (1, 1)], "a plain row is plain, not whatever is best"
    assert throughput.estimate(modelled(), {}, 20, 1.0).sizes.tolist() == [8, 16]
    free = throughput.estimate(modelled({}), {}, 64, 1.0)
    assert free.curve.configuration(free.sizes.tolist().index(16))[:2] != (8, 1)


def test_an_anchor_beyond_what_the_cluster_reaches_still_scales_its_own_layout():
    anchored = modelled(model=gpt("7B", anchor_workers=48, anchor_mfu=0.4))
    given = ((modelled(), 16), (anchored, 16), (anchored, 64))
    plain, near, far = (throughput.estimate(task, {}, most, 1.0) for task, most in given)
    assert far.flops[-1] == pytest.approx(0.4 * 312e12 * 48)
    assert near.flops.tolist() == far.flops[:2].tolist()
    assert near.flops[0] != plain.flops[0]


def test_what_is_left_of_another_shape_tells_nothing_of_a_size():
    planner = cluster(laid_out(layouts={4: PAIR, 2: PLAIN}), nodes=2)
    measure(planner, "a", 2, 1.0, epoch=1)
    assert planner.state.measured == {}, "one replica of two pairs was left, and 2 workers are to be plain"
    measure(planner, "a", 4, 1.0, epoch=2)
    assert planner.state.measured["a"].keys() == {4}


def test_the_fewest_workers_and_the_obstacle_are_those_of_the_layouts():
    assert throughput.least(modelled()) == (8, "")
    least, reason = throughput.least(modelled({1: PLAIN, 56: ParallelLayout(tensor=8)}))
    assert least == 0
    assert "for which there is a layout: 1, 56" in reason
    assert "56 GPUs with tensor 8 x pipeline 1 have a data degree of 7" in reason
    planner = cluster(TaskSubmitted(task="a", spec=modelled({1: PLAIN})))
    assert "each would need" in share(planner).reason


def test_an_anchor_that_the_table_can_not_run_is_refused():
    with pytest.raises(InvalidInputError, match="anchor_workers 56: 56 GPUs with tensor 8"):
        throughput.check(modelled(model=gpt("7B", anchor_workers=56, anchor_mfu=0.4)))


def test_the_curve_names_the_layout_of_each_size():
    planner = cluster(TaskSubmitted(task="a", spec=modelled()))
    planner.state.nodes["big"] = replace(planner.state.nodes["n1"], slots=list(range(20)))
    reply, _ = planner.answer(GetCurve(task="a"))
    texts = {point.workers: point.text for point in reply.curve.points}
    assert texts[8].startswith("tensor 2 x pipeline 4")
    assert texts[16].startswith("tensor 8 x pipeline 1")


# --- placement when the shape changes --------------------------------------------------------------------------------


def place(usable, held, size, shape, others=None):
    holdings = PlannedSlots({"a": held, **(others or {})})
    sizes = {"a": size, **{name: len(slots) for name, slots in (others or {}).items()}}
    return placement.place(usable, holdings, sizes, {"a": shape})["a"]


TWO_NODES = {"n1": [0, 1], "n2": [0, 1]}


@pytest.mark.parametrize("gone", [0, 1, 2, 3])
def test_whichever_worker_goes_nobody_else_moves_and_pairs_are_together_again(gone):
    four = place(TWO_NODES, [], 4, TWO_BY_TWO)
    assert all(map(inside, grouped(four, 2)))
    broken = four[gone]
    usable = {node: [slot.slot for slot in four if slot.node == node and slot != broken] for node in TWO_NODES}
    three = place(usable, four, 3, PLAIN)
    assert three == [slot for slot in four if slot != broken]
    two = place(usable, three, 2, PAIR)
    assert inside(two)
    assert set(two) < set(three)
    back = place(TWO_NODES, two, 4, TWO_BY_TWO)
    assert all(map(inside, grouped(back, 2)))
    assert set(two) < set(back)


def test_workers_that_were_spread_gather_in_pairs_where_most_can_stay():
    usable = {"n1": [0, 1, 2, 3], "n2": [0, 1]}
    held = refs("n1:0", "n2:0", "n1:1", "n2:1", "n1:2")
    placed = place(usable, held, 4, PAIR)
    assert set(placed) < set(held)
    assert all(map(inside, grouped(placed, 2)))


@st.composite
def changes(draw):
    """Return usable slots, those of a task in any order, those of others, and a new size and shape."""
    nodes = {f"n{number}": list(range(draw(st.integers(1, 8)))) for number in range(draw(st.integers(1, 4)))}
    every = draw(st.permutations([SlotRef(node=node, slot=slot) for node, there in nodes.items() for slot in there]))
    owners = [draw(st.sampled_from("aab-")) for _ in every]
    held, others = ([slot for slot, owner in zip(every, owners, strict=True) if owner == name] for name in "ab")
    shape = ParallelLayout(tensor=draw(st.integers(1, 4)), pipeline=draw(st.integers(1, 3)))
    most = (len(every) - len(others)) // shape.replica_workers
    size = shape.replica_workers * draw(st.integers(0, most))
    return nodes, held, others, size, shape


@settings(max_examples=500, deadline=None)
@given(changes())
def test_after_a_change_of_shape_groups_are_inside_nodes_where_there_is_room_and_who_can_stay_stays(change):
    usable, held, others, size, shape = change
    if size == len(held):
        return  # the size decides the shape, so this is none
    placed = place(usable, held, size, shape, {"b": others})
    assert len(placed) == len(set(placed)) == size
    assert not set(placed) & set(others)
    assert all(slot.slot in usable[slot.node] for slot in placed)
    taken = Counter(slot.node for slot in others)
    room = sum((len(there) - taken[node]) // shape.tensor for node, there in usable.items())
    assert sum(map(inside, grouped(placed, shape.tensor))) >= min(size // shape.tensor, room)
    if shape.pipeline == 1:
        own = Counter(slot.node for slot in held)
        stay = min(size // shape.tensor, sum(count // shape.tensor for count in own.values()))
        assert len(set(placed) & set(held)) >= stay * shape.tensor
