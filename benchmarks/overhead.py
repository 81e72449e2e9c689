"""What a `Session` costs while nothing fails, against plain torch on the same cores in the same minutes.

    python -m benchmarks.overhead --json

Two ranks train the decoder of examples/parallel/train.py: data parallel (plain: DDP, its gradients synchronized in the
last microbatch), with sharded parameters (FSDP2), and tensor parallel. Three pairs of ranks take turns with blocks of
iterations (`benchmarks.paired`): two of plain torch, whose difference is the noise, and one with a session, on a real
cluster whose services and agents run all the time. The figures are medians over the rounds, each round's blocks
compared with one another, in seconds and in CPU time of a rank, which what else runs on its cores does not change much;
of tensor parallelism also the time of one small all-reduce in the group of the mesh, which with a session goes through
`unicron.train.inner`. `_services_percent` is what server, services, agents and this program take of one of the cores
while the session trains, `_services_meanwhile_percent` while plain torch does: where they have a core of their own, the
ranks do not wait for that.

`agent_cpu_percent` is apart from that: of one core, what the agent of a node uses whose eight workers train.

With `--slow` the same is done for data parallel training of a wider model on a network of 200 Mbit/s: the loopback of a
network namespace of its own (needs root, iproute2 and unshare), with a session that overlaps its reduce with the
backward pass, as DDP does, and with one that does not: `overlap_gain_percent_slow_net`.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unicron_deploy.nats_server import free_port

from benchmarks.agent_cpu import agent_cpu_percent
from benchmarks.output import as_json
from benchmarks.paired import MICROBATCHES, MODES
from benchmarks.parallel import Scene, running
from benchmarks.strikes import ROOT, say
from unicron.contracts.tasks import ParallelLayout, TaskSpec, TaskState

NAMES = {"dp": "session", "fsdp": "fsdp", "tp": "tp"}
PLAIN = 2
"""Pairs of plain torch; the one with a session is the last."""

WARM_UP = 2
"""Rounds that do not count."""

AGENT_S = 30.0
"""So long an agent's CPU time is measured."""

PATIENCE_S = 600.0
SLOW, SLOW_WIDTH = "rate 200mbit burst 1mb latency 400ms", 256


def command(mode: str, pair: int, folder: Path, options: argparse.Namespace) -> list[str]:
    """Return the arguments of a rank."""
    numbers = {"pair": pair, "pairs": PLAIN + 1, "block": options.block, "rounds": options.rounds + WARM_UP}
    words = [word for name, value in (numbers | {"width": options.width}).items() for word in (f"--{name}", str(value))]
    return ["-m", "benchmarks.paired", mode, "--folder", str(folder), *words, *(["--apart"] if options.apart else [])]


def start_plain(mode: str, pair: int, folder: Path, options: argparse.Namespace) -> list[subprocess.Popen[bytes]]:
    """Start the two ranks of a pair of plain torch."""
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, *command(mode, pair, folder, options), "--plain"]
    return [subprocess.Popen(words, cwd=ROOT, env={**os.environ, **told, "RANK": str(rank)}) for rank in range(2)]


async def measure_one(mode: str, scene: Scene, folder: Path, options: argparse.Namespace) -> list[list[Any]]:
    """Let the pairs of a mode take turns; return each round's notes, by pair."""
    folder.mkdir()
    (folder / "turn").write_text("0", encoding="utf-8")
    pids = [os.getpid(), *(process.pid for process in scene.cluster.processes.values())]
    (folder / "others").write_text(" ".join(map(str, pids)), encoding="utf-8")
    spec = TaskSpec(
        name=mode,
        command=["python", *command(mode, PLAIN, folder, options)],
        workdir=str(ROOT),
        min_workers=2,
        max_workers=2,
        microbatches=MICROBATCHES,
        iterations=options.block * (options.rounds + WARM_UP),
        layout=ParallelLayout(shard=2 if mode == "fsdp" else 1, tensor=2 if mode == "tp" else 1),
        env={"OMP_NUM_THREADS": "1"},
    )
    await scene.client.submit(spec)
    ranks = [rank for pair in range(PLAIN) for rank in start_plain(mode, pair, folder, options)]
    try:
        state = await scene.until_ended(mode, PATIENCE_S)
        deadline = time.monotonic() + PATIENCE_S / 60
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        if state != TaskState.FINISHED or any(rank.returncode for rank in ranks):
            raise SystemExit(f"{mode}: the task is {state}, the plain ranks {[rank.returncode for rank in ranks]}")
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
    notes = [(folder / f"pair-{pair}.jsonl").read_text(encoding="utf-8").splitlines() for pair in range(PLAIN + 1)]
    return [[json.loads(line) for line in lines] for lines in zip(*notes, strict=True)][WARM_UP:]


