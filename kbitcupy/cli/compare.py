"""``kbit compare`` and ``kbit plan``: what formats cost and keep, and which one each tensor should have."""

from __future__ import annotations

import argparse
import collections
import io
import itertools
import math
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import explore
from .._version import __version__
from ..array import QuantizedArray
from ..backend import xp as _xp
from ..errors import FileError, FormatError
from ..explore import Measurement
from ..explore.samples import DISTRIBUTIONS, SHAPE, draw
from ..formats.base import Choice, split_formats
from ..io.atomic import check_file, replacing
from ..io.checkpoint import Checkpoint
from ..io.container import entry_of
from ..io.convert import progress_bar
from ..text import Column, printable, shortened, table, tables, terminal_width
from .common import DEFAULT_FORMAT, chosen_format, dumps, finite


def run(arguments: argparse.Namespace) -> None:
    """Run ``kbit compare``."""
    if arguments.best is not None:
        _run_best(arguments)
        return
    picture = None if arguments.plot is None else _picture(arguments.plot, arguments.force)
    if arguments.formats is not None:
        names = split_formats(arguments.formats)
    elif arguments.files:
        if arguments.all:
            raise FormatError("--all is for samples; --formats names those to compare on a file")
        names = [DEFAULT_FORMAT]
    else:
        names = [format.name for format in explore.default_formats(SHAPE, all=arguments.all)]
    chosen = {name: chosen_format(name, arguments.option) for name in names}
    device = _xp.resolve_device(arguments.device)
    tensors, nbytes = _tensors(arguments.files, arguments, again=True)
    rows: dict[str, list[Measurement]] = {name: [] for name in chosen}
    with progress_bar("compare", nbytes, sys.stderr.isatty()) as advance:
        for tensor, x in tensors:
            on_device = _xp.to_device(x, device)
            for name, choice in chosen.items():
                rows[name].append(explore.measure(on_device, choice, tensor))
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
            "source": _source(arguments.files),
            "device": device,
            "results": [
                {
                    "format": format.config(),
                    "tensors": [_json(row) for row in rows[name]],
                    "total": _json(totals[name]),
                }
                for name, (format, _) in chosen.items()
            ],
        }
        print(dumps(document))
        return
    titles = _titles(chosen)
    if arguments.wide:
        print(_wide_table(rows, totals, titles, bool(arguments.files)))
    else:
        lines = [(titles[name], row) for name in chosen for row in (*rows[name], totals[name])]
        print(_table(lines, *(titles.values() if len(chosen) == 1 else ())))
    measured = [row.row() for found in rows.values() for row in found]
    said = _conclusion(chosen, totals, titles), explore.notes(measured), _wrapped(*explore.remarks(measured))
    for line in itertools.chain(*said):
        print(printable(line))


# Seconds that `--best` may measure one tensor for.
_BEST_SECONDS = 5.0


