"""Records that ranks publish of their scripts, at their membership's rendezvous, where they outlive the ranks.

A rank keeps several there, as others may be an iteration behind it when it is lost. Survivors copy the records of a
lost rank to the rendezvous of the next membership, for the rank that replaces it.
"""

import contextlib
import hmac
import os
import pickle
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from typing import Any

from unicron.addresses import Address, is_loopback
from unicron.contracts.frames import LIMIT
from unicron.contracts.worker import NO_SNAPSHOT_NOW, NOWHERE, SNAPSHOT_AGAIN, UNCARRIED, Membership
from unicron.errors import GroupBrokenError
from unicron.train.carry.kinds import NotCarriedError, NotComparedError
from unicron.train.groups.rendezvous import Rendezvous
from unicron.train.loops.active_loops import SNAPSHOTS_KEPT, Chain, LoopSnapshot
from unicron.train.loops.collective_results import MOST_BYTES as RESULT_BYTES
from unicron.train.worker.telling import tell

PART, MOST_BYTES = "-records", LIMIT - (1 << 20)
REFUSED = "refused"
NO_SNAPSHOT = (
    "the lost rank left no snapshot of the iteration that the others are in: between backward() and the end of the "
    "update none is made"
)

UNKNOWN = (
    "what a collective of this script gave before its loop, or since its last snapshot, can't be given to a new rank: "
    f"it was more than {RESULT_BYTES >> 20} MiB, not the same on all ranks, or of a group of fewer than all"
)


