"""The jobs of this user, as Slurm's queue shows them: which of them goes on with a task that one could not end."""

import os
import re
from collections.abc import Mapping, Sequence

from unicron.errors import InvalidInputError
from unicron.slurm import shown, tools
from unicron.slurm.shown import JOB_COMING, JobQueued
from unicron_deploy.slurm.allocation import Allocation

_AFTER = re.compile(r"after(?:any|ok|corr):([0-9]+)")
"""Jobs that are waited for, until they end, and not until they fail."""


def own_jobs() -> list[JobQueued]:
    """Return this user's jobs, those included that have ended lately. Raises as `tools.run` does."""
    words = ["--all", "--noheader", "--states=all", "--user", str(os.getuid()), "-o", shown.QUEUE]
    return shown.queue(tools.ask("squeue", *words))


def this_job(jobs: Sequence[JobQueued], allocation: Allocation) -> JobQueued:
    """Return the job that this process runs in.

    Raises:
        InvalidInputError: Slurm does not show it.
    """
    found = next((each for each in jobs if each.job == allocation.job), None)
    if found is None:
        raise InvalidInputError(
            f"squeue shows no job {allocation.job} of this user: run this within a job of Slurm, by sbatch or salloc"
        )
    return found


def restarts(job: str) -> int:
    """Return how often a job was requeued. Raises as `tools.run` does."""
    found = shown.pairs(tools.ask("scontrol", "--oneliner", "show", "job", job)).get("Restarts", "")
    return int(found) if found.isdecimal() else 0


def alive(jobs: Sequence[JobQueued]) -> set[str]:
    """Return the ids of jobs that have not ended, and of their arrays."""
    return {number for each in jobs if each.alive for number in (each.job, each.family)}


def overwrites(environ: Mapping[str, str]) -> bool:
    """Return whether Slurm begins the output of this job anew each time it starts it. Raises as `tools.run` does.

    Args:
        environ: of the job; only that of a script names its node.
    """
    if "SLURMD_NODENAME" not in environ:
        return False
    if mode := environ.get("SLURM_OPEN_MODE", ""):
        return not mode.startswith("a")
    return not shown.appends(tools.ask("scontrol", "show", "config"))


def heir(jobs: Sequence[JobQueued], own: JobQueued) -> str:
    """Return the job that waits to go on where one ends: of its array, or of its name and folder behind it.

    It is empty where there is none: one that runs something else, as what evaluates a model, has another name.
    """
    coming = [each for each in jobs if each.state in JOB_COMING and each.job != own.job]
    for each in coming:
        if each.family == own.family:
            return each.family
    for each in coming:
        behind = {own.job, own.family}.intersection(_AFTER.findall(each.waits_for))
        if each.label == own.label and (behind or "singleton" in each.waits_for):
            return each.job
    return ""
