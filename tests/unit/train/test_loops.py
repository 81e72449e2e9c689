"""A script that begins in the middle of its loops has what one has that came there."""

import collections
import random

import numpy as np
import pytest
import torch
from helpers.loops import Watched
from hypothesis import given, settings
from hypothesis import strategies as st

from unicron.rules import load
from unicron.train.carry.compare import read
from unicron.train.carry.kinds import NotCarriedError, OwnCheckpointNewerError
from unicron.train.carry.variables import NAME
from unicron.train.loops.active_loops import LoopSnapshot
from unicron.train.loops.instrument import instrument
from unicron.train.loops.positions import Counted

SCRIPT = """
import torch

class State:
    def __init__(self):
        self.step, self.rank = 0, rank

def one(epoch, data):
    global total
    inside = 0
    for number, x in enumerate(data):
        at(epoch, number, x, inside, total, state.step, state.rank, len(found), float(torch.rand(())))
        inside, total, state.step = inside + x, total + x, state.step + 1
        backward()
    found.append(inside)

def main():
    best = 0
    for epoch in range(4):
        one(epoch, range(10 * epoch, 10 * epoch + 5))
        best = max(best, epoch)
        at("epoch", epoch, best)
    left = 5
    while left:
        at("left", left, best, total)
        left -= 1
        for _ in range(2):
            at("twice", left)
            backward()

total, found, state = 0, [], State()
main()
for x in range(3):
    at("end", x, rank, total)
    backward()
"""


def followed(rank, there=None):
    return Watched(rank, there).run(SCRIPT, rank=rank)


@pytest.mark.parametrize(
    "where", [(0, 0), (0, 3), (2, 2), (3, 4), ("left", 5), ("left", 2), ("twice", 3), ("end", 0), ("end", 2)]
)
def test_a_new_rank_is_where_the_others_are_and_what_the_one_was_that_it_replaces(where):
    whole, other = followed(1), followed(0)
    begins = max(index for index, each in enumerate(whole.passed) if each[: len(where)] == where)
    again = followed(1, (other.there[begins][0], whole.there[begins][1]))
    ends = whole.passed[begins:]
    assert again.passed[-len(ends) :] == ends
    assert len(again.passed) - len(ends) <= 1  # an outer loop's body begins once more, up to the inner loop
    later = followed(1, again.there[-1])
    assert later.passed == whole.passed[-len(later.passed) :], "and can be replaced itself"


def test_nobody_goes_where_the_others_are_without_the_snapshot_of_the_rank_that_is_replaced():
    _, there = noted(RESUMED, begin=2)
    with pytest.raises(NotCarriedError, match="no snapshot of the rank that is replaced"):
        noted(RESUMED, (there[3][0], None), begin=2)


def test_what_does_not_train_is_left_alone():
    tree = compile(instrument("for x in [1]:\n    print(x)\nwhile False:\n    pass\n", "x.py", "x.py"), "x.py", "exec")
    assert NAME not in tree.co_names


RESUMED = """
for number in range(begin, 9):
    note(number, float(torch.rand(())))
    backward()
"""


def noted(text, there=None, **variables):
    """Run a script that notes something in each of its loop's bodies; return what, and where it was each time."""
    watched = Watched(1, there)
    more = {name: getattr(watched.loops, name) for name in ("begin_iteration", "record_reduce", "record_update")}
    watched.run(text, **more, **variables)
    return watched.passed, watched.there


def test_a_script_that_has_begun_from_a_checkpoint_is_where_the_others_are_though_they_began_before():
    whole, there = noted(RESUMED, begin=2)
    for begin in (0, 2, 4, 5):
        again, as_there = noted(RESUMED, there[3], begin=begin)
        assert again == whole[3:]
        counts = [read(at[-1][1].positions[0])["count"] for at in (there, as_there)]
        assert counts[0] == counts[1]


