"""Decisions of the ranks of one replica: each holds another part of the model, so all do the same."""

from collections.abc import Sequence
from math import isnan
from typing import NamedTuple

from unicron.contracts.worker import Membership
from unicron.errors import GroupBrokenError, UnusableStateError
from unicron.train.worker.phases import ANNOUNCED, Due, ReducedValues
from unicron.train.worker.redistribute import Standing
from unicron.train.worker.shell import Ranks, States

TRIED = 2.0
"""The value that ranks of a replica exchange where the state that they try is unusable; 1 is any other failure."""


class Agreement(NamedTuple):
    """The agreement of all ranks of a replica, once the gradient is whole on each.

    Attributes:
        loss: mean over the global batch.
        announced: what is due with the next state.
        holds: the gradient may be used.
    """

    loss: float
    announced: frozenset[Due]
    holds: bool


class Replica:
    """One rank's part in it. Where one worker has the whole model, it decides for itself.

    Args:
        ranks: all of them, and the rank itself among them.
        states: of the rank.

    Attributes:
        size: workers of a replica.
        secured: when they last agreed, the states that they had saved were safe on all of them.
    """

    def __init__(self, ranks: Ranks, states: States) -> None:
        self.size, self.secured = 1, True
        self._ranks, self._states = ranks, states

    @property
    def is_sharded(self) -> bool:
        """Whether other ranks hold the other parts of the model: then they do together whatever they do."""
        return self.size > 1

    @property
    def broken(self) -> bool:
        """Whether a rank of it was lost, so that what is computed is noise."""
        return self.is_sharded and self._ranks.formed < 0

    @property
    def may_save(self) -> bool:
        """Whether the state that was saved last is safe, so that the one before may go.

        Ranks of a replica go on together, so that they always have one iteration in common.
        """
        return self._states.secured and (self.secured or not self.is_sharded)

    async def form(self, membership: Membership, standings: Sequence[Standing], replica: int) -> None:
        """Meet the others, where the groups inside of the replica are not whole."""
        formed = {each.formed for each in standings[replica * self.size :][: self.size]}
        if self.is_sharded and (-1 in formed or len(formed) > 1):
            await self._ranks.form_replica(membership)

    async def settle(self) -> None:
        """Wait until this rank knows that what it computed is no noise: only then others may use its sums.

        Raises:
            GroupBrokenError: it may be.
        """
        if self.is_sharded:
            await self._ranks.settle()

    async def check(self) -> None:
        """Make sure that nothing broke on any rank of the replica: then all of them update.

        Raises:
            GroupBrokenError: something did.
        """
        await self.settle()
        if self.is_sharded:
            await self._ranks.gather_in_replica()

    async def newest_epoch(self) -> int:
        """Return the newest epoch that any rank knows of, so that all go there before the same microbatch.

        Raises:
            GroupBrokenError: a rank is lost.
        """
        epoch = self._ranks.newest.epoch
        if not self.is_sharded:
            return epoch
        return int(max(each for (each,) in await self._ranks.gather_in_replica(float(epoch))))

    async def agree(self, outcome: ReducedValues, failure: GroupBrokenError | None, *, holds: bool) -> Agreement:
        """Return what all ranks have come to, once the gradient is whole on each.

        Args:
            outcome: of the reduce, on this rank.
            failure: what kept this rank from summing its part, if anything did.
            holds: this rank's part may be used.

        Raises:
            GroupBrokenError: `failure`, or that of another rank.
        """
        loss, announced = outcome
        if self.is_sharded:
            failed = TRIED if isinstance(failure, UnusableStateError) else float(failure is not None)
            mine = (failed, loss, float(holds), float(self._states.secured))
            gathered = await self._ranks.gather_in_replica(*mine, *(float(due in announced) for due in ANNOUNCED))
            failed = max(each for each, *_ in gathered)
            if failed == TRIED:
                raise failure or UnusableStateError("the gradient of another place is not finite")
            if failed and failure is None:
                raise GroupBrokenError("another rank of this replica could not sum its part of the gradient")
            holds = all(each for _, _, each, *_ in gathered)
            losses = [each for _, each, *_ in gathered if not isnan(each)]  # the last stage of a pipeline has one
            loss = sum(losses) / len(losses) if losses else loss
            self.secured = all(secured for _, _, _, secured, *_ in gathered)
            first = gathered[0][-len(ANNOUNCED) :]  # whose clock counts for all
            announced = frozenset(due for due, said in zip(ANNOUNCED, first, strict=True) if said)
        if failure is not None:
            raise failure
        return Agreement(loss, announced, holds)
