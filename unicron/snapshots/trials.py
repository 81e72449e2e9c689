"""The folder of a trial, as far as others than the rank look into it: what is awaited of it, and what came of it.

A rank that is lost while a process is on trial in its place leaves the folder to its agent. The process goes on as long
as the folder is there.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from unicron.contracts.worker import Drilled

AWAITED, OUTCOME = "awaited", "outcome"
"""Files of a trial's folder."""

_MOST_BYTES = 64 << 10


class Outcome(msgspec.Struct, frozen=True):
    """What has come of a trial; fields as in `Drilled`."""

    problem: str = ""
    unproven: str = ""


class Trial:
    """A trial, seen from outside of it.

    Args:
        folder: of it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, drilled: Drilled) -> None:
        """Leave behind what is to be reported, but for what came of it.

        Raises:
            OSError: it can't be written.
        """
        (self.folder / AWAITED).write_bytes(msgspec.json.encode(drilled))

    @property
    def is_awaited(self) -> bool:
        """Whether anybody waits for its outcome, be the rank there or not."""
        return (self.folder / AWAITED).exists()

    def finish(self, verdict: dict[str, Any]) -> None:
        """Leave behind what came of it, if that is awaited and the folder is still there."""
        unfinished = self.folder / f"{OUTCOME}.part"
        try:
            unfinished.write_bytes(msgspec.json.encode(Outcome(*(str(verdict.get(name, "")) for name in _FIELDS))))
            unfinished.rename(self.folder / OUTCOME)
        except OSError:  # nobody waits any more
            return

    def outcome(self) -> Drilled | None:
        """Return what came of it, as it is to be reported; None as long as it is not over."""
        if not (self.folder / OUTCOME).exists():
            return None
        try:
            awaited = msgspec.json.decode(_read(self.folder / AWAITED), type=Drilled)
            outcome = msgspec.json.decode(_read(self.folder / OUTCOME), type=Outcome)
        except (OSError, msgspec.MsgspecError):
            return None
        return replace(awaited, problem=outcome.problem, unproven=outcome.unproven, under_way=False)

    def remove(self) -> None:
        """Remove it, so that a process that is still on trial ends."""
        shutil.rmtree(self.folder, ignore_errors=True)


_FIELDS = Outcome.__struct_fields__


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(min(_MOST_BYTES, os.fstat(file.fileno()).st_size))
