"""Lists checkpoints, finds the newest that passes its check, and prunes those no longer needed."""

import re

from msgspec.structs import replace

from unicron.contracts.base import Record
from unicron.errors import CheckpointError
from unicron.snapshots.storage.check import faults
from unicron.snapshots.storage.manifest import MANIFEST, REWOUND, Manifest, manifest_in
from unicron.snapshots.storage.root import MARKER, UNFINISHED, Storage, check_owned

FEWEST = 2
"""Checkpoints that pruning leaves at least: the one before the newest is the way out should that be no good."""

UNFINISHED_S = 24 * 3600.0
"""How long nothing comes to an attempt before it counts as given up, and how long a rewound checkpoint stays."""

_FOLDER = re.compile(r"step-(\d+)(\.[0-9a-f]{8})*(\.part)?")


class Stored(Record, kw_only=True, frozen=True):
    """A folder of a task, as far as Unicron made it.

    Attributes:
        folder: its name.
        address: path or URL, as `torch.distributed.checkpoint.load` takes it for its `checkpoint_id`.
        iteration: from before whose update the state is.
        manifest: what the checkpoint says of itself; None where it is unfinished or can't be read.
        fault: why the manifest can't be read, empty otherwise.
        modified: when something was last written to it, in Unix seconds; 0 where the storage does not say.
        rewound: the task went on from an earlier one, and this one no longer counts.
    """

    folder: str
    address: str
    iteration: int
    manifest: Manifest | None = None
    fault: str = ""
    modified: float = 0.0
    rewound: bool = False

    @property
    def unfinished(self) -> bool:
        """Whether it is being written, or was given up."""
        return self.manifest is None and not self.fault

    @property
    def counts(self) -> bool:
        """Whether it is complete, and no earlier one was preferred to it."""
        return not (self.unfinished or self.rewound)


class Skipped(Record, kw_only=True, frozen=True):
    """A checkpoint that is not used.

    Attributes:
        address: path or URL.
        faults: why.
    """

    address: str
    faults: list[str]


class Newest(Record, kw_only=True, frozen=True):
    """The newest checkpoint that passes its check.

    Attributes:
        stored: None where none does.
        skipped: newer ones that do not.
    """

    stored: Stored | None
    skipped: list[Skipped]


class Pruned(Record, kw_only=True, frozen=True):
    """The result of pruning.

    Attributes:
        removed: paths or URLs of checkpoints and of attempts that were given up.
        kept: of the checkpoints that are left, newest first.
        skipped: newer ones than the newest that passes its check.
    """

    removed: list[str]
    kept: list[str]
    skipped: list[Skipped]


def tasks(storage: Storage) -> list[str]:
    """Return the tasks that have checkpoints."""
    found = storage.entries()
    return sorted(name for name, entry in found.items() if entry.folder and MARKER in storage.entries(name))


def list_checkpoints(storage: Storage, task: str) -> list[Stored]:
    """Return the checkpoints of a task, complete or not, newest first.

    Raises:
        CheckpointError: its folder is not there, or is somebody else's.
    """
    check_owned(storage, task)
    listed = {name: each for name, each in storage.entries(task).items() if each.folder and _FOLDER.fullmatch(name)}
    every = [_stored(storage, task, name, entry.modified) for name, entry in listed.items()]
    return sorted(every, key=lambda each: (each.iteration, each.manifest.written if each.manifest else 0), reverse=True)


def newest(storage: Storage, task: str, since: float = 0.0, before: int = -1) -> Newest:
    """Return the newest checkpoint whose files are all as they were written; all of it is read for that.

    Args:
        storage: where it is.
        task: whose it is.
        since: Unix seconds; what was written before does not count.
        before: iteration from which on none counts; -1: all do.

    Raises:
        CheckpointError: the task's folder is not there or is somebody else's, or the storage can't be read.
    """
    every = _since(list_checkpoints(storage, task), since)
    return _newest(storage, task, [each for each in every if before < 0 or each.iteration < before])


def rewind(storage: Storage, task: str, iteration: int, since: float = 0.0) -> Newest:
    """Have later checkpoints than that of an iteration count no more, if that one passes its check; return it.

    Args:
        storage: where it is.
        task: whose it is.
        iteration: of it.
        since: Unix seconds; what was written before does not count.

    Raises:
        CheckpointError: the task's folder is not there or is somebody else's, or the storage can't be read or written.
    """
    every = _since(list_checkpoints(storage, task), since)
    best = _newest(storage, task, [each for each in every if each.iteration == iteration])
    for each in every if best.stored else ():
        if each.counts and each.iteration > iteration:
            storage.write(b"{}", task, each.folder, REWOUND)
    return best


def _since(every: list[Stored], since: float) -> list[Stored]:
    """Return those that were written since then, or of an unknown time."""
    return [each for each in every if each.manifest is None or each.manifest.written >= since]


def prune(storage: Storage, task: str, keep: int, now: float, since: float = 0.0) -> Pruned:
    """Remove all but the newest `keep` checkpoints, and attempts that were given up or rewound a day ago.

    The newest that passes its check stays, however many newer ones there are.

    Args:
        storage: where they are.
        task: whose they are.
        keep: how many, at least 2.
        now: Unix seconds.
        since: likewise; what was written before stays and does not count.

    Raises:
        CheckpointError: `keep` is too low, or the storage can't be read or written.
    """
    if keep < FEWEST:
        raise CheckpointError(
            f"{keep} checkpoints are too few to keep: it takes {FEWEST}, for the newest may turn out to be damaged"
        )
    every = _since(list_checkpoints(storage, task), since)
    complete = [each for each in every if each.counts]
    best = _newest(storage, task, complete)
    kept = complete[:keep] + [each for each in complete[keep:] if each == best.stored]
    given_up = [each for each in every if not each.counts and 0 < each.modified < now - UNFINISHED_S]
    removed = [each for each in complete if each not in kept] + given_up
    for each in removed:
        storage.remove(task, each.folder)
    return Pruned(
        removed=[each.address for each in removed], kept=[each.address for each in kept], skipped=best.skipped
    )


def _newest(storage: Storage, task: str, every: list[Stored]) -> Newest:
    skipped: list[Skipped] = []
    for each in every:
        if not each.counts:
            continue
        wrong = [each.fault] if each.manifest is None else faults(storage, (task, each.folder), each.manifest)
        if not wrong:
            return Newest(stored=each, skipped=skipped)
        skipped.append(Skipped(address=each.address, faults=wrong))
    return Newest(stored=None, skipped=skipped)


def _stored(storage: Storage, task: str, folder: str, modified: float) -> Stored:
    """Return what is known of a folder; `modified` is its own, for it may be empty."""
    files, shape = storage.entries(task, folder), _FOLDER.fullmatch(folder)
    made = Stored(
        folder=folder,
        address=storage.address(task, folder),
        iteration=int(shape[1]) if shape else 0,
        modified=max((entry.modified for entry in files.values()), default=modified),
        rewound=REWOUND in files,
    )
    if folder.endswith(UNFINISHED) or MANIFEST not in files:
        return made
    try:
        manifest = manifest_in(storage.read(task, folder, MANIFEST), storage.address(task, folder, MANIFEST))
    except CheckpointError as error:
        return replace(made, fault=str(error))
    if (manifest.task, manifest.iteration) != (task, made.iteration):
        return replace(made, fault=f"{made.address} is iteration {manifest.iteration} of {manifest.task}: it was moved")
    return replace(made, manifest=manifest)
