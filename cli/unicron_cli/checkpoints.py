"""The commands `unicron checkpoints`: what is saved of training, and what survives a failure."""

import asyncio
from typing import Annotated

import typer

from unicron.client import Client
from unicron.contracts.states import StateRef
from unicron.contracts.tasks import NodeState
from unicron.errors import UnicronError
from unicron.snapshots.odds import odds as odds_of
from unicron_cli import stored
from unicron_cli.output import Json, Nats, console, print_json, say, warn, with_client
from unicron_cli.views import plain_table

app = typer.Typer(no_args_is_help=True)


@app.command()
def odds(
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the cluster.")],
    copies: Annotated[int, typer.Option(min=1, help="Copies of each node's state, its own included.")] = 2,
    lost: Annotated[int, typer.Option(min=1, max=100, metavar="N", help="Up to so many nodes are lost at once.")] = 8,
    as_json: Json = False,
) -> None:
    """Say how likely all states are still in memory when nodes are lost at once, with and without copies elsewhere."""
    if copies > nodes:
        warn(f"{nodes} nodes can't keep {copies} copies; these are the odds of {nodes}")
        copies = nodes
    rows = [
        (number, odds_of(nodes, copies, number), odds_of(nodes, 1, number)) for number in range(1, min(lost, nodes) + 1)
    ]
    if as_json:
        found = [{"lost": number, "odds": float(kept), "without": float(alone)} for number, kept, alone in rows]
        print_json({"nodes": nodes, "copies": copies, "rows": found})
        return

    table = plain_table("LOST AT ONCE", f"{copies} COPIES", "FAILS ONCE IN", "NO COPIES ON OTHER NODES")
    for number, kept, alone in rows:
        once = f"{float(1 / (1 - kept)):,.1f}" if kept < 1 else "never"
        table.add_row(str(number), f"{float(kept):.4%}", once, f"{float(alone):.0%}")
    console().print(table)


@app.command()
def memory(
    task: Annotated[str, typer.Argument(metavar="[TASK]", help="Whose they are; of all tasks without.")] = "",
    nats: Nats = None,
    as_json: Json = False,
) -> None:
    """Show the states that lie in the memories of nodes, whole, newest first, and on which nodes each of them does."""
    copies: dict[tuple[str, int, int, str], list[StateRef]] = {}
    for ref in with_client(nats, _states):
        if task in {"", ref.task}:
            copies.setdefault((ref.task, -ref.iteration, ref.place, ref.location.worker), []).append(ref)
    rows = [copies[key] for key in sorted(copies)]
    if as_json:
        print_json([_row(each) for each in rows])
    elif rows:
        table = plain_table("TASK", "ITERATION", "PLACE", "WORKER", "MB", "LAYOUT", "NODES")
        for first, *others in rows:
            nodes = ", ".join(ref.location.node for ref in (first, *others))
            where = (str(first.iteration), str(first.place), first.location.worker, f"{first.size / 1e6:.1f}")
            table.add_row(first.task, *where, first.layout.degrees, nodes)
        console().print(table)
    else:
        say("no node has a state" + (f" of {task}" if task else ""))


def _row(copies: list[StateRef]) -> dict[str, object]:
    first = copies[0]
    return {
        "task": first.task,
        "iteration": first.iteration,
        "place": first.place,
        "worker": first.location.worker,
        "size": first.size,
        "layout": first.layout,
        "nodes": [ref.location.node for ref in copies],
    }


async def _states(client: Client) -> list[StateRef]:
    """Return the states of all nodes that are in use; warn of each that doesn't answer."""

    async def of(node: str) -> list[StateRef]:
        try:
            return await client.states(node)
        except UnicronError as error:
            warn(f"{node} does not list its states: {error}")
            return []

    nodes = [view.node for view in (await client.status()).nodes if view.state in {NodeState.UP, NodeState.DRAINING}]
    return [ref for each in await asyncio.gather(*map(of, nodes)) for ref in each]


stored.mount(app)
