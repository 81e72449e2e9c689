"""Deals microbatches to replicas, before and after a fault (paper section 6.2, equation 7). Pure functions.

Every rank sends the others its standing; each then works out the same answer, so no coordinator takes part. What
computes a microbatch is a replica: its ranks all work at the same ones.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from msgspec import Struct

from unicron.contracts.states import ParkedSnapshot, StateRef
from unicron.contracts.tasks import ParallelLayout
from unicron.errors import InvalidInputError, StateTransferError
from unicron.train.worker.phases import Due


class Standing(Struct, frozen=True, kw_only=True):
    """The standing of one rank at the start of a new membership.

    Attributes:
        node: on which it runs.
        iteration: the iteration it is computing; its parameters are those from before that iteration's update.
        has_state: False for a worker that has just been started.
        done: microbatches of that iteration whose gradients it has accumulated.
        todo: microbatches of that iteration it still had to compute; what nobody has or had, a lost rank had.
        buckets: for each bucket of the gradient, whether the rank holds its reduced value.
        place: part of the model that it has built.
        formed: epoch in which the groups inside of its replica were formed; -1 where they are not, or broke.
        shapes: digest of its part of the gradient.
        shelf: states that others left behind, where this rank was given them.
        due: what is to be done before the update of this iteration.
        doubted: it had a state and gave it up.
    """

    node: str
    iteration: int
    has_state: bool
    done: frozenset[int]
    todo: tuple[int, ...]
    buckets: tuple[bool, ...]
    place: int = 0
    formed: int = -1
    shapes: str = ""
    shelf: ParkedSnapshot | None = None
    due: frozenset[Due] = frozenset()
    doubted: bool = False


@dataclass(frozen=True)
class Resumption:
    """How a membership goes on.

    Attributes:
        established: somebody has a state, or has left one behind; else the task begins.
        iteration: the iteration that all go on with.
        todo: for each replica, the microbatches it is to compute.
        kept: microbatches that are not computed again.
        recomputed: microbatches taken over from ranks that are gone.
        sources: for each rank, the ranks from which it can take its state, best first; empty where it has its own.
        bucket_from: for each place, for each bucket, the rank of that place that gives its reduced value to the
            others, or None where it is to be reduced.
        shelf: what ranks take their states from that have no sources, though they need one.
        lacking: those ranks.
        stale: for each rank, whether it must drop the gradients it has accumulated: others have done its microbatches.
    """

    established: bool
    iteration: int
    todo: tuple[tuple[int, ...], ...]
    kept: int
    recomputed: int
    sources: tuple[tuple[int, ...], ...]
    bucket_from: tuple[tuple[int | None, ...], ...]
    stale: tuple[bool, ...]
    shelf: ParkedSnapshot | None = None
    lacking: tuple[int, ...] = ()


def resume(standings: Sequence[Standing], microbatches: int, layout: ParallelLayout) -> Resumption:
    """Work out how the ranks that are left, and those that are new, finish the iteration.

    The newest iteration whose state is there for every place is what all go on with. A rank behind it, or without a
    state, takes the state of a rank of its place: on its own node first, else spread over the holders so that they
    share the load. A place whose state nobody has is taken from the shelf; if that is older than what the others have,
    all go back to it. Microbatches that whole replicas have done are kept, all others go round-robin over the replicas.
    A rank that was left out of a membership in between may have done what others did anew meanwhile; its sum can't be
    taken apart, so it counts for nothing. Neither does a replica whose ranks have not all done the same.

    Args:
        standings: one entry a rank; ranks beyond those of the layout compute nothing, they only give or take a state.
        microbatches: microbatches of a global batch.
        layout: of the membership, as large as it is.

    Raises:
        StateTransferError: there are states, but not of all places from before the same update.
        InvalidInputError: ranks of one place have different parts of a model.
    """
    _check_shapes(standings)
    shelf = next((standing.shelf for standing in standings if standing.shelf), None)
    established = shelf is not None or any(standing.has_state for standing in standings)
    front, holders = _holders(standings, layout, shelf) if established else (0, list(range(layout.replica_workers)))
    sources = _sources(standings, layout, holders)
    holding = set(holders)
    kept = _kept_replicas(standings, layout, holding) if established else []
    bucket_from = _bucket_from(standings, layout, kept)
    finished = [source for of_place in bucket_from for source in of_place]
    done = frozenset[int]().union(*(standings[ranks[0]].done for ranks in kept))
    claimed = done.union(*(standings[rank].todo for ranks in kept for rank in ranks))
    if finished and None not in finished:
        done = claimed = frozenset(range(microbatches))
    remaining = [microbatch for microbatch in range(microbatches) if microbatch not in done]
    keeping = {rank for ranks in kept for rank in ranks}
    return Resumption(
        established=established,
        iteration=front,
        todo=tuple(tuple(remaining[replica :: layout.replicas]) for replica in range(layout.replicas)),
        kept=len(done),
        recomputed=microbatches - len(claimed) if established else 0,
        sources=sources,
        bucket_from=bucket_from,
        stale=tuple(
            rank in holding and rank not in keeping and bool(standing.done) for rank, standing in enumerate(standings)
        ),
        shelf=shelf,
        lacking=tuple(rank for rank, found in enumerate(sources) if not found and rank not in holding),
    )


def _check_shapes(standings: Sequence[Standing]) -> None:
    first: dict[int, int] = {}
    for rank, standing in enumerate(standings):
        other = first.setdefault(standing.place, rank)
        if standings[other].shapes != standing.shapes:
            raise InvalidInputError(
                f"ranks {other} and {rank} hold the same place of the model, but parameters of other shapes: build the "
                "model from session.mesh and the task's settings alone, not from ranks, hosts or what is random"
            )


def _holders(
    standings: Sequence[Standing], layout: ParallelLayout, shelf: ParkedSnapshot | None
) -> tuple[int, list[int]]:
    """Return the iteration that all go on with, and the ranks that have the state of it."""
    held: list[set[int]] = [set() for _ in range(layout.replica_workers)]
    for standing in standings:
        if standing.has_state:
            held[standing.place].add(standing.iteration)
    common = set.intersection(*held) | ({shelf.iteration} if shelf else set())
    if not common and all(each <= {0} for each in held) and not any(standing.doubted for standing in standings):
        # no update was made yet: in the other places all begin with the model as they have built it
        return 0, [
            rank for rank, each in enumerate(standings) if each.has_state or (rank == each.place and not held[rank])
        ]
    if not common:
        there = ", ".join(f"place {place} of {sorted(each) or 'none'}" for place, each in enumerate(held))
        raise StateTransferError(f"no iteration has the states of all places; there are, by iteration: {there}")
    front = max(common)
    return front, [rank for rank, each in enumerate(standings) if each.has_state and each.iteration == front]


def _kept_replicas(standings: Sequence[Standing], layout: ParallelLayout, holding: set[int]) -> list[range]:
    """Return the ranks of each replica whose gradients count: no microbatch is in two of them."""
    size = layout.replica_workers
    replicas = [range(replica * size, (replica + 1) * size) for replica in range(layout.replicas)]
    whole = [
        ranks for ranks in replicas if holding.issuperset(ranks) and len({standings[rank].done for rank in ranks}) == 1
    ]
    kept, done = list[range](), set[int]()
    for ranks in sorted(whole, key=lambda ranks: -len(standings[ranks[0]].done)):
        if done.isdisjoint(standings[ranks[0]].done):
            kept.append(ranks)
            done |= standings[ranks[0]].done
    return sorted(kept, key=lambda ranks: ranks[0])


def _bucket_from(
    standings: Sequence[Standing], layout: ParallelLayout, kept: Sequence[range]
) -> tuple[tuple[int | None, ...], ...]:
    return tuple(
        tuple(
            next((ranks[place] for ranks in kept if standings[ranks[place]].buckets[bucket]), None)
            for bucket in range(len(standings[place].buckets))
        )
        for place in range(layout.replica_workers)
    )


def _sources(
    standings: Sequence[Standing], layout: ParallelLayout, holders: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    of_place: list[list[int]] = [[] for _ in range(layout.replica_workers)]
    for holder in holders:
        of_place[standings[holder].place].append(holder)
    found: list[tuple[int, ...]] = []
    holding = set(holders)
    for rank, standing in enumerate(standings):
        replica, near = layout.seat(rank).replica, of_place[standing.place]
        turned = [] if rank in holding else [near[(replica + step) % len(near)] for step in range(len(near))]
        found.append(tuple(sorted(turned, key=lambda holder: standings[holder].node != standing.node)))
    return tuple(found)


def parked_sources(shelf: ParkedSnapshot, layout: ParallelLayout, place: int, node: str) -> list[list[StateRef]]:
    """Return the parts on a shelf in the order in which a rank should ask for them, each with its copies.

    First those that hold nearly the same part of layers, rows and columns: where layouts cut a model evenly, no others
    are needed. Of copies those on its own node come first.

    Args:
        shelf: what there is.
        layout: of the rank.
        place: of the rank.
        node: of the rank.
    """
    copies: dict[int, list[StateRef]] = {}
    for ref in sorted(shelf.states, key=lambda ref: ref.location.node != node):
        copies.setdefault(ref.place, []).append(ref)
    return [copies[other] for other in nearest_places(layout, place, shelf.layout, copies)]


def nearest_places(layout: ParallelLayout, place: int, other: ParallelLayout, places: Iterable[int]) -> list[int]:
    """Return these places of another layout, first those that hold nearly the same part of the model as `place`."""
    mine = _spans_of(layout, place)

    def apart(there: int) -> tuple[int, Fraction]:
        spans = zip(mine, _spans_of(other, there), strict=True)
        gaps = [max(a, c) - min(b, d) for (a, b), (c, d) in spans]
        return sum(gap >= 0 for gap in gaps), sum((max(gap, Fraction(0)) for gap in gaps), Fraction(0))

    return sorted(places, key=lambda there: (apart(there), there))


def _spans_of(layout: ParallelLayout, place: int) -> list[tuple[Fraction, Fraction]]:
    """Return which part of its stages, shards and tensor ranks a place is, each from 0 to 1."""
    rest, tensor = divmod(place, layout.tensor)
    stage, shard = divmod(rest, layout.shard)
    degrees = (stage, layout.pipeline), (shard, layout.shard), (tensor, layout.tensor)
    return [(Fraction(index, degree), Fraction(index + 1, degree)) for index, degree in degrees]
