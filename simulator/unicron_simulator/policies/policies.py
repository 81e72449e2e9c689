"""The policies: Unicron with its real planner, systems that repair only who was hit, and an oracle."""

import math
from collections import Counter
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from unicron_planner import program
from unicron_planner.core import ADMISSIONS, REFRESH, PlannerCore
from unicron_planner.estimates import PlannerOptions
from unicron_planner.state import AdmittedNode, PlannerState

from unicron.contracts.base import Message, TimerFired
from unicron.contracts.events import FailureDetected, NodeAdmitted, PlanDecided, TaskRecovered, TaskSubmitted
from unicron.contracts.failures import DetectionMethod, FailureStatus, Severity
from unicron.contracts.plans import Plan
from unicron.contracts.tasks import Slot, SlotRef
from unicron_simulator.policies.economy import EarningsLedger, PolicyCluster, Result, Tariff, TaskPhase
from unicron_simulator.policies.parameters import Costs
from unicron_simulator.policies.traces import FailureTrace

EPOCH = 1e9
"""Unix seconds at which traces begin; for the planner, 0 means that no time is known."""


class Unicron(PolicyCluster):
    """The planner core decides; this moves the tasks as it says.

    Args:
        refresh_every_s: least seconds between two lookup tables, infinite for none. Without a table, plans are computed
            when they are needed. With it, the planner also brings up to date what it believes.
        options: of the planner; by default it expects a transition to take as long as it does.

    Attributes:
        plans: all that the planner decided.
        hits: for each plan, the tasks that lost workers.
    """

    def __init__(
        self,
        trace: FailureTrace,
        gpus: int,
        tariff: dict[str, Tariff],
        costs: Costs,
        refresh_every_s: float = 0.0,
        options: PlannerOptions | None = None,
    ) -> None:
        super().__init__(trace, gpus, tariff, costs)
        self.plans: list[Plan] = []
        self.hits: list[set[str]] = []
        self._slots: dict[str, list[SlotRef]] = {task: [] for task in tariff}
        self._hit: set[str] = set()
        self._every_s = refresh_every_s
        self._refreshed = 0.0
        self._asked = False
        nodes = {name: AdmittedNode(slots=list(range(gpus))) for name in trace.nodes}
        specs = {task: one.spec for task, one in list(tariff.items())[:-1]}
        options = options or PlannerOptions(transition_s=costs.recover["sev1"])
        self._planner = PlannerCore(PlannerState(nodes=nodes, tasks=specs), options)

    def start(self) -> dict[str, float]:
        """Submit the last task to a planner that knows the nodes and the others: all are planned at once."""
        task, one = list(self.tariff.items())[-1]
        for plan in self._inform_planner(TaskSubmitted(task=task, spec=one.spec)):
            self._adopt(plan)
        return {task: self.tariff[task].at(len(slots)) for task, slots in self._slots.items()}

    def tasks_on(self, node: str) -> list[str]:
        """Return the tasks with workers on a node."""
        return [task for task, slots in self._slots.items() if any(slot.node == node for slot in slots)]

    def worker_at(self, node: str, slot: int) -> str:
        """Return the task that has a slot; empty where none has."""
        place = SlotRef(node=node, slot=slot)
        return next((task for task, slots in self._slots.items() if place in slots), "")

    def size(self, task: str) -> int:
        """Return how many workers a task has."""
        return len(self._slots[task])

    def lost(self, node: str) -> None:
        """Inform the planner, and apply its plan."""
        self._hit = set(self.tasks_on(node))
        method, status = DetectionMethod.NODE_HEALTH, FailureStatus.LOST_CONNECTION
        lost = FailureDetected(severity=Severity.SEV1, method=method, status=status, node=node)
        self._change(lost)

    def joined(self, node: str) -> None:
        """Inform the planner, and apply its plan."""
        self._hit = set()
        slots = [Slot(index=index) for index in range(self.gpus)]
        self._change(NodeAdmitted(node=node, incarnation=f"{self.ledger.at}", host="", slots=slots))

    def noticed(self, task: str, kind: str) -> None:
        """Inform the planner that a task is disturbed; it changes no plan."""
        method, status = DetectionMethod.PROCESS_SUPERVISION, FailureStatus.EXITED_ABNORMALLY
        self._inform_planner(FailureDetected(severity=Severity(int(kind[-1])), method=method, status=status, task=task))

    def recovered(self, task: str, seconds: float) -> None:
        """Inform the planner how long it took, which is its next estimate of D_transition."""
        self._inform_planner(TaskRecovered(task=task, epoch=0, workers=self.size(task), seconds=seconds))

    def _change(self, message: Message) -> None:
        for plan in self._inform_planner(message):
            for task in self._adopt(plan):
                seconds = self.costs.recover["sev1" if task in self._hit else "resize"]
                self.recover(task, self.tariff[task].at(self.size(task)), seconds)

    def _adopt(self, plan: Plan) -> list[str]:
        """Take a plan over; return the tasks that it changes."""
        plan = plan.whole(self.plans[-1] if self.plans else None)
        self.plans.append(plan)
        self.hits.append(self._hit)
        changed = [share.task for share in plan.shares if share.slots != self._slots[share.task]]
        self._slots |= {share.task: share.slots for share in plan.shares}
        return changed

    def _inform_planner(self, message: Message) -> list[Plan]:
        at = EPOCH + self.ledger.at
        out = self._planner.handle(replace(message, at=at))
        if ADMISSIONS in out:  # days go by here: a moment is nothing
            out += self._planner.handle(TimerFired(name=ADMISSIONS.name, at=at))
        if REFRESH in out and not self._asked and math.isfinite(self._every_s):
            self._asked = True
            self.later(max(self.ledger.at, self._refreshed + self._every_s), self._refresh)
        return [each.plan for each in out if isinstance(each, PlanDecided)]

    def _refresh(self) -> None:
        self._asked, self._refreshed = False, self.ledger.at
        self._planner.handle(TimerFired(name="refresh", at=EPOCH + self.ledger.at))


