"""The kinds of NumPy's generators of random numbers."""

from typing import Any

from unicron.train.carry.by_value import ByValue
from unicron.train.carry.kinds import NotCarriedError


def _numpy_state(thing: Any) -> Any:
    if hasattr(thing, "bit_generator"):
        return thing.bit_generator.state
    return thing.get_state(legacy=False) if hasattr(thing, "get_state") else thing.state


def _put_numpy_state(thing: Any, state: Any) -> None:
    if hasattr(thing, "bit_generator"):
        thing.bit_generator.state = state
    elif hasattr(thing, "set_state"):
        thing.set_state(state)
    else:
        thing.state = state


def _put_seeds(thing: Any, state: Any) -> None:
    if thing.state != state:
        raise NotCarriedError("seeds of NumPy, of which others were spawned")


NUMPY_GENERATOR = ByValue(_numpy_state, _put_numpy_state, lambda thing: repr(_numpy_state(thing)))
SEEDS = ByValue(lambda thing: thing.state, _put_seeds, lambda thing: repr(thing.state))
