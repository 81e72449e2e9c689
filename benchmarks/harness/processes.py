"""Processes beside the cluster's: what they use, and how they are started and ended."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.command import ROOT

END_S = 30.0  # within which a process has to end when it is asked to
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
TORCHRUN = ["-m", "torch.distributed.run"]


def flags(**values: object) -> list[str]:
    """Return the arguments that say these values: `--name value`."""
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def cpu_s(pid: int) -> float:
    """Return the processor seconds that a process has used, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mb(pid: int) -> float:
    """Return the resident memory of a process in 10^6 bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def timed(function: Callable[[], Any], runs: int) -> list[float]:
    """Return the seconds of each run, after one that does not count."""
    function()
    found = []
    for _ in range(runs):
        began = time.perf_counter()
        function()
        found.append(time.perf_counter() - began)
    return found


def result_of(words: Sequence[str], **environment: str) -> dict[str, Any]:
    """Run Python with these arguments; return the JSON object in its last line."""
    command = [sys.executable, *words]
    ended = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False)
    if ended.returncode or not ended.stdout:
        raise SystemExit(f"{' '.join(words)} ended with {ended.returncode}: {ended.stderr[-2000:]}")
    return dict(json.loads(ended.stdout.splitlines()[-1]))


def start(words: Sequence[str], log: Path, **environment: str) -> subprocess.Popen[bytes]:
    """Start Python with these arguments, in a session of its own; its output goes to a file."""
    with log.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env=os.environ | environment,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )


@contextlib.contextmanager
def ended(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Have these processes until the end of the block, and nothing of their sessions afterwards."""
    try:
        yield
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()  # launchers end what they have started
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
