"""The interface of a message bus. Bytes in, bytes out: the codec is the caller's business.

Five things: a *journal* (totally ordered, kept, read from any position), *telemetry* (may be lost), *queries*
(one request, one reply), and *buckets* (compare-and-set key-value, with an optional time to live).
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol


class JournalEntry(NamedTuple):
    """A message of the journal.

    Attributes:
        sequence: its position, from 1; positions of filtered-out messages are skipped.
    """

    sequence: int
    subject: str
    data: bytes


class TelemetryEntry(NamedTuple):
    """A piece of telemetry."""

    subject: str
    data: bytes


class Revisioned(NamedTuple):
    """A value in a bucket.

    Attributes:
        revision: grows with every write to the bucket.
    """

    value: bytes
    revision: int


Handler = Callable[[bytes], Awaitable[bytes]]
"""Answers a query; `BusUnavailableError` where it can't right now, which the asker gets as such."""


class Bucket(Protocol):
    """Compare-and-set key-value. Keys are subject tokens, with dots between them."""

    async def get(self, key: str) -> Revisioned | None:
        """Return the value, or None where there is none. On a cluster it may be stale: decide on writes only."""

    async def before(self, key: str, revision: int) -> Revisioned | None:
        """Return what stood there before that revision; None where that is not kept, or was a deletion."""

    async def create(self, key: str, value: bytes) -> int:
        """Write a key that must not exist; return its revision.

        Raises:
            ConflictError: it exists.
        """

    async def update(self, key: str, value: bytes, last: int) -> int:
        """Write over revision `last` (0: the key must not exist); return the new revision.

        Raises:
            ConflictError: the key's revision is another.
        """

    async def delete(self, key: str, last: int = 0) -> None:
        """Remove the key, if it is there.

        Raises:
            ConflictError: `last` is given and the key's revision is another.
        """


class Bus(Protocol):
    """A connection to the bus. All methods raise `BusUnavailableError` when the bus does not answer in time."""

    async def append(self, subject: str, data: bytes, message_id: str) -> int:
        """Put a message into the journal; return its sequence. A second of the same id and subject is not stored."""

    def follow(self, filters: Sequence[str], after: int) -> AsyncIterator[JournalEntry]:
        """Read the journal in order: every message that matches a filter and whose sequence is above `after`.

        Neither skips nor repeats; it survives restarts of the server and waits while there is nothing new.
        """

    async def tail(self) -> int:
        """Return the sequence of the last message in the journal, 0 where it is empty."""

    async def silent_servers(self) -> list[str]:
        """Return the names of the servers that should keep a copy of the journal, and are not heard by the others."""

    async def last(self, filters: Sequence[str]) -> int:
        """Return the sequence of the last message in the journal that matches a filter, 0 where there is none."""

    async def publish_telemetry(self, subject: str, data: bytes) -> None:
        """Publish telemetry; only current subscribers receive it."""

    def receive_telemetry(self, filters: Sequence[str]) -> AsyncIterator[TelemetryEntry]:
        """Receive telemetry; subscribed when the first item is awaited. Subjects outside `unicron.v1` are allowed."""

    async def serve(self, subject: str, name: str, handler: Handler) -> Callable[[], Awaitable[None]]:
        """Answer queries on `subject` under the service name `name`.

        Ends when the bus is closed, or when the function it returns is called.
        """

    async def ask(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        """Send a query and return its reply.

        Raises:
            BusUnavailableError: nobody answers on that subject, or not in time.
        """

    def bucket(self, name: str) -> Bucket:
        """Return the bucket `name`, one of those in `topology.BUCKETS`."""

    async def flush(self) -> None:
        """Wait until the server has seen everything sent so far, subscriptions included."""

    async def close(self) -> None:
        """Say goodbye to the server and release the connection; all iterators end."""

    def reconnected(self) -> AsyncIterator[float]:
        """Yield, after each interruption of the connection, how many seconds it lasted.

        Raises `BusUnavailableError` when the server ended it in a way that no reconnecting mends.
        """
