"""The file of rules and channels: refused as a whole, with the place and the cure, and no secret in it."""

import re

import pytest
from helpers import ROOT
from unicron_notifier import rules
from unicron_notifier.channels import KINDS
from unicron_notifier.config import load

from unicron.errors import InvalidInputError

GOOD = """
link = "https://unicron.example"

[channel.ops]
kind = "slack"
url_file = "slack"

[channel.oncall]
kind = "pagerduty"
key_env = "PD_KEY"

[channel.alerts]
kind = "alertmanager"
url = "http://alertmanager:9093/"

[channel.post]
kind = "mail"
host = "smtp.example.org"
from = "unicron@example.org"
to = ["ops@example.org"]
user = "unicron"
password_file = "password"

[channel.script]
kind = "command"
command = ["/bin/cat", "-"]

[heartbeat]
url_file = "slack"
every_s = 30

[rule.night]
channels = ["ops"]
quiet = {from = "22:00", to = "07:00", zone = "Europe/Berlin", through = [1]}
escalate = {after_min = 15, channels = ["oncall"]}
"""
LINK, ALERTS, RULE = 'link = "https://unicron.example"', "http://alertmanager:9093/", "[rule.night]"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a file, and the secrets that GOOD names; return its path."""
    monkeypatch.setenv("PD_KEY", "R0UTING")
    for name, secret in (("slack", "https://hooks.slack.com/services/T0/B0/s3cret"), ("password", "hunter2")):
        (tmp_path / name).write_text(f"{secret}\n")
        (tmp_path / name).chmod(0o600)

    def write(text):
        path = tmp_path / "notify.toml"
        path.write_text(text)
        return str(path)

    return write


def test_a_good_file_is_read_and_its_secrets_are_not_shown(write):
    config = load(write(GOOD))
    assert config.channels["ops"].secrets.url == "https://hooks.slack.com/services/T0/B0/s3cret"
    assert config.channels["oncall"].secrets[:] == ("https://events.pagerduty.com/v2/enqueue", "", "R0UTING")
    assert config.channels["alerts"].secrets.url == "http://alertmanager:9093/api/v2/alerts"
    assert config.channels["post"].secrets.key == "hunter2"
    assert config.routing.channels == ("ops", "oncall", "alerts", "post", "script")
    for secret in ("s3cret", "R0UTING", "hunter2"):
        assert secret not in repr(config)


def test_no_file_is_no_rules():
    assert load("").routing.rules == {}


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('link = "', "link = ", "at line 2, column"),
        (LINK, 'link = "unicron.example"', "link 'unicron.example': give what the console"),
        (LINK, "links = 1", "links: there is no such table or key"),
        ('kind = "slack"', 'kind = "slak"', "[channel.ops] kind 'slak': use one of json, slack, teams, pagerduty"),
        ('url_file = "slack"\n\n', 'url = "https://hooks.slack.com/services/T0/B0/s3cret"\n\n', "so it is a secret"),
        ('url_file = "slack"', 'url_file = "none"', "[channel.ops] url_file: "),
        ('url_file = "slack"', 'url_file = "password"', "[channel.ops] url_file: it is no address that begins with"),
        ('url_file = "slack"', 'url_env = "NOWHERE"', "url_env: the variable NOWHERE is empty"),
        ('url_file = "slack"', 'url_fil = "slack"', "[channel.ops]: Object contains unknown field `url_fil`"),
        ('url_file = "slack"', 'url_file = "slack"\nurl_env = "X"', "url_file and url_env are both given"),
        ('url_file = "slack"', "", "[channel.ops] there is no url"),
        ('key_env = "PD_KEY"', "", "[channel.oncall] there is no integration key: give key_file or key_env"),
        (ALERTS, "http://me:s3cret@alertmanager:9093/", "[channel.alerts] url: it holds a password"),
        (ALERTS, "http://alertmanager:9093/?key=s3cret", "url: it holds a password or a query"),
        (ALERTS, "ftp://alertmanager", "url: it is no address that begins with https://"),
        (ALERTS, "http://a:99999/", "url: it is no address"),
        (ALERTS, r"http://a/\r\nX: y", "url: it is no address"),
        (f'"{ALERTS}"', f'"{ALERTS}"\ntoken_env = "PD_KEY"', "url: a secret goes over https only"),
        ("unicron@example.org", r"a@b.c\nBcc: x@y.z", "[channel.post] from 'a@b.c\\nBcc: x@y.z': give a"),
        ('to = ["ops@example.org"]', "to = []", "[channel.post] to: Expected `array` of length >= 1"),
        ('to = ["ops@example.org"]', 'to = ["Ops <ops@example.org>"]', "give a bare address"),
        ('user = "unicron"', 'user = "unicron"\nstarttls = false', "starttls: without it the password would be seen"),
        ('user = "unicron"', "", "user and password_file (or password_env) belong together"),
        ('["/bin/cat", "-"]', '["cat"]', "[channel.script] command 'cat': give the absolute path"),
        ('["/bin/cat", "-"]', '["/etc/passwd"]', "give the absolute path of a program that can be run"),
        ("every_s = 30", "every_s = 0", "[heartbeat] every_s: Expected `float` >= 0.1"),
        ('["ops"]\n', '["op"]\n', "[rule.night] channels: there is no channel 'op'; there are: ops,"),
        ('channels = ["oncall"]', 'channels = ["boss"]', "[rule.night] escalate.channels: there is no channel 'boss'"),
        ("after_min = 15", "after_min = 0", "[rule.night] escalate.after_min: Expected `float` > 0.0"),
        ("22:00", "24:00", "[rule.night] quiet: '24:00' is no time of day: write it as 22:00"),
        ("22:00", "07:00", "[rule.night] quiet: `from` and `to` are the same"),
        ("Europe/Berlin", "Europe/Berlinn", "[rule.night] quiet: there is no time zone 'Europe/Berlinn'"),
        ("Europe/Berlin", "../../etc/passwd", "there is no time zone"),
        ("through = [1]", "through = [4]", "[rule.night] quiet.through[0]: Expected `int` <= 3"),
        (RULE, f'{RULE}\nkinds = ["node"]', "there is no kind 'node': use some of task_failed, node_lost"),
        (RULE, f'{RULE}\nstatus = ["ecc"]', "there is no status 'ecc': use some of lost_connection"),
        (RULE, f"{RULE}\nwait_s = nan", "wait_s"),
        (RULE, '[rule."a:b"]', "[rule.a:b]: rule name 'a:b': use 1 to 64 letters"),
        (RULE, "[[rule]]", "rule: write a table for each, as [rule.NAME]"),
        (GOOD[GOOD.index("[rule.night]") :], "", "there is no [rule.NAME], so nobody would be notified"),
    ],
)
def test_a_bad_file_is_refused_with_place_and_cure(write, old, new, says):
    assert old in GOOD
    path = write(GOOD.replace(old, new, 1))
    with pytest.raises(InvalidInputError) as refused:
        load(path)
    text = str(refused.value)
    assert text.startswith(f"{path}: ")
    assert says in text
    for secret in ("s3cret", "R0UTING", "hunter2"):
        assert secret not in text


def test_a_secret_that_others_may_read_is_refused(write, tmp_path):
    path = write(GOOD)
    (tmp_path / "password").chmod(0o644)
    with pytest.raises(InvalidInputError, match=r"\[channel.post\] password_file: .*others than its owner may read"):
        load(path)


def test_a_file_that_is_none_is_refused(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(InvalidInputError, match="give the path of a TOML file of rules and channels"):
            load(str(path))


def test_the_file_in_the_docs_is_in_order(tmp_path):
    page = (ROOT / "docs" / "howto" / "notify.md").read_text()
    [text] = re.findall(r"^```toml\n(.*?)```", page, re.DOTALL | re.MULTILINE)
    file = tmp_path / "notify.toml"
    file.write_text(text)
    for name in re.findall(r'_file = "(.*?)"', text):
        (tmp_path / name).write_text("https://hooks.example.org/T0/B0/x" if "url" in name else "s3cret")
        (tmp_path / name).chmod(0o600)
    config = load(str(file))
    assert {each.given.__struct_config__.tag for each in config.channels.values()} == {*KINDS} - {"teams"}
    assert config.heartbeat
    page = (ROOT / "docs" / "reference" / "notifications.md").read_text()
    table = page[page.index("| kind | severity | reported when |") :]
    assert set(re.findall(r"^\| `(\w+)` \|", table[: table.index("\n\n")], re.MULTILINE)) == set(map(str, rules.KINDS))
