"""The detector's stored state."""

from typing import Annotated

import msgspec

from unicron.contracts import time_limits
from unicron.contracts.events import FailureDetected
from unicron.contracts.ranges import Count, Few, Label, Moment, Number, Seconds, Size, Text
from unicron_detector.ladder import Ladder, Outage, Standstill

EXPLAINS_S = 10.0
"""So long what a kernel or a worker said explains what fails there."""

ECHOES_S = 5.0
"""So long others of a task may fail because one did."""


Apart = Annotated[float, msgspec.Meta(ge=-(10.0**11), le=10.0**11)]
"""Seconds between two clocks."""


class DetectorLimits(msgspec.Struct, kw_only=True, frozen=True):
    """The detector's time limits and counts.

    Attributes:
        grace_s: from a node's lost connection to the verdict; an agent that restarts needs to be back by then.
        heartbeat_timeout_s: silence after which a node is lost though nobody saw its connection end.
        collective_hold_s: how long a broken collective waits for the failure that caused it to come to light.
        window_s: how far back attempts are counted.
        attempts: failures of one kind within the window that are met at their own severity; one more climbs.
        no_progress: memberships that fail in one iteration, one after the other, before the task is held to be broken.
        count_all: whether those count that no program has ended itself (signals, machines, networks); else such a task
            waits for longer and longer, and is not ended.
    """

    grace_s: float = time_limits.GRACE_S
    heartbeat_timeout_s: float = time_limits.HEARTBEATS_S
    collective_hold_s: float = time_limits.COLLECTIVE_HOLD_S
    window_s: float = time_limits.WINDOW_S
    attempts: int = 3
    no_progress: int = 10
    count_all: bool = False


class NodeRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A node that is held to be up.

    Attributes:
        host: address of its machine; empty where it joined before that was remembered.
        silent: ticks since its last heartbeat was handled. Clocks of other machines play no part.
        ahead_s: by how much its clock was ahead of ours at its last heartbeat.
        off_ticks: how many more ticks found that to be too much than not, as far as that counts.
        heartbeat_s: how often it beats where that is more rarely than it would by itself, else 0.
        suspect: name of the timer that ends its grace; empty while its connection is not known to be lost.
        reason: why the server says the connection ended.
    """

    incarnation: str
    host: Label = ""
    silent: Count = 0
    ahead_s: Apart = 0.0
    off_ticks: Count = 0
    heartbeat_s: Seconds = 0.0
    suspect: str = ""
    reason: str = ""


class LostNode(msgspec.Struct, kw_only=True):
    """A node given up, until it joins again.

    Attributes:
        at: when.
    """

    at: Moment


class OrderedWorker(msgspec.Struct, kw_only=True, array_like=True):
    """A worker process that was ordered and has not reported yet.

    Attributes:
        token: of the order; one of an earlier instance may come late, and no agent obeys it then.
    """

    worker: str
    task: str
    token: Size = 0


class LoggedLine(msgspec.Struct, kw_only=True, array_like=True):
    """A line that a node's kernel or a worker logged; evidence, but no failure by itself."""

    text: Label
    at: Moment


class RecentCause(msgspec.Struct, kw_only=True, array_like=True):
    """A failure that later ones of its task may follow from, as it is named in them."""

    text: Text
    at: Moment


