"""Nodes that keep copies of states: changes with a node, separate racks, and the odds that all survive."""

import itertools
from collections import Counter
from fractions import Fraction
from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unicron.errors import InvalidInputError
from unicron.snapshots.odds import odds
from unicron.snapshots.placement import Placement, moves, place, without_copy
from unicron.snapshots.shapes import kept


def names(count):
    return [f"n{number}" for number in range(count)]


def sizes(placement):
    return [len(group) for group in placement.groups]


@pytest.mark.parametrize(
    ("nodes", "copies", "expected"),
    [
        (8, 2, [2, 2, 2, 2]),
        (7, 2, [2, 2, 3]),
        (9, 3, [3, 3, 3]),
        (10, 3, [3, 3, 4]),
        (11, 3, [3, 3, 5]),
        (11, 4, [4, 7]),
        (13, 4, [4, 9]),
        (3, 1, [1, 1, 1]),
    ],
)
def test_groups_have_as_many_nodes_as_copies_but_for_one(nodes, copies, expected):
    assert sizes(place(names(nodes), copies)) == expected


def test_fewer_nodes_than_copies_keep_one_each_and_say_so():
    assert place(["a", "b"], 3) == Placement((("a", "b"),), 2)
    assert place(["a"], 2) == Placement((("a",),), 1)
    assert place(["a"], 2).keepers() == {"a": ("a",)}
    assert place([], 2) == Placement((), 1)
    assert place(["a", "b"], 2, before=Placement((("a",),), 1)) == Placement((("a", "b"),), 2)


def test_three_nodes_with_two_copies_make_a_ring():
    assert place(["a", "b", "c"], 2).keepers() == {"a": ("a", "b"), "b": ("b", "c"), "c": ("c", "a")}


def test_two_nodes_beyond_three_are_folded_in():
    # four copy sets, where a ring has five
    keepers = kept(["a", "b", "c", "d", "e"], 3)
    assert {frozenset(each) for each in keepers.values()} == {frozenset(each) for each in ("abc", "dea", "deb", "dec")}
    assert keepers["c"] == ("c", "d", "e")


@given(st.integers(1, 40), st.integers(1, 9))
def test_every_state_has_its_copies_and_every_node_keeps_no_more(nodes, copies):
    placement = place(names(nodes), copies)
    keepers = placement.keepers()
    assert list(keepers) == [node for group in placement.groups for node in keepers if node in group]
    assert set(keepers) == set(names(nodes))
    assert placement.copies == min(nodes, copies)
    assert all(each[0] == node and len(set(each)) == len(each) == placement.copies for node, each in keepers.items())
    assert set(Counter(itertools.chain(*keepers.values())).values()) == {placement.copies}
    assert nodes == 1 or copies == 1 or min(sizes(placement)) > 1


# --- nodes come and go -----------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(
    st.integers(2, 4), st.sampled_from([0, 3, 6]), st.lists(st.tuples(st.booleans(), st.integers(0, 99)), max_size=60)
)
def test_one_node_less_or_more_changes_two_groups_at_most(copies, racks, events):
    nodes, before, new = names(2 * copies), None, itertools.count(100)
    for joins, which in [(True, 0), *events]:
        if joins:
            nodes = [*nodes, f"n{next(new)}"]
        elif len(nodes) > 1:
            nodes = [node for node in nodes if node != nodes[which % len(nodes)]]
        rack = {node: str(int(node[1:]) % racks) for node in nodes} if racks else None
        found = place(nodes, copies, rack, before)
        assert found == place(nodes, copies, rack, before)
        assert sorted(itertools.chain(*found.groups)) == sorted(nodes)
        assert sizes(found) == sizes(place(nodes, copies))
        assert all(len(each) == min(copies, len(nodes)) for each in found.keepers().values())
        if before and before.copies == found.copies == copies:
            changed = [group for group in before.groups if set(group) not in map(set, found.groups)]
            most = 1 if joins and sizes(found)[-1] != 9 else 2
            # each node of a group that changes may change places with one of another group
            assert len(changed) <= (most if not racks else most + 2 * copies)
            assert len(moves(before.keepers(), found.keepers())) <= (copies**2 if not racks else 3 * copies**2)
        before = found


