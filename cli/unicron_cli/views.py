"""What rich shows of a cluster: nodes and tasks."""

import time
from collections import defaultdict

from rich.console import Group
from rich.table import Table
from rich.text import Text

from unicron.contracts.plans import Plan
from unicron.contracts.queries import NodeView, Status, TaskView
from unicron.contracts.tasks import NodeState, Slot, TaskState

_NODE_STYLES = {NodeState.UP: "green", NodeState.DRAINING: "yellow", NodeState.LOST: "red", NodeState.LEFT: "dim"}
_TASK_STYLES = {
    TaskState.WAITING: "dim",
    TaskState.RUNNING: "green",
    TaskState.FINISHED: "blue",
    TaskState.FAILED: "red",
    TaskState.REMOVED: "dim",
}
_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")

KNOWN_FLOPS = 1e3
"""FLOP/s below which a number is none: where nothing is known of any task, a worker counts as 1 FLOP/s."""


def si(number: float, unit: str) -> str:
    """Return `number` with the prefix that leaves one to three digits before the point."""
    step = 0
    while abs(number) >= 999.5 and step < len(_PREFIXES) - 1:
        number, step = number / 1000, step + 1
    return f"{number:.3g} {_PREFIXES[step]}{unit}"


def percent(part: float) -> str:
    """Return a share of 1 in percent, with at least two digits where it is small."""
    return f"{100 * part:.0f} %" if abs(part) >= 0.095 else f"{100 * part:.2g} %"


def ago(seconds: float) -> str:
    """Return a duration in its largest unit."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def nodes_table(status: Status, now: float | None = None) -> Table:
    """Return the nodes, with the tasks that compute on each of their slots."""
    now = time.time() if now is None else now
    used: dict[str, dict[int, str]] = defaultdict(dict)
    for view in status.tasks:
        for rank, member in enumerate(view.members):
            used[member.node][member.slot] = f"{view.spec.name}:{rank}"
    table = plain_table("NODE", "STATE", "FOR", "HOST", "SLOTS")
    for node in status.nodes:
        slots = " ".join(f"{slot.kind}{slot.index}={used[node.node].get(slot.index, 'free')}" for slot in _in_use(node))
        state = Text(node.state, _NODE_STYLES[node.state])
        table.add_row(Text(node.node), state, ago(now - node.since), Text(node.host), Text(slots))
    return table


def tasks_table(status: Status) -> Table:
    """Return the tasks with their progress."""
    table = plain_table("TASK", "STATE", "WEIGHT", "WORKERS", "ITERATION", "LOSS", "SECONDS", "WAF", "REASON")
    for view in status.tasks:
        spec = view.spec
        table.add_row(
            Text(spec.name),
            Text(view.state, _TASK_STYLES.get(view.state, "yellow")),
            f"{spec.weight:g}",
            f"{len(view.members)} ({spec.min_workers}-{spec.max_workers})",
            f"{view.iteration + 1}/{spec.iterations}",
            "" if view.loss is None else f"{view.loss:.4f}",
            f"{view.iteration_s:.3f}" if view.iteration_s else "",
            si(view.waf, "FLOP/s") if view.waf >= KNOWN_FLOPS else "",
            Text(_reason(view)),
        )
    return table


def status_view(status: Status, now: float | None = None) -> Group:
    """Return nodes, tasks and one line about the plan in force."""
    plan = status.plan
    lines = [
        f"plan {plan.number} after {plan.trigger}: {expected(plan)}, {plan.workers} slots" if plan else "no plan yet"
    ]
    waf = sum(view.waf for view in status.tasks)
    if waf >= KNOWN_FLOPS:
        lines.insert(0, f"WAF {si(waf, 'FLOP/s')} achieved by all tasks together")
    failed = [view for view in status.tasks if view.state == TaskState.FAILED and view.traceback]
    traces = [Text(f"\n{view.spec.name} failed:\n{view.traceback.rstrip()}", "red") for view in failed]
    return Group(nodes_table(status, now), Text(), tasks_table(status), *traces, Text(), Text("; ".join(lines), "dim"))


def known(plan: Plan) -> bool:
    """Return whether the FLOP/s that the plan expects mean anything: nothing may be known of any task."""
    runs = any(share.slots or share.before for share in plan.shares)
    return not runs or max([plan.waf, *(share.waf_before for share in plan.shares)]) >= KNOWN_FLOPS


def expected(plan: Plan) -> str:
    """Return what the plan is expected to achieve, in a few words."""
    if not any(share.slots for share in plan.shares):
        return "no task runs"
    return f"{si(plan.waf, 'FLOP/s')} expected" if known(plan) else "nothing is known of the tasks' FLOP/s"


def plain_table(*columns: str) -> Table:
    """Return an empty table without lines."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column)
    return table


def _in_use(node: NodeView) -> list[Slot]:
    return node.slots if node.state in {NodeState.UP, NodeState.DRAINING} else []


def _reason(view: TaskView) -> str:
    if view.state == TaskState.FAILED and view.traceback:
        return view.reason or view.traceback.strip().rpartition("\n")[2]
    return view.reason
