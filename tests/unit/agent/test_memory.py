"""The folder that states lie in."""

import pytest
from unicron_agent.memory import StateMemory

from unicron.errors import StateTransferError


def test_of_a_worker_that_is_gone_only_what_others_may_need_stays(tmp_path):
    gone = ["t-1.3.state", "t-1.4.state.part", "t-1.t-2.3.state.fetched", "t-1.t-2.0.saved.part"]
    stays = ["t-1.5.kept", "t-1.0.saved", "t-11.3.state", "t-2.t-1.3.state.fetched", "agent.sock"]
    for name in gone + stays:
        (tmp_path / name).touch()
    StateMemory(tmp_path, 0).forget("t-1")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(stays)


def test_a_full_memory_takes_no_state_more_until_it_is_freed_and_what_lies_there_stays(tmp_path):
    memory = StateMemory(tmp_path, 1 << 40)
    (tmp_path / "t-1.0.saved").write_bytes(b"state")
    memory.check_room("t-2.0.saved", 5)
    memory.fill()
    with pytest.raises(StateTransferError, match="more than the limit of 1099511627776 bytes"):
        memory.check_room("t-2.0.saved", 5)
    assert memory.saved() == []
    memory.free()
    memory.check_room("t-2.0.saved", 5)
    assert [path.name for path in tmp_path.iterdir()] == ["t-1.0.saved"]
