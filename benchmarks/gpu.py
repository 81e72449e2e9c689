"""What a GPU and its NCCL do where ranks are interrupted, and how tasks heal there: on one GPU of any machine.

    python -m benchmarks.gpu --json
    python -m benchmarks.gpu start noise killed
    python -m benchmarks.gpu heal

Each part takes a minute or two. `start`: what a process that a standby forks can do when, and whether it can use the
GPU at all; as `baselines`, where the standby has asked torch for GPUs. `heal`: `benchmarks.parallel`, where ranks are
killed. All others are told in `benchmarks.gpu_ranks`: three ranks, one a GPU where there are three, else all on one,
which takes NCCL 2.30 (`LD_PRELOAD` a newer libnccl.so.2 than torch's own); two ranks can't show all of it.

Kernels of several processes take turns on one GPU, so that collectives there take 5 to 50 ms: rates say nothing.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore
from unicron_agent.warm import WITHOUT_GPU

from benchmarks import gpu_ranks
from benchmarks.output import as_json
from unicron.train import nccl

RANKS, MULTI_RANK = 3, 23000
"""The first version of NCCL that has several ranks on one GPU, as it counts them."""

ON_ONE = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2"}
LIMIT_S = 120.0

FORK = """
import json, os, time, torch
from unicron_agent import standby
standby._warm_up()
began, told = time.monotonic(), {}
if os.fork() == 0:
    for name in WITHOUT_GPU:
        os.environ.pop(name, None)
    try:
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
        told["kernel_s"] = time.monotonic() - began
        ones = torch.ones(1024, 1024, device="cuda")
        (ones @ ones).sum().item()
        told["product_s"] = time.monotonic() - began
    except RuntimeError as error:
        told["refused"] = str(error).splitlines()[0]
    print(json.dumps(told), flush=True)
    os._exit(0)
os.wait()
"""


def start(environment: dict[str, str]) -> dict[str, Any]:
    """Return what a fork of a standby with these variables could do when."""
    code = f"WITHOUT_GPU = {list(WITHOUT_GPU)}\n{FORK}"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return dict(json.loads(ended.stdout.splitlines()[-1])) if ended.stdout else {"failed": ended.stderr[-500:]}


def ranks_of(part: str) -> list[dict[str, Any]]:
    """Have ranks try a part; return what each has told, that was not killed."""
    store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu_ranks", part, str(rank), str(RANKS), str(store.port)],
            env=os.environ | _placed(rank),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    until, told = time.monotonic() + LIMIT_S, list[dict[str, Any]]()
    for process in processes:
        try:
            out, _ = process.communicate(timeout=max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            out = json.dumps({"hangs_s": LIMIT_S})
        told += map(json.loads, out.splitlines())
    return [each for each in told if each]


def _placed(rank: int) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": str(rank)} if torch.cuda.device_count() >= RANKS else ON_ONE


def lacks() -> str:
    """Return why parts of several ranks can't run here; empty where they can."""
    version = ctypes.c_int()
    nccl.library().ncclGetVersion(ctypes.byref(version))
    if torch.cuda.device_count() >= RANKS or version.value >= MULTI_RANK:
        return ""
    return f"NCCL {version.value} puts one rank on a GPU only, and there are fewer than {RANKS}: it takes 2.30"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures."""
    parts = ("start", *gpu_ranks.PARTS, "heal")
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", choices=[[], *parts], default=[])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU here: run this where `nvidia-smi` shows one, with a torch built for CUDA")
    details: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    baselines: dict[str, dict[str, Any]] = {}
    for part in options.parts or parts:
        if part == "start":
            details[part] = start(WITHOUT_GPU)
            baselines["asked_for_gpus"] = {f"start_{name}": value for name, value in start({}).items()}
        elif why_not := lacks():
            details[part] = {"skipped": why_not}
        elif part == "heal":
            command = [sys.executable, "-m", "benchmarks.parallel", "--layouts", "dp4", "--faults", "killed", "--json"]
            ended = subprocess.run(
                command, env=os.environ | ON_ONE, capture_output=True, text=True, timeout=600, check=False
            )
            told = ended.stdout.splitlines()
            details[part] = json.loads(told[-1])["figures"] if told else {"failed": ended.stderr[-1000:]}
        else:
            details[part] = ranks_of(part)
        print(f"{part}: {json.dumps(details[part])}", file=sys.stderr, flush=True)
    if options.json:
        print(as_json("gpu", figures(details), baselines, details))


def figures(details: dict[str, Any]) -> dict[str, Any]:
    """Return what the first rank of each part has told, under flat names."""
    found: dict[str, Any] = {}
    for part, told in details.items():
        first = told[0] if isinstance(told, list) and told else told
        if isinstance(first, dict):
            found |= {f"{part}_{name}": value for name, value in first.items()}
    return found


if __name__ == "__main__":
    main()
