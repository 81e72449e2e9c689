"""The snapshots in this node's memory, and what is to be done about them: a part of the agent's core.

They come here in three ways: workers leave their states behind, workers save them while they compute, and other nodes
send copies of what was saved there.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b

from unicron.contracts.commands import (
    CommitCheckpoint,
    CopyState,
    DropStates,
    FindCheckpoint,
    FindStates,
    SaveStates,
    StoreState,
)
from unicron.contracts.events import StateCopied, StateRejected, StateSecured, StatesFound, StateUnprotected
from unicron.contracts.states import KEPT, Saver, StateRef
from unicron.contracts.storage import Saving
from unicron.contracts.worker import Kept, Save, Saved, Secured
from unicron.snapshots.names import exported_name, saved_names
from unicron_agent.effects import AbandonCopies, Out, RemoveState, SendCopy, SendToWorker, StorePart, UseStorage
from unicron_agent.stimuli import CopyReceived, CopySent, StateUnsound, StorageUsed
from unicron_agent.workers.workers import LocalWorker

AGAIN_S = 1.0
"""After how long a copy is sent again that did not arrive."""

TRIES = 4
"""How often in a row; a node that is gone is known to be by then. After that the worker goes on saving without it."""

SnapshotCommand = CopyState | DropStates | SaveStates | FindStates | StoreState | CommitCheckpoint | FindCheckpoint


@dataclass
class SaveOrder:
    """An order to one worker to save its state, and how far copies of what it saved have come.

    Attributes:
        saver: the worker, and the nodes that are to have copies.
        saved: the newest state that it has saved.
        missing: nodes that have no copy of that yet.
        secured: that all have one was reported since the order came, and nothing else since.
        again_at: when to send the missing copies once more; None while they are on their way, or all there.
        failures: attempts in a row that did not get there.
    """

    saver: Saver
    saved: StateRef | None = None
    missing: frozenset[str] = frozenset()
    secured: bool = False
    again_at: float | None = None
    failures: int = 0


@dataclass
class DepartureCopy:
    """A snapshot that is copied because this node is to go.

    Attributes:
        order: which, and where to.
        again_at: when to send it once more; None while it is on its way.
        failures: attempts that did not get there.
    """

    order: CopyState
    again_at: float | None = None
    failures: int = 0

    def send(self) -> SendCopy:
        """Return the effect that sends the copy: at once, the node is about to go."""
        return SendCopy(self.order.state, self.order.keeper, paced=False)

    def report(self, problem: str) -> StateCopied:
        """Return the fact that it was copied, or what the problem was."""
        keeper = self.order.keeper
        copy = self.order.state.at(keeper.node, keeper.address)
        return StateCopied(
            node=self.order.node,
            task=self.order.task,
            state=copy,
            problem=problem,
            correlation=self.order.correlation,
        )


class NodeSnapshots:
    """The snapshots in this node's memory.

    Args:
        node: its name.
        address: of its state server.

    Attributes:
        found: all whole ones, by name.
    """

    def __init__(self, node: str, address: str) -> None:
        self.present: dict[str, StateRef | None] = {}
        self._node, self._address = node, address
        self._orders: dict[str, SaveOrder] = {}
        self._sending: set[tuple[StateRef, str]] = set()
        self._departures: dict[tuple[str, str], DepartureCopy] = {}
        self._ended: dict[str, None] = {}

    def adopt(self, kept: Iterable[str], saved: Iterable[StateRef]) -> None:
        """Take over what an earlier agent has left; this one hands it out from now on."""
        self.present = {**dict.fromkeys(kept), **{ref.location.name: self.at_this_node(ref) for ref in saved}}

    def at_this_node(self, ref: StateRef) -> StateRef:
        """Return a snapshot with the address of this agent; a worker may know that of an earlier one."""
        return ref.at(self._node, self._address)

    @property
    def complete(self) -> list[StateRef]:
        """A complete snapshot that was saved here or elsewhere."""
        return [ref for ref in self.present.values() if ref is not None]

    # --- orders ------------------------------------------------------------------------------------------------------

    def obey(self, command: SnapshotCommand, workers: Iterable[LocalWorker]) -> Out:
        """Carry a command out."""
        match command:
            case CommitCheckpoint() | FindCheckpoint():
                return [UseStorage(command)]
            case StoreState(state=ref, saving=saving):
                return [UseStorage(StorePart(ref=ref, saving=saving, ordered=True))]
            case DropStates():
                return self._drop(command)
            case CopyState():
                return self._copy(command)
            case SaveStates():
                return self._order_saves(command, workers)
        return self._list(command)

    def _order_saves(self, command: SaveStates, workers: Iterable[LocalWorker]) -> Out:
        """Have workers of a task begin or cease to save."""
        savers = {saver.worker: saver for saver in command.savers}
        out: Out = []
        for name in sorted({ref.location.worker for ref, _ in self._sending if ref.task == command.task}):
            saver = savers.get(name)  # it may be gone meanwhile: what an old keeper got would never be removed
            out += self._abandon(name, {keeper.node for keeper in saver.keepers} if saver else ())
        for worker in workers:
            if worker.task != command.task:
                continue
            before = self._orders.pop(worker.worker, None)
            if saver := savers.get(worker.worker):
                self._orders[worker.worker] = SaveOrder(saver)
            if saver or before:
                out.append(SendToWorker(worker.worker, _save_message(saver)))
        return out

    def resend_order(self, worker: str) -> Out:
        """Have a worker that connects save from now on, if it is to."""
        order = self._orders.get(worker)
        return [SendToWorker(worker, _save_message(order.saver))] if order else []

    def _drop(self, command: DropStates) -> Out:
        """Remove what is not to be taken any more."""
        here = [name for name in command.names if name in self.present]
        for name in here:
            del self.present[name]
        out: Out = []
        for key in [key for key in self._departures if key[0] in here]:
            order = self._departures.pop(key).order
            out.append(AbandonCopies(order.state.location.worker, frozenset({order.keeper.node})))
        out += [RemoveState(name) for name in here]
        for worker in command.workers:
            self._ended[worker] = None
            self._orders.pop(worker, None)
            out += [*self._abandon(worker), *self._remove_saved(worker)]
        return out

    def _abandon(self, worker: str, keepers: Collection[str] = ()) -> Out:
        """Abandon copies that are on their way to others than the `keepers`, also where their worker is gone."""
        under_way = {each for each in self._sending if each[0].location.worker == worker and each[1] not in keepers}
        self._sending -= under_way
        return [AbandonCopies(worker, frozenset(node for _, node in under_way))] if under_way else []

    def _copy(self, command: CopyState) -> Out:
        """Have another node keep what may lie here only."""
        key = (command.state.location.name, command.keeper.node)
        before = self._departures.get(key)
        self._departures[key] = DepartureCopy(command)
        same = before is not None and (before.order.state, before.order.keeper) == (command.state, command.keeper)
        return [] if same and before and before.again_at is None else [self._departures[key].send()]

    def _remove_saved(self, worker: str) -> Out:
        """Remove all that a worker has saved, whole or not."""
        names = saved_names(worker)
        for name in names:
            self.present.pop(name, None)
        return [RemoveState(name) for name in names]

    def _list(self, command: FindStates) -> Out:
        """Report which snapshots of a task are here."""
        states = [ref for ref in self.complete if ref.task == command.task]
        return [StatesFound(node=self._node, task=command.task, search=command.search, states=states)]

    # --- what happens to states --------------------------------------------------------------------------------------

    def record_left_behind(self, worker: str, message: Kept) -> bool:
        """Note that a worker has left its state behind; False where it names what it could not have left."""
        name = message.state.location.name
        if name != exported_name(worker, message.epoch, kept=True):
            return False  # it would be ordered away with another's
        self.present[name] = None
        return True

    def forget_left_behind(self, worker: str) -> None:
        """Note that a worker goes on, and has taken back what it left behind."""
        taken_back = [name for name in self.present if name.startswith(f"{worker}.") and name.endswith(KEPT)]
        for name in taken_back:
            del self.present[name]

    def worker_ended(self, worker: str) -> Out:
        """Note that a worker has ended; what it saved stays, unless it was to be removed."""
        self._orders.pop(worker, None)
        return self._remove_saved(worker) if worker in self._ended else []

    def record_unprotected(self, worker: str) -> None:
        """Note that a worker can't save its state: when it can again, that is reported."""
        if order := self._orders.get(worker):
            order.secured = False

    def remove_doubtful(self, worker: str) -> Out:
        """Remove what a worker saved that is in doubt; it saves nothing more until that is ordered anew."""
        if self._orders.pop(worker, None) is None:
            return []
        return [*self._abandon(worker), *self._remove_saved(worker), SendToWorker(worker, Save(on=False))]

    def copy_saved(self, worker: LocalWorker, message: Saved) -> Out:
        """Have copies made of what a worker has saved."""
        ref = self.at_this_node(message.state)
        order = self._orders.get(worker.worker)
        if ref.location.worker != worker.worker or ref.task != worker.task or worker.worker in self._ended:
            return []
        if message.store and self.present.get(ref.location.name) == ref and order:
            return _write_to_storage(order.saver, message)
        if order is None:  # no service knows of it: ordered by an earlier agent, or no longer
            self.present.pop(ref.location.name, None)
            return [RemoveState(ref.location.name), SendToWorker(worker.worker, Save(on=False))]
        self.present[ref.location.name] = ref
        order.saved, order.again_at = ref, None
        order.missing = frozenset(keeper.node for keeper in order.saver.keepers)
        out = _write_to_storage(order.saver, message)
        return out + (self._send(order) if order.missing else self._report_secured(worker, order, ref))

    def _send(self, order: SaveOrder) -> Out:
        if (ref := order.saved) is None:
            return []
        missing = [keeper for keeper in order.saver.keepers if keeper.node in order.missing]
        self._sending |= {(ref, keeper.node) for keeper in missing}
        return [SendCopy(ref, keeper) for keeper in missing]

    def handle(
        self,
        outcome: CopySent | CopyReceived | StateUnsound | StorageUsed,
        workers: Mapping[str, LocalWorker],
        now: float,
    ) -> Out:
        """Take in what came of copies, or of the storage."""
        match outcome:
            case CopySent(ref=ref) if (ref.location.name, outcome.node) in self._departures:
                return self._departure_copy_ended(self._departures[ref.location.name, outcome.node], outcome, now)
            case CopySent(ref=ref):
                self._sending.discard((ref, outcome.node))
                return self._copy_ended(workers.get(ref.location.worker), outcome, now)
            case CopyReceived():
                return self._copy_received(outcome)
            case StateUnsound(ref=ref):
                return [StateRejected(node=self._node, task=ref.task, state=ref, reason=outcome.reason)]
        return [outcome.fact]

    def _copy_ended(self, worker: LocalWorker | None, sent: CopySent, now: float) -> Out:
        """Note that another node has a copy, or has none yet."""
        order = self._orders.get(sent.ref.location.worker)
        if worker is None or order is None or order.saved != sent.ref:
            return []
        if sent.unsound:  # another one, then
            rejected = StateRejected(node=self._node, task=sent.ref.task, state=sent.ref, reason=sent.problem)
            return [rejected, *self.resend_order(worker.worker)]
        if sent.problem:
            return self._retry_or_report(worker, order, sent, now)
        order.failures = 0
        order.missing -= {sent.node}
        return [] if order.missing else self._report_secured(worker, order, sent.ref)

    def _departure_copy_ended(self, copying: DepartureCopy, sent: CopySent, now: float) -> Out:
        """Say that another node keeps a state now; or send it again, and in the end say that none does."""
        copying.failures += 1
        if sent.problem and not sent.unsound and copying.failures < TRIES:
            copying.again_at = now + AGAIN_S
            return []
        del self._departures[sent.ref.location.name, sent.node]
        if sent.unsound:  # another one, then
            return [StateRejected(node=self._node, task=sent.ref.task, state=sent.ref, reason=sent.problem)]
        return [copying.report(sent.problem)]

    def _retry_or_report(self, worker: LocalWorker, order: SaveOrder, sent: CopySent, now: float) -> Out:
        """Send it again; in the end have the worker save newer states here only, rather than none."""
        order.failures += 1
        if order.failures < TRIES:
            order.again_at = now + AGAIN_S
            return []
        ref = sent.ref
        goes_on = SendToWorker(worker.worker, Secured(name=ref.location.name, iteration=ref.iteration))
        if order.failures > TRIES:
            return [goes_on]
        order.secured = False
        reason = f"{sent.node} keeps no copy: {sent.problem}"
        unprotected = StateUnprotected(
            node=self._node, slot=worker.slot, task=worker.task, worker=worker.worker, reason=reason
        )
        return [goes_on, unprotected]

    def _report_secured(self, worker: LocalWorker, order: SaveOrder, ref: StateRef) -> Out:
        """Let the worker save the next one; report it, unless it was reported before."""
        out: Out = [SendToWorker(worker.worker, Secured(name=ref.location.name, iteration=ref.iteration))]
        if not order.secured:
            order.secured = True
            out.append(
                StateSecured(
                    node=self._node,
                    slot=worker.slot,
                    task=worker.task,
                    worker=worker.worker,
                    iteration=ref.iteration,
                    nodes=[keeper.node for keeper in order.saver.keepers],
                )
            )
        return out

    def _copy_received(self, received: CopyReceived) -> Out:
        """Note a copy of what was saved elsewhere; or that one is being written over, and is none."""
        self.present.pop(received.name, None)
        if received.ref is not None:
            if received.ref.location.worker in self._ended:
                return [RemoveState(received.name)]
            self.present[received.name] = received.ref
        return []

    def tick(self, now: float) -> Out:
        """Send again what did not arrive."""
        out: Out = []
        for order in self._orders.values():
            if order.again_at is not None and now >= order.again_at:
                order.again_at = None
                out += self._send(order)
        for copying in self._departures.values():
            if copying.again_at is not None and now >= copying.again_at:
                copying.again_at = None
                out.append(copying.send())
        return out

    def due_at(self) -> float:
        """Return when the next is to be sent again."""
        waiting = [each.again_at for each in self._orders.values()]
        waiting += [each.again_at for each in self._departures.values()]
        return min((again_at for again_at in waiting if again_at is not None), default=math.inf)


def _save_message(saver: Saver | None) -> Save:
    store = saver.store if saver else None
    return Save(on=saver is not None, store_s=store.every_s if store else 0.0, store_asked=store.asked if store else 0)


def _write_to_storage(saver: Saver, saved: Saved) -> Out:
    """Have what was saved written to storage, if it is to be: all places work out the same attempt."""
    if saver.store is None or not saved.store:
        return []
    ref, run = saved.state, saver.store.run
    attempt = blake2b(f"{run}:{saved.epoch}:{ref.iteration}".encode(), digest_size=4).hexdigest()
    saving = Saving(root=saver.store.root, task=ref.task, iteration=ref.iteration, layout=ref.layout, attempt=attempt)
    return [UseStorage(StorePart(ref=ref, saving=saving))]
