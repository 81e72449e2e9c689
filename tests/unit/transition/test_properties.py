"""Whatever happens to a cluster, and in whatever order: states are kept, slots owned once, and plans carried out."""

from helpers.transition import Cluster, spec
from hypothesis import given, settings
from hypothesis import strategies as st
from unicron_transition.moves import MOVES, MoveCause, move_task
from unicron_transition.state import TaskRun, TransitionState

from unicron.contracts.tasks import ParallelLayout, SlotRef, TaskState

NODES = {"n1": 2, "n2": 2, "n3": 1, "n4": 3}
TWO = [spec("a", min_workers=2, weight=1.0), spec("b", min_workers=1, weight=2.0)]
SPECS = [*TWO, spec("c", min_workers=2, max_workers=6, unit=2, weight=0.5)]
WIDE = [*TWO, spec("c", min_workers=2, max_workers=6, layout=ParallelLayout(tensor=2), weight=0.5)]

SHAPES = {
    1: ParallelLayout(),
    2: ParallelLayout(tensor=2),
    3: ParallelLayout(shard=3),
    4: ParallelLayout(pipeline=2),
    6: ParallelLayout(tensor=2, pipeline=3),
}
CHANGING = [
    spec("a", max_workers=6, layouts=SHAPES),
    spec("b", min_workers=2, layouts=SHAPES, weight=2.0),
    spec("c", min_workers=2, max_workers=4, unit=2, weight=0.5),
]

EVENTS = st.one_of(
    st.tuples(st.just("plan"), st.permutations(range(8)), st.tuples(*[st.integers(0, 3)] * 3)),
    st.tuples(st.just("die"), st.integers(0, 30)),
    st.tuples(st.just("report"), st.integers(0, 30)),
    st.tuples(st.sampled_from(["lose", "cut off", "return", "drain", "undrain"]), st.sampled_from(sorted(NODES))),
    *[st.tuples(st.just("step"), st.integers(1, 4))] * 3,
)


def shares(cluster, order, wanted):
    """Return slots of the nodes that are there for each task, in a size that it may have."""
    free = [SlotRef(node=node, slot=index) for node, count in NODES.items() for index in range(count)]
    free = [free[index] for index in order if free[index].node in cluster.up]
    given = {}
    for each, count in zip(cluster.specs.values(), wanted, strict=True):
        sizes = [0, *each.sizes]
        size = max(size for size in sizes[: count + 1] if size <= len(free))
        given[each.name], free = free[:size], free[size:]
    return given


def play(events, specs=SPECS):
    cluster, target = Cluster(NODES, specs), {}
    for kind, *what in events:
        living = [process for process in cluster.processes.values() if process.living]
        match kind:
            case "plan":
                target = shares(cluster, *what)
                cluster.plan(**target)
            case "die" if living:
                cluster.end(living[what[0] % len(living)])
            case "report":
                dead = [name for name in cluster.processes if not cluster.processes[name].living]
                if dead:
                    cluster.report(dead[what[0] % len(dead)])
            case "step":
                for _ in range(what[0]):
                    cluster.step()
            case "lose" | "cut off" | "return" | "drain" | "undrain":
                befall(cluster, kind, what[0])
    return cluster, target


def befall(cluster, kind, node):
    """Let something happen to a node."""
    match kind:
        case "lose" | "cut off" if node in cluster.up:
            cluster.lose(node, alive=kind == "cut off")
        case "return" if node not in cluster.up:
            cluster.join(node)
        case "drain" | "undrain":
            cluster.drain(node, drain=kind == "drain")


def carried_out(cluster, target):
    """Make a plan, and let everything happen, when all is told of who died."""
    cluster.plan(**target)
    for name in [name for name, process in cluster.processes.items() if not process.living]:
        cluster.report(name)
    cluster.rest()


@settings(max_examples=120, deadline=None)
@given(st.lists(EVENTS, max_size=40), st.permutations(range(8)), st.tuples(*[st.integers(0, 3)] * 3))
def test_every_task_comes_to_what_the_last_plan_gives_it(events, order, wanted):
    cluster, _ = play(events)
    target = shares(cluster, order, wanted)
    carried_out(cluster, target)
    for task, slots in target.items():
        run = cluster.run(task)
        assert cluster.places(task) == sorted(map(str, slots))
        assert {run.workers[name].slot for name in run.membership.group} == set(slots)
        assert run.state is (TaskState.RUNNING if slots else TaskState.WAITING)
        assert cluster.said[task] is run.state


@settings(max_examples=120, deadline=None)
@given(st.lists(EVENTS, max_size=40), st.permutations(range(8)), st.tuples(*[st.integers(0, 6)] * 3))
def test_tasks_come_to_the_layouts_of_the_last_plan_and_nothing_is_left_behind(events, order, wanted):
    cluster, _ = play(events, CHANGING)
    target = shares(cluster, order, wanted)
    carried_out(cluster, target)
    for task, slots in target.items():
        run = cluster.run(task)
        assert {run.workers[name].slot for name in run.membership.group} == set(slots)
        assert run.state is (TaskState.RUNNING if slots else TaskState.WAITING)
        if slots:
            assert run.membership.layout == cluster.specs[task].shape(len(slots))
            assert run.snapshots.parked is None
    running = {task for task, slots in target.items() if slots}
    assert not [name for (node, name), task in cluster.kept.items() if node in cluster.up and task in running]


@settings(max_examples=50, deadline=None)
@given(st.lists(EVENTS, max_size=40))
def test_replicas_of_two_are_whole_and_nobody_changes_its_place(events):
    cluster, _ = play(events, WIDE)
    cluster.rest()


@settings(max_examples=50, deadline=None)
@given(st.lists(EVENTS, max_size=30))
def test_a_second_look_finds_nothing_more_to_do(events):
    cluster, target = play(events)
    if target:
        cluster.plan(**target)
        assert not [message for message in cluster.plan(**target) if hasattr(message, "token")]


@given(st.sampled_from(TaskState), st.sampled_from(MoveCause))
def test_a_task_moves_as_the_table_says_and_tells_it(before, cause):
    run, state = TaskRun(spec=spec("a"), state=before), TransitionState()
    told = move_task(state, run, cause, "why", "traceback")
    wanted = MOVES.get(before, {}).get(cause)
    assert run.state is (wanted or before)
    assert [(change.state, change.reason) for change in told] == [(wanted, "why")] * (wanted is not None)
    if before.ended:
        assert told == [], "an end is final"
    elif cause in {MoveCause.DONE, MoveCause.OWN_FAULT, MoveCause.USER}:
        assert run.state.ended, "whatever it is doing, it can end"
    else:
        assert not run.state.ended
    assert run.state is not TaskState.WAITING or cause is MoveCause.NO_SLOTS or before is TaskState.WAITING
