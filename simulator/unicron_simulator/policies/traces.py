"""Failure traces: which node failed when, how badly, and how long its repair took; from CSV files and from generators.

The generators are in `rates.toml`, each figure with its source. The same seed gives the same trace.
"""

import csv
import io
import math
import tomllib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from unicron.errors import InvalidInputError
from unicron.files import read_text
from unicron.printable import listed, shown

COLUMNS = ("time_s", "node", "kind", "repair_s")
KINDS = ("sev1", "sev2", "sev3")
DAY = 86400.0


class Failure(NamedTuple):
    """One failure.

    Attributes:
        at: seconds since the trace began.
        node: name of the node it struck.
        kind: severity as in table 1 of the paper: "sev1" takes the node out, "sev2" and "sev3" do not.
        repair_s: seconds until a node that was taken out is back; 0 for the others.
    """

    at: float
    node: str
    kind: str
    repair_s: float = 0.0


class Trace(NamedTuple):
    """Failures of a cluster, in order of time.

    Attributes:
        name: for headings.
        nodes: names of all nodes, those that never fail included.
        duration_s: seconds that the trace spans.
    """

    name: str
    nodes: tuple[str, ...]
    duration_s: float
    faults: tuple[Failure, ...]

    def count(self, kind: str) -> int:
        """Return how many faults are of this kind."""
        return sum(fault.kind == kind for fault in self.faults)


def node_names(count: int) -> tuple[str, ...]:
    """Return the names that generated nodes have: node-0 to node-(count - 1)."""
    return tuple(f"node-{number}" for number in range(count))


# --- generators ------------------------------------------------------------------------------------------------------


@cache
def generators() -> dict[str, dict[str, Any]]:
    """Return the entries of `rates.toml` by name."""
    return tomllib.loads((files(__package__) / "rates.toml").read_text(encoding="utf-8"))


def generate(name: str, seed: int, nodes: int = 0, days: float = 0.0) -> Trace:
    """Return the trace of a generator.

    On the source's own nodes and days it has exactly the failures that the source names, at times that are those of a
    Poisson process with that many. Otherwise their number is drawn too, at the source's rate for each node and day.

    Args:
        name: an entry of `rates.toml`.
        seed: two traces of the same seed are the same.
        nodes: nodes of the cluster, 0 for the source's.
        days: length, 0 for the source's.

    Raises:
        InvalidInputError: there is no such generator, or a number is negative.
    """
    if name not in generators():
        raise InvalidInputError(f"no trace {name!r}; there are {', '.join(generators())}, or give a CSV file")
    if nodes < 0 or not (math.isfinite(days) and days >= 0):
        raise InvalidInputError(f"trace {name}: {nodes} nodes for {days} days; give positive numbers")
    entry = generators()[name]
    nodes, days = nodes or entry["nodes"], days or entry["days"]
    as_there = (nodes, days) == (entry["nodes"], entry["days"])
    scale = nodes * days / (entry["nodes"] * entry["days"])
    random = Random(f"{name} {seed}")
    counts = {kind: entry[kind] if as_there else _poisson(random, entry[kind] * scale) for kind in KINDS}
    times = sorted((random.uniform(0, days * DAY), kind) for kind in KINDS for _ in range(counts[kind]))
    low, high = entry["repair_days"]
    names = node_names(nodes)
    back = dict.fromkeys(names, 0.0)
    faults = []
    for at, kind in times:
        node = random.choice(names)
        for _ in range(100 * nodes):
            if back[node] <= at:
                break
            node = random.choice(names)  # what is out already can't fail
        repair_s = random.uniform(low, high) * DAY if kind == "sev1" else 0.0
        back[node] = max(back[node], at + repair_s)
        faults.append(Failure(at, node, kind, repair_s))
    return Trace(name, names, days * DAY, tuple(faults))


def by_rack(trace: Trace, size: int) -> Trace:
    """Return the trace with as many lost nodes, but lost together: as when the switch of a rack fails.

    Of each `size` successive sev1 failures, the first takes as many nodes of its rack at once, for its repair time.

    Args:
        trace: of nodes that are lost one by one.
        size: nodes of a rack; the first ones are the first rack.
    """
    single = [fault for fault in trace.faults if fault.kind == "sev1"]
    faults = [fault for fault in trace.faults if fault.kind != "sev1"]
    for at in range(0, len(single), size):
        first = single[at]
        start = trace.nodes.index(first.node) // size * size
        rack = sorted(trace.nodes[start : start + size], key=lambda node: node != first.node)
        faults += [first._replace(node=node) for node in rack[: len(single[at : at + size])]]
    return trace._replace(faults=tuple(sorted(faults, key=lambda fault: fault.at)))


