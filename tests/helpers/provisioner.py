"""The provisioner's core with a clock, timers, and a provider that are played, and facts to give it."""

import itertools

import msgspec
from unicron_provisioner.core import ProvisionerCore

from unicron.contracts.base import (
    Answer,
    MachineReport,
    MachinesListed,
    ProviderAnswered,
    SetTimer,
    Started,
    TimerFired,
)
from unicron.contracts.events import (
    FailureDetected,
    MachineRetired,
    NodeAdmitted,
    NodeDrained,
    NodeGone,
    PlanDecided,
    TaskStateChanged,
    TaskSubmitted,
)
from unicron.contracts.failures import DetectionMethod, FailureStatus, Severity
from unicron.contracts.plans import Plan, TaskShare
from unicron.contracts.pools import Pool, Verb
from unicron.contracts.queries import GetPools
from unicron.contracts.tasks import Member, Slot, SlotRef, TaskSpec, TaskState

NOON = 1_784_894_400.0


def pool(name="gpu", **fields):
    return Pool(**{"name": name, "provider": "local", "max": 8, **fields})


class Yard:
    """A provisioner without a bus, and a provider of which a test says what it answers.

    Args:
        pools: their rules.

    Attributes:
        there: machines that the provider has: id -> node, empty while it has not joined.
        calls: that were made, as (verb, machine, replaces).
        answer: what the provider says to each request for a machine; `UNKNOWN` with `does` set may have done it.
        does: whether a request that is not answered was carried out.
        lists: whether it answers lists.
        broken: whether machines that were asked for end before they join.
        joins: whether machines join as soon as they are asked for.
    """

    def __init__(self, *pools):
        self.pools = pools or (pool(),)
        self.now, self.timers, self.said, self.calls, self.there = NOON, {}, [], [], {}
        self.answer, self.reason, self.does, self.lists, self.joins = Answer.DONE, "it says no", True, True, True
        self.broken = False
        self._ids, self._plans = itertools.count(), itertools.count(1)
        self._shares, self.number = {}, itertools.count(1)
        self.core = ProvisionerCore(None, self.pools)
        self.start()
        self.wait(2)

    def start(self):
        """Begin as another instance does, with what the one before has committed."""
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(self.core.state), type=type(self.core.state))
        self.core = ProvisionerCore(state, self.pools)
        self._take(Started(token=1))

    def _take(self, message):
        out = self.core.handle(msgspec.structs.replace(message, id=f"m{next(self._ids)}", at=self.now))
        assert self.core.validate() == []
        for each in out:
            if isinstance(each, SetTimer):
                self.timers[each.name] = self.now + each.after_s
            else:
                self.said.append(each)
                if isinstance(each, MachineRetired) and each.node and not each.planned:  # as the registry does
                    self._take(NodeDrained(node=each.node))

    def say(self, *facts):
        """Let facts come in, and the provider do what follows."""
        for fact in facts:
            self._take(fact)
        self.work()

    def wait(self, seconds):
        """Let time pass."""
        end = self.now + seconds
        while self.timers and min(self.timers.values()) <= end:
            name = min(self.timers, key=self.timers.get)
            self.now = max(self.now, self.timers.pop(name))
            self._take(TimerFired(name=name))
            self.work()
        self.now = end

    def work(self):
        """Let the provider answer all that it is asked."""
        while errands := self.core.answer(GetPools())[0].pools.errands:
            for errand in errands:
                self._do(errand)

    def _do(self, errand):
        common = {"pool": errand.pool, "errand": errand.number}
        if errand.verb is Verb.LIST:
            mine = [
                MachineReport(
                    machine=id_,
                    state="ended" if self.broken else "running",
                    node=node,
                    reason="its disk is full" * self.broken,
                )
                for id_, node in self.there.items()
                if id_.startswith(errand.pool)
            ]
            problem = "" if self.lists else "it hangs"
            self._take(MachinesListed(**common, machines=mine * self.lists, problem=problem))
            return
        self.calls.append((str(errand.verb), errand.machine, errand.replaces))
        asks = errand.verb is not Verb.RELEASE
        if not asks or errand.verb is Verb.REPLACE:
            self.there.pop(errand.replaces or errand.machine, None)
        answer = self.answer if asks else Answer.DONE
        taken = asks and (answer is Answer.DONE or (answer is Answer.UNKNOWN and self.does))
        new = taken and errand.machine not in self.there
        if new:
            self.there[errand.machine] = ""
        self._take(ProviderAnswered(**common, answer=answer, reason="" if answer is Answer.DONE else self.reason))
        if new and self.joins:
            self.join(errand.machine)

    # --- facts -------------------------------------------------------------------------------------------------------

    def join(self, machine="", node="", pool_name="gpu", rack="", slots=1):
        """Let a machine join, or a node that a person has started."""
        node = node or f"n{next(self.number)}"
        if machine:
            self.there[machine], pool_name = node, machine.rpartition("-")[0]
        taken = [Slot(index=index) for index in range(slots)]
        self._take(
            NodeAdmitted(
                node=node, incarnation=f"{node}-1", host=node, slots=taken, machine=machine, pool=pool_name, rack=rack
            )
        )
        return node

    def submit(self, task="gpt", most=4):
        self.say(TaskSubmitted(task=task, spec=TaskSpec(name=task, command=["x"], max_workers=most)))

    def place(self, task, *nodes):
        """Let a plan put a task on nodes, and the task compute there."""
        self._shares[task] = TaskShare(task=task, slots=[SlotRef(node=node, slot=0) for node in nodes])
        plan = Plan(number=next(self._plans), trigger="x", workers=1, shares=list(self._shares.values()))
        members = [Member(worker=f"{task}-{node}", node=node, slot=0) for node in nodes]
        self.say(PlanDecided(plan=plan), TaskStateChanged(task=task, state=TaskState.RUNNING, members=members))

    def lose(self, *nodes):
        self.say(*map(lost, nodes))

    def leave(self, node):
        self.say(NodeGone(node=node))

    # --- what is to be seen ------------------------------------------------------------------------------------------

    @property
    def view(self):
        return self.core.answer(GetPools())[0].pools.pools[0]

    @property
    def nodes(self):
        """The nodes that the first pool has."""
        return self.core.state.serving(self.pools[0].name)

    def heard(self, kind):
        """Return what was said of a kind."""
        return [each for each in self.said if isinstance(each, kind)]

    def made(self, verb):
        """Return the machines about which a call was made."""
        return [machine for each, machine, _ in self.calls if each == verb]


def lost(node, severity=Severity.SEV1):
    return FailureDetected(
        severity=severity, method=DetectionMethod.NODE_HEALTH, status=FailureStatus.LOST_CONNECTION, node=node
    )
