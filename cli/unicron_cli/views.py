"""The tables of a cluster: nodes and tasks."""

import re
import time
from collections import defaultdict

from rich.console import Group
from rich.table import Table
from rich.text import Text

from unicron.contracts.answers import NodeView, SaverView, Status, TaskView
from unicron.contracts.tasks import UNCOUNTED, NodeState, Slot, TaskState
from unicron.healing import shown_shape
from unicron.observe.accounts.eta import time_left
from unicron.observe.words.ranks import RankNames
from unicron.observe.words.units import KNOWN_FLOPS, ago, expected, si, span
from unicron_cli.fitting import FittingTable

NODE_STYLES = {NodeState.UP: "green", NodeState.DRAINING: "yellow", NodeState.LOST: "red", NodeState.LEFT: "dim"}
TASK_STYLES = {
    TaskState.WAITING: "dim",
    TaskState.RUNNING: "green",
    TaskState.FINISHED: "blue",
    TaskState.FAILED: "red",
    TaskState.REMOVED: "dim",
}

OBSERVING = "observe only: this cluster obeys its users and says what it would do by itself, but does nothing of that"


def nodes_table(status: Status, now: float | None = None) -> FittingTable:
    """Return the nodes, with the tasks that compute on each of their slots."""
    now = time.time() if now is None else now
    used: dict[str, dict[int, str]] = defaultdict(dict)
    for view in status.tasks:
        layout = shown_shape(view.spec, len(view.members))
        for rank, member in enumerate(view.members):
            place = layout.place_name(rank)
            used[member.node][member.slot] = f"{view.spec.name}:{rank}" + (f"({place})" if place else "")
    known = [field for field in ("rack", "domain") if any(getattr(node, field) for node in status.nodes)]
    heads = ("NODE", "STATE", "FOR", "HOST", *map(str.upper, known), "SLOTS")
    table = FittingTable(heads, goes=("HOST", "DOMAIN", "RACK", "FOR"))
    for node in sorted(status.nodes, key=lambda node: _natural(node.node)):
        slots = _slots(node, used[node.node])
        state, where = Text(node.state, NODE_STYLES[node.state]), [Text(getattr(node, field)) for field in known]
        table.add_row(Text(node.node), state, ago(now - node.since), Text(node.host), *where, Text(slots))
    return table


