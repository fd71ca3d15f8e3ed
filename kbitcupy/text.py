"""Tables and names as text, for terminals and documents."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


def printable(text: str) -> str:
    """The text on one line, without what would control a terminal: files and their names come from anybody."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


# What an elastic column keeps at least, where its cells are that long.
_ELASTIC = 16


@dataclass(frozen=True)
class Column:
    """A column of a table: its heading (of one or more lines), its smallest width, and where its cells stand."""

    title: str
    width: int = 0
    left: bool = False
    elastic: bool = False  # its cells lose their middle where the line is too long

    def measure(self, cells: Iterable[str]) -> int:
        """The width that shows every cell whole."""
        return max(self.width, *map(len, self.title.splitlines() or [""]), *map(len, cells))


def terminal_width() -> int:
    """Columns of the terminal; 100 where there is none."""
    return shutil.get_terminal_size((100, 24)).columns


def table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> str:
    """Aligned text, as wide as the terminal allows; wider where the elastic columns cannot give more."""
    lines = [[printable(cell) for cell in row] for row in rows]
    widths = [column.measure(line[i] for line in lines) for i, column in enumerate(columns)]
    excess = sum(widths) + 2 * (len(widths) - 1) - terminal_width()
    elastic = [i for i, column in enumerate(columns) if column.elastic and widths[i] > _ELASTIC]
    while excess > 0 and elastic:
        widest = max(elastic, key=widths.__getitem__)
        if widths[widest] <= _ELASTIC:
            break
        widths[widest] -= 1
        excess -= 1
    headings = [column.title.splitlines() or [""] for column in columns]
    deep = max(map(len, headings))
    top = zip(*([""] * (deep - len(heading)) + heading for heading in headings), strict=True)

    def cell(column: Column, width: int, text: str) -> str:
        text = shortened(text, width) if column.elastic else text
        return f"{text:<{width}}" if column.left else f"{text:>{width}}"

    return "\n".join("  ".join(map(cell, columns, widths, line)).rstrip() for line in (*top, *lines))


def tables(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns go on below where the terminal is too narrow; each part begins with the first column."""
    room = terminal_width() - min(columns[0].measure(printable(row[0]) for row in rows), 2 * _ELASTIC)
    parts: list[list[int]] = [[]]
    left = room
    for i in range(1, len(columns)):
        width = columns[i].measure(row[i] for row in rows) + 2
        if width > left and parts[-1]:
            parts.append([])
            left = room
        parts[-1].append(i)
        left -= width
    return "\n\n".join(
        table([columns[i] for i in (0, *part)], [[r[i] for i in (0, *part)] for r in rows]) for part in parts
    )


def shortened(text: str, room: int) -> str:
    """The text without its middle where it is too long."""
    if len(text) <= room:
        return text
    tail = max(room - 3, 2) // 2
    return f"{text[: max(room - 3, 2) - tail]}...{text[-tail:]}"


def markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table of a document; the first row is its heading.

    Examples
    --------
    >>> markdown_table([["format", "bits"], ["kbit4", "4.25"]])
    ['| format | bits |', '|---|---|', '| kbit4 | 4.25 |']
    """
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]
