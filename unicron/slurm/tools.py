"""Slurm's commands as processes, with answers that neither a language nor a user's own columns change."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from unicron.errors import InvalidInputError, UnicronError
from unicron.printable import one_line
from unicron.slurm import shown

ANSWER_S = 60.0
"""How long a command may take; the controller may be busy."""

_OWN = ("SQUEUE_", "SINFO_", "SCONTROL_")
"""Variables with which users have columns and filters of their own, begin so."""


class SlurmError(UnicronError):
    """A command of Slurm did not do what it was asked to; says what it has answered."""


class UnreachableError(SlurmError):
    """The controller did not answer: nobody knows what was done."""


def literal(path: Path) -> str:
    """Return a path as it stands in a pattern for the name of a file of output.

    Raises:
        InvalidInputError: there is no way to write it.
    """
    if "\\" in str(path):
        raise InvalidInputError(f"{str(path)!r}: Slurm writes no output below a folder with a backslash; rename that")
    return str(path).replace("%", "%%")


def query_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which commands answer in English, in UTC and in all columns and rows."""
    kept = {name: value for name, value in environ.items() if not name.startswith(_OWN)}
    return {**kept, "LC_ALL": "C", "TZ": "UTC", "SLURM_TIME_FORMAT": "standard"}


def ask(tool: str, *words: str) -> str:
    """Run a command that only asks; return what it writes. Raises as `run` does."""
    return run([tool, *words], query_environment(os.environ))


def run(words: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Run a command; return what it writes.

    Args:
        words: of it.
        environment: of the process; None: ours.

    Raises:
        InvalidInputError: there is no such command.
        UnreachableError: the controller does not answer.
        SlurmError: it refuses; says what it wrote.
    """
    if shutil.which(words[0]) is None:
        raise InvalidInputError(
            f"no {words[0]} on the PATH: this takes Slurm's commands; load their module, or run it on a login node"
        )
    try:
        done = subprocess.run(
            words, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=ANSWER_S
        )
    except subprocess.TimeoutExpired as error:
        raise UnreachableError(f"{words[0]} has not answered within {ANSWER_S:g} s; see `scontrol ping`") from error
    written = done.stderr.decode(errors="replace").strip()
    if done.returncode:
        raise failure(words[0], written or f"exit status {done.returncode}")
    return done.stdout.decode(errors="replace")


_UNREACHABLE = (
    "Unable to contact slurm controller",
    "Socket timed out",
    "Connection refused",
    "Zero Bytes were transmitted",
)

_CURES = {
    "Invalid partition": "name one that `sinfo` lists, with --partition",
    "Required partition not available": "the partition is down: name another one with --partition, or wait for it",
    "User's group not permitted": "name one that you may use: `scontrol show partition` lists AllowGroups",
    "Invalid account": "name an account of yours, with --account",
    "Access/permission denied": "this takes the owner of the job, or an operator of Slurm: have one of them do it",
    "Invalid user": "this takes an operator of Slurm: have one do it",
    "Requested node configuration is not available": "ask for less of a node, or for another partition",
    "More processors requested than permitted": "ask for fewer nodes or processors than the partition has",
    "Node count specification invalid": "ask for fewer nodes than the partition has",
    "unrecognized option": "`sbatch --help` lists what this version has",
    "invalid option": "`sbatch --help` lists what this version has",
}
"""What to do, by what Slurm says."""


def failure(tool: str, written: str) -> SlurmError:
    """Return the error of a command that has failed, by what it wrote: that, and the cure where it is known."""
    lines = [line for line in written.splitlines() if line.strip()]
    said = one_line("; ".join(line.removeprefix(f"{tool}: ").removeprefix("error: ") for line in lines[-3:]))
    if any(each in written for each in _UNREACHABLE):
        return UnreachableError(f"{tool}: {said}: the controller does not answer; see `scontrol ping`")
    cure = next((cure for sign, cure in _CURES.items() if sign in written), f"`man {tool}` says more")
    return SlurmError(f"{tool}: {said}; {cure}")


def version() -> tuple[int, int]:
    """Return which version of Slurm this is: year and month. Raises as `run` does, or where it says none."""
    return shown.version(ask("scontrol", "--version"))
