"""A tensor as bytes, and back."""

from typing import Any, NamedTuple

import torch

from unicron.train.carry.kinds import NotCarriedError

LARGE_BYTES = 4 << 20
"""A tensor of more is not carried; those that all ranks have alike another rank gives."""


def raw(tensor: torch.Tensor) -> Any:
    """Return the bytes of a tensor; of a sparse one, its parts.

    Raises:
        NotCarriedError: it has none of its own, or too many.
    """
    if (names := _SPARSE.get(tensor.layout)) is not None:
        parts = [getattr(tensor.detach(), name)() for name in names]
        coalesced = tensor.layout is torch.sparse_coo and tensor.is_coalesced()
        return tensor.layout, coalesced, *((raw(each), each.dtype, tuple(each.shape)) for each in parts)
    if tensor.layout != torch.strided or tensor.device.type == "meta" or tensor.nbytes > LARGE_BYTES:
        raise NotCarriedError(
            f"a tensor of {tensor.numel() * tensor.element_size()} bytes on {tensor.device} ({tensor.layout}), where "
            f"{LARGE_BYTES >> 20} MiB of ordinary memory can be carried"
        )
    try:
        return tensor.numpy(force=True).tobytes()
    except RuntimeError as error:  # of a class of its own, as one that is spread over ranks
        raise NotCarriedError(f"a {type(tensor).__qualname__}: {error}") from error
    except TypeError:  # numpy has no such numbers
        there = tensor.detach().cpu().contiguous().reshape(-1)
        return there.view(torch.uint8).numpy().tobytes() if there.numel() else b""


def order_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return in which order a tensor's dimensions lie in memory, where that is not the usual one; it decides rounding.

    That of a matrix that torch.linalg has inverted is columns first.
    """
    if tensor.layout != torch.strided or tensor.is_contiguous():
        return ()
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dimension: -strides[dimension])
    return tuple(order) if tensor.permute(order).is_contiguous() else ()


def unraw(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of these bytes, or parts; a tensor as it is, and zeros where there is nothing."""
    if isinstance(data, torch.Tensor):
        return data
    if isinstance(data, tuple):
        layout, coalesced, *parts = data
        is_coo = layout is torch.sparse_coo
        make: Any = torch.sparse_coo_tensor if is_coo else torch.sparse_compressed_tensor
        options = {"is_coalesced": coalesced} if is_coo else {"layout": layout}
        made: torch.Tensor = make(*(unraw(*each) for each in parts), shape, **options, check_invariants=False)
        return made
    if not data:
        return torch.zeros(shape, dtype=dtype)
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape).clone()
    )  # where torch puts tensors


_ROWS, _COLUMNS = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
_SPARSE: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), _ROWS),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), _COLUMNS),
}
"""Layouts of sparse tensors, with the methods that return what they are made of."""


class Given(NamedTuple):
    """What has been as the first rank's is since the model was made: no process has that by itself."""

    thing: Any
