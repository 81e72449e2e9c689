"""The embedded cluster: a real NATS server, the services, the console and some agents, as processes of this machine.

Each process leads a session of its own, writes to `ROOT/logs/NAME.log`, and stands in `ROOT/cluster.json`, so that
another command can find the cluster and stop it.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, Protocol, Self

import msgspec

from unicron.addresses import Address
from unicron.aio import retry_until_available
from unicron.bus import topology
from unicron.bus.backup import restore
from unicron.client import Client
from unicron.contracts.tasks import NodeState
from unicron.errors import BusUnavailableError, InvalidInputError, UnicronError
from unicron.processes import Patience, ProcessRecord, wait_until_gone
from unicron.service.bootstrap import connected, connected_client
from unicron.services import CONSOLE, ENROLLER, NAMED, PROVISIONER, SERVICES
from unicron.settings import Settings
from unicron_deploy.keys import Keyring
from unicron_deploy.nats_server import PING_S, NatsServer, Routes, free_port, is_free
from unicron_deploy.options import CONSOLE_PORT, PORT, Options
from unicron_deploy.rights import OPERATOR

NATS = "nats"
"""The NATS server, and what the names of several of them begin with."""

HOST = "127.0.0.1"
GRACE_S = 10.0
"""How long processes may take to end in an orderly way, before they are killed."""

SHARED_CORES = {"UNICRON_USE_MEASURED": "false"}
"""All workers share this machine's cores, so one more of them seems to bring nothing; the environment outranks it."""

IDLE_S = 60.0
"""How long what starts may do nothing before it is given up."""

DYING_S = 2.0
"""How long a process that is to start again may take to end; it may have been killed just now."""

MODULES = {ENROLLER: "unicron_deploy.enrolment", **{name: f"unicron_{name}" for name in (*NAMED, CONSOLE)}}


LAYOUT = "cluster.json"
"""In the folder of a cluster: what it is made of, and its processes."""


class Server(msgspec.Struct, frozen=True):
    """One of several NATS servers: its name, its ports for clients and for the other servers, and its address."""

    name: str
    port: int
    routes: int
    host: str = HOST


class Layout(msgspec.Struct, kw_only=True):
    """What `cluster.json` holds.

    Attributes:
        nodes: number of agents.
        slots: worker slots of each.
        port: of the NATS server, or of the first one.
        insecure: whether it lets everybody in, without a key.
        servers: of NATS, where they are several.
        metrics: port at which each process answers Prometheus, by name; empty: none does.
        console: port at which the console answers browsers; 0: there is none.
        pools: path of a file of pools; empty: there is no provisioner.
        machines: names of nodes that may come by it, and get keys beforehand.
        host: address at which nodes of other machines reach this one; empty: they don't.
        observe: whether it only says what it would do by itself.
        processes: by name.
    """

    nodes: int
    slots: int
    port: int
    insecure: bool = False
    servers: list[Server] = []
    metrics: dict[str, int] = {}
    console: int = 0
    pools: str = ""
    machines: list[str] = []
    host: str = ""
    observe: bool = False
    processes: dict[str, ProcessRecord] = {}


Step = Callable[[str], None]
"""Told what is being done, for a progress display."""


def _silent(_: str) -> None:
    """Tell nobody."""


class Child(Protocol):
    """A process that was started, and is to be asked whether it has ended: so its exit status is collected."""

    pid: int

    def poll(self) -> int | None:
        """Return its exit status, None while it runs."""


Spawn = Callable[[list[str], BinaryIO, dict[str, str]], Child]
"""Starts a command that leads a session of its own, writes into a log, and has an environment."""


def spawn(command: list[str], log: BinaryIO, environment: dict[str, str]) -> Child:
    """Start a command afresh."""
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=environment
    )


def several(port: int = PORT, before: Sequence[Server] = (), host: str = HOST) -> list[Server]:
    """Return three servers, the first one at `port`: any of them may be lost.

    Args:
        port: of the first.
        before: those of the last time; they stay as they were where nobody has taken one of their ports.
        host: address on which they listen.
    """
    same = bool(before) and before[0].port == port and before[0].host == host
    if same and all(is_free(at, host) for each in before for at in (each.port, each.routes)):
        return list(before)
    ports = [port, *(free_port(host) for _ in range(1, topology.COPIES))]
    return [Server(f"{NATS}-{number}", at, free_port(host), host) for number, at in enumerate(ports, 1)]


