"""The groups of a script that is healed in place: a new rank is given what collectives have given to the others.

It comes to where they are by running what they ran, and none of them runs a collective twice for that.
"""

import io
import pickle
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from unicron.contracts.tasks import ParallelLayout
from unicron.errors import GroupBrokenError, InvalidInputError
from unicron.train.groups.inner import InnerGroups
from unicron.train.groups.switched import COLLECTIVES, TRANSFERS, Switched, Work
from unicron.train.scripts.heard import MOST_BYTES, EndedCollectives, KnownResults, Results
from unicron.train.scripts.loops import Loops
from unicron.train.scripts.peers import Peers, Wait, Waiting
from unicron.train.snapshots.shards import local

ALIKE = frozenset(
    {"_allgather_base", "allgather", "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced", "broadcast"}
)
"""Collectives after which all ranks have the same."""

OF_PARTS = frozenset({"_allgather_base", "_reduce_scatter_base", "allgather_into_tensor_coalesced"})
"""Collectives by which `fully_shard` has a model computed."""

OPERANDS = {"reduce": 0, "gather": 1}
"""Collectives that give to one rank what others do not get: which argument has what all ranks are told of each then."""

Tell = Callable[[], Results | None]

LARGE_BYTES = 64 << 10
"""What is larger, and given before the loops begin, has to be a parameter, as nobody can be given it otherwise."""


