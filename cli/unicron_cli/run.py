"""`unicron run`: a program that knows nothing of Unicron, on this machine, healed as on a cluster."""

import asyncio
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace
from unicron_deploy.embedded import Cluster
from unicron_deploy.nats_server import free_port

from unicron.bootstrap import connected_client
from unicron.client import Client
from unicron.contracts.events import FailureDetected, ScriptDrilled, TaskRecovered
from unicron.contracts.queries import TaskView
from unicron.contracts.tasks import UNCOUNTED, Healing, ParallelLayout, TaskSpec
from unicron.errors import InvalidInputError, UnicronError
from unicron.observe.words.story import describe
from unicron.taskfile import load
from unicron_cli.output import console, say

READY_S = 90.0
LOOK_S = 0.1
CHUNK = 1 << 20
"""Bytes of a worker's output that are read at once."""


def run(
    command: Annotated[list[str], typer.Argument(help="The program and its arguments; a .py file is run by Python.")],
    nodes: Annotated[int, typer.Option("--nodes", "--nnodes", min=1, max=64, help="Agents to start.")] = 1,
    slots: Annotated[
        int,
        typer.Option("--slots", "--nproc-per-node", "--nproc_per_node", min=1, max=64, help="Ranks of each of them."),
    ] = 1,
    least: Annotated[
        int, typer.Option("--min-workers", min=0, help="Go on with as few ranks where a node is lost; 0: with all.")
    ] = 0,
    module: Annotated[bool, typer.Option("-m", "--module", help="COMMAND is a Python module.")] = False,
    restarts: Annotated[
        int,
        typer.Option(
            "--max-restarts", "--max_restarts", min=0, help="Restarts in a row without progress, before it is given up."
        ),
    ] = 9,
    silence: Annotated[
        float | None,
        typer.Option(
            "--silence",
            min=0,
            metavar="SECONDS",
            help="Begin again where no rank shows a sign of life; 0: never. [1800]",
        ),
    ] = None,
    checkpoints: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the program finds UNICRON_CHECKPOINT_DIR.")
    ] = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Ranks that live stay where they are: docs/training.md says of what.")
    ] = False,
    drill: Annotated[
        bool,
        typer.Option(
            "--drill", help="Only see whether another process can take a rank's place, in its first iterations."
        ),
    ] = False,
    task: Annotated[Path | None, typer.Option(metavar="FILE", help="Take all but COMMAND from a task file.")] = None,
    folder: Annotated[Path | None, typer.Option("--dir", help="Where logs and journal stay.")] = None,
    standalone: Annotated[bool, typer.Option("--standalone", hidden=True)] = False,  # noqa: ARG001 it always is
) -> None:
    """Run a distributed program on this machine as torchrun would, and again where it fails.

    Its checkpoints are its own; docs/training.md says what it is told, and what `unicron.train.watch` adds.
    """
    if folder is not None and (folder / "cluster.json").exists():
        raise InvalidInputError(f"--dir {folder}: a cluster has run there; give a folder that is new")
    words = worded(command, module=module)
    if task is not None:
        spec = replace(load(task).spec, command=words)
    else:
        spec = spec_of(words, nodes * slots, least or nodes * slots, checkpoints)
    if not module and command[0].endswith(".py") and not Path(spec.workdir, command[0]).is_file():
        raise InvalidInputError(f"{command[0]}: no such file in {spec.workdir}")
    if in_place or drill:
        spec = replace(
            spec, heal=Healing.IN_PLACE, layout=ParallelLayout(shard=spec.max_workers), drill=drill or spec.drill
        )
    if silence is not None:
        spec = replace(spec, silence_s=silence)
    # one machine's nodes are given up by nobody: what counts is whether it comes further
    os.environ |= {"UNICRON_ATTEMPTS": "1000", "UNICRON_NO_PROGRESS": str(restarts + 1)}
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: the cluster ends too
    root = folder or Path(tempfile.mkdtemp(prefix="unicron-run-"))
    raise typer.Exit(_run(spec, root, nodes, slots, remove=folder is None, drill=drill))


def worded(command: Sequence[str], *, module: bool) -> list[str]:
    """Return the words of a command, where torchrun's users leave the interpreter out."""
    if module:
        return ["python", "-m", *command]
    return ["python", *command] if command[0].endswith(".py") else list(command)


