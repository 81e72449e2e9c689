"""Checkpoints on storage: what the agent does about them runs in processes of their own, which may take their time."""

import time
from typing import Any

import msgspec

from unicron.contracts.base import Message
from unicron.contracts.commands import CommitCheckpoint, FindCheckpoint
from unicron.contracts.events import CheckpointFailed, CheckpointFound, CheckpointStored, PartStored
from unicron.contracts.storage import StoredPart, StoredState
from unicron.errors import CheckpointError, UnicronError
from unicron.snapshots.memory import SnapshotMemory
from unicron_agent.effects import StorePart
from unicron_agent.workers.supervisor import Supervisor

Job = StorePart | CommitCheckpoint | FindCheckpoint
LONGEST = 2000
"""Characters of an error that are reported."""


async def run_storage_job(job: Job, node: str, memory: SnapshotMemory, supervisor: Supervisor) -> Message:
    """Do a job in a process that the supervisor starts; return the fact that says what came of it."""
    try:
        match job:
            case StorePart():
                return await _store_part(job, node, memory, supervisor)
            case CommitCheckpoint(task=task, saving=saving):
                at = max(job.at, job.since)  # by the clock of who submitted, which nodes' may not agree with
                request = {"do": "commit", "saving": saving, "parts": job.parts, "since": job.since, "at": at}
                found = await _run_process(supervisor, request)
                return CheckpointStored(node=node, task=task, iteration=saving.iteration, **found)
            case FindCheckpoint(task=task):
                where = {"root": job.root, "task": task, "since": job.since}
                found = await _run_process(
                    supervisor, {"do": "find", **where, "before": job.before, "iteration": job.iteration}
                )
                stored = msgspec.convert(found["stored"], StoredState | None)
                return CheckpointFound(node=node, task=task, search=job.search, stored=stored, skipped=found["skipped"])
    except (UnicronError, OSError) as error:
        task = job.saving.task if isinstance(job, StorePart) else job.task
        return CheckpointFailed(node=node, task=task, reason=str(error)[:LONGEST])


async def _store_part(job: StorePart, node: str, memory: SnapshotMemory, supervisor: Supervisor) -> PartStored:
    """Write a part of a checkpoint from a snapshot, which no save writes over meanwhile."""
    ref, began = job.ref, time.monotonic()
    with memory.held_for_storage(ref) as path:
        state = {"path": str(path), "size": ref.size, "checksum": ref.checksum.hex(), "place": ref.place}
        found = await _run_process(supervisor, {"do": "write", "saving": job.saving, **state})
    part = msgspec.convert(found, StoredPart)
    seconds = time.monotonic() - began
    return PartStored(node=node, task=ref.task, saving=job.saving, part=part, seconds=seconds)


async def _run_process(supervisor: Supervisor, request: dict[str, Any]) -> Any:
    """Run a process of the storage; return its answer.

    Raises:
        CheckpointError: it failed.
        UnicronError: there is no standby to fork it.
    """
    status, lines = await supervisor.run_module("unicron.train.snapshots.stored", msgspec.json.encode(request).decode())
    if status or not lines:
        raise CheckpointError(lines[-1] if lines else f"its process ended with {status}")
    return msgspec.json.decode(lines[-1])
