"""``kbit compare``: what formats cost and keep, on a file or on samples."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

from . import _xp, explore
from ._version import __version__
from .cli_common import DEFAULT_FORMAT, Column, chosen_format, dumps, table
from .errors import FileError
from .explore import Measurement
from .io.checkpoint import Checkpoint
from .io.convert import progress_bar
from .samples import DISTRIBUTIONS, SHAPE, draw


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    names = arguments.formats
    if names is None:
        every = [format.name for format in explore.default_formats()]
        names = every if arguments.file is None else [DEFAULT_FORMAT]
    chosen = {name: chosen_format(name, arguments.option) for name in names}
    device = _xp.resolve_device(arguments.device)
    tensors, nbytes = _tensors(arguments)
    rows: dict[str, list[Measurement]] = {name: [] for name in chosen}
    with progress_bar("compare", nbytes, sys.stderr.isatty()) as advance:
        for tensor, x in tensors:
            on_device = _xp.to_device(x, device)
            for name, format in chosen.items():
                rows[name].append(explore.measure(on_device, format, tensor))
            advance(x.nbytes)
    totals = {name: Measurement("total") for name in chosen}
    for name, total in totals.items():
        for row in rows[name]:
            total.add(row)
    if arguments.json:
        document = {
            "kbitcupy": __version__,
            "source": arguments.file or "samples",
            "device": device,
            "results": [
                {
                    "format": format.config(),
                    "tensors": [_json(row) for row in rows[name]],
                    "total": _json(totals[name]),
                }
                for name, format in chosen.items()
            ],
        }
        print(dumps(document))
        return
    label = " ".join([*chosen, *(option.text for option in arguments.option)]) if len(chosen) == 1 else None
    print(_table([(name, row) for name in chosen for row in (*rows[name], totals[name])], label))


def _tensors(arguments: argparse.Namespace) -> tuple[Iterator[tuple[str, Any]], int]:
    """(name, array) of what is compared, one at a time, and the bytes of all."""
    if arguments.file is None:
        return ((name, draw(name)) for name in DISTRIBUTIONS), len(DISTRIBUTIONS) * 4 * math.prod(SHAPE)
    chosen = [
        (file, name)
        for file in Checkpoint(arguments.file).files.values()
        for name in file.compressible(arguments.min_size, arguments.keep)
    ]
    if not chosen:
        raise FileError(
            f"{arguments.file} holds no tensor to compress: none is {', '.join(_xp.FLOAT_DTYPES)} with two or more "
            f"dimensions, {arguments.min_size} or more elements (--min-size) and a name that --keep does not match"
        )
    tensors = ((name, file.array(name)) for file, name in chosen)
    return tensors, sum(file.entries[name].nbytes for file, name in chosen)


def _json(row: Measurement) -> dict[str, Any]:
    """JSON values; numbers that JSON has no token for are null."""
    about = {} if row.shape is None else {"shape": list(row.shape), "dtype": row.dtype}
    numbers = {
        "sqnr_db": row.sums.sqnr_db,
        "mse": row.sums.mse,
        "max_error": row.sums.largest,
        "bits_per_element": row.bits_per_element,
    }
    return {
        "name": row.tensor,
        **about,
        **{key: value if math.isfinite(value) else None for key, value in numbers.items()},
        "bytes_before": row.nbytes_before,
        "bytes_after": row.nbytes_after,
    }


#: Columns that hold numbers, and the text of a cell.
_NUMBERS: tuple[tuple[Column, Callable[[Measurement], str]], ...] = (
    (Column("SQNR dB", 7), lambda row: f"{row.sums.sqnr_db:.2f}"),
    (Column("MSE", 7), lambda row: f"{row.sums.mse:.1e}"),
    (Column("max err", 7), lambda row: f"{row.sums.largest:.1e}"),
    (Column("bits", 5), lambda row: f"{row.bits_per_element:.2f}"),
    (Column("MB before", 9), lambda row: f"{row.nbytes_before / 1e6:.3f}"),
    (Column("MB after", 8), lambda row: f"{row.nbytes_after / 1e6:.3f}"),
)


def _table(lines: list[tuple[str, Measurement]], label: str | None) -> str:
    """`label` names the only format; None asks for a column of formats."""
    columns = [Column("format", left=True)] if label is None else []
    columns += [Column(label or "tensor", left=True, elastic=True), *(column for column, _ in _NUMBERS)]
    rows = []
    for format, row in lines:
        cells = [row.tensor, *(show(row) for _, show in _NUMBERS)]
        rows.append([format, *cells] if label is None else cells)
    return table(columns, rows)
