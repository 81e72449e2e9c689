"""Checkpoints on storage: how often, when one is complete, and the look there when no memory has a state. Pure."""

from unicron.checkpoints.interval import daly
from unicron.contracts.base import Message
from unicron.contracts.commands import CommitCheckpoint, FindCheckpoint
from unicron.contracts.events import CheckpointFound, PartStored
from unicron.contracts.states import Shelf
from unicron.contracts.storage import StoreOrder
from unicron_transition.deadlines import Deadline, Wait
from unicron_transition.state import TaskRun, TransitionState

PRIOR_S = 24 * 3600.0
"""A task is taken to fail once in that time, as long as nothing else is known of it."""

LEAST_S = 60.0
LEAST_WRITE_S = 1.0
ATTEMPTS = 4
"""Checkpoints of which parts may be on their way at once; older ones lack parts that will never come."""

CHANGE = 1.25
"""By how much an interval must differ from the one in force to be ordered."""


def order(run: TaskRun) -> StoreOrder | None:
    """Return how often those who save write to storage; None where they don't."""
    if not run.spec.checkpoints:
        return None
    run.saves.every_s = run.saves.every_s or interval(run, run.submitted_at)
    return StoreOrder(root=run.spec.checkpoints, every_s=run.saves.every_s, run=f"{run.submitted_at}:{run.before}")


def interval(run: TaskRun, now: float) -> float:
    """Return the seconds from one checkpoint to the next: the user's, or Daly's for what was seen of failures."""
    seen_s = PRIOR_S + max(0.0, now - run.submitted_at)
    best_s = max(LEAST_S, daly(run.saves.write_s, seen_s / (1 + run.saves.failures)))
    return run.spec.checkpoint_s or best_s


def part_stored(state: TransitionState, run: TaskRun, fact: PartStored) -> list[Message]:
    """Note a part of a checkpoint; when all are there, have it completed, and forget what came to nothing before."""
    saves, saving = run.saves, fact.saving
    others = [part for part in saves.parts.pop(saving.attempt, ()) if part.place != fact.part.place]
    parts = saves.parts[saving.attempt] = [*others, fact.part]
    saves.write_s = max(fact.seconds, saves.write_s if others else LEAST_WRITE_S)
    if len(parts) < saving.layout.replica_workers or not state.is_there(fact.node):
        saves.parts = dict(list(saves.parts.items())[-ATTEMPTS:])
        return []
    saves.parts = {}
    return [
        CommitCheckpoint(**state.to(fact.node), task=run.spec.name, saving=saving, parts=parts, since=run.submitted_at)
    ]


def stored(run: TaskRun, at: float) -> None:
    """Note that a checkpoint is complete, and how often there should be one from now on."""
    best_s = interval(run, at)
    if not 1 / CHANGE <= best_s / (run.saves.every_s or best_s) <= CHANGE:
        run.saves.every_s = best_s


def look(state: TransitionState, run: TaskRun) -> list[Message]:
    """Have a node look at the storage, now that no memory has the state; without one, the task begins anew."""
    search = run.saves.search
    if search is None:
        return []
    if not run.spec.checkpoints:
        search.over = True
        return []
    there = [slot.node for slot in state.usable(run)] or [name for name in state.nodes if state.is_there(name)]
    if not there:
        run.saves.search = None  # it begins again with whichever node comes first
        return []
    search.looking = there[0]
    state.note(run, there[:1])
    return [
        FindCheckpoint(
            **state.to(there[0]),
            task=run.spec.name,
            search=search.number,
            root=run.spec.checkpoints,
            since=run.submitted_at,
            before=-1 if run.saves.before is None else run.saves.before,
        )
    ]


def looked(run: TaskRun, answer: CheckpointFound) -> None:
    """Go on with what lies on storage; where nothing does, the task begins anew."""
    search, stored = run.saves.search, answer.stored
    if search is None or (search.number, search.looking) != (answer.search, answer.node):
        return
    search.looking = ""
    if stored is None:
        search.over = True
        return
    run.shelf = Shelf(layout=stored.layout, iteration=stored.iteration, states=[], stored=stored)
    run.membership.broken, run.saves.search = True, None


def failed(run: TaskRun, node: str) -> list[Message]:
    """Look again after a while where the storage could not be read: a state may lie there."""
    search = run.saves.search
    if search is None or search.looking != node:
        return []
    search.looking = ""
    return [Deadline(Wait.STATES, run.spec.name).set()]
