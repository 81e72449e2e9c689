"""The present picture of a cluster, folded from journal and telemetry: one message in, the picture changed. Pure.

The same messages always give the same picture; so each instance reads the journal from its beginning, and instances
need not know of one another. What the journal no longer keeps comes from the registry's status (`ClusterPicture.fill`).
"""

import heapq
from collections import deque

from msgspec.structs import replace

from unicron.contracts import events, hardware, slowdowns, stragglers
from unicron.contracts.answers import Status
from unicron.contracts.base import Message
from unicron.contracts.failures import Severity
from unicron.contracts.plans import Plan
from unicron.contracts.tasks import NodeState, TaskSpec, TaskState
from unicron.observe.accounts.goodput import Goodput
from unicron.observe.incidents import FAILURES, chain_of
from unicron.observe.state import EARLIER, EVENTS, JournalLine, NodePicture, TaskPicture, ThinnedSeries
from unicron.observe.stories import Stories, entry_of
from unicron.observe.words.ranks import RankNames

RANKED = (events.WorkerExited, events.WorkerRaised, events.WorkerStalled, events.FailureDetected)
"""Messages about a worker that has failed, of which the rank is shown."""

TELEMETRY: tuple[type[Message], ...] = (events.IterationFinished, hardware.GpusSampled, slowdowns.ComputeTimed)
"""Telemetry that is subscribed to beside the journal."""

CHANGES: tuple[type[Message], ...] = (
    events.FailureDetected,
    events.NodeAdmitted,
    events.NodeSuspected,
    events.NodeDrained,
    events.NodeLeft,
    events.NodeLeaving,
    events.NodeGone,
    events.PlanDecided,
    events.TaskSubmitted,
    events.TaskStateChanged,
    events.TaskRecovered,
    events.TaskRemoved,
    events.TaskPaused,
    events.TaskRewound,
    events.TaskBroken,
    events.CheckpointOrdered,
    events.CheckpointStored,
    events.CheckpointFailed,
    events.StateDiverged,
    events.StateUnusable,
    events.ScriptDrilled,
    events.StandbyDied,
    events.StandbyRevived,
    events.NodeEnrolled,
    events.EnrolmentRefused,
    events.OrderTaken,
    events.ObserveOnlySwitched,
    events.OrdersWithheld,
    events.Alert,
    events.DeadLetter,
    hardware.FaultLogged,
    slowdowns.SlowdownDetected,
    slowdowns.SlowdownEnded,
    stragglers.StragglerDetected,
)
"""Messages that a person sees as they happen."""

REMEMBERED = 200
"""Tasks that have ended whose losses are kept for the next one of their name."""

SAMPLE_S = 10.0
"""Between two points of the goodput's course at first; twice that whenever they become too many."""

SLOTS_A_SAMPLE = 2000
"""For each so many slots another `SAMPLE_S`: a sample looks at all of them."""


