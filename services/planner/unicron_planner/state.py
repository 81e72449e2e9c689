"""What the planner remembers."""

import msgspec

from unicron.contracts.base import Record
from unicron.contracts.plans import Plan
from unicron.contracts.tasks import TaskSpec
from unicron_planner.throughput import Measured


class Node(Record, kw_only=True, frozen=True):
    """A node that has been admitted.

    Attributes:
        slots: numbers of its slots.
        up: False from its loss until it is admitted again.
    """

    slots: list[int]
    up: bool = True


class Row(Record, kw_only=True, frozen=True):
    """One answer of the lookup table.

    Attributes:
        event: what it is the answer to, for instance "node_lost:node-3".
        workers: n' after that event.
        sizes: workers of each task that is left after it.
        reward: sum of G (equation 3).
        runner_up_reward: that of the best other assignment, None where there is none.
    """

    event: str
    workers: int
    sizes: dict[str, int]
    reward: float
    runner_up_reward: float | None = None


class PlannerState(msgspec.Struct, kw_only=True):
    """Committed with every plan.

    Attributes:
        nodes: by name, lost ones included.
        drained: nodes that a user took out of use; holds over their loss and return.
        tasks: those that are not ended, in order of submission.
        leaving: tasks that a user removed, until the transition service says that their workers are gone.
        plan: the last one that was sent out.
        table: by event; empty from a change of the cluster until it is made again.
        measured: iteration times by task and size.
        epochs: membership epoch of each task's last iteration.
        failures: sev1 failures seen.
        worker_seconds: time that usable slots were exposed to failure, added up over them.
        clock: Unix seconds of the newest fact, 0 before the first.
    """

    nodes: dict[str, Node] = {}
    drained: list[str] = []
    tasks: dict[str, TaskSpec] = {}
    leaving: list[str] = []
    plan: Plan | None = None
    table: dict[str, Row] = {}
    measured: dict[str, dict[int, Measured]] = {}
    epochs: dict[str, int] = {}
    failures: int = 0
    worker_seconds: float = 0.0
    clock: float = 0.0
