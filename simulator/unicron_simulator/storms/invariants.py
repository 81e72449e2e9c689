"""What must hold after every step of a storm, checked from outside: from the journal, the commits and the workers."""

from collections import Counter

import msgspec
from unicron_planner.state import PlannerState

from unicron import codec, services
from unicron.bus.protocol import JournalEntry
from unicron.contracts.base import Message
from unicron.contracts.commands import Command, DropStates, Regroup, StartWorker, StopWorker
from unicron.contracts.events import (
    Alert,
    FailureDetected,
    NodeAdmitted,
    NodeDrained,
    NodeGone,
    NodeJoined,
    PlanDecided,
    StateKept,
    TaskBroken,
    TaskRemoved,
    TaskStateChanged,
    TaskSubmitted,
    WorkerFinished,
)
from unicron.contracts.events.workers import WorkerFact
from unicron.contracts.failures import DetectionMethod, Severity
from unicron.contracts.plans import Plan
from unicron.contracts.tasks import ParallelLayout, SlotRef, TaskSpec, TaskState
from unicron.contracts.worker import Joined
from unicron.service.commit import Commit
from unicron_simulator.storms import domains, resources
from unicron_simulator.storms.lie_tracking import LieTracker
from unicron_simulator.storms.training import Gradient, Trainer, saves_model

SERVICES = tuple(name for name in services.SERVICES if name not in {"straggler", "notifier"})
"""In a storm no iteration is timed, and nobody is paged."""