def test_where_a_checkpoint_of_its_own_is_newer_than_where_the_others_are_that_is_left_for_all_to_begin_again():
    _, there = noted(RESUMED, begin=2)
    watched = Watched(1, there[3])
    text = r"the others are at 4 of the loop at x\.py:2, which has no such here"
    with pytest.raises(OwnCheckpointNewerError, match=text):  # so no older snapshot is of use either
        watched.run(RESUMED, begin=7)
    assert isinstance(watched.records[-1], OwnCheckpointNewerError)


ITERATES = """
def shuffled(count):
    yield from torch.randperm(count).tolist()

loader = torch.utils.data.DataLoader(range(40), batch_size=8, shuffle=True)
for epoch in range(3):
    items, batches = iter(range(100 * epoch, 100 * epoch + 40)), iter(loader)
    for number in shuffled(5):
        batch = [next(items) for _ in range(4)]
        note(epoch, number, batch, next(batches).tolist(), float(torch.rand(())))
        backward()
"""


TESTS = """
for epoch in range(2):
    items, kept = iter([[10 * epoch + each] for each in range(3)]), []
    while (taken := next(items, None)) is not None:
        kept.append(taken)
        note(epoch, kept)
        backward()
"""


def test_a_new_rank_enters_a_while_loop_without_what_its_test_has_made():
    whole, there = noted(TESTS)
    for begin in range(6):
        again, _ = noted(TESTS, there[begin])
        assert again == whole[begin:]


def test_iterators_of_a_script_are_as_far_as_they_were_and_draw_what_they_drew():
    whole, there = noted(ITERATES)
    for begin in (0, 3, 7, 14):
        again, _ = noted(ITERATES, there[begin])
        assert again == whole[begin:]


FOUND = """
def mine():
    for number in range(9):
        yield number + float(torch.rand(()))

class Batches:
    pass

batches = Batches()
for number in range(6):
    batches.found = MADE if number == 0 else batches.found
    note(number, next(batches.found))
    backward()
"""


@pytest.mark.parametrize(
    ("made", "reason"), [("iter(range(9))", ""), ("map(str, zip(range(9), range(9)))", ""), ("mine()", "")]
)
def test_of_an_iterator_that_an_object_holds_the_position_is_known_or_no_record_is_left(made, reason):
    whole, there = noted(FOUND.replace("MADE", made))
    if reason:
        assert isinstance(there[3][1], NotCarriedError)
        assert reason in str(there[3][1])
    else:
        again, _ = noted(FOUND.replace("MADE", made), there[3])
        assert again == whole[3:]


FETCHED = """
class Drawing(torch.utils.data.Dataset):
    def __len__(self):
        return 9

    def __getitem__(self, number):
        return number + float(torch.rand(()))

class Batches:
    pass

batches = Batches()
batches.found = torch.utils.data.DataLoader(Drawing(), num_workers=1, collate_fn=list, MORE).__iter__()
for number in range(6):
    note(number, next(batches.found))
    backward()
"""


def test_of_a_loaders_iterator_with_processes_the_position_is_known_unless_it_is_kept_for_the_next_epoch():
    text = FETCHED.replace(", MORE", "")
    whole, there = noted(text)
    again, _ = noted(text, there[3])
    assert again == whole[3:]
    _, there = noted(FETCHED.replace("MORE", "persistent_workers=True"))
    assert "persistent_workers" in str(there[3][1])


SUMS = """
backward = int
for number in range(8):
    begin_iteration() if number % 4 == 0 else None
    note(number)
    backward()
    record_reduce() if number % 4 == 3 else None
"""


def test_a_rank_that_comes_within_an_iteration_begins_it():
    whole, there = noted(SUMS)
    for at, begin in ((2, 0), (4, 4), (7, 4)):
        again, _ = noted(SUMS, there[at])
        assert again == whole[begin:]


