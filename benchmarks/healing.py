"""What a task's workers noted, as figures of how it healed. Pure; `benchmarks.parallel` measures.

For a strike there are

- `first_s`: from the strike to the end of the struck iteration on the replicas that were left whole. A rank that is
  struck in its update has given all that the others need, so it is the next iteration that counts there.
- `beyond_s`: that without the work that was left. The work left is what the busiest of these replicas still had to
  compute of that iteration, the lost replica's part included: the microbatches that it ended after the strike, the one
  under way at the strike by the share that was left of it, times the undisturbed seconds of one; then the undisturbed
  seconds from the last microbatch to the end of the update. A new worker may join in the same iteration; what that
  takes is in there, and what it then computes is not.
- `waiting_s`: the same with the seconds that these microbatches did take in place of the undisturbed ones: what was
  spent otherwise than in computing. It differs from `beyond_s` where a new worker that starts takes the others' cores.
- `loss_s`, `join_s`: what the replicas that were left waited for a new membership to be formed, from where each noticed
  to the group ready, the slowest of them: the first after the strike, and the sum of further ones, in which new workers
  come in. Both are part of `beyond_s` where they fall into the struck iteration.
- `whole_s`: from the strike until all ranks of a membership with all replicas have formed their groups.

Of a whole task, `redone` counts iterations, and `wasted` the microbatches that were computed and are in no update.

Undisturbed is what was measured in the same task, in iterations of one whole membership that nothing struck.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.struck import Note, Struck
from unicron.contracts.events import Regrouped


@dataclass(frozen=True)
class Usual:
    """Seconds of a microbatch, and from the last one to the end of the update, where nothing disturbs."""

    microbatch_s: float
    tail_s: float


def usual(notes: Sequence[Note], struck: Sequence[Struck], world: int) -> Usual:
    """Return what is usual in a task of `world` ranks."""
    disturbed = {strike.iteration for strike in struck} | {0}
    by_iteration: dict[int, list[Note]] = defaultdict(list)
    for note in notes:
        by_iteration[note.iteration].append(note)
    microbatches, tails = list[float](), list[float]()
    for iteration, found in by_iteration.items():
        if iteration in disturbed or len({note.epoch for note in found}) > 1 or found[0].world < world:
            continue
        for pid in {note.pid for note in found}:
            computed = [note for note in found if note.pid == pid and note.what == "computed"]
            updated = [note for note in found if note.pid == pid and note.what == "updated"]
            if computed and updated:
                microbatches.append((computed[-1].at - computed[0].began) / len(computed))
                tails.append(updated[-1].at - computed[-1].at)
    if not microbatches:
        raise SystemExit("no iteration was undisturbed; the strikes are too close together")
    return Usual(statistics.median(microbatches), statistics.median(tails))


def healed(notes: Sequence[Note], strike: Struck, usually: Usual) -> dict[str, Any]:
    """Return the figures of one strike, without `whole_s`; None in place of those of an iteration that never ended."""
    iteration = strike.iteration + (strike.phase == "update")
    left = {note.pid for note in notes if note.epoch == strike.epoch and note.replica != strike.replica}
    inside = [note for note in notes if note.iteration == iteration and note.pid in left]
    ends = [note.at for note in inside if note.what == "updated"]
    work: dict[int, float] = defaultdict(float)
    computing: dict[int, float] = defaultdict(float)
    for note in inside:
        if note.what == "computed" and note.at > strike.at:
            under_way = (strike.at - note.began) / usually.microbatch_s
            work[note.pid] += 1.0 - min(max(under_way, 0.0), 1.0)
            computing[note.pid] += note.at - max(note.began, strike.at)
    busiest = max(work.values(), default=0.0)
    found: dict[str, Any] = {"phase": strike.phase, "iteration": iteration, "microbatches_left": round(busiest, 2)}
    if not left or len(ends) < len(left):
        return {**found, "first_s": None, "beyond_s": None, "waiting_s": None}
    first = max(ends) - strike.at - usually.tail_s
    return {
        **found,
        "first_s": max(ends) - strike.at,
        "beyond_s": first - busiest * usually.microbatch_s,
        "waiting_s": first - max(computing.values(), default=0.0),
    }


def whole_s(regrouped: Sequence[Regrouped], at: float, world: int) -> float | None:
    """Return the seconds from `at` until a whole membership had formed; None if none did."""
    ends: dict[int, list[float]] = defaultdict(list)
    for fact in regrouped:
        if fact.at > at and fact.world_size == world:
            ends[fact.epoch].append(fact.at)
    return next((max(found) - at for _, found in sorted(ends.items()) if len(found) == world), None)


def regroups(regrouped: Sequence[Regrouped], strike: Struck, world: int, size: int) -> dict[str, Any]:
    """Return the seconds of the memberships from the strike on, up to the whole one; None where there is none.

    Args:
        regrouped: of the task.
        strike: that broke one membership.
        world: ranks of a whole membership.
        size: ranks of a replica; the others of the struck one are idle from its loss on, and do not count.
    """
    seconds: dict[int, float] = {}
    before = [fact for fact in regrouped if fact.epoch == strike.epoch]
    left = {fact.worker for fact in before if fact.rank // size != strike.replica}
    for fact in regrouped:
        if fact.epoch > strike.epoch and fact.worker in left:
            seconds[fact.epoch] = max(fact.seconds, seconds.get(fact.epoch, 0.0))
    sizes = {fact.epoch: fact.world_size for fact in regrouped}
    whole = min((epoch for epoch in seconds if sizes[epoch] == world), default=0)
    found = [seconds[epoch] for epoch in sorted(seconds) if epoch <= whole]
    return {"loss_s": found[0] if found else None, "join_s": sum(found[1:]) if found else None}


def redone(notes: Sequence[Note]) -> int:
    """Return in how many iterations somebody began a microbatch after somebody had ended that iteration."""
    ended: dict[int, float] = {}
    for note in notes:
        if note.what == "updated":
            ended[note.iteration] = min(note.at, ended.get(note.iteration, note.at))
    late = [note for note in notes if note.what == "computed" and note.began > ended.get(note.iteration, note.at)]
    return len({note.iteration for note in late})


def wasted(notes: Sequence[Note], size: int, microbatches: int, dropped: int = 0) -> int:
    """Return how many microbatches were computed that are in no update.

    Args:
        notes: of all processes.
        size: ranks of a replica; they compute a microbatch together.
        microbatches: of a global batch.
        dropped: that the updates were made without.
    """
    ended = {note.iteration for note in notes if note.what == "updated" and note.iteration >= 0}
    computed = [note for note in notes if note.what == "idle" or (note.what == "computed" and note.iteration in ended)]
    return max(0, round(len(computed) / size) - (microbatches * len(ended) - dropped))
