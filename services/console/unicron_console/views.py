"""The answers of the console's interface, from which its description (OpenAPI) is made."""

from unicron.contracts.answers import CurvePoint, PlanView, StragglerView
from unicron.contracts.base import Record
from unicron.observe.accounts.eta import TimeLeft
from unicron.observe.accounts.spans import PhaseSpan
from unicron.observe.state import JournalLine, MembershipRecord

# --- shared ---------------------------------------------------------------------------------------------------------


class FailureLine(Record, kw_only=True, frozen=True):
    """A failure in one line of a list.

    Attributes:
        chain: its id.
        at: Unix seconds at which it was detected.
        severity: 1 to 3, the highest that its chain has come to.
        status: what kind it is.
        tasks: that it hit.
        recovered_s: seconds from its first sign until the last of them was back at all of its workers; None: not yet.
        over: whether nothing is to be healed any more: all are back, or have ended.
        cost_s: slot-seconds so far.
        text: the reason, for a person.
    """

    chain: str
    at: float
    severity: int
    status: str
    node: str = ""
    worker: str = ""
    tasks: list[str] = []
    recovered_s: float | None = None
    over: bool = False
    cost_s: float = 0.0
    text: str = ""


# --- cluster --------------------------------------------------------------------------------------------------------


class NodeSquare(Record, kw_only=True, frozen=True, omit_defaults=True):
    """A node in one square.

    Attributes:
        state: up, suspected, draining, lost or left.
        slots: the task in each of its slots, by index; empty for none.
        alarm: why one would look at it, empty for none: a straggler, a fault of its GPU.
    """

    state: str
    slots: list[str] = []
    alarm: str = ""


class TaskLine(Record, kw_only=True, frozen=True):
    """A task in one line of a list.

    Attributes:
        colour: number of its colour, from 0, the same on all pages and nobody else's; -1 for one that has ended.
        iteration: the last that was finished, -1 before the first.
        iterations: that it is to have; None where only its program knows.
        waf: weighted FLOP/s that it achieves; `planned_waf` what the plan expects.
        goodput: share of its GPU time that was training since it was submitted, None where nothing is known yet.
        left: how long it still takes; None where that is not known.
        slow: how slow it has got; empty where it has not.
        drill: what came of the drill of its script; empty where there was none.
        withheld: what the cluster would do about it, did it not only observe; empty where there is nothing.
    """

    name: str
    colour: int
    state: str
    reason: str = ""
    weight: float = 1.0
    workers: int = 0
    min_workers: int = 1
    max_workers: int = 1
    iteration: int = -1
    iterations: int | None = None
    iteration_s: float = 0.0
    loss: float | None = None
    waf: float = 0.0
    planned_waf: float = 0.0
    goodput: float | None = None
    left: TimeLeft | None = None
    slow: str = ""
    drill: str = ""
    paused: bool = False
    withheld: str = ""


class ClusterPage(Record, kw_only=True, frozen=True):
    """The cluster at a glance.

    Attributes:
        now: Unix seconds of this answer.
        position: of the journal, up to which it is known.
        behind: entries of the journal that are still to be read; above 0 only for a while after a start.
        ailing: a line for each part of the cluster through which nothing gets, with the cure.
        waf: weighted FLOP/s of all tasks together; `possible_waf` what the plan in force expects.
        goodput: share of the GPU time of tasks that was training, over all that the journal keeps; None: no such time.
        course: (Unix seconds, share of GPU time that was training since the point before), oldest first; thinned out
            when it gets long. In changes: all of it where there is a new point, else nothing.
        nodes: by name. In changes: those that changed; state "" where one is forgotten.
        tasks: in the order of submission, without those removed. In changes: those that changed; "removed" ones go.
        failures: the last ones, newest first, with all that are not over.
        events: what changed, newest last: failures, plans, tasks that began or ended, nodes that came or went, orders.
            In changes: the new ones.
        spares: slots of nodes that are up and that no task has.
        observe_only: whether the cluster only says what it would do by itself.
        slots: of nodes that are up.
    """

    now: float
    position: int
    behind: int = 0
    ailing: list[str] = []
    waf: float = 0.0
    possible_waf: float = 0.0
    goodput: float | None = None
    course: list[tuple[float, float]] = []
    slots: int = 0
    spares: int = 0
    observe_only: bool = False
    nodes: dict[str, NodeSquare] = {}
    tasks: list[TaskLine] = []
    failures: list[FailureLine] = []
    events: list[JournalLine] = []


