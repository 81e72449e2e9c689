"""Other ways to share workers out, to hold the planner against (paper section 7.4).

Each policy takes tasks and a number of workers and returns how many workers each task gets: only feasible sizes, and no
more in all than there are. None of them looks at what a task achieves; they know what an administrator knows without a
model of it. They are not made weak on purpose: what rounding leaves over is handed out too.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from unicron.errors import InvalidInputError
from unicron_planner.program import Ints


class Demand(NamedTuple):
    """A task's demand, as the policies see it.

    Attributes:
        name: unique.
        sizes: feasible worker counts, ascending, 0 (it waits) the first.
        weight: w(t) of equation 2.
        parameters: size of its model, in any unit that all tasks share.
        held: workers it had before the event.
        hit: whether it lost some of them, now or earlier, and has not got them back.
    """

    name: str
    sizes: Ints
    weight: float = 1.0
    parameters: float = 0.0
    held: int = 0
    hit: bool = False


Policy = Callable[[Sequence[Demand], int], dict[str, int]]
"""(tasks, workers) -> workers of each task by name."""


def equally(tasks: Sequence[Demand], workers: int) -> dict[str, int]:
    """Share `workers` out evenly among all tasks."""
    return share_out(tasks, [1.0] * len(tasks), workers)


def weighted(tasks: Sequence[Demand], workers: int) -> dict[str, int]:
    """Share `workers` out in proportion to the tasks' weights.

    Raises:
        InvalidInputError: a weight is negative or no number, or all are 0.
    """
    return share_out(tasks, [task.weight for task in tasks], workers)


def sized(tasks: Sequence[Demand], workers: int) -> dict[str, int]:
    """Share `workers` out in proportion to the sizes of the tasks' models.

    Raises:
        InvalidInputError: a number of parameters is negative or no number, or all are 0.
    """
    return share_out(tasks, [task.parameters for task in tasks], workers)


def repair_hit(tasks: Sequence[Demand], workers: int) -> dict[str, int]:
    """Let every task that was not hit keep its workers, and give those that were hit what is left.

    A task that was hit gets the largest feasible size up to what it had; `tasks` come in the order in which they were
    hit, so that the first hit is repaired first when a node comes back (paper section 7.5).
    """
    free, given = workers, {}
    for task in sorted(tasks, key=lambda task: task.hit):  # keeps the order within both kinds
        given[task.name] = _largest(task.sizes, min(task.held, free))
        free -= given[task.name]
    return {task.name: given[task.name] for task in tasks}


POLICIES: dict[str, Policy] = {"equally": equally, "weighted": weighted, "sized": sized, "repair_hit": repair_hit}
"""All of them, by the names of the paper."""


def share_out(tasks: Sequence[Demand], shares: Sequence[float], workers: int) -> dict[str, int]:
    """Give each task its share of `workers`, rounded to feasible sizes.

    Each share is first rounded down to the largest feasible size. Of what is left over, the task that is furthest below
    its share gets the step to its next feasible size, as long as any such step fits; of equals, the earlier task.

    Raises:
        InvalidInputError: a share is negative or no number, or all are 0.
    """
    for task, share in zip(tasks, shares, strict=True):
        if not (math.isfinite(share) and share >= 0):
            raise InvalidInputError(f"task {task.name}: a share of {share}; give a finite number, 0 or more")
    if tasks and not sum(shares):
        raise InvalidInputError("all tasks have a share of 0; give at least one of them more")
    wanted = [workers * share / sum(shares) for share in shares]
    picks = [_index(task.sizes, math.floor(want)) for task, want in zip(tasks, wanted, strict=True)]
    given = [int(task.sizes[pick]) for task, pick in zip(tasks, picks, strict=True)]
    free = workers - sum(given)
    while True:
        steps = [
            (given[index] - wanted[index], index)
            for index, task in enumerate(tasks)
            if picks[index] + 1 < len(task.sizes) and task.sizes[picks[index] + 1] - given[index] <= free
        ]
        if not steps:
            return {task.name: size for task, size in zip(tasks, given, strict=True)}
        index = min(steps)[1]
        picks[index] += 1
        size = int(tasks[index].sizes[picks[index]])
        free, given[index] = free - (size - given[index]), size


def _index(sizes: Ints, most: int) -> int:
    """Return the index of the largest size up to `most`."""
    return max(0, int(np.searchsorted(sizes, most, side="right")) - 1)


def _largest(sizes: Ints, most: int) -> int:
    return int(sizes[_index(sizes, most)])
