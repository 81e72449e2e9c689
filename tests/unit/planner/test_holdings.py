"""Who has which slots, followed from plan to plan."""

from hypothesis import given
from hypothesis import strategies as st
from unicron_planner.holdings import Holdings

from unicron.contracts.tasks import SlotRef

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
    held = Holdings()
    for slots in plans:
        held.follow(slots)
    fresh = Holdings(plans[-1])
    assert (held.slots, held.on) == (fresh.slots, fresh.on)
    usable = {"n0": [0, 1], "n1": [1]}
    taken = {str(slot) for slots in plans[-1].values() for slot in slots}
    free = {f"{node}:{slot}" for node, there in held.free(usable).items() for slot in there}
    assert free == {"n0:0", "n0:1", "n1:1"} - taken
    gone = {task: sum(slot.node == "n2" or str(slot) == "n1:0" for slot in slots) for task, slots in plans[-1].items()}
    assert held.displaced(usable) == {task for task, count in gone.items() if count}
    on = {task: sum(slot.node in {"n0", "n2"} for slot in slots) for task, slots in plans[-1].items()}
    assert held.lost_with(["n0", "n2", "n9"]) == {task: count for task, count in on.items() if count}
