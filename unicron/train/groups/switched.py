"""A process group whose inside is exchanged, while torch, meshes, sharded parameters and stages hold on to it.

It is a Python subclass of torch's ProcessGroup around a real one, or around a ghost: a group whose collectives return
at once with whatever is in their tensors.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BarrierOptions, FakeProcessGroup, HashStore, ProcessGroup

from unicron.errors import InvalidInputError

NAME = "unicron"
COLLECTIVES = [
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
]
TRANSFERS = ["send", "recv", "recv_anysource"]
GLOBAL = frozenset({*COLLECTIVES, "scatter"})
"""Collectives that each rank of a group comes to."""
OTHERS = [
    "_start_coalescing",
    "_get_backend",
    "_set_sequence_number_for_group",
    "_get_sequence_number_for_group",
    "set_timeout",
    "_has_hooks",
    "_wait_for_pending_works",
]


class Work(dist.Work):
    """A collective that is under way; on a ghost it has ended."""

    def __init__(self, finish: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._finish: Callable[[], None] | None = finish
        self._outputs = list[torch.Tensor]()

    def giving(self, outputs: Any) -> "Work":
        """Have it give these tensors, in however many lists, to who asks for its result."""
        self._outputs = _tensors_in(outputs)
        return self

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002 torch's signature
        """Wait for its end; it does not raise, the replica's groups know that they broke."""
        if self._finish is not None:
            self._finish()
            self._finish = None
        return True

    def get_future(self) -> Any:
        """Wait for its end, and return a future that has ended, with the tensors that it has set, as torch's has."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self.result())
        return future

    def result(self) -> list[torch.Tensor]:
        """Wait for its end, and return the tensors that it has set."""
        self.wait()
        return self._outputs

    def is_completed(self) -> bool:
        """Return whether it was waited for."""
        return self._finish is None

    def is_success(self) -> bool:
        """Return True, as `wait` does."""
        return True

    def synchronize(self) -> None:
        """Wait for its end."""
        self.wait()


def _tensors_in(given: Any) -> list[torch.Tensor]:
    if isinstance(given, list | tuple):
        return [tensor for each in given for tensor in _tensors_in(each)]
    return [given] if isinstance(given, torch.Tensor) else []


class GroupOwner(Protocol):
    """Holds groups whose inner group can be exchanged, and begins their collectives (`groups.inner.InnerGroups`)."""

    device: torch.device
    broken: bool
    muted: bool
    on_streams: bool

    def contains(self, inside: ProcessGroup) -> bool:
        """Return whether this is inside of a group."""

    def begin(self, group: "Switched", name: str, arguments: Sequence[Any], named: dict[str, Any]) -> Work:
        """Begin a collective of a group."""


class Switched(ProcessGroup):
    """A group whose inside is exchanged. The methods of `COLLECTIVES`, `TRANSFERS` and `OTHERS` are added below."""

    def __init__(self, groups: GroupOwner, places: tuple[int, ...], rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.groups, self.places = groups, places
        self.inside = ghost_group(groups.device, rank, size)
        self.ghost = True
        self._name = self._desc = ""
        # torch >= 2.15 asks the class above for its name, which that has only with a backend; nothing comes to this one
        fake = FakeProcessGroup._create_internal(rank, size)  # noqa: SLF001
        self._set_default_backend(ProcessGroup.BackendType.CUSTOM)
        self._register_backend(groups.device, ProcessGroup.BackendType.CUSTOM, fake)

    def fill(self, inside: ProcessGroup) -> None:
        """Put a real group inside."""
        self.inside, self.ghost = inside, False

    def empty(self) -> None:
        """Put a ghost inside."""
        self.inside, self.ghost = ghost_group(self.groups.device, self.rank(), self.size()), True

    def _end_coalescing(self, *arguments: Any) -> Any:
        """Begin what was said since `_start_coalescing`."""
        return self.groups.begin(self, "_end_coalescing", arguments, {})

    def scatter(self, outputs: Any, inputs: Any, *more: Any, **named: Any) -> Any:  # type: ignore[override]
        """Hand out; a ghost can't, where the tensors are another rank's."""
        if self.ghost and not (self.groups.broken or inputs):
            raise InvalidInputError(
                "the model is built before the ranks of a replica have met, so none can send another its part of it: "
                "give src_data_rank=None to parallelize_module and distribute_tensor; every rank then takes its part "
                "of the parameters that it made itself, which are the same on all from the same seed"
            )
        if self.ghost and inputs:
            for output, own in zip(outputs, inputs, strict=True):
                output.copy_(own[self.rank()])
            return Work().giving(outputs)
        return self.groups.begin(self, "scatter", (outputs, inputs, *more), named).giving(outputs)

    def monitored_barrier(self, *_: Any, **__: Any) -> None:
        """Wait for all ranks."""
        options = BarrierOptions()
        options.device = self.groups.device
        self.barrier(options).wait()

    def shutdown(self) -> None:
        """Give up what is inside, unless another group has it, too; what is NCCL's, as the process ends."""
        inside = self.inside
        self.empty()
        if not (self.groups.on_streams or self.groups.contains(inside)):
            inside.shutdown()

    def abort(self) -> None:
        """Likewise, and wait for nothing."""
        if self.groups.on_streams:
            self.shutdown()
        else:
            self.inside.abort()

    @property
    def _device_types(self) -> Any:
        return self.inside._device_types  # noqa: SLF001 torch's own protocol, as are those below

    def getBackendName(self) -> str:  # noqa: N802
        """Return the name by which torch knows this kind."""
        return NAME

    def name(self) -> str:
        """Likewise."""
        return NAME

    def _set_group_name(self, name: str) -> None:
        super()._set_group_name(name)  # type: ignore[arg-type]
        self._name = name

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """By which torch finds it."""
        return self._name

    def _set_group_desc(self, desc: str) -> None:
        super()._set_group_desc(desc)
        self._desc = desc

    @property
    def group_desc(self) -> str:
        """For people."""
        return self._desc


def _collective(name: str) -> Callable[..., Any]:
    def call(self: Switched, *arguments: Any, **named: Any) -> Any:
        return self.groups.begin(self, name, arguments, named).giving(arguments[:1])

    return call


def _forwarded(name: str) -> Callable[..., Any]:
    def call(self: Switched, *arguments: Any, **named: Any) -> Any:
        return getattr(self.inside, name)(*arguments, **named)

    return call


for _name in (*COLLECTIVES, *TRANSFERS):
    setattr(Switched, _name, _collective(_name))
for _name in OTHERS:
    setattr(Switched, _name, _forwarded(_name))


def ghost_group(device: torch.device, rank: int, size: int) -> ProcessGroup:
    """Return a group whose collectives return at once and change nothing."""
    group = ProcessGroup(HashStore(), rank, size)
    group._set_default_backend(ProcessGroup.BackendType.CUSTOM)  # noqa: SLF001
    fake = FakeProcessGroup._create_internal(rank, size)  # noqa: SLF001
    group._register_backend(device, ProcessGroup.BackendType.CUSTOM, fake)  # noqa: SLF001
    return group
