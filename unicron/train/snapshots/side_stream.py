"""A state on a GPU on its way to the node's memory, beside what training does there.

Copies to memory that is not pinned hold their thread up, and on training's own stream whatever is queued behind them
waits. So they have a stream of their own, and two halves of pinned memory: while one is filled, the other is emptied.
"""

from collections.abc import Iterator, Sequence

import torch

HALF_BYTES = 16 * 1024 * 1024


class SideStream:
    """A stream for copies from a device to pinned memory.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._updated = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._halves: list[tuple[torch.Tensor, torch.cuda.Event]] = []

    def wait_for_training(self) -> None:
        """Have the next copy wait for all that training has enqueued by now."""
        self._updated.record(torch.cuda.current_stream(self._stream.device))

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copy tensors to memory, from wherever each is; return when they are there."""
        if not self._halves:
            self._halves = [
                (torch.empty(HALF_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())  # type: ignore[no-untyped-call]
                for _ in range(2)
            ]
        self._stream.wait_event(self._updated)
        full: tuple[torch.Tensor, torch.Tensor, torch.cuda.Event] | None = None
        with torch.cuda.stream(self._stream):
            for number, (target, source) in enumerate(pieces(targets, sources)):
                half, filled = self._halves[number % 2]
                part = half[: source.nbytes].view(source.dtype)
                part.copy_(source, non_blocking=True)
                filled.record(self._stream)
                if full is not None:
                    _empty(*full)
                full = target, part, filled
            if full is not None:
                _empty(*full)


def pieces(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], most: int = HALF_BYTES
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield parts of tensors of `most` bytes at most, each with the one that it goes to."""
    for target, source in zip(targets, sources, strict=True):
        length = most // source.element_size()
        yield from zip(torch.split(target.view(-1), length), torch.split(source.reshape(-1), length), strict=True)


def _empty(target: torch.Tensor, part: torch.Tensor, filled: torch.cuda.Event) -> None:
    filled.synchronize()
    target.copy_(part)
