"""`unicron init`: which files each host gets, with which rights, and what is refused; who reads them takes them."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from helpers import ROOT
from unicron_deploy.nats_server import find_binary
from unicron_deploy.production.hosts import INSTANCES, SERVERS, Kind, checked, metrics_port
from unicron_deploy.production.layout import PROMETHEUS, TARGETS, keys, texts
from unicron_deploy.production.setup import write
from unicron_notifier.channels import KINDS
from unicron_notifier.config import NOTHING
from unicron_notifier.config import load as load_notify
from unicron_provisioner.config import load as load_pools

from unicron.bus.access import public_key
from unicron.errors import InvalidInputError
from unicron.files import read_secret
from unicron.rules import Rules, load

HOSTS = checked(["a", "b", "c"], ["n1", "n2"])
COMPOSED = checked(["a", "b", "c"], ["n1", "n2"], Kind.COMPOSE)
JOBS = checked(["a", "b", "c"], ["n1", "n2"], Kind.SLURM, "gpu", "/shared/unicron")
SECRETS = ("*.nk", "*.key", "tokens", "routes.conf")
PREFIX = "/opt/unicron/.venv/bin"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("init") / "cluster"
    write(found, HOSTS)
    return found


def test_each_host_has_its_own_keys_and_nobody_elses(folder):
    assert set(keys(COMPOSED)) == set(keys(HOSTS))
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
        (["a", "b", "[::1]"], ["n1"], "no host name"),
        (["a", "b", "c"], ["n.1"], "node"),
        (["a", "b", "c"], ["operator"], "rights of its own"),
        (["a", "b", "c"], ["n1", "n1"], "n1 is named twice"),
        (["a", "b", "c"], ["c"], "c is named twice"),
    ],
)
def test_hosts_that_can_not_be_are_refused(servers, nodes, why):
    with pytest.raises(InvalidInputError, match=re.escape(why)):
        checked(servers, nodes)


@pytest.mark.parametrize(
    ("kind", "partition", "shared", "why"),
    [
        (Kind.SLURM, "", "/s", "name the partition"),
        (Kind.SLURM, "a,b", "/s", "name the partition"),
        (Kind.SLURM, "gpu", "", "a folder that all nodes see"),
        (Kind.SLURM, "gpu", "s/t", "a folder that all nodes see"),
        (Kind.SLURM, "gpu", "/s/ t", "a folder that all nodes see"),
        (Kind.COMPOSE, "gpu", "", "compose has none"),
        (Kind.SYSTEMD, "", "/s", "systemd has none"),
    ],
)
def test_what_slurm_needs_is_asked_for_there_only(kind, partition, shared, why):
    with pytest.raises(InvalidInputError, match=re.escape(why)):
        checked(["a", "b", "c"], ["n1"], kind, partition, shared)


@pytest.mark.parametrize("hosts", [HOSTS, COMPOSED, JOBS], ids=lambda hosts: hosts.kind)
def test_each_process_has_a_port_of_its_own_for_prometheus_and_is_listed(hosts):
    ports = {name: metrics_port(name) for name in (*hosts.instances, "n1")}
    assert len(set(ports.values())) == len(ports)
    found = texts(hosts)
    listed = [each["targets"] for each in json.loads(found[TARGETS])]
    nodes = [] if hosts.partition else hosts.nodes  # those of a pool come and go
    assert len(listed) == SERVERS * len(hosts.instances) + len(nodes)
    for name in hosts.instances:
        assert [f"a:{ports[name]}"] in listed
        assert f"UNICRON_METRICS=0.0.0.0:{ports[name]}\n" in found[f"a/etc/unicron/{name}.env"]
    assert ("unicron@provisioner" in found["README.md"]) is bool(hosts.partition)


@pytest.mark.parametrize("hosts", [HOSTS, COMPOSED, JOBS], ids=lambda hosts: hosts.kind)
def test_what_is_said_of_people_rules_and_alerts_is_the_same_for_all_kinds(hosts, tmp_path):
    found = texts(hosts)
    notify = tmp_path / "notify.toml"
    notify.write_text(found["a/etc/unicron/notify/notify.toml"])
    assert load_notify(str(notify)) == NOTHING, "as it is written nobody is told"
    assert "UNICRON_NOTIFY=/etc/unicron/notify/notify.toml\n" in found["a/etc/unicron/notifier.env"]
    rules = found["a/etc/unicron/rules/own.toml"]
    assert Rules(rules, "own", load()).default == load().default
    assert "UNICRON_RULES=/etc/unicron/rules\n" in found["a/etc/unicron/detector.env"]
    node = "nodes/shared/unicron" if hosts.partition else "n1/etc/unicron"
    assert found[f"{node}/rules/own.toml"] == rules
    config = yaml.safe_load(found["prometheus/prometheus.yml"])
    assert config["rule_files"] == ["rules.yml"]
    assert Path("prometheus/targets/cluster.json").match(config["scrape_configs"][0]["file_sd_configs"][0]["files"][0])
    assert found["prometheus/rules.yml"] == (PROMETHEUS / "rules.yml").read_text()
    assert "unicron doctor --cluster --setup ." in found["README.md"]


def uncommented(text):
    """Return the examples of a file, in use."""
    return "\n".join(
        line.removeprefix("# ") for line in text.splitlines() if re.match(r"# [\[a-z_]+( =|[.\w]*\]+)", line)
    )


def test_the_examples_of_channels_are_one_of_each_kind_and_can_be_used_as_they_are(tmp_path):
    text = uncommented(texts(HOSTS)["a/etc/unicron/notify/notify.toml"])
    plain = tomllib.loads(text)
    assert sorted(each["kind"] for each in plain["channel"].values()) == sorted(KINDS)
    for each in [*plain["channel"].values(), plain["heartbeat"]]:
        for name in (value for key, value in each.items() if key.endswith("_file")):
            (tmp_path / name).write_text("https://example.org/secret")
            (tmp_path / name).chmod(0o600)
    (tmp_path / "notify.toml").write_text(text)
    found = load_notify(str(tmp_path / "notify.toml"))
    assert set(found.routing.rules) == {"worst", "rest"}
    used = {name for rule in plain["rule"].values() for name in rule["channels"]}
    assert used | set(plain["rule"]["worst"]["escalate"]["channels"]) == set(found.channels)


def test_the_examples_of_rules_can_be_used_as_they_are():
    found = Rules(uncommented(texts(HOSTS)["n1/etc/unicron/rules/own.toml"]), "own", load())
    assert found.rule_for_exception("OurLoaderError: x").rule.startswith("own")
    assert found.rule_for_hardware("ourdriver: board failure").verdict.severity == 1
    assert found.rule_for_output("our storage is slow").rule.startswith("own")


# --- Slurm -----------------------------------------------------------------------------------------------------------


def test_a_pool_of_slurm_has_the_partition_and_keys_for_a_lost_node_and_its_replacement(tmp_path):
    write(tmp_path / "cluster", JOBS)
    shared = tmp_path / "cluster/nodes/shared/unicron"
    file = tmp_path / "cluster/a/etc/unicron/pools.toml"
    file.write_text(file.read_text().replace('"/shared/unicron', f'"{shared}'))
    supply = load_pools(str(file), JOBS.url)["gpu"]
    assert (supply.pool.max, supply.pool.provider) == (2, "slurm")
    assert 'partition = "gpu"' in file.read_text()
    assert sorted(path.name for path in (shared / "keys").iterdir()) == ["gpu-1", "gpu-2", "gpu-3", "gpu-4"]
    assert {"fabric.key", "tls.pem", "gpu-1.nk"} <= {path.name for path in (shared / "keys/gpu-1").iterdir()}
    assert not (tmp_path / "cluster/n1").exists(), "its agent is a job's"


def test_slurm_gets_hooks_that_are_installed_and_the_provisioner_a_folder_that_it_may_write():
    found = texts(JOBS)
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    hooks = dict(
        re.findall(r"^(\w+)=/opt/unicron/.venv/bin/(\S+)$", found["nodes/etc/slurm/unicron.conf"], re.MULTILINE)
    )
    assert hooks.keys() == {"Prolog", "Epilog"}
    assert set(hooks.values()) <= scripts.keys()
    assert "ReadWritePaths=/shared/unicron\n" in found["a/etc/systemd/system/unicron@provisioner.service.d/shared.conf"]
    assert "UNICRON_POOLS=/etc/unicron/pools.toml\n" in found["a/etc/unicron/provisioner.env"]


# --- Compose ---------------------------------------------------------------------------------------------------------


def composed(host):
    return yaml.safe_load(texts(COMPOSED)[f"{host}/docker-compose.yml"])["services"]


def test_each_container_is_confined_and_has_its_own_keys_alone():
    assert set(composed("a")) == {"nats", *INSTANCES}
    for name, service in {**composed("a"), **composed("n1")}.items():
        assert (service["read_only"], service["cap_drop"], service["user"]) == (True, ["ALL"], "10001:10001"), name
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert "cap_add" not in service
        assert not [volume for volume in service["volumes"] if "docker.sock" in volume]
    for name in INSTANCES:
        service = composed("a")[name]
        [keys_of] = [volume for volume in service["volumes"] if "/keys" in volume]
        assert keys_of == f"./etc/unicron/keys/{name}:/etc/unicron/keys/{name}:ro"
        assert service["command"] == ["python", "-m", f"unicron_{name}"]
        assert service["env_file"] == ["etc/unicron/cluster.env", f"etc/unicron/{name}.env"]


def test_what_a_container_is_told_of_is_mounted_there_and_was_written():
    found = texts(COMPOSED)
    for host in ("a", "n1"):
        for name, service in composed(host).items():
            mounts = [volume.split(":")[:2] for volume in service["volumes"] if ":" in volume]
            own = {path.removeprefix("./") for path, _ in mounts if path.startswith("./")}
            there = [path for path in (*found, *keys(COMPOSED)) if path.startswith(f"{host}/")]
            assert all(any(path.startswith(f"{host}/{each}") for path in there) for each in own), name
            told = "".join(found[f"{host}/{file}"] for file in service.get("env_file", []))
            for path in re.findall(r"=(/\S+)", told):
                assert any(path.startswith(inside) for _, inside in mounts), f"{name} does not see {path}"


@pytest.mark.parametrize("host", ["a", "n1"])
@pytest.mark.skipif(not shutil.which("docker-compose"), reason="no docker-compose")
def test_compose_takes_its_files(host, tmp_path):
    write(tmp_path / "cluster", COMPOSED)
    words = ["docker-compose", "config", "--quiet"]
    done = subprocess.run(words, cwd=tmp_path / "cluster" / host, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- servers and units -----------------------------------------------------------------------------------------------


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
def test_systemd_finds_nothing_wrong_with_the_units(tmp_path):
    units = {path: text for path, text in texts(JOBS).items() if path.startswith("a/etc/systemd")}
    units |= {path: text for path, text in texts(HOSTS).items() if path.endswith("unicron-agent.service")}
    for path, text in units.items():
        unit = tmp_path / path.partition("/systemd/system/")[2].replace("unicron@.", "unicron@provisioner.")
        unit.parent.mkdir(exist_ok=True)
        unit.write_text(
            text.replace(f"{PREFIX}/python", sys.executable).replace(f"{PREFIX}/nats-server", find_binary())
        )
    names = sorted(path.name for path in tmp_path.glob("*.service"))
    assert names == ["unicron-agent.service", "unicron-nats.service", "unicron@provisioner.service"]
    words = ["systemd-analyze", "verify", "--man=no", *names]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "unicron" in line]) == (0, [])
