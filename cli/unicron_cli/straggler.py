"""The command group `unicron straggler`: what stragglers cost a job, who they are, and what changed between runs."""

from pathlib import Path
from typing import Annotated

import typer

from unicron_cli import straggler_live
from unicron_cli.output import console, needs, say

EXTRAS = "straggler,traces,plot"

app = typer.Typer(no_args_is_help=True)

Meta = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The job's sizes (YAML); by default meta-X.yaml beside trace-X.parquet."),
]


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
    """Simulate a job without its stragglers: what they cost it, who they are, why, and what to do."""
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


for _command in (straggler_live.on, straggler_live.off, straggler_live.status):
    app.command()(_command)
