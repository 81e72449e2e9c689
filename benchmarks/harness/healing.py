"""How tasks and peers healed, from what their ranks noted. Pure; `benchmarks.parallel` measures.

For a strike there are

- `first_s`: to the end of the struck iteration on the replicas that were left whole, or, where a peer starts all anew,
  on all ranks; of the next iteration after a strike in the update, which has given all that the others need.
- `beyond_s`: that without the work left, of the busiest of these ranks: the microbatches that it ended after the
  strike, the lost replica's that it took over included, the one under way by the share that was left of it, and the end
  of the iteration, all by what they take undisturbed. Of a peer it is the rank's own share: nobody takes the lost one's
  over.
- `waiting_s`: the same by what these microbatches did take: what was spent otherwise than in computing.
- `loss_s`, `join_s`: waits for new memberships, from where each rank noticed until its group was ready, the slowest of
  them: the first after the strike, and the sum of further ones, in which new workers come in.
- `whole_s`: until all ranks of a membership with all replicas have formed their groups.

Of a whole run: `redone` counts iterations, `wasted` microbatches that are in no update, `dropped` those of global
batches that are missing from updates. Undisturbed is the median of iterations of one whole membership without a strike.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import stats
from benchmarks.harness.command import Figures
from benchmarks.harness.strikes import Note, Struck
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
            own = [note for note in found if note.pid == pid]
            computed, updated = ([note for note in own if note.what == what] for what in ("computed", "updated"))
            if computed and updated:
                microbatches.append((computed[-1].at - computed[0].began) / len(computed))
                tails.append(updated[-1].at - computed[-1].at)
    if not microbatches:
        raise SystemExit("no iteration was undisturbed; the strikes are too close together")
    return Usual(statistics.median(microbatches), statistics.median(tails))


def healed(notes: Sequence[Note], strike: Struck, usually: Usual) -> Figures:
    """Return the figures of one strike, without `whole_s`; None in place of those of an iteration that never ended."""
    iteration = strike.iteration + (strike.phase == "update")
    left = {note.pid for note in notes if note.epoch == strike.epoch and note.replica != strike.replica}
    inside = [note for note in notes if note.iteration == iteration and note.pid in left]
    ends = [note.at for note in inside if note.what == "updated"]
    work: dict[int, float] = defaultdict(float)
    computing: dict[int, float] = defaultdict(float)
    for note in inside:
        if note.what == "computed" and note.at > strike.at:
            work[note.pid] += 1.0 - _share(strike.at - note.began, usually)
            computing[note.pid] += note.at - max(note.began, strike.at)
    busiest = max(work.values(), default=0.0)
    found: Figures = {"phase": strike.phase, "iteration": iteration, "microbatches_left": round(busiest, 2)}
    if not left or len(ends) < len(left):
        return found | dict.fromkeys(("first_s", "beyond_s", "waiting_s"))
    first = max(ends) - strike.at
    beyond, waiting = busiest * usually.microbatch_s, max(computing.values(), default=0.0)
    rest = {name: first - usually.tail_s - part for name, part in (("beyond_s", beyond), ("waiting_s", waiting))}
    return found | {"first_s": first, **rest}


def _share(seconds: float, usually: Usual) -> float:
    """Return how much of a microbatch is done after so many seconds."""
    return min(max(seconds / usually.microbatch_s, 0.0), 1.0)


def regroups(regrouped: Sequence[Regrouped], strike: Struck, world: int, size: int) -> Figures:
    """Return the seconds of the memberships from the strike on, up to the whole one of `world` ranks.

    Of the struck replica, which has `size` ranks, the others are idle from its loss on, and do not count.
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


def recovered(notes: Sequence[Note], strike: Struck, usually: Usual, share: int, world: int) -> Figures:
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
    under_way = _share(strike.at - before[-1].at, usually) if before else 0.0
    return share - len(computed) - under_way


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


def summary(layout: str, fault: str, runs: Sequence[dict[str, Any]], names: Sequence[str]) -> Figures:
    """Return the figures of all runs of a layout and a fault, with their whole names.

    Args:
        layout: that was struck.
        fault: that struck.
        runs: each with its `strikes`.
        names: of what is a median over strikes.
    """
    rows = [row for run in runs for row in run["strikes"]]
    counted = [name for name in ("redone", "wasted", "dropped") if runs and name in runs[0]]
    found: Figures = {name: stats.median(row[name] for row in rows) for name in names}
    more: Figures = {
        "beyond_worst_s": stats.worst(row["beyond_s"] for row in rows),
        "rel_diff": stats.worst((run["rel_diff"] for run in runs), 12),
        **{name: sum(run[name] for run in runs) for name in counted},
        "strikes": len(rows),
    }
    return {f"{layout}_{fault}_{name}": value for name, value in (found | more).items()}
