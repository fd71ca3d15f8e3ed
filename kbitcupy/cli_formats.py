"""``kbit formats``: what is registered."""

from __future__ import annotations

import argparse
import math
from typing import Any

from . import _xp
from ._version import __version__
from .cli_common import Column, dumps, table
from .formats.base import formats, get_format

#: Elements for which bits per element are counted.
_SIZE = 1 << 20


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    found = [_about(name) for name in (arguments.formats or formats())]
    if arguments.json:
        print(dumps({"kbitcupy": __version__, "formats": found}))
        return
    columns = [
        Column("name", left=True),
        Column("bits"),
        Column("block"),
        Column("bits per element"),
        Column("dtypes", left=True),
        Column("origin", left=True),
    ]
    print(table(columns, [[_cell(about[column.title]) for column in columns] for about in found]))


def _about(name: str) -> dict[str, Any]:
    try:
        format = get_format(name)
    except (ValueError, TypeError) as error:
        if name not in formats():
            raise
        # Nothing can be said about it before its user chooses.
        unknown = dict.fromkeys(("bits", "block", "bits per element", "dtypes", "summary", "options", "planes"))
        return {"name": name, **unknown, "origin": f"needs an option: {error}"}
    planes = format.planes((_SIZE,))
    nbytes = sum(math.prod(plane.shape) * _xp.named_dtype(plane.dtype).itemsize for plane in planes.values())
    return {
        "name": name,
        "bits": format.bits,
        "block": format.block,
        "bits per element": nbytes * 8 / _SIZE,
        "dtypes": list(format.dtypes),
        "origin": format.origin,
        "summary": format.summary,
        "options": format.options(),
        "planes": list(planes),
    }


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(value)
    if value is None:
        return ""
    return f"{value:.2f}" if isinstance(value, float) else str(value)
