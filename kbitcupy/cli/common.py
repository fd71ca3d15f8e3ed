"""What the commands share: options of formats, and JSON."""

from __future__ import annotations

import argparse
import json
import math
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import FormatError, KbitError
from ..formats.base import Choice, parse_format, resolve
from ..io.atomic import replacing
from ..text import terminal_width

DEFAULT_FORMAT = "kbit4"


@dataclass(frozen=True)
class Option:
    """An option of a format, as it was typed."""

    text: str


def option(text: str) -> Option:
    """``KEY=VALUE``, to be read as in ``format:KEY=VALUE``."""
    key, equals, _ = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE, such as codebook=nf")
    return Option(text)


def chosen_format(text: str, options: Iterable[Option]) -> Choice:
    """A format with the options of the command line, and its own, which come first: ``nf4:block=32``; and what calls of
    `quantize` bring beside it, such as a codebook of one's own.
    """
    name, own = parse_format(text)
    chosen: dict[str, Any] = {}
    for option in options:
        chosen |= parse_format(f"{name}:{option.text}")[1]
    try:
        return resolve(name, **{**chosen, **own})
    except KbitError:
        raise
    except (ValueError, TypeError) as error:  # a third party's format need not know kbitcupy's errors
        raise FormatError(f"format {name!r}: {error}") from error


def dumps(document: Any) -> str:
    """JSON text; a number that JSON has no token for is an error."""
    return json.dumps(document, indent=1, allow_nan=False)


def finite(value: Any) -> Any:
    """JSON values of a file, with null for what Python reads as NaN or an infinity, which JSON has no token for."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def wrapped(*texts: str) -> list[str]:
    """Texts in lines that the terminal has room for."""
    width = max(terminal_width(), 40)
    how: dict[str, Any] = {"subsequent_indent": "  ", "break_long_words": False, "break_on_hyphens": False}
    return [line for text in texts for line in textwrap.wrap(text, width, **how)]


def write(path: Path, data: bytes, force: bool) -> None:
    """Write a file beside the one that is wanted, and rename it."""
    with replacing(path, len(data), force) as file:
        file.write(data)
