"""The agent's decisions, pure: stimuli go in, facts for the bus and effects for the shell come out."""

import math

import msgspec

from unicron.authentication import authenticate
from unicron.checks import share_problems
from unicron.contracts.base import Message
from unicron.contracts.commands import (
    Command,
    CommitCheckpoint,
    CopyState,
    DropStates,
    FindCheckpoint,
    FindStates,
    Regroup,
    ReleaseNode,
    SaveStates,
    StartWorker,
    StopWorker,
    StoreState,
)
from unicron.contracts.events import (
    Alert,
    CommandRefused,
    DeadLetter,
    FailureDetected,
    NodeAdmitted,
    NodeHeartbeat,
    NodeJoined,
    NodeLeaving,
    NodeLeft,
    NodePaced,
    NodeRefused,
    WorkerExited,
)
from unicron.contracts.failures import DetectionMethod
from unicron.contracts.stragglers import RecordingSwitched
from unicron.contracts.timings import period_of
from unicron.contracts.worker import (
    Diverged,
    FetchState,
    Hello,
    Iterated,
    Joined,
    Kept,
    Membership,
    Sample,
    Saved,
    ToAgent,
    Unprotected,
)
from unicron.errors import InvalidInputError, StaleTokenError, UnicronError
from unicron_agent.hardware.clocks import clock_off
from unicron_agent.hardware.hardware import HardwareReports
from unicron_agent.life_signs import LifeSigns
from unicron_agent.snapshots.snapshots import NodeSnapshots
from unicron_agent.stimuli import (
    Adopted,
    CopyReceived,
    CopySent,
    DepartureNotice,
    EntryRead,
    Kill,
    Logged,
    ObtainState,
    Out,
    ProcessExited,
    ProcessStarted,
    Published,
    ReadToken,
    Reconnected,
    Sampled,
    SendToWorker,
    Shutdown,
    StacksTaken,
    StartProcess,
    StateUnsound,
    Stimulus,
    StorageUsed,
    StoreToken,
    Tick,
    TokenRead,
    WorkerMessage,
)
from unicron_agent.workers.reports import report
from unicron_agent.workers.timings import Timings
from unicron_agent.workers.watch import PING_S, Watch
from unicron_agent.workers.workers import LocalWorker, StallLimits

FRESH = 6
"""Heartbeats after joining that come at the agent's own pace. In that time the server may report the end of an earlier
connection, and the node is given up for it unless a heartbeat arrives within the grace period."""

EARLY_S = 0.005
"""How much earlier than its due moment a heartbeat may be sent, so that a tick just before it sends it."""

AGAIN_S, NAME_TAKEN_S = 5.0, 15.0
"""How often, and for how long, a node tries to join under a name that another node has: that one may be lost without
anybody having noticed."""

ADOPTION_S = 0.5
"""How long to wait for adopted workers to reconnect; they try ten times a second."""


