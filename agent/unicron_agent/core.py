"""The agent's decisions, pure: stimuli go in, facts for the bus and effects for the shell come out."""

import math

import msgspec

from unicron.authentication import received
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
from unicron_agent.hardware.hardware import Hardware
from unicron_agent.silence import Silence
from unicron_agent.snapshots.snapshots import NodeSnapshots
from unicron_agent.stimuli import (
    Adopted,
    AskToken,
    CopyReceived,
    CopySent,
    EntryRead,
    Kill,
    Leave,
    Logged,
    Notice,
    ObtainState,
    Out,
    ProcessExited,
    ProcessStarted,
    Published,
    Reconnected,
    Sampled,
    SendToWorker,
    StacksTaken,
    StartProcess,
    StateUnsound,
    Stimulus,
    StorageUsed,
    StoreToken,
    Tick,
    TokenRead,
    WorkerSaid,
)
from unicron_agent.workers.reports import report
from unicron_agent.workers.timings import Timings
from unicron_agent.workers.watch import PING_S, Watch
from unicron_agent.workers.workers import StallLimits, Worker

FRESH = 6
"""Heartbeats after joining that come at the agent's own pace: only then the server may tell of the end of an earlier
connection, for which the node is given up unless it is heard of within the grace."""

EARLY_S = 0.005
"""By so much a tick may come before the moment of a heartbeat, and be the one for it."""

AGAIN_S, NAME_TAKEN_S = 5.0, 15.0
"""How often a node tries to join whose name another one has, besides when that is given up, and for how long: it may be
gone, and nobody have noticed yet."""

ADOPTION_S = 0.5
"""How long adopted workers have to say where they are; they knock ten times a second."""


