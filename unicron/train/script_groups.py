"""The groups of a script that is healed in place: a new rank is given what collectives have given to the others.

It comes to where they are by running what they ran, and none of them runs a collective twice for that.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from unicron.contracts.tasks import ParallelLayout
from unicron.errors import GroupBrokenError, InvalidInputError
from unicron.train.heard import MOST_BYTES, Results
from unicron.train.inner import InnerGroups, Switched, Work
from unicron.train.loops import Loops

ALIKE = frozenset(
    {"_allgather_base", "allgather", "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced", "broadcast"}
)
"""Collectives after which all ranks have the same."""


class ScriptGroups(InnerGroups):
    """Those groups. A collective that breaks is begun again where a new rank can come to it.

    Args:
        layout: of the task.
        rank: of this process.
        device: of the model.
        loops: of the script.
        go_on: goes to the next membership, and returns whether what broke may be begun again there.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        rank: int,
        device: torch.device,
        loops: Loops,
        go_on: Callable[[GroupBrokenError], bool],
    ) -> None:
        self._loops, self._go_on = loops, go_on
        self._under_way: list[Collective] = []
        super().__init__(layout, rank, device)

    def begin(self, group: Switched, name: str, arguments: Sequence[Any], named: dict[str, Any]) -> Work:
        """Begin a collective, or have what it gave to the others.

        Raises:
            GroupBrokenError: it can't be done, and that is to be told.
            InvalidInputError: the others have it behind them, and what it gave is not known.
        """
        begin = partial(super().begin, group, name, arguments, named)
        if group.size() == 1 or not self._loops.begun:
            return begin()
        outputs: Results | None = [] if name == "barrier" else None
        if name in ALIKE and group is self.world:
            outputs = _tensors(arguments[0])
        if self._loops.given:
            _give(outputs, self._loops.following(), name)
            return Work()
        collective = Collective(begin, outputs)
        if self._under_way:  # which of them ends first is not told to whoever comes later
            for each in (*self._under_way, collective):
                each.known = False
        collective.begin(self._go_on)
        self._under_way.append(collective)
        return Work(lambda: self._finish_it(collective))

    def _finish_it(self, collective: "Collective") -> None:
        try:
            collective.finish(self._go_on)
        finally:
            self._under_way.remove(collective)
        self._loops.hear(collective.outputs if collective.known else None)


class Collective:
    """One that is under way.

    Args:
        begin: begins it.
        outputs: what it leaves the same on all ranks; None: it does not.

    Attributes:
        known: what it gives can be given to whoever comes later.
    """

    def __init__(self, begin: Callable[[], Work], outputs: Results | None) -> None:
        self.outputs, self.known = outputs, outputs is not None
        self._begin = begin
        self._work: Work | None = None
        small = outputs is not None and sum(each.nbytes for each in outputs) <= MOST_BYTES
        self._before = [each.clone() for each in outputs or ()] if small else None

    def begin(self, go_on: Callable[[GroupBrokenError], bool]) -> None:
        """Begin it, in as many memberships as it takes."""
        while self._work is None:
            try:
                self._work = self._begin()
            except GroupBrokenError as error:
                self._begin_again(error, go_on)

    def finish(self, go_on: Callable[[GroupBrokenError], bool]) -> None:
        """Wait for its end, in as many memberships as it takes."""
        while True:
            self.begin(go_on)
            try:
                if self._work is not None:
                    self._work.wait()
            except GroupBrokenError as error:
                self._begin_again(error, go_on)
            else:
                return

    def _begin_again(self, error: GroupBrokenError, go_on: Callable[[GroupBrokenError], bool]) -> None:
        self._work = None
        if self._before is None or not (self.known and go_on(error)):
            raise error
        for output, before in zip(self.outputs or (), self._before, strict=True):
            output.copy_(before)


def _give(outputs: Results | None, results: Results | None, name: str) -> None:
    shapes = [[(each.shape, each.dtype) for each in tensors or ()] for tensors in (outputs, results)]
    if outputs is None or results is None or shapes[0] != shapes[1]:
        raise InvalidInputError(
            f"this rank comes later than the others, and what `{name}` gave to them within their training loops is not "
            "known here: all ranks begin again"
        )
    for output, result in zip(outputs, results, strict=True):
        output.copy_(result)


def _tensors(given: Any) -> Results:
    """Return the tensors of lists in lists."""
    if isinstance(given, torch.Tensor):
        return [given]
    return [tensor for each in given for tensor in _tensors(each)]