class Invariants:
    """Watches a storm; the first thing that must not be is kept in `violation`.

    Attributes:
        violation: in words; empty while all is well.
        messages: the journal, decoded.
        plan: the newest in the journal.
        ended: tasks that have ended, and how.
        steps: for each task the iterations whose update was made, and in which epoch first.
        victims: workers that a fault has struck: name -> (node, task, from where on the journal is to answer that).
        lie_tracker: what liars have said.
        spoilt: services whose stored state somebody else has written over.
    """

    def __init__(self) -> None:
        self.violation = ""
        self.messages: list[Message] = []
        self.plan: Plan | None = None
        self.ended: dict[str, TaskState] = {}
        self.steps: dict[str, dict[int, int]] = {}
        self.victims: dict[str, tuple[str, str, int]] = {}
        self.lie_tracker = LieTracker()
        self.spoilt: set[str] = set()
        self._ids: set[str] = set()
        self._known: dict[str, int] = {}
        self._known_before: dict[str, int] = {}  # what came between may have been handled in the same batch
        self._specs: dict[str, TaskSpec] = {}
        self._living: dict[str, Trainer] = {}
        self._sequences: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._numbers: Counter[str] = Counter()
        self._begun: dict[str, TaskSpec] = {}
        self._at: dict[str, int] = {}
        self._joins: Counter[str] = Counter()
        self._losses: Counter[str] = Counter()
        self._failed: set[str] = set()
        self._slots: dict[str, set[SlotRef]] = {}
        self._up: set[str] = set()
        self._drained: set[str] = set()
        self._domains: dict[str, str] = {}
        self._planned_before: Plan | None = None
        self._replayed = 0
        self._models: set[str] = set()
        self._handed: dict[str, int] = {}
        self._compared: set[tuple[str, int, int]] = set()
        self._flaws: dict[tuple[str, int, int], dict[int, set[bytes]]] = {}

    def check(self, holds: bool, otherwise: str) -> None:
        """Note a violation where something does not hold."""
        if not holds and not self.violation:
            self.violation = otherwise

    def forget(self, message_id: str) -> None:
        """Let a message stand in the journal once more: the bus may have forgotten its id."""
        self._ids.discard(message_id)

    # --- the journal -------------------------------------------------------------------------------------------------

    def entered(self, entry: JournalEntry) -> None:
        """Check a message that was put into the journal."""
        message = codec.decode_message(entry.data)
        self.messages.append(message)
        kind = type(message).__name__
        self.check(message.id not in self._ids, f"{kind} {message.id} of {message.source} stands in the journal twice")
        self._ids.add(message.id)
        if message.source in services.NAMED:
            self.check(message.id in self._known, f"{message.source} published {kind} {message.id} without a commit")
        if message.source not in services.NAMED:
            self._in_order(message)
        problem = self.lie_tracker.problem(message)
        self.check(not problem, problem)
        blamed = resources.blames(message)
        self.check(not blamed, blamed)
        match message:
            case Alert(source=service, text=text) if text.startswith("the stored state of"):
                self.check(service in self.spoilt, text)
            case NodeJoined(node=node):
                self._joins[node] += 1
            case FailureDetected():
                self._failure(message)
            case TaskSubmitted(task=task, spec=spec):
                self._submitted(task, spec)
            case PlanDecided(plan=plan):
                self._planned(plan)
            case TaskBroken(task=task):
                self.ended[task] = TaskState.FAILED
            case TaskStateChanged(task=task, state=state) if state.ended:
                self.ended[task] = state
                there = state is not TaskState.FINISHED or not saves_model(self._specs[task]) or task in self._models
                self.check(there, f"{task} is finished, and nobody has written its model")

    def known_before(self, message_id: str) -> int:
        """Return up to where in the journal a service had read for sure when it decided on a message."""
        return self._known_before.get(message_id, 0)

    def lied(self, joined: str) -> None:
        """Take in that a lie stands in the journal now; by it a node joins, `joined`, if it is to be believed."""
        self.messages.append(Message())
        self._joins[joined] += 1

    def _submitted(self, task: str, spec: TaskSpec) -> None:
        """Forget another task that had this name; whoever was struck as a worker of that one needs no answer."""
        self._specs[task] = spec
        self.steps.pop(task, None)
        self._models.discard(task)
        self._handed.pop(task, None)
        self._compared = {each for each in self._compared if each[0] != task}
        self._flaws = {key: each for key, each in self._flaws.items() if key[0] != task}
        if self.ended.pop(task, None):
            self.victims = {name: each for name, each in self.victims.items() if each[1] != task}

    def _in_order(self, fact: Message) -> None:
        """Check that an agent's facts stand in the order in which it made them, which their ids tell."""
        boot, _, number = fact.id.rpartition("-")
        self.check(
            int(number) > self._numbers[boot], f"{type(fact).__name__} {fact.id} stands behind facts made after it"
        )
        self._numbers[boot] = int(number)

    def _failure(self, failure: FailureDetected) -> None:
        if failure.severity is Severity.SEV1:
            self._losses[failure.node] += 1
            self.check(
                self._losses[failure.node] <= self._joins[failure.node],
                f"the loss of {failure.node} was reported more often than it joined",
            )
        elif failure.severity is Severity.SEV2:
            self.check(failure.worker not in self._failed, f"the failure of {failure.worker} was reported twice")
            self._failed.add(failure.worker)

    def _planned(self, plan: Plan) -> None:
        before = self.plan.number if self.plan else 0
        self.check(plan.number > before, f"plan {plan.number} was decided after plan {before}")
        self.plan = plan.whole(self.plan)

    # --- commits -----------------------------------------------------------------------------------------------------

    def committed(self, service: str, commit: Commit) -> None:
        """Check what a service wrote down."""
        for outgoing in commit.outbox:
            self._known.setdefault(outgoing.id, commit.sequence)
            self._known_before.setdefault(outgoing.id, self._sequences[service])
        self.check(
            commit.sequence >= self._sequences[service],
            f"{service} went back from position {self._sequences[service]} to {commit.sequence}",
        )
        self._sequences[service] = commit.sequence
        if service == "planner":
            state = msgspec.msgpack.decode(commit.state, type=PlannerState)
            self._healthy(state.plan, commit.sequence)
            self._near(state)

    def _healthy(self, plan: Plan | None, sequence: int) -> None:
        """Check that the plan in force uses slots of healthy nodes, each once; facts up to `sequence` were known."""
        for message in self.messages[self._replayed : sequence]:
            match message:
                case NodeAdmitted(node=node, slots=slots, domain=domain):
                    self._up.add(node)
                    self._domains |= {node: domain} if domain else {}
                    self._slots[node] = {SlotRef(node=node, slot=slot.index) for slot in slots}
                case NodeGone(node=node) | FailureDetected(severity=Severity.SEV1, node=node):
                    self._up.discard(node)
                case NodeDrained(node=node, drain=True):
                    self._drained.add(node)
                case NodeDrained(node=node):
                    self._drained.discard(node)
        self._replayed = max(self._replayed, sequence)
        if plan is None:
            return
        usable = {slot for node in self._up - self._drained for slot in self._slots[node]}
        given = [slot for share in plan.shares for slot in share.slots]
        self.check(len(set(given)) == len(given), f"plan {plan.number} gives a slot to two workers")
        bad = sorted(map(str, set(given) - usable))
        self.check(not bad, f"plan {plan.number} uses {', '.join(bad)}, not healthy at position {sequence}")
        self.check(len(given) <= len(usable), f"plan {plan.number} uses more than the {len(usable)} healthy slots")

    def _near(self, state: PlannerState) -> None:
        """Check that the plan in force has no tensor-parallel group in two domains without need."""
        plan, before = state.plan, self._planned_before
        if plan is None or (before and before.number == plan.number):
            return
        there = self._up - self._drained - set(state.joined)  # those wait for the next plan
        usable = [slot for node in there for slot in self._slots[node]]
        successive = before if before and before.number + 1 == plan.number else None
        problem = domains.problem(plan, successive, self._specs, self._domains, usable)
        self.check(not problem, problem)
        self._planned_before = plan

    # --- nodes and workers -------------------------------------------------------------------------------------------

    def commanded(self, command: Command, incarnation: str, *, refused: bool, obeyed: bool) -> None:
        """Check what an agent made of a command that it read as `incarnation`."""
        what = f"{type(command).__name__} {command.id} to {command.node}"
        newest = self._tokens[command.node]
        self.check(refused or command.token >= newest, f"{what} took effect with token {command.token} after {newest}")
        self.check(
            not obeyed or command.incarnation in {"", incarnation},
            f"{what} took effect for incarnation {command.incarnation}",
        )
        self.check(not obeyed or command.id not in self.lie_tracker.void, f"{what} took effect, and nobody gave it")
        if command.id not in self.lie_tracker.void:
            self._tokens[command.node] = max(command.token, newest)
        if obeyed and isinstance(command, StopWorker):
            self._may_stop(command)

    def _may_stop(self, stop: StopWorker) -> None:
        """Check that nobody is stopped who may be writing results, but for a failure or at the user's word."""
        known = self.messages[: self._known_before[stop.id]]
        through = any(isinstance(each, WorkerFinished) and each.worker == stop.worker for each in known)
        asked = any(
            (isinstance(each, FailureDetected) and stop.worker == each.worker)
            or (isinstance(each, FailureDetected | NodeGone) and each.node == stop.node and _takes_node(each))
            or (isinstance(each, TaskRemoved | TaskBroken) and each.task == stop.task)
            for each in self.messages[: self._known[stop.id]]
        )
        self.check(not through or asked, f"{stop.worker} was stopped though it was through: {stop.reason}")

    def started(self, command: StartWorker, others: list[str]) -> None:
        """Check a process that starts."""
        place = f"{command.node}:{command.slot}"
        self.check(command.worker not in self._begun, f"{command.worker} was started twice")
        self.check(not others, f"{command.worker} was started in {place}, where {', '.join(others)} lives")
        self._begun[command.worker] = command.spec

    def joined(self, worker: Trainer, joined: Joined, *, established: bool) -> None:
        """Note with which iteration a worker goes on; a task starts anew only where nobody has its state any more.

        That is, as far as was known when the membership was ordered: if a node comes back with a holder a moment later,
        the next membership takes its state, which is further ahead.
        """
        self._at[worker.name] = joined.iteration
        self._living[worker.name] = worker
        if joined.state_from:
            self._handed[worker.spec.name] = joined.epoch
        if worker.spec.name in self.lie_tracker.touched or established:
            return
        if not self.steps.get(worker.spec.name) or worker.spec != self._specs[worker.spec.name]:
            return
        there = self._present_nodes(self._ordered_at(worker.spec.name, joined.epoch))
        held: dict[tuple[int, ParallelLayout], dict[int, str]] = {}
        for each in self._living.values():
            if (
                each.living
                and each.core.has_state
                and each.core.iteration
                and each.spec == worker.spec
                and each.host.name in there
            ):
                held.setdefault((each.core.iteration, each.layout), {})[each.place] = each.name
        whole = [places for (_, layout), places in held.items() if len(places) == layout.replica_workers]
        holders = [name for places in whole for name in places.values()]
        holders += self._left(worker, joined.epoch, there) + self._saved(worker, there) + self._stored(worker)
        self.check(
            not holders,
            f"{worker.spec.name} starts anew in epoch {joined.epoch} though {', '.join(holders)} has its state",
        )

    def _left(self, worker: Trainer, epoch: int, there: set[str]) -> list[str]:
        """Return the names of whole states of a worker's task that were left behind, as far as told by then."""
        task = worker.spec.name
        begun = max(
            at for at, each in enumerate(self.messages) if isinstance(each, TaskSubmitted) and each.task == task
        )
        known = self.messages[begun : self._ordered_at(task, epoch)]
        dropped = {(each.node, name) for each in self.messages if isinstance(each, DropStates) for name in each.names}
        lies = {name for node in there for name in worker.host.machines[node].kept if (node, name) not in dropped}
        found: dict[int, dict[int, str]] = {}
        for each in known:
            if isinstance(each, StateKept) and each.task == task and each.state.location.name in lies:
                found.setdefault(each.epoch, {})[each.state.place] = each.state.location.name
        layouts = {each.epoch: each.layout for each in known if isinstance(each, Regroup) and each.task == task}
        whole = [names for at, names in found.items() if len(names) == layouts[at].replica_workers]
        return [name for names in whole for name in names.values()]

    def _saved(self, worker: Trainer, there: set[str]) -> list[str]:
        """Return the names of whole states of a worker's task that are saved in the memories of nodes.

        That of iteration 0 is no loss: a replica that begins anew saves it before another one comes to its beginning.
        """
        found: dict[tuple[int, str], dict[int, str]] = {}
        for node in there:
            for name, ref in worker.host.machines[node].saved.items():
                sound = worker.host.machines[node].lies(ref)
                if sound and ref.iteration and self._begun.get(ref.location.worker) == worker.spec:
                    found.setdefault((ref.iteration, ref.layout.degrees), {})[ref.place] = f"{name} on {node}"
        sizes = {each.degrees: each.replica_workers for each in (worker.spec.layout, *worker.spec.layouts.values())}
        whole = [places for (_, degrees), places in found.items() if len(places) == sizes[degrees]]
        return [name for places in whole for name in places.values()]

    def _stored(self, worker: Trainer) -> list[str]:
        """Return the name of the newest state of a worker's task on storage."""
        stored = worker.host.storage.newest_of_run(worker.spec.name) if worker.spec.checkpoints else None
        return [stored.folder] if stored else []

    def struck(self, worker: str, node: str, task: str) -> None:
        """Note a worker that a fault has ended.

        What its node falsely said may have had it written off already, and it is written off once.
        """
        since = len(self.messages)
        if node in self.lie_tracker.misspoken:
            since = next(
                at for at, each in enumerate(self.messages) if isinstance(each, StartWorker) and each.worker == worker
            )
        self.victims[worker] = (node, task, since)

    def counted(self, worker: Trainer) -> None:
        """Check a worker that counts a microbatch: its replica is whole, and it has the state of its place."""
        core = worker.core
        self.check(core.has_state or not self.steps.get(worker.spec.name), f"{worker.name} counts without a state")
        self.check(
            core.seat.place == worker.place,
            f"{worker.name} was started for place {worker.place} and sits in place {core.seat.place}",
        )
        self.check(
            worker.layout.replica_workers == 1 or worker.formed >= worker.newest.since,
            f"{worker.name} counts a microbatch of epoch {core.epoch} though a rank of its replica was replaced",
        )

    def stepped(self, worker: Trainer, iteration: int, gradients: list[Gradient]) -> None:
        """Check an update: the next iteration, and every microbatch of it once."""
        self.check(not worker.spoilt, f"{worker.name} updated after iteration {iteration} what was clipped by noise")
        expected = self._at.get(worker.name, -1)
        self.check(iteration == expected, f"{worker.name} updated after iteration {iteration} and not {expected}")
        self._at[worker.name] = iteration + 1
        whole = dict.fromkeys(range(worker.spec.microbatches), 1)
        for gradient in gradients:
            if dict(gradient) != whole:
                self.check(
                    False,
                    f"{worker.name} updated after iteration {iteration} in epoch {worker.core.epoch} with microbatches "
                    f"{sorted(gradient.elements())} instead of each of {worker.spec.microbatches} once",
                )
        self._flawless(worker, iteration)
        if worker.spec == self._specs[worker.spec.name]:
            self.steps.setdefault(worker.spec.name, {}).setdefault(iteration, worker.core.epoch)

    def wrote_model(self, worker: Trainer, updates: int) -> None:
        """Check a model that a worker has written: all updates are in it."""
        wanted = worker.spec.iterations
        self.check(updates == wanted, f"{worker.name} wrote a model of {updates} updates instead of {wanted}")
        if worker.spec == self._specs[worker.spec.name]:
            self._models.add(worker.spec.name)

    def _flawless(self, worker: Trainer, iteration: int) -> None:
        """Check, in the first update after a state was handed over, that all replicas have the same state."""
        task, epoch = worker.spec.name, worker.core.epoch
        key = (task, epoch, iteration)
        if epoch >= self._handed.get(task, epoch + 1):
            del self._handed[task]
            self._compared.add(key)
        self._flaws.setdefault(key, {}).setdefault(worker.place, set()).add(worker.flaw)
        self._check_alike(key)

    def compared(self, worker: Trainer) -> None:
        """Check that all replicas have the same state in an iteration whose state goes to storage."""
        key = (worker.spec.name, worker.core.epoch, worker.core.iteration)
        self._compared.add(key)
        self._flaws.setdefault(key, {}).setdefault(worker.place, set()).add(worker.flaw)
        self._check_alike(key)

    def _check_alike(self, key: tuple[str, int, int]) -> None:
        for place, flaws in self._flaws[key].items() if key in self._compared else ():
            self.check(
                len(flaws) == 1, f"{key[0]} goes on after iteration {key[2]} with several states of place {place}"
            )

    def _ordered_at(self, task: str, epoch: int) -> int:
        """Return up to which place in the journal was known what led to a membership of the task."""
        orders = [
            each for each in self.messages if isinstance(each, Regroup) and (each.task, each.epoch) == (task, epoch)
        ]
        return self._known[orders[-1].id]

    def _present_nodes(self, place: int) -> set[str]:
        """Return the nodes that are in use as far as the journal tells up to a place."""
        nodes: set[str] = set()
        for message in self.messages[:place]:
            match message:
                case NodeAdmitted(node=node):
                    nodes.add(node)
                case NodeGone(node=node) | FailureDetected(severity=Severity.SEV1, node=node):
                    nodes.discard(node)
        return nodes

    def given_up(self) -> set[str]:
        """Return the nodes that were given up for what happened on them and have not joined since."""
        nodes: set[str] = set()
        for message in self.messages:
            match message:
                case FailureDetected(severity=Severity.SEV1, node=node, method=method) if (
                    method is not DetectionMethod.NODE_HEALTH
                ):
                    nodes.add(node)
                case NodeAdmitted(node=node):
                    nodes.discard(node)
        return nodes

    # --- at the end --------------------------------------------------------------------------------------------------

    def unplanned(self) -> str:
        """Return what no plan has answered yet, empty where all is answered.

        The planner may be waiting for an answer of the bus that was lost: this is to be so in the end, not at once.
        """
        plans = {message.correlation for message in self.messages if isinstance(message, PlanDecided)}
        for message in self.messages:
            match message:
                case FailureDetected(severity=Severity.SEV1, correlation=cause, node=node) if cause not in plans:
                    return f"no plan answers the loss of {node}"
        held = [share.task for share in self.plan.shares if share.slots] if self.plan else []
        over = [task for task in held if task in self.ended]
        return f"{', '.join(over)} ended, and the plan in force still gives slots to it" if over else ""

    def all_answered(self) -> None:
        """Check that each fault that struck a worker has led to a failure or an order, and what finished is whole."""
        for worker, (node, task, since) in self.victims.items():
            ordered = any(isinstance(each, StopWorker) and each.worker == worker for each in self.messages)
            answered = any(
                isinstance(each, FailureDetected | NodeGone)
                and (getattr(each, "worker", "") == worker or (each.node == node and _takes_node(each)))
                for each in self.messages[since:]
            )
            done = ordered or answered or task in self.ended or self._is_unheard_of(worker, node, since)
            self.check(done, f"nothing was done about {worker} on {node}")
        for task, state in self.ended.items():
            if state is TaskState.FINISHED:
                whole = list(range(self._specs[task].iterations))
                self.check(sorted(self.steps.get(task, {})) == whole, f"{task} finished without some of its iterations")

    def _is_unheard_of(self, worker: str, node: str, since: int) -> bool:
        """Return whether nobody knew yet that a worker was there, and its node has joined anew without it.

        Then what was ordered of the node before has no effect any more, to all services, and is ordered again.
        """
        anew = (each for each in self.messages[since:] if isinstance(each, NodeAdmitted) and each.node == node)
        gone = any(worker not in {status.worker for status in each.workers} for each in anew)
        return gone and not any(isinstance(each, WorkerFact) and each.worker == worker for each in self.messages)


def _takes_node(message: Message) -> bool:
    return isinstance(message, NodeGone) or (isinstance(message, FailureDetected) and message.severity is Severity.SEV1)
