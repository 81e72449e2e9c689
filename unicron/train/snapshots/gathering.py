"""A rank's state, put together from states that ranks of any layout have collected.

All that belongs to a parameter goes by its name, and all that is spread by where in the whole tensor it lies. A state
from a rank of the same place is only the case in which one is enough.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from unicron.errors import StateTransferError
from unicron.train.snapshots.optimizers import load_optimizer
from unicron.train.snapshots.plain import from_plain, objects_in, to_plain
from unicron.train.snapshots.shards import MARK, Box, as_shard_of, decode_shard, encode_shard, is_sharded

Protected = Mapping[str, Any]
"""The parts of the state, by the name that the script gave them."""

EXTRA = "_extra_state"
"""Suffix of the names of `torch.nn.Module.get_extra_state`'s values, which modules may keep."""


def collect_state(iteration: int, protected: Protected) -> dict[str, Any]:
    """Return this rank's state from before the update of `iteration`, as plain values and tensors: it is *laid out*.

    Raises:
        StateTransferError: it holds what no other process can be given; the text names it.
    """
    names = _names_of_parameters(protected)
    objects = {
        name: to_plain(_named_state(each, names), name, _options(name, each)) for name, each in protected.items()
    }
    if any(is_sharded(parameter) for _, parameter in names.values()):
        objects = {name: _encode_shards(each) for name, each in objects.items()}
    return {"iteration": iteration, "objects": objects}


def load_state(found: dict[str, Any], protected: Protected) -> None:
    """Load a state that `Gathering` has put together.

    Raises:
        KeyError: it lacks one of the protected objects: not all workers run the same script.
    """
    names = _names_of_parameters(protected)
    for name, thing in protected.items():
        like = _named_state(thing, names)
        whole = _as_sharded_like(found["objects"][name], _parameter_like(thing, like, names))
        if isinstance(thing, torch.optim.Optimizer):
            device = next((each.device for group in thing.param_groups for each in group["params"]), None)
            there = objects_in(like, name, _options(name, thing))
            load_optimizer(thing, _state_by_number(thing, from_plain(whole, device, there)))
        else:
            thing.load_state_dict(from_plain(whole))


