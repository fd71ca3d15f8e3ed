"""What a bit costs: formats measured over tensors, the best format for each tensor under a budget, and plots of both.

Measuring and planning need nothing but kbitcupy. The plots need matplotlib (the extra ``plot``), which is imported when
one is drawn; each takes a matplotlib Axes, or makes one, and returns it.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .. import metrics
from .._version import __version__
from ..backend import xp as _xp
from ..errors import FileError, FormatError, MissingExtraError
from ..formats.base import Format, get_format, list_formats
from ..io.safetensors import read_json_file
from ..ops import dequantize, quantize

__all__ = [
    "Measurement",
    "Plan",
    "Sweep",
    "default_formats",
    "measure",
    "plan",
    "plot_codebook",
    "plot_error_histogram",
    "plot_layers",
    "plot_sqnr",
    "read_plan",
    "sweep",
]

#: Version of the JSON that a plan is written as; what an older version wrote is still read.
PLAN_VERSION = 1

#: SQNR in dB that one more bit can buy on a Gaussian source: its distortion at rate R is at least 2^(-2 R).
DB_PER_BIT = 20 * math.log10(2)

# The palette of Okabe and Ito, without its yellow: colours that colour-blind readers tell apart, on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^v+x*<>"
_GREY = "#6E6E6E"


# ---- measuring -----------------------------------------------------------------------------------------------------


@dataclass
class Measurement:
    """What one format made of one tensor, or of several together.

    Parameters
    ----------
    tensor : str
        Name of the tensor.
    format : Format, optional
        The format, with its options chosen.
    shape : tuple of int, optional
        Shape of the tensor; None for several together.
    dtype : str, optional
        Name of its dtype.
    sums : metrics.Sums
        The errors.
    nbytes_before, nbytes_after : int
        Bytes of the tensor and of its planes.
    spread : float
        Sum of the squared distances of the elements to the mean of their tensor.
    nan, infinite : int
        Elements that are NaN, and that are infinite.
    """

    tensor: str
    format: Format | None = None
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    sums: metrics.Sums = field(default_factory=metrics.Sums)
    nbytes_before: int = 0
    nbytes_after: int = 0
    spread: float = 0.0
    nan: int = 0
    infinite: int = 0

    @property
    def sqnr_centered_db(self) -> float:
        """Ratio of the elements' variation around the mean of their tensor to the quantization noise, in dB."""
        return replace(self.sums, spread=self.spread).sqnr_centered_db

    @property
    def bits_per_element(self) -> float:
        """Bits of all planes for each element; NaN without elements."""
        return self.nbytes_after * 8 / self.sums.count if self.sums.count else math.nan

    def add(self, other: Measurement) -> None:
        """Count `other` in."""
        self.sums += other.sums
        self.spread += other.spread
        self.nan += other.nan
        self.infinite += other.infinite
        self.nbytes_before += other.nbytes_before
        self.nbytes_after += other.nbytes_after

    def row(self) -> dict[str, Any]:
        """The measurement as `sweep` lists it."""
        return {
            "tensor": self.tensor,
            "shape": self.shape,
            "dtype": self.dtype,
            "format": None if self.format is None else self.format.name,
            "options": {} if self.format is None else self.format.options(),
            "label": None if self.format is None else label(self.format),
            "elements": self.sums.count,
            "bits_per_element": self.bits_per_element,
            "sqnr_db": self.sums.sqnr_db,
            "sqnr_centered_db": self.sqnr_centered_db,
            "cosine": self.sums.cosine,
            "mse": self.sums.mse,
            "max_error": self.sums.largest,
            "signal": self.sums.signal,
            "squared_error": self.sums.noise,
            "nbytes_before": self.nbytes_before,
            "nbytes_after": self.nbytes_after,
            "mean": self.sums.mean,
            "deviation": math.sqrt(self.spread / self.sums.count) if self.sums.count else math.nan,
            "nan": self.nan,
            "infinite": self.infinite,
        }


def measure(x: Any, format: Format, tensor: str = "x") -> Measurement:
    """Compress an array, restore it, and measure what was lost.

    Parameters
    ----------
    x : array
        NumPy or CuPy array of a float dtype.
    format : Format
        The format.
    tensor : str
        The name that the measurement and an error message give to `x`.

    Returns
    -------
    Measurement
        On CuPy the call waits for the device.

    Raises
    ------
    FormatError
        When the format refuses the array.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> found = kb.explore.measure(np.eye(64, dtype=np.float32), kb.get_format("kbit4"))
    >>> found.nbytes_before, found.nbytes_after, found.sums.count
    (16384, 2180, 4096)
    """
    try:
        q = quantize(x, format)
        sums = metrics.sums(x, dequantize(q))
    except (ValueError, TypeError) as error:
        raise FormatError(f"tensor {tensor!r} with {format}: {error}") from error
    nan, infinite = (0, 0) if math.isfinite(sums.signal) else _not_finite(x)
    return Measurement(tensor, format, x.shape, x.dtype.name, sums, x.nbytes, q.nbytes, sums.spread, nan, infinite)


def _not_finite(x: Any, chunk: int = 1 << 22) -> tuple[int, int]:
    """How many elements are NaN, and how many infinite."""
    nan = infinite = 0
    flat = x.reshape(-1)
    with _xp.on_device_of(x):
        for start in range(0, x.size, chunk):
            part = flat[start : start + chunk].astype(np.float64)
            nan += int((part != part).sum())
            infinite += int((abs(part) == np.inf).sum())
    return nan, infinite


def default_formats() -> list[Format]:
    """Every registered format that can be made without options.

    Examples
    --------
    >>> import kbitcupy as kb
    >>> [str(format) for format in kb.explore.default_formats()][:2]
    ['kbit1', 'kbit2']
    """
    made = []
    for name in list_formats():
        try:
            made.append(get_format(name))
        except (ValueError, TypeError):  # it needs an option that only the caller knows, such as a table
            continue
    return made


