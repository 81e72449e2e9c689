"""Clocks of parties that are wrong, are set, or sleep: each party reads its own."""

from random import Random

from unicron.clock import VirtualClock
from unicron_simulator.storms import faults
from unicron_simulator.storms.faults import StormFault

OFFSETS_S = (-7200.0, -300.0, -1.0, 1.0, 300.0, 7200.0)
"""By how much a clock may be wrong: hours, minutes, and as much as is still told from a delay."""

SLEEPS_S = (3.0, 90.0, 1800.0)
"""How long everything may sleep."""

ASLEEP, STOPPED = "everybody, asleep,", "everybody, stopped,"
"""As targets: all parties, the bus and its leases included, find their clocks ahead in one moment; of those that were
stopped, the monotonic ones, too."""


class PartyClock:
    """The clock of one party: the virtual one, and what it is off by."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.ahead_s = 0.0

    def now(self) -> float:
        """Return the Unix seconds that the party believes in."""
        return self._clock.now() + self.ahead_s


def faults_of(random: Random, parties: list[str], begin_s: float) -> list[StormFault]:
    """Return what becomes of clocks: some are wrong from the beginning, some are set, some back again; some sleep."""
    found: list[StormFault] = [
        faults.SetClock(at=at, target=random.choice(parties), by_s=random.choice(OFFSETS_S), for_s=for_s)
        for at in (0.0, *(random.uniform(begin_s, begin_s + 22) for _ in range(random.randint(1, 5))))
        for for_s in [random.choice([0.0, 2.0, 9.0, 30.0])]
    ]
    return found + [
        faults.SetClock(
            at=random.uniform(begin_s, begin_s + 22),
            target=random.choice([ASLEEP, STOPPED]),
            by_s=random.choice(SLEEPS_S),
        )
        for _ in range(random.randint(0, 2))
    ]
