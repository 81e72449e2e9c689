"""The behaviour of a GPU and its NCCL where ranks are interrupted, and how tasks heal there: on any one GPU.

    python -m benchmarks.gpu start noise killed

Each part takes a minute or two. `start`: what a process that a standby forks can do when, and whether it can use the
GPU at all; as `baselines`, where the standby has asked torch for GPUs. `heal`: `benchmarks.parallel`, where ranks are
killed. All others are described in `benchmarks.gpu_ranks`: three ranks, one a GPU where there are three, else all on
one, which takes NCCL 2.30 (`LD_PRELOAD` a newer libnccl.so.2 than torch's own); two ranks can't show all of it.

Kernels of several processes take turns on one GPU, so that collectives there take 5 to 50 ms: rates say nothing.
"""

import ctypes
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore
from unicron_agent.workers.warm import WITHOUT_GPU

from benchmarks import gpu_ranks
from benchmarks.harness.command import Options, Result, main, option, say
from benchmarks.harness.processes import result_of
from unicron.train.groups import nccl

RANKS, MULTI_RANK = 3, 23000  # the first version of NCCL that has several ranks on one GPU, as it counts them
ON_ONE = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2"}
LIMIT_S = 120.0
PARTS = ("start", *gpu_ranks.PARTS, "heal")

FORK = """
import json, os, time, torch
from unicron_agent.workers import standby
standby._warm_up()
began, found = time.monotonic(), {}
if os.fork() == 0:
    for name in WITHOUT_GPU:
        os.environ.pop(name, None)
    try:
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
        found["kernel_s"] = time.monotonic() - began
        ones = torch.ones(1024, 1024, device="cuda")
        (ones @ ones).sum().item()
        found["product_s"] = time.monotonic() - began
    except RuntimeError as error:
        found["refused"] = str(error).splitlines()[0]
    print(json.dumps(found), flush=True)
    os._exit(0)
os.wait()
"""


def start(environment: dict[str, str]) -> dict[str, Any]:
    """Return what a fork of a standby with these variables could do when."""
    return result_of(["-c", f"WITHOUT_GPU = {list(WITHOUT_GPU)}\n{FORK}"], **environment)


def ranks_of(part: str) -> list[dict[str, Any]]:
    """Have ranks try a part; return what each has noted that was not killed."""
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
    until, noted = time.monotonic() + LIMIT_S, list[dict[str, Any]]()
    for process in processes:
        try:
            out, _ = process.communicate(timeout=max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            out = json.dumps({"hangs_s": LIMIT_S})
        noted += map(json.loads, out.splitlines())
    return [each for each in noted if each]


def _placed(rank: int) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": str(rank)} if torch.cuda.device_count() >= RANKS else ON_ONE


def lacks() -> str:
    """Return why parts of several ranks can't run here; empty where they can."""
    version = ctypes.c_int()
    nccl.library().ncclGetVersion(ctypes.byref(version))
    if torch.cuda.device_count() >= RANKS or version.value >= MULTI_RANK:
        return ""
    return f"NCCL {version.value} puts one rank on a GPU only, and there are fewer than {RANKS}: it takes 2.30"


def came_of(part: str) -> Any:
    """Return what came of a part."""
    if part == "start":
        return start(WITHOUT_GPU)
    if why_not := lacks():
        return {"skipped": why_not}
    if part == "heal":
        words = ["-m", "benchmarks.parallel", "--layouts", "dp4", "--faults", "killed", "--json"]
        return result_of(words, **ON_ONE)["figures"]
    return ranks_of(part)


def measure(options: Options, _: Path) -> Result:
    """Try the parts that are named, or all; the figures are what the first rank of each has noted."""
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU here: run this where `nvidia-smi` shows one, with a torch built for CUDA")
    result = Result({}, details={"gpu": torch.cuda.get_device_name(), "torch": torch.__version__})
    for part in options.parts or PARTS:
        try:
            came = came_of(part)
        except SystemExit as error:  # what one part can't do costs none of the others
            came = {"failed": str(error)[-1000:]}
        first = came[0] if isinstance(came, list) and came else came
        result.figures |= {f"{part}_{name}": value for name, value in dict(first).items()}
        result.details[part] = came
        if part == "start":
            result.baselines["asked_for_gpus"] = {f"start_{name}": value for name, value in start({}).items()}
        say(f"{part}: {json.dumps(came)}")
    return result


if __name__ == "__main__":
    main(measure, option("parts", nargs="*", choices=[[], *PARTS], default=[]))
