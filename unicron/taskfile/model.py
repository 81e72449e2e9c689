"""Reads the speed in a task file: `model`, from which T(t, x) is calculated, and a CSV file of `throughput`."""

import csv
import difflib
import math
from pathlib import Path
from typing import Any

import msgspec

from unicron.checks import MOST_WORKERS
from unicron.contracts.tasks import ModelSpec
from unicron.costmodel import catalogue
from unicron.errors import InvalidInputError
from unicron.files import MB, read_text
from unicron.printable import listed, shown
from unicron.taskfile.fields import BadValueError, items, readers, text, within

COLUMNS = ("workers", "flops")
TABLE = "'workers: FLOP/s', or the path of a CSV file with the columns workers,flops"

_FIELDS = {field.name: field for field in msgspec.structs.fields(ModelSpec)}
_READERS = readers(ModelSpec)


def read_model(value: Any) -> ModelSpec:
    """Return the model that the mapping `value` describes; `size` fills in what the catalogue knows.

    Raises:
        BadValueError: it names the first key that is unknown, missing or of the wrong kind.
    """
    given = dict(items(value, "size: 7B"))
    for key, entry in given.items():
        if key not in {"size", *_FIELDS}:
            raise BadValueError(_suggestion(str(key)), value=entry, key=str(key))
    found: dict[str, Any] = {}
    if given.get("size") is not None:
        found |= msgspec.structs.asdict(within("size", _size, given["size"]))
    for key, field in _FIELDS.items():
        if given.get(key) is not None:
            found[key] = within(key, _READERS[key], given[key])
        elif field.required and key not in found:
            hint = "" if key == "batch" else f", or give size, one of {', '.join(catalogue.sizes())}"
            raise BadValueError(f"needs {key}{hint}")
    known = catalogue.accelerators().get(found.get("accelerator", _FIELDS["accelerator"].default))
    return ModelSpec(**({"gpus_per_node": known.gpus_per_node} if known else {}) | found)


def read_table(path: Path) -> dict[int, float]:
    """Return T(t, x) from a CSV file with the header `workers,flops` and ascending rows; rows may be far apart.

    Raises:
        BadValueError: the file can't be read at all.
        InvalidInputError: one line for each row that can't be used: file, row, value, and the cure.
    """
    try:
        lines = read_text(path, f"throughput is rows of {TABLE}", MB).splitlines()
    except InvalidInputError as error:
        raise BadValueError(str(error).removeprefix(f"{path}: ")) from error
    try:
        rows = [(at, [cell.strip() for cell in row]) for at, row in enumerate(csv.reader(lines), 1) if any(row)]
    except csv.Error as error:
        raise InvalidInputError(f"{path}: not CSV ({error}); throughput is rows of {TABLE}") from error
    if not rows or any(rows[0][1].count(column) != 1 for column in COLUMNS):
        there = ",".join(rows[0][1]) if rows else "nothing"
        header = ",".join(COLUMNS)
        raise InvalidInputError(f"{path}:1: the first row is {shown(there)}; it must be the header {header!r}")
    if not rows[1:]:
        raise InvalidInputError(f"{path}: has a header and no rows; add one for each size that was measured")
    places = [rows[0][1].index(column) for column in COLUMNS]
    table: dict[int, float] = {}
    problems, above = [], (0, 0)
    for at, row in rows[1:]:
        cells = [row[place] if place < len(row) else "" for place in places]
        problem = _row_problem(*cells, above=above)
        if problem:
            problems.append(f"{path}:{at}: {problem}")
            continue
        above = int(cells[0]), at
        table[above[0]] = float(cells[1])
    if problems:
        raise InvalidInputError(listed(problems))
    return table


def _row_problem(workers: str, flops: str, *, above: tuple[int, int]) -> str:
    """Return what keeps a row from being used; `above` are workers and number of the last good row."""
    if not (workers.isascii() and workers.isdigit() and len(workers) < 9 and 1 <= int(workers) <= MOST_WORKERS):
        return f"workers {shown(workers)}: must be a whole number from 1 to {MOST_WORKERS}"
    before, at = above
    if int(workers) == before:
        return f"workers {workers}: stands in row {at} too; keep one of them"
    if int(workers) < before:
        return f"workers {workers}: comes after {before} in row {at}; sort the rows, each size once"
    try:
        good = math.isfinite(float(flops)) and float(flops) > 0
    except ValueError:
        good = False
    return (
        ""
        if good
        else f"flops {shown(flops)}: must be a finite number of FLOP/s above 0; leave out sizes that can't run"
    )


def _size(value: Any) -> catalogue.Size:
    try:
        return catalogue.size(text(value))
    except InvalidInputError as error:
        raise BadValueError(f"known are {', '.join(catalogue.sizes())}") from error


def _suggestion(key: str) -> str:
    names = ["size", *_FIELDS]
    near = difflib.get_close_matches(key.lower().replace("-", "_"), names, n=1, cutoff=0.5)
    return f"no such field; did you mean {near[0]!r}?" if near else f"no such field; a model has {', '.join(names)}"
