"""What a bit costs: formats measured over tensors, the best format for each tensor under a budget, and plots of both.

Measuring and planning need nothing but kbitcupy. The plots need matplotlib (the extra ``plot``), which is imported when
one is drawn; each takes a matplotlib Axes, or makes one, and returns it.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import _xp, metrics
from ._version import __version__
from .errors import FileError, FormatError, MissingExtraError
from .formats.base import Format, formats, get_format
from .io.safetensors import read_json_file
from .ops import dequantize, quantize

__all__ = [
    "Measurement",
    "Plan",
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
    """

    tensor: str
    format: Format | None = None
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    sums: metrics.Sums = field(default_factory=metrics.Sums)
    nbytes_before: int = 0
    nbytes_after: int = 0

    @property
    def bits_per_element(self) -> float:
        """Bits of all planes for each element; NaN without elements."""
        return self.nbytes_after * 8 / self.sums.count if self.sums.count else math.nan

    def add(self, other: Measurement) -> None:
        """Count `other` in."""
        self.sums += other.sums
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
            "cosine": self.sums.cosine,
            "mse": self.sums.mse,
            "max_error": self.sums.largest,
            "signal": self.sums.signal,
            "squared_error": self.sums.noise,
            "nbytes_before": self.nbytes_before,
            "nbytes_after": self.nbytes_after,
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
    return Measurement(tensor, format, x.shape, x.dtype.name, sums, x.nbytes, q.nbytes)


def default_formats() -> list[Format]:
    """Every registered format that can be made without options.

    Examples
    --------
    >>> import kbitcupy as kb
    >>> [str(format) for format in kb.explore.default_formats()][:2]
    ['kbit1', 'kbit2']
    """
    made = []
    for name in formats():
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


def sweep(
    x: Any,
    formats: str | Format | Iterable[str | Format] | None = None,
    *,
    device: str | None = None,
    progress: bool = False,
) -> list[dict[str, Any]]:
    """Measure formats on arrays.

    Parameters
    ----------
    x : array_like, mapping of str to array_like, or iterable of (str, array_like)
        The arrays: float16, bfloat16, float32 or float64 of any shape. A generator of pairs keeps one of them in
        memory at a time.
    formats : str, Format or iterable of them, optional
        What to measure; by default every format that needs no option (see `default_formats`).
    device : str, optional
        Where to work: ``"cpu"``, ``"cuda:N"``, or ``"auto"`` for a GPU where there is one. By default where the arrays
        are.
    progress : bool, default False
        Show a progress bar.

    Returns
    -------
    list of dict
        One for each tensor and format, tensor by tensor, ready for ``pandas.DataFrame``. Keys: ``tensor``, ``shape``,
        ``dtype``, ``format`` (name), ``options``, ``label`` (name and changed options), ``elements``,
        ``bits_per_element``, ``sqnr_db``, ``cosine``, ``mse``, ``max_error``, ``signal`` and ``squared_error`` (sums
        of squares), ``nbytes_before``, ``nbytes_after``.

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
    rows = []
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
        raise FormatError("formats is empty; name at least one, see kbitcupy.formats()")
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


@dataclass(frozen=True)
class Plan:
    """A format for each tensor, as `plan` chooses them.

    Parameters
    ----------
    budget_bits : float
        Bits per element that the plan was made for.
    rows : tuple of dict
        The chosen row of `sweep` for each tensor.
    """

    budget_bits: float
    rows: tuple[dict[str, Any], ...]

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
            "tensors": {name: format.config() for name, format in self.formats.items()},
        }


def plan(
    tensors: Any,
    budget_bits: float,
    *,
    formats: str | Format | Iterable[str | Format] | None = None,
    device: str | None = None,
    progress: bool = False,
) -> Plan:
    """The format for each tensor that makes the total squared error least, under a budget of bits.

    The choice is exact: no other assignment of the given formats has a lower total within the budget.

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
    This is the multiple-choice knapsack problem. A price per byte (Lagrange multiplier) turns it into one decision per
    tensor, and the price that fits the budget bounds the optimum from below. Dynamic programming over the tensors then
    keeps only choices that neither another dominates nor the bound excludes.

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
    found = _cheapest(
        [[row["nbytes_after"] for row in options] for options in choices.values()],
        [[row["squared_error"] for row in options] for options in choices.values()],
        budget,
    )
    return Plan(float(budget_bits), tuple(options[i] for i, options in zip(found, choices.values(), strict=True)))


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


