"""What collectives gave, kept for a rank that comes later."""

import torch

from unicron.train.scripts import heard
from unicron.train.scripts.heard import Ended, Heard


def test_results_are_given_once_each_in_their_order_as_they_were():
    first, tensor = Heard(), torch.ones(2)
    first.add([tensor])
    first.add(None)
    first.add([])
    tensor.zero_()
    assert first.over
    later = Heard(first.saved())
    assert not later.over
    [given] = later.following()
    assert given.tolist() == [1.0, 1.0]
    assert [later.following(), later.following(), later.over, later.following()] == [None, [], True, None]
    assert Heard(first.saved(), later).over, "this rank has had them"


def test_of_too_many_nothing_is_known(monkeypatch):
    monkeypatch.setattr(heard, "MOST_BYTES", 100)
    found = Heard()
    for _ in range(30):
        found.add([torch.ones(1)])
    assert found.saved() is None
    assert not Heard(found.saved()).over
    assert Heard(found.saved()).following() is None
    monkeypatch.setattr(heard, "MOST", 3)
    found = Heard()
    for _ in range(4):
        found.add([])
    assert found.saved() is None


def test_a_rank_is_given_what_ended_elsewhere_from_where_it_is():
    first, late, new = Ended(), Ended(), Ended()
    for number in range(20):
        first.add([torch.tensor([number])])
        if number < 17:
            late.add(None)
    late.joined = True
    told = first.since(17)
    late.know(17, told)
    assert [int(each[0]) for each in late.ahead] == [17, 18, 19]
    new.know(17, told)
    assert not new.ahead, "it has no state yet"
    new.stand(19)
    assert [int(each[0]) for each in new.ahead] == [19]
    assert first.since(2)[:3] == [None] * 2 + [[torch.tensor([4])]], "only the last of them are kept"
    assert first.since(20) == []
