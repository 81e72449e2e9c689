"""Brings a script that trains with DistributedDataParallel to a Session: text in, text and remarks out."""

import ast
import difflib
from dataclasses import dataclass

from unicron_convert.checks import check_data, check_microbatches, remarks
from unicron_convert.rewrite import Rewrite
from unicron_convert.script import Script
from unicron_convert.shape import find
from unicron_convert.source import Source, UnusualError

__all__ = ["Conversion", "UnusualError", "convert", "difference"]


@dataclass(frozen=True)
class Conversion:
    """What became of a script.

    Attributes:
        text: of it, with a Session.
        remarks: line of the script it was, and what has to be looked at there.
    """

    text: str
    remarks: list[tuple[int, str]]


def convert(text: str, ranks: int = 1) -> Conversion:
    """Bring a script to a Session.

    Args:
        text: of it.
        ranks: that it was started with.

    Raises:
        SyntaxError: it is no Python.
        UnusualError: it is not of the usual shape; it says where.
    """
    source = Source(text)
    shape = find(source)
    script = Script(source, shape, ranks)
    check_microbatches(source, shape, Rewrite(script).run())
    check_data(source, shape)
    result = source.result()
    try:
        ast.parse(result)
    except SyntaxError as error:
        raise UnusualError(shape.outer, f"this loop can't be taken apart line by line: {error}") from error
    found = {*script.remarks, *remarks(source, shape)}
    return Conversion(result, sorted(found))


def difference(before: str, after: str, name: str) -> str:
    """Return a unified diff of a file, for `patch`."""
    lines = (text.split("\n") for text in (before, after))
    old, new = ([f"{each}\n" for each in found[:-1]] + [found[-1]] * (found[-1] != "") for found in lines)
    parts = difflib.unified_diff(old, new, name, name)
    return "".join(each if each.endswith("\n") else f"{each}\n\\ No newline at end of file\n" for each in parts)
