"""`unicron run`: a program that knows nothing of Unicron, on this machine, healed as on a cluster."""

import asyncio
import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from msgspec.structs import replace
from unicron_deploy.embedded import Cluster
from unicron_deploy.ends_with import ends_with_us
from unicron_deploy.nats_server import free_port

from unicron.client import Client
from unicron.contracts.answers import Status, TaskView
from unicron.contracts.events import Alert, FailureDetected, ScriptDrilled, TaskRecovered
from unicron.contracts.tasks import Healing, NodeState, TaskSpec, TaskState
from unicron.errors import InvalidInputError, UnicronError
from unicron.healing import healed_by, way_of
from unicron.observe.words.story import describe, short
from unicron.service.bootstrap import connected_client
from unicron.taskfile import load
from unicron_cli.commit import with_commit
from unicron_cli.joined import JOIN_S, join
from unicron_cli.leading import OWN, Attendance, open_to_others
from unicron_cli.meeting import Meeting, Nodes
from unicron_cli.output import console
from unicron_cli.ranks import Ending, Ranks, Replacements

LOOK_S = 0.1
LONGEST = 400
"""Characters of a line that tells of a failure."""

LEAVING_S = 15.0
"""How long the other machines may take to leave."""


def run(
    command: Annotated[list[str], typer.Argument(help="The program and its arguments; a .py file is run by Python.")],
    nodes: Annotated[
        str,
        typer.Option(
            "--nodes", "--nnodes", metavar="N|MIN:MAX", help="Machines; without an endpoint agents of this one."
        ),
    ] = "1",
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
        bool,
        typer.Option("--in-place", help="Ranks that live stay where they are (docs/howto/in-place.md)."),
    ] = False,
    drill: Annotated[
        bool,
        typer.Option(
            "--drill", help="Only see whether another process can take a rank's place, in its first iterations."
        ),
    ] = False,
    task: Annotated[Path | None, typer.Option(metavar="FILE", help="Take all but COMMAND from a task file.")] = None,
    folder: Annotated[Path | None, typer.Option("--dir", help="Where logs and journal stay.")] = None,
    endpoint: Annotated[
        str,
        typer.Option(
            "--rdzv-endpoint",
            "--rdzv_endpoint",
            "--master-addr",
            "--master_addr",
            metavar="HOST[:PORT]",
            help="Run on several machines: this command on each. The one with that address begins, the others join.",
        ),
    ] = "",
    run_id: Annotated[
        str,
        typer.Option(
            "--rdzv-id",
            "--rdzv_id",
            metavar="ID",
            help="Distinguishes this run from others. [that of Slurm's job, or HOST-PORT]",
        ),
    ] = "",
    rank: Annotated[
        int | None,
        typer.Option("--node-rank", "--node_rank", min=0, help="0 begins, whatever address this machine has."),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where the first machine leaves the token for the others, seen by all."),
    ] = None,
    port: Annotated[int | None, typer.Option("--master-port", "--master_port", hidden=True)] = None,
    backend: Annotated[str, typer.Option("--rdzv-backend", "--rdzv_backend", hidden=True)] = "",  # noqa: ARG001 one is
    standalone: Annotated[bool, typer.Option("--standalone", hidden=True)] = False,  # noqa: ARG001 it always is
) -> None:
    """Run a distributed program on this machine as torchrun would, and again where it fails.

    Its checkpoints are its own; docs/howto/restart.md lists its variables, and what `unicron.train.watch` adds.
    """
    if folder is not None and (folder / "cluster.json").exists():
        raise InvalidInputError(f"--dir {folder}: a cluster has run there; give a folder that is new")
    words, number = worded(command, module=module), Nodes.parse(nodes)
    log = partial(console(err=True).print, soft_wrap=True)  # one line stays one
    if task is not None:
        spec = replace(load(task).spec, command=words)
    else:
        spec = spec_of(words, number.most * slots, least or number.least * slots, checkpoints)
    if not module and command[0].endswith(".py") and not Path(spec.workdir, command[0]).is_file():
        raise InvalidInputError(f"{command[0]}: no such file in {spec.workdir}")
    if spec.checkpoints and "://" not in spec.checkpoints:
        take_folder(Path(spec.checkpoints, f"{spec.name}.own"))
    if in_place or drill:
        spec = replace(healed_by(Healing.IN_PLACE, spec), drill=drill or spec.drill)
    if silence is not None:
        spec = replace(spec, silence_s=silence)
    # one machine's nodes are given up by nobody: what counts is whether it comes further
    os.environ |= {"UNICRON_ATTEMPTS": "1000", "UNICRON_NO_PROGRESS": str(restarts + 1), "UNICRON_COUNT_ALL": "true"}
    meeting = None
    if endpoint and number.most > 1:
        where = endpoint if port is None or ":" in endpoint else f"{endpoint}:{port}"
        meeting = Meeting.of(where, run_id, rank, token_file, os.environ)
        if not meeting.leads:
            with ends_with_us():
                code = join(meeting, slots, spec.name, log)
            raise typer.Exit(code)
    root = folder or Path(tempfile.mkdtemp(prefix="unicron-run-"))
    with ends_with_us():
        code = _run(Run(spec, number, slots, meeting, drill), root, log, remove=folder is None)
    raise typer.Exit(code)