def _run_best(arguments: argparse.Namespace) -> None:
    """Run ``kbit compare --best BITS``."""
    for name in ("wide", "plot"):
        if getattr(arguments, name):
            raise FormatError(f"--{name} shows every format, and --best one for each tensor: leave one of them away")
    chosen = None
    if arguments.formats is not None:
        chosen = [chosen_format(name, arguments.option) for name in split_formats(arguments.formats)]
    elif arguments.option:
        raise FormatError("--option is one of --formats: name those to choose from")
    device = _xp.resolve_device(arguments.device)
    tensors, nbytes = _tensors(arguments.files, arguments, again=True)
    rows = []
    with progress_bar("compare", nbytes, sys.stderr.isatty()) as advance:
        for tensor, x in tensors:
            how: dict[str, Any] = {"formats": chosen, "all": arguments.all, "time_limit": _BEST_SECONDS}
            try:
                found = explore.best(_xp.to_device(x, device), bits=arguments.best, **how)
            except FormatError as error:
                raise FormatError(f"tensor {tensor!r}: {error}") from error
            rows.append({**found.row, "tensor": tensor})
            advance(x.nbytes)
    whole = explore.Plan(arguments.best, tuple(rows))
    if arguments.json:
        keys = ("tensor", "shape", "dtype", "fitted", "bits_per_element", "sqnr_db", "sqnr_centered_db", "mse")
        best = [{**{key: row[key] for key in (*keys, "max_error")}, "format": row["label"]} for row in rows]
        total = {"bits_per_element": whole.bits_per_element, "sqnr_db": whole.sqnr_db}
        about = {"kbitcupy": __version__, "source": _source(arguments.files), "device": device}
        print(dumps(finite({**about, "bits": arguments.best, "best": best, "total": total})))
        return
    columns = [
        Column("tensor", left=True, elastic=True),
        Column("format", left=True),
        Column("bits", 5),
        Column("SQNR dB", 7),
        Column("centered", 7),
        Column("max err", 7),
    ]
    lines = []
    for row in rows:
        numbers = f"{row['bits_per_element']:.2f}", f"{row['sqnr_db']:.2f}", f"{row['sqnr_centered_db']:.2f}"
        lines.append([row["tensor"], _with_fit(row), *numbers, f"{row['max_error']:.1e}"])
    lines.append(["total", "", f"{whole.bits_per_element:.2f}", f"{whole.sqnr_db:.2f}", "", ""])
    print(table(columns, lines))
    counts = collections.Counter(map(_with_fit, rows))
    often = ", ".join(f"{name} for {count}" for name, count in counts.most_common())
    said = [f"best within {arguments.best:g} bits per element, of {len(rows)} tensors: {often}"]
    if len(arguments.files) == 1:
        command = f"kbit plan {shlex.quote(arguments.files[0])} --bits {arguments.best:g} -o plan.json"
        said.append(f"{command} shares these bits out among the tensors, for kbit quantize --plan")
    for line in (*_wrapped(*said), *explore.notes(rows), *_wrapped(*explore.remarks(rows))):
        print(printable(line))


def _with_fit(row: Mapping[str, Any]) -> str:
    """A format as a table names it, with what was fitted."""
    return " ".join((row["label"], *(f"({name} fitted)" for name in row["fitted"])))


def _source(files: Sequence[str]) -> Any:
    """What was compared, for JSON."""
    return (list(files) if len(files) > 1 else files[0]) if files else "samples"


def _titles(chosen: dict[str, Choice]) -> dict[str, str]:
    """What the formats are called: as they call themselves, or as they were typed where that is not one's own."""
    titles = {name: explore.label(format) for name, (format, _) in chosen.items()}
    found = list(titles.values())
    return {name: title if found.count(title) == 1 else name for name, title in titles.items()}


def _conclusion(chosen: dict[str, Choice], totals: dict[str, Measurement], titles: dict[str, str]) -> list[str]:
    """The formats that keep more than any that is no larger, where there are others."""
    best: list[str] = []
    for name in sorted(chosen, key=lambda name: (totals[name].bits_per_element, -totals[name].sums.sqnr_db)):
        if not best or totals[name].sums.sqnr_db > totals[best[-1]].sums.sqnr_db:
            best.append(name)
    if len(best) == len(chosen) or any(math.isnan(total.sums.sqnr_db) for total in totals.values()):
        return []
    found = [
        f"{titles[name]} {totals[name].sums.sqnr_db:.2f} dB at {totals[name].bits_per_element:.2f}" for name in best
    ]
    return _wrapped(f"not beaten by a smaller one, by total SQNR: {', '.join(found)} bits per element")


