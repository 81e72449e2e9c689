"""What must hold of the transition service's state after each message, whatever has happened.

Nothing in production asks: a service goes on as well as it can. Storms do, so that what is wrong shows where it begins.
"""

from collections import Counter
from collections.abc import Iterator

from unicron_transition.membership import TaskMembership
from unicron_transition.state import TaskRun, TransitionState


def inconsistencies(state: TransitionState) -> Iterator[str]:
    """Yield what contradicts itself in a state, in words."""
    slots = Counter(worker.slot for run in state.tasks.values() for worker in run.workers.values())
    yield from (f"{slot} has {count} workers" for slot, count in slots.items() if count > 1)
    yield from _lookup_problems(state)
    for node in state.leaving:
        if not state.is_there(node):
            yield f"{node} waits to leave and is not there"
    for name, run in state.tasks.items():
        yield from (f"{name}: {problem}" for problem in _task_problems(state, run))


def _lookup_problems(state: TransitionState) -> Iterator[str]:
    """Compare what was worked out of the tasks once, and is kept up since, with what follows from them now."""
    kept, anew = vars(state), TransitionState(tasks=state.tasks)
    if "occupied" in kept and state.occupied != anew.occupied:
        yield f"{state.occupied} are held to be in slots in which {anew.occupied} are"
    if "_seen" not in kept:
        return  # it is not worked out for this: worked out later, it holds other things
    for node in state.nodes:
        concerned = {run.spec.name for run in state.tasks_on(node)}
        for run in anew.tasks_on(node):
            if run.spec.name not in concerned:
                yield f"what happens to {node} is not held to concern {run.spec.name}"


def _task_problems(state: TransitionState, run: TaskRun) -> Iterator[str]:
    parked = run.snapshots.parked
    if run.state.ended and (run.workers or run.target or parked or run.snapshots.parking.copying):
        yield f"it is {run.state}, and has workers, slots or states"
    if len(set(run.target)) < len(run.target):
        yield "the plan gives it a slot twice"
    if run.before > run.started:
        yield f"{run.started} workers were started, {run.before} of them of another task of this name"
    for name, worker in run.workers.items():
        node = worker.slot.node
        if name != worker.worker:
            yield f"{worker.worker} is called {name}"
        if not state.is_there(node):
            yield f"{name} lives on {node}, which is not there"
    lying = parked.states if parked else []  # none where it is to be read from storage
    if parked and lying and len({ref.place for ref in lying}) != parked.layout.replica_workers:
        yield "not all parts of its state are left of those that are to be taken"
    yield from _membership_problems(run, run.membership)


def _membership_problems(run: TaskRun, membership: TaskMembership) -> Iterator[str]:
    epoch, group = membership.epoch, set(membership.group)
    if not group:
        return
    what = f"membership {epoch}"
    if len(group) < len(membership.group):
        yield f"{what} has a member twice"
    if membership.layout.workers > len(membership.group):
        yield f"{what} has {len(membership.group)} members in a layout of {membership.layout.workers}"
    if len(membership.since) != len(membership.replicas()) or max(membership.since, default=-1) > epoch:
        yield f"{what} has replicas since {membership.since}"
    for field in ("joined", "left"):
        if strangers := getattr(membership, field).keys() - group:
            yield f"{', '.join(strangers)} {field} {what} without being in it"
    there = run.workers.keys() | membership.through.keys() | membership.left.keys()
    if not (membership.broken or run.state.ended) and not group <= there:
        yield f"{', '.join(group - there)} of {what} are no workers, and nobody has noticed"
