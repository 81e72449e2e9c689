"""Facts, in the past tense: what agents saw and what services decided."""

from typing import Annotated

import msgspec

from unicron.contracts.base import Message
from unicron.contracts.failures import Cure, DetectionMethod, FailureStatus, Severity
from unicron.contracts.plans import Plan
from unicron.contracts.ranges import Count, Few, Label, Many, Moment, Name, Number, Seconds, Text, Who, Whole
from unicron.contracts.states import StateRef
from unicron.contracts.storage import Saving, StoredPart, StoredState
from unicron.contracts.tasks import Breakage, Member, Slot, TaskSpec, TaskState, WorkerPhase, WorkerStatus
from unicron.contracts.timings import MOST_OPS, Op


class WorkerFact(Message, kw_only=True, frozen=True):
    """Base of what is told of one worker process: its name, its task, and the slot that it runs in."""

    node: Name
    slot: Number
    task: Name
    worker: Name


# --- from agents -----------------------------------------------------------------------------------------------------


class NodeJoined(Message, kw_only=True, frozen=True):
    """An agent has started, or has come back.

    Attributes:
        incarnation: differs for each start of the agent.
        host: address at which other nodes reach this one.
        rendezvous: host:port of the node's rendezvous, where the ranks of a membership find one another.
        state_server: host:port of the gRPC state server.
        workers: living workers that the agent found and adopted.
        kept: names of the states that lie in its memory: left behind, saved, or copies of what others save.
        rack: nodes of one rack, or behind one switch, fail together; empty where that is not known.
        home: of the machine, since it was started, and the run folder: the same for an agent that is started again
            there, another for a second one of that name; empty where that is not known.
    """

    node: Name
    incarnation: Label
    host: Label
    slots: Annotated[list[Slot], Few]
    rendezvous: Label = ""
    state_server: Label = ""
    pid: Count = 0
    workers: Annotated[list[WorkerStatus], Few] = []
    kept: Annotated[list[Label], Few] = []
    rack: Label = ""
    home: Label = ""


class NodeLeft(Message, kw_only=True, frozen=True):
    """An agent said goodbye: its workers are stopped and it goes away on purpose.

    Attributes:
        reason: why it does not stay, of what a person has to mend; empty where somebody has ended it.
    """

    node: Name
    incarnation: Label
    reason: Text = ""


class NodeLeaving(Message, kw_only=True, frozen=True):
    """An agent was told that its node is to go; until it leaves, it hands over what others count on.

    Attributes:
        seconds: after which it leaves in any case.
    """

    node: Name
    incarnation: Label
    seconds: Seconds


class WorkerReady(WorkerFact, kw_only=True, frozen=True):
    """A worker has built its model and waits for a membership."""

    pid: Count


class WorkerExited(WorkerFact, kw_only=True, frozen=True):
    """A worker process ended.

    Attributes:
        exit_code: None where a signal ended it or the status is not known.
        signal: number of the signal that ended it.
        expected: it was told to stop.
        finished: it had reported the end of its last iteration.
        iteration: iteration it was computing, -1 before the first.
        microbatches_done: microbatches it had finished of that iteration.
        stderr: its last lines of output.
        collectives: a line for each that was under way when torch's watchdog ended it, from the file that this wrote.
    """

    exit_code: Whole | None = None
    signal: Whole | None = None
    expected: bool = False
    finished: bool = False
    iteration: Number = -1
    microbatches_done: Count = 0
    stderr: Annotated[list[Text], Few] = []
    collectives: Annotated[list[Text], Few] = []


class WorkerRaised(WorkerFact, kw_only=True, frozen=True):
    """An exception left a worker's script; the process is about to exit.

    Attributes:
        exception: qualified name of its class.
        text: its message.
    """

    iteration: Number
    exception: Text
    text: Text
    traceback: Text