def _slots(node: NodeView, used: dict[int, str]) -> str:
    """Return what computes on each slot of a node; a kind of several words stands once, in front."""
    slots = _in_use(node)
    kind = slots[0].kind if slots and " " in slots[0].kind else ""
    each = (f"{'' if kind else slot.kind}{slot.index}={used.get(slot.index, 'free')}" for slot in slots)
    return f"{kind}: {' '.join(each)}" if kind else " ".join(each)


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Return a key by which node-2 comes before node-10."""
    return [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in re.split(r"(\d+)", name)]


def tasks_table(status: Status) -> FittingTable:
    """Return the tasks with their progress."""
    figures = ("WEIGHT", "WORKERS", "ITERATION", "LOSS", "SECONDS", "LEFT", "WAF")
    goes = ("WEIGHT", "WAF", "SECONDS", "SAVED", "LOSS", "LEFT")
    table = FittingTable(("TASK", "STATE", *figures, "SAVED", "REASON"), goes)
    names = RankNames.of(status.tasks)
    for view in status.tasks:
        spec = view.spec
        table.add_row(
            Text(spec.name),
            Text(view.state, TASK_STYLES.get(view.state, "yellow")),
            f"{spec.weight:g}",
            f"{_workers(view)} ({spec.min_workers}-{spec.max_workers})",
            *_progress(view),
            left(view),
            si(view.waf, "FLOP/s") if view.waf >= KNOWN_FLOPS else "",
            _saved(view, status),
            Text(names.explain(_reason(view))),
        )
    return table


def _progress(view: TaskView) -> tuple[str, str, str]:
    """Return iteration, loss and seconds, as far as they are known.

    A task that starts may go on from an earlier iteration; whose program counts may not tell how far it is.
    """
    counted = view.spec.iterations < UNCOUNTED
    if view.state is TaskState.STARTING or (view.iteration < 0 and not counted):
        return "", "", ""
    total = f"/{view.spec.iterations}" if counted else ""
    loss = "" if view.loss is None else f"{view.loss:.4f}"
    return f"{view.iteration + 1}{total}", loss, f"{view.iteration_s:.3f}" if view.iteration_s else ""


def left(view: TaskView) -> str:
    """Return how long a task still takes, if its iterations go on as the last ones; empty where that is not known."""
    found = time_left(view.spec, view.iteration, view.recent_s, {}) if view.state is TaskState.RUNNING else None
    return span(found.seconds) if found else ""


def _saved(view: TaskView, status: Status) -> Text:
    """Return on how many nodes each part of its state is saved in memory, in every iteration."""
    up = {node.node for node in status.nodes if _in_use(node)}
    if not view.savers or not view.members or view.state is TaskState.WAITING:  # then only the nodes know
        return Text()
    if any(saver.problem for saver in view.savers.values()):
        return Text("no", "red")
    layout = view.spec.shape(len(view.members))
    nodes: dict[int, set[str]] = {place: set() for place in range(layout.replica_workers)}
    for rank, member in enumerate(view.members[: layout.workers]):
        saver = view.savers.get(member.worker, SaverView())
        nodes[layout.seat(rank).place] |= up.intersection(saver.nodes)
    fewest = min(map(len, nodes.values()))
    return Text("1 node" if fewest == 1 else f"{fewest} nodes" if fewest else "no", "" if fewest > 1 else "yellow")


def status_view(status: Status, now: float | None = None) -> Group:
    """Return nodes, tasks and one line about the plan in force."""
    plan = status.plan
    lines = [
        f"plan {plan.number} after {plan.trigger}: {expected(plan)}, {plan.workers} slots" if plan else "no plan yet"
    ]
    waf = sum(view.waf for view in status.tasks)
    if waf >= KNOWN_FLOPS:
        lines.insert(0, f"WAF {si(waf, 'FLOP/s')} achieved by all tasks together")
    names = RankNames.of(status.tasks)
    slow = [
        Text(f"{view.spec.name} is slow: {names.explain(view.slow)}", "yellow") for view in status.tasks if view.slow
    ]
    slow += [Text(node.problem, "yellow") for node in status.nodes if node.problem and _in_use(node)]
    lost = [node.node for node in status.nodes if node.state is NodeState.LOST]
    verb = "wait" if len(lost) > 1 else "waits"
    cure = (
        "see to the machine, then start its agent anew (`unicron chaos restart-node` where `unicron up` did, "
        "`scontrol requeue` for a job of Slurm); one that still runs has to be stopped before"
    )
    slow += [Text(f"{', '.join(lost)} {verb} for you: {cure}", "yellow")] * bool(lost)
    failed = [view for view in status.tasks if view.state == TaskState.FAILED and view.traceback]
    slow += [
        Text(f"{view.spec.name} failed: {_last_line(view)} (all of it: `unicron task show {view.spec.name}`)", "red")
        for view in failed
    ]
    slow += [
        Text(f"{view.spec.name} in its drill: {view.drill}")
        for view in status.tasks
        if view.drill and not view.state.ended and view.state is not TaskState.STARTING  # another may follow
    ]
    if status.observe_only:
        slow.insert(0, Text(OBSERVING, "bold yellow"))
    slow += [
        Text(f"{view.spec.name}: {names.explain(view.withheld)}", "yellow") for view in status.tasks if view.withheld
    ]
    notes = [*slow, Text(), Text("; ".join(lines), "dim")]
    return Group(nodes_table(status, now), Text(), tasks_table(status), *notes)


def plain_table(*columns: str) -> Table:
    """Return an empty table without lines."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column)
    return table


def _workers(view: TaskView) -> str:
    """Return how many compute: 6, or 3x2 where that is three replicas of two."""
    each = shown_shape(view.spec, len(view.members)).replica_workers
    return str(len(view.members)) if each == 1 else f"{len(view.members) // each}x{each}"


def _in_use(node: NodeView) -> list[Slot]:
    return node.slots if node.state in {NodeState.UP, NodeState.DRAINING} else []


def _last_line(view: TaskView) -> str:
    return view.traceback.strip().rpartition("\n")[2]


def _reason(view: TaskView) -> str:
    if view.state == TaskState.FAILED and view.traceback:
        return view.reason or _last_line(view)
    unprotected = next(
        (f"{name} can't be saved: {each.problem}" for name, each in view.savers.items() if each.problem), ""
    )
    return unprotected or view.reason
