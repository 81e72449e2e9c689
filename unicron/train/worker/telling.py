"""Lines for a worker's log from inside of a script, which may have exchanged `print`, `sys.stdout` and `sys.stderr`."""

import contextlib
import os

_STDERR = 2


def tell(text: str) -> None:
    """Write a line, or several, to where the process's errors go."""
    with contextlib.suppress(OSError):  # the script has closed that
        os.write(_STDERR, f"{text}\n".encode(errors="backslashreplace"))
