"""The command `unicron`: what there is, and the modules of the commands, of which only the one that is called loads."""

import logging
import os
import signal
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
import typer.core

from unicron import __version__
from unicron.errors import UnicronError
from unicron_cli.output import Nats, console, say

COMMANDS = {
    "init": (
        "init",
        "Write what a cluster in production needs: keys, certificates, configuration and what starts it, by host.",
    ),
    "demo": ("local", "Train two models on an embedded cluster while faults strike it, and report how it healed."),
    "up": ("local", "Start an embedded cluster on this machine, in the background; return when it is ready."),
    "down": ("local", "Stop the embedded cluster; its journal and options stay, so that `up` goes on where it was."),
    "provision": ("orders", "Make the streams and buckets on the bus, or bring them to what this version needs."),
    "backup": ("orders", "Save the journal and the services' state to one file, and read it again."),
    "restore": ("orders", "Make the journal and the services' state anew from a backup, on servers that hold none."),
    "submit": ("orders", "Launch the task that FILE describes; the same file again changes nothing."),
    "remove": ("orders", "Stop a task and forget it."),
    "status": ("watch", "Show nodes, tasks and the plan in force."),
    "top": (
        "top",
        "Show the cluster at a glance, live: FLOP/s, nodes, tasks, failures, events. It ends with q or Ctrl-C.",
    ),
    "tasks": ("watch", "List the tasks."),
    "nodes": ("watch", "List the nodes and what runs on their slots."),
    "pools": ("pools", "Show the pools of machines: what each is to have and has, and why."),
    "drain": ("orders", "Take a node out of use: its workers move away, and it gets no more work until --undo."),
    "events": ("watch", "List facts and commands in the order in which they happened."),
    "logs": ("watch", "Show the last lines that a worker wrote, living or ended."),
    "goodput": (
        "goodput",
        "Show what the GPU time of tasks went into: training, and what failures cost by phase, cause and node.",
    ),
    "doctor": ("local", "Say what is missing on this machine or in the cluster, and how to mend it."),
    "run": ("run", "Run a distributed program on this machine as torchrun would, and again where it fails."),
    "task": ("task", "Show a task, pause it, have it go on, save it, stop it, or have it go back to a checkpoint."),
    "plan": ("plan", "What the planner decided, why, and what it would decide."),
    "chaos": ("chaos", "Break something of a running cluster, to see it heal."),
    "checkpoints": ("checkpoints", "What is saved of training, and what survives a failure."),
    "slurm": ("slurm", "Run a task as a job of Slurm, with a cluster of its own that heals."),
    "credentials": ("credentials", "Keys of the bus: give, replace and take them."),
    "token": ("token", "Join tokens: with one of them a machine that no one has named becomes a node."),
    "simulate": (
        "simulate",
        "Run policies through failures in virtual time; show what each earns and what failures cost it.",
    ),
    "rules": ("rules", "See what exceptions and lines of logs are taken for."),
    "notify": ("notify", "See which channels get which notices, try them, and acknowledge."),
    "straggler": ("straggler", "The costs of a job's stragglers, which they are, and why."),
    "docs": ("docs", "Print all messages, with subject, fields and units, and how to listen, as Markdown."),
}
"""By name: the module here that has the command, and what it does in a line."""


def load(name: str) -> Any:
    """Return a command: the function of that name in its module, or the module's group of commands."""
    module, text = COMMANDS[name]
    found = import_module(f"unicron_cli.{module}")
    holder = typer.Typer(callback=lambda: None)
    if hasattr(found, "app"):
        holder.add_typer(found.app, name=name, help=text)
    else:
        # what follows the program that is to be run is the program's
        settings = {"allow_interspersed_args": name != "run"}
        holder.command(name, context_settings=settings)(getattr(found, name))
    return typer.main.get_group(holder).commands[name]


class Commands(typer.core.TyperGroup):
    """All commands, by name and line as long as none is called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {name: typer.core.TyperCommand(name, help=text) for name, (_, text) in COMMANDS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Load the command that is called."""
        name, known, rest = super().resolve_command(ctx, args)
        return name, known and load(known.name or ""), rest


app = typer.Typer(
    name="unicron",
    cls=Commands,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        say(f"unicron {__version__}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_version, is_eager=True, help="Show which version this is.")
]


@app.callback(invoke_without_command=True)
def _root(ctx: typer.Context, nats: Nats = None, version: Version = False) -> None:  # noqa: ARG001 it was shown
    """Train large models on machines that fail: see, order and break a Unicron cluster."""
    if nats:
        os.environ["UNICRON_NATS_URL"] = nats
    if ctx.invoked_subcommand is None:
        _lead()


def _lead() -> None:
    """Say what is here, and what the next command is."""
    from unicron_cli.here import findings, lead  # noqa: PLC0415 --help needs none of it

    console().print(lead(findings(os.environ)), soft_wrap=True)
    say("all commands: unicron --help; what is missing on this machine: unicron doctor")


def main() -> None:
    """Run the command line; errors that a person can mend are one line each, without a traceback."""
    logging.getLogger().addHandler(logging.NullHandler())  # what the bus logs, the errors say too
    for number in (signal.SIGTERM, signal.SIGHUP):  # like Ctrl-C: what a command began to run, it ends
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, signal.default_int_handler)
    try:
        app(prog_name="unicron")
    except UnicronError as error:
        say(f"unicron: {error}", err=True)
        sys.exit(1)
