"""The commands `unicron straggler`: the costs of a job's or a task's stragglers, their causes, and comparisons."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from unicron.contracts.answers import StragglerView
from unicron.contracts.timings import DEFAULT_SHARE
from unicron.observe.words.units import percent
from unicron_cli.output import Json, Nats, console, done, needs, print_json, say, with_client
from unicron_cli.views import plain_table

EXTRAS = "straggler,traces,plot"

app = typer.Typer(no_args_is_help=True)

Meta = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The job's sizes (YAML); by default meta-X.yaml beside trace-X.parquet."),
]
Task = Annotated[str, typer.Argument(metavar="TASK", help="Name of the task.")]
Layers = Annotated[int, typer.Option(min=0, help="Layers of a stage, so that a cure can name them; 0: not known.")]


@app.command()
def analyze(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="A parquet file, or NDTimeline's chrome trace (.json).")
    ],
    meta: Meta = None,
    layers: Layers = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="DIR", help="Draw heat maps and a timeline there.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a report that needs no network.")] = None,
) -> None:
    """Simulate a job without its stragglers: their costs, their causes, and what to do."""
    with needs("unicron straggler", EXTRAS):
        from unicron_straggler.analysis import diagnosis, pictures, report, words  # noqa: PLC0415
    traced, analysis = words.analyzed(trace, meta)
    diagnoses = diagnosis.diagnose(analysis, layers=layers)
    if plot is not None:
        pictures.draw(traced, analysis, plot)
    if html is not None:
        report.write(traced, analysis, diagnoses, html)
    say(words.as_json(analysis, diagnoses) if as_json else words.words(analysis, diagnoses))


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(metavar="A", help="The trace of a run.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="The trace of another run.")],
    meta: Meta = None,
    layers: Layers = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Show what changed between two runs, which may differ in size unless --meta is given for both."""
    with needs("unicron straggler", EXTRAS):
        from unicron_straggler.analysis import compare as comparing  # noqa: PLC0415
        from unicron_straggler.analysis import diagnosis, words  # noqa: PLC0415
    runs = []
    for path in (before, after):
        _, analysis = words.analyzed(path, meta)
        runs.append((analysis, diagnosis.diagnose(analysis, layers=layers)))
    found = comparing.compare(*runs)
    if as_json:
        say(words.plain_json(found.as_json()))
    else:
        console().print(comparing.view(found))


@app.command()
def on(
    task: Task,
    share: Annotated[
        float, typer.Option("--share", min=0.0, max=1.0, help="Of the iterations; 1 is each.")
    ] = DEFAULT_SHARE,
    nats: Nats = None,
    as_json: Json = False,
) -> None:
    """Have the workers of TASK record when they do what, in a share of their iterations."""
    done(with_client(nats, lambda client: client.record(task, share)), as_json, task=task, share=share)


@app.command()
def off(task: Task, nats: Nats = None, as_json: Json = False) -> None:
    """Have the workers of TASK record nothing."""
    done(with_client(nats, lambda client: client.record(task, 0.0)), as_json, task=task, share=0.0)


@app.command()
def status(task: Task, nats: Nats = None, as_json: Json = False) -> None:
    """Show how slow TASK was in the latest windows of recorded iterations, and why."""
    view = with_client(nats, lambda client: client.straggler(task))
    if as_json:
        print_json(view)
        return
    console().print(_table(view))
    for line in _lines(view):
        say(line)


def _table(view: StragglerView) -> Table:
    table = plain_table("ITERATIONS", "RECORDED", "WORKERS", "SLOWDOWN", "WASTE", "DIAGNOSIS", "WORKER", "CURED")
    for window in view.history:
        table.add_row(
            f"{window.first}-{window.last}",
            str(window.steps),
            str(window.world_size),
            Text(f"{window.slowdown:.3f}", "red" if window.slow else ""),
            percent(window.waste),
            window.diagnosis,
            Text(window.worker),
            f"{window.gain:.2f} x as fast" if window.gain else "",
        )
    return table


def _lines(view: StragglerView) -> list[str]:
    """Return what is to be said besides the table."""
    recorded = f"{view.share:.3g} of the iterations are recorded" if view.share else "nothing is recorded"
    lines = [f"{view.task}: {recorded}; {view.waiting} wait for the rest of their window"]
    if view.dropped:
        lines.append("left out: " + ", ".join(f"{count} {reason}" for reason, count in sorted(view.dropped.items())))
    if view.history:
        last = view.history[-1]
        lines += [f"problem: {text}" for text in last.problems]
        lines += [last.cure] if last.cure else []
    lines.append(f"alert: {view.alert}" if view.alert else "no alert")
    return lines
