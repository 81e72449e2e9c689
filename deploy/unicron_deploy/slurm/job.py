"""A job of Slurm that runs a task: starts the agents, hands over in time, and tells Slurm how it ended."""

import asyncio
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from unicron.client import Client
from unicron.contracts import time_limits
from unicron.contracts.answers import TaskView
from unicron.contracts.events import NodeDrained, NodeJoined, NodeLeaving
from unicron.contracts.tasks import NodeState, TaskState
from unicron.errors import InvalidInputError, UnicronError
from unicron.service.bootstrap import connected_client
from unicron.slurm import tools
from unicron.slurm.shown import NodeShown
from unicron_deploy.slurm.allocation import Allocation
from unicron_deploy.slurm.answers import Answers
from unicron_deploy.slurm.comment import Comment, state_of
from unicron_deploy.slurm.drains import DrainHere, Drains
from unicron_deploy.slurm.node import END, LEAVE
from unicron_deploy.slurm.outcome import UNFINISHED, Outcome, status_of
from unicron_deploy.slurm.servers import JobServers

LEAVE_S = time_limits.LEAVE_S
"""Seconds that an agent has to hand over, as in its settings."""

MARGIN_S = 15.0
"""Seconds from when the agents must be gone to the end of the job: for the servers, and for Slurm."""

