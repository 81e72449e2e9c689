"""The library inside a training process: `Session`."""

from unicron.train.session import Session

__all__ = ["Session"]
