"""Nodes that are to go: what lies in their memories only is copied to nodes that stay. Pure functions."""

from collections.abc import Iterable

from msgspec.structs import replace

from unicron.contracts.base import Message
from unicron.contracts.commands import CopyState, ReleaseNode
from unicron.contracts.events import StateCopied
from unicron.contracts.states import SAVED, Keeper, StateRef
from unicron_transition.holders import Copying
from unicron_transition.orders import remove
from unicron_transition.replicas import lacks_state
from unicron_transition.state import TaskRun, TransitionState

WITHDRAWN = 64
"""Copies of each task that may still arrive though nobody wants them any more; of older ones nobody tells."""


def evacuate(state: TransitionState, runs: Iterable[TaskRun]) -> list[Message]:
    """Return the commands that copy what tasks are to go on with to nodes that stay, where it lies on no such node."""
    out: list[Message] = []
    for run in runs:
        states = run.shelf.states if run.shelf and not run.state.ended else []
        vain = [each for each in run.copying if each.state not in states]
        goes_on = [each for each in run.copying if each.state in states and _is_on_its_way(state, each)]
        over = [each for each in run.copying if each not in goes_on and not each.failed]
        run.copying, run.withdrawn = goes_on, [*run.withdrawn, *over][-WITHDRAWN:]
        places: dict[int, list[StateRef]] = {}
        for ref in states:
            places.setdefault(ref.place, []).append(ref)
        for refs in places.values():
            out += _copy(state, run, refs)
        coming = {(each.state.location.name, each.keeper.node) for each in run.copying}
        arrived = [each.state.at(each.keeper.node, each.keeper.address) for each in vain]  # untold, maybe
        out += remove(state, run, [ref for ref in arrived if (ref.location.name, ref.location.node) not in coming])
    return out


def _is_on_its_way(state: TransitionState, copying: Copying) -> bool:
    """Return whether both nodes are as they were when it was ordered."""
    source, keeper = state.nodes[copying.state.location.node], copying.keeper
    known = state.stays(keeper.node) and state.nodes[keeper.node].state_server == keeper.address
    return known and source.alive and source.incarnation == copying.incarnation


def _copy(state: TransitionState, run: TaskRun, refs: list[StateRef]) -> list[Message]:
    """Return the command that has one of a place's states copied, if it is needed and one can be."""
    orders = [each for each in run.copying if each.state in refs]
    if any(state.stays(ref.location.node) for ref in refs) or not all(each.failed for each in orders):
        return []
    tried = {(each.state.location.node, each.keeper.node) for each in orders}
    for ref in refs:
        node = ref.location.node
        keepers = state.partners(node) if state.is_there(node) else []
        keeper = next((each for each in keepers if (node, each.node) not in tried), None)
        if keeper is not None:
            return [_order(state, run, ref, keeper)]
    return []  # until another node comes


def _order(state: TransitionState, run: TaskRun, ref: StateRef, keeper: Keeper) -> CopyState:
    node, worker = ref.location.node, ref.location.worker
    run.copying.append(Copying(state=ref, incarnation=state.nodes[node].incarnation, keeper=keeper))
    if ref.location.name.endswith(SAVED):
        run.saves.held.setdefault(worker, {})[keeper.node] = None
    state.note(run, [keeper.node])
    return CopyState(**state.to(node), task=run.spec.name, state=ref, keeper=keeper)


def copied(state: TransitionState, run: TaskRun, fact: StateCopied) -> list[Message]:
    """Count on a copy that is there; of one that nobody wants any more have what arrived removed."""
    copy, shelf = fact.state, run.shelf
    sent = [each for each in (*run.copying, *run.withdrawn) if each.state.location.node == fact.node]
    order = next((each for each in sent if _leads_to(each, copy)), None)
    if shelf is not None and order is not None and order in run.copying:
        order.failed = order.keeper.address == copy.location.address and bool(fact.problem)
        if order.keeper.address == copy.location.address and not fact.problem:
            run.copying.remove(order)
            run.shelf = replace(shelf, states=[*shelf.states, copy])
        return []
    if order is None:
        return []  # that node was not told to copy it, or has said so before
    run.withdrawn = [each for each in run.withdrawn if each is not order]
    counts = any(ref.location.name == copy.location.name for ref in run.counted_on(copy.location.node))
    return [] if counts or fact.problem else remove(state, run, [copy])


def _leads_to(copying: Copying, copy: StateRef) -> bool:
    return (copying.state.location.name, copying.keeper.node) == (copy.location.name, copy.location.node)


def let_go(state: TransitionState) -> list[Message]:
    """Return the commands that tell nodes which are leaving that nobody needs them any more."""
    free = [node for node in state.leaving if state.nodes[node].drained and not _is_needed(state, node)]
    state.leaving = [node for node in state.leaving if node not in free]
    return [ReleaseNode(**state.to(node)) for node in free]


def _is_needed(state: TransitionState, node: str) -> bool:
    """Return whether a task has or is to have a worker on a node, or something to go on with that lies there only."""
    return any(_counts_on(state, run, node) for run in state.on(node) if not run.state.ended)


def _counts_on(state: TransitionState, run: TaskRun, node: str) -> bool:
    slots = [*run.target, *(worker.slot for worker in run.workers.values())]
    if any(slot.node == node for slot in slots):
        return True
    if run.shelf is None:
        return lacks_state(run) and any(node in nodes for nodes in run.saves.held.values())
    safe = {ref.place for ref in run.shelf.states if state.stays(ref.location.node)}
    return any(ref.location.node == node and ref.place not in safe for ref in run.shelf.states)
