"""Tasks that wait in a circle for one another's slots: which workers are stopped. Pure functions on `state`.

A task goes on in its old slots until it can in its new ones. Where two or more that do so wait for slots of one
another, and none has its least number of workers without, that would never end.
"""

from collections.abc import Mapping

from unicron.contracts.tasks import SlotRef
from unicron_transition.membership import WorkerRun, WorkerStage
from unicron_transition.state import TaskRun, TransitionState

Waits = Mapping[str, Mapping[SlotRef, str]]
"""For each task the slots that it waits for, and which task has a worker there."""


def find_wait_cycle(state: TransitionState) -> Waits:
    """Return tasks each of which waits for slots of the next, and the last for those of the first; empty if none."""
    waiting = {name: found for name, run in state.tasks.items() if (found := slots_waited_for(state, run))}
    while going := [name for name in waiting if _has_enough_without(state, name, waiting)]:
        for name in going:
            del waiting[name]
    path: list[str] = []
    name = min(waiting, default="")
    while name and name not in path:
        path.append(name)
        name = next(other for other in waiting[name].values() if other in waiting)
    return {each: waiting[each] for each in path[path.index(name) :]} if name else {}


def slots_waited_for(state: TransitionState, run: TaskRun) -> dict[SlotRef, str]:
    """Return the slots that a task waits for; one that has too few even with them waits for another plan instead."""
    usable = [] if run.state.ended else state.usable(run.target)
    there = ((slot, state.occupied.get(slot)) for slot in usable)
    found = {slot: other.task for slot, other in there if other and other.task != run.spec.name}
    return found if found and len(usable) >= run.fewest_workers else {}


def choose_workers_to_stop(state: TransitionState, tied: Waits) -> tuple[TaskRun, list[WorkerRun], str]:
    """Return which task of the cycle gives which workers up, and why; the least weighty task first.

    One worker for each place of its state stays, until its state is in other slots. Only if that is of no help to
    anybody, and nothing is on its way that could be, a task loses its state and begins anew.
    """
    runs = sorted((state.tasks[name] for name in tied), key=lambda run: (run.spec.weight, run.spec.name))
    contested = {slot for slots in tied.values() for slot in slots}
    for run in runs:
        if spare := _spare_workers(run, contested):
            return run, spare, "another task waits for its slot, and this task can't compute before that goes on"
    if any(_is_changing(state, run) for run in runs):
        return runs[0], [], ""
    last = [worker for worker in runs[0].workers.values() if worker.slot in contested]
    return runs[0], last, "tasks wait for each other's slots, and there is none through which a state could be handed"


def _has_enough_without(state: TransitionState, name: str, waiting: Waits) -> bool:
    """Return whether a task gets its least number of workers without the slots of `waiting` tasks."""
    run = state.tasks[name]
    stuck = sum(other in waiting for other in waiting[name].values())
    return len(state.usable(run.target)) - stuck >= run.fewest_workers


def _spare_workers(run: TaskRun, contested: set[SlotRef]) -> list[WorkerRun]:
    """Return the workers in contested slots without which the task still has its state."""
    ready = run.ready_workers()
    held = run.held_places(name for name in ready if run.workers[name].slot not in contested)
    spare = []
    for name, worker in run.workers.items():
        if worker.slot in contested:
            own = run.holders.get(name) if worker.stage is WorkerStage.READY else None
            if own is None or own.place in held:
                spare.append(worker)
            else:
                held.add(own.place)
    return spare


def _is_changing(state: TransitionState, run: TaskRun) -> bool:
    """Return whether workers of a task are on their way or about to be, or its members on the way to one another."""
    starting = any(worker.stage is WorkerStage.STARTING for worker in run.workers.values())
    free = any(slot not in state.occupied for slot in state.usable(run.target))
    return starting or free or (run.membership.intact(run.workers) and not run.membership.complete)
