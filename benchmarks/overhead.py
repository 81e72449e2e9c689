"""The cost of a `Session` while nothing fails, against plain torch on the same cores in the same minutes.

Two ranks train the decoder of examples/parallel/train.py: data parallel (plain: DDP, its gradients synchronized in the
last microbatch), with sharded parameters (FSDP2), and tensor parallel. Three pairs of ranks take turns with blocks of
iterations (`benchmarks.paired`): two of plain torch, whose difference is the noise, and one with a session, on a real
cluster. The figures are medians over rounds, each round's blocks compared with one another, in seconds and in CPU time
of a rank, which what else runs on its cores does not change much; of tensor parallelism also the microseconds of one
small all-reduce in the group of the mesh, which a session wraps. `_services_percent` is what server, services, agents
and this program take of one core while the session trains, `_services_meanwhile_percent` while plain torch does.

`agent_cpu_percent` is apart from that: of one core, what the agent of a node uses whose eight workers train.

With `--slow` the same is done for data parallel training of a wider model on a network of 200 Mbit/s: the loopback of a
network namespace of its own (needs root, iproute2 and unshare), with a session that overlaps its reduce with the
backward pass, as DDP does, and with one that does not: `overlap_gain_percent_slow_net`.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unicron_deploy.nats_server import free_port

from benchmarks.harness.cluster import TRAINED, Scene, running, task
from benchmarks.harness.command import ROOT, Figures, Options, Result, main, option, say
from benchmarks.harness.processes import ONE_THREAD, cpu_s, ended, flags, start
from benchmarks.harness.stats import ratios
from benchmarks.paired import MICROBATCHES, MODES
from unicron.contracts.tasks import ParallelLayout, TaskState

NAMES = {"dp": "session", "fsdp": "fsdp", "tp": "tp"}
PLAIN = 2  # pairs of plain torch; the one with a session is the last
WARM_UP = 2  # rounds that do not count
AGENT_WORKERS, AGENT_S, SETTLED = 8, 30.0, 3  # for so long an agent's CPU time is measured, after so many iterations
PATIENCE_S = 600.0
SLOW, SLOW_WIDTH = "rate 200mbit burst 1mb latency 400ms", 256


async def agent_cpu_percent(root: Path) -> float:
    """Return how much of a core the agent of a node with eight workers uses while they train."""
    async with running(root / "one-node", 1, AGENT_WORKERS) as scene:
        env = {"PACE": "0.25"}  # workers that hardly compute leave the cores to agents
        await scene.client.submit(task("sleepy", TRAINED, AGENT_WORKERS, microbatches=4 * AGENT_WORKERS, env=env))
        await scene.reached("sleepy", SETTLED)
        pid = scene.cluster.processes[scene.cluster.nodes[0]].pid
        used, began = cpu_s(pid), time.monotonic()
        await asyncio.sleep(AGENT_S)
        return 100 * (cpu_s(pid) - used) / (time.monotonic() - began)


def words_of(mode: str, pair: int, folder: Path, options: Options) -> list[str]:
    """Return the arguments of a rank."""
    numbers = {"block": options.block, "rounds": options.rounds + WARM_UP, "width": options.width}
    words = flags(folder=folder, pair=pair, pairs=PLAIN + 1, **numbers)
    return ["-m", "benchmarks.paired", mode, *words, *(["--apart"] if options.apart else [])]


def start_plain(mode: str, pair: int, folder: Path, options: Options) -> list[subprocess.Popen[bytes]]:
    """Start the two ranks of a pair of plain torch."""
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", **ONE_THREAD}
    words = [*words_of(mode, pair, folder, options), "--plain"]
    return [start(words, folder / f"plain-{pair}-{rank}.log", RANK=str(rank), **group) for rank in range(2)]


async def take_turns(mode: str, scene: Scene, folder: Path, options: Options) -> list[list[Any]]:
    """Let the pairs of a mode take turns; return each round's notes, by pair."""
    folder.mkdir()
    (folder / "turn").write_text("0")
    pids = [os.getpid(), *(process.pid for process in scene.cluster.processes.values())]
    (folder / "others").write_text(" ".join(map(str, pids)))
    layout = ParallelLayout(shard=2 if mode == "fsdp" else 1, tensor=2 if mode == "tp" else 1)
    iterations = options.block * (options.rounds + WARM_UP)
    words = words_of(mode, PLAIN, folder, options)
    await scene.client.submit(task(mode, words, 2, microbatches=MICROBATCHES, iterations=iterations, layout=layout))
    ranks = [rank for pair in range(PLAIN) for rank in start_plain(mode, pair, folder, options)]
    with ended(ranks):
        state = await scene.until_ended(mode, PATIENCE_S)
        deadline = time.monotonic() + PATIENCE_S / 60
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        if state != TaskState.FINISHED or any(rank.returncode for rank in ranks):
            logs = [path.read_text()[-500:] for path in folder.glob("*.log")]
            raise SystemExit(
                f"{mode}: the task is {state}, the plain ranks {[rank.returncode for rank in ranks]}: {logs}"
            )
    notes = [(folder / f"pair-{pair}.jsonl").read_text().splitlines() for pair in range(PLAIN + 1)]
    return [[json.loads(line) for line in lines] for lines in zip(*notes, strict=True)][WARM_UP:]


