"""Scripts that are run in a test with their loops instrumented, and say where they are."""

import functools
import io
import itertools
import linecache
import sys
import types
from unittest.mock import patch

import torch
from tqdm import tqdm, trange

from unicron.train.carry.kinds import NotCarriedError
from unicron.train.carry.variables import NAME
from unicron.train.loops.instrument import instrument
from unicron.train.loops.loops import Loops


def update_of(loops):
    """Return what makes a whole iteration."""
    return lambda: (loops.begin_iteration(), loops.record_reduce(), loops.record_update())


class Watched:
    """A run of a script that says where it is; what it notes is no part of the script."""

    __module__ = "unicron.tests"

    def __init__(self, rank=0, there=None):
        self.passed, self.there, self.records = [], [], [there and there[1]]
        meet = (lambda: self._go_to(there)) if there else (lambda: None)
        self.loops = Loops(rank, lambda: ([], [], {}, ()), meet, self.records.append)
        torch.manual_seed(5)

    def _go_to(self, there):
        self.loops.load_state_dict(there[0])
        _ = there[1] is None or self.loops.take_over(there[1])

    def __call__(self, *values):
        self.passed.append(values)
        self.there.append((self.loops.state_dict(), self.records[-1], self.loops.closed_reason))

    def run(self, text, **variables):
        module = types.ModuleType("__main__")
        vars(module).update(backward=update_of(self.loops))
        vars(module).update(variables, note=self, at=self, torch=torch, **{NAME: self.loops, "__name__": "__main__"})
        with patch.dict(sys.modules, {"__main__": module}):
            exec(compile(instrument(text, "x.py", "x.py"), "x.py", "exec"), vars(module))
        return self


class Confirmed(Watched):
    """A run of a script whose training loops show as a model is called in them."""

    __module__ = "unicron.tests"

    def __init__(self, there=None, first=""):
        super().__init__(1, there)
        self.loops._is_ready = lambda: "ready" not in self.space or bool(self.space["ready"])
        self.loops.start_at(first)

    def run(self, text, **variables):
        self.space = variables
        update = update_of(self.loops)

        def run():
            if not self.loops.has_begun and (why := self.loops.confirm()):
                raise NotCarriedError(why)
            update()

        module = types.ModuleType("__main__")
        linecache.cache["x.py"] = (len(text), None, text.splitlines(keepends=True), "x.py")
        vars(module).update(variables, run=run, backward=run, note=self, torch=torch, total=0, functools=functools)
        vars(module).update(
            io=io, tqdm=tqdm, trange=trange, itertools=itertools, **{NAME: self.loops, "__name__": "__main__"}
        )
        exec(compile(instrument(text, "x.py", "x.py"), "x.py", "exec"), vars(module))
        return self
