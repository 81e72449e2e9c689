"""A real nats-server for the whole run, one of their own for tests that kill it, and worlds to run both buses in."""

import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from helpers import catalogue, likenccl, proxies
from helpers.gate import Gate, gate
from helpers.worlds import LocalWorld, NatsWorld, World, serving
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from unicron_deploy.nats_server import NatsServer

from unicron.bus.protocol import Bus

# a shell's background jobs ignore this signal, and so would the processes that tests start to interrupt them
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run, and no limit on how long one takes: neither a busy machine nor a seed refuses a change
# that has nothing to do with it. New examples are looked for with `--hypothesis-profile=default`.
settings.register_profile(
    "repeatable", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")
# else it mixes in constants from the source of whatever the process has imported so far: another order, other examples
providers.is_local_module_file = lambda _: False


SERVERS = {"nats_server", "private_server"}
INTEGRATION = Path(__file__).parent / "integration"
COLLECTED = pytest.StashKey[list[pytest.Item]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let `make docs/testing.md` write the list of tests, and `make test-all` run some of them as on GPUs."""
    parser.addoption("--write-list", action="store_true", help="write docs/testing.md anew (with --collect-only)")
    parser.addoption("--on-streams", action="store_true", help="have workers' groups behave as NCCL's do on GPUs")


def pytest_configure(config: pytest.Config) -> None:
    """Set the environment of all processes of this run: a host whose only way out is a proxy, here one that is gone."""
    os.environ.update(proxies.VARIABLES)
    if config.getoption("on_streams") and likenccl.can_be_built():
        os.environ.update(likenccl.env())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what needs a real server, and keep tests that share what their module made, a cluster say, on one worker."""
    for item in items:
        fixtures = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if INTEGRATION in item.path.parents or SERVERS & fixtures.keys() or parameters.get("world") == "nats":
            item.add_marker(pytest.mark.real)
        if any(found[-1].scope == "module" for name, found in fixtures.items() if name != "patient"):  # makes nothing
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
        if config.getoption("on_streams") and not likenccl.can_be_built():
            item.add_marker(pytest.mark.skip(likenccl.MISSING))
    config.stash[COLLECTED] = list(items)
    if config.getoption("write_list"):
        catalogue.PAGE.write_text(catalogue.page(items))


@pytest.fixture
def collected(request: pytest.FixtureRequest) -> list[pytest.Item]:
    """All tests that were found, those that this run leaves out by their marks as well."""
    return request.config.stash[COLLECTED]


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """One real server for all tests that leave it alive."""
    with serving(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture
def private_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A real server that the test may kill and restart."""
    with serving(tmp_path / "nats") as server:
        yield server


@pytest.fixture
async def nats_world(nats_server: NatsServer) -> AsyncIterator[NatsWorld]:
    """The shared server, emptied."""
    world = NatsWorld(nats_server.url)
    await world.provision()
    yield world
    await world.close()


@pytest.fixture
async def private_world(private_server: NatsServer) -> AsyncIterator[NatsWorld]:
    """The private server, provisioned."""
    world = NatsWorld(private_server.url)
    await world.provision()
    yield world
    await world.close()


@pytest.fixture(params=["nats", "memory"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """Each of the two buses in turn."""
    made: World
    if request.param == "memory":
        made = LocalWorld()
    else:
        made = NatsWorld(request.getfixturevalue("nats_server").url)
        await made.provision()
    yield made
    await made.close()


@pytest.fixture
async def bus(world: World) -> Bus:
    """A connection to each of the two buses in turn."""
    return await world.connect()


@pytest_asyncio.fixture(loop_scope="module")
async def held() -> AsyncIterator[Gate]:
    """The gate at which workers of a module's shared cluster wait for a fault."""
    async with gate() as found:
        yield found
