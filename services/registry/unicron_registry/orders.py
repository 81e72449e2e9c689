"""Users' orders to a task: pause, save, stop, go back. Pure functions on the registry's state."""

from collections.abc import Iterable

from msgspec.structs import replace

from unicron.contracts.answers import Reply, TaskView
from unicron.contracts.base import Message
from unicron.contracts.commands import FindCheckpoint, SaveStates
from unicron.contracts.events import (
    Alert,
    CheckpointFailed,
    CheckpointFound,
    CheckpointOrdered,
    CheckpointStored,
    OrdersWithheld,
    TaskPaused,
    TaskRemoved,
    TaskRewound,
    TaskStateChanged,
)
from unicron.contracts.queries import PauseTask, RewindTask, SaveTask
from unicron.contracts.tasks import TaskState
from unicron.errors import InvalidInputError
from unicron_registry.state import RegistryState

NAMED = 10
"""Nodes or tasks that an error names at most."""

Answer = tuple[Reply, list[Message]]


def list_names(known: Iterable[str]) -> str:
    """Return names as an error lists them."""
    every = sorted(known)
    more = f" and {len(every) - NAMED} more" if len(every) > NAMED else ""
    return (", ".join(every[:NAMED]) or "none") + more


def known_task(state: RegistryState, task: str) -> TaskView:
    """Return a task.

    Raises:
        InvalidInputError: there is none of this name.
    """
    view = state.tasks.get(task)
    if view is None:
        raise InvalidInputError(f"no task {task!r}; the known ones are {list_names(state.tasks)}")
    return view


def _living(state: RegistryState, task: str) -> TaskView:
    view = known_task(state, task)
    if view.state.ended:
        raise InvalidInputError(f"task {task} is {view.state}: nothing can be ordered of it any more")
    return view


def _stored_somewhere(state: RegistryState, task: str) -> TaskView:
    view = _living(state, task)
    if not view.spec.checkpoints:
        raise InvalidInputError(f"task {task} has no storage: its task file names none under `checkpoints`")
    return view


def pause(state: RegistryState, query: PauseTask) -> Answer:
    """Take a task's slots off it, or give it back to the planner."""
    task, view = query.task, _living(state, query.task)
    if view.withheld and not query.pause:
        state.tasks[task] = replace(view, withheld="")
        return Reply(text=f"task {task}: what was withheld is ordered now"), [TaskPaused(task=task, paused=False)]
    if view.paused == query.pause:
        return Reply(text=f"task {task} is {'paused' if view.paused else 'not paused'} already; nothing changed"), []
    state.tasks[task] = replace(view, paused=query.pause, stops_after=None, withheld="")
    text = f"task {task} finishes its iteration and keeps its state; unicron task resume {task} has it go on"
    return Reply(text=text if query.pause else f"task {task} is planned for again"), [
        TaskPaused(task=task, paused=query.pause)
    ]


def save(state: RegistryState, query: SaveTask) -> Answer:
    """Have a task's state written to storage now, and maybe the task stopped then."""
    task, view = query.task, _stored_somewhere(state, query.task)
    if view.state != TaskState.RUNNING:
        raise InvalidInputError(
            f"task {task} is {view.state}: only the state of a running task is written; wait until it runs"
        )
    state.tasks[task] = replace(view, stops_after=view.iteration if query.stop else None)
    text = f"task {task} writes its state to {view.spec.checkpoints}{' and is stopped then' if query.stop else ''}"
    return Reply(text=text), [CheckpointOrdered(task=task, after=view.iteration)]


def rewind(state: RegistryState, query: RewindTask) -> Answer:
    """Have a task go on from an earlier checkpoint."""
    task, view = query.task, _stored_somewhere(state, query.task)
    if not 0 <= query.iteration < view.spec.iterations:
        raise InvalidInputError(f"task {task} has iterations 0 to {view.spec.iterations - 1}, not {query.iteration}")
    state.tasks[task] = replace(view, withheld="")
    text = f"task {task} looks for its checkpoint of iteration {query.iteration}, and goes on from there"
    return Reply(text=text), [TaskRewound(task=task, iteration=query.iteration)]


def switch_observing(state: RegistryState, *, on: bool) -> list[Message]:
    """Note whether the cluster only observes; what was withheld is ordered when it does so no more."""
    state.observe_only = on
    if not on:
        state.tasks = {name: replace(view, withheld="") for name, view in state.tasks.items()}
    return []


def record_withheld(state: RegistryState, fact: OrdersWithheld) -> list[Message]:
    """Note what a task waits for a user with."""
    view = state.tasks.get(fact.task)
    if view is not None:
        state.tasks[fact.task] = replace(view, withheld=str(fact) if fact.orders else "")
    return []


def allow_reports(
    state: RegistryState, order: SaveStates | FindCheckpoint, savers: list[str] | None = None
) -> list[Message]:
    """Allow a node to report a task's states from now on."""
    view = state.tasks.get(order.task)
    if view is not None and not view.state.ended:
        there = state.told.setdefault(order.task, {})
        there[order.node] = there.get(order.node, []) if savers is None else savers
    return []


def allow_member_reports(state: RegistryState, change: TaskStateChanged) -> None:
    """Allow the nodes where a task computes to report its states; when it has ended, none."""
    if change.state.ended:
        state.told.pop(change.task, None)
        return
    there = state.told.setdefault(change.task, {})
    for member in change.members:
        there.setdefault(member.node, [])


def _reporting_task(
    state: RegistryState, fact: CheckpointStored | CheckpointFailed | CheckpointFound
) -> TaskView | None:
    """Return the task that a fact is about, if its node may report that."""
    return state.tasks.get(fact.task) if fact.node in state.told.get(fact.task, ()) else None


def stop_if_stored(state: RegistryState, fact: CheckpointStored) -> list[Message]:
    """Stop a task whose state is on storage now, as its user ordered."""
    view = _reporting_task(state, fact)
    if view is None or view.state.ended or view.stops_after is None or fact.iteration <= view.stops_after:
        return []
    reason = f"stopped by a user, with iteration {fact.iteration} in {fact.address}"
    state.tasks[fact.task] = replace(view, state=TaskState.REMOVED, reason=reason, waf=0.0)
    return [TaskRemoved(task=fact.task)]


def record_rewind(state: RegistryState, fact: CheckpointFound) -> list[Message]:
    """Note how far a task is that goes on from storage: less far than it was."""
    view = _reporting_task(state, fact)
    if view is not None and fact.stored is not None:
        state.tasks[fact.task] = replace(view, iteration=fact.stored.iteration - 1)
    return []


def cancel_stop(state: RegistryState, fact: CheckpointFailed) -> list[Message]:
    """Have a task that was to be stopped go on, where its state can't be written."""
    view = _reporting_task(state, fact)
    if view is None or view.stops_after is None:
        return []
    state.tasks[fact.task] = replace(view, stops_after=None)
    text = (
        f"task {fact.task} is not stopped, for its state is not on storage: {fact.reason}; "
        f"mend that and order it again, or give the state up: unicron task stop {fact.task}"
    )
    return [Alert(text=text, node=fact.node)]