def label(format: Format) -> str:
    """The format's name, and the options that differ from its defaults, as `get_format` reads them.

    Examples
    --------
    >>> import kbitcupy as kb
    >>> from kbitcupy.explore import label
    >>> label(kb.get_format("kbit4")), label(kb.get_format("kbit4", absmax="float32"))
    ('kbit4', 'kbit4:absmax=float32')
    """
    return str(format)


class Sweep(list[dict[str, Any]]):
    """The rows of `sweep`: a list, which is shown as a table and says what its numbers hide."""

    def __repr__(self) -> str:
        titles = ("tensor", "format", "bits", "SQNR dB", "centered")
        keys = ("bits_per_element", "sqnr_db", "sqnr_centered_db")
        lines: list[tuple[str, ...]] = [titles]
        for row in self[:_MOST_SHOWN]:
            numbers = (f"{row[key]:.2f}" for key in keys)
            lines.append((_shortened(repr(row["tensor"])[1:-1]), _shortened(row["label"]), *numbers))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        found = [
            "  ".join(
                f"{text:<{n}}" if i < 2 else f"{text:>{n}}"
                for i, (text, n) in enumerate(zip(line, widths, strict=True))
            )
            for line in lines
        ]
        more = [f"... {len(self) - _MOST_SHOWN} more rows"] if len(self) > _MOST_SHOWN else []
        return "\n".join((*found, *more, *notes(self)))


_MOST_SHOWN = 40


