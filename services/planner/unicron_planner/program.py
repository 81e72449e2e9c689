"""The dynamic program of paper section 5 (equations 3 to 5): how many workers each task gets.

Pure functions over arrays, compiled. One backward and one forward pass over all tasks are kept, row by row. The answer
to "task i is hit", "task i finishes" or "task i must run" then lies between the forward row before it and the backward
row after it. Being hit changes what a task's sizes earn only by amounts that are the same for all smaller and for all
larger sizes, so that even the step for task i itself is a by-product of the forward pass: all these answers together
cost no more than the two passes, O(m n k) for m tasks, n workers and k feasible sizes a task. A task whose layout
depends on its size is the exception: for each case that hits it, its step is made anew.

What is maximised is the reward, less a trifle for each worker started or stopped (so that the plan that moves fewer
workers wins a tie), less still less for uneven sizes.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from unicron_planner import kernels

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Truths = npt.NDArray[np.bool_]

MOVE = 2.0**-36
"""Cost of a started or stopped worker, as a part of the largest reward: far above rounding, far below any use.

Less for a task that earns so little beside the largest that its moves would cost more than it earns.
"""

UNEVEN = 1 / 4
"""Cost of a task that holds all workers, in moves, and with the square of its part where it holds less."""

ENDED = kernels.ENDED
"""In place of a number of lost workers: the task is no more."""

LAUNCHED = kernels.LAUNCHED
"""Likewise: the task must run."""


class Tasks(NamedTuple):
    """m tasks, packed: task t has the sizes `sizes[starts[t]:starts[t + 1]]`, ascending, 0 (it waits) the first.

    Attributes:
        starts: of shape (m + 1,).
        sizes: worker counts x', of all tasks one after the other.
        waf: F(t, x') for each of them.
        held: x, the workers that each task has, of shape (m,).
        held_waf: F(t, x), of shape (m,).
        relaid: for each of `sizes`, whether replicas there have another shape than at x.
        doubt: for each of `sizes`, as in `lookup.TaskStanding`.
    """

    starts: Ints
    sizes: Ints
    waf: Floats
    held: Ints
    held_waf: Floats
    relaid: Truths
    doubt: Floats


class Scores(NamedTuple):
    """The reward of each choice at one n'.

    Attributes:
        sizes, starts, held, relaid: of the tasks.
        base: reward of each choice while nothing is disturbed, less the trifle for uneven sizes.
        resized, hit, relayout: what a task loses that changes its size, that lost a worker, or whose layout changes
            (instead of the other two), of shape (m,).
        move: what each of its moved workers costs in a tie, of shape (m,).
        doubt: for each choice; a task that is given less than what it has left pays the difference.
    """

    starts: Ints
    sizes: Ints
    held: Ints
    base: Floats
    relaid: Truths
    resized: Floats
    hit: Floats
    relayout: Floats
    move: Floats
    doubt: Floats


def pack(
    sizes: list[Ints],
    waf: list[Floats],
    held: list[int],
    held_waf: list[float],
    relaid: list[Truths | None] | None = None,
    doubt: list[Floats | None] | None = None,
) -> Tasks:
    """Return the tasks in one piece; where None is given, a task's layout is always the same, and nothing in doubt."""
    starts = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum([len(one) for one in sizes], out=starts[1:])
    empty: list[Any] = [np.zeros(0)]
    same = [np.zeros(len(one), np.bool_) for one in sizes]
    changes = [own if given is None else given for own, given in zip(same, relaid or [None] * len(same), strict=True)]
    sure = [np.zeros(len(one)) for one in sizes]
    doubts = [own if given is None else given for own, given in zip(sure, doubt or [None] * len(sure), strict=True)]
    return Tasks(
        starts,
        np.concatenate(sizes or empty).astype(np.int64),
        np.concatenate(waf or empty).astype(np.float64),
        np.array(held, np.int64),
        np.array(held_waf, np.float64),
        np.concatenate(changes or empty).astype(np.bool_),
        np.concatenate(doubts or empty),
    )


def score(
    tasks: Tasks, workers: int, running_s: float, resize_s: float, failure_s: float, relayout_s: float = 0.0
) -> Scores:
    """Return what each choice is worth at n' = `workers` (equations 3 and 4), in weighted FLOP.

    Args:
        tasks: the tasks.
        workers: n'.
        running_s: D_running(n').
        resize_s: D_transition of a task that changes its size.
        failure_s: D_transition of a task that lost a worker.
        relayout_s: D_transition of a task whose layout changes, hit or not.
    """
    base, move = kernels.price(tasks, workers, running_s, max(resize_s, failure_s), MOVE, UNEVEN)
    resized, hit, relayout = (tasks.held_waf * seconds for seconds in (resize_s, failure_s, relayout_s))
    doubt = tasks.doubt * running_s
    return Scores(tasks.starts, tasks.sizes, tasks.held, base, tasks.relaid, resized, hit, relayout, move, doubt)


class Passes(NamedTuple):
    """Both passes over all tasks at one n'.

    Attributes:
        scores: what the choices are worth.
        values: of each choice while nothing is disturbed.
        forward: of shape (m + 1, n' + 1): the best of the tasks before i with exactly j workers.
        backward: likewise: the best of task i and those after it with at most j workers.
    """

    scores: Scores
    values: Floats
    forward: Floats
    backward: Floats


def prepare(scores: Scores, workers: int, older: Passes | None = None) -> Passes:
    """Return the backward pass, and room for the forward one.

    Args:
        scores: what the choices are worth at n' = `workers`.
        workers: n'.
        older: passes made before, no longer of use to anybody: rows behind the last task that changed are kept.
    """
    count = len(scores.held)
    values = kernels.worths(scores, np.zeros(count))
    shape = (count + 1, workers + 1)
    last = count - 1
    if older is not None and older.backward.shape == shape:
        forward, backward = older.forward, older.backward
        while last >= 0 and _same(scores, values, last, older.scores, older.values):
            last -= 1
    else:
        forward, backward = np.empty(shape), np.empty(shape)
    forward[0], forward[0, 0], backward[count] = -np.inf, 0.0, 0.0
    kernels.backward_pass(scores, values, last, backward)
    return Passes(scores, values, forward, backward)


def _same(scores: Scores, values: Floats, task: int, other: Scores, others: Floats) -> bool:
    """Return whether the task is worth the same at every size."""
    mine, theirs = slice(*scores.starts[task : task + 2]), slice(*other.starts[task : task + 2])
    return np.array_equal(scores.sizes[mine], other.sizes[theirs]) and np.array_equal(values[mine], others[theirs])


def singles(passes: Passes, cases: list[tuple[int, float]]) -> Ints:
    """Fill the forward pass, and answer the cases that touch one task.

    Args:
        passes: whose backward pass is filled.
        cases: task, and number of its workers that are lost (or ENDED, LAUNCHED), by task.

    Returns:
        the sizes of all tasks for each case, of shape (c, m); -1 in front where there is no assignment.
    """
    given = np.array(cases, np.float64).reshape(-1, 2)
    out = np.zeros((len(cases), len(passes.scores.held)), np.int64)
    window = math.ceil(given[:, 1].max(initial=0))
    kernels.singles(passes.scores, passes.values, window, passes.forward, passes.backward, given, out)
    return out


def several(passes: Passes, lost: Floats) -> Ints | None:
    """Return the sizes of all tasks in a case that touches any number of tasks; both passes are filled.

    Args:
        passes: both passes.
        lost: number of lost workers (or ENDED, LAUNCHED) of each task, of shape (m,); 0 where nothing happens.
    """
    out = np.zeros(len(lost), np.int64)
    touched = np.flatnonzero(lost)
    first, last = (int(touched[0]), int(touched[-1])) if len(touched) else (0, -1)  # then the backward pass has it all
    found = kernels.span(passes.scores, passes.values, lost, first, last, passes.forward, passes.backward, out)
    return out if found else None


def solve(scores: Scores, lost: Floats, workers: int) -> Ints | None:
    """Return the best sizes after an event that nothing was prepared for, None where there is no assignment."""
    count = len(lost)
    forward, backward = np.full((1, workers + 1), -np.inf), np.zeros((count + 1, workers + 1))
    forward[0, 0] = 0.0
    out = np.zeros(count, np.int64)
    found = kernels.span(scores, np.zeros(0), lost, 0, count - 1, forward, backward, out)
    return out if found else None


def second_best(scores: Scores, lost: Floats, workers: int, sizes: Ints) -> Ints | None:
    """Return the best sizes other than the optimal `sizes` after the same event, None where there are none."""
    values = kernels.worths(scores, lost)
    count = len(lost)
    forward, backward = np.empty((2, count + 1, workers + 1))
    forward[0], forward[0, 0], backward[count] = -np.inf, 0.0, 0.0
    kernels.forward_pass(scores, values, 0, count - 1, forward)
    kernels.backward_pass(scores, values, count - 1, backward)
    other, found = kernels.runner_up(scores, values, forward, backward, sizes)
    return other if found else None


def reward(
    tasks: Tasks,
    sizes: Ints,
    lost: Floats,
    running_s: float,
    resize_s: float,
    failure_s: float,
    relayout_s: float = 0.0,
) -> float:
    """Return the sum of G(t, x') (equation 3) of an assignment, in weighted FLOP; an ended task counts nothing."""
    return float(kernels.reward(tasks, sizes, lost, running_s, resize_s, failure_s, relayout_s))
