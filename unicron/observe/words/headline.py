"""A chain in one line: what went wrong or was ordered, and how it ended."""

from collections import Counter

from unicron.contracts.base import Message
from unicron.contracts.events import FailureDetected
from unicron.observe.incidents import NONE, Incident, TaskOutcome, shown_at
from unicron.observe.words.story import LONGEST, describe, short

NAMED = 2
"""Tasks that are named; more are counted by how they stand."""


def headline(messages: list[Message]) -> str:
    """Return what a chain is about, in one line.

    Args:
        messages: of one chain in their order, at least one; those after the first that are neither failures nor
            outcomes of tasks may be left out.
    """
    incident = Incident(cause=NONE, begun=shown_at(messages[0]))
    for message in messages:
        if isinstance(message, TaskOutcome):
            incident.record(message, message.at)
    return headline_of(incident, next((each for each in messages if isinstance(each, FailureDetected)), messages[0]))


def headline_of(incident: Incident, first: Message) -> str:
    """Return what an incident is about that began with a failure or, without one, with another message."""
    end = outcome(incident, first)
    if not end:
        return about(first)
    return short(f"{short(about(first), max(LONGEST // 2, LONGEST - len(end) - 2))}: {end}")


def about(first: Message) -> str:
    """Return what began a chain; of a failure whom it hit, and why, as what follows a semicolon is evidence."""
    if not isinstance(first, FailureDetected):
        return describe(first)
    victim = first.worker or first.task or first.node
    where = f"{victim} on {first.node}" if first.node not in {"", victim} else victim
    what = first.reason.partition("; ")[0] or first.status
    return short(f"{where}{what.removeprefix(victim)}" if what.startswith(f"{victim} ") else f"{where}: {what}")


def outcome(incident: Incident, first: Message) -> str:
    """Return how the tasks of an incident stand by it: back, still on their way, or ended; empty where it moved none.

    The task is not named where it is the only one, and what began the incident was about it.
    """
    hits = {task: hit for task, hit in incident.tasks.items() if hit.state}
    if list(hits) == [getattr(first, "task", "")]:
        return "".join(_stands(incident, task) for task in hits)
    if len(hits) > NAMED:
        counts = Counter(hit.state for hit in hits.values()).most_common()
        return f"{len(hits)} tasks: {', '.join(f'{count} {state}' for state, count in counts)}"
    return ", ".join(f"{task} {_stands(incident, task)}" for task in hits)


def _stands(incident: Incident, task: str) -> str:
    hit, took_s = incident.tasks[task], incident.took_s(task)
    match hit.state:
        case "back" if took_s is not None:
            return f"back at {hit.workers} worker{'s' * (hit.workers != 1)} after {took_s:.2f} s"
        case "broken":
            return "broken by its own program"
        case _:
            return hit.state