class TaskHolding:
    """A task of a system that knows nothing of the others.

    Attributes:
        workers: by node.
        owed: workers it lost and did not get back.
        size: how many of its workers compute.
    """

    def __init__(self) -> None:
        self.workers: Counter[str] = Counter()
        self.owed = 0
        self.size = 0


class RepairHit(PolicyCluster):
    """Only the task that was hit is reconfigured; a node that is back goes to the first one that was hit (section 7.5).

    Its tasks begin with Unicron's sizes, on as few nodes as will hold them: that is best for them, since a lost node
    then hits few. Megatron waits until it has all of its workers; a system that shrinks goes on with the largest
    feasible size.
    """

    def __init__(
        self, trace: FailureTrace, gpus: int, tariff: dict[str, Tariff], costs: Costs, sizes: dict[str, int]
    ) -> None:
        super().__init__(trace, gpus, tariff, costs)
        self._holdings = {task: TaskHolding() for task in tariff}
        self._sizes = sizes
        self._free: Counter[str] = Counter(dict.fromkeys(trace.nodes, gpus))
        self._waiting: list[str] = []

    def start(self) -> dict[str, float]:
        """Fill node after node, the largest task first."""
        for task in sorted(self._holdings, key=lambda task: -self._sizes[task]):
            self._holdings[task].owed = self._sizes[task]
            self._supply(task)
            self._holdings[task].size = self._sizes[task]
        return {task: self._rate(task) for task in self._holdings}

    def tasks_on(self, node: str) -> list[str]:
        """Return the tasks with workers on a node."""
        return [task for task, held in self._holdings.items() if held.workers[node]]

    def worker_at(self, node: str, slot: int) -> str:
        """Return the task that has a slot; empty where none has."""
        for task, held in self._holdings.items():
            if slot < held.workers[node]:
                return task
            slot -= held.workers[node]
        return ""

    def size(self, task: str) -> int:
        """Return how many workers compute for a task."""
        return self._holdings[task].size

    def _rate(self, task: str) -> float:
        return self.costs.efficiency * self.tariff[task].at(self._holdings[task].size)

    def lost(self, node: str) -> None:
        """Take the node's workers from their tasks; a task that lost some shrinks or waits."""
        self._free.pop(node, None)
        for task in self.tasks_on(node):
            held = self._holdings[task]
            held.owed += held.workers.pop(node)
            held.size = 0
            if task not in self._waiting:
                self._waiting.append(task)
            self._supply(task)
            self._resize(task, "sev1")

    def joined(self, node: str) -> None:
        """Give the node's workers to the tasks that were hit, in that order."""
        self._free[node] = self.gpus
        for task in list(self._waiting):
            if self._supply(task):
                self._resize(task, "sev1")

    def _supply(self, task: str) -> int:
        """Give a task free workers up to what it is owed; return how many."""
        held, given = self._holdings[task], 0
        while held.owed and self._free:
            node = next(iter(self._free))
            count = min(held.owed, self._free[node])
            held.workers[node] += count
            held.owed -= count
            given += count
            self._free[node] -= count
            if not self._free[node]:
                del self._free[node]
        if not held.owed and task in self._waiting:
            self._waiting.remove(task)
        return given

    def _resize(self, task: str, kind: str) -> None:
        """Let a task compute on what it has; nothing happens where that brings it nothing."""
        held = self._holdings[task]
        has = held.workers.total()
        size = self._sizes[task] if not held.owed else self.tariff[task].largest(has) if self.costs.shrinks else 0
        if size != held.size or not size:
            held.size = size
            self.recover(task, self._rate(task), self.costs.recover[kind])


