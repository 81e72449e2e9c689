"""The command `unicron simulate`: what failures cost under several policies, on traces or on one's own failure log."""

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from unicron.errors import UnicronError

app = typer.Typer(invoke_without_command=True)

POLICIES = "unicron,megatron,oobleck,varuna,bamboo,oracle"


@app.callback()
def simulate(
    context: typer.Context,
    trace: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="trace-a, trace-b, llama3, meta-rsc, opt, bloom, or a CSV file.")
    ] = "trace-a",
    policies: Annotated[str, typer.Option(metavar="NAMES", help="Policies, with commas between.")] = POLICIES,
    nodes: Annotated[int, typer.Option(min=0, help="Nodes of the cluster; 0 for those of the trace.")] = 0,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of a node.")] = 8,
    days: Annotated[float, typer.Option(min=0, help="Length; 0 for that of the trace.")] = 0,
    tasks: Annotated[
        str, typer.Option(metavar="FILE", help="Task files with --- between; or case5, case5-as-planned.")
    ] = "case5",
    seed: Annotated[int, typer.Option(help="The same seed gives the same failures.")] = 1,
    costs: Annotated[Path | None, typer.Option(metavar="FILE", help="Other parameters of the policies (TOML).")] = None,
    my_cluster: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Your cluster and its failure log: what would have been saved?")
    ] = None,
    json_file: Annotated[str, typer.Option("--json", metavar="FILE", help="Write all as JSON; - prints it.")] = "",
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it (.svg or .png).")] = None,
) -> None:
    """Run policies through failures in virtual time; tell what each earns and what failures cost it."""
    if context.invoked_subcommand:
        return
    if plot is not None:
        from unicron.cli.plot import check_path  # noqa: PLC0415

        check_path(plot)
    command = _simulator("command")
    if my_cluster is not None:
        report = command.my_cluster(my_cluster, costs)
    else:
        names = [name.strip() for name in policies.split(",") if name.strip()]
        report = command.compared(trace, names, tasks, seed=seed, nodes=nodes, gpus=gpus, days=days, costs=costs)
    if json_file != "-":
        typer.echo(command.table(report))
    command.write(report, json_file, plot)


@app.command()
def storm(
    seeds: Annotated[int, typer.Option(min=1, help="How many storms.")] = 100,
    seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Run the real services through seeded storms of faults, and check invariants after every step."""
    words = ["--seeds", str(seeds), "--seed", str(seed), *(["--json"] if as_json else [])]
    raise typer.Exit(_simulator("storm").main(words))


def _simulator(module: str) -> Any:
    """Import a module of the simulator by name: nothing that runs in a cluster needs it, so nothing imports it.

    Raises:
        UnicronError: what it needs is not installed.
    """
    try:
        return importlib.import_module(f"unicron_simulator.{module}")
    except ImportError as error:
        raise UnicronError(
            f"unicron simulate needs {error.name}, which is not installed: pip install 'unicron[planner]'"
        ) from error
