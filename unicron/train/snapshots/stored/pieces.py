"""A laid out state taken to pieces, as torch.distributed.checkpoint takes its own, and put together again.

What is nested gets the names that its `flatten_state_dict` gives. What is left without the tensors is a piece too: it
has what those names can't express, such as empty mappings and keys that are numbers.
"""

import io
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from unicron.errors import CheckpointError, StateTransferError
from unicron.train.snapshots.shards import MARK, Box, decode_shard

HERE = "__stored__"
"""Key of what stands where a tensor was: the number of its piece."""

Path = tuple[str | int, ...]


class StatePiece(NamedTuple):
    """A piece that is to be written.

    Attributes:
        path: where it is in the state.
        value: a tensor or a plain value.
        box: which part of the tensor it is; None for a value.
    """

    path: Path
    value: Any
    box: Box | None


def split(state: Mapping[str, Any]) -> tuple[list[StatePiece], dict[str, Any]]:
    """Split a collected state into pieces; return them, and what is left of the state without its tensors.

    Raises:
        CheckpointError: two of them would have the same name, or a tensor is none.
    """
    taken: list[StatePiece] = []
    objects = {name: _without_pieces(each, (name,), taken) for name, each in state["objects"].items()}
    if "iteration" not in objects:
        taken.append(StatePiece(("iteration",), state["iteration"], None))
    named: set[str] = set()
    for piece in taken:
        name = ".".join(map(str, piece.path))
        if name in named:
            raise CheckpointError(f"the state has two values called {name}: give one of them another name")
        named.add(name)
    return taken, {"iteration": state["iteration"], "objects": objects}


def loads(content: bytes | memoryview) -> Any:
    """Undo `torch.save` for tensors and plain values.

    Raises:
        CheckpointError: it holds something else; nothing of that has run.
    """
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises one kind or another for what is no archive
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        why = next((line for line in lines if "GLOBAL" in line), lines[0] if lines else type(error).__name__)
        raise CheckpointError(f"is more than tensors and plain values, and is not loaded: {why}") from error


def check_plain(rest: Any) -> None:
    """Refuse what could be written but not read again.

    Raises:
        CheckpointError: it holds more than tensors and plain values.
    """
    stream = io.BytesIO()
    torch.save(rest, stream)
    try:
        loads(stream.getvalue())
    except CheckpointError as error:
        raise CheckpointError(f"the state {error}; let state_dict return tensors and plain values alone") from error


def join(rest: Any, tensor: Callable[[int], torch.Tensor | None]) -> Any:
    """Undo `split`.

    Args:
        rest: what was left.
        tensor: returns the tensor of the piece with this number, None for one that nobody wants.
    """
    return _Rebuilding(tensor).of(rest)


def list_pieces(path: Path, value: Any) -> list[str]:
    """Return the parameters of an optimizer's group, if that is what this value is; else none."""
    is_group = len(path) > 2 and path[-1] == "params" and path[-3] == "param_groups"
    return list(value) if is_group and isinstance(value, list) and all(isinstance(each, str) for each in value) else []


def _without_pieces(value: Any, path: Path, taken: list[StatePiece]) -> Any:
    try:
        shard = decode_shard(value)
    except StateTransferError as error:
        raise CheckpointError(f"{'.'.join(map(str, path))}: {error}") from error
    if shard is not None:
        box, tensor = shard
        taken.append(StatePiece(path, tensor, box))
        here = {HERE: len(taken) - 1}
        return here if isinstance(value, torch.Tensor) else {**value, "shard": here}
    if isinstance(value, Mapping):
        return {key: _without_pieces(each, (*path, str(key)), taken) for key, each in value.items()}
    if isinstance(value, list) and not _is_terminal(value):
        return [_without_pieces(each, (*path, number), taken) for number, each in enumerate(value)]
    taken.append(StatePiece(path, value, None))
    return value


def _is_terminal(value: list[Any]) -> bool:
    """Return whether torch keeps a list as one value: it has no mappings or tensors in it."""
    return not any(
        isinstance(each, Mapping | torch.Tensor) or (isinstance(each, list) and not _is_terminal(each))
        for each in value
    )


class _Rebuilding:
    """Puts tensors where they were; what nobody wants is left out of the mapping that it was in."""

    def __init__(self, tensor: Callable[[int], torch.Tensor | None]) -> None:
        self._tensor = tensor

    def of(self, rest: Any) -> Any:
        if isinstance(rest, Mapping):
            if HERE in rest:
                return self._tensor(rest[HERE])
            if MARK in rest:
                shard = self.of(rest["shard"])
                return None if shard is None else {**rest, "shard": shard}
            made = {key: (each, self.of(each)) for key, each in rest.items()}
            return {key: new for key, (old, new) in made.items() if new is not None or old is None}
        return [self.of(each) for each in rest] if isinstance(rest, list) else rest
