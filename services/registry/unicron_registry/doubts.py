"""Facts about tasks and plans that can't be true. Pure functions on `state`."""

from unicron.contracts.base import Message
from unicron.contracts.events import IterationFinished, PlanDecided, TaskStateChanged
from unicron.service.core import gap_problem
from unicron_registry.state import RegistryState


def find_contradiction(state: RegistryState, message: Message) -> str | None:
    """Return why a fact contradicts what is known; None where it does not."""
    match message:
        case PlanDecided(plan=plan):
            return gap_problem("plan", plan.number, state.plan.number) if state.plan else None
        case TaskStateChanged() | IterationFinished():
            view = state.tasks.get(message.task)
            return gap_problem("membership", message.epoch, view.epoch) if view and view.epoch >= 0 else None
    return None
