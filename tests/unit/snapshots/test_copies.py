"""No placement of copies survives more losses: by looking through all of them."""

import itertools

import pytest
from helpers.placements import Space, beaten, best, compared, mixed, ours


@pytest.mark.parametrize(("nodes", "copies"), [(5, 2), (6, 2), (5, 3), (6, 4)])
def test_the_search_finds_what_trying_everything_finds(nodes, copies):
    space = Space(nodes, copies)
    known = tuple(1 << nodes for _ in space.layers)
    every = (
        space.of(sets)
        for sets in itertools.combinations_with_replacement(space.fatal, nodes)
        if all(sum(each >> node & 1 for each in sets) == copies for node in range(nodes))
    )
    least = tuple(map(min, zip(*every, strict=True)))
    assert best(space, known)[0] == least == space.of(ours(nodes, copies))


@pytest.mark.parametrize("copies", [2, 3, 4])
def test_no_placement_survives_more_losses(copies):
    for nodes in range(copies, 13 if copies < 4 else 9):
        assert beaten(compared(nodes, copies)) == []


@pytest.mark.exhaustive("fewer nodes are looked through in each run; these take half a minute")
@pytest.mark.parametrize("nodes", [9, 10, 11, 12])
def test_no_placement_of_four_copies_survives_more_losses_up_to_twelve_nodes(nodes):
    assert beaten(compared(nodes, 4)) == []


@pytest.mark.slow
def test_nine_nodes_with_four_copies_are_a_case_of_their_own():
    row = compared(9, 4)
    assert beaten(row) == []
    assert row["lost"] == [4, 5, 6]
    assert row["ours"] == (5, 24, 44)
    assert row["mixed"] == (6, 26, 44)


def test_folding_is_never_worse_than_a_ring_and_better_where_more_than_one_node_is_left_over():
    for copies in (2, 3, 4):
        for nodes in range(copies, 13):
            space = Space(nodes, copies)
            pairs = list(zip(space.of(ours(nodes, copies)), space.of(mixed(nodes, copies)), strict=True))
            assert all(mine <= theirs for mine, theirs in pairs)
            special = nodes % copies > 1 or (nodes, copies) == (9, 4)
            assert (pairs != [] and all(mine < theirs for mine, theirs in pairs[:1])) == special
