"""TCP connections of this process that a library has opened, found in /proc: watched, kept alive, and shut down."""

import contextlib
import os
import select
import socket
from pathlib import Path

TCP = frozenset({socket.AF_INET, socket.AF_INET6})

QUIET_S, PROBE_S, PROBES = 5, 2, 5
"""After so many seconds without a word a peer's machine is probed, and given up if it answers none of the probes."""


def open_sockets() -> dict[str, int]:
    """Return this process's sockets: inode text -> file descriptor."""
    found: dict[str, int] = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(entry.readlink())
            if target.startswith("socket:"):
                found[target] = int(entry.name)
    return found


def wait_for_end(connections: dict[int, str], changed: int, seconds: float | None) -> bool:
    """Wait until the other end of some connection was closed, or gloo has done away with it; return whether it is so.

    Args:
        connections: by descriptor, which socket it was: it may have become another's meanwhile.
        changed: descriptor of an event that ends the wait.
        seconds: after which it ends, too; None: never.
    """
    looking = select.poll()
    looking.register(changed, select.POLLIN)
    for descriptor, inode in connections.items():
        try:
            is_same = f"socket:[{os.fstat(descriptor).st_ino}]" == inode
        except OSError:
            is_same = False
        if not is_same:
            return True
        looking.register(descriptor, select.POLLRDHUP)
    ready = {descriptor for descriptor, _ in looking.poll(None if seconds is None else 1e3 * seconds)}
    if changed in ready:
        os.eventfd_read(changed)
        return False
    return bool(ready)


def keep_alive(descriptor: int) -> None:
    """Have a TCP connection end when the peer's machine is gone without a word, also where nobody says so."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family not in TCP:
            return
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, QUIET_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * (QUIET_S + PROBE_S * PROBES))


def is_tcp(descriptor: int) -> bool:
    """Return whether this is a socket of TCP's, as those to peers are, and that to the agent is not."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            return connection.family in TCP
    except OSError:
        return False


def shut_down(descriptor: int) -> None:
    """Shut a TCP connection down; leave listeners and sockets of other families alone."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family not in TCP:
            return
        if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            connection.shutdown(socket.SHUT_RDWR)
