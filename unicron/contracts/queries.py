"""Queries and orders, answered over NATS micro services: one request, one reply."""

from typing import Annotated

from msgspec import Meta

from unicron.contracts.base import Record
from unicron.contracts.enrolment import Digest, Lifetime, TokenId, Uses
from unicron.contracts.pools import PoolName
from unicron.contracts.ranges import Few, Label, Name, Number, Who
from unicron.contracts.tasks import TaskSpec

MOST_JOIN = 100_000
"""Nodes that a question can have join."""

MOST_LINES = 200
"""Lines of a log that can be asked for."""


class Query(Record, tag_field="type", tag=True, kw_only=True, frozen=True):
    """Base of all requests."""


class Order(Query, kw_only=True, frozen=True):
    """Base of the requests that change something: they have subjects, and rights, of their own.

    Attributes:
        by: name of the user, for people, such as ada@laptop. Nothing proves it.
    """

    by: Who = ""


class GetStatus(Query, kw_only=True, frozen=True):
    """Ask the registry for everything it knows."""


class GetLoad(Query, kw_only=True, frozen=True):
    """Ask a control service whether it keeps up; it answers at once, however much waits for it."""


class GetHealth(Query, kw_only=True, frozen=True):
    """Ask a control service to show that facts get through: it answers when one has, or after two seconds."""


class SubmitTask(Order, kw_only=True, frozen=True):
    """Launch a task. Submitting the same spec again changes nothing."""

    spec: TaskSpec


class RemoveTask(Order, kw_only=True, frozen=True):
    """Stop a task and forget it."""

    task: Label


class PauseTask(Order, kw_only=True, frozen=True):
    """Take all slots off a task, after the iteration at hand, or plan for it again.

    Attributes:
        pause: the former.
    """

    task: Label
    pause: bool = True


class SaveTask(Order, kw_only=True, frozen=True):
    """Write a task's state to storage now.

    Attributes:
        stop: then stop the task, and forget it.
    """

    task: Label
    stop: bool = False


class RewindTask(Order, kw_only=True, frozen=True):
    """Have a task go on from an earlier checkpoint on storage.

    Attributes:
        iteration: of the checkpoint; later ones no longer count.
    """

    task: Label
    iteration: Number


class DrainNode(Order, kw_only=True, frozen=True):
    """Take a node out of use after its workers have moved, or (drain=False) put it back."""

    node: Label
    drain: bool = True


class GetPlan(Query, kw_only=True, frozen=True):
    """Ask the planner for its current plan and lookup table."""


class WhatIf(Query, kw_only=True, frozen=True):
    """Ask the planner what it would do; nothing is done.

    Attributes:
        lose: nodes that are lost, all at once.
        join: nodes of the usual size that come in addition.
        finish: tasks that end.
        submit: a task that is launched.
    """

    lose: Annotated[list[Label], Few] = []
    join: Annotated[int, Meta(ge=0, le=MOST_JOIN)] = 0
    finish: Annotated[list[Label], Few] = []
    submit: TaskSpec | None = None


class GetCurve(Query, kw_only=True, frozen=True):
    """Ask the planner what it believes of a task's throughput: T(t, x) for every feasible x."""

    task: Label


class SwitchRecording(Order, kw_only=True, frozen=True):
    """Set the share of a task's iterations that its workers record for the straggler service.

    Attributes:
        share: 0 (none) to 1 (each).
    """

    task: Label
    share: float


class GetStraggler(Query, kw_only=True, frozen=True):
    """Ask the straggler service what it has seen of a task."""

    task: Label


class GetNotifications(Query, kw_only=True, frozen=True):
    """Ask the notifier for the latest incidents, and for the channels that report them."""


class GetPools(Query, kw_only=True, frozen=True):
    """Ask the provisioner for its pools, and what it does about each."""


class GetTokens(Query, kw_only=True, frozen=True):
    """Ask the enroller for its join tokens."""


class CreateToken(Order, kw_only=True, frozen=True):
    """Have the enroller let nodes in by a join token. Its secret stays with its maker.

    Attributes:
        token: its id.
        digest: SHA-256 of its secret.
        pool: that its nodes belong to.
        uses: nodes that it lets in.
        seconds: for which it does.
        machine: the only one that may use it; empty for any.
    """

    token: TokenId
    digest: Digest
    pool: PoolName
    uses: Uses
    seconds: Lifetime
    machine: Name = ""


class RevokeToken(Order, kw_only=True, frozen=True):
    """Have a join token let nobody in any more. Nodes that came by it stay."""

    token: TokenId


class AcknowledgeIncident(Order, kw_only=True, frozen=True):
    """Acknowledge an incident, so that nobody else is called.

    Attributes:
        incident: its id, or how only that one begins.
    """

    incident: Label


class GetStates(Query, kw_only=True, frozen=True):
    """Ask an agent which states of tasks lie in its node's memory, whole."""


class GetLog(Query, kw_only=True, frozen=True):
    """Ask an agent for what a worker of its node wrote last, living or ended, as long as its log is there.

    Attributes:
        lines: at most; of the last 64 KiB.
    """

    worker: Name
    lines: Annotated[int, Meta(ge=1, le=MOST_LINES)] = 50


class GetSettings(Query, kw_only=True, frozen=True):
    """Ask an agent with which settings, rules and patterns it runs."""


class InjectFault(Order, kw_only=True, frozen=True):
    """Ask an agent to break something of its own (chaos).

    Attributes:
        fault: one of those in `unicron/contracts/faults.py`, but for restart-node.
        worker: whom to hit; empty for the node.
        value: what else the fault takes; empty for its default.
    """

    fault: Label
    worker: Label = ""
    value: Label = ""