def _wrapped(*texts: str) -> list[str]:
    """Texts in lines that the terminal has room for."""
    width = max(terminal_width(), 40)
    how: dict[str, Any] = {"subsequent_indent": "  ", "break_long_words": False, "break_on_hyphens": False}
    return [line for text in texts for line in textwrap.wrap(text, width, **how)]


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
    target = check_file(arguments.output, arguments.force, Checkpoint(arguments.file).paths)
    chosen = None
    if arguments.formats is not None:
        chosen = [chosen_format(name, ()) for name in split_formats(arguments.formats)]
    tensors, nbytes = _tensors([arguments.file], arguments, again=False)
    with progress_bar("plan", nbytes, sys.stderr.isatty()) as advance:
        rows = explore.sweep(_counted(tensors, advance), chosen, device=arguments.device, all=arguments.all)
    plan = explore.plan(
        rows,
        arguments.bits,
        objective="absolute" if arguments.absolute else "relative",
        weights=dict(arguments.weight),
        time_limit=arguments.time_limit,
    )
    config = plan.config()
    _write(target, dumps(config).encode() + b"\n", arguments.force)
    if arguments.json:
        numbers = {"sqnr_db": plan.sqnr_db, "gap": plan.gap}
        finite = {key: value if math.isfinite(value) else None for key, value in numbers.items()}
        print(dumps({"kbitcupy": __version__, "output": arguments.output, **config, **finite}))
        return
    output = printable(arguments.output)
    print(f"{output}: a format for each of {len(plan.rows)} tensors, within {arguments.bits:g} bits")
    print(_plan_table(plan, rows))
    for line in (plan.proof, *explore.notes(plan.rows), *_wrapped(*explore.remarks(plan.rows))):
        print(printable(line))


def _counted(tensors: Iterator[tuple[str, Any]], advance: Callable[[int], object]) -> Iterator[tuple[str, Any]]:
    for name, x in tensors:
        yield name, x
        advance(x.nbytes)


def _plan_table(plan: explore.Plan, rows: list[dict[str, Any]]) -> str:
    """The plan, its parts, and every format that fits the budget on all tensors."""

    def line(name: str, part: explore.Plan) -> list[str]:
        numbers = f"{part.bits_per_element:.2f}", f"{part.sqnr_db:.2f}", f"{part.loss:.3e}"
        return [name, str(len(part.rows)), *numbers]

    lines = [line("plan", plan)]
    uniform = []
    for label in dict.fromkeys(row["label"] for row in (*rows, *plan.rows)):
        part = [row for row in plan.rows if row["label"] == label]
        if part:
            lines.append(line(f"  of which {label}", replace(plan, rows=tuple(part))))
        every = replace(plan, rows=tuple(row for row in rows if row["label"] == label))
        if len(every.rows) == len(plan.rows) and every.bits_per_element <= plan.budget_bits:
            uniform.append(line(f"{label} for all", every))
    columns = [
        Column("", left=True, elastic=True),
        Column("tensors"),
        Column("bits", 5),
        Column("SQNR dB"),
        Column(explore.OBJECTIVES[plan.objective]),
    ]
    return table(columns, [*lines, *uniform])


def _tensors(files: Sequence[str], arguments: argparse.Namespace, again: bool) -> tuple[Iterator[tuple[str, Any]], int]:
    """(name, array) of what is compared, one at a time, and the bytes of all; samples without a file.

    With `again`, tensors that are compressed already take part as what they decode to.
    """
    if not files:
        return ((name, draw(name)) for name in DISTRIBUTIONS), len(DISTRIBUTIONS) * 4 * math.prod(SHAPE)
    checkpoints = {path: Checkpoint(path, mapped=False) for path in files}
    chosen = {
        (path, name): _nbytes(checkpoint, name)
        for path, checkpoint in checkpoints.items()
        for name in checkpoint.compressible(arguments.min_size, arguments.keep, again)
    }
    if not chosen:
        raise FileError(
            f"{', '.join(files)} holds no tensor to compress: none is {', '.join(_xp.FLOAT_DTYPES)} with two or more "
            f"dimensions, {arguments.min_size} or more elements (--min-size) and a name that --keep does not match"
        )
    # Tensors of several files may have one name.
    return (
        (name if len(checkpoints) == 1 else f"{path}: {name}", _decoded(checkpoints[path][name]))
        for path, name in chosen
    ), sum(chosen.values())


