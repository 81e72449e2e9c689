"""Where ranks leave their own records, which outlive them: at their membership's rendezvous, which an agent keeps.

A rank leaves some in turn, as others may be an iteration behind it when it is lost. Those that live take what a lost
rank has left to the rendezvous of the next membership, for whoever replaces it.
"""

import contextlib
import hmac
import os
import pickle
import sys
from collections.abc import Iterable, Sequence
from hashlib import sha256
from ipaddress import ip_address
from typing import Any

from unicron.contracts.worker import NOWHERE, UNCARRIED, Membership
from unicron.errors import GroupBrokenError
from unicron.train.groups.rendezvous import Rendezvous
from unicron.train.scripts.drill import Prints
from unicron.train.scripts.kinds import NotCarriedError
from unicron.train.scripts.under_way import KEPT, Chain, Record

PART = "-records"
REFUSED, GRADIENT = "refused", "gradient"


class Records:
    """This rank's, and those of ranks that are lost.

    Attributes:
        refused: why this script can't be had by another process; empty where it can.
        gradient: iteration, and what tells apart the gradient that the rank had in it which this one replaces in a
            drill; None outside of one.
        watched: in how many iterations more what ranks have alike is compared, as one was replaced.
    """

    def __init__(self) -> None:
        self.refused, self._saved, self.watched = "", b"", 0
        self.gradient: tuple[int, Prints] | None = None
        self._told = set[str]()
        self._last = [b""] * KEPT
        self._count = 0
        self._lost: dict[int, list[bytes]] = {}
        self._membership, self._store = NOWHERE, None

    _membership: Membership
    _store: Rendezvous | None

    def state_dict(self) -> dict[str, Any]:
        """Return what was left last, to be saved with the rest of this rank's state."""
        return {"last": self._last[(self._count - 1) % KEPT]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have what this rank had left when a state was saved from which all begin again."""
        self._saved = bytes(state["last"])

    def hand_out(self, membership: Membership, saved: Iterable[dict[str, Any]]) -> None:
        """Leave for each rank what it had left when a state was saved from which all begin again."""
        self._membership, self._store = membership, Rendezvous(membership, PART)
        for rank, each in enumerate(saved):
            self._put(rank, dict(enumerate([bytes(each["last"]), *[b""] * (KEPT - 1)])))

    def leave(self, record: Record | NotCarriedError) -> None:
        """Leave a record, or say once why there is none."""
        if why := distrust(self._membership) or os.environ.get(UNCARRIED):
            record = NotCarriedError(why)
        if isinstance(record, NotCarriedError):
            if str(record) not in self._told:
                self._told.add(str(record))
                print(f"unicron: {_REFUSAL.format(record)}", file=sys.stderr)  # noqa: T201 goes to the worker's log
            data = b""
            self.refuse(str(record))
        else:
            if self.refused:
                self.refuse("")
            data = pickle.dumps([record.chain, record.positions, record.snapshots], pickle.HIGHEST_PROTOCOL)
        number = self._count % KEPT
        self._count, self._last[number] = self._count + 1, data
        with contextlib.suppress(GroupBrokenError):  # whatever else goes there tells of it
            self._put(self._membership.rank, {number: data})

    def _put(self, rank: int, records: dict[int, bytes]) -> None:
        if self._store is not None:
            for number, data in records.items():
                self._store.set(f"{rank}-{number}", signed(data, self._membership.secrets))

    def go_on(self, membership: Membership, new: Iterable[int]) -> str:
        """Go to the next membership's rendezvous, and take there what lost ranks have left.

        Args:
            membership: that is next.
            new: its ranks that have just been started.

        Returns:
            why nobody can be one of these, as it was told; empty where it was not.
        """
        before, wanted = self._store, list(new)
        left = dict[str, bytes]()
        if before is not None:
            with contextlib.suppress(GroupBrokenError):  # its node is gone, too
                left = self._left(before, wanted, (*range(KEPT), GRADIENT, REFUSED))
            before.close()
        for rank in wanted:
            found = [left.get(f"{rank}-{number}") for number in range(KEPT)]
            self._lost[rank] = [*self._lost.get(rank, []), *filter(None, found)][-KEPT:]
        self._lost = {rank: self._lost[rank] for rank in wanted}
        self._membership, self._store = membership, Rendezvous(membership, PART)
        self._put(membership.rank, dict(enumerate(self._last)))
        if self.refused:
            self.refuse(self.refused)
        for rank, records in self._lost.items():
            self._put(rank, dict(enumerate([*records, *[b""] * KEPT][:KEPT])))
            if gradient := left.get(f"{rank}-{GRADIENT}"):
                self._leave(f"{rank}-{GRADIENT}", gradient)
        return b"".join(left.get(f"{rank}-{REFUSED}", b"") for rank in wanted).decode(errors="replace")

    def _left(self, store: Rendezvous, ranks: Iterable[int], names: Iterable[object]) -> dict[str, bytes]:
        """Return what these ranks have left, by rank and name; nothing is returned that no rank has made.

        Raises:
            GroupBrokenError: the connection broke.
        """
        keys = [f"{rank}-{name}" for rank in ranks for name in names]
        found = dict[str, bytes]()
        for key, data in zip(keys, store.look(keys), strict=True):
            with contextlib.suppress(NotCarriedError):
                found[key] = data if key.endswith(REFUSED) else checked(data, self._membership.secrets)
        return found

    def leave_gradient(self, iteration: int, prints: Prints) -> None:
        """Leave what tells this rank's gradient apart, for whoever replaces it in a drill."""
        self._leave(f"{self._membership.rank}-{GRADIENT}", pickle.dumps((iteration, prints)))

    def _leave(self, key: str, data: bytes) -> None:
        if self._store is not None:
            with contextlib.suppress(GroupBrokenError):
                self._store.set(key, signed(data, self._membership.secrets))

    def begin(self, membership: Membership, chains: Iterable[Chain]) -> Record:
        """Return what the rank that this one replaces has left of where the others are.

        Args:
            membership: of this rank.
            chains: of the loops at which it can begin, the best first.

        Raises:
            NotCarriedError: it has left nothing of that.
        """
        if why := distrust(membership):
            raise NotCarriedError(why)
        self._membership, self._store = membership, Rendezvous(membership, PART)
        left = b"".join(self._left(self._store, [membership.rank], [GRADIENT]).values())
        self.gradient = pickle.loads(left) if left else None  # noqa: S301 a rank of this task has made it
        if self._saved:
            self._last = [self._saved, *[b""] * (KEPT - 1)]
        else:
            found_there = self._store.take([f"{membership.rank}-{number}" for number in range(KEPT)])
            self._last = [checked(each, membership.secrets) for each in found_there]
        left_there = {each: Record(*pickle.loads(each)) for each in self._last if each}  # noqa: S301 likewise
        for chain in chains:
            for data, record in left_there.items():
                if record.chain == chain:
                    self._last, self._count = [data, *[b""] * (KEPT - 1)], 1
                    return record
        raise NotCarriedError("the rank that is lost has left no snapshot of the iteration that the others are in")

    def refuse(self, why: str) -> None:
        """Tell the others that nobody can become this rank now, or it can't become the one that it replaces.

        Args:
            why: that is; empty where it is over.
        """
        self.refused = why
        if self._store is not None:
            with contextlib.suppress(GroupBrokenError):
                self._store.set(f"{self._membership.rank}-{REFUSED}", why.encode())


def distrust(membership: Membership) -> str:
    """Return why records at a membership's rendezvous may be anybody's, which unpickled would run; empty otherwise."""
    host, _, _ = membership.rendezvous.rpartition(":")
    if membership.secrets or not host or ip_address(host.strip("[]")).is_loopback:
        return ""
    return "its nodes have no fabric key, so that anybody could leave a snapshot: name one in UNICRON_FABRIC_KEY"


def signed(data: bytes, secrets: Sequence[bytes]) -> bytes:
    """Return data that a rank of the membership with these secrets vouches for; unsigned where all is open."""
    return b"".join(hmac.digest(secret, data, sha256) for secret in secrets[:1]) + data


def checked(data: bytes, secrets: Sequence[bytes]) -> bytes:
    """Return the data if a rank of the membership vouches for it.

    Raises:
        NotCarriedError: none does.
    """
    if not secrets:
        return data
    mark, rest = data[: sha256().digest_size], data[sha256().digest_size :]
    if not any(hmac.compare_digest(mark, hmac.digest(secret, rest, sha256)) for secret in secrets):
        raise NotCarriedError("a snapshot that no rank of this task has made")
    return rest


_REFUSAL = (
    "this script can't be carried to another process as it is: {}. If a rank is lost now, all ranks begin again from "
    "a state that could be, or from the top: keep plain values instead, or set `heal: restart`"
)
