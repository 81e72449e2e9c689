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
)
from unicron.contracts.states import KEPT, StateRef
from unicron.core import FAR, too_far
from unicron_transition.state import TransitionState


def doubt(state: TransitionState, message: Message) -> str | None:
    """Return why a fact contradicts what was ordered; None where it does not."""
    match message:
        case PlanDecided(plan=plan):
            return too_far("plan", plan.number, state.plan) if state.plan else None
        case CommandRefused(node=node):
            run = state.tasks.get(message.task)
            worker = run.workers.get(message.worker) if run else None
            there = worker is None or worker.slot.node == node
            return None if worker is None or there else f"{message.worker} runs on {worker.slot}, not on {node}"
        case StateKept(node=node, worker=name, epoch=epoch, state=ref):
            left = (ref.location.node, ref.location.worker, ref.location.name) == (node, name, f"{name}.{epoch}.{KEPT}")
            other = None if left else f"{name} can't have left {ref.location.name} of {ref.location.node} behind on {node}"
            return _of_worker(state, message) or other or _of_state(message.task, ref)
        case StatesFound(node=node, states=states):
            away = next((ref.location for ref in states if ref.location.node != node), None)
            if away is not None:
                return f"{node} can't tell that {away.name} lies on {away.node}"
            return next((why for ref in states if (why := _of_state(message.task, ref))), None)
        case StateCopied(task=task, state=ref) | StateRejected(task=task, state=ref):
            return _of_state(task, ref)
        case WorkerFact():
            return _of_worker(state, message)
    return None


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
    if iteration > run.spec.iterations:
        return f"iteration {iteration}: {fact.task} has {run.spec.iterations}"
    return too_far("epoch", epoch, run.membership.epoch)
