"""Which task holds which slots, and how their time is spent: the state behind the accounts."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from unicron.contracts.tasks import Slot
from unicron.observe.accounts.book import NO_CHAIN, Book
from unicron.observe.accounts.phases import Phase
from unicron.observe.accounts.spans import Span, TaskPace
from unicron.observe.incidents import NONE, IncidentCause

NOBODY = ""
"""The holder of slots that no task has."""


@dataclass(slots=True, eq=False)
class SlotAccount:
    """A slot of a node.

    Attributes:
        index: on its node.
        task: that its time counts for: whose worker lives in it, or else who is to have it.
        planned: the task that the newest plan gives it to, or nobody; None where no plan was seen that says so.
        worker: that lives in it; empty for none.
        epoch: the newest membership that its worker was to be in.
        broke: Unix seconds of the first sign since it last computed that its worker can't go on.
        stalled: since when its worker made no progress, where its agent said so.
    """

    node: str
    index: int
    span: Span
    task: str = NOBODY
    planned: str | None = None
    worker: str = ""
    epoch: int = -1
    broke: float | None = None
    stalled: float | None = None


@dataclass(slots=True)
class NodeAccount:
    """A node.

    Attributes:
        suspected: Unix seconds since when, None where it is not.
    """

    up: bool = True
    suspected: float | None = None
    slots: dict[int, SlotAccount] = field(default_factory=dict)


@dataclass(slots=True)
class Held:
    """The whole that a task's phases must add up to, counted apart from them.

    Attributes:
        slots: that it holds now.
        since: Unix seconds up to which they are counted.
        slot_s: slot-seconds.
    """

    slots: int
    since: float
    slot_s: float = 0.0

    def until(self, at: float, since: float) -> float:
        """Return the slot-seconds from `since` up to `at`."""
        return self.slot_s + self.slots * max(0.0, at - max(self.since, since))


class Lost(NamedTuple):
    """What a task had trained and lost, and has not computed again yet; it is in no phase but training.

    Attributes:
        slot_s: slot-seconds.
        wall_s: seconds of the task as a whole.
        unseen: what it lost besides, nobody sees.
    """

    slot_s: float
    wall_s: float
    unseen: bool


NOTHING = Lost(0.0, 0.0, unseen=False)


@dataclass(slots=True)
class TaskAccount:
    """A task.

    Attributes:
        slots: that it holds, by their identity.
        planned: that the newest plan gives it.
        span: of the task as a whole: it trains as long as any of its workers do. None before it is submitted or seen,
            and when it has ended.
        epoch: of the newest membership that was ordered; `met` of the newest that somebody computes in.
        ordered: Unix seconds at which `epoch` was.
        microbatches: of an iteration; 0 where that is not known.
        reached: the furthest iteration that anybody was in.
        mark: the iteration that the newest membership began with, when, and how many workers it has.
        iteration_slot_s: slot-seconds of an iteration; 0 where that is not known.
        again_to: iteration up to which it computes again.
        owing_s: seconds of wall time that it was yet to compute again when it ceased to compute.
        runs_again: its program begins again in each membership, from where nobody sees; `unseen` once it has.
    """

    name: str
    slots: dict[int, SlotAccount] = field(default_factory=dict)
    planned: dict[int, SlotAccount] = field(default_factory=dict)
    span: Span | None = None
    epoch: int = -1
    met: int = -1
    ordered: float = 0.0
    microbatches: int = 0
    reached: int = 0
    mark: tuple[int, float, int] | None = None
    iteration_slot_s: float = 0.0
    again_to: int = 0
    owing_s: float = 0.0
    runs_again: bool = False
    unseen: bool = False
    pace: TaskPace = field(default_factory=TaskPace)

    def engaged(self) -> Iterator[SlotAccount]:
        """Yield the slots whose workers are in the newest membership, or are to be."""
        return (slot for slot in list(self.slots.values()) if slot.epoch == self.epoch >= 0)

    def lost(self, at: float) -> Lost:
        """Return what it had trained and lost, and has not computed again yet, as far as that is known at `at`."""
        training = self.span is not None and self.span.phase is Phase.TRAINING
        seconds = max(0.0, self.pace.again_to - at) if training else self.owing_s
        return Lost(seconds * (self.mark[2] if self.mark else 0), seconds, unseen=self.unseen)

    def record_reached(self, iteration: int, at: float) -> None:
        """Record that a worker was in an iteration: how far the task is, and how long one takes."""
        self.reached = max(self.reached, iteration)
        if self.mark is None or self.span is None or self.span.phase is not Phase.TRAINING:
            return
        first, began, workers = self.mark
        if iteration > first and at > began:
            self.iteration_slot_s = (at - began) * workers / (iteration - first)


class SlotHoldings:
    """Slots, their holders, and the accounts.

    Attributes:
        now: Unix seconds of the journal's newest message; clocks differ, and the journal's order is what counts.
        book: of slots; `wall` of the tasks' own spans, in seconds of wall time.
    """

    def __init__(self, since: float, spans: int) -> None:
        self.now = 0.0
        self.book, self.wall = Book(since, spans), Book(since, spans)
        self.nodes: dict[str, NodeAccount] = {}
        self.tasks: dict[str, TaskAccount] = {}
        self.held: dict[str, Held] = {}

    def track(self, chain: str) -> None:
        """Track what a chain costs from now on."""
        self.book.open(chain)
        self.wall.open(chain)

    def forget(self, chain: str) -> None:
        """No longer track a chain."""
        self.book.fold(chain)
        self.wall.fold(chain)

    def node(self, name: str) -> NodeAccount:
        """Return a node; one that is not known yet is up."""
        node = self.nodes.get(name)
        if node is None:
            node = self.nodes[name] = NodeAccount()
        return node

    def task(self, name: str) -> TaskAccount:
        """Return a task; its wall time begins when it is first heard of."""
        if name not in self.tasks:
            self.tasks[name] = TaskAccount(name, span=Span(self.now, Phase.START_UP))
        return self.tasks[name]

    def slot(self, node: str, index: int) -> SlotAccount:
        """Return a slot; one that is not known yet is free from now on."""
        slots = self.node(node).slots
        if index not in slots:
            slots[index] = SlotAccount(node, index, Span(self.now))
            self._count(NOBODY, 1)
        return slots[index]

    def hold(self, slot: SlotAccount, task: str, phase: Phase, cause: IncidentCause = NONE) -> None:
        """Let a task, or nobody, have a slot from now on; nothing changes where it has it already."""
        if slot.task == task:
            return
        self._close(slot, self.now)
        self._count(slot.task, -1)
        if slot.task:
            del self.tasks[slot.task].slots[id(slot)]
        slot.task, slot.epoch, slot.broke, slot.stalled = task, -1, None, None
        slot.span = Span(self.now, phase, cause, slot.worker)
        self._count(task, 1)
        if task:
            self.task(task).slots[id(slot)] = slot

    def hand_over(self, slot: SlotAccount) -> None:
        """Let a slot without a worker go to whom it is planned for; it ends with its node if that is nobody."""
        if slot.worker:
            return
        wanted = slot.planned or NOBODY
        if slot.task != wanted:
            self.hold(slot, wanted, Phase.START_UP if wanted else Phase.IDLE)
        node = self.nodes[slot.node]
        if not wanted and not node.up:
            self._close(slot, self.now)
            self._count(NOBODY, -1)
            node.slots = {index: each for index, each in node.slots.items() if each is not slot}

    def enter(self, slot: SlotAccount, phase: Phase, at: float | None = None, cause: IncidentCause = NONE) -> None:
        """Let a slot be in a phase since `at`, or as early as is still open; None: now."""
        self._close(slot, self.now if at is None else at)
        span = slot.span
        span.phase, span.cause, span.worker = phase, cause, slot.worker or span.worker

    def enter_task(self, task: TaskAccount, phase: Phase, at: float | None = None, cause: IncidentCause = NONE) -> None:
        """Let a task as a whole be in a phase since then."""
        if task.span is not None:
            at = self.now if at is None else at
            task.owing_s = task.lost(at).wall_s
            self._close_task(task, at)
            task.span.phase, task.span.cause = phase, cause

    def admit(self, node: str, slots: list[Slot], workers: dict[int, str]) -> None:
        """Record the slots of a node, and their workers by index."""
        for index in {each.index for each in slots} | set(self.node(node).slots):
            slot = self.slot(node, index)
            slot.worker = workers.get(index, "")
            self.hand_over(slot)

    def release(self, name: str) -> None:
        """Record that a node is gone, and its workers with it."""
        node = self.node(name)
        node.up = False
        for slot in list(node.slots.values()):
            slot.worker = ""
            self.hand_over(slot)

    def unplan(self, task: TaskAccount, kept: Collection[int] = ()) -> None:
        """Take a task's slots off it that it does not keep, by their identity."""
        for slot in [each for key, each in task.planned.items() if key not in kept and each.planned == task.name]:
            slot.planned = NOBODY
            self.hand_over(slot)
        task.planned = {}

    def move(self, task: TaskAccount, before: set[Phase], after: Phase) -> None:
        """Let all that is in one of some phases be in another one from now on, for the same reason.

        Slots are in such phases only while their task is, which spares a look at all of them for each command.
        """
        if task.span is None or task.span.phase not in before - {after}:
            return
        for slot in task.slots.values():
            if slot.span.phase in before:
                self.enter(slot, after, None, slot.span.cause)
        self.enter_task(task, after, None, task.span.cause)

    def close_all(self, task: TaskAccount) -> None:
        """Put into the accounts what is open of a task, since its pace is about to change."""
        for slot in task.slots.values():
            self._close(slot, self.now)
        self._close_task(task, self.now)

    def end(self, task: TaskAccount) -> None:
        """A task's wall time is over."""
        task.owing_s = task.lost(self.now).wall_s
        self._close_task(task, self.now)
        task.span = None

    def totals(self, at: float) -> tuple[Book, Book, dict[str, float]]:
        """Return what it would be if all were closed at `at`: slots, tasks, and the whole by task; nothing changes."""
        book, wall = self.book.copy(), self.wall.copy()
        for node in self.nodes.values():
            for slot in node.slots.values():
                self._enter(book, slot, at)
        for task in self.tasks.values():
            if task.span is not None:
                wall.enter(task.name, task.span.pieces(at, task.pace))
        return book, wall, {name: held.until(at, self.book.since) for name, held in self.held.items()}

    def part(self, chain: str, at: float) -> tuple[Book, Book]:
        """Return what it would be of one chain if all were closed at `at`: slots, tasks; nothing changes."""
        book, wall = self.book.part(chain), self.wall.part(chain)
        paced = {task.name for task in self.tasks.values() if task.pace.went_to(chain)}
        for node in self.nodes.values():
            for slot in node.slots.values():
                if slot.span.cause.chain == chain or slot.task in paced or chain == NO_CHAIN:
                    self._enter(book, slot, at)
        for task in self.tasks.values():
            if task.span is not None:
                wall.enter(task.name, task.span.pieces(at, task.pace))
        return book, wall

    def _pace(self, task: str) -> TaskPace:
        return self.tasks[task].pace if task else TaskPace()

    def _enter(self, book: Book, slot: SlotAccount, at: float) -> None:
        span = slot.span
        book.enter(slot.task, span.pieces(at, self._pace(slot.task)), slot.node, slot.index, span.worker)

    def _close(self, slot: SlotAccount, at: float) -> None:
        span = slot.span
        if at > span.since:
            self._enter(self.book, slot, at)
            span.since = at

    def _close_task(self, task: TaskAccount, at: float) -> None:
        if task.span is not None:
            self.wall.enter(task.name, task.span.pieces(at, task.pace))
            task.span.since = max(task.span.since, at)

    def _count(self, task: str, more: int) -> None:
        held = self.held.setdefault(task, Held(0, self.now))
        held.slot_s = held.until(self.now, self.book.since)
        held.slots, held.since = held.slots + more, self.now
