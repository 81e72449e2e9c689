"""Folders that a script makes for its process alone, with names that no other process gives them."""

import os
import tempfile
from pathlib import Path
from typing import Any

from unicron.train.carry.callers import caller
from unicron.train.carry.variables import NAME


class OwnFolders:
    """The temporary folders that the script itself makes before its loops: a new rank has others, which are empty."""

    def __init__(self) -> None:
        self._made, self._looked = dict[str, int | None](), False

    def begin(self) -> None:
        """Note them from now on."""
        make = tempfile.mkdtemp

        def mkdtemp(*arguments: Any, **named: Any) -> Any:
            path = make(*arguments, **named)
            if not self._looked and NAME in caller(__name__):
                self._made[os.fsdecode(path)] = None
            return path

        tempfile.mkdtemp = mkdtemp

    def written(self) -> str:
        """Return why no new rank has what was put into such a folder since the first call; empty where nothing was."""
        self._looked = True
        for path, before in self._made.items():
            now = _look(path)
            if before is not None and now not in {before, None}:
                return (
                    f"{path}, a folder of this process alone, has files that its loop has put there, and a new rank "
                    "has another one: give it a name of your own with the rank's number"
                )
            self._made[path] = now
        return ""


def _look(path: str) -> int | None:
    """Return when something in a folder was last made or removed, None where it is gone."""
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return None
