"""The stage of a storm: the four real services, modelled nodes and a user."""

import asyncio
import contextlib
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from random import Random
from typing import Any

from unicron_agent.core import AgentCore
from unicron_agent.outbox import Outbox
from unicron_detector.main import DetectorSettings
from unicron_detector.main import wiring as detector_wiring
from unicron_planner.core import PlannerCore
from unicron_planner.estimates import PlannerOptions
from unicron_planner.main import PlannerSettings
from unicron_planner.main import wiring as planner_wiring
from unicron_provisioner.callers import Callers
from unicron_provisioner.config import Supply
from unicron_provisioner.core import ProvisionerCore
from unicron_provisioner.state import State as ProvisionerState
from unicron_registry.main import RegistrySettings
from unicron_registry.main import wiring as registry_wiring
from unicron_transition.main import TransitionSettings
from unicron_transition.main import wiring as transition_wiring

from unicron import codec, subjects
from unicron.bus import topology
from unicron.bus.protocol import JournalEntry
from unicron.clock import VirtualClock
from unicron.contracts.answers import Reply, Status
from unicron.contracts.commands import Command
from unicron.contracts.events import TaskSubmitted
from unicron.contracts.pools import PoolsView
from unicron.contracts.queries import GetPools, GetStatus, Query, SubmitTask
from unicron.errors import BusUnavailableError, InvalidInputError
from unicron.service.commit import Commit
from unicron.service.commit_store import Sizes
from unicron.service.service import Service, Wiring
from unicron.services import PROVISIONER
from unicron.train.worker.iteration import WorkerCore
from unicron_simulator.storms.bus import MemoryWorld
from unicron_simulator.storms.checked_agent import validated
from unicron_simulator.storms.clocks import PartyClock
from unicron_simulator.storms.invariants import SERVICES, Invariants
from unicron_simulator.storms.liars import Liars, spoil
from unicron_simulator.storms.links import Commits, CrashedError, Journal, Link, Network
from unicron_simulator.storms.nodes import Machine
from unicron_simulator.storms.pools import ModelledProvider
from unicron_simulator.storms.scene import Scene
from unicron_simulator.storms.storage import SharedStorage
from unicron_simulator.storms.training import Trainer

BUS = "bus"
"""As the name of a party."""

START = 1_700_000_000.0
LEASE_TTL_S = 2.0
IDLE_S = 3.0
DEADLINE_S = 4.0
"""Seconds after which a call to a provider counts as unanswered."""

OPTIONS = PlannerOptions(use_measured=False)
"""Tables are believed: what a planner that is started afresh does can then be compared."""

SPOILT = 0.5
"""Share of the services whose newest commit is written over where liars are about."""

CUT_SMALL = Sizes(whole=600, segment=200, most=400)
"""Half of the storms keep their little states in parts, as a large cluster's are kept."""


@dataclass(frozen=True)
class StormParts:
    """The parts of a storm; tests put broken ones in, to see that the storm finds them."""

    service: type[Service] = Service
    agent: type[AgentCore] = AgentCore
    outbox: type[Outbox] = Outbox
    worker: type[WorkerCore] = WorkerCore
    planner: type[PlannerCore] = PlannerCore
    provisioner: type[ProvisionerCore] = ProvisionerCore
    compares: bool = True
    remembers: bool = True


def wirings(planner_core: type[PlannerCore] = PlannerCore) -> dict[str, Wiring]:
    """Return the services' own wirings, the planner's without its stopwatch."""
    planner = replace(
        planner_wiring(PlannerSettings(use_measured=False)), core=lambda state: planner_core(state, OPTIONS)
    )
    return {
        "registry": registry_wiring(RegistrySettings()),
        "detector": detector_wiring(DetectorSettings()),
        "planner": planner,
        "transition": transition_wiring(TransitionSettings(idle_s=IDLE_S)),
    }


class _Forgetful(dict[tuple[str, str], int]):
    """Ids that a bus without a duplicate window knows: none."""

    def __contains__(self, key: object) -> bool:
        return False


