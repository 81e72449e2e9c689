"""Who has called a function that stands in for one of Python's own."""

import sys
from typing import Any

_BETWEEN = frozenset(
    {"functools", "genericpath", "glob", "io", "logging", "logging.handlers", "os", "pathlib", "posixpath", "shutil"}
    | {"tempfile", f"{__package__}.newer_files"}
)
"""Modules by way of which others call."""

_OF_PATHS = frozenset({"pathlib", "pathlib._local", "posixpath", f"{__package__}.newer_files"})
_RESOLVES = frozenset({"_joinrealpath", "realpath", "resolve"})


def caller(own: str) -> dict[str, Any]:
    """Return the variables of the module that has called, by way of Python's own or not.

    Args:
        own: name of the module with the function that stands in.
    """
    frame, between = sys._getframe(1), {own, *_BETWEEN}  # noqa: SLF001 there is no other way to them
    while frame.f_back is not None and frame.f_globals.get("__name__") in between:
        frame = frame.f_back
    return frame.f_globals


def is_resolving() -> bool:
    """Return whether a path is only made a real one, where it does not matter what is there but for links."""
    frame = sys._getframe(1)  # noqa: SLF001 likewise
    while frame.f_back is not None and frame.f_globals.get("__name__") in _OF_PATHS:
        if frame.f_code.co_name in _RESOLVES:
            return True
        frame = frame.f_back
    return False
