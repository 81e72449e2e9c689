"""Whole lines of a file that others still write."""

LONGEST_LINE = 64 * 1024
"""Bytes of a line that has no end; what comes after them counts as the next."""


class Lines:
    """Puts together what was read in pieces; the last line may be half there."""

    def __init__(self) -> None:
        self._rest = b""

    def whole(self, read: bytes) -> str:
        """Return the lines that are whole now, with their ends."""
        lines, end, self._rest = (self._rest + read).rpartition(b"\n")
        if len(self._rest) > LONGEST_LINE:
            lines, end, self._rest = lines + end + self._rest, b"\n", b""
        return (lines + end).decode(errors="replace")