LACKING_S = 60.0
"""Seconds for which a task that has computed may wait for nodes before its job is given up for another start of it."""

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""By which Slurm says that the job is to end."""


def srun(allocation: Allocation, root: Path, url: str) -> list[str]:
    """Return the command that starts an agent on each node of a job, of which any may be lost."""
    count = str(len(allocation.nodes))
    flags = [
        "--no-kill",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--overlap",
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={allocation.cpus}",
        "--cpu-bind=none",
        "--open-mode=append",
        f"--output={tools.literal(root)}/logs/node-%n.log",
    ]
    command = [sys.executable, "-P", "-m", "unicron_deploy.slurm.node", "--dir", str(root), "--url", url]
    return ["srun", *flags, *command, "--slots", str(allocation.slots)]


def step_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the step: what the batch script was given as defaults of srun is not for it."""
    dropped = ("SLURM_JOB_END_TIME", "SLURM_CPU_BIND", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK")
    kept = {name: value for name, value in environ.items() if name not in dropped and not name.startswith("SRUN_")}
    return {**kept, "PYTHONUNBUFFERED": "1"}


class Job:
    """A job whose servers run, from the start of its agents to their end.

    Args:
        allocation: that it has.
        servers: that run.
        names: what each of its nodes is called here.
        answers: of Slurm.
        comment: of the job.
        log: shows a line to a person.
        leave_s: seconds that agents have to hand over.

    Attributes:
        lacks_nodes: it was given up, as its task waited for nodes.
    """

    def __init__(
        self,
        allocation: Allocation,
        servers: JobServers,
        names: dict[str, str],
        answers: Answers,
        comment: Comment,
        log: Callable[[str], None],
        leave_s: float = LEAVE_S,
    ) -> None:
        self._allocation, self._servers, self._log, self._leave_s = allocation, servers, log, leave_s
        self._names, self._comment = names, comment
        self._seen: TaskView | None = None
        self._computed = False
        self._lacks_since: float | None = None
        self.lacks_nodes = False
        self._answers = answers
        self._drains = Drains(names)
        self._told, self._why = asyncio.Event(), ""
        self._end: float | None = None
        self._in_trouble = False

    async def run(self, training: Coroutine[Any, Any, TaskView]) -> Outcome:
        """Run until the task has ended, or the job is to: then its state is handed over and all agents have ended."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._tell, f"Slurm has sent {number.name}")
        command = srun(self._allocation, self._servers.root, self._servers.url)
        step = subprocess.Popen(  # noqa: ASYNC220 returns at once
            command, stdin=subprocess.PIPE, env=step_environment(os.environ), start_new_session=True
        )
        ended = asyncio.create_task(asyncio.to_thread(step.wait))
        trained = asyncio.create_task(training)
        beside = [asyncio.create_task(each) for each in (self._watch(), self._follow_drains())]
        told = asyncio.create_task(self._told.wait())
        try:
            await asyncio.wait({ended, trained, told}, return_when=asyncio.FIRST_COMPLETED)
            if not trained.done():
                self._order(step, LEAVE)
                await asyncio.wait({ended, trained}, return_when=asyncio.FIRST_COMPLETED)
            return await self._outcome(trained)
        finally:
            self._order(step, END)
            for each in (*beside, told, trained):
                each.cancel()
            await asyncio.gather(*beside, told, trained, return_exceptions=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(MARGIN_S):
                    await asyncio.shield(ended)
            step.kill()
            await ended
            # scancel may repeat itself, which would end us before Slurm is told how this ended. Blocked until they are
            # ignored, as the loop's own default comes between; and not only blocked, as a thread that is just ending
            # has a mask of its own
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            for number in SIGNALS:
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)

    async def _outcome(self, trained: asyncio.Task[TaskView]) -> Outcome:
        family = self._allocation.family
        if trained.done():
            view = trained.result()
            return Outcome(family=family, status=status_of(view), reason=view.reason)
        iteration = self._seen.iteration if self._seen else -1
        return Outcome(
            family=family,
            status=UNFINISHED,
            reason=self._why or "no agent of the job is left",
            iteration=iteration,
            blind=self._computed and iteration < 0,
            lacks_nodes=self.lacks_nodes,
        )

    def _tell(self, why: str) -> None:
        if not self._told.is_set():
            self._why = why
            self._log(f"unicron: {why}: the nodes hand over what they have")
        self._told.set()

    def _order(self, step: subprocess.Popen[bytes], order: str) -> None:
        """Say something to all agents; those that have ended do not mind."""
        if step.stdin is not None:
            with contextlib.suppress(OSError):
                step.stdin.write(f"{order}\n".encode())
                step.stdin.flush()

    # --- what Slurm says ---------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Look again and again when the job ends, and which nodes are drained."""
        while True:
            await self._look()
            now, pause_s = time.time(), self._answers.pause_s
            due = self._end - self._leave_s - MARGIN_S if self._end is not None else now + pause_s
            if due <= now:
                self._tell(f"the job ends in {max(0.0, (self._end or now) - now):.0f} s")
                return
            await asyncio.sleep(min(pause_s, due - now))

    async def _look(self) -> None:
        """Ask Slurm, and act on it. The controller may be away: what is known holds on, and it is asked again."""
        try:
            look = await asyncio.to_thread(self._answers.look)
            own = look.jobs.get(self._allocation.job)
            if own is not None:
                self._end = own.end
                self._comment.see(own.comment)
            await self._compare({name: look.nodes[name] for name in self._names if name in look.nodes})
        except (UnicronError, OSError) as error:
            if not self._in_trouble:
                self._log(
                    f"unicron: Slurm does not say when this job ends and which nodes are drained: {error}; "
                    "it is asked again"
                )
            self._in_trouble = True
        else:
            self._in_trouble = False

    async def _compare(self, nodes: dict[str, NodeShown]) -> None:
        """Drain here what is drained in Slurm, and tell in the job's comment what the task does."""
        async with connected_client(self._servers.settings(), "unicron-slurm") as client:
            status = await client.status()
            drained = {view.node for view in status.nodes if view.state == NodeState.DRAINING}
            await self._drain(client, self._drains.look(nodes, drained))
        for view in status.tasks:  # there is one
            self.see(view, time.monotonic())
            await asyncio.to_thread(self._comment.say, state_of(view))

    def see(self, view: TaskView, now: float) -> None:
        """Take note of the task; give the job up where it has computed and waits long for nodes: none comes to a job.

        Args:
            view: of the task.
            now: seconds of some clock.
        """
        self._seen = view
        self._computed = self._computed or view.state == TaskState.RUNNING
        if not (self._computed and view.state == TaskState.WAITING) or view.paused or view.withheld:
            self._lacks_since = None
        elif self._lacks_since is None:
            self._lacks_since = now
            self._log(
                f"unicron: {view.spec.name} waits: {view.reason}; if it still does in {LACKING_S:g} s, this job is "
                "requeued, to go on on other nodes (--spares and --min-workers let a job go on at once)"
            )
        elif now - self._lacks_since >= LACKING_S:
            self.lacks_nodes = True
            self._tell(f"{view.spec.name} has waited for {now - self._lacks_since:.0f} s: {view.reason}")

    async def _drain(self, client: Client, orders: list[DrainHere]) -> None:
        for order in orders:
            self._log(f"unicron: {order.node} {'is drained' if order.drain else 'is in use again'}: {order.why}")
            with contextlib.suppress(InvalidInputError):  # it is gone by now
                await client.drain(order.node, drain=order.drain)

    async def _follow_drains(self) -> None:
        """Drain in Slurm what people drain here from now on, if we may."""
        async with connected_client(self._servers.settings(), "unicron-slurm-drains") as client:
            async for _, message in client.follow(await client.tail()):
                if isinstance(message, NodeLeaving | NodeJoined):
                    self._drains.leaves(message.node, leaves=isinstance(message, NodeLeaving))
                elif isinstance(message, NodeDrained):
                    for order in self._drains.drained_here(message.node, drain=message.drain):
                        try:
                            await asyncio.to_thread(tools.run, ["scontrol", *order.words])
                        except UnicronError as error:
                            command = shlex.join(["scontrol", *order.words])
                            self._log(f"unicron: {order.node} stays as it is in Slurm: {error}: {command}")
