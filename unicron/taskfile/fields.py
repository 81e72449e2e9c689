"""Reads single values of task files. YAML makes numbers, dates and truths of texts, so each value is checked."""

import math
from collections.abc import Callable
from typing import Any

import msgspec


class BadValueError(Exception):
    """A value of the wrong kind; `allowed` says which kind is right. It never leaves the readers of task files."""

    def __init__(self, allowed: str, *, value: Any = None, key: str = "") -> None:
        super().__init__(allowed)
        self.allowed, self.value, self.key = allowed, value, key


def text(value: Any) -> str:
    """Return a text."""
    if isinstance(value, str):
        return value
    raise BadValueError("must be text; put it in quotes")


def word(value: Any) -> str:
    """Return a text, or a number as it is written in commands and environments."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    return text(value)


def whole(value: Any) -> int:
    """Return a whole number."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise BadValueError("must be a whole number")


def number(value: Any) -> float:
    """Return a number; it may be a text, because YAML takes 1e12 for one."""
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
        except OverflowError:
            return math.inf
    raise BadValueError("must be a number")


def truth(value: Any) -> bool:
    """Return a yes or no."""
    if isinstance(value, bool):
        return value
    raise BadValueError("must be true or false")


def items(value: Any, shape: str) -> list[tuple[Any, Any]]:
    """Return the rows of a mapping; `shape` says what they should look like."""
    if isinstance(value, dict):
        return list(value.items())
    raise BadValueError(f"must be rows of '{shape}'")


_BY_TYPE: dict[type, Callable[[Any], Any]] = {int: whole, float: number, str: text, bool: truth}


def readers(kind: type[msgspec.Struct]) -> dict[str, Callable[[Any], Any]]:
    """Return a reader for each plain field of a record, by the field's type without its range."""
    types = {field.name: getattr(field.type, "__origin__", field.type) for field in msgspec.structs.fields(kind)}
    return {name: _BY_TYPE[each] for name, each in types.items() if each in _BY_TYPE}


def within(key: str, read: Callable[[Any], Any], value: Any) -> Any:
    """Read `value`; name `key` where it can't be."""
    try:
        return read(value)
    except BadValueError as bad:
        raise BadValueError(bad.allowed, value=value if bad.value is None else bad.value, key=key) from bad
