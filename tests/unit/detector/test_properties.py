"""The detector's invariants hold for facts in any order and any number; broken ones are named."""

import msgspec
import pytest
from helpers.detector import RULES, scene_of
from hypothesis import given, settings
from hypothesis import strategies as st
from unicron_detector.books import RecordIndex
from unicron_detector.core import DetectorCore
from unicron_detector.state import DetectorState, LostNode

from unicron.contracts import events
from unicron.contracts.base import BusReconnected, CancelTimer, ConnectionLost, SetTimer, Started, TimerFired
from unicron.contracts.failures import Severity
from unicron.contracts.tasks import TaskState, WorkerStatus

NODES = ("n1", "n2", "n3")
TASKS = ("a", "b")
WORKERS = {
    f"{task}-{node}-{number}": {"node": node, "slot": number, "task": task, "worker": f"{task}-{node}-{number}"}
    for task in TASKS
    for node in NODES
    for number in range(4)
}
ERRORS = (
    ("ValueError", "bad"),
    ("ConnectionResetError", "reset"),
    ("RuntimeError", "CUDA error: unspecified launch failure"),
    ("RuntimeError", "CUDA error: uncorrectable ECC error encountered"),
)

nodes, tasks, places = st.sampled_from(NODES), st.sampled_from(TASKS), st.sampled_from(list(WORKERS.values()))
epochs, iterations = st.integers(0, 2), st.integers(-1, 1)
actions = st.sampled_from(["reattempt", "restart", "regroup"])
states = st.sampled_from([TaskState.RUNNING, TaskState.RECOVERING])


def of_worker(kind, **fields):
    return st.builds(lambda place, given: kind(**place, **given), places, st.fixed_dictionaries(fields))


@st.composite
def joins(draw):
    node = draw(nodes)
    living = draw(st.lists(st.sampled_from([name for name, at in WORKERS.items() if at["node"] == node]), max_size=2))
    status = [WorkerStatus(worker=name, task=WORKERS[name]["task"], slot=0) for name in living]
    return events.NodeAdmitted(node=node, incarnation=draw(st.sampled_from("xyz")), host="h", slots=[], workers=status)


FACTS = st.one_of(
    joins(),
    st.builds(events.NodeLeft, node=nodes, incarnation=st.sampled_from("xyz")),
    st.builds(events.NodeHeartbeat, node=nodes, incarnation=st.sampled_from("xyz")),
    st.builds(ConnectionLost, node=nodes, boot=st.sampled_from(["a", "b"])),
    of_worker(events.WorkerReady, pid=st.just(1)),
    of_worker(events.Regrouped, epoch=epochs, rank=st.just(0), world_size=st.just(2), iteration=iterations),
    of_worker(events.WorkerFinished, iterations=st.just(3)),
    of_worker(
        events.WorkerExited,
        exit_code=st.sampled_from([None, 0, 1, 137]),
        signal=st.sampled_from([None, 6, 9, 15, 200]),
        expected=st.booleans(),
        finished=st.booleans(),
        iteration=iterations,
    ),
    of_worker(
        lambda error, **fields: events.WorkerRaised(exception=error[0], text=error[1], traceback="tb", **fields),
        error=st.sampled_from(ERRORS),
        iteration=iterations,
    ),
    of_worker(events.CollectiveFailed, epoch=epochs, iteration=iterations, error=st.just("closed")),
    of_worker(
        lambda **fields: events.WorkerStalled(waited_s=2.0, limit_s=1.0, **fields),
        epoch=epochs,
        iteration=iterations,
        phase=st.sampled_from(["compute", "reduce"]),
        responsive=st.booleans(),
    ),
    of_worker(events.AttemptFailed, action=actions, reason=st.just("vain")),
    st.builds(events.AttemptFailed, task=tasks, action=actions, reason=st.just("x")),
    st.builds(events.TaskStateChanged, task=tasks, state=states, epoch=epochs),
    st.builds(BusReconnected, down_s=st.just(1.0)),
    st.just("timer"),
    st.just("restart"),
)


