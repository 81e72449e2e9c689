"""Lists of nodes as Slurm writes them: `n[01-03,7],gpu2`."""

import re

from unicron.errors import InvalidInputError

MOST_NODES = 100_000
"""Names that one list may stand for."""

_PART = re.compile(r"[^\[\],]*(?:\[[^\[\]]*\][^\[\],]*)*")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


def expand(text: str) -> list[str]:
    """Return the names that a list of nodes stands for, in its order.

    Args:
        text: names with commas between; numbers in brackets are lists and ranges, and keep their leading zeros.

    Raises:
        InvalidInputError: it is no such list, or stands for more than `MOST_NODES`.
    """
    found: list[str] = []
    for part in _parts(text):
        found += _names(part, text, MOST_NODES - len(found))
    return found


def _parts(text: str) -> list[str]:
    """Split a list at the commas that are outside of brackets."""
    parts, at = [], 0
    while at <= len(text):
        match = _PART.match(text, at)
        end = match.end() if match else at
        if end < len(text) and text[end] != ",":
            raise InvalidInputError(f"list of nodes {text!r}: the bracket at character {end + 1} has no partner")
        parts.append(text[at:end])
        at = end + 1
    if not all(parts) or any(character.isspace() for character in text):
        raise InvalidInputError(f"list of nodes {text!r}: expected names with commas between, such as n[01-03,7],gpu2")
    return parts


def _names(part: str, text: str, most: int) -> list[str]:
    """Return the names that one part stands for: each pair of brackets multiplies them."""
    match = _BRACKETS.search(part)
    if match is None:
        return [part]
    numbers = _numbers(match[1], text, most)
    rests = _names(part[match.end() :], text, most) if match.end() < len(part) else [""]
    if len(numbers) * len(rests) > most:
        raise _too_many(text)
    return [f"{part[: match.start()]}{number}{rest}" for number in numbers for rest in rests]


def _numbers(inside: str, text: str, most: int) -> list[str]:
    found: list[str] = []
    for each in inside.split(","):
        match = _RANGE.fullmatch(each)
        first, last = (match[1], match[2] or match[1]) if match else ("", "")
        if match is None or int(last) < int(first):
            raise InvalidInputError(f"list of nodes {text!r}: {each!r} is no number and no range such as 01-03")
        if int(last) - int(first) >= most - len(found):
            raise _too_many(text)
        found += [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
    return found


def _too_many(text: str) -> InvalidInputError:
    return InvalidInputError(f"list of nodes {text[:60]!r}: stands for more than {MOST_NODES} nodes")