def _cheapest(nbytes: Sequence[Sequence[int]], errors: Sequence[Sequence[float]], budget: int) -> list[int]:
    """One choice for each tensor, with the least total error of those that take at most `budget` bytes.

    Parameters
    ----------
    nbytes : sequence of sequence of int
        For each tensor, the bytes of its choices. The smallest choices fit the budget.
    errors : sequence of sequence of float
        Their errors, finite and not negative.
    budget : int
        Bytes of all tensors together.

    Returns
    -------
    list of int
        For each tensor, the index of its choice.
    """
    # Choices as a matrix, padded by choices of infinite error. Large tensors come first: the small ones then fill what
    # is left of the budget.
    sequence = sorted(range(len(nbytes)), key=lambda i: -max(nbytes[i]))
    width = max(map(len, nbytes))
    cost = np.array([[*nbytes[i], *[max(nbytes[i])] * (width - len(nbytes[i]))] for i in sequence], np.int64)
    error = np.array([[*errors[i], *[np.inf] * (width - len(errors[i]))] for i in sequence])
    rows = np.arange(len(cost))

    # The lowest price of a byte at which the best choices fit the budget, by bisection over all prices that matter.
    prices = _prices(cost, error)
    low, high = 0, len(prices) - 1
    while low < high:
        middle = (low + high) // 2
        if cost[rows, _at_price(prices[middle], cost, error)].sum() <= budget:
            high = middle
        else:
            low = middle + 1
    near = np.unique(np.clip(high + np.array([-64, -16, -4, -1, 0, 1, 4, 16, 64]), 0, len(prices) - 1))
    near = np.append(prices[near], prices[-1])  # the last one stands for the smallest choices

    # What the tensors from a row on will take: in error and bytes if each has its choice at one of these prices, and
    # at least, in error plus price times bytes (which bounds every assignment from below).
    completion = np.stack([_at_price(price, cost, error) for price in near], 1)
    rest_cost = _sums_from(np.take_along_axis(cost, completion, 1))
    rest_error = _sums_from(np.take_along_axis(error, completion, 1))
    rest_priced = rest_error + near * rest_cost

    spent, lost = np.zeros(1, np.int64), np.zeros(1)  # bytes and error of each state: an assignment of the first rows
    trail: list[tuple[np.ndarray, np.ndarray]] = []  # for each row, each state's predecessor and choice
    upper, best = np.inf, completion[:, -1]
    for row in range(len(cost) + 1):
        total = np.where(spent[:, None] + rest_cost[row] <= budget, lost[:, None] + rest_error[row], np.inf)
        if total.min() < upper:
            upper = total.min()
            state, price = np.unravel_index(total.argmin(), total.shape)
            best = completion[:, price].copy()
            for earlier in range(row - 1, -1, -1):
                best[earlier], state = trail[earlier][1][state], trail[earlier][0][state]
        if row == len(cost):
            break
        options = np.flatnonzero(np.isfinite(error[row]))
        before, choice = np.repeat(np.arange(len(spent)), len(options)), np.tile(options, len(spent))
        spent, lost = spent[before] + cost[row, choice], lost[before] + error[row, choice]
        # A state goes when it cannot end below the best known total, with a margin for the rounding of these sums, ...
        priced, paid = lost[:, None] + rest_priced[row + 1], near * (budget - spent)[:, None]
        bound = (priced - paid - 1e-12 * (priced + abs(paid))).max(1)
        alive = np.flatnonzero((bound <= upper) & (spent + rest_cost[row + 1, -1] <= budget))
        # ... or when another one takes no more bytes and has no more error.
        alive = alive[np.lexsort((lost[alive], spent[alive]))]
        alive = alive[lost[alive] < np.minimum.accumulate(np.append(np.inf, lost[alive]))[:-1]]
        trail.append((before[alive], choice[alive]))
        spent, lost = spent[alive], lost[alive]
    result = [0] * len(sequence)
    for i, choice in zip(sequence, best.tolist(), strict=True):
        result[i] = choice
    return result


