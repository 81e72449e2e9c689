"""The costs of failures: a cluster runs through a trace under one policy; its tasks earn WAF (paper section 2.2).

Between two events nothing changes, so the weighted achieved FLOP/s (WAF) are added up in closed form. What is lost
against the cluster without failures is split as in equation 1: while a failure is undetected, while a task is in
transition, and the rest, sub-healthy: whole nodes missing, tasks that wait, plans that can't use what is left.
"""

import heapq
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import NamedTuple

import numpy as np
from unicron_planner import throughput

from unicron.contracts.tasks import TaskSpec
from unicron.errors import InvalidInputError
from unicron_simulator.policies.parameters import Costs
from unicron_simulator.policies.traces import FailureTrace, TracedFailure

ITERATION_S = 60.0
"""An iteration of a task that says nothing of its FLOPs: "typically within 1 minute" (table 2)."""


class TaskPhase(Enum):
    """The state of a task."""

    RUNNING = "running"
    DETECTION = "detection"
    TRANSITION = "transition"


class ClusterSample(NamedTuple):
    """How the cluster stands from a moment on.

    Attributes:
        at: seconds since the trace began.
        waf: weighted FLOP/s that are achieved.
        gpus: GPUs of nodes that are there.
    """

    at: float
    waf: float
    gpus: int


class Result(NamedTuple):
    """The result, in weighted FLOP.

    Attributes:
        policy: its name.
        earned: accumulated WAF.
        ideal: what would have been earned without any failure; the four others add up to it.
        detection, transition, sub_healthy: what was lost, by cause.
        samples: the course of time.
    """

    policy: str
    earned: float
    ideal: float
    detection: float
    transition: float
    sub_healthy: float
    samples: tuple[ClusterSample, ...]


class Tariff:
    """F(t, x) of one task: what it earns on x workers.

    Attributes:
        sizes: feasible numbers of workers, 0 the first.
        waf: weighted FLOP/s at each.
    """

    def __init__(self, spec: TaskSpec, most: int) -> None:
        known = throughput.estimate(spec, {}, min(most, spec.max_workers), 1.0)
        self.spec = spec
        self.sizes = np.concatenate([[0], known.sizes])
        self.waf = np.concatenate([[0.0], spec.weight * known.flops])

    def largest(self, workers: int) -> int:
        """Return the largest feasible size up to `workers`."""
        return int(self.sizes[np.searchsorted(self.sizes, workers, side="right") - 1])

    def at(self, size: int) -> float:
        """Return the WAF at a feasible size."""
        place = int(np.searchsorted(self.sizes, size))
        return float(self.waf[place]) if place < len(self.sizes) and self.sizes[place] == size else 0.0

    def iteration_s(self, size: int) -> float:
        """Return the seconds of an iteration at a feasible size."""
        flops = self.at(size) / self.spec.weight
        if not flops or self.spec.flops_per_iteration == throughput.UNKNOWN_FLOPS:
            return ITERATION_S
        return self.spec.flops_per_iteration / flops


def tariffs(tasks: Sequence[TaskSpec], most: int) -> dict[str, Tariff]:
    """Return the tariff of each task.

    Raises:
        InvalidInputError: two tasks have one name, or only of some the FLOP/s are known, so they can't be added up.
    """
    names = [task.name for task in tasks]
    for name in names:
        if names.count(name) > 1:
            raise InvalidInputError(f"two tasks are called {name!r}; give each its own name")
    unknown = [task.name for task in tasks if not throughput.has_known_flops(task, {})]
    if unknown and len(unknown) < len(tasks):
        raise InvalidInputError(f"task {unknown[0]}: its FLOP/s are unknown; give it `model` or `throughput`")
    return {task.name: Tariff(task, most) for task in tasks}


class EarningsLedger:
    """Adds up what tasks earn and lose.

    Args:
        ideal: WAF of the cluster without failures.
        gpus: all of them.
    """

    def __init__(self, ideal: float, gpus: int) -> None:
        self.at = 0.0
        self.gpus = gpus
        self._ideal = ideal
        self._tasks: dict[str, tuple[float, TaskPhase]] = {}
        self._sums = dict.fromkeys(TaskPhase, 0.0)
        self._rates = dict.fromkeys(TaskPhase, 0.0)
        self._lost = 0.0
        self.samples: list[ClusterSample] = []

    def advance(self, at: float) -> None:
        """Let time pass until `at`."""
        lasted = at - self.at
        if lasted <= 0:
            return
        sample = ClusterSample(self.at, self._rates[TaskPhase.RUNNING], self.gpus)
        if not self.samples or self.samples[-1][1:] != sample[1:]:
            self.samples.append(sample)
        for phase, rate in self._rates.items():
            self._sums[phase] += rate * lasted
        self._lost += (self._ideal - sum(self._rates.values())) * lasted
        self.at = at

    def put(self, task: str, rate: float, phase: TaskPhase) -> None:
        """Set what a task earns from now on, or what it would earn if it were not in this phase."""
        self._tasks[task] = rate, phase
        self._rates = dict.fromkeys(TaskPhase, 0.0)
        for each, what in self._tasks.values():
            self._rates[what] += each

    def rate(self, task: str) -> float:
        """Return what was last put for a task."""
        return self._tasks[task][0]

    def result(self, policy: str) -> Result:
        """Return the sums up to now."""
        ended = ClusterSample(self.at, self._rates[TaskPhase.RUNNING], self.gpus)
        earned, detection, transition = (self._sums[phase] for phase in TaskPhase)
        return Result(policy, earned, self._ideal * self.at, detection, transition, self._lost, (*self.samples, ended))


