"""What is here: clusters, Slurm, containers, scripts, task files; and which command is the next one."""

import contextlib
import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text
from unicron_deploy.embedded import LAYOUT, Cluster
from unicron_deploy.ends_with import left_behind, owner_of
from unicron_deploy.options import PORT
from unicron_deploy.rights import OPERATOR
from unicron_deploy.slurm.folders import JobFolder, job_folder, job_folders, working
from unicron_deploy.slurm.outcome import FINISHED

from unicron.contracts.base import Record
from unicron.errors import UnicronError
from unicron.printable import shown
from unicron_cli.output import CONTAINERS, FOLDER, HOST

MOST, READ = 200, 200_000
"""Files of a folder that are looked at, and bytes of each."""

CONNECT_S = 0.5
"""How long the port of the containers, which is this machine's, may take to answer."""

JOBS = 3
"""Jobs that are shown, the newest."""

GROUPS = re.compile(
    rb"torch\.distributed|DistributedDataParallel|fully_shard|from accelerate|import (?:lightning|pytorch_lightning)"
    rb"|from (?:lightning|pytorch_lightning)|transformers import .*Trainer"
)
SESSION = re.compile(rb"from unicron\.train import .*Session")
TASK = re.compile(rb"^command:", re.MULTILINE), re.compile(rb"^name:", re.MULTILINE)


class Finding(Record, kw_only=True, frozen=True):
    """Something that is here, and the command that goes on from it.

    Attributes:
        name: of its kind, one word.
    """

    name: str
    found: str
    command: str


def findings(environ: Mapping[str, str]) -> list[Finding]:
    """Return what is in this folder and on this machine, what leads on first."""
    task, script = next(_task_files(), None), next(_scripts(), None)
    own, running = FOLDER.resolve(), clusters()
    jobs = job_folders(FOLDER / "slurm")
    near = [*_named(environ, task), *_own(environ, running, own, task), *_jobs(jobs)]
    running = {folder: pid for folder, pid in running.items() if folder not in {each.root.resolve() for each in jobs}}
    others = [folder for folder in running if folder != own]
    begun = [folder for folder in others if _begun_here(running[folder])]
    near += [finding for folder in begun for finding in _running(folder, running[folder])]
    stay = [folder for folder in others if owner_of(running[folder]) is None]  # the rest is of commands given elsewhere
    far = [finding for folder in stay for finding in _running(folder, running[folder], task)]
    return [*near, *_left(), *_slurm(environ, script), *_script(script), *_task(task, near + far), *_checkout(), *far]


def lead(found: list[Finding]) -> RenderableType:
    """Return what is here for a person; the last line is the next command."""
    lines = [
        part
        for each in found
        for part in (Text(f"{each.name}: {each.found}"), Text(f"    {each.command}", "bold", overflow="fold"))
    ]
    nothing = Text("here are no cluster, no Slurm, no script that trains on several ranks, and no task file")
    return Group(*(lines or [nothing]), Text(f"next: {next_command(found)}", "bold green", overflow="fold"))


def next_command(found: list[Finding]) -> str:
    """Return the command that goes on from what is here."""
    return found[0].command if found else "unicron run --nproc-per-node 2 SCRIPT.py"