class World:
    """Runs a detector on a list of facts and checks after each what must always hold."""

    def __init__(self):
        self.detector = DetectorCore(None, RULES)
        self.now, self.timers = 0.0, {}
        self.failed, self.broken, self.down = set(), set(), set()
        self.take(Started(token=1, at=0.0))

    def take(self, fact):
        if fact == "timer":
            name = min(self.timers, key=self.timers.get)
            self.now = max(self.now, self.timers.pop(name))
            fact = TimerFired(name=name, at=self.now)
        elif fact == "restart":
            data = msgspec.msgpack.encode(self.detector.state)
            state = msgspec.msgpack.decode(data, type=DetectorState)
            assert state == self.detector.state
            self.detector = DetectorCore(state, RULES)
            fact = Started(token=2, at=self.now)
        elif isinstance(fact, BusReconnected):
            fact = msgspec.structs.replace(fact, at=self.now)
        elif isinstance(fact, events.NodeAdmitted):
            self.down.discard(fact.node)
        for outcome in self.detector.handle(fact):
            self.check(outcome)
        self.check_state()

    def check(self, outcome):
        match outcome:
            case SetTimer(name=name, after_s=after_s):
                self.timers[name] = self.now + after_s
            case CancelTimer(name=name):
                self.timers.pop(name, None)
            case events.TaskBroken(task=task):
                assert task not in self.broken
                self.broken.add(task)
            case events.FailureDetected():
                self.check_failure(outcome)

    def check_failure(self, failure):
        assert failure.task not in self.broken
        assert failure.worker not in self.failed, "two failures of one process"
        if failure.worker and failure.severity is not Severity.SEV3:
            self.failed.add(failure.worker)
        if failure.severity is Severity.SEV1:
            assert failure.node not in self.down, "a node lost twice"
            self.down.add(failure.node)
        else:
            assert failure.worker

    def check_state(self):
        state = self.detector.state
        waits = {node.suspect for node in state.nodes.values() if node.suspect}
        waits |= {task.pending.timer for task in state.tasks.values() if task.pending}
        assert waits | {"tick"} == set(self.timers), "a wait without an end, or a timer for nothing"
        assert not set(state.nodes) & set(state.lost)
        books, anew = self.detector._reporter.books, RecordIndex(state)
        assert {**vars(books), "_gone": set(books._gone)} == {**vars(anew), "_gone": set(anew._gone)}


@settings(max_examples=400, deadline=None)
@given(st.lists(FACTS, max_size=60))
def test_promises_hold_in_any_order(facts):
    world = World()
    for fact in facts:
        world.take(fact)
    for _ in range(20):  # whatever is still open is settled in time
        world.take("timer")
    state = world.detector.state
    assert not any(node.suspect for node in state.nodes.values())
    assert not any(task.pending for task in state.tasks.values())


@settings(max_examples=100, deadline=None)
@given(st.lists(FACTS, max_size=30).flatmap(lambda facts: st.tuples(st.just(facts), st.permutations([*facts, *facts]))))
def test_promises_hold_when_everything_is_told_twice(facts):
    for order in facts:
        world = World()
        for fact in order:
            world.take(fact)


# --- what contradicts itself in the detector's state is named ---------------------------------------------------------


@pytest.fixture
def scene():
    scene = scene_of("n1", "n2", w1="n1", w2="n2")
    scene.disconnect("n1")
    return scene


def up_and_lost(state):
    state.lost["n2"] = LostNode(at=state.now)


def ahead(state):
    state.workers["w2"].epoch += 9


def another_s_timer(state):
    state.nodes["n1"].suspect = state.nodes["n1"].suspect.replace("n1", "n2")


def timer_to_come(state):
    state.timers = 0


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (up_and_lost, "n2 is up, and given up"),
        (lambda state: state.workers.pop("w2"), "the books on workers"),
        (lambda state: state.nodes.pop("n2"), "w2: it is watched on n2, which is not up"),
        (lambda state: state.tasks.clear(), "which is not known"),
        (ahead, "w2: it is in membership 9"),
        (another_s_timer, "ends the grace of n1"),
        (timer_to_come, "ends the grace of n1"),
    ],
)
def test_what_contradicts_itself_is_named(scene, plant, words):
    assert scene.detector.validate() == []
    plant(scene.detector.state)
    assert any(words in problem for problem in scene.detector.validate()), scene.detector.validate()
