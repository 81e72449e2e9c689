"""Stories: what was said in the chain of each failure, to whom it happened, and what was seen. Pure."""

from collections import OrderedDict

from unicron.contracts import events, hardware
from unicron.contracts.answers import PlanView
from unicron.contracts.base import Message
from unicron.observe.incidents import chain_of
from unicron.observe.state import EVIDENCE, STORIES, STORY, TRACED, JournalLine, Story
from unicron.observe.words.explain import explain
from unicron.observe.words.signs import sign
from unicron.observe.words.story import describe

SEEN: tuple[type[Message], ...] = (
    events.WorkerExited,
    events.WorkerRaised,
    events.WorkerStalled,
    events.CollectiveFailed,
    events.NodeSuspected,
    events.GradientNotFinite,
    events.StateDiverged,
    hardware.FaultLogged,
)
"""Messages that show a failure."""

CHAINS = 5000
"""Chains whose first messages are known before anything is known to have failed."""

BEFORE = 50
"""Messages of such a chain that are known."""


def entry_of(position: int, message: Message) -> JournalLine:
    """Return a message of the journal in words."""
    lines: list[str] = []
    match message:
        case events.WorkerExited():
            lines = [*message.stderr, *message.collectives]
        case events.WorkerRaised() | events.TaskStateChanged():
            lines = message.traceback.splitlines()
        case events.WorkerStalled():
            lines = list(message.stacks)
    return JournalLine(
        position=position,
        at=message.at,
        source=message.source,
        kind=type(message).__name__,
        chain=chain_of(message),
        text=describe(message),
        lines=lines,
    )


class Stories(OrderedDict[str, Story]):
    """The stories of the newest failures, by chain."""

    def __init__(self) -> None:
        super().__init__()
        self._begun: OrderedDict[str, Story] = OrderedDict()

    def add(self, message: Message, entry: JournalLine, rank: int | None = None, *, is_open: bool = False) -> bool:
        """Add a message of a worker of this rank to its chain; return whether the chain is a failure's."""
        story = self.get(entry.chain)
        if story is None:
            begun = self._begun.setdefault(entry.chain, Story())
            if len(begun.entries) < BEFORE:
                begun.entries.append(entry)
                begun.signs.append(sign(message, rank))
            if len(self._begun) > CHAINS:
                self._begun.popitem(last=False)
            return False
        if len(story.entries) < STORY:
            story.entries.append(entry)
            story.signs.append(sign(message, rank))
        else:
            story.unheard += 1
        if len(story.messages) < TRACED and is_open:
            story.messages.append(message)
        if isinstance(message, SEEN) and len(story.evidence) < EVIDENCE:
            story.evidence.append(entry)
        if isinstance(message, events.PlanDecided) and not story.plan:
            story.plan = explain(PlanView(plan=message.plan))
        return True

    def begin(self, failure: events.FailureDetected) -> Story:
        """Keep and return the story of a failure from now on, with what was said in its chain before."""
        chain = chain_of(failure)
        story = self._begun.pop(chain, None) or Story()
        if chain not in self:
            story.evidence = [entry for entry in story.entries if entry.kind in _SEEN_NAMES][:EVIDENCE]
            self[chain] = story
            if len(self) > STORIES:
                self.popitem(last=False)
        return self[chain]


_SEEN_NAMES = {kind.__name__ for kind in SEEN}
