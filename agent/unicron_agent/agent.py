"""The agent's loops: read the bus and the clock, pass them to the core as stimuli, and publish the core's facts.

Effects on the node are carried out by `unicron_agent.node`, or by a modelled node in a storm.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from unicron import subjects
from unicron.aio import gather_or_cancel, next_beat, retry_until_available
from unicron.bus.lease import token_in_force
from unicron.bus.protocol import Bus
from unicron.clock import Watch
from unicron.contracts.base import Message
from unicron.contracts.events import CommandRefused, DeadLetter
from unicron.errors import InvalidInputError
from unicron.rate_limits import LETTERS, RateLimiter, more_text
from unicron_agent.core import AgentCore
from unicron_agent.effects import Effect, Out, ReadToken
from unicron_agent.outbox import Outbox
from unicron_agent.stimuli import (
    DepartureNotice,
    EntryRead,
    Published,
    Reconnected,
    Shutdown,
    Stimulus,
    Tick,
    TokenRead,
    WorkerMessage,
)

log = logging.getLogger(__name__)

TICK_S = 0.1
"""Between ticks as long as there is something to do in each."""

COMMANDER = "transition"
"""Name of the service whose commands agents obey, as its lease has it."""

STILL_S = 0.5
"""An agent that comes by so much later than it meant stood still: nobody had the time to be silent meanwhile."""

LEASE_S = 0.1
"""Pause between looks at a lease that nobody has."""

GOODBYE_S = 2.0
"""How long a leaving agent waits for its workers to be gone, and then for its last facts to be out."""


class Agent:
    """Runs the core of one node's agent.

    Args:
        core: decides.
        bus: the agent's connection.
        outbox: publishes the core's facts.
        carry_out: carries out an effect on the node.
        inspect_workers: returns which workers' processes are stopped, and which late workers' processes sleep.

    Attributes:
        observe: called with each message that the core returns.
    """

    def __init__(
        self,
        core: AgentCore,
        bus: Bus,
        outbox: Outbox,
        carry_out: Callable[[Effect], None],
        inspect_workers: Callable[[], Tick],
    ) -> None:
        self.core = core
        self._bus = bus
        self._outbox = outbox
        self._carry_out = carry_out
        self._inspect_workers = inspect_workers
        self._token_wanted = asyncio.Event()
        self._ticks_at, self._earlier_tick = 0.0, asyncio.Event()
        self._pulse, self._looked_at, self._still_s = Watch(outbox.clock, STILL_S), 0.0, 0.0
        self._floods = RateLimiter(LETTERS)
        self.observe: Callable[[Message], None] = lambda _: None

    def handle(self, stimulus: Stimulus) -> Out:
        """Pass a stimulus to the core; publish the facts and carry out the effects that it returns, and return them."""
        out = self.core.handle(stimulus, self.now())
        if not isinstance(stimulus, WorkerMessage) and self._due_at() < self._ticks_at - TICK_S:
            self._earlier_tick.set()
        for fact in out:
            if isinstance(fact, Message):
                self.observe(fact)
                if self._should_publish(fact):
                    self._outbox.put(fact)
        for effect in out:
            if isinstance(effect, ReadToken):
                self._token_wanted.set()
            elif not isinstance(effect, Message):
                self._carry_out(effect)
        return out

    def now(self) -> float:
        """Return the monotonic seconds in which this agent ran: what stood still with it was not silent meanwhile."""
        ran = asyncio.get_running_loop().time()
        _, still_s = self._pulse.look(max(TICK_S, self._ticks_at - self._looked_at))
        self._looked_at = ran
        if still_s:
            log.warning("this agent stood still for %.1f s", still_s)
        self._still_s += still_s
        return ran - self._still_s

    def _due_at(self) -> float:
        return self.core.due_at() + self._still_s

    def _should_publish(self, fact: Message) -> bool:
        """Return whether to publish a fact: refusals and dead letters are rate-limited, and counted beyond that."""
        if not isinstance(fact, CommandRefused | DeadLetter):
            return True
        admitted = self._floods.admit(type(fact).__name__, asyncio.get_running_loop().time())
        if admitted:
            log.warning("%s", fact)
        return admitted

    def _report_suppressed(self) -> None:
        for what, count in self._floods.held_back(asyncio.get_running_loop().time()).items():
            letter = DeadLetter(subject=subjects.commands(self.core.node), error=f"{more_text(count)}: {what}")
            log.warning("%s", letter)
            self._outbox.put(letter)

    async def run(self, position: int) -> None:
        """Serve until cancelled; `position` is the place in the journal behind which commands are to be obeyed."""
        await gather_or_cancel(
            self._outbox.publish(lambda fact, sequence: self.handle(Published(fact, sequence))),
            self._outbox.send_telemetry(),
            self._read(position),
            self._tick(),
            self._reconnect(),
            self._read_tokens(),
        )

    async def _read(self, position: int) -> None:
        async for entry in self._bus.follow(subjects.read_by(self.core.node), position):
            self.handle(EntryRead(entry.sequence, entry.subject, entry.data))

    async def _tick(self) -> None:
        while True:
            self.handle(self._inspect_workers())
            self._report_suppressed()
            if self.core.presence.fault and not self.core.workers and not self._outbox.unpublished:
                raise InvalidInputError(self.core.presence.fault)
            now = asyncio.get_running_loop().time()
            self._earlier_tick.clear()
            self._ticks_at = next_beat(TICK_S, max(now, self._due_at()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._ticks_at):
                    await self._earlier_tick.wait()

    async def _reconnect(self) -> None:
        async for down_s in self._bus.reconnected():
            log.info("the bus was away for %.1f s; joining again", down_s)
            self.handle(Reconnected())

    async def _read_tokens(self) -> None:
        """Read the token in force whenever the core asks for it; wait while no instance holds the lease."""
        lease = self._bus.bucket("lease")
        while True:
            await self._token_wanted.wait()
            token = await retry_until_available(
                lambda: token_in_force(lease, COMMANDER), "reading who may give commands"
            )
            if token is None:
                await asyncio.sleep(LEASE_S)
                continue
            self._token_wanted.clear()
            self.handle(TokenRead(token))

    async def hand_over(self, seconds: float) -> None:
        """Announce that the node is to go; return when it is released and has no workers, or after `seconds`."""
        self.handle(DepartureNotice(seconds))
        await _poll_until(seconds, lambda: self.core.released and not self.core.workers)

    async def leave(self) -> bool:
        """Say goodbye and end the workers, while `run` goes on; return when both are done, or it took too long.

        Returns:
            Whether the goodbye is out: else this node still counts as one that may come back.
        """
        self.handle(Shutdown())
        await _poll_until(GOODBYE_S, lambda: not self.core.workers)
        await _poll_until(GOODBYE_S, lambda: not self._outbox.unpublished)
        return not self._outbox.unpublished


async def _poll_until(seconds: float, over: Callable[[], bool]) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not over():
                await asyncio.sleep(0.01)
