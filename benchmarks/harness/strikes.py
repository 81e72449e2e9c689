"""Strikes at exact points of an iteration: on whom, in which layouts, and what ranks note of it."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from unicron.contracts.tasks import ParallelLayout

LAYOUTS = {
    "dp4": ParallelLayout(replicas=4),
    "dp2_tp2": ParallelLayout(replicas=2, tensor=2),
    "dp2_pp2": ParallelLayout(replicas=2, pipeline=2),
    "dp2_fsdp2": ParallelLayout(replicas=2, shard=2),
    "dp3_fsdp2": ParallelLayout(replicas=3, shard=2),
    "dp2_tp2_pp2": ParallelLayout(replicas=2, tensor=2, pipeline=2),
    "mcore_dp2_tp2": ParallelLayout(replicas=2, tensor=2),
    "mcore_dp2_pp2": ParallelLayout(replicas=2, pipeline=2),
    "mcore_dp2_tp2_pp2": ParallelLayout(replicas=2, tensor=2, pipeline=2),
}
MEGATRON = "mcore"
"""Prefix of the names of tasks in which megatron-core's own model is trained, by examples/megatron."""

NODE = "node"
FAULTS = ("killed", "raised", "stopped", NODE)
PHASES = ("forward", "backward", "reduce", "update")
MICROBATCHES, MICROBATCH_S = 12, 0.25
"""Of a global batch; and about what one takes, of which a stopped rank's detection allows three."""

FIRST, APART, LEAST_APART = 3, 3, 2
"""Iteration of the first strike, how many later the next is due, and how many must lie between two in any case."""

BATCH, BLOCKS, CHUNKS = 8, 2, 4
VARIABLE = "STRUCK"  # environment variable that holds a worker's `Orders`


class Point(msgspec.Struct, frozen=True):
    """Whom a fault strikes, and where: in a forward or backward pass, of the second microbatch."""

    phase: str
    fault: str
    replica: int
    place: int
    iteration: int  # the first in which it may strike; it waits for a whole membership


class Orders(msgspec.Struct, frozen=True):
    """The orders to a task's workers."""

    example: str  # whose model they train, "parallel" or "megatron"
    folder: str  # where they note what they did
    pace_s: float  # for which a block's forward pass waits for each sample; its backward pass waits twice that
    world: int  # ranks of a whole membership
    points: list[Point] = []


class Struck(msgspec.Struct, frozen=True):
    """A strike that was made: at which Unix seconds, in which iteration and membership, on whom."""

    at: float
    iteration: int
    epoch: int
    replica: int
    phase: str


class Note(msgspec.Struct, frozen=True):
    """A record of one rank: an activity from when to when, in Unix seconds, and its position."""

    what: str  # "computed", a microbatch that counts; "updated", the end of an iteration
    pid: int
    began: float
    at: float
    iteration: int
    epoch: int
    world: int
    replica: int


def sizes(example: str) -> list[str]:
    """Return the arguments that make the examples take a microbatch of `BATCH` samples, in `CHUNKS` where they do."""
    at_once = BATCH // CHUNKS if example == "megatron" else BATCH
    return ["--batch", str(at_once), "--layers", str(BLOCKS), "--chunks", str(CHUNKS)]


def pace_s(layout: ParallelLayout) -> float:
    """Return the seconds for each sample and block that make a microbatch take `MICROBATCH_S`, or a little more."""
    passes = 3 * BLOCKS * BATCH / layout.shard
    if layout.pipeline > 1:
        passes *= (CHUNKS + layout.pipeline - 1) / (CHUNKS * layout.pipeline)
    return MICROBATCH_S / passes


def points(layout: ParallelLayout, fault: str, phases: Sequence[str]) -> list[Point]:
    """Return the strikes of a task: first and last ranks of the first and last replicas in turn."""
    replica, place = layout.replicas - 1, layout.replica_workers - 1
    victims = [(replica, place), (0, 0), (replica, 0), (0, place)]
    return [
        Point(phase, fault, *victims[number % len(victims)], FIRST + number * APART)
        for number, phase in enumerate(phases)
    ]


def notes_in(folder: Path) -> list[Note]:
    """Return what the ranks have noted so far, in the order of time."""
    lines = [line for path in folder.glob("[0-9]*.jsonl") for line in path.read_bytes().splitlines(keepends=True)]
    whole = [msgspec.json.decode(line, type=Note) for line in lines if line.endswith(b"\n")]
    return sorted(whole, key=lambda note: note.at)


def marker(folder: Path, number: int) -> Path:
    """Return where a strike is noted."""
    return folder / f"strike-{number}.json"


def made_in(folder: Path) -> list[Struck]:
    """Return the strikes that were made so far; one is noted at once, so its file may still be empty."""
    contents = [path.read_bytes() for path in sorted(folder.glob("strike-*.json"))]
    return [msgspec.json.decode(content, type=Struck) for content in contents if content]
