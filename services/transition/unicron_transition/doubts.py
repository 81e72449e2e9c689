"""What can't be true of a task's workers and plans. Pure functions on `state`.

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
from unicron.contracts.states import KEPT, StateRef
from unicron.service.core import FAR, too_far
from unicron_transition.state import TransitionState


def doubt(state: TransitionState, message: Message) -> str | None:
    """Return why a fact contradicts what was ordered; None where it does not."""
    problem: str | None = None
    match message:
        case PlanDecided(plan=plan) if state.plan:
            problem = too_far("plan", plan.number, state.plan)
        case CommandRefused(node=node, worker=name):
            run = state.tasks.get(message.task)
            worker = run.workers.get(name) if run else None
            if worker is not None and worker.slot.node != node:
                problem = f"{name} runs on {worker.slot}, not on {node}"
        case StateKept():
            problem = _of_worker(state, message) or _left_behind(message) or _of_state(message.task, message.state)
        case StatesFound(node=node, task=task, states=states):
            away = (
                f"{node} can't tell what lies on {ref.location.node}" for ref in states if ref.location.node != node
            )
            problem = next(away, None) or next((why for ref in states if (why := _of_state(task, ref))), None)
        case StateCopied(task=task, state=ref) | StateRejected(task=task, state=ref):
            problem = _of_state(task, ref)
        case WorkerFact():
            problem = _of_worker(state, message)
    return problem


def _left_behind(fact: StateKept) -> str | None:
    """Return why a worker can't have left a state behind under that name; others of it would be taken for that."""
    where, name = fact.state.location, f"{fact.worker}.{fact.epoch}.{KEPT}"
    left = (where.node, where.worker, where.name) == (fact.node, fact.worker, name)
    return None if left else f"{fact.worker} can't have left {where.name} of {where.node} behind on {fact.node}"


def _of_state(task: str, ref: StateRef) -> str | None:
    """Return why a copy is none of a task's: an order to remove it would be about another's."""
    writer = ref.location.name.partition(".")[0]
    own = ref.task == task == writer.rpartition("-")[0] and writer == ref.location.worker
    return None if own else f"{ref.location.name} of {ref.location.worker} is no copy of a state of {task}"


def _of_worker(state: TransitionState, fact: WorkerFact) -> str | None:
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
    return too_far("epoch", epoch, run.membership.epoch)
