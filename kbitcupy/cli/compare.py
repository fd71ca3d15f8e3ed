"""``kbit compare``: what formats cost and keep."""

from __future__ import annotations

import argparse
import functools
import io
import itertools
import math
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import explore, metrics
from .._version import __version__
from ..backend import xp as _xp
from ..errors import FileError
from ..explore import Measurement
from ..explore.candidates import Candidate, beyond_all
from ..formats.base import Format, split_formats
from ..io.atomic import check_file
from ..io.progress import progress_bar
from ..text import Column, printable, shortened, table, tables
from . import choose, report
from .common import chosen_format, dumps, wrapped, write
from .sources import Source, described, sources
from .workers import devices_of, measured, sharing

# Where nobody has named formats: tensors that are looked at for what else is worth measuring, and seconds after which
# tensors are measured on samples of them.
_LOOKED_AT, _SECONDS = 8, 60.0
# Bits per element for which the conclusion names a format.
_BUDGETS = (2.6, 3.6, 4.6, 5.6, 6.6, 8.6)
# The last column of formats that nobody has named.
_MARK = Column("not\nbeaten")


@dataclass
class Comparison:
    """What every format made of every tensor.

    Parameters
    ----------
    chosen : dict of str to Candidate
        The formats, by what they were called when they were chosen.
    named : bool
        Whether somebody named them.
    rows, totals : dict of str to (list of) Measurement
        Of each tensor, and of all together.
    estimated : int
        How many tensors were measured on samples of them.
    """

    chosen: dict[str, Candidate]
    named: bool
    rows: dict[str, list[Measurement]] = field(default_factory=dict)
    totals: dict[str, Measurement] = field(default_factory=dict)
    estimated: int = 0

    @property
    def titles(self) -> dict[str, str]:
        """What the formats are called: as they call themselves, or as they were typed where that is not one's own."""
        titles = {name: explore.label(one.format) for name, one in self.chosen.items()}
        found = list(titles.values())
        return {name: title if found.count(title) == 1 else name for name, title in titles.items()}

    @property
    def distinct(self) -> dict[str, str]:
        """The same without formats that do what another one does, which stand beside its title."""
        if self.named:
            return self.titles
        alike: dict[Any, list[str]] = {}
        for name, rows in self.rows.items():
            what = [(row.nbytes_after, row.sums.noise, row.sums.largest) for row in rows]
            alike.setdefault(str(what), []).append(name)
        return {names[0]: ", ".join(self.titles[name] for name in names) for names in alike.values()}

    @functools.cached_property
    def decibels(self) -> dict[str, float]:
        """What formats are ranked by: the SQNR of all tensors together, where somebody named them; else the mean over
        all elements of their squared error over the variance of their tensor, as tensors may have unlike units.
        """
        if self.named:
            return {name: total.sums.sqnr_db for name, total in self.totals.items()}
        found = {}
        for name, rows in self.rows.items():
            varied = [row for row in rows if row.spread != 0]
            count = sum(row.sums.count for row in varied)
            loss = math.fsum(row.sums.count * row.sums.noise / row.spread for row in varied)
            found[name] = metrics.Sums(count, float(count), loss).sqnr_db
        return found

    def by_size(self) -> list[str]:
        """Names of the distinct ones, the smallest first, and of one size the best."""
        return sorted(self.distinct, key=lambda name: (self.totals[name].bits_per_element, -self.decibels[name]))

    def not_beaten(self) -> list[str]:
        """The formats that keep more than any that is no larger."""
        best: list[str] = []
        for name in self.by_size():
            if not best or self.decibels[name] > self.decibels[best[-1]]:
                best.append(name)
        return best


def run(arguments: argparse.Namespace) -> None:
    """Run ``kbit compare``."""
    if arguments.best is not None:
        choose.run_best(arguments)
        return
    picture = None if arguments.plot is None else _picture(arguments.plot, arguments.force)
    page = None if arguments.html is None else check_file(arguments.html, arguments.force)
    named = None
    if arguments.formats is not None:
        names = split_formats(arguments.formats)
        named = {name: Candidate.of(chosen_format(name, arguments.option)) for name in names}
    devices = devices_of(arguments)
    device = ",".join(devices)
    found_in = sources(arguments.files, arguments, again=True)
    with sharing(arguments, sum(source.nbytes for source in found_in)) as executor:
        # Which formats are worth it is found out here, wherever the others are.
        here = _xp.resolve_device(devices[0] if arguments.scheduler is None else "auto")
        chosen = _worth_measuring(found_in, here, arguments) if named is None else named
        found, histograms = _measured(
            Comparison(chosen, named is not None), found_in, executor, devices, drawn=page is not None
        )
    if picture is not None:
        figure = explore.figure(_drawn(found))
        drawn = io.BytesIO()
        figure.savefig(drawn, format=picture.suffix[1:], dpi=160)
        write(picture, drawn.getvalue(), arguments.force)
    if page is not None:
        write(page, _report(found, arguments.files, device, histograms).encode(), arguments.force)
    if arguments.json:
        print(dumps(_document(found, arguments.files, device)))
        return
    if arguments.wide and arguments.files:
        print(_tensor_table(found))
    elif arguments.wide or not (arguments.files or found.named):
        print(_format_table(found))
    elif found.named:
        titles = found.titles
        lines = [(titles[name], row) for name in found.chosen for row in (*found.rows[name], found.totals[name])]
        print(_table(lines, *(titles.values() if len(found.chosen) == 1 else ())))
    else:
        print(_summary(found))
    for line in itertools.chain(wrapped(*_conclusion(found, arguments.files)), *_notes(found)):
        print(printable(line))


