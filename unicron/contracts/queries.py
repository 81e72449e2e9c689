"""Queries and orders, answered over NATS micro services: one request, one reply."""

from unicron.contracts.base import Record
from unicron.contracts.plans import Plan
from unicron.contracts.tasks import Member, NodeState, Slot, TaskSpec, TaskState


class Query(Record, tag_field="type", tag=True, kw_only=True, frozen=True):
    """Base of all requests."""


class GetStatus(Query, kw_only=True, frozen=True):
    """Ask the registry for everything it knows."""


class SubmitTask(Query, kw_only=True, frozen=True):
    """Launch a task. Submitting the same spec again changes nothing."""

    spec: TaskSpec


class RemoveTask(Query, kw_only=True, frozen=True):
    """Stop a task and forget it."""

    task: str


class DrainNode(Query, kw_only=True, frozen=True):
    """Take a node out of use after its workers have moved, or (drain=False) put it back."""

    node: str
    drain: bool = True


class GetPlan(Query, kw_only=True, frozen=True):
    """Ask the planner for its current plan and lookup table."""


class InjectFault(Query, kw_only=True, frozen=True):
    """Ask an agent to break something of its own (chaos).

    Attributes:
        fault: kill-worker, stop-worker, raise or kill-node.
        worker: whom to hit; empty for kill-node.
    """

    fault: str
    worker: str = ""


class NodeView(Record, kw_only=True, frozen=True):
    """A node as the registry knows it."""

    node: str
    state: NodeState
    host: str = ""
    incarnation: str = ""
    slots: list[Slot] = []
    since: float = 0.0


class TaskView(Record, kw_only=True, frozen=True):
    """A task as the registry knows it.

    Attributes:
        waf: weighted FLOP/s that the last iteration achieved, 0 while it does not run.
    """

    spec: TaskSpec
    state: TaskState
    reason: str = ""
    traceback: str = ""
    epoch: int = -1
    members: list[Member] = []
    iteration: int = -1
    loss: float | None = None
    iteration_s: float = 0.0
    waf: float = 0.0


class Status(Record, kw_only=True, frozen=True):
    """Answer to `GetStatus`."""

    nodes: list[NodeView] = []
    tasks: list[TaskView] = []
    plan: Plan | None = None


class TableRow(Record, kw_only=True, frozen=True):
    """One line of the planner's lookup table: what it will do if `event` comes next."""

    event: str
    workers: int
    sizes: dict[str, int]
    reward: float


class PlanView(Record, kw_only=True, frozen=True):
    """Answer to `GetPlan`."""

    plan: Plan | None
    table: list[TableRow]


class Reply(Record, kw_only=True, frozen=True):
    """Answer to any request.

    Attributes:
        error: empty on success, else what was wrong and the cure.
        status, plan: filled in for the queries that ask for them.
        text: a line for a person.
    """

    error: str = ""
    text: str = ""
    status: Status | None = None
    plan: PlanView | None = None
