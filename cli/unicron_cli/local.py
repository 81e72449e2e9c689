"""Commands about this machine: up, down, demo, doctor."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from unicron_cli.output import FOLDER, Folder, Json, Nats, console, done, print_json, settings, warn

READY_S = 90.0
"""How long `up` waits for the cluster; importing torch alone takes seconds on a small machine."""


def up(
    nodes: Annotated[int, typer.Option(min=1, max=64, help="Number of nodes.")] = 3,
    slots: Annotated[int, typer.Option(min=1, max=64, help="Worker slots of each node.")] = 2,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the message bus.")] = 4222,
    console_port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port of the console's page; where it is taken, another one.")
    ] = 8080,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Let everybody who reaches the bus do everything, without a key.")
    ] = False,
    backup: Annotated[
        Path | None, typer.Option("--restore", metavar="FILE", help="Begin with what `unicron backup` wrote.")
    ] = None,
    ha: Annotated[bool, typer.Option("--ha", help="Run three NATS servers, of which any may be lost.")] = False,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Have each process answer Prometheus, on a free port of this machine.")
    ] = False,
    folder: Folder = FOLDER,
    as_json: Json = False,
) -> None:
    """Start an embedded cluster on this machine, in the background; return when it is ready.

    Of one that runs, what has ended is started again, as it was.
    """
    import asyncio  # noqa: PLC0415

    from unicron_deploy.embedded import PORT, Cluster, several  # noqa: PLC0415

    with _progress("looking at the cluster") as on_step:
        if mended := Cluster.mend(folder, on_step):
            asyncio.run(mended[0].wait_until_ready(READY_S, on_step))
    if mended:
        names = ", ".join(mended[1])
        done(f"started {names} again; the rest of the cluster ran on", as_json, started=mended[1])
        return
    if insecure:
        warn(
            "INSECURE: there are no keys and no rights: whoever reaches the bus may order anything and speak for "
            "any node; leave --insecure out wherever anybody else can reach it"
        )
    servers = several(port) if ha else ()
    cluster = Cluster(
        folder, nodes, slots, port, insecure=insecure, servers=servers, metrics=metrics, console=console_port
    )
    with _progress("starting the cluster") as on_step:
        cluster.start(on_step, backup)
        try:
            asyncio.run(cluster.wait_until_ready(READY_S, on_step))
        except BaseException:
            cluster.stop(on_step)
            raise
    processes = {name: process.pid for name, process in cluster.processes.items()}
    text = f"the cluster runs at {cluster.url} with {nodes} nodes of {slots} slots; logs in {cluster.logs}"
    text += f"\nlook at it: {cluster.console_url}"
    if not insecure:
        text += f"   (orders from the page need the token in {cluster.keys.tokens})"
    if port != PORT or ha:
        text += f"\nexport UNICRON_NATS_URL={cluster.url}   # for the other commands"
    if metrics:
        text += f"\nPrometheus finds its {len(cluster.names) - len(cluster.servers)} targets in {cluster.targets}"
    key = cluster.settings().nats_nkey
    if key and folder != FOLDER:
        text += f"\nexport UNICRON_NATS_NKEY={key}   # likewise: the operator's key"
    text += "\nnext: `unicron submit TASK.yaml` (examples/gpt/task.yaml is one), then `unicron top`"
    targets = str(cluster.targets) if metrics else ""
    done(
        text,
        as_json,
        url=cluster.url,
        key=key,
        dir=str(cluster.root),
        processes=processes,
        metrics=targets,
        console=cluster.console_url,
    )


def down(folder: Folder = FOLDER, as_json: Json = False) -> None:
    """Stop the embedded cluster; its journal stays, so that `up` goes on where it was."""
    from unicron_deploy.embedded import Cluster  # noqa: PLC0415

    cluster = Cluster.load(folder)
    running = cluster.alive()
    with _progress("stopping the cluster") as on_step:
        cluster.stop(on_step)
    done(f"stopped {', '.join(running) or 'nothing: no process was running'}", as_json, stopped=running)


def demo(
    json_path: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the report as data.")] = None,
    corpus: Annotated[Path | None, typer.Option(metavar="DIR", help="Train on the text files in this folder.")] = None,
) -> None:
    """Train two models on an embedded cluster while faults strike it, and report how it healed."""
    from unicron_cli.demo import run_demo  # noqa: PLC0415

    raise typer.Exit(run_demo(json_path, corpus))


def doctor(nats: Nats = None, as_json: Json = False) -> None:
    """Say what is missing on this machine or in the cluster, and how to mend it."""
    import asyncio  # noqa: PLC0415

    from unicron_cli.doctor import examine, table  # noqa: PLC0415

    checks = asyncio.run(examine(settings(nats)))
    ok = all(check.state != "missing" for check in checks)
    if as_json:
        print_json({"ok": ok, "checks": checks})
    else:
        console().print(table(checks))
    raise typer.Exit(0 if ok else 1)


@contextmanager
def _progress(title: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner on stderr with what is being done; say nothing where that is no terminal."""
    with console(err=True).status(title) as spinner:
        yield spinner.update
