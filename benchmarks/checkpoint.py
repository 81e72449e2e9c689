"""The cost of saving the state in every iteration, and the time to restore it.

A real cluster of two nodes and tasks of `benchmarks.checkpointing` on it, with states of about 10 and 100 MB (model and
AdamW in float32). Ways of keeping the state in every iteration take turns in blocks of iterations, in one process each:
none, Unicron's memory of two nodes, `torch.distributed.checkpoint.async_save` and `torch.save`, both by rank 0 to a
folder in memory. Figures are medians over rounds of a block's mean against that of the block without, in percent:

- `overhead_percent_*`: two replicas on two nodes, each of which saves in its own node's memory.
- `travelling_percent_*`: one worker alone, whose state its node's agent sends to the other node.
- `paced_percent_*`: one replica of two workers that shard the model, whose states go to the other's node while they
  send each other nothing; `at_once_percent_*`: likewise, as soon as they are saved.
- `dcp_async_percent_*` and `torch_save_percent_*`: beside the first of these.

A state of 1 GB is had again, until it is in the parameters and the optimizer: from the memory of the own node, and from
another's over gRPC; beside a copy in memory of that size, and a stream of gRPC with nothing done about it.
"""

import itertools
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from unicron_agent.fabric import Fabric
from unicron_agent.snapshots.server import FETCH, LIMITS, SnapshotServer
from unicron_agent.snapshots.sources import OtherNode, OwnMemory, SnapshotSource
from unicron_agent.traffic import NodeTraffic

from benchmarks.checkpointing import PACED, WAYS
from benchmarks.harness.cluster import Scene, running, task
from benchmarks.harness.command import Figures, Options, Result, main, option, say
from benchmarks.harness.processes import flags
from benchmarks.harness.stats import median, ratios
from unicron.contracts.states import StateLocation, StateRef
from unicron.contracts.tasks import ParallelLayout, TaskState
from unicron.snapshots.memory import SnapshotMemory
from unicron.train.snapshots.gathering import Gathering, collect_state, load_state
from unicron.train.snapshots.packed import unpack
from unicron.train.snapshots.saving import StateSaver

SIZES = {"10mb": {"width": 128, "layers": 4, "batch": 16}, "100mb": {"width": 384, "layers": 5, "batch": 32}}
MICROBATCHES = 4


class Scenario(NamedTuple):
    """The workers of a measurement."""

    workers: int
    shard: int  # workers that share a replica
    ways: Sequence[str]  # that take turns
    label: str  # of what keeping the state in Unicron's way costs there


SCENARIOS = {
    "apart": Scenario(2, 1, WAYS, "overhead"),
    "travelling": Scenario(1, 1, WAYS[:2], "travelling"),
    "sharded": Scenario(2, 2, PACED, "paced"),
}
PATIENCE_S = 1500.0
GIGABYTE = 83  # layers of 1024 x 1024 that make, with their moments, a state of 1 GB


