"""Modelled nodes: a machine with slots, processes and power; the agent on it is the real one, with a modelled bus."""

import asyncio
import contextlib
from collections import Counter
from random import Random

from msgspec.structs import replace
from unicron_agent import effects, stimuli
from unicron_agent.core import AgentCore
from unicron_agent.outbox import Outbox
from unicron_agent.stimuli import Tick, WorkerMessage, WorkerProcess

from unicron import fabric_proofs
from unicron.aio import retry_until_available
from unicron.clock import Clock, VirtualClock
from unicron.contracts.commands import StartWorker
from unicron.contracts.events import NodeJoined
from unicron.contracts.states import KEPT, LENT, Keeper, StateRef
from unicron.contracts.tasks import Slot
from unicron.contracts.worker import Membership, Ping, Pong, Save, Secured, ToAgent, ToWorker
from unicron.train.worker.iteration import WorkerCore
from unicron_simulator.storms import resources
from unicron_simulator.storms.checked_agent import WatchedAgent
from unicron_simulator.storms.collectives import SimulatedGroup
from unicron_simulator.storms.invariants import Invariants
from unicron_simulator.storms.links import CrashedError, Network
from unicron_simulator.storms.storage import SharedStorage
from unicron_simulator.storms.training import STORM, Trainer

SIGKILL = 9
KNOCK_S = 0.1


