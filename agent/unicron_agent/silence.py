"""For how long a worker that nobody watches has shown no sign of life. Pure."""

import math
from dataclasses import dataclass
from typing import NamedTuple

LOOKS = 4
"""A worker is looked at that often within its limit."""

IDLE = 0.05
"""Of a core: who uses less only waits. Threads that watch others do that much."""


class Use(NamedTuple):
    """What a process and all that it has started have used so far.

    Attributes:
        cpu_s: seconds of CPU.
        written: bytes to files and pipes; what is sent through sockets does not count.
        awake: whether one of them runs now, would run if the machine were less busy, or waits for a disk.
        stopped: whether a signal or a debugger has stopped one of them.
    """

    cpu_s: float = 0.0
    written: int = 0
    awake: bool = False
    stopped: bool = False


@dataclass
class Silence:
    """Signs of life of a worker whose script has no session and is not watched. Times are monotonic seconds.

    A sign is whatever it tells its agent, what its processes write (to their log, or to any other file), and the use of
    a processor. Not so next to GPUs: NCCL's ranks, and whoever waits for a kernel of theirs, spin while they wait, so
    there a busy processor is no sign, and only what is written counts. That is not the log alone, since scripts that
    keep records in files of their own would be ended though they train.

    Attributes:
        limit_s: after which it is silent for too long; 0: nobody asks.
        spins: whether its device makes who waits spin.
        heard_at: the last sign.
        looked: when its processes were looked at last, and what they had used by then.
        asked_at: when somebody was sent to see where its threads are.
        seen_at: when that was known last.
    """

    limit_s: float = 0.0
    spins: bool = False
    heard_at: float = 0.0
    looked: tuple[float, Use] | None = None
    asked_at: float = -math.inf
    seen_at: float = -math.inf

    def is_due(self, now: float) -> bool:
        """Return whether its processes are to be looked at."""
        last = max(self.heard_at, self.looked[0] if self.looked else 0.0)
        return self.limit_s > 0 and now - last >= self.limit_s / LOOKS

    def look(self, use: Use, now: float) -> None:
        """Note what its processes have used by now; what they did before the last sign tells nothing."""
        before, self.looked = self.looked, (now, use)
        if before is None or before[0] < self.heard_at:
            return
        busy = use.awake or use.cpu_s - before[1].cpu_s > IDLE * (now - before[0])
        worked = busy and not self.spins
        if worked or use.written != before[1].written:
            self.heard_at = now

    def lasts_s(self, now: float) -> float:
        """Return for how long it has lasted."""
        return now - self.heard_at

    def is_near(self, now: float) -> bool:
        """Return whether it is over at the next look: where its threads are then is to be known."""
        return self.lasts_s(now) >= self.limit_s * (LOOKS - 1) / LOOKS

    def is_over(self, now: float) -> bool:
        """Return whether it has lasted for too long, and somebody has seen since it began where its threads are.

        Without that nobody could tell who waits for whom, and all would be replaced.
        """
        return self.lasts_s(now) >= self.limit_s and self.seen_at >= self.heard_at

    def asks(self, now: float) -> bool:
        """Return whether to send somebody to see where its threads are: who was sent before has come back."""
        if self.asked_at > self.seen_at:
            return False
        self.asked_at = now
        return True
