"""Which errors of ours say that a script is better run as torchrun would."""

import pytest

from unicron.contracts.worker import LONGEST_CAUSE
from unicron.errors import GroupBrokenError, InvalidInputError
from unicron.train.carry.kinds import NotCarriedError
from unicron.train.inplace.abandon import is_raised_by_us, why_not_in_place
from unicron.train.loops.collective_results import unpack_results


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (InvalidInputError("what can't be had"), "what can't be had"),
        (KeyError("none"), "a fault of Unicron's own, please report it: KeyError: 'none'"),
        (InvalidInputError("x\n" * 5000), ("x\\n" * 5000)[: LONGEST_CAUSE - 1] + "…"),  # a longer one could not be sent
        (NotCarriedError("a lambda"), ""),  # all begin again, and may be healed in place later
        (GroupBrokenError("a rank was lost"), ""),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), ""),  # of the machine
        (MemoryError(), ""),
    ],
)
def test_what_a_script_could_do_without_us_is_told_from_what_befalls_it(error, why):
    assert why_not_in_place(error) == why


def test_an_error_is_ours_where_our_code_raises_it():
    with pytest.raises(InvalidInputError) as ours:
        unpack_results(b"none")
    with pytest.raises(ValueError, match="invalid literal") as theirs:
        int("none")
    assert (is_raised_by_us(ours.value), is_raised_by_us(theirs.value)) == (True, False)
