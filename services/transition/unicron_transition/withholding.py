"""Observe only: which orders are withheld, how they are said, and which of them are still due later. Pure functions.

The state of the service goes on as if what is withheld had left and were slow to arrive, which the service has to bear
anyhow. So a user who resumes the task has it done from where it stands.
"""

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from unicron.contracts.base import Message
from unicron.contracts.commands import Regroup, StartWorker
from unicron.contracts.events import OrdersWithheld, TaskStateChanged
from unicron.contracts.plans import TaskShare
from unicron.contracts.tasks import TaskState
from unicron_transition.deadlines import Deadline
from unicron_transition.state import TaskRun, TransitionState
from unicron_transition.withheld import Order, Withheld

LISTED = 20
"""Orders that one fact lists; a membership of thousands has one for each node."""


def is_held(state: TransitionState, task: str) -> bool:
    """Return whether no order about a task leaves."""
    return task in state.withheld and bool(state.withheld[task].orders)


def withhold(state: TransitionState, out: Sequence[Message], tasks: Iterable[str]) -> list[Message]:
    """Keep back the orders about `tasks`; return everything else, with what is said instead of them."""
    kept: dict[str, list[Order]] = {task: [] for task in tasks}
    sent: list[Message] = []
    for message in out:
        if isinstance(message, Order) and message.key in kept:
            kept[message.key].append(message)
        else:
            sent.append(message)
    for task, orders in kept.items():
        if orders:
            state.withheld.setdefault(task, Withheld()).orders += orders
            sent.append(_said(task, [str(order) for order in orders]))
    return [_with_cure(state, message) if isinstance(message, TaskStateChanged) else message for message in sent]


def withhold_share(state: TransitionState, run: TaskRun, share: TaskShare) -> list[Message]:
    """Keep back what a plan gives a task; return what is said of it."""
    shape = share.layout if share.slots and share.layout.replicas else run.shape
    if run.target == share.slots and shape.is_like(run.shape):
        known = state.withheld.get(run.spec.name)
        if known is None or known.share is None:
            return []
        known.share = None
        return [] if known.orders else [_said(run.spec.name, [])]
    state.withheld.setdefault(run.spec.name, Withheld()).share = share
    now, then = len(run.target), len(share.slots)
    if then != now:
        text = f"give {run.spec.name} {then} slots instead of {now}"
    else:
        text = f"move {run.spec.name} to {', '.join(f'{slot.node}:{slot.slot}' for slot in share.slots[:LISTED])}"
    return [_said(run.spec.name, [text])]


def due_orders(state: TransitionState, task: str, withheld: Withheld) -> list[Message]:
    """Return what of the withheld orders about a task is still to be done, and the timers that wait for it.

    They are as from this instance of the service, to nodes as they are now.
    """
    run = state.tasks.get(task)
    workers = run.workers if run else {}
    epoch = run.membership.epoch if run else -1
    due: list[Message] = []
    for order in withheld.orders:
        past = isinstance(order, StartWorker) and order.worker not in workers
        past |= isinstance(order, Regroup) and order.epoch != epoch
        if not past and state.is_there(order.node):
            due.append(replace(order, **state.command_fields(order.node)))
    return [*due, *(Deadline.read(name).set() for name in withheld.timers)]


def _said(task: str, orders: list[str]) -> OrdersWithheld:
    return OrdersWithheld(task=task, orders=orders[:LISTED], more=max(0, len(orders) - LISTED))


def _with_cure(state: TransitionState, change: TaskStateChanged) -> TaskStateChanged:
    """Return how a task stands, with what a user is to do where nothing is done about it."""
    if change.state is TaskState.RUNNING or not is_held(state, change.task):
        return change
    verb = "stop" if change.state.ended else "resume"
    return replace(change, reason=f"observe only, until `unicron task {verb} {change.task}`: {change.reason}")
