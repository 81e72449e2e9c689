"""Settings: flags over environment over defaults, and errors that name the field."""

import pytest

from unicron.errors import InvalidInputError
from unicron.settings import Settings


class Extended(Settings, kw_only=True, frozen=True):
    """A service's own settings."""

    slots: int = 2
    node: str = "node-1"


def test_defaults_need_nothing():
    settings = Settings.load([], {})
    assert settings == Settings()
    assert settings.nats_url == "nats://127.0.0.1:4222"


def test_flags_win_over_the_environment_which_wins_over_defaults():
    environ = {"UNICRON_NATS_URL": "nats://env:1", "UNICRON_LEASE_TTL_S": "3.5", "NATS_URL": "nats://other:1"}
    settings = Settings.load(["--nats-url", "nats://flag:2"], environ)
    assert (settings.nats_url, settings.lease_ttl_s, settings.log_level) == ("nats://flag:2", 3.5, "info")


def test_the_process_environment_is_the_default(monkeypatch):
    monkeypatch.setenv("UNICRON_LOG_LEVEL", "debug")
    assert Settings.load([]).log_level == "debug"


def test_services_add_fields_of_their_own():
    assert Extended.load(["--slots", "4"], {"UNICRON_NODE": "n7"}) == Extended(slots=4, node="n7")


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"UNICRON_CONNECT_TIMEOUT_S": "soon"}, "connect_timeout_s"),
        ({"UNICRON_LEASE_TTL_S": ""}, "lease_ttl_s"),
        ({"UNICRON_SLOTS": "2.5"}, "slots"),
    ],
)
def test_a_value_that_does_not_fit_is_named_with_the_way_to_set_it(environ, named):
    with pytest.raises(InvalidInputError, match=rf"UNICRON_{named.upper()} '.*--{named.replace('_', '-')}"):
        Extended.load([], environ)


@pytest.mark.parametrize("text", ["0", "-1", "0.05", "nan"])
def test_a_lease_that_would_expire_at_once_is_refused(text):
    with pytest.raises(InvalidInputError, match=r"UNICRON_LEASE_TTL_S.*at least 0.1 s"):
        Settings.load([], {"UNICRON_LEASE_TTL_S": text})


@pytest.mark.parametrize("name", ["nats_creds", "nats_ca", "nats_nkey"])
def test_a_file_that_is_not_there_is_named(name, tmp_path):
    missing = str(tmp_path / "missing")
    with pytest.raises(InvalidInputError, match=rf"UNICRON_{name.upper()}: no file at '{missing}'"):
        Settings.load([f"--{name.replace('_', '-')}", missing], {})


def test_certificate_and_key_belong_together(tmp_path):
    file = tmp_path / "cert.pem"
    file.touch()
    with pytest.raises(InvalidInputError, match="UNICRON_NATS_CERT and UNICRON_NATS_KEY belong together"):
        Settings(nats_cert=str(file))
    assert Settings(nats_cert=str(file), nats_key=str(file)).nats_key == str(file)
