"""The command line in forks of a process that has imported it once: nearly all of a command's time is imports.

A fork goes on as `python -m unicron_cli` does, with standard streams, variables and folder of its own.
"""

import atexit
import functools
import importlib
import json
import os
import pkgutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

MESSAGE_BYTES = 1 << 20

_lock = threading.Lock()


def call(words, environment, cwd=None):
    """Run a command of `unicron` to its end; return its exit code, and what it wrote to stdout and stderr, in UTF-8."""
    request = json.dumps({"words": [*map(str, words)], "environment": environment, "cwd": str(cwd or Path.cwd())})
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with _lock:
            asked = _mother()
            socket.send_fds(asked, [request.encode()], [out.fileno(), err.fileno()])
            code = int(asked.recv(100))
        written = []
        for each in (out, err):
            each.seek(0)
            written.append(each.read().decode())
    return code, *written


@functools.cache
def _mother():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        for each in (ours, theirs):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_BYTES)
        command = [sys.executable, __file__, str(theirs.fileno())]
        mother = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
    atexit.register(lambda: (ours.close(), mother.wait()))
    return ours


# --- in a process of its own -----------------------------------------------------------------------------------------


def main():
    asked = socket.socket(fileno=int(sys.argv[1]))
    sys.path[0] = ""  # as with -m: where it runs
    commands = importlib.import_module("unicron_cli")
    for module in pkgutil.iter_modules(commands.__path__):
        if module.name != "__main__":
            importlib.import_module(f"unicron_cli.{module.name}")
    while True:
        data, files, _, _ = socket.recv_fds(asked, MESSAGE_BYTES, 2)
        if not data:
            return
        pid = os.fork()
        if pid == 0:
            asked.close()
            _become(json.loads(data), *files)
            return
        for each in files:
            os.close(each)
        _, status = os.waitpid(pid, 0)
        asked.send(str(os.waitstatus_to_exitcode(status)).encode())


def _become(request, out, err):
    for number, file in ((1, out), (2, err)):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    sys.argv = ["unicron", *request["words"]]
    importlib.import_module("unicron_cli.main").main()


if __name__ == "__main__":
    main()
