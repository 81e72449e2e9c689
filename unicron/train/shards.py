"""Tensors that torch has spread over the ranks of a replica (DTensor): what this rank holds of them.

torch.distributed.tensor takes seconds to import, so nothing here does where no tensor is spread.
"""

from collections.abc import Mapping
from typing import Any

import torch

from unicron.errors import StateTransferError

MARK = "__spread__"


def is_spread(tensor: Any) -> bool:
    """Return whether ranks of the replica share this tensor."""
    return isinstance(tensor, torch.Tensor) and hasattr(tensor, "placements")


def local(tensor: Any) -> torch.Tensor:
    """Return what this rank holds of a tensor: all of it, where it is not spread."""
    held: torch.Tensor = tensor.to_local() if is_spread(tensor) else tensor
    return held


def spread_as(tensor: Any, other: Any) -> Any:
    """Return `tensor` spread over the ranks as `other` is; a gradient may be a sum that is still to be made."""
    if not is_spread(tensor) or tensor.placements == other.placements:
        return tensor
    return tensor.redistribute(other.device_mesh, other.placements)


def as_shard_of(shard: torch.Tensor, other: Any) -> torch.Tensor:
    """Return the tensor whose part on this rank is `shard`, spread as `other` is."""
    if not is_spread(other):
        return shard
    return _joined(shard, other.device_mesh, other.placements, other.shape, other.stride())


def taken_apart(value: Any) -> Any:
    """Return a state with what this rank holds of each tensor, and how that was spread; plain values and tensors."""
    if is_spread(value):
        return {
            MARK: {
                "shape": list(value.shape),
                "stride": list(value.stride()),
                "dimensions": list(value.device_mesh.mesh_dim_names or ()),
                "placements": [_written(each) for each in value.placements],
            },
            "shard": value.to_local().detach(),
        }
    if isinstance(value, Mapping):
        return {name: taken_apart(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        found = [taken_apart(each) for each in value]
        return found if isinstance(value, list) else tuple(found)
    return value


def put_together(value: Any, meshes: Mapping[tuple[str, ...], Any]) -> Any:
    """Undo `taken_apart`.

    Args:
        value: from a rank of the same place.
        meshes: of this rank's own tensors, by the names of their dimensions.

    Raises:
        StateTransferError: it is spread over a mesh that this rank does not have.
    """
    if isinstance(value, dict) and MARK in value:
        spread = value[MARK]
        mesh = meshes.get(tuple(spread["dimensions"]))
        if mesh is None:
            raise StateTransferError(
                f"the state is spread over {spread['dimensions']}, and no parameter here is: "
                "all workers of a task run the same script with the same arguments"
            )
        placements = [_read(each) for each in spread["placements"]]
        return _joined(value["shard"], mesh, placements, spread["shape"], spread["stride"])
    if isinstance(value, dict):
        return {name: put_together(each, meshes) for name, each in value.items()}
    if isinstance(value, list | tuple):
        found = [put_together(each, meshes) for each in value]
        return found if isinstance(value, list) else tuple(found)
    return value


def meshes_of(value: Any) -> dict[tuple[str, ...], Any]:
    """Return the meshes of all tensors in a state, by the names of their dimensions."""
    if is_spread(value):
        return {tuple(value.device_mesh.mesh_dim_names or ()): value.device_mesh}
    found: dict[tuple[str, ...], Any] = {}
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    for each in inside:
        found |= meshes_of(each)
    return found


def _joined(shard: torch.Tensor, mesh: Any, placements: Any, shape: Any, stride: Any) -> torch.Tensor:
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 who has such tensors has imported it

    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride))


def _written(placement: Any) -> list[Any]:
    return [
        type(placement).__name__,
        *(getattr(placement, name) for name in ("dim", "split_factor") if hasattr(placement, name)),
    ]


def _read(written: list[Any]) -> Any:
    from torch.distributed.tensor import Replicate, Shard, placement_types  # noqa: PLC0415 as above

    kinds: dict[str, Any] = {
        "Shard": Shard,
        "Replicate": Replicate,
        "_StridedShard": getattr(placement_types, "_StridedShard", None),
    }
    kind, *numbers = written
    if kinds.get(kind) is None:
        raise StateTransferError(f"the state has a tensor spread as {kind}, which is not known here")
    return kinds[kind](numbers[0], split_factor=numbers[1]) if len(numbers) > 1 else kinds[kind](*numbers)
