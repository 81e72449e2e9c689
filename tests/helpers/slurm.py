"""A real Slurm on this machine: slurmctld and some slurmd, from Debian's packages, unpacked and not installed.

`FOUND` is the folder with the unpacked packages, made once for all runs; without root rights or Debian's packages the
tests that need one are skipped and say why. There is no munge and no accounting: `auth/none` believes the
user that a command runs as.
"""

import contextlib
import fcntl
import os
import platform
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Self

from unicron_deploy.nats_server import free_port

from helpers.debian import unpack, unpack_of

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins")
LIBRARIES = ("libmunge2", "libhwloc15", "liblua5.1-0", "libjwt0", "libhttp-parser2.9")
"""That the programs load, and that a small installation lacks."""

RELEASE = os.environ.get("UNICRON_TEST_SLURM", "")
"""Of Debian, whose Slurm is tried; empty: the one of this machine."""

FOLDER = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "unicron-tests", f"slurm{RELEASE}")
"""Where the packages are unpacked."""

USERS_SIGNAL = "PreemptParameters=send_user_signal" if RELEASE else "SlurmctldParameters=preempt_send_user_signal"
"""The line of a configuration by which jobs get the signal that they have asked for before they are preempted."""

LIB = FOLDER / "usr/lib" / f"{platform.machine()}-linux-gnu"
LOADER = Path(f"/lib64/ld-linux-{platform.machine().replace('_', '-')}.so.2")

FREEZER = Path("/sys/fs/cgroup/freezer")

TOOLS = ("sbatch", "srun", "scancel", "scontrol", "sinfo", "squeue", "salloc")
DAEMONS = {"slurmctld": "slurmctld-wlm", "slurmd": "slurmd-wlm", "slurmstepd": "slurmstepd-wlm"}
CONTROLLER = f"""\
exec unshare --mount sh -ec '
for each in proc dev etc tmp root; do mkdir -p {FOLDER}/$each; mount --bind /$each {FOLDER}/$each; done
[ -e {FOLDER}/lib64 ] || ln -s usr/lib64 {FOLDER}/lib64
ln -f {FOLDER}/usr/sbin/slurmctld-wlm {FOLDER}/usr/sbin/slurmctld
exec chroot {FOLDER} /usr/sbin/slurmctld "$@"' - "$@\""""
"""Starts the controller of another release without a loader: it starts itself once more, by /proc/self/exe."""

READS = (
    "setpriv",
    "--securebits=+no_setuid_fixup",
    "--inh-caps=+dac_read_search",
    "--ambient-caps=+dac_read_search",
)
"""What a command gets before it so that it may read all files, and so may what it starts as another user: the Python of
this machine and Slurm may be below root's home."""

END_S = 10.0
LOOK_S = 0.05


@cache
def missing() -> str:
    """Return why there can be no Slurm here; empty where there can. Unpacks the packages the first time."""
    if os.geteuid():
        return "slurmd has to run as root"
    if not os.access(FREEZER, os.W_OK):
        return f"Slurm keeps track of processes in {FREEZER}, which can't be written here"
    if not shutil.which("apt-get"):
        return "Slurm is had from Debian's packages, and there is no apt-get here"
    if (FOLDER / "whole").exists():
        return ""
    FOLDER.mkdir(parents=True, exist_ok=True)
    failed = unpack_of(RELEASE, PACKAGES, FOLDER) if RELEASE else unpack((*PACKAGES, *LIBRARIES), FOLDER)
    if failed:
        return f"Slurm can't be had: {failed}"
    (FOLDER / "whole").touch()
    return ""


