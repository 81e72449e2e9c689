"""Generators of random numbers that all of a process draw from: their states, and how they begin."""

import os
import pickle
import random
import sys
import threading
from hashlib import blake2b
from pathlib import Path
from types import FrameType

import torch
from torch.utils.data import get_worker_info


def generators() -> bytes:
    """Return the states of the generators of random numbers that everybody in this process draws from.

    They are the same bytes as long as nothing is drawn.
    """
    numpy = sys.modules.get("numpy")
    has_cuda = get_worker_info() is None and torch.cuda.is_available()  # a loader's worker was forked, and can't use it
    cuda = torch.cuda.get_rng_state().numpy().tobytes() if has_cuda else None
    states = (
        torch.get_rng_state().numpy().tobytes(),
        random.getstate(),
        numpy.random.get_state(legacy=False) if numpy else None,
        cuda,
    )
    return pickle.dumps(states, pickle.HIGHEST_PROTOCOL)


def set_generators(states: bytes) -> None:
    """Have them be in these states."""
    of_torch, of_python, of_numpy, of_cuda = pickle.loads(states)  # noqa: S301 it comes signed, as snapshots do
    torch.set_rng_state(torch.frombuffer(bytearray(of_torch), dtype=torch.uint8))
    random.setstate(of_python)
    if of_numpy is not None:
        sys.modules["numpy"].random.set_state(of_numpy)
    if of_cuda is not None:
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(of_cuda), dtype=torch.uint8))


def seed(rank: int) -> None:
    """Have what is random in a script that seeds nothing be the same on a process that replaces this rank's."""
    number = int.from_bytes(blake2b(f"{os.environ.get('UNICRON_TASK', '')}:{rank}".encode(), digest_size=7).digest())
    torch.manual_seed(number)
    random.seed(number)
    if numpy := sys.modules.get("numpy"):  # it takes none so large
        numpy.random.seed(number % 2**32)


LIBRARY = frozenset(sys.stdlib_module_names) - {"__main__"}
HARMLESS = frozenset(
    {
        *("unicron", "torch", "tqdm", "rich", "filelock", "psutil", "zmq", "execnet", "pynvml", "prometheus_client"),
        *("wandb", "tensorboard", "tensorboardX", "mlflow", "comet_ml", "neptune", "clearml", "sentry_sdk", "google"),
        *("grpc", "requests", "urllib3", "aiohttp", "fsspec", "boto3", "botocore", "s3transfer", "tornado"),
        *("watchdog", "pydevd", "debugpy", "ipykernel", "IPython", "ray"),
    }
)
"""Packages whose threads write logs, or wait: they draw nothing that a script depends on."""


def thread_that_may_draw() -> str:
    """Return which thread runs a script's code, or a library's that is not known, beside it; empty where none does."""
    if threading.active_count() == 1:
        return ""
    frames = sys._current_frames()  # noqa: SLF001 there is no other way to what threads run
    own = {threading.get_ident(), threading.main_thread().ident}
    for thread in threading.enumerate():
        bases = {each.__module__.partition(".")[0] for each in type(thread).__mro__}
        known = thread.ident in own or bases & HARMLESS
        frame, first = None if thread.ident is None or known else frames.get(thread.ident), None
        while frame is not None:
            if _package_of(frame) not in LIBRARY:
                first = frame  # the outermost, at last: whose thread it is
            frame = frame.f_back
        if first is not None and _package_of(first) not in HARMLESS:
            code = first.f_code
            return f"a thread that runs `{code.co_name}` ({Path(code.co_filename).name}:{code.co_firstlineno})"
    return ""


def drawn_beside(thread: str) -> str:
    """Return why no other process would draw the same numbers, where a thread runs that may draw some."""
    return (
        f"{thread} runs beside the loop while random numbers are drawn, and which of them it draws depends on time: "
        "draw in the loop, or have a DataLoader's workers do so"
    )


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
