"""Facts and telemetry about workers, and what they raise and report."""

from typing import Annotated

import msgspec

from unicron.contracts.base import AgentMessage
from unicron.contracts.ranges import Count, Few, Label, Many, Moment, Name, Number, Seconds, Text, Whole
from unicron.contracts.sentences import after, where
from unicron.contracts.tasks import UNCOUNTED, Breakage, WorkerPhase
from unicron.contracts.timings import MOST_OPS, Op


class WorkerFact(AgentMessage, kw_only=True, frozen=True):
    """Base of the facts about one worker process: its name, its task, and the slot that it runs in."""

    slot: Number
    task: Name
    worker: Name


class WorkerReady(WorkerFact, kw_only=True, frozen=True):
    """A worker has built its model and waits for a membership."""

    pid: Count

    def __str__(self) -> str:
        return f"{where(self)} is ready"


class WorkerExited(WorkerFact, kw_only=True, frozen=True):
    """A worker process ended.

    Attributes:
        exit_code: None where a signal ended it or the status is not known.
        signal: number of the signal that ended it.
        expected: it was ordered to stop.
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

    @property
    def ending(self) -> str:
        """How the process ended."""
        if self.signal:
            return f"ended by signal {self.signal}"
        return "ended, nobody knows how" if self.exit_code is None else f"ended by exit code {self.exit_code}"

    def __str__(self) -> str:
        at = f", in iteration {self.iteration}"
        if self.iteration < 0:  # an agent that was away learns neither
            unseen = self.exit_code is None and not self.signal
            at = ", nor in which iteration" if unseen else ", before its first iteration"
        return f"{where(self)} {self.ending}{', as ordered' * self.expected}{at}"


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

    def __str__(self) -> str:
        return f"{where(self)} raised {self.exception}: {self.text}"


class CollectiveFailed(WorkerFact, kw_only=True, frozen=True):
    """A worker can't go on in its membership and waits for a new one.

    Attributes:
        broke: what it was that broke.
    """

    epoch: Number
    iteration: Number
    error: Text
    broke: Breakage = Breakage.GROUP

    def __str__(self) -> str:
        return f"{where(self)} can't go on in membership {self.epoch}: {self.error}"


class WorkerStalled(WorkerFact, kw_only=True, frozen=True):
    """A worker made no progress for longer than its limit.

    Attributes:
        phase: `COMPUTE` or `REDUCE`.
        waited_s: seconds since its last sign of progress; of life, where its process is stopped.
        limit_s: what was allowed: three times its usual microbatch, with a floor.
        responsive: whether it answers; a stopped process does not.
        asleep: all its processes sleep, and it is the only one of its task on its node of which that is so.
        stacks: where its Python threads were when half of that was over (a quarter before it was, where it is silent),
            innermost call first; those of processes that the agent could not read in time are empty.
        collectives: a line for each collective that was under way then in the workers of its task on its node, its own
            first; then one for each of these that was in none. Of one that is stopped there is no line.
        silent: nobody watches its script, and it shows no sign of life, as no other of its task on its node does.
            Repeated as long as that lasts: only where all ranks are silent at once they hang.
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

    def __str__(self) -> str:
        return (
            f"nothing was heard of {where(self)} for {self.waited_s:.2f} s"
            if self.silent
            else f"{where(self)} made no progress for {self.waited_s:.2f} s in {self.phase}"
        )


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

    def __str__(self) -> str:
        return f"all processes of {where(self)} sleep, for {self.waited_s:.2f} s so far"


class WorkerAway(WorkerFact, kw_only=True, frozen=True):
    """A worker's script does something long between two iterations, such as an evaluation; others may wait for it.

    Attributes:
        epoch: of the newest membership that it is to be in; the fact is repeated for each.
        iteration: that comes next.
        waited_s: seconds since the last update.
    """

    epoch: Number
    iteration: Number
    waited_s: Seconds

    def __str__(self) -> str:
        return f"{where(self)} is between two iterations, for {self.waited_s:.2f} s so far"


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

    def __str__(self) -> str:
        return (
            f"{self.worker} is rank {self.rank} of {self.world_size} and goes on with iteration {self.iteration}: "
            f"{self.kept} microbatches kept, {self.recomputed} computed again{after(', state from ', self.state_from)}"
        )


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

    def __str__(self) -> str:
        return (
            f"the gradient of iteration {self.iteration} is not finite: "
            f"microbatch {', '.join(map(str, self.microbatches)) or 'none'} on rank {self.rank}, {where(self)}; "
            f"rule: {self.rule}"
            f"{'; computed again it is: suspect this device' * self.suspect}"
        )


class ScriptDrilled(WorkerFact, kw_only=True, frozen=True):
    """A process has taken a rank's place on trial, in a script that is healed in place; the rank went on as ever.

    Attributes:
        iteration: in which it began.
        rank: of the worker.
        problem: why no other process can take its place; empty where none is known.
        unproven: why nobody knows; empty where the process has computed the same, bit by bit, or there is a problem.
        as_is: the problem lets nothing of the script be had in place: all its ranks begin again, as under torchrun.
        undecided: nobody knows yet, and a trial may still show it.
        under_way: the process is on trial now, and what comes of it is told later.
    """

    iteration: Number
    rank: Number
    problem: Text = ""
    unproven: Text = ""
    as_is: bool = False
    undecided: bool = False
    under_way: bool = False

    @property
    def outcome(self) -> str:
        """The outcome, for people."""
        if self.under_way:
            return f"another process is on trial in the place of rank {self.rank}, from iteration {self.iteration} on"
        if self.as_is:
            return (
                "the script is not healed in place, and begins again as torchrun runs it, now and whenever a rank is "
                f"lost: {self.problem}"
            )
        if self.problem:
            return (
                f"another process can't take the place of rank {self.rank}: {self.problem}; in-place healing is off: "
                "all ranks begin again when one is lost"
            )
        if self.unproven:
            return f"unproven that another process could take the place of rank {self.rank}: {self.unproven}"
        trial = f"on trial from iteration {self.iteration} on it computed the same, bit by bit"
        return f"another process could take the place of rank {self.rank}: {trial}"

    def __str__(self) -> str:
        return f"drill in iteration {self.iteration}: {self.outcome}"


class WorkerFinished(WorkerFact, kw_only=True, frozen=True):
    """A worker is through its last iteration."""

    iterations: Count

    def __str__(self) -> str:
        done = f"has done all {self.iterations} iterations" if self.iterations < UNCOUNTED else "is done"
        return f"{where(self)} {done}"


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
    """The operations of one rank in one iteration; of a sampled share of the iterations, and of all ranks.

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
