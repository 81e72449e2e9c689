"""The folder that states lie in."""

from unicron_agent.memory import StateMemory


def test_of_a_worker_that_is_gone_only_what_others_may_need_stays(tmp_path):
    gone = ["t-1.3.state", "t-1.4.state.part", "t-1.t-2.3.state.fetched", "t-1.t-2.0.saved.part"]
    stays = ["t-1.5.kept", "t-1.0.saved", "t-11.3.state", "t-2.t-1.3.state.fetched", "agent.sock"]
    for name in gone + stays:
        (tmp_path / name).touch()
    StateMemory(tmp_path, 0).forget("t-1")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(stays)
