"""For how long a worker that nobody watches has shown no sign of life. Pure."""

import math
from dataclasses import dataclass
from typing import NamedTuple

LOOKS = 4
"""How many times within its limit a worker's processes are looked at."""

IDLE = 0.05
"""Share of a core: processes that use less only wait. Threads that watch others use that much."""


class ProcessUse(NamedTuple):
    """The resources that a process and its descendants have used so far.

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
class LifeSigns:
    """Signs of life of a worker whose script has no session and is not watched. Times are monotonic seconds.

    Signs are messages to the agent, bytes that its processes write (to their log or any other file), and processor
    time. Next to GPUs processor time is no sign: threads that wait for NCCL or for a kernel spin. Files other than the
    log count, since a script may keep its records there.

    Attributes:
        limit_s: silence that counts as a stall; 0: silence is not checked.
        spins: whether threads of this worker spin while they wait for its device.
        heard_at: the last sign.
        looked: the last look at its processes, and what they had used by then.
        asked_at: when its stacks were last asked for.
        seen_at: when its stacks were last received.
    """

    limit_s: float = 0.0
    spins: bool = False
    heard_at: float = 0.0
    looked: tuple[float, ProcessUse] | None = None
    asked_at: float = -math.inf
    seen_at: float = -math.inf

    def look_is_due(self, now: float) -> bool:
        """Return whether to look at its processes now."""
        last = max(self.heard_at, self.looked[0] if self.looked else 0.0)
        return self.limit_s > 0 and now - last >= self.limit_s / LOOKS

    def record_use(self, use: ProcessUse, now: float) -> None:
        """Record what its processes have used; use since the previous look is a sign of life."""
        before, self.looked = self.looked, (now, use)
        if before is None or before[0] < self.heard_at:
            return
        busy = use.awake or use.cpu_s - before[1].cpu_s > IDLE * (now - before[0])
        worked = busy and not self.spins
        if worked or use.written != before[1].written:
            self.heard_at = now

    def silent_s(self, now: float) -> float:
        """Return the seconds since the last sign."""
        return now - self.heard_at

    def is_nearly_over(self, now: float) -> bool:
        """Return whether its limit ends by the next look, so that its stacks are needed."""
        return self.silent_s(now) >= self.limit_s * (LOOKS - 1) / LOOKS

    def is_over(self, now: float) -> bool:
        """Return whether the silence has reached its limit, and stacks were received since it began.

        Without stacks the detector can't find out which worker the others wait for, and all would be replaced.
        """
        return self.silent_s(now) >= self.limit_s and self.seen_at >= self.heard_at

    def begin_stack_request(self, now: float) -> bool:
        """Return whether to ask for its stacks, and note that; not while an earlier request is unanswered."""
        if self.asked_at > self.seen_at:
            return False
        self.asked_at = now
        return True
