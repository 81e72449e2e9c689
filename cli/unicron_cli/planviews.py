"""The tables of plans: the one in force, one that might be, the lookup table, and the curve of a task."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from rich.console import Group
from rich.table import Table
from rich.text import Text

from unicron.contracts.answers import Curve, CurvePoint, PlanView, TableRow
from unicron.contracts.plans import Plan, TaskShare
from unicron.contracts.tasks import SlotRef
from unicron.observe.words.explain import NO_PLAN, changes, explain, guesses
from unicron.observe.words.units import KNOWN_FLOPS, expected, has_known_flops, percent, si, span
from unicron_cli.views import plain_table

NAMED = 6
"""Nodes that a line names before it only counts them."""

BAR = 24
"""Columns of the longest bar of a curve."""

ROWS = 40
"""Sizes of a curve that are shown; --json has them all."""

SOURCES = {"measured": "green", "table": "cyan", "model": "yellow", "linear": "dim"}
"""The sources of T(t, x), best first, and the colours of their bars."""

_EIGHTHS = " ▏▎▍▌▋▊▉█"


def plan_view(view: PlanView) -> Group:
    """Return the plan in force: each task's slots, and the figures by which it was chosen."""
    if view.plan is None:
        return Group(Text(NO_PLAN))
    plan = view.plan
    head = Text(f"plan {plan.number}, after {plan.trigger}", "bold")
    return Group(head, _figures(view, plan), Text(), shares_table(plan))


def what_if_view(view: PlanView, in_force: Plan | None, condition: str) -> Group:
    """Return a plan that is not carried out, in words and beside the one in force.

    Args:
        view: the planner's answer.
        in_force: the plan in force.
        condition: what would have to happen, in words.
    """
    if view.plan is None:
        return Group(Text(NO_PLAN))
    head = Text(f"if {condition}: {view.plan.workers} healthy slots (only asked: nothing has changed)", "bold")
    said = [pair for pair in explain(view) if pair[0] != "what happened"]
    return Group(head, Text(), words(said), Text(), shares_table(view.plan, in_force))


def words(pairs: Iterable[tuple[str, str]]) -> Table:
    """Return what `explain` says."""
    table = Table.grid(padding=(0, 2))
    for label, text in pairs:
        table.add_row(Text(label, "bold"), Text(text))
    return table


def shares_table(plan: Plan, in_force: Plan | None = None) -> Table:
    """Return what each task gets; beside `in_force`, where that is given, which slots change hands."""
    last = ("STARTS ON", "LEAVES") if in_force else ("SLOTS",)
    table = plain_table("TASK", "WORKERS", "BEFORE", "WAF", "AGAINST BEFORE", *last)
    for column in table.columns[1:5]:
        column.justify = "right"
    now = {share.task: share.slots for share in in_force.shares} if in_force else {}
    money = has_known_flops(plan)
    for share in plan.shares:
        if in_force:
            held, slots = set(now.get(share.task, [])), set(share.slots)
            starts = [slot for slot in share.slots if slot not in held]
            there = [places(starts), places(sorted(held - slots))]
        else:
            there = [places(share.slots)]
        table.add_row(
            Text(share.task),
            str(len(share.slots)),
            str(share.before),
            si(share.waf, "FLOP/s") if money else "",
            _gain(share) if money else "",
            *map(Text, there if share.slots else [share.reason or "waits", *there[1:]]),
        )
    return table


def lookup_view(view: PlanView) -> Group:
    """Return the lookup table; nodes whose loss has the same answer share a line."""
    if view.plan is None:
        return Group(Text(NO_PLAN))
    held = {share.task: len(share.slots) for share in view.plan.shares}
    table = plain_table("IF NEXT", "SLOTS", "WORKERS", "EXPECTED")
    for column in (table.columns[1], table.columns[3]):
        column.justify = "right"
    kinds: dict[str, list[TableRow]] = {}
    for row in view.table:
        kinds.setdefault(row.trigger.kind, []).append(row)
    for rows in kinds.values():
        for names, row in _alike(rows):
            table.add_row(
                Text(names),
                str(row.workers),
                Text(changes(held, held | row.changes) or "no task changes"),
                si(row.waf, "FLOP/s") if has_known_flops(view.plan) else "",
            )
        table.add_section()
    made = f"; making it took {span(view.plan.refresh_s)}" if view.plan.refresh_s else ""
    head = f"what comes after plan {view.plan.number}: {len(view.table)} events foreseen{made}"
    return Group(Text(head, "bold"), Text(), table)


def curve_view(curve: Curve) -> Group:
    """Return T, F and FLOP/s per worker over x as bars, coloured by where they come from; ▶ marks the held size."""
    shown = thinned(curve)
    head = [
        f"{curve.task}: T(t, x) at {len(curve.points)} feasible sizes{f', holds {curve.held} ▶' * (curve.held > 0)}"
    ]
    if len(shown) < len(curve.points):
        head.append(f"{len(shown)} of them are shown; --json has all")
    if not worth(curve):
        head.append("nothing is known of its FLOP/s; give flops_per_iteration, throughput or model in the task file")
    if not curve.measures:
        head.append("what iterations take is not looked at, as workers share processors (UNICRON_USE_MEASURED=false)")
    return Group(Text("\n".join(head), "bold"), Text(), _bars(curve, shown))


