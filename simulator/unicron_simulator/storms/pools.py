"""A provider of machines in a storm, and what must hold of pools: checked where machines are, and in the journal."""

import asyncio
from collections.abc import Callable
from random import Random
from typing import Literal

from unicron_provisioner.providers.protocol import (
    ByRelease,
    MachineReport,
    MachineRequest,
    ProviderError,
    QuotaError,
    RefusedError,
)

from unicron.contracts.base import Message
from unicron.contracts.events import (
    FailureDetected,
    MachineAsked,
    MachineDelivered,
    MachineReleased,
    MachineRetired,
    NodeAdmitted,
    NodeDrained,
    NodeGone,
    NodeLeaving,
)
from unicron.contracts.failures import Severity
from unicron.contracts.pools import Pool
from unicron_simulator.storms.invariants import Invariants
from unicron_simulator.storms.nodes import Machine

SOON_S, LATE_S = (0.2, 1.0), (20.0, 40.0)
"""Seconds from a request to the machine's agent, usually and when it comes late."""

GRACE_S = 2.0
"""Seconds that an agent has when its machine is given back."""


class ModelledProvider(ByRelease):
    """Machines of a pool in a storm.

    Args:
        pool: its rules.
        make: makes a machine, by the name of its node.
        invariants: of the storm.
        seed: of what chance there is.

    Attributes:
        mood: one of `MOODS` in faults, or nothing.
        machines: by id; a second one has `+` after it.
    """

    def __init__(self, pool: Pool, make: Callable[[str], Machine], invariants: Invariants, seed: int) -> None:
        self.mood, self.machines = "", dict[str, Machine]()
        self._pool, self._make, self._invariants, self._random = pool, make, invariants, Random(f"{seed}:{pool.name}")
        self._broken: set[str] = set()
        self._made = 0

    async def list(self) -> list[MachineReport]:
        """Return all that are there."""
        await self._travel()
        if self.mood == "forgets":
            return []
        return [
            MachineReport(machine=id_.rstrip("+"), state=self._state(id_), node=machine.name, instance=id_)
            for id_, machine in self.machines.items()
        ]

    def _state(self, id_: str) -> Literal["coming", "running", "ended"]:
        return "ended" if id_ in self._broken or self.machines[id_].lost else "running"

    async def ask(self, request: MachineRequest) -> None:
        """Start a machine, or do what the mood is."""
        self._invariants.check(
            any(isinstance(each, MachineAsked) and each.machine == request.machine for each in self._messages),
            f"{request.machine} was asked for before the journal says so",
        )
        await self._travel()
        if self.mood == "refuses":
            raise RefusedError("it is closed")
        if self.mood == "full":
            raise QuotaError("all are in use")
        done = self.mood != "hangs" or self._random.random() < 0.5
        if done and request.machine not in self.machines:
            self._start(request.machine)
            if self.mood == "twice":
                self._start(f"{request.machine}+")
        if self.mood == "hangs":
            await self._hang()

    async def release(self, machine: str, instance: str = "") -> None:
        """End a machine."""
        await self._travel()
        if self.mood == "hangs" and self._random.random() < 0.5:
            await self._hang()
        for id_ in [instance] if instance else [machine, f"{machine}+"]:
            if found := self.machines.pop(id_, None):
                self._check_unused(found)
                await found.leave(GRACE_S if not found.lost else 0.0)
                await found.lose_power()
                found.lost = True

    async def _travel(self) -> None:
        await asyncio.sleep(self._random.uniform(0.01, 0.2))

    async def _hang(self) -> None:
        if self._random.random() < 0.5:
            await asyncio.sleep(10_000)
        raise ProviderError("the connection broke")

    def _start(self, id_: str) -> None:
        self._made += 1
        machine = self._make(f"{self._pool.name}-{self._made}")
        machine.id, machine.pool, self.machines[id_] = id_.rstrip("+"), self._pool.name, machine
        if self.mood == "broken":
            self._broken.add(id_)
            return
        seconds = self._random.uniform(*(LATE_S if self.mood == "slow" else SOON_S))
        asyncio.get_running_loop().call_later(seconds, self._boot, id_, machine)

    def _boot(self, id_: str, machine: Machine) -> None:
        if self.machines.get(id_) is machine and not machine.lost:
            machine.boot()

    # --- what must hold ----------------------------------------------------------------------------------------------

    @property
    def _messages(self) -> "tuple[Message, ...]":
        return tuple(each for each in self._invariants.messages if getattr(each, "pool", "") == self._pool.name)

    def _check_unused(self, machine: Machine) -> None:
        """Check that a machine that is given back holds no worker, unless its node was given up."""
        up = True
        for message in self._invariants.messages:
            match message:
                case FailureDetected(severity=Severity.SEV1, node=node) | NodeGone(node=node) if node == machine.name:
                    up = False
        self._invariants.check(
            not (up and machine.processes), f"{machine.name} was given back with {', '.join(machine.processes)} on it"
        )

    def entered(self, message: Message) -> None:
        """Check what the provisioner says."""
        messages, check = self._messages, self._invariants.check
        match message:
            case MachineAsked(machine=id_, replaces=replaces):
                others = [each for each in messages if isinstance(each, MachineAsked) and each is not message]
                check(id_ not in {each.machine for each in others}, f"{id_} was asked for twice")
                ended = {each.machine for each in messages if isinstance(each, MachineReleased)}
                same = [each.machine for each in others if replaces and each.replaces == replaces]
                retired = {each.machine for each in messages if isinstance(each, MachineRetired)}
                joined = {each.machine for each in messages if isinstance(each, MachineDelivered)}
                doubled = [each for each in same if each not in ended | retired | joined]
                check(not doubled, f"{replaces} is replaced by {id_}, and nobody knows what became of {doubled}")
                there = {each.machine for each in others} - ended - retired - self._out(message.id) | {id_}
                check(len(there) <= self._pool.max, f"pool {self._pool.name} has {len(there)} machines")
                self._check_budget(messages)
            case MachineRetired(node=node, machine=id_):
                asked = {each.machine for each in messages if isinstance(each, MachineAsked)}
                check(id_ in asked, f"{node or id_} is given back, and nobody asked for it")

    def _out(self, decision: str) -> set[str]:
        """Return the machines whose nodes were drained, or gone, or given up, as the provisioner may have known."""
        machines, out, ever = dict[str, str](), set[str](), set[str]()
        before = self._invariants.known_before(decision)
        for at, message in enumerate(self._invariants.messages):
            match message:
                case NodeAdmitted(node=node, machine=id_):
                    machines[node] = id_
                    out.discard(id_)
                case (
                    FailureDetected(severity=Severity.SEV1, node=node)
                    | NodeGone(node=node)
                    | NodeDrained(node=node, drain=True)
                    | NodeLeaving(node=node)
                ):
                    out.add(machines.get(node, ""))
                case NodeDrained(node=node):
                    out.discard(machines.get(node, ""))
            ever = ever | out if at >= before - 1 else out
        return set(ever)

    def _check_budget(self, messages: "tuple[Message, ...]") -> None:
        found = [each for each in messages if isinstance(each, MachineAsked) and each.replaces]
        mine = [each for each in found if not each.reason.endswith("has left")]
        most = self._pool.replacements
        self._invariants.check(len(mine) <= most, f"{len(mine)} nodes were replaced within an hour, {most} may be")
