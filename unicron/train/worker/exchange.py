"""How the ranks of a new membership hand states to those that lack them."""

from collections.abc import Callable, Sequence

import msgspec

from unicron.contracts.states import ParkedSnapshot, StateRef
from unicron.contracts.storage import StoredState
from unicron.contracts.worker import Membership
from unicron.errors import StateTransferError
from unicron.train.worker.redistribute import Resumption, shelved
from unicron.train.worker.shell import Ranks, States


class Offer(msgspec.Struct, frozen=True):
    """What a rank hands over: its state, or why it can't; neither where nobody asks it."""

    state: StateRef | None = None
    error: str = ""


class Exchange:
    """One rank's part in it; all ranks of the membership go through it together.

    Args:
        ranks: of the membership.
        states: of the rank.
        membership: that has met.
        place: of the rank.
        plan: who takes a state from whom, the same on all ranks.
        taken: the rank's own state is one that it took and has not loaded yet.

    Attributes:
        took_from: worker whose state, or whose part of one first, this rank took; empty where it took none.
    """

    def __init__(
        self, ranks: Ranks, states: States, membership: Membership, place: int, plan: Resumption, *, taken: bool
    ) -> None:
        self._ranks, self._states = ranks, states
        self._membership, self._place, self._plan, self._taken = membership, place, plan, taken
        self._given: StateRef | None = None
        self.took_from = ""

    async def carry_out(self, waiting: Callable[[], None]) -> None:
        """Have every rank take what it lacks: what others have left behind, or a state of the nearest holder.

        Args:
            waiting: told before something that may take long.

        Raises:
            StateTransferError: some rank could take it from none of its sources; all ranks raise this.
            GroupBrokenError: the membership broke.
        """
        try:
            if self._plan.shelf and self._plan.lacking:
                await self._from_shelf(self._plan.shelf)
            await self._from_holders(waiting)
        finally:
            self._withdraw()

    async def _from_shelf(self, shelf: ParkedSnapshot) -> None:
        problem, member = "", self._membership.member
        if self._membership.rank in self._plan.lacking:
            parts = shelved(shelf, self._membership.layout, self._place, member.node)
            problem = await self._take(parts) if shelf.stored is None else self._take_stored(shelf.stored)
        problems = await self._ranks.gather(problem)
        if why := next(filter(None, problems), ""):
            raise StateTransferError(f"what was left of the state can't be had: {why}")

    async def _from_holders(self, waiting: Callable[[], None]) -> None:
        rank, attempt, problem, problems = self._membership.rank, 0, "", list[str]()
        sources = self._plan.sources
        missing = {each for each, found in enumerate(sources) if found}
        while missing:
            asked = {each: sources[each][attempt] for each in missing if attempt < len(sources[each])}
            if not asked:
                why = problems[min(missing)]
                raise StateTransferError(f"no holder could hand its state to ranks {sorted(missing)}: {why}")
            offers = await self._ranks.gather(await self._offer(waiting, asked=rank in asked.values()))
            if rank in asked:
                problem = await self._accept(offers[asked[rank]])
            problems = await self._ranks.gather(problem)
            self._withdraw()
            missing = {each for each in missing if problems[each]}
            attempt += 1

    async def _offer(self, waiting: Callable[[], None], *, asked: bool) -> Offer:
        """Lay the state out for those who ask; one that can't be laid out is told to all, as they wait for it."""
        if not asked:
            return Offer()
        waiting()
        try:
            self._given = await self._states.export(self._place, self._plan.iteration, taken=self._taken)
        except StateTransferError as error:
            return Offer(error=str(error))
        return Offer(state=self._given)

    async def _accept(self, offer: Offer) -> str:
        """Take the state that is offered; return what went wrong."""
        ref = offer.state
        if ref is None:
            return offer.error
        if (ref.iteration, ref.place) != (self._plan.iteration, self._place):
            return f"{ref.location.worker} offered iteration {ref.iteration} of place {ref.place}"
        return await self._take([[ref]])

    async def _take(self, parts: Sequence[Sequence[StateRef]]) -> str:
        """Take the state that these parts make up; return what went wrong."""
        try:
            await self._states.take(parts)
        except StateTransferError as error:
            return str(error)
        self.took_from = parts[0][0].location.worker
        return ""

    def _take_stored(self, stored: StoredState) -> str:
        """Take a state from storage; return what went wrong."""
        try:
            self._states.take_stored(stored)
        except StateTransferError as error:
            return str(error)
        self.took_from = stored.folder
        return ""

    def _withdraw(self) -> None:
        if self._given is not None:
            self._states.withdraw(self._given)
            self._given = None
