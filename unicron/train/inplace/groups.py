"""The groups of a script that is healed in place: a new rank replays collectives that the others have run already.

It runs the script to where they are. It is given the recorded results, so that no other rank runs a collective twice.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from unicron.contracts.tasks import ParallelLayout
from unicron.errors import GroupBrokenError, InvalidInputError
from unicron.train.groups.inner import InnerGroups
from unicron.train.groups.switched import COLLECTIVES, TRANSFERS, Switched, Work
from unicron.train.inplace.abandon import abandons
from unicron.train.inplace.peers import Peers, Wait, Waiting
from unicron.train.loops.collective_results import (
    MOST_BYTES,
    EndedCollectives,
    KnownResults,
    Results,
    kept,
    pack_results,
    unpack_results,
)
from unicron.train.loops.loops import Loops
from unicron.train.snapshots.shards import local

SAME_ON_ALL = frozenset(
    {"_allgather_base", "allgather", "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced", "broadcast"}
)
"""Collectives whose results are the same on all ranks."""

SHARDING = frozenset({"_allgather_base", "_reduce_scatter_base", "allgather_into_tensor_coalesced"})
"""Collectives that `fully_shard` runs to compute a model."""

OPERANDS = {"reduce": 0, "gather": 1}
"""Collectives whose result only one rank gets: by name, the index of the argument that is then gathered to all."""

ReadResults = Callable[[], Results | None]

LARGE_BYTES = 1 << 20
"""Larger results from before the loops, and those after the first 8 MiB, have to be parameters: these are given."""


class Trial(Protocol):
    """What is done about collectives of a script's own in a drill."""

    def run_collective(self, name: str, arguments: Sequence[Any], rank: int, begin: Callable[[], Work]) -> Work | None:
        """Begin a collective; return None where what was recorded of it was given instead."""


