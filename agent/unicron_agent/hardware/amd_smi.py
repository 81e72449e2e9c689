"""Watches this node's GPUs by AMD's programs, in a thread: these are all that there is where NVML is not.

A program that asks a broken GPU may hang in the kernel, where nothing ends it: it is left alone, and no other is
started beside it.
"""

import logging
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from unicron.contracts.tasks import Slot
from unicron.rules import Rules
from unicron_agent.hardware.amd import AmdGpus, Reading, read_gpus
from unicron_agent.hardware.gpus import SAMPLE_S, Report, Watch
from unicron_agent.stimuli import Sampled

log = logging.getLogger(__name__)

ROCM = "/opt/rocm/bin"
PROGRAMS = {
    "amd-smi": [["list", "--json"], ["metric", "--json"]],
    "rocm-smi": [
        [
            "--showuniqueid",
            "--showbus",
            "--showtemp",
            "--showpower",
            "--showreplaycount",
            "--showmeminfo",
            "vram",
            "--json",
        ]
    ],
}
"""What each is asked for; the first that says anything is believed. The second one tells of no memory errors."""

ANSWERS_S = 10.0
"""As long as a program is waited for."""

LOOK_S = 0.2


class NoAnswerError(Exception):
    """The programs say nothing of any GPU; the text says why."""


class AmdSmi:
    """Runs AMD's programs, one at a time.

    Args:
        ended: set when nobody waits for an answer any more.
    """

    def __init__(self, ended: threading.Event) -> None:
        self._ended = ended
        self._process: subprocess.Popen[bytes] | None = None

    def read(self) -> list[Reading]:
        """Return what they say of each GPU; nothing where there is no such program.

        Raises:
            NoAnswerError: there is, and it does not say anything.
        """
        problems = []
        for name, questions in PROGRAMS.items():
            if path := shutil.which(name) or shutil.which(name, path=ROCM):
                try:
                    if found := read_gpus([self._ask([path, *words]) for words in questions]):
                        return found
                    problems.append(f"{path} names no GPU")
                except (NoAnswerError, OSError) as error:
                    problems.append(str(error))
        if problems:
            raise NoAnswerError("; ".join(problems))
        return []

    def _ask(self, command: list[str]) -> str:
        if self._process is not None and self._process.poll() is None:
            raise NoAnswerError(f"process {self._process.pid} of {self._process.args!r} does not end")
        self._process = process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=_environment(),
            start_new_session=True,
        )
        until = time.monotonic() + ANSWERS_S
        while True:
            try:
                said, _ = process.communicate(timeout=LOOK_S)
                break
            except subprocess.TimeoutExpired:
                if self._ended.is_set() or time.monotonic() > until:
                    _kill(process)
                    raise NoAnswerError(f"{' '.join(command)} does not end within {ANSWERS_S:g} s") from None
        if process.returncode:
            raise NoAnswerError(f"{' '.join(command)} ends with {process.returncode}: see what it says to this user")
        return said.decode(errors="replace")


class AmdWatch(Watch):
    """Watches them through AMD's programs.

    Args:
        rules: classify faults.
        slots: of the node.
        addresses: slots by PCI address, which is filled in here for those who read the kernel's log.
        report: called in the thread with each fault and each set of counters.
    """

    def __init__(self, rules: Rules, slots: Sequence[Slot], addresses: dict[str, int], report: Report) -> None:
        super().__init__(rules, report)
        self._by_device = {slot.device: slot.index for slot in slots}
        self._addresses = addresses
        self._gpus = AmdGpus(self._by_device)
        self._smi = AmdSmi(self._ended)

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self._sample(self._smi.read())
                self._tell_problem("")
            except NoAnswerError as error:
                self._tell_problem(str(error))
            self._ended.wait(SAMPLE_S)

    def _sample(self, readings: list[Reading]) -> None:
        here = {
            reading.address: self._by_device[reading.device]
            for reading in readings
            if reading.device in self._by_device
        }
        self._addresses.update(here)
        counters, faults = self._gpus.judge(readings)
        for slot, text in faults:
            self._report_fault(slot, text)
        if counters:
            self._report(Sampled(tuple(counters)))

    def _tell_problem(self, problem: str) -> None:
        """Log a problem once, and that it is over."""
        if problem != self._problem and not self._ended.is_set():
            text = f"the GPUs are not watched: {problem}; trying again" if problem else "the GPUs are watched again"
            log.warning("%s", text)
        self._problem = problem


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a program and what it has started, as far as the kernel lets it end."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(LOOK_S)


def _environment() -> dict[str, str]:
    """Return a program's environment: nothing of ours, and the system's Python first, with which AMD's packages go."""
    return {"PATH": os.pathsep.join((os.defpath, os.environ.get("PATH", ""), ROCM)), "LC_ALL": "C.UTF-8"}