class AgentCore:
    """Everything the agent knows and decides.

    Facts come out with the correlation of their cause where they have one; the shell fills in the rest.

    Attributes:
        incarnation: name under which the node joined last, a new one each time, so that commands to an earlier one can
            be ignored. Empty before the first join.
        joined: sequence in the journal of the last join; None until it is published.
        given_up: sequence of the newest fact that declares this node lost for its silence, -1 if there is none.
        token: fencing token of the last accepted command; never above the lease's once that has been read.
        in_force: the highest token that is accepted: the lease's, or the one that an earlier agent stored.
        leave_s: seconds until the node has to go; None while it stays.
        released: the services no longer need the node.
        left: the agent has published its goodbye, and reads nothing more.
        fault: why it left by itself; empty where it was asked to.
        snapshots: in this node's memory.
        samples: by task, what its workers record, where a user has switched that.
    """

    def __init__(
        self,
        card: NodeJoined,
        boot: str,
        token: int = 0,
        limits: StallLimits = StallLimits(),  # noqa: B008 it is frozen
        heartbeat_s: float = 0.5,
    ) -> None:
        """Make the core of a node's agent.

        Args:
            card: what the node joins with, but for incarnation and workers.
            boot: a name for this start of the agent, unlike that of any other.
            token: that an earlier agent of this node stored.
            limits: for workers without progress.
            heartbeat_s: seconds between signs of life.
        """
        self.node = card.node
        self.incarnation = ""
        self.joined: int | None = None
        self.given_up = -1
        self.token = self.in_force = token
        self._held_commands: list[Command] = []
        self._deciding = 0
        self.workers: dict[str, LocalWorker] = {}
        self.snapshots = NodeSnapshots(card.node, card.state_server)
        self._hardware = HardwareReports(card.node)
        self._timings, self._watch = Timings(card.node), Watch(card.node, limits)
        self.samples: dict[str, Sample] = {}
        self._card, self._boot, self._heartbeat_s = card, boot, heartbeat_s
        self._joins = 0
        self._awaited: set[str] = set()
        self._join_by = self._beat_at = self._paced_s = self._now = 0.0
        self._beats = 0
        self.leave_s: float | None = None
        self.released = self.left = False
        self.fault, self._joined_at = "", 0.0
        self._refused_at, self._join_again_at = math.inf, math.inf

    def handle(self, stimulus: Stimulus, now: float) -> Out:
        """Handle a stimulus at `now` (monotonic seconds); return facts and effects, each kind in its order."""
        self._now = now
        match stimulus:
            case WorkerMessage(name, message):
                return self._handle_worker_message(name, message, now)
            case ProcessStarted(name, pid):
                return self._process_started(name, pid, now)
            case StacksTaken(name, stacks):
                if name in self.workers:
                    self.workers[name].record_stacks(stacks, now)
                return []
            case ProcessExited():
                return self._exited(stimulus)
            case Logged() | Sampled():
                return self._hardware.report_new(stimulus, self.workers.values(), now)
        return [] if self.left else self._handle_unless_left(stimulus, now)

    def _handle_unless_left(self, stimulus: Stimulus, now: float) -> Out:
        out: Out = []
        match stimulus:
            case EntryRead():
                out = self._handle_entry(stimulus)
            case Tick():
                out = self._tick(now, stimulus)
            case CopySent() | CopyReceived() | StateUnsound() | StorageUsed():
                out = self.snapshots.handle(stimulus, self.workers, now)
            case TokenRead(token):
                out = self._decide_held_commands(token)
            case Published(fact, sequence):
                out = self._fact_published(fact, sequence)
            case Adopted():
                out = self._adopt(stimulus, now)
            case Reconnected() if self.incarnation:  # the others may hold this node to be lost
                out = self._join()
            case DepartureNotice(seconds):
                self.leave_s = seconds
                out = self._announce_departure()
            case Shutdown():
                out = self._say_goodbye()
        return out

    # --- joining and leaving -----------------------------------------------------------------------------------------

    def _adopt(self, adopted: Adopted, now: float) -> Out:
        """Take over the workers of an earlier agent; the node joins once they have reconnected.

        Workers in slots that the node no longer has, as after the loss of a GPU, are stopped.
        """
        out: Out = []
        for each in adopted.found:
            self.workers[each.worker] = LocalWorker.adopted(each, now)
            if each.slot not in {slot.index for slot in self._card.slots}:
                out += self._stop_worker(each.worker)
        self.snapshots.adopt(adopted.kept, adopted.saved)
        self._awaited, self._join_by = set(self.workers), now + ADOPTION_S
        return out if self._awaited else self._join()

    def _join_unless_awaiting(self, name: str) -> Out:
        """Join for the first time once every adopted worker has reconnected or ended."""
        self._awaited.discard(name)
        return [] if self._awaited or self.incarnation or self.left else self._join()

    def _join(self) -> Out:
        """Publish what is on this node under a new incarnation, which makes commands to the old one void."""
        self._joins += 1
        self.incarnation, self.joined = f"{self._boot}.{self._joins}", None
        self._join_again_at = math.inf
        self._beats, self._beat_at = 0, 0.0
        present = [worker.status() for worker in self.workers.values() if not worker.stopping]
        card, kept = self._card, list(self.snapshots.present)
        return [
            msgspec.structs.replace(card, incarnation=self.incarnation, workers=present, kept=kept),
            *self._announce_departure(),
        ]

    def _fact_published(self, fact: Message, sequence: int) -> Out:
        if isinstance(fact, NodeJoined) and fact.incarnation == self.incarnation:
            self.joined, self._joined_at = sequence, fact.at
        return self._rejoin_if_given_up()

    def _rejoin_if_given_up(self) -> Out:
        """Join again if the node was declared lost for its silence after it joined.

        That fact may be late: it may be about an earlier connection or an earlier agent.
        """
        return self._join() if self.joined is not None and self.given_up > self.joined else []

    def _announce_departure(self) -> Out:
        """Publish, if the node is to go, that it is, under its current incarnation."""
        if self.leave_s is None or not self.incarnation:
            return []
        return [NodeLeaving(node=self.node, incarnation=self.incarnation, seconds=self.leave_s)]

    def _say_goodbye(self, fault: str = "") -> Out:
        """Publish the goodbye, then stop the workers: services that see them end must know why.

        A node whose name another one holds must not announce that name's leave.
        """
        self.fault = fault
        out: Out = [NodeLeft(node=self.node, incarnation=self.incarnation, reason=fault)]
        if self._refused_at < math.inf:
            out = [Alert(text=f"a second node was not taken in: {fault}", node=self.node)] if fault else []
        for name in list(self.workers):
            out += self._stop_worker(name)
        self.left = True
        return out

    # --- the journal -------------------------------------------------------------------------------------------------

    def _handle_entry(self, entry: EntryRead) -> Out:
        try:
            message = authenticate(entry.subject, entry.data)
            if isinstance(message, RecordingSwitched):
                return self._switch_recording(message)
        except InvalidInputError as error:
            return [DeadLetter(subject=entry.subject, error=str(error), payload=entry.data[:4096])]
        if isinstance(message, Command):
            return self._obey_or_verify(message)
        if isinstance(message, NodeRefused) and message.incarnation == self.incarnation:
            return self._join_refused(message.reason)
        if isinstance(message, NodeAdmitted | NodePaced) and message.incarnation == self.incarnation:
            first = self._joins == 1 or self._refused_at < math.inf
            self._paced_s, self._refused_at = message.heartbeat_s, math.inf
            # only a node that is new and idle: where the registry's clock is wrong, all would end their workers
            fresh = isinstance(message, NodeAdmitted) and first and not self.workers
            if fresh and (off := clock_off(self._joined_at, message.at, entry.at)):
                return self._say_goodbye(off)
        if isinstance(message, FailureDetected) and (message.node, message.method) == (
            self.node,
            DetectionMethod.NODE_HEALTH,
        ):
            self.given_up = entry.sequence  # for what happens on it, a node is not to come back by itself
        return self._rejoin_if_given_up()

    def _join_refused(self, reason: str) -> Out:
        """Join again later, without heartbeats, which would count as the other node's; leave if that one stays."""
        self._refused_at = min(self._refused_at, self._now)
        if self._now - self._refused_at > NAME_TAKEN_S:
            return self._say_goodbye(reason)
        self._join_again_at = self._now + AGAIN_S
        return []

    def _switch_recording(self, switched: RecordingSwitched) -> Out:
        """Set the share of iterations that the workers of a task record."""
        if problems := share_problems(switched.share):
            raise InvalidInputError(f"RecordingSwitched of task {switched.task!r}: {problems[0]}")
        sample = self.samples[switched.task] = Sample(period=period_of(switched.share))
        return [SendToWorker(name, sample) for name, worker in self.workers.items() if worker.task == switched.task]

    def _obey_or_verify(self, command: Command) -> Out:
        """Obey a command that carries the known token; hold any other one until the lease has been read.

        An agent that accepted a forged high token would refuse every real command from then on.
        """
        if command.token == self.token and not self._held_commands:
            return self.obey(command)
        self._held_commands.append(command)
        return [] if self._deciding else self._ask_for_token()

    def _ask_for_token(self) -> Out:
        self._deciding = len(
            self._held_commands
        )  # what comes after the question may be of a sender that comes after the answer
        return [ReadToken()]

    def _decide_held_commands(self, in_force: int) -> Out:
        """Obey or refuse the commands that were held until the lease was read."""
        judged, self._held_commands = self._held_commands[: self._deciding], self._held_commands[self._deciding :]
        before, self._deciding = self.token, 0
        self.in_force, self.token = in_force, min(self.token, in_force)
        out: Out = [] if self.token == before else [StoreToken(self.token)]
        out += [each for command in judged for each in self.obey(command)]
        return out + (self._ask_for_token() if self._held_commands else [])

    def obey(self, command: Command) -> Out:
        """Carry out a command; return its output, or the refusal with its reason."""
        before, out = self.token, Out()
        try:
            if self.admit(command):
                out = self._carry_out(command)
        except UnicronError as error:
            given = command.token <= self.in_force  # else no attempt to do something to that worker has failed
            refused = CommandRefused(
                node=self.node,
                command=command.id,
                reason=str(error),
                task=getattr(command, "task", "") if given else "",
                worker=getattr(command, "worker", "") if given else "",
                correlation=command.correlation,
            )
            out = [refused]
        return [StoreToken(self.token), *out] if self.token > before else out

    def admit(self, command: Command) -> bool:
        """Return whether to carry out a command: not if it was meant for an earlier incarnation of the node.

        Raises:
            StaleTokenError: a later instance of the sender has spoken already, no instance has that token, or the
                command is for another node.
        """
        if command.node != self.node:
            raise StaleTokenError(f"{type(command).__name__} for node {command.node!r} came to {self.node!r}")
        if command.token < self.token:
            raise StaleTokenError(
                f"{type(command).__name__} carries fencing token {command.token}; {self.token} has been seen"
            )
        if command.token > self.in_force:
            raise StaleTokenError(
                f"{type(command).__name__} carries fencing token {command.token}, which nobody was given: the lease "
                f"holds {self.in_force}"
            )
        self.token = command.token
        return command.incarnation in {"", self.incarnation}

    def _carry_out(self, command: Command) -> Out:
        match command:
            case StartWorker():
                return self._start_worker(command)
            case StopWorker(worker=name):
                return self._stop_worker(name)
            case CopyState() | DropStates() | SaveStates() | FindStates():
                return self.snapshots.obey(command, self.workers.values())
            case StoreState() | CommitCheckpoint() | FindCheckpoint():
                return self.snapshots.obey(command, self.workers.values())
            case Regroup():
                return self._regroup(command)
            case ReleaseNode():
                self.released = self.leave_s is not None
        return []

    # --- workers -----------------------------------------------------------------------------------------------------

    def _start_worker(self, command: StartWorker) -> Out:
        """Add the worker now, so that a StopWorker right behind finds it; start its process once its slot is free."""
        if command.worker in self.workers:
            return []  # heard before
        if command.slot not in {slot.index for slot in self._card.slots}:
            last = len(self._card.slots) - 1
            raise InvalidInputError(f"slot {command.slot}: {self.node} has slots 0 to {last}")
        others = self._in_slot(command.slot)
        taken = next((other.worker for other in others if not (other.stopping or other.finished)), None)
        if taken is not None:
            raise InvalidInputError(f"slot {command.slot} is taken by worker {taken}")
        self.workers[command.worker] = LocalWorker(
            worker=command.worker,
            task=command.task,
            slot=command.slot,
            place=command.place,
            layout=command.layout,
            correlation=command.correlation,
            queued=command if others or command.wait_s else None,
            due=self._now + command.wait_s,
            life_signs=LifeSigns(command.spec.may_be_silent_s, spins=any(slot.device for slot in self._card.slots)),
        )
        return [] if others or command.wait_s else [StartProcess(command)]

    def _in_slot(self, slot: int) -> list[LocalWorker]:
        return [worker for worker in self.workers.values() if worker.slot == slot]

    def _process_started(self, name: str, pid: int, now: float) -> Out:
        worker = self.workers.get(name)
        if worker is None:
            return []
        worker.pid, worker.life_signs.heard_at = pid, now
        return [Kill(name)] if worker.stopping else []

    def _stop_worker(self, name: str) -> Out:
        worker = self.workers.get(name)
        if worker is None:
            return []
        worker.stopping = True
        return [Kill(name)] if worker.queued is None else self._exited(ProcessExited(name))

    def _exited(self, exited: ProcessExited) -> Out:
        """Report the end of a process, and start the worker that waits for its slot."""
        worker = self.workers.pop(exited.worker, None)
        if worker is None:
            return []
        removed = self.snapshots.worker_ended(exited.worker)
        tasks = {each.task for each in self.workers.values()}
        self._timings.keep_tasks(tasks)
        self._watch.keep_tasks(tasks)
        fact = WorkerExited(
            node=self.node,
            slot=worker.slot,
            task=worker.task,
            worker=worker.worker,
            exit_code=exited.exit_code,
            signal=exited.signal,
            expected=worker.stopping,
            finished=worker.finished,
            iteration=worker.iteration,
            microbatches_done=worker.done,
            stderr=list(exited.stderr),
            collectives=list(exited.collectives),
        )
        return [fact, *removed, *self._start_queued(worker.slot), *self._join_unless_awaiting(worker.worker)]

    def _start_queued(self, slot: int) -> Out:
        match self._in_slot(slot):
            case [LocalWorker(queued=StartWorker() as command) as waiting] if waiting.due <= self._now:
                waiting.queued = None
                return [StartProcess(command)]
        return []

    def _regroup(self, order: Regroup) -> Out:
        """Send each member on this node its membership of the new epoch, now and whenever it reconnects."""
        out: Out = []
        since = order.since or [order.epoch] * len(order.members)
        for member, rank, epoch in zip(order.members, order.ranks, since, strict=False):
            worker = self.workers.get(member.worker)
            if worker is not None:
                worker.correlation = order.correlation
                worker.membership = Membership(
                    epoch=order.epoch,
                    rendezvous=order.rendezvous,
                    rendezvous_id=order.rendezvous_id,
                    rank=rank,
                    world_size=order.world_size,
                    member=member,
                    layout=order.layout,
                    since=epoch,
                    leaving=order.leaving,
                    shelf=order.shelf if rank == 0 else None,
                    cause=order.cause,
                )
                out.append(SendToWorker(worker.worker, worker.membership))
        return out

    def _handle_worker_message(self, name: str, message: ToAgent, now: float) -> Out:
        worker = self.workers.get(name)
        if worker is None:
            return []
        worker.record_message(message, now)
        out: Out = []
        match message:
            case Hello():
                out = self._handle_hello(worker, message, now)
            case FetchState(ref=ref):
                out = [ObtainState(name, ref)]
            case Saved():
                out = self.snapshots.copy_saved(worker, message)
            case Joined():
                self.snapshots.forget_left_behind(name)
            case Unprotected():
                self.snapshots.record_unprotected(name)
            case Diverged():
                out = self.snapshots.remove_doubtful(name)
            case Iterated():
                out = [*self._timings.add(worker, message, self._members_here(worker), now)]
        return out + self._report(worker, message)

    def _handle_hello(self, worker: LocalWorker, hello: Hello, now: float) -> Out:
        """Send a worker that connects the messages that it may have missed, and handle what it left behind."""
        name, remembered = worker.worker, (worker.membership, self.samples.get(worker.task))
        told = [SendToWorker(name, each) for each in remembered if each]
        kept = self._handle_worker_message(name, hello.kept, now) if hello.kept else []
        return [*told, *self.snapshots.resend_order(name), *kept, *self._join_unless_awaiting(name)]

    def _report(self, worker: LocalWorker, message: ToAgent) -> Out:
        """Return the fact to publish for a worker's message, if any."""
        if isinstance(message, Iterated) and message.rank > 0:
            return []  # rank 0 reports for all
        if isinstance(message, Kept):
            if not self.snapshots.record_left_behind(worker.worker, message):
                return []
            message = msgspec.structs.replace(message, state=self.snapshots.at_this_node(message.state))
        return report(self.node, worker, message)

    def _members_here(self, worker: LocalWorker) -> list[str]:
        """Return the workers here that are in its membership."""
        return [
            each.worker
            for each in self.workers.values()
            if (each.task, each.epoch) == (worker.task, worker.epoch) and not each.finished
        ]

    def _tick(self, now: float, tick: Tick) -> Out:
        """Send the heartbeat and whatever else is due, and check the workers."""
        out = self.snapshots.tick(now)
        self._timings.pressure = tick.pressure
        for slot in [worker.slot for worker in self.workers.values() if worker.queued is not None]:
            out += self._start_queued(slot)
        if now >= (self._join_again_at if self.incarnation else self._join_by):
            out += self._join()
        if self.incarnation and now >= self._beat_at and self._refused_at == math.inf:
            self._beats += 1
            self._beat_at = self._next_beat(now)
            out.append(NodeHeartbeat(node=self.node, incarnation=self.incarnation))
        return out + self._watch.tick(self.workers, tick, now)

    def _next_beat(self, now: float) -> float:
        """Return when to send the next heartbeat: aligned with other agents of this machine, or at the detector's pace.

        The detector asks for a slower pace in a large cluster.
        """
        if self._beats >= FRESH and self._paced_s > self._heartbeat_s:
            return now + self._paced_s
        return ((now + EARLY_S) // self._heartbeat_s + 1) * self._heartbeat_s - EARLY_S

    def due_at(self) -> float:
        """Return when the next tick has something to do (monotonic seconds), if no other stimulus comes before."""
        workers = self.workers.values()
        if self.left or not self.incarnation or any(worker.queued is not None for worker in workers):
            return -math.inf
        return min(
            [
                self._beat_at,
                self._join_again_at,
                self.snapshots.due_at(),
                *(each.heard_at + PING_S for each in workers if each.pid),
            ]
        )