# --- task -----------------------------------------------------------------------------------------------------------


class WorkerLine(Record, kw_only=True, frozen=True):
    """A worker in the newest membership."""

    worker: str
    node: str
    slot: int
    rank: int
    replica: int
    place: int


class TaskPage(Record, kw_only=True, frozen=True):
    """A task.

    Attributes:
        progress: (Unix seconds, iteration, loss, seconds an iteration), oldest first, thinned out: since this instance
            of the console began to listen.
        layout: the shape of a replica in words.
        workers: in rank order.
        attempts: the latest, newest first.
        failures: the latest that hit it, newest first.
        seconds: slot-seconds by phase since it was submitted; they add up to `whole_s`.
        kept, recomputed: microbatches, over all regroups.
        traceback: of its own error, where that ended it.
        configuration: pairs of a name and a text.
        causes: slot-seconds that were neither training nor idle, by what they were lost to, most first; "" is nothing's
            fault. `struck` failures hit it.
        earlier: `progress` of earlier tasks of its name, oldest first.
    """

    now: float
    line: TaskLine
    progress: list[tuple[float, int, float, float]] = []
    layout: str = ""
    workers: list[WorkerLine] = []
    attempts: list[MembershipRecord] = []
    failures: list[FailureLine] = []
    seconds: dict[str, float] = {}
    whole_s: float = 0.0
    kept: int = 0
    recomputed: int = 0
    traceback: str = ""
    configuration: list[tuple[str, str]] = []
    causes: dict[str, float] = {}
    struck: int = 0
    earlier: list[list[tuple[float, int, float, float]]] = []


class CurvePage(Record, kw_only=True, frozen=True):
    """The planner's estimate of a task's throughput, and where the task stands on it."""

    task: str
    held: int
    points: list[CurvePoint] = []


# --- failure --------------------------------------------------------------------------------------------------------


class Mark(Record, kw_only=True, frozen=True):
    """An entry of the summary above a failure's timeline: an actor and its action.

    Attributes:
        at: Unix seconds; where several did the same, when the last of them did.
        position: of the first message.
        kind: of the messages.
        text: in two or three words: "rank 3 lost", "ranks 0-2 regrouped, iteration 41 resumed".
        said: texts of the first of these messages; `more` of them have none here.
    """

    at: float
    position: int
    kind: str
    text: str
    said: list[str]
    more: int = 0


class FailurePage(Record, kw_only=True, frozen=True):
    """A failure, from its first sign to the last worker's return.

    Attributes:
        begun: Unix seconds of the first sign.
        wall: seconds by phase of the tasks as a whole, by task: they add up to the time from the first sign until it
            was back at all of its workers, and what it still computed again after that; "training" is while it trained
            without some.
        seconds: slot-seconds by phase; they add up to `line.cost_s`.
        bars: what slots did instead of training; `more` so many were left out.
        marks: of the timeline, in the order of their first messages.
        messages: of the chain, in their order; `unheard` so many were left out.
        evidence: lines of output, of the kernel's log, exits.
        plan: in words: pairs of a label and a sentence, with the runner-up; empty where no plan followed.
    """

    now: float
    line: FailureLine
    headline: str
    begun: float
    wall: dict[str, dict[str, float]] = {}
    seconds: dict[str, float] = {}
    bars: list[PhaseSpan] = []
    more: int = 0
    marks: list[Mark] = []
    messages: list[JournalLine] = []
    unheard: int = 0
    evidence: list[JournalLine] = []
    plan: list[tuple[str, str]] = []


