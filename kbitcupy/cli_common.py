"""What the commands share: options of formats, tables, text that is safe to print."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import FormatError, KbitError
from .formats.base import Format, get_format

DEFAULT_FORMAT = "kbit4"


@dataclass(frozen=True)
class Option:
    """An option of a format, as it was typed and as it was understood."""

    text: str
    key: str
    value: Any


def option(text: str) -> Option:
    """``KEY=VALUE``; the value is JSON where it can be, else text."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE, such as codebook=nf")
    try:
        return Option(text, key, json.loads(value))
    except (ValueError, RecursionError):
        return Option(text, key, value)


def split_outside_brackets(text: str) -> list[str]:
    """The parts between commas, those inside brackets left alone."""
    parts, depth = [""], 0
    for c in text:
        depth += (c == "[") - (c == "]")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return parts


def chosen_format(text: str, options: Iterable[Option]) -> Format:
    """A format with the options of the command line, and its own in brackets: ``nf4[block=32]``."""
    name, bracket, inside = text.partition("[")
    if bracket and not inside.endswith("]"):
        raise FormatError(f"format is {text!r}; options stand in brackets, such as nf4[block=32]")
    try:
        own = [option(part) for part in split_outside_brackets(inside[:-1])] if inside[:-1] else []
    except argparse.ArgumentTypeError as error:
        raise FormatError(f"format is {text!r}: {error}") from error
    try:
        return get_format(name, **{option.key: option.value for option in (*options, *own)})
    except KbitError:
        raise
    except (ValueError, TypeError) as error:  # a third party's format need not know kbitcupy's errors
        raise FormatError(f"format {name!r}: {error}") from error


def printable(text: str) -> str:
    """The text on one line, without what would control a terminal: files and their names come from anybody."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def dumps(document: Any) -> str:
    """JSON text; a number that JSON has no token for is an error."""
    return json.dumps(document, indent=1, allow_nan=False)


@dataclass(frozen=True)
class Column:
    """A column of a table: its heading, its smallest width, and where its cells stand."""

    title: str
    width: int = 0
    left: bool = False
    elastic: bool = False  # at most one: its cells lose their middle where the line is too long


def table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> str:
    """Aligned text, as wide as the terminal allows (100 characters at least)."""
    lines = [[column.title for column in columns], *([printable(cell) for cell in row] for row in rows)]
    widths = [max(column.width, *map(len, cells)) for column, *cells in zip(columns, *lines, strict=True)]
    spare = max(100, shutil.get_terminal_size((100, 24)).columns) - sum(widths) - 2 * (len(widths) - 1)
    widths = [width + min(spare, 0) if c.elastic else width for c, width in zip(columns, widths, strict=True)]

    def cell(column: Column, width: int, text: str) -> str:
        text = _shortened(text, width) if column.elastic else text
        return f"{text:<{width}}" if column.left else f"{text:>{width}}"

    return "\n".join("  ".join(map(cell, columns, widths, line)).rstrip() for line in lines)


def _shortened(text: str, room: int) -> str:
    """The text without its middle where it is too long."""
    if len(text) <= room:
        return text
    tail = max(room - 3, 2) // 2
    return f"{text[: max(room - 3, 2) - tail]}...{text[-tail:]}"
