"""What an exception is called where there is one line for it."""

import pytest
from torch._utils import ExceptionWrapper

from unicron.exception_texts import LONGEST_BRIEF, brief


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
        (OSError("x" * 1000), "OSError: " + "x" * LONGEST_BRIEF),
    ],
    ids=["", "", "no text", "of a worker", "long"],
)
def test_an_exception_is_told_in_one_line_and_that_of_a_worker_by_what_it_said(error, told):
    assert brief(error) == told
