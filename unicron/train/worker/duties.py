"""Duties of ranks before an update: compare the state among replicas, check that it is usable, save and store it."""

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
"""The state is saved in each iteration of at least SAVE_S seconds. In shorter ones it is saved as often as takes
at most this share of the time, or each time if a save takes less than CHEAP_S."""


class Vote(NamedTuple):
    """The digest of a replica's state of a place; a state that was taken from another replica is no vote of its own."""

    digest: int
    restored: bool


class StateComparison(NamedTuple):
    """The result of comparing states.

    Attributes:
        wrong: replicas whose state differs from the one that counts.
        undecided: no state has a majority; the one of the lowest rank counts.
    """

    wrong: frozenset[int]
    undecided: bool


def compare_votes(votes: Sequence[Vote]) -> StateComparison:
    """Return the replicas whose state differs from the majority's; states that were taken from others don't vote."""
    heard = [vote.digest for vote in votes if not vote.restored] or [vote.digest for vote in votes]
    [(right, count)] = Counter(heard).most_common(1)  # of equals the first
    wrong = frozenset(replica for replica, vote in enumerate(votes) if vote.digest != right)
    return StateComparison(wrong, bool(wrong) and 2 * count <= len(heard))


def origin_of(shelf: ParkedSnapshot) -> str:
    """Return where a state was restored from; empty if workers left it behind after they had computed on it."""
    if shelf.stored is not None:
        return f"{shelf.stored.root}/{shelf.stored.folder}"
    nodes = sorted({ref.location.node for ref in shelf.states if ref.location.name.endswith(SAVED)})
    return f"the memory of {', '.join(nodes)}" if nodes else ""


class Duties:
    """One rank's duties; all ranks of a membership have the same.

    Args:
        ranks, states, gradients: the shell of the rank.

    Attributes:
        due: in this iteration.
    """

    def __init__(self, ranks: Ranks, states: States, gradients: Gradients) -> None:
        self.due: frozenset[Due] = frozenset()
        self._ranks, self._states, self._gradients = ranks, states, gradients
        self._restored = False
        self._origin = "copies"
        self._saved_at = self._stored_at = 0.0
        self._asked = 0

    def join(self, plan: Resumption, standings: Sequence[Standing], *, taken: bool = False) -> None:
        """Take on the duties of all members; if any of them took a state, states are to be compared."""
        handed = {Due.COMPARE} if any(plan.sources) or plan.lacking else set[Due]()
        if plan.shelf and plan.lacking and (source := origin_of(plan.shelf)):
            handed.add(Due.TRY)
            self._origin = source
        self.due = frozenset(handed | {Due.SAVE}).union(*(each.due for each in standings))
        self._restored, self._saved_at = self._restored or taken, self._ranks.now()

    def announce(self, *, saved: bool) -> None:
        """Announce that the next state is to be saved or stored, if that is due or failed for this one."""
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
        """Check the first gradient that is computed on a restored state.

        Raises:
            UnusableStateError: it is not finite.
        """
        if Due.TRY in self.due and not self._gradients.finite:
            raise UnusableStateError("the loss or the gradient is not finite")

    def reject(self, epoch: int, iteration: int, error: UnusableStateError) -> None:
        """Report that no worker must use this state."""
        self._ranks.send(Unusable(epoch=epoch, iteration=iteration, copies=self._origin, reason=str(error)))

    async def compare(self, membership: Membership, iteration: int) -> None:
        """Compare states, if that is due; report it if this rank's state is wrong.

        Raises:
            GroupBrokenError: the group broke.
            StateDivergedError: some replica's must not be used.
        """
        seat = membership.seat
        if Due.COMPARE not in self.due or seat is None or membership.layout.replicas == 1:
            return
        if (digest := self._states.digest()) is None:
            return
        reports = await self._ranks.gather_across_replicas(digest, int(self._restored))
        votes = [Vote(digest, bool(taken)) for digest, taken in reports]
        wrong, undecided = compare_votes(votes)
        if seat.replica in wrong:
            self._ranks.send(
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

    def carry_out(self, *, saved: bool, announced: frozenset[Due]) -> None:
        """Mark the duties as done, and store the saved state if that is due.

        Args:
            saved: whether the state was saved.
            announced: what is due with the next state.
        """
        if Due.STORE in self.due and saved and self._states.store_s > 0:
            self._states.store()
        self.due, self._restored = announced, False
        if announced:
            self._saved_at = self._ranks.now()
        if Due.STORE in announced:
            self.due |= {Due.COMPARE, Due.SAVE}
            self._stored_at, self._asked = self._saved_at, self._states.store_asked
