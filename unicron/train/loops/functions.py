"""Analyses a program's functions, by the names that they call: whether they train, or may take long."""

import ast
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from unicron.train.loops.trees import nodes_of

TRAINS = "backward"
COLLECTIVES = {"all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "barrier", "gather", "reduce"}
COLLECTIVES |= {"broadcast", "broadcast_object_list", "gather_object", "gather_for_metrics", "monitored_barrier"}
COLLECTIVES |= {"reduce_scatter"}
HARMLESS = frozenset(
    {
        "print",
        "len",
        "append",
        "extend",
        "add",
        "update",
        "item",
        "items",
        "keys",
        "values",
        "range",
        "enumerate",
        "zip",
    }
    | {
        "min",
        "max",
        "sum",
        "abs",
        "int",
        "float",
        "str",
        "bool",
        "list",
        "dict",
        "set",
        "tuple",
        "sorted",
        "isinstance",
    }
    | {"join", "split", "strip", "format", "startswith", "endswith", "replace", "get", "pop", "sqrt", "exp", "log"}
    | {"cuda", "cpu", "to", "numel", "size", "numpy", "tolist", "detach", "clone", "zero_", "copy_", "mul_", "add_"}
    | {"getattr", "hasattr", "setattr", "requires_grad_", "parameters", "named_parameters", "write", "register_buffer"}
)
"""Names of functions that no loop trains by."""

MODELLED = frozenset({"forward", "__getitem__", "__getitems__", "collate_fn"})
"""Functions that a model computes by, or a data set finds its items by."""

LOOK_AT_GRADIENTS = frozenset({"clip_grad_norm_", "clip_grad_value_", "get_total_norm"})


class Functions(NamedTuple):
    """Names of functions: that train, that look at gradients, and that may take long; or that call one which does.

    Attributes:
        repeated: that are called in loops that train.
        modelled: that models compute by, and data sets: of which none is known to train.
        harmless: that others have made, and that don't train.
    """

    training: frozenset[str]
    gradients: frozenset[str]
    long: frozenset[str]
    repeated: frozenset[str]
    modelled: frozenset[str]
    harmless: frozenset[str]


class Facts(NamedTuple):
    """What is known of one file, as plain values.

    Attributes:
        functions: of each: its name, the names that it calls, whether it has loops, and whether it looks at gradients.
        loops: of each, the names that its body calls.
        imports: the module that each is from, how many folders above, and the names imported.
    """

    functions: list[tuple[str, set[str], bool, bool]]
    loops: list[set[str]]
    imports: list[tuple[str, int, list[str]]]


def facts_of(tree: ast.Module) -> Facts:
    """Return what is to be known of a file."""
    functions = [
        (each.name, called_names(each.body), bool(nodes_of(each, ast.For, ast.While)), has_gradients(each))
        for each in nodes_of(tree, ast.FunctionDef)
    ]
    loops = [called_names(each.body) for each in nodes_of(tree, ast.For, ast.While)]
    imports = [("", 0, [each.name]) for node in nodes_of(tree, ast.Import) for each in node.names]
    parts = nodes_of(tree, ast.ImportFrom)
    imports += [(each.module or "", each.level, [one.name for one in each.names]) for each in parts]
    return Facts(functions, loops, imports)


def functions_of(files: Iterable[Facts], trains: Iterable[str] = ()) -> Functions:
    """Return what is known of the functions of a program.

    Args:
        files: what is known of each.
        trains: names of functions that train, where these files don't show it.
    """
    whole = list(files)
    functions = [each for one in whole for each in one.functions]
    loops = {name for name, _, has_loops, _ in functions if has_loops}
    looking = {name for name, _, _, looks in functions if looks} | LOOK_AT_GRADIENTS
    calls = [(name, called) for name, called, _, _ in functions]
    training = _add_callers(calls, {TRAINS, *trains})
    repeated = {name for one in whole for names in one.loops if names & training for name in names}
    while more := {name for caller, names in calls if caller in repeated for name in names} - repeated:
        repeated |= more
    modelled, own = set(MODELLED), {name for name, _ in calls}
    while more := {name for caller, names in calls if caller in modelled for name in names & own} - modelled:
        modelled |= more
    return Functions(
        training,
        _add_callers(calls, looking),
        _add_callers(calls, loops | COLLECTIVES),
        frozenset(repeated),
        frozenset(modelled - training),
        HARMLESS - own,
    )


def _add_callers(calls: Sequence[tuple[str, set[str]]], found: set[str]) -> frozenset[str]:
    while more := {name for name, called in calls if name not in found and called & found}:
        found |= more
    return frozenset(found)


def called_names(body: Iterable[ast.AST]) -> set[str]:
    """Return the names of all functions that are called in this code."""
    calls = (node.func for each in body for node in nodes_of(each, ast.Call))
    return {getattr(each, "attr", getattr(each, "id", "")) for each in calls}


def has_gradients(node: ast.AST) -> bool:
    """Return whether code reads or sets the gradient of something."""
    return any(each.attr in {"grad", "main_grad"} for each in nodes_of(node, ast.Attribute))
