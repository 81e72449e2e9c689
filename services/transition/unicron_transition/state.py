"""What the transition service remembers: for each task who should compute, who does, and how far a change has come."""

from collections import defaultdict
from collections.abc import Collection, Iterable
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from unicron.checkpoints.placement import Placement, place
from unicron.checkpoints.shapes import Kept
from unicron.contracts.base import SetTimer
from unicron.contracts.ranges import Count, Moment, Number, Size
from unicron.contracts.states import COPIES, Keeper, Shelf, StateRef
from unicron.contracts.tasks import WITHOUT_SESSION, Healing, Member, ParallelLayout, SlotRef, TaskSpec, TaskState
from unicron.contracts.worker import LONGEST_CAUSE
from unicron_transition.deadlines import TIMEOUT_S, Deadline, Wait
from unicron_transition.holders import Copying, Saves, StateMap
from unicron_transition.membership import Membership, WorkerRun, WorkerStage


class NodeRun(msgspec.Struct, kw_only=True):
    """A node as far as commands are concerned; `incarnation` is the one it last joined under.

    Attributes:
        drained: it is to go, and nothing more is to lie there.
        slots: that it has; none where it named none.
    """

    incarnation: str = ""
    rendezvous: str = ""
    state_server: str = ""
    rack: str = ""
    alive: bool = True
    drained: bool = False
    slots: list[int] = []

    def has(self, slot: int) -> bool:
        """Whether it has this slot."""
        return not self.slots or slot in self.slots

    @property
    def stays(self) -> bool:
        """Whether states are safe there, as far as anybody knows."""
        return self.alive and not self.drained