@pytest.mark.parametrize(
    ("between", "why"),
    [
        ("record_update(); ", "a statement in the body of the loop at x.py:2 makes more than one update"),
        ("", "gradients are reduced more than once for an update in the body of the loop at x.py:2"),
    ],
)
def test_while_a_rank_is_where_nobody_could_come_there_is_no_record(between, why):
    text = (
        "\nfor number in range(3):\n    note()\n    backward()\n"
        f"    record_reduce(); {between}begin_iteration(); note(); record_reduce(); record_update()\n"
    )
    _, there = noted(text, backward=int)
    assert isinstance(there[0][1], LoopSnapshot)
    assert str(there[1][1]).startswith(why)
    assert [there[1][2] == str(there[1][1]), *(each[2] != "" for each in there)] == [True, *[False, True] * 3]


def test_a_rank_that_can_not_take_the_lost_ones_place_counts_against_no_node():
    rules = load()
    for kind in (NotCarriedError, *NotCarriedError.__subclasses__()):
        assert rules.classify(f"{kind.__module__}.{kind.__qualname__}", "why").echo


MADE_IN_THE_LOOP = """
def main():
    kept, model = [], torch.nn.Linear(2, 2)
    for number in range(5):
        def doubled(x, *, more=number):
            return 2 * x + more
        def halved(module, given, made):
            return made / 2 MORE
        kept += [doubled, lambda x, number=number: x - number]
        handle = model.register_forward_hook(halved)
        note(number, [each(number) for each in kept], model(torch.ones(2)).tolist())
        backward()
        if number % 2:
            handle.remove()

main()
"""


def test_functions_that_are_made_in_a_loop_go_along_unless_they_share_variables_with_it():
    whole, there = noted(MADE_IN_THE_LOOP.replace("MORE", ""))
    for begin in range(5):
        again, _ = noted(MADE_IN_THE_LOOP.replace("MORE", ""), there[begin])
        assert again == whole[begin:]
    _, there = noted(MADE_IN_THE_LOOP.replace("MORE", "+ 0 * number"))
    assert "function main.<locals>.halved, which was made since the loop began" in str(there[1][1])


IN_BRANCHES = """
def tested(number):
    note("tested", number)
    return number % 4

backward = int
for number in range(8):
    begin_iteration()
    drawn = float(torch.rand(()))
    loss = number + drawn
    backward()
    record_reduce()
    if tested(number) == 1:
        step()
        kind = number
        note("one", number, kind)
    elif number != 6:
        kind = 0
        if number % 2:
            kind = loss
            step()
            note("odd", number, kind)
        else:
            try:
                step()
                note("even", number)
                note("still even", number, drawn)
            finally:
                kind += 1
        note("behind", number, kind)
    else:
        step()
        note("other", number, kind)
    note("end", number, kind)
"""


def test_a_new_rank_begins_behind_an_update_in_a_branch_and_tests_nothing_again():
    def run(there=None):
        watched = Watched(1, there)
        names = {"begin_iteration": "", "record_reduce": "", "step": "record_update"}
        watched.run(IN_BRANCHES, kind=0, **{name: getattr(watched.loops, own or name) for name, own in names.items()})
        return watched

    whole = run()
    assert len({each[0] for each in whole.passed}) == 8
    for index, (what, *_) in enumerate(whole.passed):
        begins = max(at for at, each in enumerate(whole.passed[: index + 1]) if each[0] == "tested") + 1
        if begins <= index:
            assert run(whole.there[index]).passed == whole.passed[begins:], what


def test_a_loop_that_has_one_item_each_time_is_known_to_have_no_other_inside():
    watched = Watched(1).run("for each in range(3):\n    for one in [each]:\n        note(one)\n        backward()\n")
    assert watched.loops._has_inner_loop == {"x.py:1": True, "x.py:2": False}


