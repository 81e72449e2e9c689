"""The contract of every provider: one machine for each id, even if a request is repeated."""

import os
import sys
from contextlib import asynccontextmanager, contextmanager, nullcontext

import pytest
from helpers import docker
from helpers.ports import free_port
from helpers.slurm import missing, slurm
from unicron_provisioner.config import load
from unicron_provisioner.providers.protocol import MachineRequest

pytestmark = pytest.mark.real

PROGRAM = """#!{python}
import json, pathlib, sys
verb, given = sys.argv[-1], json.load(sys.stdin)
folder = pathlib.Path({folder!r})
if verb == "list":
    print(json.dumps({{"machines": [json.loads(each.read_text()) for each in sorted(folder.glob("*.json"))]}}))
elif verb == "ask":
    if len(list(folder.glob("*.json"))) >= 3 and not (folder / (given["machine"] + ".json")).exists():
        print("three are in use", file=sys.stderr)
        sys.exit(75)
    (folder / (given["machine"] + ".json")).write_text(json.dumps({{"machine": given["machine"], "state": "running"}}))
elif verb == "release":
    (folder / (given["machine"] + ".json")).unlink(missing_ok=True)
"""


def command(folder):
    """Return the table of a pool whose machines are files that a program writes."""
    (folder / "there").mkdir()
    program = folder / "machines"
    program.write_text(PROGRAM.format(python=sys.executable, folder=str(folder / "there")))
    program.chmod(0o700)
    return 'provider = "command"\n[pool.p.command]\nprogram = ["machines"]'


def local(folder):
    """Return the table of a pool of agents, which find no bus and try on."""
    return 'provider = "local"\n[pool.p.local]\nenv = {UNICRON_CONNECT_TIMEOUT_S = "600"}'


def jobs(folder):
    """Return the table of a pool of jobs of Slurm."""
    return 'provider = "slurm"\n[pool.p.slurm]\npartition = "all"\nenv = {UNICRON_CONNECT_TIMEOUT_S = "600"}'


def containers(folder):
    """Return the table of a pool of containers, which do nothing."""
    words = ["python3", "-c", "import signal; signal.pause()"]
    return f'provider = "docker"\n[pool.p.docker]\nimage = "{docker.IMAGE}"\ncommand = {words}\ngrace_s = 1'


@contextmanager
def with_slurm(folder):
    """Have a Slurm for as long, whose commands are on the PATH."""
    with pytest.MonkeyPatch.context() as patch, slurm(folder / "slurm", nodes=3) as running:
        for name in running.env.keys() - os.environ.keys() | {"PATH", "LC_ALL"}:
            patch.setenv(name, running.env[name])
        yield


PROVIDERS = {"command": command, "local": local, "slurm": jobs, "docker": containers}
AROUND = {"slurm": with_slurm}
KINDS = [
    "command",
    "local",
    pytest.param("slurm", marks=[pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]),
    pytest.param(
        "docker",
        marks=[
            pytest.mark.exhaustive("few machines that test have an engine"),
            pytest.mark.slow,
            pytest.mark.skipif(bool(docker.missing()), reason=docker.missing()),
        ],
    ),
]


@asynccontextmanager
async def made(kind, folder):
    """Have a provider, as the service makes it; whatever it has in the end is released."""
    file = folder / "pools.toml"
    file.write_text(f"[pool.p]\nmax = 3\n{PROVIDERS[kind](folder)}\n")

    def make():
        return load(str(file), f"nats://127.0.0.1:{free_port()}")["p"].provider

    with AROUND.get(kind, nullcontext)(folder):
        provider = make()
        provider.again = make
        try:
            yield provider
        finally:
            for report in await provider.list():
                await provider.release(report.machine)


def request(machine):
    return MachineRequest(machine=machine, pool="p", slots=2, reason="a test")


async def ids(provider):
    return sorted(report.machine for report in await provider.list())


@pytest.mark.parametrize("kind", KINDS)
async def test_a_machine_is_there_once_from_being_asked_for_to_being_released(kind, tmp_path):
    async with made(kind, tmp_path) as provider:
        assert await ids(provider) == []
        await provider.ask(request("p-1"))
        await provider.ask(request("p-2"))
        await provider.ask(request("p-1"))
        reports = await provider.list()
        assert sorted(each.machine for each in reports) == ["p-1", "p-2"]
        assert {each.state for each in reports} <= {"coming", "running"}
        after_a_restart = provider.again()
        await after_a_restart.ask(request("p-1"))
        assert await ids(after_a_restart) == ["p-1", "p-2"]
        await after_a_restart.release("p-1")
        await provider.release("p-1")
        await provider.release("p-9")
        assert await ids(provider) == ["p-2"]
        await provider.replace("p-2", request("p-3"))
        await provider.replace("p-2", request("p-3"))
        assert await ids(provider) == ["p-3"]
