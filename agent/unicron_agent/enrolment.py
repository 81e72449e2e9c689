"""How a node that no one has named gets in: it makes a key, shows a join token once, and keeps what it is given.

In `RUN_DIR/keys`, mode 700: its seed `NODE.nk`, `ca.pem`, `tls.key` and `tls.pem`, `fabric.key`, and `enrolled.json`,
which says that it is let in. From then on it starts like any node, without the token; at each start it asks for
certificate and fabric key anew, so that it has those that hold.
"""

import logging
import os
import re
import secrets
import socket
import ssl
from collections.abc import Mapping
from pathlib import Path

import msgspec
import nkeys
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import NameOID
from msgspec.structs import replace

from unicron import subjects
from unicron.bus import joining
from unicron.bus.access import public_key
from unicron.contracts.enrolment import JoinRequest, Papers, PapersRequest
from unicron.errors import BusUnavailableError, InvalidInputError
from unicron.files import read_secret, write_secret
from unicron.jointoken import JoinToken
from unicron_agent.settings import AgentSettings

log = logging.getLogger(__name__)


class Enrolled(msgspec.Struct, kw_only=True, frozen=True):
    """The facts that a node keeps since it was let in."""

    node: str
    pool: str


async def enrol(settings: AgentSettings) -> AgentSettings:
    """Return the settings with what this node is and has by a join token, used now or once; else as they are.

    Raises:
        InvalidInputError: the token does not let it in, or a file can't be used; says why, and the cure.
        BusUnavailableError: nobody answers.
    """
    keys = Keys(Path(settings.run_dir, "keys"))
    if settings.nats_nkey or settings.nats_creds or not (settings.join_token_file or keys.record.exists()):
        return settings
    known = keys.enrolled()
    if known is None:
        known = await _join(settings, keys)
    if settings.node not in {"", known.node}:
        raise InvalidInputError(
            f"UNICRON_NODE {settings.node}: this node was let in as {known.node}; leave that setting out, or remove "
            f"{keys.folder}, and have it join with another token"
        )
    own = replace(
        settings,
        node=known.node,
        pool=settings.pool or known.pool,
        nats_nkey=str(keys.seed(known.node)),
        fabric_key=settings.fabric_key or str(keys.fabric),
    )
    try:
        keys.keep(await joining.papers(own, known.node, PapersRequest(certificate_request=keys.request(known.node))))
    except BusUnavailableError as error:
        if not keys.complete:
            raise
        log.warning("goes on with the papers it has: %s", error)
    return own


async def _join(settings: AgentSettings, keys: "Keys") -> Enrolled:
    token, node = joining.token_in(Path(settings.join_token_file)), settings.node or own_name(os.environ)
    keys.ensure(node, token)
    request = JoinRequest(
        token=token.id,
        secret=token.secret,
        node=node,
        public_key=public_key(keys.seed(node)),
        pool=settings.pool,
        machine=settings.machine,
    )
    reply = await joining.join(settings, token, request)
    if reply.error:
        raise InvalidInputError(reply.error)
    log.info("%s was let into pool %s by token %s", node, reply.pool, token.id)
    return keys.record_as(Enrolled(node=node, pool=reply.pool))


def own_name(environ: Mapping[str, str]) -> str:
    """Return what a scheduler calls this machine, else its host name up to the first dot."""
    name = environ.get("SLURMD_NODENAME") or socket.gethostname()
    return subjects.token(re.sub(r"[^A-Za-z0-9_-]", "-", name.split(".")[0])[:64], "node")


class Keys:
    """The keys and certificates of a node, in a folder that is its user's alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record, self.fabric = folder / "enrolled.json", folder / "fabric.key"
        self._tls, self._certificate, self._authority = folder / "tls.key", folder / "tls.pem", folder / "ca.pem"

    def seed(self, node: str) -> Path:
        """Return where the seed of the node's key is."""
        return self.folder / f"{node}.nk"

    @property
    def complete(self) -> bool:
        """Whether it lacks nothing to start with."""
        return all(path.exists() for path in (self._tls, self._certificate, self._authority, self.fabric))

    def enrolled(self) -> Enrolled | None:
        """Return as what the node was let in, None if it was not yet.

        Raises:
            InvalidInputError: the record can't be read.
        """
        if not self.record.exists():
            return None
        try:
            return msgspec.json.decode(read_secret(self.record), type=Enrolled)
        except msgspec.MsgspecError as error:
            raise InvalidInputError(
                f"{self.record}: {error}; remove {self.folder}, and have the node join anew"
            ) from error

    def ensure(self, node: str, token: JoinToken) -> None:
        """Make the node's key, where there is none yet, and write down whom it believes."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder.chmod(0o700)
        if not self.seed(node).exists():
            seed: bytes = nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER)
            write_secret(self.seed(node), seed + b"\n")
        write_secret(self._authority, ssl.DER_cert_to_PEM_cert(token.authority).encode())

    def record_as(self, known: Enrolled) -> Enrolled:
        """Write down that the node was let in; return as what."""
        write_secret(self.record, msgspec.json.encode(known))
        return known

    def request(self, node: str) -> str:
        """Return a request for a certificate, for a key that never leaves this machine."""
        if not self._tls.exists():
            fresh = ec.generate_private_key(ec.SECP256R1())
            write_secret(self._tls, fresh.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        key = load_pem_private_key(read_secret(self._tls), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise InvalidInputError(f"{self._tls}: no key on a curve; remove it, so that another one is made")
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, node)])
        made = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
        return made.public_bytes(Encoding.PEM).decode()

    def keep(self, papers: Papers) -> None:
        """Write down what the enroller gave."""
        for path, content in (
            (self._authority, papers.authority.encode()),
            (self._certificate, papers.certificate.encode()),
            (self.fabric, papers.fabric),
        ):
            write_secret(path, content)
