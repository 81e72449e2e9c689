"""The bodies of webhooks: one notice in the format of each receiver. Pure.

Sources: Slack "Incoming webhooks" and "Formatting text"; Microsoft Teams "Adaptive Cards"; PagerDuty "Events API v2";
Alertmanager "API v2". What comes from the bus is data there: it can't be markup of theirs.
"""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from unicron.contracts.notices import Notice, Phase

MOST_CHARACTERS = 2800
"""Of a text in Slack, whose blocks take 3000, and in Teams."""

MOST_SUMMARY = 1024
"""Characters of a summary that PagerDuty takes."""

KEPT_S = 7 * 86400.0
"""Seconds after which Alertmanager takes an incident for over whose end it never heard; the journal keeps as long."""

NOTICE_S = 3600.0
"""Seconds for which Alertmanager shows what has no end."""

VERSION = 1
"""Of the generic form."""

PAGERDUTY = {1: "critical", 2: "error", 3: "warning"}
MARKS = {Phase.OVER: "OVER", Phase.ACKNOWLEDGED: "ACKNOWLEDGED", Phase.ESCALATED: "ESCALATED", Phase.TEST: "TEST"}


def heading(notice: Notice) -> str:
    """Return a notice's first line: what it is, how severe, and what happened."""
    mark = MARKS.get(notice.phase) or f"SEV{notice.severity}"
    return f"[{mark}] {notice.title}"


def text(notice: Notice) -> str:
    """Return a notice as plain text without its first line."""
    return "\n".join([*notice.lines, *([notice.link] if notice.link else [])])


def generic(notice: Notice, _: str) -> Any:
    """Return all fields of a notice."""
    return {"version": VERSION, **msgspec.to_builtins(notice)}


def slack(notice: Notice, _: str) -> Any:
    """Return a message for an incoming webhook of Slack: plain text, in which nothing is a link or a mention."""
    escaped = [_for_slack(part) for part in (heading(notice), _cut(text(notice)))]
    blocks = [
        {"type": "section", "text": {"type": "plain_text", "text": part, "emoji": False}} for part in escaped if part
    ]
    return {"text": escaped[0], "blocks": blocks, "unfurl_links": False, "unfurl_media": False}


def _for_slack(part: str) -> str:
    return part.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def teams(notice: Notice, _: str) -> Any:
    """Return a card for a workflow of Teams; in the runs of a rich text block nothing is Markdown or HTML."""
    parts = [(heading(notice), True), *((line, False) for line in _cut("\n".join(notice.lines)).split("\n") if line)]
    card: dict[str, Any] = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "body": [
            {
                "type": "RichTextBlock",
                "inlines": [{"type": "TextRun", "text": part, **({"weight": "Bolder"} if bold else {})}],
            }
            for part, bold in parts
        ],
    }
    if notice.link:
        card["actions"] = [{"type": "Action.OpenUrl", "title": "Open", "url": notice.link}]
    kind = "application/vnd.microsoft.card.adaptive"
    return {"type": "message", "attachments": [{"contentType": kind, "contentUrl": None, "content": card}]}


def pagerduty(notice: Notice, key: str) -> Any:
    """Return an event: trigger, acknowledge or resolve, with one `dedup_key` for each incident."""
    actions = {Phase.OVER: "resolve", Phase.ACKNOWLEDGED: "acknowledge"}
    event: dict[str, Any] = {
        "routing_key": key,
        "event_action": actions.get(notice.phase, "trigger"),
        "dedup_key": f"unicron-{notice.incident}",
        "payload": {
            "summary": heading(notice)[:MOST_SUMMARY],
            "source": ", ".join(notice.nodes or notice.tasks)[:MOST_SUMMARY] or "unicron",
            "severity": "info" if notice.phase is Phase.TEST else PAGERDUTY.get(notice.severity, "warning"),
            "timestamp": _moment(notice.began or notice.decided),
            "group": ", ".join(notice.tasks)[:MOST_SUMMARY],
            "class": str(notice.kind),
            "custom_details": {"text": text(notice), "notice": notice.id, "chain": notice.chain},
        },
        "client": "Unicron",
    }
    if notice.link:
        event |= {"client_url": notice.link, "links": [{"href": notice.link, "text": "The incident in Unicron"}]}
    return event


def alertmanager(notice: Notice, _: str) -> Any:
    """Return alerts, of which the labels stay the same from the first to the last of an incident."""
    no_end = notice.phase in {Phase.SUMMARY, Phase.TEST} or str(notice.label) in {"alert", "dead_letter", "notifier"}
    ends = notice.ended or notice.decided + (NOTICE_S if no_end else KEPT_S)
    labels = {
        "alertname": "UnicronTest" if notice.phase is Phase.TEST else "UnicronIncident",
        "incident": notice.incident,
        "kind": str(notice.label),
        "severity": str(notice.first_severity),
    }
    alert = {
        "labels": labels,
        "annotations": {"summary": heading(notice), "description": text(notice), "notice": notice.id},
        "startsAt": _moment(notice.began or notice.decided),
        "endsAt": _moment(ends),
    }
    return [{**alert, "generatorURL": notice.link} if notice.link else alert]


SHAPES: Mapping[str, Callable[[Notice, str], Any]] = {
    "json": generic,
    "slack": slack,
    "teams": teams,
    "pagerduty": pagerduty,
    "alertmanager": alertmanager,
}
"""By the kind of the channel: takes a notice and the channel's key, if it has one; returns what becomes JSON."""


def _cut(long: str) -> str:
    return long if len(long) <= MOST_CHARACTERS else long[: MOST_CHARACTERS - 1] + "…"


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
