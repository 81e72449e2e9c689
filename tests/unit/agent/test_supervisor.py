"""By which interpreter a worker's program is run."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from helpers.accounts import start
from unicron_agent.workers.output import Outputs
from unicron_agent.workers.supervisor import Supervisor

from unicron.contracts.tasks import Healing, ParallelLayout, TaskSpec
from unicron.errors import InvalidInputError

OURS = Path(sys.executable)


class Standby:
    def __init__(self):
        self.asked = []

    async def fork(self, request):
        self.asked.append((request["module"], request["argv"]))
        return os.getpid()


@pytest.fixture
def run(tmp_path, monkeypatch):
    standby = Standby()
    supervisor = Supervisor(tmp_path / "run", {}, Outputs(lambda _: None), lambda _: None, standby)
    monkeypatch.setattr(supervisor, "_watch", lambda _: None)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "python").symlink_to(OURS)

    async def run(heal, *command):
        spec = TaskSpec(name="t", command=[*command], heal=heal, workdir=str(tmp_path), layout=ParallelLayout())
        await supervisor.start_worker(msgspec.structs.replace(start("t-1", "n1", 0), spec=spec), {})
        return standby.asked.pop()

    return run


@pytest.mark.parametrize("python", ["python", "python3", str(OURS.with_name("python"))])
async def test_a_script_is_run_by_the_interpreter_of_the_node(run, python):
    assert await run(Healing.IN_PLACE, python, "x.py", "--data", "y") == (False, ["x.py", "--data", "y"])
    assert await run(Healing.RESTART, python, "-m", "x", "y") == (True, ["x", "y"])


@pytest.mark.parametrize("python", ["other/python", "./other/python"])
async def test_another_interpreter_is_run_as_it_is_or_refused_where_it_would_not_be_healed(run, python):
    assert await run(Healing.RESTART, python, "x.py") == (None, [python, "x.py"])
    with pytest.raises(InvalidInputError, match=f"^{python} is not the interpreter .*: write `python`, and install"):
        await run(Healing.IN_PLACE, python, "x.py")


async def test_a_session_may_be_of_another_environment(run, monkeypatch):
    begun = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: begun.append(command) or type("P", (), {"pid": 1})())
    with pytest.raises(IndexError):  # the standby is asked for nothing
        await run(Healing.SESSION, "other/python", "x.py")
    assert begun == [["other/python", "x.py"]]