def _notes(found: Comparison) -> tuple[list[str], list[str]]:
    """What numbers hide, and what formats say of them."""
    measured = [row.row() for rows in found.rows.values() for row in rows]
    # What is wrong with formats that nobody has named is not worth a line, unless they are recommended.
    recommended = list(found.chosen if found.named else _within(found))
    remarked = [row.row() for name in recommended for row in found.rows[name]]
    return explore.notes(measured), wrapped(*explore.remarks(remarked))


def _worth_measuring(found_in: Sequence[Source], device: str, arguments: argparse.Namespace) -> dict[str, Candidate]:
    """Formats that take every tensor: those that lists show, and those beyond them that are ahead on some tensors."""
    taken: list[Format] = explore.default_formats(all=arguments.all)
    for shape in {source.shape for source in found_in}:
        fitting = explore.default_formats(shape, all=arguments.all)
        taken = [format for format in taken if format in fitting]
    if arguments.option:
        return {str(each): Candidate.of(chosen_format(str(each), arguments.option)) for each in taken}
    step = -(-len(found_in) // _LOOKED_AT)
    some = (_xp.to_device(source.read(), device) for source in found_in[::step])
    fits_all = {source.shape for source in found_in}
    more = [one for one in beyond_all(some, taken, all=arguments.all) if all(map(one.takes, fits_all))]
    return {str(one.format): one for one in (*map(Candidate, taken), *more)}


@dataclass(frozen=True)
class _Measure:
    """Measures a tensor with every format.

    Parameters
    ----------
    chosen : dict of str to Candidate
        The formats.
    late : bool
        Whether samples of the tensor are measured.
    drawn : bool
        Whether a histogram is made.
    """

    chosen: dict[str, Candidate]
    late: bool
    drawn: bool

    def __call__(self, tensor: str, x: Any) -> tuple[dict[str, Measurement], report.Histogram | None]:
        drawn = report.Histogram.of(x, tensor) if self.drawn else None
        rows = {name: (one.estimated if self.late else one.measured)(x, tensor) for name, one in self.chosen.items()}
        return rows, drawn


def _measured(
    found: Comparison, found_in: Sequence[Source], executor: Executor | None, devices: Sequence[str], drawn: bool
) -> tuple[Comparison, list[report.Histogram]]:
    """The comparison, measured; and a histogram of each tensor if these are drawn."""
    ends = math.inf if found.named else time.monotonic() + _SECONDS

    def measure() -> _Measure:
        late = time.monotonic() >= ends
        found.estimated += late
        return _Measure(found.chosen, late, drawn)

    nbytes = sum(source.nbytes for source in found_in)
    with progress_bar("compare", nbytes, sys.stderr.isatty(), len(found_in)) as bar:
        each = measured(found_in, measure, executor, devices, bar)
    found.rows = {name: [rows[name] for rows, _ in each] for name in found.chosen}
    found.totals = {name: Measurement("total") for name in found.chosen}
    for name, total in found.totals.items():
        for row in found.rows[name]:
            total.add(row)
    return found, [histogram for _, histogram in each if histogram is not None]


def _drawn(found: Comparison) -> list[dict[str, Any]]:
    """Rows for a picture, in which formats that do the same are one."""
    return [{**row.row(), "label": title} for name, title in found.distinct.items() for row in found.rows[name]]


def _report(found: Comparison, files: Sequence[str], device: str, histograms: Sequence[report.Histogram]) -> str:
    """The page of `--html`."""
    best = found.not_beaten()
    lines = [
        report.Line(found.distinct[name], found.decibels[name], name in best, found.totals[name], found.rows[name])
        for name in found.by_size()
    ]
    notes, remarks = _notes(found)
    said = [*_conclusion(found, ()), *notes, " ".join(remarks)]
    ranked_by = "total SQNR dB" if found.named else "mean dB"
    source = ", ".join(files) if files else "samples"
    return report.page(source, device, ranked_by, lines, histograms, filter(None, said))


def _document(found: Comparison, files: Sequence[str], device: str) -> dict[str, Any]:
    return {
        "kbitcupy": __version__,
        "source": described(files),
        "device": device,
        **({"estimated_tensors": found.estimated} if found.estimated else {}),
        "results": [
            {
                "format": one.format.config(),
                **({"fitted": ["codebook"]} if one.fits else {}),
                "tensors": [_json(row) for row in found.rows[name]],
                "total": _json(found.totals[name]),
            }
            for name, one in found.chosen.items()
        ],
    }


def _within(found: Comparison) -> dict[str, float]:
    """The best format for each budget of bits per element, by name."""
    within: dict[str, float] = {}
    for budget in _BUDGETS:
        fitting = [name for name in found.not_beaten() if found.totals[name].bits_per_element <= budget]
        if fitting:
            within.setdefault(fitting[-1], budget)
    return within


def _conclusion(found: Comparison, files: Sequence[str]) -> list[str]:
    """What the numbers come to, where there are several formats."""
    titles, decibels, best = found.distinct, found.decibels, found.not_beaten()
    if len(found.chosen) < 2 or any(map(math.isnan, decibels.values())):
        return []
    if found.named:
        if len(best) == len(found.chosen):
            return []
        each = [f"{titles[name]} {decibels[name]:.2f} dB at {found.totals[name].bits_per_element:.2f}" for name in best]
        return [f"not beaten by a smaller one, by total SQNR: {', '.join(each)} bits per element"]
    each = [f"{titles[name]} within {budget:g} ({decibels[name]:.1f} dB)" for name, budget in _within(found).items()]
    said = [f"best for their bits per element, by the mean of the tensors: {', '.join(each)}"]
    if any(found.chosen[name].fits for name in titles):
        said.append("codebook=custom: values fitted to each tensor, as kb.explore.best and kbit plan do")
    if found.estimated:
        said.append(
            f"{found.estimated} tensors were measured on samples of them, as {_SECONDS:g} seconds were over; --formats "
            "measures on all of them"
        )
    if files:
        said.append("next: --wide for every tensor, --best BITS for the best format of each, kbit plan for a budget")
    return said


def _picture(path: str, force: bool) -> Path:
    """The file for a picture, checked before anything is measured."""
    found = check_file(path, force)
    kinds = explore.picture_kinds()
    if found.suffix[1:] not in kinds:
        raise FileError(f"--plot {path}: the ending is {found.suffix!r}; it must be one of {', '.join(kinds)}")
    return found


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


def _summary(found: Comparison) -> str:
    """A line for each format, with the totals of all tensors."""
    columns = [
        Column("format", left=True, elastic=True),
        Column("bits", 5),
        Column("mean dB", 7),
        Column("SQNR dB", 7),
        Column("worst", 7),
        Column("max err", 7),
        Column("MB after", 8),
        _MARK,
    ]
    best, lines = found.not_beaten(), []
    for name in found.by_size():
        total = found.totals[name]
        worst = min(row.sums.sqnr_db for row in found.rows[name])
        numbers = [total.bits_per_element, found.decibels[name], total.sums.sqnr_db, worst]
        size = f"{total.nbytes_after / 1e6:.3f}"
        lines.append(
            [found.distinct[name], *(f"{each:.2f}" for each in numbers), f"{total.sums.largest:.1e}", size]
            + ["*" if name in best else ""]
        )
    before = next(iter(found.totals.values())).nbytes_before
    return f"{table(columns, lines)}\n{len(next(iter(found.rows.values())))} tensors, {before / 1e6:.3f} MB before"


def _format_table(found: Comparison) -> str:
    """Bits, and the SQNR in dB of each tensor: a line for each format."""
    tensors = [row.tensor for row in next(iter(found.rows.values()))]
    headings = ["\n".join(textwrap.wrap(tensor, 10, break_long_words=False)) for tensor in tensors]
    columns = [Column("format", left=True, elastic=True), Column("bits", 5), *map(Column, headings)]
    columns += [Column("total")] if found.named else [Column("mean dB"), _MARK]
    best, lines = found.not_beaten(), []
    for name in found.chosen if found.named else found.by_size():
        numbers = [found.totals[name].bits_per_element, *(row.sums.sqnr_db for row in found.rows[name])]
        marks = [] if found.named else ["*" if name in best else ""]
        shown = [f"{each:.2f}" for each in (*numbers, found.decibels[name])]
        lines.append([found.distinct[name], *shown, *marks])
    return table(columns, lines)


def _tensor_table(found: Comparison) -> str:
    """The same with a line for each tensor, of which files have many, with long names."""
    names = list(found.distinct)
    columns = [Column("tensor", left=True, elastic=True), *(Column(_heading(found.distinct[name])) for name in names)]
    cells = [
        [f"{found.totals[name].bits_per_element:.2f}"]
        + [f"{row.sums.sqnr_db:.2f}" for row in (*found.rows[name], found.totals[name])]
        for name in names
    ]
    tensors = [row.tensor for row in next(iter(found.rows.values()))]
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
