"""The report of an analysis as one HTML file: it loads nothing, so that it opens without a network."""

import base64
import io
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from unicron.errors import InvalidInputError
from unicron_straggler.analysis import pictures
from unicron_straggler.analysis.diagnosis import Diagnosis
from unicron_straggler.analysis.measures import Analysis
from unicron_straggler.analysis.trace import Trace

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 75rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse } td, th { padding: .2rem .9rem .2rem 0; text-align: left; vertical-align: top }
td { border-top: 1px solid #ddd } td.number { text-align: right; font-variant-numeric: tabular-nums }
.cure { border-left: 4px solid #c40; padding: .3rem .8rem; margin: .7rem 0; background: #fdf6f2 }
.quiet { border-color: #4a4; background: #f4faf4 } .bad { color: #b00020; font-weight: 600 }
img { max-width: 100% } details { margin: .3rem 0 } code { font-size: .85em }
"""

MOST_ROWS = 10
"""Rows of a table of ranks."""

CAPTIONS = {
    "workers": "Slowdown of each worker: how much longer a step takes with it as it is and all others ideal. One dark "
    "cell is a slow worker, a dark row a stage with too much to do, many pale ones uneven sequences or pauses.",
    "steps": "The same for single steps. What wanders from step to step comes with the data or with pauses; what stays "
    "has its cause in the worker or in the partition.",
    "timeline": "The slowest step of its slowest data-parallel rank, as it was and as it could have been; the dotted "
    "line is the ideal end.",
}


def write(trace: Trace, analysis: Analysis, diagnoses: Sequence[Diagnosis], path: Path) -> None:
    """Write the report to an HTML file.

    Raises:
        InvalidInputError: the file can't be written.
        UnicronError: matplotlib is not installed.
    """
    text = page(trace, analysis, diagnoses)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidInputError(f"{path}: the report can't be written there ({error.strerror})") from error


def page(trace: Trace, analysis: Analysis, diagnoses: Sequence[Diagnosis]) -> str:
    """Return the report.

    Raises:
        UnicronError: matplotlib is not installed.
    """
    meta = analysis.meta
    name = escape(meta.name)
    size = f"data parallel {meta.dp_size} x pipeline {meta.pp_size} x tensor {meta.tp_size}, {meta.world_size} ranks"
    parts = [
        f"<h1>Stragglers of {name}</h1>",
        f"<p>{len(analysis.steps)} steps, {size}.</p>",
        *_verdict(analysis),
        "<h2>Why, and what to do</h2>",
        *(_diagnosis(each) for each in diagnoses),
        "<h2>Measures</h2>",
        _table(_measures(analysis)),
        "<h2>By kind of operation</h2><p>Slowdown with only this kind as traced, all else ideal.</p>",
        _table((op, f"{value:.4f}") for op, value in sorted(analysis.by_op.items(), key=lambda each: -each[1])),
        "<h2>Slowest workers</h2>",
        _table(_slowest(analysis), ("rank", "data-parallel rank", "stage", "slowdown")),
    ]
    for title, figure in pictures.figures(trace, analysis):
        drawn = io.BytesIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
        source = base64.b64encode(drawn.getvalue()).decode()
        parts.append(f"<h2>{title.capitalize()}</h2><p>{CAPTIONS[title]}</p>")
        parts.append(f'<img alt="{title}" src="data:image/svg+xml;base64,{source}">')
    parts += ["<h2>Problems with the trace</h2>", *_problems(analysis)]
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Stragglers of {name}</title>'
    return f"{head}<style>{STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"


def _verdict(analysis: Analysis) -> list[str]:
    said = (
        f"<p>A step takes {analysis.simulated_mean_s:.4g} s and could take {analysis.ideal_mean_s:.4g} s: the job is "
        f"<b>{analysis.slowdown:.3f} times</b> as slow as without stragglers, which is {100 * analysis.waste:.1f} % of "
        "its GPU time.</p>"
    )
    if analysis.trustworthy:
        return [said]
    why = "see the problems at the end"
    if abs(analysis.launch_slowdown - 1) > 0.05:
        why = f"the steps of the trace take {analysis.launch_slowdown:.3f} times as long as those simulated"
    return [said, f'<p class="bad">Not to be trusted: {why}.</p>']


def _diagnosis(diagnosis: Diagnosis) -> str:
    quiet = " quiet" if diagnosis.cause == "none" else ""
    share = "" if diagnosis.cause == "none" else f" ({100 * diagnosis.share:.0f} % of the waste)"
    rows = _table((name, _text(value)) for name, value in diagnosis.evidence.items())
    return (
        f'<div class="cure{quiet}"><b>{escape(diagnosis.cause)}</b>{share}<br>{escape(diagnosis.cure)}'
        f"<details><summary>evidence</summary>{rows}</details></div>"
    )


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(each)}" for name, each in value.items())
    if isinstance(value, list):
        return "; ".join(_text(each) for each in value)
    return str(value)


def _measures(analysis: Analysis) -> list[tuple[str, str]]:
    return [
        ("slowdown S = T / T_ideal", f"{analysis.slowdown:.5f}"),
        ("waste 1 - 1/S", f"{100 * analysis.waste:.2f} %"),
        ("mean step as traced", f"{analysis.traced_mean_s:.5g} s"),
        ("mean step simulated", f"{analysis.simulated_mean_s:.5g} s"),
        ("mean step ideal", f"{analysis.ideal_mean_s:.5g} s"),
        ("launch delay (traced / simulated)", f"{analysis.launch_slowdown:.4f}"),
        ("M_w, of the slowest 3 % of ranks", f"{analysis.m_w:.4f}"),
        ("M_s, of the last stage", f"{analysis.m_s:.4f}"),
        ("slowdown of the slowest step", f"{float(analysis.step_slowdown.max()):.4f}"),
        ("forward and backward correlate, within workers", f"{analysis.correlation_normalised:.4f}"),
        ("forward varies, within workers (median)", f"{analysis.forward_variation:.4f}"),
    ]


def _slowest(analysis: Analysis) -> list[tuple[str, ...]]:
    order = (-analysis.worker_exact).argsort(axis=None, kind="stable")[:MOST_ROWS]
    dp, pp = analysis.worker_exact.shape
    return [
        (
            str(analysis.ranks[place // pp, place % pp]),
            str(analysis.dp_ranks[place // pp]),
            str(place % pp),
            f"{analysis.worker_exact[place // pp, place % pp]:.4f}",
        )
        for place in order[: dp * pp]
    ]


def _problems(analysis: Analysis) -> list[str]:
    if not analysis.problems:
        return ["<p>None.</p>"]
    rows = [(one.name, one.text, str(one.dropped), "yes" if one.stands else "no") for one in analysis.problems]
    return [_table(rows, ("problem", "what", "operations dropped", "result stands"))]


def _table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    first = f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>" if head else ""
    lines = ("".join(f"<td{_kind(cell)}>{escape(cell)}</td>" for cell in row) for row in rows)
    return f"<table>{first}{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _kind(cell: str) -> str:
    return ' class="number"' if cell[:1].isdigit() and len(cell) < 14 else ""
