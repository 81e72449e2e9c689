"""The messages by which an unknown machine becomes a node, and the format of join tokens."""

from typing import Annotated

from msgspec import Meta

from unicron.contracts.base import Record
from unicron.contracts.pools import PoolName
from unicron.contracts.ranges import Few, Label, Moment, Name, Text, Who

MOST_USES = 10_000
LONGEST_S = 30 * 86400.0
"""A token that lets nodes in for longer is a key; those have files of their own."""

MOST_PEM = 16 * 1024

TokenId = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]*\Z")]
Digest = Annotated[bytes, Meta(max_length=32)]
Uses = Annotated[int, Meta(ge=1, le=MOST_USES)]
Lifetime = Annotated[float, Meta(ge=1, le=LONGEST_S)]
NodeName = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]*\Z")]
PublicKey = Annotated[str, Meta(min_length=56, max_length=56, pattern=r"^U[A-Z2-7]*\Z")]
"""An nkey of a user of the bus."""
Pem = Annotated[str, Meta(max_length=MOST_PEM)]


class JoinRequest(Record, kw_only=True, frozen=True):
    """A machine that is no node yet asks to become one.

    Attributes:
        token: id of a join token.
        secret: of that token.
        node: name that it wants.
        public_key: of the key that it has made itself.
        pool: that it is to belong to; empty: that of the token.
        machine: id under which the provisioner asked for its machine; empty where a person has started it.
    """

    token: TokenId
    secret: Annotated[bytes, Meta(min_length=32, max_length=32)]
    node: NodeName
    public_key: PublicKey
    pool: Name = ""
    machine: Name = ""


class JoinReply(Record, kw_only=True, frozen=True):
    """Answer to `JoinRequest`.

    Attributes:
        error: why it is not let in, and the cure; empty where it is.
        pool: that it belongs to.
    """

    error: Text = ""
    pool: Name = ""


class PapersRequest(Record, kw_only=True, frozen=True):
    """A node asks for its papers, over a connection that it has shown its key for.

    Attributes:
        certificate_request: PKCS #10 in PEM; its public key is certified for the sender's name, whatever it says.
    """

    certificate_request: Pem


class Papers(Record, kw_only=True, frozen=True):
    """Answer to `PapersRequest`: what a node needs besides its own key.

    Attributes:
        error: why there are none, and the cure.
        certificate: in PEM.
        authority: certificate that signed this one and the servers', in PEM.
        fabric: content of the fabric key's file.
    """

    error: Text = ""
    certificate: Pem = ""
    authority: Pem = ""
    fabric: Annotated[bytes, Meta(max_length=1024)] = b""


class TokenUse(Record, kw_only=True, frozen=True):
    """A node that came by a token.

    Attributes:
        at: Unix seconds.
    """

    node: Name
    at: Moment


class TokenView(Record, kw_only=True, frozen=True):
    """A join token, without its secret.

    Attributes:
        state: "valid", "used up", "expired" or "revoked".
        expires: Unix seconds.
        uses: nodes that it lets in altogether.
        used: those that came by it.
        by: its maker.
    """

    token: TokenId
    pool: PoolName
    state: Label
    expires: Moment
    uses: Uses
    used: Annotated[list[TokenUse], Few] = []
    machine: Name = ""
    by: Who = ""
