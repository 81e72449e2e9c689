"""Large tensors beside the model that all ranks have alike, as the weights of a teacher: another rank gives them.

A rank's own snapshot has a mark in place of each: its name, and a digest of its numbers. All ranks have the same names,
and the tensors are a part of the state that a new rank is given. It takes one only where that has the digest in the
mark, which it has not where ranks have other numbers, or have gone on since.

A rank that is lost behind an update may have left a snapshot from before it made its average, and the others have made
theirs. So of what changes between two snapshots a copy is kept as it was at the first of them.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary
from xxhash import xxh3_64_intdigest

from unicron.train.carry.kinds import NotCarriedError
from unicron.train.carry.large import words_of
from unicron.train.carry.objects import COMPARED_BYTES
from unicron.train.carry.tensors import LARGE_BYTES, raw
from unicron.train.snapshots.digest import MASK, digest

MARK = "="
"""First part of a mark's key; those of objects begin with a loop."""

STRIDE_BYTES = 16 << 10
"""One word in so many bytes is looked at where a tensor is probably what it was when its digest was made."""

RATIO, LEAST_BYTES = 2, 64 << 20
"""Those tensors may be so many times as large as the model, or so large, as each of them is read in each iteration."""

KEPT, ROOM = 6, 4
"""Snapshots for which a copy is kept; and so many times as much memory as it takes has to be free on a GPU."""

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class Mark:
    """Stands for a large tensor in a snapshot.

    Attributes:
        key: its name, and what shows that another one is the same; nothing where that need not be known.
    """

    def __init__(self, name: str, evidence: str) -> None:
        self.key = MARK, name, evidence


class _Seen(NamedTuple):
    """A tensor as it was when its digest was made."""

    evidence: str
    version: int
    address: int
    words: torch.Tensor
    values: torch.Tensor