class ClusterPicture:
    """The picture of a cluster.

    Attributes:
        position: of the journal up to which it is right.
        events: what changed, oldest first, with the node and the task that it is about.
        failures: by chain, oldest first; `stories` of the newest of them.
        healed: chains of failures that are over since somebody emptied it.
        observe_only: whether the cluster only says what it would do by itself.
        changed: kinds and names of what changed since somebody emptied it: "node", "task", "failure", "plan", "event".
    """

    def __init__(self) -> None:
        self.position = 0
        self.now = 0.0
        self.names = RankNames()
        self.observe_only = False
        self.goodput = Goodput()
        self.nodes: dict[str, NodePicture] = {}
        self.tasks: dict[str, TaskPicture] = {}
        self.plan: Plan | None = None
        self.events: deque[tuple[JournalLine, str, str]] = deque(maxlen=EVENTS)
        self.failures, self.stories = self.goodput.incidents.failures, Stories()
        self.healed: deque[str] = deque(maxlen=FAILURES)
        self.course = ThinnedSeries(3)
        self.changed: set[tuple[str, str]] = set()
        self._numbers = self._most_colours = 0
        self._earlier: dict[str, list[ThinnedSeries]] = {}
        self._colours: list[int] = []  # that were of tasks which have ended, a heap
        self._next_sample = 0.0

    # --- in ----------------------------------------------------------------------------------------------------------

    def handle(self, position: int, message: Message) -> None:
        """Take in a message of the journal; one that is known already changes nothing."""
        if position <= self.position:
            return
        self.position = position
        self.now = max(self.now, message.at)
        was_open = self._is_open(chain_of(message))
        hit = self.goodput.hit_by(message) if isinstance(message, events.FailureDetected) else set()
        self.goodput.handle(message)
        self.names.observe(message)
        entry = entry_of(position, message)
        self._add(message, replace(entry, text=self.names.explain(entry.text)), is_open=was_open)
        if isinstance(message, events.FailureDetected):
            self._failed(message, hit)
        self._change(message)
        for each in self.goodput.incidents.changed & self.failures.keys():
            self.changed.add(("failure", each))
            if self.failures[each].tasks and not self.failures[each].is_open:
                self.healed.append(each)
        self._sample()

    def _is_open(self, chain: str) -> bool:
        return chain in self.failures and self.failures[chain].is_open

    def handle_telemetry(self, message: Message) -> None:
        """Take in a piece of telemetry."""
        match message:
            case events.IterationFinished() if message.task in self.tasks:
                self.now = max(self.now, message.at)
                self.goodput.handle(message)
                self.tasks[message.task].record_iteration(message)
                self.changed.add(("task", message.task))
                self._sample()
            case hardware.GpusSampled() if message.node in self.nodes:
                self.nodes[message.node].gpus = message
                self.changed.add(("node", message.node))
            case slowdowns.ComputeTimed() if message.task in self.tasks:
                self.tasks[message.task].heat.add(message)
            case _:
                pass

    def fill(self, status: Status) -> None:
        """Add nodes and tasks that are missing in the journal, since it keeps only what is younger.

        Called before the journal is read, so that its entries about these are understood, and after it for the rest.
        """
        known = len(self.nodes) + len(self.tasks)
        self.names.learn(status.tasks)
        for view in status.nodes:
            if view.node not in self.nodes:
                kind = view.slots[0].kind if view.slots else ""
                self.nodes[view.node] = NodePicture(view.state, len(view.slots), kind, view.host, since=view.since)
                self.nodes[view.node].drained = view.state is NodeState.DRAINING
                self.nodes[view.node].standby = view.problem
                self.changed.add(("node", view.node))
        for found in status.tasks:
            if found.spec.name not in self.tasks:
                task = self._submit(found.spec)
                task.state, task.reason, task.traceback = found.state, found.reason, found.traceback
                if task.state.ended:
                    self._free_colour(task)
                task.slow, task.paused, task.drill = found.slow, found.paused, found.drill
                idle = found.state.ended or found.state is TaskState.WAITING  # a registry of before lists them
                task.members, task.withheld = [] if idle else found.members, found.withheld
        self.observe_only = status.observe_only
        self.refresh(status)
        plan = status.plan
        if plan is not None and (self.plan is None or len(self.nodes) + len(self.tasks) > known):
            newer = self.plan is not None and self.plan.number > plan.number
            self._plan(self.plan.whole(plan) if newer and self.plan else plan)

    def refresh(self, status: Status) -> None:
        """Take the progress of tasks from the registry, where their telemetry is not listened to."""
        for found in status.tasks:
            task = self.tasks.get(found.spec.name)
            if task is not None:
                task.iteration, task.loss = found.iteration, found.loss
                task.iteration_s, task.waf = found.iteration_s, found.waf
                self.changed.add(("task", found.spec.name))

    # --- in sum ------------------------------------------------------------------------------------------------------

    @property
    def waf(self) -> float:
        """Weighted FLOP/s that all tasks achieve together."""
        return sum(task.waf for task in self.tasks.values())

    @property
    def slots(self) -> int:
        """Slots of nodes that are up."""
        return sum(node.slots for node in self.nodes.values() if node.state is NodeState.UP)

    @property
    def spares(self) -> int:
        """Slots of nodes that are up, and that the plan gives to no task."""
        return sum(node.slots - len(node.tasks) for node in self.nodes.values() if node.state is NodeState.UP)

    # --- what happened -----------------------------------------------------------------------------------------------

    def _add(self, message: Message, entry: JournalLine, *, is_open: bool) -> None:
        if isinstance(message, CHANGES):
            about = str(getattr(message, "node", "")), str(getattr(message, "task", ""))
            self.events.append((replace(entry, lines=[]) if entry.lines else entry, *about))
            self.changed.add(("event", ""))
        if self.stories.add(message, entry, self._rank(message), is_open=is_open):
            self.changed.add(("failure", entry.chain))

    def _rank(self, message: Message) -> int | None:
        """Return the rank of the worker that something is said of to have failed; None where it has none."""
        if not isinstance(message, RANKED) or (task := self.tasks.get(message.task)) is None:
            return None
        return next((rank for rank, each in enumerate(task.members) if each.worker == message.worker), None)

    def _change(self, message: Message) -> None:
        match message:
            case events.PlanDecided():
                self._plan(message.plan)
            case events.Regrouped():
                self._regrouped(message)
            case events.ObserveOnlySwitched():
                self._switch_observing(on=message.on)
            case events.OrdersWithheld() if message.task in self.tasks:
                self.tasks[message.task].withheld = str(message) if message.orders else ""
                self.changed.add(("task", message.task))
            case events.ScriptDrilled() if message.task in self.tasks:
                self.tasks[message.task].drill = message.outcome
                self.changed.add(("task", message.task))
            case slowdowns.SlowdownDetected() | slowdowns.SlowdownEnded() if message.task in self.tasks:
                self.tasks[message.task].slow = message.text if isinstance(message, slowdowns.SlowdownDetected) else ""
                self.changed.add(("task", message.task))
            case stragglers.StragglerDetected() if message.node in self.nodes:
                self.nodes[message.node].alarm = f"straggler: {message.diagnosis}"
                self.changed.add(("node", message.node))
            case events.StandbyDied() | events.StandbyRevived() if message.node in self.nodes:
                self.nodes[message.node].standby = str(message) if isinstance(message, events.StandbyDied) else ""
                self.changed.add(("node", message.node))
            case hardware.FaultLogged() if message.node in self.nodes and not message.printed:
                self.nodes[message.node].alarm = message.text
                self.changed.add(("node", message.node))
            case _:
                self._node(message)
                self._task(message)

    def _switch_observing(self, *, on: bool) -> None:
        self.observe_only = on
        for name, task in self.tasks.items():
            if not on and task.withheld:
                task.withheld = ""
                self.changed.add(("task", name))

    # --- nodes -------------------------------------------------------------------------------------------------------

    def _node(self, message: Message) -> None:
        match message:
            case events.NodeAdmitted():
                node = self.nodes.setdefault(message.node, NodePicture(since=message.at))
                if not message.returned:
                    node.since, node.alarm, node.gpus = message.at, "", None
                node.standby = ""
                node.state = NodeState.DRAINING if node.drained else NodeState.UP
                node.slots, node.host = len(message.slots), message.host
                node.rack, node.domain = message.rack, message.domain
                node.kind = message.slots[0].kind if message.slots else ""
                node.suspected_until = 0.0
            case events.NodeDrained() if message.node in self.nodes:
                node = self.nodes[message.node]
                node.drained = message.drain
                if node.state in {NodeState.UP, NodeState.DRAINING}:
                    node.state = NodeState.DRAINING if message.drain else NodeState.UP
                    node.since = message.at
            case events.NodeSuspected() if message.node in self.nodes:
                self.nodes[message.node].suspected_until = message.at + message.grace_s
            case events.NodeLeft() | events.NodeGone() if message.node in self.nodes:
                self._down(message.node, NodeState.LEFT, message.at)
            case _:
                return
        self.changed.add(("node", message.node))

    def _down(self, name: str, state: NodeState, at: float) -> None:
        node = self.nodes.get(name)
        if node is not None:
            node.state, node.since, node.suspected_until = state, at, 0.0
            self.changed.add(("node", name))

    def _plan(self, plan: Plan) -> None:
        self.plan = plan.whole(self.plan)
        for share in plan.shares:
            task = self.tasks.get(share.task)
            if task is None:
                continue
            before = set(task.share.slots) if task.share else set()
            after = set(share.slots)
            for slot in before - after:
                node = self.nodes.get(slot.node)
                if node is not None and node.tasks.get(slot.slot) == share.task:
                    del node.tasks[slot.slot]
                self.changed.add(("node", slot.node))
            for slot in after:
                node = self.nodes.get(slot.node)
                if node is not None and node.tasks.get(slot.slot) != share.task:
                    node.tasks[slot.slot] = share.task
                    self.changed.add(("node", slot.node))
            task.share = share
            self.changed.add(("task", share.task))
        self.changed.add(("plan", ""))

    # --- tasks -------------------------------------------------------------------------------------------------------

    def _task(self, message: Message) -> None:
        match message:
            case events.TaskSubmitted():
                self._submit(message.spec)
            case events.TaskRemoved():
                self._ended(message.task, TaskState.REMOVED, message.at)
            case events.TaskPaused() | events.TaskRewound() if message.task in self.tasks:
                task = self.tasks[message.task]
                task.paused, task.withheld = getattr(message, "paused", task.paused), ""
                self.changed.add(("task", message.task))
            case events.TaskStateChanged() if message.task in self.tasks:
                self._moved(self.tasks[message.task], message)
            case _:
                pass

    def _submit(self, spec: TaskSpec) -> TaskPicture:
        known = self.tasks.get(spec.name)
        number = known.number if known else self._numbers
        self._numbers += known is None
        task = TaskPicture(spec, number)
        if known is not None and not known.state.ended:
            task.share, task.colour = known.share, known.colour  # its number of workers is another: all else goes on
            self._earlier[spec.name] = known.earlier
        elif self._colours:
            task.colour = heapq.heappop(self._colours)
        else:
            task.colour, self._most_colours = self._most_colours, self._most_colours + 1
        task.earlier = self._earlier.pop(spec.name, [])
        self.tasks[spec.name] = task
        self.changed.add(("task", spec.name))
        return task

    def _moved(self, task: TaskPicture, message: events.TaskStateChanged) -> None:
        if message.state.ended:
            self._ended(message.task, message.state, message.at)
        task.state, task.reason, task.traceback = message.state, message.reason, message.traceback
        if message.members or message.state.ended or message.state is TaskState.WAITING:
            task.members = message.computing
        if message.state is not TaskState.RUNNING:
            task.waf = 0.0
        self.changed.add(("task", message.task))

    def _ended(self, name: str, state: TaskState, at: float) -> None:
        task = self.tasks.get(name)
        if task is None:
            return
        task.state, task.waf, task.members, task.slow = state, 0.0, [], ""
        for slot in task.share.slots if task.share else ():
            node = self.nodes.get(slot.node)
            if node is not None and node.tasks.get(slot.slot) == name:
                del node.tasks[slot.slot]
                self.changed.add(("node", slot.node))
        task.share = None
        self._free_colour(task)
        task.close_membership(at, str(state), "")
        self._remember(task)
        self.changed.add(("task", name))
        if state is TaskState.REMOVED:
            del self.tasks[name]

    def _remember(self, task: TaskPicture) -> None:
        """Keep the losses of a task that has ended for the next one of its name."""
        if any(task.progress.points()):
            self._earlier[task.spec.name] = [*task.earlier, task.progress][-EARLIER:]
            while len(self._earlier) > REMEMBERED:
                del self._earlier[next(iter(self._earlier))]

    def _free_colour(self, task: TaskPicture) -> None:
        if task.colour >= 0:
            heapq.heappush(self._colours, task.colour)
            task.colour = -1

    def _regrouped(self, message: events.Regrouped) -> None:
        task = self.tasks.get(message.task)
        if task is not None and task.regroup(message):
            self.changed.add(("task", message.task))

    # --- failures ----------------------------------------------------------------------------------------------------

    def _failed(self, message: events.FailureDetected, hit: set[str]) -> None:
        """A failure that was about these tasks ends the memberships of those that it hit."""
        if message.severity is Severity.SEV1 and message.node:
            self._down(message.node, NodeState.LOST, message.at)
        chain = chain_of(message)
        known, story = self.failures.get(chain), self.stories.begin(message)
        if known is not None:
            known.begun = min([known.begun, *(entry.at for entry in story.entries[:1])])
        tasks = known.tasks if known else {}
        for name in hit & self.tasks.keys() & tasks.keys():
            if tasks[name].over_at is None:
                self.tasks[name].close_membership(message.at, chain, message.reason)
                self.changed.add(("task", name))
        self.changed.add(("node", message.node))

    # --- goodput -----------------------------------------------------------------------------------------------------

    def _sample(self) -> None:
        """Note now and then what was training of all that tasks had."""
        if self.now < self._next_sample:
            return
        slots = sum(node.slots for node in self.nodes.values())
        self._next_sample = self.now + SAMPLE_S * (1 + slots // SLOTS_A_SAMPLE)
        self.changed.add(("course", ""))
        rows = [row for row in self.goodput.report().tasks if row.name]
        self.course.add(self.now, sum(row.seconds["training"] for row in rows), sum(row.total_s for row in rows))
