"""Modelled process groups: members that compute together, until one of them dies or leaves."""

import asyncio
from collections.abc import Callable
from typing import Any

from unicron.errors import GroupBrokenError

MOMENT_S = 0.03
"""Until that a peer has left is noticed."""


class SimulatedGroup:
    """A membership whose members compute together; all they have is an all-gather.

    Attributes:
        broken: why it ended; empty while it has not.
        complete: all members have found one another, so they no longer need the rendezvous.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._given: dict[str, dict[int, Any]] = {}
        self._waiting: dict[str, list[asyncio.Future[list[Any]]]] = {}
        self._watching: list[Callable[[], None]] = []
        self.broken = ""
        self.complete = False

    async def gather(self, key: str, rank: int, value: Any) -> list[Any]:
        """Return what every rank gave under `key`, once all have.

        Raises:
            GroupBrokenError: a member died or left before.
        """
        if self.broken:
            raise GroupBrokenError(self.broken)
        given = self._given.setdefault(key, {})
        given[rank] = value
        if len(given) < self._size:
            future: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(key, []).append(future)
            return await future
        everything = [given[rank] for rank in range(self._size)]
        del self._given[key]  # the same may be done once more
        self.complete = True
        for waiting in self._waiting.pop(key, []):
            if not waiting.done():
                waiting.set_result(everything)
        return everything

    def watch(self, left: Callable[[], None]) -> None:
        """Have `left` called when a member has died or left."""
        self._watching.append(left)

    def end(self, why: str) -> None:
        """Interrupt all waits."""
        self.broken = self.broken or why
        while self.complete and self._watching:
            asyncio.get_running_loop().call_later(MOMENT_S, self._watching.pop())
        for waiting in [each for several in self._waiting.values() for each in several if not each.done()]:
            waiting.set_exception(GroupBrokenError(why))
