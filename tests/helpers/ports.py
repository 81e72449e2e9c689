"""Ports for what tests start."""

import socket

from unicron_deploy import nats_server

_claims = []


def free_port():
    """Return a port that nobody listens on, and that no other test on this machine is given while this process lives.

    Each is claimed by the name of a socket that the kernel gives away once.
    """
    while True:
        port, claim = nats_server.free_port(), socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0unicron-tests-{port}")
        except OSError:
            claim.close()
        else:
            _claims.append(claim)
            return port