class Cluster:
    """A cluster in `root`; `start` makes a new one, `load` finds a running one again.

    Attributes:
        url: address of its NATS server, or the addresses of all of them.
        servers: names of its NATS servers.
        names: its processes in the order in which they start: nats, services, node-1 and so on.
        keys: of the cluster, in `root/keys`.
        insecure: whether its server lets everybody in, without a key.
        targets: where Prometheus finds who answers it, as a file of `file_sd_configs`.
    """

    def __init__(
        self,
        root: Path,
        nodes: int = 3,
        slots: int = 2,
        port: int = PORT,
        *,
        insecure: bool = False,
        servers: Sequence[Server] = (),
        metrics: bool = False,
        console: int = 0,
        pools: str = "",
        machines: Sequence[str] = (),
        host: str = "",
        observe: bool = False,
        ping_s: float = PING_S,
        spawn: Spawn = spawn,
    ) -> None:
        self._ping_s, self._spawn = ping_s, spawn
        self.root = root.resolve()
        self.logs = self.root / "logs"
        self._file = self.root / LAYOUT
        self._layout = Layout(
            nodes=nodes,
            slots=slots,
            port=port,
            insecure=insecure,
            servers=list(servers),
            console=console,
            pools=pools,
            machines=list(machines),
            host=host,
            observe=observe,
        )
        self.insecure = insecure
        self.keys = Keyring(self.root / "keys")
        self._servers = self._new_servers()
        self._children: dict[str, Child] = {}
        self._busy = threading.RLock()  # a stop waits for what is being started, or it would leave that behind
        self.servers = list(self._servers)
        self.url = ",".join(server.url for server in self._servers.values())
        self.nodes = [f"node-{number}" for number in range(1, nodes + 1)]
        own = [*([PROVISIONER] if pools else []), *([CONSOLE] if console else []), *([ENROLLER] if host else [])]
        self.services = [*SERVICES, *own]
        self.names = [*self.servers, *self.services, *self.nodes]
        self.targets = self.root / "prometheus.json"
        if metrics:
            self._layout.metrics = {name: free_port(HOST) for name in (*self.services, *self.nodes)}

    @property
    def console_url(self) -> str:
        """Address of the console's page; empty where there is none."""
        return f"http://{HOST}:{self._layout.console}" if self._layout.console else ""

    @property
    def options(self) -> Options:
        """What it was started with."""
        layout = self._layout
        return Options(
            nodes=layout.nodes,
            slots=layout.slots,
            port=layout.port,
            console_port=layout.console or CONSOLE_PORT,
            insecure=layout.insecure,
            ha=bool(layout.servers),
            metrics=bool(layout.metrics),
            pools=layout.pools,
            host=layout.host,
            observe=layout.observe,
        )

    @classmethod
    def before(cls, root: Path) -> Self | None:
        """Return the cluster that was started in `root` the last time, None where none was; raises as `load` does."""
        return cls.load(root) if (root / LAYOUT).exists() else None

    @classmethod
    def of(cls, root: Path, options: Options, machines: Sequence[str] = ()) -> Self:
        """Return a cluster to start in `root`, with keys for nodes of these names that may come."""
        before = cls.before(root)
        known = before._layout.servers if before else ()  # noqa: SLF001 another of ours
        return cls(
            root,
            options.nodes,
            options.slots,
            options.port,
            insecure=options.insecure,
            servers=several(options.port, known, options.host or HOST) if options.ha else (),
            metrics=options.metrics,
            console=options.console_port,
            pools=options.pools,
            machines=machines,
            host=options.host,
            observe=options.observe,
        )

    @classmethod
    def load(cls, root: Path) -> Self:
        """Return the cluster that was started in `root`.

        Raises:
            InvalidInputError: none was, or its record can't be read.
        """
        path = root / LAYOUT
        try:
            layout = msgspec.json.decode(path.read_bytes(), type=Layout)
        except FileNotFoundError as error:
            raise InvalidInputError(
                f"no cluster in {root.resolve()}; start one there with `unicron up`, or name its folder with --dir"
            ) from error
        except msgspec.MsgspecError as error:
            raise InvalidInputError(f"{path}: not a record of a cluster: {error}; remove it") from error
        cluster = cls(
            root,
            layout.nodes,
            layout.slots,
            layout.port,
            insecure=layout.insecure,
            servers=layout.servers,
            console=layout.console,
            pools=layout.pools,
            host=layout.host,
            observe=layout.observe,
        )
        cluster._layout = layout
        return cluster

    @property
    def processes(self) -> dict[str, ProcessRecord]:
        """The processes started last under each name, dead or alive."""
        return dict(self._layout.processes)

    def alive(self) -> list[str]:
        """Return the names of the processes that run."""
        self._reap()
        return [name for name in self.names if name in self._layout.processes and self._layout.processes[name].alive()]

    # --- start -------------------------------------------------------------------------------------------------------

    def start(self, on_step: Step = _silent, backup: Path | None = None) -> None:
        """Start every process; `wait_until_ready` tells when they work.

        Args:
            on_step: told what is being done.
            backup: of the journal and the services' state, to begin with; there must be none yet.

        Raises:
            InvalidInputError: a cluster runs in this folder already, other servers keep its journal, or the port is
                taken.
            BusUnavailableError: the NATS server does not come up.
        """
        self._refuse_a_second()
        self._refuse_another_journal()
        record = self._file.read_bytes() if self._file.exists() else None
        self.logs.mkdir(parents=True, exist_ok=True)
        if self._layout.console and not is_free(self._layout.console, HOST):
            self._layout.console = free_port(HOST)
        self._tell_targets()
        with self._busy:
            try:
                for name in self.names:
                    if backup is not None and name == SERVICES[0]:
                        on_step(f"restoring {backup}")
                        self._restore(backup)
                    on_step(f"starting {name}")
                    self.start_process(name)
            except BaseException:
                self.stop()
                self._forget(record)
                raise

    def _forget(self, record: bytes | None) -> None:
        """Put back what the record was: with what this could not be started, the next start does not begin."""
        if record is None:
            self._file.unlink(missing_ok=True)
        elif self.root.exists():
            self._file.write_bytes(record)

    @classmethod
    def mend(cls, root: Path, on_step: Step = _silent) -> "tuple[Self, list[str]] | None":
        """Start again what has ended of the cluster in a folder, if some of it runs; return it, and their names."""
        cluster = cls.before(root)
        if cluster is None:
            return None
        alive = cluster.alive()
        missing = [name for name in cluster.names if name not in alive]
        if not alive or not missing:
            return None
        for name in missing:
            on_step(f"starting {name} again")
            cluster.start_process(name)
        return cluster, missing

    def start_process(self, name: str) -> None:
        """Start the process `name`, the first time or again.

        Raises:
            InvalidInputError: there is no such process, it runs already, or the port is taken.
            BusUnavailableError: the NATS server does not come up.
        """
        self._check(name)
        with self._busy:
            if name in self.alive() and wait_until_gone([self._layout.processes[name]], DYING_S):
                cure = f"; to start it anew, end it first: unicron chaos kill-node {name}" if name in self.nodes else ""
                raise InvalidInputError(f"{name} runs already (process {self._layout.processes[name].pid}){cure}")
            if name in self.servers:
                self._servers[name] = self._new_servers()[name]
                if not self.insecure:
                    self._ensure_keys()
                if self._layout.servers:
                    self.keys.route([str(Address(each.host, each.routes)) for each in self._layout.servers])
                pid = self._servers[name].start()
            else:
                if name in self.nodes:
                    self._kernel_log(name).touch()
                with (self.logs / f"{name}.log").open("ab") as log:
                    environment = {**self._usual(name), **os.environ, **self._environment(name)}
                    child = self._spawn(self._command(name), log, environment | {"PYTHONUNBUFFERED": "1"})
                self._children[name], pid = child, child.pid
            self._layout.processes[name] = ProcessRecord.from_pid(pid)
            self._save()

    def _ensure_keys(self) -> None:
        host = self._layout.host
        self.keys.ensure([*self.nodes, *self._layout.machines], enrols=bool(host))
        if host:  # what goes over a network is encrypted
            self.keys.certify([host])

    def _tell_targets(self) -> None:
        found = [
            {"targets": [f"{HOST}:{port}"], "labels": {"process": name}} for name, port in self._layout.metrics.items()
        ]
        if found:
            self.targets.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
        else:
            self.targets.unlink(missing_ok=True)

    def _restore(self, path: Path) -> None:
        asyncio.run(self._restored(path))
        for name in self.servers:  # only then they know again which messages came already
            self._servers[name].stop()
            self.start_process(name)

    async def _restored(self, path: Path) -> None:
        async with connected(self.settings(), "unicron-restore") as bus:
            await retry_until_available(partial(restore, bus, path, topology.copies(self.servers)), "restoring")

    def _new_servers(self) -> dict[str, NatsServer]:
        accounts = None if self.insecure else self.keys.accounts
        tls = self.keys.accounts.parent if self._layout.host else None
        if not self._layout.servers:
            host = self._layout.host or HOST
            return {NATS: NatsServer(self.root / NATS, self._layout.port, host, self._ping_s, accounts, tls=tls)}
        return {
            each.name: NatsServer(
                self.root / each.name,
                each.port,
                each.host,
                self._ping_s,
                accounts,
                # of this folder alone: another cluster's server may take the port just now; ports may be others later
                name=f"{each.name}-{blake2b(bytes(self.root), digest_size=6).hexdigest()}",
                routes=Routes(each.routes, self.keys.routes),
                tls=tls,
            )
            for each in self._layout.servers
        }

    def _environment(self, name: str) -> dict[str, str]:
        key = "" if self.insecure else str(self.keys.path(name))
        fabric = str(self.keys.fabric(name)) if name in self.nodes and not self.insecure else ""
        port = self._layout.metrics.get(name)  # never one for all, as the environment may have it
        tokens = "" if self.insecure else str(self.keys.tokens)
        console = {
            "UNICRON_CONSOLE_PORT": str(self._layout.console),
            "UNICRON_CONSOLE_TOKENS": tokens,
            "UNICRON_CONSOLE_CHAOS": "true",
        }
        pools = {"UNICRON_POOLS": self._layout.pools, "UNICRON_POOL_DIR": str(self.root)}
        return {
            **(console if name == CONSOLE else {}),
            **(pools if name == PROVISIONER else {}),
            **({"UNICRON_OBSERVE_ONLY": "true"} if self._layout.observe else {}),
            **({"UNICRON_KEYS": str(self.keys.folder)} if name == ENROLLER else {}),
            "UNICRON_NATS_URL": self.url,
            "UNICRON_NATS_NKEY": key,
            "UNICRON_FABRIC_KEY": fabric,
            "UNICRON_METRICS": f"{HOST}:{port}" if port else "",
        }

    def _kernel_log(self, node: str) -> Path:
        return self.logs / f"{node}.kernel.log"

    def _usual(self, name: str) -> dict[str, str]:
        """Return what the environment outranks; each node has a kernel's log, in which faults can be told of."""
        log = {"UNICRON_KERNEL_LOG": str(self._kernel_log(name))} if name in self.nodes else {}
        return {**SHARED_CORES, **log}

    def settings(self, user: str = OPERATOR) -> Settings:
        """Return what a client needs that speaks as `user`."""
        given = self._environment(user)
        return msgspec.structs.replace(
            Settings.load([]), nats_url=given["UNICRON_NATS_URL"], nats_nkey=given["UNICRON_NATS_NKEY"]
        )

    def reload(self) -> bool:
        """Have the running servers look again who is let in; return whether there are any."""
        running = set(self.servers).intersection(self.alive())
        for name in running:
            self._layout.processes[name].signal(signal.SIGHUP)
        return bool(running)

    def _command(self, name: str) -> list[str]:
        if name in MODULES:
            return [sys.executable, "-m", MODULES[name]]
        run_dir = str(self.root / "nodes" / name)
        flags = {"--node": name, "--slots": str(self._layout.slots), "--run-dir": run_dir, "--chaos": "true"}
        return [sys.executable, "-m", "unicron_agent", *(word for pair in flags.items() for word in pair)]

    def _refuse_a_second(self) -> None:
        if self._file.exists():
            running = type(self).load(self.root).alive()
            if running:
                raise InvalidInputError(
                    f"a cluster runs in {self.root} already ({', '.join(running)}); stop it with "
                    f"`unicron down --dir {self.root}`, or start another one with --dir and --port"
                )

    def _refuse_another_journal(self) -> None:
        """Raise where the journal of this folder was kept by one server, and is to be by several, or the reverse."""
        stores = {path.parent.name for path in self.root.glob(f"{NATS}*/store")}
        if stores and not stores.intersection(self.servers):
            raise InvalidInputError(
                f"the journal in {self.root} is kept by {', '.join(sorted(stores))}, which {', '.join(self.servers)} "
                "would not find: start the cluster as it was, `unicron backup FILE`, and go on in another folder"
                " (--dir) with `unicron up --restore FILE`"
            )

    async def wait_until_ready(self, idle_s: float = IDLE_S, on_step: Step = _silent) -> None:
        """Wait until every service is active and every node admitted, for as long as something comes of it.

        Raises:
            BusUnavailableError: a process ended, or none has worked for `idle_s`; says what is missing.
        """
        patience = Patience(idle_s)
        async with connected_client(self.settings(), "unicron-cluster") as client:
            while missing := await self._missing(client):
                on_step(f"waiting for {', '.join(missing)}")
                dead = sorted(set(self._layout.processes) - set(self.alive()))
                if dead:
                    raise BusUnavailableError(f"{dead[0]} ended: {self.last_line(dead[0])}; see {self.log(dead[0])}")
                if patience.is_over([self._layout.processes[name] for name in missing]):
                    raise BusUnavailableError(
                        f"not ready, and idle for {idle_s:g} s: {', '.join(missing)}; see the logs in {self.logs}"
                    )
                await asyncio.sleep(0.1)

    async def _missing(self, client: Client) -> list[str]:
        try:
            idle = [name for name in self.services if name in NAMED and not await client.active(name)]
            if idle:
                return idle
            if self._layout.host:
                await client.tokens()
            status = await client.status()
        except UnicronError:  # streams and services come up at their own pace
            return ["registry"]
        if self._layout.console and is_free(self._layout.console, HOST):
            return [CONSOLE]
        up = {view.node for view in status.nodes if view.state in {NodeState.UP, NodeState.DRAINING}}
        return [name for name in self.nodes if name not in up]

    # --- end ---------------------------------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """End the process `name` alone with SIGKILL; workers of an agent live on."""
        self._known(name).signal(signal.SIGKILL)
        self._await_end(name)

    def kill_node(self, name: str) -> None:
        """End an agent with all its workers with SIGKILL, as if its machine had lost power."""
        if name not in self.nodes:
            raise InvalidInputError(f"no node {name!r}; there are {', '.join(self.nodes)}")
        self._known(name).kill_session()
        self._await_end(name)

    def stop(self, on_step: Step = _silent) -> None:
        """Stop agents, then services, then NATS, each in an orderly way; kill what remains.

        The provisioner goes before the agents, as it would replace them.
        """
        with self._busy:
            if PROVISIONER in self._layout.processes:
                self._layout.processes[PROVISIONER].signal(signal.SIGTERM)
                wait_until_gone([self._layout.processes[PROVISIONER]], GRACE_S)
            self._stop_machines()
            for group in (self.nodes, self.services, self.servers):
                started = {name: self._layout.processes[name] for name in group if name in self._layout.processes}
                if not started:
                    continue
                on_step(f"stopping {', '.join(started)}")
                for process in started.values():  # an agent that gets SIGTERM looks for somebody to hand over to
                    process.signal(signal.SIGINT if group is self.nodes else signal.SIGTERM)
                wait_until_gone(list(started.values()), GRACE_S)
                for process in started.values():
                    process.kill_session()
                self._reap()
            self._layout.processes.clear()
            if self.root.exists():
                self._save()

    def _stop_machines(self) -> None:
        """Stop the agents that the provisioner has started; their folders stay for it."""
        found = []
        for path in self.root.glob("machines/*/machine.json"):
            with contextlib.suppress(msgspec.MsgspecError):
                found.append(msgspec.json.decode(path.read_bytes(), type=ProcessRecord))
        for process in found:
            process.signal(signal.SIGINT)
        wait_until_gone(found, GRACE_S)
        for process in found:
            process.kill_session()

    def _await_end(self, name: str) -> None:
        wait_until_gone([self._layout.processes[name]], GRACE_S)
        self._reap()

    def _reap(self) -> None:
        """Collect the exit statuses of our own children."""
        for child in self._children.values():
            child.poll()
        for server in self._servers.values():
            _ = server.pid

    # --- record ------------------------------------------------------------------------------------------------------

    def log(self, name: str) -> Path:
        """Return the path of the log of the process `name`."""
        return self._servers[name].log_path if name in self._servers else self.logs / f"{name}.log"

    def last_line(self, name: str) -> str:
        """Return the last line that the process `name` wrote."""
        path = self.log(name)
        lines = path.read_text(errors="replace").split("\n") if path.exists() else []
        return next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing")

    def _check(self, name: str) -> None:
        if name not in self.names:
            raise InvalidInputError(f"no process {name!r}; there are {', '.join(self.names)}")

    def _known(self, name: str) -> ProcessRecord:
        self._check(name)
        if name not in self._layout.processes:
            raise InvalidInputError(f"{name} was not started")
        return self._layout.processes[name]

    def _save(self) -> None:
        scratch = self._file.with_suffix(".new")
        scratch.write_bytes(msgspec.json.format(msgspec.json.encode(self._layout)))
        scratch.replace(self._file)
