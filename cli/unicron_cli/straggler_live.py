"""Commands about a running task's stragglers: what is recorded, and what came out of it."""

from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from unicron.contracts.queries import StragglerView
from unicron.contracts.timings import DEFAULT_SHARE
from unicron.observe.words.units import percent
from unicron_cli.output import Json, Nats, console, done, print_json, say, with_client
from unicron_cli.views import plain_table

Task = Annotated[str, typer.Argument(metavar="TASK", help="Name of the task.")]


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


def off(task: Task, nats: Nats = None, as_json: Json = False) -> None:
    """Have the workers of TASK record nothing."""
    done(with_client(nats, lambda client: client.record(task, 0.0)), as_json, task=task, share=0.0)


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
