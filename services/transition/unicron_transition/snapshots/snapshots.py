"""The saved states of one task: where they are, and the commands that save, search, move and remove them."""

from collections.abc import Collection

import msgspec

from unicron.contracts.base import Message
from unicron.contracts.commands import FindStates
from unicron.contracts.events import (
    Alert,
    CheckpointFailed,
    CheckpointFound,
    CheckpointOrdered,
    CheckpointStored,
    PartStored,
    StateCopied,
    StateDiverged,
    StateRejected,
    StateSecured,
    StatesFound,
    StateUnusable,
    TaskRewound,
)
from unicron.contracts.ranges import Count, Number
from unicron.contracts.states import ParkedSnapshot, StateRef
from unicron.contracts.storage import StoredState
from unicron.healing import way_of
from unicron_transition.cluster import KnownNodes
from unicron_transition.deadlines import Deadline, WaitKind
from unicron_transition.group import WorkerGroup
from unicron_transition.orders import drop_order, remove_orders
from unicron_transition.snapshots.parking import Parking
from unicron_transition.snapshots.retirement import Retirement
from unicron_transition.snapshots.saves import Saves
from unicron_transition.snapshots.search import Rewind, Search, newest_whole
from unicron_transition.snapshots.storage import CheckpointWrites, choose_storage_node, find_checkpoint_order

SnapshotFact = (
    CheckpointFailed
    | CheckpointFound
    | CheckpointOrdered
    | CheckpointStored
    | PartStored
    | StateDiverged
    | StateRejected
    | StateSecured
    | StatesFound
    | TaskRewound
)


