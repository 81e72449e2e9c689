"""Commands that show a cluster: status, tasks, nodes, events."""

import asyncio
from collections import deque
from contextlib import suppress
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from unicron import subjects, vitality
from unicron.client import Client
from unicron.contracts.answers import Status
from unicron.contracts.base import Message
from unicron.contracts.commands import StartWorker
from unicron.contracts.queries import MOST_LINES
from unicron.errors import BusUnavailableError, InvalidInputError, UnicronError
from unicron.observe.accounts.goodput import Goodput
from unicron.observe.incidents import chain_of
from unicron.observe.words.headline import headline, headline_of
from unicron.observe.words.ranks import RankNames
from unicron.observe.words.story import find_chain, line, story
from unicron_cli.output import Json, Nats, console, own_root, print_json, print_view, say, to_json, with_client
from unicron_cli.views import nodes_table, status_view, tasks_table

WATCH_S = 1.0
"""How often `status --watch` asks."""

RECENT = 10
"""Events that `events --follow` shows before the new ones."""


def status(
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every second, until Ctrl-C.")] = False,
    nats: Nats = None,
    as_json: Json = False,
) -> None:
    """Show nodes, tasks and the plan in force."""
    if watch:
        try:
            with_client(nats, lambda client: _watch(client, as_json))
        except KeyboardInterrupt:
            return
    found, ailing = with_client(nats, _look)
    if isinstance(found, UnicronError):
        for line in ailing:
            say(line, err=True)
        raise found
    if as_json:
        print_json({**msgspec.to_builtins(found), "ailing": ailing})
    else:
        print_view(found, lambda: Group(*(Text(line, "bold red") for line in ailing), status_view(found)), as_json)


async def _look(client: Client) -> tuple[Status | UnicronError, list[str]]:
    """Return what the registry knows, or why it does not say, and a line for each part through which nothing gets."""
    parts = asyncio.ensure_future(client.health())
    found: Status | UnicronError
    try:
        found = await client.status()
    except UnicronError as error:
        found = error
    return found, [vitality.sentence(part) for part in await parts if part.problem]


async def _watch(client: Client, as_json: bool) -> None:
    screen = console()
    with Live(console=screen, auto_refresh=False, transient=False) as live:
        while True:
            shown: RenderableType
            try:
                found = await client.status()
            except BusUnavailableError as error:
                shown, line = Text(str(error), "red"), to_json({"error": str(error)})
            else:
                shown, line = status_view(found), to_json(found)
            if as_json:
                say(line)
            else:
                live.update(shown, refresh=True)
            await asyncio.sleep(WATCH_S)


def tasks(nats: Nats = None, as_json: Json = False) -> None:
    """List the tasks."""
    found = with_client(nats, lambda client: client.status())
    print_view(found.tasks, lambda: tasks_table(found), as_json)


def nodes(nats: Nats = None, as_json: Json = False) -> None:
    """List the nodes and what runs on their slots."""
    found = with_client(nats, lambda client: client.status())
    print_view(found.nodes, lambda: nodes_table(found), as_json)


def events(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new ones, until Ctrl-C.")] = False,
    chain: Annotated[str, typer.Option(metavar="ID", help="Show the story of one failure, from any id in it.")] = "",
    last: Annotated[int | None, typer.Option("--last", "-n", min=0, help="Only so many of the last ones.")] = None,
    task: Annotated[str, typer.Option(help="Only what concerns this task.")] = "",
    node: Annotated[str, typer.Option(help="Only what concerns this node.")] = "",
    nats: Nats = None,
    as_json: Json = False,
) -> None:
    """List facts and commands in the order in which they happened."""
    if follow and chain:
        raise typer.BadParameter("--chain shows the past, --follow what comes: use one of them")
    try:
        if chain:
            with_client(nats, lambda client: _story(client, chain, as_json))
        else:
            wanted = {name: value for name, value in (("task", task), ("node", node)) if value}
            with_client(nats, lambda client: _list(client, follow, last, wanted, as_json))
    except KeyboardInterrupt:
        return


async def _list(client: Client, follow: bool, last: int | None, wanted: dict[str, str], as_json: bool) -> None:
    tail, last = await client.tail(), RECENT if follow and last is None else last
    now = await _names(client)
    recent, back = deque[tuple[int, Message, str]](maxlen=last), tail if last is None or wanted else last
    while True:
        names = RankNames()
        recent.clear()
        async for place, message in client.follow(max(0, tail - back), tail):
            names.observe(message)
            if _concerns(message, wanted):
                recent.append((place, message, "" if as_json else line(message, names)))
        if back >= tail or len(recent) == last:
            break
        back *= 4  # the places between are of what is no message, or has left the journal
    now.forget(names)  # what is left had its rank before
    for sequence, message, text in recent:
        say(to_json(_with_place(sequence, message)) if as_json else now.explain(text))
    if follow:
        async for sequence, message in client.follow(tail):
            names.observe(message)
            if _concerns(message, wanted):
                text = "" if as_json else now.explain(line(message, names))
                say(to_json(_with_place(sequence, message)) if as_json else text)


