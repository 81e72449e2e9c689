"""What is given to sbatch: a script, and the user's options."""

import re
import shlex
from collections.abc import Sequence

from unicron.errors import InvalidInputError

EXPEDITE = (25, 11)
"""The first version of Slurm that has `--requeue=expedite`."""

_REFUSED = {
    "--wrap": "what the job runs is given after `--`",
    "--test-only": "call `sbatch --test-only` itself",
    "--no-requeue=": "write --no-requeue",
}
_ALL_AT_ONCE = "its jobs would run at the same time, and they share one folder: give --array={}%1, one after the other"


def batch_script(command: Sequence[str]) -> str:
    """Return the script of a job in which a command runs the cluster and a task.

    A lost node does not end it, a requeue goes on in the same file of output, and where Slurm is told to send users'
    signals before it preempts, only the command gets it, not what it has started. With `@0` no signal comes before a
    time limit, as it would be up to a minute early: Slurm looks at limits twice a minute.
    """
    return f"""\
#!/bin/sh
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@0
exec {shlex.join(command)}
"""


def checked(options: Sequence[str], version: tuple[int, int]) -> tuple[list[str], list[str]]:
    """Return a user's options as this version of sbatch has them, and what was changed, for the user.

    Raises:
        InvalidInputError: one does not go with a job of ours; says why and what to write.
    """
    found, changes = [], []
    for option in options:
        for refused, cure in _REFUSED.items():
            if option == refused or option.startswith(f"{refused.rstrip('=')}="):
                raise InvalidInputError(f"{option}: {cure}")
        if option == "--requeue=expedite" and version < EXPEDITE:
            changes.append(f"{option}: Slurm {version[0]}.{version[1]:02} has no such thing; --requeue is used")
            found.append("--requeue")
        else:
            found.append(option)
    _check_array(found)
    return found, changes


def _check_array(options: Sequence[str]) -> None:
    """Raise where jobs of an array would run at the same time."""
    text = " ".join(options)
    match = re.search(r"(?:^| )(?:--array[= ]|-a ?=?)([^ ]+)", text)
    if match and not match[1].endswith("%1") and not match[1].isdecimal():
        raise InvalidInputError(f"--array={match[1]}: " + _ALL_AT_ONCE.format(match[1].partition("%")[0]))
