"""Modelled nodes: a machine with slots and processes, and the agent on it, which decides with the real agent's core."""

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from random import Random

import msgspec
from unicron_agent.core import AgentCore, Worker

from unicron import codec, subjects
from unicron.aio import insist
from unicron.clock import VirtualClock
from unicron.contracts import worker as wire
from unicron.contracts.base import Message
from unicron.contracts.commands import Command, Regroup, StartWorker, StopWorker
from unicron.contracts.events import CommandRefused, FailureDetected, NodeHeartbeat, NodeJoined, NodeLeft
from unicron.contracts.tasks import Slot
from unicron.errors import InvalidInputError, UnicronError
from unicron_simulator.invariants import Invariants
from unicron_simulator.links import CrashedError, Link, Network
from unicron_simulator.training import STORM, Group, Trainer

HEARTBEAT_S = 0.5
TICK_S = 0.2
SIGKILL = 9


class Agent:
    """The shell of an agent; it does what `unicron_agent.agent.Agent` does, to modelled processes."""

    def __init__(self, machine: "Machine", incarnation: str, link: Link, core: AgentCore) -> None:
        self.link = link
        self.core = core
        self._machine = machine
        self._first = incarnation
        self._incarnations = 0
        self._count = 0
        self._facts: asyncio.Queue[Message] = asyncio.Queue()
        self._telemetry: asyncio.Queue[Message] = asyncio.Queue()
        self._memberships: dict[str, wire.Membership] = {}
        self._causes: dict[str, str] = {}
        self._starting: set[asyncio.Task[None]] = set()
        self.task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        with contextlib.suppress(CrashedError):
            position = await insist(self.link.tail, "waiting for the journal")
            self._adopt()
            self._join()
            jobs = [self._publish(), self._tell(), self._watch(), self._beat(), self._obey(position), self._rejoin()]
            await asyncio.gather(*jobs)

    async def crash(self) -> None:
        """End the agent without a word; its workers live on."""
        await self.link.crash()
        for task in [self.task, *self._starting]:
            task.cancel()

    async def leave(self) -> None:
        """Say goodbye, stop the workers, and end."""
        self.emit(NodeLeft(node=self._machine.name, incarnation=self.core.incarnation))
        for worker in self.core.workers.values():
            worker.stopping = True
        for trainer in list(self._machine.processes.values()):
            trainer.end(None, SIGKILL)
        while not self._facts.empty() and not self.link.dead:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        await self.crash()

    # --- out ---------------------------------------------------------------------------------------------------------

    def emit(self, fact: Message, correlation: str = "") -> None:
        """Send a fact."""
        self._count += 1
        identity, now = f"{self._first}-{self._count}", self._machine.clock.now()
        queue = self._telemetry if isinstance(fact, subjects.TELEMETRY) else self._facts
        queue.put_nowait(
            msgspec.structs.replace(
                fact, id=identity, at=now, source=self._machine.name, correlation=correlation or identity
            )
        )

    def _join(self) -> None:
        self._incarnations += 1
        self.core.incarnation, self.core.joined = f"{self._first}.{self._incarnations}", None
        self.emit(
            NodeJoined(
                node=self._machine.name,
                incarnation=self.core.incarnation,
                host=self._machine.name,
                slots=[Slot(index=index) for index in range(self._machine.slots)],
                rendezvous=f"{self._machine.name}:1",
                state_server=f"{self._machine.name}:2",
                workers=[worker.status() for worker in self.core.workers.values() if not worker.stopping],
            )
        )

    def _rejoin_if_given_up(self) -> None:
        if self.core.wrongly_given_up:
            self._join()

    async def _rejoin(self) -> None:
        async for _ in self.link.reconnected():
            self._join()

    async def _publish(self) -> None:
        while True:
            fact = await self._facts.get()
            append = partial(self.link.append, subjects.of(fact), codec.encode(fact), fact.id)
            sequence = await insist(append, "publishing")
            if isinstance(fact, NodeJoined) and fact.incarnation == self.core.incarnation:
                self.core.joined = sequence
                self._rejoin_if_given_up()

    async def _tell(self) -> None:
        while True:
            fact = await self._telemetry.get()
            await self.link.tell(subjects.of(fact), codec.encode(fact))

    async def _beat(self) -> None:
        while True:
            self.emit(NodeHeartbeat(node=self._machine.name, incarnation=self.core.incarnation))
            await asyncio.sleep(HEARTBEAT_S)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_S)
            for name, trainer in self._machine.processes.items():
                if not trainer.paused:
                    self.core.said(name, wire.Pong(), loop.time())
            for fact in self.core.stalled(loop.time()):
                self.emit(fact)

    # --- workers -----------------------------------------------------------------------------------------------------

    def _adopt(self) -> None:
        now = asyncio.get_running_loop().time()
        for name, (task, slot) in list(self._machine.running.items()):
            self.core.workers[name] = Worker(worker=name, task=task, slot=slot, pid=1, moved_at=now, heard_at=now)
            trainer = self._machine.processes.get(name)
            if trainer is None:
                self.exited(name, None, None)
            elif greeting := trainer.hello():
                for message in (greeting[0], *greeting[1]):
                    self.said(name, message)

    def said(self, name: str, message: wire.ToAgent) -> None:
        """Hear a worker."""
        worker = self.core.workers.get(name)
        correlation = self._causes.get(name, worker.correlation if worker else "")
        caused = isinstance(message, (wire.Ready, wire.Joined))
        for fact in self.core.said(name, message, asyncio.get_running_loop().time()):
            self.emit(fact, correlation if caused else "")
        if isinstance(message, wire.Hello) and (membership := self._memberships.get(name)):
            self._machine.processes[name].tell(membership)

    def exited(self, name: str, exit_code: int | None, signal: int | None) -> None:
        """Hear that a process is gone."""
        self._machine.running.pop(name, None)
        for fact in self.core.exited(name, exit_code, signal, []):
            self.emit(fact)
        self._memberships.pop(name, None)
        self._causes.pop(name, None)

    # --- commands ----------------------------------------------------------------------------------------------------

    async def _obey(self, position: int) -> None:
        name = self._machine.name
        async for entry in self.link.follow([subjects.commands(name), subjects.given_up(name)], position):
            command = codec.decode_message(entry.data)
            if isinstance(command, FailureDetected):
                self.core.read(command, entry.sequence)
                self._rejoin_if_given_up()
                continue
            assert isinstance(command, Command)  # noqa: S101 nobody else writes there in this world
            try:
                wanted = self.core.admit(command)
                self._machine.token = self.core.token
                self._machine.invariants.admitted(command, self.core.incarnation if wanted else command.incarnation)
                if wanted:
                    self._carry_out(command)
            except UnicronError as error:
                refusal = CommandRefused(
                    node=self._machine.name,
                    command=command.id,
                    reason=str(error),
                    task=getattr(command, "task", ""),
                    worker=getattr(command, "worker", ""),
                )
                self.emit(refusal, command.correlation)

    def _carry_out(self, command: Command) -> None:
        match command:
            case StartWorker():
                self._register(command)
            case StopWorker(worker=name):
                if worker := self.core.workers.get(name):
                    worker.stopping = True
                    if trainer := self._machine.processes.get(name):
                        self._machine.later(0.01, partial(trainer.end, None, SIGKILL))
            case Regroup():
                for membership in self.core.memberships(command):
                    name = membership.member.worker
                    self._memberships[name] = membership
                    self._causes[name] = command.correlation
                    if trainer := self._machine.processes.get(name):
                        trainer.tell(membership)

    def _register(self, command: StartWorker) -> None:
        if command.worker in self.core.workers:
            return
        others = [other for other in self.core.workers.values() if other.slot == command.slot]
        taken = next((other.worker for other in others if not (other.stopping or other.finished)), None)
        if taken is not None:
            raise InvalidInputError(f"slot {command.slot} is taken by worker {taken}")
        worker = Worker(
            worker=command.worker, task=command.task, slot=command.slot, pid=0, correlation=command.correlation
        )
        self.core.workers[command.worker] = worker
        job = asyncio.ensure_future(self._start(command, worker, others))
        self._starting.add(job)
        job.add_done_callback(self._starting.discard)

    async def _start(self, command: StartWorker, worker: Worker, before: list[Worker]) -> None:
        while any(other.worker in self.core.workers for other in before):
            await asyncio.sleep(0.02)
        if not worker.stopping:
            await asyncio.sleep(self._machine.random.uniform(0.05, 0.2))
            worker.pid = 1
            self._machine.start(command)
        if worker.stopping:
            if trainer := self._machine.processes.get(command.worker):
                trainer.end(None, SIGKILL)
            else:
                self.exited(command.worker, None, None)