class ScriptGroups(InnerGroups):
    """The groups. A collective that breaks is begun again where a new rank can take part in it.

    Args:
        layout: of the task.
        rank: of this process.
        device: of the model.
        loops: of the script.
        rejoin: joins the next membership, and returns whether the broken collective may be begun again there.
        peers: the other ranks, which are to run its collectives, too.

    Attributes:
        records_setup: results of collectives before the loops are kept, for a new rank.
        restored: all ranks have just been started, and continue from a saved state.
        sharded: each rank has a shard of the model; its loops gather it and scatter its gradient.
        ended: the global collectives that ended since the loops began.
        began_at: when the loops of the first ranks began, in seconds of the epoch; 0 before that.
        on_shared: is called with the tensors that a collective leaves the same on all ranks.
        trial: what records collectives in the loops, or gives what was recorded of them.
        abandon: is called with an error that the script is not to see.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        rank: int,
        device: torch.device,
        loops: Loops,
        rejoin: Callable[[GroupBrokenError], bool],
        peers: Peers,
    ) -> None:
        self._loops, self._rejoin, self._peers = loops, rejoin, peers
        self._setup_count = 0
        self._active: list[ScriptCollective] = []
        self._setup, self._joins_late, self.records_setup, self.sharded = KnownResults(), False, True, False
        self.restored = False
        self.on_shared: Callable[[Results], None] = lambda _: None
        self._large_results: Results = []
        self.ended, self.began_at = EndedCollectives(), 0.0
        self.trial: Trial | None = None
        self.abandon: Callable[[Exception], Any] = _raise
        super().__init__(layout, rank, device)

    @property
    def setup(self) -> bytes | None:
        """Results of the collectives before the loops, packed for a new rank; None where some are not known."""
        results = self._setup.to_list()
        return None if results is None or None in results else pack_setup(results, self._loops.first, self.began_at)

    @property
    def replays_next(self) -> bool:
        """Whether this rank came later and the others have run the next collective already."""
        return self._loops.replays_next if self._loops.has_begun else self._joins_late

    def can_replay(self, count: int) -> bool:
        """Return whether the next `count` collectives are to be replayed and their results are known."""
        return self.replays_next and (not self.restored or self._loops.has_begun or self._setup.has_next(count))

    def state_dict(self) -> dict[str, Any]:
        """Return results of collectives before the loops, which loop is the first, and how many ended since then."""
        known = {"setup": self._setup.to_list(), "first": self._loops.first}
        return {**known, "ended": self.ended.count, "began": self.began_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the number of ended collectives of the rank whose state this is."""
        self.ended.resume_at(state["ended"])

    def replay_setup_of_saved(self, setup: bytes) -> None:
        """Replay the collectives before the loops from a saved state; those without known results all ranks run anew.

        Raises:
            InvalidInputError: `setup` holds no results.
        """
        self.replay_setup(setup)
        self.restored = True

    def replay_setup(self, setup: bytes) -> None:
        """Replay the collectives that the others ran before their loops.

        Raises:
            InvalidInputError: `setup` holds no results.
        """
        [first, *results] = unpack_results(setup)
        self._setup, self._joins_late = KnownResults(results), True
        if first:
            self.began_at = float(first[1])
        self._loops.start_at(bytes(first[0].tolist()).decode() if first else "")

    def begin_loops(self, parameters: Iterable[torch.Tensor]) -> None:
        """Begin the loops: what collectives gave in the first of them is no part of what they gave before.

        Results too large to be kept are parameters, which a new rank is given with the state, or not known.
        """
        self._setup.drop_last(self._loops.results_tried)
        known = {local(each).untyped_storage().data_ptr() for each in parameters}
        if not all(each.untyped_storage().data_ptr() in known for each in self._large_results):
            self._setup.record(None)
        self._large_results = []

    def begin(self, group: Switched, name: str, arguments: Sequence[Any], named: dict[str, Any]) -> Work:
        """Begin a collective, or replay it.

        Raises:
            GroupBrokenError: it can't be done, and the failure is reported.
            InvalidInputError: the others have it behind them, and what it gave is not known.
        """
        begin = partial(self._begin_or_give, group, name, arguments, named)
        if self.trial is None or not self._loops.has_begun or group.size() == 1:
            return begin()
        work = self.trial.run_collective(name, arguments, group.rank(), begin)
        if work is None:
            self._loops.record_result(kept(self._shared_outputs(group, name, arguments)))
            return Work()
        return work

    @abandons(GroupBrokenError)
    def _begin_or_give(self, group: Switched, name: str, arguments: Sequence[Any], named: dict[str, Any]) -> Work:
        begun, of_all = self._loops.has_begun, self._is_global(group, name)
        self._setup_count += of_all and not begun
        begin = partial(self._begin, self._wait_of(group, name), group, name, arguments, named)
        if group.size() == 1 or not (begun or self.records_setup) or (group.ghost and not (begun or self._joins_late)):
            return self._guarded(begin())
        if self.sharded and begun and name in SHARDING:
            if not self._loops.in_iteration:
                self._loops.record_result(None)  # nobody who comes later is given a whole model
            return self._guarded(begin())
        outputs, own = self._shared_outputs(group, name, arguments), _gathered_operand(name, arguments, group.size())
        give: Callable[[Results | None], None] = partial(_write_results, name, outputs)
        read: ReadResults = partial(_identity, outputs)
        if own is not None and of_all:
            outputs, give = [own], partial(_write_own_row, name, arguments, group.rank())
            read = partial(self._gather_rows, self._wait_of(group, name), group, own)
        if self.replays_next:
            results = self._loops.replayed_result() if begun else self._setup.next_result()
            if self.restored and not (begun or results):
                return self._guarded(begin())
            if begun or results != [] or not outputs:  # else they are parameters
                give(results)
            return Work()
        collective = ScriptCollective(name, partial(self._begin_or_replay, begin, give, read, of_all), outputs, of_all)
        for each in [*self._active]:
            if each.is_global and of_all:  # a rank that joins later runs them one after another
                self._finish_collective(each)
            else:  # which of them ends first is unknown to it
                each.is_replayable = collective.is_replayable = False
        collective.begin(self._rejoin)
        self._active.append(collective)
        return Work(lambda: self._finish_collective(collective))

    def _guarded(self, work: Work) -> Work:
        return Work(partial(self._await, work))

    @abandons(GroupBrokenError)
    def _await(self, work: Work) -> None:
        work.wait()

    def _shared_outputs(self, group: Switched, name: str, arguments: Sequence[Any]) -> Results | None:
        """Return the tensors that a collective leaves the same on all ranks; None where they differ."""
        if not (name in SAME_ON_ALL and group.size() == self.world.size()):
            return [] if name == "barrier" else None
        outputs = _flatten(arguments[0])
        self.on_shared(outputs)
        return outputs

    @property
    def begun_counts(self) -> tuple[int, int]:
        """How many global collectives this rank has begun, before its loops and since."""
        return self._setup_count, self.ended.count + sum(each.is_global for each in self._active)

    def _is_global(self, group: Switched, name: str) -> bool:
        """Return whether a collective is one of all ranks."""
        return group is self.world and name in COLLECTIVES

    def _wait_of(self, group: Switched, name: str) -> Waiting | None:
        """Return what all ranks wait for in the next collective; None where it is not global."""
        set_up, since = self.begun_counts
        if self.sharded and self._loops.has_begun and name in SHARDING:
            return Waiting(Wait.GRADIENT, self._peers.iteration) if self._loops.in_iteration else None
        if not self._is_global(group, name):
            return None
        return Waiting(Wait.COLLECTIVE, since + 1) if self._loops.has_begun else Waiting(Wait.SETUP, set_up)

    @abandons(InvalidInputError)
    def _begin(self, waits: Waiting | None, group: Switched, name: str, *what: Any) -> Work:
        if self.on_streams and name in TRANSFERS:
            raise InvalidInputError(
                f"`{name}` between two GPUs can't be healed in place, as nobody knows whether it came whole; for that "
                "use collectives, or Session"
            )
        work = self._begin_inside(group, name, *what)
        work = work if waits is None else Work(partial(self._wait_for, work, waits))
        if not self._needs_no_confirm(group, name):
            work.wait()
        return work

    def _needs_no_confirm(self, group: Switched, name: str) -> bool:
        """Return True also for collectives that compute a sharded model: all ranks confirm the iteration."""
        return super()._needs_no_confirm(group, name) or (self.sharded and self._loops.has_begun and name in SHARDING)

    def _wait_for(self, work: Work, waits: Waiting) -> None:
        with self._peers.waiting(waits, stays=self.device.type == "cuda"):
            work.wait()

    def _gather_rows(self, waits: Waiting | None, group: Switched, own: torch.Tensor) -> Results:
        """Return the operands of all ranks of a collective whose result only one of them gets."""
        rows = [torch.empty_like(own) for _ in range(group.size())]
        self._begin(waits, group, "allgather", ([rows], [own.detach().contiguous()]), {}).wait()
        return [torch.stack(rows)]

    def _begin_or_replay(
        self, begin: Callable[[], Work], give: Callable[[Results | None], None], read: "ReadResults", of_all: bool
    ) -> tuple[Work, "ReadResults"]:
        """Begin a collective, or write the results of one that others have ended."""
        if not (of_all and self.ended.ahead):
            return begin(), read
        results = self.ended.ahead.popleft()
        give(results)
        return Work(), partial(_identity, results)

    @abandons(GroupBrokenError)
    def _finish_collective(self, collective: "ScriptCollective") -> None:
        if collective not in self._active:
            return
        try:
            collective.finish(self._rejoin)
        finally:
            self._active.remove(collective)
        found = collective.results if collective.is_replayable else None
        if self._loops.has_begun:
            results = kept(found)
            if collective.is_global:
                self.ended.record(results)
            self._loops.record_result(results)
            return
        if _nbytes(found) > LARGE_BYTES or not self._setup.has_room(_nbytes(found)):
            self._large_results += found or ()
            self._setup.record([])
        else:
            self._setup.record(kept(found))
        if self._loops.is_tried:
            self._loops.record_result(kept(found))


