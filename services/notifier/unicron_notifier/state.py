"""The state of the notifier between two messages."""

from collections import Counter
from typing import Annotated

import msgspec
from msgspec import Meta

from unicron.contracts.events import TaskStateChanged
from unicron.contracts.notices import IncidentKind, Notice
from unicron.contracts.ranges import Amount, Count, Few, Label, Many, Moment, Text
from unicron.contracts.tasks import TaskState

KINDS = tuple(IncidentKind)
Level = Annotated[int, Meta(ge=1, le=3)]

MOST_INCIDENTS = 1000
"""Incidents that are remembered; of more the oldest are forgotten, those that are over first."""

MOST_LINES = 12
"""Lines that an incident gathers."""

MOST_NAMES = 64
"""Tasks or nodes that an incident names."""

MOST_RANKS = 4096
"""Workers of a task that go by their rank."""

FULL = 20
"""Notices that wait for one channel; what comes then is summed up as soon as they are delivered."""


class TaskHit(msgspec.Struct, kw_only=True):
    """The effect of an incident on a task.

    Attributes:
        full: workers that it had.
        computing: workers that compute since `since`.
        since: Unix seconds.
        lost: seconds of workers until then.
        now: how it stands, for a person.
        stirred: its state has changed since.
        over: it is well again, or ended.
        plan: what the plan has made of it, for a person.
    """

    full: Count = 0
    computing: Count = 0
    since: Moment = 0.0
    lost: Amount = 0.0
    now: Text = ""
    stirred: bool = False
    over: bool = False
    plan: Text = ""

    def advance(self, at: float, computing: int) -> None:
        """Count what was lost up to `at`, and how many compute from then on."""
        self.lost = self.lost_by(at)
        self.computing, self.since = computing, max(at, self.since)

    def lost_by(self, at: float) -> float:
        """Return the seconds of workers that it has cost by `at`."""
        return self.lost + (0.0 if self.over else max(0, self.full - self.computing) * max(0.0, at - self.since))


class Notified(msgspec.Struct, kw_only=True):
    """The part of an incident that a channel has got.

    Attributes:
        version: of the incident; 0 for nothing yet.
        rule: by which.
        held: why it waits for a summary: "quiet" or "full"; empty where it doesn't.
        escalated: it was called since nobody answered.
    """

    version: Count = 0
    rule: Label = ""
    held: str = ""
    escalated: bool = False


