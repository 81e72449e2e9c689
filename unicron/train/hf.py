"""Reports the progress of Hugging Face's `Trainer`: `Trainer(..., callbacks=[UnicronCallback()])`."""

# ruff: noqa: ARG002 arguments are the library's

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from unicron.train.watching import watch


class UnicronCallback(TrainerCallback):
    """A `Trainer` that is watched as by `unicron.train.watch`, whose words it takes.

    The reported loss is the one that was logged last.
    """

    def __init__(self) -> None:
        self._watching = watch()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """Begin to watch."""
        self._watching = watch(model, state.global_step).__enter__()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Say that an update was made."""
        loss = next((each["loss"] for each in reversed(state.log_history) if "loss" in each), None)
        self._watching.tick(loss, state.global_step - 1)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Watch no more."""
        self._watching.__exit__(None, None, None)
