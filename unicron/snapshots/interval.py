"""How often to save to storage, so that failures and saving together cost the least (Young 1974, Daly 2006). Pure.

Failures come at random at a constant rate, saving blocks training while it lasts, and what was computed since the last
save is computed again after a failure. "Interval" is the training between the end of a save and the begin of the next.
"""

import math

from unicron.errors import InvalidInputError


def young(save_s: float, mtbf_s: float) -> float:
    """Return the best interval in seconds, to first order: sqrt(2 save_s mtbf_s).

    Good where a save is much shorter than the time between failures.

    Source: J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17 (9), 1974.

    Args:
        save_s: seconds for which a save blocks training.
        mtbf_s: mean seconds between failures of all that the training runs on.

    Raises:
        InvalidInputError: one of them is not above 0.
    """
    _check(save_s=save_s, mtbf_s=mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s)


def daly(save_s: float, mtbf_s: float) -> float:
    """Return the best interval in seconds, to higher order; for saves of twice `mtbf_s` and more, `mtbf_s`.

    Source: J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22 (3), 2006.

    Args:
        save_s: seconds for which a save blocks training.
        mtbf_s: mean seconds between failures of all that the training runs on.

    Raises:
        InvalidInputError: one of them is not above 0.
    """
    _check(save_s=save_s, mtbf_s=mtbf_s)
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    part = save_s / (2 * mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(part) / 3 + part / 9) - save_s


def stretch(interval_s: float, save_s: float, mtbf_s: float, restart_s: float = 0.0) -> float:
    """Return how many seconds a second of training takes on average, with saves, failures and restarts.

    Daly's complete model, in which failures strike saves and restarts too; his intervals make it nearly least.

    Args:
        interval_s: seconds of training between saves.
        save_s: seconds for which a save blocks training.
        mtbf_s: mean seconds between failures of all that the training runs on.
        restart_s: seconds from a failure until training goes on from the last save.

    Raises:
        InvalidInputError: one of the first three is not above 0, or `restart_s` is negative.
    """
    _check(interval_s=interval_s, save_s=save_s, mtbf_s=mtbf_s)
    if not (math.isfinite(restart_s) and restart_s >= 0):
        raise InvalidInputError(f"restart_s is {restart_s:g}; give seconds, 0 or more")
    return mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + save_s) / mtbf_s) / interval_s


def _check(**given: float) -> None:
    for name, value in given.items():
        if not (math.isfinite(value) and value > 0):
            raise InvalidInputError(f"{name} is {value:g}; give seconds, more than 0")
