"""Wires the transition service up: settings, core, and what it listens to."""

from typing import ClassVar

from unicron import subjects
from unicron.runner import run_service
from unicron.service import Wiring
from unicron.settings import Settings
from unicron_transition.core import TransitionCore
from unicron_transition.state import TransitionState, migrate_1, migrate_2


class TransitionSettings(Settings, kw_only=True, frozen=True):
    """The transition service: failures and plans become commands, in order."""

    process: ClassVar[str] = "transition"


def wiring(settings: TransitionSettings) -> Wiring:
    """Return what the transition service is made of."""
    facts, telemetry = subjects.listened(TransitionCore().handlers)
    return Wiring(
        name=settings.process,
        core=TransitionCore,
        state=TransitionState,
        facts=facts,
        telemetry=telemetry,
        migrations=(migrate_1, migrate_2),
    )


def main() -> int:
    """Run the transition service until it is told to stop; return the exit status."""
    return run_service(TransitionSettings, wiring)
