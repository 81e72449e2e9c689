"""The real agents and services in a storm: what they make of each command, and of each message, is checked."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from unicron_agent.agent import Agent
from unicron_agent.core import AgentCore
from unicron_agent.effects import Effect, Out, StoreToken
from unicron_agent.outbox import Outbox
from unicron_agent.stimuli import Tick

from unicron.contracts.base import Message
from unicron.contracts.commands import Command
from unicron.contracts.events import CommandRefused
from unicron.service.core import Core
from unicron.service.service import Wiring
from unicron_simulator.storms.invariants import Invariants
from unicron_simulator.storms.links import Link


class WatchedAgent(Agent):
    """An agent.

    Attributes:
        link: its connection to the bus.
        connected: workers that have greeted it.
        task: in which it runs.
    """

    task: asyncio.Future[None]

    def __init__(
        self,
        core: AgentCore,
        link: Link,
        outbox: Outbox,
        carry_out: Callable[[Effect], None],
        look: Callable[[], Tick],
        invariants: Invariants,
    ) -> None:
        super().__init__(core, link, outbox, carry_out, look)
        self.link = link
        self.connected: set[str] = set()
        self._invariants, self._obey = invariants, core.obey
        core.obey = self._watch  # type: ignore[method-assign]

    def _watch(self, command: Command) -> Out:
        """Do what an agent does about a command that it judges, and look at what it did."""
        incarnation, workers = self.core.presence.incarnation, set(self.core.workers)
        out = self._obey(command)
        refused = any(isinstance(each, CommandRefused) for each in out)
        obeyed = any(not isinstance(each, Message | StoreToken) for each in out) or set(self.core.workers) != workers
        self._invariants.commanded(command, incarnation, refused=refused, obeyed=obeyed)
        return out


def validated(wiring: Wiring, invariants: Invariants) -> Wiring:
    """Return the wiring of a service whose core's state is validated after each message that it has taken in."""

    def make(state: Any) -> Core:
        core = wiring.core(state)
        handle = core.handle

        def checked(message: Message) -> list[Message]:
            out = handle(message)
            for problem in core.validate():
                what = f"{type(message).__name__} {message.id}"
                invariants.check(False, f"the state of the {wiring.name} contradicts itself after {what}: {problem}")
            return out

        core.handle = checked  # type: ignore[method-assign]
        return core

    return replace(wiring, core=make)