KEEPING = """
class Pair:
    __slots__ = ("left", "right")

def counter():
    seen = [0]
    def count(one):
        seen[0] += 1
        return one + seen[0]
    return count

class Data:
    def __init__(self):
        self.number, self.items, self.by_name, self.chosen = 0, [], {}, set()
        self.recent, self.tensor, self.bits = collections.deque(maxlen=3), torch.zeros(2), bytearray(2)
        self.array, self.pair, self.count, self.alias = numpy.zeros(2), Pair(), counter(), None
        self.pair.left = 0
        self.alias = self.items
        self.tensor.told = numpy.arange(3)  # two of those are not just equal or not

    def __len__(self):
        return 12

    def __getitem__(self, index):
        CHANGES
        return torch.tensor([index, self.number, len(self.alias), len(self.by_name), sum(self.chosen),
                             sum(self.recent), int(self.tensor.sum()), sum(self.bits), int(self.array.sum()),
                             self.pair.left, sum(self.items)])

data = Data()
loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
"""

ONCE = """
for batch in loader:
    note(batch.tolist())
    backward()
"""

REMADE = """
batches = iter(loader)
for _ in range(15):
    if (batch := next(batches, None)) is None:
        AT_END
        batches = iter(loader)
        batch = next(batches)
    note(batch.tolist())
    backward()
"""

CHANGES = (
    "self.number += index",
    "self.items.append(index)",
    "self.items = [*self.items, index]; self.alias = self.items",
    "self.by_name[index] = self.number",
    "self.chosen.add(index)",
    "self.recent.append(index)",
    "self.tensor += index",
    "self.tensor.told = self.tensor.told + index",
    "self.bits[index % 2] = index",
    "self.array[index % 2] += index",
    "self.pair.left += index",
    "self.number = self.count(index)",
    "self.number += random.randrange(9)",
)


@given(
    changes=st.lists(st.sampled_from(CHANGES), min_size=1, max_size=4),
    at_end=st.lists(st.sampled_from(CHANGES), max_size=2),
    loop=st.sampled_from([ONCE, REMADE]),
    begin=st.integers(0, 14),
)
@settings(max_examples=100)
def test_what_a_data_set_changes_as_it_is_read_is_what_it_was(changes, at_end, loop, begin):
    by_body = "; ".join([*at_end, "pass"]).replace("self", "data").replace("index", "7")
    text = KEEPING.replace("CHANGES", "; ".join(changes)) + loop.replace("AT_END", by_body)
    modules = {"collections": collections, "numpy": np, "random": random}
    whole, there = noted(text, **modules)
    begin %= len(whole)
    again, _ = noted(text, there[begin], **modules)
    assert again == whole[begin:]


@pytest.mark.parametrize("change", ["self.items.append(index)", "self.items = [*self.items, index]"])
def test_what_changes_as_items_are_found_and_is_too_large_to_be_kept_is_refused(change):
    text = (KEEPING + ONCE).replace("CHANGES", change).replace("0, [], {}, set()", "0, [*range(2000)], {}, set()")
    _, there = noted(text, collections=collections, numpy=np, random=random)
    assert "a list of more than 1000 items" in str(there[3][1])


FED = """
queue, kept = [3], [3]
def batches():
    while True:
        yield queue.pop()

def drawing():
    for _ in range(9):
        yield kept[-1] * 2

for number, x in enumerate(OVER):
    note(x)
    backward()
    queue.append(x + number)
    kept.append(number)
"""


@pytest.mark.parametrize(
    ("over", "reason"),
    [
        ("batches()", r"generator `batches` \(x\.py:3\) fails when it is run forward alone, to item 3: IndexError"),
        ("map(lambda x: queue.pop(), range(9))", r"iterator map fails when it is run forward alone"),
        ("drawing()", r"generator `drawing` \(x\.py:7\) hands out something else"),
        ("map(lambda x: kept[-1], range(9))", "iterator map hands out something else"),
    ],
)
def test_what_the_body_feeds_is_refused_by_name_and_all_begin_again(over, reason):
    text = FED.replace("OVER", over) + "    if number == 4: break\n"
    _, there = noted(text)
    watched = Watched(1, there[3])
    with pytest.raises(NotCarriedError, match=reason + r".*\(what the loop at x\.py:11 goes over\)"):
        watched.run(text)
    assert isinstance(watched.records[-1], NotCarriedError), "the others are told"


