"""What a peer's processes noted, as figures of how it recovered. Pure; `benchmarks.peers.runs` measures.

The names are those of `benchmarks.healing`, and mean the same where a peer does the same:

- `first_s`: from the strike to the end of the struck iteration on all ranks of the replicas that were left whole, or,
  where the peer starts all of them anew, on all ranks. After a strike in the update it is the next iteration.
- `beyond_s`: that without the work left: what the busiest rank of these replicas had yet to compute of its own share at
  the strike, and the undisturbed seconds from the last microbatch to the end of the update. Nobody computes the lost
  replica's share in its place, so that is not in there; what is computed again is not work that was left.
- `whole_s`: from the strike until all ranks of a membership with all replicas have formed their groups.
- `dropped`: microbatches of global batches that are in no update, until all replicas count again.

A strike in the reduce is one in the backward pass of the last microbatch: peers reduce gradients as they come.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from benchmarks.healing import Usual
from benchmarks.struck import Note, Struck


def recovered(notes: Sequence[Note], strike: Struck, usually: Usual, share: int, world: int) -> dict[str, Any]:
    """Return the figures of one strike; None in place of what never came.

    Args:
        notes: of all processes, in the order of time.
        strike: that was made.
        usually: seconds of a microbatch and of the end of an iteration.
        share: microbatches of a replica in an iteration.
        world: ranks of a whole membership.
    """
    iteration = strike.iteration + (strike.phase == "update")
    survivors = {note.pid for note in notes if note.epoch == strike.epoch and note.replica != strike.replica}
    ends: dict[int, float] = {}
    for note in notes:
        if note.what == "updated" and note.iteration == iteration and note.at > strike.at:
            ends.setdefault(note.pid, note.at)
    first = None
    if survivors and survivors <= ends.keys():
        first = max(ends[pid] for pid in survivors) - strike.at
    elif len(ends) == world:
        first = max(ends.values()) - strike.at
    left = max((_left(notes, pid, strike, usually, share) for pid in survivors), default=0.0)
    return {
        "phase": strike.phase,
        "iteration": iteration,
        "microbatches_left": round(left, 2),
        "first_s": first,
        "beyond_s": None if first is None else first - left * usually.microbatch_s - usually.tail_s,
        "whole_s": _whole_s(notes, strike, world),
    }


def _left(notes: Sequence[Note], pid: int, strike: Struck, usually: Usual, share: int) -> float:
    """Return the microbatches that a process had yet to compute at the strike."""
    if strike.phase == "update":
        return float(share)
    before = [note for note in notes if note.pid == pid and note.at <= strike.at]
    computed = [note for note in before if note.what == "computed" and note.iteration == strike.iteration]
    if len(computed) >= share:
        return 0.0
    under_way = (strike.at - before[-1].at) / usually.microbatch_s if before else 0.0
    return share - len(computed) - min(max(under_way, 0.0), 1.0)


def _whole_s(notes: Sequence[Note], strike: Struck, world: int) -> float | None:
    formed: dict[int, list[float]] = defaultdict(list)
    for note in notes:
        if note.what == "formed" and note.epoch > strike.epoch and note.world == world:
            formed[note.epoch].append(note.at)
    return next((max(ends) - strike.at for _, ends in sorted(formed.items()) if len(ends) == world), None)


def dropped(notes: Sequence[Note], world: int, microbatches: int) -> int:
    """Return how many microbatches are missing from the updates, of `microbatches` in each."""
    ranks: dict[int, int] = {}
    for note in notes:
        if note.what == "updated" and note.iteration >= 0:
            ranks[note.iteration] = min(note.world, ranks.get(note.iteration, world))
    return round(sum((world - found) / world * microbatches for found in ranks.values()))
