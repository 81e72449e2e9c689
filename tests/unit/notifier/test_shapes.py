"""The bodies that receivers get: the right form for each, and text from the bus as text."""

import email
from email import policy

import pytest
from helpers import notifier
from msgspec.structs import replace
from unicron_notifier.channels import Mail
from unicron_notifier.senders import build_mail
from unicron_notifier.shapes import SHAPES, alertmanager, pagerduty, slack, teams

from unicron.contracts.notices import IncidentKind, Notice, Phase

NOTICE = replace(
    notifier.NOTICE,
    title="n2 is lost <!channel> & **all** [x](http://evil)",
    lines=["Why: <a href='x'>", "Cost so far: about 3 s of one worker's time"],
)
OVER = replace(NOTICE, id="c1.2.ops", phase=Phase.OVER, ended=1_784_894_460.0)


def test_the_generic_form_holds_all_fields():
    body = SHAPES["json"](NOTICE, "")
    assert set(body) == {"version", *Notice.__struct_fields__}
    assert (body["version"], body["phase"], body["kind"]) == (1, "opened", "node_lost")


def test_slack_gets_text_in_which_nothing_is_a_mention_or_a_link():
    body = slack(NOTICE, "")
    assert body["text"] == "[SEV1] n2 is lost &lt;!channel&gt; &amp; **all** [x](http://evil)"
    assert {block["text"]["type"] for block in body["blocks"]} == {"plain_text"}
    assert "<" not in str(body)
    long = slack(replace(NOTICE, lines=["x" * 500] * 30), "")
    assert all(len(block["text"]["text"]) <= 3000 for block in long["blocks"])


def test_teams_gets_runs_of_text_that_are_no_markup():
    [attached] = teams(NOTICE, "")["attachments"]
    card = attached["content"]
    assert attached["contentType"] == "application/vnd.microsoft.card.adaptive"
    assert {block["type"] for block in card["body"]} == {"RichTextBlock"}
    runs = [run for block in card["body"] for run in block["inlines"]]
    assert {run["type"] for run in runs} == {"TextRun"}
    assert [run["text"] for run in runs] == [f"[SEV1] {NOTICE.title}", *NOTICE.lines]
    assert card["actions"][0]["url"] == NOTICE.link


@pytest.mark.parametrize(
    ("phase", "action"),
    [
        (Phase.OPENED, "trigger"),
        (Phase.UPDATED, "trigger"),
        (Phase.ESCALATED, "trigger"),
        (Phase.ACKNOWLEDGED, "acknowledge"),
        (Phase.OVER, "resolve"),
    ],
)
def test_pagerduty_gets_events_of_one_incident(phase, action):
    event = pagerduty(replace(NOTICE, phase=phase), "KEY")
    assert (event["event_action"], event["dedup_key"], event["routing_key"]) == (action, "unicron-c1", "KEY")
    payload = event["payload"]
    assert (payload["severity"], payload["source"]) == ("critical", "n2")
    assert payload["timestamp"] == "2026-07-24T12:00:00.000Z"
    assert event["links"][0]["href"] == NOTICE.link
    assert len(pagerduty(replace(NOTICE, title="x" * 5000), "KEY")["payload"]["summary"]) == 1024


def test_alertmanager_gets_the_same_labels_to_the_end():
    [first], [last] = alertmanager(NOTICE, ""), alertmanager(OVER, "")
    assert first["labels"] == last["labels"]
    assert first["labels"] == {"alertname": "UnicronIncident", "incident": "c1", "kind": "failure", "severity": "2"}
    assert first["startsAt"] == last["startsAt"] == "2026-07-24T12:00:00.000Z"
    assert first["endsAt"] == "2026-07-31T12:00:10.000Z"
    assert last["endsAt"] == "2026-07-24T12:01:00.000Z"
    [alert] = alertmanager(replace(NOTICE, label=IncidentKind.ALERT), "")
    assert alert["endsAt"] == "2026-07-24T13:00:10.000Z", "what has no end is shown for a while"


def test_a_mail_has_one_header_of_each_and_a_thread_for_each_incident():
    given = Mail(host="h", sender="unicron@example.org", to=["a@example.org", "b@example.org"])
    notice = replace(NOTICE, title="bad\r\nBcc: x@evil\r\n\r\nbody\x00 é")
    raw = bytes(build_mail(notice, given))
    read = email.message_from_bytes(raw, policy=policy.default)
    assert read["Subject"] == r"[SEV1] bad\u000d Bcc: x@evil\u000d \u000d body\u0000 é"
    assert read["Bcc"] is None
    assert read["To"] == "a@example.org, b@example.org"
    assert read["Message-ID"] == "<c1.1.ops@example.org>"
    assert read["References"] == "<c1@example.org>"
    assert "text/plain" in read["Content-Type"]
    assert NOTICE.lines[0] in read.get_content()
