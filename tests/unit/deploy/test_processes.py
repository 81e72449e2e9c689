import itertools
import json
import os
import signal
import subprocess
import sys
import threading

import pytest
from helpers.ports import free_port
from helpers.waiting import PATIENT_S, block_until
from unicron_deploy import embedded
from unicron_deploy.embedded import Cluster, several
from unicron_deploy.nats_server import NatsServer

from unicron.errors import BusUnavailableError, InvalidInputError
from unicron.processes import Patience, ProcessRecord, _works, wait_until_gone
from unicron.services import SERVICES

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"])
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def family():
    """A session of two processes."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", PARENT], text=True, start_new_session=True, **pipes)
    child = int(process.stdout.readline())
    yield process, ProcessRecord.from_pid(process.pid), ProcessRecord.from_pid(child)
    ProcessRecord.from_pid(process.pid).kill_session()
    process.communicate()


def test_a_process_is_known_by_its_start_too(family):
    process, started, child = family
    assert started.alive()
    assert {process.pid, child.pid} == set(started.session())
    later = ProcessRecord(pid=started.pid, ticks=started.ticks + 1)
    assert not later.alive()
    assert later.session() == []
    later.kill_session()
    later.signal(signal.SIGKILL)
    assert started.alive(), "another process's id was not touched"


def test_a_zombie_is_dead(family):
    process, started, _ = family
    os.kill(process.pid, signal.SIGKILL)
    assert wait_until_gone([started], PATIENT_S) == []
    assert not started.alive()
    started.signal(signal.SIGTERM)


def test_those_who_outlive_their_leader_end_with_the_session(family):
    process, started, child = family
    process.kill()
    process.wait()
    assert child.alive()
    started.kill_session()
    assert not child.alive()


def test_the_living_are_returned_after_the_wait(family):
    _, started, child = family
    assert wait_until_gone([started, child], 0.05) == [started, child]


@pytest.mark.parametrize(("does", "borne"), [("while True: pass", True), ("import sys; sys.stdin.read()", False)])
def test_a_start_is_borne_as_long_as_something_of_it_works(does, borne):
    begins = [sys.executable, "-c", PARENT.replace("import sys; sys.stdin.read()", does)]
    with subprocess.Popen(begins, text=True, start_new_session=True, stdin=-1, stdout=-1) as process:
        process.stdout.readline()
        leader, clock = ProcessRecord.from_pid(process.pid), itertools.count()
        patience = Patience(10.0, lambda: next(clock))
        if not borne:
            block_until(lambda: not any(map(_works, leader.session())))
        assert [patience.is_over([leader]) for _ in range(12)] == [*[False] * 10, *[not borne] * 2]
        leader.kill_session()


def test_of_the_time_in_which_the_machine_slept_only_a_moment_counts():
    clock = iter([0.0, 3600.0, 7200.0])
    patience = Patience(1.5, lambda: next(clock))
    assert [patience.is_over([]) for _ in range(2)] == [False, True]


def test_a_process_that_never_was_is_not_alive():
    assert not ProcessRecord.from_pid(2**22 + 5).alive()


def test_no_process_has_the_whole_container_for_its_session():
    assert ProcessRecord.from_pid(0).session() == []


def test_a_server_is_not_taken_for_another_that_was_quicker_at_its_port(tmp_path, monkeypatch):
    port = free_port()
    quicker, slower = NatsServer(tmp_path / "a", port), NatsServer(tmp_path / "b", port)
    pid = quicker.start()
    assert quicker.pid == pid
    monkeypatch.setattr(NatsServer, "_check_port", lambda _: None)  # it was free when both looked
    with pytest.raises(BusUnavailableError, match="address already in use"):
        slower.start()
    assert quicker.pid == pid
    quicker.stop()


def test_a_folder_without_a_cluster_says_so(tmp_path):
    with pytest.raises(InvalidInputError, match="unicron up"):
        Cluster.load(tmp_path)
    (tmp_path / "cluster.json").write_text('{"nodes": "three"}')
    with pytest.raises(InvalidInputError, match=r"cluster\.json: not a record"):
        Cluster.load(tmp_path)


def test_unknown_names_are_refused(tmp_path):
    cluster = Cluster(tmp_path, nodes=2)
    assert cluster.names == ["nats", *SERVICES, "node-1", "node-2"]
    for call in (cluster.start_process, cluster.kill):
        with pytest.raises(InvalidInputError, match="node-3"):
            call("node-3")
    with pytest.raises(InvalidInputError, match="no node 'registry'"):
        cluster.kill_node("registry")
    with pytest.raises(InvalidInputError, match="was not started"):
        cluster.kill("node-1")
    assert cluster.alive() == []


def test_a_process_that_is_just_dying_can_be_started_again_and_a_living_one_not(tmp_path, family, monkeypatch):
    process, started, _ = family
    cluster = Cluster(tmp_path)
    cluster.logs.mkdir()
    monkeypatch.setattr(Cluster, "_command", lambda *_: [sys.executable, "-c", "pass"])
    cluster._layout.processes["node-1"] = started
    monkeypatch.setattr(embedded, "DYING_S", 0.1)
    with pytest.raises(InvalidInputError, match="node-1 runs already"):
        cluster.start_process("node-1")

    def dies(processes, _):
        process.kill()
        return wait_until_gone(processes, PATIENT_S)

    monkeypatch.setattr(embedded, "wait_until_gone", dies)
    cluster.start_process("node-1")
    assert cluster.processes["node-1"].pid != started.pid
    cluster._children["node-1"].wait()


def test_a_stop_waits_for_the_start_that_is_under_way(tmp_path, monkeypatch):
    monkeypatch.setattr(Cluster, "_command", lambda *_: [sys.executable, "-c", "import signal; signal.pause()"])
    cluster = Cluster(tmp_path, nodes=2, port=free_port())
    under_way = threading.Event()
    starting = threading.Thread(
        target=cluster.start, args=[lambda text: under_way.set() if "detector" in text else None]
    )
    starting.start()
    under_way.wait()
    cluster.stop()
    starting.join()
    assert all(child.poll() is not None for child in cluster._children.values())
    assert len(cluster._children) == len(cluster.names) - 1, "all were started, but for the server that is no child"


def test_a_journal_that_one_server_kept_is_not_forgotten_by_starting_several(tmp_path):
    (tmp_path / "nats" / "store").mkdir(parents=True)
    cluster = Cluster(tmp_path, servers=several(free_port()))
    why = r"kept by nats, which nats-1, nats-2, nats-3 would not.*--restore FILE"
    with pytest.raises(InvalidInputError, match=why):
        cluster.start()
    assert not cluster.processes


def test_with_metrics_each_process_has_a_port_of_its_own_that_prometheus_finds(tmp_path, monkeypatch):
    monkeypatch.setenv("UNICRON_METRICS", "9464")
    cluster = Cluster(tmp_path, nodes=2, metrics=True)
    cluster._tell_targets()
    found = {entry["labels"]["process"]: entry["targets"] for entry in json.loads(cluster.targets.read_bytes())}
    assert list(found) == cluster.names[1:]
    assert found == {name: [cluster._environment(name)["UNICRON_METRICS"]] for name in found}
    assert len({target for targets in found.values() for target in targets}) == len(found)
    cluster._save()
    assert Cluster.load(tmp_path)._environment("planner") == cluster._environment("planner"), "it is started again"
    plain = Cluster(tmp_path)
    plain._tell_targets()
    assert plain._environment("planner")["UNICRON_METRICS"] == "", "one port can't be for all"
    assert not plain.targets.exists()


def test_another_users_process_is_named_and_not_ended(family, monkeypatch):
    def kill(_, __):
        raise PermissionError

    _, started, _ = family
    with monkeypatch.context() as other_user:
        other_user.setattr(os, "kill", kill)
        with pytest.raises(InvalidInputError, match=f"{started.pid} is another user"):
            started.signal(signal.SIGTERM)
