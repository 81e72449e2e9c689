"""Wires the registry up: settings, core, what it listens to, and the switches that it watches beside."""

from functools import partial
from pathlib import Path
from typing import ClassVar

from unicron import subjects
from unicron.bus.protocol import Bus
from unicron.client import Client
from unicron.service.runner import run_service
from unicron.service.service import Service, Wiring
from unicron.settings import Settings
from unicron_registry.core import RegistryCore
from unicron_registry.state import RegistryState
from unicron_registry.switches import Switches
from unicron_registry.watchdogs import IDLE_S


class RegistrySettings(Settings, kw_only=True, frozen=True):
    """The registry: which nodes and tasks there are.

    Attributes:
        switches: folder in which files are orders to tasks ([how](../howto/checkpoints.md#switches)). Anybody who may
            write there may give them.
        task_idle_s: seconds after which there is an alert for a task of which nothing runs.
    """

    process: ClassVar[str] = "registry"

    switches: str = ""
    task_idle_s: float = IDLE_S

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_seconds("task_idle_s")


def wiring(settings: RegistrySettings) -> Wiring:
    """Return what the registry is made of.

    It reads every fact, so that it is also the one that puts aside those that nobody can read.
    """
    listened, telemetry = subjects.listened(RegistryCore().handlers)
    return Wiring(
        name=settings.process,
        core=partial(RegistryCore, idle_s=settings.task_idle_s),
        state=RegistryState,
        facts=[subjects.FACTS, *(each for each in listened if not subjects.matches([subjects.FACTS], each))],
        telemetry=telemetry,
        provisions=True,
    )


async def watch_switches(settings: RegistrySettings, bus: Bus, _: Service) -> None:
    """Obey what users order by files, where a folder is set."""
    if settings.switches:
        await Switches(Path(settings.switches), Client(bus)).watch()


def main() -> int:
    """Run the registry until it is stopped; return the exit status."""
    return run_service(RegistrySettings, wiring, beside=watch_switches)