def _poisson(random: Random, mean: float) -> int:
    """Draw from a Poisson distribution, by the exponential gaps between its events."""
    count, reached = 0, random.expovariate(1.0)
    while reached < mean:
        count, reached = count + 1, reached + random.expovariate(1.0)
    return count


# --- CSV files -------------------------------------------------------------------------------------------------------


def to_csv(trace: Trace) -> str:
    """Return the trace as CSV text with the header `time_s,node,kind,repair_s`."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows((repr(fault.at), fault.node, fault.kind, repr(fault.repair_s)) for fault in trace.faults)
    return out.getvalue()


def load(path: Path, nodes: Sequence[str], duration_s: float = 0.0) -> Trace:
    """Read a CSV file with the columns time_s, node, kind and repair_s, in any order; others are ignored.

    Args:
        path: of the file.
        nodes: names of the cluster's nodes.
        duration_s: what the file spans; 0 takes the time of its last failure.

    Raises:
        InvalidInputError: one line for each problem: file, line, column, value, and the cure.
    """
    text = read_text(path, f"give a CSV file with the columns {','.join(COLUMNS)}")
    return parse(text, path, nodes, duration_s)


def parse(text: str, path: Path, nodes: Sequence[str], duration_s: float = 0.0) -> Trace:
    """Make a trace of CSV text; `path` is where it came from.

    Raises:
        InvalidInputError: as for `load`.
    """
    reader = csv.reader(io.StringIO(text))
    try:
        rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(map(str.strip, row))]
    except csv.Error as error:
        raise InvalidInputError(f"{path}:{reader.line_num}: not CSV ({error})") from error
    if not rows:
        raise InvalidInputError(f"{path}:1: empty; the first row must be the header {','.join(COLUMNS)}")
    header = rows[0][1]
    missing = [column for column in COLUMNS if column not in header]
    if missing:
        problem = f"missing column {', '.join(missing)}; the header must have {','.join(COLUMNS)}"
        raise InvalidInputError(f"{path}:{rows[0][0]}: {problem}, and is {shown(','.join(header))}")
    known, faults, problems, before = frozenset(nodes), [], [], (0.0, 0)
    for line, row in rows[1:]:
        cells = {column: row[header.index(column)] if header.index(column) < len(row) else "" for column in COLUMNS}
        found = _problems(cells, known, before)
        problems += [f"{path}:{line}: column {column}: {problem}" for column, problem in found]
        if not found:
            repair_s = float(cells["repair_s"] or 0)
            faults.append(Failure(float(cells["time_s"]), cells["node"], cells["kind"], repair_s))
            before = faults[-1].at, line
    last = faults[-1].at if faults else 0.0
    if duration_s and last > duration_s:
        problems.append(f"{path}:{before[1]}: column time_s: {last:g} is behind the end at {duration_s:g}")
    if problems:
        raise InvalidInputError(listed(problems))
    return Trace(path.stem, tuple(nodes), duration_s or last, tuple(faults))


def _problems(cells: dict[str, str], nodes: frozenset[str], before: tuple[float, int]) -> list[tuple[str, str]]:
    """Return column and problem of whatever can't be used in a row that follows the time and line `before`."""
    found = []
    at = _number(cells["time_s"])
    if at is None or at < 0:
        found.append(("time_s", f"{shown(cells['time_s'])}; give seconds since the trace began, 0 or more"))
    elif at < before[0]:
        found.append(("time_s", f"{at:g} is before the {before[0]:g} of line {before[1]}; sort the rows by their time"))
    if cells["node"] not in nodes:
        some = sorted(nodes)[:5]
        more = f" and {len(nodes) - len(some)} more" if len(nodes) > len(some) else ""
        found.append(("node", f"no node {shown(cells['node'])} in this cluster; it has {', '.join(some)}{more}"))
    if cells["kind"] not in KINDS:
        found.append(("kind", f"{shown(cells['kind'])}; give {', '.join(KINDS)}"))
    repair = _number(cells["repair_s"] or "0")
    if repair is None or repair < 0:
        found.append(("repair_s", f"{shown(cells['repair_s'])}; give seconds, 0 or more"))
    elif cells["kind"] == "sev1" and not repair:
        found.append(("repair_s", "a sev1 failure takes its node out; say for how many seconds"))
    return found


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
