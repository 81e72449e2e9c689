"""Programs of a cluster, forked from processes that imported them once: nearly all of a cluster's start is imports.

Each program has a process of its own that imports it, and forks when it is asked to; a fork goes on as the program does
that `python -m` starts. An agent that begins so has torch imported: its warm standby is forked from it before it has
any thread.
"""

import asyncio
import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

from unicron_agent.workers.warm import WarmStandby, single_thread
from unicron_deploy.embedded import MODULES

from unicron.services import SERVICES

AGENT, STANDBY = "unicron_agent", "unicron_agent.workers.standby"
PROGRAMS = {AGENT, *(MODULES[name] for name in SERVICES)}
MESSAGE_BYTES = 1 << 20

_mothers, _lock = {}, threading.Lock()


class Forked:
    """The handle of a process that a cluster started; its parent collects its exit status."""

    def __init__(self, pid):
        self.pid = pid

    def poll(self):
        return None


def spawn(command, log, environment):
    """Start a program as `unicron_deploy.embedded.spawn` does."""
    _, option, module, *arguments = command
    assert option == "-m"
    request = {"arguments": arguments, "environment": environment, "cwd": str(Path.cwd())}
    with _lock:
        for each in {module, *([] if _mothers else PROGRAMS)} - _mothers.keys():  # all at once the first time
            _mothers[each] = _bear(each, environment)
        socket.send_fds(_mothers[module], [json.dumps(request).encode()], [log.fileno()])
        return Forked(int(_mothers[module].recv(100)))


def _bear(module, environment):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        for each in (ours, theirs):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_BYTES)
        command = [sys.executable, __file__, module, str(theirs.fileno())]
        mother = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, pass_fds=[theirs.fileno()])
    atexit.register(lambda: (ours.close(), mother.wait()))
    return ours


# --- in a process of its own -----------------------------------------------------------------------------------------


def main():
    module, asked = sys.argv[1], socket.socket(fileno=int(sys.argv[2]))
    import likenccl  # noqa: PLC0415 it lies beside this file

    sys.path[0] = ""  # as with -m: where it runs
    importlib.import_module(f"{module}.main")
    if module == AGENT:
        importlib.import_module(STANDBY)._warm_up()
        likenccl.in_forks_of(importlib.import_module(STANDBY))
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    while True:
        data, files, _, _ = socket.recv_fds(asked, MESSAGE_BYTES, 1)
        if not data:
            return
        if os.fork() == 0:
            _begin(module, json.loads(data), files[0], asked)
            return
        os.close(files[0])


def _begin(module, request, log, asked):
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _write_to(log)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    asked.send(str(os.getpid()).encode())
    asked.close()
    sys.argv = [module, *request["arguments"]]
    if module == AGENT:
        ours = _fork_standby()
        sys.exit(importlib.import_module("unicron_agent.main").main(lambda log: ForkedStandby(log, *ours)))
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _write_to(log):
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout.reconfigure(write_through=True)


# --- an agent's standby ----------------------------------------------------------------------------------------------


class ForkedStandby(WarmStandby):
    """A standby that was forked before the agent began."""

    def __init__(self, log, pid, sock):
        super().__init__(log)
        self._pid, self._sock = pid, sock

    async def _spawn(self, log):
        if self._sock is None:
            return await super()._spawn(log)  # the first has died
        data = json.dumps({**os.environ, **single_thread()}).encode()
        socket.send_fds(self._sock, [len(data).to_bytes(4)], [log.fileno()])
        self._sock.sendall(data)
        sock, self._sock = self._sock, None
        return Process(self._pid, *await asyncio.open_connection(sock=sock))


class Process:
    """The process interface of a standby: that of `asyncio.subprocess.Process`."""

    def __init__(self, pid, stdout, stdin):
        self.pid, self.stdout, self.stdin = pid, stdout, stdin
        self._descriptor, self._gone = os.pidfd_open(pid), asyncio.Event()
        asyncio.get_running_loop().add_reader(self._descriptor, self._end)

    def _end(self):
        asyncio.get_running_loop().remove_reader(self._descriptor)
        self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._gone.set()

    def kill(self):
        if self._gone.is_set():
            raise ProcessLookupError
        signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    async def wait(self):
        await self._gone.wait()
        return self._code


def _fork_standby():
    """Fork it now, and let it wait until the agent would start it; return its pid, and the way to it."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _stand_by(theirs)
    theirs.close()
    return pid, ours


def _stand_by(asked):
    size, files, _, _ = socket.recv_fds(asked, 4, 1)
    if not size:  # the agent is gone
        os._exit(0)
    _write_to(files[0])
    data = asked.recv(int.from_bytes(size), socket.MSG_WAITALL)
    os.environ.clear()
    os.environ.update(json.loads(data))
    os.dup2(asked.fileno(), 0)
    os.dup2(asked.fileno(), 1)
    asked.close()
    sys.stdin = os.fdopen(0, closefd=False)
    importlib.import_module(STANDBY).main()
    os._exit(0)


if __name__ == "__main__":
    main()
