"""Where the ranks of a membership meet: a store for torch's process groups, kept by an agent.

torch's own TCPStore asks the name service for the name of every address it connects to, and a lookup that gets lost
holds all of them up for 5 s. This one looks nothing up.
"""

import socket
from datetime import timedelta

from torch._C._distributed_c10d import Store

from unicron.contracts.worker import LENGTH, Put, Take, ToRendezvous, frame, length_of, taken
from unicron.errors import GroupBrokenError

CONNECT_S = 5.0


class Rendezvous(Store):
    """A rank's connection to the rendezvous `name` at `address` (host:port, the host an IP address).

    Shutting its socket down, from any thread, makes whatever waits in it raise.

    Raises:
        GroupBrokenError: nobody is there, or the connection broke.
    """

    def __init__(self, address: str, name: str) -> None:
        super().__init__()
        self._name = name
        host, _, port = address.rpartition(":")
        try:
            self._socket = socket.create_connection((host, int(port)), CONNECT_S)
        except OSError as error:
            raise GroupBrokenError(f"the rendezvous {address} can't be reached: {error}") from error
        self._socket.settimeout(None)
        # a value that was left has no answer: what is asked for next would wait 40 ms for its acknowledgement
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        """Go home."""
        self._socket.close()

    def set(self, key: str, value: str | bytes) -> None:
        """Leave a value for the others."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._send(Put(rendezvous_id=self._name, key=key, value=data))

    def get(self, key: str) -> bytes:
        """Wait for a value and return it."""
        return self._take([key])[0]

    def wait(self, keys: list[str], _timeout: timedelta | None = None) -> None:
        """Wait until all of `keys` are there. There is no timeout: who has waited enough shuts the socket down."""
        self._take(keys)

    def _take(self, keys: list[str]) -> list[bytes]:
        self._send(Take(rendezvous_id=self._name, keys=keys))
        return taken(self._receive(length_of(self._receive(LENGTH.size)))).values

    def _send(self, message: ToRendezvous) -> None:
        try:
            self._socket.sendall(frame(message))
        except OSError as error:
            raise GroupBrokenError(f"the rendezvous was broken off: {error}") from error

    def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            try:
                part = self._socket.recv(size - len(data))
            except OSError as error:
                raise GroupBrokenError(f"the rendezvous was broken off: {error}") from error
            if not part:
                raise GroupBrokenError("the rendezvous was broken off")
            data += part
        return data
