"""The replacement of torch's DistributedDataParallel in a script that is healed in place.

It trains what that trains, to the last bit, or refuses by name what it can't do.
"""

import inspect
import zlib
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel import DistributedDataParallel

from unicron.errors import InvalidInputError
from unicron.train.inplace.abandon import Abandon, abandons
from unicron.train.inplace.buckets import ReadyOrder

ARGUMENTS = inspect.signature(DistributedDataParallel.__init__)

REFUSED_ARGUMENTS = {
    "mixed_precision": "use torch.autocast, or make the parameters in that precision",
    "delay_all_reduce_named_params": "leave it and param_to_hook_all_reduce out",
}
"""By the name of an argument, what to do instead of giving it."""

REFUSED_METHODS = {
    "register_comm_hook": "leave it out: gradients are reduced in the precision that they have",
    "_register_builtin_comm_hook": "leave it out: gradients are reduced in the precision that they have",
    "_register_buffer_comm_hook": "leave it out: buffers are those of the first rank",
    "_register_fused_optim": "step the optimizer behind the backward pass",
    "join_hook": "leave model.join() and Join(...) out, and give all ranks as many batches, as DistributedSampler does",
}
"""By the name of a method, what to do instead of calling it."""


class ScriptRank(Protocol):
    """The interface of one rank of a script to its models."""

    size: int
    abandon: Abandon

    def add_model(self, model: "Parallel", shared: Iterable[torch.Tensor]) -> None:
        """Note a model, and have all ranks have these tensors of the first."""

    def synchronize_buffers(self, model: "Parallel") -> None:
        """Have the buffers of the first rank."""

    def begin_forward(self, model: "Parallel") -> None:
        """Begin an iteration, or go on with it by way of this model."""


class Reducer:
    """The object that Lightning's manual optimization and Accelerate prepare for each backward pass.

    Args:
        model: whose it is.
    """

    def __init__(self, model: "Parallel") -> None:
        self._model = model

    def prepare_for_backward(self, outputs: Any) -> None:
        """Have the next backward pass be reduced, though no forward pass may come before it."""
        del outputs
        self._model.rank.begin_forward(self._model)
        self._model.expects_gradient = True

    def _rebuild_buckets(self) -> bool:
        return False