class CollectiveFailed(WorkerFact, kw_only=True, frozen=True):
    """A worker can't go on in its membership and waits for a new one.

    Attributes:
        broke: what it was that broke.
    """

    epoch: Number
    iteration: Number
    error: Text
    broke: Breakage = Breakage.GROUP


class WorkerStalled(WorkerFact, kw_only=True, frozen=True):
    """A worker made no progress for longer than its limit.

    Attributes:
        phase: `COMPUTE` or `REDUCE`.
        waited_s: seconds since its last sign of progress; of life, where its process is stopped.
        limit_s: what was allowed: three times its usual microbatch, with a floor.
        responsive: whether it answers; a stopped process does not.
        asleep: all its processes sleep, and it is the only one of its task on its node of which that is so.
        stacks: where its Python threads were when half of that was over (a quarter before it was, where it is silent),
            innermost call first; those that told before their agent could look are empty.
        collectives: a line for each collective that was under way then in the workers of its task on its node, its own
            first; then one for each of these that was in none. Of one that is stopped there is no line.
        silent: nobody watches its script, and it shows no sign of life, as no other of its task on its node does. Told
            again as long as that lasts: only where all ranks are silent at once they hang.
    """

    epoch: Number
    iteration: Number
    phase: WorkerPhase
    waited_s: Seconds
    limit_s: Seconds
    responsive: bool
    asleep: bool = False
    stacks: Annotated[list[Text], Few] = []
    collectives: Annotated[list[Text], Few] = []
    silent: bool = False


class WorkerAsleep(WorkerFact, kw_only=True, frozen=True):
    """All processes of a worker sleep in the middle of a microbatch, for half as long as they may.

    If nothing changes, `WorkerStalled` follows; by then it is known who else of its task sleeps.

    Attributes:
        waited_s: seconds since its last sign of progress.
        limit_s: what is allowed.
    """

    epoch: Number
    iteration: Number
    waited_s: Seconds
    limit_s: Seconds


class WorkerAway(WorkerFact, kw_only=True, frozen=True):
    """What a worker's script does between two iterations takes long, such as an evaluation; others may wait for it.

    Attributes:
        epoch: of the newest membership that it is to be in; it is told again for each.
        iteration: that comes next.
        waited_s: seconds since the last update.
    """

    epoch: Number
    iteration: Number
    waited_s: Seconds


class Regrouped(WorkerFact, kw_only=True, frozen=True):
    """A worker is in a new membership and computes again.

    Attributes:
        iteration: the iteration it goes on with.
        kept: microbatches of that iteration finished before, by any member, and not computed again.
        recomputed: microbatches of that iteration taken over from ranks that were lost.
        state_from: worker whose state it took, empty where it kept its own.
        seconds: from the interruption to the new group ready.
    """

    epoch: Number
    rank: Number
    world_size: Count
    iteration: Number
    kept: Count = 0
    recomputed: Count = 0
    state_from: Label = ""
    seconds: Seconds = 0.0


class StateKept(WorkerFact, kw_only=True, frozen=True):
    """A worker has left its state behind in its node's memory, where it outlives the worker.

    Attributes:
        epoch: of the membership that it leaves.
    """

    epoch: Number
    state: StateRef


class StateSecured(WorkerFact, kw_only=True, frozen=True):
    """A worker's state is safe: all copies of it are complete for the first time since they were ordered, or failed.

    Attributes:
        nodes: other nodes that have one.
    """

    iteration: Number
    nodes: Annotated[list[Label], Many]


class StateUnprotected(WorkerFact, kw_only=True, frozen=True):
    """A worker that is to save its state can't; it trains on, and older copies stay."""

    reason: Text


class StateDiverged(WorkerFact, kw_only=True, frozen=True):
    """A worker's state is not what other replicas have of its place: it takes another's, and its copies count no more.

    Attributes:
        epoch: of the membership that compared.
        place: part of the model.
        replica: of the worker.
        digests: of all replicas, in their order: 64 bits of parameters and optimizer state.
        undecided: there is no majority; the state of as many as any other, and of the lowest rank among them, counts.
    """

    epoch: Number
    iteration: Number
    place: Number
    replica: Number
    digests: Annotated[list[Label], Many]
    undecided: bool = False


