"""Iteration times of a task against their own recent past (paper section 4.1, figure 6). Pure: no clock, no faust."""

import msgspec

from unicron.contracts.base import Message
from unicron.contracts.events import IterationFinished
from unicron.contracts.ranges import SHORTEST_S, Count, Seconds
from unicron.contracts.slowdowns import ComputeTimed, SlowdownDetected, SlowdownEnded
from unicron_detector.pace import Paces

BAND = 1.1
"""Iteration times stay below this multiple of their mean as long as all is well."""

BACK = 1.05
"""Of the mean: a task that has left the band is back in it below this. Between the two nothing changes."""

FAILURE = 3.0
"""Beyond this multiple an iteration was interrupted rather than slow; it weighs no more than this in the mean."""

RECENT = 10
"""Iterations that are held against the mean."""

WINDOW = 100
"""Iterations that make up the mean; what has been slow for as many is the usual from then on."""

SURE = 1.6
"""So many times the mean deviation of single iterations, four standard errors of a mean of ten: where iteration times
vary by themselves, the band is that wide."""

TIMED_S = 1.2
"""Seconds of slow iterations before they are reported: by then agents have reported compute times twice."""

SERIES = 1024
"""Series of iteration times that are remembered; the one that was idle longest goes first."""


class Series(msgspec.Struct, kw_only=True):
    """Iteration times of one task at one world size; each iteration costs the same.

    Attributes:
        mean_s: of the iterations before the recent ones, as long as they were in the band.
        deviation_s: how far they are from the mean, in the mean; one that is far off weighs less than in a variance.
        count: how many of them weigh in it, at most WINDOW.
        recent: seconds of the last iterations.
        slow: iterations since it left its band; 0 while it is in there.
        untold_s: seconds of slow iterations that are missing before the slowdown is reported.
        busy: busy machines explain it so far.
        suppressed: it is not reported for that.
    """

    mean_s: Seconds = 0.0
    deviation_s: Seconds = 0.0
    count: Count = 0
    recent: list[Seconds] = []
    slow: Count = 0
    untold_s: Seconds = 0.0
    busy: bool = False
    suppressed: bool = False

    @property
    def recent_s(self) -> float:
        """Mean of the recent iterations, 0 where there are none."""
        return sum(self.recent) / len(self.recent) if self.recent else 0.0

    def add(self, seconds: float) -> bool:
        """Add an iteration; return whether the series has just left its band for good, or has just returned to it."""
        self.recent.append(seconds)
        if len(self.recent) > RECENT:
            self._update_mean(self.recent.pop(0))
        if self.slow:
            self.slow += 1
            if self.slow > WINDOW:
                self.mean_s, self.count = self.recent_s, RECENT
            if self._is_beyond(BACK, SURE / 2):
                return self._is_lasting(seconds)
            was_reported, self.slow, self.untold_s = not self.untold_s, 0, 0.0
            return was_reported
        self.slow = int(self._is_beyond(BAND, SURE))
        if not self.slow:
            return False
        self.untold_s = TIMED_S
        return self._is_lasting(sum(each for each in self.recent if each > BAND * self.mean_s))

    def _is_lasting(self, seconds: float) -> bool:
        """Count `seconds` of slowness; return whether a report is due now."""
        if not self.untold_s:
            return False
        self.untold_s = max(0.0, self.untold_s - seconds)
        return not self.untold_s

    def _update_mean(self, seconds: float) -> None:
        """Add an iteration to the mean unless it was slow; else a lasting slowdown would become the usual."""
        if self.slow:
            return
        if self.count >= RECENT:
            seconds = min(seconds, FAILURE * self.mean_s)
        self.count = min(self.count + 1, WINDOW)
        self.mean_s += (seconds - self.mean_s) / self.count
        self.deviation_s += (abs(seconds - self.mean_s) - self.deviation_s) / self.count

    def _is_beyond(self, band: float, deviations: float) -> bool:
        """Return whether the mean and most iterations are beyond `band`: one iteration with a failure is no trend."""
        if self.count < RECENT:
            return False
        limit = max(band * self.mean_s, self.mean_s + deviations * self.deviation_s)
        return self.recent_s > limit and sum(each > limit for each in self.recent) > len(self.recent) / 2


