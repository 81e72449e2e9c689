"""The agent's node: carries out on real processes, sockets and files what the agent decides."""

import asyncio
import contextlib
import dataclasses
import logging
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path

from unicron import __version__, subjects
from unicron.aio import gather_or_cancel, retry_until_available, sleep_until_beat
from unicron.bus.protocol import Bus
from unicron.clock import Clock
from unicron.contracts.answers import RunningSettings
from unicron.contracts.commands import StartWorker
from unicron.contracts.events import NodeJoined
from unicron.contracts.tasks import Slot
from unicron.contracts.worker import Joined, Membership, Raised, StateFetched, ToAgent
from unicron.errors import BusUnavailableError, UnicronError, explain_lack
from unicron.rules import load
from unicron.service.health import ALIVE
from unicron.snapshots.memory import SnapshotMemory
from unicron_agent import environment
from unicron_agent.agent import Agent
from unicron_agent.chaos import Chaos
from unicron_agent.core import AgentCore
from unicron_agent.effects import Effect, Kill, SendToWorker, StartProcess, StartStandby, StoreToken, TakeStacks
from unicron_agent.fabric import Fabric
from unicron_agent.hardware.amd_smi import AmdWatch
from unicron_agent.hardware.gpus import GpuWatch, Watch, addresses
from unicron_agent.hardware.kernel_log import KernelLog
from unicron_agent.hardware.network import home, memory_dir, own_address
from unicron_agent.hardware.whereabouts import locate
from unicron_agent.metrics import AgentMetrics
from unicron_agent.outbox import Outbox
from unicron_agent.queries import NodeQueries
from unicron_agent.settings import AgentSettings
from unicron_agent.snapshots.transfers import Transfers
from unicron_agent.stimuli import (
    Adopted,
    Logged,
    PatternMatched,
    ProcessExited,
    ProcessStarted,
    Sampled,
    StacksTaken,
    Stimulus,
    Tick,
    WorkerMessage,
)
from unicron_agent.traffic import NodeTraffic
from unicron_agent.watchdogs import probes
from unicron_agent.workers import flight
from unicron_agent.workers.activity import Pressure, cpu_s_if_asleep, is_stopped, use_of
from unicron_agent.workers.channels import Channels
from unicron_agent.workers.output import Outputs, rotate
from unicron_agent.workers.rendezvous import RendezvousServer
from unicron_agent.workers.stacks import stacks_of
from unicron_agent.workers.starts import Outcome, Starts
from unicron_agent.workers.supervisor import Supervisor
from unicron_agent.workers.trials import outlive
from unicron_agent.workers.warm import Standby
from unicron_agent.workers.watch import QUIET_S
from unicron_agent.workers.workers import StallLimits, communicating

log = logging.getLogger(__name__)

OPEN = (
    "INSECURE: this node has no fabric key. Anybody who reaches its ports can fetch the states of models, have others "
    "kept, and disturb any rendezvous here: name the key's file in UNICRON_FABRIC_KEY, see `unicron credentials`"
)

MEASURE_S = 10.0
"""How often is looked at how full the machine is."""

LOOK_S = 0.5
"""How often what workers write is looked at."""


