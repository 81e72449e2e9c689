"""Points at which a script stops until the test lets it go on: it is struck there, not when it happens to be there.

A script says where it is by `gate.at(iteration, microbatch, phase)` (the module is written beside it). While the gate
is open, or where there is none, it goes on at once.
"""

import asyncio
import contextlib
import json
import tempfile
from pathlib import Path

SCRIPT_SIDE = '''\
"""The position of a training script, which stops here while the test holds it."""

import json, os, select, socket

_way = {}


def at(iteration, microbatch=0, phase="", rank=None):
    path = os.environ.get("GATE")
    if not path or "UNICRON_GHOST" in os.environ:
        return
    if os.getpid() not in _way:
        _way[os.getpid()] = socket.socket(socket.AF_UNIX)
        _way[os.getpid()].connect(path)
    way = _way[os.getpid()]
    worker = os.environ.get("UNICRON_WORKER", "")
    where = {"worker": worker, "iteration": iteration, "microbatch": microbatch, "phase": phase, "rank": rank}
    try:
        way.sendall(json.dumps(where).encode() + b"\\n")
        while not select.select([way], [], [], 0.02)[0]:
            pass  # an exception that is injected meanwhile is raised here
        way.recv(1)
    except BaseException:
        _way.pop(os.getpid()).close()  # a script that catches it may come again
        raise
'''


class Gate:
    """Holds workers at points of their script.

    Attributes:
        env: what the task's environment must have.
        waiting: where those are that are held, in the order in which they came.
        passed: where all others have been.
    """

    def __init__(self, path):
        self.env = {"GATE": str(path)}
        self.waiting, self.passed = [], []
        self._closed, self._changed = lambda _: False, asyncio.Event()

    def close(self, iteration=0, microbatch=0, **only):
        """Hold who comes to this point or to a later one; where phase, rank or worker are given, only those."""
        self._closed = lambda at: _is_at(at, iteration, microbatch, only)
        self._tell()

    def close_after(self, count):
        """Hold all, wherever they are, once so many have gone on."""
        last = len(self.passed) + count
        self._closed = lambda _: len(self.passed) >= last
        self._tell()

    def close_next(self):
        """Hold all at the beginning of the iteration that nobody has been in yet."""
        self.close(1 + max((at["iteration"] for at in (*self.passed, *self.waiting)), default=-1))

    def open(self):
        """Let all go on."""
        self._closed = lambda _: False
        self._tell()

    async def held(self, count=1):
        """Wait until so many are held; return where."""
        found = lambda: [at for at in self.waiting if self._closed(at)]  # noqa: E731 others are just let go
        await self._soon(lambda: len(found()) >= count)
        return found()

    async def reached(self, iteration, microbatch=0):
        """Wait until somebody has been at this point, or at a later one."""
        await self._soon(lambda: any(_is_at(at, iteration, microbatch, {}) for at in (*self.passed, *self.waiting)))

    async def _soon(self, condition):
        try:
            await self._until(condition)
        except asyncio.CancelledError:  # the run's limit for a test is over
            print(f"held: {self.waiting}, and last let through: {self.passed[-8:]}")  # noqa: T201 pytest shows it
            raise

    def _tell(self):
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, condition):
        while not condition():
            await self._changed.wait()

    async def _serve(self, reader, writer):
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):
            while line := await reader.readline():
                await self._let_through(json.loads(line), reader)
                writer.write(b"\n")
                await writer.drain()

    async def _let_through(self, at, reader):
        if self._closed(at):
            gone = asyncio.create_task(reader.read(1))  # it says nothing while it is held
            gone.add_done_callback(lambda _: self._tell())
            self.waiting.append(at)
            self._tell()
            await self._until(lambda: gone.done() or not self._closed(at))
            self.waiting.remove(at)
            gone.cancel()
            await asyncio.wait({gone})  # two can't read at once
        self.passed.append(at)
        self._tell()


def _is_at(at, iteration, microbatch, only):
    here = (at["iteration"], at["microbatch"]) >= (iteration, microbatch)
    return here and all(at[name] == value for name, value in only.items())


def write_gate(folder):
    """Write the script's side beside a script."""
    (folder / "gate.py").write_text(SCRIPT_SIDE)


@contextlib.asynccontextmanager
async def gate():
    """Have a gate, open at first."""
    with tempfile.TemporaryDirectory(prefix="gate-") as folder:  # the path of a socket is short
        path = Path(folder, "s")
        made = Gate(path)
        server = await asyncio.start_unix_server(made._serve, path)
        try:
            yield made
        finally:
            made.open()
            server.close()