class WatchedWorker(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A worker process.

    Attributes:
        epoch: membership that it last joined, -1 before the first.
        ordered: newest membership that it was ordered into.
        finished: it is through its last iteration.
        failed: it was reported by name.
        diverged: its state was once another than that of other replicas.
        gone_at: when everything had been said about this process; None while it is watched. It is remembered for a
            while, since the same end may be reported several times: as an exception, an exit, a stall.
    """

    task: str
    node: str
    slot: Number
    epoch: Number = -1
    ordered: Number = -1
    finished: bool = False
    failed: bool = False
    diverged: bool = False
    gone_at: Moment | None = None


class SilentWorker(msgspec.Struct, kw_only=True, array_like=True):
    """A worker that shows no sign of life.

    Attributes:
        since: when it showed the last one.
        at: time of the last report.
        stopped: one of its processes is.
        where: its script was then, innermost call first; empty where nobody can see that.
    """

    since: Moment
    at: Moment
    stopped: bool
    where: Text


class PendingFailure(msgspec.Struct, kw_only=True):
    """A severity 3 failure that is held back until its cause is known.

    Attributes:
        epoch: of the membership in which it happened.
        timer: name of the timer that ends the wait.
        collective: a collective broke, so a process on another node died or a link did; else somebody only waits.
        iteration: in which it happened.
    """

    failure: FailureDetected
    epoch: Number
    timer: str
    collective: bool
    iteration: Number = -1


class TaskRecord(msgspec.Struct, kw_only=True):
    """A task.

    Attributes:
        epoch: highest membership epoch heard of.
        ordered: highest one that the transition service has ordered; None where nobody has listened for that yet.
        iterations: that it has; None where nobody has listened for that.
        restarts: its program begins anew in each membership, and may report no iterations.
        started: highest number of a worker that was ordered; None where nobody has listened since it was submitted.
        failed_epoch: highest epoch in which a failure of this task was reported; what follows in it is a consequence.
        broken: its own program is at fault; nothing more is said about it.
        ended_at: when it ended, None while it has not.
        seen: signature of a possible user's error -> worker that showed it first.
        away: workers whose scripts are busy before an iteration: its membership and number.
        sleepers: workers that were reported asleep in the middle of a microbatch, and when.
        common: the last iteration in which several were.
        silent: workers that were reported to show no sign of life.
        standstill: the iteration in which it fails again and again.
        outage: of a server outside of the cluster.
        lack: of something that a machine lacks, or of what nobody knows, where the program is not at fault.
        not_finite: iterations in a row whose loss is no number; stays once that was reported.
        replaced_at: when a worker of it was replaced last whose memory grew.
        last: the failure reported last, on which a failed attempt builds.
        cause: the first of the last few seconds that followed from no other.
    """

    epoch: Number = -1
    ordered: Number | None = None
    iterations: Number | None = None
    restarts: bool = False
    started: Number | None = None
    failed_epoch: Number = -1
    broken: bool = False
    ended_at: Moment | None = None
    seen: dict[str, str] = {}
    away: dict[str, tuple[Number, Number]] = {}
    sleepers: dict[str, Moment] = {}
    common: Number = -1
    silent: dict[str, SilentWorker] = {}
    standstill: Standstill = msgspec.field(default_factory=Standstill)
    outage: Outage = msgspec.field(default_factory=Outage)
    lack: Outage = msgspec.field(default_factory=Outage)
    not_finite: Count = 0
    replaced_at: Moment = 0.0
    last: FailureDetected | None = None
    cause: RecentCause | None = None
    pending: PendingFailure | None = None
    ladder: Ladder = msgspec.field(default_factory=Ladder)

    @property
    def closed(self) -> bool:
        """Whether nothing more is to be said about this task."""
        return self.broken or self.ended_at is not None


class DetectorState(msgspec.Struct, kw_only=True):
    """The state of the core.

    Attributes:
        now: Unix seconds of the detector's own clock, as of the last timer.
        timers: how many timers were asked for; their names hold it, so that each is different.
        starting: by node and slot, the worker that was ordered there last, until it reports.
        said: by node, what its kernel said last, which may explain what fails there just then.
        wrote: by worker, what it wrote first of late that may.
        clocks: nodes whose clocks are known to be wrong; empty for the machine that the detector runs on.
    """

    now: Moment = 0.0
    timers: Count = 0
    nodes: dict[str, NodeRecord] = {}
    lost: dict[str, LostNode] = {}
    workers: dict[str, WatchedWorker] = {}
    tasks: dict[str, TaskRecord] = {}
    starting: dict[str, dict[int, OrderedWorker]] = {}
    said: dict[str, LoggedLine] = {}
    wrote: dict[str, LoggedLine] = {}
    clocks: Annotated[list[str], Few] = []

    def may_exist(self, worker: str, task: str, node: str, slot: int) -> bool:
        """Return whether an unreported worker was ordered for this slot, or may have been."""
        known = self.tasks.get(task)
        ordered = self.starting.get(node, {}).get(slot)
        meant = ordered is not None and (ordered.worker, ordered.task) == (worker, task)
        return known is not None and (meant or known.started is None)

    def awaits_start(self, task: str) -> bool:
        """Return whether an ordered worker of a task has not reported yet."""
        return any(each.task == task for there in self.starting.values() for each in there.values())

    def forget(self, window_s: float) -> None:
        """Drop what lies before the window, but for workers: their records are the books' to drop."""
        since = self.now - window_s
        self.said = _recent(self.said, self.now)
        self.wrote = _recent(self.wrote, self.now)
        self.lost = {name: lost for name, lost in self.lost.items() if lost.at >= since}
        self.tasks = {
            name: task for name, task in self.tasks.items() if task.ended_at is None or task.ended_at >= since
        }
        for task in self.tasks.values():
            task.ladder.forget(self.now, window_s)


def _recent(said: dict[str, LoggedLine], now: float) -> dict[str, LoggedLine]:
    return {who: each for who, each in said.items() if each.at >= now - EXPLAINS_S}


def worker_number(worker: str, task: str) -> int:
    """Return the number that a worker of a task has in its name; -1 where it is no name of one."""
    named, _, number = worker.rpartition("-")
    return int(number) if named == task and number.isdecimal() else -1
