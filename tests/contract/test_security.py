"""Credentials and TLS: what the settings' files are for, against servers that ask for them."""

import base64
import contextlib
import json
import os

import nkeys
import pytest
from helpers import worlds
from unicron_deploy.certificates import Authority

from unicron.bootstrap import connected
from unicron.bus import nats
from unicron.errors import BusUnavailableError, InvalidInputError
from unicron.settings import Settings

pytestmark = pytest.mark.real


@contextlib.contextmanager
def serving(directory, monkeypatch, extra):
    """Run a server whose configuration is ours to write."""
    monkeypatch.setattr(
        "unicron_deploy.nats_server.config_text",
        lambda store, host, port, name, **_: f"server_name: {name}\nport: {port}\n{extra}",
    )
    with worlds.serving(directory / "nats") as server:
        yield server


# --- TLS -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def certificates(tmp_path):
    """A CA, and a certificate of it for 127.0.0.1 that serves both sides."""
    authority = Authority(tmp_path)
    authority.ensure()
    authority.certify(tmp_path, ["127.0.0.1"])
    return {"ca": str(tmp_path / "ca.pem"), "cert": str(tmp_path / "tls.pem"), "key": str(tmp_path / "tls.key")}


async def test_tls_with_certificates_on_both_sides(tmp_path, certificates, monkeypatch):
    tls = "tls {{ cert_file: {cert!r}, key_file: {key!r}, ca_file: {ca!r}, verify: true }}".format(**certificates)
    with serving(tmp_path, monkeypatch, tls) as server:
        url = f"tls://127.0.0.1:{server.port}"
        settings = Settings(
            nats_url=url, nats_ca=certificates["ca"], nats_cert=certificates["cert"], nats_key=certificates["key"]
        )
        async with connected(settings, "test") as bus:
            await bus.flush()
        stranger = Settings(nats_url=url, nats_ca=certificates["ca"], connect_timeout_s=0.5)
        with pytest.raises(BusUnavailableError, match="no NATS server answers"):
            await nats.connect(stranger, "test")
        unknown_ca = Settings(nats_url=url, connect_timeout_s=3.0)
        with pytest.raises(BusUnavailableError, match="certificate verify failed"):
            await nats.connect(unknown_ca, "test")


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
    with serving(tmp_path, monkeypatch, config) as server:
        async with connected(Settings(nats_url=server.url, nats_creds=good), "test") as bus:
            await bus.flush()
        with pytest.raises(BusUnavailableError, match="Authorization Violation"):
            await nats.connect(Settings(nats_url=server.url, nats_creds=bad, connect_timeout_s=3.0), "test")


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