def notes(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """What the numbers of `sweep` hide, in one line each: tensors that are not finite, or lie far from 0.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> x = 290 + 5 * np.random.default_rng(0).standard_normal((64, 64))
    >>> for note in kb.explore.notes(kb.explore.sweep(x, "kbit4")):
    ...     print(note[:35])
    note: 'x': the mean is 289.9 and th
    """
    tensors = {row["tensor"]: row for row in rows}
    found = []
    broken = [row for row in tensors.values() if row["nan"] or row["infinite"]]
    if broken:
        nan, infinite = (sum(row[key] for row in broken) for key in ("nan", "infinite"))
        counts = f"{nan} NaN and {infinite} infinit{'y' if infinite == 1 else 'ies'}"
        if len(tensors) == 1:
            found.append(f"note: {broken[0]['tensor']!r} holds {counts}")
        else:
            found.append(
                f"note: {len(broken)} of {len(tensors)} tensors hold{'s' * (len(broken) == 1)} {counts}: "
                + _listed([repr(row["tensor"]) for row in broken])
            )
    offsets = {}
    for name, row in tensors.items():
        about = metrics.Sums(row["elements"], mean=row["mean"], spread=row["deviation"] ** 2 * row["elements"])
        offset = metrics.offset_note(about)
        if offset is not None:
            offsets[name] = offset, abs(row["mean"]) / row["deviation"]
    if offsets:
        name = max(offsets, key=lambda name: offsets[name][1])
        others = f"{len(offsets)} of {len(tensors)} tensors lie far from 0, most of all " if len(offsets) > 1 else ""
        found.append(f"note: {others}{name!r}: {offsets[name][0]}")
    return found


def _listed(words: Sequence[str], most: int = 3) -> str:
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def sweep(
    x: Any,
    formats: str | Format | Iterable[str | Format] | None = None,
    *,
    device: str | None = None,
    progress: bool = False,
) -> Sweep:
    """Measure formats on arrays.

    Parameters
    ----------
    x : array_like, mapping of str to array_like, or iterable of (str, array_like)
        The arrays: float16, bfloat16, float32 or float64 of any shape. A generator of pairs keeps one of them in
        memory at a time.
    formats : str, Format or iterable of them, optional
        What to measure, such as ``"int4:block=32"``; by default every format that needs no option (see
        `default_formats`).
    device : str, optional
        Where to work: ``"cpu"``, ``"cuda:N"``, or ``"auto"`` for a GPU where there is one. By default where the arrays
        are.
    progress : bool, default False
        Show a progress bar.

    Returns
    -------
    Sweep
        A list with a dict for each tensor and format, tensor by tensor, ready for ``pandas.DataFrame``. Keys:
        ``tensor``, ``shape``, ``dtype``, ``format`` (name), ``options``, ``label`` (name and changed options, which
        `get_format` reads), ``elements``, ``bits_per_element``, ``sqnr_db``, ``sqnr_centered_db`` (against the variance
        instead of the mean square), ``cosine``, ``mse``, ``max_error``, ``signal`` and ``squared_error`` (sums of
        squares), ``nbytes_before``, ``nbytes_after``, ``mean`` and ``deviation`` (standard deviation) of the tensor,
        ``nan`` and ``infinite`` (how many of its elements are).

    Raises
    ------
    FormatError
        When a format is unknown or refuses an array.
    TypeError
        When an array is none, or not of a float dtype.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> x = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
    >>> for row in kb.explore.sweep(x, ["kbit3", "kbit4"]):
    ...     print(f"{row['format']} {row['bits_per_element']:.2f} {row['sqnr_db']:.1f}")
    kbit3 3.25 15.4
    kbit4 4.25 21.8
    """
    chosen = _chosen(formats)
    device = None if device is None else _xp.resolve_device(device)
    rows = Sweep()
    for tensor, array in _progress(_named(x), progress):
        data = _xp.as_array(array, f"tensor {tensor!r}")
        _xp.float_dtype(data.dtype, f"tensor {tensor!r}")
        if device is not None:
            data = _xp.to_device(data, device)
        rows += [measure(data, format, tensor).row() for format in chosen]
    return rows


def _chosen(wanted: str | Format | Iterable[str | Format] | None) -> list[Format]:
    if wanted is None:
        return default_formats()
    if isinstance(wanted, (str, Format)):
        wanted = (wanted,)
    found = [format if isinstance(format, Format) else get_format(format) for format in wanted]
    if not found:
        raise FormatError("formats is empty; name at least one, see kbitcupy.list_formats()")
    return found


def _named(x: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(x, Mapping):
        return x.items()
    if isinstance(x, Iterator) or (isinstance(x, (list, tuple)) and all(_is_pair(item) for item in x)):
        return x
    return (("x", x),)


def _is_pair(item: Any) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)


def _progress(items: Iterable[tuple[str, Any]], show: bool) -> Iterable[tuple[str, Any]]:
    if not show:
        return items
    from tqdm.auto import tqdm  # a widget in a notebook, text elsewhere

    return tqdm(items, desc="sweep", unit="tensor")  # it asks the items how many they are


# ---- planning ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Plan:
    """A format for each tensor, as `plan` chooses them.

    Parameters
    ----------
    budget_bits : float
        Bits per element that the plan was made for.
    rows : tuple of dict
        The chosen row of `sweep` for each tensor.
    bound : float, optional
        What the squared error of no choice within the budget is below: that of the plan, where none is better. None
        where it is not known.
    """

    budget_bits: float
    rows: tuple[dict[str, Any], ...]
    bound: float | None = None

    def __repr__(self) -> str:
        bits = f"{self.bits_per_element:.3f} of {self.budget_bits:g} bits per element"
        proof = "" if self.bound is None else f", {self.proof}"
        return f"<Plan: {len(self.rows)} tensors, {bits}, SQNR {self.sqnr_db:.2f} dB{proof}>"

    @property
    def gap(self) -> float:
        """How much less the squared error of a better choice could be, as a part of the plan's own, at most.

        0 where no choice is better, NaN where that is not known.
        """
        if self.bound is None:
            return math.nan
        proven = self.bound >= self.squared_error * (1 - _RESOLUTION)
        return 0.0 if proven else 1 - self.bound / self.squared_error

    @property
    def proof(self) -> str:
        """How good the plan is, in words."""
        if self.bound is None:
            return "not compared with other choices"
        if self.gap == 0:
            return "no other choice within the budget has less squared error"
        return f"stopped early; no choice within the budget has {100 * self.gap:.2g} % less squared error"

    @property
    def formats(self) -> dict[str, Format]:
        """The format of each tensor, by name."""
        return {row["tensor"]: get_format(row["format"], **row["options"]) for row in self.rows}

    @property
    def bits_per_element(self) -> float:
        """Bits of all planes of all tensors for each of their elements."""
        return 8 * sum(row["nbytes_after"] for row in self.rows) / sum(row["elements"] for row in self.rows)

    @property
    def squared_error(self) -> float:
        """Sum of all squared errors."""
        return math.fsum(row["squared_error"] for row in self.rows)

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise ratio of all tensors together, in dB."""
        return metrics.Sums(1, math.fsum(row["signal"] for row in self.rows), self.squared_error).sqnr_db

    def config(self) -> dict[str, Any]:
        """JSON description: what `kbit quantize --plan` and `read_plan` read."""
        return {
            "version": PLAN_VERSION,
            "written_by": f"kbitcupy {__version__}",
            "budget_bits": self.budget_bits,
            "bits_per_element": self.bits_per_element,
            "squared_error": self.squared_error,
            "squared_error_bound": self.bound,
            "tensors": {name: format.config() for name, format in self.formats.items()},
        }


def plan(
    tensors: Any,
    budget_bits: float,
    *,
    formats: str | Format | Iterable[str | Format] | None = None,
    device: str | None = None,
    progress: bool = False,
    time_limit: float = 10.0,
) -> Plan:
    """The format for each tensor that makes the total squared error least, under a budget of bits.

    The choice is exact, unless the time runs out: no other assignment of the given formats has a lower total within the
    budget. The plan says which of both it is, and how far from the best it is at most (`Plan.gap`).

    Parameters
    ----------
    tensors : mapping of str to array_like, or list of dict
        The arrays, as `sweep` takes them, or the rows of a `sweep` (which can serve several budgets).
    budget_bits : float
        Bits per element of all tensors together, scales and every other plane included.
    formats : str, Format or iterable of them, optional
        What to choose from; by default every format that needs no option. Not with rows.
    device, progress
        As for `sweep`.
    time_limit : float, default 10
        Seconds for choosing, measuring apart; ``math.inf`` to search as far as the memory for its states reaches. The
        best choice found until then is taken.

    Returns
    -------
    Plan

    Raises
    ------
    FormatError
        When there is no tensor, a tensor is not finite, even the smallest choice is over the budget, or a format's
        options cannot be written into a plan (a codebook or scales given as an array).

    Notes
    -----
    This is the multiple-choice knapsack problem. Where choices could be mixed, the tensors would move along the lower
    convex hulls of their errors over their bytes, the step that saves the most error a byte first: that gives a good
    choice, and bounds the optimum from below. Dynamic programming over the tensors that are still open then keeps only
    what neither another state dominates nor the bound excludes, and ever more of it while there is time.

    Errors of the tensors count as they are: a tensor in a unit with large numbers outweighs one with small ones.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> rng = np.random.default_rng(0)
    >>> weights = {"large": rng.normal(0, 4.0, (64, 64)), "small": rng.normal(0, 0.1, (64, 64))}
    >>> found = kb.explore.plan(weights, 3.5, formats=["kbit2", "kbit3", "kbit4"])
    >>> {name: str(format) for name, format in found.formats.items()}
    {'large': 'kbit4', 'small': 'kbit2'}
    >>> round(found.bits_per_element, 2)
    3.26
    """
    if isinstance(budget_bits, bool) or not isinstance(budget_bits, (int, float, np.number)) or not budget_bits > 0:
        raise FormatError(f"budget_bits is {budget_bits!r}; it must be a positive number of bits per element")
    if isinstance(time_limit, bool) or not isinstance(time_limit, (int, float, np.number)) or not time_limit > 0:
        raise FormatError(f"time_limit is {time_limit!r}; it must be a positive number of seconds, or math.inf")
    if isinstance(tensors, list) and tensors and all(isinstance(row, dict) for row in tensors):
        if formats is not None:
            raise FormatError("formats goes with arrays; rows of a sweep have theirs: filter the rows instead")
        rows = tensors
    else:
        chosen = _chosen(formats)
        rows = sweep(tensors, chosen, device=device, progress=progress)
    choices: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["elements"]:
            choices.setdefault(row["tensor"], []).append(row)
    if not choices:
        raise FormatError("there is nothing to plan: no tensor has an element")
    _check_choices(choices)
    elements = sum(options[0]["elements"] for options in choices.values())
    budget = math.floor(float(budget_bits) * elements / 8)
    least = sum(min(row["nbytes_after"] for row in options) for options in choices.values())
    if least > budget:
        raise FormatError(
            f"budget_bits is {budget_bits}; the smallest choice takes {8 * least / elements:.3f} bits per element: "
            "raise the budget, or offer formats of fewer bits"
        )
    found, bound = _cheapest(
        [[row["nbytes_after"] for row in options] for options in choices.values()],
        [[row["squared_error"] for row in options] for options in choices.values()],
        budget,
        float(time_limit),
    )
    chosen_rows = tuple(options[i] for i, options in zip(found, choices.values(), strict=True))
    return Plan(float(budget_bits), chosen_rows, bound)


def _check_choices(choices: Mapping[str, list[dict[str, Any]]]) -> None:
    for name, options in choices.items():
        if not all(math.isfinite(row["squared_error"]) for row in options):
            raise FormatError(f"tensor {name!r} has an error that is not finite (NaN or infinity in it); leave it out")
        for row in options:
            format = get_format(row["format"], **row["options"])
            if format.stored() is not format:
                raise FormatError(
                    f"{format!r} was given an array, which a plan cannot carry; offer formats whose options are text "
                    "and numbers"
                )


def read_plan(path: str | os.PathLike[str]) -> dict[str, Format]:
    """The formats of a plan that `kbit plan` wrote, by tensor name.

    Parameters
    ----------
    path : path_like
        JSON file of `Plan.config`.

    Returns
    -------
    dict of str to Format

    Raises
    ------
    FileError
        When the file is missing, not a plan, or from a newer version.
    FormatError
        When it names a format or an option that is not known.

    Examples
    --------
    >>> import json, pathlib, tempfile, numpy as np, kbitcupy as kb
    >>> found = kb.explore.plan({"w": np.eye(64)}, 4.5, formats="kbit4")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "plan.json")
    ...     _ = path.write_text(json.dumps(found.config()))
    ...     kb.explore.read_plan(path)
    {'w': get_format('kbit4')}
    """
    try:
        stored = read_json_file(path)
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise FileError(f"{path} is not a plan: it is not JSON ({error})") from error
    tensors = stored.get("tensors") if isinstance(stored, dict) else None
    version = stored.get("version") if isinstance(stored, dict) else None
    if not isinstance(tensors, dict) or not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise FileError(f"{path} is not a plan: it has no version or lists no tensors; write one with kbit plan")
    if version > PLAN_VERSION:
        raise FileError(f"{path} has plan version {version}; this kbitcupy reads up to {PLAN_VERSION}: upgrade it")
    found = {}
    for tensor, config in tensors.items():
        if not isinstance(config, dict) or not isinstance(config.get("name"), str):
            raise FileError(f"{path}: tensor {tensor!r} names no format")
        options = {key: value for key, value in config.items() if key != "name"}
        found[tensor] = get_format(config["name"], **options)
    return found


# What could save less than this part of the error is not looked for: the sums are no more exact.
_RESOLUTION = 1e-12
# States of the search, which are assignments of its first tensors: how many the first pass keeps of each tensor, how
# many the last one may keep of all together, and how many may be looked at for one. Some hundred MB.
_FIRST_STATES, _MOST_STATES, _MOST_CANDIDATES = 1 << 12, 1 << 26, 1 << 22


def _cheapest(
    nbytes: Sequence[Sequence[int]], errors: Sequence[Sequence[float]], budget: int, time_limit: float = math.inf
) -> tuple[list[int], float]:
    """One choice for each tensor, with the least total error of those that take at most `budget` bytes.

    Parameters
    ----------
    nbytes : sequence of sequence of int
        For each tensor, the bytes of its choices. The smallest choices fit the budget.
    errors : sequence of sequence of float
        Their errors, finite and not negative.
    budget : int
        Bytes of all tensors together.
    time_limit : float
        Seconds after which the best choice so far is the answer.

    Returns
    -------
    list of int
        For each tensor, the index of its choice.
    float
        What no choice's total error is below: that of this choice, where none is better.
    """
    deadline = time.monotonic() + time_limit
    # Choices as a matrix, padded by choices of infinite error.
    most = max(map(len, nbytes))
    cost = np.array([[*row, *[max(row)] * (most - len(row))] for row in nbytes], np.int64)
    error = np.array([[*row, *[np.inf] * (most - len(row))] for row in errors])
    rows = np.arange(len(cost))
    # Totals of bytes differ by multiples of one number: the budget ends at one of them.
    smallest = cost.min(1, keepdims=True)
    unit = int(np.gcd.reduce((cost - smallest).reshape(-1)))
    budget = int(smallest.sum()) + (budget - int(smallest.sum())) // max(unit, 1) * unit

    best, bound, price = _Relaxed(cost, error).filled(budget)
    upper, lower = float(error[rows, best].sum()), 0.0
    states = _FIRST_STATES
    while True:
        lower = min(max(lower, bound), upper)
        # A choice takes no part when every assignment with it has a larger error than the best known one.
        priced = error + price * cost
        more = priced * (1 - _RESOLUTION) - priced.min(1, keepdims=True)
        part = np.isfinite(error) & (bound + more <= upper)
        part[rows, best] = True
        core = np.flatnonzero(part.sum(1) > 1)
        proven = lower >= upper * (1 - _RESOLUTION) or not core.size
        if proven or states * core.size > _MOST_STATES or states * int(part.sum(1).max()) > _MOST_CANDIDATES:
            break
        # Large tensors come first: the small ones then fill what is left of the budget.
        core = core[np.argsort(-np.where(part[core], cost[core], 0).max(1), kind="stable")]
        others = np.setdiff1d(rows, core)
        room = budget - int(cost[others, best[others]].sum())
        fixed = float(error[others, best[others]].sum())
        search = _Relaxed(cost[core], np.where(part[core], error[core], np.inf))
        found, upper, bounded = search.searched(room, fixed, upper, states, deadline)
        if found is not None:
            best[core] = found
        lower = min(max(lower, bounded), upper)
        if lower >= upper * (1 - _RESOLUTION) or time.monotonic() >= deadline:
            break
        states *= 8
    return best.tolist(), upper if proven or lower >= upper * (1 - _RESOLUTION) else lower


class _Relaxed:
    """The problem of `_cheapest`, and what becomes of it when choices may be mixed: the lower convex hulls.

    On a tensor's hull, from the smallest choice to the one of the least error, each step saves less error a byte than
    the one before. The steps of all tensors in that order are the least error for any budget.

    Parameters
    ----------
    cost : array of int64[tensors, choices]
        Bytes.
    error : array of float64[tensors, choices]
        Errors; infinite where there is no choice.
    """

    def __init__(self, cost: np.ndarray, error: np.ndarray):
        self.cost, self.error = cost, error
        hulls = [_hull(*row) for row in zip(cost.tolist(), error.tolist(), strict=True)]
        steps = [
            (row, after, cost[row, after] - cost[row, before], error[row, before] - error[row, after])
            for row, hull in enumerate(hulls)
            for before, after in itertools.pairwise(hull)
        ]
        rows, choices, costs, saved = (np.array(column) for column in zip(*steps, strict=True)) if steps else [()] * 4
        self.step_cost, self.step_saved = np.array(costs, np.int64), np.array(saved, float)
        with np.errstate(over="ignore"):
            self.step_price = self.step_saved / self.step_cost
        order = np.lexsort((-self.step_cost, -self.step_price))
        self.step_row, self.step_choice = np.array(rows, np.int64)[order], np.array(choices, np.int64)[order]
        self.step_cost, self.step_saved = self.step_cost[order], self.step_saved[order]
        self.step_price = self.step_price[order]
        self.first = np.array([hull[0] for hull in hulls])
        numbers = np.arange(len(cost))
        self.least_cost = _sums_from(cost[numbers, self.first])
        self.least_error = _sums_from(error[numbers, [hull[-1] for hull in hulls]])

    def filled(self, budget: int) -> tuple[np.ndarray, float, float]:
        """A good choice: every step that fits, in their order. Then a bound of all choices, and the price of a byte."""
        best, blocked = self.first.copy(), set()
        left = budget - int(self.least_cost[0])
        steps = zip(self.step_row.tolist(), self.step_choice.tolist(), self.step_cost.tolist(), strict=True)
        price = 0.0
        for number, (row, choice, nbytes) in enumerate(steps):
            if nbytes <= left and row not in blocked:
                best[row] = choice
                left -= nbytes
            else:
                blocked.add(row)
                price = price or float(self.step_price[number])
        nbytes, errors, _ = self._ahead(0)
        _, bound = _between(nbytes, errors, np.array([budget]))
        return best, float(bound[0]), price

    def searched(
        self, budget: int, fixed: float, upper: float, states: int, deadline: float
    ) -> tuple[np.ndarray | None, float, float]:
        """A choice whose error and `fixed` are less than `upper`, and the least possible unless time or states run out.

        Dynamic programming over the tensors: of each keeps as many `states` at most.

        Returns
        -------
        array of int or None
            The choice; None when none was found.
        float
            Its error and `fixed`, or `upper`.
        float
            A bound of every choice: not above the other one.
        """
        spent, lost = np.zeros(1, np.int64), np.full(1, fixed)  # bytes and error of each state
        trail: list[tuple[np.ndarray, np.ndarray]] = []  # for each tensor, each state's predecessor and choice
        best, dropped = None, math.inf
        for row in range(len(self.cost)):
            options = np.flatnonzero(np.isfinite(self.error[row]))
            before, choice = np.repeat(np.arange(len(spent)), len(options)), np.tile(options, len(spent))
            spent, lost = spent[before] + self.cost[row, choice], lost[before] + self.error[row, choice]
            fits = np.flatnonzero(spent + self.least_cost[row + 1] <= budget)
            spent, lost, before, choice = spent[fits], lost[fits], before[fits], choice[fits]
            nbytes, errors, steps = self._ahead(row + 1)
            at, bound = _between(nbytes, errors, budget - spent)
            bound += lost
            total = lost + errors[at]
            if total.min() < upper:
                state = int(total.argmin())
                upper, best = float(total[state]), self.first.copy()
                taken = steps[: at[state]]
                best[self.step_row[taken]] = self.step_choice[taken]  # of a tensor's steps the last one counts
                best[row], state = choice[state], before[state]
                for earlier in range(row - 1, -1, -1):
                    best[earlier], state = trail[earlier][1][state], trail[earlier][0][state]
            # A state goes when it cannot end below the best known total, or when another one takes no more bytes and
            # has no more error.
            alive = np.flatnonzero(bound < upper * (1 - _RESOLUTION))
            alive = alive[np.lexsort((lost[alive], spent[alive]))]
            alive = alive[lost[alive] < np.minimum.accumulate(np.append(np.inf, lost[alive]))[:-1]]
            if len(alive) > states:
                order = np.argpartition(bound[alive], states)
                dropped = min(dropped, float(bound[alive[order[states:]]].min()))
                alive = alive[order[:states]]
            if time.monotonic() >= deadline:
                dropped = min(dropped, float(bound[alive].min(initial=math.inf)))
                alive = alive[:0]
            if not alive.size:
                break
            trail.append((before[alive].astype(np.int32), choice[alive].astype(np.int32)))
            spent, lost = spent[alive], lost[alive]
        return best, upper, min(dropped, upper)

    def _ahead(self, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What the tensors from `row` on take, in bytes and in error, before and after each of their steps; those."""
        steps = np.flatnonzero(self.step_row >= row)
        nbytes = self.least_cost[row] + np.concatenate(([0], np.cumsum(self.step_cost[steps])))
        # Summed from the small end: a difference of large numbers would have their error.
        saved = np.concatenate((np.cumsum(self.step_saved[steps][::-1])[::-1], [0.0]))
        return nbytes, self.least_error[row] + saved, steps


