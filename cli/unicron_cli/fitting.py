"""Tables that fit a terminal: what is less important goes first, and nothing that is shown is cut."""

from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

GAP = 2
"""Columns between two columns."""

LEAST_TEXT = 30
"""Columns that a sentence needs beside the others; with fewer it stands below its row."""

INDENT = 4
"""Columns by which it is indented there."""


class FittingTable:
    """A table of which only as many columns are shown as there is room for.

    Args:
        heads: names of the columns; the last one has sentences, which are wrapped.
        goes: those that may be left out, the first one first.
    """

    def __init__(self, heads: Sequence[str], goes: Sequence[str]) -> None:
        self._heads, self._goes = list(heads), list(goes)
        self._rows: list[list[Text]] = []

    def add_row(self, *cells: Text | str) -> None:
        """Add a row."""
        self._rows.append([cell if isinstance(cell, Text) else Text(cell) for cell in cells])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield its lines for a terminal of this width."""
        columns = [[Text(head, "bold"), *cells] for head, cells in zip(self._heads, self._cells(), strict=True)]
        texts = columns.pop()
        widths = [max(cell.cell_len for cell in column) for column in columns]
        wide = max(text.cell_len for text in texts)
        word = max((cell_len(word) for text in texts for word in text.plain.split()), default=0)
        least = min(wide, max(LEAST_TEXT, word))
        shown = self.shown(widths, least, options.max_width)
        room = options.max_width - sum(widths[each] + GAP for each in shown)
        beside = room >= least
        for row, text in enumerate(texts):
            line = Text()
            for each in shown:
                line.append_text(columns[each][row])
                line.append(" " * (widths[each] + GAP - columns[each][row].cell_len))
            indent = line.cell_len if beside else INDENT
            width = max(LEAST_TEXT // 2, options.max_width - indent)
            wrapped: list[Text] = list(text.wrap(console, width)) if text else []
            for part in wrapped:
                part.rstrip()
            if beside and wrapped:
                line.append_text(wrapped.pop(0))
            line.rstrip()
            yield line
            if row or beside:  # a heading of its own would stand over nothing
                yield from (Text(" " * indent).append_text(part) for part in wrapped)

    def _cells(self) -> list[list[Text]]:
        return [[row[each] for row in self._rows] for each in range(len(self._heads))]

    def shown(self, widths: Sequence[int], text: int, width: int) -> list[int]:
        """Return which columns are shown in so many columns of a terminal beside `text`, or with that below them."""
        left = list(range(len(widths)))
        for name in self._goes:
            if sum(widths[each] + GAP for each in left) + text <= width:
                break
            if name in self._heads:
                left.remove(self._heads.index(name))
        return left
