"""Regular expressions of users, by RE2: a line takes time in proportion to its length, whatever the expression is."""

import math
from typing import Any

from unicron.errors import InvalidInputError

LONGEST = 300
"""Characters of an expression."""

MEMORY = 1 << 20
"""Bytes that RE2 may spend on an expression."""


def compiled(pattern: str) -> Any:
    """Return a compiled expression of RE2.

    Raises:
        InvalidInputError: it is none, or too large, or captures more than one thing; says how to mend it.
    """
    import re2  # noqa: PLC0415 most commands and tasks have no need of it

    if not 0 < len(pattern) <= LONGEST:
        raise InvalidInputError(f"must be a regular expression of 1 to {LONGEST} characters")
    options = re2.Options()
    options.log_errors, options.max_mem = False, MEMORY
    try:
        found = re2.compile(pattern, options)
        groups = found.groups
    except (re2.error, UnicodeError) as error:
        raise InvalidInputError(
            f"is no regular expression of RE2 ({_text(error)}): mend it; RE2 has no (?=...), (?!...) and \\1"
        ) from error
    if groups > 1:
        raise InvalidInputError(f"captures {groups} things: capture the number alone, and group others with (?:...)")
    return found


def is_number(text: str) -> bool:
    """Return whether a text is a finite number, as logs write them: 1,234.5 and 3.2e-4, too."""
    try:
        return math.isfinite(float(text.replace(",", "")))
    except ValueError:
        return False


def _text(error: Exception) -> str:
    first = error.args[0] if error.args else error
    return first.decode(errors="replace") if isinstance(first, bytes) else str(first)
