"""Authenticates the nodes of a cluster to one another's state servers and rendezvous: fabric key and certificates."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from unicron import fabric_proofs
from unicron.addresses import Address
from unicron.contracts.rendezvous import Enter
from unicron.contracts.worker import Membership
from unicron.errors import InvalidInputError
from unicron.files import read_secret
from unicron.rate_limits import LETTERS, RateLimiter, more_text
from unicron_agent.calls import DIRECT, grpc

log = logging.getLogger(__name__)

HEADER = "unicron-proof-bin"
"""Metadata key of a gRPC call for its `CallProof`. gRPC allows any bytes under keys that end in "-bin"."""

CHALLENGE, CHALLENGES = "unicron-challenge-bin", 64
"""Metadata key of the answer to a call whose proof is out of date: the challenge for a new proof. And how many open
challenges a server remembers."""

CERTIFICATE = ("ca.pem", "tls.key", "tls.pem")
"""Files beside that of the fabric key, where state servers speak TLS: the authority's, and this node's own."""

_TARGET = "grpc.ssl_target_name_override"
_Options = Sequence[tuple[str, Any]]


class Fabric:
    """The fabric key, read from its file at each use, so that it can be replaced without a restart.

    A file that becomes unusable changes nothing: it may be half written. If there are certificates beside it, state
    servers use mutual TLS; a caller checks that the server's certificate is for its node's name.

    Args:
        path: of the file; empty: there is none, and all is open.
        node: that this is.
        now: returns Unix seconds.

    Raises:
        InvalidInputError: there is no key in the file, or others may read it; or a certificate lacks its other files.
    """

    def __init__(self, path: str, node: str, now: Callable[[], float] = time.time) -> None:
        self._path = Path(path) if path else None
        self._node, self._now = node, now
        self._key_content, self._problem = b"", ""
        self._used: dict[bytes, float] = {}
        self._challenges: dict[bytes, None] = {}
        if self._path is not None:
            self._key_content = self._read(self._path)
        self._tls()

    @property
    def requires_proof(self) -> bool:
        """Whether callers have to prove that they have the key."""
        return self._path is not None

    def keys(self) -> list[bytes]:
        """Return the keys that hold now, the newest first; none where all is open."""
        if self._path is None:
            return []
        try:
            self._key_content, self._problem = self._read(self._path), ""
        except InvalidInputError as error:
            if str(error) != self._problem:
                log.warning("the fabric key stays what it was: %s", error)
            self._problem = str(error)
        return fabric_proofs.keys_in(self._key_content, self._now())

    def _read(self, path: Path) -> bytes:
        content = read_secret(path)
        try:
            fabric_proofs.keys_in(content, self._now())
        except InvalidInputError as error:
            raise InvalidInputError(f"{path}: {error}") from error
        return content

    # --- TLS ---------------------------------------------------------------------------------------------------------

    def _tls(self) -> list[bytes]:
        """Return the contents of the files of `CERTIFICATE`; none where there are none of them."""
        if self._path is None:
            return []
        files = [self._path.with_name(name) for name in CERTIFICATE]
        missing = [str(file) for file in files if not file.exists()]
        if len(missing) == len(files):
            return []
        if missing:
            raise InvalidInputError(
                f"no certificate without {', '.join(missing)}; copy what `unicron_deploy.keys` has made of this node"
            )
        authority, key, own = files
        return [authority.read_bytes(), read_secret(key), own.read_bytes()]

    def open_port(self, server: grpc.aio.Server, host: str) -> int:
        """Have a server listen on a free port of `host`; return it."""
        where = str(Address(host, 0))
        if tls := self._tls():
            authority, key, own = tls
            return int(server.add_secure_port(where, grpc.ssl_server_credentials([(key, own)], authority, True)))
        return int(server.add_insecure_port(where))

    def channel(self, address: str, node: str, options: _Options) -> grpc.aio.Channel:
        """Return a channel to the state server of `node` at `address`."""
        options = [*options, *DIRECT]
        if tls := self._tls():
            return grpc.aio.secure_channel(
                address, grpc.ssl_channel_credentials(*tls), options=[*options, (_TARGET, node)]
            )
        return grpc.aio.insecure_channel(address, options=options)

    # --- rendezvous --------------------------------------------------------------------------------------------------

    def with_secrets(self, membership: Membership) -> Membership:
        """Return a membership with the secrets that admit its ranks to the rendezvous."""
        secrets = fabric_proofs.epoch_secrets(self.keys(), membership.rendezvous_id, membership.epoch)
        return msgspec.structs.replace(membership, secrets=secrets)

    def verify_entry(self, enter: Enter, address: str, challenge: bytes) -> bool:
        """Return whether the answer to `challenge` proves a secret of the membership that `enter` names."""
        secrets = fabric_proofs.epoch_secrets(self.keys(), enter.rendezvous_id, enter.epoch)
        return fabric_proofs.is_response(secrets, enter.answers, address, challenge)

    # --- state servers -----------------------------------------------------------------------------------------------

    def proof_metadata(
        self, method: str, address: str, request: bytes, challenge: bytes = b""
    ) -> tuple[tuple[str, bytes], ...]:
        """Return the metadata with the proof for a call whose first message is `request`."""
        if not self.requires_proof:
            return ()
        shown = fabric_proofs.CallProof.create(
            self.keys(), method, address, request, self._node, self._now(), challenge
        )
        return ((HEADER, msgspec.msgpack.encode(shown)),)

    def verify_call(self, metadata: Any, method: str, address: str) -> fabric_proofs.CallProof:
        """Return the proof in the metadata of a call, verified; each proof is accepted once.

        Raises:
            UntimelyProofError: it is out of date; the caller may answer a challenge instead.
            InvalidInputError: there is none, or it does not verify; says why, with the cure.
        """
        now = self._now()
        found = fabric_proofs.verify_call(
            self.keys(), dict(metadata or ()).get(HEADER), method, address, now, self._challenges
        )
        self._challenges.pop(found.challenge, None)
        while self._used and next(iter(self._used.values())) < now:
            del self._used[next(iter(self._used))]
        if found.nonce in self._used:
            raise InvalidInputError("a proof that was shown before: each call needs one of its own")
        self._used[found.nonce] = (
            now + 2 * fabric_proofs.WINDOW_S
        )  # a clock that is ahead has its proofs hold as much longer
        return found

    def issue_challenge(self) -> bytes:
        """Return a new challenge for a caller whose proof is out of date; it can be answered once."""
        while len(self._challenges) >= CHALLENGES:
            del self._challenges[next(iter(self._challenges))]
        asked = fabric_proofs.nonce()
        self._challenges[asked] = None
        return asked


def challenge_in(error: grpc.aio.AioRpcError) -> bytes:
    """Return the challenge in a server's refusal of a call; empty if there is none."""
    found = dict(error.trailing_metadata() or ()).get(CHALLENGE, b"")
    return found if isinstance(found, bytes) else b""


class RefusalLog:
    """Logs refused callers, with a rate limit; the rest are counted.

    Args:
        where: name of the server that refuses them.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._floods = RateLimiter(LETTERS)
        self._summing: asyncio.TimerHandle | None = None

    def record(self, host: str, reason: object) -> None:
        """Log or count that a caller at `host` was refused."""
        loop = asyncio.get_running_loop()
        if self._floods.admit(host, loop.time()):
            log.warning("the %s turned %s away: %s", self._where, host, reason)
        elif self._summing is None:
            self._summing = loop.call_later(LETTERS.period_s, self._report_suppressed)

    def _report_suppressed(self) -> None:
        now = asyncio.get_running_loop().time()
        for host, count in self._floods.held_back(now).items():
            log.warning("the %s turned %s away: %s", self._where, host, more_text(count))
        self._summing = None
