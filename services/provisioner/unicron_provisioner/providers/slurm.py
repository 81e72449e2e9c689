"""Slurm gives machines: each is a job of one node, in the partition of its pool, called like the machine.

`machines/ID.json` in the folder of the cluster says which job a machine is: Slurm forgets a job some minutes after its
end. It is written before the job is submitted, and completed after it; a job of which the provisioner did not hear any
more is found by its name.
"""

import asyncio
import os
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from unicron.contracts.pools import Pool
from unicron.contracts.ranges import Label, Name
from unicron.errors import InvalidInputError
from unicron.slurm import shown, tools
from unicron.slurm.shown import JOB_COMING, JOB_ENDED, JobShown
from unicron_provisioner.providers.names import credentials, folder_of_keys, free_name
from unicron_provisioner.providers.protocol import (
    ByRelease,
    MachineReport,
    MachineRequest,
    ProviderError,
    QuotaError,
    RefusedError,
    Surroundings,
)

_QUOTA = ("QOSMaxSubmitJobPerUserLimit", "AssocMaxSubmitJobLimit", "Job violates accounting/QOS policy")
"""What sbatch says where a user has all the jobs that may be had."""

_NEVER_STARTS = ("not in group permitted", "AccountNotAllowed", "QOSNotAllowed")
"""What a job waits for, as squeue says, that no waiting cures: newer versions take it where `EnforcePartLimits=NO`."""

ENDS_S = 90.0
"""How long a cancelled job may take to end: Slurm gives it `KillWait` seconds, 30 unless set otherwise."""

LOOK_S = 0.5


