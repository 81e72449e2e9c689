"""What the transition service remembers: for each task who should compute, who does, and how far a change has come."""

from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

import msgspec

from unicron.contracts.base import SetTimer
from unicron.contracts.ranges import Moment, Number
from unicron.contracts.tasks import Member, SlotRef
from unicron.contracts.worker import LONGEST_CAUSE
from unicron.healing import way_of
from unicron_transition.cluster import KnownNodes
from unicron_transition.deadlines import TIMEOUT_S, Deadline, WaitKind
from unicron_transition.group import WorkerGroup
from unicron_transition.membership import WorkerRun
from unicron_transition.snapshots.snapshots import Snapshots
from unicron_transition.withheld import Withheld

EARLY_S = 600.0
"""What a script that can't go on where it was has trained in so long is trained once more, from its top: the result is
that of a run without failures, which it is not from most checkpoints. Later its own checkpoint is the lesser evil."""


class TaskRun(WorkerGroup, kw_only=True):
    """One task's state machine: its workers, its snapshots, and the change that is being carried out.

    Attributes:
        snapshots: its saved states.
        failed: workers that failed and may yet be alive, each with its node.
        paused: a user took its slots off it; what plans say of it is out of date.
        failed_at: Unix seconds of the failure or plan being carried out; None while nothing is.
        cause: what that is, or was last; empty before the first membership. Programs that begin again can read it.
        wait_s: seconds that workers wait before they start: what ended the last one would end them at once.
        waits_for: why that is, until it is as large as the plan wants.
    """

    snapshots: Snapshots = msgspec.field(default_factory=Snapshots)
    failed: dict[str, str] = {}
    paused: bool = False
    failed_at: Moment | None = None
    cause: str = ""
    wait_s: float = 0.0
    waits_for: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether the last iteration is done, and nobody is left who could be busy with it."""
        if not self.membership.through:
            return False
        lost = self.snapshots.parked is None and bool(self.lost_places())
        return self.membership.has_ended(self.workers, lost=lost)

    @property
    def is_early(self) -> bool:
        """Whether its script, where it can't go on from a state, is to begin as it did when it was first run."""
        begins = way_of(self.spec).begins_again and not self.as_is
        if not begins or self.trained_since <= 0 or self.failed_at is None:
            return False
        return self.failed_at - self.trained_since <= EARLY_S

    def begin_recovery(self, at: float, cause: str) -> None:
        """Begin a recovery, from a failure or for a plan, if none is under way."""
        if self.failed_at is None:
            self.failed_at, self.cause = at, cause[:LONGEST_CAUSE]

    def request_timer(self, wait: WaitKind, about: str = "") -> list[SetTimer]:
        """Return the request for the timer of a wait of this task."""
        seconds = way_of(self.spec).wait_s(self.spec, TIMEOUT_S[wait])
        return [] if seconds is None else [Deadline(wait, self.spec.name, about).set(seconds + self.wait_s)]


class Occupant(NamedTuple):
    """Who is in a slot."""

    task: str
    worker: str


class TransitionState(KnownNodes, kw_only=True, dict=True):
    """Everything that the transition service persists.

    Attributes:
        plan: number of the newest plan taken up.
        tasks: by name.
        leaving: nodes whose agents wait until nobody needs them any more.
        observe_only: whether what the cluster decides by itself is only said.
        withheld: what was only said, by task.
        now: Unix seconds at which the message was made that is being taken in.
    """

    plan: Number = 0
    tasks: dict[str, TaskRun] = {}
    leaving: list[str] = []
    observe_only: bool = False
    withheld: dict[str, Withheld] = {}
    now: Moment = 0.0

    @cached_property
    def occupied(self) -> dict[SlotRef, Occupant]:
        """The worker in each occupied slot; not stored, as it follows from the workers."""
        return {
            worker.slot: Occupant(name, worker.worker)
            for name, run in self.tasks.items()
            for worker in run.workers.values()
        }

    @cached_property
    def freed(self) -> set[SlotRef]:
        """Slots that workers have left since the last look for who waits for them; not stored, either."""
        return set()

    def add_worker(self, run: TaskRun, worker: WorkerRun) -> None:
        """Add a worker process to its task."""
        run.workers[worker.worker] = worker
        self.occupied[worker.slot] = Occupant(run.spec.name, worker.worker)
        self._seen[worker.slot.node].add(run.spec.name)

    def drop_worker(self, run: TaskRun, name: str) -> None:
        """Remove a worker process from its task."""
        worker = run.workers.pop(name, None)
        if worker is not None:
            self.occupied.pop(worker.slot, None)
            self.freed.add(worker.slot)

    def set_target(self, run: TaskRun, target: list[SlotRef]) -> None:
        """Set the slots in which a task is to compute."""
        run.target = list(target)
        self.index_nodes(run, (slot.node for slot in target))

    def index_nodes(self, run: TaskRun, nodes: Iterable[str]) -> None:
        """Add a task to the index of tasks by node, for these nodes."""
        for node in nodes:
            self._seen[node].add(run.spec.name)

    def tasks_on(self, node: str) -> list[TaskRun]:
        """Return the tasks that have or are to have a worker on `node`; those that had one may be among them."""
        return [run for name, run in self.tasks.items() if name in self._seen.get(node, ())]

    @cached_property
    def _seen(self) -> defaultdict[str, set[str]]:
        found = defaultdict[str, set[str]](set)
        for name, run in self.tasks.items():
            for slot in (*run.target, *(worker.slot for worker in run.workers.values())):
                found[slot.node].add(name)
            for held in run.holders.values():
                found[held.node].add(name)
            for node in (*run.snapshots.nodes(), *(ref.location.node for ref in run.membership.left.values())):
                found[node].add(name)
        return found

    def set_leaving(self, node: str, *, waits: bool) -> None:
        """Record whether a node's agent waits for the order that releases it."""
        self.leaving = [each for each in self.leaving if each != node] + [node] * waits

    def members(self, run: TaskRun) -> list[Member]:
        """Return the newest membership in rank order, without members that are gone."""
        there = [run.workers[name] for name in run.membership.group if name in run.workers]
        return [
            Member(
                worker=worker.worker,
                node=worker.slot.node,
                slot=worker.slot.slot,
                state_server=self.nodes[worker.slot.node].state_server,
            )
            for worker in there
        ]
