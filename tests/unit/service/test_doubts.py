"""Facts that contradict a service's state are doubted; late, repeated ones and those of an ended task are not."""

from msgspec.structs import replace
from unicron_detector.doubts import find_contradiction as of_detector
from unicron_detector.state import DetectorState, TaskRecord, WatchedWorker
from unicron_registry.doubts import find_contradiction as of_registry
from unicron_registry.state import RegistryState
from unicron_transition.doubts import find_contradiction as of_transition
from unicron_transition.membership import TaskMembership, WorkerRun
from unicron_transition.state import TaskRun, TransitionState

from unicron.contracts.answers import TaskView
from unicron.contracts.events import CollectiveFailed, PlanDecided, Regrouped, TaskStateChanged, WorkerExited
from unicron.contracts.plans import Plan
from unicron.contracts.tasks import SlotRef, TaskSpec, TaskState
from unicron.service.core import FAR

PLACE = {"node": "n1", "slot": 0, "task": "gpt", "worker": "gpt-1"}
SPEC = TaskSpec(name="gpt", command=["x"], iterations=50)
REGROUPED = Regrouped(**PLACE, epoch=7, rank=0, world_size=1, iteration=3)
EXITED = WorkerExited(**PLACE)
FAR_PLAN = PlanDecided(plan=Plan(number=10**8, trigger="", workers=1))


def transition():
    worker = WorkerRun(worker="gpt-1", slot=SlotRef(node="n1", slot=0))
    run = TaskRun(spec=SPEC, started=1, workers={"gpt-1": worker}, membership=TaskMembership(epoch=7))
    return TransitionState(plan=4, tasks={"gpt": run})


def test_the_transition_service_knows_where_its_workers_are_and_how_far_they_can_be():
    state = transition()
    others = (replace(REGROUPED, epoch=2), replace(EXITED, worker="gpt-2"), replace(EXITED, task="b"))
    for true in (REGROUPED, EXITED, *others):
        assert of_transition(state, true) is None
    assert "runs on n1:0, not on n2:0" in of_transition(state, replace(EXITED, node="n2"))
    assert "iteration 51: gpt has 50" in of_transition(state, replace(REGROUPED, iteration=51))
    assert "can't come after membership 7" in of_transition(state, replace(REGROUPED, epoch=8 + FAR))
    assert "gpt-99999 never was" in of_transition(state, replace(EXITED, worker="gpt-99999"))
    assert "can't come after plan 4" in of_transition(state, FAR_PLAN)
    state.tasks["gpt"].state = TaskState.FINISHED
    assert of_transition(state, replace(EXITED, node="n2")) is None, "an earlier task's, maybe"


def test_the_detector_doubts_what_it_knows_otherwise_and_nothing_that_is_new_to_it():
    state = DetectorState(
        tasks={"gpt": TaskRecord(epoch=7)}, workers={"gpt-1": WatchedWorker(task="gpt", node="n1", slot=0)}
    )
    broken = CollectiveFailed(**PLACE, epoch=8, iteration=3, error="")
    others = (replace(EXITED, worker="gpt-5", node="n3"), replace(EXITED, worker="b-1", task="b"))
    for true in (REGROUPED, EXITED, broken, *others):
        assert of_detector(state, true) is None
    assert "can't come after membership 7" in of_detector(state, replace(broken, epoch=10**7))
    assert "can't come after membership 7" in of_detector(
        state, TaskStateChanged(task="gpt", state="running", epoch=10**7)
    )
    assert "not of gpt there" in of_detector(state, replace(EXITED, node="n2"))
    assert "never was: workers of gpt are called gpt-NUMBER" in of_detector(state, replace(EXITED, worker="x"))
    state.workers["gpt-1"].gone_at = 1.0
    assert of_detector(state, replace(EXITED, node="n2")) is None


def test_the_detector_believes_no_epoch_that_was_not_ordered():
    state = DetectorState(tasks={"gpt": TaskRecord(epoch=7, ordered=8)})
    assert of_detector(state, replace(REGROUPED, epoch=8)) is None
    for worker in ("gpt-1", "gpt-99"):  # of any node: who runs where is not always known
        ahead = replace(REGROUPED, worker=worker, epoch=9)
        assert of_detector(state, ahead) == "membership 9 of gpt was never ordered: the newest is 8"
    state.tasks["gpt"] = TaskRecord(ordered=-1)
    assert of_detector(state, replace(REGROUPED, epoch=0)) == "membership 0 of gpt was never ordered: it has none yet"
    state.workers["gpt-1"] = WatchedWorker(task="gpt", node="n1", slot=0, gone_at=1.0)
    assert of_detector(state, REGROUPED) is None, "of an earlier task of this name, maybe"


def test_the_registry_doubts_epochs_and_plans_far_ahead():
    view = TaskView(spec=SPEC, state=TaskState.RUNNING, epoch=7)
    state = RegistryState(tasks={"gpt": view}, plan=Plan(number=4, trigger="", workers=1))
    changed = TaskStateChanged(task="gpt", state="running", epoch=9)
    assert of_registry(state, changed) is None
    assert "can't come after membership 7" in of_registry(state, replace(changed, epoch=10**7))
    assert "can't come after plan 4" in of_registry(state, FAR_PLAN)
