"""What a step of a job runs on its node: a failed agent is started again, and orders reach it by the step's input."""

import asyncio
import os
import signal
import subprocess
import sys

from helpers.waiting import until
from unicron_deploy.slurm import node
from unicron_deploy.slurm.node import Supervised, agent_command

FAILS = 'echo "$$" >> started; exit 3'


async def test_an_agent_that_fails_is_started_again_until_it_is_told_to_end(tmp_path, monkeypatch):
    monkeypatch.setattr(node, "PAUSE_S", 0.01)
    monkeypatch.setattr(node, "LONGEST_PAUSE_S", 0.01)
    said = []
    supervised = Supervised(["sh", "-c", f"cd {tmp_path}; {FAILS}"], said.append)
    running = asyncio.create_task(supervised.run())
    await until(lambda: (tmp_path / "started").exists() and len((tmp_path / "started").read_text().split()) >= 3)
    supervised.tell(signal.SIGINT)
    await running
    assert said[0] == "the agent ended with status 3; it is started again in 0.01 s"


def test_an_order_reaches_the_agent_by_the_input_of_the_step(tmp_path):
    program = (
        "import asyncio, sys; from unicron_deploy.slurm.node import supervise; "
        f"sys.exit(asyncio.run(supervise([sys.executable, '-c', {AGENT!r}], print)))"
    )
    step = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert step.stdout.readline() == "waits\n"
    written, _ = step.communicate("nonsense\nleave\n")
    assert written == "told to leave\n"
    assert step.returncode == 0


AGENT = (
    "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1]); print('waits', flush=True); "
    "signal.sigwait([signal.SIGUSR1]); print('told to leave', flush=True)"
)


def test_keys_are_named_by_their_paths(tmp_path):
    words = agent_command(tmp_path, "nats://n1:4222", 2, "n1")
    assert words[words.index("--nats-nkey") + 1] == str(tmp_path / "keys/n1/n1.nk")
    assert words[words.index("--run-dir") + 1] == str(tmp_path / "nodes/n1")


def test_the_agent_does_not_leave_by_a_limit_that_can_be_raised(tmp_path, monkeypatch):
    async def sees_the_limit(*_):
        return "SLURM_JOB_END_TIME" in os.environ

    monkeypatch.setattr(node, "_run", sees_the_limit)
    monkeypatch.setattr(sys, "argv", ["node", "--dir", str(tmp_path), "--url", "nats://n1:4222", "--slots", "1"])
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1")  # as srun of Slurm 24.11 does
    assert not node.main()
