"""One of the ranks that `benchmarks.gpu` starts, which tries what NCCL does. Not for people.

    python -m benchmarks.gpu_ranks PART RANK SIZE PORT

It prints what came of its part as one JSON object; a rank that is to be killed prints nothing.
"""

import json
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

from unicron.train.groups import nccl

EPOCHS, ROUNDS = 12, 30
SMALL, LARGE = 1 << 10, 1 << 24  # elements of four bytes: NCCL sends few and many of them by different protocols
PATIENCE_S = 5.0
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


class Ranks:
    """This rank, and how it meets the others."""

    def __init__(self, rank: int, size: int, port: int) -> None:
        self.rank, self.size = rank, size
        self._store = TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=60))

    @property
    def last(self) -> bool:
        """Whether this is the one that a part takes away."""
        return self.rank == self.size - 1

    def meet(self, name: str, ranks: int) -> None:
        """Wait until so many ranks are here."""
        self._store.add(name, 1)
        while self._store.add(name, 0) < ranks:
            time.sleep(0.001)

    def connect(self, name: str, size: int | None = None) -> nccl.Communicator:
        """Return a group of the first ranks, connected."""
        return nccl.Communicator(PrefixStore(name, self._store), self.rank, size or self.size, DEVICE)

    def begin(self, group: nccl.Communicator, elements: int = SMALL) -> torch.Tensor:
        """Begin to sum 1, 2, 3 … over the ranks; return where the sum will be."""
        values = torch.full((elements,), float(self.rank + 1), device=DEVICE)
        group.group.allreduce([values]).wait()
        return values

    def sum(self, group: nccl.Communicator) -> float:
        """Return the sum."""
        values = self.begin(group)
        return float(values[0].item()) if ended() else float("nan")


def ended(patience_s: float = PATIENCE_S) -> bool:
    """Wait for the GPU; return whether it is through with all that was enqueued."""
    mark, until = nccl.record_event(), time.monotonic() + patience_s
    nccl.await_event(mark, lambda: time.monotonic() > until)
    return bool(mark.query())


def seconds(what: Callable[[], Any], patience_s: float = PATIENCE_S) -> float | None:
    """Return how long something takes; None: too long."""
    began, took = time.monotonic(), list[float]()

    def run() -> None:
        what()
        took.append(time.monotonic() - began)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(patience_s)
    return took[0] if took else None


def total(ranks: int) -> float:
    """Return what the sum should be."""
    return ranks * (ranks + 1) / 2


def epochs(ranks: Ranks) -> dict[str, Any]:
    """Connect and abort again and again: what that takes, and whether memory is left behind."""
    connects, aborts, used, right = list[float](), list[float](), list[int](), list[bool]()
    for epoch in range(EPOCHS):
        began = time.monotonic()
        group = ranks.connect(f"epoch {epoch}")
        right.append(ranks.sum(group) == total(ranks.size))
        connects.append(time.monotonic() - began)
        ranks.meet(f"summed {epoch}", ranks.size)
        aborts.append(seconds(group.abort) or PATIENCE_S)
        ranks.meet(f"aborted {epoch}", ranks.size)
        if DEVICE.type == "cuda":
            free, whole = torch.cuda.mem_get_info()
            used.append(whole - free)
    return {
        "connect_first_s": connects[0],
        "connect_s": statistics.median(connects[1:]),
        "abort_s": statistics.median(aborts),
        "left_behind_mib": (used[-1] - used[0]) / (1 << 20) if used else None,
        "sums_right": all(right),
    }


def killed(ranks: Ranks) -> dict[str, Any]:
    """Lose a rank for which the others wait in a sum."""
    group = ranks.connect("whole")
    ranks.sum(group)
    ranks.meet("whole", ranks.size)
    if ranks.last:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.begin(group, LARGE)
    time.sleep(0.5)
    waits, error = not ended(0.1), group.error
    began = time.monotonic()
    group.revoke()
    idle = time.monotonic() - began if ended() else None
    ranks.meet("left", ranks.size - 1)
    began = time.monotonic()
    aborts = nccl.begin_aborts([group])
    rest = ranks.connect("rest", ranks.size - 1)
    found = ranks.sum(rest)
    return {
        "waits_for_ever": waits,
        "error": error,
        "idle_s": idle,
        "connect_s": time.monotonic() - began,
        "aborted": nccl.await_aborts(aborts),
        "sum_right": found == total(ranks.size - 1),
    }


