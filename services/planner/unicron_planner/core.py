"""The planner's decisions: after each event that changes the cluster, which task gets which slots (paper section 5).

The answer is read from the lookup table where the event was foreseen, and computed where not. The table for the next
events is made after the plan has gone out: the core asks for a timer that is due at once.
"""

import math
from collections import Counter
from itertools import takewhile

import numpy as np
from msgspec.structs import replace

from unicron.contracts.base import Message, Record, SetTimer, TimerFired
from unicron.contracts.checks import check_task
from unicron.contracts.events import (
    FailureDetected,
    IterationFinished,
    NodeAdmitted,
    NodeDrained,
    NodeGone,
    PlanDecided,
    Severity,
    TaskBroken,
    TaskRemoved,
    TaskStateChanged,
    TaskSubmitted,
)
from unicron.contracts.queries import GetPlan, PlanView, Query, Reply, TableRow
from unicron.contracts.tasks import TaskState
from unicron_planner import lookup, throughput
from unicron_planner.lookup import Event, Situation, Standing
from unicron_planner.plans import differs, make_plan, slots_of
from unicron_planner.program import Floats
from unicron_planner.state import Node, PlannerState, Row
from unicron_planner.throughput import Measured

REFRESH = SetTimer(name="refresh", after_s=0.0)
JOINED = "node_joined"

DRIFT = 0.05
"""Change of a measured iteration time, as a part of it, after which the table is made again."""


class Options(Record, kw_only=True, frozen=True):
    """What an administrator can set.

    Attributes:
        transition_s: D_transition of equation 3: seconds in which a task that is reconfigured earns nothing.
        prior_failures: sev1 failures that were seen before this cluster, the shape of the Gamma prior.
        prior_worker_s: worker-seconds in which they were seen, its rate. By default three a week among 128 workers
            (paper section 2.2: one to seven).
        use_measured: whether measured iteration times outrank the tables of users. Where workers share processor
            cores, one more of them seems to bring nothing, and the measurements are better left out.
    """

    transition_s: float = 5.0
    prior_failures: float = 1.0
    prior_worker_s: float = 128 * 7 * 86400 / 3
    use_measured: bool = True


