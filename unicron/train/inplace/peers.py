"""Notices that a rank waits for one that never comes there: it has ended its script, or waits elsewhere for this one.

A thread looks every half second whether the script is still in the same wait. If so it leaves its rank's position at
the rendezvous of the membership, and looks at those of the others; a rank that has ended the script leaves its own.
That a wait is in vain follows from what ranks have begun: how long it lasts only says when to look.
"""

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import msgspec

from unicron.contracts.tasks import WorkerPhase
from unicron.contracts.worker import Membership, Progress, Raised
from unicron.errors import GroupBrokenError, RankEndedError
from unicron.flight import is_of_library
from unicron.train.groups.rendezvous import Rendezvous
from unicron.train.restart import ending
from unicron.train.worker.channel import AgentChannel
from unicron.train.worker.telling import tell

LOOK_S, RARELY_S = 0.5, 30.0
"""How often a wait is looked at; the longer it lasts, the more rarely the others' positions are."""


class Wait(StrEnum):
    """For what a rank waits, each time for all other ranks.

    Attributes:
        SETUP: a collective before the training loop, counted from 1.
        LOOP: the beginning of the training loop.
        COLLECTIVE: a collective since then, counted from 1.
        GRADIENT: of an iteration.
    """

    SETUP = "collective {} before the training loop"
    LOOP = "the beginning of the training loop"
    COLLECTIVE = "collective {} since the training loop began"
    GRADIENT = "the gradient of iteration {}"


CURES = {
    Wait.SETUP: "let all ranks run the same collectives before their loop",
    Wait.LOOP: "let all ranks come to the same training loop",
    Wait.COLLECTIVE: "let all run the same collectives, and all of them change a model's buffers, or none",
    Wait.GRADIENT: "give all ranks the same number of batches; where one leaves a batch out or ends early, let all do "
    "so (all_reduce the decision)",
}
"""What to change, by what a rank waits for in vain."""


class Waiting(NamedTuple):
    """A wait, and the number of what is waited for."""

    wait: Wait
    number: int = 0

    def __str__(self) -> str:
        return self.wait.format(self.number)


class RankPosition(msgspec.Struct, frozen=True, kw_only=True):
    """The collectives that a rank has begun, and the reason why it begins no more.

    Attributes:
        rank: its number.
        where: it is in its script, for people.
        waits: for what; None where it has ended its script.
        setup: collectives before its training loop.
        begun: whether it has come to that.
        collectives: since then.
        iterations: whose gradients it has computed.
    """

    rank: int
    where: str
    waits: Waiting | None
    setup: int
    begun: bool
    collectives: int
    iterations: int

    def has_not_begun(self, waiting: Waiting) -> bool:
        """Return whether this rank has not begun what another one waits for."""
        match waiting.wait:
            case Wait.SETUP:
                return self.setup < waiting.number
            case Wait.LOOP:
                return not self.begun
            case Wait.COLLECTIVE:
                return self.collectives < waiting.number
        return self.iterations <= waiting.number

    def never_meets(self, other: "RankPosition") -> bool:
        """Return whether this rank waits for another one that never comes.

        The position of one that waits may be out of date: then its wait is over, which took this rank, too.
        """
        if self.waits is None or not other.has_not_begun(self.waits):
            return False
        return other.waits is None or self.has_not_begun(other.waits)


