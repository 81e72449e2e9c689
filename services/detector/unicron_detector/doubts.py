"""Facts that contradict what is known of workers and memberships. Pure functions on `state`.

A worker is ordered before anybody can hear of it, and a membership before anybody can be in it: what was never ordered
never was, whatever the sender.
"""

from unicron.contracts.base import Message
from unicron.contracts.events import WorkerFact, WorkerFinished
from unicron.service.core import gap_problem
from unicron.subjects import TELEMETRY
from unicron_detector.state import DetectorState, TaskRecord, WatchedWorker, worker_number


def find_contradiction(state: DetectorState, message: Message) -> str | None:
    """Return why a fact contradicts earlier ones; None where it does not."""
    if isinstance(message, TELEMETRY):  # it has no order relative to the journal: its subject may not be known yet
        return None
    task = state.tasks.get(getattr(message, "task", ""))
    if (
        task is not None
        and task.epoch >= 0
        and (problem := gap_problem("membership", getattr(message, "epoch", -1), task.epoch))
    ):
        return problem
    if not isinstance(message, WorkerFact):
        return None
    worker = state.workers.get(message.worker)
    if worker is not None and worker.gone_at is not None:
        return None  # an earlier task may have had its name
    return (
        _worker_contradiction(task, worker, message)
        or _membership_contradiction(task, message)
        or _end_contradiction(task, message)
    )


def _end_contradiction(task: TaskRecord | None, fact: WorkerFact) -> str | None:
    """Return why a worker can't have finished; failures after its end would be ignored."""
    if task is None or task.iterations is None or not isinstance(fact, WorkerFinished):
        return None
    short = fact.iterations < task.iterations
    return f"{fact.worker} is through after {fact.iterations} of {task.iterations} iterations" if short else None


def _worker_contradiction(task: TaskRecord | None, worker: WatchedWorker | None, fact: WorkerFact) -> str | None:
    if worker is not None:
        there = (fact.task, fact.node, fact.slot) == (worker.task, worker.node, worker.slot)
        at = f"{worker.task} on {worker.node}:{worker.slot}"
        return None if there else f"{fact.worker} is a worker of {at}, not of {fact.task} there"
    number = worker_number(fact.worker, fact.task)
    if number < 0:
        return f"{fact.worker} never was: workers of {fact.task} are called {fact.task}-NUMBER"
    if task is not None and task.started is not None and number > task.started:
        last = f"the last is {fact.task}-{task.started}" if task.started >= 0 else "it has none yet"
        return f"{fact.worker} was never ordered: {last}"
    return None  # it may have been forgotten, for it ended long ago


def _membership_contradiction(task: TaskRecord | None, fact: WorkerFact) -> str | None:
    """Return why a worker can't be in the epoch that it names.

    Were one believed that is still to come, all that others say of the present one would count as late.
    """
    epoch = getattr(fact, "epoch", -1)
    if task is None or task.ordered is None or epoch <= task.ordered:
        return None
    newest = f"the newest is {task.ordered}" if task.ordered >= 0 else "it has none yet"
    return f"membership {epoch} of {fact.task} was never ordered: {newest}"
