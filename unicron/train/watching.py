"""Reports the progress of a training loop of one's own, where the script has no `Session`."""

import os
import time
from types import TracebackType
from typing import Any, Self

import torch

from unicron.contracts.tasks import WorkerPhase
from unicron.contracts.worker import Iterated, Progress
from unicron.train.worker import channel


class watch:  # noqa: N801 scripts read it as a verb
    """A training loop that is watched: `with unicron.train.watch(model) as watching: ... watching.tick()`.

    Iterations are reported to the cluster, so that it knows how far the task is, whether it has become slower, and, by
    the loss, whether it still learns. With the model it also knows of hangs in the middle of an iteration, and which
    worker computes for longer than the others: from the beginning of a forward pass in training mode until the backward
    pass has made its last gradient. Of a model on a GPU that is the time of the host.

    A script that is run by hand, without a cluster, is not disturbed.

    Args:
        model: what is trained, wrapped (DistributedDataParallel, FSDP) or not.
        iteration: that the loop begins with, where it goes on from a checkpoint.
    """

    def __init__(self, model: torch.nn.Module | None = None, iteration: int = 0) -> None:
        self.iteration = iteration
        self._line = channel.launcher_channel()
        self._model = model
        self._hooks: list[Any] = []
        self._began = self._forward_began = self._gradient_made = 0.0
        self._passes = 0
        self._computed: list[float] = []

    def __enter__(self) -> Self:
        """Begin to watch."""
        self._began = time.monotonic()
        if self._line is not None and self._model is not None:
            self._hooks = [self._model.register_forward_pre_hook(self._forward)]
            self._hooks += [
                parameter.register_post_accumulate_grad_hook(self._gradient)  # type: ignore[no-untyped-call]
                for parameter in self._model.parameters()
                if parameter.requires_grad
            ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Watch no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def tick(self, loss: float | torch.Tensor | None = None, iteration: int | None = None) -> None:
        """Say that an iteration is done: its update is made.

        Args:
            loss: of it; a tensor on a GPU is waited for.
            iteration: its number, where they are not counted one by one.
        """
        self._end_pass()
        if iteration is not None:
            self.iteration = iteration
        now = time.monotonic()
        if self._line is not None:
            if self._passes:
                self._progress()
            self._line.send(
                Iterated(
                    iteration=self.iteration,
                    epoch=0,
                    rank=int(os.environ.get("RANK", "0")),
                    world_size=int(os.environ.get("WORLD_SIZE", "1")),
                    seconds=now - self._began,
                    loss=_number(loss),
                    computed_s=sum(self._computed) / len(self._computed) if self._computed else 0.0,
                )
            )
        self.iteration += 1
        self._began, self._passes = now, 0
        self._computed.clear()

    def _forward(self, module: torch.nn.Module, _: Any) -> None:
        """Note that a forward pass begins, unless it is an evaluation's."""
        if not (module.training and torch.is_grad_enabled()):
            return
        self._end_pass()
        self._progress()
        self._passes += 1
        self._forward_began = time.monotonic()

    def _gradient(self, _: torch.nn.Parameter) -> None:
        self._gradient_made = time.monotonic()

    def _end_pass(self) -> None:
        """Note how long this process computed for the last forward and backward pass, without waiting for others."""
        if self._gradient_made > self._forward_began > 0:
            self._computed.append(self._gradient_made - self._forward_began)
        self._forward_began = 0.0

    def _progress(self) -> None:
        """Say how far it is; in a pass it may wait for others at any time, as in a reduce."""
        if self._line is not None:
            self._line.send(Progress(iteration=self.iteration, phase=WorkerPhase.REDUCE, done=self._passes))


def _number(loss: float | torch.Tensor | None) -> float:
    if isinstance(loss, torch.Tensor):
        loss = loss.detach().mean().item()
    return 0.0 if loss is None else float(loss)