def figures_of(mode: str, rounds: Sequence[list[Any]]) -> dict[str, float]:
    """Return the figures of a mode."""
    over, cpu = (
        [2 * last[what] / (one[what] + other[what]) - 1 for one, other, last in rounds] for what in ("seconds", "cpu_s")
    )
    noise = [abs(one["seconds"] / other["seconds"] - 1) for one, other, _ in rounds]
    drift = [one["seconds"] / other["seconds"] - 1 for one, other, _ in rounds]
    others = [[100 * each["others_s"] / each["seconds"] for each in blocks] for blocks in zip(*rounds, strict=True)]
    found = {
        f"{NAMES[mode]}_overhead_percent": 100 * statistics.median(over),
        f"{NAMES[mode]}_cpu_overhead_percent": 100 * statistics.median(cpu),
        f"{NAMES[mode]}_noise_percent": 100 * statistics.median(noise),
        f"{NAMES[mode]}_plain_against_plain_percent": 100 * statistics.median(drift),
        f"{NAMES[mode]}_services_percent": statistics.mean(others[PLAIN]),
        f"{NAMES[mode]}_services_meanwhile_percent": statistics.mean(others[0] + others[1]),
    }
    if mode == "tp":
        plain = [float(each["small_us"]) for one in rounds for each in one[:PLAIN]]
        found["plain_all_reduce_us"] = statistics.median(plain)
        found["wrapped_all_reduce_us"] = statistics.median(float(one[PLAIN]["small_us"]) for one in rounds)
    return {name: round(value, 2) for name, value in found.items()}


async def measure(options: argparse.Namespace, root: Path) -> tuple[dict[str, float], dict[str, Any]]:
    """Return figures and details."""
    figures: dict[str, float] = {}
    details: dict[str, Any] = {"block": options.block, "rounds": options.rounds}
    async with running(root / "cluster", 2) as scene:
        for mode in options.modes:
            rounds = await measure_one(mode, scene, root / mode, options)
            figures |= figures_of(mode, rounds)
            plain_s = statistics.median(one["seconds"] for one, _, _ in rounds) / options.block
            details[f"{mode}_plain_iteration_ms"] = round(1e3 * plain_s, 2)
            say(f"{mode}: {figures}")
    figures["agent_cpu_percent"] = round(await agent_cpu_percent(root, AGENT_S), 2)
    noises = [value for name, value in figures.items() if name.endswith("_noise_percent")]
    return {**figures, "noise_percent": max(noises)}, details


def on_slow_network(options: argparse.Namespace) -> dict[str, float]:
    """Return the figures of data parallel training on a slow network, which other processes measure."""
    over = {}
    for apart in (False, True):
        command = (
            f"ip link set lo up && tc qdisc add dev lo root tbf {SLOW} && exec {sys.executable} -m benchmarks.overhead"
        )
        words = f"--json --modes dp --width {SLOW_WIDTH} --rounds {options.rounds} --block {options.block}"
        shell = ["unshare", "--net", "bash", "-c", f"{command} {words} {'--apart' * apart}"]
        done = subprocess.run(shell, stdout=subprocess.PIPE, check=True, cwd=ROOT)
        over[apart] = json.loads(done.stdout)["figures"]
    ours, apart_percent = (over[apart]["session_overhead_percent"] for apart in (False, True))
    return {
        "slow_net_session_overhead_percent": ours,
        "slow_net_without_overlap_overhead_percent": apart_percent,
        "slow_net_noise_percent": over[False]["noise_percent"],
        "overlap_gain_percent_slow_net": round(100 * ((100 + apart_percent) / (100 + ours) - 1), 2),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--block", type=int, default=5, help="iterations of a turn")
    parser.add_argument("--width", type=int, default=128, help="of the model")
    parser.add_argument("--apart", action="store_true", help="have the session reduce when the backward pass is done")
    parser.add_argument("--slow", action="store_true", help="measure on a slow network instead")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: the cluster ends too
    figures, details = dict[str, Any](), dict[str, Any]()
    if options.slow:
        figures = on_slow_network(options)
    else:
        with tempfile.TemporaryDirectory() as folder:
            figures, details = asyncio.run(measure(options, Path(folder)))
    if options.json:
        print(as_json("overhead", figures, details=details))
        return
    for name, value in figures.items():
        print(f"{name:40} {value}")


if __name__ == "__main__":
    main()
