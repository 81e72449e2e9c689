"""A detector in a world of its own: timers, heartbeats and a clock, all of them driven by the test."""

import errno

import msgspec
from unicron_detector.core import DetectorCore
from unicron_detector.state import DetectorLimits, DetectorState

from helpers.unwalked import Unwalked
from unicron import rules
from unicron.contracts.base import (
    BusReconnected,
    CancelTimer,
    ConnectionLost,
    Message,
    SetTimer,
    Started,
    TelemetryDropped,
    TimerFired,
)
from unicron.contracts.commands import StartWorker
from unicron.contracts.events import (
    AttemptFailed,
    CollectiveFailed,
    NodeAdmitted,
    NodeHeartbeat,
    Regrouped,
    StateDiverged,
    TaskSubmitted,
    WorkerAsleep,
    WorkerAway,
    WorkerExited,
    WorkerGrows,
    WorkerRaised,
    WorkerStalled,
)
from unicron.contracts.tasks import Breakage, TaskSpec, WorkerStatus
from unicron.errors import explain_lack

RULES = rules.load()


class DetectorHarness:
    """Feeds messages in, keeps timers as the shell does, and returns what is neither timer nor cancellation."""

    def __init__(self, limits=None):
        self.limits = limits or DetectorLimits()
        self.detector = DetectorCore(None, RULES, self.limits)
        self.now = 1000.0
        self.timers = {}
        self.beating, self.ahead = {}, {}
        self.places = {}
        self.feed(Started(token=1, at=self.now))

    def feed(self, *messages: Message) -> list[Message]:
        out = []
        for message in messages:
            for outcome in self._handle(message):
                match outcome:
                    case SetTimer(name=name, after_s=after_s):
                        self.timers[name] = self.now + after_s
                    case CancelTimer(name=name):
                        self.timers.pop(name, None)
                    case _:
                        out.append(outcome)
        return out

    def _handle(self, message: Message) -> list[Message]:
        """Hand a message to the core: only at a tick, or after it was deaf, it goes through all workers and nodes."""
        state, name = self.detector.state, message.name if isinstance(message, TimerFired) else ""
        held_up = self.now > self.timers.get(name, self.now)
        if not (held_up or name == "tick" or isinstance(message, Started | BusReconnected | TelemetryDropped)):
            state.workers, state.nodes = Unwalked(state.workers), Unwalked(state.nodes)
        try:
            return self.detector.handle(message)
        finally:
            state.workers, state.nodes = dict(dict.items(state.workers)), dict(dict.items(state.nodes))

    def wait(self, seconds: float) -> list[Message]:
        """Let time pass: nodes that are alive beat every half second, timers fire when they are due."""
        out, end = [], self.now + seconds
        beat = self.now
        while True:
            due = min([*self.timers.values(), beat, end])
            self.now = max(self.now, due)
            if self.now >= end:
                return out
            if beat <= self.now:
                out += self.feed(*(self._beat(node) for node in self.beating))
                beat += 0.5
            for name in [name for name, at in self.timers.items() if at <= self.now]:
                del self.timers[name]
                out += self.feed(TimerFired(name=name, at=self.now))

    def _beat(self, node):
        return NodeHeartbeat(node=node, incarnation=self.beating[node], at=self.now + self.ahead.get(node, 0.0))

    def restart(self) -> list[Message]:
        """End the detector's process and start it again from its last commit; its timers are part of that."""
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(self.detector.state), type=DetectorState)
        self.detector = DetectorCore(state, RULES, self.limits)
        return self.feed(Started(token=2, at=self.now))

    # --- facts -------------------------------------------------------------------------------------------------------

    def join(self, *nodes, incarnation="a", workers=(), host=""):
        out = []
        for node in nodes:
            self.beating[node] = incarnation
            status = [WorkerStatus(worker=w, task=t, slot=0) for w, t in workers]
            out += self.feed(
                NodeAdmitted(node=node, incarnation=incarnation, host=host or f"of-{node}", slots=[], workers=status)
            )
        return out

    def run(self, task="gpt", epoch=0, **places):
        """Put workers (name=node) into a membership of the task."""
        out = []
        if task not in self.detector.state.tasks:
            out += self.submit(task)
        for rank, (worker, node) in enumerate(places.items()):
            out += self.start(worker, node, task)
            joined = Regrouped(**self.places[worker], epoch=epoch, rank=rank, world_size=len(places), iteration=0)
            out += self.feed(joined)
        return out

    def submit(self, task="gpt"):
        return self.feed(TaskSubmitted(task=task, spec=TaskSpec(name=task, command=["x"])))

    def start(self, worker, node, task="gpt", slot=0, token=0):
        """Order a worker, once."""
        self.places[worker] = {"node": node, "slot": slot, "task": task, "worker": worker}
        if worker in self.detector.state.workers:
            return []
        return self.feed(StartWorker(**self.places[worker], token=token, spec=TaskSpec(name=task, command=["x"])))

    def silence(self, node):
        """Kill the machine: no more heartbeats."""
        del self.beating[node]

    def disconnect(self, node, reason="Client Closed", boot=None):
        known = self.detector.state.nodes.get(node)
        if boot is None:
            boot = known.incarnation.partition(".")[0] if known else "a"
        return self.feed(ConnectionLost(node=node, boot=boot, reason=reason))

    def exit(self, worker, **how):
        return self.feed(WorkerExited(**self.places[worker], **how))

    def throw(self, worker, exception="ValueError", text="bad", iteration=3, traceback="Traceback ..."):
        told = {"exception": exception, "text": text, "traceback": traceback}
        return self.feed(WorkerRaised(**self.places[worker], iteration=iteration, **told))

    def collective(self, worker, epoch=0, error="Connection closed by peer", iteration=3):
        return self.feed(CollectiveFailed(**self.places[worker], epoch=epoch, iteration=iteration, error=error))

    def stateless(self, worker, epoch=0, error="no source of the state answers"):
        """Let a worker report that nobody could hand it the state it needs."""
        fact = CollectiveFailed(**self.places[worker], epoch=epoch, iteration=3, error=error, broke=Breakage.STATE)
        return self.feed(fact)

    def lack(self, worker, epoch):
        """Let a worker report that its node has no room for the state it needs."""
        error = explain_lack(OSError(errno.ENOSPC, "No space left on device"))
        told = {"epoch": epoch, "iteration": 0, "error": error, "broke": Breakage.LACK}
        return self.feed(CollectiveFailed(**self.places[worker], **told))

    def diverge(self, worker, epoch=0):
        """Let a worker find that its state is not what other replicas have."""
        told = {"iteration": 3, "place": 0, "replica": 1, "digests": ["a", "b", "a"]}
        return self.feed(StateDiverged(**self.places[worker], epoch=epoch, **told))

    def stall(self, worker, epoch=0, phase="compute", responsive=True, asleep=False, collectives=()):
        seen = {"phase": phase, "responsive": responsive, "asleep": asleep, "collectives": list(collectives)}
        at = {**self.places[worker], "epoch": epoch, "iteration": 3}
        return self.feed(WorkerStalled(**at, waited_s=3.0, limit_s=2.0, **seen))

    def sleep(self, worker, epoch=0):
        fact = WorkerAsleep(**self.places[worker], epoch=epoch, iteration=3, waited_s=1.8, limit_s=3.0)
        return self.feed(fact)

    def away(self, worker, epoch=0, iteration=3):
        """Let a worker's script be busy before an iteration."""
        return self.feed(WorkerAway(**self.places[worker], epoch=epoch, iteration=iteration, waited_s=10.0))

    def grow(self, worker, epoch=0, iteration=3):
        """Let a worker end an iteration whose memory grows without end."""
        how = {"used": 2**33, "left": 2**31, "rate": 2.0**20}
        return self.feed(WorkerGrows(**self.places[worker], epoch=epoch, iteration=iteration, **how))

    def give_up(self, action, worker, task="gpt", reason="in vain"):
        place = self.places[worker]
        fact = AttemptFailed(task=task, action=action, reason=reason, node=place["node"], slot=0, worker=worker)
        return self.feed(fact)


def scene_of(*nodes, limits=None, **workers):
    """Return a detector that knows these nodes, and a task whose workers (name=node) run on them."""
    scene = DetectorHarness(limits)
    scene.join(*nodes)
    if workers:
        scene.run(**workers)
    return scene


def brief(messages):
    """Return the fields of a failure as a tuple; other messages by their type."""
    found = []
    for each in messages:
        if type(each).__name__ == "FailureDetected":
            found.append((int(each.severity), each.status, each.worker or each.node))
        else:
            found.append(type(each).__name__)
    return found
