"""What a container of a pool is started with where Compose keeps the keys: one node's volume, and no right of root."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import ROOT
from unicron_deploy.keys import Keyring
from unicron_provisioner import config
from unicron_provisioner.providers.docker import DockerProvider, Options, make
from unicron_provisioner.providers.protocol import MachineRequest, QuotaError, Surroundings

from unicron.contracts.pools import Pool
from unicron.errors import InvalidInputError

REQUEST = MachineRequest(machine="box-7f3a", pool="box", slots=2)


def provider(*volumes):
    found = DockerProvider("box", Options(image="i", key_volumes="u_key-"), None, "nats://nats:4222")
    there = [SimpleNamespace(name=name) for name in volumes]
    found._engine = SimpleNamespace(volumes=SimpleNamespace(list=lambda filters: there))
    return found


def test_a_machine_gets_the_first_node_whose_keys_are_in_a_volume_that_nobody_has():
    found = provider("u_key-box-10", "u_key-box-2", "u_key-boxer-1", "u_key-node-1", "other_u_key-box-1")
    assert found._free_node([]) == "box-2"
    assert found._free_node(["box-2"]) == "box-10"
    with pytest.raises(QuotaError, match="u_key-NODE are in use"):
        found._free_node(["box-2", "box-10"])


def test_it_sees_its_own_keys_and_has_no_right_of_root():
    given = provider()._given(REQUEST, "box-2")
    assert given["volumes"] == ["u_key-box-2:/run/unicron/keys:ro"]
    assert given["environment"]["UNICRON_NATS_NKEY"] == "/run/unicron/keys/box-2.nk"
    assert given["environment"]["UNICRON_FABRIC_KEY"] == "/run/unicron/keys/fabric.key"
    assert (given["cap_drop"], given["security_opt"]) == (["ALL"], ["no-new-privileges:true"])


def test_keys_in_a_folder_are_mounted_by_its_path(tmp_path):
    Keyring(tmp_path).ensure(["box-1"])
    given = DockerProvider("box", Options(image="i", keys=str(tmp_path)), tmp_path, "nats://a")._given(REQUEST, "box-1")
    assert given["volumes"] == [f"{tmp_path}/box-1:/run/unicron/keys:ro"]
    assert given["environment"]["UNICRON_NATS_NKEY"] == "/run/unicron/keys/box-1.nk"


def test_keys_lie_in_one_place_only(tmp_path):
    options = Options(image="i", keys=str(tmp_path), key_volumes="u_key-")
    with pytest.raises(InvalidInputError, match="leave the other out"):
        make(Pool(name="box", provider="docker", max=1), options, Surroundings(tmp_path, tmp_path, "nats://a"))


def test_the_pool_that_comes_with_the_compose_file_has_keys_for_lost_machines_and_their_replacements():
    supply = config.load(str(ROOT / "deploy/pools/pools.toml"), "nats://nats:4222")["box"]
    compose = Path(ROOT / "docker-compose.yml").read_text()
    assert all(f"key-box-{number}:/keys/box-{number}" in compose for number in range(1, 2 * supply.pool.max + 1))
