"""The commit of the folder in which a task's script lies."""

import os
import shutil
import subprocess
from pathlib import Path

from msgspec.structs import replace

from unicron.contracts.tasks import TaskSpec

LOOK_S = 5.0
"""A large repository on a slow file system is not waited for longer."""

SHOWN, DIRTY = 12, "-dirty"


def with_commit(spec: TaskSpec) -> TaskSpec:
    """Return a task with a commit, that of its script's folder if it names none; "-dirty" is added if files differ."""
    return spec if spec.commit else replace(spec, commit=_commit_of(spec))


def _commit_of(spec: TaskSpec) -> str:
    """Return what git says of a script's folder; empty where there is no git, no repository, or no answer in time."""
    workdir = Path(spec.workdir or ".")
    script = next((each for word in spec.command[1:] if (each := workdir / word).is_file()), None)
    folder = script.parent if script else workdir
    found = _git(folder, "describe", "--always", "--dirty", "--exclude=*", f"--abbrev={SHOWN}")
    unknown = found and script and not _git(folder, "ls-files", "--", script.name)
    return f"{found.removesuffix(DIRTY)}{DIRTY}" if unknown else found


def _git(folder: Path, *words: str) -> str:
    """Return what git answers, without a lock, as somebody else may be at work there; empty where it does not."""
    git = shutil.which("git")
    if git is None:
        return ""
    try:
        found = subprocess.run(
            [git, "-C", folder, *words],
            capture_output=True,
            text=True,
            timeout=LOOK_S,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_LITERAL_PATHSPECS": "1", "LC_ALL": "C"},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""
