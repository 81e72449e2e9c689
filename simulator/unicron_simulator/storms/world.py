"""The stage of a storm: the four real services, modelled nodes, a user, and the hands that do the damage."""

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
from unicron_planner.estimates import Options
from unicron_planner.main import PlannerSettings
from unicron_planner.main import wiring as planner_wiring
from unicron_registry.main import RegistrySettings
from unicron_registry.main import wiring as registry_wiring
from unicron_transition.main import TransitionSettings
from unicron_transition.main import wiring as transition_wiring

from unicron import codec, subjects
from unicron.bus import topology
from unicron.bus.protocol import Entry
from unicron.clock import VirtualClock
from unicron.contracts.commands import Command
from unicron.contracts.queries import DrainNode, GetStatus, PauseTask, Query, RemoveTask, Reply, Status, SubmitTask
from unicron.errors import BusUnavailableError, InvalidInputError
from unicron.service.commit import Commit
from unicron.service.commit_store import Sizes
from unicron.service.service import Service, Wiring
from unicron.train.worker.iteration import WorkerCore
from unicron_simulator.storms import faults
from unicron_simulator.storms.bus import MemoryWorld
from unicron_simulator.storms.checked_agent import validated
from unicron_simulator.storms.faults import CALM, Fault, Scene
from unicron_simulator.storms.invariants import SERVICES, Invariants
from unicron_simulator.storms.liars import Liars, spoil
from unicron_simulator.storms.links import Commits, CrashedError, Journal, Link, Network
from unicron_simulator.storms.nodes import Machine
from unicron_simulator.storms.storage import SharedStorage
from unicron_simulator.storms.training import INFINITE, Trainer

START = 1_700_000_000.0
LEASE_TTL_S = 2.0
IDLE_S = 3.0
OPTIONS = Options(use_measured=False)
"""Tables are believed: what a planner that is started afresh does can then be compared."""

SPOILT = 0.5
"""Share of the services whose newest commit is written over where liars are about."""

CUT_SMALL = Sizes(whole=600, segment=200, most=400)
"""Half of the storms keep their little states in parts, as a large cluster's are kept."""


@dataclass(frozen=True)
class Parts:
    """What a storm is played with; tests put broken parts in, to see that the storm finds them."""

    service: type[Service] = Service
    agent: type[AgentCore] = AgentCore
    outbox: type[Outbox] = Outbox
    worker: type[WorkerCore] = WorkerCore
    compares: bool = True
    remembers: bool = True


