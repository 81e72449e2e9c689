"""Commands about this machine: up, down, demo, doctor."""

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer
from unicron_deploy.embedded import Cluster
from unicron_deploy.ends_with import MARK
from unicron_deploy.options import PORT, Options, Value
from unicron_deploy.production.layout import TARGETS
from unicron_deploy.slurm.folders import job_folder
from unicron_provisioner.config import load

from unicron.contracts.answers import Status
from unicron.errors import InvalidInputError, UnicronError
from unicron.healing import way_of
from unicron_cli.doctor import examine, examine_cluster, table
from unicron_cli.here import findings, lead, next_command
from unicron_cli.output import FOLDER, Folder, Json, Nats, console, done, patient, print_json, settings, warn

STATUS_S = 5.0
"""So long a cluster that is to be stopped may take to say what its tasks have done."""


def up(
    nodes: Annotated[int | None, typer.Option(min=0, max=64, help="Number of nodes.", show_default="3")] = None,
    slots: Annotated[
        int | None, typer.Option(min=1, max=64, help="Worker slots of each node.", show_default="2")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the message bus.", show_default="4222")
    ] = None,
    console_port: Annotated[
        int | None,
        typer.Option(
            min=1, max=65535, help="Port of the console's page; where it is taken, another one.", show_default="8080"
        ),
    ] = None,
    insecure: Annotated[
        bool | None,
        typer.Option("--insecure/--no-insecure", help="Let everybody who reaches the bus do all, without a key."),
    ] = None,
    backup: Annotated[
        Path | None, typer.Option("--restore", metavar="FILE", help="Begin with what `unicron backup` wrote.")
    ] = None,
    ha: Annotated[
        bool | None, typer.Option("--ha/--no-ha", help="Run three NATS servers, of which any may be lost.")
    ] = None,
    metrics: Annotated[
        bool | None,
        typer.Option(
            "--metrics/--no-metrics", help="Have each process answer Prometheus, on a free port of this machine."
        ),
    ] = None,
    pools: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Have nodes come and go as tasks need them, by the pools of this file."),
    ] = None,
    observe: Annotated[
        bool | None,
        typer.Option("--observe/--no-observe", help="Only say what the cluster would do by itself; users are obeyed."),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Let nodes of other machines join, which reach this one there: a name or an address of its own.",
            show_default="nobody but this machine",
        ),
    ] = None,
    folder: Folder = FOLDER,
    as_json: Json = False,
) -> None:
    """Start an embedded cluster on this machine, in the background; return when it is ready.

    One that was stopped starts with the options that it had, unless others are given. Of one that runs, what has ended
    is started again, as it was.
    """
    given = {
        "nodes": nodes,
        "slots": slots,
        "port": port,
        "console_port": console_port,
        "insecure": insecure,
        "ha": ha,
        "metrics": metrics,
        "pools": str(pools.resolve()) if pools else None,
        "observe": observe,
        "host": host and host.strip("[]"),
    }
    if _mended(folder, given, as_json):
        return
    before = Cluster.before(folder)
    options, kept = Options.settled(given, before.options if before else None)
    if not options.nodes and not options.pools:
        raise typer.BadParameter("--nodes 0 without --pools: no node would ever come; give a file of pools, or nodes")
    if options.insecure:
        warn(
            "INSECURE: there are no keys and no rights: anybody who reaches the bus may order anything and speak for "
            "any node; leave --insecure out wherever anybody else can reach it"
            + (", and say --no-insecure where it was started so before" if "--insecure" in kept else "")
        )
    cluster = Cluster.of(folder, options, _machines(options.pools, folder))
    _started(cluster, backup)
    processes = {name: process.pid for name, process in cluster.processes.items()}
    done(
        _summary(cluster, kept, folder),
        as_json,
        url=cluster.url,
        key=cluster.settings().nats_nkey,
        dir=str(cluster.root),
        processes=processes,
        metrics=str(cluster.targets) if options.metrics else "",
        console=cluster.console_url,
        kept=kept,
    )


def _machines(pools: str, folder: Path) -> list[str]:
    """Return the names of nodes that may come to pools whose machines see this folder: as many as may be, twice.

    A machine that is lost and its replacement are both there for a while.
    """
    kinds = {"local", "slurm"}
    here = [supply.pool for supply in load(pools, "", str(folder)).values() if supply.pool.provider in kinds]
    return [f"{pool.name}-{number}" for pool in here for number in range(1, 2 * pool.max + 1)]


def _mended(folder: Path, given: Mapping[str, Value | None], as_json: bool) -> bool:
    """Start again what has ended of a cluster that runs; return whether there was any of it."""
    with _progress("looking at the cluster") as on_step:
        mended = Cluster.mend(folder, on_step)
        if not mended:
            return False
        cluster, names = mended
        asyncio.run(cluster.wait_until_ready(on_step=on_step))
    if otherwise := cluster.options.contradicted(given):
        warn(f"{' '.join(otherwise)}: a cluster that runs stays as it is; `unicron down` first, then give them again")
    done(f"started {', '.join(names)} again; the rest of the cluster ran on", as_json, started=names)
    return True


def _started(cluster: Cluster, backup: Path | None) -> None:
    """Start a cluster, and wait until it works; stop it where that fails. It is to stay, whoever calls us."""
    os.environ.pop(MARK, None)
    with _progress("starting the cluster") as on_step:
        cluster.start(on_step, backup)
        try:
            asyncio.run(cluster.wait_until_ready(on_step=on_step))
        except BaseException:
            cluster.stop(on_step)
            raise


