"""Results of collectives, kept for a rank that comes later."""

import pytest
import torch

from unicron.errors import GroupBrokenError
from unicron.train.inplace.groups import ScriptCollective
from unicron.train.loops import collective_results
from unicron.train.loops.collective_results import EndedCollectives, KnownResults, kept


def test_results_are_given_once_each_in_their_order_as_they_were():
    first, tensor = KnownResults(), torch.ones(2)
    first.record(kept([tensor]))
    first.record(None)
    first.record([])
    tensor.zero_()
    assert first.exhausted
    later = KnownResults(first.to_list())
    assert not later.exhausted
    [given] = later.next_result()
    assert given.tolist() == [1.0, 1.0]
    assert [later.next_result(), later.next_result(), later.exhausted, later.next_result()] == [None, [], True, None]
    assert KnownResults(first.to_list(), later).exhausted, "this rank has had them"


def test_of_too_many_nothing_is_known(monkeypatch):
    monkeypatch.setattr(collective_results, "MOST_BYTES", 100)
    found = KnownResults()
    for _ in range(30):
        found.record([torch.ones(1)])
    assert found.to_list() is None
    assert not KnownResults(found.to_list()).exhausted
    assert KnownResults(found.to_list()).next_result() is None
    monkeypatch.setattr(collective_results, "RESULTS_KEPT", 3)
    found = KnownResults()
    for _ in range(4):
        found.record([])
    assert found.to_list() is None


def test_a_rank_is_given_what_ended_elsewhere_from_where_it_is():
    first, late, new = EndedCollectives(), EndedCollectives(), EndedCollectives()
    for number in range(20):
        first.record([torch.tensor([number])])
        if number < 17:
            late.record(None)
    late.in_loops = True
    told = first.results_after(17)
    late.set_ahead(17, told)
    assert [int(each[0]) for each in late.ahead] == [17, 18, 19]
    new.set_ahead(17, told)
    assert not new.ahead, "it has no state yet"
    new.resume_at(19)
    assert [int(each[0]) for each in new.ahead] == [19]
    assert first.results_after(2)[:3] == [None] * 2 + [[torch.tensor([4])]], "only the last of them are kept"
    assert first.results_after(20) == []


@pytest.mark.parametrize("outputs", [None, [torch.zeros(1 << 22)]])
def test_where_a_broken_collective_can_not_be_run_by_a_new_rank_too_that_is_said(outputs):
    def breaks():
        raise GroupBrokenError("connection reset")

    with pytest.raises(GroupBrokenError, match=r"in a collective \(`allgather`\) whose results .* all begin again"):
        ScriptCollective("allgather", breaks, outputs, True).begin(lambda _: pytest.fail("no more is tried"))