class Peers:
    """The other ranks of a script.

    Args:
        channel: to the agent.
        membership: returns that in which this rank is.
        position: returns where it is, given in what it waits, and where its script is.

    Attributes:
        iteration: that it is in.
    """

    def __init__(
        self,
        channel: AgentChannel,
        membership: Callable[[], Membership],
        position: Callable[[Waiting | None, str], RankPosition],
    ) -> None:
        self._channel, self._membership, self._position = channel, membership, position
        self._waiting: Waiting | None = None
        self.iteration = 0

    def watch(self) -> None:
        """Have a thread look at this rank's waits, from now on."""
        threading.Thread(target=self._run, name="unicron-peers", daemon=True).start()

    @contextlib.contextmanager
    def waiting(self, waits: Waiting, *, stays: bool = False) -> Iterator[None]:
        """Wait for them inside; with `stays`, until the next wait, as after it the script may wait for a GPU."""
        before, self._waiting = self._waiting, waits
        try:
            yield
        finally:
            if not stays:
                self._waiting = before

    def publish(self, position: RankPosition) -> None:
        """Publish this rank's position.

        Raises:
            GroupBrokenError: the rendezvous can't be reached.
        """
        with self._rendezvous(self._membership()) as store:
            store.set(f"{position.rank}", msgspec.json.encode(position))

    @contextlib.contextmanager
    def _rendezvous(self, membership: Membership) -> Iterator[Rendezvous]:
        store = Rendezvous(membership, "-positions")
        try:
            yield store
        finally:
            store.close()

    def _run(self) -> None:
        seen, pause_s = self._waiting, LOOK_S
        while True:
            time.sleep(pause_s if self._waiting is seen else LOOK_S)
            if self._waiting is None or self._waiting is not seen:
                seen, pause_s = self._waiting, LOOK_S
                continue
            if seen.wait is Wait.COLLECTIVE:  # a forward pass before it may have been of no iteration, but to evaluate
                at = max(0, self._channel.iteration)
                self._channel.send(Progress(iteration=at, phase=WorkerPhase.WAITING, done=0))
            pause_s = min(2 * pause_s, RARELY_S)
            with contextlib.suppress(GroupBrokenError, msgspec.MsgspecError):  # it is looked at again
                self._compare_positions(seen)

    def _compare_positions(self, waiting: Waiting) -> None:
        """Publish in what this rank waits, and end the process if another rank never comes there."""
        membership = self._membership()
        stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident or 0])  # noqa: SLF001 as faulthandler
        own = self._position(waiting, script_line(stack))
        with self._rendezvous(membership) as store:
            store.set(f"{own.rank}", msgspec.json.encode(own))
            found = store.read_present([f"{rank}" for rank in range(membership.world_size) if rank != own.rank])
        others = [msgspec.json.decode(each, type=RankPosition) for each in found if each]
        other = next((each for each in others if own.never_meets(each)), None)
        if other is not None and self._waiting is waiting and self._membership().epoch == membership.epoch:
            self._end_process(waiting, own, other, stack)

    def _end_process(
        self, waiting: Waiting, own: RankPosition, other: RankPosition, stack: traceback.StackSummary
    ) -> None:
        """Report which ranks wait for which and end the process, as the script's own thread can't."""
        does = f"waits at {other.where} for {other.waits}" if other.waits else f"has ended its script {other.where}"
        text = (
            f"rank {own.rank} waits at {own.where} for {waiting}, and rank {other.rank} never comes there: it "
            f"{does}, after {other.iterations} iterations: {cure(waiting, other.waits)}"
        )
        name = f"{RankEndedError.__module__}.{RankEndedError.__qualname__}"
        lines = "".join(stack.format())[-8000:]
        self._channel.send(Raised(iteration=self._channel.iteration, exception=name, text=text[:2000], traceback=lines))
        tell(f"{lines}{name}: {text}")
        ending.flush()
        os._exit(1)


def cure(own: Waiting, other: Waiting | None) -> str:
    """Return what to change where one rank waits for another, which waits for something else, or has ended."""
    early = own.wait in {Wait.SETUP, Wait.LOOP}
    ended = own.wait if early else Wait.GRADIENT  # as where it had fewer batches, each with a collective
    return "; ".join(dict.fromkeys((CURES[own.wait], CURES[other.wait if other else ended])))


def script_line(stack: traceback.StackSummary) -> str:
    """Return where a script is: its innermost line that is of no library."""
    own = [each for each in stack if not is_of_library(each.filename)]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else "an unknown line"
