"""`unicron slurm`: a task as a job of Slurm, with a cluster of its own."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
from msgspec.structs import replace
from rich.console import Console
from unicron_deploy.slurm import job as jobs
from unicron_deploy.slurm import queue
from unicron_deploy.slurm.allocation import JOB, Allocation, node_names
from unicron_deploy.slurm.answers import Answers
from unicron_deploy.slurm.comment import Comment
from unicron_deploy.slurm.handover import Ending
from unicron_deploy.slurm.outcome import Outcome
from unicron_deploy.slurm.ownership import Claim, Owner, claim, claim_given
from unicron_deploy.slurm.script import batch_script, checked
from unicron_deploy.slurm.servers import JobServers, own_address

from unicron.contracts.tasks import Healing, TaskSpec
from unicron.errors import InvalidInputError
from unicron.healing import PYTHON, healed_by
from unicron.slurm import shown, tools
from unicron.taskfile import load
from unicron_cli.meeting import Nodes
from unicron_cli.output import console, say, warn
from unicron_cli.run import Program, Run, spec_of, worded

STEP, BATCH_STEPS = "SLURM_STEP_ID", 0xFFFFFFF0
"""The number of a step; those that Slurm itself begins, for a script or a shell, have greater ones."""

STARTERS = PYTHON | {"torchrun"}
"""Programs whose first argument, if it is no option, is a script."""

COMMAND = "unicron.command"
"""Under this click keeps what stands behind `--`."""


class WithCommand(typer.core.TyperCommand):
    """A command with options of its own, options of sbatch, and maybe a program behind `--`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the program off first: what is in it is nobody's option here."""
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[COMMAND] = args[at + 1 :]
        return super().parse_args(ctx, args[:at])


app = typer.Typer(no_args_is_help=True)
SETTINGS = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": ["--help"]}

Dir = Annotated[
    Path | None,
    typer.Option(
        "--dir", resolve_path=True, help="Folder that all nodes see, for keys, journal and logs. [.unicron/slurm/JOB]"
    ),
]
UntilDone = Annotated[
    bool, typer.Option("--until-done", help="At its time limit the job is requeued, until its task is done.")
]
Slots = Annotated[int, typer.Option("--nproc-per-node", min=0, help="Ranks of each node; 0: its GPUs, else its tasks.")]


@app.command(cls=WithCommand, context_settings=SETTINGS)
def run(
    ctx: typer.Context,
    least: Annotated[
        int, typer.Option("--min-workers", min=0, help="Go on with as few ranks where a node is lost; 0: with all.")
    ] = 0,
    spares: Annotated[int, typer.Option("--spares", min=0, help="Nodes of the job that wait for another's loss.")] = 0,
    in_place: Annotated[bool, typer.Option("--in-place", help="Ranks that live stay where they are.")] = False,
    checkpoints: Annotated[
        Path | None,
        typer.Option(metavar="DIR", resolve_path=True, help="Where the program finds UNICRON_CHECKPOINT_DIR."),
    ] = None,
    task: Annotated[
        Path | None, typer.Option(metavar="FILE", resolve_path=True, help="Take all but the program from a task file.")
    ] = None,
    slots: Slots = 0,
    root: Dir = None,
    until_done: UntilDone = False,
) -> None:
    """Run a program as a job: unicron slurm run [OPTIONS] [OPTIONS OF sbatch] -- PROGRAM ARGUMENTS.

    Within a job, one of sbatch or salloc, it is run there.
    """
    program: list[str] = ctx.meta[COMMAND]
    if not program:
        raise InvalidInputError("no program: write it behind `--`, as in: unicron slurm run --nodes=2 -- train.py")
    words = worded(program, module=False)
    if not within(ctx.args):
        check_script(program, ctx.args)
        submit_again(ctx, ctx.args, spec_of(words, 1, 1, None).name, "--", *program)
        return
    allocation = Allocation.read(os.environ, slots)
    ranks = (len(allocation.nodes) - spares) * allocation.slots
    if ranks < 1:
        raise InvalidInputError(f"--spares {spares}: the job has {len(allocation.nodes)} nodes, and one must compute")
    if task is not None:
        spec = replace(load(task).spec, command=words)
    else:
        spec = spec_of(words, ranks, least or ranks, checkpoints)
    if in_place:
        spec = healed_by(Healing.IN_PLACE, spec)
    raise typer.Exit(_run(allocation, spec, root, until_done=until_done))


@app.command(cls=WithCommand, context_settings=SETTINGS)
def submit(
    ctx: typer.Context,
    slots: Slots = 0,
    root: Dir = None,
    until_done: UntilDone = False,
) -> None:
    """Run the task of a task file as a job: unicron slurm submit [OPTIONS] [OPTIONS OF sbatch] FILE."""
    if not ctx.args:
        raise InvalidInputError("no task file: unicron slurm submit [OPTIONS] [OPTIONS OF sbatch] FILE")
    *options, file = ctx.args
    spec, warnings = load(Path(file))
    for warning in warnings:
        warn(warning)
    check_storage(spec)
    if not within(options):
        submit_again(ctx, options, spec.name, str(Path(file).resolve()))
        return
    allocation = Allocation.read(os.environ, slots)
    spec = replace(spec, resume=bool(spec.checkpoints))
    raise typer.Exit(_run(allocation, spec, root, until_done=until_done))


def check_storage(spec: TaskSpec) -> None:
    """Refuse a task whose state can't be written: it would be lost with the job.

    Raises:
        InvalidInputError: there is no such folder.
    """
    if spec.checkpoints and "://" not in spec.checkpoints and not Path(spec.checkpoints).is_dir():
        raise InvalidInputError(f"checkpoints {spec.checkpoints!r}: no such folder; make it where all nodes see it")


