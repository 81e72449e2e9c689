"""What is said in the text of an exception: the messages of a whole traceback, without what surrounds them.

Python, torch and NCCL print the way to an error around it, and advice that is the same for all errors. Words of those
say nothing about a cause: a line of source that raises ConnectionResetError, or torch's hint at device-side assertions
behind each error of CUDA.
"""

import re

_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
"""Of terminals, as loggers colour with."""

_AUTHORS = re.compile(
    r"^(?:\[(?:default)?[Rr]ank ?\d+\]: ?|\[\d+,\d+\]<std\w+>: ?|\([^()\n]*\bpid=\d+[^()\n]*\) |\d{1,5}: |[ ]*\| )+",
    re.MULTILINE,
)
"""Who writes: torchrun, mpirun, Ray and srun set it before each line; Python a bar before those of a group."""

_FRAME = re.compile(
    r'^[ ]*(?:File "[^"\n]*", line \d+.*|\.\.\.)\n?(?:^(?:    .*|[ ]{0,3}[~^]+)(?:\n|\Z))*', re.MULTILINE
)
"""A frame of Python, with the lines of its source; or the gap that `shortened` leaves, with what it leaves of one."""

_CUT_FRAME = re.compile(r"\A(?:^(?:[ ][ ].*|[ ]?[~^]+)\n)++(?=[ ]*File \"|\S)", re.MULTILINE)
"""The end of a frame, where the text begins in the middle of one."""

_NATIVE = re.compile(
    r"^[ ]*(?:frame )?#\d+:? .*$|^Exception raised from .*$|^C\+\+ CapturedTraceback:$|^[ ]*\[Previous line repeated.*$"
    r"|^(?:Current thread|Thread) 0x.*\(most recent call first\):$",
    re.MULTILINE,
)
"""Frames of C++, what stands above them, and what faulthandler writes."""

_NEXT = re.compile(
    r"^[ ]*(?:Original )?Traceback \(most recent call last\):[ ]*$"
    r"|^The above exception was the direct cause of the following exception:$"
    r"|^During handling of the above exception, another exception occurred:$",
    re.MULTILINE,
)

_CLASS = re.compile(
    r"(?:\A|^(?=[\w.]*(?:Error|Exception|[Tt]imeout|Interrupt|Died)\b))([A-Za-z_][\w.]*)(?:\(\w*\))?(?=:|$)",
    re.MULTILINE,
)
"""The class of an exception: anything that a message begins with, but what ends like one in a later line."""


_RAISED = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Warning|Interrupt|Exit): ")

LONGEST_BRIEF = 300
"""Characters of an exception that is told in one line."""

_BEGINS, _ENDS = re.compile(r"(?<!\w)'(?=\S)"), re.compile(r"(?<=\S)'(?!\w)")
"""Quotation marks that may be an apostrophe, too."""


def shortened(text: str, most: int) -> str:
    """Return whole lines from both ends of a traceback: its first exception says what happened, its last one where."""
    if len(text) <= most:
        return text
    begin, end = text[: most // 2].rpartition("\n")[0], text[-most // 2 :].partition("\n")[2]
    return f"{begin}\n  ...\n{end}"


def cut(text: str, most: int) -> str:
    """Return text of at most so many characters; where it is cut that shows, and a quotation in it is closed."""
    room = 0
    while len(text) > most:
        left = text[: most - 1 - room]
        marks = [mark for mark in '"`' if left.count(mark) % 2]
        marks += ["'"] * (len(_BEGINS.findall(left)) > len(_ENDS.findall(left)))
        if len(marks) <= room:
            return f"{left}…{''.join(marks)}"
        room += 1
    return text


def messages(text: str, boilerplate: list[re.Pattern[str]]) -> list[str]:
    """Return what exceptions in a text say, each by itself: of a chain the first cause first.

    Args:
        text: "CLASS: MESSAGE", a traceback with the chain of exceptions, or the last lines that a process wrote.
        boilerplate: what libraries write whatever the error is.

    Returns:
        Messages without frames and boilerplate. What stands before the first traceback is the last one, unless the text
        begins in the middle of one.
    """
    text = _AUTHORS.sub("", _ESCAPES.sub("", text))
    begins = _NEXT.search(text)
    cut = _CUT_FRAME.match(text) or _FRAME.search(text, 0, begins.start() if begins else len(text))
    text = _NATIVE.sub("", _FRAME.sub("", _CUT_FRAME.sub("", text)))
    for pattern in boilerplate:
        text = pattern.sub("", text)
    before, *raised = _NEXT.split(text)
    ordered = [before, *raised] if cut else [*raised, before]
    return [said.removeprefix("builtins.") for part in ordered if (said := part.strip())]


def brief(error: BaseException) -> str:
    """Return what has raised an exception, in one line: of one that repeats a worker's, what that has said."""
    kind = type(error).__name__
    said = messages(str(error), [])
    line = said[0].strip().partition("\n")[0] if said else ""
    line = cut(line, LONGEST_BRIEF)
    return line if _RAISED.match(line) else f"{kind}: {line}" if line else kind


def classes_in(message: str) -> list[str]:
    """Return the classes of the exceptions that a message begins with, or that other lines of it begin with."""
    return _CLASS.findall(message)
