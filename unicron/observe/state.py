"""The console's state of a cluster; each part is bounded by the cluster's size or by a number here."""

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from msgspec.structs import replace

from unicron.contracts.answers import RECENT
from unicron.contracts.base import Message, Record
from unicron.contracts.events import IterationFinished, Regrouped
from unicron.contracts.hardware import GpusSampled
from unicron.contracts.plans import TaskShare
from unicron.contracts.ranges import SHORTEST_S
from unicron.contracts.slowdowns import ComputeTimed
from unicron.contracts.tasks import Member, NodeState, TaskSpec, TaskState
from unicron.observe.incidents import chain_of
from unicron.observe.words.signs import Sign

STORIES = 200
"""Failures whose messages are known, the newest ones."""

STORY = 300
"""Messages of a failure that are kept; of the others only the number is."""

EVENTS = 4000
"""Changes that are known."""

ATTEMPTS = 50
"""Memberships of a task that are known, the newest ones."""

POINTS = 240
"""Points of a course; when it is full every second one goes, and then only every second one comes."""

EARLIER = 4
"""Earlier tasks of the same name whose losses are known."""

COLUMNS = 60
"""Iterations of a heat map."""

CELLS = 100_000
"""Of a heat map: with more ranks it has fewer iterations."""

TRACED = 100
"""Messages of a failure that its trace has."""

EVIDENCE = 40
"""Pieces of evidence of a failure: exits, exceptions, lines of the kernel's log."""


class JournalLine(Record, kw_only=True, frozen=True):
    """A message of the journal in words.

    Attributes:
        position: in the journal.
        at: Unix seconds, of the sender's clock.
        source: the sender: a node or a service.
        kind: of the message.
        chain: id of the chain that it belongs to.
        text: what it says.
        lines: what else a person wants to see of it: last lines of output, a traceback, an entry of the kernel's log.
    """

    position: int
    at: float
    source: str
    kind: str
    chain: str
    text: str
    lines: list[str] = []


class MembershipRecord(Record, kw_only=True, frozen=True):
    """A membership of a task.

    Attributes:
        at: Unix seconds since when it computed.
        until: when it ended; None: it computes.
        iteration: that it began with.
        kept, recomputed: microbatches of the interrupted iteration.
        chain: of what led to it; `ended` of what ended it, `why` in words.
    """

    epoch: int
    at: float
    workers: int
    iteration: int
    kept: int = 0
    recomputed: int = 0
    chain: str = ""
    until: float | None = None
    ended: str = ""
    why: str = ""


class ThinnedSeries:
    """Points that are thinned out when they become too many, so that they always span all of the time."""

    def __init__(self, width: int) -> None:
        self._width, self._values = width, array("d")
        self._every, self._skipped = 1, 0

    def add(self, *point: float) -> None:
        """Add a point, if it is its turn."""
        self._skipped += 1
        if self._skipped < self._every:
            return
        self._skipped = 0
        self._values.extend(point)
        if len(self._values) >= POINTS * self._width:
            kept = array("d")
            for start in range(self._width, len(self._values), 2 * self._width):
                kept.extend(self._values[start : start + self._width])
            self._values, self._every = kept, 2 * self._every

    def points(self) -> Iterator[tuple[float, ...]]:
        """Yield all points, oldest first."""
        values = iter(self._values)
        return zip(*[values] * self._width, strict=True)


