"""What a rank records for a trial: where a process begins that takes its place, what that is given, where it ends.

It is in a folder of the node's memory that only this user may enter. Tensors are copied by a thread, as far as they
stay as they are meanwhile: the sums of an iteration do until the next one begins.
"""

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from unicron.exception_texts import brief
from unicron.train.carry.kinds import NotCarriedError
from unicron.train.groups.switched import TRANSFERS
from unicron.train.loops.active_loops import Chain, LoopSnapshot
from unicron.train.snapshots.packed import Packing, map_file, unpack

BEGIN, END, ITERATION, COLLECTIVES = "begin", "end", "iteration", "collectives"
"""Files of a recording; of iterations there are several."""

LEAST, MOST = 2, 8
"""Iterations of a recording: as few as show that what an update leaves is right, more until an epoch's end is in it."""

MOST_COLLECTIVE_BYTES = 64 << 20
"""Of what a script's own collectives are given and give, altogether."""

TEMPORARY = ".tmp"
"""The ending of a link to the folder for temporary files of a process on trial, beside the recording."""

SHARE = 4
"""A recording takes at most one in so many bytes of the room that there is."""

FROM_FIRST = ("allreduce", "broadcast", "reduce", "send")
"""Collectives that get what a rank contributes as their first argument, by what their names begin with."""


class NoRoomError(Exception):
    """A recording would be too large; the text says of what."""


class Called(NamedTuple):
    """A collective of a rank: its name, what the rank contributed, and all its tensors as it left them."""

    name: str
    given: list[torch.Tensor]
    left: list[torch.Tensor]


class Recording:
    """A recording that is being made.

    Args:
        folder: to make for it.

    Attributes:
        folder: likewise.
        began: iteration in which it begins; -1 before that.
        chain: of the loops as it began.
        problem: why it can't be used; empty where it can.
    """

    def __init__(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        self.folder, self.began, self.problem = folder, -1, ""
        self.chain: Chain = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="unicron-recording")
        self._copying: Future[None] | None = None
        self._room = shutil.disk_usage(folder).free // SHARE
        self._collectives, self._collective_bytes = list[Called](), 0

    def begin(self, iteration: int, record: LoopSnapshot, state: Mapping[str, Any]) -> None:
        """Record where a process begins that takes this rank's place.

        Args:
            iteration: that comes next.
            record: this rank's own snapshot.
            state: what all ranks have alike; as it is now.

        Raises:
            NoRoomError: there is no room for it.
            OSError: likewise.
        """
        self.began, self.chain = iteration, record.chain
        self._write(BEGIN, {**state, **record_state(iteration, record)})

    def end(self, iteration: int, record: LoopSnapshot, state: Mapping[str, Any]) -> None:
        """Record where it has to be after the iterations since.

        Raises:
            NoRoomError: there is no room for it.
            OSError: likewise.
        """
        self.wait()
        self._write(COLLECTIVES, {"called": [[each.name, each.given, each.left] for each in self._collectives]})
        self._write(END, {**state, **record_state(iteration, record)})

    def is_enough(self, iteration: int, record: LoopSnapshot) -> bool:
        """Return whether it may end here: an epoch's end was in it, or none came soon."""
        done = iteration - self.began
        return done >= LEAST and (done >= MOST or outer(record.chain) != outer(self.chain))

    def add_iteration(self, iteration: int, given: torch.Tensor, reduced: torch.Tensor) -> None:
        """Record the gradient that this rank computed and the one of all ranks, which stay as they are until `wait`."""
        self.wait()
        self._copying = self._thread.submit(
            self._write, f"{ITERATION}-{iteration}", {"given": given, "reduced": reduced}
        )

    def add_collective(self, called: Called) -> None:
        """Record a collective of the script's own that begins."""
        self._collectives.append(called)

    def keep(self, where: list[torch.Tensor], find: Callable[[], list[torch.Tensor]]) -> None:
        """Keep copies of tensors of a collective, if there is room: whatever they are, the script goes on.

        Args:
            where: to put them.
            find: returns the tensors.
        """
        if self.problem:
            return
        try:
            tensors = find()
            self._collective_bytes += sum(each.numel() * each.element_size() for each in tensors)
            if self._collective_bytes <= MOST_COLLECTIVE_BYTES:
                where.extend(copies(tensors))
                return
            self.problem = f"its own collectives take more than {MOST_COLLECTIVE_BYTES >> 20} MiB"
        except Exception as error:  # noqa: BLE001 a tensor of any class
            self.problem = reason_of(error)
        self._collectives.clear()

    def wait(self) -> None:
        """Wait until all that was given is copied."""
        copying, self._copying = self._copying, None
        if copying is not None:
            try:
                copying.result()
            except Exception as error:  # noqa: BLE001 the script goes on
                self.problem = self.problem or reason_of(error)

    def remove(self) -> None:
        """Remove it."""
        self.wait()
        self._thread.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)
        for each in self.folder.parent.glob(f"*{TEMPORARY}"):
            if not each.exists():  # a link to a folder that was in there
                each.unlink(missing_ok=True)

    def _write(self, name: str, state: Mapping[str, Any]) -> None:
        packing = Packing(state)
        self._room -= packing.size
        if self._room < 0:
            raise NoRoomError(f"there is no room for a trial in {self.folder.parent}")
        packing.write(map_file(self.folder / name, packing.size))


