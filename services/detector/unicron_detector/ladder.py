"""The ladder (paper section 4.2): an attempt that keeps failing gives way to the next, costlier one.

Reattempts are counted per task, restarts per task and node, climbs to severity 1 per task; each in a sliding window.
Apart from these it is counted how often a task has failed in one iteration, on any worker: a sample that ends every
worker that computes it goes from node to node, and no node's count climbs.
"""

import msgspec

from unicron.contracts.ranges import Count, Moment, Number, Text


class Ladder(msgspec.Struct, kw_only=True):
    """The recent failures of one task. Times are Unix seconds of the detector's own clock.

    Attributes:
        reattempts: times of its severity 3 failures.
        restarts: node -> times of its severity 2 failures there.
        climbs: node -> when that node was given up after failures of this task alone.
    """

    reattempts: list[Moment] = []
    restarts: dict[str, list[Moment]] = {}
    climbs: dict[str, Moment] = {}

    def reattempt(self, now: float, window_s: float) -> int:
        """Count a severity 3 failure; return how many the window holds, this one included."""
        self.reattempts = [*_recent(self.reattempts, now, window_s), now]
        return len(self.reattempts)

    def restart(self, node: str, now: float, window_s: float) -> int:
        """Count a severity 2 failure on `node`; return how many the window holds, this one included."""
        self.restarts[node] = [*_recent(self.restarts.get(node, []), now, window_s), now]
        return len(self.restarts[node])

    def give_up_node(self, node: str, now: float, window_s: float) -> bool:
        """Record that `node` is given up because of this task; return False where another was within the window.

        What fails on several nodes is no node's own: they are given up no further.
        """
        self.forget(now, window_s)
        if set(self.climbs) - {node}:
            return False
        self.climbs[node] = now
        self.restarts.pop(node, None)
        return True

    def forget(self, now: float, window_s: float) -> None:
        """Drop what lies before the window."""
        self.reattempts = _recent(self.reattempts, now, window_s)
        kept = {node: _recent(times, now, window_s) for node, times in self.restarts.items()}
        self.restarts = {node: times for node, times in kept.items() if times}
        self.climbs = {node: at for node, at in self.climbs.items() if now - at <= window_s}


OUTAGE_S = 600.0
"""For so long a server outside of the cluster may refuse before what fails for that counts as any other failure."""

LONGEST_S, CALM_S, ECHO_S = 60.0, 300.0, 3.0
"""The longest wait; after so long without such a failure the outage is over; so close behind one others may follow."""


class Outage(msgspec.Struct, kw_only=True, array_like=True):
    """A server outside of the cluster refuses a task or does not answer, so that a restart at once is in vain.

    Attributes:
        since: when it began.
        at: when the task failed for that last.
        iteration: in which that was; 0 also where that is not known.
        tries: how often it did, without coming further.
        ordered: number of the newest worker then: what others up to that meet is the same try.
    """

    since: Moment = 0.0
    at: Moment = 0.0
    iteration: Number = 0
    tries: Count = 0
    ordered: Number = -1

    def count_failure(self, now: float, iteration: int, number: int, ordered: int) -> float | None:
        """Count a failure; return for how many seconds to wait; None where it lasts for too long.

        Args:
            now: Unix seconds.
            iteration: in which the worker was; -1 before the first.
            number: of the worker.
            ordered: number of the newest worker of the task.
        """
        iteration = max(iteration, 0)
        if self.tries and number <= self.ordered and iteration <= self.iteration and now - self.at <= CALM_S:
            return self.wait_s
        if iteration > self.iteration or now - self.at > CALM_S + self.wait_s:
            self.since, self.tries, self.iteration = now, 0, iteration
        self.at, self.tries, self.ordered = now, self.tries + 1, ordered
        return self.wait_s if now - self.since <= OUTAGE_S else None

    def count_lack(self, now: float, number: int, ordered: int) -> float:
        """Count a failure for want of something; return for how many seconds to wait, which has no end.

        How far the task is does not count: it may go on with fewer workers. Arguments are those of `count_failure`.
        """
        if self.tries and number <= self.ordered and now - self.at <= CALM_S:
            return self.wait_s
        if now - self.at > CALM_S + self.wait_s:
            self.since, self.tries = now, 1
        self.at, self.tries, self.ordered = now, self.tries + 1, ordered
        return self.wait_s

    def explains(self, now: float) -> bool:
        """Return whether another failure at `now` may be a consequence of this outage."""
        return bool(self.tries) and now - self.at <= ECHO_S

    @property
    def wait_s(self) -> float:
        """Seconds to wait: none the first time, then twice as many as before each time."""
        return min(LONGEST_S, 2.0 ** (self.tries - 2)) if self.tries > 1 else 0.0