async def _names(client: Client) -> RankNames:
    """Return the ranks that workers have now; none where nobody says so."""
    try:
        return RankNames.of((await client.status()).tasks)
    except UnicronError:
        return RankNames()


def _concerns(message: Message, wanted: dict[str, str]) -> bool:
    return all(getattr(message, name, "") == value for name, value in wanted.items())


async def _story(client: Client, wanted: str, as_json: bool) -> None:
    found = [pair async for pair in client.follow(0, await client.tail())]
    chain = find_chain((message for _, message in found), wanted)
    if as_json:
        for sequence, message in found:
            if chain_of(message) == chain_of(chain[0]):
                say(to_json(_with_place(sequence, message)))
        return
    names, first = RankNames(), next(place for place, (_, each) in enumerate(found) if each.id == chain[0].id)
    for _, message in found[:first]:
        names.observe(message)
    lines, accounts = story(chain, names), Goodput()
    for _, message in found:  # it may have ended by another chain
        accounts.handle(message)
    failure = accounts.incidents.failures.get(chain_of(chain[0]))
    head = headline_of(failure, failure.first) if failure else headline(chain)
    took = f"{len(chain)} messages in {chain[-1].at - chain[0].at:.3f} s"
    say(f"chain {chain_of(chain[0])}, {took}: {names.explain(head)}")
    for text in lines:
        say(text)


def logs(
    worker: Annotated[
        str, typer.Argument(metavar="TASK:RANK", help="TASK:RANK, as gpt:1; or the name of a process, as gpt-2.")
    ],
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, max=MOST_LINES, help="How many.")] = 50,
    node: Annotated[str, typer.Option("--node", help="Where it runs, or ran; else the cluster is asked.")] = "",
    nats: Nats = None,
    as_json: Json = False,
) -> None:
    """Show the last lines that a worker wrote, living or ended."""
    worker, home, found = with_client(nats, lambda client: _log(client, node, worker, lines))
    if as_json:
        print_json({"worker": worker, "node": home, "lines": found})
    else:
        for text in found:
            say(text)
        if not found:
            say(f"{worker} on {home} has written nothing", err=True)


async def _log(client: Client, node: str, worker: str, lines: int) -> tuple[str, str, list[str]]:
    if ":" in worker:
        worker = await _of_rank(client, worker)
    node = node or await _home(client, worker)
    try:
        return worker, node, await client.log(node, worker, lines)
    except BusUnavailableError:  # the node may be lost; where it kept its logs in this folder, they are still there
        from unicron_agent.workers.output import tail  # noqa: PLC0415 other commands need none of it

        folder = own_root() / "nodes" / subjects.token(node, "node") / "logs"
        path = folder / f"{subjects.token(worker, 'worker')}.log"
        with suppress(OSError):
            return worker, node, tail(path, lines)
        raise


async def _of_rank(client: Client, wanted: str) -> str:
    """Return the worker that is a rank of a task, "TASK:RANK": now, or before it ended."""
    task, _, rank = wanted.rpartition(":")
    view = next((view for view in (await client.status()).tasks if view.spec.name == task), None)
    if view is not None and rank.isdecimal() and int(rank) < len(view.members):
        return view.members[int(rank)].worker
    names = RankNames()
    if view is not None and not view.members:  # it waits, or has ended: who computed last
        async for _, message in client.follow(0, await client.tail()):
            names.observe(message)
    if worker := names.worker(wanted):
        return worker
    ranks = f"has ranks 0 to {len(view.members) - 1} now" if view and view.members else "has no ranks now"
    raise InvalidInputError(f"{wanted}: {f'there is no task {task!r}' if view is None else f'{task} {ranks}'}")


async def _home(client: Client, worker: str) -> str:
    """Return the node of a worker: of one that computes, or else of one that was started within the journal's days."""
    members = [member for view in (await client.status()).tasks for member in view.members]
    homes = [member.node for member in members if member.worker == worker] or [
        message.node
        async for _, message in client.follow(0, await client.tail())
        if isinstance(message, StartWorker) and message.worker == worker
    ]
    if not homes:
        raise InvalidInputError(f"no worker {worker!r} in the journal; `unicron events` has those that were started")
    return homes[-1]


def _with_place(sequence: int, message: Message) -> dict[str, Any]:
    return {"sequence": sequence, **msgspec.to_builtins(message)}
