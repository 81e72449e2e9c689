"""A real server, the enroller and the agent's half: join tokens, the rights that they give, and refusals."""

import asyncio
import contextlib
import socket
import ssl
import stat
from functools import partial

import nats as raw
import pytest
from cryptography import x509
from helpers.waiting import PATIENT_S, insist
from helpers.worlds import serving
from msgspec.structs import replace
from unicron_agent.enrolment import enrol, own_name
from unicron_agent.settings import AgentSettings
from unicron_deploy.enrolment.enroller import Enroller
from unicron_deploy.keys import Keyring

from unicron.bus import access, topology
from unicron.client import Client
from unicron.contracts.events import EnrolmentRefused, NodeEnrolled
from unicron.contracts.queries import CreateToken
from unicron.errors import BusUnavailableError, InvalidInputError, NotAllowedError
from unicron.files import write_secret
from unicron.jointoken import JoinToken
from unicron.service.bootstrap import connected
from unicron.settings import Settings

pytestmark = pytest.mark.real


class Place:
    """A cluster's server with TLS, its keys, and an enroller."""

    def __init__(self, server, keys, root):
        self.server, self.keys, self.root = server, keys, root

    def settings(self, user):
        return Settings(nats_url=self.server.url, nats_nkey=str(self.keys.path(user)), connect_timeout_s=PATIENT_S)

    def agent(self, name, token="", **more):
        """Return the settings of an agent whose run folder has this name."""
        path = token and self.root / f"{token.id}.token"
        if token and not path.exists():
            write_secret(path, token.line().encode())
        more = {"node": name, "connect_timeout_s": PATIENT_S, **more}
        run_dir = str(self.root / "nodes" / name)
        return AgentSettings(nats_url=self.server.url, run_dir=run_dir, join_token_file=str(path), **more)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("enrolment")
    keys = Keyring(root / "keys")
    keys.ensure(["node-1"], enrols=True)
    keys.certify(["127.0.0.1"])
    with serving(root / "nats", accounts=keys.accounts, tls=keys.accounts.parent) as server:
        place = Place(server, keys, root)

        async def provision():
            async with connected(place.settings("registry"), "registry") as bus:
                await topology.provision(bus.jetstream)

        asyncio.run(provision())
        yield place


@pytest.fixture
async def client(place):
    """The operator's, while an enroller serves."""
    async with (
        connected(place.settings("enroller"), "enroller") as bus,
        connected(place.settings("operator"), "operator") as operator,
    ):
        serving = asyncio.create_task(Enroller(bus, place.keys).run())
        client = Client(operator, by="ada@desk")
        await insist(client.tokens)
        yield client
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving


async def made(place, client, **order):
    authority = place.keys.authority.certificate.read_text()
    token = JoinToken.new(ssl.PEM_cert_to_DER_cert(authority))
    wanted = {"pool": "gpu", "uses": 1, "seconds": 600.0, **order}
    await client.create_token(CreateToken(token=token.id, digest=token.digest, **wanted))
    return token


async def published(client, kind, after):
    """Return the first message of a kind that the journal has behind a position."""
    async for _, message in client.follow(after):
        if isinstance(message, kind):
            return message
    return None


async def test_a_node_gets_in_once_keeps_what_it_was_given_and_needs_no_token_again(place, client):
    token, before = await made(place, client, machine="gpu-7f3a"), await client.tail()
    given = place.agent("new-1", token, machine="gpu-7f3a")
    settings = await enrol(given)
    assert (settings.node, settings.pool) == ("new-1", "gpu")
    fact = await published(client, NodeEnrolled, before)
    assert (fact.node, fact.pool, fact.token, fact.machine, fact.uses_left) == ("new-1", "gpu", token.id, "gpu-7f3a", 0)
    assert (fact.source, fact.public_key) == ("enroller", place.keys.users()["new-1"])
    folder = place.root / "nodes" / "new-1" / "keys"
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == dict.fromkeys(
        ["ca.pem", "enrolled.json", "fabric.key", "new-1.nk", "tls.key", "tls.pem"], 0o600
    )
    assert (folder / "fabric.key").read_bytes() == place.keys.fabric("node-1").read_bytes()
    assert not place.keys.path("new-1").exists(), "its seed never left it"
    certificate = x509.load_pem_x509_certificate((folder / "tls.pem").read_bytes())
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes()))
    assert certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value == (
        x509.SubjectAlternativeName([x509.DNSName("new-1")])
    )
    (place.root / f"{token.id}.token").unlink()
    place.keys.rotate_fabric()
    again = await enrol(place.agent("new-1"))
    assert again == replace(settings, join_token_file="", machine=""), "a restart needs no token"
    assert (folder / "fabric.key").read_bytes() == place.keys.fabric("node-1").read_bytes(), "it has the new one"
    async with connected(again, "agent.new-1") as bus:
        await bus.append("unicron.v1.evt.new-1.T.k", b"", "1")
        with pytest.raises(NotAllowedError):
            await bus.append("unicron.v1.evt.node-1.T.k", b"", "2")
        with pytest.raises(NotAllowedError):
            await bus.ask("unicron.v1.enrol.node-1", b"", PATIENT_S)


