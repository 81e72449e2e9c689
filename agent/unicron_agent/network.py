"""Which network interface has an address: gloo and NCCL want its name."""

import contextlib
import fcntl
import socket
import struct

SIOCGIFADDR = 0x8915


def interface_of(address: str) -> str:
    """Return the name of the network interface that has the IPv4 `address`, empty where none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                if socket.inet_ntoa(fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24]) == address:
                    return name
    return ""
