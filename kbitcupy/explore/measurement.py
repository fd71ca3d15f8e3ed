"""What formats cost and keep, measured on arrays."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .. import metrics
from ..backend import xp as _xp
from ..errors import FormatError
from ..formats.base import Choice, Format, get_format, list_formats, resolve
from ..ops import dequantize, quantize


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
    given : tuple of str
        What `kbitcupy.quantize` was given beside the format.
    shares : dict of str to float
        What `Format.shares` tells of the compressed tensor.
    fitted : dict of str to array
        What of `given` was fitted to the tensor.
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
    given: tuple[str, ...] = ()
    shares: dict[str, float] = field(default_factory=dict)
    fitted: dict[str, Any] = field(default_factory=dict)

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
        count = self.sums.count + other.sums.count
        for word, share in other.shares.items():
            before = self.shares.get(word, 0.0) * self.sums.count
            self.shares[word] = (before + share * other.sums.count) / count if count else math.nan
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
            "family": None if self.format is None else self.format.family,
            "options": {} if self.format is None else self.format.options(),
            "given": list(self.given),
            "fitted": {name: np.asarray(values).tolist() for name, values in self.fitted.items()},
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
            "shares": dict(self.shares),
            "remark": None if self.format is None else self.format.remark(self.sums.sqnr_db, self.sums.cosine),
        }


def measure(x: Any, format: str | Format | Choice, tensor: str = "x") -> Measurement:
    """Compress an array, restore it, and measure what was lost.

    Parameters
    ----------
    x : array
        NumPy or CuPy array of a float dtype.
    format : str, Format or tuple of one of them and a dict
        The format, and what `kbitcupy.quantize` is given beside it, such as ``("kbit4", {"codebook": values})``.
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
    format, given = resolve(format)
    try:
        q = quantize(x, format, **given)
        sums = metrics.sums(x, dequantize(q))
    except (ValueError, TypeError) as error:
        raise FormatError(f"tensor {tensor!r} with {format}: {error}") from error
    nan, infinite = (0, 0) if math.isfinite(sums.signal) else _not_finite(x)
    shares = {}
    if format.tells:
        with _xp.on_device_of(x):
            shares = format.shares(q.planes, q.shape)
    about = (tensor, format, x.shape, x.dtype.name, sums, x.nbytes, q.nbytes, sums.spread, nan, infinite)
    return Measurement(*about, tuple(given), shares)


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


def default_formats(shape: tuple[int, ...] | None = None, *, all: bool = False) -> list[Format]:
    """Every registered format that lists show, that can be made without options and quantized to.

    Parameters
    ----------
    shape : tuple of int, optional
        Leave out those that refuse an array of this shape, as its rows are not whole blocks of theirs.
    all : bool, default False
        Those too that lists do not show to who has not asked for them (`Format.default`).

    Examples
    --------
    >>> import kbitcupy as kb
    >>> [str(format) for format in kb.explore.default_formats()][:2]
    ['kbit1', 'kbit2']
    >>> [name for name in ("q8_0", "q4_k") if kb.get_format(name) in kb.explore.default_formats((64, 96))]
    ['q8_0']
    """
    made = []
    for name in list_formats(default=None if all else True):
        try:
            format = get_format(name)
            if shape is not None:
                format.check_shape(shape)
        except (ValueError, TypeError):  # or it needs an option that only the caller knows, such as a table
            continue
        if format.can_encode:
            made.append(format)
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


def remarks(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """What formats say of their errors in rows of `sweep`, in one line each (`Format.remark`).

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> x = np.random.default_rng(0).standard_normal((64, 64))
    >>> for remark in kb.explore.remarks(kb.explore.sweep(x, ["kbit2", "ternary"])):
    ...     print(remark[:44])
    note: ternary of 'x': so low an SQNR says th
    """
    found: dict[tuple[str, str], list[str]] = {}
    tensors = set()
    for row in rows:
        tensors.add(row["tensor"])
        if row.get("remark"):
            found.setdefault((row["label"], row["remark"]), []).append(repr(row["tensor"]))
    lines = []
    for (format, remark), names in found.items():
        which = names[0] if len(names) == 1 else f"{len(names)} of {len(tensors)} tensors"
        lines.append(f"note: {format} of {which}: {remark}")
    return lines


def _listed(words: Sequence[str], most: int = 3) -> str:
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")