class TaskRun(msgspec.Struct, kw_only=True):
    """One task's state machine.

    Attributes:
        started: counts worker processes, for their names.
        before: how many of them were an earlier task's of this name.
        target: slots that the newest plan gives it, in rank order; `TransitionState.aim` changes it.
        aimed: the shape of a replica that the plan wants; None before the first.
        workers: living worker processes by name; `TransitionState.add` and `drop` change it.
        membership: the newest one ordered.
        states: who holds which part of its state.
        shelf: what lies in the memories of nodes and is to be taken; None where living workers have the state.
        copying: copies of what lies there that are on their way to nodes that stay, or could not be made.
        withdrawn: orders to copy what is no longer to be taken; a copy of which nobody has told yet may still arrive.
        saves: where its states are saved.
        submitted_at: Unix seconds; what was stored before under its name is another task's.
        failed: workers that failed and may yet be alive, each with its node.
        paused: a user took its slots off it; what plans say of it is out of date.
        failed_at: Unix seconds of the failure or plan being carried out; None while nothing is.
        cause: what that is, or was last; empty before the first membership. Programs that begin again are told.
        uncarried: why nobody can take the place of a rank of its script; empty where somebody can.
        wait_s: seconds that workers wait before they start: what ended the last one would end them at once.
    """

    spec: TaskSpec
    state: TaskState = TaskState.WAITING
    started: Count = 0
    before: Count = 0
    target: list[SlotRef] = []
    aimed: ParallelLayout | None = None
    workers: dict[str, WorkerRun] = {}
    membership: Membership = msgspec.field(default_factory=Membership)
    states: StateMap = msgspec.field(default_factory=StateMap)
    shelf: Shelf | None = None
    copying: list[Copying] = []
    withdrawn: list[Copying] = []
    saves: Saves = msgspec.field(default_factory=Saves)
    submitted_at: Moment = 0.0
    failed: dict[str, str] = {}
    paused: bool = False
    failed_at: Moment | None = None
    cause: str = ""
    uncarried: str = ""
    wait_s: float = 0.0

    def recovers(self, at: float, cause: str) -> None:
        """Note that a failure or a plan is being carried out, if nothing is yet, and what it is."""
        if self.failed_at is None:
            self.failed_at, self.cause = at, cause[:LONGEST_CAUSE]

    def wait(self, wait: Wait, about: str = "") -> list[SetTimer]:
        """Return the request for the timer of a wait of this task.

        Between being started and joining its first membership, a worker that is healed in place runs all of its script
        before the loop. Who hangs there is found by its silence, so this is for who is busy for ever.
        """
        spec, least = self.spec, TIMEOUT_S[wait]
        if spec.heal is Healing.IN_PLACE:
            least = max(least, 2 * spec.silence_s)
            return [Deadline(wait, spec.name, about).set(least + self.wait_s)] if spec.silence_s else []
        ends = spec.stop_grace_s if spec.heal is Healing.RESTART else 0.0  # its programs may take that long to
        return [Deadline(wait, spec.name, about).set(least + ends + self.wait_s)]

    @property
    def shape(self) -> ParallelLayout:
        """The shape of a replica that it is to have."""
        return self.aimed or self.spec.layout.with_workers(0)

    @property
    def restarts(self) -> bool:
        """Whether no worker is known to have a state: memberships begin by themselves, or agree on what they have."""
        return self.spec.heal in WITHOUT_SESSION

    def hold(self, worker: str, place: int, iteration: int, node: str) -> None:
        """Note that `worker` has the state of `place`, unless none has any."""
        if not self.restarts:
            self.states.hold(worker, place, iteration, node)

    @property
    def present(self) -> ParallelLayout:
        """The shape of a replica of those who hold its state; where nobody does, the one it is to have."""
        holders = (self.workers[name] for name in self.states.by_worker if name in self.workers)
        return next((worker.layout for worker in holders), self.shape)

    @property
    def least(self) -> int:
        """Workers without which it can't compute in the shape that it is to have."""
        return min(self.spec.sizes_like(self.shape), default=self.shape.replica_workers)

    def counted_on(self, node: str) -> list[StateRef]:
        """Return the states on a node, left behind there, that are to be taken."""
        left = [*(self.shelf.states if self.shelf else ()), *self.membership.left.values()]
        coming = [each.state.at(node, "") for each in self.copying if each.keeper.node == node]
        return [ref for ref in left if ref.location.node == node] + coming

    def was_on(self, worker: str, node: str) -> bool:
        """Return whether a worker is on a node, or was; one that is gone is known as long as its state counts."""
        if worker in self.workers:
            return self.workers[worker].slot.node == node
        held = self.states.by_worker.get(worker)
        return (held is not None and held.node == node) or self.saves.wrote.get(worker) == node

    def takes_part(self, node: str) -> bool:
        """Return whether a node has a worker of the task, or was told to do something with its state."""
        saves = self.saves
        told = [*(saves.retiring.nodes if saves.retiring else ()), saves.rewind.node if saves.rewind else ""]
        if node in saves.ordered or node in told or (saves.search is not None and saves.search.looking == node):
            return True
        return any(worker.slot.node == node for worker in self.workers.values())

    def readdress(self, node: str, address: str) -> None:
        """Note where what was left behind on a node is to be had now: its agent was started again."""
        left = self.membership.left
        left.update({each: ref.at(node, address) for each, ref in left.items() if ref.location.node == node})
        if self.shelf is None:
            return
        states = [ref.at(node, address) if ref.location.node == node else ref for ref in self.shelf.states]
        if states != self.shelf.states:
            self.shelf = replace(self.shelf, states=states)
            self.membership.broken = True  # its members were told otherwise

    def without(self, node: str, kept: Collection[str]) -> list[StateRef]:
        """Note that of the states left behind on a node no others than those of these names are there any more.

        Returns:
            those on other nodes that are of no use without them.
        """
        for worker, ref in list(self.membership.left.items()):
            if ref.location.node == node and ref.location.name not in kept:
                del self.membership.left[worker]
                self.membership.lose(worker)
        if self.shelf is None:
            return []
        states = [ref for ref in self.shelf.states if ref.location.node != node or ref.location.name in kept]
        if len(states) == len(self.shelf.states):
            return []
        self.membership.broken = True  # its members were told of more
        if len({ref.place for ref in states}) < self.shelf.layout.replica_workers:
            self.shelf = None
            return [ref for ref in states if ref.location.node != node]
        self.shelf = replace(self.shelf, states=states)
        return []

    def ready(self) -> list[str]:
        """Return the workers of the present layout that compute or could."""
        shape = self.present
        return [
            name
            for name, worker in self.workers.items()
            if worker.stage is WorkerStage.READY and worker.layout.is_like(shape)
        ]


class Occupant(NamedTuple):
    """Who is in a slot."""

    task: str
    worker: str


