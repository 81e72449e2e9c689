"""The size of a model and the work of an iteration, independent of the machine.

Symbols as in Narayanan et al. 2021 (arXiv:2104.04473): l layers, h hidden, s sequence, V vocabulary, B batch. Model
FLOPs count what the mathematics needs (MFU); hardware FLOPs also count what is computed twice (HFU).
"""

from unicron.contracts.tasks import ModelSpec

NONE, SELECTIVE, FULL = range(3)
"""The activations that the backward pass recomputes: none, those of the attention core, or all."""

RECOMPUTE = ("none", "selective", "full")
"""Their names, in Megatron's own words."""


def parameters(model: ModelSpec) -> float:
    """Return the number of parameters: 12 l h^2 (1 + 13/(12 h)) + V h; positions are not counted."""
    return model.layers * layer_parameters(model) + model.vocabulary * model.hidden


def layer_parameters(model: ModelSpec) -> float:
    """Return the number of parameters of one layer: 12 h^2 + 13 h."""
    return 12.0 * model.hidden**2 + 13.0 * model.hidden


def layer_flops(model: ModelSpec, recompute: int = NONE) -> float:
    """Return the FLOPs of one layer for one sequence, forward and backward: 72 s h^2 (1 + s/(6 h)) at least."""
    matrices = 72.0 * model.sequence * model.hidden**2
    attention = 12.0 * model.sequence**2 * model.hidden
    again = {NONE: 0.0, SELECTIVE: attention / 3, FULL: (matrices + attention) / 3}  # a third is the forward pass
    return matrices + attention + again[recompute]


def head_flops(model: ModelSpec) -> float:
    """Return the FLOPs of the output layer for one sequence: 6 s V h; it is never recomputed."""
    return 6.0 * model.sequence * model.vocabulary * model.hidden


def iteration_flops(model: ModelSpec, recompute: int = NONE) -> float:
    """Return the FLOPs of one iteration.

    Without recompute they are the model FLOPs 72 B s l h^2 (1 + s/(6 h) + V/(12 l h)); with FULL the hardware FLOPs
    96 B s l h^2 (1 + s/(6 h) + V/(16 l h)).
    """
    return model.batch * (model.layers * layer_flops(model, recompute) + head_flops(model))
