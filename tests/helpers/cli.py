"""The command line, as a user types it: calls, and what they print."""

import io
import json
import os
import subprocess
import sys

from rich.console import Console
from typer.testing import CliRunner
from unicron_cli.main import app

from helpers import commands

UNICRON = [sys.executable, "-m", "unicron_cli"]
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("UNICRON_")} | {"COLUMNS": "200"}


def call(command, environment=CLEAN, cwd=None):
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, check=False)


def invoke(*words):
    """Call a command in this process; return what it prints, or raise the error that it would print."""
    done = CliRunner().invoke(app, [*map(str, words)])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def printed(view, width=200):
    """Return what a person sees of a table."""
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(view)
    return console.export_text()


KEYS = {}
"""Path of the operator's key, by the address of the bus that knows it."""


def reaching(url):
    """Return the environment of a command that reaches the bus at `url`."""
    return CLEAN | {"UNICRON_NATS_URL": url} | ({"UNICRON_NATS_NKEY": KEYS[url]} if url in KEYS else {})


def unicron(*words, url=None, code=0, cwd=None):
    environment = reaching(url) if url else CLEAN
    ended, out, err = commands.call(words, environment, cwd)
    assert ended == code, f"{words}: {ended}\n{out}\n{err}"
    assert "Traceback" not in err
    return err if code else out


def data(*words, **options):
    return json.loads(unicron(*words, "--json", **options))
