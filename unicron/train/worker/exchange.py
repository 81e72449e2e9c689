"""How the ranks of a new membership hand states to those that lack them."""

from collections.abc import Callable, Sequence

import msgspec

from unicron.contracts.states import ParkedSnapshot, StateRef
from unicron.contracts.storage import StoredState
from unicron.contracts.worker import Membership
from unicron.errors import LackError, StateTransferError, tells_lack
from unicron.train.worker.redistribute import Resumption, parked_sources
from unicron.train.worker.shell import Ranks, States


class Offer(msgspec.Struct, frozen=True):
    """The state that a rank hands over, or why it can't; neither where nobody asks it."""

    state: StateRef | None = None
    error: str = ""


class Exchange:
    """One rank's part in it; all ranks of the membership go through it together.

    Args:
        ranks: of the membership.
        states: of the rank.
        membership: that has met.
        place: of the rank.
        plan: which rank takes a state from which, the same on all ranks.
        taken: the rank's own state is one that it has fetched and not loaded yet.

    Attributes:
        restored_from: worker whose state, or whose part of one first, this rank has fetched; empty where it has none.
    """

    def __init__(
        self, ranks: Ranks, states: States, membership: Membership, place: int, plan: Resumption, *, taken: bool
    ) -> None:
        self._ranks, self._states = ranks, states
        self._membership, self._place, self._plan, self._has_fetched = membership, place, plan, taken
        self._exported: StateRef | None = None
        self.restored_from = ""

    async def carry_out(self, waiting: Callable[[], None]) -> None:
        """Have every rank fetch the state that it lacks: a parked snapshot, or a state of the nearest holder.

        Args:
            waiting: is called before something that may take long.

        Raises:
            StateTransferError: some rank could take it from none of its sources; all ranks raise this.
            GroupBrokenError: the membership broke.
        """
        try:
            if self._plan.shelf and self._plan.lacking:
                await self._restore_parked(self._plan.shelf)
            await self._restore_from_holders(waiting)
        finally:
            self._remove_export()

    async def _restore_parked(self, shelf: ParkedSnapshot) -> None:
        problem, member = "", self._membership.member
        if self._membership.rank in self._plan.lacking:
            parts = parked_sources(shelf, self._membership.layout, self._place, member.node)
            problem = await self._fetch(parts) if shelf.stored is None else self._read_stored(shelf.stored)
        problems = await self._ranks.gather(problem)
        if why := next(filter(None, problems), ""):
            raise _failed(f"what was left of the state can't be had: {why}", problem)

    async def _restore_from_holders(self, waiting: Callable[[], None]) -> None:
        rank, attempt, problem, problems = self._membership.rank, 0, "", list[str]()
        sources = self._plan.sources
        missing = {each for each, found in enumerate(sources) if found}
        while missing:
            asked = {each: sources[each][attempt] for each in missing if attempt < len(sources[each])}
            if not asked:
                why = problems[min(missing)]
                text = f"no holder could hand its state to ranks {sorted(missing)}: {why}"
                raise _failed(text, problem if rank in missing else "")
            offers = await self._ranks.gather(await self._offer(waiting, asked=rank in asked.values()))
            if rank in asked:
                problem = await self._fetch_offered(offers[asked[rank]])
            problems = await self._ranks.gather(problem)
            self._remove_export()
            missing = {each for each in missing if problems[each]}
            attempt += 1

    async def _offer(self, waiting: Callable[[], None], *, asked: bool) -> Offer:
        """Export the state if a rank asks for it; return it, or the reason why it can't be exported."""
        if not asked:
            return Offer()
        waiting()
        try:
            self._exported = await self._states.export(self._place, self._plan.iteration, taken=self._has_fetched)
        except StateTransferError as error:
            return Offer(error=str(error))
        return Offer(state=self._exported)

    async def _fetch_offered(self, offer: Offer) -> str:
        """Fetch the state that is offered; return what went wrong, empty if nothing did."""
        ref = offer.state
        if ref is None:
            return offer.error
        if (ref.iteration, ref.place) != (self._plan.iteration, self._place):
            return f"{ref.location.worker} offered iteration {ref.iteration} of place {ref.place}"
        return await self._fetch([[ref]])

    async def _fetch(self, parts: Sequence[Sequence[StateRef]]) -> str:
        """Fetch the state that these parts make up; return what went wrong, empty if nothing did."""
        try:
            await self._states.fetch(parts)
        except StateTransferError as error:
            return str(error)
        self.restored_from = parts[0][0].location.worker
        return ""

    def _read_stored(self, stored: StoredState) -> str:
        """Read a state from storage; return what went wrong, empty if nothing did."""
        try:
            self._states.read_stored(stored)
        except StateTransferError as error:
            return str(error)
        self.restored_from = stored.folder
        return ""

    def _remove_export(self) -> None:
        if self._exported is not None:
            self._states.remove_export(self._exported)
            self._exported = None


def _failed(text: str, problem: str) -> StateTransferError:
    """Return the error of a rank with this problem of its own; who has a state, or needs none, has none."""
    return LackError(problem) if tells_lack(problem) else StateTransferError(text)
