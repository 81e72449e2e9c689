"""A worker's state, saved in its node's memory while the worker computes on (GEMINI, SOSP 2023).

In which iterations is decided with the others (`unicron.train.worker.duties`).

Parameters and their moments change in an update only. So a thread copies them from where they are, and the next update
waits for it. What else there is of a state is small, and is set aside at once.
"""

import mmap
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from msgspec.structs import replace
from xxhash import xxh3_128

from unicron.contracts.states import TURNS, StateRef
from unicron.errors import StateTransferError, explain_lack
from unicron.snapshots.memory import SnapshotMemory
from unicron.snapshots.names import saved_name
from unicron.train.snapshots.packed import Packing, Targets, map_file
from unicron.train.snapshots.shards import local
from unicron.train.snapshots.side_stream import SideStream

COSTS = 4
"""Recent saves, of which the cheapest is the estimate of the cost: other load makes some expensive."""


def copy_mutable(state: dict[str, Any], protected: Mapping[str, Any]) -> dict[str, Any]:
    """Return a collected state in which whatever may change before the next update is copied."""
    modules = [each for each in protected.values() if isinstance(each, torch.nn.Module)]
    steady = {local(each).untyped_storage().data_ptr() for module in modules for each in module.parameters()}
    objects = {
        name: each if name == "optimizer" else _copy_mutable(each, steady) for name, each in state["objects"].items()
    }
    return {**state, "objects": objects}


def _copy_mutable(value: Any, steady: set[int]) -> Any:
    if isinstance(value, torch.Tensor):
        return value if value.untyped_storage().data_ptr() in steady else value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _copy_mutable(each, steady) for key, each in value.items()}
    return type(value)(_copy_mutable(each, steady) for each in value) if type(value) in {list, tuple} else value


class StateSaver:
    """Writes states to two files in turn: one is whole while the other is written.

    Args:
        memory: of the node.
        on_failure: is called with the reason why a state could not be saved, by the thread.

    Attributes:
        failed: the last one could not be saved.
    """

    def __init__(self, memory: SnapshotMemory, on_failure: Callable[[str], None]) -> None:
        self.failed = False
        self._memory, self._on_failure = memory, on_failure
        self._last_whole = 0
        self._files: dict[str, mmap.mmap] = {}
        self._targets: dict[str, Targets] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="unicron-saver")
        self._saving: Future[None] | None = None
        self._costs: deque[float] = deque(maxlen=COSTS)
        self._side: SideStream | None = None

    @property
    def cost_s(self) -> float:
        """Seconds of a processor that it takes to save a state, as the cheapest of the last did."""
        return min(self._costs, default=0.0)

    def begin(
        self,
        state: dict[str, Any],
        ref: StateRef,
        saved: Callable[[StateRef], None],
        is_whole: Callable[[], bool],
        cost_s: float,
    ) -> str:
        """Begin to save a state; return the name that it will have.

        Args:
            state: laid out and set aside; its parameters and moments stay as they are until `wait` returns.
            ref: what it is; where exactly it lies, its size and its checksum are found here.
            saved: called by the thread when it is complete.
            is_whole: called by the thread when all is copied: returns whether nothing has changed meanwhile.
            cost_s: seconds of a processor that it took to prepare it.
        """
        self.wait()
        self.failed = False
        turn = (self._last_whole + 1) % TURNS
        name = saved_name(ref.location.worker, turn)
        ref = replace(ref, location=replace(ref.location, name=name))
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._side = self._side or SideStream(torch.device("cuda", torch.cuda.current_device()))
            self._side.wait_for_training()
        self._saving = self._thread.submit(self._save, state, ref, turn, saved, is_whole, cost_s)
        return name

    def wait(self) -> None:
        """Wait until nothing is being saved."""
        if self._saving is not None:
            self._saving.result()
            self._saving = None

    def _save(
        self,
        state: dict[str, Any],
        ref: StateRef,
        turn: int,
        saved: Callable[[StateRef], None],
        is_whole: Callable[[], bool],
        cost_s: float,
    ) -> None:
        began = time.thread_time()
        try:
            ref = self._write(state, ref, is_whole)
        except Exception as error:  # noqa: BLE001 whatever it is, training goes on, and the last whole state stays
            self._memory.remove(ref.location.name)
            self.failed = True
            self._on_failure(f"{ref.location.name} in {self._memory.folder}: {_reason(error)}")
        else:
            self._last_whole = turn
            self._costs.append(cost_s + time.thread_time() - began)
            saved(ref)

    def _write(self, state: dict[str, Any], ref: StateRef, is_whole: Callable[[], bool]) -> StateRef:
        copy = self._side.copy if self._side is not None else None
        packing, name = Packing(state, copy), ref.location.name
        file = self._file_to_write(name, packing.size)
        self._targets[name] = packing.write(file, self._targets.get(name))
        ref = replace(ref, size=packing.size, checksum=xxh3_128(file).digest())
        if not is_whole():
            raise StateTransferError("parameters were changed while they were copied")
        self._memory.add_label(ref)  # only now it is a state
        return ref

    def _file_to_write(self, name: str, size: int) -> mmap.mmap:
        """Return the file to write to, without its label: from here on it is no state."""
        known = self._files.pop(name, None)
        same = self._memory.begin_overwrite(name, size)
        if known is None or len(known) != size or not same:
            self._targets.pop(name, None)
            self._memory.remove(name)
            self._memory.check_room(name, size)
            known = map_file(self._memory.folder / name, size)
        self._files[name] = known
        return known


def _reason(error: Exception) -> str:
    """Return why a state could not be saved, and the cure if there is one."""
    if isinstance(error, OSError):
        return explain_lack(error)
    return str(error) if isinstance(error, StateTransferError) else repr(error)
