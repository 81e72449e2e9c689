"""`unicron demo`: the main job on an embedded cluster, while faults strike it; and a report of how it healed."""

import asyncio
import contextlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text
from unicron_chaos.injection import Injection, run_script
from unicron_chaos.script import ScriptedFault, load
from unicron_deploy.embedded import Cluster
from unicron_deploy.ends_with import ends_with_us
from unicron_deploy.nats_server import free_port
from unicron_deploy.options import CONSOLE_PORT

from unicron.client import Client
from unicron.contracts.answers import Status
from unicron.contracts.base import Message, TimerFired
from unicron.contracts.events import Alert, DeadLetter, FailureDetected, IterationFinished, NodeAdmitted
from unicron.contracts.tasks import TaskSpec
from unicron.errors import InvalidInputError, UnicronError
from unicron.observe.words.story import story
from unicron.service.bootstrap import connected_client
from unicron_cli.output import console
from unicron_cli.report import DemoReport, TaskReport, fault_reports, is_ok, report_view
from unicron_cli.views import status_view

CHECKOUT = Path(__file__).parents[2]
SCRIPT = CHECKOUT / "examples" / "gpt" / "train.py"
FAULTS = CHECKOUT / "chaos" / "main-job.yaml"
ITERATIONS = 70
"""The last fault strikes in iteration 34, and has been healed before iteration 60 or so."""

MICROBATCHES = 8
LIMIT_S = 600.0
CHAIN_LINES = 14

THROUGHPUT = {1: 48e9, 2: 86e9, 3: 115e9, 4: 134e9}
"""T(t, x) of both tasks, FLOP/s, from a quiet machine: they share its cores, so that measuring here would mislead."""


def run_demo(json_path: Path | None, corpus: Path | None) -> int:
    """Run the main job; return 0 if it went as promised.

    Args:
        json_path: where to write the report as data.
        corpus: folder with the text to train on; None: the source of the Python standard library.

    Raises:
        InvalidInputError: this is no checkout, or the corpus can't be used.
    """
    if not SCRIPT.exists():
        raise InvalidInputError(f"{SCRIPT} is not there: run the demo in a checkout of the project")
    folder = (corpus or Path(sysconfig.get_path("stdlib"))).resolve()
    if not folder.is_dir():
        raise InvalidInputError(f"--corpus {folder}: no such folder; give one with .py, .txt or .md files")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="unicron-demo-") as name:
        demo = Demo(Path(name), folder, load(FAULTS))
        report = None
        try:
            with ends_with_us():
                report = asyncio.run(asyncio.wait_for(demo.run(began), LIMIT_S))
        finally:
            if report is None or not report.ok:
                console(err=True).print(f"not as promised; logs and journal are kept in {demo.keep()}")
    if json_path is not None:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    console().print(report_view(report))
    return 0 if report.ok else 1


