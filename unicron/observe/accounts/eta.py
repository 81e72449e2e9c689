"""How long a task still takes, and how sure that is. Pure."""

from collections.abc import Collection, Mapping

from unicron.contracts.base import Record
from unicron.contracts.tasks import UNCOUNTED, TaskSpec
from unicron.observe.accounts.phases import Phase

NOT_LOST = {Phase.TRAINING, Phase.IDLE, Phase.START_UP}
"""Phases of a task as a whole that no failure is to blame for; waiting for slots is idle time."""


class TimeLeft(Record, kw_only=True, frozen=True):
    """Seconds until a task has done its iterations, with the workers that it has.

    Attributes:
        seconds: at the median of its last iterations.
        least: at the fastest tenth of them, and nothing fails.
        most: at the slowest tenth of them, and failures take the share of its time that they took so far.
    """

    seconds: float
    least: float
    most: float


def time_left(
    spec: TaskSpec, iteration: int, recent: Collection[float], wall_s: Mapping[str, float]
) -> TimeLeft | None:
    """Return how long a task still takes; None where that can't be known.

    Args:
        spec: of the task.
        iteration: the last that it has finished.
        recent: seconds of its last iterations, in the membership that it has now.
        wall_s: seconds by phase of the task as a whole.
    """
    if not recent or spec.iterations >= UNCOUNTED:
        return None
    iterations = max(0, spec.iterations - iteration - 1)
    by_length = sorted(recent)
    fast, median, slow = (by_length[round(share * (len(by_length) - 1))] for share in (0.1, 0.5, 0.9))
    training = wall_s.get(Phase.TRAINING, 0.0)
    lost = sum(seconds for phase, seconds in wall_s.items() if phase not in NOT_LOST)
    held_up = 1 + lost / training if training else 1.0
    return TimeLeft(seconds=iterations * median, least=iterations * fast, most=iterations * slow * held_up)