def _raise(error: Exception) -> None:
    raise error


class ScriptCollective:
    """A collective that is running.

    Args:
        name: of the operation.
        begin: begins it, and returns a function that reads its results once it has ended.
        outputs: tensors that it changes, where they are the same on all ranks; None where they are not.
        is_global: it is one of all ranks.

    Attributes:
        is_replayable: its results can be given to a rank that comes later.
        results: that, once it has ended.
    """

    def __init__(
        self, name: str, begin: Callable[[], tuple[Work, "ReadResults"]], outputs: Results | None, of_all: bool
    ) -> None:
        self._name, self.is_global = name, of_all
        self.outputs, self.is_replayable = outputs, outputs is not None
        self.results: Results | None = None
        self._begin = begin
        self._work: Work | None = None
        self._read_results: ReadResults = partial(_identity, None)
        small = outputs is not None and _nbytes(outputs) <= MOST_BYTES
        # of another group's nobody knows which ranks have ended it when it breaks
        anew = small and (of_all or not outputs)
        self._inputs = [each.clone() for each in outputs or ()] if anew else None

    def begin(self, go_on: Callable[[GroupBrokenError], bool]) -> None:
        """Begin it, in as many memberships as necessary."""
        while self._work is None:
            try:
                self._work, self._read_results = self._begin()
            except GroupBrokenError as error:
                self._begin_again(error, go_on)

    def finish(self, go_on: Callable[[GroupBrokenError], bool]) -> None:
        """Wait for its end, in as many memberships as necessary."""
        while True:
            self.begin(go_on)
            try:
                if self._work is not None:
                    self._work.wait()
                self.results = self._read_results() if self.is_replayable else None
            except GroupBrokenError as error:
                self._begin_again(error, go_on)
            else:
                return

    def _begin_again(self, error: GroupBrokenError, go_on: Callable[[GroupBrokenError], bool]) -> None:
        self._work = None
        if self._inputs is None or not self.is_replayable:
            raise GroupBrokenError(
                f"a rank was lost in a collective (`{self._name}`) whose results a new one can't be given, as they are "
                f"more than {MOST_BYTES >> 20} MiB, or not the same on all ranks: all begin again"
            ) from error
        if not go_on(error):
            raise error
        for output, before in zip(self.outputs or (), self._inputs, strict=True):
            output.copy_(before)


