"""The fabric key of this node: what opens the state servers and rendezvous of the cluster's nodes to one another."""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from unicron import proofs
from unicron.contracts.worker import Enter, Membership
from unicron.errors import InvalidInputError
from unicron.files import read_secret
from unicron.floods import LETTERS, Floods, more

log = logging.getLogger(__name__)

HEADER = "unicron-proof-bin"
"""Of a gRPC call: a `CallProof`. gRPC takes any bytes where a name ends so."""


class Fabric:
    """The key, read from its file at each use: who replaces it there need not tell anybody.

    A file that can't be used later on changes nothing: it may be half written.

    Args:
        path: of the file; empty: there is none, and all is open.
        node: that this is.
        now: returns Unix seconds.

    Raises:
        InvalidInputError: there is no key in the file, or others may read it.
    """

    def __init__(self, path: str, node: str, now: Callable[[], float] = time.time) -> None:
        self._path = Path(path) if path else None
        self._node, self._now = node, now
        self._content, self._problem = b"", ""
        self._used: dict[bytes, float] = {}
        if self._path is not None:
            self._content = self._read(self._path)

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
        return proofs.keys_in(self._content, self._now())

    def _read(self, path: Path) -> bytes:
        content = read_secret(path)
        try:
            proofs.keys_in(content, self._now())
        except InvalidInputError as error:
            raise InvalidInputError(f"{path}: {error}") from error
        return content

    # --- rendezvous --------------------------------------------------------------------------------------------------

    def told(self, membership: Membership) -> Membership:
        """Return a membership with what opens its rendezvous."""
        secrets = proofs.epoch_secrets(self.keys(), membership.rendezvous_id, membership.epoch)
        return msgspec.structs.replace(membership, secrets=secrets)

    def admits(self, enter: Enter, address: str, challenge: bytes) -> bool:
        """Return whether somebody has a secret of the membership that it names, as its answer to `challenge` shows."""
        secrets = proofs.epoch_secrets(self.keys(), enter.rendezvous_id, enter.epoch)
        return proofs.answered(secrets, enter.answers, address, challenge)

    # --- state servers -----------------------------------------------------------------------------------------------

    def header(self, method: str, address: str, request: bytes) -> tuple[tuple[str, bytes], ...]:
        """Return the metadata that a call needs whose first message is `request`."""
        if not self.closed:
            return ()
        shown = proofs.CallProof.of(self.keys(), method, address, request, self._node, self._now())
        return ((HEADER, msgspec.msgpack.encode(shown)),)

    def checked(self, metadata: Any, method: str, address: str) -> proofs.CallProof:
        """Return the proof in the metadata of a call; it holds once.

        Raises:
            InvalidInputError: there is none, or it does not hold; says why, with the cure.
        """
        now = self._now()
        found = proofs.checked(self.keys(), dict(metadata or ()).get(HEADER), method, address, now)
        while self._used and next(iter(self._used.values())) < now:
            del self._used[next(iter(self._used))]
        if found.nonce in self._used:
            raise InvalidInputError("a proof that was shown before: each call needs one of its own")
        self._used[found.nonce] = now + 2 * proofs.WINDOW_S  # a clock that is ahead has its proofs hold as much longer
        return found


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
