"""A script that begins in the middle of its loops has what one has that came there."""

import pytest
import torch

from unicron.errors import InvalidInputError
from unicron.train.loops import NAME, Loops, instrument

SCRIPT = """
import torch

class State:
    def __init__(self):
        self.step, self.rank = 0, rank

def backward():
    torch.zeros(1, requires_grad=True).sum().backward()

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


def followed(rank, there=None, until=None):
    """Return what a rank comes by, from where `there` says, and where it is when it comes by what begins so."""
    torch.manual_seed(5)
    passed, kept = [], {}

    def at(*values):
        passed.append(values)
        if until is not None and values[: len(until)] == until:
            kept.update(loops.state_dict())

    loops = Loops(rank, lambda: there and loops.load_state_dict(there))
    program = {"rank": rank, "at": at, "__name__": "__main__", NAME: loops}
    exec(compile(instrument(SCRIPT, "x.py"), "x.py", "exec"), program)
    return passed, kept


@pytest.mark.parametrize(
    "where", [(0, 0), (0, 3), (2, 2), (3, 4), ("left", 5), ("left", 2), ("twice", 3), ("end", 0), ("end", 2)]
)
def test_a_rank_that_begins_later_is_where_another_is(where):
    whole, _ = followed(1)
    _, there = followed(0, until=where)
    again, _ = followed(1, there)
    begins = max(index for index, each in enumerate(whole) if each[: len(where)] == where)
    ends = whole[begins:]
    assert again[-len(ends) :] == ends
    assert len(again) - len(ends) <= 1  # an outer loop's body begins once more, up to the inner loop


def test_who_has_come_later_hands_on_what_was_before():
    whole, _ = followed(2)
    _, first = followed(0, until=(1, 2))
    _, second = followed(1, first, until=(3, 1))
    again, _ = followed(2, second)
    assert again == whole[-len(again) :]
    assert again[0][:2] == (3, 1)


def test_what_does_not_train_is_left_alone():
    tree = compile(instrument("for x in [1]:\n    print(x)\nwhile False:\n    pass\n", "x.py"), "x.py", "exec")
    assert NAME not in tree.co_names


def test_an_iterator_of_a_loop_is_refused():
    text = "def run(data):\n    while True:\n        next(data)\n        loss.backward()\nrun(x for x in [1])\n"
    with pytest.raises(InvalidInputError, match="the loop at line 2 uses `data`, an iterator"):
        exec(compile(instrument(text, "x.py"), "x.py", "exec"), {NAME: Loops(0, lambda: None)})


RESUMED = """
for number in range(begin, 9):
    note((number, float(torch.rand(()))))
    backward()
"""


def resumed(begin, there=None):
    torch.manual_seed(5)
    loops, passed, kept = Loops(1, lambda: there and loops.load_state_dict(there)), [], []
    program = {
        "begin": begin,
        "note": passed.append,
        "torch": torch,
        "backward": lambda: kept.append(loops.state_dict()),
    }
    exec(compile(instrument(RESUMED, "x.py"), "x.py", "exec"), {**program, NAME: loops})
    return passed, kept


def test_a_script_that_has_begun_from_a_checkpoint_is_where_the_others_are_though_they_began_before():
    whole, there = resumed(2)
    for begin in (0, 2, 4):
        again, _ = resumed(begin, there[3])
        assert again == whole[3:]
    with pytest.raises(InvalidInputError, match="the others are at 5 of the loop at line 2, which ends before"):
        resumed(7, there[3])


ITERATES = """
import torch

def backward():
    torch.zeros(1, requires_grad=True).sum().backward()

for epoch in range(3):
    items = iter(range(100 * epoch, 100 * epoch + 40))
    for number in range(5):
        batch = [next(items) for _ in range(4)]
        note((epoch, number, batch, float(torch.rand(()))))
        backward()
"""


def iterated(there=None):
    torch.manual_seed(5)
    loops, passed, kept = Loops(1, lambda: there and loops.load_state_dict(there)), [], []

    def note(value):
        passed.append(value)
        kept.append(loops.state_dict())

    exec(compile(instrument(ITERATES, "x.py"), "x.py", "exec"), {"note": note, NAME: loops})
    return passed, kept


def test_an_iterator_that_the_script_makes_is_as_far_as_that_of_the_others():
    whole, there = iterated()
    for begin in (0, 3, 7, 14):
        again, _ = iterated(there[begin])
        assert again == whole[begin:]


SUMS = """
for number in range(8):
    mark() if number % 4 == 0 else None
    note(number)
    backward()
"""


def test_a_rank_that_comes_within_an_iteration_begins_it_and_one_without_a_loop_of_its_own_is_refused():
    passed, kept = [], []
    loops = Loops(1, lambda: None)
    program = {
        "note": lambda number: (passed.append(number), kept.append(loops.state_dict())),
        "backward": lambda: None,
    }
    exec(compile(instrument(SUMS, "x.py"), "x.py", "exec"), {**program, "mark": loops.mark, NAME: loops})
    for at, begin in ((2, 0), (4, 4), (7, 4)):
        passed.clear()
        later = Loops(2, lambda later=None, at=at: None)
        later._begin = lambda later=later, at=at: later.load_state_dict(kept[at])
        more = {**program, "note": passed.append, "mark": later.mark, NAME: later}
        exec(compile(instrument(SUMS, "x.py"), "x.py", "exec"), more)
        assert passed == list(range(begin, 8))
    twice = SUMS.replace("note(number)", "mark()")
    again = Loops(1, lambda: None)
    with pytest.raises(InvalidInputError, match="the loop at line 2 makes more than one update"):
        exec(compile(instrument(twice, "x.py"), "x.py", "exec"), {**program, "mark": again.mark, NAME: again})