class PolicyCluster:
    """Runs a trace; subclasses say what a policy does.

    Args:
        trace: the failures.
        gpus: slots of each node.
        tariff: what each task earns.
        costs: of the policy.

    Attributes:
        replace: has another machine take the place of a node that is lost, and then calls `back`; None: nobody does,
            and the node is back after its repair.
    """

    def __init__(self, trace: FailureTrace, gpus: int, tariff: dict[str, Tariff], costs: Costs) -> None:
        self.trace = trace
        self.gpus = gpus
        self.tariff = tariff
        self.costs = costs
        self.out: set[str] = set()
        self.replace: Callable[[str], None] | None = None
        self._turns = dict.fromkeys(tariff, 0)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.ledger = EarningsLedger(0.0, 0)

    def run(self, policy: str) -> Result:
        """Run the trace to its end."""
        rates = self.start()
        self.ledger = EarningsLedger(sum(rates.values()), len(self.trace.nodes) * self.gpus)
        for task, rate in rates.items():
            self.ledger.put(task, rate, TaskPhase.RUNNING)
        for fault in self.trace.faults:
            self.later(fault.at, partial(self._strike, fault))
        while self._queue and self._queue[0][0] < self.trace.duration_s:
            at, _, action = heapq.heappop(self._queue)
            self.ledger.advance(at)
            action()
        self.ledger.advance(self.trace.duration_s)
        return self.ledger.result(policy)

    def later(self, at: float, action: Callable[[], None]) -> None:
        """Do something at a moment; of equal moments the first that was asked for is the first."""
        self._count += 1
        heapq.heappush(self._queue, (at, self._count, action))

    # --- what happens to tasks ---------------------------------------------------------------------------------------

    def _strike(self, fault: TracedFailure) -> None:
        if fault.node in self.out:
            return  # what is out can't fail
        if fault.kind != "sev1":
            task = self.worker_at(fault.node, int(fault.at) % self.gpus)
            if task:
                self._restart(task, fault.kind)
            return
        self.out.add(fault.node)
        self.ledger.gpus -= self.gpus
        detect_s = self.costs.detect["sev1"]
        for task in self.tasks_on(fault.node):
            self.enter(task, TaskPhase.DETECTION, self.ledger.rate(task))
        self.later(fault.at + detect_s, lambda: self.lost(fault.node))
        if self.replace:
            self.later(fault.at + detect_s, partial(self.replace, fault.node))
        else:
            self.later(fault.at + max(fault.repair_s, detect_s), lambda: self.back(fault.node))

    def back(self, node: str) -> None:
        """Have a node again."""
        self.out.discard(node)
        self.ledger.gpus += self.gpus
        self.joined(node)

    def _restart(self, task: str, kind: str) -> None:
        """Let a task pass through detection and transition; its workers stay."""
        rate = self.ledger.rate(task)
        if not rate:
            return  # it waits for a node
        waited = self.costs.detect_iterations.get(kind, 0.0) * self.tariff[task].iteration_s(self.size(task))
        turn = self.enter(task, TaskPhase.DETECTION, rate)

        def detected() -> None:
            if self._turns[task] == turn:
                self.noticed(task, kind)
                self.recover(task, rate, self.costs.recover[kind])

        self.later(self.ledger.at + self.costs.detect[kind] + waited, detected)

    def enter(self, task: str, phase: TaskPhase, rate: float) -> int:
        """Put a task into a phase; whatever was planned for it is void. Return the number of this turn."""
        self._turns[task] += 1
        self.ledger.put(task, rate, phase)
        return self._turns[task]

    def recover(self, task: str, rate: float, seconds: float) -> None:
        """Let a task run again at `rate` after `seconds`; 0 lets it wait."""
        if not rate:
            self.enter(task, TaskPhase.RUNNING, 0.0)
            return
        turn = self.enter(task, TaskPhase.TRANSITION, rate)

        def done() -> None:
            if self._turns[task] == turn:
                self.enter(task, TaskPhase.RUNNING, rate)
                self.recovered(task, seconds)

        self.later(self.ledger.at + seconds, done)

    # --- what policies say -------------------------------------------------------------------------------------------

    def start(self) -> dict[str, float]:
        """Place all tasks; return what each earns."""
        raise NotImplementedError

    def tasks_on(self, node: str) -> list[str]:
        """Return the tasks with workers on a node."""
        raise NotImplementedError

    def worker_at(self, node: str, slot: int) -> str:
        """Return the task that has a slot; empty where none has."""
        raise NotImplementedError

    def size(self, task: str) -> int:
        """Return how many workers compute for a task."""
        raise NotImplementedError

    def lost(self, node: str) -> None:
        """Answer a lost node, now that it is known."""
        raise NotImplementedError

    def joined(self, node: str) -> None:
        """Answer a node that is back."""
        raise NotImplementedError

    def noticed(self, task: str, kind: str) -> None:
        """Hear of a failure that leaves the node in use."""

    def recovered(self, task: str, seconds: float) -> None:
        """Hear that a task is through its transition."""
