"""Certificates and credentials: what a keyring's, and those that settings name, are for; and strangers."""

import asyncio
import base64
import contextlib
import json
import os
import stat
import subprocess
import sys

import nkeys
import pytest
from helpers import ROOT
from helpers.buses import say
from helpers.fabric import Node, state_ref
from helpers.ports import free_port
from helpers.waiting import PATIENT_S, insist
from helpers.worlds import serving
from unicron_agent.fabric import CERTIFICATE, Fabric
from unicron_agent.snapshots.sending import send_copy
from unicron_agent.snapshots.sources import OtherNode
from unicron_deploy import certificates
from unicron_deploy.certificates import Authority
from unicron_deploy.keys import Keyring
from unicron_deploy.nats_server import Routes, config_text

from unicron.bus import nats, topology
from unicron.contracts.events import FailureDetected
from unicron.contracts.failures import Severity
from unicron.contracts.states import Keeper
from unicron.errors import BusUnavailableError, InvalidInputError, StateTransferError
from unicron.service.bootstrap import connected
from unicron.settings import Settings

pytestmark = pytest.mark.real

NAME, CONTENT = "gpt-1.1.saved", b"state" * 100_000
LONG = "n_3-" + "x" * 60


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    ring = Keyring(tmp_path_factory.mktemp("tls") / "keys")
    ring.ensure(["n1", "n2", LONG])
    ring.certify(["127.0.0.1", "nats"])
    return ring


# --- NATS ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def served(directory, keys, monkeypatch, count=1, tls=True):
    """Run servers with the keyring's certificate; yield them."""
    folder = keys.accounts.parent if tls else None
    monkeypatch.setattr(
        "unicron_deploy.nats_server.config_text", lambda *words, **more: config_text(*words, **more | {"tls": folder})
    )
    routes = [free_port() for _ in range(count)]
    keys.route([f"127.0.0.1:{port}" for port in routes])
    with contextlib.ExitStack() as stack:
        servers = []
        for number, port in enumerate(routes):
            name, route = f"nats-{number}", Routes(port, keys.routes) if count > 1 else None
            server = serving(directory / name, accounts=keys.accounts, name=name, routes=route)
            servers.append(stack.enter_context(server))
        yield servers


def settings(server, path, **more):
    return Settings(nats_url=server.url, nats_nkey=str(path), **{"connect_timeout_s": PATIENT_S, **more})


async def test_a_key_brings_the_authority_along_and_who_does_not_know_it_connects_to_nobody(
    tmp_path, keys, monkeypatch
):
    alone = tmp_path / "user.nk"
    alone.write_bytes(keys.path("user").read_bytes())
    alone.chmod(0o600)
    with served(tmp_path, keys, monkeypatch) as [server]:
        async with connected(settings(server, keys.path("registry")), "registry") as bus:
            await topology.provision(bus.jetstream)
            assert await bus.tail() == 0
        with pytest.raises(
            BusUnavailableError, match=r"certificate verify failed.*put the ca\.pem of .* beside your key"
        ):
            await nats.connect(settings(server, alone), "user", patient=False)
        other = Settings(
            nats_url=f"nats://localhost:{server.port}", nats_nkey=str(keys.path("user")), connect_timeout_s=PATIENT_S
        )
        with pytest.raises(BusUnavailableError, match="name the server in UNICRON_NATS_URL as its certificate does"):
            await nats.connect(other, "user", patient=False)


async def test_a_tool_of_ones_own_needs_nothing_but_its_key_with_the_authority_beside(tmp_path, keys, monkeypatch):
    what = {"severity": Severity.SEV2, "method": "process_supervision", "status": "killed", "node": "n1"}
    with served(tmp_path, keys, monkeypatch) as [server]:
        async with connected(settings(server, keys.path("registry")), "registry") as bus:
            await topology.provision(bus.jetstream)
        async with connected(settings(server, keys.path("detector")), "detector") as bus:
            await say(bus, FailureDetected(id="f", at=1.0, source="detector", **what))
        environment = {**os.environ, "UNICRON_NATS_NKEY": str(keys.path("subscriber"))}
        words = [sys.executable, str(ROOT / "examples" / "subscriber.py"), server.url]
        tool = await asyncio.create_subprocess_exec(*words, env=environment, stdout=asyncio.subprocess.PIPE)
        assert b"FAILURE sev2 killed n1" in await tool.stdout.readline()
        tool.kill()
        await tool.wait()


async def test_a_server_that_speaks_in_plain_is_not_the_one_that_a_key_with_an_authority_is_for(
    tmp_path, keys, monkeypatch
):
    with served(tmp_path, keys, monkeypatch, tls=False) as [server], pytest.raises(BusUnavailableError, match="no TLS"):
        await nats.connect(settings(server, keys.path("user")), "user", patient=False)


