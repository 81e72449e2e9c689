"""Commands of `unicron task`: what there is to know of a task, and what users order a running one to do."""

import time
from collections.abc import Awaitable, Sequence
from typing import Annotated

import typer

from unicron.client import Client
from unicron.contracts.events import TaskSubmitted
from unicron.errors import UnicronError
from unicron.observe.accounts.goodput import Goodput
from unicron.observe.cluster import ClusterPicture
from unicron_cli.output import Json, Nats, done, print_view, with_client
from unicron_cli.taskview import TaskAccount, account, view_of

app = typer.Typer(no_args_is_help=True)
Task = Annotated[str, typer.Argument(metavar="TASK", help="Name of the task.")]


@app.command()
def show(
    task: Task,
    other: Annotated[str, typer.Argument(metavar="OTHER", help="Another one, to be put beside it.")] = "",
    nats: Nats = None,
    as_json: Json = False,
) -> None:
    """Show how far a task is, how long it still takes, what failures have cost it, and its configuration."""
    found = with_client(nats, lambda client: _read(client, [task, other] if other else [task]))
    print_view(found, lambda: view_of(found), as_json)


async def _read(client: Client, names: Sequence[str]) -> list[TaskAccount]:
    cluster, status = ClusterPicture(), await client.status()
    views = {view.spec.name: view for view in status.tasks}
    for name in names:
        if name not in views:
            known = ", ".join(sorted(views)) or "none"
            raise UnicronError(f"there is no task {name!r}; those there are: {known}")
    cluster.fill(status)
    tail, submitted = await client.tail(), {name: list[float]() for name in names}
    async for position, message in client.follow(0, tail):
        cluster.handle(position, message)
        if isinstance(message, TaskSubmitted) and message.task in submitted:
            submitted[message.task].append(message.at)
    found = []
    for name in names:
        goodput, last = cluster.goodput, (submitted[name] or [0.0])[-1]
        if len(submitted[name]) > 1:  # what earlier tasks of its name cost is not its own
            goodput = Goodput(last)
            async for _, message in client.follow(0, tail):
                goodput.handle(message)
        found.append(account(cluster, views[name], time.time(), goodput, last))
    return found


@app.command()
def pause(task: Task, nats: Nats = None, as_json: Json = False) -> None:
    """Take all slots off a task: it finishes its iteration, and its state stays in the nodes' memory."""
    done(with_client(nats, lambda client: client.pause(task)), as_json, task=task, paused=True)


@app.command()
def resume(task: Task, nats: Nats = None, as_json: Json = False) -> None:
    """Have a paused task go on where it was."""
    done(with_client(nats, lambda client: client.pause(task, pause=False)), as_json, task=task, paused=False)


@app.command()
def save(task: Task, nats: Nats = None, as_json: Json = False) -> None:
    """Write a task's state to its storage now; `unicron events` shows when it is there, and where."""
    done(with_client(nats, lambda client: client.save(task)), as_json, task=task)


@app.command()
def stop(
    task: Task,
    keep: Annotated[
        bool, typer.Option("--save", help="Write its state to its storage first; submit --resume takes it up.")
    ] = False,
    nats: Nats = None,
    as_json: Json = False,
) -> None:
    """Stop a task and forget it, at once or as soon as its state is on its storage."""

    def order(client: Client) -> Awaitable[str]:
        return client.save(task, stop=True) if keep else client.remove(task)

    done(with_client(nats, order), as_json, task=task, saved=keep)


@app.command()
def rewind(
    task: Task,
    iteration: Annotated[int, typer.Option(metavar="N", help="Of the checkpoint; `checkpoints list` shows them.")],
    nats: Nats = None,
    as_json: Json = False,
) -> None:
    """Have a task go on from an earlier checkpoint on its storage; later ones no longer count."""
    done(with_client(nats, lambda client: client.rewind(task, iteration)), as_json, task=task, iteration=iteration)
