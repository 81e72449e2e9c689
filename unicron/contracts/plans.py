"""Plans: which task runs where, and why."""

from unicron.contracts.base import Record
from unicron.contracts.tasks import ParallelLayout, SlotRef


class TaskShare(Record, kw_only=True, frozen=True):
    """What a plan gives one task.

    Attributes:
        slots: where its workers run, in rank order; empty while it waits.
        waf: expected F(t, x') in weighted FLOP/s.
        before: workers it had before.
        waf_before: F(t, x), what it was expected to earn with them.
        reason: why it waits, where it does.
        layout: of the workers in `slots`.
    """

    task: str
    slots: list[SlotRef] = []
    waf: float = 0.0
    before: int = 0
    waf_before: float = 0.0
    reason: str = ""
    layout: ParallelLayout = ParallelLayout(replicas=0)


class Plan(Record, kw_only=True, frozen=True):
    """An answer of the planner to one event (paper section 5).

    Attributes:
        number: counts plans; a higher one replaces a lower one.
        trigger: the event it answers, for instance "node_lost:node-3".
        workers: n', the healthy slots it could use.
        shares: one entry for each task that is not ended.
        waf: expected sum of F over all tasks.
        reward: value of the objective, sum of G (equation 3), in weighted FLOP.
        running_s: D_running(n'), the expected seconds until the next failure.
        transition_s: D_transition that was assumed for tasks that are reconfigured.
        prepared: whether the answer lay ready in the lookup table.
        lookup_s: seconds from the event to this answer, inside the planner.
        refresh_s: seconds that the lookup table took when it was last made.
    """

    number: int
    trigger: str
    workers: int
    shares: list[TaskShare] = []
    waf: float = 0.0
    reward: float = 0.0
    running_s: float = 0.0
    transition_s: float = 0.0
    prepared: bool = False
    lookup_s: float = 0.0
    refresh_s: float = 0.0
