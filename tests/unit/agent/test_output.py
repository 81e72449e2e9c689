"""Workers' output: lines that match a pattern, among any others."""

import os

import pytest
from unicron_agent.stimuli import Logged
from unicron_agent.workers import output
from unicron_agent.workers.output import MOST, TAIL_BYTES, Outputs, last_lines, rotate

from unicron.errors import InvalidInputError
from unicron.rules import LONGEST_LINE, load

WATCHDOG = "[rank0]:[E1123 12:00:00.1 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout"
CUDA = "[rank0]: RuntimeError: CUDA error: unspecified launch failure"
NOISE = "".join(f"step {n} loss 2.345 tokens/s 123456\n" for n in range(10_000))


@pytest.fixture
def path(tmp_path):
    found = tmp_path / "gpt-1.log"
    found.write_text(f"{WATCHDOG}\nof an earlier worker of that name\n")
    return found


@pytest.fixture
def outputs(path):
    found = Outputs(load())
    found.follow("gpt-1", str(path))
    return found


def write(path, data):
    with path.open("ab") as file:
        file.write(data if isinstance(data, bytes) else data.encode())


def texts(logged):
    return [each.text for each in logged]


def test_what_a_worker_writes_is_found_once_and_by_its_name(outputs, path):
    assert outputs.new_lines() == []
    write(path, f"{NOISE}{WATCHDOG}\n{CUDA}\nall is well\n")
    found = [(WATCHDOG, "nccl_timeout"), (CUDA, "cuda_error")]
    assert outputs.new_lines() == [Logged(text=text, status=status, author="gpt-1") for text, status in found]
    assert outputs.new_lines() == []
    assert outputs.new_lines_of("gpt-2") == []


def test_half_a_line_is_none_yet(outputs, path):
    write(path, CUDA[:30])
    assert outputs.new_lines() == []
    write(path, CUDA[30:] + "\n")
    assert texts(outputs.new_lines()) == [CUDA]


def test_a_file_that_is_cut_off_is_followed_on_and_one_that_is_gone_harmless(outputs, path):
    write(path, f"{CUDA}\n")
    outputs.new_lines()
    path.write_text(f"{CUDA}\n")
    assert texts(outputs.new_lines()) == [CUDA]
    path.unlink()
    assert outputs.new_lines() == []


def test_of_a_flood_the_end_is_looked_at(outputs, path):
    write(path, f"{WATCHDOG}\n" + "x\n" * MOST + f"{CUDA}\n")
    assert texts(outputs.new_lines()) == [CUDA]


def test_a_rule_finds_one_line_at_a_look(outputs, path):
    write(path, "".join(f"{CUDA} {n}\n" for n in range(1000)))
    assert texts(outputs.new_lines()) == [f"{CUDA} 0"]


def test_bytes_that_are_no_text_and_lines_without_an_end_are_harmless(outputs, path):
    write(path, b"\xff\xfe\x00 \x80" + CUDA.encode() + b"\x00\n" + b"x" * 100_000 + b"\n")
    [text] = texts(outputs.new_lines())
    assert CUDA in text
    assert "\x00" in text
    write(path, "CUDA error: " + "x" * 1_000_000 + "\n")
    assert outputs.new_lines() == [], "its beginning was passed over"
    write(path, "CUDA error: " + "x" * 100_000 + "\n")
    assert [len(text) for text in texts(outputs.new_lines())] == [LONGEST_LINE]


def test_who_is_gone_is_not_followed(outputs, path):
    outputs.forget("gpt-1")
    write(path, f"{CUDA}\n")
    assert outputs.new_lines() == []


def test_a_log_that_became_too_large_is_put_aside_and_followed_on(outputs, path, monkeypatch):
    monkeypatch.setattr(output, "LOG_BYTES", 4 * MOST)
    writer = path.open("ab")  # as a worker has it open
    assert outputs.oversized() == []
    writer.write(b"old\n" + b"x" * (5 * MOST) + b"\nlast\n")
    writer.flush()
    outputs.new_lines()
    assert outputs.oversized() == [str(path)]
    rotate(str(path))
    aside = path.with_name(path.name + ".1")
    assert aside.stat().st_size == 4 * MOST
    assert aside.read_bytes().endswith(b"x\nlast\n")
    writer.write(f"{CUDA}\n".encode())
    writer.close()
    assert path.read_text() == f"{CUDA}\n"
    assert texts(outputs.new_lines()) == [CUDA]
    assert outputs.oversized() == []


def test_the_last_lines_are_those_of_before_it_was_put_aside_too(path):
    path.write_bytes(b"".join(b"line %d\n" % number for number in range(30)) + b"\xff\x1b[2J")
    assert last_lines(path.parent, "gpt-1", 3) == ["line 28", "line 29", "\ufffd\x1b[2J"]
    rotate(str(path))
    assert last_lines(path.parent, "gpt-1", 1) == ["\ufffd\x1b[2J"]
    path.write_text("new\n")
    assert last_lines(path.parent, "gpt-1", 3) == ["line 29", "\ufffd\x1b[2J", "new"]
    assert len(last_lines(path.parent, "gpt-1", 200)) == 32


def test_of_a_log_of_any_size_only_the_end_is_read(path):
    with path.open("wb") as file:
        file.truncate(1 << 40)
        file.seek(0, 2)
        file.write(b"first\n" + b"x" * TAIL_BYTES + b"\nlast\n")
    path.with_name(path.name + ".1").write_text("long ago\n")
    assert last_lines(path.parent, "gpt-1", 200) == ["last"], "not half a line, nor what came before that"
    path.write_bytes(b"y" * (TAIL_BYTES + 5))
    assert last_lines(path.parent, "gpt-1", 200) == ["y" * TAIL_BYTES]


@pytest.mark.parametrize("worker", ["", "..", "../gpt-1", "gpt-1.log", "/etc/passwd", "a/b", "gpt-1\n", "x" * 65])
def test_what_is_no_workers_name_is_no_path_either(path, worker):
    path.write_text("mine\n")
    (path.parent / "..log").write_text("another's\n")
    with pytest.raises(InvalidInputError, match="use 1 to 64 letters, digits"):
        last_lines(path.parent, worker, 5)


def test_only_files_in_the_folder_are_logs(path, tmp_path_factory):
    secret = tmp_path_factory.mktemp("elsewhere") / "secret"
    secret.write_text("secret\n")
    (path.parent / "link.log").symlink_to(secret)
    (path.parent / "folder.log").mkdir()
    os.mkfifo(path.parent / "pipe.log")
    for worker in ("link", "folder", "pipe", "none"):
        with pytest.raises(InvalidInputError, match=f"no log of worker '{worker}' here"):
            last_lines(path.parent, worker, 5)
    path.write_text("mine\n")
    path.with_name(path.name + ".1").symlink_to(secret)
    assert last_lines(path.parent, "gpt-1", 5) == ["mine"]


def test_where_there_is_no_room_a_log_is_emptied_all_the_same(path):
    path.with_name(path.name + ".1").mkdir()
    rotate(str(path))
    assert path.read_bytes() == b""