HELD = """
class Held:
    def __init__(self, loader):
        self.source, self.held = iter(loader), []

    def __iter__(self):
        return self

    def __next__(self):
        self.held.append(next(self.source))
        return self.held[len(self.held) // 30]

class Holding:
    def __iter__(self):
        return Held(loader)

class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, number):
        return number + torch.rand(())

loader = torch.utils.data.DataLoader(Noisy(), batch_size=2)
for number, x in enumerate(Holding()):
    note(x.tolist(), float(torch.rand(())))
    backward()
"""


def test_what_holds_items_longer_than_it_is_known_what_they_drew_is_refused():
    _, there = noted(HELD)
    with pytest.raises(NotCarriedError, match="the iterator Held hands out something else when begun anew"):
        noted(HELD, there[24])


class Spread(torch.Tensor):
    """A tensor that gives nobody its numbers, as one that is spread over ranks."""

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), named=None):
        raise RuntimeError("not supported for tensor subclasses")


class Shy:
    """An object that raises whoever looks at it."""

    def __iter__(self):
        return (each for each in ([1], [2]))

    @property
    def __dict__(self):
        raise ValueError("nobody's business")


def test_what_nobody_can_look_at_is_gone_over_all_the_same():
    spread = torch.Tensor._make_subclass(Spread, torch.ones(2))
    over = Counted(iter({"weight": spread}.items()))
    assert next(over)[1] is spread
    shy = Counted(Shy())
    assert [*shy] == [[1], [2]]
    with pytest.raises(NotCarriedError, match="what Shy hands out can't be looked at: ValueError"):
        shy.position()


LOADS_AHEAD = """
import threading, numpy
from queue import Queue

class Ahead:
    def __iter__(self):
        self.ready, self.seen = Queue(), threading.Event()
        self.thread = threading.Thread(target=self.load, daemon=True)
        self.thread.start()
        return self

    def load(self):
        for number in range(4):
            self.ready.put(number + (numpy.random.rand() if draws else 0))
        self.ready.put(None)
        self.seen.wait()

    def __next__(self):
        if (found := self.ready.get()) is None:
            raise StopIteration
        return found

for items in (Ahead(), range(4)):
    for number, item in enumerate(items):
        if number == 1 and items != range(4):
            items.seen.set()
            items.thread.join()
        note(number)
        backward()
"""


@pytest.mark.parametrize("draws", [True, False])
def test_what_a_thread_has_drawn_for_the_items_of_a_loop_is_refused_until_that_loop_is_over(draws):
    there = Watched(1).run(LOADS_AHEAD, draws=draws).there
    beside = ["a thread that runs `load`" in str(record) for _, record, _ in there[2:]]
    assert beside == [draws, draws, False, False, False, False]


UNPACKABLE = """
class Shy:
    def __reduce_ex__(self, _):
        asked.append(1)
        raise TypeError("no")

seen = []
for x in range(200):
    note(x)
    seen.append(Shy())
    backward()
"""


def test_what_can_not_be_packed_time_after_time_is_asked_less_and_less(monkeypatch):
    monkeypatch.setattr("unicron.train.loops.snapshot_taker.REST", 1e9)
    asked = []
    noted(UNPACKABLE, asked=asked)
    once = len(asked)
    monkeypatch.setattr("unicron.train.loops.snapshot_taker.REST", 0.0)
    noted(UNPACKABLE, asked=asked)
    assert 0 < once < (len(asked) - once) / 5
