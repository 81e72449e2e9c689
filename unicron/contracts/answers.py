"""The answers to queries: views of nodes, tasks, plans and stragglers."""

from typing import Annotated

from unicron.contracts.base import Record
from unicron.contracts.enrolment import TokenView
from unicron.contracts.notices import NotificationsView
from unicron.contracts.plans import Plan, Trigger
from unicron.contracts.pools import PoolsView
from unicron.contracts.ranges import Amount, Count, Few, Label, Many, Moment, Name, Number, Seconds, Text
from unicron.contracts.states import StateRef
from unicron.contracts.tasks import Member, NodeState, Slot, TaskSpec, TaskState
from unicron.contracts.watchdogs import LogPattern


class NodeView(Record, kw_only=True, frozen=True):
    """A node as the registry knows it.

    Attributes:
        home, rack, domain, machine, version: as in `NodeJoined`.
        problem: why no worker can start there, for a person; empty where one can.
    """

    node: Label
    state: NodeState
    host: Label = ""
    incarnation: Label = ""
    slots: Annotated[list[Slot], Few] = []
    since: Moment = 0.0
    home: Label = ""
    rack: Label = ""
    domain: Label = ""
    machine: Name = ""
    version: Label = ""
    problem: Text = ""


class SaverView(Record, kw_only=True, frozen=True):
    """A worker that saves its task's state now and then, as the registry knows it.

    Attributes:
        nodes: in whose memories each of its states comes to lie, its own first; none where it can't be saved.
        problem: why it can't.
    """

    nodes: Annotated[list[Label], Many] = []
    problem: Text = ""


RECENT = 20
"""Iterations of a task whose times are known: from them it is worked out how long it still takes."""


class TaskView(Record, kw_only=True, frozen=True):
    """A task as the registry knows it.

    Attributes:
        waf: weighted FLOP/s that the last iteration achieved, 0 while it does not run.
        recent_s: seconds of its last iterations in this membership, oldest first.
        savers: its workers that save its state, by name.
        paused: a user took its slots off it.
        stops_after: it is to be stopped as soon as a later iteration than this is on storage; None where it isn't.
        slow: how slow it has become, and which workers are, for a person; empty where it has not.
        drill: what came of the drill of its script, for a person; empty where there was none.
        withheld: what the cluster would do about it, did it not only observe; empty where there is nothing.
    """

    spec: TaskSpec
    state: TaskState
    reason: Text = ""
    traceback: Text = ""
    epoch: Number = -1
    members: Annotated[list[Member], Many] = []
    iteration: Number = -1
    loss: float | None = None
    iteration_s: Seconds = 0.0
    recent_s: Annotated[list[Seconds], Few] = []
    waf: Amount = 0.0
    savers: dict[str, SaverView] = {}
    paused: bool = False
    stops_after: Number | None = None
    slow: Text = ""
    drill: Text = ""
    withheld: Text = ""


class Status(Record, kw_only=True, frozen=True):
    """Answer to `GetStatus`.

    Attributes:
        observe_only: whether the cluster only says what it would do by itself.
    """

    nodes: Annotated[list[NodeView], Many] = []
    tasks: Annotated[list[TaskView], Many] = []
    plan: Plan | None = None
    observe_only: bool = False


class TableRow(Record, kw_only=True, frozen=True):
    """One line of the planner's lookup table: what it will do if `event` comes next.

    Attributes:
        event: its `TriggerKind`, and after a colon whom it hits: "node_lost:node-3,node-4" stands for either.
        workers: n' after the event.
        changes: workers of each task whose number changes, ended tasks left out.
        reward: sum of G (equation 3), in weighted FLOP until the next failure: the fewer workers, the later it comes.
        waf: expected sum of F over all tasks.
    """

    event: Label
    workers: Count
    changes: dict[str, int] = {}
    reward: float
    waf: Amount = 0.0

    @property
    def trigger(self) -> Trigger:
        """The event that would have to come next."""
        return Trigger.parse(self.event)


class Weighing(Record, kw_only=True, frozen=True):
    """A plan that takes workers from running tasks, against one that takes fewer.

    It is made if its gain is larger than cost and error together. All are in weighted FLOP until the next failure.

    Attributes:
        changes: workers of the tasks in which the two differ, by the plan that was not made.
        gain: what its tasks earn more, before its cost.
        cost: what more is lost while tasks are reconfigured; negative where less is.
        error: by how much more its gain may be off, as the estimates are.
    """

    changes: dict[str, int] = {}
    gain: float = 0.0
    cost: float = 0.0
    error: float = 0.0


class PlanView(Record, kw_only=True, frozen=True):
    """Answer to `GetPlan` and `WhatIf`.

    Attributes:
        plan: in force, or what it would be.
        runner_up: the best other assignment of sizes to the same event; None where there is none.
        table: what comes after each next event; empty for a `WhatIf`.
        failures: node failures seen.
        failure_rate: believed failures per worker and second.
        transitions: believed D_transition in seconds by kind: "failure" of a worker, "resize" without one, "relayout"
            where the shape of the replicas changes, with or without one.
        taken: where the plan takes workers that it could have left, what it gains by that.
        held_back: where a plan that takes more workers would gain something, but not enough: that plan.
        guessed: FLOP/s that a worker is taken to bring to each task about which nothing is known.
    """

    plan: Plan | None
    runner_up: TableRow | None = None
    table: Annotated[list[TableRow], Many] = []
    failures: Count = 0
    failure_rate: float = 0.0
    transitions: dict[str, float] = {}
    taken: Weighing | None = None
    held_back: Weighing | None = None
    guessed: dict[str, float] = {}


