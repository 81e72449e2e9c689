"""The accounts of a cluster's GPU time: one message in, accounts and what is open changed."""

from collections import Counter

from unicron.contracts import commands, events, slowdowns
from unicron.contracts.base import Message
from unicron.contracts.failures import Severity
from unicron.contracts.tasks import TaskState
from unicron.healing import way_of
from unicron.observe.accounts.book import Book
from unicron.observe.accounts.chains import ChainCost
from unicron.observe.accounts.holdings import NOBODY, SlotAccount, SlotHoldings, TaskAccount
from unicron.observe.accounts.phases import INTERRUPTED, Phase
from unicron.observe.accounts.report import Report, cost, make
from unicron.observe.accounts.spans import Key, Span, TaskPace
from unicron.observe.incidents import NONE, Hit, Incident, IncidentCause, Incidents, chain_of, shown_at

CHAINS = 4096
"""Chains that are tracked; what older ones cost is kept in sum, and nothing new is put down to one."""

SPANS = 2000
"""Spans of one chain that are kept; beyond that they are only counted."""

_WITHOUT_MEMBERS = {TaskState.WAITING: Phase.IDLE, TaskState.STARTING: Phase.START_UP}
"""What the slots of a task are accounted as in states in which none computes, and nothing is broken."""

SLOWDOWN = "slowdown"
"""The cause of what a slowdown costs."""


