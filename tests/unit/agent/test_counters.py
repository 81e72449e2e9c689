"""Counters of GPUs, compared with those of the sample before."""

import pytest
from unicron_agent.counters import grew


@pytest.mark.parametrize(
    ("now", "before", "says"),
    [
        ((1, 2, 3), (1, 2, 3), False),
        ((1, 3, 3), (1, 2, 3), True),
        ((0, 0, 0), (1, 2, 3), False),
        ((0, 3, 0), (1, 2, 3), True),
        ((None, 3, None), (1, 2, 3), True),
        ((None, 3, None), (1, None, 3), None),
        ((1, 2, 3), (), None),
        ((None, None, None), (None, None, None), None),
    ],
)
def test_counters_grow_or_begin_anew(now, before, says):
    assert grew(now, before) is says
