"""What workers write: the lines that stand for something, whatever else is written."""

import pytest
from unicron_agent.hardware import Hardware
from unicron_agent.output import MOST, Outputs
from unicron_agent.stimuli import Logged, Running
from unicron_agent.workers import Worker

from unicron.contracts.hardware import FaultLogged
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
    assert outputs.look() == []
    write(path, f"{NOISE}{WATCHDOG}\n{CUDA}\nall is well\n")
    assert outputs.look() == [
        Logged(text=WATCHDOG, status="nccl_timeout", author="gpt-1"),
        Logged(text=CUDA, status="cuda_error", author="gpt-1"),
    ]
    assert outputs.look() == []
    assert outputs.look_at("gpt-2") == []


def test_half_a_line_is_none_yet(outputs, path):
    write(path, CUDA[:30])
    assert outputs.look() == []
    write(path, CUDA[30:] + "\n")
    assert texts(outputs.look()) == [CUDA]


def test_a_file_that_is_cut_off_is_followed_on_and_one_that_is_gone_harmless(outputs, path):
    write(path, f"{CUDA}\n")
    outputs.look()
    path.write_text(f"{CUDA}\n")
    assert texts(outputs.look()) == [CUDA]
    path.unlink()
    assert outputs.look() == []


def test_of_a_flood_the_end_is_looked_at(outputs, path):
    write(path, f"{WATCHDOG}\n" + "x\n" * MOST + f"{CUDA}\n")
    assert texts(outputs.look()) == [CUDA]


def test_a_rule_finds_one_line_at_a_look(outputs, path):
    write(path, "".join(f"{CUDA} {n}\n" for n in range(1000)))
    assert texts(outputs.look()) == [f"{CUDA} 0"]


def test_bytes_that_are_no_text_and_lines_without_an_end_are_harmless(outputs, path):
    write(path, b"\xff\xfe\x00 \x80" + CUDA.encode() + b"\x00\n" + b"x" * 100_000 + b"\n")
    [text] = texts(outputs.look())
    assert CUDA in text
    assert "\x00" in text
    write(path, "CUDA error: " + "x" * 1_000_000 + "\n")
    assert outputs.look() == [], "its beginning was passed over"
    write(path, "CUDA error: " + "x" * 100_000 + "\n")
    assert [len(text) for text in texts(outputs.look())] == [LONGEST_LINE]


def test_who_is_gone_is_not_followed(outputs, path):
    outputs.forget("gpt-1")
    write(path, f"{CUDA}\n")
    assert outputs.look() == []


def worker(name, slot):
    return Worker.adopted(Running(worker=name, task="gpt", slot=slot, pid=slot + 10), 0.0)


def test_a_line_is_told_as_its_workers_once_in_a_while():
    hardware, workers = Hardware("n1"), [worker("gpt-1", 0), worker("gpt-2", 1)]

    def told(author, now=0.0):
        return hardware.hear(Logged(text=CUDA, status="cuda_error", author=author), workers, now)

    assert told("gpt-2") == [FaultLogged(node="n1", text=CUDA, slot=1, task="gpt", worker="gpt-2", printed=True)]
    assert told("gpt-2") == []
    assert len(told("gpt-1")) == 1
    assert told("gpt-9") == [], "it is gone"
    kernel = Logged(text="NVRM: Xid (PCI:0000:3b:00): 31", status="cuda_error", pid=11)
    assert hardware.hear(kernel, workers, 0.0)[0].printed is False, "what a worker wrote hides nothing of the kernel's"
