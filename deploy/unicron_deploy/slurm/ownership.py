"""Which job and which task a folder is of: no job takes for its own what another one has left there.

Numbers of jobs come again: with another cluster that shares the home, or as an admin has Slurm begin anew. So
`work.json` in the folder says of which cluster its job is, when that was submitted, and what it runs. A job that finds
its number taken uses a folder beside that, as the other one's may be in use just now.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import NamedTuple

import msgspec

from unicron.contracts.tasks import TaskSpec
from unicron.errors import InvalidInputError
from unicron.printable import shown
from unicron_deploy.slurm.outcome import GIVEN_UP, Outcome, outcome

RECORD = "work.json"


class Owner(msgspec.Struct, kw_only=True, frozen=True):
    """A job and its task, as they stand in the folder.

    Attributes:
        cluster: Slurm's name of it.
        family: the id that the job shares with all of its array; its own where it is of none.
        job: the last one that had the folder.
        submitted: Unix seconds; of an array one moment for all.
        restarts: how often it was requeued, by which Slurm changes when it was submitted.
        spec: of the task.
        claimed: Unix seconds at which the job got the folder.
    """

    cluster: str
    family: str
    job: str
    submitted: float
    restarts: int
    spec: TaskSpec
    claimed: float = 0.0


class Claim(NamedTuple):
    """A folder that a job has for itself.

    Attributes:
        root: of the folder.
        before: how the last job there ended, None where none has.
        note: for a person, where it is not the folder that they expect.
        held: keeps others out as long as it is open.
    """

    root: Path
    before: Outcome | None
    note: str
    held: int


def claim_given(root: Path, own: Owner) -> Claim:
    """Have the folder that a user has named for a job, whichever was there before: its task has to be the same.

    Raises:
        InvalidInputError: another job works there, or it is another task's; says what to do.
    """
    return _take(root, own, _check_given(root, own))


def claim(base: Path, own: Owner, queued: AbstractSet[str]) -> Claim:
    """Have a folder in `base` for a job: its own, else one where its task was left unfinished, else a new one.

    Args:
        base: where the folders of all jobs are that were submitted there.
        own: the job.
        queued: ids of the user's jobs that have not ended, and of their arrays.

    Raises:
        InvalidInputError: its task was left unfinished in several, or was changed meanwhile; says what to do.
    """
    base.mkdir(parents=True, exist_ok=True)
    with _locked(base / "claims.lock"):
        records = _records(base)
        mine = [(each.claimed, root) for root, each in records.items() if _is_of_same_job(each, own)]
        if mine:
            root = max(mine)[1]
            return _take(root, own, _check(root, records[root], own))
        others = queued - {own.job, own.family}
        left = [root for root, each in records.items() if _was_left(root, each, own, others)]
        if len(left) > 1:
            raise InvalidInputError(
                f"{own.spec.name} was left unfinished in {', '.join(map(str, left))}: give one of them with --dir to "
                "go on there, or a new folder to begin again"
            )
        if left:
            note = (
                f"goes on with what job {records[left[0]].job} has left in {left[0]}; to begin again, give a new --dir"
            )
            return _take(left[0], own, outcome(left[0]), note)
        return _take_new(base, own, records)


def _is_of_same_job(found: Owner, own: Owner) -> bool:
    """Return whether a folder is of this job, which may have several if it runs several programs."""
    same_job = (found.cluster, found.family) == (own.cluster, own.family)
    return same_job and (own.restarts > 0 or found.submitted == own.submitted) and _work(found) == _work(own)


def _was_left(root: Path, found: Owner, own: Owner, others: AbstractSet[str]) -> bool:
    """Return whether this task was left here by a job of this cluster, and no other job is there to go on with it."""
    before = outcome(root)
    if (found.cluster, found.spec) != (own.cluster, own.spec) or (before is not None and not before.unfinished):
        return False
    return others.isdisjoint({found.job, found.family, before.heir if before else ""})


def _words(owner: Owner) -> str:
    return shown(" ".join(owner.spec.command))


def _work(owner: Owner) -> tuple[str, str, list[str]]:
    return owner.spec.name, owner.spec.workdir, owner.spec.command


def _check_given(root: Path, own: Owner) -> Outcome | None:
    before, found = outcome(root), record(root)
    if found is not None:
        return _check(root, found, own)
    if before is not None and not before.unfinished:
        raise InvalidInputError(
            f"{root}: a task has ended here, and nothing says which one it was: give another --dir, or remove this one"
        )
    return before


def _check(root: Path, found: Owner, own: Owner) -> Outcome | None:
    """Return how the last job in a folder ended; raise where it is another task's, unless that one has failed."""
    before = outcome(root)
    if found.spec == own.spec or (before is not None and before.status == GIVEN_UP):
        return before if found.spec == own.spec else None
    changes = "; ".join(
        f"{field} {shown(getattr(found.spec, field))} -> {shown(getattr(own.spec, field))}"
        for field in TaskSpec.__struct_fields__
        if getattr(found.spec, field) != getattr(own.spec, field)
    )
    raise InvalidInputError(
        f"{root} is of another task, of job {found.job} of cluster {found.cluster} ({changes}): submit that one as it "
        "was to go on with it, or give another --dir"
    )


def _take_new(base: Path, own: Owner, records: dict[Path, Owner]) -> Claim:
    """Have the first folder that is called after the job and is not there yet."""
    number, root = 1, base / own.family
    while root.exists():
        number += 1
        root = base / f"{own.family}-{number}"
    note = ""
    if number > 1:
        found = records.get(base / own.family)
        whose = (
            f"job {found.job} of cluster {found.cluster}, for {_words(found)}" if found else "nobody knows which job"
        )
        note = f"the folder is {root}, as {base / own.family} is of {whose}; that one stays as it is"
    return _take(root, own, None, note)


def _take(root: Path, own: Owner, before: Outcome | None, note: str = "") -> Claim:
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    held = lock(root)
    found, submitted = record(root), own.submitted
    if found is not None and own.restarts and (found.cluster, found.family) == (own.cluster, own.family):
        submitted = found.submitted  # as other jobs of the array have it
    owner = msgspec.structs.replace(own, submitted=submitted, claimed=time.time())
    scratch = root / f"{RECORD}.new"
    scratch.write_bytes(msgspec.json.encode(owner))
    scratch.replace(root / RECORD)
    return Claim(root, before, note, held)


def _records(base: Path) -> dict[Path, Owner]:
    found = {path.parent: record(path.parent) for path in sorted(base.glob(f"*/{RECORD}"))}
    return {root: each for root, each in found.items() if each is not None}


def record(root: Path) -> Owner | None:
    """Return whose a folder is, None where nothing says so, or nothing that can be read."""
    try:
        return msgspec.json.decode((root / RECORD).read_bytes(), type=Owner)
    except (OSError, msgspec.MsgspecError):
        return None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Have nobody else choose a folder at the same time."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def lock(root: Path) -> int:
    """Have a folder for this process alone, as long as it lives.

    Raises:
        InvalidInputError: another one has it.
    """
    held = os.open(root / "job.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise InvalidInputError(
            f"another job works in {root}: wait for its end, as with --dependency=singleton, or give another --dir"
        ) from None
    return held
