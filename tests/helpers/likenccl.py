"""NCCL's manners on processors: see likenccl.cpp. In a process that has it installed, each device counts as a GPU.

Where `LIKENCCL` names the library, what is forked from a standby of the tests has it; `env()` is for tasks and scripts.
It imports nothing of ours: standbys import it by its bare name.
"""

import ctypes
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

SOURCE = Path(__file__).with_suffix(".cpp")
VARIABLE = "LIKENCCL"
COMPILER = os.environ.get("CXX", "c++")
MISSING = "needs a C++ compiler (c++, or what CXX names), for a backend with NCCL's manners"


def is_used():
    """Return whether workers of this run have it, by `--on-streams`."""
    return VARIABLE in os.environ


def can_be_built():
    """Return whether there is a compiler."""
    return shutil.which(COMPILER) is not None


def built():
    """Return the library, which is compiled once for each version of its source and of torch: that takes 15 s."""
    import torch  # noqa: PLC0415 not before somebody needs it
    from torch.utils.cpp_extension import include_paths, library_paths  # noqa: PLC0415

    headers = [*include_paths(), sysconfig.get_paths()["include"]]
    options = [
        "-std=c++20",
        "-O0",
        "-DNDEBUG",
        "-shared",
        "-fPIC",
        "-fvisibility=hidden",
        *(f"-I{each}" for each in headers),
    ]
    linked = [*(f"-L{each}" for each in library_paths()), "-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]
    known = [SOURCE.read_text(), torch.__version__, sys.version, *options, *linked]
    folder = Path(tempfile.gettempdir()) / f"likenccl-{os.getuid()}"
    library = folder / f"{hashlib.sha256(repr(known).encode()).hexdigest()[:16]}.so"
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            unfinished = library.with_suffix(".part")
            subprocess.run([COMPILER, *options, "-o", str(unfinished), str(SOURCE), *linked], check=True)
            unfinished.rename(library)
    return library


def env():
    """Return variables with which a script that is forked from a standby has it."""
    return {VARIABLE: str(built())}


def install(library):
    """Have this process take it for NCCL, and its processors for GPUs."""
    from torch._C import _distributed_c10d  # noqa: PLC0415

    from unicron.train.groups import nccl  # noqa: PLC0415

    loader = importlib.machinery.ExtensionFileLoader("_likenccl", str(library))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("_likenccl", loader))
    loader.exec_module(module)

    def group(store, rank, size, options):
        return module.ProcessGroupLikeNccl(store, rank, size, bool(options.config.blocking))

    group.Options = lambda: SimpleNamespace(_timeout=timedelta(), config=SimpleNamespace(blocking=1))
    _distributed_c10d.ProcessGroupNCCL = group
    nccl.on_streams = lambda _: True
    loaded = ctypes.CDLL(str(library))
    nccl.library = lambda: loaded
    nccl.event = module.Event

    def idle():
        mark = nccl.record_event()
        while not mark.query():
            time.sleep(0.001)

    nccl.synchronize = idle


def in_forks_of(standby):
    """Have a standby's forks install it where the variable says so, before their scripts run."""
    usual = standby._run_request

    def become(request):
        if library := request["env"].get(VARIABLE, os.environ.get(VARIABLE)):
            install(library)
        usual(request)

    standby._run_request = become
