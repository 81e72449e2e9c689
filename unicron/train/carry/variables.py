"""Variables of a script: what its modules and its functions that are running have, by name."""

import ctypes
import os
import sys
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

NAME = "__unicron__"
"""The variable of each instrumented module whose methods its loops call."""


class Variables:
    """Those of a function that is running, or of a module.

    Args:
        scope: the function's frame, or the module's variables.
        without: names of variables that are left alone.
    """

    def __init__(self, scope: FrameType | dict[str, Any], without: Iterable[str] = ()) -> None:
        self.scope, self._without = scope, frozenset(without)

    def belongs_to(self, frame: FrameType) -> bool:
        """Return whether they are what a frame's code reads and sets."""
        return self.scope is frame or self.scope is frame.f_locals

    def values(self) -> dict[str, Any]:
        """Return their values by name."""
        variables = self.scope if isinstance(self.scope, dict) else self.scope.f_locals
        left = self._without
        return {name: value for name, value in variables.items() if not (name.startswith("__") or name in left)}

    def assign(self, values: Mapping[str, Any], names: Iterable[str]) -> None:
        """Have these values, and no variables but `names`."""
        kept = {*names, *self._without}
        if isinstance(self.scope, dict):
            for name in self.values().keys() - kept:
                del self.scope[name]
            self.scope.update(values)
            return
        variables = self.scope.f_locals
        kept |= {name for name in variables if name.startswith("__")}
        variables.update(values)
        # from 3.13 on they are written through (PEP 667), and none can be taken away
        if sys.version_info < (3, 13):
            for name in variables.keys() - kept:
                del variables[name]
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(self.scope), ctypes.c_int(1))


def space_name(space: str) -> str:
    """Return the name of a space of variables as a script's author knows it."""
    _, running, function = space.partition(":")
    return f"{function}()" if running else space


def spaces_of(frame: FrameType, modules: Mapping[str, dict[str, Any]]) -> dict[str, Variables]:
    """Return the variables of the program's modules, and of its functions that are running, the outermost first."""
    frames, each = list[FrameType](), frame
    while each is not None:
        if NAME in each.f_globals and each.f_locals is not each.f_globals:
            frames.append(each)
        each = each.f_back  # type: ignore[assignment]
    found = {name: Variables(variables) for name, variables in sorted(modules.items())}
    found["os"] = Variables({"environ": os.environ})
    return found | {f"{number}:{each.f_code.co_name}": Variables(each) for number, each in enumerate(frames[::-1])}