class Best(NamedTuple):
    """The tasks as the dynamic program wants them."""

    tasks: program.Tasks
    tariff: dict[str, Tariff]

    def waf(self, workers: int) -> float:
        """Return the most that all tasks can earn on so many workers."""
        scores = program.score(self.tasks, workers, running_s=1.0, resize_s=0.0, failure_s=0.0)
        sizes = program.solve(scores, np.zeros(len(self.tariff)), workers)
        if sizes is None:
            return 0.0
        return sum(one.at(int(size)) for one, size in zip(self.tariff.values(), sizes, strict=True))


def oracle(trace: FailureTrace, gpus: int, tariff: dict[str, Tariff]) -> Result:
    """Return what nobody can beat: the optimal plan for the nodes that are there, at any moment, at no cost.

    Knowing all failures ahead, it has moved everything before they come; so only the missing nodes cost it anything.
    """
    ones = list(tariff.values())
    nothing = [0] * len(ones)
    packed = program.pack([one.sizes for one in ones], [one.waf for one in ones], nothing, [0.0] * len(ones))
    best, known = Best(packed, tariff), dict[int, float]()
    changes: list[tuple[float, int]] = []
    back = dict.fromkeys(trace.nodes, 0.0)
    for fault in trace.faults:
        if fault.kind == "sev1" and back[fault.node] <= fault.at:
            back[fault.node] = fault.at + fault.repair_s
            changes += [(fault.at, -gpus), (back[fault.node], gpus)]
    workers = len(trace.nodes) * gpus
    known[workers] = best.waf(workers)
    ledger = EarningsLedger(known[workers], workers)
    ledger.put("all", known[workers], TaskPhase.RUNNING)
    for at, change in sorted(changes):
        if at < trace.duration_s:
            ledger.advance(at)
            ledger.gpus += change
            if ledger.gpus not in known:
                known[ledger.gpus] = best.waf(ledger.gpus)
            ledger.put("all", known[ledger.gpus], TaskPhase.RUNNING)
    ledger.advance(trace.duration_s)
    return ledger.result("oracle")
