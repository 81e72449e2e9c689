"""The folders that jobs have in `.unicron/slurm`: which job each is of, where its cluster is, and how it ended."""

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from unicron.errors import UnicronError
from unicron_deploy.rights import OPERATOR
from unicron_deploy.slurm.outcome import OUTCOME, Outcome, outcome
from unicron_deploy.slurm.ownership import RECORD, record
from unicron_deploy.slurm.queue import alive, own_jobs

URL = "url"
"""File with the address of a job's cluster."""


class JobFolder(NamedTuple):
    """A job's folder.

    Attributes:
        job: the last that had it.
        what: it runs, in words.
        task: its name.
        url: of its cluster; empty where that has not begun.
        ended: how the job ended; None while it works, or where it was killed.
    """

    root: Path
    job: str
    what: str
    task: str
    url: str
    ended: Outcome | None

    @property
    def key(self) -> Path:
        """Path of the key with which people reach its cluster."""
        return self.root / "keys" / OPERATOR / f"{OPERATOR}.nk"


def job_folder(root: Path) -> JobFolder | None:
    """Return what a folder says of its job; None where it is of none."""
    owner, url = record(root), ""
    if owner is None:
        return None
    with contextlib.suppress(OSError, UnicodeDecodeError):
        url = (root / URL).read_text()
    ended = None
    with contextlib.suppress(OSError):
        if (root / OUTCOME).stat().st_mtime_ns >= (root / RECORD).stat().st_mtime_ns:
            ended = outcome(root)
    return JobFolder(root, owner.job, " ".join(owner.spec.command), owner.spec.name, url, ended)


def job_folders(base: Path) -> list[JobFolder]:
    """Return the folders of jobs in `base`, the one that began last first."""
    roots = sorted((path.parent for path in base.glob(f"*/{RECORD}")), key=lambda root: -_begun(root))
    return [found for root in roots if (found := job_folder(root))]


def working(found: Iterable[JobFolder]) -> list[JobFolder]:
    """Return those whose job works: one that was killed has written no end, but Slurm does not have it any more."""
    unended = [each for each in found if each.ended is None]
    with contextlib.suppress(UnicronError):  # Slurm is not here, or does not answer
        living = alive(own_jobs()) if unended else set()
        return [each for each in unended if each.job in living]
    return unended


def _begun(root: Path) -> float:
    with contextlib.suppress(OSError):
        return (root / RECORD).stat().st_mtime
    return 0.0