class Planner:
    """Keeps the plan optimal, and the next ones ready."""

    def __init__(self, state: PlannerState | None = None, options: Options | None = None) -> None:
        self.state = state or PlannerState()
        self._options = options or Options()

    def handle(self, message: Message) -> list[Message]:
        """Take a fact, a piece of telemetry or a timer in; return what follows from it.

        Raises:
            InvalidInputError: a task was submitted that can't be planned for; nothing was changed.
        """
        match message:
            case IterationFinished():
                return self._measure(message)
            case TimerFired():
                self._refresh()
                return []
        self._count_time(message.at)
        return self._on_node(message) or self._on_task(message)

    def answer(self, query: Query) -> tuple[Reply, list[Message]]:
        """Return the current plan and the lookup table."""
        if not isinstance(query, GetPlan):
            return Reply(error=f"the planner does not answer {type(query).__name__}; it answers GetPlan"), []
        if not self.state.table:
            self._refresh()
        rows = [
            TableRow(event=row.event, workers=row.workers, sizes=row.sizes, reward=row.reward)
            for row in self.state.table.values()
        ]
        return Reply(plan=PlanView(plan=self.state.plan, table=rows)), []

    # --- nodes -------------------------------------------------------------------------------------------------------

    def _on_node(self, message: Message) -> list[Message]:
        match message:
            case NodeAdmitted():
                return self._admit(message)
            case NodeDrained():
                return self._drain(message)
            case NodeGone(node=node) if self._is_up(node):
                self.state.nodes[node] = replace(self.state.nodes[node], up=False)
                return self._decide(f"node_left:{node}", f"node_lost:{node}")
            case FailureDetected(severity=Severity.SEV1, node=node):
                return self._lose(node)
        return []

    def _admit(self, admitted: NodeAdmitted) -> list[Message]:
        name, node = admitted.node, Node(slots=[slot.index for slot in admitted.slots])
        if self.state.nodes.get(name) == node:
            return []  # its agent was started again
        foreseen = not self._is_up(name)
        self.state.nodes[name] = node
        return self._decide(f"{JOINED}:{name}", JOINED if foreseen else "")

    def _drain(self, message: NodeDrained) -> list[Message]:
        name, drain = message.node, message.drain
        if drain == (name in self.state.drained):
            return []
        (self.state.drained.append if drain else self.state.drained.remove)(name)
        if not self._is_up(name):
            return []
        if drain:
            return self._decide(f"node_drained:{name}", f"node_lost:{name}")
        return self._decide(f"node_undrained:{name}", JOINED)

    def _lose(self, name: str) -> list[Message]:
        """Take a node out of use; whoever cures the failure waits for an answer, even if nothing changes."""
        was_up = self._is_up(name)
        if was_up:
            self.state.nodes[name] = replace(self.state.nodes[name], up=False)
        event = f"node_lost:{name}"
        out = self._decide(event, event, owed=True)
        self.state.failures += was_up  # only now, so that a prepared and a computed answer come from the same rate
        return out

    def _is_up(self, name: str) -> bool:
        return name in self.state.nodes and self.state.nodes[name].up

    def _usable(self) -> dict[str, list[int]]:
        drained = self.state.drained
        return {name: node.slots for name, node in self.state.nodes.items() if node.up and name not in drained}

    # --- tasks -------------------------------------------------------------------------------------------------------

    def _on_task(self, message: Message) -> list[Message]:
        match message:
            case TaskSubmitted():
                return self._submit(message)
            case TaskRemoved(task=task) if task in self.state.tasks:
                self.state.leaving.append(task)
                return self._end(task, "removed")
            case TaskStateChanged(task=task, state=TaskState.REMOVED) if task in self.state.leaving:
                self.state.leaving.remove(task)  # by now the name may be another task's
            case TaskBroken(task=task):
                return self._end(task, "failed")
            case TaskStateChanged(task=task, state=state) if state.ended:
                return self._end(task, state.value)
        return []

    def _submit(self, submitted: TaskSubmitted) -> list[Message]:
        check_task(submitted.spec)
        if self.state.tasks.get(submitted.task) == submitted.spec:
            return []
        self._forget(submitted.task)
        self.state.tasks[submitted.task] = submitted.spec
        return self._decide(f"task_submitted:{submitted.task}")

    def _end(self, task: str, how: str) -> list[Message]:
        if task not in self.state.tasks:
            return []
        del self.state.tasks[task]
        self._forget(task)
        return self._decide(f"task_{how}:{task}", f"task_finished:{task}")

    def _forget(self, task: str) -> None:
        self.state.measured.pop(task, None)
        self.state.epochs.pop(task, None)

    def _measure(self, done: IterationFinished) -> list[Message]:
        """Add an iteration's time to the sums; ask for a new table where it changes what is believed."""
        spec = self.state.tasks.get(done.task)
        sound = math.isfinite(done.seconds) and done.seconds > 0
        if spec is None or not sound or not 1 <= done.world_size <= spec.max_workers or not self._options.use_measured:
            return []
        if self.state.epochs.get(done.task) != done.epoch:
            self.state.epochs[done.task] = done.epoch
            return []  # the first iteration of a membership holds its start, or the cure of a failure
        by_size = self.state.measured.setdefault(done.task, {})
        now = by_size[done.world_size] = throughput.added(by_size.get(done.world_size, Measured()), done.seconds)
        moved = abs(now.mean_s - now.believed_s) > DRIFT * max(now.mean_s, now.believed_s)
        return [REFRESH] if moved else []

    # --- plans -------------------------------------------------------------------------------------------------------

    def _decide(self, trigger: str, event: str = "", *, owed: bool = False) -> list[Message]:
        """Answer a change of the cluster; `event` is its name in the lookup table.

        A plan that says nothing new is not sent, unless somebody is `owed` an answer.
        """
        usable = self._usable()
        workers = sum(map(len, usable.values()))
        ready = self.state.table.get(event)
        prepared = ready is not None and ready.workers == workers
        row = ready if ready is not None and prepared else self._compute(workers, usable)
        nominal = self._nominal()
        waf = {task: float(self._earns(task, [size], nominal)[0]) for task, size in row.sizes.items()}
        plan = make_plan(replace(row, event=trigger), self.state.plan, self.state.tasks, usable, waf)
        plan = replace(plan, prepared=prepared)
        said = owed or differs(plan, self.state.plan)
        if said:
            self.state.plan = plan
        self.state.table = {}
        return [PlanDecided(plan=plan), REFRESH] if said else [REFRESH]

    def _compute(self, workers: int, usable: dict[str, list[int]]) -> Row:
        held = slots_of(self.state.plan)
        lost = {task: sum(slot.slot not in usable.get(slot.node, ()) for slot in slots) for task, slots in held.items()}
        return lookup.answer(self._situation(), Event("", workers, lost))

    def _refresh(self) -> None:
        """Make the lookup table for the cluster as it is."""
        self.state.table = lookup.table(self._situation(), self._next_events())
        for by_size in self.state.measured.values():
            for size, one in by_size.items():
                by_size[size] = replace(one, believed_s=one.mean_s)

    def _next_events(self) -> list[Event]:
        usable = self._usable()
        workers = sum(map(len, usable.values()))
        held = {task: slots for task, slots in slots_of(self.state.plan).items() if task in self.state.tasks}
        on: dict[str, Counter[str]] = {}
        for task, slots in held.items():
            for slot in slots:
                on.setdefault(slot.node, Counter())[task] += 1
        events = [Event(f"node_lost:{name}", workers - len(slots), on.get(name, {})) for name, slots in usable.items()]
        if self.state.nodes:
            counts = Counter(len(node.slots) for node in self.state.nodes.values())
            usual = max(counts, key=lambda size: (counts[size], size))
            events.append(Event(JOINED, workers + usual))
        for task in self.state.tasks:
            if held.get(task):
                events.append(Event(f"task_finished:{task}", workers, ended=task))
            else:
                events.append(Event(f"task_launched:{task}", workers, launched=task))
        return events

    # --- what the program needs to know ------------------------------------------------------------------------------

    def _situation(self) -> Situation:
        held, standings = slots_of(self.state.plan), {}
        counts = [len(node.slots) for node in self.state.nodes.values()]
        most = sum(counts) + max(counts, default=0)  # all nodes that were ever here, and one more
        nominal = self._nominal()
        for task, spec in self.state.tasks.items():
            has = len(held.get(task, ()))
            sizes = [0, *takewhile(lambda size: size <= most, spec.sizes)]
            standings[task] = Standing(
                sizes=np.array(sizes, np.int64),
                waf=self._earns(task, sizes, nominal),
                held=has,
                held_waf=float(self._earns(task, [has], nominal)[0]),
            )
        options = self._options
        return Situation(
            tasks=standings,
            # the mean of the posterior Gamma distribution
            failure_rate=(options.prior_failures + self.state.failures)
            / (options.prior_worker_s + self.state.worker_seconds),
            transition_s=options.transition_s,
        )

    def _earns(self, task: str, sizes: list[int], nominal: float) -> Floats:
        """Return F(t, x) of equation 2 for feasible sizes."""
        spec, measured = self.state.tasks[task], self.state.measured.get(task, {})
        return spec.weight * throughput.rates(spec, measured, np.array(sizes, np.int64), nominal)

    def _nominal(self) -> float:
        """Return the FLOP/s per worker to assume where nothing is known: the median of what the known tasks achieve."""
        found = []
        for task, spec in self.state.tasks.items():
            measured = self.state.measured.get(task, {})
            if throughput.known(spec, measured):
                least = np.array(spec.sizes[:1], np.int64)
                found.append(throughput.rates(spec, measured, least, 1.0)[0] / least[0])
        return float(np.median(found)) if found else 1.0

    def _count_time(self, at: float) -> None:
        """Add the time since the last fact to the workers' exposure to failure."""
        if not math.isfinite(at) or at <= self.state.clock:
            return
        if self.state.clock:
            self.state.worker_seconds += (at - self.state.clock) * sum(map(len, self._usable().values()))
        self.state.clock = at
