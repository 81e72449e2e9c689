"""Training time lost to failures, with checkpoints on remote storage and with copies in other nodes' memory.

16 nodes for eight weeks, failures of trace-a (Unicron section 7.5: 43, of which 10 take their node out), in virtual
time; each figure is the median over seeds.

Lost is all time that does not bring training forward for good: iterations that are computed again, the wait for a
checkpoint to be read, and what saving blocks. Detection and restart are the same for all and left out. A checkpoint can
be used once it is written as a whole, so on average a failure costs one writing, half an interval, and one reading.

Figures by their source:

- GEMINI (Wang et al., SOSP 2023, as Amazon sums it up): 30 to 40 minutes to write a large model to remote storage, 10
  to 20 to read it, a checkpoint about each three hours; in memory one each iteration, between what training sends, so
  at no cost, and more than 92 % less time lost than with the best of the others.
- Young 1974 and Daly 2006: the best interval, from the trace's time between failures and the seconds a save blocks.
- Assumed: one minute an iteration (a model of 100 billion parameters on 128 GPUs). Its copy takes until the end of the
  next iteration. Three seconds to read it from other nodes (90 GB at 400 Gbit/s). Saving blocks training for as long as
  it writes, or for one second where states are copied to the host's memory first ("background").

Nodes lost within two iterations of each other count as lost at once: their copies have not been made anew. `by_rack`
makes bursts of trace-a's failures: the nodes are lost four at once, of one rack.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from unicron_simulator.policies import traces
from unicron_simulator.policies.traces import FailureTrace, TracedFailure

from benchmarks.harness.command import Options, Result, main, option
from unicron.snapshots.interval import daly, young
from unicron.snapshots.placement import Placement, place, without_copy

HOUR, MINUTE = 3600.0, 60.0

WRITE_S = 35 * MINUTE
READ_S = 15 * MINUTE
STORAGE_INTERVAL_S = 3 * HOUR
OFTEN_S = 30 * MINUTE
SNAPSHOT_S = 1.0
ITERATION_S = 60.0
MEMORY_READ_S = 3.0
AT_ONCE_S = 2 * ITERATION_S

TRACE, SEEDS, RACK, COPIES = "trace-a", 20, 4, 2
OURS = "in memory, each iteration"
WRITES_S = (3 * MINUTE, 8 * MINUTE, 15 * MINUTE, WRITE_S)
ITERATIONS_S = (10.0, 30.0, ITERATION_S, 120.0)


class Saving(NamedTuple):
    """One way to save."""

    interval_s: float  # training between the begins of two saves; where writing takes longer than that, the next waits
    write_s: float  # until a save can be used
    blocked_s: float  # of it, for how long training stands
    read_s: float  # to read it after a failure

    @property
    def period_s(self) -> float:
        """Seconds from one begin to the next."""
        return max(self.interval_s + self.blocked_s, self.write_s)

    def progress(self, ran_s: float) -> float:
        """Return the seconds of training in so many seconds since training went on."""
        periods, rest = divmod(ran_s, self.period_s)
        trained_s = self.period_s - self.blocked_s
        # the save comes at the end of a period, the first one after a whole one
        return periods * trained_s + min(rest, trained_s)

    def kept(self, ran_s: float) -> float:
        """Return the seconds of training that the last save holds that can be used; 0 where none was finished."""
        trained_s = self.period_s - self.blocked_s
        return max(math.floor((ran_s - trained_s - self.write_s) / self.period_s) + 1, 0) * trained_s


class Scheme(NamedTuple):
    """The copies of a state: always on storage, and in the memory of other nodes where `memory` says how."""

    storage: Saving
    memory: Saving | None = None


Schemes = dict[str, Scheme]


class Lost(NamedTuple):
    """Seconds lost, and from where training went on."""

    redone_s: float
    read_s: float
    blocked_s: float
    from_memory: int
    from_storage: int

    @property
    def total_s(self) -> float:
        """Seconds in all."""
        return self.redone_s + self.read_s + self.blocked_s


def schemes(
    mtbf_s: float, write_s: float = WRITE_S, read_s: float = READ_S, iteration_s: float = ITERATION_S
) -> Schemes:
    """Return all ways to save that are compared, ours last; `mtbf_s` are the mean seconds between failures."""
    blocking = {
        "every 3 h": STORAGE_INTERVAL_S,
        "every 30 min": OFTEN_S,
        "Young": young(write_s, mtbf_s),
        "Daly": daly(write_s, mtbf_s),
    }
    # what blocks for a second only would be saved more often than it can be written: one save follows the other
    background = {"every 3 h, background": STORAGE_INTERVAL_S, "Daly, background": daly(SNAPSHOT_S, mtbf_s)}
    found = {name: Scheme(Saving(interval_s, write_s, write_s, read_s)) for name, interval_s in blocking.items()}
    for name, interval_s in background.items():
        found[name] = Scheme(Saving(interval_s, write_s, SNAPSHOT_S, read_s))
    memory = Saving(iteration_s, iteration_s, 0.0, MEMORY_READ_S)
    return found | {OURS: Scheme(found["every 3 h, background"].storage, memory)}


def lost(trace: FailureTrace, scheme: Scheme, racks: dict[str, str] | None = None) -> Lost:
    """Return what failures cost with a scheme; `racks` has those of nodes, where placing copies is to know them."""
    position = stored = resumed = redone = read = blocked = 0.0
    served = [0, 0]
    for at, survived in _survivals(trace, racks or {}):
        if at < resumed:  # struck while it was reading
            read, resumed = read - (resumed - at), at
        ran = at - resumed
        progress = scheme.storage.progress(ran)
        stored = max(stored, position + scheme.storage.kept(ran)) if scheme.storage.kept(ran) else stored
        from_memory = scheme.memory is not None and survived
        restored = position + scheme.memory.kept(progress) if scheme.memory and survived else stored
        read_s = scheme.memory.read_s if scheme.memory and survived else scheme.storage.read_s
        redone += position + progress - restored
        blocked += ran - progress
        position, resumed, read = restored, at + read_s, read + read_s
        served[from_memory] += 1
    ran = max(trace.duration_s - resumed, 0.0)
    read -= max(resumed - trace.duration_s, 0.0)
    return Lost(redone, read, blocked + ran - scheme.storage.progress(ran), served[True], served[False])


def _survivals(trace: FailureTrace, racks: dict[str, str]) -> Iterator[tuple[float, bool]]:
    """Yield when failures struck, and whether all states still had a copy in memory; what is lost at once is one."""
    back = dict.fromkeys(trace.nodes, 0.0)
    placed: Placement | None = None
    for together in _moments(trace.faults):
        at = together[0].at
        placed = place([node for node in trace.nodes if back[node] <= at], COPIES, racks, placed)
        gone = {fault.node for fault in together if fault.kind == "sev1"}
        yield at, not without_copy(placed.keepers(), gone)
        for fault in together:
            back[fault.node] = max(back[fault.node], fault.at + fault.repair_s)
        left = [node for node in trace.nodes if back[node] <= together[-1].at]
        placed = place(left, COPIES, racks, placed)


def _moments(faults: Sequence[TracedFailure]) -> Iterator[list[TracedFailure]]:
    together: list[TracedFailure] = []
    for fault in faults:
        if together and fault.at - together[0].at > AT_ONCE_S:
            yield together
            together = []
        together.append(fault)
    if together:
        yield together


# --- what is reported ------------------------------------------------------------------------------------------------


def compared(
    drawn: Sequence[FailureTrace], racks: dict[str, str] | None = None, **changed: float
) -> dict[str, list[Lost]]:
    """Return what each scheme lost with each trace; `changed` goes to `schemes`."""
    mtbf_s = sum(trace.duration_s for trace in drawn) / sum(len(trace.faults) for trace in drawn)
    known = schemes(mtbf_s, **changed)
    return {name: [lost(trace, scheme, racks) for trace in drawn] for name, scheme in known.items()}


def row(found: Sequence[Lost]) -> dict[str, float]:
    """Return the medians of a scheme over seeds in hours, and from where training went on in all of them together."""
    parts = {"lost_h": "total_s", "redone_h": "redone_s", "read_h": "read_s", "blocked_h": "blocked_s"}
    hours = {name: statistics.median(getattr(each, part) for each in found) / HOUR for name, part in parts.items()}
    served = ("from_memory", "from_storage")
    return hours | {name: sum(getattr(each, name) for each in found) for name in served}


def reduction(found: dict[str, list[Lost]]) -> float:
    """Return by what part ours loses less than the best of the others, in medians."""
    lost_h = {name: row(each)["lost_h"] for name, each in found.items()}
    return 1 - lost_h.pop(OURS) / min(lost_h.values())


def report(seeds: int = SEEDS) -> tuple[dict[str, float], dict[str, dict[str, dict[str, float]]], dict[str, float]]:
    """Return the figures, what each way loses by case, and what the intervals follow from."""
    drawn = [traces.generate(TRACE, seed) for seed in range(1, seeds + 1)]
    bursts = [traces.by_rack(trace, RACK) for trace in drawn]
    racks = {node: f"rack-{number // RACK}" for number, node in enumerate(drawn[0].nodes)}
    cases = {TRACE: compared(drawn), "bursts": compared(bursts), "bursts, racks told": compared(bursts, racks)}
    rows = {case: {name: row(each) for name, each in found.items()} for case, found in cases.items()}
    ours, best = rows[TRACE][OURS]["lost_h"], min(each["lost_h"] for name, each in rows[TRACE].items() if name != OURS)
    mtbf_s = drawn[0].duration_s / len(drawn[0].faults)
    figures = {"lost_in_memory_h": ours, "lost_best_other_h": best}
    for case, found in cases.items():
        figures[f"reduction_{case.replace(', ', '_').replace(' ', '_')}"] = reduction(found)
    for write_s in WRITES_S:
        slower = compared(drawn, write_s=write_s, read_s=write_s * READ_S / WRITE_S)
        figures[f"reduction_write_{write_s / MINUTE:g}_min"] = reduction(slower)
    for iteration_s in ITERATIONS_S:
        figures[f"reduction_iteration_{iteration_s:g}_s"] = reduction(compared(drawn, iteration_s=iteration_s))
    figures["worth_slower_share"] = (best - ours) * HOUR / drawn[0].duration_s
    known = {"mtbf": mtbf_s, "young": young(WRITE_S, mtbf_s), "daly": daly(WRITE_S, mtbf_s)}
    return figures, rows, {f"{name}_h": seconds / HOUR for name, seconds in known.items()}


def measure(options: Options, _: Path) -> Result:
    """Return what each way of saving loses, medians over seeds."""
    figures, rows, known = report(options.seeds)
    cases = {f"{case}: {name}": each for case, found in rows.items() for name, each in found.items()}
    baselines = {name: each for name, each in rows[TRACE].items() if name != OURS}
    return Result(figures, baselines, {"cases": cases, **known, "seeds": options.seeds})


if __name__ == "__main__":
    main(measure, option("--seeds", default=SEEDS, help="traces"))
