"""More nodes for the cluster in containers, as the page has them typed: by a pool of the engine, by a join token."""

import contextlib

import pytest
from helpers import ROOT
from helpers.compose import BUILD_S, connected, node_of, running, status_when, up
from helpers.pages import typed

from unicron.contracts.tasks import NodeState

POOLS = ROOT / "deploy" / "pools" / "pools.toml"
PROFILES = ("--profile", "pools", "--profile", "enrol")

pytestmark = [
    pytest.mark.compose,
    pytest.mark.exhaustive("the provider and enrolment have tests of their own"),
    pytest.mark.timeout(BUILD_S + 600),
]


def lines(profile):
    """Return what the page has typed for a profile."""
    blocks, found = (
        [],
        [line for line in typed(ROOT / "docs" / "start" / "containers.md") if "test_profiles.py" in line.why_not],
    )
    for line in found:
        if line.text.startswith(("export", "docker-compose --profile enrol")):
            blocks.append([])
        blocks[-1].append(line.text)
    [block] = [block for block in blocks if any(f"--profile {profile}" in text for text in block)]
    return block


def of_the_pool(cluster):
    """Return the containers of machines that came to a project."""
    network = f"network={cluster.project}_default"
    return cluster.type(f"docker ps -aq -f label=unicron.pool=box -f {network}").split()


def joined(status):
    """Return the machines of the pool that have joined, and the node that each of them is."""
    return {node.machine: node.node for node in status.nodes if node.state is NodeState.UP and node.machine}


@contextlib.contextmanager
def with_a_pool(cluster, folder):
    """Have the page's pool, which is not Compose's to end."""
    folder.mkdir()
    folder.chmod(0o755)
    (folder / "pools.toml").write_text(POOLS.read_text().replace("unicron_", f"{cluster.project}_"))
    cluster.environment["UNICRON_POOLS_FOLDER"] = str(folder)
    try:
        cluster.type(*lines("pools")[:2])
        yield
    finally:
        cluster.compose(*PROFILES, "stop", "provisioner")
        for machine in of_the_pool(cluster):
            cluster.type(f"docker rm -fv {machine}")


async def test_a_pool_gives_containers_and_replaces_one_that_is_lost(tmp_path):
    with running(tmp_path, ends=PROFILES) as cluster, with_a_pool(cluster, tmp_path / "pools"):
        async with connected(cluster) as client:
            [(first, node)] = joined(await status_when(client, "a machine has joined", joined)).items()
            [machine] = of_the_pool(cluster)
            assert machine in cluster.type(*lines("pools")[2:])
            shown = "{{.HostConfig.CapDrop}} {{.HostConfig.SecurityOpt}} {{.HostConfig.Binds}}"
            keys = f"{cluster.project}_key-{node}:/run/unicron/keys:ro"
            looked = cluster.type(f"docker inspect -f '{shown}' {machine}")
            assert looked == f"[ALL] [no-new-privileges:true] [{keys}]\n"
            cluster.type(f"docker kill {machine}")
            await status_when(client, "another has come for it", lambda status: joined(status).keys() - {first})


async def test_a_host_joins_by_a_token_and_is_still_let_in_when_keys_were_looked_after_again(tmp_path):
    token = str(tmp_path / "lab.token")
    *before, agent = [text.replace("lab.token", token) for text in lines("enrol")]
    with running(tmp_path, ends=PROFILES) as cluster:
        cluster.type(*before)
        with cluster.typing(agent, UNICRON_NODE="host-1", UNICRON_RUN_DIR=str(tmp_path / "run")):
            async with connected(cluster) as client:
                await status_when(client, "the host has joined", lambda status: up(status, "host-1"))
                cluster.compose("up", "--no-build", "-d")
                assert "# host-1\n" in cluster.execute("nats", "cat", "/etc/unicron/server/accounts.conf")
                status = await status_when(client, "it is still there", lambda status: up(status, "host-1"))
                assert node_of(status, "host-1").slots
                assert "host-1" in cluster.unicron("token", "list")
