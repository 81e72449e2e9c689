"""Reads torch's flight recorder: which collectives of a process are under way, and which was completed last.

The recorder keeps the newest 2,000 of each process (https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html).
"""

import math
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from unicron.contracts.ranges import Label, Size
from unicron.errors import InvalidInputError
from unicron.printable import one_line

MOST_LINES = 8
"""How many of those under way are reported, the first."""

INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Folders of libraries, whichever environment they are of: one may use what is installed in another."""

_FOREIGN = (sysconfig.get_path("stdlib"), str(Path(__file__).parent), "<")


def is_of_library(filename: str) -> bool:
    """Return whether a file is no script's: it is of Python, of this package, or installed."""
    return filename.startswith(_FOREIGN) or not INSTALLED.isdisjoint(Path(filename).parts)


class Frame(msgspec.Struct, frozen=True):
    """A call, as the recorder keeps it."""

    filename: Label
    line: Size


Frames = Annotated[list[Frame], Meta(max_length=10_000)]
Tensors = Annotated[list[Annotated[list[Size], Meta(max_length=64)]], Meta(max_length=10_000)]
Types = Annotated[list[Label], Meta(max_length=10_000)]


class FlightEntry(msgspec.Struct, frozen=True):
    """An entry of the recorder. Fields that may be long are decoded only where they are reported.

    Attributes:
        process_group: name and description of its group.
        retired: the recorder waits for it no more; gloo's are never said to be completed.
        thread_id: that began it, as `threading.get_ident` has it.
        frames: the calls that it was begun in, innermost first; torch's JSON has none.
    """

    record_id: Size
    process_group: tuple[Label, Label]
    profiling_name: Label
    collective_seq_id: Size
    p2p_seq_id: Size
    is_p2p: bool
    state: Literal["scheduled", "started", "completed"]
    retired: bool
    input_sizes: Any
    input_dtypes: Any
    thread_id: Label = ""
    frames: Any = ()

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self.state == "completed" or (self.retired and self.profiling_name.startswith("gloo:"))

    def __str__(self) -> str:
        """Return its operation with its number in its group."""
        number = self.p2p_seq_id if self.is_p2p else self.collective_seq_id
        return f"{self.profiling_name.rpartition(':')[2]} #{number}"


class Recording(msgspec.Struct, frozen=True):
    """All entries, in the order in which they were begun."""

    entries: Annotated[list[FlightEntry], Meta(max_length=200_000)] = []


def parse(recorded: bytes) -> Recording:
    """Return torch's recording as JSON.

    Raises:
        InvalidInputError: it is something else.
    """
    try:
        return msgspec.json.decode(recorded, type=Recording)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"no recording of collectives: {error}") from error


def convert(plain: Any, kind: Any = Recording) -> Any:
    """Return what torch has written as maps and lists.

    Raises:
        InvalidInputError: it is something else.
    """
    try:
        return msgspec.convert(plain, kind)
    except msgspec.MsgspecError as error:
        raise InvalidInputError(f"no recording of collectives: {error}") from error


def describe(recording: Recording, begun: Callable[[FlightEntry], Iterable[Frame]] | None = None) -> list[str]:
    """Return a line for each collective that is under way, the first one first; one for the last, where there is none.

    Args:
        recording: of a process.
        begun: returns the calls that a collective was begun in, where the recording does not have them.

    Raises:
        InvalidInputError: a field that would be reported is out of range.
    """
    last: dict[tuple[str, str], FlightEntry] = {each.process_group: each for each in recording.entries if each.done}
    waiting = [each for each in recording.entries if not each.done]
    if not waiting:
        return [one_line(f"none; the last that was done: {each}{_group_text(each)}") for each in [*last.values()][-1:]]
    lines = []
    for each in waiting[:MOST_LINES]:
        frames = begun(each) if begun else convert(each.frames, Frames)
        before = last.get(each.process_group)
        done = f"; the last of them that was done: {before}" if before else ""
        lines.append(one_line(f"{each}{_group_text(each)}, {_size(each)}, {each.state}{_script_line(frames)}{done}"))
    return lines + ([f"and {len(waiting) - MOST_LINES} more"] if len(waiting) > MOST_LINES else [])


def _group_text(collective: FlightEntry) -> str:
    """Return its group in words, where that has a name: those of sessions have none."""
    name, description = collective.process_group
    return f" of {description or name}" if description or name else ""


def _size(collective: FlightEntry) -> str:
    tensors, types = convert(collective.input_sizes, Tensors), convert(collective.input_dtypes, Types)
    return f"{sum(math.prod(each) for each in tensors)} x {'+'.join(sorted({*types})) or 'nothing'}"


def _script_line(frames: Iterable[Frame]) -> str:
    """Return the innermost line of the script."""
    found = next((each for each in frames if not is_of_library(each.filename)), None)
    return f", {Path(found.filename).name}:{found.line}" if found else ""
