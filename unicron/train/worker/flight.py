"""Returns the collectives of this process that are under way, from torch's flight recorder."""

import sys
from collections.abc import Iterator

from unicron.errors import InvalidInputError
from unicron.flight import FlightEntry, Frame, describe, parse
from unicron.train.worker.telling import tell

RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""Of NCCL and of gloo; a build of torch may lack either."""


def collectives() -> list[str]:
    """Return a line for each collective of this process that is under way; from any thread.

    Torch can say itself where each was begun, but imports its compiler for that, which takes seconds.
    """
    torch, lines = sys.modules.get("torch._C._distributed_c10d"), list[str]()
    for name in RECORDERS:
        if recorded := getattr(torch, name, None):
            try:
                lines += describe(parse(recorded()), _begun_in)
            except (InvalidInputError, RuntimeError, ValueError) as error:
                tell(f"unicron: {name}: {error}")
    return lines


def _begun_in(collective: FlightEntry) -> Iterator[Frame]:
    """Yield where the thread is now that has begun a collective, innermost call first: mostly it waits for it."""
    frame = sys._current_frames().get(int(collective.thread_id or 0))  # noqa: SLF001 the only way to see other threads
    while frame is not None:
        yield Frame(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
