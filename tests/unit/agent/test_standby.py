"""The warm standby: what it does before it forks leaves CUDA alone, or none of its forks could use any; their names."""

import pytest
import torch
from helpers.standby import run
from unicron_agent.workers import standby
from unicron_agent.workers.warm import WITHOUT_GPU

from unicron.contracts.tasks import Healing, ParallelLayout
from unicron.healing import WAYS


@pytest.fixture
def counted(monkeypatch):
    """Times that CUDA was asked for its devices, by a torch that was built for it."""
    standby._warm_up()  # imports that would take its word for it
    found = []
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: found.append(1) or 0, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: torch.device("cuda"))
    for name in WITHOUT_GPU:
        monkeypatch.delenv(name, raising=False)
    return found


def test_the_standby_warms_up_without_a_look_at_gpus(counted, monkeypatch):
    for name, value in WITHOUT_GPU.items():
        monkeypatch.setenv(name, value)
    standby._warm_up()
    assert not counted


def test_without_its_variables_an_optimizer_s_first_step_looks(counted):
    standby._warm_up()
    assert counted


@pytest.mark.parametrize(
    ("worker", "comm"), [("gpt-2", "unicron gpt-2"), ("a-long-name-of-a-task-2", "ame-of-a-task-2")]
)
def test_a_worker_goes_by_its_name_where_processes_are_listed(worker, comm, tmp_path):
    reads = "print(open('/proc/self/comm').read(), end=open('/proc/self/cmdline').read().strip(chr(0))[:40])"
    (tmp_path / "script.py").write_text(reads)
    code, said = run(tmp_path / "script.py", UNICRON_WORKER=worker)
    assert (code, said) == (0, f"{comm}\n{f'unicron {worker}: {tmp_path}/script.py'[:40]}")


@pytest.mark.parametrize(
    ("text", "heal", "ahead"),
    [
        ("", Healing.RESTART, ()),
        ("", Healing.IN_PLACE, ("unicron.train.inplace.launch",)),
        ("from torch.distributed.fsdp import fully_shard", Healing.SESSION, standby.FOR_PARTS),
    ],
)
def test_what_a_worker_needs_is_imported_before_the_first_is_forked(text, heal, ahead, tmp_path):
    (tmp_path / "script.py").write_text(text)
    request = {"argv": ["script.py"], "cwd": str(tmp_path), "module": False, **WAYS[heal].launch(ParallelLayout())}
    assert standby._modules_needed(request) == ahead


LIKE_A_START = """
import gc, io, os, sys, time
import found

sys.stdout = io.StringIO()
sys.stdout = sys.__stdout__  # as scripts do that silence something for a while
sys.stderr = sys.__stderr__
gc.collect()
taken = open(os.devnull, "w")
print(found.__file__, sys.orig_argv[1:], time.tzname[0], taken.fileno() > 2, sys.stderr.errors)
"""


def test_a_script_finds_what_it_would_in_an_interpreter_that_has_just_started(tmp_path):
    for name in ("theirs", "own"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "found.py").write_text("")
    (tmp_path / "script.py").write_text(LIKE_A_START)
    environment = {"PYTHONPATH": f"own:{tmp_path / 'theirs'}", "TZ": "XYZ-3", "UNICRON_WORKER": "gpt-1"}
    code, said = run(tmp_path / "script.py", "--lr", **environment)
    words = f"{tmp_path}/own/found.py ['{tmp_path}/script.py', '--lr'] XYZ True backslashreplace\n"
    assert (code, said) == (0, words)