class NodeShell:
    """This machine, and its agent. `run` returns when it is cancelled or stopped; the agent has left the cluster then.

    Args:
        settings: of the agent.
        bus: its connection.
        clock: of the machine.
        slots: that workers can have here.
        boot: the agent's proof that this connection is its own; see `unicron.fabric_proofs`.
        standby: forks workers.
        leaving: returns when the node is to hand over what it has.
        cut: takes the agent off the bus for so many seconds, as a fault.
    """

    def __init__(
        self,
        settings: AgentSettings,
        bus: Bus,
        clock: Clock,
        slots: list[Slot],
        boot: str,
        standby: Standby,
        leaving: Callable[[], Awaitable[None]],
        cut: Callable[[float], None],
    ) -> None:
        self._settings, self._bus, self._clock, self._slots, self._boot = settings, bus, clock, slots, boot
        self._name = subjects.token(settings.node, "node")
        self._rules, self._location = load(settings.rules), locate(settings)
        self._fabric = Fabric(settings.fabric_key, self._name, clock.now)
        self._run_dir = Path(settings.run_dir).resolve()
        self._memory = SnapshotMemory(memory_dir(self._run_dir), settings.state_limit)
        self._traffic = NodeTraffic(self._memory.folder, lambda: communicating(self._agent.core.workers.values()))
        self._token_file = self._run_dir / "token"
        self._alive = self._run_dir / ALIVE
        self._host = settings.host or own_address(settings.nats_servers[0])
        self._outputs = Outputs(self._rules)
        self._standby, self._leaving, self._cut = standby, leaving, cut
        variables = environment.of_node(self._name, self._host, self._memory)
        self._supervisor = Supervisor(self._run_dir, variables, self._outputs, self._exited, standby)
        self._channels = Channels(
            is_known=lambda worker: worker in self._agent.core.workers,
            on_message=self._on_worker_message,
        )
        self._pressure = Pressure()
        self._jobs: set[asyncio.Task[None]] = set()
        self._starts = Starts(self._start, self._start_ended)
        self._transfers = Transfers(
            self._name,
            self._memory,
            self._traffic,
            self._fabric,
            self._supervisor,
            self._handle,
            self._answer_fetch,
        )

    async def run(self) -> None:
        """Adopt what lives, join, and serve until cancelled."""
        if not self._fabric.requires_proof:
            log.warning(OPEN)
        position = await self._journal_end()
        rendezvous, rendezvous_address = await RendezvousServer(self._fabric).serve(self._host)
        snapshots, snapshots_address = await self._transfers.serve(self._host)
        self._agent = self._make_agent(rendezvous_address, snapshots_address)
        self._measure()
        chaos = self._make_chaos() if self._settings.chaos else None
        self._adopt()
        socket = await self._channels.serve(self._memory.folder / "agent.sock")
        await self._standby.start(self._handle)
        watches = self._watch_hardware()
        runs_with = RunningSettings(settings=self._settings.texts(), rules=self._rules.digest)
        logs = self._run_dir / "logs"
        await NodeQueries(self._name, self._agent.core, logs, chaos, self._outbox, runs_with).serve(self._bus)
        running = asyncio.create_task(
            gather_or_cancel(self._agent.run(position), self._look_at_outputs(), self._measure_machine())
        )
        try:
            await self._serve_until_departure(running)
        finally:
            gone = await self._agent.leave()
            for watch in watches:
                await asyncio.to_thread(watch.stop)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await self._supervisor.stop()
            await self._standby.stop()
            await snapshots.stop(0)
            socket.close()
            rendezvous.close()
            if gone:  # else its states are asked for when it is back, as those of a node that was lost
                shutil.rmtree(self._memory.folder, ignore_errors=True)

    def _watch_hardware(self) -> list[KernelLog | Watch]:
        """Watch what can be watched of this machine, in threads."""
        loop, rules = asyncio.get_running_loop(), self._rules

        def handle_from_thread(what: Logged | Sampled) -> None:
            with contextlib.suppress(RuntimeError):  # we are just ending
                loop.call_soon_threadsafe(self._handle, what)

        slots, found = addresses(), list[KernelLog | Watch]()
        if self._settings.kernel_log:
            found.append(KernelLog(self._settings.kernel_log, rules, slots, handle_from_thread))
        if slots:
            found.append(GpuWatch(rules, handle_from_thread))
        elif any(slot.device for slot in self._slots):
            found.append(AmdWatch(rules, self._slots, slots, handle_from_thread))
        for watch in found:
            watch.start()
        return found

    async def _look_at_outputs(self) -> None:
        while True:
            self._handle_all(self._outputs.new_lines())
            for path in self._outputs.oversized():
                await asyncio.to_thread(rotate, path)
            await sleep_until_beat(LOOK_S)

    async def _measure_machine(self) -> None:
        """Feed the watchdogs, from a thread: a file system may hang."""
        while True:
            folders: list[str | Path] = [self._run_dir, self._memory.folder, *sorted(self._supervisor.checkpoints)]
            pids = {name: worker.pid for name, worker in self._agent.core.workers.items() if worker.pid}
            self._handle(await asyncio.to_thread(probes.measure, folders, self._settings.disk_free, pids))
            await asyncio.sleep(MEASURE_S)

    def _handle_all(self, logged: list[Logged | PatternMatched]) -> None:
        for each in logged:
            self._handle(each)

    def _on_worker_message(self, worker: str, message: ToAgent) -> None:
        if isinstance(message, Raised | Joined):  # what it wrote before explains this, or what it is over now
            self._handle_all(self._outputs.new_lines_of(worker))
        self._handle(WorkerMessage(worker, message))

    async def _serve_until_departure(self, running: asyncio.Task[None]) -> None:
        """Serve until the node is to go, and hand over what it has; the loops that do so are needed for the goodbye."""
        leaving = asyncio.ensure_future(self._leaving())
        try:
            await asyncio.wait({running, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
        if running.done():
            running.result()
        await self._agent.hand_over(self._settings.leave_s)

    async def _journal_end(self) -> int:
        """Return from where on commands are for this agent; the control services make the journal when they start.

        Raises:
            BusUnavailableError: they did not in time.
        """
        try:
            async with asyncio.timeout(self._settings.connect_timeout_s):
                return await retry_until_available(self._bus.tail, "waiting for the journal")
        except TimeoutError as error:
            raise BusUnavailableError(
                f"no journal within {self._settings.connect_timeout_s:g} s: start the control services, or run "
                "`unicron provision`"
            ) from error

    def _make_agent(self, rendezvous: str, snapshots: str) -> Agent:
        card = NodeJoined(
            node=self._name,
            incarnation="",
            host=self._host,
            slots=self._slots,
            rendezvous=rendezvous,
            state_server=snapshots,
            pid=os.getpid(),
            rack=self._location.rack,
            domain=self._location.domain,
            machine=self._settings.machine,
            pool=self._settings.pool,
            home=home(self._run_dir),
            version=__version__,
        )
        stored = self._token_file.read_text().strip() if self._token_file.exists() else ""
        token = int(stored) if stored.isdecimal() else 0  # the lease is read before any other is believed
        limits = StallLimits(
            asleep_s=self._settings.asleep_s, hang_s=self._settings.hang_s, between_s=self._settings.between_s
        )
        settings = self._settings
        core = AgentCore(card, self._boot, token, limits, settings.heartbeat_s, settings.watchdogs)
        self._outbox = Outbox(self._bus, self._clock, self._name, self._boot, self._alive.touch)
        return Agent(core, self._bus, self._outbox, self._carry_out, self._inspect_workers)

    def _make_chaos(self) -> Chaos:
        return Chaos(
            self._agent.core,
            self._supervisor,
            self._channels.send,
            self._memory,
            self._cut,
            self._settings.kernel_log,
            lambda: self._outbox.unpublished,
            self._standby.kill,
        )

    def _measure(self) -> None:
        """Answer Prometheus, where the settings want that."""
        if self._settings.metrics_address is None:
            return
        measured = AgentMetrics(self._agent.core, self._outbox, self._clock.now)
        self._agent.observe, self._transfers.on_fetched = measured.observe, measured.record_fetch
        measured.metrics.serve(self._settings.metrics_address)

    def _inspect_workers(self) -> Tick:
        """Look at the processes of the workers that are quiet, though asked whether they are there, or late."""
        workers, now = self._agent.core.workers, self._agent.now()
        stopped = [
            name for name, worker in workers.items() if now - worker.heard_at > QUIET_S and is_stopped(worker.pid)
        ]
        late = {
            name: cpu_s_if_asleep(worker.pid) for name, worker in workers.items() if worker.pid and worker.is_late(now)
        }
        used = {name: use_of(worker.pid) for name, worker in workers.items() if worker.may_be_silent(now)}
        asleep_s = {name: used for name, used in late.items() if used is not None}
        return Tick(stopped, asleep_s, used, self._pressure.share(now) if workers else 0.0)

    def _adopt(self) -> None:
        """Give the agent the workers that outlived an earlier one."""
        found = self._supervisor.adopt()
        if not self._supervisor.watching:
            self._memory.clean()
        (self._memory.folder / "agent.sock").unlink(missing_ok=True)
        self._handle(Adopted(found, self._memory.kept(), self._memory.saved()))

    def _exited(self, exited: ProcessExited) -> None:
        self._spawn(self._handle_exit(exited))

    async def _handle_exit(self, exited: ProcessExited) -> None:
        await self._channels.drain(exited.worker)
        self._memory.remove_transient(exited.worker)
        trial, worker = self._memory.trial(exited.worker), self._agent.core.workers.get(exited.worker)
        self._spawn(outlive(trial, self._name, worker, self._handle))
        self._handle_all(self._outputs.new_lines_of(exited.worker))
        self._outputs.forget(exited.worker)
        lines = flight.read_dump(self._dump_prefix(exited.worker), self._clock.now())
        self._handle(dataclasses.replace(exited, collectives=lines))

    def _dump_prefix(self, worker: str) -> Path:
        """Return how the names of the files begin in which torch writes what a worker's collectives were."""
        return self._run_dir / "logs" / f"{worker}.collectives"

    def _handle(self, stimulus: Stimulus) -> None:
        self._agent.handle(stimulus)

    # --- effects -----------------------------------------------------------------------------------------------------

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case StartProcess(command):
                self._starts.begin(command)
            case Kill(worker):
                self._supervisor.kill(worker)
                self._starts.call_off(worker)
            case StartStandby():
                self._spawn(self._standby.start(self._handle))
            case TakeStacks(worker, pid):
                self._spawn(self._take_stacks(worker, pid))
            case SendToWorker(worker, message):
                self._channels.send(
                    worker, self._fabric.with_secrets(message) if isinstance(message, Membership) else message
                )
            case StoreToken(token):
                self._store(token)
            case _:
                self._transfers.carry_out(effect)

    def _store(self, token: int) -> None:
        unfinished = self._token_file.with_suffix(".part")
        try:
            unfinished.write_text(str(token))
            unfinished.rename(self._token_file)
        except OSError as error:  # no reason to end the workers
            log.error("token %d can't be stored in %s: %s; make room there", token, self._run_dir, error)  # noqa: TRY400

    def _spawn(self, job: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(job)
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)
        return task

    async def _start(self, command: StartWorker) -> Outcome:
        spec = command.spec
        try:
            recorder = flight.dump_variables(self._dump_prefix(command.worker), os.environ, spec.env)
            ours = environment.of_worker(command, self._slots, time.time())
            variables = {**environment.of_checkpoints(spec), **recorder, **spec.env, **ours}
            return ProcessStarted(command.worker, await self._supervisor.start_worker(command, variables))
        except (OSError, UnicronError) as error:
            why = explain_lack(error) if isinstance(error, OSError) else error
            reason = f"{self._name} can't start {spec.command[0]!r} in {spec.workdir!r}: {why}"
            return ProcessExited(command.worker, 127, stderr=(reason,))

    def _start_ended(self, outcome: Outcome) -> None:
        if isinstance(outcome, ProcessExited):
            self._exited(outcome)
        else:
            self._handle(outcome)

    async def _take_stacks(self, worker: str, pid: int) -> None:
        self._handle(StacksTaken(worker, await stacks_of(pid)))

    def _answer_fetch(self, worker: str, answer: StateFetched) -> None:
        self._channels.send(worker, answer)
        if worker not in self._agent.core.workers:
            self._memory.remove_transient(worker)
