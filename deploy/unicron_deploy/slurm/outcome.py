"""How a job ended, as it stands in its folder for the next one there, and what Slurm is told of it."""

from pathlib import Path

import msgspec

from unicron.contracts.answers import TaskView
from unicron.contracts.tasks import TaskState

FINISHED, UNFINISHED, GIVEN_UP = 0, 75, 93
"""Exit statuses: it is done; it goes on in the next job (EX_TEMPFAIL); nothing that Slurm does again would help."""

OUTCOME = "outcome.json"


class Outcome(msgspec.Struct, kw_only=True, frozen=True):
    """How a job ended.

    Attributes:
        family: job, or the array that it was of.
        status: what became of the task.
        reason: of the task's end.
        heir: the job that goes on with it; empty where none is known.
        iteration: that the task has reached; -1 where it has none, or has not said so.
        blind: whether it computed, as a program does that does not say how far it is.
        lacks_nodes: whether the job had to be given up as nodes of it were lost or drained.
    """

    family: str
    status: int
    reason: str = ""
    heir: str = ""
    iteration: int = -1
    blind: bool = False
    lacks_nodes: bool = False

    @property
    def unfinished(self) -> bool:
        """Whether the task can be gone on with."""
        return self.status == UNFINISHED

    def settles(self, family: str) -> bool:
        """Return whether a job of this family has nothing to do any more: what failed is tried again by another."""
        return self.status == FINISHED or (self.status == GIVEN_UP and self.family == family)


def outcome(root: Path) -> Outcome | None:
    """Return how the last job in a folder ended, None where none has."""
    try:
        return msgspec.json.decode((root / OUTCOME).read_bytes(), type=Outcome)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def write(root: Path, ended: Outcome) -> None:
    """Keep how a job ended."""
    scratch = root / f"{OUTCOME}.new"
    scratch.write_bytes(msgspec.json.encode(ended))
    scratch.replace(root / OUTCOME)


def status_of(view: TaskView) -> int:
    """Return the exit status of a job whose task has ended so."""
    return FINISHED if view.state == TaskState.FINISHED else GIVEN_UP