def spec_of(command: list[str], workers: int, least: int, checkpoints: Path | None) -> TaskSpec:
    """Return a task that runs a command."""
    script = next((word for word in command if word.endswith(".py")), command[0])
    called = command[2] if command[:2] == ["python", "-m"] else Path(script).stem
    return TaskSpec(
        name=re.sub(r"[^A-Za-z0-9_-]", "-", called)[:40] or "program",
        command=command,
        min_workers=least,
        max_workers=workers,
        iterations=UNCOUNTED,
        workdir=str(Path.cwd()),
        checkpoints=str(checkpoints.resolve()) if checkpoints else "",
        heal=Healing.RESTART,
    )


def _run(spec: TaskSpec, root: Path, nodes: int, slots: int, *, remove: bool, drill: bool) -> int:
    """Run a task on a cluster of its own; return the exit status."""
    cluster = Cluster(root, nodes, slots, free_port())
    log = console(err=True).print
    well = False
    try:
        with console(err=True).status("starting the cluster") as spinner:
            cluster.start(spinner.update)
            asyncio.run(cluster.wait_until_ready(READY_S, spinner.update))
        log(f"unicron: {spec.max_workers} ranks; the cluster is at {cluster.url}, logs are in {root}")
        program = Program(cluster, spec, log, drill=drill)
        view = asyncio.run(program.run())
        well = view.state == "finished" if not drill else program.drilled is not None and not program.drilled.problem
        if program.drilled is None or not drill:
            came = f"; in its drill {program.drilled.outcome}" if program.drilled else "; there was no drill" * drill
            log(f"unicron: {spec.name} {view.state}: {view.reason}{came}")
    finally:
        cluster.stop()
        if remove and well:
            shutil.rmtree(root, ignore_errors=True)
        elif not well:
            log(f"unicron: logs and journal are kept in {root}")
    return 0 if well else 1


class Program:
    """A program on a cluster of its own.

    Args:
        cluster: that runs.
        spec: of the program.
        log: shows a line to a person.
        drill: it is over with the drill.

    Attributes:
        drilled: how that came out.
    """

    def __init__(self, cluster: Cluster, spec: TaskSpec, log: Callable[[str], None], *, drill: bool = False) -> None:
        self._cluster, self._spec, self._log, self._drill = cluster, spec, log, drill
        self.drilled: ScriptDrilled | None = None
        self._read = {path: path.stat().st_size for path in self._logs()}  # of an earlier run it was shown then

    async def run(self) -> TaskView:
        """Submit it, and show what it writes and what befalls it until it has ended."""
        async with connected_client(self._cluster.settings(), "unicron-run") as client:
            await client.submit(self._spec)
            following = asyncio.create_task(self._follow(client))
            try:
                return await self._show(client)
            finally:
                following.cancel()
                with suppress(asyncio.CancelledError):
                    await following

    async def _show(self, client: Client) -> TaskView:
        while True:
            self._write()
            with suppress(UnicronError):  # a service may be down just now
                view = next(view for view in (await client.status()).tasks if view.spec.name == self._spec.name)
                if view.state.ended or (self._drill and self.drilled is not None):
                    await asyncio.sleep(LOOK_S)
                    self._write()
                    return view
            await asyncio.sleep(LOOK_S)

    async def _follow(self, client: Client) -> None:
        """Tell of failures and recoveries."""
        failed = False
        async for _, message in client.follow():
            if isinstance(message, FailureDetected):
                failed = True
                self._log(f"unicron: {describe(message)}")
            elif isinstance(message, ScriptDrilled):
                self.drilled = message
                self._log(f"unicron: {describe(message)}")
            elif isinstance(message, TaskRecovered) and failed:
                self._log(f"unicron: {describe(message)}")

    def _logs(self) -> Iterable[Path]:
        return self._cluster.root.glob(f"nodes/*/logs/{self._spec.name}-*.log")

    def _write(self) -> None:
        """Write what the ranks have written since the last look, whole lines at a time."""
        for path in sorted(self._logs()):
            with path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._read.get(path, 0):
                    self._read[path] = 0  # it was too large, and is begun anew
                file.seek(self._read.get(path, 0))
                data = file.read(CHUNK)
            whole = data[: data.rfind(b"\n") + 1] or (data if len(data) == CHUNK else b"")
            self._read[path] = self._read.get(path, 0) + len(whole)
            for line in whole.decode(errors="replace").splitlines():
                say(f"{path.stem}: {line}" if self._spec.max_workers > 1 else line)
