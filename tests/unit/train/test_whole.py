"""A model in one file: whole under its name at any time, or not there."""

import errno
import os

import pytest
import torch

from unicron.train.snapshots import whole

MODEL = {"0.weight": torch.arange(6.0).reshape(2, 3), "0.bias": torch.ones(2)}


def read(path):
    return torch.load(path, weights_only=True)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_is_written_is_what_torch_loads_and_nothing_else_is_left(tmp_path):
    whole.save_file(MODEL, tmp_path / "m.pt")
    assert all(torch.equal(read(tmp_path / "m.pt")[name], each) for name, each in MODEL.items())
    assert names(tmp_path) == ["m.pt"]


def test_a_file_that_was_there_stays_until_the_new_one_is_whole(tmp_path, monkeypatch):
    whole.save_file({"old": torch.ones(1)}, tmp_path / "m.pt")
    seen = []
    monkeypatch.setattr(os, "fsync", lambda _: seen.append(set(read(tmp_path / "m.pt"))))
    whole.save_file(MODEL, tmp_path / "m.pt")
    assert seen == [{"old"}, set(MODEL)], "synced before it has its name, and its folder after that"


def test_what_a_writer_that_died_has_left_is_removed_and_nothing_else(tmp_path):
    for name in ("m.pt.0123abcd.part", "m.pt.part", "other.pt.0123abcd.part"):
        (tmp_path / name).write_bytes(b"half")
    whole.save_file(MODEL, tmp_path / "m.pt")
    assert names(tmp_path) == ["m.pt", "m.pt.part", "other.pt.0123abcd.part"]


def test_a_storage_that_has_not_what_was_written_is_found_out(tmp_path, monkeypatch):
    (tmp_path / "m.pt").write_bytes(b"what was there")
    sync = os.fsync

    def forgetful(handle):
        sync(handle)
        os.pwrite(handle, b"\0\0\0\0", 100)

    monkeypatch.setattr(os, "fsync", forgetful)
    with pytest.raises(OSError, match=r"m\.pt can't be saved: what was written is not what can be read there"):
        whole.save_file(MODEL, tmp_path / "m.pt")
    assert (tmp_path / "m.pt").read_bytes() == b"what was there"
    assert names(tmp_path) == ["m.pt"]


def test_a_full_disk_is_told_with_the_name_of_the_file(tmp_path, monkeypatch):
    def full(_handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"m\.pt can't be saved: No space left on device") as raised:
        whole.save_file(MODEL, tmp_path / "m.pt")
    assert raised.value.errno == errno.ENOSPC
    assert names(tmp_path) == []
