"""Plain runs of scripts by processes of our own, and what ranks have kept."""

import multiprocessing
import multiprocessing.connection
import os
import runpy
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from unicron_deploy.nats_server import free_port

PATIENCE_S = 60.0
IMPORTED = ("numpy", "torch._dynamo", "torch.distributed", "torch.utils.data", "tqdm.auto", "rich.progress")
MARK, BEGUN, BEFORE = "struck", "begun", "begun-before"  # as `case` calls files; the module itself is only for scripts


def kept(folder: Path, ranks: int = 2) -> dict[int, Any]:
    """Return what ranks have kept in a folder, and which process each was, by rank."""
    paths = {rank: folder / f"result-{rank}.pt" for rank in range(ranks)}
    return {rank: torch.load(path, weights_only=False) for rank, path in paths.items() if path.exists()}


def results(folder: Path, ranks: int = 2) -> dict[int, Any]:
    """Return the results that ranks have kept in a folder."""
    return {rank: one["results"] for rank, one in kept(folder, ranks).items()}


def preload(*modules: str) -> None:
    """Have plain runs begin with these modules, and what scripts usually import, of one process that has them."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([*modules, *IMPORTED])


def _be_rank(script: str, folder: str, rank: int, ranks: int, port: int) -> None:
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{ranks}", "LOCAL_WORLD_SIZE": f"{ranks}"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    log = os.open(Path(folder, f"log-{rank}"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = [script, folder]
    torch.set_num_threads(1)  # as ranks of tasks have: sums of several threads are others
    multiprocessing.set_start_method("fork", force=True)  # of loaders' workers, as everywhere else
    runpy.run_path(script, run_name="__main__")


def plain(script: Path, folder: Path, ranks: int = 2) -> dict[int, Any]:
    """Run a script by plain processes, as torchrun would; return each rank's results, of those that have any."""
    folder.mkdir()
    context, port = multiprocessing.get_context("forkserver"), free_port()
    words = [(str(script), str(folder), rank, ranks, port) for rank in range(ranks)]
    processes = [context.Process(target=_be_rank, args=each) for each in words]
    for each in processes:
        each.start()
    deadline = time.monotonic() + PATIENCE_S
    while any(each.exitcode is None for each in processes) and time.monotonic() < deadline:
        if any(each.exitcode for each in processes):
            break  # as torchrun does
        multiprocessing.connection.wait([each.sentinel for each in processes if each.exitcode is None], 1.0)
    for each in processes:
        each.kill()
        each.join()
    return results(folder, ranks)


def began_again(folder: Path) -> set[int]:
    """Return the ranks of which processes have begun since one was struck."""
    if not (folder / BEFORE).exists():
        return set()
    begun, before = (Counter((folder / name).read_text().split()) for name in (BEGUN, BEFORE))
    return {int(rank) for rank in begun - before}
