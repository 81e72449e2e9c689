"""Plain runs of scripts by processes of our own, and what ranks have kept."""

import multiprocessing
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from unicron_deploy.nats_server import free_port

PATIENCE_S = 60.0
MARK = "struck"  # as `case` calls the file; the module itself is only for scripts


def kept(folder: Path, ranks: int = 2) -> dict[int, Any]:
    """Return what ranks have kept in a folder, and which process each was, by rank."""
    paths = {rank: folder / f"result-{rank}.pt" for rank in range(ranks)}
    return {rank: torch.load(path, weights_only=False) for rank, path in paths.items() if path.exists()}


def results(folder: Path, ranks: int = 2) -> dict[int, Any]:
    """Return the results that ranks have kept in a folder."""
    return {rank: one["results"] for rank, one in kept(folder, ranks).items()}


def _be_rank(script: str, folder: str, rank: int, port: int) -> None:
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    log = os.open(Path(folder, f"log-{rank}"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = [script, folder]
    torch.set_num_threads(1)  # as ranks of tasks have: sums of several threads are others
    multiprocessing.set_start_method("fork", force=True)  # of loaders' workers, as everywhere else
    runpy.run_path(script, run_name="__main__")


def plain(script: Path, folder: Path) -> dict[int, Any]:
    """Run a script by two plain processes, as torchrun would; return each rank's results, of those that have any."""
    folder.mkdir()
    context, port = multiprocessing.get_context("forkserver"), free_port()
    ranks = [context.Process(target=_be_rank, args=(str(script), str(folder), rank, port)) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(PATIENCE_S)
        each.kill()
    return results(folder)
