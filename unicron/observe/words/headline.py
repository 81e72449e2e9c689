"""What a chain is about, in one line: what went wrong or was ordered, and how it ended."""

from collections import Counter

from unicron.contracts.base import Message
from unicron.contracts.events import FailureDetected, TaskBroken, TaskRecovered, TaskRemoved, TaskStateChanged
from unicron.contracts.tasks import TaskState
from unicron.observe.words.story import LONGEST, describe, short

ENDS = (TaskStateChanged, TaskRecovered, TaskBroken, TaskRemoved)
"""What a chain's end is told by."""


NAMED = 2
"""Tasks that are named; of more it is told how many are where."""


def headline(messages: list[Message]) -> str:
    """Return what a chain is about, in one line.

    Args:
        messages: of one chain in their order, at least one; those after the first that are neither failures nor `ENDS`
            may be left out.
    """
    end = outcome(messages)
    if not end:
        return about(messages)
    return short(f"{short(about(messages), max(LONGEST // 2, LONGEST - len(end) - 2))}: {end}")


def about(messages: list[Message]) -> str:
    """Return what began a chain: its first failure in short, or else its first message."""
    first = _first(messages)
    return _failed(first) if isinstance(first, FailureDetected) else describe(first)


def _first(messages: list[Message]) -> Message:
    return next((message for message in messages if isinstance(message, FailureDetected)), messages[0])


def _failed(failure: FailureDetected) -> str:
    """Return whom a failure hit, and why; what the detector says after the first semicolon is evidence."""
    who = failure.worker or failure.task or failure.node
    where = f"{who} on {failure.node}" if failure.node not in {"", who} else who
    what = failure.reason.partition("; ")[0] or failure.status
    return short(f"{where}{what.removeprefix(who)}" if what.startswith(f"{who} ") else f"{where}: {what}")


def outcome(messages: list[Message]) -> str:
    """Return how the tasks of a chain stand by it: back, still on their way, or ended; empty where it moved none.

    The task is not named where it is the only one, and what began the chain was about it.
    """
    ends: dict[str, tuple[str, str]] = {}
    for message in messages:
        match message:
            case TaskRecovered(task=task, workers=workers, seconds=seconds):
                ends[task] = "back", f" at {workers} worker{'s' * (workers != 1)} after {seconds:.2f} s"
            case TaskBroken(task=task):
                ends[task] = "broken", " by its own program"
            case TaskRemoved(task=task):
                ends[task] = "removed", ""
            case TaskStateChanged(task=task, state=state) if not (state is TaskState.RUNNING and task in ends):
                ends[task] = str(state), ""
    if list(ends) == [getattr(_first(messages), "task", "")]:
        return "".join(*ends.values())
    if len(ends) > NAMED:
        counts = Counter(end for end, _ in ends.values()).most_common()
        return f"{len(ends)} tasks: {', '.join(f'{count} {end}' for end, count in counts)}"
    return ", ".join(f"{task} {end}{more}" for task, (end, more) in ends.items())
