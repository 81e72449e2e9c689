"""Join tokens: with one of them a machine that no one has named becomes a node. One line of text, in a file.

It says whom to believe, too: the certificate of the cluster's authority, so nothing is sent to anybody else.
"""

import base64
import re
import secrets
from hashlib import sha256
from typing import NamedTuple, Self

from unicron.errors import InvalidInputError

SECRET_BYTES = 32
CURE = "give a file made by `unicron token create`, mode 600"

_TOKEN = re.compile(r"unicron\.([0-9a-f]{8})\.([A-Za-z0-9_-]{43})\.([A-Za-z0-9_-]{100,8000})")


class JoinToken(NamedTuple):
    """A join token.

    Attributes:
        id: that people know it by; no secret.
        secret: that opens the cluster.
        authority: certificate of the cluster's authority, DER.
    """

    id: str
    secret: bytes
    authority: bytes

    @classmethod
    def new(cls, authority: bytes) -> Self:
        """Return a token that nobody has yet."""
        return cls(secrets.token_hex(4), secrets.token_bytes(SECRET_BYTES), authority)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the token that a line stands for.

        Raises:
            InvalidInputError: it is none; the message does not show it.
        """
        found = _TOKEN.fullmatch(text.strip())
        if not found:
            raise InvalidInputError(f"no join token; {CURE}")
        try:
            return cls(found[1], _bytes(found[2]), _bytes(found[3]))
        except ValueError:
            raise InvalidInputError(f"a join token that was cut off or changed; {CURE}") from None

    @property
    def digest(self) -> bytes:
        """The digest of the secret, which the enroller keeps."""
        return digest(self.secret)

    def line(self) -> str:
        """Return what stands in the file; it is a secret."""
        return f"unicron.{self.id}.{_text(self.secret)}.{_text(self.authority)}\n"

    def __repr__(self) -> str:
        """Return what may be seen of it."""
        return f"JoinToken({self.id})"


def digest(secret: bytes) -> bytes:
    """Return a digest of a token's secret; it does not lead back to the secret, which is 256 random bits."""
    return sha256(secret).digest()


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