def pack_setup(results: list[Results | None], first: str, began_at: float) -> bytes:
    """Return what a new rank is given of the collectives before the loops, which loop is the first, and its time."""
    moment = torch.tensor(began_at, dtype=torch.float64)
    return pack_results([[torch.tensor([*first.encode()], dtype=torch.uint8), moment], *results])


def _gathered_operand(name: str, arguments: Sequence[Any], size: int) -> torch.Tensor | None:
    """Return the operand that all ranks gather, so that each can replay its result; None where they can't.

    They can't where a rank may begin the collective and never wait for it, nor where the operand is large.
    """
    options = next((each for each in arguments if hasattr(each, "asyncOp")), None)
    if name not in OPERANDS or options is None or options.asyncOp:
        return None
    own: torch.Tensor = arguments[OPERANDS[name]][0]
    return own if own.nbytes * size <= LARGE_BYTES else None


def _identity(results: Results | None) -> Results | None:
    return results


def _write_own_row(name: str, arguments: Sequence[Any], rank: int, results: Results | None) -> None:
    """Write the result that a rank had of a collective whose results differ between ranks."""
    own: torch.Tensor = arguments[OPERANDS[name]][0]
    if results is None or [(each.shape[1:], each.dtype) for each in results] != [(own.shape, own.dtype)]:
        _write_results(name, None, None)
    elif name == "reduce":
        own.copy_(results[0][rank])
    elif arguments[0]:
        for output, row in zip(arguments[0][0], results[0], strict=True):
            output.copy_(row)


def _write_results(name: str, outputs: Results | None, results: Results | None) -> None:
    shapes = [[(each.shape, each.dtype) for each in tensors or ()] for tensors in (outputs, results)]
    if outputs is None or results is None or shapes[0] != shapes[1]:
        raise InvalidInputError(
            f"this rank comes later than the others, and what `{name}` gave to them is not known here: all ranks begin "
            "again"
        )
    for output, result in zip(outputs, results, strict=True):
        output.copy_(result)


def _nbytes(results: Results | None) -> int:
    return sum(each.nbytes for each in results or ())


def _flatten(given: Any) -> Results:
    """Return the tensors of lists in lists."""
    if isinstance(given, torch.Tensor):
        return [given]
    return [tensor for each in given for tensor in _flatten(each)]
