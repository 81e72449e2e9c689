"""A user's files: tasks, traces by name or file, and a description of a cluster with its own failures."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from unicron import taskfile
from unicron.contracts.tasks import TaskSpec
from unicron.errors import InvalidInputError
from unicron.files import read_text
from unicron.printable import listed, shown
from unicron_simulator.policies import experiments, traces
from unicron_simulator.policies.traces import DAY, FailureTrace

CASES = ("case5", "case5-as-planned")
FIELDS = ("nodes", "gpus_per_node", "days", "failures", "tasks", "detect_minutes", "restart_minutes")
REQUIRED = ("nodes", "days", "failures", "tasks")
MOST_NODES = 100_000

EXAMPLE = "see docs/howto/simulate.md for an example"


class MyCluster(NamedTuple):
    """A user's cluster.

    Attributes:
        detect_s, restart_s: how long failures stay unnoticed there and how long a restart takes; None where not said.
    """

    trace: FailureTrace
    tasks: list[TaskSpec]
    gpus: int
    detect_s: float | None
    restart_s: float | None


def load_tasks(given: str) -> list[TaskSpec]:
    """Return the tasks of a name in `CASES`, or of a file that holds task files, one below the other, between `---`.

    Raises:
        InvalidInputError: one line for each problem, with file and line.
    """
    if given in CASES:
        return experiments.case_5(all_run=given == CASES[0])
    path = Path(given)
    text = read_text(path, f"give a file of tasks, or one of {', '.join(CASES)}", taskfile.MOST_BYTES)
    found, line = [], 0
    for document in re.split(r"^---[ \t]*(?:#.*)?$", text, flags=re.MULTILINE):
        if any(each.strip() and not each.strip().startswith("#") for each in document.splitlines()):
            found.append(taskfile.parse("\n" * line + document, path).spec)  # so that lines are those of the file
        line += document.count("\n")
    if not found:
        raise InvalidInputError(
            f"{path}: no task in it; it holds task files as `unicron submit` takes, with --- between"
        )
    return found


def load_trace(given: str, seed: int, nodes: int, days: float) -> FailureTrace:
    """Return the trace of a generator, or of a CSV file.

    Args:
        given: name or path.
        seed: for a generator.
        nodes: of the cluster; 0 for the generator's own, and 16 for a file, whose nodes are then node-0 and so on.
        days: what it spans; 0 for the generator's own, and up to the last failure for a file.

    Raises:
        InvalidInputError: there is no such generator or file, or the file can't be used.
    """
    if given in traces.generators():
        return traces.generate(given, seed, nodes, days)
    if not Path(given).exists():
        raise InvalidInputError(f"no trace or file {given!r}; there are {', '.join(traces.generators())}")
    return traces.load(Path(given), traces.node_names(nodes or 16), days * DAY)


def load_cluster(path: Path) -> MyCluster:
    """Read the description of a cluster; other files that it names start at its folder.

    Raises:
        InvalidInputError: one line for each problem, with file and line.
    """
    text = read_text(path, f"give the description of a cluster, {EXAMPLE}", taskfile.MOST_BYTES)
    values, lines = taskfile.read_mapping(text, path)
    problems = [
        f"{path}:{lines[name]}: no field {name!r}; there are {', '.join(FIELDS)}"
        for name in values
        if name not in FIELDS
    ]
    problems += [f"{path}: {name} is missing; {EXAMPLE}" for name in REQUIRED if values.get(name) is None]
    if problems:
        raise InvalidInputError(listed(problems))
    given = _Values(path, values, lines)
    folder = path.absolute().parent
    tasks = str(values["tasks"])
    nodes = _nodes(given)
    return MyCluster(
        trace=traces.load(folder / str(values["failures"]), nodes, given.number("days", 1e-3) * DAY),
        tasks=load_tasks(tasks if tasks in CASES else str(folder / tasks)),
        gpus=round(given.number("gpus_per_node", 1, 8)),
        detect_s=60 * given.number("detect_minutes", 0) if "detect_minutes" in values else None,
        restart_s=60 * given.number("restart_minutes", 0) if "restart_minutes" in values else None,
    )


class _Values(NamedTuple):
    path: Path
    values: dict[str, Any]
    lines: dict[str, int]

    def wrong(self, name: str, cure: str) -> InvalidInputError:
        return InvalidInputError(f"{self.path}:{self.lines[name]}: {name} {shown(self.values[name])}: {cure}")

    def number(self, name: str, least: float, default: float = 0.0) -> float:
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
            raise self.wrong(name, f"give a number, {least:g} or more")
        return float(value)


def _nodes(given: _Values) -> Sequence[str]:
    nodes = given.values["nodes"]
    if isinstance(nodes, int) and not isinstance(nodes, bool) and 1 <= nodes <= MOST_NODES:
        return traces.node_names(nodes)
    if isinstance(nodes, list) and nodes and len({str(name) for name in nodes}) == len(nodes):
        return [str(name) for name in nodes]
    raise given.wrong("nodes", "give how many there are, called node-0, node-1 ..., or a list of different names")
