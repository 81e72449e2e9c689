"""The messages between a rank and the rendezvous of its membership, over TCP."""

from collections.abc import Callable

from unicron.contracts.base import Record
from unicron.contracts.frames import decoder
from unicron.contracts.ranges import Label, Number
from unicron.fabric_proofs import Nonce, Proofs


class ToRendezvous(Record, tag_field="type", tag=True, kw_only=True, frozen=True):
    """Base of what a rank says at the rendezvous of its membership, over TCP."""


class Enter(ToRendezvous, kw_only=True, frozen=True):
    """First message where the rendezvous has sent a `Challenge`: the connection is of this membership from now on.

    Attributes:
        rendezvous_id, epoch: of the membership.
        answers: to the challenge, see `proofs.answers`.
    """

    rendezvous_id: Label
    epoch: Number
    answers: Proofs


class Put(ToRendezvous, kw_only=True, frozen=True):
    """Leave `value` under `key` for the others at the rendezvous `rendezvous_id`."""

    rendezvous_id: str
    key: str
    value: bytes


class Take(ToRendezvous, kw_only=True, frozen=True):
    """Wait until somebody has put each of `keys`; the answer is a `Taken`.

    Attributes:
        waits: else the answer comes at once, and has empty values where nobody has.
    """

    rendezvous_id: str
    keys: list[str]
    waits: bool = True


class Challenge(Record, kw_only=True, frozen=True):
    """First message of a rendezvous that takes only who has the secret of a membership: to be answered by `Enter`."""

    nonce: Nonce


class Taken(Record, kw_only=True, frozen=True):
    """The values of the keys that were asked for, in their order."""

    values: list[bytes]


to_rendezvous: Callable[[bytes], ToRendezvous] = decoder(*ToRendezvous.__subclasses__())
challenge: Callable[[bytes], Challenge] = decoder(Challenge)
taken: Callable[[bytes], Taken] = decoder(Taken)
