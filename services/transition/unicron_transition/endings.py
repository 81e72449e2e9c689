"""The end of a task: it has finished, its program failed, or its user has removed it. Pure functions on `state`."""

from unicron.contracts.base import Message
from unicron.healing import way_of
from unicron_transition.deadlines import Deadline, WaitKind
from unicron_transition.moves import MoveCause, move_task
from unicron_transition.reconcile import reconcile
from unicron_transition.state import TaskRun, TransitionState


def end_task(state: TransitionState, task: str, cause: MoveCause, reason: str, traceback: str = "") -> list[Message]:
    """End a task for `cause`: stop its workers, and remove its states from the memory of nodes.

    Nothing happens where the task is unknown or has ended.
    """
    run = state.tasks.get(task)
    if run is None or run.state.ended:
        return []
    out = move_task(state, run, cause, reason, traceback)
    out += run.snapshots.release_parked(state, run) + run.snapshots.drop_exported(state, run)
    state.set_target(run, [])
    out += reconcile(state, [task])  # then its workers are no more
    return out + run.snapshots.drop_saved(state, run) + [Deadline(WaitKind.REGROUP, task).cancel()]


def finish_task(state: TransitionState, run: TaskRun) -> list[Message]:
    """End a task whose last iteration is done.

    Workers that have finished may still be writing their results, so only the others are stopped.
    """
    group, through = run.membership.group, run.membership.through
    silent = [name for name in group if name not in run.workers and name not in through]
    for name in through.keys() & run.workers.keys():
        state.drop_worker(run, name)
    count = f"all {run.spec.iterations} iterations are done"
    reason = count if way_of(run.spec).counts_iterations else "its program is done"
    if silent:
        reason += f"; {', '.join(silent)} ended without saying so: what it was to write then may be missing"
    return end_task(state, run.spec.name, MoveCause.DONE, reason)
