"""A warm standby that all tests of this process share: it has torch imported, and forks what they run."""

import atexit
import ctypes
import functools
import json
import os
import queue
import subprocess
import sys
import threading

from unicron_agent.warm import PR_SET_CHILD_SUBREAPER, single_thread

_lock = threading.Lock()


@functools.cache
def ready():
    """Return the standby's process, ready to fork; what it forks becomes a child of this process."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    started = queue.SimpleQueue()
    threading.Thread(target=_keep, args=[started], daemon=True).start()
    process = started.get()
    atexit.register(process.kill)
    assert json.loads(process.stdout.readline())["ready"]
    return process


def _keep(started):
    """Start it, and stay: it ends with the thread that started it, and those of an event loop end with the loop."""
    process = subprocess.Popen(
        [sys.executable, "-m", "unicron_agent.standby"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**_plain(), **single_thread()},
    )
    started.put(process)
    process.wait()


def fork(request):
    """Have the standby fork what `request` names; return its process id."""
    with _lock:
        process = ready()
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())["pid"]


def start(script, *arguments, **environment):
    """Start a script as a plain process, without any cluster; return its process id and the file that it writes to."""
    log = script.with_suffix(f".{os.urandom(4).hex()}.log")
    how = dict.fromkeys(("module", "parts", "restarts", "in_place"), False)
    where = {"cwd": str(script.parent), "log": str(log), "env": environment}
    return fork({"argv": [str(script), *arguments], **where, **how}), log


def run(script, *arguments, **environment):
    """Run a script as a plain process; return its exit code and what it wrote."""
    pid, log = start(script, *arguments, **environment)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), log.read_text()


def _plain():
    return {name: value for name, value in os.environ.items() if not name.startswith("UNICRON_")}
