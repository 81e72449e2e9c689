"""A node's facts about tasks that it has no part in have no effect, whatever they are, and at any time.

The table is each type of fact that a node may say, of another's worker, one that never was, and one that is gone, with
numbers of now and of times to come, while a task starts, runs, is saved and stopped, is looked for, and is paused.
"""

import itertools

import pytest
from helpers.cores import Cores
from unicron_simulator.storms.forged_facts import ABOUT_TASKS, CLAIMS, Claim

from unicron import codec
from unicron.contracts.base import AGENT, CancelTimer, SetTimer
from unicron.contracts.commands import Command, CopyState, FindStates, Regroup, StartWorker
from unicron.contracts.events import (
    NodeHeartbeat,
    NodeJoined,
    NodeLeaving,
    NodeLeft,
    WorkerExited,
    WorkerRaised,
)
from unicron.contracts.hardware import GpusSampled
from unicron.contracts.queries import DrainNode, PauseTask, SaveTask, SubmitTask
from unicron.contracts.tasks import Slot, TaskSpec, TaskState
from unicron.contracts.watchdogs import LogPattern

WATCHED = {"watch_log": [LogPattern(pattern="x", absent_for_s=60.0)], "checkpoints": "/r"}
SPEC = TaskSpec(name="gpt", command=["x"], min_workers=4, max_workers=4, iterations=50, **WATCHED)
ROOT = {"root": SPEC.checkpoints}


def starting():
    cores = Cores("b", "c", silent=[StartWorker])
    cores.order(SubmitTask(spec=SPEC))
    return cores


def running(silent=(), *nodes):
    cores = Cores(*nodes or ("b", "c"))
    cores.order(SubmitTask(spec=SPEC))
    assert cores.run("gpt").state is TaskState.RUNNING
    cores.silent |= set(silent)
    return cores


def stopping():
    cores = running()
    cores.order(SaveTask(task="gpt", stop=True))
    return cores


def searching():
    """All of its workers have been killed, and their nodes are asked for copies."""
    cores = running([StartWorker, FindStates, Regroup])
    there = [(name, worker.slot) for name, worker in cores.run("gpt").workers.items()]
    cores.say(*(WorkerExited(node=at.node, slot=at.slot, task="gpt", worker=name, signal=9) for name, at in there))
    assert cores.run("gpt").snapshots.search
    return cores


def pausing():
    """Its workers are to leave their states behind."""
    cores = running([Regroup])
    cores.order(PauseTask(task="gpt"))
    assert cores.run("gpt").membership.leaving
    return cores


def evacuating():
    """What they have left behind lies on nodes that are to go."""
    cores = running([CopyState], "b", "c", "d")
    cores.order(PauseTask(task="gpt"))
    for node in {ref.location.node for ref in cores.run("gpt").snapshots.parked.states}:
        cores.order(DrainNode(node=node))
    assert cores.run("gpt").snapshots.parking.copying
    return cores


PHASES = (starting, running, stopping, searching, pausing, evacuating)


def claims(cores, node):
    """Return what may be claimed under the name of a node: of workers of others, and of such as are not."""
    run = cores.run("gpt")
    names, homes = ("gpt-1", f"gpt-{run.started}", "gpt-901"), (node, "b", "c", "d")
    epochs = (run.membership.epoch, run.membership.epoch + 1, 5000, 10**6)
    for worker, home, epoch, slot in itertools.product(names, homes, epochs, (0, 1)):
        numbers = {"epoch": epoch, "iteration": 5, "search": run.snapshots.searches, **ROOT}
        yield Claim(node=node, slot=slot, task="gpt", worker=worker, home=home, **numbers)


def of_others(out, node):
    """Return what concerns others than a node."""
    return [each for each in out if not (isinstance(each, Command | SetTimer | CancelTimer) and each.node == node)]


def test_the_table_has_every_fact_that_a_node_may_say():
    assert set(CLAIMS) >= {kind for kind in codec.MESSAGES.values() if kind.SENDER == AGENT}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", ABOUT_TASKS)
def test_of_a_task_without_part_of_it_a_node_can_say_nothing(phase, kind):
    cores = phase()
    joined = NodeJoined(node="a", incarnation="1.1", host="a", slots=[Slot(index=0), Slot(index=1)])
    cores.say(joined)
    cores.cores["transition"].state.partners("a")  # what follows from who is there is worked out when it is asked for
    run = cores.run("gpt")
    assert not run.snapshots.takes_part(run, "a")
    before = cores.states()
    for claim in claims(cores, "a"):
        out = cores.heard(CLAIMS[kind](claim))
        assert of_others(out, "a") == [], claim
        changed = [name for name, state in cores.states().items() if state != before[name]]
        assert changed == [], claim


@pytest.mark.parametrize("kind", [NodeJoined, NodeLeft, NodeLeaving, NodeHeartbeat, GpusSampled])
def test_what_a_node_says_of_itself_moves_no_worker_of_others(kind):
    cores = running()
    workers, watched = dict(cores.run("gpt").workers), dict(cores.cores["detector"].state.workers)
    for claim in claims(cores, "a"):
        out = cores.say(CLAIMS[kind](claim))
        assert [each for each in out if isinstance(each, Command) and each.node != "a"] == [], claim
    assert cores.run("gpt").workers == workers
    assert cores.cores["detector"].state.workers == watched


def test_of_its_own_workers_a_node_is_believed():
    believed = set()
    for phase, kind in itertools.product(PHASES, ABOUT_TASKS):
        cores = phase()
        run, before, out = cores.run("gpt"), cores.states(), []
        places = [(name, worker.slot.node, worker.slot.slot) for name, worker in run.workers.items()]
        if phase is evacuating:
            lie = [
                (each.state.location.worker, each.state.location.node, each.keeper.node)
                for each in run.snapshots.parking.copying
            ]
        else:
            lie = [(name, node, node) for name, node, _ in places] or [("gpt-1", "b", "b")]
        for name, node, home in lie:
            slot = next((slot for worker, _, slot in places if worker == name), 0)
            numbers = {"epoch": run.membership.epoch, "iteration": 50, "search": run.snapshots.searches, **ROOT}
            out += cores.heard(CLAIMS[kind](Claim(node=node, slot=slot, task="gpt", worker=name, home=home, **numbers)))
        if out or cores.states() != before:
            believed.add(kind)
    missing = {kind.__name__ for kind in ABOUT_TASKS} - {kind.__name__ for kind in believed}
    assert missing == {"ComputeTimed"}, "statistics beside a core overhear that"


def test_two_workers_that_never_were_break_no_task():
    cores = running()
    for worker in ("gpt-901", "gpt-902"):
        told = {"iteration": 5, "exception": "ValueError", "text": "x", "traceback": ""}
        assert of_others(cores.say(WorkerRaised(node="b", slot=0, task="gpt", worker=worker, **told)), "") == []
