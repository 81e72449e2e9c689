"""Plans: which task runs where, and why."""

from collections.abc import Sequence
from typing import Annotated, NamedTuple

from msgspec.structs import replace

from unicron.contracts.base import Record, Word
from unicron.contracts.ranges import Amount, Count, Label, Many, Number, Seconds, Text
from unicron.contracts.tasks import ParallelLayout, SlotRef

NAMED = 4
"""Names that a trigger gives; further ones are only counted."""


class TriggerKind(Word):
    """The kinds of events that a plan can answer."""

    NODE_LOST = "node_lost"
    TWO_NODES_LOST = "two_nodes_lost"
    NODE_LEFT = "node_left"
    NODE_JOINED = "node_joined"
    """One, or several shortly after one another."""
    NODE_DRAINED = "node_drained"
    NODE_UNDRAINED = "node_undrained"
    WORKER_FAILED = "worker_failed"
    """Its process starts anew in its slot."""
    TASK_SUBMITTED = "task_submitted"
    TASK_LAUNCHED = "task_launched"
    """A task that waits must run."""
    TASK_PAUSED = "task_paused"
    TASK_RESUMED = "task_resumed"
    TASK_REMOVED = "task_removed"
    TASK_FAILED = "task_failed"
    TASK_FINISHED = "task_finished"
    WHAT_IF = "what_if"
    """Nothing happened; somebody asks what would be."""
    UNKNOWN = "unknown"


class Names(NamedTuple):
    """Nodes that are alike, or a task.

    Attributes:
        named: the first `NAMED` of them.
        more: how many there are beyond.
    """

    named: tuple[str, ...]
    more: int = 0

    def __str__(self) -> str:
        return ",".join(self.named) + (f" and {self.more} more" if self.more else "")


class Trigger(NamedTuple):
    """The event that a plan answers, or that a line of the lookup table is for. `str` makes its text, `parse` reads it.

    Attributes:
        kind: what happened, or may happen next.
        whom: to which node or task; in the lookup table to any one of nodes that are alike. Where two nodes are lost
            that are not alike, the second entry holds those that are like the second node.
    """

    kind: TriggerKind
    whom: tuple[Names, ...] = ()

    @classmethod
    def of(cls, kind: TriggerKind, *whom: Sequence[str]) -> "Trigger":
        """Return the trigger `kind` of these nodes or this task."""
        return cls(kind, tuple(Names(tuple(names[:NAMED]), max(0, len(names) - NAMED)) for names in whom))

    @classmethod
    def parse(cls, text: str) -> "Trigger":
        """Return the trigger in `text`; `UNKNOWN` where this version has none such."""
        kind, _, rest = text.partition(":")
        whom = []
        for names in rest.split("+") if rest else ():
            named, _, more = names.removesuffix(" more").partition(" and ")
            whom.append(Names(tuple(named.split(",")), int(more) if more.isdecimal() else 0))
        return cls(TriggerKind(kind), tuple(whom))

    @property
    def names(self) -> str:
        """Whom it is about; empty where that is nobody in particular."""
        return "+".join(map(str, self.whom))

    def __str__(self) -> str:
        return f"{self.kind}:{self.names}" if self.whom else str(self.kind)


class TaskShare(Record, kw_only=True, frozen=True):
    """The share of one task in a plan.

    Attributes:
        slots: where its workers run, in rank order; empty while it waits.
        waf: expected F(t, x') in weighted FLOP/s.
        before: workers it had before.
        waf_before: F(t, x), what it was expected to earn with them.
        reason: why it waits, where it does.
        layout: of the workers in `slots`.
    """

    task: Label
    slots: Annotated[list[SlotRef], Many] = []
    waf: Amount = 0.0
    before: Number = 0
    waf_before: Amount = 0.0
    reason: Text = ""
    layout: ParallelLayout = ParallelLayout(replicas=0)

    @property
    def given(self) -> tuple[list[SlotRef], ParallelLayout, str]:
        """The part that the task learns: slots, layout, and the reason where it has no workers."""
        return self.slots, self.layout, self.reason

    def kept(self) -> "TaskShare":
        """Return the share of a task that a later plan leaves as it is."""
        return replace(self, before=len(self.slots), waf_before=self.waf)


class Plan(Record, kw_only=True, frozen=True):
    """An answer of the planner to one event (paper section 5).

    Attributes:
        number: counts plans; a higher one replaces a lower one.
        trigger: what it answers: its `TriggerKind`, and after a colon whom it hits, for instance "node_lost:node-3".
        workers: n', the healthy slots it could use.
        shares: one entry for each task that is not ended; in a message without those that are as in the plan before.
        waf: expected sum of F over all tasks.
        reward: value of the objective, sum of G (equation 3), in weighted FLOP.
        running_s: D_running(n'), the expected seconds until the next failure.
        transition_s: D_transition that was assumed for tasks that are reconfigured.
        prepared: whether the answer lay ready in the lookup table.
        lookup_s: seconds from the event to this answer, inside the planner.
        refresh_s: seconds that the lookup table took when it was last made.
        tasks: all tasks that are not ended, in order of submission; empty where `shares` holds one for each.
    """

    number: Count
    trigger: Label
    workers: Count
    shares: Annotated[list[TaskShare], Many] = []
    waf: Amount = 0.0
    reward: float = 0.0
    running_s: float = 0.0
    transition_s: float = 0.0
    prepared: bool = False
    lookup_s: Seconds = 0.0
    refresh_s: Seconds = 0.0
    tasks: Annotated[list[Label], Many] = []

    @property
    def cause(self) -> Trigger:
        """The event that it answers."""
        return Trigger.parse(self.trigger)

    def news(self, before: "Plan | None") -> "Plan":
        """Return the plan without the shares that say nothing new after `before`."""
        known = {share.task: share.given for share in before.shares} if before else {}
        return replace(self, shares=[share for share in self.shares if share.given != known.get(share.task)])

    def whole(self, before: "Plan | None") -> "Plan":
        """Return the plan with the shares that were left out because they are as in `before`."""
        shares = {share.task: share.kept() for share in before.shares} if before else {}
        shares |= {share.task: share for share in self.shares}
        return replace(
            self, shares=[shares[task] for task in self.tasks if task in shares] if self.tasks else self.shares
        )
