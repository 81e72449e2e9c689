"""The kernel's log: files as log daemons write them, and waiting for what is written to one."""

import os
import threading
import time
from types import SimpleNamespace

import pytest
from helpers.waiting import block_until
from unicron_agent import file_changes
from unicron_agent.file_changes import FileChanges
from unicron_agent.hardware import kernel_log
from unicron_agent.hardware.kernel_log import KernelLog, append, pci
from unicron_agent.lines import LONGEST_LINE

from unicron.errors import InvalidInputError
from unicron.rules import load

XID = "[ 12.5] NVRM: Xid (PCI:0000:3b:00): {}, pid=4711, name=python, Ch 00000008\n"


class Heard:
    """What a log has told of."""

    def __init__(self, path):
        self.logged, self._more = [], threading.Condition()
        self.log = KernelLog(str(path), load(), {"0000:3b:00": 5}, self._hear)
        self.log.start()

    def _hear(self, logged):
        with self._more:
            self.logged.append(logged)
            self._more.notify()

    def until(self, count):
        """Wait until it has told of so many lines, and of no more; return their texts."""
        with self._more:
            self._more.wait_for(lambda: len(self.logged) >= count)
            assert len(self.logged) == count, self.logged
            return [each.text for each in self.logged]

    def end(self, path):
        """Stop, once a last line has come; it comes next."""
        count = len(self.logged)
        write(path, XID.format(62))
        assert "): 62," in self.until(count + 1)[-1]
        self.log.stop()


@pytest.fixture
def path(tmp_path):
    found = tmp_path / "kern.log"
    found.write_text(XID.format(48) + "an old line\n")
    return found


@pytest.fixture
def heard(path):
    found = Heard(path)
    yield found
    found.end(path)


def write(path, text):
    with path.open("a") as file:
        file.write(text)


def test_what_stood_there_before_is_not_told(heard, path):
    write(path, "all is well\n" + XID.format(79))
    [text] = heard.until(1)
    assert text == XID.format(79).strip()
    [logged] = heard.logged
    assert (logged.slot, logged.pid, logged.status) == (5, 4711, "gpu_driver_error")


def test_amds_driver_names_device_and_process_in_words_of_its_own(heard, path):
    fault = "amdgpu 0000:{}:00.0: amdgpu: [gfxhub0] page fault (vmid:8, for process python pid 4711 thread x pid 4712)"
    write(path, f"{fault.format('07')}\n{fault.format('3b')}\n")  # that of a screen, and that of a slot
    assert heard.until(1) == [fault.format("3b")]
    [logged] = heard.logged
    assert (logged.slot, logged.pid, logged.status) == (5, 4711, "illegal_memory_access")


def test_half_a_line_is_none_yet(heard, path):
    whole = XID.format(79)
    write(path, whole[:30])
    block_until(lambda: os.lseek(heard.log._file, 0, os.SEEK_CUR) == path.stat().st_size)
    write(path, whole[30:] + XID.format(31))
    assert heard.until(2) == [whole.strip(), XID.format(31).strip()]


def test_a_log_that_is_moved_away_or_cut_off_is_followed_on_without_a_look_once_in_a_while(path, monkeypatch):
    monkeypatch.setattr(kernel_log, "REST_S", 1e5)  # a test that waits for it never ends
    heard = Heard(path)
    write(path, XID.format(79))
    heard.until(1)
    path.rename(path.with_suffix(".1"))
    path.write_text(XID.format(94))
    heard.until(2)
    path.write_text("")
    write(path, XID.format(31).partition(", pid=")[0] + "\n")  # shorter than what was there, whenever it is looked at
    assert [text.split("): ")[1][:2] for text in heard.until(3)] == ["79", "94", "31"]
    heard.log.stop()


def test_a_log_that_is_not_there_yet_is_waited_for(tmp_path):
    heard = Heard(tmp_path / "later")
    (tmp_path / "later").write_text(XID.format(79))
    assert heard.until(1) == [XID.format(79).strip()]
    heard.log.stop()


def test_the_first_line_of_a_log_that_comes_later_is_told_without_a_look_once_in_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_log, "LOOK_S", 1e5)  # a test that waits for it never ends
    later = tmp_path / "later.log"
    heard = Heard(later)
    for number in (1, 2):
        write(later, XID.format(79))
        heard.until(number)
    monkeypatch.undo()
    write(later, "the end\n")  # who waits wakes up
    heard.log.stop()


def test_one_that_may_not_be_read_is_said_and_harmless(tmp_path, caplog):
    (tmp_path / "file").touch()
    Heard(tmp_path / "file" / "log").log.stop()
    assert "is not watched" in caplog.text


