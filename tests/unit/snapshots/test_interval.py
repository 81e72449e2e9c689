"""How often to save: known values, the least of the complete model, and a simulation of failures."""

import math
from random import Random

import pytest
from scipy.optimize import minimize_scalar

from unicron.errors import InvalidInputError
from unicron.snapshots.interval import daly, stretch, young

HOUR = 3600.0


def test_values_worked_out_by_hand():
    assert young(5 * 60, 24 * HOUR) == 7200  # sqrt(2 x 300 x 86,400)
    assert daly(5 * 60, 24 * HOUR) == pytest.approx(7000 + 7200 * 300 / 172_800 / 9)  # 7200 (1 + 1/72 + ...) - 300
    assert daly(2 * HOUR, HOUR) == daly(3 * HOUR, HOUR) == HOUR


def best(save_s, mtbf_s):
    return minimize_scalar(stretch, args=(save_s, mtbf_s), bounds=(1e-3, 20 * mtbf_s), method="bounded").x


@pytest.mark.parametrize("save_s", [1, 60, 600, 2100, 3 * HOUR])
@pytest.mark.parametrize("mtbf_s", [2 * HOUR, 31 * HOUR, 500 * HOUR])
def test_dalys_interval_is_the_least_of_the_complete_model(save_s, mtbf_s):
    least = stretch(best(save_s, mtbf_s), save_s, mtbf_s)
    assert stretch(daly(save_s, mtbf_s), save_s, mtbf_s) <= least * 1.005
    if save_s < mtbf_s / 100:
        assert stretch(young(save_s, mtbf_s), save_s, mtbf_s) <= least * 1.005
        assert daly(save_s, mtbf_s) == pytest.approx(best(save_s, mtbf_s), rel=0.01)


def simulated(interval_s, save_s, mtbf_s, restart_s, rounds, seed):
    """Return the mean seconds a second of training, of so many intervals that were kept."""
    random, total = Random(seed), 0.0
    for _ in range(rounds):
        needed = interval_s + save_s
        while (lived := random.expovariate(1 / mtbf_s)) < needed:
            total, needed = total + lived, restart_s + interval_s + save_s
        total += needed
    return total / rounds / interval_s


@pytest.mark.parametrize(("interval_s", "restart_s"), [(3 * HOUR, 900.0), (6 * HOUR, 900.0), (24 * HOUR, 0.0)])
def test_the_complete_model_is_what_a_simulation_gives(interval_s, restart_s):
    found = simulated(interval_s, 2100.0, 31 * HOUR, restart_s, rounds=30_000, seed=1)
    assert found == pytest.approx(stretch(interval_s, 2100.0, 31 * HOUR, restart_s), rel=0.01)


def test_dalys_interval_is_the_best_of_a_simulation():
    def cost(interval_s):
        return simulated(interval_s, 600.0, 5 * HOUR, 0.0, rounds=30_000, seed=2)

    chosen = daly(600.0, 5 * HOUR)
    assert cost(chosen) < min(cost(chosen / 2), cost(chosen * 2))


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.inf, math.nan])
def test_what_can_not_be_is_told(wrong):
    for function in (young, daly):
        with pytest.raises(InvalidInputError, match=r"save_s is .*; give seconds, more than 0"):
            function(wrong, HOUR)
        with pytest.raises(InvalidInputError, match="mtbf_s is"):
            function(HOUR, wrong)
    with pytest.raises(InvalidInputError, match="interval_s is"):
        stretch(wrong, 1, HOUR)
    if wrong:
        with pytest.raises(InvalidInputError, match="restart_s is"):
            stretch(1, 1, HOUR, restart_s=wrong)
