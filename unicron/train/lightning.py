"""Reports the progress of Lightning's `Trainer`: `Trainer(..., callbacks=[UnicronCallback()])`."""

# ruff: noqa: ARG002 arguments are the library's

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from unicron.train.watching import watch


class UnicronCallback(Callback):
    """A `Trainer` that is watched as by `unicron.train.watch`."""

    def __init__(self) -> None:
        self._watching = watch()
        self._step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to watch."""
        self._step = trainer.global_step
        self._watching = watch(pl_module, self._step).__enter__()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Say that an update was made, where this batch was the last of one."""
        if trainer.global_step > self._step:
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            self._watching.tick(loss if isinstance(loss, torch.Tensor) else None, self._step)
            self._step = trainer.global_step

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Watch no more."""
        self._watching.__exit__(None, None, None)
