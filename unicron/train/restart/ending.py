"""The end of a script, whose process ends without taking everything down."""

import atexit
import gc
import io
import threading
from contextlib import suppress

FILES = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


def flush() -> None:
    """Flush what the script has left open, as its objects would when they were freed."""
    for each in gc.get_objects():
        if issubclass(type(each), FILES):
            with suppress(OSError, ValueError):  # it is closed, or nobody reads it any more
                each.flush()


def end() -> None:
    """Do what the interpreter does before it takes everything down: wait for threads, and run what is to be run."""
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 it has no other name
    atexit._run_exitfuncs()  # noqa: SLF001 likewise
