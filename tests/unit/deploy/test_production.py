"""`unicron init`: which files each host gets, with which rights, and what is refused; servers and systemd read them."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from unicron_deploy.nats_server import find_binary
from unicron_deploy.production.layout import INSTANCES, SERVERS, checked, keys, metrics_port, texts
from unicron_deploy.production.setup import write

from unicron.bus.access import public_key
from unicron.errors import InvalidInputError
from unicron.files import read_secret

HOSTS = checked(["a", "b", "c"], ["n1", "n2"])
SECRETS = ("*.nk", "*.key", "tokens", "routes.conf")
PREFIX = "/opt/unicron/.venv/bin"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("init") / "cluster"
    write(found, HOSTS)
    return found


def test_each_host_has_its_own_keys_and_nobody_elses(folder):
    for server in HOSTS.servers:
        there = {path.name for path in (folder / server / "etc/unicron/keys").iterdir()}
        assert there == set(INSTANCES)
    for node in HOSTS.nodes:
        [own] = (folder / node / "etc/unicron/keys").iterdir()
        assert public_key(own / f"{node}.nk") == public_key(folder / "keys" / node / f"{node}.nk")
        assert {"fabric.key", "tls.pem", "tls.key", "ca.pem"} <= {path.name for path in own.iterdir()}
    assert not list(folder.glob("*/etc/**/ca.key")), "the authority's key stays here"
    assert not list(folder.glob("*/etc/**/operator*"))


def test_secrets_are_their_owners_alone_and_stand_in_no_other_file(folder):
    secrets = [path for name in SECRETS for path in folder.rglob(name)]
    assert len(secrets) > 2 * len(keys(HOSTS))
    assert {path.stat().st_mode & 0o777 for path in secrets} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    seeds = {read_secret(path).decode() for path in folder.rglob("*.nk")}
    for path in texts(HOSTS):
        text = (folder / path).read_text()
        assert not [seed for seed in seeds if seed in text]


def test_a_folder_with_anything_in_it_is_refused_and_stays_as_it_is(tmp_path):
    (tmp_path / "own").write_text("mine")
    with pytest.raises(InvalidInputError, match="give a folder that is empty"):
        write(tmp_path, HOSTS)
    with pytest.raises(InvalidInputError, match="give a folder that is empty"):
        write(tmp_path / "own", HOSTS)
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


@pytest.mark.parametrize(
    ("servers", "nodes", "why"),
    [
        (["a", "b"], ["n1"], "give three"),
        (["a", "b", "../c"], ["n1"], "no host name"),
        (["a", "b", "::1"], ["n1"], "no host name"),
        (["a", "b", "c"], ["n.1"], "node"),
        (["a", "b", "c"], ["operator"], "rights of its own"),
        (["a", "b", "c"], ["n1", "n1"], "n1 is named twice"),
        (["a", "b", "c"], ["c"], "c is named twice"),
    ],
)
def test_hosts_that_can_not_be_are_refused(servers, nodes, why):
    with pytest.raises(InvalidInputError, match=re.escape(why)):
        checked(servers, nodes)


def test_each_process_has_a_port_of_its_own_for_prometheus_and_is_listed():
    ports = {name: metrics_port(name) for name in (*INSTANCES, "n1")}
    assert len(set(ports.values())) == len(ports)
    listed = texts(HOSTS)["prometheus.json"]
    assert listed.count('"targets"') == SERVERS * len(INSTANCES) + len(HOSTS.nodes)
    for name in INSTANCES:
        assert f"UNICRON_METRICS=0.0.0.0:{ports[name]}" in texts(HOSTS)[f"a/etc/unicron/{name}.env"]
        assert f"unicron@{name}" in texts(HOSTS)["README.md"]


@pytest.mark.slow
@pytest.mark.real
def test_each_server_of_nats_takes_its_configuration(folder, tmp_path):
    for server in HOSTS.servers:
        here = tmp_path / server
        shutil.copytree(folder / server / "etc/unicron", here)
        conf = here / "nats.conf"
        conf.write_text(conf.read_text().replace("/etc/unicron", str(here)).replace("/var/lib/unicron", str(tmp_path)))
        done = subprocess.run([find_binary(), "-t", "-c", conf], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.real
@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze")
def test_systemd_finds_nothing_wrong_with_the_units(folder, tmp_path):
    units = []
    for path in [*(folder / "a/etc/systemd/system").iterdir(), *(folder / "n1/etc/systemd/system").iterdir()]:
        text = path.read_text().replace(f"{PREFIX}/python", sys.executable)
        unit = tmp_path / path.name.replace("@", "@registry")
        unit.write_text(text.replace(f"{PREFIX}/nats-server", find_binary()))
        units.append(unit)
    words = ["systemd-analyze", "verify", "--man=no", *units]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    said = [line for line in done.stderr.splitlines() if any(Path(unit).name in line for unit in units)]
    assert (done.returncode, said) == (0, [])
