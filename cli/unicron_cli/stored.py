"""Commands of `unicron checkpoints`: what lies on a storage, whether it is as it was written, and what may go."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from unicron.errors import CheckpointError
from unicron_cli.output import Json, console, needs, print_json, say
from unicron_cli.views import plain_table

if TYPE_CHECKING:
    from unicron.snapshots.storage.catalog import Stored
    from unicron.snapshots.storage.root import Storage

At = Annotated[
    str,
    typer.Option(
        "--at",
        envvar="UNICRON_CHECKPOINTS",
        metavar="DIR|URL",
        help="Where they are: a directory, or s3://bucket/folder.",
    ),
]
Task = Annotated[str, typer.Argument(metavar="TASK", help="Whose they are.")]
OneOrAll = Annotated[str, typer.Argument(metavar="[TASK]", help="Whose they are; of all tasks without.")]
Step = Annotated[int | None, typer.Option("--step", metavar="N", help="Of iteration N; the newest complete without.")]

MB = 1e6


def mount(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("list")(list_)
    for command in (show, verify, restore, prune):
        app.command()(command)


def list_(at: At, task: OneOrAll = "", as_json: Json = False) -> None:
    """Show the checkpoints, newest first, without reading them."""
    storage = _storage(at)
    from unicron.snapshots.storage import catalog  # noqa: PLC0415 by now what it needs is there

    found = {each: catalog.list_checkpoints(storage, each) for each in ([task] if task else catalog.tasks(storage))}
    if as_json:
        print_json([_as_record(name, each) for name, every in found.items() for each in every])
    elif found:
        console().print(_table(found))
    else:
        say(f"{at} has no checkpoints")


def show(at: At, task: Task, step: Step = None, as_json: Json = False) -> None:
    """Show what one checkpoint consists of."""
    found = _one(_storage(at), task, step)
    manifest = found.manifest
    if manifest is None:
        raise CheckpointError(found.fault)
    if as_json:
        print_json({**_as_record(task, found), "manifest": manifest})
        return
    say(f"{found.address}\niteration {manifest.iteration} of {task}, {manifest.layout.degrees}")
    say(f"written {_when(manifest.written)}, {manifest.size / MB:.1f} MB in {len(manifest.files)} files")
    for file in manifest.files:
        say(f"{file.size:>16,}  {file.checksum}  {file.name}")


def verify(at: At, task: OneOrAll = "", step: Step = None, as_json: Json = False) -> None:
    """Read the complete checkpoints and list files that are not as they were written; exit with 1 if any is not."""
    storage = _storage(at)
    from unicron.snapshots.storage import catalog  # noqa: PLC0415 by now what it needs is there

    rows = []
    for name in [task] if task else catalog.tasks(storage):
        every = [_one(storage, name, step)] if step is not None else catalog.list_checkpoints(storage, name)
        rows += [_checked(storage, name, each) for each in every if not each.unfinished]
    if as_json:
        print_json(rows)
    else:
        for row in rows:
            say(f"{row['address']}: {'damaged' if row['faults'] else 'as it was written'}")
            say("".join(f"    {fault}\n" for fault in row["faults"]), nl=False)
            say("".join(f"    {each}: not of this checkpoint\n" for each in row["strangers"]), nl=False)
        if not rows:
            say(f"{at} has no complete checkpoints" + (f" of {task}" if task else ""))
    raise typer.Exit(1 if any(row["faults"] for row in rows) else 0)


def restore(
    at: At,
    task: Task,
    to: Annotated[Path, typer.Option(metavar="FILE", help="The file to write.")],
    step: Step = None,
    as_json: Json = False,
) -> None:
    """Write a checkpoint to one file, for torch.load: whole parameters and optimizer states under their full names.

    Without --step it is the newest that is as it was written.
    """
    storage = _storage(at)
    from unicron.snapshots.storage import catalog  # noqa: PLC0415 by now what it needs is there

    with needs("unicron checkpoints restore", "agent"):
        from unicron.train.snapshots import whole  # noqa: PLC0415
        from unicron.train.snapshots.stored import reading  # noqa: PLC0415
    if step is None:
        newest = catalog.newest(storage, task)
        for each in newest.skipped:
            say(f"damaged: {each.address}: {'; '.join(each.faults)}", err=True)
        if newest.stored is None:
            raise CheckpointError(f"{storage.address(task)} has no complete checkpoint that is as it was written")
        found = newest.stored
    else:
        found = _one(storage, task, step)
    content = reading.read_whole(storage, found)
    try:
        whole.save_file(content, to)
    except OSError as error:
        raise CheckpointError(str(error.strerror)) from error
    if as_json:
        print_json({**_as_record(task, found), "to": str(to.absolute()), "holds": sorted(content)})
    else:
        say(f"{to}: iteration {found.iteration} of {task}, with {', '.join(sorted(content))}")


def prune(
    at: At,
    task: Task,
    keep: Annotated[int, typer.Option(metavar="N", help="How many of the newest stay, at least 2.")] = 2,
    as_json: Json = False,
) -> None:
    """Remove all but the newest checkpoints, and attempts that were given up a day ago.

    The newest that is as it was written always stays.
    """
    storage = _storage(at)
    from unicron.snapshots.storage import catalog  # noqa: PLC0415 by now what it needs is there

    done = catalog.prune(storage, task, keep, time.time())
    if as_json:
        print_json(done)
        return
    for each in done.skipped:
        say(f"damaged  {each.address}: {'; '.join(each.faults)}")
    for verb, addresses in (("removed", done.removed), ("kept", done.kept)):
        for address in addresses:
            say(f"{verb:8} {address}")


def _storage(at: str) -> "Storage":
    with needs("unicron checkpoints", "storage"):
        from unicron.snapshots.storage.root import Storage  # noqa: PLC0415
    return Storage(at)


def _one(storage: "Storage", task: str, step: int | None) -> "Stored":
    """Return the newest checkpoint of an iteration, or of all.

    Raises:
        CheckpointError: there is none.
    """
    from unicron.snapshots.storage import catalog  # noqa: PLC0415

    every = [each for each in catalog.list_checkpoints(storage, task) if not each.unfinished]
    for each in every:
        if step is None or each.iteration == step:
            return each
    there = ", ".join(str(each.iteration) for each in every) or "none"
    wanted = "" if step is None else f" of iteration {step}"
    raise CheckpointError(f"{storage.address(task)} has no complete checkpoint{wanted}; there are: {there}")


def _checked(storage: "Storage", task: str, found: "Stored") -> dict[str, Any]:
    from unicron.snapshots.storage.check import faults, strangers  # noqa: PLC0415

    folder, manifest = (task, found.folder), found.manifest
    return {
        **_as_record(task, found),
        "faults": [found.fault] if manifest is None else faults(storage, folder, manifest),
        "strangers": [] if manifest is None else strangers(storage, folder, manifest),
    }


def _as_record(task: str, found: "Stored") -> dict[str, Any]:
    manifest = found.manifest
    return {
        "task": task,
        "address": found.address,
        "iteration": found.iteration,
        "state": _state(found),
        "written": manifest.written if manifest else None,
        "size": manifest.size if manifest else None,
        "layout": manifest.layout if manifest else None,
    }


def _state(found: "Stored") -> str:
    if found.unfinished:
        return "unfinished"
    return "damaged" if found.fault else "rewound" if found.rewound else "complete"


def _table(found: "dict[str, list[Stored]]") -> Table:
    table = plain_table("TASK", "ITERATION", "STATE", "WRITTEN", "MB", "LAYOUT", "ADDRESS")
    for task, every in found.items():
        for each in every:
            manifest = each.manifest
            details = (
                (_when(manifest.written), f"{manifest.size / MB:.1f}", manifest.layout.degrees)
                if manifest
                else 3 * ("",)
            )
            table.add_row(task, str(each.iteration), _state(each), *details, Text(each.address))
    return table


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
