"""The folder in a node's memory that snapshots lie in: what is one there, what stays, and how much may lie there."""

import pytest
from xxhash import xxh3_128

from unicron.contracts.states import StateLocation, StateRef
from unicron.errors import StateTransferError, UnsoundStateError
from unicron.snapshots.memory import SnapshotMemory, finished_or_removed, verify
from unicron.snapshots.names import exported_name, saved_names

CONTENT = b"parameters"


def saved(name="t-1.0.saved"):
    location = StateLocation(node="n1", worker="t-1", name=name)
    checksum = xxh3_128(CONTENT).digest()
    return StateRef(task="t", iteration=7, place=0, location=location, size=len(CONTENT), checksum=checksum)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def fail_midway(target):
    with finished_or_removed(target) as path:
        path.write_bytes(CONTENT[:3])
        raise OSError("full")


def test_a_worker_knows_the_memory_from_what_its_agent_gives_it(tmp_path, monkeypatch):
    for name, value in SnapshotMemory(tmp_path, 6000).variables.items():
        monkeypatch.setenv(name, value)
    memory = SnapshotMemory.of_worker()
    assert (memory.folder, memory.limit) == (tmp_path, 6000)


def test_names_of_a_workers_files_are_names_of_snapshots():
    kept, lent = exported_name("t-1", 3, kept=True), exported_name("t-1", 3)
    assert (kept, lent, saved_names("t-1")) == ("t-1.3.kept", "t-1.3.state", ["t-1.0.saved", "t-1.1.saved"])
    for name in (kept, lent, *saved_names("t-1")):
        assert SnapshotMemory.check_name(name) == name
    with pytest.raises(StateTransferError, match="expected WORKER"):
        SnapshotMemory.check_name("agent.sock")


def test_only_its_label_makes_a_file_a_saved_snapshot(tmp_path):
    memory, ref = SnapshotMemory(tmp_path, 0), saved()
    path = tmp_path / ref.location.name
    assert not memory.begin_overwrite(path.name, ref.size), "there is no file yet"
    path.write_bytes(CONTENT)
    assert memory.saved() == []
    memory.add_label(ref)
    assert memory.saved() == [ref]
    assert memory.begin_overwrite(path.name, ref.size)
    assert (memory.saved(), path.read_bytes()) == ([], CONTENT)


def test_a_file_with_a_second_name_is_left_to_its_reader(tmp_path):
    memory, ref = SnapshotMemory(tmp_path, 0), saved()
    (tmp_path / ref.location.name).write_bytes(CONTENT)
    with memory.held_for_storage(ref) as held:
        assert not memory.begin_overwrite(ref.location.name, ref.size)
        assert held.read_bytes() == CONTENT
    assert names(tmp_path) == []


def test_a_file_is_there_whole_or_not_at_all(tmp_path):
    with finished_or_removed(tmp_path / "t-1.3.state") as path:
        path.write_bytes(CONTENT)
        assert names(tmp_path) == ["t-1.3.part"]
    assert names(tmp_path) == ["t-1.3.state"]
    with pytest.raises(OSError, match="full"):
        fail_midway(tmp_path / "t-1.4.state")
    assert names(tmp_path) == ["t-1.3.state"]


@pytest.mark.parametrize("content", [CONTENT[:-1], b"", b"x" + CONTENT[1:]])
def test_content_that_differs_from_its_checksum_is_refused(tmp_path, content):
    path = tmp_path / "t-1.0.saved"
    path.write_bytes(CONTENT)
    verify(saved(), path)
    path.write_bytes(content)
    with pytest.raises(UnsoundStateError, match="of n1: wrong checksum"):
        verify(saved(), path)


def test_of_a_worker_that_is_gone_only_what_others_may_need_stays(tmp_path):
    gone = ["t-1.3.state", "t-1.4.state.part", "t-1.t-2.3.state.fetched", "t-1.t-2.0.saved.part"]
    stays = ["t-1.5.kept", "t-1.0.saved", "t-11.3.state", "t-2.t-1.3.state.fetched", "agent.sock"]
    for name in gone + stays:
        (tmp_path / name).touch()
    SnapshotMemory(tmp_path, 0).remove_transient("t-1")
    assert names(tmp_path) == sorted(stays)


def test_a_file_that_cannot_be_removed_keeps_no_other_from_it(tmp_path, caplog):
    for name in ("t-1.3.state", "t-1.5.state", "t-1.0.saved"):
        (tmp_path / name).touch()
    (tmp_path / "t-1.4.state").mkdir()  # no unlink() removes it, whoever asks
    memory = SnapshotMemory(tmp_path, 0)
    memory.remove_transient("t-1")
    memory.remove("t-1.4.state")
    assert names(tmp_path) == ["t-1.0.saved", "t-1.4.state"]
    assert caplog.text.count("t-1.4.state can't be removed") == 2


def test_a_full_memory_takes_no_state_more_until_it_is_freed_and_what_lies_there_stays(tmp_path):
    memory = SnapshotMemory(tmp_path, 1 << 40)
    (tmp_path / "t-1.0.saved").write_bytes(b"state")
    memory.check_room("t-2.0.saved", 5)
    memory.fill()
    with pytest.raises(StateTransferError, match="more than the limit of 1099511627776 bytes"):
        memory.check_room("t-2.0.saved", 5)
    assert memory.saved() == []
    memory.free()
    memory.check_room("t-2.0.saved", 5)
    assert names(tmp_path) == ["t-1.0.saved"]


def test_what_is_removed_by_others_meanwhile_is_no_want_of_room(tmp_path):
    """After a node is lost, the agents remove what its workers had saved, while others save."""
    memory = SnapshotMemory(tmp_path / "of", 100)
    with pytest.raises(StateTransferError, match="of is gone: start the agent of this node again"):
        memory.check_room("t-2.0.saved", 5)
    memory.folder.mkdir()
    (memory.folder / "t-1.0.saved").symlink_to("nothing")  # listed, and gone when it is looked at
    memory.check_room("t-2.0.saved", 5)
    assert not memory.begin_overwrite("t-1.0.saved", 5)