class StateUnusable(WorkerFact, kw_only=True, frozen=True):
    """The first gradient on a state that was had from copies is not finite, or is another: an older one is to be taken.

    Attributes:
        epoch: of the membership that took it.
        iteration: of the state.
        copies: where it was had from.
        uncarried: nobody can go on with what ranks of this script leave: none is to be saved, nor taken.
    """

    epoch: Number
    iteration: Number
    copies: Text
    reason: Text
    uncarried: bool = False


class GradientNotFinite(WorkerFact, kw_only=True, frozen=True):
    """The gradient of an iteration has infinity in it or what is no number, so that it makes no update.

    Attributes:
        rank: of the worker.
        microbatches: the first of this worker whose gradient is not finite; none where only the sum of all is not.
        rule: what the script wants then: "skip" this update, "stop", or "retry", on another rank.
        suspect: it was finite then, so this worker's device may compute wrongly.
    """

    epoch: Number
    iteration: Number
    rank: Number
    microbatches: Annotated[list[Number], Many]
    rule: Label = ""
    suspect: bool = False


class ScriptDrilled(WorkerFact, kw_only=True, frozen=True):
    """A rank of a script that is healed in place was replaced on purpose, or could not be.

    Attributes:
        iteration: in which it was.
        rank: of the worker.
        problem: why another process can't take its place; empty where it has computed the same, bit by bit.
    """

    iteration: Number
    rank: Number
    problem: Text = ""

    @property
    def outcome(self) -> str:
        """What came of it, for people."""
        if self.problem:
            return f"another process can't take the place of rank {self.rank}: {self.problem}"
        return f"another process has taken the place of rank {self.rank}, and computed the same, bit by bit"


class StateRejected(Message, kw_only=True, frozen=True):
    """A copy of a state is not what its checksum says, and must not be used by anybody.

    Attributes:
        node: that found it out.
        state: the copy.
    """

    node: Name
    task: Name
    state: StateRef
    reason: Text


class StateCopied(Message, kw_only=True, frozen=True):
    """The answer to `CopyState`: another node has a copy now; or it has none, and why.

    Attributes:
        node: that was to send it.
        state: as it lies at its new node, or would.
        problem: why it does not; empty where it does.
    """

    node: Name
    task: Name
    state: StateRef
    problem: Text = ""


class StatesFound(Message, kw_only=True, frozen=True):
    """The answer to `FindStates`: what lies in the memory of a node.

    Attributes:
        search: the number that was asked under.
        states: all copies of the task's states that are whole.
    """

    node: Name
    task: Name
    search: Count
    states: Annotated[list[StateRef], Many]


class PartStored(Message, kw_only=True, frozen=True):
    """A place's part of a checkpoint is on storage.

    Attributes:
        saving: the attempt that it belongs to.
        part: what was written.
        seconds: that took.
    """

    node: Name
    task: Name
    saving: Saving
    part: StoredPart
    seconds: Seconds


class CheckpointStored(Message, kw_only=True, frozen=True):
    """A checkpoint is complete on storage, read again and found right.

    Attributes:
        address: as `torch.distributed.checkpoint.load` takes it.
        removed: older ones that were removed for it.
        folder: of it, in the task's.
    """

    node: Name
    task: Name
    iteration: Number
    address: Label
    removed: Annotated[list[Label], Few]
    folder: Label = ""


class CheckpointFailed(Message, kw_only=True, frozen=True):
    """A checkpoint could not be written to storage, or none could be looked for; the last good one is untouched."""

    node: Name
    task: Name
    reason: Text


class CheckpointFound(Message, kw_only=True, frozen=True):
    """The answer to `FindCheckpoint`.

    Attributes:
        search: the number that was asked under.
        stored: the newest that passes its check; None where none does.
        skipped: newer ones that do not, and why.
    """

    node: Name
    task: Name
    search: Count
    stored: StoredState | None
    skipped: Annotated[list[Text], Few]


