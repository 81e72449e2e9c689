"""Carries out the faults of a storm: on services, nodes, workers and their states, and what users order meanwhile."""

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial

from unicron import codec
from unicron.bus.protocol import JournalEntry
from unicron.contracts.commands import Command
from unicron.contracts.queries import DrainNode, PauseTask, RemoveTask, SubmitTask
from unicron_simulator.storms import convergence, faults
from unicron_simulator.storms.clocks import ASLEEP, STOPPED
from unicron_simulator.storms.faults import StormFault
from unicron_simulator.storms.resources import LONG_S
from unicron_simulator.storms.scene import CALM
from unicron_simulator.storms.training import INFINITE
from unicron_simulator.storms.world import World

TELL_S = 100.0
"""Virtual seconds within which a task has met that a node lacks something, and says so; it waits up to a minute."""


class FaultInjector:
    """The faults of a world's scene."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._late: list[tuple[int, dict[str, JournalEntry]]] = []
        self._last: dict[str, tuple[int, JournalEntry]] = {}
        world.on_command = self._record_command

    async def inject_all(self) -> None:
        """Let every fault strike at its time; return when all of them are over."""
        await asyncio.gather(*(self._inject_at(fault) for fault in self._world.scene.faults))
        self._world.network.weather = CALM

    def _record_command(self, command: Command, entry: JournalEntry) -> None:
        self._let_late_ones_in(command)
        self._last[command.node] = (command.token, entry)

    async def _inject_at(self, fault: StormFault) -> None:
        await asyncio.sleep(max(0.0, fault.at - self._world.clock.elapsed()))
        match fault:
            case faults.CrashService(service=name, writes=writes, down_s=down_s):
                await self._crash_service(name, writes, down_s)
            case faults.DelayCommands(down_s=down_s):
                older = {node: entry for node, (_, entry) in self._last.items()}
                token = max((token for token, _ in self._last.values()), default=0)
                self._late.append((token, older))
                await self._crash_service("transition", 1, down_s)
            case faults.SetClock() | faults.Cut() | faults.Lack():
                await self._disturb(fault)
            case faults.LosePower() | faults.CrashAgent() | faults.LeaveNode() | faults.Lies():
                await self._hit_node(fault)
            case faults.StrikeWorker():
                await self._hit_worker(fault)
            case faults.KillTask(pick=pick):
                self._kill_task(pick)
            case faults.Rot() | faults.KillStandby():
                self._harm(fault)
            case faults.Flip(pick=pick, infinite=infinite) if living := self._world.trainers():
                victim = living[pick % len(living)]
                self._world.record(f"a bit of the parameters of {victim.name} on {victim.host.name} is flipped")
                victim.flip(INFINITE * infinite + pick.to_bytes(2))
            case faults.Blackout(at=at, back_s=back_s, notice_s=notice_s):
                lost = partial(faults.LosePower, noticed=True)
                kind = partial(faults.LeaveNode, notice_s=notice_s) if notice_s else lost
                await asyncio.gather(
                    *(self._hit_node(kind(at=at, node=each, back_s=back_s)) for each in [*self._world.machines])
                )
            case _:
                await self._obey(fault)

    async def _obey(self, wish: StormFault) -> None:
        """Do what a person wants done, or what happens to pools."""
        match wish:
            case faults.LoseMachine():
                await self._lose_machine(wish)
            case faults.Mood(how=how, for_s=for_s):
                await self._change_mood(how, for_s)
            case faults.Drain(node=node, for_s=for_s):
                self._world.record(f"a user drains {node}")
                await self._world.ask(DrainNode(node=node))
                await asyncio.sleep(for_s)
                self._world.record(f"a user puts {node} back")
                await self._world.ask(DrainNode(node=node, drain=False))
            case faults.Submit(task=task):
                self._world.record(f"a user submits {task.name}")
                if not (await self._world.ask(SubmitTask(spec=task))).error:
                    self._world.specs[task.name] = task
            case faults.Pause(task=name, for_s=for_s):
                self._world.record(f"a user pauses {name}")
                await self._world.ask(PauseTask(task=name))
                await asyncio.sleep(for_s)
                self._world.record(f"a user resumes {name}")
                await self._world.ask(PauseTask(task=name, pause=False))
            case faults.Remove(task=name):
                self._world.record(f"a user removes {name}")
                await self._world.ask(RemoveTask(task=name))

    async def _crash_service(self, name: str, writes: float, down_s: float) -> None:
        if not self._world.instances[name]:
            return
        instance = self._world.instances[name][0]
        crashed = asyncio.Event()
        instance.link.crash_after(writes, crashed.set)
        with contextlib.suppress(TimeoutError):  # it writes nothing: then it is killed while it waits
            await asyncio.wait_for(crashed.wait(), 5.0)
        self._world.record(f"the {name} is killed ({writes:g} writes on), for {down_s:g} s")
        await self._world.kill_service(instance)
        await asyncio.sleep(down_s)
        self._world.record(f"the {name} is started again")
        self._world.start_service(name)

    def _let_late_ones_in(self, newer: Command) -> None:
        for token, older in self._late:
            if newer.token > token and (entry := older.pop(newer.node, None)):
                asyncio.get_running_loop().call_later(self._world.random.uniform(0.1, 1.0), self._store_again, entry)

    def _store_again(self, entry: JournalEntry) -> None:
        command = codec.decode_message(entry.data)
        self._world.record(f"a {type(command).__name__} of an earlier transition service arrives late")
        self._world.invariants.forget(command.id)
        self._world.memory.journal.append(JournalEntry(len(self._world.memory.journal) + 1, entry.subject, entry.data))
        for follower in self._world.memory.followers:
            follower.set()

    async def _disturb(self, fault: faults.SetClock | faults.Cut | faults.Lack) -> None:
        match fault:
            case faults.Cut():
                await self._cut(fault)
            case faults.Lack():
                await self._take_away(fault)
            case faults.SetClock(target=target, by_s=by_s, for_s=for_s):
                await self._set_clock(target, by_s, for_s)

    async def _set_clock(self, target: str, by_s: float, for_s: float) -> None:
        clocks = self._world.clocks
        if target == STOPPED:
            self._world.record(f"{target} stands still for {by_s:g} s")
            self._world.clock.advance(by_s)
            return
        changed = [*clocks.values()] if target == ASLEEP else [clocks[target]]
        self._world.record(f"the clock of {target} is set by {by_s:+g} s" + f", for {for_s:g} s" * bool(for_s))
        for clock in changed:
            clock.ahead_s += by_s
        if for_s:
            await asyncio.sleep(for_s)
            self._world.record(f"the clock of {target} is set by {-by_s:+g} s")
            for clock in changed:
                clock.ahead_s -= by_s

    async def _cut(self, cut: faults.Cut) -> None:
        machine = self._world.machines.get(cut.target)
        agent = machine.agent if machine else None
        links = [agent.link] if agent else [each.link for each in self._world.instances.get(cut.target, [])[:1]]
        self._world.record(f"{cut.target} is cut off from the bus for {cut.for_s:g} s")
        for link in links:
            link.interrupt()
        if agent and cut.noticed:
            self._world.publish_disconnect(cut.target, "Stale Connection")
        await asyncio.sleep(cut.for_s)
        self._world.record(f"{cut.target} reaches the bus again")
        for link in links:
            link.heal()

    async def _hit_node(self, fault: faults.LosePower | faults.CrashAgent | faults.LeaveNode | faults.Lies) -> None:
        machine = self._world.machines[fault.node]
        match fault:
            case faults.LosePower(noticed=noticed):
                self._world.record(f"{fault.node} loses power for {fault.back_s:g} s")
                await machine.lose_power()
                if noticed:
                    self._world.publish_disconnect(fault.node, "Client Closed")
            case faults.CrashAgent():
                self._world.record(f"the agent of {fault.node} is killed, for {fault.back_s:g} s")
                await machine.crash_agent()
                self._world.publish_disconnect(fault.node, "Client Closed")
            case faults.LeaveNode(notice_s=notice_s):
                self._world.record(f"the agent of {fault.node} is ordered to leave, for {fault.back_s:g} s")
                await machine.leave(notice_s)
            case faults.Lies(how=how, count=count, for_s=for_s):
                self._world.record(f"{count} lies for {for_s:.1f} s: {how}, {fault.node}")
                await self._world.liars.lie(fault)
                if how not in {"lie", "claim"}:
                    return
                self._world.record(f"{fault.node} is to be set up anew")
                await machine.lose_power()
                self._world.publish_disconnect(fault.node, "Client Closed")
        await asyncio.sleep(fault.back_s)
        self._world.record(f"{fault.node} comes back")
        machine.boot()

    async def _take_away(self, lack: faults.Lack) -> None:
        """Have a node lack something; it has it again once every task has done without, or says what it waits for."""
        machine = self._world.machines[lack.node]
        self._world.record(f"{lack.node} has no {lack.what} left, for {lack.for_s:g} s")
        machine.lacks[lack.what] += 1
        await asyncio.sleep(lack.for_s)
        if lack.for_s >= LONG_S:
            await self._until_told(lack)
        self._world.record(f"{lack.node} has {lack.what} again")
        machine.lacks[lack.what] -= 1

    async def _until_told(self, lack: faults.Lack) -> None:
        """Wait until every task does as planned, or says what lacks: there is nothing else that it could wait for."""
        began = self._world.clock.elapsed()
        while problem := await convergence.untold(self._world):
            if self._world.clock.elapsed() - began > TELL_S:
                text = f"{lack.node} has had no {lack.what} for {lack.for_s + TELL_S:g} s: {problem}"
                self._world.invariants.check(False, text)
                return
            await asyncio.sleep(1.0)

    async def _lose_machine(self, fault: faults.LoseMachine) -> None:
        mine = [each for each in self._world.machines.values() if each.id and each.agent and not each.lost]
        if not mine:
            return
        machine = mine[fault.pick % len(mine)]
        self._world.record(f"{machine.name} is lost for good, {fault.notice_s:g} s after the notice")
        if fault.notice_s:
            await machine.leave(fault.notice_s)
        await machine.lose_power()
        machine.lost = True
        self._world.publish_disconnect(machine.name, "Client Closed")

    async def _change_mood(self, how: str, for_s: float) -> None:
        for provider in self._world.providers.values():
            self._world.record(f"the provider {how}")
            provider.mood = how
        await asyncio.sleep(for_s)
        for provider in self._world.providers.values():
            provider.mood = "" if provider.mood == how else provider.mood

    async def _hit_worker(self, strike: faults.StrikeWorker) -> None:
        living = self._world.trainers()
        if not living:
            return
        victim = living[strike.pick % len(living)]
        self._world.record(f"{victim.name} on {victim.host.name}: {strike.how}")
        hit: dict[str, Callable[[], None]] = {
            "kill": partial(victim.end, None, 9),
            "stop": victim.pause,
            "raise": partial(victim.throw, f"CUDA error number {strike.pick}"),
        }
        hit[strike.how]()
        if not victim.living:
            self._world.record_struck(victim)
        elif strike.how == "stop":
            await asyncio.sleep(strike.for_s)
            if victim.living:
                self._world.record(f"{victim.name} goes on")
                victim.go_on()

    def _kill_task(self, pick: int) -> None:
        living = self._world.trainers()
        tasks = sorted({trainer.spec.name for trainer in living})
        for victim in living:
            if victim.spec.name == tasks[pick % len(tasks)]:
                self._world.record(f"{victim.name} on {victim.host.name}: kill, with all of its task")
                victim.end(None, 9)
                self._world.record_struck(victim)

    def _harm(self, fault: faults.Rot | faults.KillStandby) -> None:
        """Harm a node's memory, or what forks its workers."""
        if isinstance(fault, faults.KillStandby):
            self._world.record(f"the standby of {fault.node} is killed, for {fault.for_s:g} s")
            self._world.machines[fault.node].kill_standby(fault.for_s)
            return
        saved = [(machine, ref) for machine in self._world.machines.values() for ref in machine.saved.values()]
        if saved:
            machine, ref = saved[fault.pick % len(saved)]
            self._world.record(f"a byte of {ref.location.name} on {machine.name} is flipped")
            machine.rotten.append(ref)
