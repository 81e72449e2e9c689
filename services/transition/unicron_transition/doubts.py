"""What can't be true of a task's workers and plans. Pure functions on `state`.

A worker is known here from before its process starts, so what is said of it is held against what was ordered.
"""

from unicron.contracts.base import Message
from unicron.contracts.events import PlanDecided, WorkerFact
from unicron.core import FAR, too_far
from unicron_transition.state import TransitionState


def doubt(state: TransitionState, message: Message) -> str | None:
    """Return why a fact contradicts what was ordered; None where it does not."""
    match message:
        case PlanDecided(plan=plan):
            return too_far("plan", plan.number, state.plan) if state.plan else None
        case WorkerFact():
            return _of_worker(state, message)
    return None


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
