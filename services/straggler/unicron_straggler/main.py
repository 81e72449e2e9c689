"""Wires the straggler service up: settings, core, and what it listens to."""

import math
from functools import partial
from typing import ClassVar

from unicron import subjects
from unicron.errors import InvalidInputError
from unicron.service.runner import run_service
from unicron.service.service import Wiring
from unicron.settings import PREFIX, Settings
from unicron_straggler.core import StragglerCore
from unicron_straggler.state import StragglerLimits, StragglerState


class StragglerSettings(Settings, kw_only=True, frozen=True):
    """The straggler service: finds workers that slow a task down.

    Attributes:
        straggler_window: recorded iterations that are analysed together, a window.
        straggler_windows: slow windows in a row, with the same cause, that make an alert; as many others end it.
        straggler_threshold: slowdown above which an iteration and a window are slow.
        straggler_drain: whether the node of a slow worker is drained, where the other nodes have enough workers for the
            task. Never a second one before the task got well.
    """

    process: ClassVar[str] = "straggler"

    straggler_window: int = StragglerLimits().window
    straggler_windows: int = StragglerLimits().windows
    straggler_threshold: float = StragglerLimits().threshold
    straggler_drain: bool = StragglerLimits().drain

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("straggler_window", "straggler_windows"):
            if getattr(self, name) < 1:
                raise InvalidInputError(f"{PREFIX}{name.upper()} {getattr(self, name)}: give 1 or more")
        if not (math.isfinite(self.straggler_threshold) and self.straggler_threshold >= 1):
            value = f"{PREFIX}STRAGGLER_THRESHOLD {self.straggler_threshold}"
            raise InvalidInputError(f"{value}: give a finite ratio of at least 1, such as 1.1")

    @property
    def limits(self) -> StragglerLimits:
        """The core's part of the settings."""
        return StragglerLimits(
            window=self.straggler_window,
            windows=self.straggler_windows,
            threshold=self.straggler_threshold,
            drain=self.straggler_drain,
        )


def wiring(settings: StragglerSettings) -> Wiring:
    """Return what the straggler service is made of."""
    core = partial(StragglerCore, limits=settings.limits)
    facts, telemetry = subjects.listened(core(None).handlers)
    return Wiring(
        name=settings.process,
        core=core,
        state=StragglerState,
        facts=facts,
        telemetry=telemetry,
    )


def main() -> int:
    """Run the straggler service until it is stopped; return the exit status."""
    return run_service(StragglerSettings, wiring)
