"""The text of a notice: event, task or node, Unicron's reaction, and costs so far. Pure."""

from urllib.parse import quote

from unicron.contracts.failures import Severity
from unicron.contracts.notices import IncidentKind, Notice, Phase
from unicron.printable import one_line
from unicron_notifier.state import NotifiedIncident, TaskHit

LONGEST_LINE = 500
LONGEST_TITLE = 200
NAMED = 4
"""Names that a title gives; further ones are counted."""

CURES = {
    Severity.SEV1: "Unicron gives the node up; its tasks go on elsewhere, or with fewer workers.",
    Severity.SEV2: "Unicron starts the process again; the other workers go on meanwhile where they can.",
    Severity.SEV3: "Unicron has the ranks form a new group and try again; nothing is started anew.",
}

MEANT = {
    IncidentKind.TASK_FAILED: "Unicron does not start it again: mend it, then submit it anew.",
    IncidentKind.SLOW: "Unicron goes on, records what its workers do, and names the workers that slow it down.",
    IncidentKind.ALERT: "Nothing is done about it: a person should look.",
    IncidentKind.DEAD_LETTER: "Unicron has put the message aside and goes on without it.",
    IncidentKind.NOTIFIER: "Unicron goes on with the other channels: mend this one.",
}


def cut(text: str, most: int) -> str:
    """Return text from elsewhere as one line that steers nothing, of `most` characters."""
    line = " ".join(one_line(text[: 2 * most].replace("\n", " ")).split())
    return line if len(line) <= most else line[: most - 1] + "…"


def counted(count: int, what: str) -> str:
    """Return a number of things."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def names(found: list[str]) -> str:
    """Return names, of many the first."""
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return ", ".join(found[:NAMED]) + more


def lasted(seconds: float) -> str:
    """Return a duration for a person."""
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def title(incident: NotifiedIncident) -> str:
    """Return what happened, in one line."""
    tasks, nodes = names(incident.tasks), names(incident.nodes)
    match incident.kind:
        case IncidentKind.NODE_LOST:
            hit = f": {counted(incident.workers, 'worker')} of {counted(len(incident.hits), 'task')} ({tasks})"
            text = f"{nodes} is lost{hit if incident.hits else ', and no task had workers there'}"
        case IncidentKind.FAILURE:
            victim = incident.worker or tasks or nodes
            where = f" on {nodes}" if nodes and victim != nodes else ""
            text = f"{victim}{where} failed: {incident.status}, severity {incident.severity}"
        case IncidentKind.TASK_FAILED:
            text = f"{tasks} has failed: {incident.reason}"
        case IncidentKind.SLOW:
            text = f"{tasks} is slow: {incident.reason}"
        case _:
            text = incident.reason
    return cut(text, LONGEST_TITLE)


def _hit(task: str, hit: TaskHit) -> str:
    had = f" (had {counted(hit.full, 'worker')})" if hit.full else ""
    return f"{task}{had}: " + "; ".join(filter(None, (hit.now or "is stopped", hit.plan)))


def _cost(incident: NotifiedIncident, at: float) -> list[str]:
    lost, so_far = incident.lost_by(at), "" if incident.ended else " so far"
    return [f"Cost{so_far}: about {lasted(lost)} of one worker's time" if lost < 60 else _long(lost, so_far)] * (
        lost > 0
    )


def _long(lost: float, so_far: str) -> str:
    return f"Cost{so_far}: about {lost / 3600:.2f} worker-hours"


def lines(incident: NotifiedIncident, phase: Phase, at: float) -> list[str]:
    """Return what is known of an incident at `at`, in Unix seconds, line by line."""
    found = []
    if phase is Phase.OVER:
        found.append(f"Over after {lasted(incident.ended - incident.began)}.")
    elif phase is Phase.ACKNOWLEDGED:
        found.append(f"{incident.by} sees to it.")
    elif phase is Phase.ESCALATED:
        found.append(f"Nobody has acknowledged it for {lasted(at - incident.began)}.")
    if incident.reason and incident.kind in {IncidentKind.NODE_LOST, IncidentKind.FAILURE}:
        found.append(f"Why: {incident.reason}")
    found += [_hit(task, hit) for task, hit in incident.hits.items()]
    if phase is not Phase.OVER:
        found.append(MEANT.get(incident.kind) or CURES[Severity(incident.severity)])
    if phase is Phase.OVER and incident.out:
        found.append(f"{names(incident.out)} is not back yet: somebody should see why.")
    found += incident.lines
    if incident.again:
        found.append(f"The same again: {incident.again} more.")
    found += _cost(incident, at)
    if incident.away and phase is not Phase.OVER:
        found.append(f"Over when {names(incident.away)} is back.")
    if phase in {Phase.OPENED, Phase.UPDATED, Phase.ESCALATED} and not incident.by:
        found.append(f"To say that you see to it: unicron notify ack {incident.id} --by YOUR-NAME")
    return [cut(line, LONGEST_LINE) for line in found]


def notice(incident: NotifiedIncident, channel: str, phase: Phase, at: float, link: str) -> Notice:
    """Return what a channel is to say of an incident as it stands at `at`, in Unix seconds."""
    return Notice(
        id=f"{incident.id}.{incident.version}.{channel}",
        channel=channel,
        phase=phase,
        incident=incident.id,
        chain=incident.chain,
        kind=incident.kind,
        label=incident.label,
        severity=incident.severity,
        first_severity=incident.first,
        title=title(incident),
        lines=lines(incident, phase, at),
        tasks=incident.tasks,
        nodes=incident.nodes,
        workers=incident.workers,
        began=incident.began,
        decided=at,
        ended=incident.ended,
        lost_worker_s=incident.lost_by(at),
        by=incident.by,
        link=f"{link.rstrip('/')}/failures/{quote(incident.chain, safe='')}" if link else "",
    )


def summary(incidents: list[NotifiedIncident], channel: str, why: str, number: int, at: float, link: str) -> Notice:
    """Return what a channel is to say of all incidents that were held back from it."""
    worst = min(each.severity for each in incidents)
    over = sum(1 for each in incidents if each.ended)
    still = [each for each in incidents if not each.ended and not each.notice]
    found = [
        f"{counted(len(incidents), 'message')} held back: {counted(over, 'incident')} over, {len(still)} going on."
    ]
    for each in sorted(incidents, key=lambda each: (bool(each.ended), each.severity, each.began)):
        state = f"over after {lasted(each.ended - each.began)}" if each.ended else "going on" * (not each.notice)
        found.append(cut(f"{title(each)}{f' ({state})' if state else ''} [{each.id}]", LONGEST_LINE))
    return Notice(
        id=f"summary.{number}.{channel}",
        channel=channel,
        phase=Phase.SUMMARY,
        incident=f"summary-{number}",
        chain=incidents[0].chain,
        kind=min((each.kind for each in incidents), key=list(IncidentKind).index),
        label=IncidentKind.ALERT,
        severity=worst,
        first_severity=worst,
        title=f"{counted(len(incidents), 'message')} held back {why}",
        lines=found,
        began=min(each.began for each in incidents),
        decided=at,
        link=link,
    )
