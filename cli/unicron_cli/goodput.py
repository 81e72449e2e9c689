"""The command that shows how GPU time was spent."""

import csv
import io
import re
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from unicron.client import Client
from unicron.errors import UnicronError
from unicron.observe.accounts.chains import ChainCost
from unicron.observe.accounts.goodput import SLOWDOWN, Goodput
from unicron.observe.accounts.phases import Phase
from unicron.observe.accounts.report import CostRow, Report, TaskRow
from unicron.observe.words.units import percent, span
from unicron_cli.fitting import FittingTable
from unicron_cli.output import Json, Nats, console, print_json, say, with_client
from unicron_cli.views import plain_table

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}

NO_TASK = "(no task)"

ROWS = 20
"""Causes, nodes and failures that the tables show, the dearest; `--json` and `--csv` have all."""


def goodput(
    task: Annotated[str, typer.Argument(help="Only of this task.")] = "",
    since: Annotated[str, typer.Option(metavar="SPAN", help="How far back, such as 36h, 7d or 3w.")] = "7d",
    failures: Annotated[bool, typer.Option("--failures", help="Show each failure and slowdown by itself.")] = False,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print CSV: a line a task, cause and node, or failure.")
    ] = False,
    nats: Nats = None,
    as_json: Json = False,
) -> None:
    """Show what the GPU time of tasks went into: training, and what failures cost by phase, cause and node."""
    if as_csv and as_json:
        raise typer.BadParameter("--csv and --json are two forms of the same: use one of them")
    began = time.time() - span_s(since)
    accounts, until = with_client(nats, lambda client: _read(client, began)), time.time()
    report = accounts.report(until, task or None)
    if task and report.row(task) is None:
        raise UnicronError(f"the journal has nothing of a task {task!r}; `unicron goodput` shows all that it has")
    costs = dearest(accounts.costs(until), began, task) if failures else []
    if as_json:
        print_json(costs if failures else report)
    elif as_csv:
        say(to_csv([each.record() for each in costs] if failures else report.records()), nl=False)
    else:
        console().print(view_of(costs) if failures else view(report))


def span_s(text: str) -> float:
    """Return the seconds that a span such as 7d is.

    Raises:
        typer.BadParameter: it is none.
    """
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)([smhdw])", text)
    if not found:
        raise typer.BadParameter(f"--since {text!r}: a number and s, m, h, d or w is expected, such as 36h or 7d")
    return float(found[1]) * UNITS_S[found[2]]


def dearest(costs: list[ChainCost], since: float, task: str = "") -> list[ChainCost]:
    """Return failures and slowdowns that were, or cost something, since a time in Unix seconds, the dearest first."""
    found = [each for each in costs if each.detected_at is not None and task in {"", *each.tasks}]
    found = [each for each in found if each.whole_s or each.begun >= since]
    return sorted(found, key=lambda each: -each.whole_s)


async def _read(client: Client, since: float) -> Goodput:
    accounts = Goodput(since)
    async for _, message in client.follow(0, await client.tail()):
        accounts.handle(message)
    return accounts


def to_csv(records: list[dict[str, Any]]) -> str:
    """Return rows as CSV: seconds, and shares from 0 to 1."""
    out = io.StringIO()
    if records:
        writer = csv.DictWriter(out, list(records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
    return out.getvalue()


def view(report: Report) -> Group:
    """Return a report as tables for a person."""
    shown: list[RenderableType] = []
    for title, rows in (("TASK", report.tasks), ("CAUSE", report.causes[:ROWS]), ("NODE", report.nodes[:ROWS])):
        shown += [_table(title, rows), Text()] if rows else []
    return Group(*shown, *(Text(line, "dim") for line in _notes(report)))


def _table(title: str, rows: Sequence[CostRow]) -> Table:
    """Return a row each, with the phases that any of them has."""
    used = [phase for phase in Phase if any(row.seconds[phase] for row in rows)]
    heads = ["GPU TIME", "GOODPUT", "TRAINED"] if title == "TASK" else ["COST"]
    table = plain_table(title, "FAILURES", *heads, *(phase.replace("_", "-").upper() for phase in used))
    for row in rows:
        shares = []
        if isinstance(row, TaskRow):
            most = "≤ " if row.at_most else ""
            shares = [f"{most}{percent(each)}" for each in (row.goodput, row.effective_time)]
        if not row.name:
            shares = [""] * len(shares)
        times = [span(row.seconds[phase]) if row.seconds[phase] else "" for phase in used]
        table.add_row(Text(row.name or NO_TASK), str(row.failures), span(row.total_s), *shares, *times)
    return table


def view_of(costs: list[ChainCost]) -> Group:
    """Return what failures cost as a table for a person; `unicron events --chain` shows what happened in one."""
    heads = ("FAILURE", "NODE", "TASKS", "AT", "HEALED IN", "COST", "CHAIN", "MOST OF IT")
    table = FittingTable(heads, goes=("TASKS", "NODE"))
    for cost in costs[:ROWS]:
        at = time.strftime("%m-%d %H:%M:%S", time.localtime(cost.begun))
        phase = max(cost.seconds, key=lambda each: cost.seconds[each])
        most = f"{phase.replace('_', '-')} {span(cost.seconds[phase])}" if cost.whole_s else ""
        names = Text(cost.what), Text(cost.node), Text(" ".join(cost.tasks))
        table.add_row(*names, at, _healed(cost), span(cost.whole_s), Text(cost.chain), most)
    notes = [f"failures and slowdowns: {len(costs)}; costs are GPU time; --csv has all phases"]
    notes += [f"only the {ROWS} dearest are shown; --csv has all"] if len(costs) > ROWS else []
    return Group(table, Text(), *(Text(line, "dim") for line in notes))


def _healed(cost: ChainCost) -> str:
    """Return how long healing took, or why there is none to tell of: a slowdown only passes, and a task may end."""
    if cost.recovered_at is None:
        return "not yet"
    took = span(cost.recovered_at - cost.begun)
    return f"slow for {took}" if cost.what == SLOWDOWN else cost.ended or took


def _notes(report: Report) -> list[str]:
    total, whole = sum(row.total_s for row in report.tasks), sum(row.whole_s for row in report.tasks)
    sums = f"all phases add up to {span(total)} of GPU time, wall time x slots are {span(whole)}"
    notes = [f"over {span(report.until - report.since)}; {sums}"]
    if report.nodes and report.nodes[0].total_s:
        cost = span(report.nodes[0].total_s)
        notes.append(f"{report.nodes[0].name} cost {cost} of GPU time, more than any other node")
    hidden = max(len(report.causes), len(report.nodes)) > ROWS
    notes += [f"only the {ROWS} dearest causes and nodes are shown; --csv has all"] if hidden else []
    return [*notes, *(f"estimated: {each}" for each in report.estimates)]
