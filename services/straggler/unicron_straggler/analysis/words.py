"""The work of the commands `unicron straggler analyze` and `compare`."""

from pathlib import Path
from typing import Any

from unicron.errors import UnicronError
from unicron_straggler.analysis import measures, reader
from unicron_straggler.analysis.measures import Analysis
from unicron_straggler.analysis.trace import Trace

SHOWN = 8
"""So many of a list are printed at most."""


def analyzed(trace: Path, meta: Path | None) -> tuple[Trace, Analysis]:
    """Read a trace and analyze it.

    Args:
        trace: parquet, or a chrome trace (.json).
        meta: its YAML file; None for the one beside it that is named likewise (trace-X.parquet: meta-X.yaml).

    Raises:
        InvalidInputError: one of the files can't be used.
        UnicronError: what reads parquet is not installed.
    """
    if meta is None:
        meta = trace.with_name(trace.stem.replace("trace", "meta", 1) + ".yaml")
    try:
        found = reader.read(trace, reader.read_meta(meta))
    except ImportError as error:
        raise UnicronError(
            f"reading {trace} needs {error.name}, which is not installed: pip install '.[traces]'"
        ) from error
    return found, measures.analyze(found)


def as_json(analysis: Analysis, diagnoses: list[Any]) -> str:
    """Return the measures under the names of the study's analyzer, with ours beside them, as JSON.

    What has no value (a share of a slowdown that is none) is null.
    """
    more = {
        "fb_corr_normalised": analysis.correlation_normalised,
        "fwd_variation": analysis.forward_variation,
        "trustworthy": analysis.trustworthy,
        "problems": list(analysis.problems),
        "diagnoses": diagnoses,
    }
    return plain_json(analysis.as_json() | more)


def plain_json(values: Any) -> str:
    """Return dataclasses, mappings and numbers as JSON; what is not a number is null."""
    import msgspec  # noqa: PLC0415

    return msgspec.json.format(msgspec.json.encode(values), indent=1).decode()


def words(analysis: Analysis, diagnoses: list[Any]) -> str:
    """Return the main measures as lines of text."""
    meta = analysis.meta
    doubt = "" if analysis.trustworthy else "; the result is not to be trusted"
    lines = [
        f"{meta.name}: {len(analysis.steps)} steps, dp {len(analysis.dp_ranks)} x pp {meta.pp_size}",
        f"  slowdown S       {analysis.slowdown:.4f}    {analysis.waste:.1%} of the GPU hours are wasted",
        f"  step as traced   {analysis.traced_mean_s:.3f} s",
        f"  step simulated   {analysis.simulated_mean_s:.3f} s; ideal {analysis.ideal_mean_s:.3f} s",
        f"  launch delay     {analysis.launch_slowdown - 1:+.2%}{doubt}",
        "  by operation     " + _worst(analysis.by_op),
        "  by dp rank       " + _worst(dict(zip(map(str, analysis.dp_ranks), analysis.by_dp.tolist(), strict=True))),
        "  by stage         " + _worst({str(at): each for at, each in enumerate(analysis.by_stage.tolist())}),
        f"  slowest ranks    {', '.join(map(str, analysis.slowest_ranks))}: {analysis.m_w:.1%} of the slowdown",
        f"  last stage       {analysis.m_s:.1%} of the slowdown",
        f"  forward times    vary by {analysis.forward_variation:.1%} on a worker (median)",
        f"  and backward     correlate by {analysis.correlation_normalised:.3f} on a worker",
    ]
    lines += [
        f"  problem          {one.name}: {one.text}" + ("" if one.stands else " (the result does not stand)")
        for one in analysis.problems
    ]
    lines += [f"  {one.cause} ({one.share:.0%} of the waste): {one.cure}" for one in diagnoses]
    return "\n".join(lines)


def _worst(slowdowns: Any) -> str:
    worst = sorted(slowdowns.items(), key=lambda item: -item[1])[:SHOWN]
    return ", ".join(f"{name} {value:.3f}" for name, value in worst)
