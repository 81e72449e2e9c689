"""A script that begins in the middle of its loops has what one has that came there."""

import pytest
import torch

from unicron.errors import InvalidInputError
from unicron.train.instrument import NAME, instrument
from unicron.train.loops import Loops

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


def run(text, variables):
    exec(compile(instrument(text, "x.py", "x.py"), "x.py", "exec"), {"__name__": "__main__", **variables})


def followed(rank, there=None, until=None):
    """Return what a rank comes by, from where `there` says, and where it is when it comes by what begins so."""
    torch.manual_seed(5)
    passed, kept = [], {}

    def at(*values):
        passed.append(values)
        if until is not None and values[: len(until)] == until:
            kept.update(loops.state_dict())

    loops = Loops(rank, lambda: there and loops.load_state_dict(there))
    run(SCRIPT, {"rank": rank, "at": at, NAME: loops})
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
    tree = compile(instrument("for x in [1]:\n    print(x)\nwhile False:\n    pass\n", "x.py", "x.py"), "x.py", "exec")
    assert NAME not in tree.co_names


def test_an_iterator_of_a_loop_is_refused():
    text = "def run(data):\n    while True:\n        next(data)\n        loss.backward()\nrun(x for x in [1])\n"
    with pytest.raises(InvalidInputError, match=r"the loop at x\.py:2 uses `data`, an iterator"):
        run(text, {NAME: Loops(0, lambda: None)})


RESUMED = """
for number in range(begin, 9):
    note((number, float(torch.rand(()))))
    backward()
"""


def noted(text, there=None, **variables):
    """Run a script that notes something in each of its loop's bodies; return what, and where it was each time."""
    torch.manual_seed(5)
    passed, kept = [], []
    loops = Loops(1, lambda: there and loops.load_state_dict(there))

    def note(*values):
        passed.append(values)
        kept.append(loops.state_dict())

    program = {"note": note, "backward": lambda: None, "torch": torch, "mark": loops.mark, "reduced": loops.reduced}
    run(text, {**program, NAME: loops, **variables})
    return passed, kept


def test_a_script_that_has_begun_from_a_checkpoint_is_where_the_others_are_though_they_began_before():
    whole, there = noted(RESUMED, begin=2)
    for begin in (0, 2, 4):
        again, _ = noted(RESUMED, there[3], begin=begin)
        assert again == whole[3:]
    with pytest.raises(InvalidInputError, match=r"the others are at 5 of the loop at x\.py:2, which ends before"):
        noted(RESUMED, there[3], begin=7)


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


def test_an_iterator_that_the_script_makes_is_as_far_as_that_of_the_others():
    whole, there = noted(ITERATES)
    for begin in (0, 3, 7, 14):
        again, _ = noted(ITERATES, there[begin])
        assert again == whole[begin:]


SUMS = """
for number in range(8):
    mark() if number % 4 == 0 else None
    note(number)
    backward()
    reduced() if number % 4 == 3 else None
"""


def test_a_rank_that_comes_within_an_iteration_begins_it():
    whole, there = noted(SUMS)
    for at, begin in ((2, 0), (4, 4), (7, 4)):
        again, _ = noted(SUMS, there[at])
        assert again == whole[begin:]


@pytest.mark.parametrize("body", ["mark(); mark()", "reduced() if number else None; mark()"])
def test_an_iteration_that_begins_where_nobody_could_come_is_refused(body):
    """In the second the sum of one iteration ends, and the next begins, in one body."""
    with pytest.raises(InvalidInputError, match=r"the loop at x\.py:2 makes more than one update"):
        noted(f"\nfor number in range(3):\n    {body}; backward()\n")


def test_lists_of_many_groups_of_tensors_are_data_and_all_else_that_is_plain_is_copied():
    losses, log = [torch.ones(())] * 99, [{"loss": 0.5, "step": each} for each in range(999)]
    batches, pairs = [{"x": torch.ones(3)}] * 65, [(each, 1.0) for each in range(99)]
    program = {"losses": losses, "log": log, "batches": batches, "pairs": pairs, "new": [], "backward": lambda: None}
    loops = Loops(1, lambda: None)
    lines = "for each in (losses, log, batches, pairs, new): each.append(each[0] if each else 1)"
    text = f"\nfor number in range(2):\n    {lines}\n    backward()\n    found.append(state())"
    found = []
    run(text, {**program, "found": found, "state": loops.state_dict, NAME: loops})
    values = found[-1]["loops"][0][3]["__main__"]
    assert "batches" not in values
    assert [len(values[name]) for name in ("losses", "log", "pairs", "new")] == [100, 1000, 100, 1]
    assert values["pairs"] == pairs[:-1]


HOLDS = """
class Batches:
    pass

def run(batches):
    batches.found = MAKES(range(100))
    for number in range(6):
        note(number, next(batches.found))
        backward()

run(Batches())
"""


def test_an_iterator_that_an_object_holds_is_as_far_as_that_of_the_others_or_is_refused():
    text = HOLDS.replace("MAKES", "iter")
    _, there = noted(text)
    again, _ = noted(text, there[3])
    assert again == [(number, number) for number in range(3, 6)]
    with pytest.raises(InvalidInputError, match=r"uses `batches\.found`, an iterator \(map\)"):
        noted(HOLDS.replace("MAKES", "(lambda them: map(int, them))"))
