"""Names of snapshots' files in the memory of a node; they begin with the worker that wrote them."""

from unicron.contracts.states import KEPT, LENT, SAVED, TURNS


def exported_name(worker: str, epoch: int, *, kept: bool = False) -> str:
    """Return the name of the snapshot that a worker exports in a membership; one that is `kept` outlives the worker."""
    return f"{worker}.{epoch}.{KEPT if kept else LENT}"


def saved_name(worker: str, turn: int) -> str:
    """Return the name of the file that a worker saves its state to in this turn."""
    return f"{worker}.{turn}.{SAVED}"


def saved_names(worker: str) -> list[str]:
    """Return the names of all files that a worker saves its state to."""
    return [saved_name(worker, turn) for turn in range(TURNS)]
