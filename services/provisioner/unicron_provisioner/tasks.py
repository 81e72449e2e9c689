"""The nodes that tasks can use, and where they compute, as the provisioner sees it. Pure functions on `state`."""

from unicron.contracts.events import PlanDecided, TaskPaused, TaskRemoved, TaskStateChanged, TaskSubmitted
from unicron_provisioner.state import State, Task


def submitted(state: State, fact: TaskSubmitted) -> None:
    """Take in a task that is new, or has other limits than one of its name that has ended."""
    before = state.tasks.get(fact.task, Task())
    state.tasks[fact.task] = Task(most=max(0, fact.spec.max_workers), computing=before.computing)


def paused(state: State, fact: TaskPaused) -> None:
    """Take in that a task is to have no slots, or some again."""
    if fact.task in state.tasks:
        state.tasks[fact.task].paused = fact.paused


def removed(state: State, fact: TaskRemoved) -> None:
    """Take in that a task can use nothing any more; where it computes is said when that ends."""
    if fact.task in state.tasks:
        state.tasks[fact.task].most = 0


def changed(state: State, fact: TaskStateChanged, now: float) -> None:
    """Take in where a task computes."""
    if fact.state.ended:
        state.tasks.pop(fact.task, None)
    elif fact.task in state.tasks:
        state.tasks[fact.task].computing = sorted({member.node for member in fact.members})
    state.note_quiet(now)


def planned(state: State, fact: PlanDecided, now: float) -> None:
    """Take in which nodes tasks are given; what a plan does not mention stays as it was."""
    shares = {share.task: share for share in fact.plan.shares}
    for name, task in state.tasks.items():
        if name in shares:
            task.planned = sorted({slot.node for slot in shares[name].slots})
        elif name not in fact.plan.tasks:
            task.planned = []
    state.note_quiet(now)
