"""What a benchmark prints: its figures, and on which machine and commit they were measured."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Figures = dict[str, Any]


@dataclass
class Result:
    """What was measured.

    Attributes:
        figures: flat; each name ends in its unit.
        baselines: figures of what it is compared with, measured in the same run, by system.
        details: what explains the figures; tables of it are shown to people.
        status: the exit status.
    """

    figures: Figures
    baselines: dict[str, Figures] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    status: int = 0


def as_json(benchmark: str, result: Result) -> str:
    """Return the line for programs."""
    head = {"benchmark": benchmark, "machine": machine(), "commit": commit()}
    return json.dumps(
        head | {"figures": result.figures, "baselines": result.baselines, "details": result.details}, default=_plain
    )


def _plain(value: Any) -> Any:
    """Return what JSON can hold of a number of NumPy's, or of an object with attributes."""
    return value.item() if hasattr(value, "item") else vars(value)


def as_text(result: Result) -> str:
    """Return tables for people: figures beside those of the baselines, then what is a table in the details."""
    columns = {"": result.figures, **result.baselines}
    names = dict.fromkeys(name for column in columns.values() for name in column)
    rows = {name: {system: column.get(name, "") for system, column in columns.items()} for name in names}
    tables = [("", rows), *result.details.items()]
    return "\n\n".join(_table(title, table) for title, table in tables if _is_table(table))


def _is_table(value: Any) -> bool:
    rows = list(value.values()) if isinstance(value, Mapping) else []
    return bool(rows) and all(isinstance(row, Mapping) for row in rows)


def _table(title: str, rows: Mapping[Any, Mapping[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    cells: list[Sequence[str]] = [[title, *names]]
    cells += [[str(key), *(_cell(row.get(name, "")) for name in names)] for key, row in rows.items()]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join([f"{first:{widths[0]}}", *(f"{each:>{width}}" for each, width in zip(rest, widths[1:], strict=True))])
        for first, *rest in cells
    )


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:60]


def machine() -> Figures:
    """Return processor, cores that may be used, load, and the version of Python."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "processor": names[0].partition(":")[2].strip() if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }


def commit() -> str:
    """Return the commit that is checked out, with a plus where files differ from it; empty outside a clone."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