class Goodput:
    """Works out where the time of all slots went, from the journal's messages in their order.

    Boundaries: a fault is at the first fact that shows it (a process ended, raised or lost its collective; a node was
    suspected; for a hang, `waited_s` before its report); detection ends with `FailureDetected`, the decision with
    the first command or plan for the task, the transition with each worker's `Regrouped`. A fault that is known late
    takes back what was training since, but nothing that has another reason already.

    `IterationFinished` is not in the journal; where it is given too, what is computed again is measured.
    """

    def __init__(self, since: float = 0.0, chains: int = CHAINS, spans: int = SPANS) -> None:
        """Begin with nothing.

        Args:
            since: Unix seconds from which on is counted; messages from before are still to be given.
            chains: that are tracked, the newest, at least one.
            spans: of a chain that are kept, of slots and of tasks each.
        """
        self._all = SlotHoldings(since, spans)
        self.incidents = Incidents(chains, self._all.forget)
        self._failures: Counter[Key] = Counter()
        self._began: float | None = None

    def handle(self, message: Message) -> None:
        """Take a message of the journal, or of telemetry, into account."""
        if not isinstance(message, events.IterationFinished):  # telemetry overtakes the journal, whose order counts
            if self._began is None:
                self._began = message.at
            self._all.now = max(self._all.now, message.at)
            self.incidents.changed.clear()
            self.incidents.record(message, self._all.now)
        match message:
            case commands.Command():
                self._commanded(message)
            case events.WorkerFact():
                self._worker(message)
            case slowdowns.SlowdownDetected() | slowdowns.SlowdownEnded():
                self._slow(message)
            case events.TaskSubmitted() | events.TaskStateChanged() | events.TaskRecovered() | events.TaskPaused():
                self._task(message)
            case events.FailureDetected():
                self._failed(message)
            case events.PlanDecided():
                self._planned(message)
            case events.CheckpointFound() | events.CheckpointFailed() | events.StatesFound():
                self._all.move(self._all.task(message.task), {Phase.CHECKPOINT}, Phase.WAITING)
            case _:
                self._node(message)

    def report(self, until: float | None = None, task: str | None = None) -> Report:
        """Return where the time went.

        Args:
            task: only of this one; None for all, and for slots that no task had.
            until: Unix seconds; what is as it is now is taken to stay so until then. None: that of the journal's
                newest message.
        """
        return self._report(self._all.totals(self._until(until)), self._until(until), task)

    def _until(self, until: float | None) -> float:
        return max(self._all.now, until or 0.0)

    def _report(self, totals: tuple[Book, Book, dict[str, float]], until: float, task: str | None = None) -> Report:
        book, wall, whole = totals
        since = max(self._began or 0.0, book.since)
        lost = {name: each.lost(until) for name, each in self._all.tasks.items()}
        return make((since, max(since, until)), book.all(), wall.all(), whole, self._failures, lost, task)

    def statement(self, until: float | None = None) -> tuple[Report, list[ChainCost]]:
        """Return `report()` and `costs()` by one look at all slots, which is what takes time."""
        totals = self._all.totals(self._until(until))
        return self._report(totals, self._until(until)), self._costs(totals)

    def chain(self, chain: str, until: float | None = None) -> ChainCost | None:
        """Return what one chain cost; the costs of all, and of "" for what belongs to none, are those of the report.

        Args:
            chain: id of its first fact.
            until: as in `report()`.

        Returns:
            None where it has no cause that is known, or is too old to be tracked.
        """
        known = self.incidents.known.get(chain) if chain else Incident(cause=NONE, begun=self._all.book.since)
        if known is None:
            return None
        return cost(known, *self._all.part(chain, self._until(until)))

    def costs(self, until: float | None = None) -> list[ChainCost]:
        """Return what each chain cost that is tracked, the newest last: as `chain()` of each, in far less time."""
        return self._costs(self._all.totals(self._until(until)))

    def _costs(self, totals: tuple[Book, Book, dict[str, float]]) -> list[ChainCost]:
        book, wall, _ = totals
        return [cost(known, book, wall) for known in self.incidents.known.values()]

    # --- nodes and plans ---------------------------------------------------------------------------------------------

    def _node(self, message: Message) -> None:
        match message:
            case events.NodeAdmitted():
                node = self._all.node(message.node)
                node.up, node.suspected = True, None
                self._all.admit(message.node, message.slots, {each.slot: each.worker for each in message.workers})
            case events.NodeSuspected():
                self._all.node(message.node).suspected = message.at
            case events.NodeLeft() | events.NodeGone():
                self._all.release(message.node)

    def _planned(self, message: events.PlanDecided) -> None:
        incident = self._begin(message, str(message.plan.cause[0]))
        self._decided(message)
        for share in message.plan.shares:
            task = self._all.task(share.task)
            given = {id(slot): slot for slot in (self._all.slot(at.node, at.slot) for at in share.slots)}
            if given.keys() - task.planned.keys() or (given and task.planned.keys() - given.keys()):
                self.incidents.hit(incident, task.name)
            self._all.unplan(task, given)
            for slot in given.values():
                slot.planned = task.name
                if not slot.worker:
                    self._all.hold(slot, task.name, Phase.START_UP, incident.cause)
            task.planned = given
            self._all.move(task, {Phase.DECISION}, Phase.WAITING)

    # --- tasks -------------------------------------------------------------------------------------------------------

    def _task(
        self, message: events.TaskSubmitted | events.TaskStateChanged | events.TaskRecovered | events.TaskPaused
    ) -> None:
        task = self._all.task(message.task)
        if isinstance(message, events.TaskRecovered | events.TaskPaused):
            if task.span is not None and task.span.phase is Phase.TRAINING and not self.incidents.are_open(task.name):
                self._all.enter_task(task, Phase.TRAINING)
        elif isinstance(message, events.TaskSubmitted):
            self._all.close_all(task)
            fresh = TaskAccount(task.name, task.slots, task.planned, Span(self._all.now, Phase.START_UP))
            fresh.microbatches = message.spec.microbatches
            self._all.tasks[task.name] = fresh
        elif message.state.ended:
            self._all.close_all(task)
            self._end_slowdown(task)
            self._all.unplan(task)
            for slot in list(task.slots.values()):
                self._all.enter(slot, Phase.IDLE)
                slot.epoch = -1
                self._all.hand_over(slot)
            self._all.end(task)
            task.epoch = -1
        elif message.state in _WITHOUT_MEMBERS and task.span is not None:
            cause = task.span.cause if task.span.cause is not NONE else self.incidents.cause(message)
            self._all.enter_task(task, _WITHOUT_MEMBERS[message.state], None, cause)

    def _end_slowdown(self, task: TaskAccount) -> None:
        known = self.incidents.known.get(task.pace.slow_for.chain)
        if known is not None:
            known.tasks[task.name] = Hit(over_at=self._all.now)
        task.pace.slow, task.pace.slow_for = 0.0, NONE

    def _slow(self, message: slowdowns.SlowdownDetected | slowdowns.SlowdownEnded) -> None:
        task = self._all.task(message.task)
        self._all.close_all(task)
        self._end_slowdown(task)
        if isinstance(message, slowdowns.SlowdownDetected):
            node = message.workers[0].node if message.workers else ""
            incident = self._begin(message, SLOWDOWN, node)
            incident.detected_at = self._all.now if incident.detected_at is None else incident.detected_at
            incident.tasks[task.name] = Hit()
            if message.recent_s > message.usual_s:
                task.pace.slow = 1 - message.usual_s / message.recent_s
            task.pace.slow_for = IncidentCause(SLOWDOWN, node, incident.cause.chain)

    # --- failures ----------------------------------------------------------------------------------------------------

    def _begin(self, message: Message, what: str, node: str = "") -> Incident:
        """Return the incident of a message's chain, whose costs are tracked from now on."""
        self._all.track(chain_of(message))
        return self.incidents.begin(message, self._all.now, what, node)

    def _decided(self, message: Message) -> None:
        known = self.incidents.known.get(message.correlation)
        if known is not None and known.decided_at is None:
            known.decided_at = self._all.now

    def hit_by(self, failure: events.FailureDetected) -> set[str]:
        """Return the tasks that a failure is about: the one it names, and all with slots on a node that is given up."""
        given_up = failure.severity is Severity.SEV1 and bool(failure.node)
        here = self._all.node(failure.node).slots.values() if given_up else ()
        return {failure.task, *(slot.task for slot in here)} - {NOBODY}

    def _failed(self, message: events.FailureDetected) -> None:
        incident = self._begin(message, str(message.status), message.node)
        gives_up = message.severity is Severity.SEV1 and bool(message.node)
        here = list(self._all.node(message.node).slots.values()) if message.node else []
        hit = self.hit_by(message)
        if not hit:
            self._failures[Key(NOBODY, incident.cause).without_chain()] += 1
        at = self._all.node(message.node).slots.get(message.slot) if message.worker else None
        named = {id(slot) for slot in here if gives_up or (slot is at and slot.worker in {"", message.worker})}
        for name in sorted(hit):
            self._failures[Key(name, incident.cause).without_chain()] += 1
            task = self._all.task(name)
            if 0 <= message.epoch < task.epoch or task.span is None:  # a later membership is not concerned
                incident.tasks.setdefault(name, Hit(over_at=self._all.now))
            else:
                self.incidents.hit(incident, name)
                self._interrupt(task, named, whole=not (message.worker or gives_up), incident=incident)
        if gives_up:
            self._all.release(message.node)

    def _interrupt(self, task: TaskAccount, named: set[int], *, whole: bool, incident: Incident) -> None:
        """Nobody computes any more where a member failed, since the first sign of it."""
        engaged = list(task.engaged())
        struck = [slot for slot in engaged if id(slot) in named]
        if not struck and not whole:
            return  # it only was on its way: the others go on computing
        signs = [slot.broke for slot in engaged]
        signs += [slot.stalled for slot in struck] + [self._all.node(slot.node).suspected for slot in struck]
        at = min((sign for sign in signs if sign is not None), default=self._all.now)
        cause, incident.begun = incident.cause, min(incident.begun, at)
        for slot in engaged:
            self._all.enter(slot, Phase.DETECTION, at, cause)
            self._all.enter(slot, Phase.DECISION, None, cause)
            slot.broke = slot.stalled = None
        self._all.enter_task(task, Phase.DETECTION, at, cause)
        self._all.enter_task(task, Phase.DECISION, None, cause)

    # --- commands ----------------------------------------------------------------------------------------------------

    def _commanded(self, message: commands.Command) -> None:
        match message:
            case commands.StartWorker():
                self._start(message)
            case commands.StopWorker():
                task = self._all.task(message.task)
                self._all.move(task, {Phase.DECISION}, Phase.WAITING)
                slot = self._all.slot(message.node, message.slot)
                if slot.worker == message.worker and slot.span.phase is Phase.TRAINING and slot.planned != task.name:
                    self._all.enter(slot, Phase.TRANSITION, None, self.incidents.cause(message))
            case commands.FindStates() | commands.FindCheckpoint():
                self._all.move(self._all.task(message.task), {Phase.DECISION, Phase.WAITING}, Phase.CHECKPOINT)
            case commands.Regroup():
                task = self._all.task(message.task)
                if message.epoch > task.epoch:
                    task.epoch, task.ordered = message.epoch, self._all.now
                for member in message.members:
                    slot = self._all.slot(member.node, member.slot)
                    if slot.task == task.name:
                        slot.epoch = message.epoch
                self._all.move(task, INTERRUPTED, Phase.TRANSITION)
            case _:
                return
        self._decided(message)

    def _start(self, message: commands.StartWorker) -> None:
        task = self._all.task(message.task)
        task.microbatches = message.spec.microbatches
        task.runs_again = way_of(message.spec).runs_again
        if not self._all.node(message.node).up:
            return  # it has left before the order was written, and starts nothing
        slot = self._all.slot(message.node, message.slot)
        cause = self.incidents.cause(message)
        slot.worker = message.worker
        slot.broke = slot.stalled = None  # those were signs of the last one
        self._all.hold(slot, task.name, Phase.START_UP, cause)
        if slot.planned is None:
            slot.planned, task.planned[id(slot)] = task.name, slot
        if slot.span.phase in {Phase.IDLE, Phase.START_UP}:
            self._all.enter(slot, Phase.START_UP, None, cause)
        self._all.move(task, {Phase.DECISION}, Phase.WAITING)

    # --- workers -----------------------------------------------------------------------------------------------------

    def _worker(self, message: events.WorkerFact) -> None:
        if isinstance(message, events.Regrouped):
            self._regrouped(message)
        elif isinstance(message, events.IterationFinished):
            self._iterated(message)
        else:
            slot = self._all.slot(message.node, message.slot)
            if slot.worker in {"", message.worker}:  # or else another one has the slot by now
                at = shown_at(message)
                self._all.task(message.task).record_reached(getattr(message, "iteration", -1), at)
                self._change_slot(slot, message, at)

    def _change_slot(self, slot: SlotAccount, message: events.WorkerFact, at: float) -> None:
        match message:
            case events.WorkerReady():
                slot.worker = message.worker
                self._all.hold(slot, message.task, Phase.START_UP, self.incidents.cause(message))
            case events.WorkerFinished():
                self._all.enter(slot, Phase.IDLE)
            case events.StateKept() if slot.span.phase is Phase.TRAINING:
                self._all.enter(slot, Phase.TRANSITION, None, self.incidents.cause(message))
            case events.WorkerStalled():
                slot.stalled = at
            case events.WorkerRaised() | events.CollectiveFailed():
                slot.broke = _first(slot.broke, at)
            case events.WorkerExited():
                slot.worker = ""
                if not message.expected and not message.finished:
                    slot.broke = _first(slot.broke, at)
                if slot.planned is not None or slot.span.phase is Phase.IDLE:  # None: the failure is its task's yet
                    self._all.hand_over(slot)

    def _regrouped(self, message: events.Regrouped) -> None:
        task = self._all.task(message.task)
        if message.epoch < task.epoch or task.span is None:
            return  # a newer one is ordered already, or the task has ended
        cause = self.incidents.cause(message)
        slot = self._all.slot(message.node, message.slot)
        slot.worker = message.worker
        self._all.hold(slot, task.name, Phase.START_UP, cause)
        task.epoch = slot.epoch = message.epoch
        began = max(task.ordered, message.at - message.seconds)
        if message.epoch > task.met:
            task.unseen |= task.runs_again and task.met >= 0
            task.met = message.epoch
            self._met(task, message, began, cause)
        self._all.enter(slot, Phase.TRAINING)
        slot.broke = slot.stalled = None

    def _met(self, task: TaskAccount, message: events.Regrouped, began: float, cause: IncidentCause) -> None:
        """The first of a new membership computes: so the old one is over, and what is to be computed again is known."""
        for slot in task.slots.values():
            if slot.span.phase is Phase.TRAINING:  # what is closed with it is at the old pace
                self._all.enter(slot, Phase.TRANSITION, began, cause)
            elif slot.epoch < task.epoch and slot.span.phase in INTERRUPTED:
                ours = slot.planned == task.name
                self._all.enter(slot, Phase.SUB_HEALTHY if ours else Phase.TRANSITION, None, slot.span.cause)
        if task.span is not None and task.span.phase is Phase.TRAINING:
            task.record_reached(message.iteration, began)
            self._all.enter_task(task, Phase.TRANSITION, began, cause)
        held = task.span.cause if task.span is not None and self.incidents.are_open(task.name) else NONE
        self._all.enter_task(task, Phase.TRAINING, None, held)
        task.reached = max(task.reached, message.iteration)
        iterations: float = task.reached - message.iteration
        if task.microbatches:
            iterations += min(1.0, message.recomputed / task.microbatches)
        seconds = iterations * task.iteration_slot_s / max(message.world_size, 1)
        task.pace = TaskPace(self._all.now + seconds, cause, task.pace.slow, task.pace.slow_for)
        task.again_to = task.reached
        task.mark = (message.iteration, self._all.now, message.world_size)

    def _iterated(self, message: events.IterationFinished) -> None:
        task = self._all.tasks.get(message.task)
        if task is None or message.epoch != task.epoch:
            return  # the journal knows another membership, or none yet
        task.iteration_slot_s = message.seconds * message.world_size
        if message.iteration + 1 >= task.again_to:
            # an iteration of which only microbatches are computed again is over with them; whole ones with the last
            task.pace.again_to = min(task.pace.again_to, message.at)
        task.reached = max(task.reached, message.iteration + 1)


def _first(known: float | None, at: float) -> float:
    return at if known is None else min(known, at)
