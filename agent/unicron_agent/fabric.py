"""What opens state servers and rendezvous of a cluster's nodes to one another: the fabric key, and certificates."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import msgspec

from unicron import fabric_proofs
from unicron.contracts.worker import Enter, Membership
from unicron.errors import InvalidInputError
from unicron.files import read_secret
from unicron.rate_limits import LETTERS, Floods, more

log = logging.getLogger(__name__)

HEADER = "unicron-proof-bin"
"""Of a gRPC call: a `CallProof`. gRPC takes any bytes where a name ends so."""

CHALLENGE, CHALLENGES = "unicron-challenge-bin", 64
"""Of the answer to a call whose proof is not of now: what a proof is to be made over instead; and how many of these a
server remembers."""

CERTIFICATE = ("ca.pem", "tls.key", "tls.pem")
"""Files beside that of the fabric key, where state servers speak TLS: the authority's, and this node's own."""

_TARGET = "grpc.ssl_target_name_override"
_Options = Sequence[tuple[str, Any]]


class Fabric:
    """The key, read from its file at each use: who replaces it there need not tell anybody.

    A file that can't be used later on changes nothing: it may be half written. Where there are certificates beside it,
    both ends of a call to a state server show theirs: a server for its node's name, which the caller goes by.

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
        self._content, self._problem = b"", ""
        self._used: dict[bytes, float] = {}
        self._challenges: dict[bytes, None] = {}
        if self._path is not None:
            self._content = self._read(self._path)
        self._tls()

    @property
    def closed(self) -> bool:
        """Whether a proof is asked for."""
        return self._path is not None

    def keys(self) -> list[bytes]:
        """Return the keys that hold now, the newest first; none where all is open."""
        if self._path is None:
            return []
        try:
            self._content, self._problem = self._read(self._path), ""
        except InvalidInputError as error:
            if str(error) != self._problem:
                log.warning("the fabric key stays what it was: %s", error)
            self._problem = str(error)
        return fabric_proofs.keys_in(self._content, self._now())

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
        if tls := self._tls():
            authority, key, own = tls
            return int(server.add_secure_port(f"{host}:0", grpc.ssl_server_credentials([(key, own)], authority, True)))
        return int(server.add_insecure_port(f"{host}:0"))

    def channel(self, address: str, node: str, options: _Options) -> grpc.aio.Channel:
        """Return a channel to the state server of `node` at `address`."""
        if tls := self._tls():
            return grpc.aio.secure_channel(
                address, grpc.ssl_channel_credentials(*tls), options=[*options, (_TARGET, node)]
            )
        return grpc.aio.insecure_channel(address, options=options)

    # --- rendezvous --------------------------------------------------------------------------------------------------

    def told(self, membership: Membership) -> Membership:
        """Return a membership with what opens its rendezvous."""
        secrets = fabric_proofs.epoch_secrets(self.keys(), membership.rendezvous_id, membership.epoch)
        return msgspec.structs.replace(membership, secrets=secrets)

    def admits(self, enter: Enter, address: str, challenge: bytes) -> bool:
        """Return whether somebody has a secret of the membership that it names, as its answer to `challenge` shows."""
        secrets = fabric_proofs.epoch_secrets(self.keys(), enter.rendezvous_id, enter.epoch)
        return fabric_proofs.answered(secrets, enter.answers, address, challenge)

    # --- state servers -----------------------------------------------------------------------------------------------

    def header(
        self, method: str, address: str, request: bytes, challenge: bytes = b""
    ) -> tuple[tuple[str, bytes], ...]:
        """Return the metadata that a call needs whose first message is `request`."""
        if not self.closed:
            return ()
        shown = fabric_proofs.CallProof.of(self.keys(), method, address, request, self._node, self._now(), challenge)
        return ((HEADER, msgspec.msgpack.encode(shown)),)

    def checked(self, metadata: Any, method: str, address: str) -> fabric_proofs.CallProof:
        """Return the proof in the metadata of a call; it holds once.

        Raises:
            UntimelyProofError: it is not of now; who made it may answer a challenge.
            InvalidInputError: there is none, or it does not hold; says why, with the cure.
        """
        now = self._now()
        found = fabric_proofs.checked(
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

    def challenge(self) -> bytes:
        """Return what somebody is to prove anew whose proof is not of now; it can be answered once."""
        while len(self._challenges) >= CHALLENGES:
            del self._challenges[next(iter(self._challenges))]
        asked = fabric_proofs.nonce()
        self._challenges[asked] = None
        return asked


def challenged(error: grpc.aio.AioRpcError) -> bytes:
    """Return what the server that refused a call wants proven instead; empty where nothing helps."""
    found = dict(error.trailing_metadata() or ()).get(CHALLENGE, b"")
    return found if isinstance(found, bytes) else b""


class Strangers:
    """Tells the log who was turned away: so many, and the rest summed up.

    Args:
        where: at which server.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._floods = Floods(LETTERS)
        self._summing: asyncio.TimerHandle | None = None

    def note(self, host: str, reason: object) -> None:
        """Tell, or count, that somebody at `host` was turned away."""
        loop = asyncio.get_running_loop()
        if self._floods.admit(host, loop.time()):
            log.warning("the %s turned %s away: %s", self._where, host, reason)
        elif self._summing is None:
            self._summing = loop.call_later(LETTERS.period_s, self._sum_up)

    def _sum_up(self) -> None:
        now = asyncio.get_running_loop().time()
        for host, count in self._floods.over(now).items():
            log.warning("the %s turned %s away: %s", self._where, host, more(count))
        self._summing = None