def noise(ranks: Ranks) -> dict[str, Any]:
    """Interrupt one rank that waits for the last, which comes later: what do the others get?"""
    wrong = 0
    for elements in (SMALL, LARGE):
        group = ranks.connect(f"{elements}")
        ranks.meet(f"{elements} connected", ranks.size)
        if ranks.last:
            time.sleep(1.0)
        values = ranks.begin(group, elements)
        if ranks.rank == 1:
            time.sleep(0.5)
            group.revoke()
        elif ended():
            wrong += int((values != total(ranks.size)).sum())
        ranks.meet(f"{elements} ended", ranks.size)
    return {"elements_wrong_without_a_word": wrong, "of": SMALL + LARGE}


def two(ranks: Ranks) -> dict[str, Any]:
    """Abort a group of which nothing is under way, while a kernel of another waits for a rank that is gone."""
    found = {}
    whole = ranks.connect("whole")
    idle = None if ranks.last else ranks.connect("idle", ranks.size - 1)
    ranks.meet("connected", ranks.size)
    if ranks.last:
        os.kill(os.getpid(), signal.SIGKILL)
    assert idle is not None
    ranks.begin(whole)
    time.sleep(0.3)
    found["abort_of_the_idle_one_first_s"] = seconds(idle.group.abort)
    whole.revoke()
    found["idle_s"] = seconds(nccl.synchronize)
    found["abort_of_the_other_then_s"] = seconds(whole.abort)
    return found


def connecting(ranks: Ranks) -> dict[str, Any]:
    """Leave behind what waits for a rank that does not come, and connect without it."""
    if ranks.last:
        ranks.meet("done", ranks.size)
        return {}
    threading.Thread(target=partial(ranks.connect, "whole"), daemon=True).start()
    time.sleep(1.0)
    began = time.monotonic()
    found = ranks.sum(ranks.connect("rest", ranks.size - 1))
    took = time.monotonic() - began
    ranks.meet("done", ranks.size)
    return {"connect_without_it_s": took, "sum_right": found == total(ranks.size - 1)}


def opened(ranks: Ranks) -> dict[str, Any]:
    """Be interrupted within a batch of sends, and sum in another group then."""
    first, peer = ranks.connect("first"), (ranks.rank + 1) % ranks.size
    ranks.meet("connected", ranks.size)
    first.group._start_coalescing()  # noqa: SLF001 as torch's batches do
    first.revoke()
    refused = False
    try:
        first.group.send([torch.ones(SMALL, device=DEVICE)], peer, 0)
    except RuntimeError:
        refused = True
    nccl.end_groups()
    second = ranks.connect("second")
    return {"send_refused": refused, "sum_right": ranks.sum(second) == total(ranks.size)}


def race(ranks: Ranks) -> dict[str, Any]:
    """Be interrupted, again and again, while another thread begins one sum after the other."""
    idles, ends = list[float](), set[str]()
    for number in range(ROUNDS):
        group = ranks.connect(f"{number}")
        values = torch.ones(1 << 16, device=DEVICE)

        def begin(group: nccl.Communicator = group, values: torch.Tensor = values) -> None:
            try:
                while True:
                    group.group.allreduce([values])
            except RuntimeError as error:
                ends.add(type(error).__name__)

        thread = threading.Thread(target=begin, daemon=True)
        thread.start()
        time.sleep(0.02 + 0.003 * (number % 7))
        began = time.monotonic()
        group.revoke()
        thread.join(PATIENCE_S)
        nccl.synchronize()
        idles.append(time.monotonic() - began)
        ranks.meet(f"idle {number}", ranks.size)
        group.abort()
        ranks.meet(f"aborted {number}", ranks.size)
    return {"rounds": ROUNDS, "idle_s": statistics.median(idles), "calls_ended_by": sorted(ends)}


PARTS = {each.__name__: each for each in (epochs, killed, noise, two, connecting, opened, race)}

if __name__ == "__main__":
    part, rank, size, port = sys.argv[1], *map(int, sys.argv[2:])
    nccl.prepare()
    try:
        came = PARTS[part](Ranks(rank, size, port))
    except Exception as error:  # noqa: BLE001 whatever it is, it is reported
        came = {"raised": f"{type(error).__name__}: {str(error)[:300]}"}
    print(json.dumps(came), flush=True)
    os._exit(0)  # what was left behind, and torch's own threads, are not waited for
