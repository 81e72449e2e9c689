"""Failures, and what was said in the chain of each: whom it hit, what was seen, who is still to be healed. Pure."""

from collections import OrderedDict, deque
from collections.abc import Iterable

from unicron.contracts import events, hardware
from unicron.contracts.base import Message
from unicron.contracts.queries import PlanView
from unicron.observe.words.explain import explain
from unicron.observe.words.headline import ENDS
from unicron.observe.words.signs import sign
from unicron.observe.words.story import chain_of
from unicron_console.state import EVIDENCE, FAILURES, STORIES, STORY, TRACED, Failure, Story
from unicron_console.views import Told

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
"""What shows that something failed."""

CHAINS = 5000
"""Chains whose first messages are known before anything is known to have failed."""

BEFORE = 50
"""Messages of such a chain that are known."""


class Failures:
    """The failures of a cluster.

    Attributes:
        known: by chain, oldest first; `stories` of the newest of them.
        healed: chains of those that are over since somebody emptied it.
    """

    def __init__(self) -> None:
        self.known: OrderedDict[str, Failure] = OrderedDict()
        self.stories: OrderedDict[str, Story] = OrderedDict()
        self.healed: deque[str] = deque(maxlen=FAILURES)
        self._begun: OrderedDict[str, Story] = OrderedDict()
        self._open: set[str] = set()

    def tell(self, message: Message, told: Told, rank: int | None = None) -> bool:
        """Note what is said in a chain, of a worker of this rank; return whether a failure's has changed by it."""
        story = self.stories.get(told.chain)
        if story is None:
            begun = self._begun.setdefault(told.chain, Story())
            if len(begun.told) < BEFORE:
                begun.told.append(told)
                begun.signs.append(sign(message, rank))
            if len(self._begun) > CHAINS:
                self._begun.popitem(last=False)
            return False
        if len(story.told) < STORY:
            story.told.append(told)
            story.signs.append(sign(message, rank))
        else:
            story.unheard += 1
        if len(story.messages) < TRACED and told.chain in self._open:
            story.messages.append(message)
        if isinstance(message, ENDS) and len(story.ends) < TRACED:
            story.ends.append(message)
        if isinstance(message, SEEN) and len(story.evidence) < EVIDENCE:
            story.evidence.append(told)
        if isinstance(message, events.PlanDecided) and not story.plan:
            story.plan = explain(PlanView(plan=message.plan))
        return True

    def detect(self, message: events.FailureDetected, tasks: Iterable[str]) -> str:
        """Note a failure that hit these tasks; return its chain. A later one of the same chain adds to it."""
        chain = chain_of(message)
        story = self._begun.pop(chain, None) or Story()
        if chain not in self.known:
            self._begin(chain, message, story)
        failure = self.known[chain]
        failure.severity = min(failure.severity, int(message.severity))
        for name in tasks:
            if name not in failure.tasks:
                failure.tasks.append(name)
            failure.open.add(name)
        if failure.open:
            failure.closed = None
            self._open.add(chain)
        return chain

    def _begin(self, chain: str, message: events.FailureDetected, story: Story) -> None:
        self.known[chain] = Failure(
            chain=chain,
            begun=story.told[0].at if story.told else message.at,
            at=message.at,
            severity=int(message.severity),
            status=str(message.status),
            node=message.node,
            worker=message.worker,
            text=message.reason,
        )
        story.ends = [message]
        story.evidence = [told for told in story.told if told.kind in _SEEN_NAMES][:EVIDENCE]
        self.stories[chain] = story
        while len(self.known) > FAILURES:
            old, _ = self.known.popitem(last=False)
            self._open.discard(old)
        while len(self.stories) > STORIES:
            self.stories.popitem(last=False)

    def heal(self, task: str, at: float) -> list[str]:
        """Note that nothing of a task is to be healed any more; return the chains that hit it."""
        hit = [chain for chain in sorted(self._open) if task in self.known[chain].open]
        for chain in hit:
            failure = self.known[chain]
            failure.open.discard(task)
            if not failure.open:
                failure.closed = at
                self._open.discard(chain)
                self.healed.append(chain)
        return hit


_SEEN_NAMES = {kind.__name__ for kind in SEEN}