def figures_of(mode: str, rounds: Sequence[list[Any]]) -> Figures:
    """Return the figures of a mode."""
    over, cpu = (
        ratios((last[what], (one[what] + other[what]) / 2) for one, other, last in rounds)
        for what in ("seconds", "cpu_s")
    )
    drift = ratios((one["seconds"], other["seconds"]) for one, other, _ in rounds)
    others = [[100 * each["others_s"] / each["seconds"] for each in blocks] for blocks in zip(*rounds, strict=True)]
    found = {
        "overhead_percent": statistics.median(over),
        "cpu_overhead_percent": statistics.median(cpu),
        "noise_percent": statistics.median(map(abs, drift)),
        "plain_against_plain_percent": statistics.median(drift),
        "services_percent": statistics.mean(others[PLAIN]),
        "services_meanwhile_percent": statistics.mean(others[0] + others[1]),
    }
    figures = {f"{NAMES[mode]}_{name}": round(value, 2) for name, value in found.items()}
    if mode == "tp":
        for name, pairs in (("plain", slice(PLAIN)), ("wrapped", slice(PLAIN, None))):
            taken = [float(each["small_us"]) for one in rounds for each in one[pairs]]
            figures[f"{name}_all_reduce_us"] = round(statistics.median(taken), 2)
    return figures


def on_slow_network(options: Options) -> Figures:
    """Return the figures of data parallel training on a slow network, which other processes measure."""
    over = {}
    for apart in (False, True):
        network = f"ip link set lo up && tc qdisc add dev lo root tbf {SLOW}"
        words = f"--json --modes dp --width {SLOW_WIDTH} --rounds {options.rounds} --block {options.block}"
        command = f"{network} && exec {sys.executable} -m benchmarks.overhead {words} {'--apart' * apart}"
        shell = ["unshare", "--net", "bash", "-c", command]
        done = subprocess.run(shell, stdout=subprocess.PIPE, check=True, cwd=ROOT)
        over[apart] = json.loads(done.stdout)["figures"]
    ours, apart_percent = (over[apart]["session_overhead_percent"] for apart in (False, True))
    return {
        "slow_net_session_overhead_percent": ours,
        "slow_net_without_overlap_overhead_percent": apart_percent,
        "slow_net_noise_percent": over[False]["noise_percent"],
        "overlap_gain_percent_slow_net": round(100 * ((100 + apart_percent) / (100 + ours) - 1), 2),
    }


async def measure(options: Options, root: Path) -> Result:
    """Let pairs of each mode take turns, and measure an agent."""
    if options.slow:
        return Result(on_slow_network(options))
    result = Result({}, details={"block": options.block, "rounds": options.rounds})
    async with running(root / "cluster", 2) as scene:
        for mode in options.modes:
            rounds = await take_turns(mode, scene, root / mode, options)
            result.figures |= figures_of(mode, rounds)
            plain_s = statistics.median(one["seconds"] for one, _, _ in rounds) / options.block
            result.details[f"{mode}_plain_iteration_ms"] = round(1e3 * plain_s, 2)
            say(f"{mode}: {result.figures}")
    noises = [value for name, value in result.figures.items() if name.endswith("_noise_percent")]
    result.figures |= {"agent_cpu_percent": round(await agent_cpu_percent(root), 2), "noise_percent": max(noises)}
    return result


if __name__ == "__main__":
    main(
        measure,
        option("--modes", nargs="+", choices=MODES, default=list(MODES)),
        option("--rounds", default=30),
        option("--block", default=5, help="iterations of a turn"),
        option("--width", default=128, help="of the model"),
        option("--apart", action="store_true", help="have the session reduce when the backward pass is done"),
        option("--slow", action="store_true", help="measure on a slow network instead"),
    )
