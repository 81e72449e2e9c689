"""The liars of a storm: with a node's key, with none that counts, or with one for commands."""

import asyncio
import contextlib
from collections.abc import Mapping
from random import Random

from msgspec.structs import replace

from unicron import codec, subjects
from unicron.bus.protocol import JournalEntry
from unicron.clock import VirtualClock
from unicron.contracts.base import Message
from unicron.contracts.events import NodeJoined
from unicron.errors import InvalidInputError
from unicron_simulator.storms import lies
from unicron_simulator.storms.bus import MemoryBucket
from unicron_simulator.storms.faults import Lies
from unicron_simulator.storms.forged_facts import Claim, claimed
from unicron_simulator.storms.invariants import Invariants
from unicron_simulator.storms.links import Network
from unicron_simulator.storms.nodes import Machine

STRANGER = "stranger"
"""A key that is no node's and no service's."""

RECENT, FROM_ALL = 60, 0.3
"""A liar takes its pick of so many messages, or with this chance of all."""


async def spoil(states: MemoryBucket, service: str, random: Random) -> None:
    """Overwrite the newest commit of a service, or a part of it, as anybody with its key can."""
    key = random.choice([service, *(each for each in states.stored() if each.startswith(f"{service}."))])
    stored = await states.get(key)
    if stored is not None:
        value = lies.spoilt(random, stored.value) if key == service else lies.garbage(random, stored.value)
        await MemoryBucket.update(states, key, value, stored.revision)  # no follower gets it: it is no commit