@pytest.mark.exhaustive("three servers take seconds to find one another")
async def test_servers_know_one_another_by_their_certificates(tmp_path, keys, monkeypatch):
    with served(tmp_path, keys, monkeypatch, count=3) as servers:
        urls = ",".join(server.url for server in servers)
        known = Settings(nats_url=urls, nats_nkey=str(keys.path("registry")), connect_timeout_s=PATIENT_S)
        async with connected(known, "registry") as bus:
            await insist(lambda: topology.provision(bus.jetstream, topology.COPIES))
            info = await bus.jetstream.stream_info(topology.STREAM)
            assert len(info.cluster.replicas) == 2


# --- state servers ---------------------------------------------------------------------------------------------------


class CertifiedNode(Node):
    """A node with a certificate, and its way to others."""

    def __init__(self, root, keys, name):
        super().__init__(name, root / name, Fabric(str(keys.fabric(name)), name))

    def ref(self, claimed=None):
        return state_ref(CONTENT, NAME, claimed or self.name, self.address)

    async def fetch(self, ref):
        return (await OtherNode(self.fabric).obtain(ref, self.folder / "taken")).read_bytes()


@pytest.mark.parametrize("name", ["n1", LONG])
async def test_nodes_show_one_another_who_they_are(tmp_path, keys, name):
    holder, other = CertifiedNode(tmp_path, keys, name), CertifiedNode(tmp_path, keys, "n2")
    (holder.folder / NAME).write_bytes(CONTENT)
    async with holder.served(), other.served():
        assert await other.fetch(holder.ref()) == CONTENT
        keeper = Keeper(node="n2", address=other.address)
        await send_copy(holder.memory, holder.ref(), keeper, holder.traffic, holder.fabric, paced=False)
        assert [ref.size for _, ref in other.reports if ref] == [len(CONTENT)]
        with pytest.raises(StateTransferError, match="n2"):  # it is another node that answers there
            await other.fetch(holder.ref(claimed="n2"))
        keeper = Keeper(node=name, address=other.address)
        with pytest.raises(StateTransferError):
            await send_copy(holder.memory, holder.ref(), keeper, holder.traffic, holder.fabric, paced=False)


async def test_who_has_the_fabric_key_and_no_certificate_of_this_cluster_gets_nothing(tmp_path, keys):
    ring = Keyring(tmp_path / "keys")
    ring.ensure(["plain", "n2"])
    for name in ("plain", "n2"):
        ring.fabric(name).write_bytes(keys.fabric("n1").read_bytes())
    plain = CertifiedNode(tmp_path, ring, "plain")
    ring.certify([])
    stranger, holder = CertifiedNode(tmp_path, ring, "n2"), CertifiedNode(tmp_path, keys, "n1")
    (holder.folder / NAME).write_bytes(CONTENT)
    async with holder.served():
        for node in (stranger, plain):
            with pytest.raises(StateTransferError):
                await node.fetch(holder.ref())


def test_a_certificate_without_its_other_files_is_named(tmp_path, keys):
    for name in ("fabric.key", *CERTIFICATE[:-1]):
        (tmp_path / name).write_bytes((keys.fabric("n1").parent / name).read_bytes())
        (tmp_path / name).chmod(0o600)
    with pytest.raises(InvalidInputError, match=r"no certificate without .*tls\.pem; copy"):
        Fabric(str(tmp_path / "fabric.key"), "n1")


# --- the authority ---------------------------------------------------------------------------------------------------


def test_certificates_stay_until_half_their_life_is_over_or_their_names_change(tmp_path, monkeypatch):
    ring = Keyring(tmp_path)
    ring.ensure(["n1"])
    ring.certify(["nats"])
    server, node = tmp_path / "server" / "tls.pem", tmp_path / "n1" / "tls.pem"
    assert stat.S_IMODE((tmp_path / "ca" / "ca.key").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "n1" / "tls.key").stat().st_mode) == 0o600
    first = server.read_bytes(), node.read_bytes()
    ring.certify(["nats"])
    ring.ensure(["n1", "n9"])
    assert (tmp_path / "n9" / "tls.pem").exists()
    assert (server.read_bytes(), node.read_bytes()) == first
    ring.certify(["nats", "nats-2"])
    assert server.read_bytes() != first[0]
    assert node.read_bytes() == first[1]
    monkeypatch.setattr(certificates, "LIFE", certificates.LIFE * 2.1)  # as if the first half were over
    ring.certify(["nats", "nats-2"])
    assert node.read_bytes() != first[1]
    (tmp_path / "ca" / "ca.pem").write_bytes(node.read_bytes())
    with pytest.raises(InvalidInputError, match=r"ca\.key: not the key of .*ca\.pem; restore both"):
        ring.ensure([])


def test_the_container_of_the_keys_makes_all_of_it(tmp_path):
    words = ["-m", "unicron_deploy.keys", "--dir", str(tmp_path), "--tls", "nats,127.0.0.1", "n1"]
    subprocess.run([sys.executable, *words], check=True)
    made = {name: {path.name for path in (tmp_path / name).iterdir()} for name in ("n1", "user")}
    assert made == {"n1": {"ca.pem", "fabric.key", "n1.nk", "tls.key", "tls.pem"}, "user": {"ca.pem", "user.nk"}}
    assert not list((tmp_path / "server").glob("ca.key"))


