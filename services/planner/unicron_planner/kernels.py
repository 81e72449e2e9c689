"""The compiled loops of the dynamic program; `unicron_planner.program` says what they are for.

Written as numba wants loops to be: plain, over arrays, each with one thing in the innermost loop. `scores` is a
`program.Scores`.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

ENDED = -1
LAUNCHED = -2


_UNKEPT: list[Any] = []
"""Functions whose machine code has no place on disk: neither beside this file nor in the user's cache."""


def _jit(function: Callable[..., Any]) -> Any:
    """Compile `function`, and keep the machine code on disk where there is a place for it."""
    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # nothing here can be written
        _UNKEPT.append(numba.njit(nogil=True)(function))
        return _UNKEPT[-1]


def keep_in(folder: str) -> None:
    """Keep machine code that has no place in a folder, of the user's alone, as it is run from there.

    Raises:
        RuntimeError: it can't be written.
    """
    numba.config.CACHE_DIR = folder  # type: ignore[attr-defined]
    while _UNKEPT:
        _UNKEPT.pop().enable_caching()


@_jit
def price(tasks, workers, running_s, longest_s, trifle, uneven):  # type: ignore[no-untyped-def]
    """Return the undisturbed reward of each choice, less the trifle for uneven sizes, and the price of a move."""
    count = tasks.held.shape[0]
    move, base = np.zeros(count), np.empty(tasks.sizes.shape[0])
    largest = 0.0
    for task in range(count):
        for a in range(tasks.starts[task], tasks.starts[task + 1]):
            base[a] = tasks.waf[a] * running_s
            if tasks.sizes[a] <= workers:
                move[task] = max(move[task], base[a])
        largest = max(largest, move[task] + tasks.held_waf[task] * longest_s)
    if largest > 0:  # a power of two, so that small changes of one task leave the trifles of the others alone
        trifle *= 2.0 ** np.ceil(np.log2(largest))
    for task in range(count):
        move[task] = min(trifle, move[task] / (4 * max(workers, 1)))
        for a in range(tasks.starts[task], tasks.starts[task + 1]):
            base[a] -= move[task] * uneven * (tasks.sizes[a] / max(workers, 1)) ** 2
    return base, move


@_jit
def extend(before, sizes, scores, low, high, out):  # type: ignore[no-untyped-def]
    """Raise `out[j]` to the best of `before[j - sizes[a]] + scores[a]` over `low` <= a < `high` (equation 5).

    Four sizes at a time: that many sums are made for each value that is read and written back.
    """
    count = out.shape[0]
    a = low
    while a + 4 <= high and sizes[a + 3] < count:
        last = sizes[a + 3]
        for b in range(a, a + 3):
            k, g = sizes[b], scores[b]
            for j in range(k, last):
                value = before[j - k] + g
                out[j] = value if value > out[j] else out[j]
        g0, g1, g2, g3 = scores[a], scores[a + 1], scores[a + 2], scores[a + 3]
        p0, p1, p2 = before[last - sizes[a] :], before[last - sizes[a + 1] :], before[last - sizes[a + 2] :]
        rest = out[last:]
        for j in range(count - last):
            v0, v1, v2, v3 = p0[j] + g0, p1[j] + g1, p2[j] + g2, before[j] + g3
            v0 = v0 if v0 > v1 else v1
            v2 = v2 if v2 > v3 else v3
            v0 = v0 if v0 > v2 else v2
            rest[j] = v0 if v0 > rest[j] else rest[j]
        a += 4
    while a < high:
        k, g = sizes[a], scores[a]
        for j in range(k, count):
            value = before[j - k] + g
            out[j] = value if value > out[j] else out[j]
        a += 1


@_jit
def first_above(scores, task, above):  # type: ignore[no-untyped-def]
    """Return the index of the task's first size that is larger than `above`."""
    low, high = scores.starts[task], scores.starts[task + 1]
    while low < high:
        middle = (low + high) // 2
        if scores.sizes[middle] > above:
            high = middle
        else:
            low = middle + 1
    return low


@_jit
def doubt_at(scores, task, size):  # type: ignore[no-untyped-def]
    """Return the doubt of the task's largest size up to `size`."""
    return scores.doubt[max(first_above(scores, task, size) - 1, scores.starts[task])]