def _hull(cost: Sequence[int], error: Sequence[float]) -> list[int]:
    """The choices on the lower convex hull, from the smallest one to that of the least error."""
    hull: list[int] = []
    prices: list[float] = []  # error saved for a byte, up to each of them
    for i in sorted((i for i, e in enumerate(error) if e < math.inf), key=lambda i: (cost[i], error[i])):
        if hull and error[i] >= error[hull[-1]]:
            continue
        while hull:
            price = (error[hull[-1]] - error[i]) / (cost[i] - cost[hull[-1]])
            if len(hull) == 1 or price < prices[-1]:
                break
            hull.pop()
            prices.pop()
        if hull:
            prices.append(price)
        hull.append(i)
    return hull


def _between(nbytes: np.ndarray, errors: np.ndarray, room: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each number of bytes the last step that it has room for, and the least error on the line to the next one."""
    at = np.searchsorted(nbytes, room, "right") - 1
    after = np.minimum(at + 1, len(nbytes) - 1)
    missing = (nbytes[after] - room) / np.maximum(nbytes[after] - nbytes[at], 1)
    return at, errors[after] + (errors[at] - errors[after]) * np.maximum(missing, 0.0)


def _sums_from(x: np.ndarray) -> np.ndarray:
    """Element i is the sum of the elements from i on; one more element of 0 ends them."""
    return np.concatenate((np.cumsum(x[::-1], 0)[::-1], np.zeros_like(x[:1])))


# ---- plots ---------------------------------------------------------------------------------------------------------


def plot_sqnr(rows: Sequence[Mapping[str, Any]], *, ax: Any = None) -> Any:
    """SQNR against bits per element, with the Gaussian rate-distortion bound of 6.02 dB per bit.

    Formats that differ in their number only (``kbit1`` to ``kbit8``) are joined by a line.

    Parameters
    ----------
    rows : sequence of dict
        Rows of `sweep`. One tensor gets a colour for each family of formats; up to seven get a colour each, and a
        marker for each family; of more tensors each family shows its range in its own colour.
    ax : matplotlib.axes.Axes, optional
        Where to draw; by default a new figure, which has room for the legend beside the axes of several tensors.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    MissingExtraError
        When matplotlib is not installed.

    Notes
    -----
    A Gaussian source of variance s^2 has at rate R the distortion s^2 2^(-2 R) or more. The line is a bound for
    independent Gaussian elements; other distributions, and elements whose size varies from block to block, can lie
    above it.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> rows = kb.explore.sweep(np.random.default_rng(0).standard_normal(4096), ["kbit2", "kbit4"])
    >>> kb.explore.plot_sqnr(rows).get_xlabel()  # doctest: +SKIP
    'bits per element'
    """
    series: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        series.setdefault((row["tensor"], _family(row)), []).append(row)
    tensors = list(dict.fromkeys(tensor for tensor, _ in series))
    families = list(dict.fromkeys(family for _, family in series))
    several, many = len(tensors) > 1, len(tensors) > len(_COLOURS)
    given = ax is not None
    ax = _axes(ax, (10.0, 4.8) if several else (7.0, 4.5))
    shown: dict[str, Any] = {}  # the legend: a line for each tensor and each family, not for each pair of them
    for (tensor, family), members in series.items():
        members.sort(key=lambda row: row["bits_per_element"])
        number = families.index(family)
        colour = _COLOURS[(tensors.index(tensor) if several and not many else number) % len(_COLOURS)]
        style = {
            "marker": _MARKERS[number % len(_MARKERS)],
            "linestyle": ("-", "-.")[number % 2],
            "fillstyle": "none",
            "markersize": 7,
            "linewidth": 1.2,
        }
        (line,) = ax.plot(
            [row["bits_per_element"] for row in members],
            [row["sqnr_db"] for row in members],
            color=colour,
            zorder=3 - number / 100,  # dashes over lines, hollow markers: one place may hold several
            alpha=0.3 if many else None,
            label=_shortened(" to ".join(dict.fromkeys((members[0]["label"], members[-1]["label"]))), 40),
            **style,
        )
        if several and not many:
            shown.setdefault(f"tensor {tensor}", _sample(_shortened(tensor, 40), color=colour, linewidth=3))
        if not several or len(families) > 1 or many:
            only = {} if not several else {"color": colour if many else _GREY}
            shown.setdefault(f"family {family}", _sample(line.get_label(), **style, **only) if only else line)
    most = max((row["bits_per_element"] for row in rows), default=8.0)
    (bound,) = ax.plot(
        [0, most], [0, DB_PER_BIT * most], color=_GREY, linestyle="--", linewidth=1, label="6.02 dB per bit"
    )
    ax.set(xlabel="bits per element", ylabel="SQNR in dB", xlim=(0, 1.05 * most))
    ax.set_title(f"{len(tensors)} tensors" if many else _shortened(tensors[0], 40) if len(tensors) == 1 else "")
    ax.grid(color="#DDDDDD", linewidth=0.6)
    handles = [*sorted(shown.values(), key=lambda line: line.get_marker() != "None"), bound]
    beside = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.02)} if several and not given else {}
    ax.legend(handles=handles, fontsize="small", frameon=False, ncols=1 + len(handles) // 24, **beside)
    return ax


def _sample(name: str, **style: Any) -> Any:
    """A line of the legend that stands for several lines."""
    from matplotlib.lines import Line2D

    return Line2D([], [], label=name, **style)


def plot_error_histogram(
    x: Any, formats: str | Format | Iterable[str | Format] | None = None, *, bins: int = 121, ax: Any = None
) -> Any:
    """Distribution of the errors of some formats, in units of the array's root mean square.

    Parameters
    ----------
    x : array_like
        float array, as `quantize` takes it.
    formats : str, Format or iterable of them, optional
        Formats to draw; by default every format that needs no option.
    bins : int, default 121
        Bins of the histogram.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure by default.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    FormatError
        When a format is unknown.
    MissingExtraError
        When matplotlib is not installed.
    """
    ax = _axes(ax)
    data = _xp.as_array(x)
    _xp.float_dtype(data.dtype, "x")
    host = _xp.to_device(data, "cpu").astype(np.float64).reshape(-1)
    unit = math.sqrt(float(host @ host) / max(host.size, 1)) or 1.0
    errors = {
        label(format): (_xp.to_device(dequantize(quantize(data, format)), "cpu").reshape(-1) - host) / unit
        for format in _chosen(formats)
    }
    # The few largest errors would squeeze the rest into one bin.
    reach = max((float(np.quantile(abs(error), 0.9999)) for error in errors.values() if error.size), default=1.0)
    for i, (name, error) in enumerate(errors.items()):
        density, edges = np.histogram(error, np.linspace(-reach, reach, bins + 1), density=True)
        ax.stairs(density, edges, color=_COLOURS[i % len(_COLOURS)], linestyle=_dashes(i), linewidth=1.2, label=name)
    ax.set(xlabel="error / root mean square of the array", ylabel="density", yscale="log")
    ax.set_axisbelow(True)
    ax.grid(color="#DDDDDD", linewidth=0.6)
    ax.legend(fontsize="small", frameon=False, ncols=2)
    return ax


def plot_codebook(codebook: Any, *, sample: Any = None, ax: Any = None) -> Any:
    """Levels and thresholds of a codebook, and each cell's share of the squared error.

    Parameters
    ----------
    codebook : array_like of float, 1-D
        The levels, for elements divided by the absmax of their block.
    sample : array_like, optional
        Such elements, in [-1, 1]; by default those of normal blocks of 32.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure by default.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    ValueError
        When the codebook is not a 1-D array of two or more finite numbers.
    MissingExtraError
        When matplotlib is not installed.
    """
    levels = np.sort(np.asarray(codebook, np.float64))
    if levels.ndim != 1 or levels.size < 2 or not np.isfinite(levels).all():
        raise ValueError(f"codebook has shape {levels.shape}; it must be 1-D with two or more finite numbers")
    ax = _axes(ax)
    scaled = _normal_blocks() if sample is None else np.asarray(sample, np.float64).reshape(-1)
    thresholds = (levels[1:] + levels[:-1]) / 2
    cell = np.searchsorted(thresholds, scaled)
    error = np.bincount(cell, (scaled - levels[cell]) ** 2, levels.size)
    share = error / (error.sum() or 1.0)
    low, high = min(scaled.min(), levels[0]), max(scaled.max(), levels[-1])
    edges = np.concatenate(([low], thresholds, [high]))
    ax.bar(
        edges[:-1],
        100 * share,
        np.diff(edges),
        align="edge",
        color=_COLOURS[5],
        edgecolor="white",
        linewidth=0.6,
        label="share of the squared error",
    )
    ax.vlines(thresholds, 0, 100 * share.max(), color=_GREY, linestyle=":", linewidth=0.8, label="thresholds")
    ax.plot(levels, np.zeros(levels.size), "^", color=_COLOURS[1], markersize=7, clip_on=False, label="levels")
    ax.set(xlabel="element / absmax of its block", ylabel="share of the squared error in %")
    ax.set_ylim(0, 130 * share.max())  # room for the legend
    ax.legend(fontsize="small", frameon=False, ncols=3, loc="upper center")
    return ax


def plot_layers(rows: Sequence[Mapping[str, Any]], *, plan: Plan | None = None, ax: Any = None) -> Any:
    """Heat map of the SQNR of every tensor in every format.

    Parameters
    ----------
    rows : sequence of dict
        Rows of `sweep`, every format on every tensor.
    plan : Plan, optional
        The cells that it chose get a frame.
    ax : matplotlib.axes.Axes, optional
        Where to draw; by default a new figure that is as high as the tensors need.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    MissingExtraError
        When matplotlib is not installed.
    """
    tensors, columns = _cells(rows)
    labels = list(columns)
    values = np.full((len(tensors), len(labels)), np.nan)
    for row in rows:
        values[tensors.index(row["tensor"]), labels.index(row["label"])] = row["sqnr_db"]
    ax = _axes(ax, _heat_map_size(rows))
    image = ax.imshow(np.where(np.isfinite(values), values, np.nan), cmap="cividis", aspect="auto")
    ax.figure.colorbar(image, ax=ax, label="SQNR in dB", pad=0.02)
    ax.set_yticks(range(len(tensors)), [_shortened(name) for name in tensors], fontsize="small")
    ax.set_xticks(range(len(labels)), columns.values(), fontsize="small")
    ax.xaxis.tick_top()
    _write_numbers(ax, image, values)
    if plan is not None:
        from matplotlib.patches import Rectangle

        for row in plan.rows:
            if row["tensor"] in tensors and row["label"] in labels:
                corner = (labels.index(row["label"]) - 0.5, tensors.index(row["tensor"]) - 0.5)
                ax.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=_COLOURS[1], linewidth=1.8))
    return ax


def _cells(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], dict[str, str]]:
    """Rows and columns of a heat map: the tensors; the formats by bits, with what stands above them."""
    tensors = list(dict.fromkeys(row["tensor"] for row in rows))
    nbytes: dict[str, int] = {}
    elements: dict[str, int] = {}
    for row in rows:
        nbytes[row["label"]] = nbytes.get(row["label"], 0) + row["nbytes_after"]
        elements[row["label"]] = elements.get(row["label"], 0) + row["elements"]
    bits = {name: 8 * nbytes[name] / max(elements[name], 1) for name in nbytes}
    # An option a line: the columns stay narrow, and nothing has to be turned or cut.
    return tensors, {
        name: name.replace(":", ":\n", 1).replace(",", ",\n") + f"\n{bits[name]:.2f} bits"
        for name in sorted(bits, key=bits.__getitem__)
    }


# Inches of a character and of a line of small print, and of a row of a heat map.
_CHARACTER, _LINE, _ROW = 0.075, 0.16, 0.24


def _heat_map_size(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Width and height in inches of a page with room for every name."""
    tensors, columns = _cells(rows)
    lines = [title.splitlines() for title in columns.values()]
    across = len(lines) * max((_CHARACTER * len(line) + 0.12 for title in lines for line in title), default=1.0)
    names = _CHARACTER * max((len(_shortened(name)) for name in tensors), default=0)
    above = _LINE * max(map(len, lines), default=0)
    return names + across + 1.4, max(above + _ROW * len(tensors) + 0.4, 2.0)


def _write_numbers(ax: Any, image: Any, values: np.ndarray) -> None:
    """The numbers of a heat map in its cells, where those are large enough."""
    ax.figure.draw_without_rendering()  # the layout decides how large they are
    box = ax.get_window_extent()
    width, height = (72 * size / ax.figure.dpi for size in (box.width, box.height))
    size = min(8.0, 0.72 * height / max(len(values), 1), 0.38 * width / max(values.shape[1], 1))
    if size < 5:
        return
    for (i, j), value in np.ndenumerate(values):
        red, green, blue, _ = image.cmap(image.norm(value)) if math.isfinite(value) else (1, 1, 1, 1)
        dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
        text = f"{value:.1f}" if abs(value) < 99.95 else f"{value:.0f}"
        ax.text(j, i, text, ha="center", va="center", fontsize=size, color="white" if dark else "black")


def figure(rows: Sequence[Mapping[str, Any]]) -> Any:
    """The picture of `kbit compare --plot`: SQNR against bits, one panel for each of up to four tensors; a heat map of
    more tensors.

    Parameters
    ----------
    rows : sequence of dict
        Rows of `sweep`, every format on every tensor.

    Returns
    -------
    matplotlib.figure.Figure
        It belongs to no window system, so ``savefig`` works everywhere.

    Raises
    ------
    MissingExtraError
        When matplotlib is not installed.
    """
    _matplotlib()
    from matplotlib.figure import Figure

    tensors = list(dict.fromkeys(row["tensor"] for row in rows))
    if len(tensors) > 4:
        page = Figure(figsize=_heat_map_size(rows), layout="constrained")
        plot_layers(rows, ax=page.subplots())
        return page
    across, down = min(len(tensors), 2), -(-len(tensors) // 2)
    page = Figure(layout="constrained")
    panels = page.subplots(down, across, sharex=True, sharey=True, squeeze=False).reshape(-1)
    for panel, tensor in zip(panels, tensors, strict=False):
        plot_sqnr([row for row in rows if row["tensor"] == tensor], ax=panel)
        panel.get_legend().remove()
        panel.label_outer()
    for panel in panels[len(tensors) :]:
        panel.set_axis_off()
    handles, names = panels[0].get_legend_handles_labels()
    width = 4.6 * across if across > 1 else 6.4
    fit = min(max(int(width / (0.65 + _CHARACTER * max(map(len, names)))), 1), 5)
    lines = -(-len(names) // fit)
    page.set_size_inches(width, 3.3 * down + 0.7 + 0.22 * max(lines - 2, 0))
    page.legend(handles, names, loc="outside lower center", ncols=fit, frameon=False)
    return page


def picture_kinds() -> list[str]:
    """The endings of files that a figure can be saved as: ``"png"``, ``"svg"``, ...

    Raises
    ------
    MissingExtraError
        When matplotlib is not installed.
    """
    _matplotlib()
    from matplotlib.backend_bases import FigureCanvasBase

    return sorted(FigureCanvasBase.get_supported_filetypes())


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtraError("a plot needs matplotlib: pip install 'kbitcupy[plot]'") from error
    return matplotlib


def _axes(ax: Any, figsize: tuple[float, float] = (7.0, 4.5)) -> Any:
    if ax is not None:
        return ax
    _matplotlib()
    from matplotlib import pyplot

    return pyplot.subplots(figsize=figsize, layout="constrained")[1]


def _family(row: Mapping[str, Any]) -> str:
    """What the formats of one line have in common: the name without its number, and the changed options."""
    name, _, changed = row["label"].partition(":")
    return ":".join(filter(None, (re.sub(r"\d+$", "", name), changed)))


def _dashes(i: int) -> str:
    """A line style for the i-th series, another one each time that the colours begin anew."""
    return ("-", "--", ":", "-.")[i // len(_COLOURS) % 4]


def _shortened(name: str, room: int = 44) -> str:
    return name if len(name) <= room else f"{name[: room // 2 - 2]}...{name[-(room // 2 - 1) :]}"


def _normal_blocks(blocks: int = 1 << 14) -> np.ndarray:
    """Elements of normal blocks of 32, each divided by the absmax of its block."""
    x = np.random.default_rng(0).standard_normal((blocks, 32))
    return (x / abs(x).max(1, keepdims=True)).reshape(-1)
