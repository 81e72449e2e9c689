"""Plans that can't be true. Pure functions on `state`."""

from unicron.contracts.base import Message
from unicron.contracts.events import PlanDecided
from unicron.service.core import gap_problem
from unicron_planner.state import PlannerState


def find_contradiction(state: PlannerState, message: Message) -> str | None:
    """Return why a fact contradicts what is known; None where it does not."""
    if isinstance(message, PlanDecided) and state.plan:
        return gap_problem("plan", message.plan.number, state.plan.number)
    return None
