"""What an exception is called where there is one line for it."""

import pytest
from torch._utils import ExceptionWrapper

from unicron.exception_texts import LONGEST_BRIEF, brief, cut


def fail():
    raise RuntimeError("manager: Invalid argument\nframe #0: c10::Error")


def of_a_worker():
    try:
        fail()
    except RuntimeError:
        wrapped = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(RuntimeError) as raised:
        wrapped.reraise()
    return raised.value


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("too few: 3"), "ValueError: too few: 3"),
        (KeyError("lr"), "KeyError: 'lr'"),
        (StopIteration(), "StopIteration"),
        (of_a_worker(), "RuntimeError: manager: Invalid argument"),
        (OSError("x" * 1000), "OSError: " + "x" * (LONGEST_BRIEF - 1) + "…"),
    ],
    ids=["", "", "no text", "of a worker", "long"],
)
def test_an_exception_is_told_in_one_line_and_that_of_a_worker_by_what_it_said(error, told):
    assert brief(error) == told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("it is as it was", "it is as it was"),
        ("a rank can't have `box.first.second` of x", "a rank can't have `box.fir…`"),
        ('its last line was "iteration 10" and more', 'its last line was "iterati…"'),
        ("name 'history_of_it' is not defined at x.py", "name 'history_of_it' is not…"),
        ("so it says: name 'history_of_it' is not", "so it says: name 'history_…'"),
        ("all ranks' own, and that can't be had", "all ranks' own, and that ca…"),
    ],
)
def test_a_text_that_is_cut_leaves_no_quotation_open(text, told):
    assert cut(text, 28) == told
