"""How a script is run in place: what it calls is exchanged before its first line runs, and nothing of it is changed."""

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from unicron.contracts.worker import ANEW, CAUSE
from unicron.train.carry.files import Files
from unicron.train.carry.kept_workers import KeptWorkers, make_iterator
from unicron.train.carry.variables import NAME as LOOPS
from unicron.train.groups.switched import NAME
from unicron.train.inplace.ghost import Ghost
from unicron.train.inplace.inplace import InPlace, call_after
from unicron.train.inplace.parallel import parallel
from unicron.train.inplace.seed import GHOST, Seed
from unicron.train.loops.program import InstrumentingFinder, ScriptProgram, locate_module
from unicron.train.restart.launcher import Place, variables_of
from unicron.train.worker.channel import AgentChannel

PLACES = ("backend", "init_method", "timeout", "world_size", "rank")
"""The first parameters of `torch.distributed.init_process_group`."""

BESIDE = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
"""The agent's description of the ranks on its node: a script reads it before there is a membership."""


def install(channel: AgentChannel | None, seed: Seed | None = None) -> InPlace:
    """Exchange what scripts call; return what is behind it."""
    mine = _rank(channel, seed)
    places = [Place("", "", host="127.0.0.1")] * mine.size  # nobody is to be met there
    beside = {name: os.environ[name] for name in BESIDE}
    os.environ.update(variables_of(mine.rank, places, os.environ["UNICRON_TASK"]) | beside)
    begin, hand_out, backward = dist.init_process_group, dist.broadcast_object_list, torch.autograd.backward
    ask, make = dist.get_backend, dist.new_group

    def init_process_group(*arguments: Any, **named: Any) -> None:
        if NAME in arguments or mine.stay_apart(dict(zip(PLACES, arguments, strict=False)) | named):
            begin(*arguments, **named)
        else:
            mine.join_group()

    def get_backend(*arguments: Any, **named: Any) -> str:
        """Say what is inside: scripts ask for what it can do."""
        found = ask(*arguments, **named)
        return ("nccl" if torch.cuda.is_available() else "gloo") if found == NAME else found

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, **named: Any) -> Any:
        """Make a group of ours, whatever it is to be: in one of torch's own the ranks would not find each other."""
        del backend
        return make(ranks, timeout, None, **named)

    def noting(tensors: Any, *arguments: Any, **named: Any) -> None:
        mine.iteration.before_backward(tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors)))
        backward(tensors, *arguments, **named)

    def broadcast_object_list(object_list: list[Any], src: int | None = None, *arguments: Any, **named: Any) -> None:
        if (
            mine.replays_next
        ):  # whose objects these are never looks at what it gets: it gave something else than it has now
            named.pop("group_src", None)
            src = (mine.rank + 1) % mine.size
        hand_out(object_list, src, *arguments, **named)

    model = parallel(mine)
    for place, name, mended in (
        *((each, "init_process_group", init_process_group) for each in _holders(begin)),
        *((each, "new_group", new_group) for each in _holders(make)),
        (dist, "get_backend", get_backend),  # torch itself asks elsewhere
        *((each, "broadcast_object_list", broadcast_object_list) for each in _holders(hand_out)),
        (torch.autograd, "backward", noting),
        (torch.nn.parallel, "DistributedDataParallel", model),
        (torch.nn.parallel.distributed, "DistributedDataParallel", model),
        (torch.utils.data.DataLoader, "_get_iterator", make_iterator),
        (torch.optim.Optimizer, "__init__", call_after(torch.optim.Optimizer, mine.add_optimizer)),
        (
            torch.optim.Optimizer,
            "add_param_group",
            call_after(torch.optim.Optimizer, mine.iteration.check_extension, "add_param_group"),
        ),
    ):
        setattr(place, name, mended)
    KeptWorkers.abandon = staticmethod(mine.abandon)
    mine.trained.watch_data()
    register_optimizer_step_pre_hook(lambda optimizer, *_: mine.iteration.before_update(optimizer))
    register_optimizer_step_post_hook(lambda optimizer, *_: mine.iteration.after_update(optimizer))
    return mine


def _holders(function: Callable[..., Any]) -> list[ModuleType]:
    """Return torch's modules that have a function by its name, as those of meshes of devices call it."""
    modules = [each for name, each in sys.modules.items() if name.partition(".")[0] == "torch"]
    return [each for each in modules if getattr(each, "__dict__", {}).get(function.__name__) is function]


def _rank(channel: AgentChannel | None, seed: Seed | None) -> InPlace:
    if channel is None:
        return Ghost(Path(os.environ[GHOST]))
    *moments, always = [*os.environ.get(ANEW, "").split(), "", "", ""][:3]
    anew = [float(each) for each in moments if each]
    files = Files(first=not os.environ.get(CAUSE), anew=anew, always=bool(always))
    if files.diverts_writes:
        files.install()
    files.begin()
    return InPlace(channel, files, seed)


def execute(channel: AgentChannel | None, script: str, seed: Seed | None) -> dict[str, Any]:
    """Run a script as `python script.py` would, in place; return its variables.

    Args:
        channel: to the agent; None in a ghost.
        script: its file.
        seed: from which ghosts grow; None where this rank is not drilled.
    """
    path = Path(script)
    mine, program = install(channel, seed), ScriptProgram(path.parent, path)
    sys.meta_path.insert(0, InstrumentingFinder(program, mine.loops))
    main = ModuleType("__main__")
    main.__dict__.update({"__file__": str(path), LOOPS: mine.loops})
    sys.modules["__main__"] = main
    with mine.run_to_end():
        exec(program.compile_file(path.read_bytes(), path), main.__dict__)  # noqa: S102 the user's own script
    return main.__dict__


def execute_module(channel: AgentChannel | None, name: str, seed: Seed | None) -> dict[str, Any]:
    """Run a module as `python -m` would, likewise."""
    mine = install(channel, seed)
    sys.meta_path.insert(0, InstrumentingFinder(ScriptProgram(*locate_module(name)), mine.loops))
    with mine.run_to_end():
        return runpy.run_module(name, {LOOPS: mine.loops}, run_name="__main__", alter_sys=True)
