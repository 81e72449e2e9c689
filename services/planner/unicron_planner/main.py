"""Wires the planner up: settings, core, and what it listens to."""

import contextlib
import math
import time
from typing import ClassVar

from unicron import subjects
from unicron.errors import InvalidInputError
from unicron.files import temporary_folder
from unicron.service.runner import run_service
from unicron.service.service import Wiring
from unicron.settings import PREFIX, Settings
from unicron_planner import kernels
from unicron_planner.core import PlannerCore
from unicron_planner.estimates import PlannerOptions
from unicron_planner.lookup import warm_up
from unicron_planner.state import LEARNT, PlannerState


class PlannerSettings(Settings, kw_only=True, frozen=True):
    """The planner: which task gets how many workers, and which.

    Attributes:
        transition_s: seconds in which a reconfigured task earns nothing, until some were measured (D_transition).
        prior_failures: node failures seen before, from which the failure rate starts.
        prior_worker_hours: worker-hours in which they were seen.
        use_measured: whether measured iteration times go before users' tables. Set false where workers share cores.
        spare_nodes: nodes that are kept free to replace lost ones.
        estimate_error: part of 1 by which an unmeasured throughput may be off. A plan takes workers from running tasks
            only for a larger gain. 0 allows any gain.
    """

    process: ClassVar[str] = "planner"

    transition_s: float = PlannerOptions().transition_s
    prior_failures: float = PlannerOptions().prior_failures
    prior_worker_hours: float = PlannerOptions().prior_worker_s / 3600
    use_measured: bool = PlannerOptions().use_measured
    spare_nodes: int = PlannerOptions().spare_nodes
    estimate_error: float = PlannerOptions().estimate_error

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (math.isfinite(self.transition_s) and self.transition_s >= 0):
            raise InvalidInputError(f"{PREFIX}TRANSITION_S {self.transition_s}: give seconds, 0 or more")
        if self.spare_nodes < 0:
            raise InvalidInputError(f"{PREFIX}SPARE_NODES {self.spare_nodes}: give a number of nodes, 0 or more")
        if not 0 <= self.estimate_error < 1:
            raise InvalidInputError(f"{PREFIX}ESTIMATE_ERROR {self.estimate_error}: give a part of 1, such as 0.05")
        for name in ("prior_failures", "prior_worker_hours"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InvalidInputError(f"{PREFIX}{name.upper()} {value}: give a finite number above 0")


def wiring(settings: PlannerSettings) -> Wiring:
    """Return what the planner is made of."""
    options = PlannerOptions(
        transition_s=settings.transition_s,
        prior_failures=settings.prior_failures,
        prior_worker_s=settings.prior_worker_hours * 3600,
        use_measured=settings.use_measured,
        spare_nodes=settings.spare_nodes,
        estimate_error=settings.estimate_error,
    )
    facts, telemetry = subjects.listened(PlannerCore(options=options).handlers)
    return Wiring(
        name=settings.process,
        core=lambda state: PlannerCore(state, options, time.perf_counter),
        state=PlannerState,
        facts=facts,
        telemetry=telemetry,
        learnt=LEARNT,
    )


def warm_wiring(settings: PlannerSettings) -> Wiring:
    """Return `wiring`, with everything compiled that an answer would else wait for."""
    with contextlib.suppress(RuntimeError, InvalidInputError):  # it is compiled at each start
        kernels.keep_in(str(temporary_folder() / "compiled"))
    warm_up()
    return wiring(settings)


def main() -> int:
    """Run the planner until it is stopped; return the exit status."""
    return run_service(PlannerSettings, warm_wiring)
