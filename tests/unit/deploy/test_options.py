"""What `unicron up` starts with: what is given, else what the cluster had, else the usual; and what it says of it."""

import socket
import time

import pytest
from helpers.ports import free_port
from unicron_deploy import nats_server
from unicron_deploy.embedded import Cluster, several
from unicron_deploy.nats_server import NatsServer
from unicron_deploy.options import Options

from unicron.errors import InvalidInputError

GIVEN = {"nodes": 2, "slots": None, "port": None, "console_port": 9090, "insecure": None, "ha": True, "metrics": True}
NOTHING = dict.fromkeys(GIVEN)


def test_options_are_kept_until_others_are_given():
    first, kept = Options.settled(GIVEN, None)
    assert (first.nodes, first.slots, first.port, first.console_port, first.ha) == (2, 2, 4222, 9090, True)
    assert kept == []
    assert Options.settled(NOTHING, first) == (first, ["--nodes 2", "--console-port 9090", "--ha", "--metrics"])
    other, kept = Options.settled(NOTHING | {"nodes": 3, "ha": False}, first)
    assert (other.nodes, other.ha, other.metrics, kept) == (3, False, True, ["--console-port 9090", "--metrics"])
    assert first.contradicted(NOTHING | {"nodes": 2, "slots": 4, "ha": False}) == ["--slots 4", "--no-ha"]


def test_a_cluster_that_was_stopped_is_found_with_its_options(tmp_path):
    assert Cluster.before(tmp_path) is None
    options = Options(
        nodes=2, slots=1, port=free_port(), console_port=free_port(), insecure=True, ha=True, metrics=True
    )
    cluster = Cluster.of(tmp_path, options)
    cluster.stop()  # writes the record
    assert Cluster.before(tmp_path).options == cluster.options == options
    assert Cluster.of(tmp_path, options).url == cluster.url, "the second and third server are where they were"
    assert several(free_port(), cluster._layout.servers)[1:] != cluster._layout.servers[1:]


def test_a_start_that_fails_leaves_the_options_of_the_last_one_that_did_not(tmp_path, monkeypatch):
    monkeypatch.setattr(nats_server, "DYING_S", 0.0)
    good = Options(port=free_port(), insecure=True)
    Cluster.of(tmp_path, good).stop()
    with socket.create_server(("127.0.0.1", 0)) as other:
        bad = Options(port=other.getsockname()[1], insecure=True)
        with pytest.raises(InvalidInputError, match="choose another port"):
            Cluster.of(tmp_path, bad).start()
    assert Cluster.before(tmp_path).options == good


def test_a_port_whose_last_server_is_just_dying_is_waited_for(tmp_path, monkeypatch):
    other, tried = socket.create_server(("127.0.0.1", 0)), []

    def sleep(seconds):
        tried.append(seconds)
        if len(tried) == 2:
            other.close()

    monkeypatch.setattr(time, "sleep", sleep)
    NatsServer(tmp_path, other.getsockname()[1])._check_port()
    assert len(tried) == 2
