"""Graphs by which tensors were computed: a later backward pass may go through one, and no other process has it."""

from collections import deque
from typing import Any

import torch

MOST_NODES = 1000
"""Nodes that are looked at; a larger graph counts as one that is still there."""


def keeps_graph(tensor: torch.Tensor) -> bool:
    """Return whether a backward pass could still go from a tensor to a parameter.

    A pass frees what the functions that it goes through have saved, and no other can go there: so it is with nearly all
    tensors that a script still has when an iteration is over.
    """
    if tensor.grad_fn is None:
        return False
    todo, seen, leads = deque[Any]([tensor.grad_fn]), set[int](), False
    while todo and len(seen) < MOST_NODES:
        node = todo.popleft()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        if _is_freed(node):
            return False
        leads |= hasattr(node, "variable")  # it adds to the gradient of a leaf
        todo.extend(each for each, _ in node.next_functions)
    return leads or bool(todo)


def cloned_leaf(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the leaf of which a tensor is a clone, as where weights are kept while others are swapped in."""
    node = tensor.grad_fn
    if node is None or node.name() != "CloneBackward0":
        return None
    leaf = getattr(node.next_functions[0][0], "variable", None)
    return leaf if leaf is not None and (leaf.shape, leaf.dtype) == (tensor.shape, tensor.dtype) else None


def _is_freed(node: Any) -> bool:
    """Return whether what a function has saved for a backward pass is gone."""
    for name in dir(type(node)):
        if name.startswith("_saved_") or name == "saved_tensors":
            try:
                getattr(node, name, None)
            except RuntimeError:
                return True
    return False