class Gathering:
    """A state that is being put together for this rank.

    Args:
        protected: what it is for.
    """

    def __init__(self, protected: Protected) -> None:
        self._protected, self._names = protected, _names_of_parameters(protected)
        self._like = {name: _named_state(each, self._names) for name, each in protected.items()}
        self._found: dict[str, Any] = {}
        self._unlisted: dict[str, set[str]] = {}

    def add(self, state: Mapping[str, Any]) -> None:
        """Take what this rank needs of a laid out state; its file must stay as it is until all is loaded.

        Parameters are read from there when they are loaded, as that copies them; all else is copied here.

        Raises:
            StateTransferError: it does not fit.
        """
        for name, thing in self._protected.items():
            if name not in state["objects"]:
                raise StateTransferError(f"the state has no {name!r}: not all workers run the same script")
            value, like, in_place = state["objects"][name], self._like[name], isinstance(thing, torch.nn.Module)
            if in_place:
                value = {
                    key: _cloned(each) if key.endswith(EXTRA) else each for key, each in value.items() if key in like
                }
                _check_shapes(name, value, like)
            elif isinstance(thing, torch.optim.Optimizer):
                value = self._select_own(name, value, like)
            # whole moments, and all else that is not spread, are as the holder has them
            like = _parameter_like(thing, like, self._names)
            self._found[name] = _merge(self._found.get(name), like, value, borrow=in_place)

    def _select_own(self, name: str, value: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
        """Return the part of an optimizer's state that belongs to this rank's parameters."""
        if len(value["param_groups"]) != len(like["param_groups"]):
            raise StateTransferError(
                f"{name} has {len(like['param_groups'])} groups of parameters here and {len(value['param_groups'])} in "
                "the state: make as many on every rank, in the same order"
            )
        wanted = _parameter_names(like)
        self._unlisted[name] = self._unlisted.get(name, set(wanted)).difference(_parameter_names(value))
        groups = zip(value["param_groups"], like["param_groups"], strict=True)
        return {
            "state": {each: value["state"][each] for each in wanted if each in value["state"]},
            "param_groups": [{**theirs, "params": own["params"]} for theirs, own in groups],
        }

    @property
    def missing(self) -> str:
        """The name of a value that is still missing, empty when the state is whole."""
        for name, thing in self._protected.items():
            found = self._found.get(name)
            if found is None:
                return name
            if isinstance(thing, torch.nn.Module):
                missing = self._like[name].keys() - found.keys()
            else:
                missing = self._unlisted.get(name, set())
            if where := min(missing, default="") or _first_missing(found):
                return f"{name} {where}"
        return ""

    def result(self, iteration: int) -> dict[str, Any]:
        """Return the state, laid out.

        Raises:
            StateTransferError: it is not whole.
        """
        if self.missing:
            raise StateTransferError(
                f"the states that are there lack {self.missing}: parameters have the same names in all layouts, "
                "as a stage that keeps its layers' numbers gives them"
            )
        return {"iteration": iteration, "objects": {name: _encode_parts(each) for name, each in self._found.items()}}


def assemble(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the objects that all places of a replica together have, with whole tensors under their full names.

    Args:
        parts: the objects that each place has laid out.

    Raises:
        StateTransferError: something is not whole.
    """
    found: dict[str, Any] = {}
    listed: dict[tuple[str, int], dict[str, None]] = {}
    for part in parts:
        found = _merge(found, None, part)
        for name, each in part.items():
            groups = each.get("param_groups", ()) if isinstance(each, Mapping) else ()
            for number, group in enumerate(groups):  # a stage of a pipeline has parameters of its own
                listed.setdefault((name, number), {}).update(dict.fromkeys(group["params"]))
    if lacking := _first_missing(found):
        raise StateTransferError(f"the places of a replica together lack {lacking}")
    whole: dict[str, Any] = _encode_parts(found)
    for (name, number), names in listed.items():
        whole[name]["param_groups"][number]["params"] = list(names)
    return whole


class Needs:
    """The parts of laid out states that a rank needs, known before they are read.

    Args:
        protected: what they are for.
    """

    def __init__(self, protected: Protected) -> None:
        self._modules = {
            name: {key: Box.of(each) for key, each in thing.state_dict().items() if isinstance(each, torch.Tensor)}
            for name, thing in protected.items()
            if isinstance(thing, torch.nn.Module)
        }
        self._optimizers = {name for name, thing in protected.items() if isinstance(thing, torch.optim.Optimizer)}
        self._parameters = {name: Box.of(each.detach()) for name, each in _names_of_parameters(protected).values()}
        self._names = set(protected)

    def has(self, path: Sequence[str | int], box: Box) -> bool:
        """Return whether a rank needs some of a part of a tensor, by where that is in the objects of the state."""
        name = path[0]
        if name in self._modules:
            mine = self._modules[str(name)].get(str(path[1]))
        elif name in self._optimizers and path[1] == "state":
            mine = self._parameters.get(str(path[2]))
        else:
            return name in self._names
        if mine is None:
            return False
        # moments may have another shape than their parameter; a rank with nothing of a tensor gets its type from a part
        return mine.whole != box.whole or 0 in mine.shape or mine.overlap(box) is not None


class _Part:
    """The part of a tensor on this rank, as far as it was loaded."""

    def __init__(self, box: Box, like: torch.Tensor, *, spread: bool) -> None:
        self._box, self._spread = box, spread
        self._held = torch.empty(box.shape, dtype=like.dtype)
        self._seen: set[Box] = set()
        self.missing = self._held.numel()

    def add(self, box: Box, shard: torch.Tensor, *, borrow: bool) -> None:
        """Take what both hold; ranks that hold the same hold the very same box, or one of them all.

        Args:
            box: where the shard lies.
            shard: what another rank holds.
            borrow: a shard that is all that is wanted is not copied.
        """
        both = self._box.overlap(box)
        if both is None or both in self._seen or not self.missing:
            return
        if borrow and self._box == box:
            self._held, self.missing = shard, 0
            return
        self._seen.add(both)
        self._held[both.within(self._box)] = shard[both.within(box)]
        self.missing = 0 if both == self._box else self.missing - self._held[both.within(self._box)].numel()

    def encode(self) -> Any:
        """Return it as it is laid out."""
        if not self._spread:
            return self._held
        return {MARK: [list(self._box.whole), list(self._box.offset)], "shard": self._held}


# --- what is protected, by name --------------------------------------------------------------------------------------


def _names_of_parameters(protected: Protected) -> dict[int, tuple[str, torch.Tensor]]:
    """Return the name of each parameter, and the parameter, by its identity."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, thing in protected.items():
        if isinstance(thing, torch.nn.Module):
            prefix = "" if name == "model" else f"{name}."
            for each, parameter in thing.named_parameters():
                found.setdefault(id(parameter), (prefix + each, parameter))
    return found


def _named_state(thing: Any, names: Mapping[int, tuple[str, torch.Tensor]]) -> Any:
    """Return the state of an object; an optimizer's by the names of its parameters."""
    state = thing.state_dict()
    if not isinstance(thing, torch.optim.Optimizer):
        return state
    parameters = [each for group in thing.param_groups for each in group["params"]]
    called = [names.get(id(each), (f"#{number}", each))[0] for number, each in enumerate(parameters)]
    return {  # groups first: objects of theirs are there before there is a state
        "param_groups": [
            {**group, "params": [called[number] for number in group["params"]]} for group in state["param_groups"]
        ],
        "state": {called[key] if isinstance(key, int) else key: each for key, each in state["state"].items()},
    }


def _state_by_number(optimizer: torch.optim.Optimizer, named: dict[str, Any]) -> dict[str, Any]:
    """Undo `_named_state` for an optimizer."""
    numbers = {name: number for number, name in enumerate(_parameter_names(named))}
    packed = optimizer.state_dict()["param_groups"]
    return {
        "state": {numbers.get(name, name): each for name, each in named["state"].items()},
        "param_groups": [
            {**group, "params": own["params"]} for group, own in zip(named["param_groups"], packed, strict=True)
        ],
    }


def _options(name: str, thing: Any) -> str | None:
    """Return where an optimizer's options are in its state, by name."""
    return f"{name}.param_groups" if isinstance(thing, torch.optim.Optimizer) else None


def _parameter_names(named: Mapping[str, Any]) -> list[str]:
    return [name for group in named["param_groups"] for name in group["params"]]


def _parameter_like(thing: Any, like: Any, names: Mapping[int, tuple[str, torch.Tensor]]) -> Any:
    """Return, for each tensor, how it is to be spread: moments of an optimizer as their parameter."""
    if not isinstance(thing, torch.optim.Optimizer):
        return like
    return {"state": {name: _Everything(parameter) for name, parameter in names.values()}, "param_groups": []}


class _Everything(dict[str, torch.Tensor]):
    """A mapping in which every name leads to the same parameter."""

    def __init__(self, parameter: torch.Tensor) -> None:
        super().__init__()
        self._parameter = parameter

    def get(self, _: str, default: Any = None) -> Any:  # noqa: ARG002
        """Return the parameter."""
        return self._parameter


def _check_shapes(name: str, value: Mapping[str, Any], like: Mapping[str, Any]) -> None:
    for key, each in value.items():
        piece = decode_shard(each)
        if piece is not None and isinstance(like[key], torch.Tensor) and piece[0].whole != tuple(like[key].shape):
            raise StateTransferError(
                f"{name} {key} has the shape {tuple(like[key].shape)} here and {piece[0].whole} in the state: all "
                "workers of a task run the same script with the same arguments"
            )


# --- nested values ---------------------------------------------------------------------------------------------------


def _is_leaf(value: Any) -> bool:
    return not isinstance(value, Mapping | list | tuple) or (isinstance(value, Mapping) and MARK in value)


def _items(value: Any) -> list[tuple[Any, Any]]:
    return list(value.items()) if isinstance(value, Mapping) else list(enumerate(value))


def _item_at(value: Any, key: Any) -> Any:
    if isinstance(value, Mapping):
        return value.get(key)
    return value[key] if isinstance(value, list | tuple) and key < len(value) else None


def _cloned(value: Any) -> Any:
    """Return a copy of a value, tensors included."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return value if _is_leaf(value) else _rebuilt(value, [(key, _cloned(each)) for key, each in _items(value)])


def _rebuilt(value: Any, items: list[tuple[Any, Any]]) -> Any:
    """Return a value of the kind of `value` with these items."""
    if isinstance(value, Mapping):
        return dict(items)
    return type(value)(each for _, each in items) if type(value) in {list, tuple} else [each for _, each in items]


def _encode_shards(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return encode_shard(value)
    return value if _is_leaf(value) else _rebuilt(value, [(key, _encode_shards(each)) for key, each in _items(value)])


def _merge(found: Any, like: Any, value: Any, *, borrow: bool = False) -> Any:
    """Return what was found so far, with what `value` has of it."""
    if not _is_leaf(value):
        new = [
            (key, _merge(_item_at(found, key), _item_at(like, key), each, borrow=borrow)) for key, each in _items(value)
        ]
        if isinstance(value, Mapping) and isinstance(found, Mapping):
            return {**found, **dict(new)}
        return _rebuilt(value, new)
    named = decode_shard(value)
    if named is None:
        return value if found is None else found
    box, shard = named
    if not isinstance(found, _Part):
        spread = is_sharded(like) and tuple(like.shape) == box.whole
        found = _Part(
            Box.of(like) if spread else Box(box.whole, (0,) * len(box.whole), box.whole), shard, spread=spread
        )
    found.add(box, shard, borrow=borrow)
    return found


def _first_missing(found: Any) -> str:
    """Return where a tensor lacks some of its elements, empty where none does."""
    if isinstance(found, _Part) or _is_leaf(found):
        return "elements" if isinstance(found, _Part) and found.missing else ""
    for key, each in _items(found):
        if where := _first_missing(each):
            return f"{key} {where}"
    return ""


def _encode_parts(found: Any) -> Any:
    if isinstance(found, _Part):
        return found.encode()
    return found if _is_leaf(found) else _rebuilt(found, [(key, _encode_parts(each)) for key, each in _items(found)])


def _as_sharded_like(value: Any, like: Any) -> Any:
    if not _is_leaf(value):
        return _rebuilt(value, [(key, _as_sharded_like(each, _item_at(like, key))) for key, each in _items(value)])
    named = decode_shard(value) if isinstance(value, dict) else None
    return value if named is None else as_shard_of(named[1], like)
