"""A store for torch's process groups, kept by an agent, by which the ranks of a membership find one another.

torch's own TCPStore asks the name service for the name of every address it connects to, and a lookup that gets lost
holds all of them up for 5 s. This one looks nothing up.
"""

import contextlib
import socket
import time
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import Store

from unicron import fabric_proofs
from unicron.addresses import Address
from unicron.contracts.frames import LENGTH, frame, length_of
from unicron.contracts.rendezvous import Enter, Put, Take, ToRendezvous, challenge, taken
from unicron.contracts.worker import Membership
from unicron.errors import GroupBrokenError, InvalidInputError, explain_lack

CONNECT_S = 5.0
ASKED_BYTES = 1024
"""More than a challenge has."""

GONE_S = 2.0
"""How long a rendezvous may be gone, before a program that has ended well is taken to have done so everywhere."""


def await_all_done(meet: Callable[[], object], is_over: Callable[[], bool]) -> bool:
    """Wait until a program has ended well on all ranks; return False where on one it has not.

    Else a task would be done whose first rank fails while it saves the model, behind the others' end. Where the
    rendezvous is gone, as its agent was started again, that is not known, and nobody waits for it.

    Args:
        meet: meets the others at their end; raises GroupBrokenError where that was broken off.
        is_over: there is a newer membership.
    """
    gone_at: float | None = None
    while not is_over():
        try:
            meet()
        except GroupBrokenError:
            gone_at = gone_at or time.monotonic()
            if time.monotonic() - gone_at > GONE_S:
                return True
            time.sleep(GONE_S / 10)
        else:
            return True
    return False


class Rendezvous(Store):
    """A rank's connection to the rendezvous of its membership (host:port, the host an IP address).

    Shutting its socket down, from any thread, makes whatever waits in it raise.

    Args:
        membership: where it is, and the secrets that open it.
        part: those with the same part of the membership meet each other only.

    Raises:
        GroupBrokenError: nobody is there, it takes us for a stranger, or the connection broke.
    """

    def __init__(self, membership: Membership, part: str = "") -> None:
        super().__init__()
        # the name keeps tasks and epochs apart: a rank that was stopped and goes on meets nobody
        self._name = f"{membership.rendezvous_id}-{membership.epoch}{part}"
        self._address = membership.rendezvous
        try:
            self._socket = socket.create_connection(Address.parse(self._address), CONNECT_S)
        except OSError as error:
            raise GroupBrokenError(f"the rendezvous {self._address} can't be reached: {explain_lack(error)}") from error
        if membership.secrets:
            self._enter(membership)
        self._socket.settimeout(None)
        # a value that was left has no answer: what is asked for next would wait 40 ms for its acknowledgement
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _enter(self, membership: Membership) -> None:
        """Answer its challenge."""
        try:
            asked = challenge(self._receive(length_of(self._receive(LENGTH.size), ASKED_BYTES)))
        except (GroupBrokenError, InvalidInputError) as error:
            raise GroupBrokenError(
                f"{error}; where it asks for no proof, name the fabric key in UNICRON_FABRIC_KEY on its node too"
            ) from error
        answers = fabric_proofs.challenge_responses(membership.secrets, self._address, asked.nonce)
        self._send(Enter(rendezvous_id=membership.rendezvous_id, epoch=membership.epoch, answers=answers))

    def cut(self) -> None:
        """Make all waits on this connection raise, from any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value for the other ranks."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._send(Put(rendezvous_id=self._name, key=key, value=data))

    def get(self, key: str) -> bytes:
        """Wait for a value and return it."""
        return self.read([key])[0]

    def wait(self, keys: list[str], _timeout: timedelta | None = None) -> None:
        """Wait until all of `keys` are there. There is no timeout: to end the wait, the socket is shut down."""
        self.read(keys)

    def read(self, keys: list[str]) -> list[bytes]:
        """Wait until all of `keys` are there, and return their values.

        Raises:
            GroupBrokenError: the connection broke.
        """
        return self._ask(Take(rendezvous_id=self._name, keys=keys))

    def read_present(self, keys: list[str]) -> list[bytes]:
        """Return the values that are there now, empty where there is none.

        Raises:
            GroupBrokenError: the connection broke.
        """
        return self._ask(Take(rendezvous_id=self._name, keys=keys, waits=False))

    def _ask(self, question: Take) -> list[bytes]:
        self._send(question)
        data = self._receive(length_of(self._receive(LENGTH.size)))
        try:
            return taken(data).values
        except InvalidInputError as error:
            raise GroupBrokenError(
                f"the rendezvous {self._address} answers otherwise: {error}; where it asks for a proof, name the "
                "fabric key in UNICRON_FABRIC_KEY on this node too"
            ) from error

    def _send(self, message: ToRendezvous) -> None:
        try:
            self._socket.sendall(frame(message))
        except OSError as error:
            raise self._broken_error(error) from error

    def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            try:
                part = self._socket.recv(size - len(data))
            except OSError as error:
                raise self._broken_error(error) from error
            if not part:
                raise self._broken_error("its end was closed")
            data += part
        return data

    def _broken_error(self, why: object) -> GroupBrokenError:
        return GroupBrokenError(
            f"the rendezvous {self._address} was broken off: {why}; the log of its agent says so if it took us for a "
            "stranger"
        )