class Slurm:
    """A controller and its nodes, each slurmd with a port of its own.

    Args:
        folder: of configuration, state and logs.
        nodes: their names, as Slurm writes lists of them.
        more: lines of the configuration besides.
        users: whether others than root have jobs, too.

    Attributes:
        bin: folder with the commands that speak to this controller.
        env: what a process needs to speak to it.
        names: of the nodes.
    """

    def __init__(self, folder: Path, names: list[str], more: str = "", *, users: bool = False) -> None:
        self.folder, self.names = folder, names
        self._before = READS if users else ()
        self.bin = folder / "bin"
        self._config = folder / "slurm.conf"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ports = {name: free_port() for name in names}
        for each in ("bin", "state", "spool", "logs"):
            (folder / each).mkdir(parents=True)
        self._config.write_text(self._text(free_port(), more))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\n")
        own = f"{FOLDER}/usr" if RELEASE else ""  # its libc is another one
        loader = f"{own}{LOADER} --library-path {LIB}:{LIB}/slurm-wlm"
        programs = {name: FOLDER / "usr/bin" / name for name in TOOLS}
        programs |= {name: FOLDER / "usr/sbin" / file for name, file in DAEMONS.items()}
        for name, path in programs.items():
            self._write_program(name, f'exec {loader} --argv0 {name} {path} "$@"')
        if RELEASE:
            self._write_program("slurmctld", CONTROLLER)

    def _write_program(self, name: str, line: str) -> None:
        program = self.bin / name
        program.write_text(f"#!/bin/sh\nexport SLURM_CONF={self._config}\n{line}\n")
        program.chmod(0o755)

    def _text(self, port: int, more: str) -> str:
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={platform.node()} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=2000"
            for name, port in self._ports.items()
        )
        return f"""\
ClusterName=tests
SlurmctldHost={platform.node()}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
AuthInfo=cred_expire=15
CredType=cred/none
PluginDir={LIB}/slurm-wlm
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool/%n
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/slurmd.%n.pid
SlurmctldLogFile={self.folder}/logs/slurmctld.log
SlurmdLogFile={self.folder}/logs/slurmd.%n.log
ProctrackType=proctrack/cgroup
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0,sched_interval=1,bf_interval=1
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=10
MessageTimeout=5
KillWait=5
CompleteWait=0
MinJobAge=300
JobRequeue=1
{nodes}
PartitionName=all Nodes={",".join(self.names)} Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
{more}
"""

    @property
    def env(self) -> dict[str, str]:
        """The environment of a user's shell."""
        return {**os.environ, "PATH": f"{self.bin}:{os.environ['PATH']}", "LC_ALL": "C"}

    def __enter__(self) -> Self:
        self.start("slurmctld")
        self.until(lambda: self.try_("sinfo", "--noheader").returncode == 0, "slurmctld")
        for name in self.names:
            self.start(name)
        self.until(lambda: self.states() == dict.fromkeys(self.names, "idle"), "slurmd")
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(subprocess.SubprocessError):
            if self._processes["slurmctld"].poll() is None:
                jobs = self.squeue()
                if jobs:
                    self.try_("scancel", *jobs)
                    self.until(lambda: not self.squeue(), "the end of all jobs")
        for name in [*self.names, "slurmctld"]:
            if name in self._processes:
                self.stop(name)
        self._forget_groups()
        while left := self._started():
            _signal(left, signal.SIGKILL)
            time.sleep(LOOK_S)

    def start(self, name: str) -> None:
        """Start the controller, `slurmctld`, or the slurmd of a node."""
        command = (
            [self.bin / "slurmctld", "-D", "-i"]
            if name == "slurmctld"
            else [*self._before, self.bin / "slurmd", "-D", "-N", name, "-d", self.bin / "slurmstepd"]
        )
        with (self.folder / "logs" / f"{name}.out").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=self.env,
                cwd=self.folder,  # where a daemon that fails dumps its core
            )

    def stop(self, name: str) -> None:
        """Stop a daemon in an orderly way; steps of jobs live on."""
        process = self._processes.pop(name)
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def kill(self, node: str) -> None:
        """End all of a node with SIGKILL, as if it had lost power: its slurmd, its steps and all that they started.

        All are stopped before the first is killed, as nobody is to act on the end of another: srun has a process beside
        it that has the controller end the step on all other nodes once srun is gone.
        """
        process = self._processes.pop(node)
        process.kill()
        process.wait()
        stopped: list[int] = []
        while others := [pid for pid in self._all_of(node) if pid not in stopped]:
            _signal(others, signal.SIGSTOP)
            stopped += others
        _signal(stopped, signal.SIGKILL)

    def _all_of(self, node: str) -> list[int]:
        """Return the processes of jobs on a node behind those that watch them."""
        watching = {_parent(pid) for pid in self.processes_of(node)}
        return [*filter(_is_slurms, watching), *self._started(node)]

    def processes_of(self, *nodes: str) -> list[int]:
        """Return the processes of jobs on some nodes, without those that watch them."""
        return [pid for node in nodes for pid in self._started(node) if not _is_slurms(pid)]

    def _started(self, node: str = "") -> list[int]:
        """Return all processes of jobs, on a node or on all, with what watches them.

        They are in a control group of their node, whatever environment they have; what Slurm has moved out of it has
        our configuration.
        """
        nodes = [node] if node else self.names
        listed = [
            path.read_text().split() for each in nodes for path in (FREEZER / f"slurm_{each}").rglob("cgroup.procs")
        ]
        grouped = {int(pid) for pids in listed for pid in pids}
        return [
            pid
            for pid in _pids()
            if pid != os.getpid()
            and (
                pid in grouped
                or (
                    _variable(pid, "SLURM_CONF") == str(self._config)
                    and (not node or _variable(pid, "SLURMD_NODENAME") == node)
                )
            )
        ]

    def _forget_groups(self) -> None:
        """Remove the control groups that Slurm leaves behind."""
        for name in self.names:
            for path in sorted((FREEZER / f"slurm_{name}").glob("**/"), reverse=True):
                with contextlib.suppress(OSError):
                    path.rmdir()

    def try_(
        self, *words: str, env: Mapping[str, str] | None = None, user: str = "", cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as a user would, or as a user who is named; return what came of it."""
        if user:
            words = (*READS, f"--reuid={user}", f"--regid={user}", "--clear-groups", *words)
        return subprocess.run(
            words, env={**self.env, **(env or {})}, cwd=cwd, capture_output=True, text=True, check=False
        )

    def run(self, *words: str) -> str:
        """Run a command that has to go well; return what it writes."""
        done = self.try_(*words)
        assert not done.returncode, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def states(self) -> dict[str, str]:
        """Return the state of each node."""
        lines = self.try_("sinfo", "--noheader", "-N", "-o", "%N %t").stdout.split("\n")
        return dict(line.split()[:2] for line in lines if line.strip())

    def squeue(self) -> list[str]:
        """Return the ids of all jobs that have not ended."""
        return self.try_("squeue", "--noheader", "-o", "%A").stdout.split()

    def job(self, number: str) -> dict[str, str]:
        """Return what the controller knows of a job."""
        words = self.run("scontrol", "-o", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def until(self, over: Callable[[], bool], what: str) -> None:
        """Wait until something is so, as long as it takes, and all daemons live."""
        while not over():
            for name, process in self._processes.items():
                assert process.poll() is None, f"{name} ended before {what}: {self.log(name)}"
            time.sleep(LOOK_S)

    def log(self, name: str) -> str:
        """Return the last lines of a daemon's log."""
        path = self.folder / "logs" / ("slurmctld.log" if name == "slurmctld" else f"slurmd.{name}.log")
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return "\n".join([*lines[-10:], (self.folder / "logs" / f"{name}.out").read_text(errors="replace")[-500:]])


@contextlib.contextmanager
def slurm(folder: Path, nodes: int = 4, more: str = "", *, users: bool = False) -> Iterator[Slurm]:
    """Run a Slurm whose nodes are n1, n2 and so on, and end it with all that it started."""
    names = [f"n{number}" for number in range(1, nodes + 1)]
    # one at a time on this machine: control groups are called after nodes and numbers of jobs
    with (FOLDER.parent / "slurm.lock").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        with Slurm(folder, names, more, users=users) as running:
            yield running


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _is_slurms(pid: int) -> bool:
    """Return whether a process is of Slurm itself, which is started by the loader."""
    try:
        return Path(f"/proc/{pid}/exe").readlink().name.startswith("ld-")
    except OSError:
        return False


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def _variable(pid: int, name: str) -> str:
    """Return a variable of the environment that a process was started with; empty where it has none, or is gone."""
    try:
        words = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    except OSError:
        return ""
    return next((word.partition("=")[2] for word in words if word.startswith(f"{name}=")), "")


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
