"""An honest cluster around the core of the transition service: it obeys at once, and answers when the test lets it."""

from dataclasses import dataclass

import msgspec
from unicron_transition.core import TransitionCore
from unicron_transition.moves import MOVES
from unicron_transition.state import TransitionState

from unicron.contracts import events
from unicron.contracts.base import CancelTimer, SetTimer, Started, TimerFired
from unicron.contracts.commands import CopyState, DropStates, FindStates, Regroup, SaveStates, StartWorker, StopWorker
from unicron.contracts.failures import Severity
from unicron.contracts.plans import Plan, TaskShare
from unicron.contracts.states import COPIES, StateLocation, StateRef
from unicron.contracts.tasks import ParallelLayout, Slot, SlotRef, TaskSpec, TaskState, WorkerStatus

TOKEN = 7


def slot(text):
    node, index = text.split(":")
    return SlotRef(node=node, slot=int(index))


def of(kind, out):
    return [message for message in out if isinstance(message, kind)]


def failure(severity, **fields):
    return events.FailureDetected(severity=severity, method="m", status="s", **fields)


@dataclass
class Process:
    """A worker process.

    Attributes:
        place: whose state it has.
        built: the place of `layout` that it was started for.
        left: epoch in which it left its state behind.
    """

    name: str
    task: str
    slot: SlotRef
    ready: bool = False
    place: int | None = None
    epoch: int = -1
    living: bool = True
    built: int = 0
    layout: ParallelLayout = ParallelLayout()  # noqa: RUF009 it is frozen
    left: int = -1

    @property
    def who(self):
        """The fields that each of its facts has."""
        return {"node": self.slot.node, "slot": self.slot.slot, "task": self.task, "worker": self.name}