def worth(curve: Curve) -> bool:
    """Return whether the curve is in FLOP/s; else only its shape means anything."""
    return max((point.flops for point in curve.points), default=0.0) >= KNOWN_FLOPS


def weighted(curve: Curve) -> bool:
    """Return whether F(t, x) is another curve than T(t, x)."""
    return any(point.waf not in {0.0, point.flops} for point in curve.points)


def _bars(curve: Curve, shown: Sequence[CurvePoint]) -> Table:
    unit, also_waf = "FLOP/s" if worth(curve) else "", weighted(curve)
    top = max((point.flops for point in shown), default=0.0)
    most = max((_each(point) for point in shown), default=0.0)
    table = plain_table("", "WORKERS", "T", "", *(["F"] if also_waf else []), "PER WORKER", "", "FROM", "")
    for column in table.columns:
        column.justify = "right" if column.header in {"WORKERS", "T", "F", "PER WORKER"} else "left"
        column.no_wrap = True
    for point in shown:
        colour = SOURCES.get(point.source, "")
        table.add_row(
            "▶" if point.workers == curve.held else "",
            str(point.workers),
            si(point.flops, unit).strip(),
            Text(bar(point.flops, top, BAR), colour),
            *([si(point.waf, unit).strip()] if also_waf else []),
            si(_each(point), unit).strip(),
            Text(bar(_each(point), most, BAR // 2), colour),
            Text(point.source + (f" ±{percent(point.spread)}" if point.spread else ""), colour),
            Text(point.text),
        )
    return table


def thinned(curve: Curve) -> list[CurvePoint]:
    """Return about `ROWS` points, evenly spread: the first, the last, the measured and the held ones among them."""
    points = curve.points
    if len(points) <= ROWS:
        return points
    evenly = {round(index * (len(points) - 1) / (ROWS - 1)) for index in range(ROWS)}
    return [
        point
        for index, point in enumerate(points)
        if index in evenly or point.workers == curve.held or point.source == "measured"
    ]


def bar(value: float, full: float, columns: int) -> str:
    """Return a bar whose length is `value` in parts of `full`, to an eighth of a column."""
    eighths = round(8 * columns * value / full) if full > 0 else 0
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def places(slots: Sequence[SlotRef]) -> str:
    """Return slots in rank order, shortened: "node-1:0-7 node-2:0,3"; many nodes are counted."""
    nodes = [(node, [slot.slot for slot in group]) for node, group in groupby(slots, key=lambda slot: slot.node)]
    texts = [f"{node}:{_ranges(numbers)}" for node, numbers in nodes[:NAMED]]
    return " ".join(texts) + (f" and {len(nodes) - NAMED} nodes more" if len(nodes) > NAMED else "")


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] + 1 == number:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _figures(view: PlanView, plan: Plan) -> Text:
    how = "from the lookup table" if plan.prepared else "computed when it was needed"
    took = f" in {span(plan.lookup_s)}" if plan.lookup_s else ""
    table = f"; making the table took {span(plan.refresh_s)}" if plan.refresh_s else ""
    lines = [f"{how}{took}{table}", f"{expected(plan)} on {plan.workers} slots"]
    if has_known_flops(plan) and view.runner_up is not None:
        lines[1] += f", {si(view.runner_up.waf, 'FLOP/s')} by the runner-up"
    lines.append(f"D_running {span(plan.running_s)}, D_transition {span(plan.transition_s)}")
    return Text("\n".join(filter(None, [*lines, guesses(view)])))


def _gain(share: TaskShare) -> Text:
    gain = share.waf - share.waf_before
    if not gain:
        return Text("0", "dim")
    part = f" ({'+' if gain > 0 else ''}{percent(gain / share.waf_before)})" if share.waf_before else ""
    return Text(f"{'+' if gain > 0 else ''}{si(gain, 'FLOP/s')}{part}", "green" if gain > 0 else "red")


def _alike(rows: Iterable[TableRow]) -> list[tuple[str, TableRow]]:
    """Return rows with the same answer as one, with all their events."""
    groups: dict[object, list[TableRow]] = {}
    for row in rows:
        answer = (row.workers, tuple(sorted(row.changes.items())), row.reward)
        groups.setdefault(answer, []).append(row)
    return [(_events(alike), alike[0]) for alike in groups.values()]


def _events(rows: Sequence[TableRow]) -> str:
    if len(rows) == 1:
        return rows[0].event
    whom = ", ".join(row.trigger.names for row in rows[:NAMED])
    more = f" and {len(rows) - NAMED} more" if len(rows) > NAMED else ""
    return f"{rows[0].trigger.kind}: {whom}{more}"


def _each(point: CurvePoint) -> float:
    return point.flops / point.workers if point.workers else 0.0
