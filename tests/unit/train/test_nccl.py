"""Groups whose collectives a GPU does."""

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from unicron.errors import GroupBrokenError
from unicron.train.groups.connections import POLL, Connections

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CYCLES = 2_000_000_000
"""Of a GPU's clock, about a second."""


@pytest.fixture
def connections():
    found = Connections()
    with found.forming(1):
        group = found.connect_streams(torch.device("cuda"), HashStore(), 0, 1)
    return found, group


def begun(group):
    """Begin a sum that the GPU gets to after a second only."""
    values = torch.ones(1024, device="cuda")
    torch.cuda._sleep(CYCLES)
    return values, group.allreduce([values])


def test_a_collective_may_take_longer_than_a_look_at_it(connections):
    found, group = connections
    assert POLL.total_seconds() < 0.5
    for _ in range(2):
        values, work = begun(group)
        found.finish(work, group)
        assert values.sum().item() == 1024


def test_one_that_was_interrupted_is_not_taken_for_done(connections):
    found, group = connections
    _, work = begun(group)
    assert found.cut_below(2)
    with pytest.raises(GroupBrokenError):
        found.finish(work, group)
