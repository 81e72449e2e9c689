"""The library inside a training process: `Session`."""

from unicron.train.session import InjectedFault, Session

__all__ = ["InjectedFault", "Session"]
