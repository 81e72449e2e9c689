"""Checkpoints on storage: how often, when one is complete, and the look there when no memory has a state. Pure."""

from unicron.checkpoints.interval import daly
from unicron.contracts.base import Message
from unicron.contracts.commands import CommitCheckpoint, FindCheckpoint
from unicron.contracts.events import Alert, CheckpointFound, CheckpointStored, PartStored
from unicron.contracts.states import Shelf
from unicron.contracts.storage import StoredState, StoreOrder
from unicron_transition.deadlines import Deadline, Wait
from unicron_transition.holders import Rewind
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
    asked = run.saves.asks if run.saves.asked_after is not None else 0
    named = f"{run.submitted_at}:{run.before}"
    return StoreOrder(root=run.spec.checkpoints, every_s=run.saves.every_s, run=named, asked=asked)


def interval(run: TaskRun, now: float) -> float:
    """Return the seconds from one checkpoint to the next: the user's, or Daly's for what was seen of failures."""
    seen_s = PRIOR_S + max(0.0, now - run.submitted_at)
    best_s = max(LEAST_S, daly(run.saves.write_s, seen_s / (1 + run.saves.failures)))
    return run.spec.checkpoint_s or best_s


def part_stored(state: TransitionState, run: TaskRun, fact: PartStored) -> list[Message]:
    """Note a part of a checkpoint; when all are there, have it completed, and forget what came to nothing before."""
    saves, saving = run.saves, fact.saving
    if saves.rewind is not None:
        return []  # it would count as newer than what the task goes back to
    if (saving.root, saving.task) != (run.spec.checkpoints, run.spec.name):
        return []  # an earlier task's of this name
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


def stored(run: TaskRun, fact: CheckpointStored) -> None:
    """Note that a checkpoint is complete, and how often there should be one from now on."""
    if fact.iteration > (run.saves.asked_after or 0):
        run.saves.asked_after = None
    best_s = interval(run, fact.at)
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
    node = _looker(state, run)
    if not node:
        run.saves.search = None  # it begins again with whichever node comes first
        return []
    search.looking = node
    return [_find(state, run, node, search.number)]


def _looker(state: TransitionState, run: TaskRun) -> str:
    """Return a node that can look at the storage, empty where there is none."""
    there = [slot.node for slot in state.usable(run)] or [name for name in state.nodes if state.is_there(name)]
    state.note(run, there[:1])
    return there[0] if there else ""


def _find(state: TransitionState, run: TaskRun, node: str, number: int, iteration: int = -1) -> FindCheckpoint:
    return FindCheckpoint(
        **state.to(node),
        task=run.spec.name,
        search=number,
        root=run.spec.checkpoints,
        since=0.0 if run.spec.resume else run.submitted_at,
        before=-1 if run.saves.before is None else run.saves.before,
        iteration=iteration,
    )


def rewind(state: TransitionState, run: TaskRun, iteration: int) -> list[Message]:
    """Have a node look whether a checkpoint is there to which the task is to go back; it computes on until then."""
    node = _looker(state, run)
    if not node:
        return [_not_rewound(run, iteration, "no node is there that could look for it")]
    run.saves.searches += 1
    run.saves.parts = {}
    run.saves.rewind = Rewind(number=run.saves.searches, iteration=iteration, node=node)
    return [_find(state, run, node, run.saves.searches, iteration)]


def rewound(run: TaskRun, answer: CheckpointFound) -> tuple[StoredState | None, list[Message]]:
    """Return the checkpoint to which the task goes back now, if that was looked for."""
    order = run.saves.rewind
    if order is None or (order.number, order.node) != (answer.search, answer.node):
        return None, []
    run.saves.rewind = None
    if answer.stored is None:
        why = "; ".join(answer.skipped) or "there is none"
        return None, [_not_rewound(run, order.iteration, why)]
    return answer.stored, []


def no_rewind(run: TaskRun, node: str, why: str) -> list[Message]:
    """Give an order to go back up, where the node that looks for the checkpoint is gone or can't."""
    order = run.saves.rewind
    if order is None or order.node != node:
        return []
    run.saves.rewind = None
    return [_not_rewound(run, order.iteration, why)]


def _not_rewound(run: TaskRun, iteration: int, why: str) -> Alert:
    task, root = run.spec.name, run.spec.checkpoints
    text = f"task {task} goes on where it is, not from iteration {iteration} in {root}: {why}"
    return Alert(text=f"{text}; unicron checkpoints list {task} --at {root} shows what is there")


def looked(run: TaskRun, answer: CheckpointFound) -> None:
    """Go on with what lies on storage; where nothing does, the task begins anew."""
    search, stored = run.saves.search, answer.stored
    if search is None or (search.number, search.looking) != (answer.search, answer.node):
        return
    search.looking = ""
    if stored is None:
        search.over = True
        return
    take(run, stored)


def take(run: TaskRun, stored: StoredState) -> None:
    """Go on with a checkpoint."""
    run.shelf = Shelf(layout=stored.layout, iteration=stored.iteration, states=[], stored=stored)
    run.membership.broken, run.saves.search = True, None


def failed(run: TaskRun, node: str) -> list[Message]:
    """Look again after a while where the storage could not be read: a state may lie there."""
    run.saves.asked_after = None  # who ordered it is told, and may mend it and order it again
    search = run.saves.search
    if search is None or search.looking != node:
        return []
    search.looking = ""
    return [Deadline(Wait.STATES, run.spec.name).set()]
