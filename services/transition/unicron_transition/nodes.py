"""Nodes that come, with what their agents have found there, and nodes that go. Pure functions."""

from unicron.contracts.base import Message
from unicron.contracts.commands import ReleaseNode
from unicron.contracts.events import NodeAdmitted, WorkerReady
from unicron.contracts.states import SAVED
from unicron.contracts.tasks import SlotRef, WorkerStatus
from unicron_transition.cluster import NodeRun
from unicron_transition.membership import WorkerRun, WorkerStage
from unicron_transition.orders import drop_order, remove_orders, stop_order
from unicron_transition.snapshots.saves import saver_of
from unicron_transition.state import TaskRun, TransitionState


def admit_node(state: TransitionState, node: NodeAdmitted) -> list[Message]:
    """Record a node that is new or whose agent has restarted, and synchronize its workers with the agent's list."""
    before = state.nodes.get(node.node)
    state.set_leaving(node.node, waits=False)
    state.nodes[node.node] = NodeRun(
        incarnation=node.incarnation,
        rendezvous=node.rendezvous,
        state_server=node.state_server,
        rack=node.rack,
        domain=node.domain,
        slots=[slot.index for slot in node.slots],
        drained=before is not None and before.drained,
    )
    state.invalidate_partners()
    alive = {status.worker: status for status in node.workers}
    for run in state.tasks.values():
        run.failed = {name: where for name, where in run.failed.items() if where != node.node or name in alive}
    for run in state.tasks_on(node.node):
        run.snapshots.node_joined(run, node.node, node.state_server)
        run.forget_others(node.node, alive)
        for worker in [worker for worker in run.workers.values() if worker.slot.node == node.node]:
            status = alive.pop(worker.worker, None)
            if status is None:
                lose_worker(state, run, worker.worker, node.at)
            else:
                _sync_worker(run, worker, status)
    _record_saved(state, node.node, node.kept)
    runs = state.tasks.values()
    out = [order for run in runs for order in run.snapshots.restrict_node(state, run, node.node, node.kept)]
    unknown = [status for status in alive.values() if not _readopt_worker(state, node.node, status)]
    reason = "the node was held to be lost, and its place in the membership is taken"
    out += [stop_order(state, status.task, _worker_run(node.node, status), reason) for status in unknown]
    return out


def remove_strays(state: TransitionState, node: str, kept: list[str]) -> list[Message]:
    """Return the commands that remove states of no task from a node, and copies that are still on their way there."""
    runs = state.tasks.values()
    wanted = {ref.location.name for run in runs for ref in run.snapshots.usable_states(run, node)}
    saved = {name for run in runs for name in kept if run.snapshots.saves.is_expected(node, name)}
    strays = [name for name in kept if name not in wanted | saved]
    names = [name for name in strays if not name.endswith(SAVED)]
    ended = {name.partition(".")[0] for name in strays if name.endswith(SAVED)}
    return [drop_order(state, "", node, names, sorted(ended))] if strays else []


def stop_if_stray(state: TransitionState, run: TaskRun | None, ready: WorkerReady) -> list[Message]:
    """Return the command that stops a ready worker that no task wants; it would occupy its slot for ever."""
    through = run is not None and ready.worker in run.membership.through
    if through or not state.is_there(ready.node):
        return []
    slot = SlotRef(node=ready.node, slot=ready.slot)
    return [stop_order(state, ready.task, WorkerRun(worker=ready.worker, slot=slot), "it is not wanted there")]


def remove_node(state: TransitionState, name: str, at: float) -> list[Message]:
    """Mark a node as lost, stop its workers, and forget the states that they had."""
    node = state.nodes.get(name)
    if node is None:
        return []
    out: list[Message] = []
    hit = state.tasks_on(name)
    for run in hit:
        for worker in [worker for worker in run.workers.values() if worker.slot.node == name]:
            if node.alive:
                out.append(stop_order(state, run.spec.name, worker, f"{name} is taken out of use"))
            lose_worker(state, run, worker.worker, at)
        if run.trial_node == name:
            run.trial, run.trial_node, run.awaits_trial = "", "", False
        out += remove_orders(state, run.spec.name, run.snapshots.usable_states(run, name))  # its agent may well live
        out += run.snapshots.restrict_node(state, run, name)
    node.alive = False
    state.set_leaving(name, waits=False)
    state.invalidate_partners()
    for run in hit:
        out += run.snapshots.node_lost(state, run, name)
    return out


def release_nodes(state: TransitionState) -> list[Message]:
    """Return the commands that release the leaving nodes which no task needs any more."""
    free = [node for node in state.leaving if state.nodes[node].drained and not _is_needed(state, node)]
    state.leaving = [node for node in state.leaving if node not in free]
    return [ReleaseNode(**state.command_fields(node)) for node in free]


def _is_needed(state: TransitionState, node: str) -> bool:
    """Return whether a task has or will have a worker on a node, or depends on a state that lies only there."""
    for run in state.tasks_on(node):
        slots = [*run.target, *(worker.slot for worker in run.workers.values())]
        if not run.state.ended and (
            node in {slot.node for slot in slots} or run.snapshots.depends_on(state, run, node)
        ):
            return True
    return False


def lose_worker(state: TransitionState, run: TaskRun, name: str, at: float) -> None:
    """Remove a worker and the state that it had from its task."""
    state.drop_worker(run, name)
    run.membership.record_loss(name)
    run.begin_recovery(at, f"{name} is gone")


def _record_saved(state: TransitionState, node: str, names: list[str]) -> None:
    """Record the saved states that a joining node lists, so that they are found or removed later."""
    for worker in map(saver_of, names):
        task, _, number = worker.rpartition("-")
        run = state.tasks.get(task)
        if run and not run.state.ended and number.isdecimal() and int(number) > run.before:
            run.snapshots.saves.record_location(worker, node)
            state.index_nodes(run, [node])


def _sync_worker(run: TaskRun, worker: WorkerRun, status: WorkerStatus) -> None:
    """Bring the record of a worker that outlived its agent up to date with what the new agent reports."""
    if status.ready and worker.stage is WorkerStage.STARTING:
        worker.stage = WorkerStage.READY
    place = _place_held(status)
    if place is not None:
        run.record_state(status.worker, place, status.iteration, worker.slot.node)
    if status.worker in run.membership.group and status.epoch != run.membership.epoch:
        run.membership.broken = True


def _readopt_worker(state: TransitionState, node: str, status: WorkerStatus) -> bool:
    """Readmit a worker that was lost with its node if no other worker has its part of the state; return whether so."""
    run = state.tasks.get(status.task)
    if run is None or run.state.ended or not status.ready:
        return False
    number = status.worker.rpartition("-")[2]
    earlier = not number.isdecimal() or int(number) <= run.before
    place, worker = _place_held(status), _worker_run(node, status)
    if (
        earlier
        or status.worker in run.failed
        or place is None
        or worker.slot in state.occupied
        or run.snapshots.parked is not None
    ):
        return False
    if place in run.held_places(run.workers) or not worker.layout.is_like(run.present_shape):
        return False
    state.add_worker(run, worker)
    run.record_state(status.worker, place, status.iteration, node)
    return True


def _worker_run(node: str, status: WorkerStatus) -> WorkerRun:
    """Return a worker as its agent names it."""
    slot = SlotRef(node=node, slot=status.slot)
    return WorkerRun(worker=status.worker, slot=slot, stage=WorkerStage.READY, place=status.place, layout=status.layout)


def _place_held(status: WorkerStatus) -> int | None:
    """Return whose place's state a worker has that its agent names, None where it has none."""
    return status.place if status.epoch >= 0 else None
