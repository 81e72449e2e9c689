"""The command line of a benchmark, by declaration, and its end: one JSON object, or tables."""

import argparse
import asyncio
import inspect
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.report import as_json, as_text

ROOT = Path(__file__).parents[2]

Options = argparse.Namespace
Option = tuple[tuple[str, ...], dict[str, Any]]


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