class Recorded:
    """A recording that was made.

    Args:
        folder: of it.

    Attributes:
        begin, end: the states that it begins and ends with.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.begin, self.end = self._read(BEGIN), self._read(END)
        self._collectives = iter([Called(*each) for each in self._read(COLLECTIVES)["called"]])

    def iteration(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradient that the rank computed in an iteration, and the one of all ranks."""
        found = self._read(f"{ITERATION}-{number}")
        return found["given"], found["reduced"]

    def next_collective(self) -> Called | None:
        """Return the next collective of the script's own; None where the rank called no more."""
        return next(self._collectives, None)

    def _read(self, name: str) -> Any:
        path = self._folder / name
        return unpack(path, path.stat().st_size)


def reason_of(error: Exception) -> str:
    """Return why there is no recording, for people."""
    known = isinstance(error, NoRoomError | NotCarriedError | OSError)
    return f"{error}" if known else f"what it has can't be recorded: {brief(error)}"


def record_of(state: Mapping[str, Any]) -> LoopSnapshot:
    """Return the snapshot of the rank's script in a state of a recording."""
    return LoopSnapshot(*state["record"])


def contribution(name: str, arguments: Sequence[Any], rank: int) -> list[torch.Tensor]:
    """Return the tensors that a rank contributes to a collective.

    Args:
        name: of the collective, as torch's process groups have it.
        arguments: of the call.
        rank: in its group.
    """
    if name == "barrier" or (name in TRANSFERS and name.startswith("recv")) or not arguments:
        return []
    if name == "broadcast" and getattr(arguments[1] if len(arguments) > 1 else None, "rootRank", rank) != rank:
        return []
    first = name.startswith(FROM_FIRST) and not name.startswith("reduce_scatter")
    return flatten(arguments[0 if first or len(arguments) == 1 else 1])


def flatten(given: Any) -> list[torch.Tensor]:
    """Return the tensors in an argument of a collective."""
    if isinstance(given, torch.Tensor):
        return [given]
    if isinstance(given, list | tuple):
        return [tensor for each in given for tensor in flatten(each)]
    return []


def copies(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of tensors, on the processor."""
    return [each.detach().cpu().clone() for each in tensors]


def record_state(iteration: int, record: LoopSnapshot) -> dict[str, Any]:
    """Return the snapshot of a rank's script as plain values, for a state of a recording."""
    chain = [list(each) for each in record.chain]
    return {"iteration": iteration, "record": [chain, list(record.positions), list(record.snapshots)]}


def outer(chain: Chain) -> list[Any]:
    """Return where the loops around the innermost one are."""
    return [list(each)[:3] for each in chain[:-1]]
