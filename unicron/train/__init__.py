"""The library inside a training process: `Session`. Samplers find `balance` in `unicron.train.balance`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unicron.train.session import Session

__all__ = ["Session"]


def __getattr__(name: str) -> Any:
    """Import `Session`, and torch with it, only for those who ask: a sampler, or an analysis, may have no torch."""
    if name != "Session":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from unicron.train.session import Session  # noqa: PLC0415

    return Session
