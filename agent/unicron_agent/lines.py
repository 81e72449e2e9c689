"""Cuts a growing file into whole lines."""

LONGEST_LINE = 64 * 1024
"""Bytes of a line that has no end; what comes after them counts as the next."""


class Lines:
    """Joins pieces that were read, and keeps an unfinished last line for the next one."""

    def __init__(self) -> None:
        self._rest = b""

    def add(self, read: bytes) -> str:
        """Add a piece; return the lines that are whole now, with their ends."""
        lines, end, self._rest = (self._rest + read).rpartition(b"\n")
        if len(self._rest) > LONGEST_LINE:
            lines, end, self._rest = lines + end + self._rest, b"\n", b""
        return (lines + end).decode(errors="replace")
