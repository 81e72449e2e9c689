"""How the machines of one `unicron run` find one another: as torchrun's do, at an endpoint, and by a token in a file.

The machine whose address the endpoint has is the cluster; the others join it. The token lies in a file that only its
owner may read, in a folder that all machines see: the user's home, unless another one is named.
"""

import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

from unicron.addresses import MOST_PORT
from unicron.errors import InvalidInputError
from unicron.files import temporary_folder
from unicron.printable import shown

PORT = 29400
"""Default port, which is also torchrun's."""

MOST_NODES = 10_000


class Nodes(NamedTuple):
    """How many machines take part: as few as `least` go on where others are lost."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return what N or MIN:MAX stands for.

        Raises:
            InvalidInputError: it is neither.
        """
        found = re.fullmatch(r"(\d{1,5})(?::(\d{1,5}))?", text.strip())
        least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= least <= most <= MOST_NODES:
            raise InvalidInputError(f"--nnodes {shown(text)}: give N or MIN:MAX, from 1 to {MOST_NODES}")
        return cls(least, most)


class Meeting(NamedTuple):
    """The address and the name under which machines meet.

    Attributes:
        host, port: of the endpoint.
        id: distinguishes this run from others.
        rank: of this machine, None where none was given.
        token_file: where the token is, or will be.
    """

    host: str
    port: int
    id: str
    rank: int | None
    token_file: Path

    @classmethod
    def of(
        cls, endpoint: str, run_id: str, rank: int | None, token_file: Path | None, environ: Mapping[str, str]
    ) -> Self:
        """Return the meeting that options and a scheduler's variables stand for.

        Raises:
            InvalidInputError: the endpoint is none.
        """
        found = re.fullmatch(r"([\w.-]+|\[[0-9a-fA-F:.]+\])(?::(\d{1,5}))?", endpoint.strip(), re.ASCII)
        host, port = (found[1].strip("[]"), int(found[2] or PORT)) if found else ("", 0)
        if not 0 < port <= MOST_PORT:
            raise InvalidInputError(
                f"--rdzv-endpoint {shown(endpoint)}: give HOST or HOST:PORT, an IPv6 address in brackets"
            )
        job = ".".join(filter(None, (environ.get("SLURM_JOB_ID"), environ.get("SLURM_STEP_ID"))))
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", run_id or job or f"{host}-{port}")[:100]
        path = token_file or Path.home() / ".unicron" / "run" / f"{name}.token"
        return cls(host, port, name, rank, path)

    @property
    def leads(self) -> bool:
        """Whether this machine is the cluster: it has rank 0, or, where nobody gave ranks, the endpoint's address.

        Raises:
            InvalidInputError: no machine has the endpoint's name.
        """
        return is_own(self.host) if self.rank is None else self.rank == 0

    def run_dir(self) -> Path:
        """Return a folder of this machine's own for its agent; one that is started again finds its workers and its key.

        Raises:
            InvalidInputError: somebody else has that folder.
        """
        return temporary_folder() / (self.id if self.rank is None else f"{self.id}-{self.rank}")


def is_own(host: str) -> bool:
    """Return whether an address or name is this machine's.

    Raises:
        InvalidInputError: no machine has that name.
    """
    try:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InvalidInputError(f"--rdzv-endpoint {host}: no machine has that name ({error})") from error
    for family, kind, protocol, _, address in addresses:
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False
