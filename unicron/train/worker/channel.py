"""A worker's connection to its agent: a unix socket, read by one thread of the process.

The thread also interrupts the main thread: when a newer membership arrives, it breaks the collective that blocks. When
the agent dies, the worker goes on computing, and the thread tries to connect until an agent is back.
"""

import contextlib
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from types import TracebackType

from unicron.contracts.frames import LENGTH, frame, length_of
from unicron.contracts.timings import DEFAULT_SHARE, period_of
from unicron.contracts.worker import (
    NOWHERE,
    ExitFault,
    Hello,
    Membership,
    Ping,
    Pong,
    Raised,
    RaiseFault,
    ResetFault,
    Sample,
    Save,
    Secured,
    SlowFault,
    StateFetched,
    ToAgent,
    ToWorker,
    to_worker,
)
from unicron.errors import GroupBrokenError, InvalidInputError
from unicron.exception_texts import shortened
from unicron.train.worker.flight import collectives
from unicron.train.worker.injected import Injected, exception, raise_in_script
from unicron.train.worker.phases import FORGOTTEN, greeting
from unicron.train.worker.telling import tell

SOCKET_VARIABLE = "UNICRON_WORKER_SOCKET"
LAUNCHER_VARIABLE = "UNICRON_TELL"
"""Variable with the descriptor of the socket on which a program sends messages to its launcher."""

LONGEST_TRACEBACK = 8000
"""Characters of a traceback that are reported."""

OURS = {"unicron", "unicron_agent", "runpy"}
"""Packages that run a script."""


