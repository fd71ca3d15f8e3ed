"""``kbit compare --best`` and ``kbit plan``: which format each tensor should have."""

from __future__ import annotations

import argparse
import collections
import functools
import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from .. import explore
from .._version import __version__
from ..errors import FormatError
from ..explore.candidates import Candidate, Search
from ..explore.sweeps import rows_of
from ..formats.base import split_formats
from ..io.atomic import check_file
from ..io.checkpoint import Checkpoint
from ..io.progress import progress_bar
from ..text import Column, printable, table
from .common import chosen_format, dumps, finite, wrapped, write
from .sources import Source, described, sources
from .workers import devices_of, measured, sharing

_R = TypeVar("_R")

# Seconds that `--best` may measure one tensor for.
_BEST_SECONDS = 5.0


def run_best(arguments: argparse.Namespace) -> None:
    """Run ``kbit compare --best BITS``."""
    for name in ("wide", "plot", "html"):
        if getattr(arguments, name, None):
            raise FormatError(f"--{name} shows every format, and --best one for each tensor: leave one of them away")
    chosen = None
    if arguments.formats is not None:
        chosen = [chosen_format(name, arguments.option) for name in split_formats(arguments.formats)]
    elif arguments.option:
        raise FormatError("--option is one of --formats: name those to choose from")
    how = {"bits": arguments.best, "formats": chosen, "all": arguments.all, "time_limit": _BEST_SECONDS}
    device = ",".join(devices_of(arguments))
    rows = _of_each(sources(arguments.files, arguments, again=True), functools.partial(_best, how), arguments)
    whole = explore.Plan(arguments.best, tuple(rows))
    if arguments.json:
        keys = ("tensor", "shape", "dtype", "fitted", "bits_per_element", "sqnr_db", "sqnr_centered_db", "mse")
        best = [{**{key: row[key] for key in (*keys, "max_error")}, "format": row["label"]} for row in rows]
        total = {"bits_per_element": whole.bits_per_element, "sqnr_db": whole.sqnr_db}
        about = {"kbitcupy": __version__, "source": described(arguments.files), "device": device}
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
    for line in (*wrapped(*said), *explore.notes(rows), *wrapped(*explore.remarks(rows))):
        print(printable(line))


def _of_each(found_in: Sequence[Source], measure: Callable[[str, Any], _R], arguments: argparse.Namespace) -> list[_R]:
    """What is found out of each tensor, in their order."""
    nbytes = sum(source.nbytes for source in found_in)
    label = "plan" if arguments.run is run_plan else "compare"
    with (
        sharing(arguments, nbytes) as executor,
        progress_bar(label, nbytes, sys.stderr.isatty(), len(found_in)) as bar,
    ):
        return measured(found_in, lambda: measure, executor, devices_of(arguments), bar)


def _best(how: Mapping[str, Any], tensor: str, x: Any) -> dict[str, Any]:
    """The row of the best format for a tensor."""
    try:
        found = explore.best(x, **how)
    except FormatError as error:
        raise FormatError(f"tensor {tensor!r}: {error}") from error
    return {**found.row, "tensor": tensor}


def _with_fit(row: Mapping[str, Any]) -> str:
    """A format as a table names it, with what was fitted."""
    return " ".join((row["label"], *(f"({name} fitted)" for name in row["fitted"])))


def run_plan(arguments: argparse.Namespace) -> None:
    """Run ``kbit plan``."""
    target = check_file(arguments.output, arguments.force, Checkpoint(arguments.file).paths)
    chosen = None
    if arguments.formats is not None:
        chosen = [chosen_format(name, ()) for name in split_formats(arguments.formats)]
    found_in = sources([arguments.file], arguments, again=False)
    named = None if chosen is None else list(map(Candidate.of, chosen))
    each = _of_each(found_in, functools.partial(rows_of, named, Search(all=arguments.all)), arguments)
    rows = [row for part in each for row in part]
    plan = explore.plan(
        rows,
        arguments.bits,
        objective="absolute" if arguments.absolute else "relative",
        weights=dict(arguments.weight),
        time_limit=arguments.time_limit,
    )
    config = plan.config()
    write(target, dumps(config).encode() + b"\n", arguments.force)
    if arguments.json:
        numbers = {"sqnr_db": plan.sqnr_db, "gap": plan.gap}
        finite = {key: value if math.isfinite(value) else None for key, value in numbers.items()}
        print(dumps({"kbitcupy": __version__, "output": arguments.output, **config, **finite}))
        return
    output = printable(arguments.output)
    print(f"{output}: a format for each of {len(plan.rows)} tensors, within {arguments.bits:g} bits")
    print(_plan_table(plan, rows))
    for line in (plan.proof, *explore.notes(plan.rows), *wrapped(*explore.remarks(plan.rows))):
        print(printable(line))


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