def _summary(cluster: Cluster, kept: list[str], folder: Path) -> str:
    """Return the report of a cluster that was started."""
    options = cluster.options
    text = f"the cluster runs at {cluster.url} with {options.nodes} nodes of {options.slots} slots; "
    text += f"logs in {cluster.logs}"
    if kept:
        text += f"\nas it was started before: {' '.join(kept)}   (unless others are given)"
    text += f"\nlook at it: {cluster.console_url}"
    if not options.insecure:
        text += f"   (orders from the page need the token in {cluster.keys.tokens})"
    if options.host:
        text += "\nother machines join it with a token: `unicron token create --pool POOL`"
    if folder != FOLDER and (options.port != PORT or options.ha or options.host):
        text += f"\nexport UNICRON_NATS_URL={cluster.url}   # for the other commands"
    if options.observe:
        text += "\nobserve only: it says what it would do by itself (`unicron events`), and does nothing of that"
    if options.metrics:
        text += f"\nPrometheus finds its {len(cluster.names) - len(cluster.servers)} targets in {cluster.targets}"
    key = cluster.settings().nats_nkey
    if key and folder != FOLDER:
        text += f"\nexport UNICRON_NATS_NKEY={key}   # likewise: the operator's key"
    where = "" if folder == FOLDER else f" --dir {folder}"
    text += f"\nit stays until `unicron down{where}`, also when this terminal closes"
    return text + "\nnext: `unicron submit TASK.yaml` (examples/gpt/task.yaml is one), then `unicron top`"


def down(folder: Folder = FOLDER, as_json: Json = False) -> None:
    """Stop the embedded cluster; its journal and options stay, so that `up` goes on where it was."""
    if job := job_folder(folder):
        raise InvalidInputError(f"{folder} is of job {job.job} of Slurm, which ends it: scancel {job.job}")
    cluster = Cluster.load(folder)
    running = cluster.alive()
    lost = asyncio.run(_unstored(cluster)) if running else {}
    for task, what in lost.items():
        warn(f"{task}: {what}")
    with _progress("stopping the cluster") as on_step:
        cluster.stop(on_step)
    done(f"stopped {', '.join(running) or 'nothing: no process was running'}", as_json, stopped=running, lost=[*lost])


async def _unstored(cluster: Cluster) -> dict[str, str]:
    """Return what `unstored` does; nothing where the cluster does not say so at once."""
    from unicron.service.bootstrap import connected_client  # noqa: PLC0415 --help needs none of it

    with suppress(UnicronError, TimeoutError):
        async with (
            asyncio.timeout(STATUS_S),
            connected_client(cluster.settings(), "unicron-cli", patient=False) as client,
        ):
            return unstored(await client.status())
    return {}


def unstored(status: Status) -> dict[str, str]:
    """Return the tasks whose state lies in the memory of nodes alone: what becomes of each, and how one is kept."""
    lost = {}
    for view in status.tasks:
        way, task = way_of(view.spec), view.spec.name
        stored = way.tracks_states and view.spec.checkpoints
        if not way.saves_states or stored or view.state.ended or view.iteration < 0:
            continue
        again, keep = (
            ("it at iteration 0", "give its task file `checkpoints`")
            if way.tracks_states
            else ("its script again, from a checkpoint of its own or the top", "have the script save checkpoints")
        )
        lost[task] = (
            f"its state of iteration {view.iteration} is in the memory of the nodes alone and goes with it; the next "
            f"`up` begins {again}. To keep one another time, {keep}"
        )
    return lost


def demo(
    json_path: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the report as data.")] = None,
    corpus: Annotated[Path | None, typer.Option(metavar="DIR", help="Train on the text files in this folder.")] = None,
) -> None:
    """Train two models on an embedded cluster while faults strike it, and report how it healed."""
    from unicron_cli.demo import run_demo  # noqa: PLC0415

    raise typer.Exit(run_demo(json_path, corpus))


def doctor(
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Hold a running cluster against what one in production should be.")
    ] = False,
    keys: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="With --cluster: where its keys lie.", show_default="DIR/keys of --dir"),
    ] = None,
    targets: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --cluster: whom Prometheus scrapes, a JSON file of file_sd_configs.",
            show_default="what `unicron up --metrics` wrote",
        ),
    ] = None,
    setup: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="With --cluster: what `unicron init` wrote; it has keys and targets, too."),
    ] = None,
    folder: Folder = FOLDER,
    nats: Nats = None,
    as_json: Json = False,
) -> None:
    """Say what is missing on this machine or in the cluster, and how to mend it."""
    if cluster:
        known = folder / "prometheus.json" if setup is None else setup / TARGETS
        scraped = targets or (known if known.exists() else None)
        looking = examine_cluster(settings(nats), keys or (setup or folder) / "keys", scraped, setup, patient=patient())
    else:
        looking = examine(settings(nats), patient=patient())
    here = [] if cluster else findings(os.environ)
    checks = asyncio.run(looking)
    ok = all(check.state not in {"missing", "fail"} for check in checks)
    if as_json:
        print_json({"ok": ok, "checks": checks, "here": here, "next": "" if cluster else next_command(here)})
    else:
        console().print(table(checks))
        if not cluster:
            console().print("", lead(here), soft_wrap=True)
    raise typer.Exit(0 if ok else 1)


@contextmanager
def _progress(title: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner on stderr with what is being done; say nothing where that is no terminal."""
    with console(err=True).status(title) as spinner:
        yield spinner.update
