"""Lost nodes are replaced in virtual time: the provisioner's core decides, and a provider gives each machine later.

A machine that replaces another gets the name of its node, as those of the provider `local` do: so what a trace does to
a node befalls whatever machine has its place.
"""

from collections.abc import Sequence
from functools import partial
from itertools import count

from msgspec.structs import replace
from unicron_provisioner.core import LOOK, STEADY_S, ProvisionerCore

from unicron.contracts.base import (
    Answer,
    MachineReport,
    MachinesListed,
    Message,
    ProviderAnswered,
    SetTimer,
    Started,
    TimerFired,
)
from unicron.contracts.events import FailureDetected, NodeAdmitted, TaskSubmitted
from unicron.contracts.failures import DetectionMethod, FailureStatus, Severity
from unicron.contracts.pools import Errand, Pool, Verb
from unicron.contracts.queries import GetPools
from unicron.contracts.tasks import Slot, TaskSpec
from unicron_simulator.policies.economy import PolicyCluster

EPOCH = 1e9
"""Unix seconds at which traces begin."""

POOL = "pool"
LOOKS = 50
"""Looks of the provisioner while a machine is to come; it would look each second."""


class VirtualPool:
    """A pool of machines that has all nodes of a cluster, and replaces those that it loses.

    Args:
        cluster: whose nodes they are.
        tasks: that it trains.
        spares: how many of its nodes no task needs.
        delivery_s: seconds from a request to the provider until the machine has joined.

    Attributes:
        given: machines that came.
    """

    def __init__(self, cluster: PolicyCluster, tasks: Sequence[TaskSpec], spares: int, delivery_s: float) -> None:
        self.given = 0
        self._cluster, self._delivery_s = cluster, delivery_s
        nodes = len(cluster.trace.nodes)
        pool = Pool(
            name=POOL,
            provider="virtual",
            max=nodes,
            spares=spares,
            slots=cluster.gpus,
            join_s=min(86400.0, 2 * delivery_s),
        )
        self._core = ProvisionerCore(None, [pool])
        self._there = {f"{POOL}-{node}": node for node in cluster.trace.nodes}
        self._coming: dict[str, str] = {}
        self._ids, self._looks = count(1), False
        self._inform(Started(token=1))
        for task in tasks:
            self._inform(TaskSubmitted(task=task.name, spec=task))
        for machine, node in self._there.items():
            self._admit(machine, node)
        self._inform(TimerFired(name=LOOK))
        self._serve()

    def lost(self, node: str) -> None:
        """Take in that a node was given up."""
        method, status = DetectionMethod.NODE_HEALTH, FailureStatus.LOST_CONNECTION
        self._inform_after_look(FailureDetected(severity=Severity.SEV1, method=method, status=status, node=node))

    def _admit(self, machine: str, node: str) -> None:
        slots = [Slot(index=index) for index in range(self._cluster.gpus)]
        joined = NodeAdmitted(node=node, incarnation=machine, host=node, slots=slots, machine=machine, pool=POOL)
        self._inform(joined)

    def _inform_after_look(self, fact: Message) -> None:
        """Inform the core, after a look: it goes by the clock of its last one."""
        self._inform(TimerFired(name=LOOK))
        self._inform(fact)
        self._serve()

    def _inform(self, message: Message) -> None:
        out = self._core.handle(replace(message, id=f"m{next(self._ids)}", at=EPOCH + self._cluster.ledger.at))
        waits = [each.after_s for each in out if isinstance(each, SetTimer)]
        if any(after_s < STEADY_S for after_s in waits) and not self._looks:
            self._looks = True
            self._cluster.later(self._cluster.ledger.at + self._delivery_s / LOOKS, self._look)

    def _look(self) -> None:
        self._looks = False
        self._inform(TimerFired(name=LOOK))
        self._serve()

    # --- the provider ------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Do all that the core wants of the provider."""
        while errands := self._errands():
            for errand in errands:
                self._inform(self._done(errand))

    def _errands(self) -> Sequence[Errand]:
        reply, _ = self._core.answer(GetPools())
        return reply.pools.errands if reply.pools else []

    def _done(self, errand: Errand) -> Message:
        if errand.verb is Verb.LIST:
            found = [MachineReport(machine=id_, state="running", node=node) for id_, node in self._there.items()]
            found += [MachineReport(machine=id_, state="coming", node=node) for id_, node in self._coming.items()]
            return MachinesListed(pool=POOL, errand=errand.number, machines=found)
        node = self._there.pop(errand.replaces or errand.machine, "")
        if errand.verb is not Verb.RELEASE:
            self._coming[errand.machine] = node
            self._cluster.later(self._cluster.ledger.at + self._delivery_s, partial(self._join, errand.machine))
        return ProviderAnswered(pool=POOL, errand=errand.number, answer=Answer.DONE)

    def _join(self, machine: str) -> None:
        self.given += 1
        node = self._there[machine] = self._coming.pop(machine)
        self._inform(TimerFired(name=LOOK))
        self._admit(machine, node)
        self._serve()
        self._cluster.back(node)
