"""The command line of a benchmark, by declaration, and what it prints: one JSON object, or tables."""

import argparse
import asyncio
import inspect
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

Options = argparse.Namespace
Option = tuple[tuple[str, ...], dict[str, Any]]
Figures = dict[str, Any]


@dataclass
class Result:
    """The results of a benchmark.

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


def option(*names: str, **settings: Any) -> Option:
    """Return an argument of a command line; the type is that of the default where none is named."""
    default = settings.get("default")
    if type(default) in {int, float}:
        settings = {"type": type(default), **settings}
    return names, settings


def names(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    """Return what reads names with commas between them, of those that are allowed."""

    def read(text: str) -> list[str]:
        found = [name for name in text.split(",") if name]
        if unknown := sorted(set(found) - set(allowed)):
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: there are {', '.join(allowed)}")
        return found

    return read


def main(measure: Callable[[Options, Path], Any], *options: Option, folder: str | None = None) -> None:
    """Parse the command line, call `measure`, and print its result: with --json as one line that is the last.

    Args:
        measure: gets the options and an empty folder; a coroutine is run. It returns a `Result`.
        options: of the benchmark, besides --json.
        folder: in which the empty folder is made.
    """
    module = inspect.getmodule(measure)
    parser = argparse.ArgumentParser(
        description=module.__doc__ if module else None, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for names, settings in options:
        parser.add_argument(*names, **settings)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parsed = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: clusters and processes end too
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    with tempfile.TemporaryDirectory(prefix="unicron-benchmark-", dir=folder) as root:
        result = measure(parsed, Path(root))
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
    name = module.__spec__.name.rpartition(".")[2] if module and module.__spec__ else "?"
    print(as_json(name, result) if parsed.json else as_text(result), flush=True)
    sys.exit(result.status)


def say(text: str) -> None:
    """Print progress to standard error."""
    print(text, file=sys.stderr, flush=True)


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
    columns = {"measured": result.figures, **result.baselines}
    names = dict.fromkeys(name for column in columns.values() for name in column)
    rows = {name: {system: column.get(name, "") for system, column in columns.items()} for name in names}
    tables = [("figure", rows), *result.details.items()]
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