class TransitionState(msgspec.Struct, kw_only=True, dict=True):
    """All of it.

    Attributes:
        token: fencing token of the active instance.
        plan: number of the newest plan taken up.
        leaving: nodes whose agents wait to be told that nobody needs them any more.
        placement: of copies, as it was asked for last.
        idle_s: how long a task without slots keeps its state in memory, where it has a storage; as it is set.
    """

    token: Size = 0
    plan: Number = 0
    nodes: dict[str, NodeRun] = {}
    tasks: dict[str, TaskRun] = {}
    leaving: list[str] = []
    placement: Placement = Placement((), COPIES)
    idle_s: float = TIMEOUT_S[Wait.IDLE]

    @cached_property
    def occupied(self) -> dict[SlotRef, Occupant]:
        """Who is in a slot; not stored, since the workers tell it."""
        return {
            worker.slot: Occupant(name, worker.worker)
            for name, run in self.tasks.items()
            for worker in run.workers.values()
        }

    @cached_property
    def freed(self) -> set[SlotRef]:
        """Slots that workers have left and that nobody has looked at since; not stored, either."""
        return set()

    def add(self, run: TaskRun, worker: WorkerRun) -> None:
        """Take a worker process in."""
        run.workers[worker.worker] = worker
        self.occupied[worker.slot] = Occupant(run.spec.name, worker.worker)
        self._seen[worker.slot.node].add(run.spec.name)

    def drop(self, run: TaskRun, name: str) -> None:
        """Take a worker process out."""
        worker = run.workers.pop(name, None)
        if worker is not None:
            self.occupied.pop(worker.slot, None)
            self.freed.add(worker.slot)

    def aim(self, run: TaskRun, target: list[SlotRef]) -> None:
        """Give a task other slots to be in."""
        run.target = list(target)
        self.note(run, (slot.node for slot in target))

    def note(self, run: TaskRun, nodes: Iterable[str]) -> None:
        """Note that what happens to these nodes concerns a task."""
        for node in nodes:
            self._seen[node].add(run.spec.name)

    def on(self, node: str) -> list[TaskRun]:
        """Return the tasks that have or are to have a worker on `node`; those that had one may be among them."""
        return [run for name, run in self.tasks.items() if name in self._seen.get(node, ())]

    @cached_property
    def _seen(self) -> defaultdict[str, set[str]]:
        found = defaultdict[str, set[str]](set)
        for name, run in self.tasks.items():
            for slot in (*run.target, *(worker.slot for worker in run.workers.values())):
                found[slot.node].add(name)
            for held in run.states.by_worker.values():
                found[held.node].add(name)
            for ref in (*(run.shelf.states if run.shelf else ()), *run.membership.left.values()):
                found[ref.location.node].add(name)
            for copying in run.copying:
                found[copying.keeper.node].add(name)
            for nodes in run.saves.held.values():
                for node in nodes:
                    found[node].add(name)
            if run.saves.search and run.saves.search.looking:
                found[run.saves.search.looking].add(name)
            if run.saves.rewind:
                found[run.saves.rewind.node].add(name)
        return found

    def is_there(self, node: str) -> bool:
        """Return whether a node can be given commands."""
        return node in self.nodes and self.nodes[node].alive

    def to(self, node: str) -> dict[str, Any]:
        """Return the fields that every command to a node has."""
        return {"node": node, "token": self.token, "incarnation": self.nodes[node].incarnation}

    def waits_to_go(self, node: str, *, waits: bool) -> None:
        """Note whether a node's agent waits to be told that nobody needs it any more."""
        self.leaving = [each for each in self.leaving if each != node] + [node] * waits

    def stays(self, node: str) -> bool:
        """Return whether a node is there, and not to go."""
        return node in self.nodes and self.nodes[node].stays

    def partners(self, node: str) -> list[Keeper]:
        """Return the nodes that keep copies of what is saved on a node, those of one that is to go by preference."""
        names = self._keepers[node][1:] if node in self._keepers else self._others(node)
        return [Keeper(node=name, address=self.nodes[name].state_server) for name in names]

    def _others(self, node: str) -> list[str]:
        """Return the nodes that stay, those of other racks first; each node that is to go begins with another one."""
        staying = [name for name, each in self.nodes.items() if each.stays]
        first = list(self.nodes).index(node) % len(staying) if staying else 0
        rack = self.nodes[node].rack
        return sorted(staying[first:] + staying[:first], key=lambda name: bool(rack) and self.nodes[name].rack == rack)

    @cached_property
    def _keepers(self) -> Kept:
        there = {name: node.rack for name, node in self.nodes.items() if node.stays}
        self.placement = place(list(there), COPIES, there, self.placement)
        return self.placement.keepers()

    def regroup_nodes(self) -> None:
        """Note that other nodes stay than before: who keeps whose copies is worked out when it is asked for."""
        self.__dict__.pop("_keepers", None)

    def usable(self, run: TaskRun) -> list[SlotRef]:
        """Return the slots of the task's target that are there: a node may have lost some, and a plan is to follow."""
        return [slot for slot in run.target if self.is_there(slot.node) and self.nodes[slot.node].has(slot.slot)]

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