class Beside:
    """The large tensors beside a model, on this rank. It is protected as a model is.

    Attributes:
        own: names of those that are not the same on all ranks.
        alike: names of those that another rank had, too, when that was looked at, or has no need of.
        missing: names of those that not all ranks had.
        before: copies of what has changed since a snapshot.
    """

    def __init__(self) -> None:
        self.own, self.alike, self.missing = set[str](), set[str](), set[str]()
        self._least, self._most = LARGE_BYTES, LEAST_BYTES
        self._given = dict[str, torch.Tensor]()
        self._found, self._new = dict[str, tuple[weakref.ref[torch.Tensor], str]](), dict[str, tuple[Any, str]]()
        self._seen, self._same = WeakIdKeyDictionary(), dict[int, str]()
        self._bytes, self._is_certain = 0, True
        self._at: Any = None
        self._at_found: Any = None
        self._changing = dict[Any, set[str]]()
        self.before = Before()

    def limit_to(self, model_bytes: int) -> None:
        """Limit what there may be of them, given the size of the model."""
        self._most = max(LEAST_BYTES, RATIO * model_bytes)

    # --- a snapshot --------------------------------------------------------------------------------------------------

    def begin(self, *, certain: bool, at: Any = None) -> None:
        """Begin a snapshot.

        Args:
            certain: what it has is to be shown to be right; else another snapshot comes behind it, which is.
            at: the place in the script.
        """
        self._new, self._bytes, self._is_certain, self._at = {}, 0, certain, at
        self._same = self._find_same() if certain else {}

    def end(self) -> None:
        """End a snapshot that is whole."""
        if self._is_certain:
            before, self._found = self._found, self._new
            self._changing[self._at_found] = {
                name for name in before if self._found.get(name, before[name])[1] != before[name][1]
            }
            self._at_found = self._at
            self.before.keep(dict(self._present(self._changing.get(self._at, set()))))
        self._same = {}

    @property
    def includes_smaller(self) -> bool:
        """Whether smaller tensors are taken, too."""
        return self._least <= COMPARED_BYTES

    def include_smaller(self) -> bool:
        """Take smaller tensors, too, as a snapshot got too large with them; return whether that is new."""
        before, self._least = self.includes_smaller, COMPARED_BYTES
        return not before

    def raw(self, tensor: torch.Tensor, name: str = "") -> Any:
        """Return the bytes of a tensor, or a mark.

        Args:
            tensor: of any kind.
            name: of it; empty where it has none.

        Raises:
            NotCarriedError: another process can have neither.
        """
        if not self._may_be_marked(tensor):
            return raw(tensor)
        name = name or f"tensor {len(self._new)}, of shape {tuple(tensor.shape)}, of the loop"
        if name in self._new:
            name = f"{name}, {len(self._new)}"
        where = f"a tensor of {tensor.nbytes} bytes on {tensor.device}"
        if name in self.own:
            self._new[name] = weakref.ref(tensor), ""
            if tensor.nbytes > LARGE_BYTES:
                raise NotCarriedError(f"{where}, which is not the same on all ranks, so that no other one can give it")
            return raw(tensor)
        self._bytes += tensor.nbytes
        if self._bytes > self._most:
            raise NotCarriedError(
                f"{where}: with it what changes outside of DistributedDataParallel has over {self._most >> 20} MiB, "
                "and a new rank is given no more: keep less there, or have DistributedDataParallel train it"
            )
        mark = Mark(name, self._evidence_of(tensor) if self._is_certain else "")
        self._new[name] = weakref.ref(tensor), mark.key[2]
        return mark

    def _may_be_marked(self, tensor: torch.Tensor) -> bool:
        whole = tensor.layout == torch.strided and tensor.device.type != "meta" and not tensor.is_quantized
        return whole and type(tensor) in _PLAIN and tensor.nbytes > self._least

    def _evidence_of(self, tensor: torch.Tensor) -> str:
        if found := self._same.get(id(tensor)):
            return found
        found = evidence_of(tensor)
        if (words := _words_of(tensor)) is not None:
            self._seen[tensor] = _Seen(found, tensor._version, tensor.data_ptr(), words, words.clone())  # noqa: SLF001
        return found

    def _find_same(self) -> dict[int, str]:
        """Return the evidence of those tensors that are what they were when it was made, by identity."""
        found = dict[int, str]()
        there = [
            (id(tensor), seen)
            for tensor, seen in self._seen.items()  # type: ignore[no-untyped-call]
            if (tensor._version, tensor.data_ptr()) == (seen.version, seen.address)  # noqa: SLF001
        ]
        for device in {seen.words.device for _, seen in there}:
            those = [(one, seen) for one, seen in there if seen.words.device == device]
            now, before = torch.cat([seen.words for _, seen in those]), torch.cat([seen.values for _, seen in those])
            different = torch.split((now != before).cpu(), [len(seen.values) for _, seen in those])
            found |= {one: seen.evidence for (one, seen), each in zip(those, different, strict=True) if not each.any()}
        return found

    # --- ranks -------------------------------------------------------------------------------------------------------

    def digests(self) -> dict[str, int]:
        """Return what shows whether ranks have the same, by name, as of the last snapshot."""
        return {name: int(each[:16], 16) for name, (_, each) in self._found.items() if each}

    @property
    def are_alike(self) -> bool:
        """Whether each of them is known to be alike, so that all ranks can go on from what one of them has saved."""
        return self._found.keys() <= self.alike

    @property
    def is_known(self) -> bool:
        """Whether it is known of each of them whether another rank has the same."""
        return self.are_alike and self.missing.isdisjoint(self._found)

    @property
    def can_be_given(self) -> bool:
        """Whether another rank is known to have all that the last snapshot leaves to it."""
        return self.is_known and not any(each and name in self.own for name, (_, each) in self._found.items())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return these tensors as they are now, by name."""
        return {name: each.cpu() for name, each in self._present(self._found)}

    def _present(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            found = self._found[name][0]() if name in self._found and name not in self.own else None
            if found is not None:
                yield name, found.detach()

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Keep those of another rank until this one is where it can take them."""
        self._given = dict(state)

    # --- becoming another rank ---------------------------------------------------------------------------------------

    def take(self, name: str, evidence: str) -> torch.Tensor:
        """Return the tensor of another rank for which a mark stands.

        Raises:
            NotCarriedError: no other rank has given the same.
        """
        given = [each[name] for each in (self._given, self.before.given) if name in each]
        there = (each.to(evidence.rpartition(" ")[2]) for each in given)
        found = next((each for each in there if evidence_of(each) == evidence), None)
        if found is None:
            why = "another rank has it otherwise, or has changed it since" if given else "no other rank has it"
            raise NotCarriedError(f"{name}, a large tensor outside of the model, can't be had from another rank: {why}")
        self._new[name] = weakref.ref(found), evidence
        if found.nbytes <= self._least:  # the one that it replaces has taken smaller ones, too
            self.include_smaller()
        return found

    def end_taking(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """End a snapshot that was restored.

        Args:
            pairs: of what was taken, and the tensor that has got its numbers; of others what was taken is the tensor.
        """
        owners = {id(taken): thing for taken, thing in pairs}
        for name, (ref, evidence) in self._new.items():
            if (thing := owners.get(id(ref()))) is not None:
                self._new[name] = weakref.ref(thing), evidence
        self._given = self.before.given = {}
        self.alike |= self._new.keys()
        self.end()


class Before:
    """Copies of large tensors as they were at a snapshot, where they have changed since. It is protected, too.

    Attributes:
        given: those of another rank.
    """

    def __init__(self) -> None:
        self.given: Mapping[str, torch.Tensor] = {}
        self._copies, self._age = dict[str, torch.Tensor](), 0

    def keep(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy these at a snapshot; of one with nothing to copy the copies of another one stay, for a while."""
        self._age += 1
        if tensors and _has_room(tensors.values()):
            self._copies = {name: _copy(each, self._copies.get(name)) for name, each in tensors.items()}
            self._age = 0
        elif self._age > KEPT:
            self._copies = {}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the copies, by name."""
        return {name: each.cpu() for name, each in self._copies.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Keep those of another rank until this one is where it can take them."""
        self.given = dict(state)


class Nothing:
    """What is saved of copies: a rank that goes on from what was saved needs none."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return none."""
        return {}


def _has_room(tensors: Iterable[torch.Tensor]) -> bool:
    there = list(tensors)
    if all(each.device.type == "cpu" for each in there):
        return True
    if not all(each.device.type in {"cpu", "cuda"} for each in there):
        return False
    return torch.cuda.mem_get_info()[0] > ROOM * sum(each.nbytes for each in there)


def _copy(tensor: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
    same = into is not None and (into.shape, into.dtype, into.device) == (tensor.shape, tensor.dtype, tensor.device)
    return into.copy_(tensor) if into is not None and same else tensor.clone()


def evidence_of(tensor: torch.Tensor) -> str:
    """Return what is the same for two tensors of equal numbers, shape and type on devices of a kind, and no others."""
    there = tensor.detach().resolve_conj().resolve_neg()
    flat = (torch.view_as_real(there) if there.is_complex() else there).contiguous().reshape(-1)
    if flat.device.type == "cpu":
        memory: Any = flat.view(torch.uint8).numpy()
        number = xxh3_64_intdigest(memory)
    else:
        number = digest([("", flat)]) & MASK
    return f"{number:016x} {tensor.dtype} {tuple(tensor.shape)} {tensor.device.type}"


def _words_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return some words of a tensor, where they are; None where its numbers do not lie one behind the other."""
    if not tensor.is_contiguous() or tensor.is_complex():
        return None
    return words_of(tensor.detach().reshape(-1).view(torch.uint8))[:: STRIDE_BYTES // 8]
