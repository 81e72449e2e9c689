"""What can't be true of tasks and plans. Pure functions on `state`."""

from unicron.contracts.base import Message
from unicron.contracts.events import IterationFinished, PlanDecided, TaskStateChanged
from unicron.service.core import too_far
from unicron_registry.state import RegistryState


def doubt(state: RegistryState, message: Message) -> str | None:
    """Return why a fact contradicts what is known; None where it does not."""
    match message:
        case PlanDecided(plan=plan):
            return too_far("plan", plan.number, state.plan.number) if state.plan else None
        case TaskStateChanged() | IterationFinished():
            view = state.tasks.get(message.task)
            return too_far("epoch", message.epoch, view.epoch) if view and view.epoch >= 0 else None
    return None
