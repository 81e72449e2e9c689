"""What is made of a source file is kept on the node, as Python keeps what it compiles, for later processes."""

import contextlib
import importlib.util
import marshal
import os
import sys
from collections.abc import Callable
from hashlib import sha256
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from unicron.contracts.worker import CODE

_MAKERS = ("functions", "handing", "instrument", "liveness", "trees")
_OURS = b"".join(Path(__file__).with_name(f"{each}.py").read_bytes() for each in _MAKERS)


def load_or_make(make: Callable[[], Any], *of: bytes) -> Any:
    """Return what was made and kept; else make it, and keep it where the agent has named a folder for that.

    Args:
        make: makes it: code, or plain values.
        of: all that it is made of, besides Python and this package.
    """
    folder = os.environ.get(CODE)
    if not folder:
        return make()
    where, loader = str(Path(folder, _digest(of))), SourceFileLoader("", "")
    with contextlib.suppress(OSError, EOFError, ValueError, TypeError):
        return marshal.loads(loader.get_data(where))  # noqa: S302 nobody else writes to that folder
    made = make()
    loader.set_data(where, marshal.dumps(made))  # at once, or not at all
    return made


def _digest(parts: tuple[bytes, ...]) -> str:
    found = sha256(importlib.util.MAGIC_NUMBER + bytes([sys.flags.optimize]))
    for each in (_OURS, *parts):
        found.update(len(each).to_bytes(8, "big") + each)
    return found.hexdigest()
