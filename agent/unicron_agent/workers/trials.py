"""The trial of a worker that has ended: others may wait for its outcome, and nobody else is there to tell it."""

import asyncio
from collections.abc import Callable

from unicron.contracts.time_limits import TRIAL_S
from unicron.snapshots.trials import Trial
from unicron_agent.stimuli import TrialEnded
from unicron_agent.workers.reports import report
from unicron_agent.workers.workers import LocalWorker

LOOK_S = 0.2


async def outlive(trial: Trial, node: str, worker: LocalWorker | None, on_end: Callable[[TrialEnded], None]) -> None:
    """Wait for the outcome of a trial, if anybody does, and remove it.

    Args:
        trial: that may be there.
        node: of this agent.
        worker: that has ended; None where it is not known.
        on_end: is called with the outcome.
    """
    outcome = None
    try:
        if worker is not None and not (worker.stopping or worker.finished) and trial.is_awaited:
            async with asyncio.timeout(TRIAL_S):
                while (outcome := trial.outcome()) is None:
                    await asyncio.sleep(LOOK_S)
    except TimeoutError:
        return
    finally:
        trial.remove()
    if worker is not None and outcome is not None:
        for fact in report(node, worker, outcome):
            on_end(TrialEnded(fact))