def test_the_device_itself_tells_when_there_is_something_new():
    device = "/dev/kmsg"
    if not os.access(device, os.R_OK | os.W_OK):
        pytest.skip(f"{device} can't be read and written here")
    mark = f"a test of unicron {os.getpid()}"
    heard = Heard(device)
    try:
        append(device, "nothing that anybody knows", time.monotonic())
        append(device, f"NVRM: Xid (PCI:0000:3b:00): 79, {mark}", time.monotonic())
        [text] = heard.until(1)
        assert mark in text
    finally:
        heard.log.stop()  # returns though the device is silent


def test_noise_hides_nothing(heard, path):
    noise = "".join(f"[{n}] systemd[1]: Started Session {n} of User root, link up, 3 of 4\n" for n in range(20_000))
    write(path, noise + XID.format(79) + noise + "x" * 3 * LONGEST_LINE + "\n" + XID.format(31) + noise)
    assert [text.split("): ")[1][:2] for text in heard.until(2)] == ["79", "31"]


def test_bytes_that_are_no_text_are_passed_over(heard, path):
    with path.open("ab") as file:
        file.write(b"\xff\xfe\x00\n" + XID.format(79).encode() + b"\x80\n")
    heard.until(1)


@pytest.mark.parametrize(
    "harmless",
    [
        "NVRM: Xid (PCI:0000:3b:00): 999, of a later driver",
        "NVRM: Xid (PCI:0000:3b:00): , pid=",
        "NVRM: Xid (PCI:zz): 12345678901234567890",
        "x" * 1_000_000,
        "NVRM: " * 200_000,
        "\x00" * 100_000,
    ],
)
def test_lines_that_nobody_knows_are_harmless(heard, path, harmless):
    write(path, harmless + "\n" + XID.format(79))
    assert heard.until(1) == [XID.format(79).strip()]


def test_a_line_that_stands_for_something_may_hold_anything(heard, path):
    begin = XID.format(79).partition("pid=")[0].encode()
    with path.open("ab") as file:
        file.write(begin + b"pid=" + b"9" * 5000 + b"\n" + begin + b"\x00\xff\n" + begin + b"x" * 1_000_000 + b"\n")
    texts = heard.until(3)
    assert [len(text) for text in texts] == [1000, len(begin) + 2, 1000]
    write(path, XID.format(31))
    heard.until(4)


@pytest.mark.parametrize("address", ["0000:3B:00", "00000000:3B:00.0", "0000:3b:00"])
def test_addresses_are_the_same_however_they_are_written(address):
    assert pci(address) == "0000:3b:00"


def test_a_line_that_is_written_on_purpose_is_heard_like_any_other_and_none_that_is_old_is(heard, path):
    now, text = time.monotonic(), "NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, name=python, GPU has fallen off the bus."
    drifted = now + 4e-4 * now
    for at in (now / 2, 2 * now + 60, drifted):  # written once more by a daemon; of an earlier start of the machine
        append(str(path), text, at)
    [told] = heard.until(1)
    assert told.startswith(f"[{drifted:12.6f}] NVRM: Xid (PCI:0000:3b:00): 79, pid=4711")
    assert (heard.logged[0].pid, heard.logged[0].slot, heard.logged[0].status) == (4711, 5, "gpu_driver_error")


def test_the_xid_of_a_gpu_that_is_no_slot_s_is_left_out(heard, path):
    write(path, XID.format(79).replace("3b", "4c") + XID.format(79))
    [told] = heard.until(1)
    assert "3b:00" in told


def test_nothing_is_written_where_no_log_is(tmp_path):
    with pytest.raises(InvalidInputError, match="follows no kernel's log: start its agent with UNICRON_KERNEL_LOG"):
        append("", "a line", 0.0)
    missing = tmp_path / "none.log"
    with pytest.raises(InvalidInputError, match=r"none\.log can't be written: No such file or directory; start"):
        append(str(missing), "a line", 0.0)
    assert not missing.exists()


# --- waiting for what is written to a file ----------------------------------------------------------------------------


LONG_S = 1e5
"""A test that waits for so long never ends."""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "log").touch()
    found = os.open(tmp_path / "log", os.O_RDWR | os.O_APPEND)
    yield found
    os.close(found)


def test_what_is_written_ends_the_wait_and_is_told_of_once(file):
    waiting = FileChanges(file, os.eventfd(0))
    for _ in range(2):
        assert waiting._poll.poll(0) == []
        os.write(file, b"a line\n")
        waiting.wait(LONG_S)
    asked = []
    waiting._poll = SimpleNamespace(poll=asked.append)
    waiting.wait(7.0)
    assert asked == [7000.0], "it is the kernel that waits"
    waiting.close()


def test_where_the_kernel_tells_nobody_it_is_looked_at(file, monkeypatch):
    refuses = SimpleNamespace(inotify_init1=lambda _: -1, inotify_add_watch=lambda *_: -1)
    monkeypatch.setattr(file_changes.ctypes, "CDLL", lambda _: refuses)
    waiting = FileChanges(file, os.eventfd(0))
    waiting.wait(LONG_S)
    waiting.close()
