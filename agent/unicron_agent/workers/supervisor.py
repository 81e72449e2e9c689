"""Forks worker processes from the warm standby, watches them by pidfd, and adopts them after a restart of the agent."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from unicron.contracts.commands import StartWorker
from unicron.contracts.worker import CODE
from unicron.errors import InvalidInputError
from unicron.healing import PYTHON, way_of
from unicron_agent.stimuli import ProcessExited, WorkerProcess
from unicron_agent.workers.activity import start_time
from unicron_agent.workers.orphans import LOOKS_S
from unicron_agent.workers.output import Outputs, tail
from unicron_agent.workers.warm import Standby

TAIL_LINES = 30

AS_IT_IS: dict[str, Any] = {"runner": "", "ahead": (), "parts": False}
"""A request to the standby for what is no worker."""


class Supervisor:
    """Starts, watches and ends worker processes.

    Args:
        run_dir: of the node, for logs and records.
        environment: variables for all of them.
        outputs: follows their logs.
        on_exit: called with the end of each.
        standby: forks the ones that run Python.
    """

    def __init__(
        self,
        run_dir: Path,
        environment: dict[str, str],
        outputs: Outputs,
        on_exit: Callable[[ProcessExited], None],
        standby: Standby,
    ) -> None:
        self._run_dir = run_dir
        self._outputs = outputs
        self._environment = environment
        self._on_exit = on_exit
        self._running: dict[str, WorkerProcess] = {}
        self._standby = standby
        self._popens: dict[str, subprocess.Popen[bytes]] = {}
        self._helpers: set[int] = set()
        for name in ("logs", "workers"):
            (run_dir / name).mkdir(parents=True, exist_ok=True)
        code = run_dir / "code"
        shutil.rmtree(code, ignore_errors=True)  # of an older agent, for sources that may be other ones now
        with contextlib.suppress(OSError):  # what somebody else may write is not used
            code.mkdir(0o700)
            self._environment = {**environment, CODE: str(code.absolute())}

    async def run_module(self, module: str, argument: str) -> tuple[int, tuple[str, ...]]:
        """Run a module in a fork of the standby, not as a worker; return its exit status and its last lines.

        The status is 128 plus the signal's number if a signal ended it.

        Raises:
            UnicronError: the standby is dead.
        """
        with tempfile.NamedTemporaryFile(dir=self._run_dir / "logs") as log:
            there = {
                "cwd": str(self._run_dir),
                "log": log.name,
                "env": {**self._environment, "UNICRON_WORKER_SOCKET": ""},
            }
            how = {"module": True, **AS_IT_IS}
            pid = await self._standby.fork({"argv": [module, argument], **how, **there})
            self._helpers.add(pid)
            descriptor, ended = os.pidfd_open(pid), asyncio.Event()
            asyncio.get_running_loop().add_reader(descriptor, ended.set)
            try:
                await ended.wait()
            finally:
                asyncio.get_running_loop().remove_reader(descriptor)
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)  # where this was cancelled
                code, number = _status(descriptor)
                self._helpers.discard(pid)
                os.close(descriptor)
            return code if code is not None else 128 + (number or 0), _tail(log.name)

    async def start_worker(self, command: StartWorker, env: dict[str, str]) -> int:
        """Start the process of a worker; return its process id.

        A Python script or module (`python -m`) is forked from the warm standby, and so is the launcher of a program
        that heals by restarts; anything else is started by `subprocess`.

        Raises:
            OSError: the program or its folder is not there.
            UnicronError: the standby is dead, or its interpreter is not the one that is to be healed in place.
        """
        name, spec, way = command.worker, command.spec, way_of(command.spec)
        log, env = self._run_dir / "logs" / f"{name}.log", {**self._environment, **env}
        pid = await self._launch(command, env, log)
        running = WorkerProcess(
            worker=name,
            task=command.task,
            slot=command.slot,
            pid=pid,
            started=start_time(pid) or 0,
            log=str(log),
            correlation=command.correlation,
            place=command.place,
            layout=command.layout,
            restarts=way.runs_again,
            silence_s=way.silence_s(spec),
            spins=bool(env.get("CUDA_VISIBLE_DEVICES")),
            checkpoints=spec.checkpoints,
            watch_log=spec.watch_log,
        )
        self._watch(running)
        try:
            self._record_path(name).write_bytes(msgspec.json.encode(running))
        except OSError:  # no later agent would find it
            self.kill(name)
            raise
        return pid

    async def _launch(self, command: StartWorker, env: dict[str, str], log: Path) -> int:
        spec = command.spec
        cwd = Path(spec.workdir or ".").resolve(strict=True)
        script = _python_script(spec.command, cwd)
        self._outputs.follow(command.worker, str(log), spec.watch_log)
        way = way_of(spec)
        if script is None and way.runner and not way.runs_any:
            raise InvalidInputError(
                f"{spec.command[0]} is not the interpreter by which this node runs scripts that are healed in place, "
                f"{sys.executable}: write `python`, and install Unicron in the environment that the script needs"
            )
        if script is not None or way.runs_any:
            module, argv = script or (None, spec.command)
            how = {"module": module, **way.launch(command.layout)}
            return await self._standby.fork({"argv": argv, "cwd": str(cwd), "env": env, "log": str(log), **how})
        with log.open("ab") as output:
            process = subprocess.Popen(  # noqa: ASYNC220 returns at once
                spec.command,
                cwd=cwd,
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,
            )
        self._popens[command.worker] = process
        return process.pid

    def adopt(self) -> list[WorkerProcess]:
        """Find and watch the workers of an earlier agent; `on_exit` is soon called for those that have ended."""
        found = []
        for path in sorted((self._run_dir / "workers").glob("*.json")):
            try:
                running = msgspec.json.decode(path.read_bytes(), type=WorkerProcess)
            except msgspec.MsgspecError:  # written half when the machine went down
                path.unlink()
                continue
            found.append(running)
            self._outputs.follow(running.worker, running.log, running.watch_log)
            if start_time(running.pid) == running.started:
                self._watch(running)
            else:
                asyncio.get_running_loop().call_soon(self._reap, running, None)
        return found

    @property
    def checkpoints(self) -> set[str]:
        """The folders on this machine to which the tasks of its workers write checkpoints."""
        return {
            each.checkpoints for each in self._running.values() if each.checkpoints and "://" not in each.checkpoints
        }

    @property
    def watching(self) -> bool:
        """Whether any worker's process runs."""
        return bool(self._running)

    def kill(self, name: str) -> None:
        """Kill the worker, even a stopped one; `on_exit` is called when it has ended."""
        running = self._running.get(name)
        if running is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(running.pid, signal.SIGKILL)

    def restarts(self, name: str) -> bool:
        """Return whether the worker runs a program without a session."""
        return self._running[name].restarts

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to the worker."""
        os.kill(self._running[name].pid, number)

    async def stop(self) -> None:
        """Kill all workers, and wait for them to be gone."""
        for name in list(self._running):
            self.kill(name)
        while self._running:
            await asyncio.sleep(0.01)

    # --- watching ----------------------------------------------------------------------------------------------------

    def _record_path(self, name: str) -> Path:
        return self._run_dir / "workers" / f"{name}.json"

    def _watch(self, running: WorkerProcess) -> None:
        self._running[running.worker] = running
        try:
            descriptor = os.pidfd_open(running.pid)
        except ProcessLookupError:
            asyncio.get_running_loop().call_soon(self._reap, running, None)
            return
        asyncio.get_running_loop().add_reader(descriptor, self._reap, running, descriptor)

    def _reap(self, running: WorkerProcess, descriptor: int | None) -> None:
        """Collect the status of a process that has ended, if it was our child, and report its end."""
        code = number = None
        if descriptor is not None:
            asyncio.get_running_loop().remove_reader(descriptor)
            code, number = _status(descriptor)
            os.close(descriptor)
        self._running.pop(running.worker, None)
        if process := self._popens.pop(running.worker, None):
            process.returncode = 0  # its status was collected above; it must not be waited for again
        self._record_path(running.worker).unlink(missing_ok=True)
        for seconds in LOOKS_S:
            asyncio.get_running_loop().call_later(seconds, self._kill_orphans)
        self._on_exit(ProcessExited(running.worker, code, number, _tail(running.log)))

    def _kill_orphans(self) -> None:
        self._standby.kill_orphans({*self._helpers, *(each.pid for each in self._running.values())})


def _status(descriptor: int) -> tuple[int | None, int | None]:
    """Return the exit code of a process that has ended or is about to, or the signal that ended it.

    Both are None where it was another's child.
    """
    with contextlib.suppress(ChildProcessError):
        status = os.waitid(os.P_PIDFD, descriptor, os.WEXITED)
        if status is not None:
            return (status.si_status, None) if status.si_code == os.CLD_EXITED else (None, status.si_status)
    return None, None


def _tail(log: str) -> tuple[str, ...]:
    """Return the last lines that a worker wrote."""
    with contextlib.suppress(OSError):
        return tuple(tail(log, TAIL_LINES))
    return ()


def _python_script(command: list[str], cwd: Path) -> tuple[bool, list[str]] | None:
    """Return (is a module, arguments from the script's name on) where `command` runs this Python, else None."""
    program = Path(command[0])
    if program.name not in PYTHON or len(command) < 2:
        return None
    if program.name != command[0] and (cwd / program).parent.resolve() != Path(sys.executable).parent.resolve():
        return None  # of another environment, with other packages
    if command[1] == "-m" and len(command) > 2:
        return True, command[2:]
    return None if command[1].startswith("-") else (False, command[1:])
