"""Addresses of machines, IPv4's, IPv6's and names alike: written, read and looked up here only."""

import contextlib
import ipaddress
import socket
from typing import NamedTuple, Self
from urllib.parse import urlsplit

from unicron.errors import InvalidInputError

MOST_PORT = 65535

NATS_PORT = 4222


class Address(NamedTuple):
    """A host and a port; as text HOST:PORT, where an IPv6 address stands in brackets.

    Attributes:
        host: a name, or an address without brackets.
        port: 0 stands for a free one.
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def nats_url(self) -> str:
        """The URL of a NATS server there."""
        return f"nats://{self}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the address in HOST:PORT; the host is empty where only a port stands there.

        Raises:
            InvalidInputError: there is no port.
        """
        host, _, port = text.rpartition(":")
        sound = port.isdecimal() and port.isascii() and 0 < int(port) <= MOST_PORT
        if not sound or (":" in host and (host[0], host[-1]) != ("[", "]")):
            raise InvalidInputError(
                f"{text!r}: give a port from 1 to {MOST_PORT}, or HOST:PORT, with an IPv6 address in brackets"
            )
        return cls(host.strip("[]"), int(port))

    @classmethod
    def of_url(cls, url: str) -> Self:
        """Return the address in the URL of a NATS server, that may be HOST:PORT or HOST only.

        Raises:
            InvalidInputError: it is none.
        """
        try:
            parts = urlsplit(url if "://" in url else f"nats://{url}")
            return cls(parts.hostname or "127.0.0.1", parts.port or NATS_PORT)
        except ValueError as error:
            raise InvalidInputError(f"{url!r}: {error}; give nats://HOST:PORT, an IPv6 address in brackets") from error


def family(host: str) -> socket.AddressFamily:
    """Return the family of sockets that an address needs; that of IPv4 for a name."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def is_loopback(host: str) -> bool:
    """Return whether only this machine is reached at a host."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def local_address(towards: Address) -> str:
    """Return the address of this machine from which another is reached.

    Raises:
        OSError: the other one's name can't be resolved, or there is no way to it.
    """
    failed: OSError | None = None
    for kind, _, _, _, there in socket.getaddrinfo(*towards, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(kind, socket.SOCK_DGRAM) as probe:
                probe.connect(there)
                return str(probe.getsockname()[0])
        except OSError as error:
            failed = error
    raise failed or OSError("it has no address")


def addresses_of(interface: str) -> set[str]:
    """Return the IPv6 addresses of a network interface."""
    found = set()
    with contextlib.suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as file:  # noqa: PTH123 of the kernel
        for line in file:
            digits, *_, name = line.split()
            if name == interface:
                found.add(str(ipaddress.IPv6Address(int(digits, 16))))
    return found