def wirings() -> dict[str, Wiring]:
    """Return the services' own wirings, the planner's without its stopwatch."""
    planner = replace(
        planner_wiring(PlannerSettings(use_measured=False)), core=lambda state: PlannerCore(state, OPTIONS)
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
class _Instance:
    name: str
    link: Link
    task: asyncio.Task[None] = field(init=False)


class World:
    """Everything there is in a storm.

    Attributes:
        told: what struck when, in words.
        specs: of all tasks that were submitted.
    """

    def __init__(self, scene: Scene, clock: VirtualClock, parts: Parts) -> None:
        self.scene, self.clock = scene, clock
        self.invariants = Invariants()
        self.told: list[tuple[float, str]] = []
        self._parts = parts
        self.memory = MemoryWorld(clock, LEASE_TTL_S)
        self.memory.journal = Journal(self._entered)
        commits = Commits(clock, self._wrote)
        commits.compares = parts.compares
        self.memory.buckets["state"] = commits
        if not parts.remembers:
            self.memory.ids = _Forgetful()
        self.network = Network(self.memory, scene.seed, scene.weather)
        self.storage = SharedStorage()
        self.machines = {
            name: Machine(name, slots, clock, self.network, self.invariants) for name, slots in scene.slots.items()
        }
        for machine in self.machines.values():
            machine.storage = self.storage
            machine.machines, machine.make_core, machine.make_outbox = self.machines, parts.agent, parts.outbox
            machine.make_worker = parts.worker
        self._instances: dict[str, list[_Instance]] = {name: [] for name in SERVICES}
        self._wirings = wirings()
        self._ids = 0
        self._user = self.network.link("user")
        self._random = Random(f"{scene.seed}:world")
        self.specs = {task.name: task for task in scene.tasks}
        self.liars = Liars(self.network, clock, self.machines, self.invariants)
        self._late: list[tuple[int, dict[str, Entry]]] = []
        self._last: dict[str, tuple[int, Entry]] = {}

    def _wrote(self, key: str, _: bytes, commit: Commit | None) -> None:
        if commit is not None:
            self.invariants.committed(key, commit)

    def _entered(self, entry: Entry) -> None:
        if entry.sequence in self.liars.stored:
            return
        self.invariants.entered(entry)
        message = self.invariants.messages[-1]
        if isinstance(message, Command):
            self._let_late_ones_in(message)
            self._last[message.node] = (message.token, entry)

    # --- the beginning and the end -----------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Start everything and submit the tasks."""
        for name in SERVICES:
            self._start(name)
            if name in self.scene.standbys:
                self._start(name)
        for machine in self.machines.values():
            machine.boot()
            await asyncio.sleep(0.05)
        for task in self.scene.tasks:
            await self._ask(SubmitTask(spec=task))

    async def strike_all(self) -> None:
        """Let every fault strike at its time; return when all of them are over."""
        await asyncio.gather(*(self._strike_at(fault) for fault in self.scene.faults))
        self.network.weather = CALM

    async def end(self) -> None:
        """End everything."""
        for name in SERVICES:
            for instance in list(self._instances[name]):
                await self._kill(instance)
        for machine in self.machines.values():
            await machine.lose_power()

    async def restart(self) -> None:
        """Start all services anew, from what they have stored; somebody has spoilt that of some, once each."""
        for name in SERVICES:
            for instance in list(self._instances[name]):
                await self._kill(instance)
            if self._random.random() < SPOILT:
                await spoil(self.memory.buckets["state"], name, self._random)
                self.invariants.spoilt.add(name)
            self._start(name)

    def trainers(self) -> list[Trainer]:
        """Return the workers that live, by name."""
        found = [trainer for machine in self.machines.values() for trainer in machine.processes.values()]
        return sorted(found, key=lambda trainer: trainer.name)

    async def status(self) -> Status:
        """Ask the registry for everything it knows."""
        reply = await self._ask(GetStatus())
        if reply.status is None:
            raise InvalidInputError(f"the registry gave no status: {reply.error}")
        return reply.status

    # --- services ----------------------------------------------------------------------------------------------------

    def _start(self, name: str) -> None:
        instance = _Instance(name, self.network.link(name))
        sizes = None if self.scene.seed % 2 else CUT_SMALL
        service = self._parts.service(
            validated(self._wirings[name], self.invariants),
            instance.link,
            self.clock,
            LEASE_TTL_S,
            partial(self._fresh_id, name),
            sizes,
        )
        instance.task = asyncio.ensure_future(self._watched(name, service.run()))
        self._instances[name].append(instance)

    def _fresh_id(self, name: str) -> str:
        self._ids += 1
        return f"{name}-id-{self._ids}"

    async def _watched(self, name: str, job: Coroutine[Any, Any, None]) -> None:
        try:
            await job
        except CrashedError:
            pass
        except Exception as error:  # noqa: BLE001 whatever it is, a service must not end by it
            self.invariants.check(False, f"the {name} ended: {error!r}")

    async def _kill(self, instance: _Instance) -> None:
        if instance in self._instances[instance.name]:
            self._instances[instance.name].remove(instance)
        await instance.link.crash()
        instance.task.cancel()

    async def _ask(self, query: Query) -> Reply:
        while True:
            with contextlib.suppress(BusUnavailableError):
                reply = await self._user.ask(subjects.asked("registry", query), codec.encode(query), 2.0)
                return codec.decode(reply, Reply)
            await asyncio.sleep(0.2)

    # --- faults ------------------------------------------------------------------------------------------------------

    def _tell(self, what: str) -> None:
        self.told.append((self.clock.elapsed(), what))

    async def _strike_at(self, fault: Fault) -> None:
        await asyncio.sleep(max(0.0, fault.at - self.clock.elapsed()))
        match fault:
            case faults.CrashService(service=name, writes=writes, down_s=down_s):
                await self._crash_service(name, writes, down_s)
            case faults.DelayCommands(down_s=down_s):
                older = {node: entry for node, (_, entry) in self._last.items()}
                token = max((token for token, _ in self._last.values()), default=0)
                self._late.append((token, older))
                await self._crash_service("transition", 1, down_s)
            case faults.Cut():
                await self._cut(fault)
            case faults.LosePower() | faults.CrashAgent() | faults.Leave() | faults.Lies():
                await self._hit_node(fault)
            case faults.Strike():
                await self._hit_worker(fault)
            case faults.KillTask(pick=pick):
                self._kill_task(pick)
            case faults.Rot(pick=pick):
                self._rot(pick)
            case faults.Flip(pick=pick, infinite=infinite) if living := self.trainers():
                victim = living[pick % len(living)]
                self._tell(f"a bit of the parameters of {victim.name} on {victim.host.name} is flipped")
                victim.flip(INFINITE * infinite + pick.to_bytes(2))
            case faults.Blackout(at=at, back_s=back_s, notice_s=notice_s):
                lost = partial(faults.LosePower, noticed=True)
                kind = partial(faults.Leave, notice_s=notice_s) if notice_s else lost
                await asyncio.gather(*(self._hit_node(kind(at=at, node=each, back_s=back_s)) for each in self.machines))
            case _:
                await self._obey(fault)

    async def _obey(self, wish: Fault) -> None:
        """Do what a person wants done."""
        match wish:
            case faults.Drain(node=node, for_s=for_s):
                self._tell(f"a user drains {node}")
                await self._ask(DrainNode(node=node))
                await asyncio.sleep(for_s)
                self._tell(f"a user puts {node} back")
                await self._ask(DrainNode(node=node, drain=False))
            case faults.Submit(task=task):
                self._tell(f"a user submits {task.name}")
                if not (await self._ask(SubmitTask(spec=task))).error:
                    self.specs[task.name] = task
            case faults.Pause(task=name, for_s=for_s):
                self._tell(f"a user pauses {name}")
                await self._ask(PauseTask(task=name))
                await asyncio.sleep(for_s)
                self._tell(f"a user resumes {name}")
                await self._ask(PauseTask(task=name, pause=False))
            case faults.Remove(task=name):
                self._tell(f"a user removes {name}")
                await self._ask(RemoveTask(task=name))

    async def _crash_service(self, name: str, writes: float, down_s: float) -> None:
        if not self._instances[name]:
            return
        instance = self._instances[name][0]
        crashed = asyncio.Event()
        instance.link.crash_after(writes, crashed.set)
        with contextlib.suppress(TimeoutError):  # it writes nothing: then it is killed while it waits
            await asyncio.wait_for(crashed.wait(), 5.0)
        self._tell(f"the {name} is killed ({writes:g} writes on), for {down_s:g} s")
        await self._kill(instance)
        await asyncio.sleep(down_s)
        self._tell(f"the {name} is started again")
        self._start(name)

    def _let_late_ones_in(self, newer: Command) -> None:
        for token, older in self._late:
            if newer.token > token and (entry := older.pop(newer.node, None)):
                asyncio.get_running_loop().call_later(self._random.uniform(0.1, 1.0), self._store_again, entry)

    def _store_again(self, entry: Entry) -> None:
        command = codec.decode_message(entry.data)
        self._tell(f"a {type(command).__name__} of an earlier transition service arrives late")
        self.invariants.forget(command.id)
        self.memory.journal.append(Entry(len(self.memory.journal) + 1, entry.subject, entry.data))
        for follower in self.memory.followers:
            follower.set()

    async def _cut(self, cut: faults.Cut) -> None:
        machine = self.machines.get(cut.who)
        agent = machine.agent if machine else None
        links = [agent.link] if agent else [each.link for each in self._instances.get(cut.who, [])[:1]]
        self._tell(f"{cut.who} is cut off from the bus for {cut.for_s:g} s")
        for link in links:
            link.interrupt()
        if agent and cut.noticed:
            self._advise(cut.who, "Stale Connection")
        await asyncio.sleep(cut.for_s)
        self._tell(f"{cut.who} reaches the bus again")
        for link in links:
            link.heal()

    async def _hit_node(self, fault: faults.LosePower | faults.CrashAgent | faults.Leave | faults.Lies) -> None:
        machine = self.machines[fault.node]
        match fault:
            case faults.LosePower(noticed=noticed):
                self._tell(f"{fault.node} loses power for {fault.back_s:g} s")
                await machine.lose_power()
                if noticed:
                    self._advise(fault.node, "Client Closed")
            case faults.CrashAgent():
                self._tell(f"the agent of {fault.node} is killed, for {fault.back_s:g} s")
                await machine.crash_agent()
                self._advise(fault.node, "Client Closed")
            case faults.Leave(notice_s=notice_s):
                self._tell(f"the agent of {fault.node} is told to leave, for {fault.back_s:g} s")
                await machine.leave(notice_s)
            case faults.Lies(how=how, count=count, for_s=for_s):
                self._tell(f"{count} lies for {for_s:.1f} s: {how}, {fault.node}")
                await self.liars.lie(fault)
                if how not in {"lie", "claim"}:
                    return
                self._tell(f"{fault.node} is to be set up anew")
                await machine.lose_power()
                self._advise(fault.node, "Client Closed")
        await asyncio.sleep(fault.back_s)
        self._tell(f"{fault.node} comes back")
        machine.boot()

    def _advise(self, node: str, reason: str) -> None:
        """Say what the server says when the connection of an agent ends."""
        advisory = {
            "id": self._fresh_id("advisory"),
            "timestamp": datetime.fromtimestamp(self.clock.now(), UTC).isoformat(),
            "client": {"name": f"agent.{node}.{self.machines[node].secret}"},
            "reason": reason,
        }
        self.network.tell(
            self._random, topology.DISCONNECTS.replace("*", topology.NODES), json.dumps(advisory).encode()
        )

    async def _hit_worker(self, strike: faults.Strike) -> None:
        living = self.trainers()
        if not living:
            return
        victim = living[strike.pick % len(living)]
        self._tell(f"{victim.name} on {victim.host.name}: {strike.how}")
        hit: dict[str, Callable[[], None]] = {
            "kill": partial(victim.end, None, 9),
            "stop": victim.pause,
            "raise": partial(victim.throw, f"CUDA error number {strike.pick}"),
        }
        hit[strike.how]()
        if not victim.living:
            self._note(victim)
        elif strike.how == "stop":
            await asyncio.sleep(strike.for_s)
            if victim.living:
                self._tell(f"{victim.name} goes on")
                victim.go_on()

    def _note(self, victim: Trainer) -> None:
        """Remember a worker that a fault has ended."""
        self.invariants.struck(victim.name, victim.host.name, victim.spec.name)

    def _kill_task(self, pick: int) -> None:
        living = self.trainers()
        tasks = sorted({trainer.spec.name for trainer in living})
        for victim in living:
            if victim.spec.name == tasks[pick % len(tasks)]:
                self._tell(f"{victim.name} on {victim.host.name}: kill, with all of its task")
                victim.end(None, 9)
                self._note(victim)

    def _rot(self, pick: int) -> None:
        saved = [(machine, ref) for machine in self.machines.values() for ref in machine.saved.values()]
        if saved:
            machine, ref = saved[pick % len(saved)]
            self._tell(f"a byte of {ref.location.name} on {machine.name} is flipped")
            machine.rotten.append(ref)
