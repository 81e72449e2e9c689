"""The transitions of a task's state."""

from enum import StrEnum

from unicron.contracts.base import Message
from unicron.contracts.events import TaskStateChanged
from unicron.contracts.tasks import TaskState
from unicron_transition.state import TaskRun, TransitionState


class MoveCause(StrEnum):
    """What moves a task."""

    SLOTS = "slots"
    """A plan gives it other slots."""
    NO_SLOTS = "no_slots"
    """A plan takes all slots from it."""
    FAILURE = "failure"
    """Something failed that it needs."""
    HELD = "held"
    """What it is to leave behind finds no room: it waits as it is."""
    COMPLETE = "complete"
    """All members of its newest membership compute."""
    DONE = "done"
    """Its last iteration is done."""
    OWN_FAULT = "own_fault"
    """Its own program is at fault."""
    USER = "user"
    """Its user removed it."""


_ENDS = {MoveCause.DONE: TaskState.FINISHED, MoveCause.OWN_FAULT: TaskState.FAILED, MoveCause.USER: TaskState.REMOVED}
_WITH_SLOTS = {
    **_ENDS,
    MoveCause.NO_SLOTS: TaskState.WAITING,
    MoveCause.FAILURE: TaskState.RECOVERING,
    MoveCause.HELD: TaskState.RECOVERING,
    MoveCause.COMPLETE: TaskState.RUNNING,
}

MOVES: dict[TaskState, dict[MoveCause, TaskState]] = {
    TaskState.WAITING: {**_ENDS, MoveCause.SLOTS: TaskState.STARTING, MoveCause.HELD: TaskState.WAITING},
    TaskState.STARTING: {**_WITH_SLOTS, MoveCause.SLOTS: TaskState.STARTING},
    TaskState.RUNNING: {**_WITH_SLOTS, MoveCause.SLOTS: TaskState.RECONFIGURING},
    TaskState.RECONFIGURING: {**_WITH_SLOTS, MoveCause.SLOTS: TaskState.RECONFIGURING},
    TaskState.RECOVERING: _WITH_SLOTS,  # from a failure it recovers in whatever slots
}
"""What is not in it moves nothing, and is not published; the ends are final. A move to the same state is a move too."""


def move_task(
    state: TransitionState, run: TaskRun, cause: MoveCause, reason: str, traceback: str = ""
) -> list[Message]:
    """Change a task's state as `cause` demands, and return the fact that it changed."""
    moved = MOVES.get(run.state, {}).get(cause)
    if moved is None:
        return []
    run.state = moved
    return [
        TaskStateChanged(
            task=run.spec.name,
            state=moved,
            epoch=run.membership.epoch,
            members=state.members(run),
            reason=reason,
            traceback=traceback,
        )
    ]