class ScriptGroups(InnerGroups):
    """Those groups. A collective that breaks is begun again where a new rank can come to it.

    Args:
        layout: of the task.
        rank: of this process.
        device: of the model.
        loops: of the script.
        go_on: goes to the next membership, and returns whether what broke may be begun again there.
        peers: who are to come to its collectives, too.

    Attributes:
        heeded: what collectives give before the loops begin is kept, for a new rank.
        again: all ranks have just been started, and go on from what was saved.
        in_parts: each rank has a part of the model, which it gathers and whose gradient it scatters in its loops.
        ended: the collectives of all ranks that its loops have behind them.
        share: called with the tensors that a collective leaves the same on all ranks.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        rank: int,
        device: torch.device,
        loops: Loops,
        go_on: Callable[[GroupBrokenError], bool],
        peers: Peers,
    ) -> None:
        self._loops, self._go_on, self._peers = loops, go_on, peers
        self._set_up = 0
        self._under_way: list[ScriptCollective] = []
        self._setup, self._late, self.heeded, self.in_parts = KnownResults(), False, True, False
        self.again = False
        self.share: Callable[[Results], None] = lambda _: None
        self._large: Results = []
        self.ended = EndedCollectives()
        super().__init__(layout, rank, device)

    @property
    def setup(self) -> bytes | None:
        """What collectives have given before the loops began, as a new rank is told; None where it can't be."""
        results = self._setup.saved()
        return None if results is None or None in results else packed(results)

    @property
    def given(self) -> bool:
        """Whether this rank comes later, and the others have the next collective behind them."""
        return self._loops.given if self._loops.begun else self._late

    def knows(self, count: int) -> bool:
        """Return whether it is known what the next collectives gave, where this rank is not to have them run."""
        return self.given and (not self.again or self._loops.begun or self._setup.knows(count))

    def state_dict(self) -> dict[str, Any]:
        """Return what collectives have given before the loops began, to be saved with all else."""
        return {"setup": self._setup.saved(), "ended": self.ended.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Be where the rank is whose state this is; what its set-up was given is known from before."""
        self.ended.stand(state["ended"])

    def come_again(self, setup: bytes) -> None:
        """Have what collectives gave before the loops of those who saved began; what is not known is run anew by all.

        Raises:
            InvalidInputError: that was not told so.
        """
        self.come_late(setup)
        self.again = True

    def come_late(self, setup: bytes) -> None:
        """Have what collectives gave to the others before their loops began.

        Raises:
            InvalidInputError: that was not told so.
        """
        self._setup, self._late = KnownResults(unpacked(setup)), True

    def know(self, parameters: Iterable[torch.Tensor]) -> None:
        """See whether what was too large to be kept is part of a model, which a new rank has anyway."""
        known = {local(each).untyped_storage().data_ptr() for each in parameters}
        if not all(each.untyped_storage().data_ptr() in known for each in self._large):
            self._setup.add(None)
        self._large = []

    def begin(self, group: Switched, name: str, arguments: Sequence[Any], named: dict[str, Any]) -> Work:
        """Begin a collective, or have what it gave to the others.

        Raises:
            GroupBrokenError: it can't be done, and that is to be told.
            InvalidInputError: the others have it behind them, and what it gave is not known.
        """
        begun, of_all = self._loops.begun, self._is_of_all(group, name)
        self._set_up += of_all and not begun
        begin = partial(self._begin, self._waits_of(group, name), group, name, arguments, named)
        if group.size() == 1 or not (begun or self.heeded) or (group.ghost and not (begun or self._late)):
            return begin()
        if self.in_parts and begun and name in OF_PARTS:
            if not self._loops.within:
                self._loops.hear(None)  # nobody who comes later is given a whole model
            return begin()
        outputs, own = self._outputs(group, name, arguments), _own(name, arguments, group.size())
        give: Callable[[Results | None], None] = partial(_give, name, outputs)
        tell: Tell = partial(_same, outputs)
        if own is not None and of_all:
            outputs, give = [own], partial(_give_own, name, arguments, group.rank())
            tell = partial(self._gathered, self._waits_of(group, name), group, own)
        if self.given:
            results = self._loops.following() if begun else self._setup.following()
            if self.again and not (begun or results):
                return begin()
            if begun or results != [] or _nbytes(outputs) <= LARGE_BYTES:  # else it is a parameter
                give(results)
            return Work()
        collective = ScriptCollective(partial(self._begin_or_have, begin, give, tell, of_all), outputs, of_all)
        if self._under_way:  # which of them ends first is not told to whoever comes later
            for each in (*self._under_way, collective):
                each.known = False
        collective.begin(self._go_on)
        self._under_way.append(collective)
        return Work(lambda: self._finish_it(collective))

    def _outputs(self, group: Switched, name: str, arguments: Sequence[Any]) -> Results | None:
        """Return what a collective leaves the same on all ranks; None where it does not."""
        if not (name in ALIKE and group is self.world):
            return [] if name == "barrier" else None
        outputs = _tensors(arguments[0])
        self.share(outputs)
        return outputs

    @property
    def began(self) -> tuple[int, int]:
        """How many collectives of all ranks it has begun, before its loops begin and since."""
        return self._set_up, self.ended.count + sum(each.of_all for each in self._under_way)

    def _is_of_all(self, group: Switched, name: str) -> bool:
        """Return whether each rank is to come to it; of those that were begun together that is not known."""
        return group is self.world and name in COLLECTIVES

    def _waits_of(self, group: Switched, name: str) -> Waiting | None:
        """Return for what all ranks wait in the next collective; None where that is not known of it."""
        set_up, since = self.began
        if self.in_parts and self._loops.begun and name in OF_PARTS:
            return Waiting(Wait.GRADIENT, self._peers.iteration) if self._loops.within else None
        if not self._is_of_all(group, name):
            return None
        return Waiting(Wait.COLLECTIVE, since + 1) if self._loops.begun else Waiting(Wait.SETUP, set_up)

    def _begin(self, waits: Waiting | None, group: Switched, name: str, *what: Any) -> Work:
        if self.on_streams and name in TRANSFERS:
            raise InvalidInputError(
                f"`heal: in-place` can't have `{name}` between two GPUs, as nobody knows whether it came whole: use "
                "collectives, Session, or set `heal: restart`"
            )
        work = self._begun(group, name, *what)
        work = work if waits is None else Work(partial(self._wait_for, work, waits))
        if not self._is_sure(group, name):
            work.wait()
        return work

    def _is_sure(self, group: Switched, name: str) -> bool:
        """Return that also of those by which a model is computed: all ranks confirm the iteration."""
        return super()._is_sure(group, name) or (self.in_parts and self._loops.begun and name in OF_PARTS)

    def _wait_for(self, work: Work, waits: Waiting) -> None:
        with self._peers.waiting(waits, stays=self.device.type == "cuda"):
            work.wait()

    def _gathered(self, waits: Waiting | None, group: Switched, own: torch.Tensor) -> Results:
        """Return what each rank has by a collective that gives to one what others do not get."""
        rows = [torch.empty_like(own) for _ in range(group.size())]
        self._begin(waits, group, "allgather", ([rows], [own.detach().contiguous()]), {}).wait()
        return [torch.stack(rows)]

    def _begin_or_have(
        self, begin: Callable[[], Work], give: Callable[[Results | None], None], tell: "Tell", of_all: bool
    ) -> tuple[Work, "Tell"]:
        """Begin a collective, or have what one of all ranks gave to those that have it behind them."""
        if not (of_all and self.ended.ahead):
            return begin(), tell
        results = self.ended.ahead.popleft()
        give(results)
        return Work(), partial(_same, results)

    def _finish_it(self, collective: "ScriptCollective") -> None:
        try:
            collective.finish(self._go_on)
        finally:
            self._under_way.remove(collective)
        results = collective.results if collective.known else None
        if self._loops.begun:
            if collective.of_all:
                self.ended.add(results)
            self._loops.hear(results)
        elif _nbytes(results) > LARGE_BYTES:
            self._large += results or ()
            self._setup.add([])
        else:
            self._setup.add(results)


class ScriptCollective:
    """One that is under way.

    Args:
        begin: begins it, and returns what then tells what it has given.
        outputs: that it changes, where what it gives can be given to others; None: it can't.
        of_all: it is one of all ranks.

    Attributes:
        known: what it gives can be given to whoever comes later.
        results: that, once it has ended.
    """

    def __init__(self, begin: Callable[[], tuple[Work, "Tell"]], outputs: Results | None, of_all: bool) -> None:
        self.of_all = of_all
        self.outputs, self.known = outputs, outputs is not None
        self.results: Results | None = None
        self._begin = begin
        self._work: Work | None = None
        self._tell: Tell = partial(_same, None)
        small = outputs is not None and _nbytes(outputs) <= MOST_BYTES
        self._before = [each.clone() for each in outputs or ()] if small else None

    def begin(self, go_on: Callable[[GroupBrokenError], bool]) -> None:
        """Begin it, in as many memberships as it takes."""
        while self._work is None:
            try:
                self._work, self._tell = self._begin()
            except GroupBrokenError as error:
                self._begin_again(error, go_on)

    def finish(self, go_on: Callable[[GroupBrokenError], bool]) -> None:
        """Wait for its end, in as many memberships as it takes."""
        while True:
            self.begin(go_on)
            try:
                if self._work is not None:
                    self._work.wait()
                self.results = self._tell() if self.known else None
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


def packed(results: list[Results | None]) -> bytes:
    """Return what collectives gave as other ranks unpack it; None: that is not known."""
    stream = io.BytesIO()
    torch.save([None if each is None else [one.clone() for one in each] for each in results], stream)
    return stream.getvalue()


def unpacked(data: bytes) -> list[Results | None]:
    """Return what another rank has packed.

    Raises:
        InvalidInputError: it is something else.
    """
    try:
        results: Any = torch.load(io.BytesIO(data), weights_only=True)
    except (RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise InvalidInputError(f"what another rank sent of its collectives can't be read: {error}") from error
    lists = isinstance(results, list) and all(isinstance(each, list | None) for each in results)
    if not lists or not all(isinstance(each, torch.Tensor) for given in results for each in given or ()):
        raise InvalidInputError("what another rank sent is no list of results of collectives")
    return list(results)


def _own(name: str, arguments: Sequence[Any], size: int) -> torch.Tensor | None:
    """Return the tensor of which all ranks are told what each of them has; None where they can't be.

    They are not where a rank may begin it and never wait for it, nor where it is large.
    """
    options = next((each for each in arguments if hasattr(each, "asyncOp")), None)
    if name not in OPERANDS or options is None or options.asyncOp:
        return None
    own: torch.Tensor = arguments[OPERANDS[name]][0]
    return own if own.nbytes * size <= LARGE_BYTES else None


def _same(results: Results | None) -> Results | None:
    return results


def _give_own(name: str, arguments: Sequence[Any], rank: int, results: Results | None) -> None:
    """Have what a rank has had of a collective that gave to each something else."""
    own: torch.Tensor = arguments[OPERANDS[name]][0]
    if results is None or [(each.shape[1:], each.dtype) for each in results] != [(own.shape, own.dtype)]:
        _give(name, None, None)
    elif name == "reduce":
        own.copy_(results[0][rank])
    elif arguments[0]:
        for output, row in zip(arguments[0][0], results[0], strict=True):
            output.copy_(row)


def _give(name: str, outputs: Results | None, results: Results | None) -> None:
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


def _tensors(given: Any) -> Results:
    """Return the tensors of lists in lists."""
    if isinstance(given, torch.Tensor):
        return [given]
    return [tensor for each in given for tensor in _tensors(each)]
