"""The servers of a job, on its first node: NATS with TLS, and the services."""

import socket
from pathlib import Path

from unicron.addresses import Address, local_address
from unicron.errors import InvalidInputError
from unicron_deploy.embedded import NATS, Cluster
from unicron_deploy.nats_server import NatsServer, free_port
from unicron_deploy.slurm.folders import URL


class JobServers(Cluster):
    """NATS and services at an address that the other nodes reach; the nodes are Slurm's to start.

    Args:
        root: folder that all nodes see: keys, journal, logs.
        address: of this node, as the others have it.
        nodes: their names here; each gets a key.
    """

    def __init__(self, root: Path, address: str, nodes: list[str]) -> None:
        self._address = address
        super().__init__(root, nodes=0, port=free_port(address))
        self._members = nodes
        self.url = Address(address, self._layout.port).nats_url

    def prepare(self) -> None:
        """Make the folder, which is ours alone, and all keys and certificates.

        Raises:
            InvalidInputError: a key that is there can't be used.
        """
        for path in (self.root, self.keys.folder):
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.keys.ensure(self._members)
        self.keys.certify([self._address, socket.gethostname()])
        (self.root / URL).write_text(self.url)

    def _refuse_a_second(self) -> None:
        """Have the lock of the folder's job see to that: what its record names ran on the first node of another job."""

    def _new_servers(self) -> dict[str, NatsServer]:
        accounts = self.keys.accounts
        server = NatsServer(
            self.root / NATS, self._layout.port, self._address, self._ping_s, accounts, tls=accounts.parent
        )
        return {NATS: server}


def own_address(other: str) -> str:
    """Return the address of this machine from which another is reached.

    Raises:
        InvalidInputError: the other one's name can't be resolved.
    """
    try:
        return local_address(Address(other, 1))
    except OSError as error:
        raise InvalidInputError(
            f"address {other!r} of a node can't be resolved ({error}); see NodeAddr in `scontrol show node`"
        ) from error
