"""Which key the commands find: README's order of `unicron up` and containers, in one folder and on one port."""

import json
import os
from pathlib import Path

import pytest
from helpers import ROOT
from helpers.cli import invoke
from unicron_cli.output import own_key, settings
from unicron_deploy.keys import Keyring

from unicron.errors import InvalidInputError
from unicron.processes import ProcessRecord

URL = "nats://127.0.0.1:4222"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / ".unicron"


def put(folder, text="secret"):
    (folder / "operator").mkdir(parents=True)
    (folder / "operator" / "operator.nk").write_text(text)
    return os.path.relpath(folder / "operator" / "operator.nk")


def up(folder, *, runs, **fields):
    us = ProcessRecord.from_pid(os.getpid())
    nats = {"pid": us.pid, "ticks": us.ticks if runs else us.ticks - 1}
    (folder / "cluster.json").write_text(json.dumps({"port": 4222, "processes": {"nats": nats}, **fields}))


def test_the_key_is_that_of_the_cluster_that_is_there(folder):
    own = put(folder / "keys")
    up(folder, runs=True)
    assert own_key(URL) == own
    containers = put(folder / "containers")
    assert own_key(URL) == own, "the containers can't have its port"
    up(folder, runs=False)
    assert own_key(URL) == containers
    Path(containers).unlink()
    assert own_key(URL) == own, "where nothing runs, its error names the cluster"


@pytest.mark.parametrize(
    "words", [("list",), ("subscriber",), *((verb, "node-1") for verb in ("node", "rotate", "shut-out", "forget"))]
)
def test_keys_of_a_cluster_that_is_not_there_are_not_made(folder, words):
    with pytest.raises(InvalidInputError, match=r"no cluster's keys in .*containers keep theirs: .*docker cp"):
        invoke("credentials", *words)
    assert not (folder / "keys").exists()


def test_the_subscribers_key_is_that_of_the_cluster_begun_here_and_else_that_fetched_from_the_containers(folder):
    for place in ("containers", "keys"):
        Keyring(folder / place).ensure([])
        found = Path(invoke("credentials", "subscriber").splitlines()[0])
        assert found.resolve() == folder / place / "subscriber" / "subscriber.nk"


@pytest.mark.parametrize(
    ("url", "fields"),
    [("nats://127.0.0.1:4333", {}), ("nats://example.org:4222", {}), (URL, {"insecure": True})],
)
def test_no_key_is_shown_to_another_server(folder, url, fields):
    put(folder / "keys")
    up(folder, runs=True, **fields)
    put(folder / "containers")
    assert own_key(url) == ""


def test_a_server_elsewhere_gets_the_key_of_the_cluster_that_listens_there_only(folder):
    own = put(folder / "keys")
    put(folder / "containers")
    up(folder, runs=False, host="10.0.0.1")
    assert own_key("nats://10.0.0.1:4222") == own
    assert own_key("nats://10.0.0.2:4222") == ""


def test_what_is_typed_for_containers_is_in_their_own_folder(folder):
    lines = [
        line
        for line in (ROOT / "docs" / "start" / "containers.md").read_text().splitlines()
        if "docker" in line and ".unicron/" in line
    ]
    assert len(lines) == 3
    for line in lines:
        assert {word for word in line.split() if ".unicron/" in word} <= {".unicron/containers", ".unicron/containers/"}


@pytest.mark.parametrize(
    ("fields", "url"),
    [
        ({"port": 4333}, "nats://127.0.0.1:4333"),
        ({"port": 4333, "host": "::1"}, "nats://[::1]:4333"),
        ({"servers": [{"host": "a", "port": 1}, {"host": "b", "port": 2}]}, "nats://a:1,nats://b:2"),
    ],
)
def test_the_cluster_of_this_folder_is_found_wherever_it_listens_unless_another_is_named(
    folder, fields, url, monkeypatch
):
    monkeypatch.delenv("UNICRON_NATS_URL", raising=False)
    folder.mkdir()
    up(folder, runs=False, **fields)
    assert settings(None).nats_url == URL
    up(folder, runs=True, **fields)
    assert settings(None).nats_url == url
    assert settings("nats://c:3").nats_url == "nats://c:3"
    monkeypatch.setenv("UNICRON_NATS_URL", "nats://d:4")
    assert settings(None).nats_url == "nats://d:4"
