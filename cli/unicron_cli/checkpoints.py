"""The commands `unicron checkpoints`: what is saved of training, and what survives a failure."""

from typing import Annotated

import typer

from unicron_cli.output import Json, console, print_json, warn

app = typer.Typer(no_args_is_help=True, help="What is saved of training, and what survives a failure.")


@app.command()
def odds(
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the cluster.")],
    copies: Annotated[int, typer.Option(min=1, help="Copies of each node's state, its own included.")] = 2,
    lost: Annotated[int, typer.Option(min=1, max=100, metavar="N", help="Up to so many nodes are lost at once.")] = 8,
    as_json: Json = False,
) -> None:
    """Say how likely all states are still in memory when nodes are lost at once, with and without copies elsewhere."""
    from unicron.checkpoints.odds import odds as odds_of  # noqa: PLC0415

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
    from unicron_cli.views import plain_table  # noqa: PLC0415

    table = plain_table("LOST AT ONCE", f"{copies} COPIES", "FAILS ONCE IN", "NO COPIES ON OTHER NODES")
    for number, kept, alone in rows:
        once = f"{float(1 / (1 - kept)):,.1f}" if kept < 1 else "never"
        table.add_row(str(number), f"{float(kept):.4%}", once, f"{float(alone):.0%}")
    console().print(table)