@dataclass
class Instance:
    """A process of a service."""

    name: str
    link: Link
    task: asyncio.Task[None] = field(init=False)


class World:
    """Everything there is in a storm.

    Attributes:
        history: what struck when, in words.
        specs: of all tasks that were submitted.
        clocks: what each party reads, by its name.
        entered_at: when each of the honest messages in the journal came there, in virtual seconds.
        instances: that run, by service.
        on_command: called with each command and its entry in the journal.
    """

    def __init__(self, scene: Scene, clock: VirtualClock, parts: StormParts) -> None:
        self.scene, self.clock = scene, clock
        self.invariants = Invariants()
        self.history: list[tuple[float, str]] = []
        self._parts = parts
        self.clocks = {name: PartyClock(clock) for name in (*SERVICES, PROVISIONER, BUS)}
        self.entered_at: list[float] = []
        self.memory = MemoryWorld(self.clocks[BUS], LEASE_TTL_S)
        self.memory.journal = Journal(self._entered)
        commits = Commits(clock, self._wrote)
        commits.compares = parts.compares
        self.memory.buckets["state"] = commits
        if not parts.remembers:
            self.memory.ids = _Forgetful()
        self.network = Network(self.memory, scene.seed, scene.weather)
        self.storage = SharedStorage()
        self.machines: dict[str, Machine] = {}
        for name, slots in scene.slots.items():
            self._make_machine(name, slots)
        self.providers = {
            pool.name: ModelledProvider(
                pool, partial(self._make_machine, slots=pool.slots), self.invariants, scene.seed
            )
            for pool in scene.pools
        }
        self._wirings = wirings(parts.planner)
        if scene.pools:
            self._wirings[PROVISIONER] = self._provisioner()
        self._services = (*SERVICES, *([PROVISIONER] if scene.pools else []))
        self.instances: dict[str, list[Instance]] = {name: [] for name in self._services}
        self._ids = 0
        self._user = self.network.link("user")
        self.random = Random(f"{scene.seed}:world")
        self.specs = {task.name: task for task in scene.tasks}
        self.liars = Liars(self.network, clock, self.machines, self.invariants)
        self.on_command: Callable[[Command, JournalEntry], None] = lambda _, __: None

    def _make_machine(self, name: str, slots: int) -> Machine:
        """Add a machine to the world, without power."""
        own = self.clocks[name] = PartyClock(self.clock)
        machine = self.machines[name] = Machine(name, slots, self.clock, self.network, self.invariants, own)
        machine.storage, machine.machines = self.storage, self.machines
        machine.make_core, machine.make_outbox = self._parts.agent, self._parts.outbox
        machine.make_worker = self._parts.worker
        machine.place = self.scene.places.get(name, machine.place)
        return machine

    def _provisioner(self) -> Wiring:
        core = partial(self._parts.provisioner, pools=self.scene.pools)
        facts, telemetry = subjects.listened(core(None).handlers)
        return Wiring(name=PROVISIONER, core=core, state=ProvisionerState, facts=facts, telemetry=telemetry)

    def _wrote(self, key: str, _: bytes, commit: Commit | None) -> None:
        if commit is not None:
            self.invariants.committed(key, commit)

    def _entered(self, entry: JournalEntry) -> None:
        if entry.sequence in self.liars.stored:
            return
        self.invariants.entered(entry)
        self.entered_at.append(self.clock.elapsed())
        message = self.invariants.messages[-1]
        if isinstance(message, TaskSubmitted):
            self.storage.submitted[message.task] = self.clock.now()
        for provider in self.providers.values():
            provider.entered(message)
        if isinstance(message, Command):
            self.on_command(message, entry)

    # --- the beginning and the end -----------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Start everything and submit the tasks."""
        for name in self._services:
            self.start_service(name)
            if name in self.scene.standbys:
                self.start_service(name)
        for machine in [*self.machines.values()]:
            machine.boot()
            await asyncio.sleep(0.05)
        for task in self.scene.tasks:
            await self.ask(SubmitTask(spec=task))

    async def end(self) -> None:
        """End everything."""
        for name in self._services:
            for instance in list(self.instances[name]):
                await self.kill_service(instance)
        for machine in self.machines.values():
            await machine.lose_power()

    async def restart(self) -> None:
        """Start all services anew, from what they have stored; somebody has spoilt that of some, once each."""
        for name in self._services:
            for instance in list(self.instances[name]):
                await self.kill_service(instance)
            if self.random.random() < SPOILT:
                await spoil(self.memory.buckets["state"], name, self.random)
                self.invariants.spoilt.add(name)
            self.start_service(name)

    def trainers(self) -> list[Trainer]:
        """Return the workers that live, by name."""
        found = [trainer for machine in self.machines.values() for trainer in machine.processes.values()]
        return sorted(found, key=lambda trainer: trainer.name)

    async def pools(self) -> PoolsView:
        """Ask the provisioner how its pools stand."""
        return (await self.ask(GetPools(), PROVISIONER)).pools or PoolsView()

    async def status(self) -> Status:
        """Ask the registry for everything it knows."""
        reply = await self.ask(GetStatus())
        if reply.status is None:
            raise InvalidInputError(f"the registry gave no status: {reply.error}")
        return reply.status

    # --- services ----------------------------------------------------------------------------------------------------

    def start_service(self, name: str) -> None:
        """Start one more instance of a service."""
        instance = Instance(name, self.network.link(name))
        sizes = None if self.scene.seed % 2 else CUT_SMALL
        service = self._parts.service(
            validated(self._wirings[name], self.invariants),
            instance.link,
            self.clocks[name],
            LEASE_TTL_S,
            partial(self.fresh_id, name),
            sizes,
        )
        job = self._with_callers(service) if name == PROVISIONER else service.run()
        instance.task = asyncio.ensure_future(self._watched(name, job))
        self.instances[name].append(instance)

    async def _with_callers(self, service: Service) -> None:
        """Run the provisioner with what asks its providers beside it; both end together."""
        supplies = {pool.name: Supply(pool, self.providers[pool.name], DEADLINE_S) for pool in self.scene.pools}
        beside = asyncio.ensure_future(Callers(supplies, service).run())
        try:
            await service.run()
        finally:
            beside.cancel()

    def fresh_id(self, name: str) -> str:
        """Return an id that nothing else has."""
        self._ids += 1
        return f"{name}-id-{self._ids}"

    async def _watched(self, name: str, job: Coroutine[Any, Any, None]) -> None:
        try:
            await job
        except CrashedError:
            pass
        except Exception as error:  # noqa: BLE001 whatever it is, a service must not end by it
            self.invariants.check(False, f"the {name} ended: {error!r}")

    async def kill_service(self, instance: Instance) -> None:
        """End an instance by SIGKILL."""
        if instance in self.instances[instance.name]:
            self.instances[instance.name].remove(instance)
        await instance.link.crash()
        instance.task.cancel()

    async def ask(self, query: Query, owner: str = "registry") -> Reply:
        """Return the reply to a user's query, asked again until somebody answers."""
        while True:
            with contextlib.suppress(BusUnavailableError):
                reply = await self._user.ask(subjects.for_query(owner, query), codec.encode(query), 2.0)
                return codec.decode(reply, Reply)
            await asyncio.sleep(0.2)

    # --- what faults need ---------------------------------------------------------------------------------------------

    def record(self, what: str) -> None:
        """Record what strikes now, in words."""
        self.history.append((self.clock.elapsed(), what))

    def publish_disconnect(self, node: str, reason: str) -> None:
        """Publish what the server publishes when the connection of an agent ends."""
        advisory = {
            "id": self.fresh_id("advisory"),
            "timestamp": datetime.fromtimestamp(self.clock.now(), UTC).isoformat(),
            "client": {"name": f"agent.{node}.{self.machines[node].secret}"},
            "reason": reason,
        }
        self.network.publish_telemetry(
            self.random, topology.DISCONNECTS.replace("*", topology.NODES), json.dumps(advisory).encode()
        )

    def record_struck(self, victim: Trainer) -> None:
        """Record a worker that a fault has ended."""
        self.invariants.struck(victim.name, victim.host.name, victim.spec.name)
