"""Answers of a node to queries and orders."""

import asyncio
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from unicron import codec, subjects
from unicron.bus.protocol import Bus
from unicron.contracts.answers import Reply
from unicron.contracts.queries import GetLog, GetStates, InjectFault, Query
from unicron.errors import InvalidInputError, UnicronError
from unicron.service.core import order_taken
from unicron_agent.chaos import Chaos
from unicron_agent.core import AgentCore
from unicron_agent.outbox import Outbox
from unicron_agent.workers.output import last_lines


class NodeQueries:
    """Answers the queries and orders to a node.

    Args:
        name: of the node.
        core: of its agent.
        logs: folder of its workers' logs.
        chaos: injects faults; None where the settings forbid that.
        outbox: publishes the orders that were carried out.
    """

    def __init__(self, name: str, core: AgentCore, logs: Path, chaos: Chaos | None, outbox: Outbox) -> None:
        self._name, self._core, self._logs, self._chaos, self._outbox = name, core, logs, chaos, outbox

    async def serve(self, bus: Bus) -> None:
        """Answer from now on."""
        await bus.serve(subjects.rpc(self._name), f"agent-{self._name}", partial(self._answer, orders=False))
        await bus.serve(subjects.orders(self._name), f"agent-{self._name}", partial(self._answer, orders=True))

    async def _answer(self, data: bytes, *, orders: bool) -> bytes:
        try:
            reply = await self._reply(codec.decode_asked(data, orders=orders))
        except UnicronError as error:
            reply = Reply(error=str(error))
        return codec.encode(reply)

    async def _reply(self, query: Query) -> Reply:
        match query:
            case GetStates():
                return Reply(states=self._core.snapshots.complete)
            case GetLog(worker=worker, lines=lines):
                return Reply(log=await asyncio.to_thread(last_lines, self._logs, worker, lines))
            case InjectFault() if self._chaos is not None:
                text = await self._chaos.inject(query)
                self._outbox.put(replace(order_taken(query, text), node=self._name))
                return Reply(text=text)
            case InjectFault():
                raise InvalidInputError(f"{self._name} injects no faults: start its agent with UNICRON_CHAOS=true")
        raise InvalidInputError(f"an agent answers GetStates, GetLog and InjectFault, not {type(query).__name__}")
