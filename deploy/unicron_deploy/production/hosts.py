"""The hosts of a set-up, and what starts the processes there. Pure."""

import ipaddress
import re
from enum import StrEnum
from typing import NamedTuple

from unicron.addresses import Address
from unicron.errors import InvalidInputError
from unicron.services import CONSOLE, PROVISIONER, SERVICES
from unicron_deploy import rights

CLIENTS, ROUTES, MONITOR, METRICS = 4222, 6222, 8222, 9400
"""Ports: of NATS for clients, for its servers and for this machine only; of metrics the first, which agents have."""

INSTANCES = (*SERVICES, CONSOLE)
"""What runs beside each server: of each service one instance works, and the others stand by."""

SERVERS = 3
"""Of NATS: fewer keep no copies, more none that is of use."""

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
_POOL = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,39}")
_FOLDER = re.compile(r"(/[A-Za-z0-9._-]+)+")


class Kind(StrEnum):
    """What starts the processes of a set-up."""

    SYSTEMD = "systemd"
    COMPOSE = "compose"
    SLURM = "slurm"


class Hosts(NamedTuple):
    """The hosts of a cluster.

    Attributes:
        kind: what starts the processes there.
        servers: hosts of NATS and the services.
        nodes: hosts that train.
        partition: of Slurm that has these, and the pool's name; empty where Slurm has no part in it.
        shared: folder that all nodes see, where Slurm starts them.
    """

    kind: Kind
    servers: list[str]
    nodes: list[str]
    partition: str = ""
    shared: str = ""

    @property
    def url(self) -> str:
        """What clients connect to."""
        return ",".join(Address(server, CLIENTS).nats_url for server in self.servers)

    @property
    def everywhere(self) -> str:
        """The address that stands for all of a host's own."""
        return "::" if any(":" in server for server in self.servers) else "0.0.0.0"

    @property
    def instances(self) -> tuple[str, ...]:
        """What runs beside each server."""
        return (*INSTANCES, PROVISIONER) if self.partition else INSTANCES

    @property
    def members(self) -> list[str]:
        """Names of nodes in the cluster: of a pool twice as many, as a lost one and its replacement are both there."""
        if not self.partition:
            return self.nodes
        return [f"{self.partition}-{number}" for number in range(1, 2 * len(self.nodes) + 1)]


def checked(
    servers: list[str], nodes: list[str], kind: Kind = Kind.SYSTEMD, partition: str = "", shared: str = ""
) -> Hosts:
    """Return these hosts.

    Raises:
        InvalidInputError: they are not three servers, a name can't be a host's or a node's, or stands there twice; or
            what Slurm needs is missing, or is given where it has no part.
    """
    if len(servers) != SERVERS:
        raise InvalidInputError(f"--servers: {len(servers)} given; give three, such as a,b,c: then any may be lost")
    for server in servers:
        if not _is_host(server):
            raise InvalidInputError(f"--servers: {server!r} is no host name and no IP address")
    names = [*servers, *nodes]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InvalidInputError(f"{twice[0]} is named twice: a host is either a server or a node, and named once")
    _check_slurm(kind, partition, shared)
    hosts = Hosts(kind, servers, nodes, partition, shared)
    for node in hosts.members:
        rights.node(node)
    return hosts


def _check_slurm(kind: Kind, partition: str, shared: str) -> None:
    if kind is not Kind.SLURM:
        if partition or shared:
            raise InvalidInputError(f"--partition and --shared: {kind} has none; add --kind slurm, or leave them out")
        return
    if not _POOL.fullmatch(partition):
        raise InvalidInputError(
            f"--partition {partition!r}: name the partition of the nodes, in letters, digits and '-', 40 at most"
        )
    if not _FOLDER.fullmatch(shared):
        raise InvalidInputError(
            f"--shared {shared!r}: give the path of a folder that all nodes see, as /shared/unicron"
        )


def _is_host(text: str) -> bool:
    try:
        return bool(ipaddress.ip_address(text))
    except ValueError:
        return bool(_HOST.fullmatch(text))


def metrics_port(process: str) -> int:
    """Return where a process answers Prometheus."""
    processes = (*INSTANCES, PROVISIONER)
    return METRICS + 1 + processes.index(process) if process in processes else METRICS
