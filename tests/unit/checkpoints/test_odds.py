"""How likely all states survive: by counting, by a formula, and fast for large clusters."""

import itertools
from fractions import Fraction
from math import comb

import pytest

from unicron.checkpoints.odds import odds
from unicron.checkpoints.placement import place, without_copy
from unicron.errors import InvalidInputError


@pytest.mark.parametrize("copies", [1, 2, 3, 4, 5])
def test_the_odds_are_those_of_trying_all_losses(copies):
    for nodes in range(1, 12):
        keepers = place([str(node) for node in range(nodes)], copies).keepers()
        for lost in range(nodes + 1):
            safe = sum(not without_copy(keepers, which) for which in itertools.combinations(keepers, lost))
            assert odds(nodes, copies, lost) == Fraction(safe, comb(nodes, lost))


def test_with_whole_groups_of_which_only_one_can_be_lost_the_odds_are_a_formula():
    for nodes, copies, lost in [(16, 2, 2), (16, 2, 3), (1024, 4, 6), (12_500, 2, 3), (12_498, 3, 5)]:
        formula = 1 - Fraction(nodes * comb(nodes - copies, lost - copies), copies * comb(nodes, lost))
        assert odds(nodes, copies, lost) == formula
    assert odds(16, 2, 2) == Fraction(14, 15)


def test_large_clusters_are_no_matter():
    assert float(odds(12_500, 2, 16)) == pytest.approx(0.990434, abs=1e-6)
    assert odds(12_499, 2, 16) < odds(12_499, 3, 16) < odds(12_499, 4, 16) < 1


def test_what_can_not_be_is_told():
    with pytest.raises(InvalidInputError, match="9 of 8 nodes lost; give 0 to 8"):
        odds(8, 2, 9)
    with pytest.raises(InvalidInputError, match="0 copies"):
        odds(8, 0, 1)
