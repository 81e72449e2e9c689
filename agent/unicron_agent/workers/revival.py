"""When the warm standby is started again, and what is said of its deaths. Pure.

No worker that runs Python can start without it, and none is to blame: the first that the kernel ends for want of memory
is often this process, which idles with much in it.
"""

import math

from unicron.contracts.events import StandbyDied, StandbyRevived
from unicron_agent.effects import Out, StartStandby
from unicron_agent.stimuli import StandbyEnded, StandbyReady

FIRST_S, LONGEST_S = 0.5, 30.0
"""Waits before it is started again: none after the first death, then twice as long each time."""

LIVES_S = 30.0
"""A standby that has lived for so long after it was ready has not died in a row with the one before."""

HELPLESS = 8
"""Deaths in a row, a minute's at least, after which its node is to get no work until one lives."""


class Revival:
    """Watches over the standby of a node.

    Args:
        node: its name.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._deaths, self._died_at = 0, 0.0
        self._ready_at = self._due = self._said_at = math.inf

    def handle(self, stimulus: StandbyEnded | StandbyReady, now: float) -> Out:
        """Return what there is to say and to do about a standby that has ended, or is ready."""
        return self._ended(stimulus.how, now) if isinstance(stimulus, StandbyEnded) else self._ready(now)

    def _ended(self, how: str, now: float) -> Out:
        """Report its death, and say when the next one starts."""
        if now - self._ready_at >= LIVES_S:
            self._deaths = 0
        if not self._deaths or self._ready_at < math.inf:
            self._died_at = now
        self._deaths += 1
        self._ready_at = self._said_at = math.inf
        wait_s = 0.0 if self._deaths == 1 else min(LONGEST_S, FIRST_S * 2 ** min(self._deaths - 2, 60))
        self._due = now + wait_s
        helpless = self._deaths >= HELPLESS
        died = StandbyDied(node=self._node, how=how, deaths=self._deaths, wait_s=wait_s, helpless=helpless)
        return [died, *self.tick(now)]

    def _ready(self, now: float) -> Out:
        """Record that it can fork, and say so where it could not before; of a helpless node once it is sure."""
        self._ready_at = now
        if self._deaths:
            self._said_at = now + LIVES_S * (self._deaths >= HELPLESS)
        return self.tick(now)

    def tick(self, now: float) -> Out:
        """Start it when that is due; say that it lives again when that is sure."""
        out: Out = []
        if now >= self._due:
            self._due = math.inf
            out.append(StartStandby())
        if now >= self._said_at:
            self._said_at = math.inf
            out.append(StandbyRevived(node=self._node, seconds=self._ready_at - self._died_at))
        return out

    def due_at(self) -> float:
        """Return when the next tick has something to do (monotonic seconds)."""
        return min(self._due, self._said_at)
