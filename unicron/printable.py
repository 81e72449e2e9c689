"""Text from elsewhere on its way to a terminal: what would steer it is shown instead (CWE-150)."""

import re
from reprlib import Repr

STEERING = (
    r"\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but tab and newline, and C1, of which U+009B begins a sequence as ESC [ does
    r"\u200e\u200f\u2028-\u202e\u2066-\u2069"  # the order and the breaks of lines (Trojan Source, CVE-2021-42574)
    r"\ud800-\udfff"  # halves of a pair, which no terminal's encoding has
)
"""Characters that are no text, as a regular expression has them between brackets."""

_STEERING = re.compile(f"[{STEERING}]")


def printable(text: str) -> str:
    r"""Return text in which control characters other than tab and newline stand as `\u001b`, as JSON has them."""
    return _STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def one_line(text: str) -> str:
    r"""Return text as `printable` does, with newlines as `\n`: it can't pass for several lines."""
    return printable(text).replace("\n", "\\n")


def shown(value: object) -> str:
    """Return a value from outside as Python writes it, cut where it is long; for messages that name it."""
    return _SHORT.repr(value)


MOST_LISTED = 20
"""Problems that are printed at most."""

_SHORT = Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxstring, _SHORT.maxother = 3, 4, 120, 120


def listed(problems: list[str]) -> str:
    """Return problems one below the other; of many the first, and how many more there are."""
    more = [f"... and {len(problems) - MOST_LISTED:,} more like these"] if len(problems) > MOST_LISTED else []
    return "\n".join(problems[:MOST_LISTED] + more)