@_jit
def worth(scores, task, a, lost):  # type: ignore[no-untyped-def]
    """Return what choice `a` of a task is worth that lost `lost` workers, or ended, or must run."""
    size, held = scores.sizes[a], scores.held[task]
    if lost == ENDED:
        return 0.0 if size == 0 else -np.inf
    if lost == LAUNCHED and size == 0:
        return -np.inf
    if lost > 0:
        cost = scores.relayout[task] if scores.relaid[a] else scores.hit[task]
        cost += max(0.0, doubt_at(scores, task, held - lost) - scores.doubt[a])
        return scores.base[a] - cost - scores.move[task] * abs(size - held + lost)
    if size != held:
        cost = scores.relayout[task] if scores.relaid[a] else scores.resized[task]
        cost += max(0.0, doubt_at(scores, task, held) - scores.doubt[a])
        return scores.base[a] - cost - scores.move[task] * abs(size - held)
    return scores.base[a]


@_jit
def worths(scores, lost):  # type: ignore[no-untyped-def]
    """Return what each choice is worth, given how many workers each task lost."""
    values = np.empty(scores.sizes.shape[0])
    for task in range(scores.held.shape[0]):
        for a in range(scores.starts[task], scores.starts[task + 1]):
            values[a] = worth(scores, task, a, lost[task])
    return values


@_jit
def backward_pass(scores, values, last, rows):  # type: ignore[no-untyped-def]
    """Fill `rows[i, j]`, the best of task i and those after it with at most j workers, for i <= `last`."""
    for task in range(last, -1, -1):
        rows[task, :] = -np.inf
        extend(rows[task + 1], scores.sizes, values, scores.starts[task], scores.starts[task + 1], rows[task])


@_jit
def forward_pass(scores, values, first, last, rows):  # type: ignore[no-untyped-def]
    """Fill `rows[i, j]`, the best of the tasks before i with exactly j workers, for `first` < i <= `last` + 1."""
    for task in range(first, last + 1):
        rows[task + 1, :] = -np.inf
        extend(rows[task], scores.sizes, values, scores.starts[task], scores.starts[task + 1], rows[task + 1])


@_jit
def likely(scores, task):  # type: ignore[no-untyped-def]
    """Return the index of the size that the task holds, or of one near it: most tasks keep theirs."""
    return max(first_above(scores, task, scores.held[task]) - 1, scores.starts[task])


@_jit
def trace_left(scores, values, rows, first, task, used, out):  # type: ignore[no-untyped-def]
    """Write the sizes of the tasks from `first` to before `task`, `rows` beginning with `first`."""
    for t in range(task - 1, first - 1, -1):
        a = likely(scores, t)
        before, target = rows[t - first], rows[t - first + 1, used]
        if scores.sizes[a] > used or before[used - scores.sizes[a]] + values[a] != target:
            a = scores.starts[t]
            while before[used - scores.sizes[a]] + values[a] != target:
                a += 1
        out[t] = scores.sizes[a]
        used -= scores.sizes[a]
    return used


@_jit
def trace_right(scores, values, rows, task, free, out):  # type: ignore[no-untyped-def]
    """Write the sizes of `task` and those after it, which share `free` workers, into `out`."""
    for t in range(task, scores.held.shape[0]):
        a = likely(scores, t)
        k = scores.sizes[a]
        if k > free or rows[t + 1, free - k] + values[a] != rows[t, free]:
            a = scores.starts[t]
            while rows[t + 1, free - scores.sizes[a]] + values[a] != rows[t, free]:
                a += 1
        out[t] = scores.sizes[a]
        free -= scores.sizes[a]


@_jit
def join(left, right):  # type: ignore[no-untyped-def]
    """Return the best sum and how many workers the left side then uses."""
    best, used, last = -np.inf, 0, left.shape[0] - 1
    for j in range(last + 1):
        value = left[j] + right[last - j]
        if value > best:
            best, used = value, j
    return best, used


@_jit
def step(scores, task, lost, before, low, high, inner, outer, front):  # type: ignore[no-untyped-def]
    """Write into `front` the row behind a task that lost `lost` workers, or ended, or must run.

    `low` and `high` are the undisturbed rows behind it with its sizes before `inner` and from `outer` on alone.
    """
    if lost == ENDED:
        front[:] = before
        return
    if lost == LAUNCHED:
        front[:] = high
    else:
        # hit, a smaller size is nearer to what is left, a larger one farther; else only the penalty differs
        shift = scores.resized[task] - scores.hit[task]
        gone = doubt_at(scores, task, scores.held[task]) - doubt_at(scores, task, scores.held[task] - lost)
        near, far = shift + gone + scores.move[task] * lost, shift - scores.move[task] * lost
        front[:] = np.maximum(low + near, high + far)
    start, end = scores.starts[task], scores.starts[task + 1]
    hit = np.empty(end - start)
    for a in range(inner, outer):
        hit[a - start] = worth(scores, task, a, lost)
    extend(before, scores.sizes[start:end], hit, inner - start, outer - start, front)