async def refused(place, client, settings, why, name=None):
    """See that a node does not get in, learns why, and that the journal has it too."""
    before, users = await client.tail(), place.keys.users()
    with pytest.raises(InvalidInputError, match=why):
        await enrol(settings)
    fact = await published(client, EnrolmentRefused, before)
    assert (fact.name, fact.source) == (name or settings.node, "enroller")
    assert place.keys.users() == users
    return fact


async def test_a_token_that_was_copied_lets_in_one_and_the_other_is_refused_and_reported(place, client):
    token = await made(place, client)
    await enrol(place.agent("first", token))
    fact = await refused(place, client, place.agent("thief", token), r"used up: 1 of 1 came by it \(first\)")
    assert (fact.name, fact.token) == ("thief", token.id)


async def test_tokens_that_do_not_hold_let_nobody_in(place, client):
    token = await made(place, client)
    await refused(place, client, place.agent("n-pool", token, pool="cpu"), "for pool gpu, not for cpu")
    await refused(place, client, place.agent("node-1", token), "another machine is node-1, with another key")
    await client.revoke_token(token.id)
    await refused(place, client, place.agent("n-revoked", token), "was revoked")
    forged = JoinToken(token.id, bytes(32), token.authority)
    (place.root / f"{token.id}.token").unlink()
    await refused(place, client, place.agent("n-forged", forged), "it is forged")
    unknown = JoinToken.new(token.authority)
    await refused(place, client, place.agent("n-unknown", unknown), "unknown here")
    short = await made(place, client, seconds=1.0)
    await until_async(partial(expired, client, short.id))
    await refused(place, client, place.agent("n-late", short), "expired at")


async def expired(client, name):
    return next(view for view in await client.tokens() if view.token == name).state == "expired"


async def until_async(condition):
    while not await condition():
        await asyncio.sleep(0.05)


async def test_nobody_but_the_tokens_own_cluster_sees_its_secret(place, client, tmp_path):
    other = Keyring(tmp_path / "other")
    other.ensure([])
    other.certify(["127.0.0.1"])
    token = JoinToken.new(ssl.PEM_cert_to_DER_cert(other.authority.certificate.read_text()))
    with pytest.raises(BusUnavailableError, match="not the cluster that the token is of"):
        await enrol(place.agent("n-elsewhere", token, connect_timeout_s=1.0))


async def test_who_asks_to_join_may_do_that_and_nothing_else(place, client):
    refused = []

    async def note(error):
        refused.append(str(error).partition(' to "')[2].rstrip('"'))

    publish = [
        "unicron.v1.evt.node-1.WorkerExited.gpt",
        "unicron.v1.cmd.node-1.StopWorker.gpt",
        "unicron.v1.tel.node-1.NodeHeartbeat.node-1",
        "unicron.v1.rpc.registry",
        "unicron.v1.ord.enroller",
        "unicron.v1.enrol.node-1",
        "$JS.API.DIRECT.GET.UNICRON",
        "unicron.js.STREAM.INFO.UNICRON",
        "$SYS.REQ.SERVER.PING",
    ]
    subscribe = [
        "unicron.stored.evt.>",
        "unicron.stored.cmd.node-1.>",
        "unicron.v1.enrol",
        "unicron.v1.tel.>",
        "_INBOX.node-1.>",
    ]
    stranger = await raw.connect(
        place.server.url,
        user=access.JOINER,
        password=access.JOINER,
        tls=ssl.create_default_context(cafile=str(place.keys.authority.certificate)),
        inbox_prefix="_INBOX.joiner",
        error_cb=note,
    )
    try:
        for subject in publish:
            await stranger.publish(subject, b"")
        for subject in subscribe:
            await stranger.subscribe(subject)
        for _ in range(2):
            await stranger.flush()
        before = await client.tail()
        garbage = await stranger.request("unicron.v1.enrol", b"garbage", timeout=PATIENT_S)
        assert b"can't be read" in garbage.data
        assert "can't be read" in (await published(client, EnrolmentRefused, before)).reason
    finally:
        await stranger.close()
    assert sorted(refused) == sorted(subject.lower() for subject in [*publish, *subscribe])


async def test_no_secret_stands_in_the_journal_in_a_log_or_in_the_enrollers_memory_of_tokens(place, client, caplog):
    caplog.set_level("DEBUG")
    token = await made(place, client)
    settings = await enrol(place.agent("quiet", token))
    seed = (place.root / "nodes" / "quiet" / "keys" / "quiet.nk").read_text().strip()
    fabric = place.keys.fabric("node-1").read_text().split()[0]
    secrets = [token.line().split(".")[2], token.secret.hex(), repr(token.secret), seed, fabric]
    tail = await client.tail()
    entries = [entry.data async for entry in _upto(client.bus.follow(["unicron.v1.>"], 0), tail)]
    journal = b"\n".join(entries)
    assert token.secret not in journal
    kept = (place.keys.folder / "enroller" / "tokens.json").read_text()
    for text in (journal.decode("latin-1"), kept, caplog.text, place.server.log_path.read_text(), repr(settings)):
        assert [secret for secret in secrets if secret in text] == []


async def _upto(entries, tail):
    async for entry in entries:
        yield entry
        if entry.sequence >= tail:
            return


def test_a_node_is_called_as_its_scheduler_or_its_host(monkeypatch):
    assert own_name({"SLURMD_NODENAME": "gpu-07"}) == "gpu-07"
    monkeypatch.setattr(socket, "gethostname", lambda: "rack_3.node+1.example")
    assert own_name({}) == "rack_3"
