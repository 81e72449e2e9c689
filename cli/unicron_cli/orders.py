"""Commands that change a cluster: provision, submit, remove, drain."""

import asyncio
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace

from unicron.bus import backup as backups
from unicron.bus import topology
from unicron.contracts.tasks import TaskSpec
from unicron.errors import InvalidInputError
from unicron.service.bootstrap import connected
from unicron.taskfile import load
from unicron_cli.commit import with_commit
from unicron_cli.output import Json, Nats, done, patient, settings, warn, with_client


def provision(nats: Nats = None, as_json: Json = False) -> None:
    """Make the streams and buckets on the bus, or bring them to what this version needs."""

    async def make() -> None:
        found = settings(nats)
        async with connected(found, "unicron-cli", patient=patient()) as bus:
            await topology.provision(bus.jetstream, topology.copies(found.nats_servers))

    asyncio.run(make())
    names = [stream.name for stream in topology.streams()]
    done(f"ready: {', '.join(map(str, names))}", as_json, streams=names)


def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="To write; it must not be there.")],
    nats: Nats = None,
    as_json: Json = False,
) -> None:
    """Save the journal and the services' state to one file, and read it again."""

    async def make() -> dict[str, int]:
        async with connected(settings(nats), "unicron-cli", patient=patient()) as bus:
            return await backups.backup(bus, file)

    saved = asyncio.run(make())
    text = f"{file}: the journal up to {saved['UNICRON']}, {file.stat().st_size} bytes, read again and whole"
    done(text, as_json, file=str(file), streams=saved)


def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="That `unicron backup` wrote.")],
    nats: Nats = None,
    as_json: Json = False,
) -> None:
    """Make the journal and the services' state anew from a backup, on servers that hold none."""
    found = settings(nats)

    async def make() -> dict[str, int]:
        async with connected(found, "unicron-cli", patient=patient()) as bus:
            return await backups.restore(bus, file, topology.copies(found.nats_servers))

    restored = asyncio.run(make())
    text = f"restored the journal up to {restored['UNICRON']}; restart the servers now, and then start the services"
    done(text, as_json, file=str(file), streams=restored)


def submit(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A task file (YAML).")],
    resume: Annotated[
        bool, typer.Option("--resume", help="Begin with the newest checkpoint that a task of this name has written.")
    ] = False,
    nats: Nats = None,
    as_json: Json = False,
) -> None:
    """Launch the task that FILE describes; the same file again changes nothing."""
    spec, warnings = load(file)
    _check_script(spec, file)
    spec = with_commit(replace(spec, resume=spec.resume or resume))
    for warning in warnings:
        warn(warning)
    text = with_client(nats, lambda client: client.submit(spec))
    done(text, as_json, task=spec.name, warnings=warnings)


def _check_script(spec: TaskSpec, file: Path) -> None:
    """Refuse a script that is not beside the task file, where the nodes, too, look for it unless `workdir` is given.

    Raises:
        InvalidInputError: there is no such script.
    """
    folder, script = file.absolute().parent.resolve(), spec.command[1:2]
    if spec.workdir != str(folder) or not script or Path(script[0]).suffix != ".py" or (folder / script[0]).exists():
        return
    near = get_close_matches(script[0], [path.name for path in folder.glob("*.py")], n=1, cutoff=0.5)
    meant = f"; did you mean {near[0]!r}?" if near else "."
    cure = "Where only the nodes have it, name its folder there in `workdir`"
    raise InvalidInputError(f"{file}: command: no {script[0]} in {folder}{meant} {cure}")


def remove(
    task: Annotated[str, typer.Argument(metavar="TASK", help="Name of the task.")],
    nats: Nats = None,
    as_json: Json = False,
) -> None:
    """Stop a task and forget it."""
    done(with_client(nats, lambda client: client.remove(task)), as_json, task=task)


def drain(
    node: Annotated[str, typer.Argument(metavar="NODE", help="Name of the node.")],
    undo: Annotated[bool, typer.Option("--undo", help="Put the node back into use.")] = False,
    nats: Nats = None,
    as_json: Json = False,
) -> None:
    """Take a node out of use: its workers move away, and it gets no more work until --undo."""
    done(with_client(nats, lambda client: client.drain(node, drain=not undo)), as_json, node=node, drained=not undo)
