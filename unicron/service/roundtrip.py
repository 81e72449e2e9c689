"""Shows that facts get through: one is put into the journal, and has come out where the service has taken it in.

A process may answer while nothing reaches it, and a server while it stores nothing. So health is no question of whether
somebody is there. What is put in is no message: it stands on a subject of its own, which nobody else reads.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from unicron import codec, subjects
from unicron.aio import retry_until_available
from unicron.bus.protocol import Bus
from unicron.contracts.answers import Health, Reply
from unicron.errors import NotAllowedError, UnicronError
from unicron.services import SERVICES
from unicron.vitality import STORES_NOTHING

PROOF_S = 1.8
"""How long the way may take."""

OUTLIVED = 1.2
"""Times to live after which a lease that was not renewed should be gone."""

LOOK_S = 0.2
"""Time to the next look whether an instance can be active."""

OTHERS_S = 0.4
"""How long to wait for a pulse that another service sends: who asks one asks all, and one pulse shows it of each."""


class Inactive:
    """Answers in place of a service, while no instance can be active, why that is so.

    Args:
        name: of the service.
        bus: on which to.
        is_active: returns whether the instance here is.
        trouble: returns why none can be; empty where that is not known.
        ttl_s: how long a lease outlives its last renewal.
    """

    def __init__(
        self, name: str, bus: Bus, is_active: Callable[[], object], trouble: Callable[[], str], ttl_s: float
    ) -> None:
        self._name, self._bus, self._is_active, self._trouble, self._ttl_s = name, bus, is_active, trouble, ttl_s
        self._seen: tuple[int, float] = (0, 0.0)

    async def run(self) -> None:
        """Do so for ever."""
        while True:
            if await self._why():
                stop = await retry_until_available(
                    partial(self._bus.serve, subjects.standby(self._name), self._name, self._answer),
                    "saying what is wrong",
                )
                while await self._why():
                    await asyncio.sleep(LOOK_S)
                await stop()
            await asyncio.sleep(LOOK_S)

    async def _answer(self, _: bytes) -> bytes:
        return codec.encode(Reply(health=Health(seconds=0.0, problem=f"{STORES_NOTHING}: {await self._why()}")))

    async def _why(self) -> str:
        """Return why no instance can be active; empty where one is, or may be at once."""
        if self._is_active():
            return ""
        return self._trouble() or await self._never_ends()

    async def _never_ends(self) -> str:
        """Return that the lease of an instance that renews it no more does not run out: even removing is writing."""
        try:
            stored = await self._bus.bucket("lease").get(self._name)
        except UnicronError as error:
            return str(error)
        now, (revision, since) = asyncio.get_running_loop().time(), self._seen
        if stored is None or stored.revision != revision:
            self._seen = (stored.revision if stored else 0, now)
            return ""
        never = now - since > OUTLIVED * self._ttl_s
        return f"a lease that nobody renews has not run out for {now - since:.0f} s" if never else ""


class RoundTrips:
    """The round trips of one service.

    Args:
        name: of the service.
        send: puts a pulse into the journal.
        waiting: returns how many inputs wait.
    """

    def __init__(self, name: str, send: Callable[[], Awaitable[object]], waiting: Callable[[], int]) -> None:
        self._name, self._send, self._waiting = name, send, waiting
        self._awaited: dict[asyncio.Future[None], None] = {}
        self._sending: asyncio.Future[object] | None = None

    def came_back(self) -> None:
        """Hear that the service has taken a pulse in, and committed what came before."""
        self._sending = None
        for each in self._awaited:
            if not each.done():
                each.set_result(None)

    async def prove(self, now: float) -> Health:
        """Return how long a fact takes, or what it did not get through.

        Args:
            now: Unix seconds here.
        """
        loop = asyncio.get_running_loop()
        began, back = loop.time(), loop.create_future()
        self._awaited[back] = None
        try:
            problem = await self._wait(back)
        finally:
            self._awaited.pop(back, None)
        return Health(seconds=loop.time() - began, problem=problem, at=now)

    async def _wait(self, back: "asyncio.Future[None]") -> str:
        if self._name != SERVICES[0]:
            await asyncio.wait({back}, timeout=OTHERS_S)
        problem = ""
        try:
            async with asyncio.timeout(PROOF_S):
                if not back.done():
                    problem = STORES_NOTHING + f": no answer within {PROOF_S:g} s"
                    await self._put_in()
                    problem = f"what the journal takes does not get through: {self._waiting():,} inputs wait"
                await back
        except TimeoutError:
            self._give_up()
            return problem
        except NotAllowedError as error:
            return f"can't show it: {error}"
        except UnicronError as error:
            return f"{STORES_NOTHING}: {error}"
        return ""

    async def _put_in(self) -> None:
        """Put a pulse in, unless one is on its way: however many ask, one shows it to all of them."""
        if self._sending is None:
            self._sending = asyncio.ensure_future(self._send())
            self._sending.add_done_callback(lambda sent: sent.cancelled() or sent.exception())
        try:
            await asyncio.shield(self._sending)
        except UnicronError:
            self._give_up()
            raise

    def _give_up(self) -> None:
        """Put another one in when somebody asks again."""
        if self._sending is not None and self._sending.done():
            self._sending = None