class AgentCore:
    """Everything the agent knows and decides.

    Facts come out with the correlation of their cause where they have one; the shell fills in the rest.

    Attributes:
        incarnation: under which the node joined last; each time another, so that commands to an earlier one are told
            apart. Empty before the first time.
        joined: place in the journal at which it did; None until that is known.
        given_up: place of the newest fact that gives this node up for its silence, -1 where there is none.
        token: fencing token of the last command that was believed; once the lease has been read, none above that.
        in_force: the highest token that may be believed: as the lease said, or an earlier agent stored.
        leave_s: within how many seconds it is to go, as it was told; None as long as it stays.
        released: nobody needs the node any more.
        left: it has said goodbye, and reads nothing more.
        fault: why it has by itself; empty where somebody has told it to go.
        snapshots: that lie in this node's memory.
        samples: by task, what its workers are to record, where somebody has switched that.
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
        self._held: list[Command] = []
        self._judged = 0
        self.workers: dict[str, Worker] = {}
        self.snapshots = NodeSnapshots(card.node, card.state_server)
        self._hardware = Hardware(card.node)
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
        """Take a stimulus in at `now`, in monotonic seconds; return facts and effects, each kind in its order."""
        self._now = now
        match stimulus:
            case WorkerSaid(name, message):
                return self._said(name, message, now)
            case ProcessStarted(name, pid):
                return self._started(name, pid, now)
            case StacksTaken(name, stacks):
                if name in self.workers:
                    self.workers[name].saw(stacks, now)
                return []
            case ProcessExited():
                return self._exited(stimulus)
            case Logged() | Sampled():
                return self._hardware.hear(stimulus, self.workers.values(), now)
        return [] if self.left else self._handle_unless_left(stimulus, now)

    def _handle_unless_left(self, stimulus: Stimulus, now: float) -> Out:
        out: Out = []
        match stimulus:
            case EntryRead():
                out = self._read(stimulus)
            case Tick():
                out = self._tick(now, stimulus)
            case CopySent() | CopyReceived() | StateUnsound() | StorageUsed():
                out = self.snapshots.handle(stimulus, self.workers, now)
            case TokenRead(token):
                out = self._judge(token)
            case Published(fact, sequence):
                out = self._published(fact, sequence)
            case Adopted():
                out = self._adopt(stimulus, now)
            case Reconnected() if self.incarnation:  # the others may hold this node to be lost
                out = self._join()
            case Notice(seconds):
                self.leave_s = seconds
                out = self._warn()
            case Leave():
                out = self._leave()
        return out

    # --- joining and leaving -----------------------------------------------------------------------------------------

    def _adopt(self, adopted: Adopted, now: float) -> Out:
        """Take over the workers of an earlier agent; the node joins when they have said where they are.

        Those in slots that the node has no more, as a GPU of it is gone, are ended.
        """
        out: Out = []
        for each in adopted.found:
            self.workers[each.worker] = Worker.adopted(each, now)
            if each.slot not in {slot.index for slot in self._card.slots}:
                out += self._stop(each.worker)
        self.snapshots.adopt(adopted.kept, adopted.saved)
        self._awaited, self._join_by = set(self.workers), now + ADOPTION_S
        return out if self._awaited else self._join()

    def _no_longer_awaited(self, name: str) -> Out:
        """Join for the first time once every adopted worker has spoken or is gone."""
        self._awaited.discard(name)
        return [] if self._awaited or self.incarnation or self.left else self._join()

    def _join(self) -> Out:
        """Say what there is on this node, each time under a new name: commands to the old one are out of date."""
        self._joins += 1
        self.incarnation, self.joined = f"{self._boot}.{self._joins}", None
        self._join_again_at = math.inf
        self._beats, self._beat_at = 0, 0.0
        present = [worker.status() for worker in self.workers.values() if not worker.stopping]
        card, kept = self._card, list(self.snapshots.found)
        return [msgspec.structs.replace(card, incarnation=self.incarnation, workers=present, kept=kept), *self._warn()]

    def _published(self, fact: Message, sequence: int) -> Out:
        if isinstance(fact, NodeJoined) and fact.incarnation == self.incarnation:
            self.joined, self._joined_at = sequence, fact.at
        return self._rejoin_if_given_up()

    def _rejoin_if_given_up(self) -> Out:
        """Join again where this node was given up for its silence after it joined.

        That fact may be late: of a connection that ended long before, or of an earlier agent.
        """
        return self._join() if self.joined is not None and self.given_up > self.joined else []

    def _warn(self) -> Out:
        """Say that this node is to go, if it is, under the name that it has now."""
        if self.leave_s is None or not self.incarnation:
            return []
        return [NodeLeaving(node=self.node, incarnation=self.incarnation, seconds=self.leave_s)]

    def _leave(self, fault: str = "") -> Out:
        """Say goodbye before any worker ends: whoever hears them end must know why.

        Of a name that another node has it is not the place of this one to say that it has left.
        """
        self.fault = fault
        out: Out = [NodeLeft(node=self.node, incarnation=self.incarnation, reason=fault)]
        if self._refused_at < math.inf:
            out = [Alert(text=f"a second node was not taken in: {fault}", node=self.node)] if fault else []
        for name in list(self.workers):
            out += self._stop(name)
        self.left = True
        return out

    # --- the journal -------------------------------------------------------------------------------------------------

    def _read(self, entry: EntryRead) -> Out:
        try:
            message = received(entry.subject, entry.data)
            if isinstance(message, RecordingSwitched):
                return self._switch(message)
        except InvalidInputError as error:
            return [DeadLetter(subject=entry.subject, error=str(error), payload=entry.data[:4096])]
        if isinstance(message, Command):
            return self._heed(message)
        if isinstance(message, NodeRefused) and message.incarnation == self.incarnation:
            return self._refused(message.reason)
        if isinstance(message, NodeAdmitted | NodePaced) and message.incarnation == self.incarnation:
            first = self._joins == 1 or self._refused_at < math.inf
            self._paced_s, self._refused_at = message.heartbeat_s, math.inf
            # only a node that is new and idle: where the registry's clock is wrong, all would end their workers
            fresh = isinstance(message, NodeAdmitted) and first and not self.workers
            if fresh and (off := clock_off(self._joined_at, message.at, entry.at)):
                return self._leave(off)
        if isinstance(message, FailureDetected) and (message.node, message.method) == (
            self.node,
            DetectionMethod.NODE_HEALTH,
        ):
            self.given_up = entry.sequence  # for what happens on it, a node is not to come back by itself
        return self._rejoin_if_given_up()

    def _refused(self, reason: str) -> Out:
        """Try again in a while, silently: a heartbeat would be taken for the other's; give up where that lives on."""
        self._refused_at = min(self._refused_at, self._now)
        if self._now - self._refused_at > NAME_TAKEN_S:
            return self._leave(reason)
        self._join_again_at = self._now + AGAIN_S
        return []

    def _switch(self, switched: RecordingSwitched) -> Out:
        """Have the workers of a task record another share of their iterations."""
        if problems := share_problems(switched.share):
            raise InvalidInputError(f"RecordingSwitched of task {switched.task!r}: {problems[0]}")
        sample = self.samples[switched.task] = Sample(period=period_of(switched.share))
        return [SendToWorker(name, sample) for name, worker in self.workers.items() if worker.task == switched.task]

    def _heed(self, command: Command) -> Out:
        """Obey a command of the sender that is known; for any other first look who may give commands.

        Who believed a number that was never given out would refuse every real command from then on.
        """
        if command.token == self.token and not self._held:
            return self.obey(command)
        self._held.append(command)
        return [] if self._judged else self._ask()

    def _ask(self) -> Out:
        self._judged = len(self._held)  # what comes after the question may be of a sender that comes after the answer
        return [AskToken()]

    def _judge(self, in_force: int) -> Out:
        """Obey or refuse the commands that waited for the lease to be read."""
        judged, self._held = self._held[: self._judged], self._held[self._judged :]
        before, self._judged = self.token, 0
        self.in_force, self.token = in_force, min(self.token, in_force)
        out: Out = [] if self.token == before else [StoreToken(self.token)]
        out += [each for command in judged for each in self.obey(command)]
        return out + (self._ask() if self._held else [])

    def obey(self, command: Command) -> Out:
        """Carry a command out, or say why not."""
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
        """Return whether to carry a command out: not one that was meant for the node before it joined anew.

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
                return self._start(command)
            case StopWorker(worker=name):
                return self._stop(name)
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

    def _start(self, command: StartWorker) -> Out:
        """Take the worker in at once, so that a StopWorker right behind finds it; its process comes when it can."""
        if command.worker in self.workers:
            return []  # heard before
        if command.slot not in {slot.index for slot in self._card.slots}:
            last = len(self._card.slots) - 1
            raise InvalidInputError(f"slot {command.slot}: {self.node} has slots 0 to {last}")
        others = self._in_slot(command.slot)
        taken = next((other.worker for other in others if not (other.stopping or other.finished)), None)
        if taken is not None:
            raise InvalidInputError(f"slot {command.slot} is taken by worker {taken}")
        self.workers[command.worker] = Worker(
            worker=command.worker,
            task=command.task,
            slot=command.slot,
            place=command.place,
            layout=command.layout,
            correlation=command.correlation,
            queued=command if others or command.wait_s else None,
            due=self._now + command.wait_s,
            silence=Silence(command.spec.may_be_silent_s, spins=any(slot.device for slot in self._card.slots)),
        )
        return [] if others or command.wait_s else [StartProcess(command)]

    def _in_slot(self, slot: int) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.slot == slot]

    def _started(self, name: str, pid: int, now: float) -> Out:
        worker = self.workers.get(name)
        if worker is None:
            return []
        worker.pid, worker.silence.heard_at = pid, now
        return [Kill(name)] if worker.stopping else []

    def _stop(self, name: str) -> Out:
        worker = self.workers.get(name)
        if worker is None:
            return []
        worker.stopping = True
        return [Kill(name)] if worker.queued is None else self._exited(ProcessExited(name))

    def _exited(self, exited: ProcessExited) -> Out:
        """A process is gone; its slot's next one, if that waits, can start."""
        worker = self.workers.pop(exited.worker, None)
        if worker is None:
            return []
        removed = self.snapshots.ended(exited.worker)
        tasks = {each.task for each in self.workers.values()}
        self._timings.keep(tasks)
        self._watch.keep(tasks)
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
        return [fact, *removed, *self._start_queued(worker.slot), *self._no_longer_awaited(worker.worker)]

    def _start_queued(self, slot: int) -> Out:
        match self._in_slot(slot):
            case [Worker(queued=StartWorker() as command) as waiting] if waiting.due <= self._now:
                waiting.queued = None
                return [StartProcess(command)]
        return []

    def _regroup(self, order: Regroup) -> Out:
        """Send each worker here that takes part its place in the new epoch, now and when it connects again."""
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

    def _said(self, name: str, message: ToAgent, now: float) -> Out:
        worker = self.workers.get(name)
        if worker is None:
            return []
        worker.note(message, now)
        out: Out = []
        match message:
            case Hello():
                out = self._greeted(worker, message, now)
            case FetchState(ref=ref):
                out = [ObtainState(name, ref)]
            case Saved():
                out = self.snapshots.saved(worker, message)
            case Joined():
                self.snapshots.goes_on(name)
            case Unprotected():
                self.snapshots.unprotected(name)
            case Diverged():
                out = self.snapshots.disown(name)
            case Iterated():
                out = [*self._timings.add(worker, message, self._together_with(worker), now)]
        return out + self._report(worker, message)

    def _greeted(self, worker: Worker, hello: Hello, now: float) -> Out:
        """Tell a worker that connects what it may have missed, and hear what the agent may have."""
        name, remembered = worker.worker, (worker.membership, self.samples.get(worker.task))
        told = [SendToWorker(name, each) for each in remembered if each]
        kept = self._said(name, hello.kept, now) if hello.kept else []
        return [*told, *self.snapshots.connected(name), *kept, *self._no_longer_awaited(name)]

    def _report(self, worker: Worker, message: ToAgent) -> Out:
        """Return the fact that a worker's message makes, where it is to be told."""
        if isinstance(message, Iterated) and message.rank > 0:
            return []  # one is enough
        if isinstance(message, Kept):
            if not self.snapshots.left_behind(worker.worker, message):
                return []
            message = msgspec.structs.replace(message, state=self.snapshots.at_this_node(message.state))
        return report(self.node, worker, message)

    def _together_with(self, worker: Worker) -> list[str]:
        """Return the workers here that are in its membership."""
        return [
            each.worker
            for each in self.workers.values()
            if (each.task, each.epoch) == (worker.task, worker.epoch) and not each.finished
        ]

    def _tick(self, now: float, tick: Tick) -> Out:
        """Say that this node lives, and look at its workers."""
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
        """Return when to beat next: as others on this machine do, unless there are many nodes, whose beats add up."""
        if self._beats >= FRESH and self._paced_s > self._heartbeat_s:
            return now + self._paced_s
        return ((now + EARLY_S) // self._heartbeat_s + 1) * self._heartbeat_s - EARLY_S

    def due_at(self) -> float:
        """Return when a tick has something to do, in monotonic seconds, unless the core is told something before."""
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