@contextlib.contextmanager
def configured(directory, monkeypatch, extra):
    """Run a server whose configuration is ours to write."""
    monkeypatch.setattr(
        "unicron_deploy.nats_server.config_text",
        lambda store, host, port, name, **_: f"server_name: {name}\nport: {port}\n{extra}",
    )
    with serving(directory / "nats") as server:
        yield server


# --- certificates that settings name ---------------------------------------------------------------------------------


@pytest.fixture
def issued(tmp_path):
    """A CA, and a certificate of it for 127.0.0.1 that serves both sides."""
    authority = Authority(tmp_path)
    authority.ensure()
    authority.certify(tmp_path, ["127.0.0.1"])
    return {"ca": str(tmp_path / "ca.pem"), "cert": str(tmp_path / "tls.pem"), "key": str(tmp_path / "tls.key")}


async def test_tls_with_certificates_on_both_sides(tmp_path, issued, monkeypatch):
    tls = "tls {{ cert_file: {cert!r}, key_file: {key!r}, ca_file: {ca!r}, verify: true }}".format(**issued)
    with configured(tmp_path, monkeypatch, tls) as server:
        url = f"tls://127.0.0.1:{server.port}"
        settings = Settings(nats_url=url, nats_ca=issued["ca"], nats_cert=issued["cert"], nats_key=issued["key"])
        async with connected(settings, "test") as bus:
            await bus.flush()
        stranger = Settings(nats_url=url, nats_ca=issued["ca"], connect_timeout_s=PATIENT_S)
        with pytest.raises(BusUnavailableError, match=r"where it asks for a certificate of ours, .*UNICRON_NATS_CERT"):
            await nats.connect(stranger, "test", patient=False)
        unknown_ca = Settings(nats_url=url, connect_timeout_s=PATIENT_S)
        with pytest.raises(BusUnavailableError, match=r"certificate verify failed.*, of containers, fetch both"):
            await nats.connect(unknown_ca, "test", patient=False)


# --- credentials -----------------------------------------------------------------------------------------------------


def keypair(prefix):
    return nkeys.from_seed(nkeys.encode_seed(os.urandom(32), prefix))


def token(issuer, subject, kind, **claims):
    """Return a NATS JWT."""

    def part(raw):
        return base64.urlsafe_b64encode(raw).rstrip(b"=")

    body = {"iss": issuer.public_key.decode(), "sub": subject.public_key.decode(), "jti": kind, "iat": 1, "name": kind,
            "nats": {"type": kind, "version": 2, **claims}}  # fmt: skip
    signed = b".".join(part(json.dumps(each).encode()) for each in ({"typ": "JWT", "alg": "ed25519-nkey"}, body))
    return (signed + b"." + part(issuer.sign(signed))).decode()


def creds(path, jwt, user):
    path.write_text(
        f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n"
    )
    return str(path)


async def test_credentials_let_in_and_others_are_refused(tmp_path, monkeypatch):
    operator, user = keypair(nkeys.PREFIX_BYTE_OPERATOR), keypair(nkeys.PREFIX_BYTE_USER)
    account, stranger = keypair(nkeys.PREFIX_BYTE_ACCOUNT), keypair(nkeys.PREFIX_BYTE_ACCOUNT)
    limits = {"subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "conn": -1, "leaf": -1}
    config = (
        f"operator: {token(operator, operator, 'operator')}\nresolver: MEMORY\nresolver_preload: {{\n"
        f"  {account.public_key.decode()}: {token(operator, account, 'account', limits=limits)}\n}}\n"
    )
    rights = {"pub": {}, "sub": {}, "subs": -1, "data": -1, "payload": -1}
    good = creds(tmp_path / "good.creds", token(account, user, "user", **rights), user)
    bad = creds(tmp_path / "bad.creds", token(stranger, user, "user", **rights), user)
    with configured(tmp_path, monkeypatch, config) as server:
        async with connected(Settings(nats_url=server.url, nats_creds=good), "test") as bus:
            await bus.flush()
        stranger = Settings(nats_url=server.url, nats_creds=bad, connect_timeout_s=PATIENT_S)
        with pytest.raises(BusUnavailableError, match="Authorization Violation"):
            await nats.connect(stranger, "test", patient=False)


@pytest.mark.parametrize("text", ["", "-----BEGIN NATS USER JWT-----\nx\n"])
async def test_a_credentials_file_without_its_parts_is_named(tmp_path, text):
    file = tmp_path / "broken.creds"
    file.write_text(text)
    with pytest.raises(InvalidInputError, match=rf"UNICRON_NATS_CREDS: {file} holds no user JWT and seed"):
        await nats.connect(Settings(nats_creds=str(file)), "test")


async def test_a_ca_file_that_is_none_is_named(tmp_path):
    file = tmp_path / "broken.pem"
    file.write_text("nothing")
    with pytest.raises(InvalidInputError, match=rf"can't use the TLS files {file}"):
        await nats.connect(Settings(nats_ca=str(file)), "test")
