"""Counting attempts in a sliding window."""

from unicron_detector.ladder import Ladder


def test_reattempts_count_within_the_window():
    ladder = Ladder()
    assert [ladder.reattempt(at, 10) for at in (0, 5, 10, 16)] == [1, 2, 3, 2]


def test_restarts_count_for_each_node():
    ladder = Ladder()
    assert [ladder.restart(node, at, 10) for node, at in (("a", 0), ("b", 1), ("a", 2), ("a", 11))] == [1, 1, 2, 2]


def test_a_second_node_is_one_too_many_within_the_window_and_not_after_it():
    ladder, later = Ladder(), Ladder()
    assert [ladder.climb(node, at, 10) for node, at in (("a", 0), ("a", 5), ("b", 9))] == [False, False, True]
    assert [later.climb(node, at, 10) for node, at in (("a", 0), ("b", 11))] == [False, False]


def test_forgetting_leaves_nothing_behind():
    ladder = Ladder()
    ladder.reattempt(0, 10)
    ladder.restart("a", 0, 10)
    ladder.climb("b", 0, 10)
    ladder.forget(5, 10)
    assert ladder != Ladder()
    ladder.forget(11, 10)
    assert ladder == Ladder()
