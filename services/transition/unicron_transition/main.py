"""Wires the transition service up: settings, core, and what it listens to."""

import math
from functools import partial
from typing import ClassVar

from unicron import subjects
from unicron.errors import InvalidInputError
from unicron.service.runner import run_service
from unicron.service.service import Wiring
from unicron.settings import PREFIX, Settings
from unicron_transition.core import TransitionCore
from unicron_transition.deadlines import TIMEOUT_S, WaitKind
from unicron_transition.observing import ObservingCore
from unicron_transition.state import TransitionState


class TransitionSettings(Settings, kw_only=True, frozen=True):
    """The transition service: failures and plans become commands, in order.

    Attributes:
        idle_s: seconds that a task without slots keeps its state in the nodes' memory. Then it is written to its
            storage, if it has one.
        observe_only: whether the cluster only says what it would do by itself ([how](../howto/observe-only.md)). Users'
            orders are obeyed.
    """

    process: ClassVar[str] = "transition"

    idle_s: float = TIMEOUT_S[WaitKind.IDLE]
    observe_only: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (math.isfinite(self.idle_s) and self.idle_s >= 0):
            raise InvalidInputError(f"{PREFIX}IDLE_S {self.idle_s}: give seconds, 0 or more")


def wiring(settings: TransitionSettings) -> Wiring:
    """Return what the transition service is made of."""
    core = ObservingCore if settings.observe_only else TransitionCore
    facts, telemetry = subjects.listened(core().handlers)
    return Wiring(
        name=settings.process,
        core=partial(core, idle_s=settings.idle_s),
        state=TransitionState,
        facts=facts,
        telemetry=telemetry,
    )


def main() -> int:
    """Run the transition service until it is stopped; return the exit status."""
    return run_service(TransitionSettings, wiring)