class Cluster:
    """Checks every command and every fact of the core against what there is.

    Attributes:
        anew: tasks that had a state, and lost it.
        kept: states that were left behind, and copies of them, by node and name: of which task.
        copying: orders to copy a state that nobody has obeyed yet.
        saved: states that were saved, by node and name; none where workers do not save.
        make: makes the core from its state.
    """

    make = TransitionCore

    def __init__(self, nodes, specs, *, saving=True):
        self.core = self.make()
        self.specs = {spec.name: spec for spec in specs}
        self.slots = nodes
        self.up = set()
        self.processes = {}
        self.orders = {}
        self.said = dict.fromkeys(self.specs, TaskState.WAITING)
        self.progress = set()
        self.anew = set()
        self.kept = {}
        self.saving, self.savers, self.saved = saving, {}, {}
        self.asked, self.copying, self.timers = [], [], {}
        self.plans = 0
        self.tell(Started(token=TOKEN))
        for node in nodes:
            self.join(node)
        for name, spec in self.specs.items():
            self.tell(events.TaskSubmitted(task=name, spec=spec))

    def tell(self, message):
        """Hand the core a message, after a restart, and do what it says."""
        stored = msgspec.msgpack.encode(self.core.state)
        self.core = self.make(msgspec.msgpack.decode(stored, type=TransitionState))
        out = self.core.handle(message)
        for each in out:
            self.take(each)
            self.take_in_memory(each)
        return out

    def take(self, message):
        match message:
            case StopWorker(worker=name) if name in self.processes:
                self.end(self.processes[name])
            case StartWorker():
                self.start(message)
            case Regroup(task=task, epoch=epoch):
                newest = self.orders.get(task)
                assert newest is None or epoch >= newest[0].epoch
                self.orders[task] = [*(newest if newest and newest[0].epoch == epoch else []), message]
            case events.TaskStateChanged(task=task, state=state):
                assert state in MOVES[self.said[task]].values(), f"{task} went from {self.said[task]} to {state}"
                self.said[task] = state

    def take_in_memory(self, message):
        """Do what concerns states in the memories of nodes."""
        match message:
            case DropStates(node=node, names=names, workers=workers):
                for name in names:
                    self.kept.pop((node, name), None)
                    self.saved.pop((node, name), None)
                gone = [key for key, ref in self.saved.items() if key[0] == node and ref.location.worker in workers]
                for key in gone:
                    del self.saved[key]
            case SaveStates(node=node, task=task, savers=savers):
                self.savers[task, node] = {saver.worker: [saver, -1] for saver in savers} if self.saving else {}
            case CopyState(state=ref):
                assert ref.location.node == message.node
                self.copying.append(message)
            case FindStates():
                self.asked.append(message)
            case SetTimer(name=name) if name.startswith("states."):
                self.timers[name] = None
            case CancelTimer(name=name):
                self.timers.pop(name, None)

    def start(self, order):
        at = SlotRef(node=order.node, slot=order.slot)
        assert order.node in self.up
        assert not [each for each in self.processes.values() if each.slot == at and each.living], f"{at} is in use"
        assert order.worker not in self.processes, "a name used twice"
        self.processes[order.worker] = Process(order.worker, order.task, at, built=order.place, layout=order.layout)

    def end(self, process):
        process.living, process.place = False, None

    # --- what the cluster does ---------------------------------------------------------------------------------------

    def join(self, node, incarnation="x"):
        self.up.add(node)
        workers = []
        for each in self.processes.values():
            if each.slot.node == node and each.living:
                known = {"epoch": each.epoch, "iteration": each.epoch, "place": each.built, "layout": each.layout}
                told = {"worker": each.name, "task": each.task, "slot": each.slot.slot, "ready": each.ready}
                workers.append(WorkerStatus(**told, **known))
        kept = [name for at, name in (*self.kept, *self.saved) if at == node]
        slots = [Slot(index=index) for index in range(self.slots[node])]
        there = {"host": node, "rendezvous": f"{node}:1", "state_server": f"{node}:{incarnation}", "slots": slots}
        return self.tell(events.NodeAdmitted(node=node, incarnation=incarnation, workers=workers, kept=kept, **there))

    def plan(self, **slots):
        self.plans += 1
        shares = [
            TaskShare(task=task, slots=slots.get(task, []), layout=spec.shape(len(slots.get(task, []))))
            for task, spec in self.specs.items()
        ]
        return self.tell(events.PlanDecided(plan=Plan(number=self.plans, trigger="test", workers=9, shares=shares)))

    def settle(self, **slots):
        """Give tasks these slots, and let everything happen that follows."""
        out = self.plan(**slots)
        self.rest()
        return out

    def lose(self, node, *, alive=False):
        self.up.discard(node)
        for process in [each for each in self.processes.values() if each.slot.node == node]:
            if not alive:
                self.end(process)
        if not alive:
            self.kept = {key: task for key, task in self.kept.items() if key[0] != node}
            self.saved = {key: ref for key, ref in self.saved.items() if key[0] != node}
        self.savers = {key: each for key, each in self.savers.items() if key[1] != node}
        self.asked = [each for each in self.asked if each.node != node]
        self.copying = [each for each in self.copying if each.node != node]
        stopped = {name for name, each in self.processes.items() if each.slot.node == node and each.living}
        keep = {name: (self.processes[name].living, self.processes[name].place) for name in stopped}
        out = self.tell(failure(Severity.SEV1, node=node))
        for name, (living, place) in keep.items():  # the orders did not reach it
            self.processes[name].living, self.processes[name].place = living, place
        return out

    def report(self, name):
        """Report that a process died."""
        return self.tell(failure(Severity.SEV2, **self.processes[name].who))

    def kill(self, *names):
        """Let processes die one after the other, and report it."""
        out = []
        for name in names:
            self.end(self.processes[name])
            out += self.report(name)
        return out

    def step(self):
        """Let one thing happen that is under way; return whether there was any."""
        for process in self.processes.values():
            if process.living and not process.ready and process.slot.node in self.up:
                process.ready = True
                self.tell(events.WorkerReady(**process.who, pid=1))
                return True
        return self.found() or self.copy() or any(self.meet(task) for task in self.orders) or self.save() or self.fire()

    def found(self):
        """Let the next node that was asked report its states."""
        if not self.asked:
            return False
        asked = self.asked.pop(0)
        states = [ref for (node, _), ref in self.saved.items() if (node, ref.task) == (asked.node, asked.task)]
        self.tell(events.StatesFound(node=asked.node, task=asked.task, search=asked.search, states=states))
        return True

    def drain(self, node, *, drain=True):
        return self.tell(events.NodeDrained(node=node, drain=drain))

    def copy(self, problem=""):
        """Let the next copy that was ordered arrive where it is to lie, or not."""
        if not self.copying:
            return False
        order = self.copying.pop(0)
        ref, node = order.state, order.keeper.node
        lies, key = self.lies(ref), (node, ref.location.name)
        if lies and node in self.up and not problem:
            memory = self.kept if ref.location.name.endswith("kept") else self.saved
            memory[key] = ref.task if memory is self.kept else ref.at(node, order.keeper.address)
        problem = problem or ("" if lies and node in self.up else "it is gone")
        copy = ref.at(node, order.keeper.address)
        self.tell(events.StateCopied(node=order.node, task=order.task, state=copy, problem=problem))
        return True

    def save(self):
        """Let the next worker that is to save do so."""
        for (_, node), savers in self.savers.items():
            for name, entry in savers.items():
                process, (saver, epoch) = self.processes[name], entry
                if process.living and process.place is not None and process.epoch > epoch:
                    entry[1] = process.epoch
                    keepers = [keeper.node for keeper in saver.keepers]
                    self.write(process, node, keepers)
                    self.tell(events.StateSecured(**process.who, iteration=process.epoch, nodes=keepers))
                    return True
        return False

    def write(self, process, node, keepers):
        name = f"{process.name}.{process.epoch % 2}.saved"
        for each in [node, *(keeper for keeper in keepers if keeper in self.up)]:
            location = StateLocation(node=each, worker=process.name, name=name)
            told = {"iteration": process.epoch, "place": process.place, "layout": process.layout}
            self.saved[each, name] = StateRef(task=process.task, location=location, size=1, checksum=b"", **told)

    def fire(self):
        """End waits for nodes, when nothing else happens."""
        if not self.timers:
            return False
        self.tell(TimerFired(name=self.timers.popitem()[0]))
        return True

    def meet(self, task):
        """Let the members of the newest membership meet, if they can, and the next of them say so."""
        orders = self.orders[task]
        first = orders[0]
        ranks = {rank: m.worker for order in orders for rank, m in zip(order.ranks, order.members, strict=True)}
        assert sorted(ranks) == list(range(first.world_size))
        group = [self.processes[ranks[rank]] for rank in range(first.world_size)]
        if all(each.epoch >= first.epoch for each in group):  # who has met leaves by itself, whoever is lost then
            return first.leaving and self.leave(task, first, group)
        if not all(each.living and each.ready for each in group):
            return False
        if all(each.epoch < first.epoch for each in group):
            if not self.can_be_had(task):
                return False  # they say so, and wait
            self.exchange(task, first, group)
        rank = next(rank for rank, each in enumerate(group) if each.epoch < first.epoch)
        process = group[rank]
        process.epoch = first.epoch
        joined = {"epoch": first.epoch, "rank": rank, "world_size": len(group), "iteration": first.epoch}
        self.tell(events.Regrouped(**process.who, **joined))
        return True

    def leave(self, task, order, group):
        """Let the next worker that is to leave its state behind do so, and report it."""
        due = group[: order.layout.replica_workers * COPIES]
        process = next((each for each in due if each.living and each.left < order.epoch), None)
        if process is None:
            return False
        process.left, name = order.epoch, f"{process.name}.{order.epoch}.kept"
        self.kept[process.slot.node, name] = task
        location = StateLocation(node=process.slot.node, worker=process.name, name=name)
        ref = StateRef(task=task, iteration=order.epoch, place=process.place, location=location, size=1, checksum=b"")
        self.tell(events.StateKept(**process.who, epoch=order.epoch, state=ref))
        return True

    def exchange(self, task, order, group):
        """Hand states over: by place, and each replica is whole; or all take what others have left behind."""
        layout = order.layout
        assert layout.workers <= len(group)
        assert all(process.layout.is_like(layout) for process in group), "workers of several layouts"
        held = {process.place for process in group} - {None}
        shelf = next(each.shelf for each in self.orders[task] if 0 in each.ranks)
        if shelf is None and held:
            assert held == set(range(layout.replica_workers)), "a part of the state is missing"
        elif shelf is None and task in self.progress:
            there = [each for each in self.processes.values() if each.task == task and each.slot.node in self.up]
            others = [each.name for each in there if each.place is not None]
            assert not others, f"{task} begins anew though {others} has its state"
            assert not self.whole(task), f"{task} begins anew though {self.whole(task)} is saved"
            self.anew.add(task)
        for process in group:
            self.kept.pop((process.slot.node, f"{process.name}.{process.left}.kept"), None)
        self.progress.add(task)
        for rank, process in enumerate(group):
            place = layout.seat(rank).place if rank < layout.workers else process.built
            assert process.built == place, f"{process.name} was built for place {process.built}, not {place}"
            process.place = place

    def can_be_had(self, task):
        """Return whether each part of the state of the newest membership's command lies where it says."""
        shelf = next(each.shelf for each in self.orders[task] if 0 in each.ranks)
        there = {ref.place for ref in shelf.states if self.lies(ref)} if shelf else ()
        return shelf is None or shelf.stored is not None or len(there) == shelf.layout.replica_workers

    def lies(self, ref):
        """Return whether a state is where it is said to be."""
        key = (ref.location.node, ref.location.name)
        return key in self.kept or key in self.saved

    def whole(self, task):
        """Return the iterations of a task's state that are whole in the memories of nodes that are up."""
        found = {}
        for (node, _), ref in self.saved.items():
            if ref.task == task and node in self.up:
                found.setdefault((ref.iteration, ref.layout), set()).add(ref.place)
        return [iteration for (iteration, layout), places in found.items() if len(places) == layout.replica_workers]

    def rest(self):
        """Let everything happen that is under way."""
        for _ in range(2000):
            if not self.step():
                return
        raise AssertionError("it never comes to rest")

    # --- looking -----------------------------------------------------------------------------------------------------

    def run(self, task):
        return self.core.state.tasks[task]

    def group(self, task):
        return self.run(task).membership.group

    def places(self, task):
        return sorted(str(worker.slot) for worker in self.run(task).workers.values())


def spec(name, **fields):
    return TaskSpec(name=name, command=["python", "t.py"], **{"max_workers": 4, "microbatches": 8, **fields})
