"""How the detector is wired up: settings, the server's advisories, and what it imports."""

import json

import pytest
from unicron_detector.main import DetectorSettings, translate, wiring

from unicron import fabric_proofs
from unicron.bus import topology
from unicron.errors import InvalidInputError

ENDED = f"$SYS.ACCOUNT.{topology.NODES}.DISCONNECT"
ADVISORY = {
    "type": "io.nats.server.advisory.v1.client_disconnect",
    "id": "AOWX9DUDXsy9KFxAXvPwU3",
    "timestamp": "2026-11-20T14:00:00.123456789Z",
    "server": {"name": "unicron"},
    "client": {"id": 7, "acc": "UNICRON", "user": "unicron", "name": "agent.n1.secret"},
    "reason": "Client Closed",
}


def advisory(**client):
    return json.dumps({**ADVISORY, "client": {**ADVISORY["client"], **client}}).encode()


def test_an_agents_disconnect_becomes_a_message():
    lost = translate(ENDED, advisory())
    assert (lost.node, lost.reason, lost.id) == ("n1", "Client Closed", "AOWX9DUDXsy9KFxAXvPwU3")
    assert lost.boot == fabric_proofs.boot("secret")
    assert lost.at == pytest.approx(1795183200.123456)


@pytest.mark.parametrize(
    "data",
    [
        advisory(name="detector"),
        advisory(name=""),
        advisory(name="agent."),
        advisory(name="agent.n1"),
        advisory(name="agent.n1.n2.secret"),
        advisory(name=None),
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"client": {"name": "agent.n1.secret"}}',
        json.dumps({**ADVISORY, "timestamp": 5}).encode(),
    ],
)
def test_other_advisories_become_nothing(data):
    assert translate(ENDED, data) is None


def test_other_subjects_become_nothing():
    assert translate(ENDED.replace("DISCONNECT", "CONNECT"), advisory()) is None


def test_settings_reach_the_core_and_advisories_are_listened_to():
    settings = DetectorSettings.load(["--grace-s", "0.25"], {"UNICRON_ATTEMPTS": "7"})
    assert (settings.limits.grace_s, settings.limits.attempts) == (0.25, 7)
    made = wiring(settings)
    assert made.core(None)._reporter.limits == settings.limits
    assert topology.DISCONNECTS in made.telemetry


@pytest.mark.parametrize("name", ["grace_s", "heartbeat_timeout_s", "collective_hold_s", "window_s", "attempts"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "x"])
def test_bad_settings_are_named(name, value):
    with pytest.raises(InvalidInputError) as caught:
        DetectorSettings.load([], {f"UNICRON_{name.upper()}": value})
    assert name in str(caught.value).lower()
