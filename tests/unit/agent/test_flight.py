"""Reports of collectives that hang: real ones of gloo, asked from within, and torch's own file of them."""

import json
import logging
import os
import pickle
import subprocess
import sys
import time

import pytest
from unicron_agent.workers import flight
from unicron_agent.workers.flight import MOST_BYTES, RECENT_S, VARIABLES, dump_variables, load_plain_pickle, read_dump

from unicron.errors import InvalidInputError
from unicron.flight import is_of_library

SCRIPT = """
import json, os, sys, threading
import torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace
from unicron.train.worker.flight import collectives
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
dist.all_reduce(torch.ones(1024))
dist.all_reduce(torch.ones(1024))
def dump():
    while collectives()[0].startswith("none"):
        pass
    with open(f"{folder}/gpt-3.collectives.0", "wb") as file:
        file.write(_dump_fr_trace())
    print(json.dumps(collectives()), flush=True)
    os._exit(0)
while not collectives()[0].startswith("none"):  # gloo's thread notes that it is done a moment after it is
    pass
if rank:
    print(json.dumps(collectives()), flush=True)
    sys.stdin.read()
    os._exit(0)
threading.Thread(target=dump).start()
dist.broadcast(torch.ones(2, 3), 1)
"""

WAITS = "broadcast #3 of default_pg, 6 x Float, scheduled, train.py:24; the last of them that was done: all_reduce #2"


@pytest.fixture(scope="module")
def hung(tmp_path_factory):
    """A folder with what torch wrote of the first of two ranks, which the second has left alone, and what both said."""
    folder = tmp_path_factory.mktemp("logs")
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, script]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "1", folder], **pipes) as other:
        first = subprocess.run([*command, "0", folder], stdout=subprocess.PIPE, text=True, check=True)
        said, _ = other.communicate()
    return folder, json.loads(first.stdout), json.loads(said)


def test_who_waits_says_for_which_collective_and_who_does_not_which_was_its_last(hung):
    _, waits, idle = hung
    assert waits == [WAITS]
    assert idle == ["none; the last that was done: all_reduce #2 of default_pg"]


def test_the_file_that_torch_writes_says_the_same_as_long_as_it_is_new(hung):
    prefix = hung[0] / "gpt-3.collectives"
    now = (hung[0] / "gpt-3.collectives.0").stat().st_mtime
    assert read_dump(prefix, now) == (WAITS,)
    assert read_dump(prefix, now + RECENT_S + 1) == ()
    assert read_dump(hung[0] / "gpt-33.collectives", now) == ()


class Runs:
    def __reduce__(self):
        return os.mkdir, ("pwned",)


ENTRY = {"record_id": 1, "process_group": ("0", "default_pg"), "profiling_name": "nccl:all_reduce", "frames": []}
ENTRY |= {"collective_seq_id": 7, "p2p_seq_id": 0, "is_p2p": False, "state": "started", "retired": True}
ENTRY |= {"input_sizes": [[4, 5], [2]], "input_dtypes": ["Float", "Float"]}
SHARED = [ENTRY] * 500_000

BAD = {
    "names code": pickle.dumps({"entries": [Runs()]}),
    "names a class": pickle.dumps({"entries": [Runs]}),
    "persistent": b"\x80\x02K\x01Q.",
    "memory": b"\x80\x02]r\xff\xff\xff\x7f.",
    "length": b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x00x.",
    "empty": b"",
    "noise": b"\x00\x01\x02" * 99,
    "stack": b"\x80\x02.",
    "list": pickle.dumps([1]),
    "entries": pickle.dumps({"entries": [1]}),
    "lacks": pickle.dumps({"entries": [{"record_id": 1}]}),
    "state": pickle.dumps({"entries": [ENTRY | {"state": "odd"}]}),
    "sizes": pickle.dumps({"entries": [ENTRY | {"input_sizes": [["4"]]}]}),
    "a large number": pickle.dumps({"entries": [ENTRY | {"input_sizes": [[2**40000]]}]}),
    "frames": pickle.dumps({"entries": [ENTRY | {"frames": [3]}]}),
    "many": pickle.dumps({"entries": SHARED}),
    "huge": pickle.dumps({"entries": [], "more": b"x" * MOST_BYTES}),
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
def test_of_a_bad_file_one_line_says_what_is_wrong_and_nothing_is_run(tmp_path, monkeypatch, caplog, data):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w.collectives.0").write_bytes(data)
    began = time.process_time()
    assert read_dump(tmp_path / "w.collectives", time.time()) == ()
    assert time.process_time() - began < 5.0
    [record] = [each for each in caplog.records if each.levelno >= logging.WARNING and each.name == flight.__name__]
    assert str(tmp_path / "w.collectives.0") in record.getMessage()
    assert "\n" not in record.getMessage()
    assert not (tmp_path / "pwned").exists()


def test_a_file_that_ends_in_the_middle_is_refused_wherever_it_ends(hung, tmp_path):
    whole, cut = (hung[0] / "gpt-3.collectives.0").read_bytes(), tmp_path / "cut"
    for end in range(0, len(whole), 97):
        cut.write_bytes(whole[:end])
        with pytest.raises(InvalidInputError):
            load_plain_pickle(cut)


def test_of_nccls_entries_one_that_timed_out_is_told_though_torch_waits_for_it_no_more(tmp_path):
    done = ENTRY | {"state": "completed", "collective_seq_id": 6}
    sends = ENTRY | {"is_p2p": True, "p2p_seq_id": 2, "profiling_name": "nccl:send 0->1", "process_group": ("1", "")}
    (tmp_path / "w.1").write_bytes(pickle.dumps({"version": "2.10", "entries": [done, ENTRY, *[sends] * 9]}))
    first, second, *_, more = read_dump(tmp_path / "w", time.time())
    assert first == "all_reduce #7 of default_pg, 22 x Float, started; the last of them that was done: all_reduce #6"
    assert second == "send 0->1 #2 of 1, 22 x Float, started"
    assert more == "and 2 more"


def test_names_that_would_steer_a_terminal_or_are_no_text_are_escaped(tmp_path):
    (tmp_path / "w.1").write_bytes(pickle.dumps({"entries": [ENTRY | {"process_group": ("0", "\ud800\n\x1b")}]}))
    [line] = read_dump(tmp_path / "w", time.time())
    assert line.startswith(r"all_reduce #7 of \ud800\n\u001b, 22 x Float")


def test_torch_is_told_where_to_write_unless_somebody_has_said_so(tmp_path):
    old = tmp_path / "gpt-1.collectives.5"
    old.touch()
    told = dump_variables(tmp_path / "gpt-1.collectives", {"PATH": "/bin"}, {})
    assert told == dict.fromkeys(VARIABLES, f"{tmp_path}/gpt-1.collectives.")
    assert not old.exists(), "of an earlier worker"
    for name in VARIABLES:
        assert (
            dump_variables(tmp_path / "x", {}, {name: "/mine"})
            == dump_variables(tmp_path / "x", {name: "/mine"}, {})
            == {}
        )


@pytest.mark.parametrize(
    ("filename", "of_library"),
    [
        (json.__file__, True),
        (pytest.__file__, True),
        ("/usr/lib/python3/dist-packages/torch/autograd/graph.py", True),  # of an environment that this one may use
        ("/home/a/.local/lib/python3.12/site-packages/torch/nn/modules/module.py", True),
        ("<frozen runpy>", True),
        (__file__, False),
        ("/data/packages/train.py", False),
    ],
)
def test_what_is_installed_is_no_scripts_in_whichever_environment(filename, of_library):
    assert is_of_library(filename) is of_library
