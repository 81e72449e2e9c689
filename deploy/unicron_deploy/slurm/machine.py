"""`python -m unicron_deploy.slurm.machine`: the agent of a job that is one machine, told in time when the job ends.

Its settings are in the environment, as those of any agent. While the node has workers, the comment of the job names
their tasks.
"""

import argparse
import asyncio
import os
import signal
import sys
import time
from pathlib import Path

from unicron.errors import UnicronError
from unicron_deploy.slurm.allocation import JOB
from unicron_deploy.slurm.answers import Answers
from unicron_deploy.slurm.comment import Comment
from unicron_deploy.slurm.job import LEAVE_S, MARGIN_S
from unicron_deploy.slurm.node import Supervised


def tasks_in(run_dir: Path) -> list[str]:
    """Return the tasks of the workers that an agent has, by its records of them: each is called TASK-NUMBER."""
    names = (path.stem.rpartition("-")[0] for path in (run_dir / "workers").glob("*.json"))
    return sorted({name for name in names if name})


class Machine:
    """A job of one node, and its agent.

    Args:
        job: its number.
        run_dir: of its agent.
        leave_s: seconds that the agent has to hand over.
    """

    def __init__(self, job: str, run_dir: Path, leave_s: float) -> None:
        self._job, self._run_dir, self._leave_s = job, run_dir, leave_s
        self._agent = Supervised([sys.executable, "-m", "unicron_agent"], lambda text: _say(f"unicron: {text}"))
        self._answers = Answers(run_dir.parent, os.environ.get("SLURM_CLUSTER_NAME", ""))
        self._comment = Comment(job, _say, ours=True)

    async def run(self) -> int:
        """Run the agent until it ends, or is to, as the job or its node is; return its exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            loop.add_signal_handler(number, self._agent.tell, number)
        watch = asyncio.create_task(self._watch())
        try:
            return await self._agent.run()
        finally:
            watch.cancel()

    async def _watch(self) -> None:
        while True:
            due_s = self._answers.pause_s
            try:
                due_s = await asyncio.to_thread(self._look)
            except (UnicronError, OSError) as error:
                _say(f"unicron: Slurm does not say when job {self._job} ends: {error}")
            if due_s <= 0:
                self._agent.tell(signal.SIGUSR1)
                return
            await asyncio.sleep(min(self._answers.pause_s, due_s))

    def _look(self) -> float:
        """Return in how many seconds the agent is to begin to leave, and have the job's comment say what it does."""
        look = self._answers.look()
        if tasks := tasks_in(self._run_dir):
            self._comment.say(f"task {', '.join(tasks)}")
        node = look.nodes.get(os.environ.get("SLURMD_NODENAME", ""))
        if node is not None and node.drained:
            _say(f"unicron: {node.node} was drained in Slurm: {node.reason or 'no reason given'}")
            return 0.0
        job = look.jobs.get(self._job)
        return job.end - time.time() - self._leave_s - MARGIN_S if job and job.end else self._answers.pause_s


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def main() -> int:
    """Run the agent of this job; return its exit status."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="of the agent")
    options = parser.parse_args()
    os.environ.pop("SLURM_JOB_END_TIME", None)  # limits can be changed: the agent is told when it is time
    leave_s = float(os.environ.get("UNICRON_LEAVE_S") or LEAVE_S)
    return asyncio.run(Machine(os.environ.get(JOB, ""), options.run_dir, leave_s).run())


if __name__ == "__main__":
    sys.exit(main())