class Records:
    """The records of this rank, and of ranks that are lost.

    Attributes:
        refusal: why no other process can take over this script; empty where one can.
        moved: returns whether parameters are not what they were at the last snapshot.
        shown: what a trial has shown: why no other process can ever take over this script; empty where it has not.
        iterations_compared: in how many more iterations options of optimizers are compared, as a rank was replaced.
    """

    def __init__(self) -> None:
        self.refusal, self._saved, self.iterations_compared = "", b"", 0
        self.shown, self._notices, self._has_told = "", dict[str, bytes](), False
        self.moved: Callable[[], bool] = lambda: False
        self._reported = {os.environ.get(UNCARRIED, "")}  # which was told as it was found
        self._last = [b""] * SNAPSHOTS_KEPT
        self._count = 0
        self._lost: dict[int, list[bytes]] = {}
        self._membership, self._store = NOWHERE, None

    _membership: Membership
    _store: Rendezvous | None

    def state_dict(self) -> dict[str, Any]:
        """Return the newest record, to be saved with the rest of this rank's state."""
        return {"last": self._last[(self._count - 1) % SNAPSHOTS_KEPT]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the record in a saved state from which all ranks restart."""
        self._saved = bytes(state["last"])

    def distribute(self, membership: Membership, saved: Iterable[dict[str, Any]]) -> None:
        """Publish for each rank its record in the saved state from which all ranks restart."""
        self._membership, self._store = membership, Rendezvous(membership, PART)
        for rank, each in enumerate(saved):
            self._put(rank, dict(enumerate([bytes(each["last"]), *[b""] * (SNAPSHOTS_KEPT - 1)])))

    def publish(self, record: LoopSnapshot | NotCarriedError) -> None:
        """Publish a record, or print once why there is none."""
        if why := self.shown or untrusted_reason(self._membership) or os.environ.get(UNCARRIED):
            record = NotCarriedError(why)
        if isinstance(record, NotCarriedError):
            if not isinstance(record, NotComparedError) and str(record) not in self._reported:
                self._reported.add(str(record))
                cure = " Keep plain values instead" if str(record).startswith("`") and "keep" not in str(record) else ""
                tell(f"{NO_SNAPSHOT_NOW}{record}{_THEN}{cure}")
                self._has_told = True
            data = b""
            self.publish_refusal(str(record))
        else:
            if self.refusal:
                self.publish_refusal("")
            data = pickle.dumps([record.chain, record.positions, record.snapshots], pickle.HIGHEST_PROTOCOL)
            if len(data) > MOST_BYTES:  # the rendezvous takes no more, and would break off
                number, most = len(record.snapshots), MOST_BYTES >> 20
                self.publish(NotCarriedError(f"its {number} snapshots, one for each loop, take more than {most} MiB"))
                return
            if self._has_told:
                self._has_told = False
                tell(SNAPSHOT_AGAIN)
        number = self._count % SNAPSHOTS_KEPT
        self._count, self._last[number] = self._count + 1, data
        with contextlib.suppress(GroupBrokenError):  # whatever else goes there tells of it
            self._put(self._membership.rank, {number: data})

    def _put(self, rank: int, records: dict[int, bytes]) -> None:
        if self._store is not None:
            for number, data in records.items():
                self._store.set(f"{rank}-{number}", sign(data, self._membership.secrets))

    def move_to(self, membership: Membership, new: Iterable[int]) -> str:
        """Move to the next membership's rendezvous, and copy the records of lost ranks there.

        Args:
            membership: that is next.
            new: its ranks that have just been started.

        Returns:
            why no new rank can take one of their places; empty where no rank has published a reason.
        """
        before, wanted = self._store, list(new)
        left = dict[str, bytes]()
        if before is not None:
            with contextlib.suppress(GroupBrokenError):  # its node is gone, too
                for name in (*range(SNAPSHOTS_KEPT), REFUSED):  # together they may be more than an answer may have
                    for rank in wanted:
                        left |= self._read(before, [rank], [name])
            before.close()
        for rank in wanted:
            found = [left.get(f"{rank}-{number}") for number in range(SNAPSHOTS_KEPT)]
            self._lost[rank] = [*self._lost.get(rank, []), *filter(None, found)][-SNAPSHOTS_KEPT:]
        self._lost = {rank: self._lost[rank] for rank in wanted}
        self._membership, self._store = membership, Rendezvous(membership, PART)
        self._put(membership.rank, dict(enumerate(self._last)))
        if self.refusal:
            self.publish_refusal(self.refusal)
        for name, data in self._notices.items():
            self.leave(name, data)
        for rank, records in self._lost.items():
            self._put(rank, dict(enumerate([*records, *[b""] * SNAPSHOTS_KEPT][:SNAPSHOTS_KEPT])))
        return b"".join(left.get(f"{rank}-{REFUSED}", b"") for rank in wanted).decode(errors="replace")

    def _read(self, store: Rendezvous, ranks: Iterable[int], names: Iterable[object]) -> dict[str, bytes]:
        """Return what these ranks have published, by rank and name; what has no valid signature is left out.

        Raises:
            GroupBrokenError: the connection broke.
        """
        keys = [f"{rank}-{name}" for rank in ranks for name in names]
        found = dict[str, bytes]()
        for key, data in zip(keys, store.read_present(keys), strict=True):
            with contextlib.suppress(NotCarriedError):
                found[key] = data if key.endswith(REFUSED) else verify(data, self._membership.secrets)
        return found

    def take_over(self, membership: Membership, chains: Iterable[Chain]) -> LoopSnapshot:
        """Return the replaced rank's record of the point at which the other ranks are.

        Args:
            membership: of this rank.
            chains: of the loops at which it can begin, the best first.

        Raises:
            NotCarriedError: it has published none.
        """
        if why := untrusted_reason(membership) or os.environ.get(UNCARRIED):
            raise NotCarriedError(why)
        self._membership, self._store = membership, Rendezvous(membership, PART)
        if self._saved:
            self._last = [self._saved, *[b""] * (SNAPSHOTS_KEPT - 1)]
        else:
            found_there = [self._store.read([f"{membership.rank}-{number}"])[0] for number in range(SNAPSHOTS_KEPT)]
            self._last = [verify(each, membership.secrets) for each in found_there]
        left_there = {each: LoopSnapshot(*pickle.loads(each)) for each in self._last if each}  # noqa: S301 likewise
        for chain in chains:
            for data, record in left_there.items():
                if record.chain == chain:
                    self._last, self._count = [data, *[b""] * (SNAPSHOTS_KEPT - 1)], 1
                    return record
        raise NotCarriedError(NO_SNAPSHOT)

    def lost_reach(self, chains: Iterable[Chain]) -> bool:
        """Return whether each lost rank whose records were copied has left one of a point with one of these chains."""
        reachable = list(chains)
        records = ((LoopSnapshot(*pickle.loads(each)) for each in left if each) for left in self._lost.values())  # noqa: S301 ranks of this task have made them
        return all(any(record.chain in reachable for record in left) for left in records)

    def lacks_of_lost(self, reachable: Iterable[Chain], known: Iterable[Chain]) -> str:
        """Return why no new rank can begin where a lost one has left a snapshot; empty where it can.

        Args:
            reachable: chains of points of this rank that a new one can come to.
            known: those of all of them.
        """
        if self.lost_reach(reachable):
            return ""
        return UNKNOWN if self.lost_reach(known) else NO_SNAPSHOT

    def wait_for_comparison(self) -> None:
        """Have no process take over this rank yet: ranks have made their first update, and are not compared so far."""
        why = "ranks are compared after their first update, before one may take another's place"
        self._reported.add(why)
        self.publish(NotCarriedError(why))

    def leave(self, name: str, data: bytes) -> None:
        """Leave something for the other ranks."""
        self._notices[name] = data
        if self._store is not None:
            with contextlib.suppress(GroupBrokenError):
                self._store.set(f"{self._membership.rank}-{name}", sign(data, self._membership.secrets))

    def read_left(self, names: Iterable[str], ranks: Iterable[int]) -> list[bytes]:
        """Return what these ranks have left under these names, rank by rank; empty where nothing is."""
        keys, wanted = list(names), list(ranks)
        if self._store is None or not wanted:
            return [b"" for _ in wanted for _ in keys]
        try:
            found = self._read(self._store, wanted, keys)
        except GroupBrokenError:  # a newer membership is near
            found = {}
        return [found.get(f"{rank}-{name}", b"") for rank in wanted for name in keys]

    def refuse_all(self, why: str) -> None:
        """Have no process take over this script any more, as it would go on otherwise. Any thread may call this."""
        self.shown = self.refusal = why
        self._reported.add(why)  # it is told as what came of the trial
        if self._store is not None:
            with contextlib.suppress(GroupBrokenError), contextlib.closing(Rendezvous(self._membership, PART)) as store:
                store.set(f"{self._membership.rank}-{REFUSED}", why.encode())

    def publish_refusal(self, why: str) -> None:
        """Publish why no process can take over this rank, or why this one can't take over the one that it replaces.

        Args:
            why: that is; empty where it is over.
        """
        self.refusal = why
        if self._store is not None:
            with contextlib.suppress(GroupBrokenError):
                self._store.set(f"{self._membership.rank}-{REFUSED}", why.encode())


def untrusted_reason(membership: Membership) -> str:
    """Return why records at a rendezvous can't be trusted (unpickling runs code); empty where they can."""
    if membership.secrets or not membership.rendezvous or is_loopback(Address.parse(membership.rendezvous).host):
        return ""
    return "its nodes have no fabric key, so that anybody could leave a snapshot: name one in UNICRON_FABRIC_KEY"


def sign(data: bytes, secrets: Sequence[bytes]) -> bytes:
    """Return data with the signature of a rank that has these secrets; unsigned where there are none."""
    return b"".join(hmac.digest(secret, data, sha256) for secret in secrets[:1]) + data


def verify(data: bytes, secrets: Sequence[bytes]) -> bytes:
    """Return signed data without its signature.

    Raises:
        NotCarriedError: no rank with one of these secrets has signed it.
    """
    if not secrets:
        return data
    mark, rest = data[: sha256().digest_size], data[sha256().digest_size :]
    if not any(hmac.compare_digest(mark, hmac.digest(secret, rest, sha256)) for secret in secrets):
        raise NotCarriedError("a snapshot that no rank of this task has made")
    return rest


_THEN = (
    ". If a rank is lost meanwhile, all ranks begin again, from the newest state that others can take up, or from the "
    "top."
)