EARLIER = 64
"""Iterations before the newest one that a task failed in of which it is remembered how often it did."""


class Standstill(msgspec.Struct, kw_only=True, array_like=True):
    """The iteration in which a task fails, until the task is known to have computed a later one.

    Attributes:
        iteration: the last one that it failed in.
        epoch: the last membership that failed; what else fails in that one is of the same blow.
        kept: microbatches that were done when workers met in it; more of them are progress.
        tried: what ended it each time.
        met_at: when workers met last.
        earlier: likewise for iterations before it in which the task fails since it was set back.
        starts: by slot, how workers ended there, one after the other, before the task had a place for them.
        same: by slot, what may be the program's own that ended its workers last, and how often in a row.
    """

    iteration: Number = -1
    epoch: Number = -1
    kept: Count = 0
    tried: list[Text] = []
    met_at: Moment = 0.0
    earlier: dict[Number, list[Text]] = {}
    starts: dict[Text, list[Text]] = {}
    same: dict[Text, tuple[Text, Count]] = {}

    def count_failure(self, iteration: int, epoch: int, how: str, *, lasted: bool = False) -> list[str]:
        """Count a failure; return what ended the task in that iteration, once for each membership.

        Args:
            iteration: in which it failed; -1 where that is not known: in the one in which it failed before.
            epoch: of the membership.
            how: what ended it.
            lasted: it ran so long that it has come further, though it reports no iterations.
        """
        iteration = self.iteration if iteration < 0 else iteration
        if epoch <= self.epoch:
            return []
        self.epoch = epoch
        if iteration < self.iteration:  # it was set back, and has not come there again yet
            found = self.earlier[iteration] = [*self.earlier.get(iteration, []), how]
            if len(self.earlier) > EARLIER:
                self.earlier.pop(min(self.earlier))
            return found
        if iteration > self.iteration or lasted:
            self.kept, self.tried = 0, []
        self.iteration = iteration
        self.tried = [*self.tried, how]
        return self.tried

    def count_failed_start(self, slot: str, how: str) -> list[str]:
        """Count the end of a worker that was in no membership yet; return how earlier ones in its slot ended."""
        self.starts[slot] = [*self.starts.get(slot, []), how]
        return self.starts[slot]

    def count_same(self, slot: str, what: str) -> int:
        """Count what may be the program's own that ended a slot's worker; return how often it did, in a row."""
        last, times = self.same.get(slot, ("", 0))
        times = times + 1 if last == what else 1
        self.same[slot] = what, times
        return times

    def record_progress(self, iteration: int, kept: int = 0) -> None:
        """Record the iteration in which the task continues."""
        self.starts = {}
        self.earlier = {at: tried for at, tried in self.earlier.items() if at >= iteration}
        if iteration > self.iteration:
            self.same = {}
        if iteration > self.iteration or (iteration == self.iteration and kept > self.kept):
            self.tried = []
        if iteration == self.iteration:
            self.kept = max(self.kept, kept)


def _recent(times: list[float], now: float, window_s: float) -> list[float]:
    return [at for at in times if now - at <= window_s]
