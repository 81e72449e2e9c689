"""Which workers form the next membership, and in which seats: whole replicas only. Pure functions.

A worker has built one place of the model. Replicas that are whole stay as they are; what is left of broken ones is put
together where places fit, and where too many have the same place, some are to be started again with another.
"""

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable

from unicron.contracts.tasks import SlotRef
from unicron_transition.membership import WorkerRun, WorkerStage
from unicron_transition.state import TaskRun


def choose(run: TaskRun, ready: list[str], *, final: bool) -> tuple[list[str], int]:
    """Return the best membership that a task can form, in rank order, and how many of it compute; empty where none can.

    Where none of `ready` holds some place, a worker in a slot that is no longer the task's comes along to hand it over,
    and leaves when that is done; who takes a state from it and is in no whole replica yet computes nothing. With
    nothing more to come, that is done even with too few workers to go on with: the state is in the task's own slots
    then, and the other slot can be given up.

    Args:
        run: the task.
        ready: workers in its slots that could compute, in the order of the slots.
        final: nothing better than these is there or on its way.
    """
    ranks = {name: rank for rank, name in enumerate(run.membership.group)}
    ready = sorted(ready, key=lambda name: ranks.get(name, len(ranks)))  # stable: members keep their order
    replica, size = run.present.replica_workers, _allowed(run, len(ready))
    givers = _givers(run, ready)
    if givers and (size or (ready and final)):
        group = _seated(run, givers + ready, max(1, (size or len(ready)) // replica) + 1)
        takers = [name for name in ready if name not in group and run.states.place(name) is None] if group else []
        return [*group, *(takers if replica > 1 else [])], len(group)
    group = _seated(run, ready, len(ready))
    group = group[: _allowed(run, len(group))]
    return group, len(group)


def leavers(run: TaskRun) -> list[str]:
    """Return who of those with the state forms the last membership of their layout, in rank order; empty if none can.

    They may be in slots that are no longer the task's, and fewer or more than it is allowed to have.
    """
    names = [name for name in run.ready() if run.states.place(name) is not None]
    return _seated(run, names, len(names))


def lost_places(run: TaskRun) -> set[int]:
    """Return the places whose state nobody holds any more, though that of other places is still there."""
    held = run.states.places(run.ready())
    return set(range(run.present.replica_workers)) - held if held and run.shelf is None else set()


def lacks_state(run: TaskRun) -> bool:
    """Return whether nobody living has some part of a state that the task may have, and it is not known where one lies.

    Members that are on their way into a membership may have one that nobody knows of yet.
    """
    membership = run.membership
    if run.shelf is not None or membership.through or membership.intact(run.workers):
        return False
    if run.restarts:  # who is left of those that saved theirs has it yet, or ends by itself
        return run.saves.whole and not any(name in run.workers for name in membership.met)
    if not (membership.met or run.saves.held or run.spec.resume):
        return False  # it has not begun
    return len(run.states.places(run.ready())) < run.present.replica_workers


def is_over(run: TaskRun) -> bool:
    """Return whether the last iteration is done, and nobody is left who could be busy with it."""
    return run.membership.over(run.workers, lost=bool(lost_places(run)))


def _allowed(run: TaskRun, count: int) -> int:
    """Return the largest size of the task that `count` workers make, 0 where they are too few."""
    sizes = run.spec.sizes_like(run.present)
    index = bisect_right(sizes, count)
    return sizes[index - 1] if index else 0


def _givers(run: TaskRun, ready: list[str]) -> list[str]:
    """Return a worker elsewhere for each place that nobody of `ready` holds."""
    missing = run.states.places(run.ready()) - run.states.places(ready)
    return [run.states.holders(place, run.ready())[0] for place in sorted(missing)]


def _seated(run: TaskRun, names: list[str], most: int) -> list[str]:
    """Return up to `most` whole replicas made of `names`, one after the other."""
    there, places = set(names), run.present.replica_workers
    whole = [list(replica) for replica in _standing(run) if there.issuperset(replica)][:most]
    there.difference_update(*whole)
    waiting: list[deque[str]] = [deque() for _ in range(places)]
    for name in sorted(names, key=lambda name: run.states.place(name) is None):  # who has a state first
        if name in there and run.workers[name].place < places:
            waiting[run.workers[name].place].append(name)
    while len(whole) < most and all(waiting):
        whole.append([each.popleft() for each in waiting])
    return [name for replica in whole for name in replica]


def _standing(run: TaskRun) -> list[tuple[str, ...]]:
    """Return the replicas of the present membership all of whose members hold their place's state."""
    replicas = run.membership.replicas()
    return [replica for replica in replicas if all(run.states.place(name) is not None for name in replica)]


def awaited(run: TaskRun) -> str:
    """Return which workers of broken replicas wait for which places, in words; empty where none do."""
    idle = [name for name in run.ready() if name not in run.membership.group]
    coming = sorted({worker.place for worker in run.workers.values() if worker.stage is WorkerStage.STARTING})
    if run.present.replica_workers == 1 or not idle or not coming:
        return ""
    return f"; the replica of {', '.join(idle)} waits for place {', '.join(map(str, coming))}"


def next_place(run: TaskRun, workers: Iterable[WorkerRun], slot: SlotRef, replicas: int) -> int:
    """Return the place that a worker started beside `workers` is to have, where `replicas` can be made of them all.

    That which the plan means for its slot, as ranks that talk much are meant to be on one node; where there are
    enough of that, the first that fewest of them have.
    """
    places = run.shape.replica_workers
    counts = Counter(worker.place for worker in workers)
    meant = run.target.index(slot) % places
    return meant if counts[meant] < replicas else min(range(places), key=lambda place: counts[place])


def slots_by_place(run: TaskRun) -> list[SlotRef]:
    """Return where the worker of each place of the only replica is, or is to be, as far as there are slots."""
    there = {worker.place: worker.slot for worker in run.workers.values()}
    free = [slot for slot in run.target if slot not in there.values()]
    meant = (there.get(place) or (free.pop(0) if free else None) for place in range(run.shape.replica_workers))
    return [slot for slot in meant if slot is not None]


def surplus(run: TaskRun, workers: list[WorkerRun]) -> list[WorkerRun]:
    """Return those of `workers` that no replica needs while it lacks others: their slots are for other places.

    Args:
        run: the task.
        workers: in all its slots, none of which is free.
    """
    places = run.shape.replica_workers
    wanted = len(workers) // places
    counts = Counter(worker.place for worker in workers)
    lacking = sum(max(0, wanted - counts[place]) for place in range(places))
    if not lacking:
        return []
    settled = {name for replica in _standing(run) for name in replica if run.workers.keys() >= set(replica)}
    found: list[WorkerRun] = []
    for worker in reversed(workers):
        if len(found) < lacking and counts[worker.place] > wanted and worker.worker not in settled:
            counts[worker.place] -= 1
            found.append(worker)
    return found