@_jit
def singles(scores, values, window, forward, backward, cases, out):  # type: ignore[no-untyped-def]
    """Go forward over all tasks, and answer on the way what happens if one of them is hit, ends or must run.

    Args:
        scores: of the tasks.
        values: of each choice while nothing is disturbed.
        window: largest number of lost workers in `cases`.
        forward: rows, to be filled.
        backward: rows that are filled.
        cases: task and number of lost workers (or ENDED, LAUNCHED) of each case, by task, of shape (c, 2).
        out: sizes for each case, of shape (c, m); -1 in the first column where there is no assignment.
    """
    count, case = forward.shape[1], 0
    low, high, front = np.empty(count), np.empty(count), np.empty(count)
    for task in range(scores.held.shape[0]):
        held, start, end = scores.held[task], scores.starts[task], scores.starts[task + 1]
        inner, outer = first_above(scores, task, held - window), first_above(scores, task, held)
        if scores.relaid[start:end].any():  # then being hit changes each size's worth in a way of its own
            inner, outer = start, end
        before, after = forward[task], forward[task + 1]
        low[:], high[:] = -np.inf, -np.inf
        extend(before, scores.sizes, values, start, inner, low)
        extend(before, scores.sizes, values, outer, end, high)
        after[:] = np.maximum(low, high)
        extend(before, scores.sizes, values, inner, outer, after)
        while case < cases.shape[0] and int(cases[case, 0]) == task:
            lost = cases[case, 1]
            step(scores, task, lost, before, low, high, inner, outer, front)
            best, used = join(front, backward[task + 1])
            if best == -np.inf:
                out[case, 0] = -1
            else:
                trace_right(scores, values, backward, task + 1, count - 1 - used, out[case])
                pick, most = start, -np.inf
                for a in range(start, end):
                    if scores.sizes[a] <= used:
                        value = before[used - scores.sizes[a]] + worth(scores, task, a, lost)
                        if value > most:
                            pick, most = a, value
                out[case, task] = scores.sizes[pick]
                trace_left(scores, values, forward, 0, task, used - scores.sizes[pick], out[case])
            case += 1


@_jit
def span(scores, values, lost, first, last, forward, backward, out):  # type: ignore[no-untyped-def]
    """Answer one case that touches the tasks from `first` to `last`, between the rows before and after them."""
    rows = np.empty((last - first + 2, forward.shape[1]))
    rows[0] = forward[first]
    changed = np.empty(scores.sizes.shape[0])
    for task in range(first, last + 1):
        start, end, row = scores.starts[task], scores.starts[task + 1], rows[task - first + 1]
        for a in range(start, end):
            changed[a] = worth(scores, task, a, lost[task])
        row[:] = -np.inf
        extend(rows[task - first], scores.sizes, changed, start, end, row)
    best, used = join(rows[last - first + 1], backward[last + 1])
    if best == -np.inf:
        return False
    trace_right(scores, values, backward, last + 1, forward.shape[1] - 1 - used, out)
    used = trace_left(scores, changed, rows, first, last + 1, used, out)
    trace_left(scores, values, forward, 0, first, used, out)
    return True


@_jit
def runner_up(scores, values, forward, backward, sizes):  # type: ignore[no-untyped-def]
    """Return the best assignment other than `sizes`, and whether there is one.

    Two assignments differ exactly if, behind some task, they have given out different numbers of workers: the second
    best is the best total, over all tasks, off the path of the best.
    """
    best, where, at, used, last = -np.inf, 0, 0, 0, forward.shape[1] - 1
    for task in range(1, scores.held.shape[0] + 1):
        used += sizes[task - 1]
        for j in range(last + 1):
            value = forward[task, j] + backward[task, last - j]
            if j != used and value > best:
                best, where, at = value, task, j
    out = np.zeros(scores.held.shape[0], np.int64)
    if best > -np.inf:
        trace_left(scores, values, forward, 0, where, at, out)
        trace_right(scores, values, backward, where, last - at, out)
    return out, best > -np.inf


@_jit
def reward(tasks, sizes, lost, running_s, resize_s, failure_s, relayout_s):  # type: ignore[no-untyped-def]
    """Return the sum of G (equation 3) of an assignment."""
    total = 0.0
    for task in range(sizes.shape[0]):
        if lost[task] != ENDED:
            a = first_above(tasks, task, sizes[task]) - 1
            total += tasks.waf[a] * running_s
            if tasks.relaid[a]:
                total -= tasks.held_waf[task] * relayout_s
            elif lost[task] > 0:
                total -= tasks.held_waf[task] * failure_s
            elif sizes[task] != tasks.held[task]:
                total -= tasks.held_waf[task] * resize_s
    return total
