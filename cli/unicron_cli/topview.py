"""The view of a cluster at a glance, in a terminal of any size. Pure."""

import time
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from unicron.contracts.tasks import NodeState
from unicron.observe.words.units import KNOWN_FLOPS, ago, percent, si
from unicron.printable import one_line
from unicron_cli.glance import EventGlance, FailureGlance, Glance, TaskGlance
from unicron_cli.views import NODE_STYLES, TASK_STYLES

_STATES = (NodeState.LOST, NodeState.DRAINING, NodeState.UP, NodeState.LEFT)

WIDE = 110
"""Columns from which on there is room for what is only nice to have."""

GAP, LEAST_NAME = 2, 8
"""Columns between two columns of a table, and of the name of a task."""

LEAST_BAR = 5
"""Columns of a bar that says anything."""

_SEVERITY_STYLES = {1: "bold red", 2: "yellow", 3: "dim"}


def top_view(glance: Glance, width: int, height: int) -> Group:
    """Return a cluster at a glance, in `height` lines of `width` columns at most."""
    head = _head(glance, width)
    names, squares = _squares(glance.nodes, width, max(1, height // 5))
    wanted = [1 + len(part) for part in (glance.tasks, glance.failures, glance.events)]
    tasks, failures, events = _deal_lines(wanted, height - len(head) - 1 - len(squares))
    parts = [
        *head,
        names,
        *squares,
        *(_tasks(glance.tasks, width, tasks) if tasks else []),
        *(_failures(glance.failures[: failures - 1], glance.at, width) if failures else []),
        *(_events(glance.events[: events - 1], width) if events else []),
    ]
    return Group(*parts)


def _deal_lines(wanted: Sequence[int], lines: int) -> list[int]:
    """Deal lines out, one after the other, to those that want more; a part of one line would be a heading alone."""
    given = [0] * len(wanted)
    while lines > 0 and given != list(wanted):
        for part, most in enumerate(wanted):
            if given[part] < most and lines > 0:
                given[part], lines = given[part] + 1, lines - 1
    return [0 if lines == 1 else lines for lines in given]


def _text(text: str, style: str = "") -> Text:
    """Return one line of text from elsewhere."""
    return Text(one_line(text).replace("\t", " "), style, no_wrap=True, overflow="ellipsis")


def _head(glance: Glance, width: int) -> list[RenderableType]:
    clock = time.strftime("%H:%M:%S", time.localtime(glance.at))
    tasks = f"{len(glance.tasks):,} task{'s' * (len(glance.tasks) != 1)}"
    head = _text(f"unicron {clock}  {tasks}, {glance.slots:,} slots, {glance.spare:,} spare", "bold")
    lines: list[RenderableType] = [head, _waf(glance, width)]
    return [*lines, _text(glance.error, "bold red")] if glance.error else lines


def _waf(glance: Glance, width: int) -> RenderableType:
    planned = glance.planned_waf
    if planned is None:
        return _text("WAF: no plan yet", "dim")
    if planned < KNOWN_FLOPS:
        return _text("WAF: nothing is known of the tasks' FLOP/s", "dim")
    share = glance.waf / planned
    text = f"WAF {si(glance.waf, 'FLOP/s')} of {si(planned, 'FLOP/s')} planned, {percent(share)}"
    room = min(40, width - len(text) - 2)
    if room < LEAST_BAR:
        return _text(text)
    line = Table.grid(padding=(0, 1))
    line.add_row(Text(text), ProgressBar(1.0, min(1.0, share), width=room))
    return line


def _squares(nodes: dict[str, int], width: int, rows: int) -> tuple[Text, list[RenderableType]]:
    """Return how many nodes are in each state, and a square for each of them, or for each so many."""
    states = [(state, nodes[state]) for state in _STATES if nodes.get(state)]
    each = 1
    while sum(-(-count // each) for _, count in states) > width * rows:
        each *= 2
    squares = Text(no_wrap=False, overflow="fold")
    for state, count in states:
        squares.append("■" * -(-count // each), NODE_STYLES[state])
    names = Text("NODES ", "bold", no_wrap=True, overflow="ellipsis")
    for state, count in states:
        names.append(f" {count:,} {state}", NODE_STYLES[state])
    names.append(f"  (■ is {each} nodes)" if each > 1 else "", "dim")
    return names, [squares[start : start + width] for start in range(0, len(squares), width)]


def _tasks(tasks: list[TaskGlance], width: int, lines: int) -> list[RenderableType]:
    """Return as many tasks as there is room for, and how many more there are."""
    shown = tasks if len(tasks) < lines else tasks[: max(1, lines - 2)]
    rows = [_cells(task, bar=30 if width >= WIDE else 12) for task in shown]
    widths = {name: max(len(name), *(_wide(row[name]) for row in rows)) for name in _COLUMNS}
    longest = max(LEAST_NAME, min(max(cell_len(task.task) for task in shown), width // 2))
    names = list(_COLUMNS)
    for name in _GOES:
        if longest + sum(widths[name] + GAP for name in names) <= width:
            break
        names.remove(name)
    table = _plain(width, TASK=1, **dict.fromkeys(names))
    table.columns[0].min_width = LEAST_NAME
    room = max(LEAST_NAME, width - sum(widths[name] + GAP for name in names))
    for task, cells in zip(shown, rows, strict=True):
        table.add_row(_text(_short(task.task, room)), *(cells[name] for name in names))
    more = len(tasks) - len(shown)
    return [table, Text(f"and {more:,} more tasks", "dim")] if more and lines > 2 else [table]


_COLUMNS = ("STATE", "WORKERS", "PROGRESS", "ITERATION", "LOSS", "SECONDS", "GOODPUT", "WAF")
"""The columns of a task beside its name."""

_GOES = ("WAF", "ITERATION", "SECONDS", "GOODPUT", "LOSS", "PROGRESS", "WORKERS")
"""Those that are left out where there is no room for all, the first one first."""


def _wide(cell: RenderableType) -> int:
    """Return how many columns a cell takes."""
    if isinstance(cell, ProgressBar):
        return cell.width or 0
    return cell.cell_len if isinstance(cell, Text) else cell_len(str(cell))


def _short(name: str, width: int) -> str:
    """Return a name that is too long without its middle: what tells names apart is at their ends."""
    plain = one_line(name)
    if cell_len(plain) <= width:
        return plain
    head = width // 2
    return f"{plain[: head - 1]}…{plain[len(plain) - (width - head) :]}"


def _cells(task: TaskGlance, bar: int) -> dict[str, RenderableType]:
    of = f"/{task.iterations:,}" if task.iterations else ""
    count = f"{task.iteration:,}{of}" if task.iteration or of else ""  # not every program tells how far it is
    return {
        "STATE": Text(task.state, TASK_STYLES.get(task.state, "yellow")),
        "WORKERS": str(task.workers),
        "PROGRESS": ProgressBar(1.0, task.iteration / task.iterations, width=bar) if task.iterations else Text(count),
        "ITERATION": count,
        "LOSS": "" if task.loss is None else f"{task.loss:.4g}",
        "SECONDS": f"{task.iteration_s:.3g}" if task.iteration_s else "",
        "GOODPUT": "" if task.goodput is None else percent(task.goodput),
        "WAF": si(task.waf, "FLOP/s") if task.waf >= KNOWN_FLOPS else "",
    }


def _failures(failures: Sequence[FailureGlance], now: float, width: int) -> list[RenderableType]:
    ratio = {"FAILURE": 6, "OUTCOME": 5} if width >= WIDE else {"FAILURE": 2, "OUTCOME": 1}
    table = _plain(width, SEV=None, AGO=None, **ratio)
    for failure in failures:
        table.add_row(
            Text(f"{failure.severity}", _SEVERITY_STYLES[failure.severity]),
            ago(now - failure.at),
            _text(failure.what),
            _text(failure.outcome, "yellow" if failure.open else "green"),
        )
    return [table]


def _events(events: Sequence[EventGlance], width: int) -> list[RenderableType]:
    table = _plain(width, TIME=None, SOURCE=None, EVENT=1)
    table.columns[1].max_width = 12
    for event in events:
        clock = time.strftime("%H:%M:%S", time.localtime(event.at))
        table.add_row(Text(clock, "dim"), _text(event.source, "dim"), _text(event.text))
    return [table]


def _plain(width: int, **columns: int | None) -> Table:
    """Return a table of which no row is more than a line, with the shares of what is left that its columns get."""
    table = Table(box=None, pad_edge=False, expand=True, width=width, header_style="bold")
    for name, ratio in columns.items():
        table.add_column(name, ratio=ratio, no_wrap=True, overflow="ellipsis")
    return table
