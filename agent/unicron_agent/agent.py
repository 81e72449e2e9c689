"""The agent's shell: it ties bus, processes and sockets to the pure core."""

import asyncio
import contextlib
import logging
import os
import shutil
import time
import uuid
from functools import partial
from pathlib import Path

import msgspec

from unicron import codec, subjects
from unicron.aio import insist
from unicron.bus.protocol import Bus
from unicron.clock import Clock
from unicron.contracts import worker as wire
from unicron.contracts.base import Message
from unicron.contracts.commands import Command, Regroup, StartWorker, StopWorker
from unicron.contracts.events import (
    CommandRefused,
    DeadLetter,
    NodeHeartbeat,
    NodeJoined,
    NodeLeft,
    RecordingSwitched,
)
from unicron.contracts.queries import InjectFault, Reply
from unicron.contracts.tasks import Slot
from unicron.errors import BusUnavailableError, InvalidInputError, UnicronError
from unicron_agent import state_server
from unicron_agent.chaos import break_something
from unicron_agent.core import AgentCore, StallLimits, Worker
from unicron_agent.network import interface_of, memory_dir, own_address
from unicron_agent.rendezvous import RendezvousServer
from unicron_agent.settings import AgentSettings
from unicron_agent.supervisor import Supervisor

log = logging.getLogger(__name__)

TICK_S = 0.1
ADOPTION_S = 0.5


