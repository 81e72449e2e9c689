"""Streams and buckets, declared as data and made by `provision`."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace

from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, RePublish, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import APIError, NotFoundError, ServerError, ServiceUnavailableError

from unicron import subjects
from unicron.errors import BusUnavailableError, InvalidInputError

STREAM = "UNICRON"
"""Name of the journal stream."""

BUCKETS = {"state": "unicron_state", "lease": "unicron_lease"}
"""Buckets by the name that `Bus.bucket` takes."""

ACCOUNT, NODES, READERS, JOINERS = "UNICRON", "UNICRON_NODES", "UNICRON_READERS", "UNICRON_JOINERS"
"""The server accounts: of what is stored, the services and the operator; of the agents; of readers; of
machines that ask with a join token to become nodes."""

API = "unicron.js"
"""As what all accounts know the interface of JetStream, `$JS.API`, which in each of them is the account's own."""

DISCONNECTS = "$SYS.ACCOUNT.*.DISCONNECT"
"""Subject on which the server reports that a connection of an account has ended; imported from the system account."""

DAY_S = 86400.0

JOURNAL = StreamConfig(
    name=STREAM,
    description="facts and commands, in the order in which they happened",
    subjects=list(subjects.KEPT),
    retention=RetentionPolicy.LIMITS,
    storage=StorageType.FILE,
    max_age=7 * DAY_S,
    duplicate_window=3600.0,
    allow_direct=True,
    allow_msg_ttl=True,
    republish=RePublish(src=subjects.ANY, dest=f"{subjects.STORED}.>", headers_only=True),
)

PULSE_TTL = "60s"
"""How long a pulse stands in the journal: it has come out long before, and takes no room from messages."""

BUCKET = StreamConfig(
    max_msgs_per_subject=1,
    discard=DiscardPolicy.NEW,
    allow_rollup_hdrs=True,
    deny_delete=True,
    storage=StorageType.FILE,
    duplicate_window=120.0,
)
"""The stream below a key-value bucket; reads go to the leader, which is never behind."""

JOURNAL_BYTES = tuple(16 * 1024**3 >> halved for halved in range(11))
"""Sizes of the journal, of which the first is used that the server has room for; then its oldest entries go. A server
has no room left stores nothing at all, leases neither, so that one node with much to say would end all healing."""

KEPT = 2
"""Values of each key of the states: a service that can't use the newest commit returns to the one before it."""

_NAME_IN_USE = 10058
_NO_ROOM = {10005, 10047}

COPIES = 3
"""Servers that keep the journal and the buckets, where there are as many: any one of them may be lost."""


def copies(servers: Sequence[str]) -> int | None:
    """Return how many servers are to keep a copy, by the addresses of all; None where one does, or as it is."""
    return COPIES if len(servers) >= COPIES else None


def streams(replicas: int = 1, lease_ttl_s: float = 2.0) -> list[StreamConfig]:
    """Return all streams, the ones under the buckets included.

    Args:
        replicas: servers that keep a copy of each stream: 1, 3 or 5.
        lease_ttl_s: seconds after which a lease that was not renewed is gone.
    """
    state, lease = (
        replace(BUCKET, name=f"KV_{bucket}", subjects=[f"$KV.{bucket}.>"])
        for bucket in (BUCKETS["state"], BUCKETS["lease"])
    )
    state = replace(state, max_msgs_per_subject=KEPT)
    lease = replace(lease, max_age=lease_ttl_s, duplicate_window=lease_ttl_s)
    return [replace(stream, num_replicas=replicas) for stream in (JOURNAL, state, lease)]


async def provision(js: JetStreamContext, replicas: int | None = None, lease_ttl_s: float = 2.0) -> None:
    """Make all streams and buckets, or bring existing ones to what is declared here; may be repeated.

    Args:
        js: JetStream of the server.
        replicas: servers that keep a copy; None leaves existing streams as they are, and makes new ones with one.
        lease_ttl_s: as for `streams`.

    Raises:
        BusUnavailableError: JetStream does not answer, or can't just now.
        InvalidInputError: a stream of that name exists and can't be turned into the declared one.
    """
    for stream in streams(replicas or 1, lease_ttl_s):
        try:
            await _provide(js, stream, replicas)
        except (NatsTimeoutError, NoRespondersError, ServiceUnavailableError) as error:
            raise BusUnavailableError(
                f"JetStream does not answer ({error or 'timeout'}); start the server with JetStream enabled"
            ) from error
        except ServerError as error:  # for instance while the folder of a stream just deleted is being removed
            raise BusUnavailableError(
                f"stream {stream.name} can't be provisioned now: {error.description}; try again"
            ) from error
        except APIError as error:
            if error.err_code == _NAME_IN_USE:
                raise BusUnavailableError(
                    f"stream {stream.name} was made by somebody else just now; try again"
                ) from error
            raise InvalidInputError(
                f"stream {stream.name} can't be provisioned: {error.description}; remove the old one or mend the server"
            ) from error


async def _provide(js: JetStreamContext, stream: StreamConfig, replicas: int | None) -> None:
    """Make a stream, or change the one there is; one that takes much room, as large as the server has room for."""
    sizes = JOURNAL_BYTES if stream.name == STREAM else (stream.max_bytes,)
    send = js.add_stream
    with contextlib.suppress(NotFoundError):
        found = (await js.stream_info(str(stream.name))).config
        send, stream = js.update_stream, replace(stream, num_replicas=replicas or found.num_replicas)
    for size in sizes:
        try:
            await send(replace(stream, max_bytes=size))
        except ServerError as error:
            if error.err_code not in _NO_ROOM or size == sizes[-1]:
                raise
        else:
            return