class CurvePoint(Record, kw_only=True, frozen=True):
    """T(t, x) of one task at one size.

    Attributes:
        workers: x.
        flops: T(t, x), achieved aggregate FLOP/s.
        waf: F(t, x), weighted.
        source: where it comes from: "measured", "table", "model" or "linear".
        spread: coefficient of variation of the measured iteration times, 0 where not measured.
        text: for instance the parallel configuration that the model picks.
    """

    workers: Count
    flops: Amount
    waf: Amount
    source: Label
    spread: Amount = 0.0
    text: Text = ""


class Curve(Record, kw_only=True, frozen=True):
    """Answer to `GetCurve`: feasible sizes, ascending.

    Attributes:
        held: workers that the task has now.
        measures: whether measured iteration times are believed, where there are any.
    """

    task: Label
    held: Count
    points: Annotated[list[CurvePoint], Many]
    measures: bool = True


class StragglerWindow(Record, kw_only=True, frozen=True):
    """Some recorded iterations in a row, and what came out of them.

    Attributes:
        at: Unix seconds at which they were looked at.
        first, last: iterations from which to which.
        steps: recorded iterations that were looked at.
        slowdown: S, mean iteration time as it is over that with every operation at its ideal.
        waste: 1 - 1/S.
        slow: whether it counts towards an alert.
        diagnosis: kind of the cause, empty where there is none.
        worker: the culprit, where it is one.
        gain: mean iteration time as it is over that with the cause cured; 0 where that is not known.
        evidence: the figures that the diagnosis rests on, as JSON.
        cure: what to do about it.
        problems: what was wrong with the record.
    """

    at: Moment
    epoch: Number
    world_size: Count
    first: Number
    last: Number
    steps: Count
    slowdown: Amount
    waste: float
    slow: bool = False
    diagnosis: Label = ""
    worker: Label = ""
    gain: Amount = 0.0
    evidence: Text = ""
    cure: Text = ""
    problems: Annotated[list[Text], Few] = []


class StragglerView(Record, kw_only=True, frozen=True):
    """Answer to `GetStraggler`.

    Attributes:
        share: of the iterations that workers are to record.
        waiting: recorded iterations that wait for the rest of their window.
        dropped: recorded iterations that were left out since the service started, by reason.
        alert: the reported diagnosis that still holds; empty where there is none.
        history: the latest windows, newest last.
    """

    task: Label
    share: float
    waiting: Count = 0
    dropped: dict[str, int] = {}
    alert: Label = ""
    history: Annotated[list[StragglerWindow], Many] = []


class Load(Record, kw_only=True, frozen=True):
    """Answer to `GetLoad`.

    Attributes:
        waiting: inputs that it has read and not taken in.
        position: of the last entry of the journal that it has taken in; those that do not concern it do not count.
        dropped: pieces of telemetry that it has not looked at since it started, since too much waited.
        disbelieved: pieces about workers that it knows elsewhere, or not at all.
    """

    waiting: Count
    position: Count
    dropped: Count
    disbelieved: Count = 0


class Health(Record, kw_only=True, frozen=True):
    """Answer to `GetHealth`.

    Attributes:
        seconds: that a fact took into the journal, and out of it through all inputs of the service; or that it was
            waited for.
        problem: where it got stuck; empty where it came through.
        at: Unix seconds, by the clock of the service.
    """

    seconds: Seconds
    problem: Text = ""
    at: Moment = 0.0


class PartHealth(Record, kw_only=True, frozen=True):
    """How the journal or a control service is.

    Attributes:
        name: of the part.
        problem: what does not get through, for a person; empty where all does.
        cure: likewise.
        seconds: that a fact takes through it.
        at: Unix seconds, by its clock; 0 where that is not known.
    """

    name: Label
    problem: Text = ""
    cure: Text = ""
    seconds: Seconds = 0.0
    at: Moment = 0.0


class RunningSettings(Record, kw_only=True, frozen=True):
    """Answer to `GetSettings`: what an agent runs with, whatever its files say by now.

    Attributes:
        settings: all of its settings as texts, by the variable that sets each.
        rules: digest of the rules by which it reads logs; see `unicron.rules`.
        watch_log: by task that has workers there, what these are watched for.
    """

    settings: Annotated[dict[Label, Text], Few] = {}
    rules: Label = ""
    watch_log: Annotated[dict[Name, list[LogPattern]], Few] = {}


class Reply(Record, kw_only=True, frozen=True):
    """Answer to any request.

    Attributes:
        error: empty on success, else what was wrong and the cure.
        status, plan, curve, straggler, states, load, health, log, notifications, pools, tokens, settings: filled in for
            the queries that ask for them.
        text: a line for a person.
    """

    error: Text = ""
    text: Text = ""
    status: Status | None = None
    plan: PlanView | None = None
    curve: Curve | None = None
    straggler: StragglerView | None = None
    states: Annotated[list[StateRef], Many] = []
    log: Annotated[list[Text], Few] = []
    load: Load | None = None
    health: Health | None = None
    notifications: NotificationsView | None = None
    pools: PoolsView | None = None
    tokens: Annotated[list[TokenView], Few] = []
    settings: RunningSettings | None = None
