"""Wires the registry up: its core, what it hears, and the bus."""

import sys

from unicron import subjects
from unicron.contracts.events import IterationFinished
from unicron.errors import UnicronError
from unicron.runner import run_service
from unicron.service import Wiring
from unicron.settings import Settings
from unicron_registry.core import Registry
from unicron_registry.state import RegistryState


def wiring() -> Wiring:
    """Return what the registry is made of.

    It reads every fact, so that it is also the one that puts aside those that nobody can read.
    """
    return Wiring(
        name="registry",
        core=Registry,
        state=RegistryState,
        facts=[subjects.FACTS],
        telemetry=subjects.events(IterationFinished),
        answers=True,
    )


def main() -> int:
    """Run the registry until it is told to stop; return the exit status."""
    try:
        return run_service(wiring(), Settings.load())
    except UnicronError as error:
        print(f"registry: {error}", file=sys.stderr)  # noqa: T201
        return 1
