"""Proofs that somebody carries the key of a cluster's nodes, the fabric key: made and checked; no clock, no socket.

A proof is an HMAC-SHA256 (RFC 2104) over what it is for, so who sees one can use it for nothing else. Where a key is
being replaced two are held, and what is shown under either of them holds: nodes read the new one at different times.
"""

import hmac
import re
import secrets
from collections.abc import Container, Iterable, Sequence
from hashlib import sha256
from typing import Annotated, Self

import msgspec
from msgspec import Meta

from unicron.errors import InvalidInputError, UntimelyProofError

KEY_BYTES = 32
MOST = 2
"""Keys that are held at once."""

BOOT_CHARS = 24

WINDOW_S = 60.0
"""How far the clocks of two nodes may be apart, and how old the proof of a call may be: seconds. Beyond that a server
asks for a proof over a challenge of its own, which is as new as it says whatever the caller's clock shows."""

_LINE = re.compile(rb"([0-9a-f]{64})(?: until (\d{1,12}))?")

Proofs = Annotated[list[Annotated[bytes, Meta(max_length=KEY_BYTES)]], Meta(max_length=MOST)]
"""One under each key that is held, as many as there may be."""

Nonce = Annotated[bytes, Meta(min_length=16, max_length=16)]


def nonce() -> bytes:
    """Return a number that nobody has used or will guess."""
    return secrets.token_bytes(16)


def boot_id(secret: str) -> str:
    """Return the public id of an agent's start; only the agent, and readers of its end, know the `secret`."""
    return sha256(secret.encode()).hexdigest()[:BOOT_CHARS]


def new_key() -> bytes:
    """Return a key that nobody else has."""
    return secrets.token_bytes(KEY_BYTES)


def key_file_text(key: bytes, before: bytes | None = None, until: float = 0.0) -> bytes:
    """Return what stands in the file of a key; the one before it is held as well until then, in Unix seconds."""
    return b"%s\n" % key.hex().encode() + (b"%s until %d\n" % (before.hex().encode(), until) if before else b"")


def keys_in(content: bytes, now: float) -> list[bytes]:
    """Return the keys that a file's content says are held at `now`, in Unix seconds; the newest is the first.

    Raises:
        InvalidInputError: it is no such content.
    """
    lines = [_LINE.fullmatch(line) for line in content.strip().split(b"\n")]
    if len(lines) > MOST or not all(lines) or (lines[0] and lines[0][2]):
        raise InvalidInputError("holds no fabric key; give a file made by `unicron credentials`")
    return [bytes.fromhex(line[1].decode()) for line in lines if line and (not line[2] or now < int(line[2]))]


def sign(key: bytes, *over: str | bytes | float) -> bytes:
    """Return what only who has the key can say of these things."""
    return hmac.digest(key, msgspec.msgpack.encode(over), "sha256")


def is_signed(keys: Iterable[bytes], proofs: Sequence[bytes], *over: str | bytes | float) -> bool:
    """Return whether one of the proofs is that of these things under one of the keys."""
    return any(hmac.compare_digest(sign(key, *over), each) for key in keys for each in proofs)


def epoch_secrets(keys: Iterable[bytes], rendezvous_id: str, epoch: int) -> list[bytes]:
    """Return the secrets of a membership, which its workers get; they open no other membership."""
    return [sign(key, "membership", rendezvous_id, epoch) for key in keys]


def challenge_responses(epoch_secrets: Iterable[bytes], address: str, challenge: bytes) -> list[bytes]:
    """Return what a worker answers to the challenge of the rendezvous at `address`; it holds there and this once."""
    return [sign(secret, *_meeting(address, challenge)) for secret in epoch_secrets]


def is_response(epoch_secrets: Iterable[bytes], proofs: Sequence[bytes], address: str, challenge: bytes) -> bool:
    """Return whether a challenge was answered with a secret of the membership."""
    return is_signed(epoch_secrets, proofs, *_meeting(address, challenge))


def _meeting(address: str, challenge: bytes) -> tuple[str | bytes, ...]:
    return "rendezvous", address, challenge


class CallProof(msgspec.Struct, kw_only=True, frozen=True):
    """Goes with a call to a state server, ahead of what is asked for.

    Attributes:
        node: the caller's.
        at: when, in Unix seconds of that node.
        nonce: of this call alone.
        request: SHA-256 of the first message.
        challenge: of the server, which it answers; empty where there was none.
        proofs: over all of these, the method and the server's address.
    """

    node: Annotated[str, Meta(max_length=128)]
    at: float
    nonce: Nonce
    request: Annotated[bytes, Meta(max_length=32)]
    proofs: Proofs = []
    challenge: Annotated[bytes, Meta(max_length=16)] = b""

    @classmethod
    def create(
        cls,
        keys: Iterable[bytes],
        method: str,
        address: str,
        request: bytes,
        node: str,
        at: float,
        challenge: bytes = b"",
    ) -> Self:
        """Return the proof for a call of `node` to the server at `address`."""
        asked = sha256(request).digest()
        bare = cls(node=node, at=float(at), nonce=nonce(), request=asked, challenge=challenge)
        return msgspec.structs.replace(bare, proofs=[sign(key, *bare.signed_values(method, address)) for key in keys])

    def signed_values(self, method: str, address: str) -> tuple[str | bytes | float, ...]:
        """Return what is proven."""
        answer = (self.challenge,) if self.challenge else ()  # older versions know of none
        return "call", method, address, self.node, self.at, self.nonce, self.request, *answer

    def matches(self, request: bytes) -> bool:
        """Return whether this is the first message of the call."""
        return hmac.compare_digest(sha256(request).digest(), self.request)


_shown: msgspec.msgpack.Decoder[CallProof] = msgspec.msgpack.Decoder(CallProof)


def verify_call(
    keys: Iterable[bytes],
    shown: bytes | None,
    method: str,
    address: str,
    now: float,
    challenges: Container[bytes] = (),
) -> CallProof:
    """Return the proof that goes with a call, if it holds for this method at this address at `now`, in Unix seconds.

    One that answers one of the challenges holds whenever it was made.

    Raises:
        UntimelyProofError: it does not hold now.
        InvalidInputError: there is none, or it does not hold.
    """
    if shown is None:
        raise InvalidInputError(
            "no proof that a node of this cluster asks: name the fabric key in UNICRON_FABRIC_KEY of the one that does"
        )
    try:
        found = _shown.decode(shown)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidInputError(
            f"a proof that can't be read: {error}; use a version of Unicron like this one"
        ) from None
    if not is_signed(keys, found.proofs, *found.signed_values(method, address)):
        raise InvalidInputError(
            "a proof that does not hold: give both nodes the same fabric key, the newest of `unicron credentials`"
        )
    if not (abs(now - found.at) <= WINDOW_S or found.challenge in challenges):
        raise UntimelyProofError(
            f"a proof of {now - found.at:+.0f} s ago, {WINDOW_S:g} s are allowed: set the clocks of both nodes"
        )
    return found