def test_nodes_that_stay_keep_their_keepers():
    before = place(names(16), 2)
    after = place(names(16)[:15], 2, before=before)
    assert moves(before.keepers(), after.keepers()) == [("n13", "n14"), ("n14", "n12")]
    again = place([*names(16)[:15], "new"], 2, before=after)
    assert moves(after.keepers(), again.keepers()) == [("n13", "n12"), ("n14", "new"), ("new", "n14")]
    assert moves(again.keepers(), place([*names(16)[:15], "new"], 2, before=again).keepers()) == []


def test_where_two_groups_become_one_the_larger_keeps_its_keepers():
    before = place(names(10), 4)
    assert sizes(before) == [4, 6]
    assert len(moves(before.keepers(), place(names(9), 4, before=before).keepers())) == 6


def test_with_another_number_of_copies_all_are_placed_anew():
    assert place(names(12), 3, before=place(names(12), 2)) == place(names(12), 3)


# --- racks -----------------------------------------------------------------------------------------------------------


@given(st.integers(2, 4), st.lists(st.integers(1, 8), min_size=1, max_size=12))
def test_no_group_has_two_nodes_of_a_rack_where_that_can_be(copies, in_racks):
    rack = {f"r{at}-{node}": f"r{at}" for at, count in enumerate(in_racks) for node in range(count)}
    found = place(sorted(rack), copies, rack)
    # Gale and Ryser: the racks fit if the largest of them do
    fits = all(sum(sorted(in_racks)[-few:]) <= sum(min(few, size) for size in sizes(found)) for few in range(1, 13))
    apart = [len({rack[node] for node in group}) == len(group) for group in found.groups]
    assert all(apart) or not fits


def test_a_new_node_joins_the_group_that_has_nobody_of_its_rack():
    before = place(names(4), 2, {"n0": "a", "n1": "b", "n2": "a", "n3": "c"})
    assert before.groups == (("n0", "n1"), ("n2", "n3"))
    racks = {"n0": "a", "n1": "b", "n2": "a", "n3": "c", "x": "c"}
    assert place([*names(4), "x"], 2, racks, before).groups == (("n2", "n3"), ("n0", "n1", "x"))


def test_a_rack_that_comes_back_is_not_left_to_itself():
    racks = {node: str(int(node[1:]) // 4) for node in names(16)}
    before = place(names(16), 2, racks)
    without = place(names(16)[4:], 2, racks, before)
    back = place(names(16), 2, racks, without)
    for placement in (before, without, back):
        assert all(len({racks[node] for node in group}) == 2 for group in placement.groups)
    assert len(moves(without.keepers(), back.keepers())) == 8
    assert place(names(16), 2, racks, back) == back


def test_a_group_of_one_rack_stays_where_no_other_has_room_for_it():
    racks = dict.fromkeys(names(4), "one")
    before = place(names(4), 2, racks)
    assert place([*names(4), "n4"], 2, racks | {"n4": "one"}, before).groups == (("n0", "n1"), ("n2", "n3", "n4"))


def test_nodes_without_a_rack_share_with_nobody():
    found = place(["a", "b", "c", "d"], 2, {"a": "r", "b": "r", "c": ""})
    assert sorted(map(sorted, found.groups)) == [["a", "c"], ["b", "d"]]


# --- what is lost, and what is wrong ---------------------------------------------------------------------------------


def test_a_state_is_lost_with_all_of_its_keepers():
    keepers = place(names(6), 2).keepers()
    assert without_copy(keepers, {"n0", "n2", "n4"}) == []
    assert without_copy(keepers, {"n0", "n2", "n3"}) == ["n2", "n3"]


def test_what_can_not_be_is_told():
    with pytest.raises(InvalidInputError, match="0 copies of a state; give 1"):
        place(["a"], 0)
    with pytest.raises(InvalidInputError, match="node 'a' is there 2 times"):
        place(["a", "b", "a"], 2)
    with pytest.raises(InvalidInputError, match="node 'a' is there 2 times"):
        place(["a", "b"], 2, before=Placement((("a", "b"), ("c", "a")), 2))


# --- how likely all survive ------------------------------------------------------------------------------------------


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


def test_odds_that_can_not_be_are_told():
    with pytest.raises(InvalidInputError, match="9 of 8 nodes lost; give 0 to 8"):
        odds(8, 2, 9)
    with pytest.raises(InvalidInputError, match="0 copies"):
        odds(8, 0, 1)
