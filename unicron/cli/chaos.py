"""The commands `unicron chaos`: break something of a running cluster, now or by a script."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unicron.cli.output import FOLDER, Folder, Json, Nats, done, print_json, with_client

if TYPE_CHECKING:
    from unicron.cli.strikes import Restart, Strike

app = typer.Typer(no_args_is_help=True, help="Break something of a running cluster, to see it heal.")

Worker = Annotated[str, typer.Argument(metavar="TASK:RANK", help="The worker that has this rank now.")]
Node = Annotated[str, typer.Argument(metavar="NODE", help="Name of the node.")]


@app.command("kill-worker")
def kill_worker(target: Worker, nats: Nats = None, as_json: Json = False) -> None:
    """End a worker with SIGKILL."""
    _strike("kill-worker", target, nats, as_json)


@app.command("stop-worker")
def stop_worker(target: Worker, nats: Nats = None, as_json: Json = False) -> None:
    """Stop a worker with SIGSTOP: it hangs and says nothing."""
    _strike("stop-worker", target, nats, as_json)


@app.command("raise")
def raise_in_worker(target: Worker, nats: Nats = None, as_json: Json = False) -> None:
    """Raise an exception in a worker's next step."""
    _strike("raise", target, nats, as_json)


@app.command("kill-node")
def kill_node(target: Node, nats: Nats = None, as_json: Json = False) -> None:
    """End an agent with all its workers with SIGKILL, as if the machine had lost power."""
    _strike("kill-node", target, nats, as_json)


@app.command("restart-node")
def restart_node(target: Node, folder: Folder = FOLDER, nats: Nats = None, as_json: Json = False) -> None:
    """Bring a killed node of the embedded cluster back."""
    _strike("restart-node", target, nats, as_json, restarter(folder))


@app.command("run")
def run(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A fault script (YAML).")],
    folder: Folder = FOLDER,
    nats: Nats = None,
    as_json: Json = False,
) -> None:
    """Let the faults of FILE strike when their tasks reach their iterations; end after the last one."""
    from unicron.cli.faults import load  # noqa: PLC0415
    from unicron.cli.strikes import run_script  # noqa: PLC0415

    faults = load(file)
    restart = restarter(folder) if any(fault.fault == "restart-node" for fault in faults) else None

    def tell(strike: "Strike") -> None:
        if as_json:
            print_json(strike)
        else:
            typer.echo(_line(strike))

    with_client(nats, lambda client: run_script(client, faults, restart, tell))


def restarter(folder: Path) -> "Restart":
    """Return what brings nodes of the embedded cluster in `folder` back.

    Raises:
        InvalidInputError: there is no cluster.
    """
    import asyncio  # noqa: PLC0415

    from unicron.cli.cluster import Cluster  # noqa: PLC0415

    cluster = Cluster.load(folder)

    async def restart(node: str) -> None:
        await asyncio.to_thread(cluster.start_process, node)

    return restart


def _strike(fault: str, target: str, nats: str | None, as_json: bool, restart: "Restart | None" = None) -> None:
    from msgspec import to_builtins  # noqa: PLC0415

    from unicron.cli.faults import parse_target  # noqa: PLC0415
    from unicron.cli.strikes import strike  # noqa: PLC0415

    aim = parse_target(target)
    made = with_client(nats, lambda client: strike(client, fault, aim, restart))
    if as_json:
        done(made.text, as_json, **{name: value for name, value in to_builtins(made).items() if name != "text"})
    else:
        typer.echo(_line(made))


def _line(strike: "Strike") -> str:
    hit = f" ({strike.worker} on {strike.node})" if strike.worker else ""
    return f"{strike.fault} {strike.target}{hit}: {strike.text}"