class Parallel(DistributedDataParallel):
    """A model whose gradients are reduced as its backward pass ends, and whose buffers go along with them.

    Attributes:
        rank: of the script that makes it.
        differed: evidence of what all ranks were given as it was made, where any of them had something else.
        given_digest: its value is the digest of the buffers as all ranks were given them last; None before that.
        reduced: parameters whose gradients are: those that required one as it was made, though they be frozen later.
        expects_gradient: a forward pass says that the next backward pass is to be reduced, as with torch.
        has_unreduced: a backward pass has left gradients that no later one has reduced.
        ready: in which order its gradients are made, and so summed.
        unwalked: attributes that name no parameter for people.
    """

    rank: ScriptRank
    unwalked = frozenset({"reduced", "ready"})

    def __init__(self, module: torch.nn.Module, *arguments: Any, **named: Any) -> None:
        given = ARGUMENTS.bind(self, module, *arguments, **named).arguments
        self._check(module, given)
        torch.nn.Module.__init__(self)
        self.module = module
        self.parameters_to_ignore = {*getattr(module, "_ddp_params_and_buffers_to_ignore", ())}
        found = module.named_parameters()
        parameters = {name: each for name, each in found if name not in self.parameters_to_ignore}
        self.reduced = [each for each in parameters.values() if each.requires_grad]
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self.expects_gradient = self.has_unreduced = False
        self.find_unused_parameters = bool(given.get("find_unused_parameters"))
        self.static_graph = bool(given.get("static_graph"))
        synced, older = given.get("forward_sync_buffers"), given.get("broadcast_buffers")
        self.forward_sync_buffers = synced if synced is not None else older is not False
        cap_mb = given.get("bucket_cap_mb")
        cap = None if cap_mb is None else int(cap_mb * 1024 * 1024)
        self.ready = ReadyOrder(self.reduced, varies=self.find_unused_parameters, cap_bytes=cap)
        self.ready.static = self.static_graph
        self.reducer = Reducer(self)  # type: ignore[assignment]
        first = next(module.parameters())
        self.device, self.device_type = first.device, first.device.type
        self.device_ids = list(given.get("device_ids") or ()) if self.device_type != "cpu" else []
        buffers = self.shared_buffers() if synced is not None or older is not False else {}
        shared = parameters | buffers if given.get("init_sync", True) else {}
        self._given, self.differed = frozenset(shared), frozenset[str]()
        self.rank.add_model(self, shared.values())
        self.given_digest = SimpleNamespace(value=self.digest_buffers() if shared else None)

    @property
    def abandon(self) -> Abandon:
        """What ends this process, for an error that the script is not to see."""
        return self.rank.abandon

    @abandons(InvalidInputError)
    def _check(self, module: torch.nn.Module, given: Mapping[str, Any]) -> None:
        _check(module, given, self.rank.size)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the model."""
        if self.require_forward_param_sync and self.forward_sync_buffers:
            self.rank.synchronize_buffers(self)
        self.rank.begin_forward(self)
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self.expects_gradient = True
        if self.device_ids:
            (inputs,), (named,) = _to_kwargs(inputs, named, self.device, use_side_stream_for_tensor_copies=False)
        output = self.module(*inputs, **named)
        self.require_forward_param_sync = torch.is_grad_enabled() and self.require_backward_grad_sync
        return output

    def shared_buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers that ranks share, by name: all but those that the script has said are to be ignored."""
        found = self.module.named_buffers()
        return {name: each for name, each in found if name not in self.parameters_to_ignore}

    def given_tensors(self) -> list[torch.Tensor]:
        """Return the parameters and buffers that have had the first rank's values since the model was made."""
        found: list[tuple[str, torch.Tensor]] = [*self.module.named_parameters(), *self.module.named_buffers()]
        return [each for name, each in found if name in self._given]

    def digest_buffers(self) -> int:
        """Return a digest of them."""
        found = 0
        for each in self.shared_buffers().values():
            found = zlib.crc32(each.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data, found)
        return found

    @property
    def uses_vary(self) -> bool:
        """Whether a backward pass may leave out some of its parameters."""
        return self.find_unused_parameters or self.static_graph

    def _set_static_graph(self) -> None:
        self.static_graph = self.ready.static = True

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return nothing; Lightning asks."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.nn.Module.__setstate__(self, state)  # type: ignore[no-untyped-call]


def parallel(rank: ScriptRank) -> type[Parallel]:
    """Return what scripts make instead of torch's own, by whose name they may look for it."""
    name, module = DistributedDataParallel.__name__, DistributedDataParallel.__module__
    return type(name, (Parallel,), {"rank": rank, "__module__": module})


def _check(module: torch.nn.Module, given: Mapping[str, Any], ranks: int) -> None:
    """Refuse what gradients would be reduced otherwise for.

    Raises:
        InvalidInputError: it is one of the things that can't be had in place.
        RuntimeError: there is nothing to train, as torch says.
    """
    for name, instead in REFUSED_ARGUMENTS.items():
        if given.get(name) is not None:
            _refuse(f"{name}=", instead)
    for name, size in (("process_group", dist.get_world_size), ("device_mesh", DeviceMesh.size)):
        if given.get(name) is not None and size(given[name]) != ranks:
            _refuse(f"{name}= of less than all {ranks} ranks", "have all of them train one model")
    if not any(each.requires_grad for each in module.parameters()):
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
        )


def _refuse(what: str, instead: str) -> NoReturn:
    raise InvalidInputError(f"DistributedDataParallel with {what} can't be healed in place; for that {instead}")


def _refused(name: str, instead: str) -> Any:
    @abandons(InvalidInputError)
    def refused(_: Parallel, *__: Any, **___: Any) -> NoReturn:
        _refuse(name.removesuffix("_hook") if name == "join_hook" else name, instead)

    return refused


for _name, _instead in REFUSED_METHODS.items():
    setattr(Parallel, _name, _refused(_name, _instead))
