"""The state of the planner."""

from copy import copy
from typing import Annotated

import msgspec

from unicron.contracts.base import Record
from unicron.contracts.plans import Plan
from unicron.contracts.ranges import Amount, Count, Label, Moment, Number
from unicron.contracts.tasks import TaskSpec
from unicron_planner.throughput import MeasuredSize

LEARNT = ("measured", "epochs", "disturbed", "transitions", "failures", "worker_seconds", "believed_rate", "clock")
"""Fields seen of the cluster, and what follows from them: where something impossible was stored, it looks again."""

Exposure = Annotated[float, msgspec.Meta(ge=0, le=1e17)]
"""Worker-seconds: no more than a hundred million workers in thirty years."""

Rate = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
"""Failures a second and worker."""


class AdmittedNode(Record, kw_only=True, frozen=True):
    """A node that has been admitted.

    Attributes:
        slots: numbers of its slots.
        up: False from its loss until it is admitted again.
        rack, domain: as in `NodeJoined`.
    """

    slots: list[Number]
    up: bool = True
    rack: Label = ""
    domain: Label = ""


class DurationSums(Record, kw_only=True, frozen=True):
    """Running sums of durations.

    Attributes:
        count: how many, the older ones counting less.
        seconds: their sum.
        believed_s: the mean that plans are made with, 0 before the first.
    """

    count: Amount = 0.0
    seconds: Amount = 0.0
    believed_s: Amount = 0.0


class PlannerState(msgspec.Struct, kw_only=True):
    """Committed with every plan. The lookup table is not in it: it follows from the rest.

    Attributes:
        nodes: by name, lost ones included.
        drained: nodes that a user took out of use; holds over their loss and return.
        tasks: those that are not ended, in order of submission.
        paused: those that a user took all slots off; nothing is planned for them.
        joined: nodes that are to be planned for together, in a moment.
        plan: the last one that was sent out.
        measured: iteration times by task and size.
        epochs: membership epoch of each task's last iteration.
        disturbed: tasks on their way to full membership, and whether by "failure", "resize" or "relayout".
        transitions: how long that took, by kind.
        failures: sev1 failures seen.
        worker_seconds: time that usable slots were exposed to failure, added up over them.
        exposed: usable slots since the newest change.
        believed_rate: failures a second and worker that plans are made with, 0 before the first.
        clock: Unix seconds of the newest fact, 0 before the first.
    """

    nodes: dict[str, AdmittedNode] = {}
    drained: list[str] = []
    tasks: dict[str, TaskSpec] = {}
    paused: dict[str, TaskSpec] = {}
    joined: list[str] = []
    plan: Plan | None = None
    measured: dict[str, dict[int, MeasuredSize]] = {}
    epochs: dict[str, Number] = {}
    disturbed: dict[str, str] = {}
    transitions: dict[str, DurationSums] = {}
    failures: Count = 0
    worker_seconds: Exposure = 0.0
    exposed: Count = 0
    believed_rate: Rate = 0.0
    clock: Moment = 0.0

    def copy(self) -> "PlannerState":
        """Return one whose nodes, tasks and lists can be changed without changing this one's."""
        fields = msgspec.structs.asdict(self)
        return PlannerState(**{name: copy(value) for name, value in fields.items()})