def take_folder(own: Path) -> None:
    """Make the folder for a program's own checkpoints, and have it for this process alone until that ends.

    Only here: on a cluster a folder that is missing may not be mounted.

    Raises:
        InvalidInputError: it can't be made, or another run has it.
    """
    try:
        own.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInputError(f"--checkpoints: {own} can't be made: {error.strerror}; give another folder") from error
    with suppress(OSError):  # a file system without locks
        held = os.open(own, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(held)
            cure = "wait for its end, or give another folder"
            raise InvalidInputError(f"--checkpoints: another run writes its checkpoints to {own}; {cure}") from error


def worded(command: Sequence[str], *, module: bool) -> list[str]:
    """Return the words of a command, where torchrun's users leave the interpreter out."""
    if module:
        return ["python", "-m", *command]
    return ["python", *command] if command[0].endswith(".py") else list(command)


def spec_of(command: list[str], workers: int, least: int, checkpoints: Path | None) -> TaskSpec:
    """Return a task that runs a command."""
    script = next((word for word in command if word.endswith(".py")), command[0])
    called = command[2] if command[:2] == ["python", "-m"] else Path(script).stem
    spec = TaskSpec(
        name=re.sub(r"[^A-Za-z0-9_-]", "-", called)[:40] or "program",
        command=command,
        min_workers=least,
        max_workers=workers,
        workdir=str(Path.cwd()),
        checkpoints=str(checkpoints.resolve()) if checkpoints else "",
    )
    return healed_by(Healing.RESTART, spec)


class Run(NamedTuple):
    """A run: a task, on how many machines with how many ranks each, and their meeting, if there are several.

    Attributes:
        drill: it is over with the drill.
    """

    spec: TaskSpec
    nodes: Nodes
    slots: int
    meeting: Meeting | None = None
    drill: bool = False

    def cluster(self, root: Path) -> Cluster:
        """Return its cluster, which is to be started."""
        if self.meeting is None:
            return Cluster(root, self.nodes.most, self.slots, free_port())
        return Cluster(root, 1, self.slots, self.meeting.port, host=self.meeting.host)


def _run(what: Run, root: Path, log: Callable[[str], None], *, remove: bool) -> int:
    """Run a task on a cluster of its own; return the exit status."""
    cluster, spec, drill = what.cluster(root), what.spec, what.drill
    well = False
    try:
        with console(err=True).status("starting the cluster") as spinner:
            cluster.start(spinner.update)
            asyncio.run(cluster.wait_until_ready(on_step=spinner.update))
        fate = " (removed if it ends well; --dir keeps them)" if remove else ""
        log(f"unicron: {spec.max_workers} ranks; the cluster is at {cluster.url}, logs are in {root}{fate}")
        program = Program(cluster, what, log)
        view = asyncio.run(program.run())
        came = program.drilled
        well = view.state == "finished" if not drill else came is not None and not (came.problem or came.unproven)
        if not drill or came is None:
            log(f"unicron: {spec.name} {view.state}: {view.reason}")
            if way_of(spec).may_be_uncarried:
                log(f"unicron: in place: {program.replacements.outcome(came.outcome if came else '')}")
    finally:
        cluster.stop()
        if remove and well:
            shutil.rmtree(root, ignore_errors=True)
        elif not well:
            log(f"unicron: logs and journal are kept in {root}")
    return 0 if well else 1


def _up(status: Status) -> set[str]:
    return {view.node for view in status.nodes if view.state == NodeState.UP}


class Program:
    """A program on a cluster of its own.

    Args:
        cluster: that runs.
        what: is to be run.
        log: shows a line to a person.
        again: also what an earlier run in its folder wrote, and what befell it, is shown.

    Attributes:
        drilled: how that came out.
        replacements: of ranks that were lost.
    """

    def __init__(self, cluster: Cluster, what: Run, log: Callable[[str], None], *, again: bool = False) -> None:
        self._cluster, self._what, self._log = cluster, what, log
        self._spec, self._drill, self._again = what.spec, what.drill, again
        self._attendance = Attendance(what.nodes, JOIN_S)
        self.drilled: ScriptDrilled | None = None
        self.replacements = Replacements(self._spec.name, runs_again=way_of(self._spec).runs_again)
        self._passed, self._outcomes = False, set[tuple[str, str]]()
        named = self._spec.max_workers > 1
        self._ending = Ending(self._spec.name)
        self._ranks = Ranks(cluster.root, f"nodes/*/logs/{self._spec.name}-*.log", named=named, again=again)

    async def run(self) -> TaskView:
        """Submit it, and show what it writes and what befalls it until it has ended."""
        async with connected_client(self._cluster.settings(), "unicron-run") as client:
            since = -1 if self._again else await client.tail()
            await client.submit(with_commit(self._spec))
            following = asyncio.create_task(self._follow(client, since))
            try:
                if self._what.meeting is None:
                    return await self._show(client)
                async with open_to_others(
                    client, self._cluster.keys.authority.certificate, self._what.meeting, self._what.nodes
                ):
                    view = await self._show(client)
                await self._until_alone(client)
                return view
            finally:
                following.cancel()
                with suppress(asyncio.CancelledError):
                    await following

    async def _show(self, client: Client) -> TaskView:
        while True:
            self._ranks.write()
            with suppress(UnicronError):  # a service may be down just now
                status = await client.status()
                view = next(view for view in status.tasks if view.spec.name == self._spec.name)
                if self._what.meeting and (problem := self._attendance.problem(_up(status), time.monotonic())):
                    return replace(view, state=TaskState.FAILED, reason=problem)
                # what a script does behind its loop, such as writing its model, is part of its run
                if (view.state.ended and self._ending.over) or (self._drill and self.drilled is not None):
                    await asyncio.sleep(LOOK_S)
                    self._ranks.write()
                    return view
            await asyncio.sleep(LOOK_S)

    def _take_outcome(self, drilled: ScriptDrilled) -> None:
        """Keep the outcome of a drill: that a script can't be carried everywhere outlasts one that it passes."""
        passed = not (drilled.problem or drilled.unproven)
        if not (passed and self._passed and self.drilled is not None and self.drilled.unproven):
            self.drilled = drilled
        self._passed |= passed

    @property
    def _is_off(self) -> bool:
        """Whether a drill has shown that healing in place is off: no later one shows more."""
        return self.drilled is not None and bool(self.drilled.problem)

    async def _until_alone(self, client: Client) -> None:
        """Wait until the others have seen that it is over, and have gone; for so long only."""
        with suppress(TimeoutError, UnicronError):
            async with asyncio.timeout(LEAVING_S):
                while _up(await client.status()) - {OWN}:
                    await asyncio.sleep(LOOK_S)

    async def _follow(self, client: Client, since: int) -> None:
        """Print failures and recoveries, those behind a position of the journal: an earlier job has told the others."""
        async for position, message in client.follow():
            self._ending.observe(message)
            self._ranks.names.observe(message)
            told = self.replacements.observe(message)
            if position <= since:
                continue
            self._ranks.write()  # what ranks wrote before it, such as why they ended
            if isinstance(message, FailureDetected):
                self._log(f"unicron: {self._ranks.names.explain(short(str(message), LONGEST))}")
            elif isinstance(message, ScriptDrilled) and not (message.under_way or self._is_off):
                found = message.problem, message.unproven
                if found not in self._outcomes:
                    self._log(f"unicron: in place: {message.outcome}")
                self._outcomes.add(found)
                self._take_outcome(message)
            elif isinstance(message, Alert) and (message.task, message.source) == (self._spec.name, "transition"):
                self._log(f"unicron: {self._ranks.names.explain(message.text)}")
            elif isinstance(message, TaskRecovered) and told:
                text = self._ranks.names.explain(describe(message))
                self._log(f"unicron: {text}, {told}")