def check_script(program: Sequence[str], options: Sequence[str]) -> None:
    """Refuse a script that is not there: the job would wait for its turn only to say so.

    Raises:
        InvalidInputError: there is no such file.
    """
    script = program[1] if program[0] in STARTERS and len(program) > 1 else program[0]
    elsewhere = any(option.startswith(("-D", "--chdir")) for option in options)
    if script.endswith(".py") and not elsewhere and not Path(script).is_file():
        raise InvalidInputError(f"there is no {script!r} in {Path.cwd()}: name a script that all nodes of the job see")


def within(options: Sequence[str]) -> bool:
    """Return whether this is a job, in which the task is to be run."""
    if not os.environ.get(JOB):
        return False
    if int(os.environ.get(STEP) or BATCH_STEPS) < BATCH_STEPS:
        raise InvalidInputError(
            "this is a step, of srun: leave `srun` out, as `unicron slurm run` starts a process on each node by itself"
        )
    if options:
        raise InvalidInputError(
            f"{' '.join(options)}: this is job {os.environ[JOB]} already; leave options of sbatch out, or write them "
            "as #SBATCH lines"
        )
    return True


def submit_again(ctx: typer.Context, options: Sequence[str], name: str, *behind: str) -> None:
    """Submit a job in which this same command is called, without the options of sbatch.

    Args:
        ctx: of the command.
        options: of sbatch.
        name: of the task; the job is called so.
        behind: what stands behind the command's own options.
    """
    given, changes = checked(options, tools.version())
    for change in changes:
        warn(change)
    words = [sys.executable, "-P", "-m", "unicron_cli", "slurm", ctx.command.name or "", *own_options(ctx), *behind]
    requeued = ["--requeue"] if ctx.params["until_done"] else []
    say(f"submitted job {_sbatch([f'--job-name={name}', *requeued, *given], batch_script(words))}")


def own_options(ctx: typer.Context) -> list[str]:
    """Return the options of a command that were given, without those that it does not know."""
    found = []
    for parameter in ctx.command.params:
        name = parameter.name or ""
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            value = ctx.params[name]
            found += [parameter.opts[0]] if value is True else [parameter.opts[0], str(value)]
    return found


def _sbatch(options: Sequence[str], script: str) -> str:
    """Submit a script; return the number of its job."""
    import tempfile  # noqa: PLC0415

    with tempfile.NamedTemporaryFile("w", encoding="utf-8", errors="surrogateescape", suffix=".sh") as file:
        file.write(script)
        file.flush()
        return shown.submitted(tools.run(["sbatch", "--parsable", *options, file.name]))


def _run(allocation: Allocation, spec: TaskSpec, given: Path | None, *, until_done: bool) -> int:
    """Run a task on a cluster of its own in this job; return the exit status."""
    log = partial(_log, console(err=True))
    claimed = _claimed(allocation, spec, given)
    if claimed.note:
        log(f"unicron: {claimed.note}")
    if claimed.before is not None and claimed.before.settles(allocation.family):
        log(f"unicron: {spec.name} has ended before, in {claimed.root}: {claimed.before.reason}")
        return claimed.before.status
    again = queue.overwrites(os.environ)
    if again:
        shown_again = "; what its ranks wrote before follows" if allocation.restarts else ""
        log(
            f"unicron: add #SBATCH --open-mode=append: Slurm overwrites this output as it requeues the job{shown_again}"
        )
    nodes = node_names(allocation.nodes)
    servers = JobServers(claimed.root, _address(allocation), list(nodes.values()))
    comment = Comment(allocation.job, log)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    servers.prepare()
    try:
        servers.start()
        asyncio.run(servers.wait_until_ready())
        log(
            f"unicron: job {allocation.job}: {len(nodes)} nodes of {allocation.slots} slots for {spec.name}; "
            f"the cluster is at {servers.url}, all of it in {claimed.root}"
        )
        leave_s = float(os.environ.get("UNICRON_LEAVE_S") or jobs.LEAVE_S)
        answers = Answers(claimed.root if given else claimed.root.parent, allocation.cluster)
        job = jobs.Job(allocation, servers, nodes, answers, comment, log, leave_s)
        program = Program(servers, Run(spec, Nodes(len(nodes), len(nodes)), allocation.slots), log, again=again)
        ended = asyncio.run(_trained(job, program))
    finally:
        servers.stop()
    return Ending(allocation, claimed, spec.name, until_done, comment, log).tell(ended)


async def _trained(job: jobs.Job, program: Program) -> Outcome:
    return await job.run(program.run())


def _claimed(allocation: Allocation, spec: TaskSpec, given: Path | None) -> Claim:
    """Have a folder for this job."""
    known = queue.own_jobs()
    own = Owner(
        cluster=allocation.cluster,
        family=allocation.family,
        job=allocation.job,
        submitted=queue.this_job(known, allocation).submitted,
        restarts=allocation.restarts,
        spec=spec,
    )
    if given is not None:
        return claim_given(given, own)
    return claim((allocation.submitted_in / ".unicron" / "slurm").resolve(), own, queue.alive(known))


def _log(screen: Console, line: str) -> None:
    """Print a line with the time, for those who read it the next morning."""
    clock = time.strftime("%H:%M:%S")
    screen.print(line.replace("unicron: ", f"unicron: {clock} ", 1), soft_wrap=True)  # one line stays one


def _address(allocation: Allocation) -> str:
    """Return the address at which the other nodes of a job reach this one."""
    shown_nodes = tools.ask("scontrol", "--oneliner", "show", "node", ",".join(allocation.nodes[:2]))
    others = shown.addresses(shown_nodes)
    return own_address(others[allocation.nodes[-1 if len(allocation.nodes) == 1 else 1]])