def overheads(notes: Sequence[dict[str, Any]], block: int, ways: Sequence[str]) -> Figures:
    """Return for each way by how many percent its blocks took longer than those without, the median over rounds."""
    rounds: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for note in notes:
        if not note["first"]:
            rounds[note["iteration"] // (block * len(ways))][note["way"]].append(note["s"])
    whole = [{way: statistics.mean(took) for way, took in each.items()} for number, each in rounds.items() if number]
    return {
        way: median(ratios((each[way], each["none"]) for each in whole if set(each) == set(ways)), 2)
        for way in ways[1:]
    }


async def train(scene: Scene, scenario: Scenario, folder: Path, options: Options, sizes: dict[str, int]) -> Any:
    """Train a task; return its notes and the size of its state in bytes."""
    folder.mkdir()
    words = flags(folder=folder, block=options.block, shard=scenario.shard, **sizes)
    spec = task(
        folder.name,
        ["-m", "benchmarks.checkpointing", *words, "--ways", *scenario.ways],
        scenario.workers,
        microbatches=MICROBATCHES,
        iterations=options.block * len(scenario.ways) * (options.rounds + 1),
        layout=ParallelLayout(shard=scenario.shard),
    )
    await scene.client.submit(spec)
    if (state := await scene.until_ended(folder.name, PATIENCE_S)) != TaskState.FINISHED:
        raise SystemExit(f"{folder.name} is {state}")
    lines = (folder / "notes.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], int((folder / "size").read_text())


async def saving(options: Options, root: Path, memory: Path) -> Result:
    """Return what saving costs."""
    result = Result({}, details={"rounds": options.rounds, "block": options.block})
    async with running(root / "cluster", 2) as scene:
        for (size, sizes), name in itertools.product(SIZES.items(), options.scenarios):
            scenario = SCENARIOS[name]
            notes, bytes_ = await train(scene, scenario, memory / f"{name}-{size}", options, sizes)
            found = overheads(notes, options.block, scenario.ways)
            labels = {way: way for way in scenario.ways} | {"ours": scenario.label}
            result.figures |= {f"{labels[way]}_percent_{size}": percent for way, percent in found.items()}
            plain = statistics.median(note["s"] for note in notes if note["way"] == "none" and not note["first"])
            details = {"iteration_ms": round(1e3 * plain, 1), "state_mb": round(bytes_ / 1e6, 1)}
            for way in set(scenario.ways) & set(PACED[1:]):
                saved = [note["saved"] for note in notes if note["way"] == way]
                details[f"saved_{way}"] = round(sum(saved) / len(saved), 2)
            result.details[f"{name}-{size}"] = details
            say(f"{name}-{size}: {found}, {details}")
    return result


# --- having it again -------------------------------------------------------------------------------------------------


def made() -> dict[str, Any]:
    """Return a model and its optimizer, updated once."""
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(GIGABYTE)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


async def had_again(source: SnapshotSource, ref: StateRef, target: Path, protected: dict[str, Any]) -> None:
    """Have a state from a source until it is in place."""
    path = await source.obtain(ref, target)
    gathering = Gathering(protected)
    gathering.add(unpack(path, ref.size))
    load_state(gathering.result(ref.iteration), protected)
    path.unlink()


async def streamed(address: str, name: str) -> None:
    """Receive a file over gRPC."""
    async with Fabric("", "").channel(address, "", LIMITS) as channel:
        pieces: AsyncIterator[bytes] = channel.unary_stream(FETCH)(name.encode(), timeout=600)
        async for _ in pieces:
            pass


async def rate(size: int, repeats: int, what: Callable[[], Any]) -> float:
    """Return the median gigabytes a second of something that is done several times."""
    took = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        if isinstance(waiting := what(), Coroutine):
            await waiting
        took.append(time.perf_counter() - began)
    return round(size / statistics.median(took[1:]) / 1e9, 2)


async def having(repeats: int, memory: Path) -> Figures:
    """Return how fast a state is had again."""
    protected, states, fabric = made(), SnapshotMemory(memory, 0), Fabric("", "here")
    refs: list[StateRef] = []
    saver = StateSaver(states, say)
    location = StateLocation(node="here", worker="w", name="")
    ref = StateRef(task="t", iteration=1, place=0, location=location, size=0, checksum=b"")
    saver.begin(collect_state(1, protected), ref, refs.append, lambda: True, 0.0)
    saver.wait()
    [ref] = refs
    server, address = await SnapshotServer(states, "here", lambda *_: None, NodeTraffic(memory), fabric).serve(
        "127.0.0.1"
    )
    there, target = ref.at("there", address), memory / "w.fetched"
    source, copy = torch.ones(ref.size // 4), torch.empty(ref.size // 4)
    ways: dict[str, Callable[[], Any]] = {
        "own_memory": lambda: had_again(OwnMemory(states), ref, target, protected),
        "neighbour": lambda: had_again(OtherNode(fabric), there, target, protected),
        "memcpy": lambda: copy.copy_(source),
        "memcpy_to_fresh_memory": source.clone,
        "grpc": lambda: streamed(address, ref.location.name),
    }
    try:
        return {f"{name}_gb_s": await rate(ref.size, repeats, way) for name, way in ways.items()}
    finally:
        await server.stop(0)


async def measure(options: Options, root: Path) -> Result:
    """Measure saving and having, or one half."""
    torch.set_num_threads(1)
    result = Result({})
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        if options.only != "having":
            result = await saving(options, root, Path(memory))
        if options.only != "saving":
            result.figures |= await having(options.repeats, Path(memory))
    return result


if __name__ == "__main__":
    main(
        measure,
        option("--rounds", default=8),
        option("--block", default=5, help="iterations of a turn"),
        option("--repeats", default=5, help="of having a state again"),
        option("--only", choices=("saving", "having"), help="measure one half"),
        option("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS), help="workers and layouts"),
    )
