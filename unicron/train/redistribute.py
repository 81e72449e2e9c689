"""Who computes which microbatch, before and after a fault (paper section 6.2, equation 7). Pure functions.

Every rank tells the others what it has; each then works out the same answer, so no coordinator takes part.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """What one rank brings into a new membership.

    Attributes:
        iteration: the iteration it is computing; its parameters are those from before that iteration's update.
        has_state: False for a worker that has just been started.
        done: microbatches of that iteration whose gradients it has accumulated.
        todo: microbatches of that iteration it still had to compute; what nobody has or had, a lost rank had.
        buckets: for each bucket of the gradient, whether the rank holds its reduced value.
    """

    iteration: int
    has_state: bool
    done: frozenset[int]
    todo: tuple[int, ...]
    buckets: tuple[bool, ...]


@dataclass(frozen=True)
class Resumption:
    """How a membership goes on.

    Attributes:
        iteration: the iteration that all go on with.
        todo: for each rank, the microbatches it is to compute.
        kept: microbatches that are not computed again.
        recomputed: microbatches taken over from ranks that are gone.
        sources: for each rank, the ranks from which it can take its state, best first; empty where it has its own.
        bucket_from: for each bucket, the rank that gives its reduced value to all, or None where it is to be reduced.
        stale: for each rank, whether it must drop the gradients it has accumulated: others have done its microbatches.
    """

    iteration: int
    todo: tuple[tuple[int, ...], ...]
    kept: int
    recomputed: int
    sources: tuple[tuple[int, ...], ...]
    bucket_from: tuple[int | None, ...]
    stale: tuple[bool, ...]


def resume(progress: Sequence[Progress], microbatches: int, nodes: Sequence[Hashable]) -> Resumption:
    """Work out how the ranks that are left, and those that are new, finish the iteration.

    The rank that is furthest ahead sets the iteration. A rank behind it, or without a state, takes the state of one
    that is there: on its own node first, else spread over the holders so that they share the load. Microbatches that
    the holders have done are kept, all others go round-robin over everybody. A rank that was left out of a membership
    in between may have done what others did anew meanwhile; its sum can't be taken apart, so it counts for nothing.

    Args:
        progress: one entry a rank.
        microbatches: microbatches of a global batch.
        nodes: the node of each rank, or whatever tells nodes apart.
    """
    front = max((entry.iteration for entry in progress if entry.has_state), default=0)
    holders = [rank for rank, entry in enumerate(progress) if entry.has_state and entry.iteration == front] or [0]
    established = progress[holders[0]].has_state
    sources = tuple(() if rank in holders else _nearest(rank, holders, nodes) for rank in range(len(progress)))
    kept = _disjoint(progress, holders) if established else []
    stale = tuple(rank in holders and rank not in kept and bool(entry.done) for rank, entry in enumerate(progress))
    count = len(progress[0].buckets)
    bucket_from = tuple(
        next((rank for rank in kept if progress[rank].buckets[bucket]), None) for bucket in range(count)
    )
    if count and None not in bucket_from:
        everything = tuple(() for _ in progress)
        return Resumption(front, everything, microbatches, 0, sources, bucket_from, stale)
    done = frozenset[int]().union(*(progress[rank].done for rank in kept))
    claimed = done.union(*(progress[rank].todo for rank in kept))
    remaining = [microbatch for microbatch in range(microbatches) if microbatch not in done]
    return Resumption(
        iteration=front,
        todo=tuple(tuple(remaining[rank :: len(progress)]) for rank in range(len(progress))),
        kept=len(done),
        recomputed=microbatches - len(claimed) if established else 0,
        sources=sources,
        bucket_from=bucket_from,
        stale=stale,
    )


def _disjoint(progress: Sequence[Progress], holders: Sequence[int]) -> list[int]:
    """Return the holders whose accumulated gradients can be added up: no microbatch is in two of them."""
    kept, done = list[int](), set[int]()
    for rank in sorted(holders, key=lambda rank: -len(progress[rank].done)):
        if done.isdisjoint(progress[rank].done):
            kept.append(rank)
            done |= progress[rank].done
    return sorted(kept)


def _nearest(rank: int, holders: Sequence[int], nodes: Sequence[Hashable]) -> tuple[int, ...]:
    turned = [holders[(rank + step) % len(holders)] for step in range(len(holders))]
    return tuple(sorted(turned, key=lambda holder: nodes[holder] != nodes[rank]))
