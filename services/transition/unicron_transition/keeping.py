"""What facts about a task's states lead to: in memories, on storage, and what users order of them. Pure functions."""

from unicron.contracts.base import Message
from unicron.contracts.events import (
    CheckpointFailed,
    CheckpointFound,
    CheckpointOrdered,
    CheckpointStored,
    PartStored,
    StateDiverged,
    StateRejected,
    StateSecured,
    StatesFound,
    TaskRewound,
)
from unicron.contracts.storage import StoredState
from unicron_transition import storing
from unicron_transition.moves import Cause, move
from unicron_transition.reconcile import forsake, release, stop
from unicron_transition.retiring import not_retired, retired
from unicron_transition.saves import disown, drop_saved, found, reject, secured
from unicron_transition.state import TaskRun, TransitionState

AboutStates = (
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


def heard(state: TransitionState, run: TaskRun, fact: AboutStates) -> list[Message]:
    """Take in a fact about the states of a task that has not ended; `settle` does the rest."""
    match fact:
        case StateSecured():
            secured(run, fact.worker, fact.node, fact.nodes)
        case StatesFound():
            return found(state, run, fact.node, fact.search, fact.states)
        case StateRejected() if fact.state.location.node == fact.node or run.takes_part(fact.node):
            return reject(state, run, fact.state)  # nobody is to take it
        case StateDiverged() if run.was_on(fact.worker, fact.node):  # it counts no more, nor what that worker saved
            run.states.forget(fact.worker)
            return disown(state, run, fact.worker, fact.node)
        case PartStored() | CheckpointStored() | CheckpointFailed() if not run.takes_part(fact.node):
            return []  # not any more; what it was about is tried again
    return _about_storage(state, run, fact)


def _about_storage(state: TransitionState, run: TaskRun, fact: AboutStates) -> list[Message]:
    match fact:
        case PartStored():
            return storing.part_stored(state, run, fact)
        case CheckpointStored():
            storing.stored(run, fact)
            return retired(state, run, fact)
        case CheckpointFailed():
            out = storing.failed(run, fact.node) + storing.no_rewind(run, fact.node, fact.reason)
            return out + not_retired(state, run, fact.node)
        case CheckpointFound():
            stored, out = storing.rewound(run, fact)
            storing.looked(run, fact)
            return out + (_rewind(state, run, stored) if stored else [])
        case CheckpointOrdered() if run.spec.checkpoints:
            run.saves.asks, run.saves.asked_after = run.saves.asks + 1, fact.after
        case TaskRewound() if run.spec.checkpoints:
            return storing.rewind(state, run, fact.iteration)
    return []


def _rewind(state: TransitionState, run: TaskRun, stored: StoredState) -> list[Message]:
    """Give up the state that a task has for an earlier one."""
    reason = f"a user has it go back to iteration {stored.iteration}"
    out = release(state, run) + forsake(state, run)
    for worker in list(run.workers.values()):
        out += stop(state, run, worker, reason)
    out += drop_saved(state, run)
    run.saves.tried, run.saves.before = [], None  # the user wants this one, whatever was ruled out
    storing.take(run, stored)
    return out + move(state, run, Cause.FAILURE, reason)
