"""Wires the transition service up."""

from unicron import subjects
from unicron.runner import run_service
from unicron.service import Wiring
from unicron.settings import Settings
from unicron_transition.core import FACTS, TransitionCore
from unicron_transition.state import TransitionState

WIRING = Wiring(
    name="transition",
    core=TransitionCore,
    state=TransitionState,
    facts=subjects.events(*FACTS),
    telemetry=[],
)


def main() -> int:
    """Run the service until SIGTERM; return the exit code."""
    return run_service(WIRING, Settings.load())
