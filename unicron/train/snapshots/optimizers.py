"""Loads an optimizer's state as it was: torch casts its tensors, and makes anew or copies what else there is."""

from collections.abc import Mapping
from typing import Any

import torch


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load an optimizer's state in the types that it has, and into the tensors that it has.

    Torch casts moments to the type of their parameter, and makes whatever can be iterated over anew, which hardly
    anything but a list survives. It puts new groups in place of those that the script may have in variables of its own.
    A checkpoint that a script has read may have the optimizer's tensors, too.
    """
    groups, states = optimizer.param_groups, optimizer.state
    before, held = [*groups], {parameter: each for parameter, each in states.items() if isinstance(each, Mapping)}
    optimizer.load_state_dict({**state, "state": {key: _hidden(each) for key, each in state["state"].items()}})
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for number, parameter in enumerate(parameters):
        _restore_types(optimizer.state.get(parameter), state["state"].get(number))
        if parameter in held and parameter in optimizer.state:
            optimizer.state[parameter] = _into(held[parameter], optimizer.state[parameter])
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):  # torch has copied objects
        group.update({name: each for name, each in saved.items() if name != "params" and _is_object(each)})
    if vars(optimizer).keys() >= {"param_groups", "state"}:  # else they are those of an optimizer inside of this one
        for own, loaded in zip(before, optimizer.param_groups, strict=True):
            _become(own, loaded)
        groups[:] = before
        _become(states, optimizer.state)
        optimizer.param_groups, optimizer.state = groups, states


def _become(own: Any, loaded: Any) -> None:
    """Have a dictionary hold what another one does, in the order that it had: torch puts a group's parameters last."""
    if own is not loaded:
        found = {key: loaded[key] for key in own if key in loaded} | dict(loaded)
        own.clear()
        own.update(found)


@torch.no_grad()
def _into(own: Any, loaded: Any) -> Any:
    """Return what was loaded, in the tensors that were there before where these are laid out alike."""
    if isinstance(own, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return own.copy_(loaded) if _layout(own) == _layout(loaded) else loaded
    if isinstance(own, Mapping) and isinstance(loaded, dict):
        loaded.update({key: _into(own.get(key), each) for key, each in loaded.items()})
    elif type(own) is type(loaded) in {list, tuple} and len(own) == len(loaded):
        return type(loaded)(map(_into, own, loaded))
    return loaded


def _layout(tensor: torch.Tensor) -> Any:
    strides = tensor.stride() if tensor.layout == torch.strided else ()
    return type(tensor), tensor.shape, tensor.dtype, tensor.device, tensor.layout, strides


def _is_object(value: Any) -> bool:
    return not isinstance(value, torch.Tensor | str | float | None)


class _Hidden:
    """A value that torch leaves as it is."""


def _hidden(value: Any) -> Any:
    """Return a state of a parameter with nothing in place of what torch would make anew."""
    if isinstance(value, dict):
        return {key: _hidden(each) for key, each in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(map(_hidden, value))
    return value if isinstance(value, torch.Tensor) else _Hidden()


def _restore_types(own: Any, saved: Any) -> Any:
    """Return what was loaded; tensors whose type was changed by that, and what was hidden, are as they were saved."""
    if isinstance(own, torch.Tensor) and isinstance(saved, torch.Tensor):
        return own if own.dtype == saved.dtype else saved.to(own.device)
    if isinstance(own, dict) and isinstance(saved, Mapping):
        own.update({key: _restore_types(each, saved.get(key)) for key, each in own.items()})
    elif type(own) in {list, tuple} and isinstance(saved, list | tuple):
        return type(own)(map(_restore_types, own, saved))
    return saved if isinstance(own, _Hidden) else own
