"""What `unicron task show` says of a task, or of two of them side by side. Pure."""

import time
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from unicron.contracts.answers import TaskView
from unicron.contracts.base import Record
from unicron.contracts.tasks import UNCOUNTED, TaskState
from unicron.observe.accounts.eta import TimeLeft, time_left
from unicron.observe.accounts.goodput import Goodput
from unicron.observe.cluster import ClusterPicture
from unicron.observe.words.configuration import configuration
from unicron.observe.words.headline import headline_of
from unicron.observe.words.units import percent, span
from unicron_cli.views import plain_table

FAILURES = 5
"""Failures of a task that are shown, the newest; `unicron goodput TASK --failures` has all."""

CAUSES = 4
"""Causes of lost time that are shown, the dearest."""


class FailureAccount(Record, kw_only=True, frozen=True):
    """A failure that hit a task, in one line; `chain` is what `unicron events --chain` shows all of."""

    at: float
    what: str
    chain: str


class TaskAccount(Record, kw_only=True, frozen=True):
    """A task: how far it is, what became of its time, and what it was begun with.

    Attributes:
        workers: that compute; it is allowed `least` to `most`.
        iteration: the last that it has finished, from 0; -1 before that.
        iterations: None where they are not counted.
        left: None where that can't be known, or it does not run.
        at_most: its goodput may be less, see `TaskRow`.
        seconds: slot-seconds since it was submitted, by phase.
        wall_s: seconds, by what the task as a whole did.
        causes: slot-seconds that were neither training nor idle, by what they were lost to, most first; "" is nothing's
            fault.
        struck: so many failures hit it; `failures` are the newest ones of them, newest first.
        configuration: pairs of a name and a text.
        traceback: of the program's own error, where that ended it.
    """

    task: str
    state: TaskState
    reason: str
    workers: int
    least: int
    most: int
    iteration: int
    iterations: int | None
    loss: float | None
    iteration_s: float
    left: TimeLeft | None
    goodput: float | None
    at_most: bool
    seconds: dict[str, float]
    wall_s: dict[str, float]
    causes: dict[str, float]
    struck: int
    failures: list[FailureAccount]
    configuration: list[tuple[str, str]]
    traceback: str = ""


def account(
    cluster: ClusterPicture, view: TaskView, now: float, goodput: Goodput, submitted: float = 0.0
) -> TaskAccount:
    """Return the account of a task.

    Args:
        cluster: as the journal has it.
        view: of the task, as the registry has it.
        now: Unix seconds.
        goodput: since it was submitted.
        submitted: Unix seconds; failures before that were another task's of its name.
    """
    spec, row = view.spec, goodput.report(now).row(view.spec.name)
    here = [each for each in cluster.failures.values() if spec.name in each.tasks and each.begun >= submitted]
    hit = here[: -FAILURES - 1 : -1]
    wall_s = _nonzero(row.wall_s) if row else {}
    runs = view.state is TaskState.RUNNING
    return TaskAccount(
        task=spec.name,
        state=view.state,
        reason=cluster.names.explain(view.reason),
        workers=len(view.members),
        least=spec.min_workers,
        most=spec.max_workers,
        iteration=view.iteration,
        iterations=spec.iterations if spec.iterations < UNCOUNTED else None,
        loss=view.loss,
        iteration_s=view.iteration_s,
        left=time_left(spec, view.iteration, view.recent_s, wall_s) if runs else None,
        goodput=row.goodput if row and row.total_s else None,
        at_most=row is not None and row.at_most,
        seconds=_nonzero(row.seconds) if row else {},
        wall_s=wall_s,
        causes=row.causes if row else {},
        struck=len(here),
        failures=[
            FailureAccount(
                at=each.first.at, what=cluster.names.explain(headline_of(each, each.first)), chain=each.cause.chain
            )
            for each in hit
        ],
        configuration=configuration(spec),
        traceback=view.traceback,
    )


def _nonzero(seconds: dict[str, float]) -> dict[str, float]:
    return {str(phase): part for phase, part in seconds.items() if part}


def view_of(accounts: Sequence[TaskAccount]) -> Group:
    """Return a task, or two of them side by side, for a person."""
    shown: list[RenderableType] = [_side_by_side([(each.task, dict(_progress(each))) for each in accounts])]
    for each in accounts:
        title = "failures" if len(accounts) == 1 else f"failures of {each.task}"
        shown += [Text(), Text(f"{title}, the newest first:", "bold"), *map(_line, each.failures)] * bool(each.failures)
    shown += [Text(f"\n{each.traceback.rstrip()}", "red") for each in accounts if each.traceback]
    options = [(each.task, dict(each.configuration)) for each in accounts]
    return Group(*shown, Text(), _side_by_side(options, mark=True))


def _line(failure: FailureAccount) -> Text:
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(failure.at))
    return Text(f"{clock}  {failure.what}  (chain {failure.chain})")


def _side_by_side(columns: Sequence[tuple[str, dict[str, str]]], *, mark: bool = False) -> RenderableType:
    """Return a table with a column a task; rows in which two differ are marked where that is wanted."""
    names = list(dict.fromkeys(name for _, rows in columns for name in rows))
    table = plain_table("", *(task for task, _ in columns))
    for name in names:
        texts = [rows.get(name, "") for _, rows in columns]
        differs = mark and len(set(texts)) > 1
        table.add_row(Text(f"{name} *" if differs else name, "yellow" if differs else "dim"), *map(Text, texts))
    return table


def _progress(task: TaskAccount) -> Iterator[tuple[str, str]]:
    yield "state", f"{task.state}: {task.reason}" if task.reason else str(task.state)
    yield "workers", f"{task.workers} ({task.least} to {task.most})"
    done = task.iteration + 1
    if task.iterations is None:
        yield "done", f"{done} iterations" if done else "not counted"
    else:
        yield "done", f"{done} of {task.iterations} iterations ({percent(done / task.iterations)})"
    if task.loss is not None:
        yield "loss", f"{task.loss:.6g}"
    if task.iteration_s:
        yield "an iteration", span(task.iteration_s)
    if task.left:
        least, most = span(task.left.least), span(task.left.most)
        slow = "with failures as so far" if task.struck else "at the pace of the slowest tenth"
        yield "left", f"{span(task.left.seconds)}: {least} at the pace of the fastest tenth, {most} {slow}"
    if task.goodput is not None:
        yield "goodput", f"{'at most ' * task.at_most}{percent(task.goodput)} of its GPU time was training"
        yield "wall time", ", ".join(f"{phase.replace('_', '-')} {span(part)}" for phase, part in task.wall_s.items())
    yield "failures", str(task.struck)
    if lost := [f"{cause} {span(part)}" for cause, part in task.causes.items() if cause]:
        yield "GPU time lost to", ", ".join(lost[:CAUSES])
