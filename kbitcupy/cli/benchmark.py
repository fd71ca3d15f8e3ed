"""``kbit bench``: formats and products, or the cells that are asked for."""

from __future__ import annotations

import argparse
import fnmatch
import functools
import json
import sys
from collections.abc import Callable
from typing import Any

from .. import bench
from ..backend.xp import resolve_device
from ..bench import products
from ..errors import FormatError
from ..formats.base import split_formats

# What a run has: formats, and two kinds of products.
_PARTS = ("formats", "linear", "w8a8")


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    _check(arguments)
    names = None if arguments.formats is None else split_formats(arguments.formats)
    about: dict[str, Any] = {
        "sizes": None if arguments.sizes is None else [bench.parse_size(text) for text in arguments.sizes],
        "dtypes": arguments.dtypes,
        "device": arguments.device,
        "quick": arguments.quick,
        "peers": arguments.peers,
        "all": arguments.all,
    }
    cells = _cells(arguments, names, about)
    if arguments.list_cells:
        print(*(name for part in cells.values() for name in part), sep="\n")
        return
    if not any(cells.values()):
        raise FormatError(f"no cell is named {arguments.cells!r}: kbit bench --list-cells prints their names")
    patterns = None if arguments.cells is None else arguments.cells.split(",")
    selection = bench.Selection(patterns, arguments.limit, functools.partial(print, file=sys.stderr, flush=True))
    shared = {"device": arguments.device, "quick": arguments.quick, "peers": arguments.peers, "selection": selection}
    runs: dict[str, Callable[[], Any]] = {
        "formats": lambda: bench.run(names, **about, selection=selection),
        "linear": lambda: products.run_linear(names=names, **shared),
        "w8a8": lambda: products.run_w8a8(**shared),
    }
    reports = {part: runs[part]() for part, found in cells.items() if found}
    for note in dict.fromkeys(note for report in reports.values() for note in report.notes):
        print(f"kbit: note: {note}", file=sys.stderr)
    if arguments.json and len(reports) > 1:
        print(json.dumps({part: json.loads(report.json()) for part, report in reports.items()}, indent=1))
        return
    for number, report in enumerate(reports.values()):
        text = report.json() if arguments.json else report.markdown() if arguments.markdown else report.text()
        print(*([""] if number else []), text, sep="\n")


def _check(arguments: argparse.Namespace) -> None:
    if arguments.w8a8 and (arguments.formats or arguments.sizes or arguments.dtypes):
        raise FormatError("--w8a8 has shapes of its own: leave --formats, --sizes and --dtypes away")
    if arguments.linear and (arguments.sizes or arguments.dtypes):
        raise FormatError("--linear has shapes of its own: leave --sizes and --dtypes away")


def _cells(arguments: argparse.Namespace, names: list[str] | None, about: dict[str, Any]) -> dict[str, list[str]]:
    """The names of the cells that are asked for, by part."""
    chosen = [part for part in _PARTS[1:] if getattr(arguments, part)] or ["formats"]
    if chosen == ["formats"] and (arguments.cells is not None or arguments.list_cells):
        chosen = list(_PARTS)
    found = {
        "formats": bench.list_cells(names, **about) if "formats" in chosen else [],
        **products.list_cells(names, quick=arguments.quick),
    }
    patterns = ["*"] if arguments.cells is None else arguments.cells.split(",")
    wanted = {
        part: [name for name in found[part] if any(fnmatch.fnmatchcase(name, text) for text in patterns)]
        for part in chosen
    }
    if wanted.get("formats") and not arguments.device.startswith("cuda") and resolve_device(arguments.device) == "cpu":
        return {"formats": wanted["formats"]}  # products are for a GPU
    return wanted
