"""`unicron run` on the machine that the others join: the token for them, and what it does where they are missing."""

import ssl
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from unicron.client import Client
from unicron.contracts.queries import CreateToken
from unicron.files import write_secret
from unicron.jointoken import JoinToken
from unicron_cli.meeting import Meeting, Nodes

POOL = "run"
VALID_S = 7 * 86400.0
"""For how long others may join."""

OWN = "node-1"
"""Name of this machine's node."""


@asynccontextmanager
async def open_to_others(client: Client, authority: Path, meeting: Meeting, nodes: Nodes) -> AsyncIterator[None]:
    """Leave a token where the other machines look for it; take it away at the end."""
    token = JoinToken.new(ssl.PEM_cert_to_DER_cert(authority.read_text()))
    await client.create_token(
        CreateToken(token=token.id, digest=token.digest, pool=POOL, uses=nodes.most - 1, seconds=VALID_S)
    )
    meeting.token_file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_secret(meeting.token_file, token.line().encode())
    try:
        yield
    finally:
        meeting.token_file.unlink(missing_ok=True)


class Attendance:
    """The machines that take part; gives up where too few do for too long.

    Args:
        nodes: how many are to be.
        patience_s: seconds that they may be fewer than the least.
    """

    def __init__(self, nodes: Nodes, patience_s: float) -> None:
        self._nodes, self._patience_s = nodes, patience_s
        self._short_since: float | None = None

    def problem(self, up: Iterable[str], now: float) -> str:
        """Return why not to go on, empty where there is no reason; `up` names the nodes that are there."""
        there = sorted(up)
        if len(there) >= self._nodes.least:
            self._short_since = None
            return ""
        self._short_since = now if self._short_since is None else self._short_since
        if now - self._short_since < self._patience_s:
            return ""
        least = self._nodes.least
        return f"{len(there)} of {least} machines for {self._patience_s:g} s ({', '.join(there) or 'none'} is there)"
