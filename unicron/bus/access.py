"""Credentials and TLS for the NATS server, from the files that the settings name."""

import base64
import re
import ssl
from pathlib import Path
from typing import NamedTuple, Self

import nkeys

from unicron.bus import topology
from unicron.errors import InvalidInputError
from unicron.files import read_secret
from unicron.settings import PREFIX, Settings

JOINER = "joiner"
"""User, and password, of all who come with a join token: it is known to everybody, and opens nothing but the question
whether one may be a node."""

KEY_BYTES = 35
"""Of a public key: what kind it is, itself, and a checksum."""

MOST_ASKED = 4096
"""Bytes that such a question may have."""


def ca_path(settings: Settings) -> str:
    """Return the path of the CA's certificate: that of the settings, else one beside our key; empty for none."""
    beside = Path(settings.nats_nkey).parent / "ca.pem"
    return settings.nats_ca or (str(beside) if settings.nats_nkey and beside.exists() else "")


def tls(settings: Settings) -> ssl.SSLContext | None:
    """Return what TLS needs, or None where the settings name no CA and none lies beside our key.

    Raises:
        InvalidInputError: a file does not hold what it should.
    """
    ca = ca_path(settings)
    if not ca:
        return None
    try:
        context = ssl.create_default_context(cafile=ca)
        if settings.nats_cert:
            context.load_cert_chain(settings.nats_cert, settings.nats_key)
    except OSError as error:
        files = ", ".join(filter(None, (ca, settings.nats_cert, settings.nats_key)))
        raise InvalidInputError(
            f"can't use the TLS files {files}: {error}; give PEM files that fit together"
        ) from error
    return context


def credentials(settings: Settings) -> str | None:
    """Return the path of the credentials file, or None where the settings name none.

    Raises:
        InvalidInputError: it lacks one of its two parts, at which the client would read on for ever.
    """
    if not settings.nats_creds:
        return None
    text = Path(settings.nats_creds).read_text(errors="replace")
    if "BEGIN NATS USER JWT" not in text or "BEGIN USER NKEY SEED" not in text:
        raise InvalidInputError(
            f"{PREFIX}NATS_CREDS: {settings.nats_creds} holds no user JWT and seed; "
            "give a file made by `nsc generate creds`"
        )
    return settings.nats_creds


def inbox(user: str) -> str:
    """Return the prefix of the inboxes of `user`, where nobody else may read; its key's file is called after it."""
    return f"_INBOX.{user}"


def public_key(path: Path) -> str:
    """Return the public key that belongs to the seed in the file `path`.

    Raises:
        InvalidInputError: there is no such file, others may read it, or it holds no seed of a user.
    """
    seed = read_secret(path)
    try:
        pair = nkeys.from_seed(bytearray(seed))
        key: str = pair.public_key.decode()
    except (nkeys.NkeysError, ValueError) as error:
        raise InvalidInputError(f"{path}: holds no nkey seed; give a file made by `unicron credentials`") from error
    if not key.startswith("U"):
        raise InvalidInputError(f"{path}: the seed in it is no user's; give a file made by `unicron credentials`")
    return key


def check_public_key(key: str) -> None:
    """Refuse what is not the public key of a user: a server reads no configuration that holds such a thing.

    Raises:
        InvalidInputError: it is none.
    """
    try:
        raw = base64.b32decode(key + "=" * (-len(key) % 8))
    except ValueError:
        raw = b""
    sound = len(raw) == KEY_BYTES and raw[0] == nkeys.PREFIX_BYTE_USER and nkeys.crc16_checksum(raw[:-2]) == raw[-2:]
    if not sound:
        raise InvalidInputError(f"{key!r} is no public key of a user")


def normalized_subject(subject: str) -> str:
    """Return a subject as a refusal has it: in small letters, and by the name that JetStream has for the server."""
    return subject.lower().replace(f"{topology.API}.", "$js.api.")


class Refusal(NamedTuple):
    """A publish or subscription that the server refused.

    Attributes:
        verb: publish or subscription.
        subject: plain.
    """

    verb: str
    subject: str

    @classmethod
    def parse(cls, error: Exception) -> Self | None:
        """Parse the server's `error`; return the refusal that it describes, or None."""
        found = _REFUSAL.search(str(error))
        return cls(found[1], normalized_subject(found[2])) if found else None

    def explain(self, name: str, subject: str) -> str:
        """Return it with the cure, for the connection `name`, and with `subject` as we spell it."""
        verb = "publish on" if self.verb == "publish" else "subscribe to"
        return f"the key of {name} gives no right to {verb} {subject}: name another key in {PREFIX}NATS_NKEY"


_REFUSAL = re.compile(r'permissions violation for (publish|subscription) to "([^" ]+)"')