class AgentChannel:
    """The connection, and the last messages of the agent."""

    def __init__(self, path: str, worker: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._changed = threading.Condition()
        self._socket: socket.socket | None = None
        self._unsent: deque[bytes] = deque()
        self._membership = NOWHERE
        self._fetched: dict[str, StateFetched] = {}
        self._hello = Hello(worker=worker, pid=os.getpid())
        self.period = period_of(DEFAULT_SHARE)
        self.saves, self.store_s, self.store_asked = False, 0.0, 0
        self.secured: tuple[str, int] | None = None
        self.on_membership: Callable[[Membership], bool] = lambda _: False
        self.on_reset: Callable[[], None] = lambda: None
        self.on_ping: Callable[[Ping], None] = lambda ping: self.send(pong(ping))
        self.injected = Injected()
        threading.Thread(target=self._run, name="unicron-channel", daemon=True).start()

    # --- from the main thread ----------------------------------------------------------------------------------------

    @property
    def iteration(self) -> int:
        """The iteration in the last message to the agent; -1 before the first."""
        return self._hello.iteration

    @property
    def newest(self) -> Membership:
        """The newest membership that the agent has sent; epoch -1 before the first."""
        return self._membership

    def send(self, message: ToAgent) -> None:
        """Send a message to the agent. While it is away, progress and timings are dropped, and all else is queued."""
        data = frame(message)
        with self._lock:
            self._hello = greeting(self._hello, message)
            if self._socket is not None and not self._unsent:
                try:
                    self._socket.sendall(data)
                except OSError:
                    pass
                else:
                    return
            if not isinstance(message, FORGOTTEN):
                self._unsent.append(data)

    def await_membership(self, above: int, within_s: float | None = None) -> Membership:
        """Block until there is a membership with an epoch greater than `above`, or so many seconds have passed."""
        with self._changed:
            self._changed.wait_for(lambda: self._membership.epoch > above, within_s)
            return self._membership

    def await_state(self, name: str, epoch: int) -> StateFetched:
        """Block until the agent has fetched the state `name`, or has failed to.

        Raises:
            GroupBrokenError: a membership newer than `epoch` came meanwhile.
        """
        with self._changed:
            self._changed.wait_for(lambda: name in self._fetched or self._membership.epoch > epoch)
            fetched = self._fetched.pop(name, None)
            if fetched is None or self._membership.epoch > epoch:
                raise GroupBrokenError("interrupted by a newer membership")
            return fetched

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                    connection.connect(self._path)
                    self._greet(connection)
                    self._read(connection)
            except (OSError, EOFError):
                pass
            except InvalidInputError as error:
                tell(f"unicron: {error}")
            with self._lock:
                self._socket = None
            time.sleep(0.1)

    def _greet(self, connection: socket.socket) -> None:
        with self._lock:
            connection.sendall(frame(self._hello))
            while self._unsent:
                connection.sendall(self._unsent[0])
                self._unsent.popleft()
            self._socket = connection

    def _read(self, connection: socket.socket) -> None:
        while True:
            # a group that was being formed when the interruption came may open further sockets: interrupt again
            busy = self.on_membership(self._membership)
            if select.select([connection], [], [], 0.05 if busy else None)[0]:
                length = length_of(receive(connection, LENGTH.size))
                self._handle(to_worker(receive(connection, length)))

    def _handle(self, message: ToWorker) -> None:
        match message:
            case Membership():
                with self._changed:
                    if message.epoch > self._membership.epoch:
                        self._membership = message
                    self._changed.notify_all()
            case StateFetched():
                with self._changed:
                    self._fetched[message.name] = message
                    self._changed.notify_all()
            case Sample():
                self.period = message.period
            case Save():
                self.saves, self.store_s, self.store_asked = message.on, message.store_s, message.store_asked
                self.secured = None
            case Secured():
                self.secured = (message.name, message.iteration)
            case Ping():
                self.on_ping(message)
            case _:
                self._inject(message)

    def _inject(self, message: ToWorker) -> None:
        match message:
            case RaiseFault():
                if message.exception:
                    self.injected.error = exception(message.exception)
                else:
                    raise_in_script()
            case ExitFault():
                os._exit(message.code)
            case SlowFault():
                self.injected.factor = message.factor
            case ResetFault():
                self.on_reset()


def receive(connection: socket.socket, size: int) -> bytes:
    """Return so many bytes.

    Raises:
        EOFError: the other side has closed it.
        OSError: it broke.
    """
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def pong(ping: Ping) -> Pong:
    """Return the answer to a ping."""
    return Pong(collectives=collectives() if ping.collectives else None)


class LauncherChannel:
    """The connection of a program to the launcher that runs it, which forwards its messages to the agent."""

    iteration = -1

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._lock = connection, threading.Lock()
        threading.Thread(target=self._answer, name="unicron-answer", daemon=True).start()

    def send(self, message: ToAgent) -> None:
        """Send a message to the launcher; if that has ended, this process is about to be killed, too."""
        with contextlib.suppress(OSError), self._lock:
            self._socket.sendall(frame(message))

    def _answer(self) -> None:
        """Answer the launcher's pings, whatever the program is doing."""
        with contextlib.suppress(OSError, EOFError, InvalidInputError):
            while True:
                asked = to_worker(receive(self._socket, length_of(receive(self._socket, LENGTH.size))))
                if isinstance(asked, Ping):
                    self.send(pong(asked))


_channel: AgentChannel | None = None
_launcher_channel: LauncherChannel | None = None


def connect() -> AgentChannel | None:
    """Return this process's channel, or None where no agent started it (a plain run of the script)."""
    global _channel  # noqa: PLW0603 one a process, made before or by the script
    path = os.environ.get(SOCKET_VARIABLE)
    if _channel is None and path:
        _channel = AgentChannel(path, os.environ["UNICRON_WORKER"])
        sys.excepthook = report_exception
    return _channel


def use_launcher(connection: socket.socket) -> LauncherChannel:
    """Connect this process to its launcher instead of an agent."""
    global _channel, _launcher_channel
    _channel, _launcher_channel = None, LauncherChannel(connection)
    sys.excepthook = report_exception
    return _launcher_channel


def launcher_channel() -> LauncherChannel | None:
    """Return the connection to this process's launcher, None if it has none."""
    number = os.environ.get(LAUNCHER_VARIABLE)
    return _launcher_channel or (use_launcher(socket.socket(fileno=int(number))) if number else None)


def since_script(error: BaseException, trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback of an error without what began the script, which is ours and Python's.

    Where nothing else is left it is as it was, but of a script that can't be read, for which nobody else is needed.
    """
    found = trace
    while found is not None:
        names = found.tb_frame.f_globals
        spec = names.get("__spec__")  # of a module that is run its __name__ is that of any script
        package = (spec.name if spec else names.get("__name__") or "").partition(".")[0]
        if package not in OURS:
            return found
        found = found.tb_next
    return None if isinstance(error, SyntaxError) else trace


def report_exception(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None, *, line_only: bool = False
) -> None:
    """Report an exception that leaves the script to the agent, then print it as usual, or as one line."""
    trace = since_script(error, trace)
    error = error.with_traceback(trace)  # what prints it goes by this
    line = _launcher_channel or _channel
    if line is not None and issubclass(kind, Exception):
        text = shortened("".join(traceback.format_exception(kind, error, trace)), LONGEST_TRACEBACK)
        name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
        line.send(Raised(iteration=line.iteration, exception=name, text=str(error)[:2000], traceback=text))
    with contextlib.suppress(OSError):
        if line_only:
            tell(f"unicron: {error}")
        else:
            sys.__excepthook__(kind, error, trace)
