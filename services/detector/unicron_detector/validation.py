"""Invariants of the detector's state after each message, whatever has happened.

Nothing in production asks: a service goes on as well as it can. Storms do, so that what is wrong shows where it begins.
"""

from collections.abc import Iterator

from unicron_detector.books import RecordIndex
from unicron_detector.state import DetectorState, TaskRecord, WatchedWorker
from unicron_detector.timers import DetectorTimer, TimerKind


def inconsistencies(state: DetectorState, books: RecordIndex) -> Iterator[str]:
    """Yield what contradicts itself in a state and the books on it, in words."""
    if vars(RecordIndex(state)) != vars(books):
        yield "the books on workers and suspect nodes are not of this state"
    for name in state.nodes.keys() & state.lost.keys():
        yield f"{name} is up, and given up"
    for name, node in state.nodes.items():
        if node.suspect and not _is_ours(state, node.suspect, TimerKind.GRACE, name):
            yield f"{node.suspect} ends the grace of {name}"
    for name, task in state.tasks.items():
        yield from (f"{name}: {problem}" for problem in _of_task(state, name, task))
    for name, worker in state.workers.items():
        if worker.gone_at is None:
            yield from (f"{name}: {problem}" for problem in _of_watched(state, worker))


def _of_task(state: DetectorState, name: str, task: TaskRecord) -> Iterator[str]:
    if task.pending is not None:
        if task.closed:
            yield "nothing more is to be said about it, and something waits to be"
        if not _is_ours(state, task.pending.timer, TimerKind.HOLD, name):
            yield f"{task.pending.timer} ends the wait for the cause of what failed"
    if task.ordered is not None and task.failed_epoch > max(task.ordered, task.epoch):
        yield f"it failed in membership {task.failed_epoch}, and none after {task.ordered} was ordered"


def _of_watched(state: DetectorState, worker: WatchedWorker) -> Iterator[str]:
    task = state.tasks.get(worker.task)
    if worker.node not in state.nodes:
        yield f"it is watched on {worker.node}, which is not up"
    if task is None:
        yield f"it is watched as a worker of {worker.task}, which is not known"
    elif worker.epoch > task.epoch:
        yield f"it is in membership {worker.epoch}, and {worker.task} has come to {task.epoch}"


def _is_ours(state: DetectorState, timer: str, kind: TimerKind, about: str) -> bool:
    """Return whether a timer is one of those asked for, for this."""
    read = DetectorTimer.read(timer)
    return (read.kind, read.about) == (kind, about) and read.number <= state.timers
