"""The agent's decisions, pure: stimuli go in, facts for the bus and effects for the shell come out."""

import math

import msgspec

from unicron.authentication import authenticate
from unicron.contracts import commands
from unicron.contracts.commands import Command, StartWorker
from unicron.contracts.events import CommandRefused, DeadLetter, NodeJoined
from unicron.contracts.stragglers import RecordingSwitched
from unicron.contracts.timings import period_of
from unicron.contracts.watchdogs import LogPattern
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
from unicron.healing import way_of
from unicron_agent import stimuli
from unicron_agent.effects import Kill, ObtainState, Out, SendToWorker, StartProcess, StoreToken
from unicron_agent.fencing import Fencing
from unicron_agent.hardware.hardware import HardwareReports
from unicron_agent.life_signs import LifeSigns
from unicron_agent.presence import Presence
from unicron_agent.snapshots.snapshots import NodeSnapshots, SnapshotCommand
from unicron_agent.stimuli import Observation, Stimulus
from unicron_agent.watchdogs.limits import WatchdogLimits
from unicron_agent.watchdogs.watchdogs import Watchdogs
from unicron_agent.workers.reports import exit_fact, report
from unicron_agent.workers.revival import Revival
from unicron_agent.workers.timings import Timings
from unicron_agent.workers.watch import PING_S, Watch
from unicron_agent.workers.workers import LocalWorker, StallLimits