class Agent:
    """One a node. `run` returns when cancelled, after saying goodbye."""

    def __init__(self, settings: AgentSettings, bus: Bus, clock: Clock, slots: list[Slot]) -> None:
        self._settings = settings
        self._bus = bus
        self._clock = clock
        self._slots = slots
        self._node = subjects.token(settings.node, "node")
        self._core = AgentCore(node=self._node, limits=StallLimits(hang_s=settings.hang_s))
        self._run_dir = Path(settings.run_dir).resolve()
        self._state_dir = memory_dir(self._run_dir)
        self._host = settings.host or own_address(settings.nats_url)
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._memberships: dict[str, wire.Membership] = {}
        self._causes: dict[str, str] = {}
        self._starting: set[asyncio.Task[None]] = set()
        self._facts: asyncio.Queue[Message] = asyncio.Queue()
        self._telemetry: asyncio.Queue[Message] = asyncio.Queue()
        self._supervisor = Supervisor(self._run_dir, self._common_environment(), self._on_exit)

    async def run(self) -> None:
        """Adopt what lives, join, and serve until cancelled."""
        socket_path = self._state_dir / "agent.sock"
        socket_path.unlink(missing_ok=True)
        token_file = self._run_dir / "token"
        if token_file.exists():
            self._core.token = int(token_file.read_text())
        self._token_file = token_file
        position = await self._journal_end()
        await self._adopt()
        server = await asyncio.start_unix_server(self._serve_worker, socket_path)
        await self._await_adopted()
        rendezvous, self._rendezvous = await RendezvousServer().serve(self._host)
        states, self._state_address = await state_server.serve(self._host, self._state_dir)
        await self._supervisor.start()
        await self._bus.serve(subjects.rpc(self._node), f"agent-{self._node}", self._on_query)
        jobs = [asyncio.create_task(job) for job in (self._publish(), self._watch(), self._tell_telemetry())]
        try:
            self._join()
            more = (self._beat(), self._obey(position), self._rejoin())
            jobs += [asyncio.create_task(job) for job in more]
            done, _ = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
            for job in done:
                job.result()
        finally:
            # first of all: whoever hears a leaving agent's workers end must know that it leaves
            self._emit(NodeLeft(node=self._node, incarnation=self._core.incarnation))
            for job in jobs[1:]:
                job.cancel()
            await self._leave()
            jobs[0].cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            await states.stop(0)
            server.close()
            rendezvous.close()
            shutil.rmtree(self._state_dir, ignore_errors=True)

    def _join(self) -> None:
        """Say what there is on this node, each time under a new name: commands to the old one are out of date."""
        self._core.incarnation, self._core.joined = uuid.uuid4().hex[:12], None
        self._emit(
            NodeJoined(
                node=self._node,
                incarnation=self._core.incarnation,
                host=self._host,
                slots=self._slots,
                rendezvous=self._rendezvous,
                state_server=self._state_address,
                pid=os.getpid(),
                workers=[worker.status() for worker in self._core.workers.values() if not worker.stopping],
            )
        )

    def _rejoin_if_given_up(self) -> None:
        if self._core.wrongly_given_up:
            log.warning("this node was given up, but it lives; joining again")
            self._join()

    async def _rejoin(self) -> None:
        """Join again whenever the connection was interrupted: the others may hold this node to be lost."""
        async for down_s in self._bus.reconnected():
            log.info("the bus was away for %.1f s; joining again", down_s)
            self._join()

    async def _journal_end(self) -> int:
        """Return from where on commands are for this agent; the control services make the journal when they start.

        Raises:
            BusUnavailableError: they did not in time.
        """
        try:
            async with asyncio.timeout(self._settings.connect_timeout_s):
                return await insist(self._bus.tail, "waiting for the journal")
        except TimeoutError as error:
            raise BusUnavailableError(
                f"no journal within {self._settings.connect_timeout_s:g} s: start the control services, or run "
                "`unicron provision`"
            ) from error

    async def _leave(self) -> None:
        """Stop all workers, and see that the goodbye gets out as long as the bus is there to hear it."""
        for worker in self._core.workers.values():
            worker.stopping = True
        await self._supervisor.stop()
        for _ in range(40):
            if self._facts.empty():
                break
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.05)

    async def _adopt(self) -> None:
        """Find the workers that outlived an earlier agent. Those that did not are reported as gone."""
        living, gone = self._supervisor.adopt()
        now = time.monotonic()
        for running in [*living, *gone]:
            self._core.workers[running.worker] = Worker(
                worker=running.worker,
                task=running.task,
                slot=running.slot,
                pid=running.pid,
                correlation=running.correlation,
                moved_at=now,
                heard_at=now,
            )
        for running in gone:
            self._on_exit(running.worker, None, None, self._supervisor.tail(running.log))
        if not living:  # what lies there is of workers that are no more
            for path in self._state_dir.iterdir():
                path.unlink()
        if living:
            log.info("adopting %s", ", ".join(running.worker for running in living))

    async def _await_adopted(self) -> None:
        """Give the adopted workers time to say where they are: they knock ten times a second."""
        deadline = time.monotonic() + ADOPTION_S
        while set(self._core.workers) - set(self._writers) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    # --- out ---------------------------------------------------------------------------------------------------------

    def _emit(self, fact: Message, correlation: str = "") -> None:
        identity = uuid.uuid4().hex[:16]
        queue = self._telemetry if isinstance(fact, subjects.TELEMETRY) else self._facts
        queue.put_nowait(
            msgspec.structs.replace(
                fact, id=identity, at=self._clock.now(), source=self._node, correlation=correlation or identity
            )
        )

    async def _publish(self) -> None:
        """Send facts in order; while the bus is away they wait."""
        while True:
            fact = await self._facts.get()
            append = partial(self._bus.append, subjects.of(fact), codec.encode(fact), fact.id)
            sequence = await insist(append, f"publishing {type(fact).__name__}")
            if isinstance(fact, NodeJoined) and fact.incarnation == self._core.incarnation:
                self._core.joined = sequence
                self._rejoin_if_given_up()

    async def _tell_telemetry(self) -> None:
        """Send telemetry, not behind facts: a heartbeat that waits until the journal answers is a node given up."""
        while True:
            fact = await self._telemetry.get()
            with contextlib.suppress(BusUnavailableError):
                await self._bus.tell(subjects.of(fact), codec.encode(fact))

    async def _beat(self) -> None:
        while True:
            self._emit(NodeHeartbeat(node=self._node, incarnation=self._core.incarnation))
            await asyncio.sleep(self._settings.heartbeat_s)

    async def _watch(self) -> None:
        """Look for stalled workers; ask the quiet ones whether they are there."""
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            for worker in self._core.workers.values():
                if now - worker.heard_at > 2 * TICK_S:
                    self._tell(worker.worker, wire.Ping())
            for fact in self._core.stalled(now):
                self._emit(fact)

    # --- workers -----------------------------------------------------------------------------------------------------

    def _tell(self, worker: str, message: wire.ToWorker) -> None:
        writer = self._writers.get(worker)
        if writer is not None and not writer.is_closing():
            writer.write(wire.frame(message))

    async def _serve_worker(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Talk to one worker over its connection."""
        name = ""
        try:
            hello = await _read(reader)
            if not isinstance(hello, wire.Hello) or hello.worker not in self._core.workers:
                log.warning("an unknown worker knocked: %s", hello)
                return
            name = hello.worker
            self._writers[name] = writer
            self._said(name, hello)
            for remembered in (self._memberships.get(name), self._core.sample_of(name)):
                if remembered is not None:
                    self._tell(name, remembered)
            while True:
                self._said(name, await _read(reader))
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass  # it ended, or the agent does
        except InvalidInputError as error:
            log.warning("worker %s: %s", name or "unknown", error)
        finally:
            if self._writers.get(name) is writer:
                del self._writers[name]
            writer.close()

    def _said(self, name: str, message: wire.ToAgent) -> None:
        if isinstance(message, wire.FetchState):
            asyncio.get_running_loop().create_task(self._fetch_state(name, message))
            return
        worker = self._core.workers.get(name)
        correlation = self._causes.get(name, worker.correlation if worker else "")
        caused = isinstance(message, (wire.Ready, wire.Joined))
        for fact in self._core.said(name, message, time.monotonic()):
            self._emit(fact, correlation if caused else "")

    async def _fetch_state(self, name: str, wanted: wire.FetchState) -> None:
        self._tell(name, await state_server.obtain(self._state_dir, name, self._node, wanted.ref))

    def _on_exit(self, name: str, exit_code: int | None, number: int | None, stderr: list[str]) -> None:
        for fact in self._core.exited(name, exit_code, number, stderr):
            self._emit(fact)
        self._writers.pop(name, None)
        self._memberships.pop(name, None)
        self._causes.pop(name, None)

    # --- commands ----------------------------------------------------------------------------------------------------

    async def _obey(self, position: int) -> None:
        """Read the journal from `position` on: commands, what to record, whether this node was given up yet lives."""
        filters = [subjects.commands(self._node), subjects.given_up(self._node), subjects.switched()]
        async for entry in self._bus.follow(filters, position):
            try:
                message = codec.decode_message(entry.data)
                if subjects.of(message) != entry.subject:
                    raise InvalidInputError(f"{type(message).__name__} does not belong on {entry.subject}")  # noqa: TRY301
                if isinstance(message, RecordingSwitched):
                    for worker in self._core.switch(message):
                        self._tell(worker, self._core.samples[message.task])
            except InvalidInputError as error:
                log.warning("dead letter on %s: %s", entry.subject, error)
                self._emit(DeadLetter(subject=entry.subject, error=str(error), payload=entry.data[:4096]))
                continue
            if isinstance(message, Command):
                await self._admit(message)
            else:
                self._core.read(message, entry.sequence)
                self._rejoin_if_given_up()

    async def _admit(self, command: Command) -> None:
        try:
            before = self._core.token
            wanted = self._core.admit(command)
            if self._core.token > before:
                self._token_file.write_text(str(self._core.token))
            if wanted:
                await self._carry_out(command)
            else:
                log.info("%s is from before this node joined; let pass", type(command).__name__)
        except (UnicronError, OSError) as error:
            self._refuse(command, str(error))

    def _refuse(self, command: Command, reason: str) -> None:
        log.warning("refused %s: %s", type(command).__name__, reason)
        refusal = CommandRefused(
            node=self._node,
            command=command.id,
            reason=reason,
            task=getattr(command, "task", ""),
            worker=getattr(command, "worker", ""),
        )
        self._emit(refusal, command.correlation)

    async def _carry_out(self, command: Command) -> None:
        match command:
            case StartWorker():
                self._register(command)
            case StopWorker():
                if worker := self._core.workers.get(command.worker):
                    worker.stopping = True
                    self._supervisor.kill(command.worker)
            case Regroup():
                for membership in self._core.memberships(command):
                    name = membership.member.worker
                    self._memberships[name] = membership
                    self._causes[name] = command.correlation
                    self._tell(name, membership)

    def _register(self, command: StartWorker) -> None:
        """Take the worker in at once, so that a StopWorker right behind finds it; its process comes when it can."""
        if command.worker in self._core.workers:
            return  # heard before
        if command.slot not in {slot.index for slot in self._slots}:
            raise InvalidInputError(f"slot {command.slot}: {self._node} has slots 0 to {len(self._slots) - 1}")
        worker = Worker(
            worker=command.worker, task=command.task, slot=command.slot, pid=0, correlation=command.correlation
        )
        others = [other for other in self._core.workers.values() if other.slot == command.slot]
        taken = next((other.worker for other in others if not (other.stopping or other.finished)), None)
        if taken is not None:
            raise InvalidInputError(f"slot {command.slot} is taken by worker {taken}")
        self._core.workers[command.worker] = worker
        job = asyncio.create_task(self._start(command, worker, others))
        self._starting.add(job)
        job.add_done_callback(self._starting.discard)

    async def _start(self, command: StartWorker, worker: Worker, before: list[Worker]) -> None:
        while any(other.worker in self._core.workers for other in before):
            await asyncio.sleep(0.005)  # the slot's last worker is on its way out
        spec = command.spec
        try:
            if not worker.stopping:
                worker.pid = await self._supervisor.start_worker(
                    command.worker,
                    command.task,
                    command.slot,
                    spec.command,
                    Path(spec.workdir or "."),
                    {**spec.env, **self._environment_of(command)},
                    command.correlation,
                )
        except (OSError, UnicronError) as error:
            reason = f"{self._node} can't start {spec.command[0]!r} in {spec.workdir!r}: {error}"
            self._on_exit(command.worker, 127, None, [reason])
        if worker.stopping:
            self._supervisor.kill(command.worker)
            if not worker.pid:
                self._on_exit(command.worker, None, None, [])

    def _common_environment(self) -> dict[str, str]:
        found = {
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "UNICRON_NODE": self._node,
            "UNICRON_WORKER_SOCKET": str(self._state_dir / "agent.sock"),
            "UNICRON_STATE_DIR": str(self._state_dir),
        }
        if interface := interface_of(self._host):
            found |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
        return found

    def _environment_of(self, command: StartWorker) -> dict[str, str]:
        slot = next(slot for slot in self._slots if slot.index == command.slot)
        return {
            "UNICRON_WORKER": command.worker,
            "UNICRON_TASK": command.task,
            "UNICRON_SLOT": str(command.slot),
            "UNICRON_ITERATIONS": str(command.spec.iterations),
            "UNICRON_MICROBATCHES": str(command.spec.microbatches),
            "CUDA_VISIBLE_DEVICES": slot.device,
        }

    # --- chaos -------------------------------------------------------------------------------------------------------

    async def _on_query(self, data: bytes) -> bytes:
        try:
            query = codec.decode_query(data)
            if not isinstance(query, InjectFault):
                raise InvalidInputError(f"an agent answers InjectFault, not {type(query).__name__}")
            return codec.encode(
                Reply(text=break_something(query, self._settings, self._core, self._supervisor, self._tell))
            )
        except UnicronError as error:
            return codec.encode(Reply(error=str(error)))


async def _read(reader: asyncio.StreamReader) -> wire.ToAgent:
    length = wire.length_of(await reader.readexactly(wire.LENGTH.size))
    return wire.to_agent(await reader.readexactly(length))
