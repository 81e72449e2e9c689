"""Machines that are agents on this one, as `unicron up` starts them: each leads a session of its own.

`machines/ID/machine.json` in the folder says which process a machine is. It is written before the process is started,
and completed after it: a process of which the provisioner did not hear any more is found by its environment.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from unicron.contracts.pools import Pool
from unicron.contracts.ranges import Label, Name
from unicron.processes import ProcessRecord, wait_until_gone
from unicron_provisioner.providers.names import credentials, folder_of_keys, free_name
from unicron_provisioner.providers.protocol import MachineReport, MachineRequest, ProviderError, Surroundings

GRACE_S = 10.0
"""How long an agent may take to leave in an orderly way, before it is killed."""

RECORD = "machine.json"


class Options(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The options of local machines in the file of pools.

    Attributes:
        folder: where they are kept; empty: machines, in the folder of the cluster.
        keys: folder of the nodes' keys; empty: keys, in the folder of the cluster, if there is one.
        env: further settings of the agents.
    """

    folder: Label = ""
    keys: Label = ""
    env: dict[str, str] = {}


class Record(msgspec.Struct, kw_only=True):
    """A machine.

    Attributes:
        node: name of its node.
        pid, ticks: as in `ProcessRecord`; -1 as long as it was not started, as far as is known.
    """

    machine: Name
    node: Name
    pid: int = -1
    ticks: int = -1

    @property
    def process(self) -> ProcessRecord:
        """Its process."""
        return ProcessRecord(pid=self.pid, ticks=self.ticks)


class LocalProvider:
    """Agents on this machine.

    Args:
        pool: its name.
        folder: where its machines are kept.
        keys: folder of the nodes' keys, None for none.
        environment: of the agents, but for their own names and folders.
    """

    def __init__(self, pool: str, folder: Path, keys: Path | None, environment: dict[str, str]) -> None:
        self._pool, self._folder, self._keys, self._environment = pool, folder, keys, environment
        self._children: list[subprocess.Popen[bytes]] = []

    async def list(self) -> list[MachineReport]:
        """Return all that were asked for and not released."""
        self._children = [child for child in self._children if child.poll() is None]
        return [
            MachineReport(
                machine=record.machine,
                state="running" if record.process.alive() else "coming" if record.pid < 0 else "ended",
                node=record.node,
                instance=str(record.pid),
                reason="" if record.pid < 0 or record.process.alive() else self._last_line(record.machine),
            )
            for record in self._records()
        ]

    async def ask(self, request: MachineRequest) -> None:
        """Start an agent."""
        record = self._record(request.machine)
        if record is None:
            used = [each.node for each in self._records()]
            record = Record(machine=request.machine, node=free_name(self._keys, self._pool, used))
            self._write(record)
        if record.pid < 0:
            found = self._find(record.machine)
            record.pid, record.ticks = found or self._start(record, request)
            self._write(record)

    async def release(self, machine: str, instance: str = "") -> None:  # noqa: ARG002 an id is there once
        """End an agent in an orderly way; one that is stopped, or hangs, is killed."""
        await self._end(machine, signal.SIGTERM)

    async def replace(self, machine: str, request: MachineRequest) -> None:
        """Kill what is left of a machine that is lost, and start another."""
        await self._end(machine, signal.SIGKILL)
        await self.ask(request)

    async def _end(self, machine: str, how: signal.Signals) -> None:
        record = self._record(machine)
        if record is None:
            return
        if record.pid < 0 and (found := self._find(machine)):
            record.pid, record.ticks = found
        record.process.signal(how)
        if how is signal.SIGTERM:
            await asyncio.to_thread(wait_until_gone, [record.process], GRACE_S)
        await asyncio.to_thread(record.process.kill_session)
        self._children = [child for child in self._children if child.poll() is None]
        shutil.rmtree(self._folder / machine, ignore_errors=True)

    def _start(self, record: Record, request: MachineRequest) -> tuple[int, int]:
        home = self._folder / record.machine
        files = {setting: str(path) for setting, path in credentials(self._keys, record.node).items()}
        variables = {
            "UNICRON_NODE": record.node,
            "UNICRON_MACHINE": record.machine,
            "UNICRON_POOL": self._pool,
            "UNICRON_RACK": request.rack,
            "UNICRON_SLOTS": str(request.slots),
            "UNICRON_RUN_DIR": str(home / "run"),
        }
        with (home / "agent.log").open("ab") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", "unicron_agent"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**self._environment, **files, **variables},
            )
        self._children.append(child)
        started = ProcessRecord.from_pid(child.pid)
        return started.pid, started.ticks

    def _find(self, machine: str) -> tuple[int, int] | None:
        """Return the process that an earlier provisioner has started for a machine, if there is one."""
        mark = f"UNICRON_MACHINE={machine}".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                pid = int(path.parent.name)
                if mark in path.read_bytes().split(b"\0") and os.getsid(pid) == pid:
                    started = ProcessRecord.from_pid(pid)
                    return started.pid, started.ticks
            except OSError:
                continue  # it has ended, or is another user's
        return None

    def _records(self) -> Sequence[Record]:
        found = (self._record(path.name) for path in sorted(self._folder.glob("*")) if path.is_dir())
        return [record for record in found if record and record.machine.startswith(f"{self._pool}-")]

    def _record(self, machine: str) -> Record | None:
        path = self._folder / machine / RECORD
        try:
            return msgspec.json.decode(path.read_bytes(), type=Record)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise ProviderError(f"{path}: not a record of a machine: {error}; end that agent and remove it") from error

    def _write(self, record: Record) -> None:
        path = self._folder / record.machine / RECORD
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        scratch = path.with_suffix(".new")
        scratch.write_bytes(msgspec.json.encode(record))
        scratch.replace(path)

    def _last_line(self, machine: str) -> str:
        path = self._folder / machine / "agent.log"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "it wrote nothing")


def make(pool: Pool, options: Options, around: Surroundings) -> LocalProvider:
    """Return the provider of a pool.

    Raises:
        InvalidInputError: the folder of keys is not there.
    """
    usual = str(around.cluster / "keys") if (around.cluster / "keys").is_dir() else ""
    keys = folder_of_keys(options.keys or usual, around.folder)
    folder = (around.folder / Path(options.folder or around.cluster / "machines").expanduser()).resolve()
    kept = {key: value for key, value in os.environ.items() if not key.startswith("UNICRON_")}
    environment = {**kept, "UNICRON_NATS_URL": around.nats_url, "PYTHONUNBUFFERED": "1", **options.env}
    return LocalProvider(pool.name, folder, keys, environment)