class StoredSeries(msgspec.Struct, kw_only=True):
    """The series kept over a restart, by task and world size. The paces of workers are not kept.

    Attributes:
        busy: tasks for which busy machines were reported.
    """

    tasks: dict[str, dict[int, Series]] = {}
    busy: set[str] = set()


class Windows:
    """The series of all tasks, and the paces of their workers.

    Args:
        known: what an earlier instance has kept.
    """

    def __init__(self, known: StoredSeries | None = None) -> None:
        self.known = known or StoredSeries()
        self._paces = Paces()

    def add_timings(self, timed: ComputeTimed) -> None:
        """Add workers' compute times."""
        series = self.known.tasks.get(timed.task, {})
        self._paces.observe(timed, frozen=any(each.slow for each in series.values()))

    def add_iteration(self, finished: IterationFinished) -> list[Message]:
        """Add an iteration; return the slowdown that begins or ends with it."""
        if finished.seconds < SHORTEST_S:
            return []
        if finished.iteration == 0:  # the name of an earlier task is used again
            self._forget(finished.task)
        out = self._end_at_other_sizes(finished)
        series = self._series(finished)
        lasted = series.slow >= WINDOW
        if not series.add(finished.seconds):
            again = series.busy and series.slow % RECENT == 0 and finished.seconds > BAND * series.mean_s
            return [*out, *self._report_slow(finished, series, begins=False)] if again else out
        if series.slow:
            return [*out, *self._report_slow(finished, series, begins=True)]
        suppressed, series.busy, series.suppressed = series.suppressed, False, False
        if not suppressed:
            reason = f"{WINDOW} iterations were like that: it is the usual now" if lasted else "back in its band"
            return [*out, _slowdown_ended(finished, finished.world_size, series, reason)]
        return out

    def _report_slow(self, finished: IterationFinished, series: Series, *, begins: bool) -> list[Message]:
        """Return the report that a task is slow; where busy machines explain it, only the first time.

        Then it is looked at again now and then: a device may have got slow meanwhile, or it is seen only then.
        """
        common, workers = self._paces.slow(finished.task)
        busy = self._paces.busy(finished.task, common, workers)
        if not (begins or workers):
            return []
        series.busy = bool(busy)
        if busy and (not begins or finished.task in self.known.busy):
            series.suppressed |= begins
            return []
        series.suppressed = False
        self.known.busy |= {finished.task} if busy else set()
        return [
            SlowdownDetected(
                task=finished.task,
                epoch=finished.epoch,
                iteration=finished.iteration,
                world_size=finished.world_size,
                usual_s=series.mean_s,
                recent_s=series.recent_s,
                computing=common,
                workers=workers,
                busy=busy,
            )
        ]

    def _forget(self, task: str) -> None:
        self.known.tasks.pop(task, None)
        self.known.busy.discard(task)
        self._paces.forget(task)

    def _end_at_other_sizes(self, finished: IterationFinished) -> list[Message]:
        """End a slowdown at another world size: the task goes on with other workers, and other figures."""
        out: list[Message] = []
        for size, series in self.known.tasks.get(finished.task, {}).items():
            if series.slow and size != finished.world_size:
                why = f"it goes on with {finished.world_size} workers, not {size}"
                out += [] if series.untold_s or series.suppressed else [_slowdown_ended(finished, size, series, why)]
                series.slow, series.untold_s, series.recent = 0, 0.0, []
                series.busy = series.suppressed = False
        return out

    def _series(self, finished: IterationFinished) -> Series:
        tasks = self.known.tasks
        of_task = tasks[finished.task] = tasks.pop(finished.task, {})  # the last that was heard of is last
        if finished.world_size not in of_task:
            while sum(map(len, tasks.values())) >= SERIES:
                first = next(iter(tasks))
                if first != finished.task:
                    self._forget(first)
                else:
                    del of_task[next(iter(of_task))]
            of_task[finished.world_size] = Series()
        return of_task[finished.world_size]


def _slowdown_ended(finished: IterationFinished, world_size: int, series: Series, reason: str) -> SlowdownEnded:
    return SlowdownEnded(
        task=finished.task,
        epoch=finished.epoch,
        iteration=finished.iteration,
        world_size=world_size,
        usual_s=series.mean_s,
        recent_s=series.recent_s,
        reason=reason,
    )
