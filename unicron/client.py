"""A user's view of a running cluster: ask, order, listen. The command line, the demo and tests stand on it."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from msgspec.structs import replace

from unicron import codec, subjects, vitality
from unicron.aio import RETRY_S
from unicron.authentication import authenticate
from unicron.bus.protocol import Bus
from unicron.contracts.answers import Curve, Load, PartHealth, PlanView, Reply, RunningSettings, Status, StragglerView
from unicron.contracts.base import Message
from unicron.contracts.enrolment import TokenView
from unicron.contracts.faults import kind_of
from unicron.contracts.notices import NotificationsView
from unicron.contracts.pools import PoolsView
from unicron.contracts.queries import (
    AcknowledgeIncident,
    CreateToken,
    DrainNode,
    GetCurve,
    GetLoad,
    GetLog,
    GetNotifications,
    GetPlan,
    GetPools,
    GetSettings,
    GetStates,
    GetStatus,
    GetStraggler,
    GetTokens,
    InjectFault,
    Order,
    PauseTask,
    Query,
    RemoveTask,
    RevokeToken,
    RewindTask,
    SaveTask,
    SubmitTask,
    SwitchRecording,
    WhatIf,
)
from unicron.contracts.states import StateRef
from unicron.contracts.tasks import TaskSpec
from unicron.errors import InvalidInputError, NobodyAnswersError
from unicron.services import ANSWERING, ENROLLER, PROVISIONER

ANSWER_S = 5.0
"""How long a service may take to answer."""


class Client:
    """The operations of a user on a cluster, over any bus.

    Every method raises `BusUnavailableError` when nobody answers and `InvalidInputError` when an order is refused.

    Args:
        bus: a connection.
        by: name of the user, recorded in the journal with each order.

    Attributes:
        patience_s: how long an order waits for a service that is not there yet: it starts, or takes another's place.
    """

    patience_s = 0.0

    def __init__(self, bus: Bus, by: str = "") -> None:
        self.bus, self.by = bus, by

    # --- queries and orders ------------------------------------------------------------------------------------------

    async def status(self) -> Status:
        """Return all nodes and tasks, and the plan in force."""
        return (await self._ask("registry", GetStatus())).status or Status()

    async def plan(self) -> PlanView:
        """Return the plan in force and the planner's lookup table."""
        return (await self._ask("planner", GetPlan())).plan or PlanView(plan=None)

    async def what_if(
        self, *, lose: Sequence[str] = (), join: int = 0, finish: Sequence[str] = (), submit: TaskSpec | None = None
    ) -> PlanView:
        """Return the plan that would follow if all of this happened at once; nothing is done.

        Args:
            lose: nodes that are lost.
            join: nodes of the usual size that come in addition.
            finish: tasks that end.
            submit: a task that is launched.
        """
        query = WhatIf(lose=list(lose), join=join, finish=list(finish), submit=submit)
        return (await self._ask("planner", query)).plan or PlanView(plan=None)

    async def curve(self, task: str) -> Curve:
        """Return T(t, x) of `task` at every size it can have, as the planner believes it."""
        found = (await self._ask("planner", GetCurve(task=task))).curve
        return found or Curve(task=task, held=0, points=[])

    async def submit(self, spec: TaskSpec) -> str:
        """Launch a task; return a line for a person."""
        return (await self._ask("registry", SubmitTask(spec=spec))).text

    async def remove(self, task: str) -> str:
        """Stop a task and forget it; return a line for a person."""
        return (await self._ask("registry", RemoveTask(task=task))).text

    async def pause(self, task: str, *, pause: bool = True) -> str:
        """Take all slots off a task, or have it planned for again; return a line for a person."""
        return (await self._ask("registry", PauseTask(task=task, pause=pause))).text

    async def save(self, task: str, *, stop: bool = False) -> str:
        """Have a task's state written to storage now, and then maybe the task stopped; return a line for a person."""
        return (await self._ask("registry", SaveTask(task=task, stop=stop))).text

    async def rewind(self, task: str, iteration: int) -> str:
        """Have a task go on from an earlier checkpoint on storage; return a line for a person."""
        return (await self._ask("registry", RewindTask(task=task, iteration=iteration))).text

    async def drain(self, node: str, *, drain: bool = True) -> str:
        """Take a node out of use, or put it back; return a line for a person."""
        return (await self._ask("registry", DrainNode(node=node, drain=drain))).text

    async def straggler(self, task: str) -> StragglerView:
        """Return what the straggler service has seen of `task`."""
        found = (await self._ask("straggler", GetStraggler(task=task))).straggler
        return found or StragglerView(task=task, share=0.0)

    async def record(self, task: str, share: float) -> str:
        """Have the workers of `task` record that share of their iterations; return a line for a person."""
        return (await self._ask("straggler", SwitchRecording(task=task, share=share))).text

    async def pools(self) -> PoolsView:
        """Return the pools of machines, and what the provisioner does about each."""
        return (await self._ask(PROVISIONER, GetPools())).pools or PoolsView()

    async def notifications(self) -> NotificationsView:
        """Return the latest incidents, and the channels that report them."""
        return (await self._ask("notifier", GetNotifications())).notifications or NotificationsView()

    async def acknowledge(self, incident: str, by: str) -> str:
        """Say that `by` sees to an incident; return a line for a person."""
        return (await self._ask("notifier", AcknowledgeIncident(incident=incident, by=by))).text

    async def create_token(self, order: CreateToken) -> str:
        """Have the enroller take a join token, whose secret stays here; return a line for a person."""
        return (await self._ask(ENROLLER, order)).text

    async def revoke_token(self, token: str) -> str:
        """Have a join token let nobody in any more; return a line for a person."""
        return (await self._ask(ENROLLER, RevokeToken(token=token))).text

    async def tokens(self) -> list[TokenView]:
        """Return all join tokens that the enroller knows, those that are over included."""
        return (await self._ask(ENROLLER, GetTokens())).tokens

    async def states(self, node: str) -> list[StateRef]:
        """Return the states of tasks that lie in the memory of `node`, whole."""
        return (await self._ask(node, GetStates())).states

    async def log(self, node: str, worker: str, lines: int = 50) -> list[str]:
        """Return what `worker` wrote last on `node`, line by line; it may hold what steers a terminal."""
        query = GetLog(worker=subjects.token(worker, "worker"), lines=lines)
        return (await self._ask(node, query)).log

    async def settings(self, node: str) -> RunningSettings:
        """Return what the agent of `node` runs with."""
        return (await self._ask(node, GetSettings())).settings or RunningSettings()

    async def inject(self, node: str, fault: str, worker: str = "", value: str = "") -> str:
        """Let the agent of `node` break something of its own; return a line for a person."""
        given = kind_of(fault).checked(value)
        return (await self._ask(node, InjectFault(fault=fault, worker=worker, value=given))).text

    async def active(self, service: str) -> bool:
        """Return whether an instance of a control service holds its lease."""
        return await self.bus.bucket("lease").get(service) is not None

    async def load(self, service: str) -> Load:
        """Return whether a control service keeps up."""
        found = (await self._ask(service, GetLoad())).load
        if found is None:
            raise InvalidInputError(f"{service} does not report its load; it is of an older version")
        return found

    async def health(self) -> list[PartHealth]:
        """Return how the journal and each control service are, by what gets through them; it takes seconds at most."""
        return await vitality.examine(self.bus)

    async def _ask(self, owner: str, query: Query) -> Reply:
        if isinstance(query, Order) and not query.by:
            query = replace(query, by=self.by)
        waits = isinstance(query, Order) and owner in ANSWERING
        end = asyncio.get_running_loop().time() + (self.patience_s if waits else 0.0)
        while True:
            try:
                data = await self.bus.ask(subjects.for_query(owner, query), codec.encode(query), ANSWER_S)
                break
            except NobodyAnswersError:  # so nobody has taken it, and it may be said again
                if asyncio.get_running_loop().time() >= end:
                    raise
                await asyncio.sleep(RETRY_S)
        reply = codec.decode(data, Reply)
        if reply.error:
            raise InvalidInputError(reply.error)
        return reply

    # --- listening ---------------------------------------------------------------------------------------------------

    async def tail(self) -> int:
        """Return the position of the journal's last message; pulses behind it are none."""
        return await self.bus.last(subjects.JOURNAL)

    async def follow(
        self, after: int = 0, until: int | None = None, filters: Sequence[str] = subjects.JOURNAL
    ) -> AsyncIterator[tuple[int, Message]]:
        """Yield (position, message) of the journal in order; what can't be used is left out.

        Args:
            after: position after which to begin.
            until: position at which to end; None goes on for ever. Only with filters that let the last one through.
            filters: subjects to read.
        """
        if until is not None and after >= until:
            return
        async for entry in self.bus.follow(filters, after):
            message = _authenticated(entry.subject, entry.data)
            if message is not None:
                yield entry.sequence, message
            if until is not None and entry.sequence >= until:
                return

    async def telemetry(self, *kinds: type[Message]) -> AsyncIterator[Message]:
        """Yield telemetry of these kinds as it comes; what can't be used is left out."""
        async for heard in self.bus.receive_telemetry(subjects.events(*kinds)):
            message = _authenticated(heard.subject, heard.data)
            if message is not None:
                yield message


def _authenticated(subject: str, data: bytes) -> Message | None:
    try:
        return authenticate(subject, data)
    except InvalidInputError:
        return None