class NotifiedIncident(msgspec.Struct, kw_only=True):
    """One cause, and all that followed from it.

    Attributes:
        id: for people and receivers.
        chain: of the first fact.
        key: what makes another fact the same again, where that is not its chain; empty where there is none.
        status: of the failure.
        reason: one line.
        worker: of the failure.
        factor: how slow, as a share of the workers' time that is lost; 0 where it is no slowness.
        label, first: kind and severity in the first notice; they do not change any more.
        lines: what else is known.
        tasks: that it is about.
        hits: what it did to each of them that it stopped.
        nodes: that it hit.
        away: nodes that are waited for, where no task was hit.
        out: nodes that were given up and are not back.
        workers: that were on its nodes.
        ended: Unix seconds, 0 while it is not over.
        by: name of the person that has acknowledged it.
        acked: version that this made.
        version: how often it changed so that people should know.
        again: how often the same came again, without a notice.
        told: by channel.
        waits: rules whose wait before the first notice runs.
        telling: the time runs until channels that have it get its changes.
        notice: it has no end of its own; nothing heals it.
        hidden: nothing happened yet that people should know.
    """

    id: Label
    chain: Label
    kind: IncidentKind
    key: Label = ""
    severity: Level = 3
    status: Label = ""
    reason: Text = ""
    worker: Label = ""
    factor: Amount = 0.0
    label: IncidentKind = IncidentKind.UNKNOWN
    first: Level = 3
    lines: Annotated[list[Text], Few] = []
    tasks: Annotated[list[Label], Few] = []
    hits: dict[str, TaskHit] = {}
    nodes: Annotated[list[Label], Few] = []
    away: Annotated[list[Label], Few] = []
    out: Annotated[list[Label], Few] = []
    workers: Count = 0
    began: Moment = 0.0
    ended: Moment = 0.0
    by: Text = ""
    acked: Count = 0
    version: Count = 0
    again: Count = 0
    told: dict[str, Notified] = {}
    waits: Annotated[list[Label], Few] = []
    telling: bool = False
    notice: bool = False
    hidden: bool = False

    @property
    def settled(self) -> bool:
        """Whether no notice of it is due any more."""
        return not (self.waits or self.telling or any(notified.held for notified in self.told.values()))

    def worsen(self, kind: IncidentKind, severity: int) -> None:
        """Take the worse of what it was and this."""
        self.kind = min(self.kind, kind, key=KINDS.index)
        self.severity = min(self.severity, severity)

    def note(self, line: str) -> bool:
        """Add a line; return whether it is new, and there was room for it."""
        if line in self.lines or len(self.lines) >= MOST_LINES:
            return False
        self.lines.append(line)
        return True

    def name(self, node: str = "", task: str = "") -> None:
        """Add a node, or a task."""
        for known, name in ((self.nodes, node), (self.tasks, task)):
            if name and name not in known and len(known) < MOST_NAMES:
                known.append(name)

    def lost_by(self, at: float) -> float:
        """Return the seconds of workers that it has cost by `at`, about."""
        until = self.ended or at
        if self.factor:
            return self.factor * self.workers * max(0.0, until - self.began)
        return sum(hit.lost_by(until) for hit in self.hits.values())


class ChannelQueue(msgspec.Struct, kw_only=True):
    """The deliveries of one channel.

    Attributes:
        pending: in order.
        broken: why the last one was given up; empty since one was delivered.
    """

    pending: Annotated[list[Notice], Few] = []
    broken: Text = ""


class TaskSeen(msgspec.Struct, kw_only=True):
    """A task that runs.

    Attributes:
        on: how many of its workers are on each node.
        computing: how many compute now.
        ranks: names of the workers that computed last, in rank order, the first ones.
    """

    on: dict[str, Count] = {}
    computing: Count = 0
    ranks: Annotated[list[Label], Many] = []

    @property
    def workers(self) -> int:
        """How many it has."""
        return sum(self.on.values())

    def follow(self, changed: TaskStateChanged) -> None:
        """Take a change of its state into account."""
        running = changed.state is TaskState.RUNNING
        self.computing = len(changed.members) if running else 0
        if running:  # who is left of a membership keeps its rank until it computes as another
            self.ranks = [member.worker for member in changed.members[:MOST_RANKS]]
            self.on = dict(Counter(member.node for member in changed.members))
        elif changed.state is TaskState.WAITING:
            self.on = {}


class NotifierState(msgspec.Struct, kw_only=True):
    """The state of the core.

    Attributes:
        routed: there was a file of rules when it was last started.
        since: Unix seconds before which nothing is sent: then there was no file of rules.
        summaries: how many there were.
        tasks: that run, by name.
        incidents: by id, oldest first.
        channels: by name.
    """

    routed: bool = False
    since: Moment = 0.0
    summaries: Count = 0
    tasks: dict[str, TaskSeen] = {}
    incidents: dict[str, NotifiedIncident] = {}
    channels: dict[str, ChannelQueue] = {}

    def forget(self) -> None:
        """Drop what is too old: all but the latest incidents, and those first that are over and delivered."""
        if len(self.incidents) <= MOST_INCIDENTS:
            return
        done = (each for each in self.incidents.values() if (each.ended or each.notice or each.hidden) and each.settled)
        victim = next(done, None) or next(iter(self.incidents.values()))
        del self.incidents[victim.id]
