"""What can't be true of nodes and plans. Pure functions on `state`."""

from unicron.contracts.base import Message
from unicron.contracts.events import NodeAdmitted, PlanDecided
from unicron.service.core import too_far
from unicron_planner.state import PlannerState


def doubt(state: PlannerState, message: Message) -> str | None:
    """Return why a fact contradicts what is known; None where it does not."""
    match message:
        case NodeAdmitted(node=node, slots=slots):
            indices = [slot.index for slot in slots]
            if not indices or len(set(indices)) < len(indices) or min(indices) < 0:
                return f"{node} can't have the slots {indices}: each needs a number of its own, from 0"
        case PlanDecided(plan=plan):
            return too_far("plan", plan.number, state.plan.number) if state.plan else None
    return None