class Machine:
    """A node.

    Attributes:
        agent: that runs on it now.
        processes: its living workers.
        running: the workers that an agent has started and not seen end; kept on its disk.
        token: kept on its disk.
        kept: the states that workers have left behind in its memory.
        saved: the states that workers here and elsewhere have saved there.
        rotten: those of them that are not what their checksums say.
        pace: of its workers.
        storage: that all nodes see.
        place: its rack and its NVLink domain; empty where that is not known.
        fatal_until: virtual seconds until which its standby dies as soon as it is ready.
        id, pool: under which it was asked for, and for which pool; empty where a person has started it.
        lost: it never comes back.
        lacks: what of that which healing takes it has none left of, as often as something takes it away.
    """

    def __init__(
        self, name: str, slots: int, clock: VirtualClock, network: Network, invariants: Invariants, own: Clock
    ) -> None:
        self.name, self.slots, self.clock, self.invariants = name, slots, clock, invariants
        self.agent: WatchedAgent | None = None
        self.processes: dict[str, Trainer] = {}
        self.running: dict[str, WorkerProcess] = {}
        self.token = 0
        self.kept: dict[str, StateRef] = {}
        self.saved: dict[str, StateRef] = {}
        self.rotten: list[StateRef] = []
        self.random = Random(f"{network.seed}:{name}")
        self.make_core, self.make_outbox, self.make_worker = AgentCore, Outbox, WorkerCore
        self.make_trainer = Trainer
        self.pace, self.place = STORM, ("", "")
        self.machines: dict[str, Machine] = {}
        self.storage = SharedStorage()
        self.id, self.pool, self.lost = "", "", False
        self.lacks: Counter[str] = Counter()
        self._network, self._own = network, own
        self._boots, self.address, self.secret = 0, "", ""
        self.fatal_until, self._forks = 0.0, True
        self._waiting: dict[str, StartWorker] = {}
        self._groups: dict[str, SimulatedGroup] = {}
        self._sending: dict[tuple[StateRef, str], asyncio.TimerHandle] = {}

    # --- power -------------------------------------------------------------------------------------------------------

    def boot(self) -> None:
        """Start an agent, where none runs."""
        if self.agent is not None or self.lost:
            return
        self._boots += 1
        self.secret, link = f"{self.name}b{self._boots}", self._network.link(self.name)
        boot = fabric_proofs.boot_id(self.secret)
        self.address = f"{self.name}:{self._boots}"
        slots = [Slot(index=index) for index in range(self.slots)]
        card = NodeJoined(node=self.name, incarnation="", host=self.name, slots=slots, rendezvous=f"{self.name}:1")
        card = replace(card, state_server=self.address, home=self.name, rack=self.place[0], domain=self.place[1])
        card = replace(card, machine=self.id, pool=self.pool)
        core, outbox = self.make_core(card, boot, self.token), self.make_outbox(link, self._own, self.name, boot)
        self.agent = WatchedAgent(core, link, outbox, self._carry_out, self._look, self.invariants)
        self._forks, self._waiting = True, {}
        self.agent.task = asyncio.ensure_future(self._run(self.agent))

    def _look(self) -> Tick:
        asleep = {name: 0.0 for name, trainer in self.processes.items() if trainer.asleep}
        return Tick([name for name, trainer in self.processes.items() if trainer.paused], asleep)

    async def _run(self, agent: WatchedAgent) -> None:
        with contextlib.suppress(CrashedError):
            position = await retry_until_available(agent.link.tail, "waiting for the journal")
            agent.handle(stimuli.Adopted(list(self.running.values()), list(self.kept), list(self.saved.values())))
            for name in list(self.running):
                if name in self.processes:
                    self._knock(agent, name)
                else:
                    self._report(name, None, None)
            await self._watched(agent, position)

    async def _watched(self, agent: WatchedAgent, position: int) -> None:
        try:
            await agent.run(position)
        except CrashedError:
            raise
        except Exception as error:  # noqa: BLE001 whatever it is, an agent must not end by it
            self.invariants.check(False, f"the agent of {self.name} ended: {error!r}")

    async def crash_agent(self) -> None:
        """Kill the agent; the rendezvous on it are gone."""
        agent, self.agent = self.agent, None
        for group in self._groups.values():
            if not group.complete:
                group.end("the rendezvous is gone")
        self._groups, self._sending = {}, {}
        if agent is not None:
            await agent.link.crash()
            agent.task.cancel()

    async def lose_power(self) -> None:
        """End everything on it, without a word to anybody."""
        await self.crash_agent()
        for trainer in list(self.processes.values()):
            trainer.end(None, None, silently=True)
        self.running, self.processes, self.kept, self.saved = {}, {}, {}, {}

    async def leave(self, notice_s: float = 0.0) -> None:
        """Let the agent hand over for so long at most, say goodbye and go."""
        agent = self.agent
        if agent is not None and notice_s:
            await agent.hand_over(notice_s)
        if agent is not None and agent is self.agent:
            await agent.leave()
            self.kept, self.saved = {}, {}
            if self.agent is agent:
                await self.crash_agent()

    def kill_standby(self, for_s: float) -> None:
        """End the warm standby, and for so long each that takes its place as soon as it could fork."""
        self.fatal_until = self.clock.elapsed() + for_s
        if self.agent is not None and self._forks:
            self._forks = False
            self.agent.handle(stimuli.StandbyEnded("was ended by SIGKILL"))

    def _start_standby(self, agent: WatchedAgent | None) -> None:
        if agent is None or agent is not self.agent:
            return
        if self.clock.elapsed() < self.fatal_until:
            agent.handle(stimuli.StandbyEnded("was ended by SIGKILL"))
            return
        self._forks, waiting, self._waiting = True, self._waiting, {}
        agent.handle(stimuli.StandbyReady())
        for command in waiting.values():
            self._start(agent, command)

    # --- what the agent has done -------------------------------------------------------------------------------------

    def _carry_out(self, effect: effects.Effect) -> None:
        match effect:
            case effects.StartProcess(command):
                asyncio.get_running_loop().call_later(self.random.uniform(0.05, 0.2), self._start, self.agent, command)
            case effects.Kill(worker):
                self._kill(worker)
            case effects.StartStandby():
                seconds = self.random.uniform(0.5, 3.0)
                asyncio.get_running_loop().call_later(seconds, self._start_standby, self.agent)
            case effects.SendToWorker(worker, message):
                self._send(worker, message)
            case effects.StoreToken(token):
                self.token = token
            case effects.SendCopy(ref, keeper):
                handle = self._send_copy(self.agent, ref, keeper)
                self._sending[ref, keeper.node] = handle
            case effects.AbandonCopies(worker, nodes):
                self._abandon(worker, nodes)
            case effects.UseStorage():
                seconds = self.random.uniform(0.1, 1.0)
                asyncio.get_running_loop().call_later(seconds, self._use_storage, self.agent, effect)
            case effects.RemoveState(name):
                self.kept.pop(name, None)
                self.saved.pop(name, None)

    def _kill(self, worker: str) -> None:
        if trainer := self.processes.get(worker):
            asyncio.get_running_loop().call_later(0.01, trainer.end, None, SIGKILL)
        elif self._waiting.pop(worker, None):
            asyncio.get_running_loop().call_later(0.002, self._report, worker, None, SIGKILL)

    def _use_storage(self, agent: WatchedAgent | None, effect: effects.UseStorage) -> None:
        if agent is not None and agent is self.agent:
            job = effect.job
            sound = not isinstance(job, effects.StorePart) or self._can_be_stored(job)
            agent.handle(stimuli.StorageUsed(self.storage.use(effect, self.name, self.clock.now(), sound=sound)))

    def _can_be_stored(self, job: effects.StorePart) -> bool:
        """Return whether a state is sound, and there: what is saved over meanwhile has a second name."""
        return self.lies(job.ref) if job.ordered else not self.is_rotten(job.ref)

    def _send_copy(self, sender: WatchedAgent | None, ref: StateRef, keeper: Keeper) -> asyncio.TimerHandle:
        """Begin to write over an older copy elsewhere; in the end it is whole, or there is none."""
        there, name = self.machines[keeper.node], ref.location.name
        taker, room = there.agent if keeper.address == there.address else None, True
        if taker is not None:
            room = there.memory(name).pop(name, None) is not None or not there.lacking(resources.ROOM)
            taker.handle(stimuli.CopyReceived(name, None))

        def end() -> None:
            sound = taker is not None and taker is there.agent and self.lies(ref)
            if sound and room and taker is not None and sender is self.agent:
                there.memory(name)[name] = copy = ref.at(there.name, there.address)
                taker.handle(stimuli.CopyReceived(name, copy))
            if sender is not None and sender is self.agent:
                del self._sending[ref, there.name]
                problem = "it is gone" if not sound else "" if room else resources.explain(resources.ROOM)
                sender.handle(stimuli.CopySent(ref, there.name, problem, unsound=self.is_rotten(ref)))

        return asyncio.get_running_loop().call_later(self.random.uniform(*self.pace.copy), end)

    def _abandon(self, worker: str, nodes: frozenset[str]) -> None:
        for ref, node in list(self._sending):
            if ref.location.worker == worker and node in nodes:
                self._sending.pop((ref, node)).cancel()

    def _start(self, agent: WatchedAgent | None, command: StartWorker) -> None:
        if agent is None or agent is not self.agent:
            return  # the standby that was to fork it died with its agent
        if not self._forks:
            self._waiting[command.worker] = command
            if agent.core.workers[command.worker].stopping:
                self._kill(command.worker)
            return
        name, slot = command.worker, command.slot
        if why := self.lacking(resources.DESCRIPTORS):
            agent.handle(stimuli.ProcessExited(name, 127, stderr=(f"{self.name} can't start it: {why}",)))
            return
        self.invariants.started(command, [each.name for each in self.processes.values() if each.slot == slot])
        self.running[name] = WorkerProcess(
            worker=name,
            task=command.task,
            slot=slot,
            pid=1,
            correlation=command.correlation,
            place=command.place,
            layout=command.layout,
        )
        random = Random(f"{self._network.seed}:{name}")
        self.processes[name] = self.make_trainer(command, self, self.invariants, random, self.pace, self.make_worker)
        agent.handle(stimuli.ProcessStarted(name, 1))
        self._knock(agent, name)

    def _send(self, worker: str, message: ToWorker) -> None:
        trainer = self.processes.get(worker)
        if trainer is None or self.agent is None or worker not in self.agent.connected:
            return
        match message:
            case Membership():
                trainer.receive_membership(message)
            case Save():
                trainer.save_from_now(message)
            case Secured():
                trainer.secure(message)
            case Ping() if not trainer.paused:
                self.deliver_to_agent(worker, Pong())

    # --- processes ---------------------------------------------------------------------------------------------------

    def _knock(self, agent: WatchedAgent, name: str) -> None:
        """Let a worker greet its agent as soon as it is not stopped."""
        trainer = self.processes.get(name)
        if trainer is None or agent is not self.agent:
            return
        if greeting := trainer.hello():
            agent.connected.add(name)
            for message in (greeting[0], *greeting[1]):
                agent.handle(WorkerMessage(name, message))
        else:
            asyncio.get_running_loop().call_later(KNOCK_S, self._knock, agent, name)

    def deliver_to_agent(self, worker: str, message: ToAgent) -> bool:
        """Take a worker's message to the agent."""
        if self.agent is None or worker not in self.agent.connected:
            return False
        self.agent.handle(WorkerMessage(worker, message))
        return True

    def exited(self, worker: str, exit_code: int | None, signal: int | None) -> None:
        """Hear that a process is gone."""
        self.processes.pop(worker, None)
        asyncio.get_running_loop().call_later(0.002, self._report, worker, exit_code, signal)

    def _report(self, worker: str, exit_code: int | None, signal: int | None) -> None:
        if self.agent is not None and worker in self.agent.core.workers:  # else the next one finds that it is gone
            self.running.pop(worker, None)
            self.agent.handle(stimuli.ProcessExited(worker, exit_code, signal))

    def meeting(self, place: str, name: str, size: int) -> SimulatedGroup | None:
        """Return the group that meets under `name` at another node's agent."""
        there = self.machines[place.partition(":")[0]]
        return there._groups.setdefault(name, SimulatedGroup(size)) if there.agent else None  # noqa: SLF001 of the same kind

    def hands_over(self, ref: StateRef) -> bool:
        """Return whether a state can be fetched now, from this node or another."""
        there, name = self.machines[ref.location.node], ref.location.name
        if self.agent is None or there.agent is None or (there is not self and ref.location.address != there.address):
            return False
        whole = name.endswith(LENT) or name in there.kept or there.lies(ref)
        if not whole:
            self.agent.handle(stimuli.StateUnsound(ref, "a byte of it was flipped, or it is gone"))
        return whole

    def lacking(self, what: str) -> str:
        """Return what the system says of something of which there is none left here; empty where there is."""
        return resources.explain(what) if self.lacks[what] else ""

    def memory(self, name: str) -> dict[str, StateRef]:
        """Return the states of a kind that lie here, by name."""
        return self.kept if name.endswith(KEPT) else self.saved

    def lies(self, ref: StateRef) -> bool:
        """Return whether a state that was saved, or left behind, is here, whole and sound."""
        return _same(self.memory(ref.location.name).get(ref.location.name), ref) and not self.is_rotten(ref)

    def is_rotten(self, ref: StateRef) -> bool:
        """Return whether a byte of a state was flipped here."""
        return any(_same(each, ref) for each in self.rotten)


def _same(found: StateRef | None, ref: StateRef) -> bool:
    """Return whether what lies here is that state, whatever address its agent had when it came."""
    return found is not None and found.at("", "") == ref.at("", "")
