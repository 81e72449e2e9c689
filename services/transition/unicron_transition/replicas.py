"""Which workers form the next membership, and in which seats: whole replicas only. Pure functions.

A worker that holds the state of a place keeps that place; one without a state takes whatever place is free. Replicas
that are whole stay as they are; what is left of broken ones is put together where places fit.
"""

from bisect import bisect_right
from collections import deque

from unicron_transition.state import TaskRun


def choose(run: TaskRun, ready: list[str], *, final: bool) -> list[str]:
    """Return the best membership that a task can form, in rank order; empty where it can form none.

    Where none of `ready` holds some place, a worker in a slot that is no longer the task's comes along to hand it over,
    and leaves when that is done. With nothing more to come, that is done even with too few workers to go on with: the
    state is in the task's own slots then, and the other slot can be given up.

    Args:
        run: the task.
        ready: workers in its slots that could compute, in the order of the slots.
        final: nothing better than these is there or on its way.
    """
    ranks = {name: rank for rank, name in enumerate(run.membership.group)}
    ready = sorted(ready, key=lambda name: ranks.get(name, len(ranks)))  # stable: members keep their order
    replica, size = run.spec.layout.replica_workers, _allowed(run, len(ready))
    givers = _givers(run, ready)
    if givers and (size or (ready and final)):
        return _seated(run, givers + ready, (size or len(ready)) // replica + 1)
    group = _seated(run, ready, size // replica)
    return group[: _allowed(run, len(group))]


def lost_places(run: TaskRun) -> set[int]:
    """Return the places whose state nobody holds any more, though that of other places is still there."""
    held = run.states.places(run.ready())
    return set(range(run.spec.layout.replica_workers)) - held if held else set()


def _allowed(run: TaskRun, count: int) -> int:
    """Return the largest size of the task that `count` workers make, 0 where they are too few."""
    sizes = run.spec.sizes
    index = bisect_right(sizes, count)
    return sizes[index - 1] if index else 0


def _givers(run: TaskRun, ready: list[str]) -> list[str]:
    """Return a worker elsewhere for each place that nobody of `ready` holds."""
    missing = run.states.places(run.ready()) - run.states.places(ready)
    return [run.states.holders(place, run.ready())[0] for place in sorted(missing)]


def _seated(run: TaskRun, names: list[str], most: int) -> list[str]:
    """Return up to `most` whole replicas made of `names`, one after the other."""
    there, places = set(names), run.spec.layout.replica_workers
    whole = [replica for replica in _standing(run, places) if there.issuperset(replica)][:most]
    there.difference_update(*whole)
    holders: list[deque[str]] = [deque() for _ in range(places)]
    fresh = deque[str]()
    for name in names:
        if name in there:
            place = run.states.place(name)
            (fresh if place is None else holders[place]).append(name)
    while len(whole) < most and sum(not held for held in holders) <= len(fresh):
        whole.append([(held or fresh).popleft() for held in holders])
    return [name for replica in whole for name in replica]


def _standing(run: TaskRun, places: int) -> list[list[str]]:
    """Return the replicas of the present membership all of whose members hold their place's state."""
    group = run.membership.group
    replicas = [group[first : first + places] for first in range(0, len(group), places)]
    return [replica for replica in replicas if all(run.states.place(name) is not None for name in replica)]