class AgentCore:
    """Everything the agent knows and decides.

    Facts come out with the correlation of their cause where they have one; the shell fills in the rest.

    Attributes:
        presence: how the node stands in the cluster.
        fencing: which commands count.
        released: the services no longer need the node.
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
        watchdogs: WatchdogLimits = WatchdogLimits(),  # noqa: B008 likewise
    ) -> None:
        """Make the core of a node's agent.

        Args:
            card: what the node joins with, but for incarnation and workers.
            boot: a name for this start of the agent, unlike that of any other.
            token: that an earlier agent of this node stored.
            limits: for workers without progress.
            heartbeat_s: seconds between signs of life.
            watchdogs: when to give an alert.
        """
        self.node = card.node
        self.presence, self.fencing = Presence(card, boot, heartbeat_s), Fencing(token)
        self.workers: dict[str, LocalWorker] = {}
        self.snapshots = NodeSnapshots(card.node, card.state_server)
        self._hardware, self._watchdogs = HardwareReports(card.node), Watchdogs(card.node, watchdogs)
        self._timings, self._watch = Timings(card.node), Watch(card.node, limits)
        self.samples: dict[str, Sample] = {}
        self._revival = Revival(card.node)
        self._slots = card.slots
        self._now = 0.0
        self.released = False

    @property
    def watch_log(self) -> dict[str, list[LogPattern]]:
        """What the workers here are watched for, by task."""
        return self._watchdogs.patterns

    def handle(self, stimulus: Stimulus, now: float) -> Out:
        """Handle a stimulus at `now` (monotonic seconds); return facts and effects, each kind in its order."""
        self._now = now
        match stimulus:
            case stimuli.WorkerMessage(name, message):
                return self._handle_worker_message(name, message, now)
            case stimuli.ProcessStarted(name, pid):
                return self._process_started(name, pid, now)
            case stimuli.StacksTaken(name, stacks):
                if name in self.workers:
                    self.workers[name].record_stacks(stacks, now)
                return []
            case stimuli.ProcessExited():
                return self._exited(stimulus)
            case (
                stimuli.Logged()
                | stimuli.Sampled()
                | stimuli.MachineMeasured()
                | stimuli.PatternMatched()
                | stimuli.TrialEnded()
            ):
                return self._observe(stimulus, now)
        return [] if self.presence.left else self._handle_unless_left(stimulus, now)

    def _observe(self, stimulus: Observation, now: float) -> Out:
        """Return what there is to say of what was seen of the machine, of a trial, or in what a worker writes."""
        match stimulus:
            case stimuli.TrialEnded(fact):
                return [fact]
            case stimuli.MachineMeasured():
                return [*self._watchdogs.measured(stimulus, self.workers, now)]
            case stimuli.PatternMatched(name):
                worker = self.workers.get(name)
                return [*self._watchdogs.matched(stimulus, worker, now)] if worker else []
            case stimuli.Sampled(gpus):
                return [*self._hardware.report_new(stimulus, (), now), *self._watchdogs.sampled(gpus, now)]
        return self._hardware.report_new(stimulus, self.workers.values(), now)

    def _handle_unless_left(self, stimulus: Stimulus, now: float) -> Out:
        out: Out = []
        match stimulus:
            case stimuli.EntryRead():
                out = self._handle_entry(stimulus)
            case stimuli.Tick():
                out = self._tick(now, stimulus)
            case stimuli.CopySent() | stimuli.CopyReceived() | stimuli.StateUnsound() | stimuli.StorageUsed():
                out = self.snapshots.handle(stimulus, self.workers, now)
            case stimuli.StandbyEnded() | stimuli.StandbyReady():
                out = self._revival.handle(stimulus, now)
            case stimuli.TokenRead(token):
                out = self._obey_held_commands(token)
            case stimuli.Published(fact, sequence):
                self.presence.record_published(fact, sequence)
                out = self._rejoin_if_given_up()
            case stimuli.Adopted():
                out = self._adopt(stimulus, now)
            case stimuli.Reconnected() if self.presence.incarnation:  # the others may hold this node to be lost
                out = self._join()
            case stimuli.DepartureNotice() | stimuli.Shutdown():
                out = self._prepare_to_end(stimulus)
        return out

    # --- joining and leaving -----------------------------------------------------------------------------------------

    def _adopt(self, adopted: stimuli.Adopted, now: float) -> Out:
        """Take over the workers of an earlier agent; the node joins once they have reconnected.

        Workers in slots that the node no longer has, as after the loss of a GPU, are stopped.
        """
        out: Out = []
        for each in adopted.found:
            self.workers[each.worker] = LocalWorker.adopted(each, now)
            self._watchdogs.started(each.task, each.watch_log, now)
            if each.slot not in {slot.index for slot in self._slots}:
                out += self._stop_worker(each.worker)
        self.snapshots.adopt(adopted.kept, adopted.saved)
        return out if self.presence.await_workers(self.workers, now) else self._join()

    def _join_if_complete(self, name: str) -> Out:
        """Join for the first time once every adopted worker has reconnected or ended."""
        return self._join() if self.presence.is_complete(name) else []

    def _join(self) -> Out:
        """Publish what is on this node."""
        present = [worker.status() for worker in self.workers.values() if not worker.stopping]
        return self.presence.join(present, list(self.snapshots.present))

    def _rejoin_if_given_up(self) -> Out:
        return self._join() if self.presence.is_given_up() else []

    def _prepare_to_end(self, order: stimuli.DepartureNotice | stimuli.Shutdown) -> Out:
        if isinstance(order, stimuli.Shutdown):
            return self._say_goodbye()
        self.presence.leave_s = order.seconds
        return self.presence.announce_departure()

    def _say_goodbye(self, fault: str = "") -> Out:
        """Publish the goodbye, then stop the workers: services that see them end must know why."""
        out = self.presence.say_goodbye(fault)
        for name in list(self.workers):
            out += self._stop_worker(name)
        return out

    # --- the journal -------------------------------------------------------------------------------------------------

    def _handle_entry(self, entry: stimuli.EntryRead) -> Out:
        try:
            message = authenticate(entry.subject, entry.data)
            if isinstance(message, RecordingSwitched):
                return self._switch_recording(message)
        except InvalidInputError as error:
            return [DeadLetter(subject=entry.subject, error=str(error), payload=entry.data[:4096])]
        if isinstance(message, Command):
            return self._obey_or_verify(message)
        fault = self.presence.record_entry(message, entry, self._now)
        return self._say_goodbye(fault) if fault else self._rejoin_if_given_up()

    def _switch_recording(self, switched: RecordingSwitched) -> Out:
        """Set the share of iterations that the workers of a task record."""
        sample = self.samples[switched.task] = Sample(period=period_of(switched.share))
        return [SendToWorker(name, sample) for name, worker in self.workers.items() if worker.task == switched.task]

    def _obey_or_verify(self, command: Command) -> Out:
        """Obey a command that carries the known token; hold any other one until the lease has been read."""
        return self.obey(command) if self.fencing.is_verified(command) else self.fencing.hold(command)

    def _obey_held_commands(self, in_force: int) -> Out:
        """Obey or refuse the commands that were held until the lease was read."""
        ready, out = self.fencing.release(in_force)
        out += [each for command in ready for each in self.obey(command)]
        return out + self.fencing.ask()

    def obey(self, command: Command) -> Out:
        """Carry out a command; return its output, or the refusal with its reason."""
        before, out = self.fencing.token, Out()
        try:
            if self.admit(command):
                out = self._carry_out(command)
        except UnicronError as error:
            given = command.token <= self.fencing.in_force  # else no attempt to do something to that worker has failed
            refused = CommandRefused(
                node=self.node,
                command=command.id,
                reason=str(error),
                task=getattr(command, "task", "") if given else "",
                worker=getattr(command, "worker", "") if given else "",
                token=command.token if given else -1,
                correlation=command.correlation,
            )
            out = [refused]
        return [StoreToken(self.fencing.token), *out] if self.fencing.token > before else out

    def admit(self, command: Command) -> bool:
        """Return whether to carry out a command: not if it was meant for an earlier incarnation of the node.

        Raises:
            StaleTokenError: a later instance of the sender has spoken already, no instance has that token, or the
                command is for another node.
        """
        if command.node != self.node:
            raise StaleTokenError(f"{type(command).__name__} for node {command.node!r} came to {self.node!r}")
        self.fencing.admit(command)
        return command.incarnation in {"", self.presence.incarnation}

    def _carry_out(self, command: Command) -> Out:
        match command:
            case StartWorker():
                return self._start_worker(command)
            case commands.StopWorker(worker=name):
                return self._stop_worker(name)
            case commands.Regroup():
                return self._regroup(command)
            case commands.ReleaseNode():
                self.released = self.presence.leave_s is not None
        return self.snapshots.obey(command, self.workers.values()) if isinstance(command, SnapshotCommand) else []

    # --- workers -----------------------------------------------------------------------------------------------------

    def _start_worker(self, command: StartWorker) -> Out:
        """Add the worker now, so that a StopWorker right behind finds it; start its process once its slot is free."""
        if command.worker in self.workers:
            return []  # heard before
        if command.slot not in {slot.index for slot in self._slots}:
            last = len(self._slots) - 1
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
            life_signs=LifeSigns(
                way_of(command.spec).silence_s(command.spec), spins=any(slot.device for slot in self._slots)
            ),
        )
        self._watchdogs.started(command.task, command.spec.watch_log, self._now + command.wait_s)
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
        return [Kill(name)] if worker.queued is None else self._exited(stimuli.ProcessExited(name))

    def _exited(self, exited: stimuli.ProcessExited) -> Out:
        """Report the end of a process, and start the worker that waits for its slot."""
        worker = self.workers.pop(exited.worker, None)
        if worker is None:
            return []
        removed = self.snapshots.worker_ended(exited.worker)
        tasks = {each.task for each in self.workers.values()}
        self._timings.keep_tasks(tasks)
        self._watch.keep_tasks(tasks)
        self._watchdogs.keep(self.workers)
        fact = exit_fact(self.node, worker, exited)
        return [fact, *removed, *self._start_queued(worker.slot), *self._join_if_complete(worker.worker)]

    def _start_queued(self, slot: int) -> Out:
        match self._in_slot(slot):
            case [LocalWorker(queued=StartWorker() as command) as waiting] if waiting.due <= self._now:
                waiting.queued = None
                return [StartProcess(command)]
        return []

    def _regroup(self, order: commands.Regroup) -> Out:
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
                out += self._watchdogs.iterated(worker, message.iteration, now)
        return out + self._report(worker, message)

    def _handle_hello(self, worker: LocalWorker, hello: Hello, now: float) -> Out:
        """Send a worker that connects the messages that it may have missed, and handle what it left behind."""
        name, remembered = worker.worker, (worker.membership, self.samples.get(worker.task))
        queued = [SendToWorker(name, each) for each in remembered if each]
        kept = self._handle_worker_message(name, hello.kept, now) if hello.kept else []
        return [*queued, *self.snapshots.resend_order(name), *kept, *self._join_if_complete(name)]

    def _report(self, worker: LocalWorker, message: ToAgent) -> Out:
        """Return the fact to publish for a worker's message, if any."""
        if isinstance(message, Iterated) and message.rank > 0:
            return []  # rank 0 reports for all
        if isinstance(message, Kept):
            if not self.snapshots.record_left_behind(worker.worker, message):
                return []
            message = msgspec.structs.replace(message, state=self.snapshots.at_this_node(message.state))
        return [*report(self.node, worker, message)]

    def _members_here(self, worker: LocalWorker) -> list[str]:
        """Return the workers here that are in its membership."""
        here = worker.task, worker.epoch
        return [each.worker for each in self.workers.values() if (each.task, each.epoch) == here and not each.finished]

    def _tick(self, now: float, tick: stimuli.Tick) -> Out:
        """Send the heartbeat and whatever else is due, and check the workers."""
        out = self.snapshots.tick(now) + self._revival.tick(now)
        self._timings.pressure = tick.pressure
        for slot in [worker.slot for worker in self.workers.values() if worker.queued is not None]:
            out += self._start_queued(slot)
        if self.presence.must_join(now):
            out += self._join()
        return out + self.presence.beat(now) + self._watch.tick(self.workers, tick, now)

    def due_at(self) -> float:
        """Return when the next tick has something to do (monotonic seconds), if no other stimulus comes before."""
        workers = self.workers.values()
        if any(worker.queued is not None for worker in workers):
            return -math.inf
        pings = (each.heard_at + PING_S for each in workers if each.pid)
        return min([self.presence.due_at(), self.snapshots.due_at(), self._revival.due_at(), *pings])