class WorkerFinished(WorkerFact, kw_only=True, frozen=True):
    """A worker is through its last iteration."""

    iterations: Count


class CommandRefused(Message, kw_only=True, frozen=True):
    """An agent did not carry out a command, and why."""

    node: Name
    command: Label
    reason: Text
    task: Name = ""
    worker: Name = ""


# --- telemetry: core NATS, may be lost -------------------------------------------------------------------------------


class NodeHeartbeat(Message, kw_only=True, frozen=True):
    """Sign of life of an agent."""

    node: Name
    incarnation: Label


class IterationFinished(WorkerFact, kw_only=True, frozen=True):
    """Rank 0 of a task finished an iteration.

    Attributes:
        seconds: duration of the iteration, reduce and step included.
        loss: mean over the global batch.
    """

    epoch: Number
    iteration: Number
    world_size: Count
    seconds: Seconds
    loss: float


class StepTimed(WorkerFact, kw_only=True, frozen=True):
    """What one rank did when in one iteration; of a sampled share of the iterations, and of all ranks.

    Attributes:
        began: Unix seconds of the rank's own clock at which its record begins.
        ops: in the order in which they began.
    """

    epoch: Number
    iteration: Number
    rank: Number
    world_size: Count
    began: Moment
    ops: Annotated[list[Op], msgspec.Meta(max_length=MOST_OPS)]


# --- from the registry -----------------------------------------------------------------------------------------------


class NodeAdmitted(Message, kw_only=True, frozen=True):
    """The registry has taken a node in; it may be given work.

    Attributes:
        returned: the same incarnation's predecessor was still held to be up (an agent restart within the grace).
        kept, rack: as in `NodeJoined`.
        heartbeat_s: between heartbeats, where all nodes together would send too many; 0: as the agent likes.
    """

    node: Name
    incarnation: Label
    host: Label
    slots: Annotated[list[Slot], Few]
    rendezvous: Label = ""
    state_server: Label = ""
    workers: Annotated[list[WorkerStatus], Few] = []
    returned: bool = False
    kept: Annotated[list[Label], Few] = []
    rack: Label = ""
    heartbeat_s: Seconds = 0.0


class NodeRefused(Message, kw_only=True, frozen=True):
    """The registry did not take a node in: another agent of that name is there, and goes on as before.

    Attributes:
        incarnation: that was refused.
        reason: why, and what a person can do about it.
    """

    node: Name
    incarnation: Label
    reason: Text


class NodePaced(Message, kw_only=True, frozen=True):
    """So many nodes are there by now that this one is to beat more rarely than it was told when it was admitted.

    Attributes:
        incarnation: that was admitted.
        heartbeat_s: between heartbeats.
    """

    node: Name
    incarnation: Label
    heartbeat_s: Seconds


class NodeDrained(Message, kw_only=True, frozen=True):
    """A node is to be given no more work (`drain=True`), or may be used again."""

    node: Name
    drain: bool = True


class NodeGone(Message, kw_only=True, frozen=True):
    """A node said goodbye; the registry no longer counts it."""

    node: Name


class TaskSubmitted(Message, kw_only=True, frozen=True):
    """A user launched a task."""

    task: Name
    spec: TaskSpec


class TaskPaused(Message, kw_only=True, frozen=True):
    """A user wants a task to have no slots, or to be planned for again.

    Attributes:
        paused: the former.
    """

    task: Name
    paused: bool = True


class CheckpointOrdered(Message, kw_only=True, frozen=True):
    """A user wants a task's state to be written to storage now.

    Attributes:
        after: the last iteration known to be done; a checkpoint of a later one will do.
    """

    task: Name
    after: Number


class TaskRewound(Message, kw_only=True, frozen=True):
    """A user wants a task to go on from an earlier checkpoint on storage.

    Attributes:
        iteration: of the checkpoint; later ones no longer count.
    """

    task: Name
    iteration: Number


