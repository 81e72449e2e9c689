"""The dynamic program of paper section 5 (equations 3 to 5): how many workers each task gets.

Pure functions over arrays. A task is a `Choices`: the worker counts it can be given and what each earns. One forward
and one backward pass over all tasks are kept as fronts; the answer to "task i is hit", "task i finishes" or "task i
must run" is then one step for task i between the forward front before it and the backward front after it, so that all
these answers together cost no more than the passes: O(m n^2) for m tasks and n workers.

Scores are whole numbers, so that sums are exact in whatever order they are added and ties are ties: a reward, less a
little for each worker started or stopped (so that the plan that changes fewer workers wins a tie), less still less for
uneven sizes. What is left after that goes to the task submitted earlier.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

RESOLUTION = 2**48
"""Score of the largest reward a single task can earn; 4096 such rewards still add up within 64 bits."""

MOVE = 2**18
"""What a started or stopped worker costs in a score: a billionth of the largest reward, far above all rounding.

Less for a task that earns so little beside the largest that its moves would cost more than it earns.
"""

UNEVEN = 1 / 4
"""What a task costs that holds all workers, in moves, and with the square of its part where it holds less."""

UNREACHABLE = -(2**61)
"""Score of a state that no assignment leads to; two of them still add up within 64 bits."""


class Choices(NamedTuple):
    """What one task can be given: `sizes[a]` workers earn `rewards[a]`, ranked by `scores[a]`. Sizes ascend."""

    sizes: Ints
    rewards: Floats
    scores: Ints


class Front(NamedTuple):
    """Row i of S(i, j): for each number of workers j the two best scores of different assignments.

    Attributes:
        best, second: of shape (n + 1,).
        pick: index into the sizes of the task added last that leads to `best`.
    """

    best: Ints
    second: Ints
    pick: Ints


class Sweep(NamedTuple):
    """Both passes over `tasks`: `forward[i]` is over tasks before i, `backward[i]` over task i and those after it."""

    tasks: Sequence[Choices]
    forward: list[Front]
    backward: list[Front]


class Solution(NamedTuple):
    """An optimal assignment.

    Attributes:
        sizes: workers of each task.
        reward: sum of G (equation 3).
        score: what was maximised.
        runner_up: best score of any other assignment, None where there is none.
    """

    sizes: list[int]
    reward: float
    score: int
    runner_up: int | None


ENDED = Choices(np.zeros(1, np.int64), np.zeros(1), np.zeros(1, np.int64))
"""The choices of a task that is no more."""


def rewards(
    sizes: Ints, waf: Floats, held: int, held_waf: float, *, hit: bool, running_s: float, transition_s: float
) -> Floats:
    """Return G(t, x') of equations 3 and 4 for each x' in `sizes`, in weighted FLOPs.

    Args:
        sizes: worker counts x', ascending.
        waf: F(t, x') for each of them.
        held: x, the workers that the task has.
        held_waf: F(t, x).
        hit: whether a worker of the task faulted.
        running_s: D_running(n').
        transition_s: D_transition.
    """
    disturbed = np.ones(sizes.shape) if hit else (sizes != held).astype(np.float64)
    return waf * running_s - held_waf * transition_s * disturbed


def scores(sizes: Ints, earned: Floats, living: int, unit: float, workers: int) -> Ints:
    """Return the score of each choice.

    Args:
        sizes: worker counts, ascending.
        earned: reward of each.
        living: workers of the task that are still there; the others have to be started whatever the plan.
        unit: reward of one point, the same for all tasks that compete.
        workers: n'.
    """
    points = np.rint(earned / unit).astype(np.int64)
    move = min(MOVE, int(np.abs(points).max(initial=0)) // (4 * max(workers, 1)))
    uneven = np.rint(move * UNEVEN * (sizes / max(workers, 1)) ** 2).astype(np.int64)
    ranked: Ints = points - move * np.abs(sizes - living) - uneven
    return ranked


def forward(tasks: Sequence[Choices], workers: int) -> list[Front]:
    """Return S(0, j) to S(m, j), in which j is the number of workers used."""
    start = np.full(workers + 1, UNREACHABLE, np.int64)
    start[0] = 0
    fronts = [Front(start, np.full_like(start, UNREACHABLE), np.zeros_like(start))]
    for choices in tasks:
        fronts.append(_extend(fronts[-1], choices, larger=False))
    return fronts


def backward(tasks: Sequence[Choices], workers: int) -> list[Front]:
    """Return the same from the last task to the first; here j is the number of workers that may be used."""
    fronts = [_open(workers)]
    for choices in reversed(tasks):
        fronts.append(_extend(fronts[-1], choices, larger=True))
    return fronts[::-1]


def sweep(tasks: Sequence[Choices], workers: int) -> Sweep:
    """Return both passes over `tasks`, from which `solve_instead` answers for every next event."""
    return Sweep(tasks, forward(tasks, workers), backward(tasks, workers))


def solve(tasks: Sequence[Choices], workers: int) -> Solution | None:
    """Return the best assignment, None where no assignment keeps to the sizes (0 is missing from some)."""
    return _join(tasks, forward(tasks, workers), [_open(workers)])


def solve_instead(passes: Sweep, replaced: Mapping[int, Choices]) -> Solution | None:
    """Return the best assignment with other choices for some tasks, None where there is none.

    Only the tasks from the first replaced to the last are gone through again.
    """
    count = len(passes.tasks)
    first, last = (min(replaced), max(replaced)) if replaced else (count, count - 1)
    tasks = [replaced.get(index, choices) for index, choices in enumerate(passes.tasks)]
    ahead = passes.forward[: first + 1]
    for choices in tasks[first : last + 1]:
        ahead.append(_extend(ahead[-1], choices, larger=False))
    return _join(tasks, ahead, passes.backward[last + 1 :])


def _open(workers: int) -> Front:
    """Return S(0, j) = 0: no task, and any number of workers left over."""
    free = np.zeros(workers + 1, np.int64)
    return Front(free, np.full_like(free, UNREACHABLE), np.zeros_like(free))


def _extend(front: Front, choices: Choices, *, larger: bool) -> Front:
    """Take one more task in (equation 5); of equal choices keep the `larger` or the smaller."""
    best = np.full_like(front.best, UNREACHABLE)
    second = best.copy()
    pick = np.zeros_like(best)
    for index, (size, score) in enumerate(zip(choices.sizes.tolist(), choices.scores.tolist(), strict=True)):
        if size >= len(best):
            break
        first, other = front.best[: len(best) - size] + score, front.second[: len(best) - size] + score
        leading, trailing = best[size:], second[size:]
        np.maximum(trailing, np.maximum(np.minimum(leading, first), other), out=trailing)
        pick[size:][first >= leading if larger else first > leading] = index
        np.maximum(leading, first, out=leading)
    return Front(best, second, pick)


def _join(tasks: Sequence[Choices], ahead: Sequence[Front], behind: Sequence[Front]) -> Solution | None:
    """Share the workers between the tasks that `ahead` covers and the rest, which `behind` covers."""
    left, right = ahead[-1], behind[0]
    totals = left.best + right.best[::-1]
    used = len(totals) - 1 - int(np.argmax(totals[::-1]))
    score, free = int(totals[used]), len(totals) - 1 - used
    if score < UNREACHABLE // 2:
        return None
    others = [left.second[used] + right.best[free], left.best[used] + right.second[free]]
    totals[used] = UNREACHABLE
    runner_up = int(max(*others, totals.max()))

    split = len(ahead) - 1
    picks = [0] * len(tasks)
    for index in range(split - 1, -1, -1):
        picks[index] = int(ahead[index + 1].pick[used])
        used -= int(tasks[index].sizes[picks[index]])
    for index in range(split, len(tasks)):
        picks[index] = int(behind[index - split].pick[free])
        free -= int(tasks[index].sizes[picks[index]])
    return Solution(
        sizes=[int(choices.sizes[pick]) for choices, pick in zip(tasks, picks, strict=True)],
        reward=float(sum(choices.rewards[pick] for choices, pick in zip(tasks, picks, strict=True))),
        score=score,
        runner_up=runner_up if runner_up > UNREACHABLE // 2 else None,
    )