# --- node -----------------------------------------------------------------------------------------------------------


class GpuLine(Record, kw_only=True, frozen=True):
    """The newest counters of a slot's GPU, by name."""

    slot: int
    counters: dict[str, float] = {}


class NodePage(Record, kw_only=True, frozen=True):
    """A node.

    Attributes:
        since: Unix seconds since when it is in this state.
        workers: that compute in its slots.
        history: what was said of it, newest first.
        failures: on it, newest first; `cost_s` slot-seconds of all that the console remembers.
    """

    now: float
    node: str
    square: NodeSquare
    host: str = ""
    rack: str = ""
    domain: str = ""
    since: float = 0.0
    kind: str = ""
    workers: list[WorkerLine] = []
    gpus: list[GpuLine] = []
    failures: list[FailureLine] = []
    cost_s: float = 0.0
    history: list[JournalLine] = []


# --- plan -----------------------------------------------------------------------------------------------------------


class PlanRow(Record, kw_only=True, frozen=True):
    """The planner's answer to an event that may come next.

    Attributes:
        event: in words.
        changes: whose number of workers changes, in words; empty: nobody's.
        waf: weighted FLOP/s of all tasks that are expected then; 0 where their FLOP/s are not known.
    """

    event: str
    workers: int
    changes: str
    waf: float


class PlanPage(Record, kw_only=True, frozen=True):
    """The plan in force, or the one that would be.

    Attributes:
        words: pairs of a label and a sentence.
        shares: workers of each task, `before` those that it had.
        table: what comes after each next event.
        view: the planner's whole answer.
    """

    now: float
    words: list[tuple[str, str]] = []
    shares: dict[str, int] = {}
    before: dict[str, int] = {}
    table: list[PlanRow] = []
    view: PlanView


class Question(Record, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A question to the planner about a change.

    Attributes:
        lose: nodes that are lost, all at once.
        join: nodes of the usual size that come in addition.
        finish: tasks that end.
    """

    lose: list[str] = []
    join: int = 0
    finish: list[str] = []


# --- the rest -------------------------------------------------------------------------------------------------------


class StragglerPage(Record, kw_only=True, frozen=True):
    """The stragglers of a task.

    Attributes:
        view: what the straggler service has seen; None where it does not answer.
        heat: mean seconds of a microbatch, without waiting for others; a row a rank, a column an iteration; None where
            nothing is known.
        iterations: of the columns; `workers` of the rows.
    """

    now: float
    view: StragglerView | None = None
    heat: list[list[float | None]] = []
    iterations: list[int] = []
    workers: list[str] = []


class Wanted(Record, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """An order.

    Attributes:
        order: drain, undrain, save, pause, resume, stop, rewind or break.
        target: node or task; of `break` the node.
        worker: of `break`, whom to hit; empty for the node.
        value: the iteration to rewind to; the fault to inject.
        sure: give it; False: only say what would happen.
    """

    order: str
    target: str
    worker: str = ""
    value: str = ""
    sure: bool = False


class Answer(Record, kw_only=True, frozen=True):
    """The result of an order, or of its preview; or what is wrong, and the cure.

    Attributes:
        text: for a person.
        error: what was wrong; empty where nothing was.
    """

    text: str = ""
    error: str = ""


class Access(Record, kw_only=True, frozen=True):
    """The name and the rights of a token.

    Attributes:
        name: of the token; empty without one.
        orders: that may be given, empty without a token.
        faults: that may be injected with `break`, where chaos is on.
    """

    name: str = ""
    orders: list[str] = []
    faults: list[str] = []


class Log(Record, kw_only=True, frozen=True):
    """The last lines that a worker wrote."""

    worker: str
    node: str
    lines: list[str] = []