def _nbytes(checkpoint: Checkpoint, name: str) -> int:
    """Bytes of a tensor when it is not compressed."""
    found = checkpoint.compressed.get(name) or checkpoint.reader.entry(name)
    return entry_of(found).nbytes


def _decoded(tensor: Any) -> Any:
    return tensor.dequantize() if isinstance(tensor, QuantizedArray) else tensor


def _json(row: Measurement) -> dict[str, Any]:
    """JSON values; numbers that JSON has no token for are null."""
    about = {} if row.shape is None else {"shape": list(row.shape), "dtype": row.dtype}
    numbers = {
        "sqnr_db": row.sums.sqnr_db,
        "sqnr_centered_db": row.sqnr_centered_db,
        "mse": row.sums.mse,
        "max_error": row.sums.largest,
        "bits_per_element": row.bits_per_element,
    }
    return {
        "name": row.tensor,
        **about,
        **{key: value if math.isfinite(value) else None for key, value in numbers.items()},
        "nan": row.nan,
        "infinite": row.infinite,
        "bytes_before": row.nbytes_before,
        "bytes_after": row.nbytes_after,
        **({"shares": row.shares} if row.shares else {}),
    }


#: Columns that hold numbers, and the text of a cell.
_NUMBERS: tuple[tuple[Column, Callable[[Measurement], str]], ...] = (
    (Column("SQNR dB", 7), lambda row: f"{row.sums.sqnr_db:.2f}"),
    (Column("centered", 7), lambda row: f"{row.sqnr_centered_db:.2f}"),
    (Column("MSE", 7), lambda row: f"{row.sums.mse:.1e}"),
    (Column("max err", 7), lambda row: f"{row.sums.largest:.1e}"),
    (Column("bits", 5), lambda row: f"{row.bits_per_element:.2f}"),
    (Column("MB before", 9), lambda row: f"{row.nbytes_before / 1e6:.3f}"),
    (Column("MB after", 8), lambda row: f"{row.nbytes_after / 1e6:.3f}"),
)


def _wide_table(
    rows: dict[str, list[Measurement]], totals: dict[str, Measurement], titles: dict[str, str], by_tensor: bool
) -> str:
    """Bits, and the SQNR in dB of each tensor in each format.

    A line for each format, or for each tensor: a file has many, with long names.
    """
    tensors = [row.tensor for row in next(iter(rows.values()))]
    cells = []
    for name, measured in rows.items():
        found = [f"{row.sums.sqnr_db:.2f}" for row in (*measured, totals[name])]
        cells.append([f"{totals[name].bits_per_element:.2f}", *found])
    if not by_tensor:
        columns = [Column("format", left=True, elastic=True), Column("bits", 5)]
        columns += (Column(tensor.replace(", ", ",\n")) for tensor in (*tensors, "total"))
        return table(columns, [[titles[name], *line] for name, line in zip(rows, cells, strict=True)])
    columns = [Column("tensor", left=True, elastic=True), *(Column(_heading(titles[name])) for name in rows)]
    return tables(columns, [list(line) for line in zip(("bits", *tensors, "total"), *cells, strict=True)])


def _heading(title: str) -> str:
    """A format as the heading of a column: an option a line."""
    name, colon, options = title.partition(":")
    lines = [name + colon, *options.replace(",", ",\n").splitlines()]
    return "\n".join(shortened(line, 24) for line in lines)


def _table(lines: list[tuple[str, Measurement]], label: str | None = None) -> str:
    """`label` names the only format; None asks for a column of formats."""
    columns = [Column("format", left=True, elastic=True)] if label is None else []
    columns += [Column(label or "tensor", left=True, elastic=True), *(column for column, _ in _NUMBERS)]
    words = list(dict.fromkeys(word for _, row in lines for word in row.shares))
    columns += [Column(word) for word in words]
    rows = []
    for format, row in lines:
        cells = [row.tensor, *(show(row) for _, show in _NUMBERS)]
        cells += [f"{row.shares[word]:.1%}" if word in row.shares else "-" for word in words]
        rows.append([format, *cells] if label is None else cells)
    return table(columns, rows)
