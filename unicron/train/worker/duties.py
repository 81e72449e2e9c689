"""What ranks do with a state before they update it: compare it among replicas, try it, and have it stored."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from unicron.contracts.states import SAVED, ParkedSnapshot
from unicron.contracts.worker import Diverged, Membership, Unusable
from unicron.errors import StateDivergedError, UnusableStateError
from unicron.train.worker.phases import Due
from unicron.train.worker.redistribute import Resumption, Standing
from unicron.train.worker.shell import Gradients, Ranks, States

BITS = (1 << 64) - 1

SAVE_S, SAVE_SHARE, CHEAP_S = 1.0, 0.004, 0.002
"""Iterations that take at least so many seconds have their states saved each; shorter ones too, as long as that takes
no more than this share of their time or next to nothing, else once in a while that makes it so."""


class Vote(NamedTuple):
    """What a replica has of a place's state; who has taken it from another since they compared says nothing new."""

    digest: int
    taken: bool


class Verdict(NamedTuple):
    """What came of a comparison.

    Attributes:
        wrong: replicas whose state is not the one that counts.
        undecided: it is not that of most, only that of as many as any other has, and the lowest rank.
    """

    wrong: frozenset[int]
    undecided: bool


def judge(votes: Sequence[Vote]) -> Verdict:
    """Return which replicas have another state than most of those that have it of themselves."""
    heard = [vote.digest for vote in votes if not vote.taken] or [vote.digest for vote in votes]
    [(right, count)] = Counter(heard).most_common(1)  # of equals the first
    wrong = frozenset(replica for replica, vote in enumerate(votes) if vote.digest != right)
    return Verdict(wrong, bool(wrong) and 2 * count <= len(heard))


def _source(shelf: ParkedSnapshot) -> str:
    """Return where copies of a state were had from; empty where workers left it behind who had gone on from it."""
    if shelf.stored is not None:
        return f"{shelf.stored.root}/{shelf.stored.folder}"
    nodes = sorted({ref.location.node for ref in shelf.states if ref.location.name.endswith(SAVED)})
    return f"the memory of {', '.join(nodes)}" if nodes else ""


class Duties:
    """One rank's part in it; all ranks of a membership have the same duties.

    Args:
        ranks, states, gradients: the shell of the rank.

    Attributes:
        due: in this iteration.
    """

    def __init__(self, ranks: Ranks, states: States, gradients: Gradients) -> None:
        self.due: frozenset[Due] = frozenset()
        self._ranks, self._states, self._gradients = ranks, states, gradients
        self._taken = False
        self._source = "copies"
        self._saved_at = self._stored_at = 0.0
        self._asked = 0

    def join(self, plan: Resumption, standings: Sequence[Standing], *, taken: bool = False) -> None:
        """Have the duties of all members; where one of them took a state, states are to be compared."""
        handed = {Due.COMPARE} if any(plan.sources) or plan.lacking else set[Due]()
        if plan.shelf and plan.lacking and (source := _source(plan.shelf)):
            handed.add(Due.TRY)
            self._source = source
        self.due = frozenset(handed | {Due.SAVE}).union(*(each.due for each in standings))
        self._taken, self._saved_at = self._taken or taken, self._ranks.now()

    def announce(self, *, saved: bool) -> None:
        """Have the next state saved or stored where it is time for that, or this one should be and is not saved."""
        every_s, now = self._states.store_s, self._ranks.now()
        cost_s = self._states.save_cost_s
        every_save_s = min(SAVE_S, cost_s / SAVE_SHARE) if cost_s > CHEAP_S else 0.0
        if self._states.saves and (now - self._saved_at >= every_save_s or (Due.SAVE in self.due and not saved)):
            self._gradients.announce(Due.SAVE)
        self._stored_at = self._stored_at or now
        missed = Due.STORE in self.due and not saved
        asked = self._states.store_asked not in {0, self._asked}
        if every_s > 0 and (now - self._stored_at >= every_s or missed or asked):
            self._gradients.announce(Due.STORE)

    def check(self) -> None:
        """Look at the gradient, where this is the first on a state that nobody has gone on from.

        Raises:
            UnusableStateError: it is not finite.
        """
        if Due.TRY in self.due and not self._gradients.finite:
            raise UnusableStateError("the loss or the gradient is not finite")

    def reject(self, epoch: int, iteration: int, error: UnusableStateError) -> None:
        """Tell that this state is to be used by nobody."""
        self._ranks.say(Unusable(epoch=epoch, iteration=iteration, copies=self._source, reason=str(error)))

    async def compare(self, membership: Membership, iteration: int) -> None:
        """Compare states, where that is due; tell whose this rank's is, if that must not be used any more.

        Raises:
            GroupBrokenError: the group broke.
            StateDivergedError: some replica's must not be used.
        """
        seat = membership.seat
        if Due.COMPARE not in self.due or seat is None or membership.layout.replicas == 1:
            return
        told = await self._ranks.tally(self._states.digest(), int(self._taken))
        votes = [Vote(digest, bool(taken)) for digest, taken in told]
        wrong, undecided = judge(votes)
        if seat.replica in wrong:
            self._ranks.say(
                Diverged(
                    epoch=membership.epoch,
                    iteration=iteration,
                    place=seat.place,
                    replica=seat.replica,
                    digests=[f"{vote.digest & BITS:016x}" for vote in votes],
                    undecided=undecided,
                )
            )
        if wrong:
            names = ", ".join(map(str, sorted(wrong)))
            text = (
                f"replica {names} has another state of place {seat.place} than {'most' if not undecided else 'others'}"
            )
            raise StateDivergedError(text, own=seat.replica in wrong)

    def fulfil(self, *, saved: bool, announced: frozenset[Due]) -> None:
        """Note that all is well with the state; who stores now has its own stored, if it was saved at all.

        Args:
            saved: it was.
            announced: what is due with the next.
        """
        if Due.STORE in self.due and saved and self._states.store_s > 0:
            self._states.store()
        self.due, self._taken = announced, False
        if announced:
            self._saved_at = self._ranks.now()
        if Due.STORE in announced:
            self.due |= {Due.COMPARE, Due.SAVE}
            self._stored_at, self._asked = self._saved_at, self._states.store_asked
