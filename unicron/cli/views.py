"""What rich shows of a cluster: nodes, tasks and plans."""

import time
from collections import defaultdict

from rich.console import Group
from rich.table import Table
from rich.text import Text

from unicron.contracts.queries import NodeView, PlanView, Status, TaskView
from unicron.contracts.tasks import NodeState, Slot, TaskState

_NODE_STYLES = {NodeState.UP: "green", NodeState.DRAINING: "yellow", NodeState.LOST: "red", NodeState.LEFT: "dim"}
_TASK_STYLES = {
    TaskState.WAITING: "dim",
    TaskState.RUNNING: "green",
    TaskState.FINISHED: "blue",
    TaskState.FAILED: "red",
    TaskState.REMOVED: "dim",
}
_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def si(number: float, unit: str) -> str:
    """Return `number` with the prefix that leaves one to three digits before the point."""
    step = 0
    while abs(number) >= 999.5 and step < len(_PREFIXES) - 1:
        number, step = number / 1000, step + 1
    return f"{number:.3g} {_PREFIXES[step]}{unit}"


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
    table = _table("NODE", "STATE", "FOR", "HOST", "SLOTS")
    for node in status.nodes:
        slots = " ".join(f"{slot.kind}{slot.index}={used[node.node].get(slot.index, 'free')}" for slot in _in_use(node))
        state = Text(node.state, _NODE_STYLES[node.state])
        table.add_row(Text(node.node), state, ago(now - node.since), Text(node.host), Text(slots))
    return table


def tasks_table(status: Status) -> Table:
    """Return the tasks with their progress."""
    table = _table("TASK", "STATE", "WEIGHT", "WORKERS", "ITERATION", "LOSS", "SECONDS", "WAF", "REASON")
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
            si(view.waf, "FLOP/s") if view.waf else "",
            Text(_reason(view)),
        )
    return table


def status_view(status: Status, now: float | None = None) -> Group:
    """Return nodes, tasks and one line about the plan in force."""
    plan = status.plan
    line = "no plan yet"
    if plan is not None:
        line = f"plan {plan.number} after {plan.trigger}: {si(plan.waf, 'FLOP/s')} expected on {plan.workers} slots"
    waf = sum(view.waf for view in status.tasks)
    total = f"WAF {si(waf, 'FLOP/s')} achieved by all tasks together; {line}"
    failed = [view for view in status.tasks if view.state == TaskState.FAILED and view.traceback]
    traces = [Text(f"\n{view.spec.name} failed:\n{view.traceback.rstrip()}", "red") for view in failed]
    return Group(nodes_table(status, now), Text(), tasks_table(status), *traces, Text(), Text(total, "dim"))


def plan_view(view: PlanView) -> Group:
    """Return the plan in force and what the planner will do after each next event."""
    if view.plan is None:
        return Group(Text("no plan yet: no task was submitted"))
    plan = view.plan
    head = f"plan {plan.number}, after {plan.trigger}" + (", from the lookup table" if plan.prepared else "")
    reward = f"expected WAF {si(plan.waf, 'FLOP/s')} on {plan.workers} slots, reward {si(plan.reward, 'FLOP')}"
    if plan.runner_up_reward is not None:
        reward += f", {si(plan.reward - plan.runner_up_reward, 'FLOP')} above the runner-up"
    shares = _table("TASK", "WORKERS", "BEFORE", "WAF", "WHERE")
    for share in plan.shares:
        where = " ".join(map(str, share.slots)) or share.reason
        shares.add_row(Text(share.task), str(len(share.slots)), str(share.before), si(share.waf, "FLOP/s"), Text(where))
    table = _table("IF NEXT", "SLOTS", "THEN WORKERS", "REWARD")
    for row in view.table:
        sizes = " ".join(f"{task}={size}" for task, size in row.sizes.items())
        table.add_row(Text(row.event), str(row.workers), Text(sizes), si(row.reward, "FLOP"))
    return Group(Text(head, "bold"), Text(reward), Text(), shares, Text(), table)


def _table(*columns: str) -> Table:
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
