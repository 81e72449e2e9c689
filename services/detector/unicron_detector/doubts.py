"""What can't be true of workers and memberships. Pure functions on `state`.

A worker may be heard of here for the first time when it ends, so only what is known of it is held against a fact.
"""

from unicron.contracts.base import Message
from unicron.contracts.events import WorkerFact
from unicron.core import too_far
from unicron_detector.state import State, Task, Worker


def doubt(state: State, message: Message) -> str | None:
    """Return why a fact contradicts what was heard before; None where it does not."""
    task = state.tasks.get(getattr(message, "task", ""))
    if (
        task is not None
        and task.epoch >= 0
        and (problem := too_far("epoch", getattr(message, "epoch", -1), task.epoch))
    ):
        return problem
    if not isinstance(message, WorkerFact):
        return None
    worker = state.workers.get(message.worker)
    if worker is not None and worker.gone_at is not None:
        return None  # an earlier task may have had its name
    return _of_worker(worker, message) or _of_membership(task, message)


def _of_worker(worker: Worker | None, fact: WorkerFact) -> str | None:
    if worker is None:
        task, _, number = fact.worker.rpartition("-")
        named = number.isdecimal() and task == fact.task
        return None if named else f"{fact.worker} never was: workers of {fact.task} are called {fact.task}-NUMBER"
    if (fact.task, fact.node, fact.slot) != (worker.task, worker.node, worker.slot):
        return f"{fact.worker} is a worker of {worker.task} on {worker.node}:{worker.slot}, not of {fact.task} there"
    return None


def _of_membership(task: Task | None, fact: WorkerFact) -> str | None:
    """Return why a worker can't be in the epoch that it names.

    Were one believed that is still to come, all that others say of the present one would count as late.
    """
    epoch = getattr(fact, "epoch", -1)
    if task is None or task.ordered is None or epoch <= task.ordered:
        return None
    newest = f"the newest is {task.ordered}" if task.ordered >= 0 else "it has none yet"
    return f"epoch {epoch} of {fact.task} was never ordered: {newest}"
