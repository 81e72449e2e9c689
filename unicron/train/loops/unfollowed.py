"""Loops around a model's call that can't be followed, and what to change: for the text of a refusal."""

import ast
import inspect
import linecache
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType, GeneratorType
from typing import Any

from unicron.train.carry.objects import Call
from unicron.train.carry.variables import NAME
from unicron.train.loops.active_loops import ActiveLoop
from unicron.train.loops.loop_stack import LoopStack, line_of
from unicron.train.loops.positions import Counted, describe
from unicron.train.loops.program import LIBRARIES

COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def unfollowed_reason(caller: FrameType, active: Sequence[ActiveLoop], too_early: Iterable[str]) -> str:
    """Return which loop around a model's call is not followed, and what to do about it; empty where all are.

    Args:
        caller: calls the model.
        active: loops that are followed.
        too_early: places of loops that have begun before all was made that is needed to train.
    """
    frames = own_frames(caller)
    if not frames:
        return "the model is called by no file of this program: call it in one"
    here, followed = _place(frames[0]), {(id(at.frame), line_of(at.place)) for at in active}
    reason = next(filter(None, map(_unfollowable, frames)), "")
    around = [(frame, line) for frame in reversed(frames) for line in loops_around(frame)]
    missing = next(((frame, line) for frame, line in around if (id(frame), line) not in followed), None)
    if reason or (around and missing is None) or (not around and active):
        return reason
    if missing is not None:
        loop = f"the loop at {Path(missing[0].f_code.co_filename).name}:{missing[1]}, in which {here} calls the model,"
        if (Path(missing[0].f_code.co_filename).name, missing[1]) not in {
            (_file(each), line_of(each)) for each in too_early
        }:
            return f"{loop} can't be followed: let it be a loop of the main thread"
        return (
            f"{loop} begins before all is made that it trains: call init_process_group, make the models "
            "DistributedDataParallel, or spread them by fully_shard (imported before that), and make an optimizer, all "
            "before that loop"
        )
    by = _library_between(caller, frames[0])
    return (
        f"the model is called at {here}{f' by way of {by}' if by else ''}, with no loop of this program around it: "
        "train in a `for` or `while` loop of the file that is run, or of those beside it"
    )


def own_frames(caller: FrameType | None) -> list[FrameType]:
    """Return the frames of the program's own files, the innermost first."""
    found = list[FrameType]()
    while caller is not None:
        if NAME in caller.f_globals and caller.f_globals.get("__name__") not in LIBRARIES:
            found.append(caller)
        caller = caller.f_back
    return found


def _unfollowable(frame: FrameType) -> str:
    if frame.f_code.co_name in COMPREHENSIONS:
        return f"a comprehension trains, at {_place(frame)}: make it a `for` loop"
    if frame.f_code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        return f"a coroutine trains, at {_place(frame)}: train in a function that is none"
    return ""


def why_asked(stack: LoopStack) -> str:
    """Return why training in an iterator that the script asks for items by itself can't be followed, if it does."""
    if (asked := stack.asked_by_script) is None:
        return ""
    return (
        f"{describe(asked)} trains, and is asked for items by next(), or within another iterator: go over it in a "
        "`for` loop"
    )


def why_not_fed(active: Iterable[ActiveLoop]) -> str:
    """Return why training in what a loop iterates over can't be followed; empty where it can, or there is none."""
    loops = list(active)
    if any(at.is_fed and not at.is_drawing for at in loops):
        at = next(at for at in loops if at.is_fed and not at.is_drawing)
        return f"the body of the loop at {at.place} trains, and so does what it goes over: train in one of them"
    for at in loops:
        over = at.iterator.iterable if at.iterator is not None else None
        if at.is_fed and not isinstance(over, Counted | GeneratorType | Call):
            name = type(over).__qualname__
            return f"what the loop at {at.place} goes over trains within {name}: go over the generator itself"
    return ""


def loops_around(frame: FrameType) -> list[int]:
    """Return the lines at which the loops begin that a frame's function is in, the outermost first."""
    try:
        tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals)))
    except SyntaxError:
        return []
    scope: ast.AST = tree
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == frame.f_code.co_name:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if first == frame.f_code.co_firstlineno:
                scope = node
    if scope is tree and frame.f_code.co_name != "<module>":
        return []
    return [each.lineno for each in _loops_of(scope) if each.lineno <= frame.f_lineno <= (each.end_lineno or 0)]


def _loops_of(scope: ast.AST) -> Iterable[ast.For | ast.While]:
    for each in ast.iter_child_nodes(scope):
        if isinstance(each, ast.For | ast.While):
            yield each
        if not isinstance(each, SCOPES):
            yield from _loops_of(each)


def _file(place: str) -> str:
    return Path(place.rpartition(":")[0]).name


def _place(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _library_between(caller: Any, own: FrameType) -> str:
    """Return the outermost place in a library that the program's own frame has called on the way to the model."""
    found = ""
    while caller is not None and caller is not own:
        if "unicron" not in caller.f_globals.get("__name__", "") and not caller.f_code.co_filename.startswith("<"):
            found = _place(caller)
        caller = caller.f_back
    return found
