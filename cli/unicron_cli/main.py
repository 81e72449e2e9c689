"""The command `unicron`. Everything heavy is imported by the command that needs it."""

import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from unicron.errors import UnicronError
from unicron_cli import (
    chaos,
    checkpoints,
    credentials,
    goodput,
    local,
    notify,
    orders,
    plan,
    rules,
    run,
    simulate,
    stored,
    straggler,
    straggler_live,
    task,
    top,
    watch,
)
from unicron_cli.output import Nats, say

app = typer.Typer(
    name="unicron",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata  # noqa: PLC0415

        say(f"unicron {importlib.metadata.version('unicron')}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_version, is_eager=True, help="Show which version this is.")
]


@app.callback()
def _root(nats: Nats = None, version: Version = False) -> None:  # noqa: ARG001 its callback has shown it
    """Train large models on machines that fail: see, order and break a Unicron cluster."""
    if nats:
        os.environ["UNICRON_NATS_URL"] = nats


_COMMANDS: list[Callable[..., None]] = [
    local.demo,
    local.up,
    local.down,
    orders.provision,
    orders.backup,
    orders.restore,
    orders.submit,
    orders.remove,
    watch.status,
    top.top,
    watch.tasks,
    watch.nodes,
    orders.drain,
    watch.events,
    watch.logs,
    goodput.goodput,
    local.doctor,
]
for _command in _COMMANDS:
    app.command()(_command)
app.command(context_settings={"allow_interspersed_args": False})(run.run)  # what comes later is the program's
app.add_typer(task.app, name="task")
app.add_typer(plan.app, name="plan")
app.add_typer(chaos.app, name="chaos")
app.add_typer(checkpoints.app, name="checkpoints")
app.add_typer(credentials.app, name="credentials")
app.add_typer(simulate.app, name="simulate")
app.add_typer(rules.app, name="rules")
app.add_typer(notify.app, name="notify")
app.add_typer(straggler.app, name="straggler")
straggler_live.mount(straggler.app)
stored.mount(checkpoints.app)


@app.command(hidden=True)
def docs() -> None:
    """Print docs/events.md, made from the contracts."""
    from unicron_cli.docs import render  # noqa: PLC0415

    say(render(), nl=False)


def main() -> None:
    """Run the command line; errors that a person can mend are one line each, without a traceback."""
    logging.getLogger().addHandler(logging.NullHandler())  # what the bus logs, the errors say too
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: what a command began to run, it ends
    try:
        app(prog_name="unicron")
    except UnicronError as error:
        say(f"unicron: {error}", err=True)
        sys.exit(1)
