"""What a server does whose disk has no room, and how much of it the journal takes."""

import os

import pytest
from helpers.worlds import known, serving
from unicron_deploy import nats_server
from unicron_deploy.keys import Keyring

from unicron.bus import nats, topology

pytestmark = pytest.mark.real

MB = 1024**2


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A server with room for 40 MB, and its keys."""
    whole = nats_server.config_text
    monkeypatch.setattr(
        nats_server,
        "config_text",
        lambda *words, **more: whole(*words, **more).replace("jetstream {", "jetstream {\n  max_file_store: 40MB", 1),
    )
    keys = Keyring(tmp_path / "keys")
    keys.ensure(["n1"])
    with serving(tmp_path / "nats", accounts=keys.accounts) as server:
        yield server, keys


async def test_who_has_much_to_say_pushes_out_what_is_old_and_keeps_nobody_from_storing(small):
    registry, node = [await nats.connect(known(*small, user), user) for user in ("registry", "n1")]
    for _ in range(2):  # again, as at each start
        await topology.provision(registry.jetstream)
        kept = (await registry.jetstream.stream_info(topology.STREAM)).config.max_bytes
        assert kept == 32 * MB
    for number in range(600):
        await node.append("unicron.v1.evt.n1.T.k", os.urandom(90_000), str(number))
    assert await registry.tail() == 600
    state = (await registry.jetstream.stream_info(topology.STREAM)).state
    assert state.first_seq > 1
    assert state.bytes <= 32 * MB
    for name in ("state", "lease"):
        await registry.bucket(name).create("registry", b"mine")
    for bus in (registry, node):
        await bus.close()
