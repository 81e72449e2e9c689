"""The node's address as others see it, the interface that has it, and its folder in memory."""

import contextlib
import fcntl
import hashlib
import os
import socket
import struct
from pathlib import Path

from unicron.addresses import Address, addresses_of, local_address
from unicron.errors import InvalidInputError

SIOCGIFADDR = 0x8915

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Differs for each start of each machine, also where these are copies of one image."""


def interface_of(address: str) -> str:
    """Return the name of the network interface that has an address, empty where none has."""
    if ":" in address:
        return next((name for _, name in socket.if_nameindex() if address in addresses_of(name)), "")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                if socket.inet_ntoa(fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24]) == address:
                    return name
    return ""


def own_address(nats_url: str) -> str:
    """Return the local address from which the bus is reached: other nodes see this one there."""
    try:
        return local_address(Address.of_url(nats_url))
    except OSError as error:
        raise InvalidInputError(
            f"nats_url {nats_url!r}: there is no way to that host ({error}); see `ip route get` with its address, or "
            "name the address of this node by --host"
        ) from error


def home(run_dir: Path) -> str:
    """Return an id of a run folder on this machine, since its boot; empty where there is none."""
    try:
        there = run_dir.stat()
        where = f"{BOOT_ID.read_text().strip()} {there.st_dev} {there.st_ino}"
    except OSError:
        return ""
    return hashlib.blake2b(where.encode(), digest_size=8).hexdigest()


def memory_dir(run_dir: Path) -> Path:
    """Return a folder in memory for states and the socket, the same after a restart of the agent."""
    shared = Path("/dev/shm")  # noqa: S108 memory shared within the node; the folder is ours alone
    name = f"unicron-{os.getuid()}-{hashlib.blake2b(str(run_dir).encode(), digest_size=6).hexdigest()}"
    folder = (shared if os.access(shared, os.W_OK) else run_dir) / name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder
