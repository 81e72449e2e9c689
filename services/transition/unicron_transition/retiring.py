"""States that go from the memories of nodes to storage, and are only there then. Pure functions.

Those of tasks that wait for long, so that memory is free; and at once those that lie on nodes which are to go, where
none stays that could keep a copy.
"""

from collections.abc import Iterable
from hashlib import blake2b

from unicron.contracts.base import Message
from unicron.contracts.commands import StoreState
from unicron.contracts.events import CheckpointStored
from unicron.contracts.states import StateRef
from unicron.contracts.storage import Saving, StoredState
from unicron_transition.deadlines import Deadline, Wait
from unicron_transition.holders import Retiring
from unicron_transition.orders import remove
from unicron_transition.saves import drop_saved
from unicron_transition.state import TaskRun, TransitionState
from unicron_transition.storing import take


def retire(state: TransitionState, runs: Iterable[TaskRun]) -> list[Message]:
    """Return the commands that write to storage what is not to stay in memory, or the timer for what may so long."""
    return [message for run in runs for message in _retire(state, run)]


def _retire(state: TransitionState, run: TaskRun) -> list[Message]:
    strands = _strands(state, run)
    if not strands and (run.target or not _can_be_stored(run)):
        return _call_off(run)
    retiring = run.saves.retiring
    if retiring is None:
        retiring = run.saves.retiring = Retiring(wait=Wait.IDLE)
        if not strands:
            return [Deadline(Wait.IDLE, run.spec.name).set(state.idle_s)]
    if _is_on_its_way(state, retiring) or retiring.wait == (Wait.AGAIN if strands else Wait.IDLE):
        return []
    return _order(state, run, retiring)


def _can_be_stored(run: TaskRun) -> bool:
    in_memory = run.shelf is not None and bool(run.shelf.states) and not run.state.ended
    return in_memory and bool(run.spec.checkpoints) and run.saves.rewind is None


def _strands(state: TransitionState, run: TaskRun) -> bool:
    """Return whether some place lies on nodes that are to go only, and no copy of it is on its way to another."""
    if run.shelf is None or not _can_be_stored(run):
        return False
    safe = {ref.place for ref in run.shelf.states if state.stays(ref.location.node)}
    safe |= {each.state.place for each in run.copying if not each.failed}
    return any(ref.place not in safe for ref in run.shelf.states)


def _call_off(run: TaskRun) -> list[Message]:
    """Leave what is in memory there: it is about to be taken, or is gone; what is being written may be finished."""
    retiring, run.saves.retiring = run.saves.retiring, None
    return [Deadline(Wait(retiring.wait), run.spec.name).cancel()] if retiring and retiring.wait else []


def _is_on_its_way(state: TransitionState, retiring: Retiring) -> bool:
    """Return whether all who write are as they were when they were told to."""
    told = retiring.nodes.items()
    return retiring.saving is not None and all(
        state.is_there(node) and state.nodes[node].incarnation == incarnation for node, incarnation in told
    )


def _order(state: TransitionState, run: TaskRun, retiring: Retiring) -> list[Message]:
    """Have each place written by one of the nodes that have it, by another one with each attempt."""
    if run.shelf is None:
        return []
    out: list[Message] = [Deadline(Wait(retiring.wait), run.spec.name).cancel()] if retiring.wait else []
    run.saves.retired += 1
    named = f"{run.submitted_at}:{run.before}:{run.shelf.iteration}:{run.saves.retired}"
    retiring.wait, retiring.saving = (
        "",
        Saving(
            root=run.spec.checkpoints,
            task=run.spec.name,
            iteration=run.shelf.iteration,
            layout=run.shelf.layout.with_workers(0),
            attempt=blake2b(named.encode(), digest_size=4).hexdigest(),
        ),
    )
    places: dict[int, list[StateRef]] = {}
    for ref in run.shelf.states:
        places.setdefault(ref.place, []).append(ref)
    chosen = [refs[run.saves.retired % len(refs)] for refs in places.values()]
    retiring.nodes = {ref.location.node: state.nodes[ref.location.node].incarnation for ref in chosen}
    return out + [
        StoreState(**state.to(ref.location.node), task=run.spec.name, state=ref, saving=retiring.saving)
        for ref in chosen
    ]


def not_retired(state: TransitionState, run: TaskRun, node: str) -> list[Message]:
    """Try again later, where a node could not write its part: soon if it is to go."""
    retiring = run.saves.retiring
    if retiring is None or retiring.saving is None or node not in retiring.nodes:
        return []
    run.saves.parts.pop(retiring.saving.attempt, None)
    retiring.saving, wait = None, Wait.AGAIN if _strands(state, run) else Wait.IDLE
    retiring.wait = wait
    return [Deadline(wait, run.spec.name).set(state.idle_s if wait is Wait.IDLE else None)]


def waited(run: TaskRun) -> list[Message]:
    """Note that the time is over that a state may stay in memory, or until the next attempt; `settle` does the rest."""
    if run.saves.retiring is not None:
        run.saves.retiring.wait = ""
    return []


def retired(state: TransitionState, run: TaskRun, fact: CheckpointStored) -> list[Message]:
    """Count on what is on storage now, and have all removed that is in memory."""
    retiring, shelf = run.saves.retiring, run.shelf
    saving = retiring.saving if retiring else None
    if retiring is None or saving is None or shelf is None or not shelf.states or fact.iteration != shelf.iteration:
        return []
    if fact.node not in retiring.nodes:
        return []
    run.saves.retiring = None
    out = remove(state, run, shelf.states) + drop_saved(state, run)
    where = {"root": saving.root, "folder": fact.folder}
    take(run, StoredState(**where, iteration=saving.iteration, layout=saving.layout))
    return out
