"""How the commands speak: tables for people, JSON for programs, and the connection they share."""

import json
import os
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from urllib.parse import urlsplit

import msgspec
import typer
from msgspec.structs import replace
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from unicron.addresses import Address
from unicron.errors import UnicronError
from unicron.printable import printable
from unicron.processes import ProcessRecord
from unicron.settings import PREFIX, Settings

if TYPE_CHECKING:
    from unicron_deploy.slurm.folders import JobFolder

    from unicron.client import Client

T = TypeVar("T")

Nats = Annotated[
    str | None,
    typer.Option("--nats", "--nats-url", envvar="UNICRON_NATS_URL", metavar="URL", help="Where the message bus is."),
]
Folder = Annotated[Path, typer.Option("--dir", help="Folder of the embedded cluster.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]

FOLDER = Path(".unicron")

CONTAINERS = FOLDER / "containers"
"""Where the operator's key of docker-compose.yml's cluster is put: the folder of keys is another cluster's."""

HOST = "127.0.0.1"

CONNECT_S = "3"
"""How long a command waits for a bus that neither answers nor fails, unless the environment says otherwise."""

SERVICE_S = 15.0
"""How long an order waits for a service: of containers that were started just now, the registry needs some seconds."""

PLAIN_WIDTH = 160
"""Columns of tables that go to a file or a pipe."""


def settings(nats: str | None) -> Settings:
    """Return the settings of a command: `--nats` over the environment over this folder's cluster over defaults."""
    name = PREFIX + "NATS_URL"
    given = {PREFIX + "CONNECT_TIMEOUT_S": CONNECT_S, **os.environ}
    if url := nats or (own_url() if name not in os.environ else ""):
        given[name] = url
    found = Settings.load([], given)
    return found if found.nats_nkey or found.nats_creds else replace(found, nats_nkey=own_key(found.nats_servers[0]))


def patient() -> bool:
    """Whether a command waits for a bus that is not there yet, or does not know its key: where a time is set."""
    return PREFIX + "CONNECT_TIMEOUT_S" in os.environ


def own_key(url: str) -> str:
    """Return the path of the key for the bus at `url`; empty where there is none.

    It is that of the embedded cluster of this folder, if its record says that it is there. While that one does not run,
    the containers may be, whose key has a folder of its own.
    """
    if (job := _job()) and job.url == url:
        return str(job.key)
    address, layout = urlsplit(url), _layout()
    here = address.hostname in {HOST, "localhost"}
    if here and not _runs(layout) and (key := _key_in(CONTAINERS)):
        return key
    if layout and (layout.get("insecure") or layout.get("port") != address.port):
        return ""
    return _key_in(FOLDER / "keys") if here or address.hostname == (layout.get("host") or HOST) else ""


def own_url() -> str:
    """Return where the cluster of this folder is, the embedded one or that of its job; empty where none runs."""
    layout = _layout()
    servers = layout.get("servers") or [{"host": layout.get("host") or HOST, "port": layout.get("port")}]
    if _runs(layout):
        return ",".join(Address(each["host"], each["port"]).nats_url for each in servers)
    job = _job()
    return job.url if job else ""


def own_root() -> Path:
    """Return the folder of the cluster of this folder, the embedded one or that of its job."""
    job = None if _runs(_layout()) else _job()
    return job.root if job else FOLDER


def _job() -> "JobFolder | None":
    """Return the job of Slurm that works for this folder; None where there is none, or several."""
    if not (FOLDER / "slurm").is_dir():
        return None
    from unicron_deploy.slurm.folders import job_folders, working  # noqa: PLC0415 few folders need it

    found = working(each for each in job_folders(FOLDER / "slurm") if each.url)
    return found[0] if len(found) == 1 else None


def _layout() -> dict[str, Any]:
    """Return the record of the embedded cluster of this folder; empty where there is none."""
    with suppress(OSError, ValueError):
        return dict(json.loads((FOLDER / "cluster.json").read_bytes()))
    return {}


def _runs(layout: dict[str, Any]) -> bool:
    """Return whether any process of an embedded cluster lives."""
    return any(msgspec.convert(each, ProcessRecord).alive() for each in layout.get("processes", {}).values())


def _key_in(folder: Path) -> str:
    paths = (folder / name / f"{name}.nk" for name in ("operator", "user"))
    return next((str(path) for path in paths if os.access(path, os.R_OK)), "")


def with_client(nats: str | None, job: "Callable[[Client], Awaitable[T]]") -> T:
    """Run `job` on a connection to the cluster."""
    import asyncio  # noqa: PLC0415 - slow to import, and --help needs none of it

    from unicron.service.bootstrap import connected_client  # noqa: PLC0415 - likewise

    async def main() -> T:
        async with connected_client(settings(nats), "unicron-cli", patient=patient()) as client:
            client.patience_s = SERVICE_S
            return await job(client)

    return asyncio.run(main())


@contextmanager
def needs(command: str, extras: str) -> Iterator[None]:
    """Import what `command` needs, which not every installation has.

    Raises:
        UnicronError: it is not installed; it says how to.
    """
    try:
        yield
    except ImportError as error:
        cure = f"pip install '.[{extras}]'"
        raise UnicronError(f"{command} needs {error.name}, which is not installed: {cure}") from error


def to_json(value: Any) -> str:
    """Return `value` as one line of JSON; numbers that JSON lacks become null, bytes base64."""
    return printable(msgspec.json.encode(value).decode())


def print_json(value: Any) -> None:
    """Print `value` as one line of JSON."""
    typer.echo(to_json(value))


def say(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print text, of which some may come from elsewhere: it can't steer the terminal."""
    typer.echo(printable(text), err=err, nl=nl)


def console(*, err: bool = False) -> Console:
    """Return where tables go; in a pipe they keep their full width. Texts in them can't steer the terminal.

    Nor are they markup: what gloo says begins with a path in brackets, which would be taken for the end of a style.
    """

    class Shown(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for each in super().render(renderable, options):
                yield each if each.control else Segment(printable(each.text), each.style)

    stream = sys.stderr if err else sys.stdout
    width = None if stream.isatty() else PLAIN_WIDTH
    return Shown(stderr=err, highlight=False, markup=False, emoji=False, width=width)


def print_view(found: Any, view: Callable[[], RenderableType], as_json: bool) -> None:
    """Print what was found, or a view of it for people."""
    if as_json:
        print_json(found)
    else:
        console().print(view())


def done(text: str, as_json: bool, **fields: Any) -> None:
    """Say that an order was carried out."""
    if as_json:
        print_json({"ok": True, "text": text, **fields})
    else:
        say(text)


def warn(text: str) -> None:
    """Say on stderr what a person should look at."""
    say(f"warning: {text}", err=True)
