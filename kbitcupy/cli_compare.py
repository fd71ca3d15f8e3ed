"""``kbit compare`` and ``kbit plan``: what formats cost and keep, and which one each tensor should have."""

from __future__ import annotations

import argparse
import io
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import _xp, explore
from ._version import __version__
from .array import QuantizedArray
from .cli_common import DEFAULT_FORMAT, Column, chosen_format, dumps, table
from .errors import FileError
from .explore import Measurement
from .io.atomic import check_file, replacing
from .io.bitsandbytes import BitsandbytesCheckpoint
from .io.checkpoint import Checkpoint
from .io.convert import progress_bar
from .io.safetensors import SourceFile
from .samples import DISTRIBUTIONS, SHAPE, draw


def run(arguments: argparse.Namespace) -> None:
    """Run ``kbit compare``."""
    picture = None if arguments.plot is None else _picture(arguments.plot, arguments.force)
    names = arguments.formats
    if names is None:
        every = [format.name for format in explore.default_formats()]
        names = every if arguments.file is None else [DEFAULT_FORMAT]
    chosen = {name: chosen_format(name, arguments.option) for name in names}
    device = _xp.resolve_device(arguments.device)
    tensors, nbytes = _tensors(arguments, again=True)
    rows: dict[str, list[Measurement]] = {name: [] for name in chosen}
    with progress_bar("compare", nbytes, sys.stderr.isatty()) as advance:
        for tensor, x in tensors:
            on_device = _xp.to_device(x, device)
            for name, format in chosen.items():
                rows[name].append(explore.measure(on_device, format, tensor))
            advance(x.nbytes)
    if picture is not None:
        page = explore.figure([row.row() for measured in rows.values() for row in measured])
        drawn = io.BytesIO()
        page.savefig(drawn, format=picture.suffix[1:], dpi=160)
        _write(picture, drawn.getvalue(), arguments.force)
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
    if arguments.wide:
        print(_wide_table(rows, totals))
        return
    label = " ".join([*chosen, *(option.text for option in arguments.option)]) if len(chosen) == 1 else None
    print(_table([(name, row) for name in chosen for row in (*rows[name], totals[name])], label))


def _picture(path: str, force: bool) -> Path:
    """The file for a picture, checked before anything is measured."""
    found = check_file(path, force)
    kinds = explore.picture_kinds()
    if found.suffix[1:] not in kinds:
        raise FileError(f"--plot {path}: the ending is {found.suffix!r}; it must be one of {', '.join(kinds)}")
    return found


def _write(path: Path, data: bytes, force: bool) -> None:
    with replacing(path, len(data), force) as file:
        file.write(data)


def run_plan(arguments: argparse.Namespace) -> None:
    """Run ``kbit plan``."""
    chosen = None if arguments.formats is None else [chosen_format(name, ()) for name in arguments.formats]
    target = check_file(arguments.output, arguments.force, Checkpoint(arguments.file).paths)
    tensors, nbytes = _tensors(arguments, again=False)
    with progress_bar("plan", nbytes, sys.stderr.isatty()) as advance:
        rows = explore.sweep(_counted(tensors, advance), chosen, device=arguments.device)
    plan = explore.plan(rows, arguments.bits)
    _write(target, dumps(plan.config()).encode() + b"\n", arguments.force)
    print(f"{arguments.output}: a format for each of {len(plan.rows)} tensors, within {arguments.bits:g} bits")
    print(_plan_table(plan, rows))


def _counted(tensors: Iterator[tuple[str, Any]], advance: Callable[[int], object]) -> Iterator[tuple[str, Any]]:
    for name, x in tensors:
        yield name, x
        advance(x.nbytes)


def _plan_table(plan: explore.Plan, rows: list[dict[str, Any]]) -> str:
    """The plan, its parts, and every format that fits the budget on all tensors."""

    def line(name: str, part: explore.Plan) -> list[str]:
        numbers = f"{part.bits_per_element:.2f}", f"{part.sqnr_db:.2f}", f"{part.squared_error:.3e}"
        return [name, str(len(part.rows)), *numbers]

    lines = [line("plan", plan)]
    uniform = []
    for label in dict.fromkeys(row["label"] for row in rows):
        part = [row for row in plan.rows if row["label"] == label]
        if part:
            lines.append(line(f"  of which {label}", explore.Plan(plan.budget_bits, tuple(part))))
        every = explore.Plan(plan.budget_bits, tuple(row for row in rows if row["label"] == label))
        if every.bits_per_element <= plan.budget_bits:
            uniform.append(line(f"{label} for all", every))
    columns = [Column("", left=True), Column("tensors"), Column("bits", 5), Column("SQNR dB"), Column("squared error")]
    return table(columns, [*lines, *uniform])


def _tensors(arguments: argparse.Namespace, again: bool) -> tuple[Iterator[tuple[str, Any]], int]:
    """(name, array) of what is compared, one at a time, and the bytes of all.

    With `again`, tensors that are compressed already take part as what they decode to.
    """
    if arguments.file is None:
        return ((name, draw(name)) for name in DISTRIBUTIONS), len(DISTRIBUTIONS) * 4 * math.prod(SHAPE)
    checkpoint = BitsandbytesCheckpoint(arguments.file, mapped=False)
    chosen = {
        name: _nbytes(file, name)
        for file in checkpoint.files.values()
        for name in file.compressible(arguments.min_size, arguments.keep, again)
    }
    if not chosen:
        raise FileError(
            f"{arguments.file} holds no tensor to compress: none is {', '.join(_xp.FLOAT_DTYPES)} with two or more "
            f"dimensions, {arguments.min_size} or more elements (--min-size) and a name that --keep does not match"
        )
    return ((name, _decoded(checkpoint[name])) for name in chosen), sum(chosen.values())


def _nbytes(file: SourceFile, name: str) -> int:
    """Bytes of a tensor when it is not compressed."""
    if name not in file.compressed:
        return file.entries[name].nbytes
    _, shape, dtype = file.compressed[name]
    return math.prod(shape) * dtype.itemsize


def _decoded(tensor: Any) -> Any:
    return tensor.dequantize() if isinstance(tensor, QuantizedArray) else tensor


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


def _wide_table(rows: dict[str, list[Measurement]], totals: dict[str, Measurement]) -> str:
    """Bits, and the SQNR in dB of each tensor."""
    titles = list(dict.fromkeys(row.tensor for measured in rows.values() for row in measured))
    columns = [Column("format", left=True, elastic=True), Column("bits", 5), *map(Column, titles), Column("total")]
    lines = []
    for name, measured in rows.items():
        found = {row.tensor: row for row in (*measured, totals[name])}
        bits = f"{totals[name].bits_per_element:.2f}"
        lines.append([name, bits, *(f"{found[title].sums.sqnr_db:.2f}" for title in (*titles, "total"))])
    return table(columns, lines)


def _table(lines: list[tuple[str, Measurement]], label: str | None) -> str:
    """`label` names the only format; None asks for a column of formats."""
    columns = [Column("format", left=True)] if label is None else []
    columns += [Column(label or "tensor", left=True, elastic=True), *(column for column, _ in _NUMBERS)]
    rows = []
    for format, row in lines:
        cells = [row.tensor, *(show(row) for _, show in _NUMBERS)]
        rows.append([format, *cells] if label is None else cells)
    return table(columns, rows)
