"""The library inside a training process: `Session`, or `watch` where there is none.

Samplers find `balance` in `unicron.train.balance`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unicron.train.session.session import Session
    from unicron.train.watching import watch

__all__ = ["Session", "watch"]

_HOMES = {"Session": "unicron.train.session.session", "watch": "unicron.train.watching"}


def __getattr__(name: str) -> Any:
    """Import these, and torch with them, only on access: a sampler, or an analysis, may have no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
