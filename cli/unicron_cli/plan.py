"""The command group `unicron plan`: what the planner decided, why, and what it would decide."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from unicron.client import Client
from unicron.contracts.answers import PlanView
from unicron.contracts.plans import Plan
from unicron.contracts.queries import WhatIf
from unicron.observe.words.explain import condition
from unicron.observe.words.explain import explain as explained
from unicron.taskfile import load
from unicron_cli.output import Json, Nats, print_view, warn, with_client
from unicron_cli.planviews import curve_view, lookup_view, plan_view, what_if_view, words
from unicron_cli.plot import check_path, draw_curve

app = typer.Typer(no_args_is_help=True)


@app.command()
def show(nats: Nats = None, as_json: Json = False) -> None:
    """Show the plan in force: each task's slots, and the expected throughput."""
    view = with_client(nats, lambda client: client.plan())
    print_view(view, lambda: plan_view(view), as_json)


@app.command()
def explain(nats: Nats = None, as_json: Json = False) -> None:
    """Explain a plan in words: the event, the decision, its cost to each task, and its grounds."""
    view = with_client(nats, lambda client: client.plan())
    pairs = explained(view)
    print_view(_fields(view) | {"words": dict(pairs)}, lambda: words(pairs), as_json)


@app.command("what-if")
def what_if(
    lose: Annotated[
        list[str] | None, typer.Option("--lose", metavar="NODE", help="This node is lost; repeat it.")
    ] = None,
    join: Annotated[int, typer.Option("--join", min=0, metavar="N", help="N nodes of the usual size join.")] = 0,
    finish: Annotated[list[str] | None, typer.Option(metavar="TASK", help="This task ends; repeat it.")] = None,
    submit: Annotated[Path | None, typer.Option(metavar="FILE", help="The task of this file is launched.")] = None,
    nats: Nats = None,
    as_json: Json = False,
) -> None:
    """Show the plan that would follow if all of this happened at once, beside the one in force; nothing is done."""
    if not (lose or join or finish or submit):
        raise typer.BadParameter("say what happens: --lose NODE, --join N, --finish TASK or --submit FILE")
    spec = None
    if submit is not None:
        spec, warnings = load(submit)
        for warning in warnings:
            warn(warning)
    query = WhatIf(lose=lose or [], join=join, finish=finish or [], submit=spec)
    view, in_force = with_client(nats, lambda client: _beside(client, query))
    print_view(
        _fields(view) | {"in_force": in_force, "words": dict(explained(view))},
        lambda: what_if_view(view, in_force, condition(query)),
        as_json,
    )


@app.command()
def table(nats: Nats = None, as_json: Json = False) -> None:
    """Show the lookup table: what will be done if this event comes next."""
    view = with_client(nats, lambda client: client.plan())
    print_view(view.table, lambda: lookup_view(view), as_json)


@app.command()
def curve(
    task: Annotated[str, typer.Argument(metavar="TASK", help="Name of the task.")],
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw it into FILE (.png or .svg) as well.")
    ] = None,
    nats: Nats = None,
    as_json: Json = False,
) -> None:
    """Show what is believed of a task's throughput over its number of workers, and where that comes from."""
    if plot is not None:
        check_path(plot)
    found = with_client(nats, lambda client: client.curve(task))
    if plot is not None:
        draw_curve(found, plot)
    print_view(found, lambda: curve_view(found), as_json)


async def _beside(client: Client, query: WhatIf) -> tuple[PlanView, Plan | None]:
    """Return the plan that would be, and the one in force."""
    view = await client.what_if(lose=query.lose, join=query.join, finish=query.finish, submit=query.submit)
    return view, (await client.plan()).plan


def _fields(view: PlanView) -> dict[str, Any]:
    return dict(msgspec.structs.asdict(view))