class Heat:
    """How long the microbatches of a membership's ranks took in its last iterations.

    Attributes:
        workers: their names by rank.
        columns: by iteration, mean seconds of a microbatch by rank.
    """

    def __init__(self) -> None:
        self._epoch = -1
        self.workers: dict[int, str] = {}
        self.columns: OrderedDict[int, dict[int, float]] = OrderedDict()

    def add(self, timed: ComputeTimed) -> None:
        """Add the timings of a node's workers; a newer membership has other ranks, so they begin a new map."""
        if timed.epoch < self._epoch:
            return
        if timed.epoch > self._epoch:
            self._epoch, self.workers, self.columns = timed.epoch, {}, OrderedDict()
        column = self.columns.setdefault(timed.iteration, {})
        for each in timed.workers:
            self.workers[each.rank] = each.worker
            column[each.rank] = each.seconds
        while len(self.columns) > max(1, min(COLUMNS, CELLS // len(self.workers or [0]))):
            self.columns.popitem(last=False)


@dataclass(slots=True)
class NodePicture:
    """A node.

    Attributes:
        tasks: that the plan gives its slots, by index.
        kind: of its slots.
        since: Unix seconds since when it is in this state.
        suspected_until: Unix seconds until which it is given time to be heard of again; 0: it is not suspected.
        drained: whether it is out of use also when it comes back.
        alarm: what else is wrong with it.
        standby: why no worker can start there; empty where one can.
    """

    state: NodeState = NodeState.UP
    slots: int = 0
    kind: str = ""
    host: str = ""
    rack: str = ""
    domain: str = ""
    since: float = 0.0
    suspected_until: float = 0.0
    drained: bool = False
    tasks: dict[int, str] = field(default_factory=dict)
    alarm: str = ""
    standby: str = ""
    gpus: GpusSampled | None = None


@dataclass(slots=True)
class TaskPicture:
    """A task.

    Attributes:
        number: by the order of submission.
        colour: number of its colour, from 0; all tasks that have not ended have different ones. -1: it has ended.
        waf: weighted FLOP/s that its last iteration achieved, while it runs.
        attempts: newest last.
        recent: seconds of the last iterations in the newest of them.
        earlier: progress of earlier tasks of this name, newest last.
    """

    spec: TaskSpec
    number: int
    colour: int = -1
    state: TaskState = TaskState.WAITING
    reason: str = ""
    traceback: str = ""
    members: list[Member] = field(default_factory=list)
    share: TaskShare | None = None
    iteration: int = -1
    loss: float | None = None
    iteration_s: float = 0.0
    waf: float = 0.0
    slow: str = ""
    drill: str = ""
    paused: bool = False
    withheld: str = ""
    kept: int = 0
    recomputed: int = 0
    attempts: deque[MembershipRecord] = field(default_factory=lambda: deque(maxlen=ATTEMPTS))
    progress: ThinnedSeries = field(default_factory=lambda: ThinnedSeries(4))
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    earlier: list[ThinnedSeries] = field(default_factory=list)
    heat: Heat = field(default_factory=Heat)

    def record_iteration(self, done: IterationFinished) -> None:
        """Record the progress of an iteration."""
        self.iteration, self.loss, self.iteration_s = done.iteration, done.loss, done.seconds
        if self.state is TaskState.RUNNING and done.seconds >= SHORTEST_S:
            self.waf = self.spec.weight * self.spec.flops_per_iteration / done.seconds
        self.recent.append(done.seconds)
        self.progress.add(done.at, done.iteration, done.loss, done.seconds)

    def regroup(self, message: Regrouped) -> bool:
        """Begin a newer membership; return False where it is known already."""
        if self.attempts and self.attempts[-1].epoch >= message.epoch:
            return False
        self.close_membership(message.at, chain_of(message), f"{message.world_size} workers regrouped and went on")
        self.attempts.append(
            MembershipRecord(
                epoch=message.epoch,
                at=message.at,
                workers=message.world_size,
                iteration=message.iteration,
                kept=message.kept,
                recomputed=message.recomputed,
                chain=chain_of(message),
            )
        )
        self.recent.clear()
        self.kept += message.kept
        self.recomputed += message.recomputed
        self.iteration = max(self.iteration, message.iteration - 1)
        return True

    def close_membership(self, at: float, ended: str, why: str) -> None:
        """Record what ended the newest membership, the first time that anything did."""
        if self.attempts and self.attempts[-1].until is None:
            self.attempts[-1] = replace(self.attempts[-1], until=at, ended=ended, why=why)


@dataclass(slots=True)
class Story:
    """A chain that healed something: what was said in it.

    Attributes:
        entries: its first messages; `unheard` how many came after `STORY`.
        signs: of each of these, what is marked of it on the timeline.
        messages: the first `TRACED` of them as they are, until it is healed and its trace was exported.
    """

    entries: list[JournalLine] = field(default_factory=list)
    signs: list[Sign | None] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    unheard: int = 0
    evidence: list[JournalLine] = field(default_factory=list)
    plan: list[tuple[str, str]] = field(default_factory=list)
