"""The ladder (paper section 4.2): an attempt that keeps failing gives way to the next, costlier one.

Reattempts are counted per task, restarts per task and node, climbs to severity 1 per task; each in a sliding window.
Apart from these it is counted how often a task has failed in one iteration, whoever did: a sample that ends whoever
computes it goes from node to node, and no node's count climbs.
"""

import msgspec

from unicron.contracts.ranges import Count, Moment, Number, Text


class Ladder(msgspec.Struct, kw_only=True):
    """What one task has gone through lately. Times are Unix seconds of the detector's own clock.

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

    def climb(self, node: str, now: float, window_s: float) -> bool:
        """Give `node` up on account of this task; return whether another one was given up in the window before."""
        self.forget(now, window_s)
        self.climbs[node] = now
        self.restarts.pop(node, None)
        return len(self.climbs) > 1

    def forget(self, now: float, window_s: float) -> None:
        """Drop what lies before the window."""
        self.reattempts = _recent(self.reattempts, now, window_s)
        kept = {node: _recent(times, now, window_s) for node, times in self.restarts.items()}
        self.restarts = {node: times for node, times in kept.items() if times}
        self.climbs = {node: at for node, at in self.climbs.items() if now - at <= window_s}


class Standstill(msgspec.Struct, kw_only=True, array_like=True):
    """The iteration in which a task fails, as long as nobody has heard that it went on behind it.

    Attributes:
        epoch: the last membership that failed in it; what else fails in that one is of the same blow.
        kept: microbatches that were done when workers met in it; more of them are progress.
        tried: what ended it each time.
        met_at: when workers met last.
    """

    iteration: Number = -1
    epoch: Number = -1
    kept: Count = 0
    tried: list[Text] = []
    met_at: Moment = 0.0

    def failed(self, iteration: int, epoch: int, how: str, *, lasted: bool = False) -> int:
        """Count a failure; return in how many memberships the task has failed in that iteration.

        One in an earlier iteration tells nothing: the task was set back, and has not come here again yet.

        Args:
            iteration: in which it failed.
            epoch: of the membership.
            how: what ended it.
            lasted: it was so long in there that it has come further, though nobody tells of its iterations.
        """
        if iteration < self.iteration or epoch <= self.epoch:
            return 0
        if iteration > self.iteration or lasted:
            self.kept, self.tried = 0, []
        self.iteration, self.epoch = iteration, epoch
        self.tried = [*self.tried, how]
        return len(self.tried)

    def reached(self, iteration: int, kept: int = 0) -> None:
        """Note where the task goes on."""
        if iteration > self.iteration or (iteration == self.iteration and kept > self.kept):
            self.tried = []
        if iteration == self.iteration:
            self.kept = max(self.kept, kept)


def _recent(times: list[float], now: float, window_s: float) -> list[float]:
    return [at for at in times if now - at <= window_s]
