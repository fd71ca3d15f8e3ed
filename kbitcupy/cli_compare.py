"""``kbit compare``: what formats cost and keep, on a file or on samples."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from . import _xp, metrics
from ._version import __version__
from .cli_common import DEFAULT_FORMAT, Column, chosen_format, dumps, table
from .errors import FileError, FormatError
from .formats.base import Format, formats
from .io.safetensors import SourceFile, with_progress
from .ops import dequantize, quantize
from .samples import DISTRIBUTIONS, draw


@dataclass
class Row:
    """What one format made of one tensor, or of several together."""

    name: str
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    sums: metrics.Sums = field(default_factory=metrics.Sums)
    nbytes_before: int = 0
    nbytes_after: int = 0

    @property
    def bits_per_element(self) -> float:
        """Bits of all planes for each element."""
        return self.nbytes_after * 8 / self.sums.count if self.sums.count else math.nan

    def add(self, other: Row) -> None:
        """Count `other` in."""
        self.sums += other.sums
        self.nbytes_before += other.nbytes_before
        self.nbytes_after += other.nbytes_after

    def as_json(self) -> dict[str, Any]:
        """JSON values; numbers that JSON has no token for are null."""
        numbers = {
            "sqnr_db": self.sums.sqnr_db,
            "mse": self.sums.mse,
            "max_error": self.sums.largest,
            "bits_per_element": self.bits_per_element,
        }
        about = {} if self.shape is None else {"shape": list(self.shape), "dtype": self.dtype}
        return {
            "name": self.name,
            **about,
            **{key: value if math.isfinite(value) else None for key, value in numbers.items()},
            "bytes_before": self.nbytes_before,
            "bytes_after": self.nbytes_after,
        }


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    names = arguments.formats
    if names is None:
        names = formats() if arguments.file is None else [DEFAULT_FORMAT]
    chosen = {name: chosen_format(name, arguments.option) for name in names}
    device = _xp.resolve_device(arguments.device)
    tensors, count = _tensors(arguments)
    rows: dict[str, list[Row]] = {name: [] for name in chosen}
    for tensor, x in with_progress(tensors, count, "compare", sys.stderr.isatty()):
        on_device = _xp.to_device(x, device)
        for name, format in chosen.items():
            rows[name].append(_measure(tensor, on_device, format))
    totals = {name: Row("total") for name in chosen}
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
                    "tensors": [row.as_json() for row in rows[name]],
                    "total": totals[name].as_json(),
                }
                for name, format in chosen.items()
            ],
        }
        print(dumps(document))
        return
    label = " ".join([*chosen, *(option.text for option in arguments.option)]) if len(chosen) == 1 else None
    print(_table([(name, row) for name in chosen for row in (*rows[name], totals[name])], label))


def _tensors(arguments: argparse.Namespace) -> tuple[Iterator[tuple[str, Any]], int]:
    """(name, array) of what is compared, one at a time, and how many there are."""
    if arguments.file is None:
        return ((name, draw(name)) for name in DISTRIBUTIONS), len(DISTRIBUTIONS)
    source = SourceFile(arguments.file)
    names = source.compressible(arguments.min_size, arguments.keep)
    if not names:
        raise FileError(
            f"{arguments.file} holds no tensor to compress: none is {', '.join(_xp.FLOAT_DTYPES)} with two or more "
            f"dimensions, {arguments.min_size} or more elements (--min-size) and a name that --keep does not match"
        )
    return ((name, source.array(name)) for name in names), len(names)


def _measure(name: str, x: Any, format: Format) -> Row:
    try:
        q = quantize(x, format)
        sums = metrics.sums(x, dequantize(q))
    except (ValueError, TypeError) as error:
        raise FormatError(f"tensor {name!r} with {format}: {error}") from error
    return Row(name, x.shape, x.dtype.name, sums, x.nbytes, q.nbytes)


#: Columns that hold numbers, and the text of a cell.
_NUMBERS: tuple[tuple[Column, Callable[[Row], str]], ...] = (
    (Column("SQNR dB", 7), lambda row: f"{row.sums.sqnr_db:.2f}"),
    (Column("MSE", 7), lambda row: f"{row.sums.mse:.1e}"),
    (Column("max err", 7), lambda row: f"{row.sums.largest:.1e}"),
    (Column("bits", 5), lambda row: f"{row.bits_per_element:.2f}"),
    (Column("MB before", 9), lambda row: f"{row.nbytes_before / 1e6:.3f}"),
    (Column("MB after", 8), lambda row: f"{row.nbytes_after / 1e6:.3f}"),
)


def _table(lines: list[tuple[str, Row]], label: str | None) -> str:
    """`label` names the only format; None asks for a column of formats."""
    columns = [Column("format", left=True)] if label is None else []
    columns += [Column(label or "tensor", left=True, elastic=True), *(column for column, _ in _NUMBERS)]
    rows = []
    for format, row in lines:
        cells = [row.name, *(show(row) for _, show in _NUMBERS)]
        rows.append([format, *cells] if label is None else cells)
    return table(columns, rows)
