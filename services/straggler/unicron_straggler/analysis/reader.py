"""Readers: parquet with the study's columns, NDTimeline's chrome traces, and rows of one's own recording."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unicron.errors import InvalidInputError
from unicron.files import MB, read_text
from unicron.printable import shown
from unicron_straggler.analysis.trace import CODES, Meta, Trace, TraceProblem

TYPES = {
    "dp_rank": np.int16,
    "stage": np.int16,
    "rank": np.int32,
    "step": np.int64,
    "seq_id": np.int32,
    "mc": np.int16,
    "mb_id": np.int16,
    "gmc": np.int32,
}
UNKNOWN = -1


def read(path: Path, meta: Meta) -> Trace:
    """Read a trace: parquet, or (by the name's end .json) a chrome trace of NDTimeline.

    Raises:
        InvalidInputError: the file can't be read, lacks columns, or contradicts the meta.
    """
    return read_chrome(path, meta) if path.suffix == ".json" else read_parquet(path, meta)


def read_meta(path: Path) -> Meta:
    """Read the YAML file that goes with a trace: trial_name and the sizes.

    Raises:
        InvalidInputError: the file can't be read, or a size is missing or not a positive number.
    """
    import yaml  # noqa: PLC0415

    text = read_text(path, "name another with --meta", MB)
    try:
        given = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: an impossible date or number
        raise InvalidInputError(f"{path} can't be read as YAML: {error}; name another with --meta") from error
    if not isinstance(given, dict):
        raise InvalidInputError(f"wrong meta: {path} is no mapping; give trial_name, dp_size, pp_size, ...")
    sizes = {}
    for name in ("dp_size", "pp_size", "tp_size", "dsp_size", "vpp_size"):
        size = given.get(name, 1 if name not in {"dp_size", "pp_size"} else None)
        if not isinstance(size, int) or size < 1:
            raise InvalidInputError(f"wrong meta: {name} in {path} is {shown(size)}; give a whole number of at least 1")
        sizes[name] = size
    numbers = {name: given.get(name, 0) for name in ("world_size", "run_id")}
    for name, number in numbers.items():
        if not isinstance(number, int) or number < 0:
            raise InvalidInputError(
                f"wrong meta: {name} in {path} is {shown(number)}; give a whole number, or leave it out"
            )
    return Meta(str(given.get("trial_name", path.stem)), **sizes, **numbers)


def read_parquet(path: Path, meta: Meta) -> Trace:
    """Read a parquet file with the study's columns.

    Raises:
        InvalidInputError: as `read`.
    """
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415

    needed = [*TYPES, "optype", "start_ts", "duration"]
    try:
        table = pq.ParquetFile(path).read(columns=needed)
    except (OSError, pa.ArrowException) as error:
        raise InvalidInputError(f"{path} can't be read as parquet: {error}") from error
    missing = [name for name in needed if name not in table.column_names]
    if missing:
        raise InvalidInputError(f"{path} lacks the columns {', '.join(missing)}; all of {', '.join(needed)} are needed")
    nulls = [name for name in needed if table.column(name).null_count]
    if nulls:
        raise InvalidInputError(
            f"{path} has empty values in {', '.join(nulls)}; write -1 where a column does not apply"
        )
    optype = table.column("optype").combine_chunks()
    if not pa.types.is_dictionary(optype.type):
        optype = optype.dictionary_encode()
    names = optype.dictionary.to_pylist()
    columns = {name: table.column(name).to_numpy() for name in needed if name != "optype"}
    return _trace(meta, names, optype.indices.to_numpy(), columns)


def read_chrome(path: Path, meta: Meta) -> Trace:
    """Read the chrome trace that NDTimeline's local handler writes.

    Complete events ("ph": "X") have the operation as name, microseconds in ts and dur, the data-parallel rank as pid,
    and rank, step, tp and pp in args; model_chunk and mb_id in args are taken where they are. Only tensor-parallel rank
    0 is read; an operation such as forward-send-backward-recv counts as both.

    Raises:
        InvalidInputError: as `read`.
    """
    try:
        events = json.loads(path.read_bytes())
        events = events["traceEvents"] if isinstance(events, dict) else events
        rows = [_event(event) for event in events if event.get("ph") == "X"]
    except OSError as error:
        raise InvalidInputError(f"{path} can't be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        why = f"an event has no {error.args[0]}" if isinstance(error, KeyError) else shown(error)
        raise InvalidInputError(
            f"{path} is no chrome trace of NDTimeline ({why}): each complete event needs name, ts, dur, "
            "pid, and rank, step and pp in args"
        ) from error
    names: dict[str, int] = {}
    columns: list[tuple[Any, ...]] = []
    for tensor, name, row in rows:
        if tensor == 0:
            columns.extend((names.setdefault(part, len(names)), *row) for part in _parts(name))
    return _ordered(meta, list(names), columns)


def _event(event: dict[str, Any]) -> tuple[int, str, tuple[Any, ...]]:
    args = event["args"]
    where = (int(event["pid"]), int(args["pp"]), int(args["rank"]), int(args["step"]))
    times = (float(event["ts"]) / 1e6, float(event["dur"]) / 1e6)
    chunk, batch = (args.get(name) for name in ("model_chunk", "mb_id"))
    place = (0 if chunk is None else int(chunk), -1 if batch is None else int(batch))
    return int(args.get("tp", 0)), str(event["name"]), (*where, *times, *place)


def _parts(name: str) -> tuple[str, ...]:
    """Return the operations that go by one name: a send and a receive may have been launched together."""
    words = name.split("-")
    halves = ("-".join(words[:2]), "-".join(words[2:]))
    return halves if all(half in CODES for half in halves) else (name,)


def from_rows(rows: Iterable[tuple[int, int, int, int, str, float, float, int]], meta: Meta) -> Trace:
    """Make a trace of a recording of one's own.

    Args:
        rows: (dp_rank, stage, rank, step, name of the op type, start, duration, mb_id): seconds on one clock, and the
            microbatch or -1.
        meta: the job.

    Raises:
        InvalidInputError: as `read`.
    """
    names: dict[str, int] = {}
    columns = [
        (names.setdefault(name, len(names)), dp_rank, stage, rank, step, start, duration, 0, batch)
        for dp_rank, stage, rank, step, name, start, duration, batch in rows
    ]
    return _ordered(meta, list(names), columns)


def _ordered(meta: Meta, names: list[str], rows: list[tuple[Any, ...]]) -> Trace:
    """Make a trace of rows that have no seq_id and whose clock runs on from step to step."""
    index, dp_rank, stage, rank, step, start, duration, chunk, batch = (
        np.array(column) for column in (zip(*rows, strict=True) if rows else [()] * 9)
    )
    order = np.lexsort((start, index, rank, step))
    same = np.ones(len(rows), bool)
    for column in (index, rank, step):
        same[1:] &= column[order][1:] == column[order][:-1]
    begins = np.flatnonzero(~same) if len(rows) else np.array([], int)
    begins = np.union1d(begins, [0]) if len(rows) else begins
    seq = np.empty(len(rows), np.int64)
    lengths = np.diff(np.append(begins, len(rows)))
    seq[order] = np.arange(len(rows)) - np.repeat(begins, lengths)
    if len(rows):
        _, of_step = np.unique(step, return_inverse=True)
        first = np.full(of_step.max() + 1, np.inf)
        np.fmin.at(first, of_step, start)
        start = start - first[of_step]
    columns = {
        "dp_rank": dp_rank,
        "stage": stage,
        "rank": rank,
        "step": step,
        "start_ts": start,
        "duration": duration,
        "seq_id": seq,
        "mc": chunk,
        "mb_id": batch,
        "gmc": chunk * meta.pp_size + stage,
    }
    return _trace(meta, names, index, columns)


def _trace(meta: Meta, names: Sequence[str], index: Any, columns: dict[str, Any]) -> Trace:
    """Check what can be checked row by row, and make the trace.

    Raises:
        InvalidInputError: a column holds no numbers, or such as no job has.
    """
    for name, column in columns.items():
        if column.dtype.kind not in "iuf":
            raise InvalidInputError(f"wrong trace: column {name} holds something else than numbers of 64 bits")
        if name in TYPES and len(column):
            low, high, most = column.min(), column.max(), 2 ** (8 * np.dtype(TYPES[name]).itemsize - 1)
            if not -most <= low <= high < most:
                raise InvalidInputError(
                    f"wrong trace: column {name} goes from {low} to {high}; {-most} to {most - 1} are possible"
                )
    problems: list[TraceProblem] = []
    codes = np.array([CODES.get(name, UNKNOWN) for name in names], np.int8)
    optype = codes[index] if len(names) else np.array([], np.int8)
    kept = optype != UNKNOWN
    if not kept.all():
        unknown = sorted({str(names[at])[:60] for at in np.unique(index[~kept]).tolist()})
        more = f" and {len(unknown) - 10} more" if len(unknown) > 10 else ""
        dropped = int((~kept).sum())
        text = f"{dropped} operations of unknown types are left out: {', '.join(unknown[:10])}{more}"
        text += "; the time they took counts as delay between the others"
        problems.append(TraceProblem("unknown-op-types", text, dropped))
    wrong = kept & ~((columns["duration"] >= 0) & np.isfinite(columns["start_ts"]) & np.isfinite(columns["duration"]))
    if wrong.any():
        dropped = int(wrong.sum())
        text = f"{dropped} operations with negative or no times are left out, and with them the steps they belong to"
        problems.append(TraceProblem("wrong-times", text, dropped, stands=bool(dropped <= 0.01 * len(wrong))))
        kept &= ~wrong
    if not kept.all():
        optype = optype[kept]
        columns = {name: column[kept] for name, column in columns.items()}
    typed = {name: column.astype(TYPES[name], copy=False) for name, column in columns.items() if name in TYPES}
    times = {"start": columns["start_ts"], "duration": columns["duration"]}
    if any(column.dtype not in (np.float32, np.float64) for column in times.values()):
        times = {name: column.astype(np.float64) for name, column in times.items()}
    return Trace(meta=meta, optype=optype, **typed, **times, problems=tuple(problems))
