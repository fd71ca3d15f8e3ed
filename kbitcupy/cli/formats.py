"""``kbit formats``: what is registered."""

from __future__ import annotations

import argparse
import inspect
import json
import math
import re
import textwrap
from typing import Any

from .._version import __version__
from ..backend import xp as _xp
from ..formats.base import Format, format_factory, get_format, list_formats, option_names
from ..text import Column, table, terminal_width
from .common import dumps

#: Elements for which bits per element are counted.
_SIZE = 1 << 20


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    found = [_about(name) for name in (arguments.formats or list_formats(default=None if arguments.all else True))]
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
    for about in found if arguments.formats else ():
        print(_options_text(about["name"], about["choices"]))


def _options_text(name: str, choices: list[dict[str, str]]) -> str:
    """The options of a format, each with its default, and what it may be."""
    if not choices:
        return f"\n{name} has no options"
    lines = [f"\noptions of {name}:"]
    keys = [f"  {c['name']}={c['default']}" if c["default"] else f"  {c['name']}" for c in choices]
    width = max(map(len, keys))
    for key, choice in zip(keys, choices, strict=True):
        text = ": ".join(filter(None, (choice["allowed"], choice["meaning"])))
        room = max(terminal_width() - width - 2, 40)
        first, *more = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]
        lines += [f"{key:<{width}}  {first}".rstrip(), *(f"{'':{width}}  {line}" for line in more)]
    return "\n".join(lines)


def _choices(format: Format) -> list[dict[str, str]]:
    """What a user may choose of a format: its options, as the numpydoc docstring of its class describes them."""
    factory = format_factory(format.name)
    defaults = format.spelled()
    described = _described(inspect.getdoc(type(format)) or "")
    found = []
    for name in option_names(factory):
        allowed, meaning = described.get(name, ("", ""))
        default = defaults.get(name, inspect.signature(factory).parameters[name].default)
        text = "" if default is None or default is inspect.Parameter.empty else json.dumps(default).strip('"')
        found.append({"name": name, "default": text, "allowed": allowed, "meaning": meaning})
    return found


def _described(docstring: str) -> dict[str, tuple[str, str]]:
    """Name, allowed values and description of each parameter."""
    section = re.search(r"^Parameters\n-+\n(.*?)(?:\n\S[^\n]*\n-+\n|\Z)", docstring, re.DOTALL | re.MULTILINE)
    found = {}
    for entry in re.split(r"\n(?=\S)", section[1].strip("\n") if section else ""):
        head, _, text = entry.partition("\n")
        name, _, allowed = head.partition(" : ")
        # A choice as people write it on the command line: no quotes, no marks of the docstring.
        allowed = re.sub(r"^bool$", "true, false", re.sub(r", (optional|default .*)$", "", allowed))
        found[name] = re.sub(r'[`"{}]', "", allowed), re.sub(r'[`"]', "", " ".join(text.split()))
    return found


def _about(name: str) -> dict[str, Any]:
    try:
        format = get_format(name)
    except (ValueError, TypeError) as error:
        if name not in list_formats():
            raise
        # Nothing can be said about it before its user chooses.
        unknown = dict.fromkeys(("bits", "block", "bits per element", "dtypes", "summary", "options", "planes"))
        return {"name": name, **unknown, "choices": [], "origin": f"needs an option: {error}"}
    planes = format.planes((_SIZE,))
    nbytes = sum(math.prod(plane.shape) * _xp.named_dtype(plane.dtype).itemsize for plane in planes.values())
    return {
        "name": format.name,
        "bits": format.bits,
        "block": format.block,
        "bits per element": nbytes * 8 / _SIZE,
        "dtypes": list(format.dtypes),
        "origin": format.origin,
        "summary": format.summary,
        "options": format.options(),
        "choices": _choices(format),
        "planes": list(planes),
    }


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(value)
    if value is None:
        return ""
    return f"{value:.2f}" if isinstance(value, float) else str(value)
