"""Wires the registry up: settings, core, and what it listens to."""

from typing import ClassVar

from unicron import subjects
from unicron.runner import run_service
from unicron.service import Wiring
from unicron.settings import Settings
from unicron_registry.core import RegistryCore
from unicron_registry.state import RegistryState


class RegistrySettings(Settings, kw_only=True, frozen=True):
    """The registry: which nodes and tasks there are."""

    process: ClassVar[str] = "registry"


def wiring(settings: RegistrySettings) -> Wiring:
    """Return what the registry is made of.

    It reads every fact, so that it is also the one that puts aside those that nobody can read.
    """
    _, telemetry = subjects.listened(RegistryCore().handlers)
    return Wiring(
        name=settings.process,
        core=RegistryCore,
        state=RegistryState,
        facts=[subjects.FACTS],
        telemetry=telemetry,
    )


def main() -> int:
    """Run the registry until it is told to stop; return the exit status."""
    return run_service(RegistrySettings, wiring)
