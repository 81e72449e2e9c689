"""Alerts about missing things: a task of which nothing runs, and lines that nobody writes. Pure on `state`."""

from unicron.contracts.answers import TaskView
from unicron.contracts.base import CancelTimer, Message, SetTimer
from unicron.contracts.events import Alert, PatternMissed
from unicron.contracts.tasks import NodeState, TaskState
from unicron.contracts.watchdogs import AlertKind
from unicron_registry.state import RegistryState

IDLE = "idle:"
"""How the names of the timers begin that look after tasks; the name of the task follows."""

IDLE_S = 1800.0
AGAIN_S = 6 * 3600.0
"""Time to the next alert of the same, as long as it lasts."""


def follow(state: RegistryState, task: str, now: TaskState, idle_s: float) -> list[Message]:
    """Look after a task from when nothing of it runs until something does.

    Args:
        state: of the registry.
        task: its name.
        now: how it stands now.
        idle_s: seconds until it is looked at.
    """
    runs = now == TaskState.RUNNING or now.ended
    if now.ended:
        state.missed.pop(task, None)
    if runs and task in state.idle:
        state.idle.remove(task)
        return [CancelTimer(name=IDLE + task)]
    if runs or task in state.idle:
        return []
    state.idle.append(task)
    return [SetTimer(name=IDLE + task, after_s=idle_s)]


def look(state: RegistryState, task: str, idle_s: float) -> list[Message]:
    """Alert if nothing of a task has run for `idle_s` without a reason; look again later."""
    view = state.tasks.get(task)
    if task not in state.idle or view is None:
        return []
    why = _why_idle(state, view)
    again = SetTimer(name=IDLE + task, after_s=AGAIN_S if why else idle_s)
    text = f"nothing of task {task} has run for {idle_s / 60:.0f} minutes and more: {why}"
    return [Alert(text=text, task=task, kind=AlertKind.TASK_IDLE), again] if why else [again]


def _why_idle(state: RegistryState, view: TaskView) -> str:
    """Return why nothing of a task runs that should; empty where it is paused, or waits for others to end."""
    if view.paused or view.state.ended:
        return ""
    if view.state != TaskState.WAITING:
        return f"it is {view.state}{': ' * bool(view.reason)}{view.reason}"
    need = min(view.spec.sizes, default=view.spec.min_workers)
    have = sum(len(node.slots) for node in state.nodes.values() if node.state == NodeState.UP)
    if have < need:
        return f"it needs {need} slots, and the nodes in use have {have}"
    queued = any(each.members for each in state.tasks.values() if each is not view)
    return "" if queued else f"it waits, though {have} slots are there: {view.reason}"


def missed(state: RegistryState, fact: PatternMissed) -> list[Message]:
    """Alert if no node that computes for a task has seen a line that it should write."""
    view = state.tasks.get(fact.task)
    if view is None or view.state.ended or fact.pattern not in {each.pattern for each in view.spec.watch_log}:
        return []
    computing = {member.node for member in view.members}
    if fact.node not in computing:
        return []
    nodes = state.missed.setdefault(fact.task, {}).setdefault(fact.pattern, [])
    nodes[:] = [node for node in nodes if node in computing and node != fact.node]
    if fact.missing:
        nodes.append(fact.node)
    if not computing.issubset(nodes):
        return []
    when = "since it started" if fact.first else f"for {fact.limit_s:g} s"
    text = f"nothing that task {fact.task} wrote {when} matches {fact.pattern!r}; {fact.limit_s:g} s are allowed"
    return [Alert(text=text, task=fact.task, kind=AlertKind.LOG)]