class Machine:
    """A node.

    Attributes:
        agent: that runs on it now.
        processes: its living workers.
        running: task and slot of each worker that an agent has started and not seen end; kept on its disk.
        token: highest fencing token seen; kept on its disk.
        pace: of its workers.
    """

    def __init__(self, name: str, slots: int, clock: VirtualClock, network: Network, invariants: Invariants) -> None:
        self.name, self.slots, self.clock, self.invariants = name, slots, clock, invariants
        self.agent: Agent | None = None
        self.processes: dict[str, Trainer] = {}
        self.running: dict[str, tuple[str, int]] = {}
        self.token = 0
        self.random = Random(f"{network.seed}:{name}")
        self.make_core = AgentCore
        self.pace = STORM
        self.machines: dict[str, Machine] = {}
        self._network = network
        self._boots = 0
        self._groups: dict[str, Group] = {}

    # --- life --------------------------------------------------------------------------------------------------------

    def boot(self) -> None:
        """Start an agent, where none runs."""
        if self.agent is None:
            self._boots += 1
            core = self.make_core(node=self.name, token=self.token)
            self.agent = Agent(self, f"{self.name}b{self._boots}", self._network.link(self.name), core)

    async def crash_agent(self) -> None:
        """Kill the agent; the meeting places on it are gone."""
        agent, self.agent = self.agent, None
        for group in self._groups.values():
            if not group.complete:
                group.end("the meeting place is gone")
        self._groups = {}
        if agent is not None:
            await agent.crash()

    async def lose_power(self) -> None:
        """End everything on it, without a word to anybody."""
        await self.crash_agent()
        for trainer in list(self.processes.values()):
            trainer.end(None, None, silently=True)
        self.running, self.processes = {}, {}

    async def leave(self) -> None:
        """Let the agent say goodbye and go."""
        agent = self.agent
        if agent is not None:
            await agent.leave()
            if self.agent is agent:
                await self.crash_agent()

    # --- processes ---------------------------------------------------------------------------------------------------

    def start(self, command: StartWorker) -> None:
        """Start a worker process."""
        self.invariants.started(command, [each.name for each in self.processes.values() if each.slot == command.slot])
        self.running[command.worker] = (command.task, command.slot)
        self.processes[command.worker] = Trainer(
            command.worker,
            command.spec,
            self,
            command.slot,
            self.invariants,
            Random(f"{self._network.seed}:{command.worker}"),
            self.pace,
        )

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        """Do something after a while."""
        asyncio.get_running_loop().call_later(seconds, what)

    def said(self, worker: str, message: wire.ToAgent) -> bool:
        """Take a worker's message to the agent."""
        if self.agent is None or worker not in self.agent.core.workers:
            return False
        self.agent.said(worker, message)
        return True

    def exited(self, worker: str, exit_code: int | None, signal: int | None) -> None:
        """Hear that a process is gone."""
        self.processes.pop(worker, None)
        self.later(0.002, partial(self._report, worker, exit_code, signal))

    def _report(self, worker: str, exit_code: int | None, signal: int | None) -> None:
        if self.agent is not None:  # else the next one finds that it is gone
            self.agent.exited(worker, exit_code, signal)

    def meeting(self, place: str, name: str, size: int) -> Group | None:
        """Return the group that meets under `name` at another node's agent."""
        there = self.machines[place.partition(":")[0]]
        if there.agent is None:
            return None
        return there._groups.setdefault(name, Group(size))  # noqa: SLF001 another of the same kind

    def hands_over(self, node: str) -> bool:
        """Return whether a state can be fetched from another node now."""
        return self.agent is not None and self.machines[node].agent is not None
