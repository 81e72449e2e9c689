"""What can't be true of workers and memberships. Pure functions on `state`.

A worker may be heard of here for the first time when it ends, so only what is known of it is held against a fact.
"""

from unicron.contracts.base import Message
from unicron.contracts.events import WorkerFact
from unicron.core import too_far
from unicron_detector.state import State


def doubt(state: State, message: Message) -> str | None:
    """Return why a fact contradicts what was heard before; None where it does not."""
    task = state.tasks.get(getattr(message, "task", ""))
    if (
        task is not None
        and task.epoch >= 0
        and (problem := too_far("epoch", getattr(message, "epoch", -1), task.epoch))
    ):
        return problem
    return _of_worker(state, message) if isinstance(message, WorkerFact) else None


def _of_worker(state: State, fact: WorkerFact) -> str | None:
    worker = state.workers.get(fact.worker)
    if worker is None:
        task, _, number = fact.worker.rpartition("-")
        named = number.isdecimal() and task == fact.task
        return None if named else f"{fact.worker} never was: workers of {fact.task} are called {fact.task}-NUMBER"
    if worker.gone_at is not None:
        return None  # an earlier task may have had its name
    if (fact.task, fact.node, fact.slot) != (worker.task, worker.node, worker.slot):
        return f"{fact.worker} is a worker of {worker.task} on {worker.node}:{worker.slot}, not of {fact.task} there"
    return None