class TaskRemoved(Message, kw_only=True, frozen=True):
    """A user took a task away."""

    task: Name


# --- from the detector -----------------------------------------------------------------------------------------------


class NodeSuspected(Message, kw_only=True, frozen=True):
    """A node's connection ended. Where nothing is heard of it within the grace it is given up; if it is, all is well.

    Attributes:
        reason: why the server says that it ended.
        grace_s: seconds from this on in which it may come back.
    """

    node: Name
    reason: Text
    grace_s: Seconds


class FailureDetected(Message, kw_only=True, frozen=True):
    """A failure, classified (paper table 1).

    Attributes:
        severity: what it will take to cure it.
        method: how it was found.
        status: what kind of failure it is.
        task, node, slot, worker: whom it hit; empty or -1 where not applicable.
        reason: one line for a person.
        escalated: severity before it was raised, None where it was not.
        attempt: how many failures of this kind the window holds, this one included.
        epoch: membership that broke, where that is known; a later one is not concerned.
        wait_s: seconds for which nothing is tried: a server outside of the cluster refuses, and would again.
    """

    severity: Severity
    method: DetectionMethod
    status: FailureStatus
    task: Name = ""
    node: Name = ""
    slot: Number = -1
    worker: Name = ""
    reason: Text = ""
    escalated: Severity | None = None
    attempt: Count = 1
    epoch: Number = -1
    wait_s: Seconds = 0.0


class TaskBroken(Message, kw_only=True, frozen=True):
    """The task's own program is at fault, as it seems: to start it again would be in vain, and nothing is.

    It raised the same at the same iteration again, fails on several nodes, never passes an iteration (`no progress`),
    or its loss has not been finite for long.
    """

    task: Name
    reason: Text
    traceback: Text = ""


# --- from the planner ------------------------------------------------------------------------------------------------


class PlanDecided(Message, kw_only=True, frozen=True):
    """The planner's answer to an event; the transition service carries it out."""

    plan: Plan


# --- from the transition service -------------------------------------------------------------------------------------


class TaskStateChanged(Message, kw_only=True, frozen=True):
    """A task went from one state to another.

    Attributes:
        members: who computes, in rank order.
        traceback: of the user's own error, where that ended the task.
    """

    task: Name
    state: TaskState
    epoch: Number = -1
    members: Annotated[list[Member], Many] = []
    reason: Text = ""
    traceback: Text = ""


class AttemptFailed(Message, kw_only=True, frozen=True):
    """A cure did not work; the detector climbs the ladder.

    Attributes:
        action: what was tried.
    """

    task: Name
    action: Cure
    reason: Text
    node: Name = ""
    slot: Number = -1
    worker: Name = ""


class TaskRecovered(Message, kw_only=True, frozen=True):
    """A task is back at full membership after a failure or a new plan.

    Attributes:
        seconds: since the failure was detected.
    """

    task: Name
    epoch: Number
    workers: Count
    seconds: Seconds


# --- from anybody ----------------------------------------------------------------------------------------------------


class DeadLetter(Message, kw_only=True, frozen=True):
    """A message that could not be used; it was put aside and the service went on.

    Attributes:
        subject: where it came in.
        error: what was wrong with it.
        payload: its first 4 KiB.
    """

    subject: Label
    error: Text
    payload: bytes = b""


class OrderTaken(Message, kw_only=True, frozen=True):
    """A service or an agent took an order; what follows from it is in the same chain. Those refused are not told.

    Attributes:
        order: its type.
        text: what was answered, for a person.
        by: who gave it, as they call themselves; empty where they don't.
        task, node: what it is about, where that is one of them.
    """

    order: Label
    text: Text
    by: Who = ""
    task: Name = ""
    node: Name = ""


class Alert(Message, kw_only=True, frozen=True):
    """Something a person should look at."""

    text: Text
    node: Name = ""
    task: Name = ""