class Options(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What the file of pools says of machines that Slurm gives.

    Attributes:
        partition: of their jobs.
        sbatch: further options of sbatch, such as --time=8:00:00 or --gpus-per-node=8.
        folder: which all nodes see, where agents log and work; empty: machines, in the folder of the cluster.
        keys: folder of the nodes' keys, which all nodes see; empty: keys, in the folder of the cluster, if it is there.
        env: further settings of the agents.
    """

    partition: Annotated[Label, msgspec.Meta(min_length=1)]
    sbatch: list[Label] = []
    folder: Label = ""
    keys: Label = ""
    env: dict[str, str] = {}


class Record(msgspec.Struct, kw_only=True):
    """A machine.

    Attributes:
        node: name of its node.
        job: that it is; empty as long as it was not submitted, as far as is known.
    """

    machine: Name
    node: Name
    job: Label = ""


class SlurmProvider(ByRelease):
    """Jobs of one node each.

    Args:
        pool: its name.
        options: of the file of pools.
        folder: where agents log and work, and what machines there are is kept.
        keys: folder of the nodes' keys, None for none.
        environment: settings of all agents.
    """

    def __init__(
        self, pool: str, options: Options, folder: Path, keys: Path | None, environment: Mapping[str, str]
    ) -> None:
        self._pool, self._options, self._folder, self._keys = pool, options, folder, keys
        self._environment = environment

    async def list(self) -> list[MachineReport]:
        """Return all that were asked for and not released."""
        return [*await asyncio.to_thread(self._list)]

    async def ask(self, request: MachineRequest) -> None:
        """Submit a job."""
        await asyncio.to_thread(self._ask, request)

    async def release(self, machine: str, instance: str = "") -> None:
        """Cancel a job, and wait until it has ended."""
        await asyncio.to_thread(self._cancel, machine, instance)
        end = asyncio.get_running_loop().time() + ENDS_S
        while any(job.state not in JOB_ENDED for job in await asyncio.to_thread(self._jobs, machine, instance)):
            if asyncio.get_running_loop().time() > end:
                raise ProviderError(f"job of {machine} has not ended {ENDS_S:g} s after scancel; see `squeue`")
            await asyncio.sleep(LOOK_S)
        if not instance or not self._jobs_left(machine, instance):
            self._path(machine).unlink(missing_ok=True)

    # --- blocking ----------------------------------------------------------------------------------------------------

    def _list(self) -> Sequence[MachineReport]:
        jobs = _queue()
        found = []
        for record in self._records():
            own = [job for job in jobs if job.name == record.machine]
            living = [job for job in own if job.state not in JOB_ENDED]
            found += [_report(record, job, self._pool) for job in living or own[-1:]]
            if not own and record.job:
                reason = f"Slurm knows nothing of job {record.job} any more"
                found.append(MachineReport(machine=record.machine, state="ended", node=record.node, reason=reason))
        return found

    def _ask(self, request: MachineRequest) -> None:
        record = self._record(request.machine)
        if record is None:
            used = [each.node for each in self._records()]
            record = Record(machine=request.machine, node=free_name(self._keys, self._pool, used))
            self._write(record)
        if not record.job:
            before = [job for job in _queue(request.machine) if job.state not in JOB_ENDED]
            try:
                record.job = before[-1].job if before else self._submit(record, request)
            except RefusedError:
                self._path(request.machine).unlink(missing_ok=True)
                raise
            self._write(record)

    def _submit(self, record: Record, request: MachineRequest) -> str:
        script = machine_script(record.machine, self._folder, self._settings(record, request))
        words = [
            "sbatch",
            "--parsable",
            *self._options.sbatch,
            f"--partition={self._options.partition}",
            f"--job-name={record.machine}",
            f"--comment={request.reason or 'a machine of pool ' + self._pool}",
            "--nodes=1",
            "--no-requeue",
            f"--output={tools.literal(self._folder / record.machine)}.log",
        ]
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", errors="surrogateescape", suffix=".sh") as file:
            file.write(script)
            file.flush()
            try:
                return shown.submitted(tools.run([*words, file.name]))
            except tools.UnreachableError as error:
                raise ProviderError(str(error)) from error
            except tools.SlurmError as error:
                kind = QuotaError if any(each in str(error) for each in _QUOTA) else RefusedError
                raise kind(f"{self._field(error)}: {error}") from error
            except InvalidInputError as error:  # there is no sbatch, or it says something else than a number
                raise ProviderError(str(error)) from error

    def _field(self, error: tools.SlurmError) -> str:
        """Return which field of the file of pools Slurm refuses, and what is in it."""
        said, _, _ = str(error).rpartition(";")
        field = "partition" if "partition" in said.lower() else "sbatch"
        return f"[pool.{self._pool}.slurm] {field} = {getattr(self._options, field)!r}"

    def _settings(self, record: Record, request: MachineRequest) -> dict[str, str]:
        files = {setting: str(path) for setting, path in credentials(self._keys, record.node).items()}
        return {
            **self._environment,
            **files,
            "UNICRON_NODE": record.node,
            "UNICRON_MACHINE": record.machine,
            "UNICRON_POOL": self._pool,
            "UNICRON_RACK": request.rack,
            "UNICRON_SLOTS": str(request.slots),
            "UNICRON_RUN_DIR": str(self._folder / record.machine),
        }

    def _cancel(self, machine: str, instance: str) -> None:
        living = [job.job for job in self._jobs(machine, instance) if job.state not in JOB_ENDED]
        try:
            if living:
                tools.run(["scancel", *living])
        except tools.UnreachableError as error:
            raise ProviderError(str(error)) from error
        except tools.SlurmError as error:
            raise RefusedError(f"{machine} is job {', '.join(living)}: {error}") from error

    def _jobs(self, machine: str, instance: str) -> Sequence[JobShown]:
        return [job for job in _queue(machine) if instance in {"", job.job}]

    def _jobs_left(self, machine: str, instance: str) -> bool:
        record = self._record(machine)
        return record is not None and record.job != instance

    # --- records -----------------------------------------------------------------------------------------------------

    def _path(self, machine: str) -> Path:
        return self._folder / f"{machine}.json"

    def _records(self) -> Sequence[Record]:
        found = (self._record(path.stem) for path in sorted(self._folder.glob("*.json")))
        return [record for record in found if record and record.machine.startswith(f"{self._pool}-")]

    def _record(self, machine: str) -> Record | None:
        path = self._path(machine)
        try:
            return msgspec.json.decode(path.read_bytes(), type=Record)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise ProviderError(f"{path}: not a record of a machine: {error}; cancel its job and remove it") from error

    def _write(self, record: Record) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        scratch = self._path(record.machine).with_suffix(".new")
        scratch.write_bytes(msgspec.json.encode(record))
        scratch.replace(self._path(record.machine))


def machine_script(machine: str, folder: Path, settings: Mapping[str, str]) -> str:
    """Return the script of a job that is a machine: its agent, which is told when the job ends.

    Settings hold paths of keys, never the keys: scripts of jobs are shown to whoever may see the job.
    """
    told = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in sorted(settings.items()))
    command = [sys.executable, "-P", "-m", "unicron_deploy.slurm.machine", "--run-dir", str(folder / machine)]
    return f"#!/bin/sh\n#SBATCH --open-mode=append\n#SBATCH --signal=B:USR1@0\n{told}\nexec {shlex.join(command)}\n"


def _queue(machine: str = "") -> list[JobShown]:
    """Return our jobs, those included that have ended lately, or are in a partition that is hidden from us."""
    which = ["--name", machine] if machine else ["--user", str(os.getuid())]
    words = ["--all", "--noheader", "--states=all", "--sort=i", *which, "-o", shown.JOBS]
    try:
        return shown.jobs(tools.ask("squeue", *words))
    except (tools.SlurmError, InvalidInputError) as error:
        raise ProviderError(str(error)) from error


def _report(record: Record, job: JobShown, pool: str) -> MachineReport:
    state: Literal["coming", "running", "ended"] = "running"
    if job.state in JOB_ENDED | JOB_COMING:
        state = "ended" if job.state in JOB_ENDED else "coming"
    reason = "" if state == "running" else f"job {job.job} is {job.state}: {job.where}"
    if state == "coming" and any(each in job.where for each in _NEVER_STARTS):
        state = "ended"  # it is given back as it has not joined
        reason += f"; name a partition in [pool.{pool}.slurm] that you may use: `scontrol show partition` lists who may"
    return MachineReport(machine=record.machine, state=state, node=record.node, instance=job.job, reason=reason)


def make(pool: Pool, options: Options, around: Surroundings) -> SlurmProvider:
    """Return the provider of a pool.

    Raises:
        InvalidInputError: the folder of keys is not there.
    """
    usual = str(around.cluster / "keys") if (around.cluster / "keys").is_dir() else ""
    keys = folder_of_keys(options.keys or usual, around.folder)
    folder = (around.folder / Path(options.folder or around.cluster / "machines").expanduser()).resolve()
    environment = {"UNICRON_NATS_URL": around.nats_url, **options.env}
    return SlurmProvider(pool.name, options, folder, keys, environment)
