"""A warm standby that all tests of this process share: it has torch imported, and forks what they run."""

import atexit
import contextlib
import ctypes
import functools
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from unicron_agent.workers.warm import PR_SET_CHILD_SUBREAPER, single_thread

FOR_LIBRARIES = ("torchmetrics", "transformers.models.llama.modeling_llama")
"""Slow imports of Lightning and transformers; none of them trains."""

_lock = threading.Lock()
_starter = ThreadPoolExecutor(1)
"""Its thread is there until this process ends: a standby dies with the thread that has started it."""


@functools.cache
def ready():
    """Return the standby's process, ready to fork; what it forks becomes a child of this process."""
    return _starter.submit(_start).result()


def _start():
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    ends = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, __file__], env={**_plain(), **single_thread()}, **ends)
    atexit.register(process.kill)
    assert json.loads(process.stdout.readline())["ready"]
    return process


def fork(request):
    """Have the standby fork what `request` names; return its process id."""
    with _lock:
        process = ready()
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())["pid"]


def run(script, *arguments, parts=False, **environment):
    """Run a script as one plain process, without any cluster; return its exit code and what it wrote.

    Where `parts`, the standby first imports what scripts need that hold a part of a model.
    """
    log = script.with_suffix(f".{os.urandom(4).hex()}.log")
    how = {"module": False, "parts": parts, "runner": "", "ahead": ()}
    pid = fork(
        {"argv": [str(script), *arguments], "cwd": str(script.parent), "log": str(log), "env": environment, **how}
    )
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), log.read_text()


def printed(written):
    """Return the last line of JSON in what a script wrote; gloo writes lines of its own, when it likes."""
    for line in reversed(written.splitlines()):
        with contextlib.suppress(ValueError):
            return json.loads(line)
    raise AssertionError(f"no line of JSON: {written!r}")


def _plain():
    return {name: value for name, value in os.environ.items() if not name.startswith("UNICRON_")}


def _main():
    """Be the standby; import such things before the first script is forked that has a use for them."""
    import likenccl  # noqa: PLC0415 of that process, where it lies beside this file
    from unicron_agent.workers import standby  # noqa: PLC0415

    def ahead(request, usual=standby._modules_needed):
        script = Path(request["cwd"], request["argv"][0])
        text = script.read_bytes() if script.is_file() else b""
        return (*usual(request), *(FOR_LIBRARIES if b"lightning" in text or b"transformers" in text else ()))

    standby._modules_needed = ahead
    likenccl.in_forks_of(standby)
    standby.main()


if __name__ == "__main__":
    _main()
