"""Servers that can't be used: a command fails at once with server, reason and cure; services retry."""

import pytest
from helpers.ports import free_port
from helpers.refusing import INFO, REFUSED, WELCOME, serving
from nats.errors import Error as NatsError
from unicron_deploy.keys import Keyring

from unicron.bus import dialling, nats
from unicron.errors import BusUnavailableError
from unicron.settings import Settings

pytestmark = pytest.mark.timeout(15)  # far below how long a command could wait here

TLS = {**INFO, "tls_required": True}


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(dialling, "SETTLE_S", 0.0)


async def connect(url, **options):
    settings = Settings(nats_url=url, connect_timeout_s=1000.0, nats_nkey=options.pop("key", ""))
    await (await nats.connect(settings, "test", **options)).close()


@pytest.mark.parametrize(
    ("greeting", "says"),
    [
        (
            INFO,
            r"the NATS server at {} turns us away \(Authorization Violation\): .* without a key; set UNICRON",
        ),
        (b"SSH-2.0-OpenSSH\r\n", "no NATS server answers at {}: the listener there is no NATS server .*; see what has"),
        (b"INFO x\r\n", "no NATS server answers at {}: the listener there is no NATS server .*; see what has"),
        (
            {**INFO, "tls_required": True},
            "no NATS server answers at {}: it ends TLS .*; where it asks for",
        ),
    ],
)
async def test_a_server_that_can_not_be_used_is_told_at_once_with_the_cure(greeting, says):
    async with serving(REFUSED, greetings=[greeting]) as url:
        with pytest.raises(BusUnavailableError, match=says.format(url)):
            await connect(url, patient=False)


async def test_a_closed_port_and_several_servers_of_which_none_is_left_are_told_at_once():
    closed = f"nats://127.0.0.1:{free_port()}"
    with pytest.raises(BusUnavailableError, match=f"answers at {closed}: nothing listens there .*; start the server"):
        await connect(closed, patient=False)
    async with serving(REFUSED) as refuses:
        with pytest.raises(BusUnavailableError, match=f"the NATS server at {refuses} turns us away"):
            await connect(f"{closed},{refuses}", patient=False)
        async with serving(WELCOME) as good:
            await connect(f"{refuses},{closed},{good}", patient=False)


async def test_a_key_that_is_not_known_is_named_and_a_service_waits_until_it_is(tmp_path):
    keys = Keyring(tmp_path)
    keys.ensure([])
    key = str(keys.path("user"))
    async with serving(REFUSED, REFUSED, WELCOME) as url:
        with pytest.raises(BusUnavailableError, match=f"does not know the key in {key}, which is another cluster's"):
            await connect(url, patient=False, key=key)
        await connect(url, key=key)


@pytest.mark.parametrize("telling", [0, 1])
async def test_of_several_the_most_telling_reason_is_told(telling):
    tried = dialling.Dialling(Settings(nats_url="nats://a,nats://b"), patient=False)
    errors = [ConnectionRefusedError("closed"), ConnectionRefusedError("closed")]
    errors[telling] = NatsError("nats: 'Authorization Violation'")
    for server, error in zip("ab", errors, strict=True):
        tried.record_attempt(server, error, 2)
    assert tried.in_vain.done()
    assert str(tried.failure()).startswith(f"the NATS server at {'ab'[telling]} turns us away")


async def test_a_handshake_that_failed_holds_up_no_other():
    async with serving(WELCOME, greetings=[TLS, TLS, INFO]) as url:
        await connect(url)