class Demo:
    """One run of the demo in the folder `root`."""

    def __init__(self, root: Path, corpus: Path, script: Sequence[ScriptedFault]) -> None:
        self._root = root
        self._script = script
        self.cluster = Cluster(root / "cluster", nodes=3, slots=2, port=free_port(), console=CONSOLE_PORT)
        self._specs = [
            _spec(root, corpus, name="gpt-a", weight=1.0, seed=1),
            _spec(root, corpus, name="gpt-b", weight=2.0, seed=2),
        ]
        self.journal: list[Message] = []
        self._iterations: list[IterationFinished] = []
        self._injections: list[Injection] = []
        self._status = Status()
        self._doing = ""

    async def run(self, began: float) -> DemoReport:
        """Run it all; `began` is when, in monotonic seconds."""
        screen = console()
        with Live(console=screen, get_renderable=self._view, refresh_per_second=4, transient=not screen.is_terminal):
            try:
                await self._train()
            finally:
                self._say("stopping the cluster")
                self.cluster.stop(self._say)  # not in a thread: one that has not begun yet can be cancelled
            self._say("running the same tasks without failures, to compare")
            await self._run_undisturbed()
        tasks = [self._task_report(spec) for spec in self._specs]
        reports = fault_reports(self._injections, self.journal, self._iterations)
        return DemoReport(
            ok=is_ok(reports, tasks, {spec.name: spec.iterations for spec in self._specs}),
            faults=reports,
            tasks=tasks,
            seconds=time.monotonic() - began,
            machine=f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        )

    async def _train(self) -> None:
        """Start the cluster, submit the tasks, let the faults strike, and wait for the end."""
        await asyncio.to_thread(self.cluster.start, self._say)
        await self.cluster.wait_until_ready(120.0, self._say)
        async with connected_client(self.cluster.settings(), "unicron-demo") as client:
            jobs = [
                asyncio.create_task(job) for job in (self._follow(client), self._listen(client), self._poll(client))
            ]
            await asyncio.sleep(0.2)  # only current subscribers get telemetry
            for spec in self._specs:
                await client.submit(spec)
            self._say(f"training: look at {self.cluster.console_url}")
            try:
                await run_script(client, self._script, self._restart, self._on_injection)
                while not self._ended():
                    await asyncio.sleep(0.1)
                await asyncio.sleep(0.5)  # what was published last is still on its way here
            finally:
                for job in jobs:
                    job.cancel()
                ended = await asyncio.gather(*jobs, return_exceptions=True)
            for error in ended:
                if isinstance(error, Exception):
                    raise error

    def keep(self) -> Path:
        """Copy logs and journal to a folder that stays; return it."""
        kept = Path(tempfile.mkdtemp(prefix="unicron-demo-kept-"))
        shutil.copytree(self.cluster.root, kept, dirs_exist_ok=True, ignore=shutil.ignore_patterns("jetstream"))
        with (kept / "journal.jsonl").open("wb") as file:
            for message in self.journal:
                file.write(msgspec.json.encode(message) + b"\n")
        return kept

    # --- what is seen ------------------------------------------------------------------------------------------------

    async def _follow(self, client: Client) -> None:
        async for _, message in client.follow():
            self.journal.append(message)

    async def _listen(self, client: Client) -> None:
        async for message in client.telemetry(IterationFinished):
            if isinstance(message, IterationFinished):
                self._iterations.append(message)

    async def _poll(self, client: Client) -> None:
        while True:
            with contextlib.suppress(UnicronError):  # a service may be down just now
                self._status = await client.status()
            await asyncio.sleep(0.25)

    def _ended(self) -> bool:
        return len(self._status.tasks) == len(self._specs) and all(view.state.ended for view in self._status.tasks)

    def _say(self, text: str) -> None:
        if text != self._doing and not sys.stdout.isatty():
            console(err=True).print(text)
        self._doing = text

    def _on_injection(self, injection: Injection) -> None:
        self._injections.append(injection)
        self._say(f"fault {len(self._injections)} of {len(self._script)}: {injection.text}")

    async def _restart(self, node: str) -> None:
        await asyncio.to_thread(self.cluster.start_process, node)

    def _view(self) -> RenderableType:
        parts: list[RenderableType] = [Text(self._doing, "bold")]
        if self._status.nodes:
            parts.append(status_view(self._status))
        if chain := self._chain():
            parts += [
                Text("The chain of events", "bold"),
                *(Text(line, overflow="ellipsis", no_wrap=True) for line in chain),
            ]
        return Group(*parts)

    def _chain(self) -> list[str]:
        """Return the story of the last fault, from its first fact on."""
        if not self._injections:
            return []
        since = self._injections[-1].at
        causes = (FailureDetected, NodeAdmitted)
        cause = next((message for message in self.journal if message.at >= since and isinstance(message, causes)), None)
        if cause is None:
            return []
        chain = [message for message in self.journal if message.correlation == cause.correlation]
        shown = [message for message in chain if not isinstance(message, (Alert, DeadLetter, TimerFired))]
        return story(shown)[:CHAIN_LINES]

    # --- the result --------------------------------------------------------------------------------------------------

    async def _run_undisturbed(self) -> None:
        """Run each task as one plain process, of the same seed and without a cluster."""
        jobs = []
        for spec in self._specs:
            command = [sys.executable, *spec.command[1:-1], str(self._root / f"{spec.name}.undisturbed.pt")]
            command += ["--iterations", str(spec.iterations), "--microbatches", str(spec.microbatches)]
            with (self._root / f"{spec.name}.undisturbed.log").open("wb") as log:
                jobs.append(
                    await asyncio.create_subprocess_exec(
                        *command,
                        cwd=spec.workdir,
                        env={**os.environ, "OMP_NUM_THREADS": "1"},
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        try:
            for job, spec in zip(jobs, self._specs, strict=True):
                if await job.wait():
                    text = (self._root / f"{spec.name}.undisturbed.log").read_text()[-2000:]
                    raise InvalidInputError(f"the failure-free run of {spec.name} failed:\n{text}")
        finally:
            for job in jobs:
                if job.returncode is None:
                    job.kill()

    def _task_report(self, spec: TaskSpec) -> TaskReport:
        view = next((view for view in self._status.tasks if view.spec.name == spec.name), None)
        losses = {done.iteration: done.loss for done in self._iterations if done.task == spec.name}
        results = [self._root / f"{spec.name}.pt", self._root / f"{spec.name}.undisturbed.pt"]
        return TaskReport(
            name=spec.name,
            weight=spec.weight,
            state=str(view.state) if view else "unknown",
            iterations=view.iteration + 1 if view else 0,
            first_loss=losses.get(min(losses, default=0)),
            final_loss=losses.get(max(losses, default=0)),
            max_rel_diff=max_rel_diff(*results) if all(path.exists() for path in results) else None,
        )


def max_rel_diff(healed: Path, undisturbed: Path) -> float:
    """Return, over all tensors of two saved state dicts, the largest |a-b| over the largest |b|."""
    import torch  # noqa: PLC0415 - only the comparison needs it

    ours, theirs = (torch.load(path, weights_only=True) for path in (healed, undisturbed))
    if ours.keys() != theirs.keys():
        raise InvalidInputError(f"{healed} and {undisturbed} do not hold the same parameters")
    return max(
        float(
            (ours[name].double() - theirs[name].double()).abs().max()
            / theirs[name].double().abs().max().clamp_min(1e-30)
        )
        for name in theirs
    )


def _spec(root: Path, corpus: Path, *, name: str, weight: float, seed: int) -> TaskSpec:
    """Return a task of the demo; its last argument is where the parameters go."""
    return TaskSpec(
        name=name,
        weight=weight,
        min_workers=1,
        max_workers=4,
        microbatches=MICROBATCHES,
        iterations=ITERATIONS,
        command=[
            "python",
            str(SCRIPT),
            "--corpus",
            str(corpus),
            "--seed",
            str(seed),
            "--out",
            str(root / f"{name}.pt"),
        ],
        workdir=str(SCRIPT.parent),
        flops_per_iteration=6 * 391_008 * 64 * 8 * MICROBATCHES,
        throughput=THROUGHPUT,
    )