def clusters() -> dict[Path, int]:
    """Return the folders of this user's embedded clusters that run here, and a NATS server of each, as process id."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().decode(errors="replace").split("\0")
            ours = path.parent.stat().st_uid == os.getuid()
            if ours and Path(words[0]).name == "nats-server" and words[1:2] == ["-c"]:
                found[Path(words[2]).parent.parent] = int(path.parent.name)
    return {folder: found[folder] for folder in sorted(found) if os.access(folder / LAYOUT, os.R_OK)}


def _named(environ: Mapping[str, str], task: Path | None) -> Iterator[Finding]:
    if url := environ.get("UNICRON_NATS_URL"):
        yield Finding(name="cluster", found=f"UNICRON_NATS_URL says that it is at {url}", command=_look(task))


def _own(environ: Mapping[str, str], running: Mapping[Path, int], own: Path, task: Path | None) -> Iterator[Finding]:
    """Yield the clusters that the commands reach from this folder: its own, and else that of the containers."""
    if own in running:
        yield from _running(own, running[own], task)
        return
    if _has_containers() and not environ.get("UNICRON_NATS_URL"):  # which may be theirs
        yield _containers(task)
    if (own / LAYOUT).exists():
        found = f"in {FOLDER}, which was stopped: `up` goes on with its tasks and options"
        yield Finding(name="cluster", found=found, command="unicron up")


def _has_containers() -> bool:
    return (CONTAINERS / "operator").exists()


def _containers(task: Path | None) -> Finding:
    """Return the cluster in containers whose key is here, and whether it runs."""
    with contextlib.suppress(OSError), socket.create_connection((HOST, PORT), CONNECT_S):
        return Finding(name="cluster", found=f"in containers: its key lies in {CONTAINERS}", command=_look(task))
    found = (
        f"in containers, which are stopped, as nothing listens at {HOST}:{PORT}: its key lies in {CONTAINERS} "
        "(`docker-compose up -d` if they were removed; UNICRON_NATS_URL if they have another port)"
    )
    return Finding(name="cluster", found=found, command="docker-compose start")


def _running(folder: Path, pid: int, task: Path | None = None) -> Iterator[Finding]:
    """Yield an embedded cluster that runs, and until when it does; what outlived its command is no cluster."""
    with contextlib.suppress(UnicronError):
        cluster, own = Cluster.load(folder), folder == FOLDER.resolve()
        needed = {"UNICRON_NATS_URL": "" if own else cluster.url}
        needed["UNICRON_NATS_NKEY"] = "" if own or cluster.insecure else str(cluster.keys.path(OPERATOR))
        reach = " ".join([*(f"{name}={value}" for name, value in needed.items() if value), _look(task)])
        owner = owner_of(pid)
        if job := job_folder(folder):
            yield Finding(
                name="job", found=f"{job.job} works in {folder} until `scancel {job.job}`", command=_reach(job)
            )
        elif owner is None:
            down = "unicron down" if own else f"unicron down --dir {folder}"
            yield Finding(name="cluster", found=f"runs in {folder} until `{down}`", command=reach)
        elif owner.alive():
            found = f"runs in {folder} until the command ends that has started it, process {owner.pid}"
            yield Finding(name="cluster", found=found, command=reach)


def _jobs(found: list[JobFolder]) -> Iterator[Finding]:
    """Yield the jobs of Slurm that work for this folder, and the last one if it has ended without being done."""
    alive = working(found)
    for each in alive[:JOBS]:
        command = "unicron status" if len(alive) == 1 else _reach(each)
        yield Finding(
            name="job", found=f"{each.job} runs {shown(each.what)} until `scancel {each.job}`", command=command
        )
    last = found[0] if found else None
    if last and last not in alive and (last.ended is None or last.ended.status != FINISHED):
        how = shown(last.ended.reason) if last.ended else "it was killed, or cancelled, before it could say how"
        text = f"{last.job}, {shown(last.what)}, has ended: {how}; its output is slurm-{last.job}.out"
        yield Finding(name="job", found=text, command=f"tail -n 50 {last.root}/nodes/*/logs/{last.task}-*.log")


def _reach(job: JobFolder) -> str:
    return f"UNICRON_NATS_URL={job.url} UNICRON_NATS_NKEY={job.key} unicron status"


def _begun_here(pid: int) -> bool:
    """Return whether a command that was given in this folder, such as `unicron run`, has a cluster with this server."""
    owner = owner_of(pid)
    with contextlib.suppress(OSError):
        return owner is not None and owner.alive() and Path(f"/proc/{owner.pid}/cwd").samefile(Path.cwd())
    return False


def _look(task: Path | None) -> str:
    return f"unicron submit {task}" if task else "unicron status"


def _left() -> Iterator[Finding]:
    if left := left_behind():
        found = f"{len(left)} processes outlived the command that had started them, and was to end them"
        yield Finding(name="remains", found=found, command=f"kill -KILL {' '.join(str(each.pid) for each in left)}")


def _slurm(environ: Mapping[str, str], script: Path | None) -> Iterator[Finding]:
    program = script or "SCRIPT.py"
    if job := environ.get("SLURM_JOB_ID"):
        found = f"this is job {job}: it runs the program on its nodes"
        yield Finding(name="Slurm", found=found, command=f"unicron slurm run -- {program}")
    elif shutil.which("sbatch"):
        found = "jobs are submitted from here: each has a cluster of its own, and heals"
        yield Finding(name="Slurm", found=found, command=f"unicron slurm run --nodes=2 -- {program}")


def _script(script: Path | None) -> Iterator[Finding]:
    if script is not None:
        found = "trains on several ranks: it runs as under torchrun, and begins again where it fails"
        yield Finding(name="script", found=found, command=f"unicron run --nproc-per-node {ranks_here()} {script}")


def ranks_here() -> int:
    """Return how many ranks to begin with: one a GPU, or two."""
    return len(list(Path("/dev").glob("nvidia[0-9]*"))) or 2


def _task(task: Path | None, clusters: list[Finding]) -> Iterator[Finding]:
    if task is not None and not clusters:
        found = f"{task} is for a cluster, and none is here"
        yield Finding(name="task", found=found, command=f"unicron up && unicron submit {task}")


def _checkout() -> Iterator[Finding]:
    if Path("docker-compose.yml").exists() and Path("examples/gpt/task.yaml").exists():
        found = "the checkout of Unicron: two small models train here, while faults strike them"
        yield Finding(name="demo", found=found, command="unicron demo")
        if shutil.which("docker") and not _has_containers() and _engine_answers(os.environ):
            found = "a container engine: the cluster of docker-compose.yml (docs/start/containers.md has its key)"
            yield Finding(name="containers", found=found, command="docker-compose up --build -d")


def _engine_answers(environ: Mapping[str, str]) -> bool:
    """Return whether a container engine runs, as far as a look at its socket shows; one elsewhere is believed to."""
    given = environ.get("DOCKER_HOST", "")
    if given and not given.startswith("unix://"):
        return True
    own = f"{environ.get('XDG_RUNTIME_DIR', '/run/user/0')}/docker.sock"
    for path in (given.removeprefix("unix://"),) if given else ("/var/run/docker.sock", own):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as engine:
            engine.settimeout(CONNECT_S)
            engine.connect(path)
            return True
    return False


def _scripts() -> Iterator[Path]:
    """Yield the scripts of this folder that train on several ranks by themselves, those called train first."""
    for path in sorted(_files("*.py"), key=lambda path: ("train" not in path.name, path.name)):
        text = _head(path)
        if GROUPS.search(text) and not SESSION.search(text):
            yield path


def _task_files() -> Iterator[Path]:
    for path in _files("*.y*ml"):
        if all(part.search(_head(path)) for part in TASK):
            yield path


def _files(pattern: str) -> list[Path]:
    return sorted(Path().glob(pattern))[:MOST]


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(READ)
    except OSError:  # a folder of that name, say
        return b""
