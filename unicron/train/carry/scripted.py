"""Modules that torch.jit has compiled: what they hold lies in C++, where `vars` does not lead to."""

import itertools
from typing import Any

import torch
from torch.jit._state import _python_cu

from unicron.train.carry.kinds import Kind, Parts


def rounding_hint() -> str:
    """Return why numbers may be others in a new process for what torch.jit has compiled here; empty where they can't.

    A process whose profiling mode was on has none of it from now on.
    """
    unit: Any = _python_cu
    compiled = unit.get_functions()
    if not compiled or not torch._C._jit_set_profiling_mode(False):  # noqa: SLF001 there is no other way to it
        return ""
    name = compiled[-1].qualified_name.removeprefix("__torch__.")
    return (
        f"; torch.jit has compiled {name}, and may round otherwise in its first calls in each process: call "
        "torch._C._jit_set_profiling_mode(False) before that"
    )


class ScriptedModule(Kind):
    """A compiled module by its attributes, parameters and buffers, and what is in Python beside them.

    What it is compiled to is each process's own: such as its methods, of which torch keeps those that were called.
    """

    def _beside(self, thing: Any) -> Parts:
        own = vars(thing).items()
        return [(name, each) for name, each in own if not type(each).__module__.startswith("torch")]

    def _held(self, thing: Any) -> Parts:
        names = sorted(thing._concrete_type.get_attributes())  # noqa: SLF001 there is no other way to them
        return [(name, getattr(thing, name)) for name in names]

    def parts(self, thing: Any) -> Parts:
        """Return tensors, modules inside, and what is beside them; lists and the like are made anew at each look."""
        tensors = [(name, each) for name, each in self._held(thing) if isinstance(each, torch.Tensor)]
        return [*tensors, *thing._modules.items(), *self._beside(thing)]  # noqa: SLF001 likewise

    def fingerprint(self, thing: Any) -> tuple[Any, ...]:
        """Return these, and texts of all else."""
        others = [(name, repr(each)) for name, each in self._held(thing) if not isinstance(each, torch.Tensor)]
        return tuple(itertools.chain.from_iterable([*self.parts(thing), *others]))

    def state(self, thing: Any) -> Any:
        """Return all of them."""
        return self._held(thing), self._beside(thing)

    def set_state(self, thing: Any, state: Any) -> None:
        """Set all of them."""
        for name, each in state[0]:
            if getattr(thing, name) is not each:
                setattr(thing, name, each)
        vars(thing).update(state[1])