class Liars:
    """The liars of one storm; what they do depends on its seed alone.

    Attributes:
        stored: positions in the journal of what they have said.
    """

    def __init__(
        self, network: Network, clock: VirtualClock, machines: Mapping[str, Machine], invariants: Invariants
    ) -> None:
        self.stored: set[int] = set()
        self._network, self._clock, self._machines, self._invariants = network, clock, machines, invariants
        self._count = 0

    async def lie(self, what: Lies) -> None:
        """Say so many things in so many seconds."""
        random = Random(f"{self._network.seed}:{what}")
        likely = lies.Likely(random)
        for _ in range(what.count):
            await asyncio.sleep(random.uniform(0, 2 * what.for_s / what.count))
            self._count += 1
            name = f"lie-{self._count}"
            match what.how:
                case "repeat":
                    self._repeat(what.node, random, name)
                case "lie" if random.random() < 0.2:
                    self._repeat(what.node, random, name, joins=True)
                case "lie":
                    self._change(what.node, random, name, likely)
                case "pose":
                    self._pose(random.choice([what.node, STRANGER]), random, name)
                case "forge":
                    self._forge(what.node, random, name)
                case "claim":
                    self._claim(what.node, random, name)

    def _real(self, random: Random, node: str = "*", *, joins: bool = True) -> tuple[str, bytes] | None:
        """Return what somebody has said, or that node: as telemetry, or in the journal."""
        own = subjects.matcher(f"{subjects.ROOT}.{kind}.{node}.>" for kind in ("evt", "tel"))
        telemetry = [(each.subject, each.data) for each in self._network.recent_telemetry]
        kept = [(each.subject, each.data) for each in self._network.world.journal if each.sequence not in self.stored]
        found = [[each for each in some if own(each[0])] for some in (telemetry, kept)]
        found[1] = [each for each in found[1] if joins or f".{NodeJoined.__name__}." not in each[0]]
        some = random.choice([each for each in found if each] or [[]])
        return random.choice(some if random.random() < FROM_ALL else some[-RECENT:]) if some else None

    def _repeat(self, node: str, random: Random, name: str, *, joins: bool = False) -> None:
        """Say something again, under the id that it has or another.

        A node that joins again under an earlier incarnation counts as that one, until it is set up anew.
        """
        if real := self._real(random, node, joins=joins):
            subject, data = real
            if random.random() < 0.5:
                data = codec.encode(replace(codec.decode_message(data), id=name))
            self._send(subject, data, name, node, random)

    def _change(self, node: str, random: Random, name: str, likely: lies.Likely) -> None:
        """Say something that the node has said, but for one value."""
        if real := self._real(random, node):
            likely.note(real[1])
            if other := self._real(random):
                likely.note(other[1])
            message = replace(codec.decode_message(real[1]), id=name, correlation=name, at=self._clock.now())
            marked = codec.encode(message)
            data = likely.changed(marked) if random.random() < 0.7 else lies.impossible(random, marked)
            data = self._apart(data, name)
            self._send(self._belongs(data, real[0], node), data, name, node, random)

    def _apart(self, data: bytes, name: str) -> bytes:
        """Return a lie as the first of its chain, where it claims to follow from one that nobody may believe.

        What comes of a lie is known by its chain: were it said to be of that one, what follows from both looks alike.
        """
        with contextlib.suppress(InvalidInputError):
            message = codec.decode_message(data)
            if message.correlation in self._invariants.lie_tracker.void:
                return codec.encode(replace(message, correlation=name))
        return data

    def _belongs(self, data: bytes, subject: str, node: str) -> str:
        """Return where the message in `data` belongs, if the node may speak there; else where it came from."""
        try:
            own = subjects.for_message(codec.decode_message(data))
        except InvalidInputError:
            return subject
        return own if ".cmd." not in own and subjects.sender(own) == node else subject

    def _pose(self, sender: str, random: Random, name: str) -> None:
        """Say what another one has said: as it was, on a subject of one's own; or as one's own."""
        real = self._real(random)
        if real is None or subjects.sender(real[0]) == sender:
            return
        message: Message = replace(codec.decode_message(real[1]), id=name, correlation=name, at=self._clock.now())
        parts = real[0].split(".")
        subject = ".".join([*parts[:3], sender, *parts[4:]])
        if random.random() < 0.5:
            message = replace(message, source=sender)
        self._send(subject, codec.encode(message), name, sender, random)

    def _forge(self, node: str, random: Random, name: str) -> None:
        """Give a command under a token that nobody was given; it names a worker that lives there, if one does."""
        living = sorted(self._machines[node].processes)
        worker = random.choice(living) if living else "none-1"
        task = worker.rpartition("-")[0]
        command = lies.forged(random, self._count, node, task, worker)
        command = replace(command, id=name, correlation=name, at=self._clock.now())
        self._send(subjects.for_message(command), codec.encode(command), name, node, random)

    def _claim(self, node: str, random: Random, name: str) -> None:
        """Say in the node's own name what is about some worker in the cluster, or some that never was."""
        living = [process for _, each in sorted(self._machines.items()) for process in each.processes.values()]
        if not living:
            return
        other = random.choice(living)
        where = Claim(node, random.randint(0, 2), other.spec.name, other.name, home=other.host.name)
        claim = where._replace(root=other.spec.checkpoints)
        for index, lie in enumerate(claimed(random, claim, self._count)):
            own = name if index == 0 else f"{name}-{index}"
            message = replace(lie, id=own, correlation=own, source=node, at=self._clock.now())
            self._send(subjects.for_message(message), codec.encode(message), own, node, random)

    def _send(self, subject: str, data: bytes, name: str, sender: str, random: Random) -> None:
        if machine := self._machines.get(sender):
            held = [ref.task for ref in (*machine.kept.values(), *machine.saved.values())]
            self._invariants.lie_tracker.touched |= {*held, *(each.spec.name for each in machine.processes.values())}
        joined = self._invariants.lie_tracker.record_lie(subject, data, name, sender)
        if not subjects.matches(subjects.JOURNAL, subject):
            self._network.publish_telemetry(random, subject, data)
            return
        world = self._network.world
        self.stored.add(len(world.journal) + 1)
        self._invariants.lied(joined)
        world.journal.append(JournalEntry(len(world.journal) + 1, subject, data))
        for follower in world.followers:
            follower.set()
