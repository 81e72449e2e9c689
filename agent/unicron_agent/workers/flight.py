"""Reads the collectives that torch's watchdog dumps before it ends a process: a pickle of plain data."""

import io
import logging
import pickle
import pickletools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unicron.errors import InvalidInputError
from unicron.flight import convert, describe
from unicron.printable import one_line

log = logging.getLogger(__name__)

VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Name the beginning of the files that torch writes, one a rank, which it ends with the rank's number; the second is
the older name. That it writes them when a collective of NCCL takes too long, of 2,000 of them, is what it does unasked.
"""

MOST_BYTES = 4 * 1024 * 1024
"""Of a file: 2,000 collectives take 0.3 MB."""

RECENT_S = 120.0
"""Older files are of another failure: torch ends a process some seconds after it has written one."""


def dump_variables(prefix: Path, *environments: Mapping[str, str]) -> dict[str, str]:
    """Return where torch is to write, as variables; none where one of the environments says that already.

    What was written there for an earlier worker is removed.
    """
    for path in prefix.parent.glob(f"{prefix.name}.*"):
        path.unlink(missing_ok=True)
    said = any(name in each for name in VARIABLES for each in environments)
    return {} if said else dict.fromkeys(VARIABLES, f"{prefix}.")


def read_dump(prefix: Path, now: float) -> tuple[str, ...]:
    """Return a line for each collective that was under way when torch wrote, not long ago; none where it has not.

    Args:
        prefix: of the files, as for `dump_variables`.
        now: Unix seconds.
    """
    recent = [path for path in prefix.parent.glob(f"{prefix.name}.*") if now - path.stat().st_mtime < RECENT_S]
    if not recent:
        return ()
    path = max(recent, key=lambda path: path.stat().st_mtime)
    try:
        return tuple(describe(convert(load_plain_pickle(path))))
    except (InvalidInputError, OSError) as error:
        log.warning("%s has no readable collectives: %s", path, one_line(str(error)[:300]))
        return ()


def load_plain_pickle(path: Path) -> Any:
    """Return what a pickle of plain data holds.

    Raises:
        InvalidInputError: it is something else, or larger than such a file can be.
        OSError: it can't be read.
    """
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise InvalidInputError(f"it is larger than {MOST_BYTES} bytes")
    try:
        puts = [int(str(argument)) for code, argument, _ in pickletools.genops(data) if "PUT" in code.name]
        if max(puts, default=0) < len(data):  # else loading it would take as much memory as it says there
            return _Plain(io.BytesIO(data)).load()
    except Exception as error:  # a broken pickle raises anything
        raise InvalidInputError(f"{type(error).__name__}: {error}") from error
    raise InvalidInputError("it asks for more memory than it can need")


class _Plain(pickle.Unpickler):
    """Makes lists, maps, texts and numbers, and nothing else.

    See https://docs.python.org/3/library/pickle.html#restricting-globals.
    """

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")
