"""Types with the ranges of message fields: decoding a message or a stored state checks them.

They are wide. What an honest sender can say at all is in range; the rest would overflow a sum, fill a memory, or leave
a folder. Where a value is allowed but contradicts what is known, a service's doubts say so (`unicron.service.core`).
"""

import re
from typing import Annotated, Any

from msgspec import Meta

from unicron.printable import STEERING, shown

MOST_NUMBER = 10**9
"""Iterations, epochs, searches, plans: what is counted one by one."""

MOST_WHOLE = 2**53
"""Whole numbers that a double still holds exactly, as readers in other languages use."""

MOST_SECONDS = 10.0**9
"""Thirty years."""

SHORTEST_S = 1e-6
"""No iteration takes less, so that a division by it gives a usable number."""

LONGEST_TEXT = 2**23
"""Characters of a text for people."""

Number = Annotated[int, Meta(ge=-1, le=MOST_NUMBER)]
"""Of an iteration, an epoch, a slot; -1 where there is none."""

Count = Annotated[int, Meta(ge=0, le=MOST_NUMBER)]
"""How many."""

Whole = Annotated[int, Meta(ge=-MOST_WHOLE, le=MOST_WHOLE)]
"""A whole number of any meaning."""

Size = Annotated[int, Meta(ge=0, le=MOST_WHOLE)]
"""In bytes, or a number that the bus gives out."""

Seconds = Annotated[float, Meta(ge=0, le=MOST_SECONDS)]
"""A duration: finite."""

Moment = Annotated[float, Meta(ge=0, le=10.0**11)]
"""Unix seconds."""

Stamp = Annotated[float, Meta(ge=0, le=10.0**11, description="an identity")]
"""Unix seconds that stay what they are when a clock is set: they tell one thing from another."""

Amount = Annotated[float, Meta(ge=0, le=10.0**100)]
"""Something finite that is not negative, such as FLOP/s."""

Name = Annotated[str, Meta(max_length=128, pattern=r"^[A-Za-z0-9_-]*\Z")]
"""Of a task, a node or a worker; it becomes part of subjects and of paths."""

Label = Annotated[str, Meta(max_length=4096)]
"""An address, a path, an id: one line."""

Text = Annotated[str, Meta(max_length=LONGEST_TEXT)]
"""For a person."""

LONGEST_WHO = 256

Who = Annotated[str, Meta(max_length=LONGEST_WHO, pattern=rf"^[^\t\n{STEERING}]*\Z")]
"""Whom a person takes somebody for: any signs that can be shown in one line."""

Few = Meta(max_length=10_000)
"""Things of one node, or lines of a text."""

Many = Meta(max_length=1_000_000)
"""Things of one task."""

_STEP = re.compile(r"\[(\d+)\]|\[\.\.\.\]|\.([A-Za-z_]\w*)")


def explained(error: Exception, plain: Any) -> str:
    """Return what msgspec says about a field, with the value that it found there.

    Args:
        error: names the field as a path, such as `$.plan.shares[0].waf`.
        plain: the message as maps and lists.
    """
    text = str(error)
    path = re.search(r" - at `\$(.*)`$", text)
    value = plain
    for step in _STEP.finditer(path[1]) if path else ():
        try:
            value = value[int(step[1])] if step[1] else value[step[2]] if step[2] else next(iter(value.values()))
        except (LookupError, TypeError, AttributeError, StopIteration):
            return text
    if not path or "[...]" in path[1] or isinstance(value, dict | list):
        return text
    return f"{text}, which is {shown(value)}"
