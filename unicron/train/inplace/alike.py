"""What is alike on all ranks of a script, and what is a rank's own: found before anything counts on it.

A new rank gets parameters and moments from another one. So each rank digests its own at the same few iterations and
compares them with the others'. Moments that differ, or were compared by nobody yet, are carried in the rank's own
snapshot; parameters that do are what the script is trained to, and nobody else has them.
"""

from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, Protocol

import msgspec
import torch

from unicron.train.carry.beside import Beside
from unicron.train.carry.kinds import NotComparedError
from unicron.train.carry.objects import Stateful
from unicron.train.carry.tensors import LARGE_BYTES
from unicron.train.snapshots.digest import digests

FIRST, AGAIN = 1, 4
"""Iterations at whose beginning ranks are compared: the first, and each with so many times as many as the last."""

APART = 4
"""Iterations that a comparison for new moments stays away from the next one that is due anyway."""

PARAMETER, MOMENT, BESIDE = "parameter", "optimizer's state of", "beside the model:"

TOTAL, ALL, CAME = "total", "digests", "compared"
"""Notices: a digest of all digests, each of them, and what came of comparing them."""


class Moments(Stateful):
    """The parts of optimizers' states that are this rank's own, or may be.

    Args:
        optimizers: of the script.
        shared: parameters whose gradients are reduced over the ranks, by identity: their moments are alike, as a rule.

    Attributes:
        left_out: of a process on trial, whose moments are compared apart: they are no part of the state.
    """

    comes_last = True
    left_out = False

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer], shared: set[int]) -> None:
        self._optimizers = list(optimizers)
        self._own, self._alike = 0, 0  # a bit for each parameter, so that it costs nothing to carry them
        self._own = _bits(number for number, _, each in self._parameters() if id(each) not in shared)

    @property
    def own(self) -> set[int]:
        """The parameters whose moments are this rank's, by their numbers in the optimizers, one after the other."""
        return {number for number, *_ in self._parameters() if self._own >> number & 1}

    @property
    def alike(self) -> set[int]:
        """Those whose moments were compared and are the same on all ranks; of all others they go along."""
        return {number for number, *_ in self._parameters() if self._alike >> number & 1}

    def _parameters(self) -> Iterator[tuple[int, torch.optim.Optimizer, torch.Tensor]]:
        places = ((one, each) for one in self._optimizers for group in one.param_groups for each in group["params"])
        return ((number, *place) for number, place in enumerate(places))

    def shared(self, names: Mapping[int, str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the moments that other ranks should have, too, by name.

        Args:
            names: of parameters, by identity.
        """
        for number, optimizer, parameter in self._parameters():
            for key, each in optimizer.state.get(parameter, {}).items():
                if not self._own >> number & 1 and isinstance(each, torch.Tensor):
                    yield f"{_beginning(number, parameter, names)}{key}", each

    def new(self) -> set[int]:
        """Return the parameters that have moments of which nobody knows yet whether they are alike."""
        return {number for number, *_ in self._states() if not self._own >> number & 1}

    def keep_own(self, different: Iterable[str], compared: Iterable[int], names: Mapping[int, str]) -> None:
        """Have all moments of a parameter be this rank's own where some rank has others, or has none.

        Args:
            different: names of moments.
            compared: the parameters that had any when they were compared.
            names: of parameters, by identity.
        """
        found = tuple(different)
        for number, _, parameter in self._parameters() if found else ():
            name = _beginning(number, parameter, names)
            self._own |= any(each.startswith(name) for each in found) << number
        self._alike = (self._alike | _bits(compared)) & ~self._own

    def look(self) -> Any:
        """Return what shows a change."""
        return (
            self._own,
            self._alike,
            [
                (number, key, each._version if isinstance(each, torch.Tensor) else each)  # noqa: SLF001 as tensors are watched
                for number, _, _, state in self._states()
                for key, each in state.items()
            ],
        )

    def state(self) -> Any:
        """Return them."""
        found = {number: dict(state) for number, *_, state in self._states()} if not self.left_out else {}
        return self._own, self._alike, found

    def check(self) -> None:
        """See whether they can go along.

        Raises:
            NotComparedError: they are large, and ranks have not been compared since there are any.
        """
        new = (state for number, *_, state in self._states() if not self._own >> number & 1)
        sizes = (each.nbytes for state in new for each in state.values() if isinstance(each, torch.Tensor))
        if not self.left_out and sum(sizes) > LARGE_BYTES:
            raise NotComparedError("ranks are compared before others' large moments count as those of a lost one")

    def set_state(self, state: Any) -> None:
        """Have them be as another process had them."""
        self._own, self._alike, found = state
        for number, optimizer, parameter in self._parameters():
            if number in found:
                optimizer.state[parameter] = found[number]
            elif not self._alike >> number & 1:  # that process had none, as the share of the update was another's
                optimizer.state.pop(parameter, None)

    def _states(self) -> Iterator[tuple[int, torch.optim.Optimizer, torch.Tensor, dict[str, Any]]]:
        for number, optimizer, parameter in self._parameters():
            if not self._alike >> number & 1 and (state := optimizer.state.get(parameter)):
                yield number, optimizer, parameter, state


def _bits(numbers: Iterable[int]) -> int:
    return sum(1 << number for number in numbers)


def _beginning(number: int, parameter: torch.Tensor, names: Mapping[int, str]) -> str:
    """Return how the names of a parameter's moments begin, on all ranks alike."""
    return f"{MOMENT} {names.get(id(parameter), f'parameter {number}')}: "


def total_of(found: Mapping[str, int]) -> bytes:
    """Return a digest of digests by name."""
    return blake2b(repr(sorted(found.items())).encode(), digest_size=16).digest()


class Notices(Protocol):
    """What ranks leave for one another, by rank and name."""

    def leave(self, name: str, data: bytes) -> None:
        """Leave something for the other ranks."""

    def read_left(self, names: Iterable[str], ranks: Iterable[int]) -> list[bytes]:
        """Return what these ranks have left under these names, rank by rank; empty where nothing is."""


class Comparison(msgspec.Struct, array_like=True):
    """What came of a comparison: what some rank had otherwise as an iteration began, and what not all knew of."""

    iteration: int
    different: list[str]
    missing: list[str] = []


class Alike:
    """One rank's comparisons with the others: the first rank compares, and leaves what comes of it for all.

    Args:
        rank, size: of this process, and how many there are.
        models: that are trained.
        trained: their parameters whose gradients are reduced, by identity.
        moments: that are this rank's own; those that differ get among them.
        beside: large tensors beside the models, likewise.

    Attributes:
        compares: there is another rank.
        is_confirmed: ranks have been compared at least once, so that one may take another's place.
    """

    def __init__(
        self, rank: int, size: int, models: torch.nn.Module, trained: set[int], moments: Moments, beside: Beside
    ) -> None:
        self._rank, self._size, self._models, self._trained, self._moments = rank, size, models, trained, moments
        self._beside = beside
        self._due, self._at = FIRST, -1
        self._mine, self._new = dict[str, int](), set[int]()
        self._patience, self._beside_from = APART, 0
        self.compares, self.is_confirmed = size > 1, size == 1

    def confirm(self, iteration: int) -> None:
        """Have this rank be as the one whose place it takes: it is compared when the others are."""
        self._due, self.is_confirmed = _due_after(iteration - 1), True

    def digest_parameters(self) -> dict[str, int]:
        """Return digests of the parameters that all ranks should have alike."""
        named = self._models.named_parameters()
        return digests((f"{PARAMETER} {name}", each) for name, each in named if id(each) in self._trained)

    def begin(self, iteration: int, notices: Notices) -> None:
        """Leave this rank's digests for the others, where a comparison is due and none is under way.

        It is as well where there are moments of other parameters than the last time, or large tensors that no rank knew
        of, both of which all ranks begin to have in the same iteration, as a rule. Where a script has others again and
        again, it takes ever longer until they are looked at.

        Args:
            iteration: that comes next.
            notices: by which ranks tell one another.
        """
        new = self._moments.new()
        unknown = iteration >= self._beside_from and not self._beside.is_known
        early = self._at < 0 and self.is_confirmed and (new - self._new or unknown) and iteration + APART <= self._due
        if not early and iteration < self._due:
            return
        if unknown:
            self._beside_from, self._patience = iteration + self._patience, 2 * self._patience
        self._at, self._new, self._due = iteration, new, _due_after(iteration) if iteration >= self._due else self._due
        names = {id(each): name for name, each in self._models.named_parameters()}
        self._mine = self.digest_parameters() | digests(self._moments.shared(names))
        self._mine |= {f"{BESIDE} {name}": each for name, each in self._beside.digests().items()}
        notices.leave(ALL, msgspec.msgpack.encode((iteration, self._mine)))
        notices.leave(TOTAL, msgspec.msgpack.encode((iteration, total_of(self._mine))))

    def end(self, notices: Notices) -> str:
        """End a comparison that is under way, as soon as that can be done.

        Returns:
            a parameter that is not the same on all ranks; empty where none is known.
        """
        at = self._at
        if at < 0 or (found := self._compare(notices) if self._rank == 0 else self._read(notices)) is None:
            return ""
        self._at, self.is_confirmed = -1, True
        self._keep_beside(found)
        return self._keep_own(found.different, self._new if found.iteration == at else ())

    def _read(self, notices: Notices) -> Comparison | None:
        [left] = notices.read_left([CAME], [0])
        found = msgspec.msgpack.decode(left, type=Comparison) if left else Comparison(-1, [])
        return found if found.iteration >= self._at else None

    def _compare(self, notices: Notices) -> Comparison | None:
        others = range(1, self._size)
        [own, *left] = notices.read_left([TOTAL], range(self._size))
        totals = [msgspec.msgpack.decode(each, type=tuple[int, bytes]) if each else (-1, b"") for each in left]
        if not own or any(iteration < self._at for iteration, _ in totals):
            return None
        if any(iteration > self._at for iteration, _ in totals):  # only this rank had something new to compare
            self._at = -1
            return None
        mine = msgspec.msgpack.decode(own, type=tuple[int, bytes])
        different, missing = dict[str, None](), set[str]()
        odd = [rank for rank, each in zip(others, totals, strict=True) if each != mine]
        found = notices.read_left([ALL], odd)
        if not all(found):  # the connection broke in between
            return None
        for each in found:
            iteration, theirs = msgspec.msgpack.decode(each, type=tuple[int, dict[str, int]])
            if iteration == self._at:
                names = self._mine | theirs
                missing |= {name for name in self._mine.keys() ^ theirs.keys() if name.startswith(BESIDE)}
                compared = (name for name in names if _is_known(name, self._mine, theirs))
                different |= dict.fromkeys(name for name in compared if self._mine.get(name) != theirs.get(name))
        came = Comparison(self._at, list(different), sorted(missing))
        notices.leave(CAME, msgspec.msgpack.encode(came))
        return came

    def _keep_beside(self, found: Comparison) -> None:
        """Have what is beside models be this rank's own where it differs; look out for what not all knew of."""
        self._beside.own |= _beside_names(found.different)
        self._beside.alike |= _beside_names(self._mine)
        self._beside.missing = _beside_names(found.missing)
        if found.missing:  # some had too much for one snapshot, and so left out smaller ones, too
            self._beside.include_smaller()

    def _keep_own(self, different: list[str], compared: Iterable[int]) -> str:
        """Have moments be this rank's own where they differ; return what can't be."""
        self._moments.keep_own(different, compared, {id(each): name for name, each in self._models.named_parameters()})
        return next((name for name in different if name.startswith(PARAMETER)), "")


def _beside_names(names: Iterable[str]) -> set[str]:
    return {name.removeprefix(f"{BESIDE} ") for name in names if name.startswith(BESIDE)}


def _due_after(iteration: int) -> int:
    """Return the iteration after this one at which all ranks compare next, whatever each of them has seen."""
    due = FIRST
    while due <= iteration:
        due *= AGAIN
    return due


def _is_known(name: str, ours: Mapping[str, int], theirs: Mapping[str, int]) -> bool:
    """Return whether both ranks know what has a name: what is beside models is only known once it has changed."""
    return not name.startswith(BESIDE) or (name in ours and name in theirs)
