"""Facts that contradict what was ordered of a task's workers. Pure functions on `state`.

A worker is known here from before its process starts, so what is said of it is held against what was ordered.
"""

from unicron.contracts.base import Message
from unicron.contracts.events import (
    CommandRefused,
    PlanDecided,
    StateCopied,
    StateKept,
    StateRejected,
    StatesFound,
    WorkerFact,
    WorkerFinished,
)
from unicron.contracts.states import StateRef
from unicron.service.core import FAR, gap_problem
from unicron.snapshots.names import exported_name
from unicron_transition.state import TransitionState


def find_contradiction(state: TransitionState, message: Message) -> str | None:
    """Return why a fact contradicts what was ordered; None where it does not."""
    problem: str | None = None
    match message:
        case PlanDecided(plan=plan) if state.plan:
            problem = gap_problem("plan", plan.number, state.plan)
        case CommandRefused(node=node, worker=name):
            run = state.tasks.get(message.task)
            worker = run.workers.get(name) if run else None
            if worker is not None and worker.slot.node != node:
                problem = f"{name} runs on {worker.slot}, not on {node}"
        case StateKept():
            problem = (
                _worker_contradiction(state, message)
                or _export_contradiction(message)
                or _state_contradiction(message.task, message.state)
            )
        case StatesFound(node=node, task=task, states=states):
            away = (
                f"{node} can't tell what lies on {ref.location.node}" for ref in states if ref.location.node != node
            )
            problem = next(away, None) or next(
                (why for ref in states if (why := _state_contradiction(task, ref))), None
            )
        case StateCopied(task=task, state=ref) | StateRejected(task=task, state=ref):
            problem = _state_contradiction(task, ref)
        case WorkerFact():
            problem = _worker_contradiction(state, message)
    return problem


def _export_contradiction(fact: StateKept) -> str | None:
    """Return why a worker can't have exported a state of that name, which would then stand for another one."""
    where, name = fact.state.location, exported_name(fact.worker, fact.epoch, kept=True)
    left = (where.node, where.worker, where.name) == (fact.node, fact.worker, name)
    return None if left else f"{fact.worker} can't have left {where.name} of {where.node} behind on {fact.node}"


def _state_contradiction(task: str, ref: StateRef) -> str | None:
    """Return why a copy can't be one of this task; removing it would remove another task's state."""
    writer = ref.location.name.partition(".")[0]
    own = ref.task == task == writer.rpartition("-")[0] and writer == ref.location.worker
    return None if own else f"{ref.location.name} of {ref.location.worker} is no copy of a state of {task}"


def _worker_contradiction(state: TransitionState, fact: WorkerFact) -> str | None:
    run = state.tasks.get(fact.task)
    if run is None or run.state.ended:
        return None
    worker, number = run.workers.get(fact.worker), fact.worker.rpartition("-")[2]
    if worker is None:
        never = number.isdecimal() and int(number) > run.started + FAR
        return f"{fact.worker} never was: {run.started} workers of {fact.task} were started" if never else None
    if (fact.node, fact.slot) != (worker.slot.node, worker.slot.slot):
        return f"{fact.worker} runs on {worker.slot}, not on {fact.node}:{fact.slot}"
    iteration, epoch = getattr(fact, "iteration", -1), getattr(fact, "epoch", -1)
    if isinstance(fact, WorkerFinished):
        iteration = fact.iterations
        if iteration < run.spec.iterations:
            return f"{fact.worker} can't be through after {iteration} iterations: {fact.task} has {run.spec.iterations}"
    if iteration > run.spec.iterations:
        return f"iteration {iteration}: {fact.task} has {run.spec.iterations}"
    return gap_problem("membership", epoch, run.membership.epoch)
