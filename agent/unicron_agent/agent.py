"""The agent's loops: the bus and the time become stimuli of the core; what the core answers goes out.

What it has done on the node it leaves to others: to `unicron_agent.node`, or to a modelled node in a storm.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from unicron import subjects
from unicron.aio import insist, next_beat, together
from unicron.bus.lease import token_in_force
from unicron.bus.protocol import Bus
from unicron.contracts.base import Message
from unicron.contracts.events import CommandRefused, DeadLetter
from unicron.errors import InvalidInputError
from unicron.floods import LETTERS, Floods, more
from unicron_agent.clocks import MOST_S
from unicron_agent.core import AgentCore
from unicron_agent.outbox import Outbox
from unicron_agent.stimuli import (
    AskToken,
    Effect,
    EntryRead,
    Leave,
    Notice,
    Out,
    Published,
    Reconnected,
    Stimulus,
    Tick,
    TokenRead,
    WorkerSaid,
)

log = logging.getLogger(__name__)

TICK_S = 0.1
"""Between ticks as long as there is something to do in each."""

COMMANDER = "transition"
"""Name of the service whose commands agents obey, as its lease has it."""

LEASE_S = 0.1
"""Pause between looks at a lease that nobody has."""

GOODBYE_S = 2.0
"""How long a leaving agent waits for its workers to be gone, and then for its last facts to be out."""


class Agent:
    """One a node.

    Args:
        core: of it.
        bus: its connection.
        outbox: where its facts go.
        carry_out: does what the core wants done on the node.
        look: returns which workers' processes are stopped, and which of the late ones' sleep.

    Attributes:
        observe: is given all that the core says.
    """

    def __init__(
        self,
        core: AgentCore,
        bus: Bus,
        outbox: Outbox,
        carry_out: Callable[[Effect], None],
        look: Callable[[], Tick],
    ) -> None:
        self.core = core
        self._bus = bus
        self._outbox = outbox
        self._carry_out = carry_out
        self._look = look
        self._asked = asyncio.Event()
        self._ticks_at, self._sooner = 0.0, asyncio.Event()
        self._began = 0.0
        self._floods = Floods(LETTERS)
        self.observe: Callable[[Message], None] = lambda _: None

    def handle(self, stimulus: Stimulus) -> Out:
        """Give the core a stimulus, and pass on what it answers; return that."""
        out = self.core.handle(stimulus, asyncio.get_running_loop().time())
        if not isinstance(stimulus, WorkerSaid) and self.core.due_at() < self._ticks_at - TICK_S:
            self._sooner.set()
        for fact in out:
            if isinstance(fact, Message):
                self.observe(fact)
                if self._admits(fact):
                    self._outbox.put(fact)
        for effect in out:
            if isinstance(effect, AskToken):
                self._asked.set()
            elif not isinstance(effect, Message):
                self._carry_out(effect)
        return out

    def _admits(self, fact: Message) -> bool:
        """Return whether to tell a fact: refusals and dead letters only so often, the rest are counted."""
        if not isinstance(fact, CommandRefused | DeadLetter):
            return True
        admitted = self._floods.admit(type(fact).__name__, asyncio.get_running_loop().time())
        if admitted:
            log.warning("%s", fact)
        return admitted

    def _sum_up(self) -> None:
        for what, count in self._floods.over(asyncio.get_running_loop().time()).items():
            letter = DeadLetter(subject=subjects.commands(self.core.node), error=f"{more(count)}: {what}")
            log.warning("%s", letter)
            self._outbox.put(letter)

    async def run(self, position: int) -> None:
        """Serve until cancelled; `position` is the place in the journal behind which commands are to be obeyed."""
        await together(
            self._outbox.publish(lambda fact, sequence: self.handle(Published(fact, sequence))),
            self._outbox.send_telemetry(),
            self._read(position),
            self._tick(),
            self._reconnect(),
            self._read_tokens(),
        )

    async def _read(self, position: int) -> None:
        async for entry in self._bus.follow(subjects.read_by(self.core.node), position):
            self.handle(EntryRead(entry.sequence, entry.subject, entry.data, self._outbox.clock.now()))

    async def _tick(self) -> None:
        while True:
            self.handle(self._look())
            self._sum_up()
            self._see_a_step()
            if self.core.fault and not self.core.workers and not self._outbox.unpublished:
                raise InvalidInputError(self.core.fault)
            now = asyncio.get_running_loop().time()
            self._sooner.clear()
            self._ticks_at = next_beat(TICK_S, max(now, self.core.due_at()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._ticks_at):
                    await self._sooner.wait()

    def _see_a_step(self) -> None:
        """Join again where the clock has stepped: from a wrong one it may be that nothing was believed meanwhile."""
        began = self._outbox.clock.now() - asyncio.get_running_loop().time()
        stepped_s = began - (self._began or began)
        if not self._began or abs(stepped_s) > MOST_S:
            self._began = began
        if abs(stepped_s) > MOST_S:
            log.warning("the clock of this node has stepped by %+.0f s; joining again", stepped_s)
            self.handle(Reconnected())

    async def _reconnect(self) -> None:
        async for down_s in self._bus.reconnected():
            log.info("the bus was away for %.1f s; joining again", down_s)
            self.handle(Reconnected())

    async def _read_tokens(self) -> None:
        """Answer the core's questions for the token in force; an instance that is gone is followed by another."""
        lease = self._bus.bucket("lease")
        while True:
            await self._asked.wait()
            token = await insist(lambda: token_in_force(lease, COMMANDER), "reading who may give commands")
            if token is None:
                await asyncio.sleep(LEASE_S)
                continue
            self._asked.clear()
            self.handle(TokenRead(token))

    async def hand_over(self, seconds: float) -> None:
        """Say that the node is to go; return when nobody needs it any more, or it took too long."""
        self.handle(Notice(seconds))
        await _within(seconds, lambda: self.core.released and not self.core.workers)

    async def leave(self) -> bool:
        """Say goodbye and end the workers, while `run` goes on; return when both are done, or it took too long.

        Returns:
            Whether the goodbye is out: else this node still counts as one that may come back.
        """
        self.handle(Leave())
        await _within(GOODBYE_S, lambda: not self.core.workers)
        await _within(GOODBYE_S, lambda: not self._outbox.unpublished)
        return not self._outbox.unpublished


async def _within(seconds: float, over: Callable[[], bool]) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not over():
                await asyncio.sleep(0.01)
