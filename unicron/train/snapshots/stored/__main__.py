"""The program that works on checkpoints for an agent: a request in JSON is the argument, the answer the last line.

An error is that line where the exit status is 1.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from unicron.contracts.storage import Saving, StoredPart, StoredState
from unicron.errors import CheckpointError, UnicronError
from unicron.snapshots.memory import checksum
from unicron.snapshots.storage.catalog import FEWEST, newest, prune, rewind
from unicron.snapshots.storage.root import Storage, claim


def write(request: dict[str, Any]) -> StoredPart:
    """Write the part of a place from a file in the node's memory, which is what its checksum says."""
    from unicron.train.snapshots.packed import unpack  # noqa: PLC0415 torch takes its time, and looking needs none
    from unicron.train.snapshots.stored.parts import write_part  # noqa: PLC0415

    saving, path = msgspec.convert(request["saving"], Saving), Path(request["path"])
    if checksum(path, request["size"]).hex() != request["checksum"]:
        raise CheckpointError(f"{path.name} is not what its checksum says, and is not stored")
    claim(Storage(saving.root), saving.task)
    return write_part(saving, request["place"], unpack(path, request["size"]))


def commit(request: dict[str, Any]) -> dict[str, Any]:
    """Complete a checkpoint, and remove what it makes superfluous."""
    from unicron.train.snapshots.stored.commit import commit as complete  # noqa: PLC0415 likewise

    saving = msgspec.convert(request["saving"], Saving)
    stored = complete(saving, msgspec.convert(request["parts"], list[StoredPart]), request["at"])
    try:
        removed = prune(Storage(saving.root), saving.task, FEWEST, time.time(), request["since"]).removed
    except CheckpointError:  # the checkpoint is there, and the next one tries again
        removed = []
    return {"address": stored.address, "removed": removed, "folder": stored.folder}


def find(request: dict[str, Any]) -> dict[str, Any]:
    """Look for the newest checkpoint of a task that passes its check, or for that of an iteration, to go back to."""
    storage, task = Storage(request["root"]), request["task"]
    if task not in storage.entries():
        return {"stored": None, "skipped": []}
    iteration, since = request["iteration"], request["since"]
    if iteration < 0:
        found = newest(storage, task, since, request["before"])
    else:
        found = rewind(storage, task, iteration, since)
    skipped = [f"{each.address}: {'; '.join(each.faults)}" for each in found.skipped]
    if found.stored is None or found.stored.manifest is None:
        return {"stored": None, "skipped": skipped}
    stored = StoredState(
        root=request["root"],
        folder=found.stored.folder,
        iteration=found.stored.iteration,
        layout=found.stored.manifest.layout,
    )
    return {"stored": stored, "skipped": skipped}


DO: dict[str, Callable[[dict[str, Any]], Any]] = {"write": write, "commit": commit, "find": find}


def main() -> int:
    """Answer the request; return the exit status."""
    request = msgspec.json.decode(sys.argv[1])
    try:
        answer, status = msgspec.json.encode(DO[request["do"]](request)).decode(), 0
    except (UnicronError, OSError, ValueError) as error:
        answer, status = " ".join(str(error).split()), 1
    print(answer, flush=True)  # noqa: T201 it is what this is for
    return status


if __name__ == "__main__":
    sys.exit(main())
