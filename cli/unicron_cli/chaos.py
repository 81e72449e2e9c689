"""The commands `unicron chaos`: break something of a running cluster, now or by a script."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from msgspec import to_builtins
from unicron_chaos.injection import NO_RESTART, Injection, Restart, inject, run_script
from unicron_chaos.script import load, parse_target
from unicron_chaos.storm import Storm, rage, troubles
from unicron_deploy.embedded import Cluster

from unicron.client import Client
from unicron.contracts.faults import FAULTS, NODE, WORKER, FaultKind
from unicron.errors import InvalidInputError, UnicronError
from unicron_cli.output import FOLDER, Folder, Json, Nats, done, print_json, say, warn, with_client

app = typer.Typer(no_args_is_help=True)

_WHOM = {WORKER: "the worker that has this rank now", NODE: "the node of this name"}


def _add(kind: FaultKind) -> None:
    """Make the command of a fault."""
    whom = _sentence(" or ".join(_WHOM[each] for each in kind.targets))
    target = typer.Argument(metavar="|".join(kind.targets), help=whom)

    def plain(target: str = target, nats: Nats = None, as_json: Json = False) -> None:
        _inject(kind.name, target, nats, as_json)

    def restarting(target: str = target, folder: Folder = FOLDER, nats: Nats = None, as_json: Json = False) -> None:
        _inject(kind.name, target, nats, as_json, restart=restarter(folder))

    command: Callable[..., None] = restarting if kind.name == "restart-node" else plain
    if kind.value is not None:
        value = typer.Argument(
            ... if kind.value.default is None else kind.value.default,
            metavar=kind.value.name if kind.value.default is None else f"[{kind.value.name}]",
            help=_sentence(kind.value.allowed),
            show_default=bool(kind.value.default),
        )

        def with_value(target: str = target, value: str = value, nats: Nats = None, as_json: Json = False) -> None:
            _inject(kind.name, target, nats, as_json, value=value)

        command = with_value
    app.command(kind.name, help=_sentence(kind.text))(command)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


for _kind in FAULTS.values():
    _add(_kind)


@app.command("run")
def run(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A fault script (YAML).")],
    folder: Folder = FOLDER,
    nats: Nats = None,
    as_json: Json = False,
) -> None:
    """Let the faults of FILE strike when their tasks reach their iterations; end after the last one."""
    faults = load(file)
    restart = restarter(folder) if any(fault.fault == "restart-node" for fault in faults) else None

    with_client(nats, lambda client: run_script(client, faults, restart, print_json if as_json else _print_line))


@app.command("storm")
def storm(
    minutes: Annotated[float, typer.Option(min=0, help="How long faults strike.")] = 5.0,
    seed: Annotated[int, typer.Option(help="The same seed and the same cluster give the same faults.")] = 0,
    every: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Mean time between faults.")] = 10.0,
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Folder of the embedded cluster; only with it nodes are killed too.")
    ] = None,
    nats: Nats = None,
    as_json: Json = False,
) -> None:
    """Let random faults strike, bring killed nodes back, and exit with 1 if the cluster is not whole again."""
    restart = restarter(folder) if folder else None

    async def run(client: Client) -> tuple[list[Injection], list[str]]:
        done = []
        async for made in rage(client, Storm(seed, nodes=restart is not None), minutes * 60, every, restart):
            if isinstance(made, UnicronError):
                warn(f"no strike: {made}")
                continue
            done.append(made)
            if not as_json:
                _print_line(made)
        return done, await troubles(client, {made.node for made in done if made.fault == "kill-node"})

    done, wrong = with_client(nats, run)
    if as_json:
        print_json({"ok": not wrong, "seed": seed, "strikes": done, "troubles": wrong})
    else:
        say(f"{len(done)} faults; " + (f"not whole: {'; '.join(wrong)}" if wrong else "the cluster is whole"))
    raise typer.Exit(1 if wrong else 0)


def restarter(folder: Path) -> Restart:
    """Return what brings nodes of the embedded cluster in `folder` back.

    Raises:
        InvalidInputError: no cluster runs there.
    """
    cluster = Cluster.before(folder)
    if cluster is None or not cluster.alive():
        raise InvalidInputError(f"no cluster runs in {folder.resolve()}, and {NO_RESTART}")

    async def restart(node: str) -> None:
        await asyncio.to_thread(cluster.start_process, node)

    return restart


def _inject(
    fault: str, target: str, nats: str | None, as_json: bool, *, value: str = "", restart: Restart | None = None
) -> None:
    aim = parse_target(target)
    made = with_client(nats, lambda client: inject(client, fault, aim, restart, value))
    if as_json:
        done(made.text, as_json, **{name: value for name, value in to_builtins(made).items() if name != "text"})
    else:
        _print_line(made)


def _print_line(injection: Injection) -> None:
    say(f"{injection.target}: {injection.text}" if injection.worker else injection.text)
