"""All services' cores wired together without a bus, and nodes whose agents obey at once."""

import importlib

import msgspec

from unicron.contracts.base import CancelTimer, SetTimer, Started, TimerFired
from unicron.contracts.commands import Command, Regroup, SaveStates, StartWorker
from unicron.contracts.events import Alert, NodeJoined, Regrouped, StateKept, StateSecured, WorkerReady
from unicron.contracts.states import StateLocation, StateRef
from unicron.contracts.tasks import Slot
from unicron.services import SERVICES
from unicron.settings import Settings

NOW = 1e9


def wired(name):
    """Return what a service is made of, with the settings that it has when nothing is set."""
    module = importlib.import_module(f"unicron_{name}.main")
    (kind,) = (
        each
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, Settings) and each is not Settings
    )
    return module.wiring(kind())


class Cores:
    """The cores of one cluster, and its journal.

    Args:
        nodes: that join.
        silent: types of commands that agents leave alone from the beginning.
    """

    def __init__(self, *nodes, silent=()):
        self.silent, self.journal, self._read = set(silent), [], 0
        self.cores = {name: wired(name).core(None) for name in SERVICES}
        for name in SERVICES:
            self._take(name, Started(token=1, at=NOW))
        for node in nodes:
            slots = [Slot(index=0), Slot(index=1)]
            self.say(NodeJoined(node=node, incarnation="1.1", host=node, slots=slots, state_server=f"{node}:1"))

    def order(self, query):
        """Give a user's order."""
        reply, out = self.cores["registry"].answer(query)
        assert not reply.error
        self._tell("registry", out)
        self._rest()

    def say(self, *facts):
        """Have the agents of these facts' nodes say them; return what all services say then."""
        before = len(self.journal)
        self.journal += [msgspec.structs.replace(fact, source=fact.node, at=NOW) for fact in facts]
        self._rest()
        return self.journal[before + len(facts) :]

    def heard(self, fact):
        """Return the outcomes of a fact in all cores, unpublished; a doubted fact has none."""
        fact = msgspec.structs.replace(fact, source=fact.node, at=NOW)
        cores = [core for core in self.cores.values() if not core.find_contradiction(fact)]
        return [each for core in cores for each in core.handle(fact) if not isinstance(each, Alert)]

    def states(self):
        """Return what each core remembers, as bytes."""
        return {name: msgspec.msgpack.encode(core.state) for name, core in self.cores.items()}

    def run(self, task):
        """Return what the transition service knows of a task."""
        return self.cores["transition"].state.tasks[task]

    def _rest(self):
        while self._read < len(self.journal):
            message = self.journal[self._read]
            self._read += 1
            for name in SERVICES:
                self._take(name, message)
            if isinstance(message, Command) and type(message) not in self.silent:
                answers = self._obeyed(message)
                self.journal += [msgspec.structs.replace(each, source=message.node, at=NOW) for each in answers]

    def _take(self, name, message):
        if not self.cores[name].find_contradiction(message):
            self._tell(name, self.cores[name].handle(message))

    def _tell(self, source, out):
        for each in out:
            if isinstance(each, SetTimer) and source == "planner":
                self._take("planner", TimerFired(name=each.name, at=NOW))
            elif not isinstance(each, SetTimer | CancelTimer):
                self.journal.append(msgspec.structs.replace(each, source=source, at=NOW))

    def _obeyed(self, command):
        match command:
            case StartWorker(node=node, slot=slot, worker=worker, task=task):
                return [WorkerReady(node=node, slot=slot, worker=worker, task=task, pid=1)]
            case Regroup(node=node, task=task, epoch=epoch, world_size=size):
                at = {"node": node, "task": task, "epoch": epoch, "world_size": size, "iteration": 5}
                ranks = zip(command.ranks, command.members, strict=True)
                there = [Regrouped(worker=each.worker, slot=each.slot, rank=rank, **at) for rank, each in ranks]
                due = [each for each in command.members if each.worker in self.run(task).membership.exporting_members()]
                return there + [_kept(command, each) for each in due]
            case SaveStates(node=node, task=task, savers=savers):
                slots = {worker: each.slot.slot for worker, each in self.run(task).workers.items()}
                at = {"node": node, "task": task, "iteration": 5}
                return [
                    StateSecured(worker=saver.worker, slot=slots[saver.worker], nodes=_nodes(saver), **at)
                    for saver in savers
                    if saver.worker in slots
                ]
        return []


def _kept(order, member):
    name = f"{member.worker}.{order.epoch}.kept"
    location = StateLocation(node=order.node, worker=member.worker, name=name, address=member.state_server)
    state = StateRef(task=order.task, iteration=6, place=0, location=location, size=1, checksum=b"x")
    place = {"node": order.node, "slot": member.slot, "task": order.task, "worker": member.worker}
    return StateKept(**place, epoch=order.epoch, state=state)


def _nodes(saver):
    return [keeper.node for keeper in saver.keepers]