class Snapshots(msgspec.Struct, kw_only=True):
    """The saved states of a task: in memories of nodes, on storage, on their way, and looked for.

    It orders what concerns them, and notes in the task's worker group where its membership must be formed anew.

    Attributes:
        parking: the snapshot that new workers restore from, where no living worker has the state.
        saves: where workers save theirs while they compute.
        storage: what they write to storage meanwhile.
        retirement: what is parked in memory and is to go to storage.
        searches: counts them.
        search: that is on, or was in vain; None while somebody living has all of the state.
        rewind: the task is to go on from an earlier checkpoint.
        tried: snapshots that were taken and were no good: which, from where, and why.
        before: iteration from which on none is to be taken again; None where any may be.
    """

    parking: Parking = msgspec.field(default_factory=Parking)
    saves: Saves = msgspec.field(default_factory=Saves)
    storage: CheckpointWrites = msgspec.field(default_factory=CheckpointWrites)
    retirement: Retirement = msgspec.field(default_factory=Retirement)
    searches: Count = 0
    search: Search | None = None
    rewind: Rewind | None = None
    tried: list[str] = []
    before: Number | None = None

    @property
    def parked(self) -> ParkedSnapshot | None:
        """A complete snapshot that new workers restore from; None where living workers have the state."""
        return self.parking.snapshot

    # --- what is asked at each look at a task ------------------------------------------------------------------------

    def start_search(self, cluster: KnownNodes, group: WorkerGroup) -> list[Message]:
        """Return the commands that ask nodes for copies, where no living worker has some part of the task's state."""
        if group.state.ended or not self.needs_search(group):
            self.search = None
            return []
        if self.search is not None:
            return []
        self.searches += 1
        asked = sorted(node for node in self.saves.nodes() if cluster.is_there(node))
        self.search = Search(number=self.searches, asked=dict.fromkeys(asked))
        orders: list[Message] = [
            FindStates(**cluster.command_fields(node), task=group.spec.name, search=self.searches) for node in asked
        ]
        return orders or self._conclude_search(cluster, group)

    def is_searching(self, group: WorkerGroup) -> bool:
        """Return whether a search for the lost state is on, so that no membership may form."""
        search = self.search
        return (
            search is not None and (not search.over or bool(self.exhausted_reason(group))) and self.needs_search(group)
        )

    def order_saves(self, cluster: KnownNodes, group: WorkerGroup) -> list[Message]:
        """Return the commands that order workers to save their states, and that remove states of no use.

        Older copies are, once those of all who save now are whole; and what members that are gone were to take back.
        """
        back = group.membership.taken_back
        out = remove_orders(cluster, group.spec.name, [back.pop(name) for name in back.keys() - group.workers.keys()])
        if not (group.state.ended or group.membership.through):
            out += self.saves.save_orders(cluster, group, self.storage)
        if self.saves.superseded(group):
            self.tried, self.before = [], None
            out += self.saves.drop_older(cluster, group)
        return out

    def order_moves(self, cluster: KnownNodes, group: WorkerGroup) -> list[Message]:
        """Return the commands that move the parked snapshot off draining nodes: to other nodes, or to storage."""
        parked = self.parked
        if parked is None and not self.parking.copying and self.retirement.attempt is None:
            return []
        out = self.parking.order_copies(cluster, group, self.saves)
        stranded = self._stranded(cluster, group)
        if parked is None or not (stranded or (self._can_be_stored(group) and not group.target)):
            return out + self.retirement.cancel(group.spec.name)
        return out + self.retirement.retire(cluster, group, parked, at_once=stranded)

    def park_exported(self, cluster: KnownNodes, group: WorkerGroup) -> list[Message]:
        """Park the snapshot that the members have exported, once it is complete, and end any search.

        Where a snapshot is parked already, what some members have left behind is of no use, and is removed.
        """
        whole = group.membership.exported_snapshot()
        if whole is None and self.parked is None:
            return []
        in_vain = [] if whole else self.drop_exported(cluster, group)
        self.parking.snapshot, group.membership.left, self.search = whole or self.parked, {}, None
        return in_vain

    def exhausted_reason(self, group: WorkerGroup) -> str:
        """Return why a task whose snapshots are all unusable can't continue; empty as long as it can.

        A script that is healed in place begins again from its top: as often as it is said of all memberships that fail.
        """
        search = self.search
        if search is None or not search.over or not self.tried or way_of(group.spec).begins_again:
            return ""
        return f"no copy of its state can be used: {'; '.join(self.tried)}; nothing older is there"

    # --- what is there -----------------------------------------------------------------------------------------------

    def needs_search(self, group: WorkerGroup) -> bool:
        """Return whether a search is needed: some part of the task's state is on no living worker, and none is parked.

        Members that are on their way into a membership may have one that nobody knows of yet.
        """
        membership = group.membership
        if self.parked is not None or membership.through or membership.intact(group.workers):
            return False
        if not way_of(group.spec).tracks_states:  # who is left of those that saved theirs has it yet, or ends by itself
            return self.saves.whole and not any(name in group.workers for name in membership.met)
        if not (membership.met or self.saves.held or group.spec.resume):
            return False  # it has not begun
        return group.lacks_places()

    def usable_states(self, group: WorkerGroup, node: str) -> list[StateRef]:
        """Return the states on a node, exported or copied there, from which workers may restore."""
        left = [ref for ref in group.membership.left.values() if ref.location.node == node]
        return [*self.parking.usable_states(node), *left]

    def depends_on(self, cluster: KnownNodes, group: WorkerGroup, node: str) -> bool:
        """Return whether a part of the task's state lies on `node` only."""
        if self.parked is None:
            return self.needs_search(group) and node in self.saves.nodes()
        return self.parking.depends_on(cluster, node)

    @property
    def saved_whole(self) -> bool:
        """Whether a snapshot is parked, or some worker ever saved one whole."""
        return self.parked is not None or self.saves.whole

    def nodes(self) -> set[str]:
        """Return the nodes whose loss concerns these snapshots."""
        looking = (self.search.looking if self.search else "", self.rewind.node if self.rewind else "")
        return self.saves.nodes() | self.parking.nodes() | set(filter(None, looking))

    def worker_was_on(self, group: WorkerGroup, worker: str, node: str) -> bool:
        """Return whether a worker is or was on a node; a lost worker is known as long as its state is kept."""
        if worker in group.workers:
            return group.workers[worker].slot.node == node
        held = group.holders.get(worker)
        return (held is not None and held.node == node) or self.saves.wrote.get(worker) == node

    def takes_part(self, group: WorkerGroup, node: str) -> bool:
        """Return whether a node has a worker of the task, or was ordered to do something with its state."""
        attempt, search, rewind = self.retirement.attempt, self.search, self.rewind
        if node in self.saves.ordered or (attempt is not None and node in attempt.nodes):
            return True
        if node in {search.looking if search else "", rewind.node if rewind else ""}:
            return True
        return any(worker.slot.node == node for worker in group.workers.values())

    # --- facts -------------------------------------------------------------------------------------------------------

    def handle(self, cluster: KnownNodes, group: WorkerGroup, fact: SnapshotFact) -> list[Message]:
        """Record a fact about the snapshots of a running task; the reconciliation that follows acts on it."""
        match fact:
            case StateSecured():
                self.saves.record_secured(fact.worker, fact.node, fact.nodes)
            case StatesFound():
                return self._record_found(cluster, group, fact)
            case StateRejected() if fact.state.location.node == fact.node or self.takes_part(group, fact.node):
                return self._reject_copy(cluster, group, fact.state)  # nobody is to take it
            case StateDiverged() if self.worker_was_on(group, fact.worker, fact.node):
                return self._discard_worker_state(cluster, group, fact.worker, fact.node)
            case PartStored() | CheckpointStored() | CheckpointFailed() if self.takes_part(group, fact.node):
                return self._handle_write(cluster, group, fact)  # else what it was about is tried again
            case CheckpointFound() | CheckpointOrdered() | TaskRewound() if group.spec.checkpoints:
                return self._handle_checkpoint(cluster, group, fact)
        return []

    def _handle_write(
        self, cluster: KnownNodes, group: WorkerGroup, fact: PartStored | CheckpointStored | CheckpointFailed
    ) -> list[Message]:
        match fact:
            case PartStored():  # one that comes while the task is to go back would count as newer than what it goes to
                return [] if self.rewind else self.storage.add_part(cluster, group, fact)
            case CheckpointStored():
                self.storage.record_checkpoint(group, fact)
                return self._record_retired(cluster, group, fact)
            case CheckpointFailed():
                return self._storage_failed(cluster, group, fact)

    def _handle_checkpoint(
        self, cluster: KnownNodes, group: WorkerGroup, fact: CheckpointFound | CheckpointOrdered | TaskRewound
    ) -> list[Message]:
        match fact:
            case CheckpointFound():
                return self._checkpoint_found(group, fact)
            case CheckpointOrdered():
                self.storage.request_checkpoint(fact.after)
                return []
            case TaskRewound():
                return self._start_rewind(cluster, group, fact.iteration)

    def record_copy(self, cluster: KnownNodes, group: WorkerGroup, fact: StateCopied) -> list[Message]:
        """Record a copy that has arrived; return the command that removes it if it is no longer wanted."""
        if not self.parking.record_copy(fact):
            return []
        copy = fact.state
        counts = any(ref.location.name == copy.location.name for ref in self.usable_states(group, copy.location.node))
        return [] if counts else remove_orders(cluster, group.spec.name, [copy])

    def rule_out(self, group: WorkerGroup, fact: StateUnusable) -> None:
        """Record that the snapshot from which workers restored is unusable, so that an older one is searched for."""
        self.tried.append(f"iteration {fact.iteration} from {fact.copies} ({fact.reason})")
        self.before, self.search, self.parking.snapshot = fact.iteration, None, None
        group.holders.clear()
        group.membership.broken = True

    def expire(self, cluster: KnownNodes, group: WorkerGroup, wait: WaitKind) -> list[Message]:
        """End a wait: for lost nodes that may have copies, for slots, or for the next attempt to write to storage."""
        if wait is not WaitKind.STATES:
            self.retirement.expire()
            return []
        search = self.search
        if search is None or search.asked or search.looking or search.over:
            return []
        self.saves.forget_absent(cluster)  # and ask the others again: what was on its way has arrived since
        self.search = None
        return self.start_search(cluster, group)

    # --- nodes -------------------------------------------------------------------------------------------------------

    def node_joined(self, group: WorkerGroup, node: str, address: str) -> None:
        """Record that an agent has started, and the address from which its node's states are fetched now."""
        self.saves.mark_order_unknown(node)
        self.search = None
        left = group.membership.left
        left.update({each: ref.at(node, address) for each, ref in left.items() if ref.location.node == node})
        self.parking.readdress(group, node, address)

    def restrict_node(
        self, cluster: KnownNodes, group: WorkerGroup, node: str, names: Collection[str] = ()
    ) -> list[Message]:
        """Drop the exported states of a node that it no longer has; return the commands that remove incomplete ones."""
        for worker, ref in list(group.membership.left.items()):
            if ref.location.node == node and ref.location.name not in names:
                del group.membership.left[worker]
                group.membership.record_loss(worker)
        parked = self.parked
        if parked is None:
            return []
        self.parking.restrict(
            group, [ref for ref in parked.states if ref.location.node != node or ref.location.name in names]
        )
        useless = [ref for ref in parked.states if ref.location.node != node] if self.parked is None else []
        return remove_orders(cluster, group.spec.name, useless)

    def node_lost(self, cluster: KnownNodes, group: WorkerGroup, node: str) -> list[Message]:
        """End the searches and orders that wait for a lost node."""
        self.saves.ordered.pop(node, None)
        out = self._cancel_rewind(group, node, f"{node}, which looked for it, is gone")
        search = self.search
        if search is None or (node not in search.asked and search.looking != node):
            return out
        search.asked.pop(node, None)
        search.looking = "" if search.looking == node else search.looking
        return out + self._conclude_search(cluster, group)

    # --- what is taken, and what is of no use any more ---------------------------------------------------------------

    def park_stored(self, group: WorkerGroup, stored: StoredState) -> None:
        """Park a checkpoint that lies on storage: the next membership restores from it."""
        self.parking.snapshot = ParkedSnapshot(
            layout=stored.layout, iteration=stored.iteration, states=[], stored=stored
        )
        group.membership.broken, self.search = True, None

    def park_rewound(self, group: WorkerGroup, stored: StoredState) -> None:
        """Park the checkpoint that a user wants, and allow again the snapshots that were ruled out."""
        self.rewind, self.tried, self.before = None, [], None
        self.park_stored(group, stored)

    def release_parked(self, cluster: KnownNodes, group: WorkerGroup) -> list[Message]:
        """Return the commands that remove the parked snapshot: living workers have a newer state, or the task ended."""
        states, self.parking.snapshot = self.parking.states, None
        return remove_orders(cluster, group.spec.name, states)

    def drop_exported(self, cluster: KnownNodes, group: WorkerGroup, staying: Collection[str] = ()) -> list[Message]:
        """Return the commands that remove states exported in vain; `staying` members remove theirs when they join."""
        left, group.membership.left = group.membership.left, {}
        if not left:
            return []
        group.membership.taken_back |= {name: left[name] for name in staying if name in left}
        return remove_orders(cluster, group.spec.name, [left[name] for name in sorted(left.keys() - set(staying))])

    def drop_saved(self, cluster: KnownNodes, group: WorkerGroup) -> list[Message]:
        """Return the commands that stop all saving, and remove all saved states."""
        self.search = None
        return self.saves.drop_all(cluster, group)

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _record_found(self, cluster: KnownNodes, group: WorkerGroup, fact: StatesFound) -> list[Message]:
        """Record the states that a node has found."""
        search, node = self.search, fact.node
        if search is None or search.number != fact.search or node not in search.asked:
            return []
        del search.asked[node]
        search.found += [ref for ref in fact.states if node in self.saves.held.get(ref.location.worker, ())]
        return self._conclude_search(cluster, group)

    def _conclude_search(self, cluster: KnownNodes, group: WorkerGroup) -> list[Message]:
        """Park the newest complete snapshot once all nodes have answered; wait for lost nodes that may have one."""
        search, before = self.search, self.before
        if search is None or search.asked or search.over or search.looking:
            return []
        self.parking.snapshot = newest_whole(ref for ref in search.found if before is None or ref.iteration < before)
        if self.parked is not None:
            group.membership.broken, self.search = True, None
            return [Deadline(WaitKind.STATES, group.spec.name).cancel()]
        if not all(cluster.is_there(node) for node in self.saves.nodes()):
            return [
                Deadline(WaitKind.REGROUP, group.spec.name).cancel(),
                Deadline(WaitKind.STATES, group.spec.name).set(),
            ]
        if way_of(group.spec).tracks_states:
            return self._search_storage(cluster, group, search)
        search.over = True  # what is in its folder of checkpoints is its script's affair
        why = "can't be taken up by other processes" if group.uncarried else "is on no node any more"
        text = f"what task {group.spec.name} had saved in memory {why}: its program begins again"
        return [Alert(text=f"{text}, from a checkpoint of its own if it has one", task=group.spec.name)]

    def _begin_anew(self, group: WorkerGroup, lacks: str) -> list[Message]:
        """Alert where a task that was further begins at iteration 0, as its state is nowhere."""
        if not (self.saves.held or group.membership.met):
            return []  # it has not begun
        text = f"what task {group.spec.name} had saved in memory is on no node any more, and {lacks}: it begins again"
        return [Alert(text=f"{text} at iteration 0", task=group.spec.name)]

    def _search_storage(self, cluster: KnownNodes, group: WorkerGroup, search: Search) -> list[Message]:
        """Order a node to look for a checkpoint, as no memory has the state; a task without storage begins anew."""
        if not group.spec.checkpoints:
            search.over = True
            return self._begin_anew(group, "it has no `checkpoints` in its task file")
        node = choose_storage_node(cluster, group)
        if not node:
            self.search = None  # it begins again with whichever node comes first
            return []
        search.looking = node
        return [find_checkpoint_order(cluster, group, node, search.number, before=self.before)]

    def _checkpoint_found(self, group: WorkerGroup, answer: CheckpointFound) -> list[Message]:
        """Park the checkpoint that a node has found, for a search or a rewind; end either where there is none."""
        rewind, search, stored = self.rewind, self.search, answer.stored
        if rewind is not None and (rewind.number, rewind.node) == (answer.search, answer.node):
            rewind.stored = stored
            why = "; ".join(answer.skipped) or "there is none"
            return [] if stored else self._cancel_rewind(group, rewind.node, why)
        if search is not None and (search.number, search.looking) == (answer.search, answer.node):
            search.looking, search.over = "", stored is None
            if stored is None:
                return self._begin_anew(group, f"{group.spec.checkpoints} has no checkpoint of it")
            self.park_stored(group, stored)
        return []

    def _storage_failed(self, cluster: KnownNodes, group: WorkerGroup, fact: CheckpointFailed) -> list[Message]:
        """Retry later what failed at the storage; give a rewind up."""
        node, task, search, out = fact.node, group.spec.name, self.search, list[Message]()
        self.storage.asked_after = None  # who ordered it can see why, and may mend it and order it again
        if search is not None and search.looking == node:
            search.looking = ""
            out.append(Deadline(WaitKind.STATES, task).set())  # a state may lie there
        out += self._cancel_rewind(group, node, fact.reason)
        at_once = self._stranded(cluster, group)
        saving, later = self.retirement.record_failure(cluster, task, node, at_once=at_once)
        if saving is not None:
            self.storage.parts.pop(saving.attempt, None)
        return out + later

    def _start_rewind(self, cluster: KnownNodes, group: WorkerGroup, iteration: int) -> list[Message]:
        """Order a node to look for the checkpoint of a rewind; the task computes on until it is found."""
        node = choose_storage_node(cluster, group)
        self.rewind = Rewind(number=self.searches + 1, iteration=iteration, node=node)
        if not node:
            return self._cancel_rewind(group, node, "no node is there that could look for it")
        self.searches += 1
        self.storage.parts = {}
        return [find_checkpoint_order(cluster, group, node, self.searches, before=self.before, iteration=iteration)]

    def _cancel_rewind(self, group: WorkerGroup, node: str, why: str) -> list[Message]:
        """Cancel the rewind whose checkpoint `node` looks for, and alert why."""
        rewind = self.rewind
        if rewind is None or rewind.node != node:
            return []
        self.rewind = None
        task, root = group.spec.name, group.spec.checkpoints
        text = f"task {task} goes on where it is, not from iteration {rewind.iteration} in {root}: {why}"
        return [Alert(text=f"{text}; unicron checkpoints list {task} --at {root} shows what is there", task=task)]

    def _reject_copy(self, cluster: KnownNodes, group: WorkerGroup, bad: StateRef) -> list[Message]:
        """Drop a copy that is corrupt; return the command that removes it."""
        where, name = bad.location.node, bad.location.name
        left = [ref for ref in self.parking.states if (ref.location.node, ref.location.name) != (where, name)]
        self.parking.restrict(group, left)
        return [drop_order(cluster, group.spec.name, where, [name])] if cluster.is_there(where) else []

    def _discard_worker_state(self, cluster: KnownNodes, group: WorkerGroup, worker: str, node: str) -> list[Message]:
        """Discard the state of a worker that differs from the other replicas', and the copies that it saved."""
        group.holders.pop(worker, None)
        self.saves.mark_order_unknown(node)
        doubtful = [each for each in self.parking.states if each.location.worker == worker]
        out = [message for ref in doubtful for message in self._reject_copy(cluster, group, ref)]
        self.search = None  # what was found may be among them
        return out + self.saves.drop_copies(cluster, group, worker, node)

    def _can_be_stored(self, group: WorkerGroup) -> bool:
        in_memory = bool(self.parking.states) and not group.state.ended
        return in_memory and bool(group.spec.checkpoints) and self.rewind is None

    def _stranded(self, cluster: KnownNodes, group: WorkerGroup) -> bool:
        return self._can_be_stored(group) and self.parking.stranded(cluster)

    def _record_retired(self, cluster: KnownNodes, group: WorkerGroup, fact: CheckpointStored) -> list[Message]:
        """Replace the parked snapshot by its checkpoint on storage; return the commands that free the memory."""
        parked = self.parked
        if parked is None or not parked.states or fact.iteration != parked.iteration:
            return []
        saving = self.retirement.record_written(fact.node)
        if saving is None:
            return []
        out = remove_orders(cluster, group.spec.name, parked.states) + self.drop_saved(cluster, group)
        where = {"root": saving.root, "folder": fact.folder}
        self.park_stored(group, StoredState(**where, iteration=saving.iteration, layout=saving.layout))
        return out
