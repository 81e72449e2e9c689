"""Which modules a process finds first: a process of the cluster what it was installed with, a script what is its own.

A folder of scripts may well have a `secrets.py` of its own, and a user's PYTHONPATH a `pynvml`.
"""

# ruff: noqa: PTH100 pathlib would be imported from wherever it is found first
import os
import sys
from typing import NoReturn


def run(name: str) -> NoReturn:
    """Run `main` of a module of ours, and exit with its status; nothing else may have been imported before."""
    find_own_first()
    from importlib import import_module  # noqa: PLC0415 not before

    sys.exit(import_module(name).main())


def find_own_first() -> None:
    """Have this process import what it was installed with; what comes by a user's ways is found last.

    These are the folder in which it was started, and PYTHONPATH. Its children have that as it was.
    """
    variable = "" if sys.flags.ignore_environment else os.environ.get("PYTHONPATH", "")
    users = {os.path.abspath(each) for each in variable.split(os.pathsep) if each}
    users |= set() if sys.flags.safe_path else {os.path.abspath(sys.path[0])}
    sys.path.sort(key=lambda each: os.path.abspath(each) in users)


def forget_others(folder: str, kept: frozenset[str]) -> None:
    """Have a script import modules of its own folder by whatever name, though others of that name were imported.

    Args:
        folder: of the script, first in its path.
        kept: names of modules that Python itself had imported: these are not found in a folder either.
    """
    from pathlib import Path  # noqa: PLC0415 not before

    own = Path(folder)
    names = {path.stem for path in own.glob("*.py")} | {path.parent.name for path in own.glob("*/__init__.py")}
    for name in names & sys.modules.keys() - kept - {"torch", "unicron"}:
        origin = Path(str(getattr(getattr(sys.modules[name], "__spec__", None), "origin", None)))
        if own not in {origin.parent, origin.parent.parent}:
            del sys.modules[name]