def _prices(cost: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Every price of a byte at which a tensor may change its choice, from 0 to one at which all take the smallest."""
    more = cost[:, None, :] - cost[:, :, None]
    with np.errstate(invalid="ignore", divide="ignore"):  # of the padding
        saved = error[:, :, None] - error[:, None, :]
        slopes = np.unique((saved / more)[np.isfinite(saved) & (saved > 0) & (more > 0)])
    return np.concatenate(([0.0], slopes, [2 * slopes[-1] if slopes.size else 1.0]))


def _at_price(price: float, cost: np.ndarray, error: np.ndarray) -> np.ndarray:
    """The choice of each tensor when a byte costs `price`: the smaller one of two that are equally good."""
    total = error + price * cost
    tied = total == total.min(1, keepdims=True)
    return np.where(tied, cost, np.iinfo(np.int64).max).argmin(1)


def _sums_from(x: np.ndarray) -> np.ndarray:
    """Row i is the sum of the rows from i on; one more row of zeros ends them."""
    return np.concatenate((np.cumsum(x[::-1], 0)[::-1], np.zeros_like(x[:1])))


# ---- plots ---------------------------------------------------------------------------------------------------------


def plot_sqnr(rows: Sequence[Mapping[str, Any]], *, ax: Any = None) -> Any:
    """SQNR against bits per element, with the Gaussian rate-distortion bound of 6.02 dB per bit.

    Formats that differ in their number only (``kbit1`` to ``kbit8``) are joined by a line.

    Parameters
    ----------
    rows : sequence of dict
        Rows of `sweep`. One tensor gets a colour for each family of formats; several get a colour each, and a marker
        for each family.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure by default.

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
    ax = _axes(ax)
    series: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        series.setdefault((row["tensor"], _family(row)), []).append(row)
    tensors = list(dict.fromkeys(tensor for tensor, _ in series))
    families = list(dict.fromkeys(family for _, family in series))
    for (tensor, family), members in series.items():
        members.sort(key=lambda row: row["bits_per_element"])
        place = tensors.index(tensor) if len(tensors) > 1 else families.index(family)
        name = " to ".join(dict.fromkeys((members[0]["label"], members[-1]["label"])))
        if len(tensors) > 1:
            name = tensor if len(families) == 1 else f"{tensor}: {name}"
        ax.plot(
            [row["bits_per_element"] for row in members],
            [row["sqnr_db"] for row in members],
            marker=_MARKERS[families.index(family) % len(_MARKERS)],
            color=_COLOURS[place % len(_COLOURS)],
            linestyle=("-", "-.")[families.index(family) % 2],
            fillstyle="none",
            zorder=3 - families.index(family) / 100,  # dashes over lines, hollow markers: one place may hold several
            linewidth=1.2,
            markersize=7,
            label=name,
        )
    most = max((row["bits_per_element"] for row in rows), default=8.0)
    ax.plot([0, most], [0, DB_PER_BIT * most], color=_GREY, linestyle="--", linewidth=1, label="6.02 dB per bit")
    ax.set(xlabel="bits per element", ylabel="SQNR in dB", xlim=(0, 1.05 * most))
    ax.set_title(_shortened(tensors[0], 40) if len(tensors) == 1 else "")
    ax.grid(color="#DDDDDD", linewidth=0.6)
    ax.legend(fontsize="small", frameon=False)
    return ax


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
    tensors = list(dict.fromkeys(row["tensor"] for row in rows))
    labels = list(dict.fromkeys(row["label"] for row in rows))
    bits: dict[str, float] = {row["label"]: row["bits_per_element"] for row in rows}
    labels.sort(key=bits.__getitem__)
    values = np.full((len(tensors), len(labels)), np.nan)
    for row in rows:
        values[tensors.index(row["tensor"]), labels.index(row["label"])] = row["sqnr_db"]
    ax = _axes(ax, (3.5 + 0.55 * len(labels), 1.8 + 0.21 * len(tensors)))
    image = ax.imshow(np.where(np.isfinite(values), values, np.nan), cmap="cividis", aspect="auto")
    ax.figure.colorbar(image, ax=ax, label="SQNR in dB")
    ax.set_yticks(range(len(tensors)), [_shortened(name) for name in tensors], fontsize="small")
    ax.set_xticks(
        range(len(labels)), [f"{name} ({bits[name]:.2f} bits)" for name in labels], rotation=60, ha="right",
        rotation_mode="anchor", fontsize="small",
    )  # fmt: skip
    if plan is not None:
        from matplotlib.patches import Rectangle

        for row in plan.rows:
            if row["tensor"] in tensors and row["label"] in labels:
                corner = (labels.index(row["label"]) - 0.5, tensors.index(row["tensor"]) - 0.5)
                ax.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=_COLOURS[1], linewidth=1.8))
    return ax


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
        labels = {row["label"] for row in rows}
        page = Figure(figsize=(4.5 + 0.55 * len(labels), 1.8 + 0.21 * len(tensors)), layout="constrained")
        plot_layers(rows, ax=page.subplots())
        return page
    across, down = min(len(tensors), 2), -(-len(tensors) // 2)
    page = Figure(figsize=(4.6 * across, 3.3 * down + 0.7), layout="constrained")
    panels = page.subplots(down, across, sharex=True, sharey=True, squeeze=False).reshape(-1)
    for panel, tensor in zip(panels, tensors, strict=False):
        plot_sqnr([row for row in rows if row["tensor"] == tensor], ax=panel)
        panel.get_legend().remove()
        panel.label_outer()
    for panel in panels[len(tensors) :]:
        panel.set_axis_off()
    page.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
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
