"""Formats measured on many arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..backend import xp as _xp
from ..errors import FormatError
from ..formats.base import Choice, Format, resolve
from ..text import Column, shortened, table
from .candidates import Candidate, Search, ahead
from .measurement import default_formats, notes, remarks


class Sweep(list[dict[str, Any]]):
    """The rows of `sweep`: a list, which is shown as a table and says what its numbers hide."""

    def __repr__(self) -> str:
        words = list(dict.fromkeys(word for row in self for word in row.get("shares", ())))
        columns = [Column(title, left=i < 2) for i, title in enumerate((*_SHOWN, *words))]
        lines = []
        for row in self[:_MOST_SHOWN]:
            numbers = (f"{row[key]:.2f}" for key in _SHOWN.values() if key)
            shares = (f"{row['shares'][word]:.1%}" if word in row.get("shares", ()) else "-" for word in words)
            lines.append([shortened(row["tensor"], _NAME), shortened(row["label"], _NAME), *numbers, *shares])
        more = [f"... {len(self) - _MOST_SHOWN} more rows"] if len(self) > _MOST_SHOWN else []
        return "\n".join((table(columns, lines), *more, *notes(self), *remarks(self)))


# Columns that a sweep is shown with, and their keys; how many rows, and characters of a name.
_SHOWN = {
    "tensor": "",
    "format": "",
    "bits": "bits_per_element",
    "SQNR dB": "sqnr_db",
    "centered": "sqnr_centered_db",
}
_MOST_SHOWN, _NAME = 40, 44


def sweep(
    x: Any,
    formats: str | Format | Choice | Iterable[str | Format | Choice] | None = None,
    *,
    device: str | None = None,
    progress: bool = False,
    all: bool = False,
) -> Sweep:
    """Measure formats on arrays.

    Parameters
    ----------
    x : array_like, mapping of str to array_like, or iterable of (str, array_like)
        The arrays: float16, bfloat16, float32 or float64 of any shape. A generator of pairs keeps one of them in
        memory at a time.
    formats : str, Format or iterable of them, optional
        What to measure, such as ``"int4:block=32"``, or a tuple of it and a dict of what `kbitcupy.quantize` is given
        beside it, such as ``("kbit4", {"codebook": values})``; by default every format that needs no option and takes
        an array of this shape (see `default_formats`), and with other options, finer granularities and codebooks that
        are fitted to the array among them, those that keep a dB more than any that is no larger. A sample of the array
        says which.
    device : str, optional
        Where to work: ``"cpu"``, ``"cuda:N"``, or ``"auto"`` for a GPU where there is one. By default where the arrays
        are.
    progress : bool, default False
        Show a progress bar.
    all : bool, default False
        Without `formats`: those too that lists do not show to who has not asked for them.

    Returns
    -------
    Sweep
        A list with a dict for each tensor and format, tensor by tensor, ready for ``pandas.DataFrame``. Keys:
        ``tensor``, ``shape``, ``dtype``, ``format`` (name), ``family``, ``options``, ``given`` (names of what
        `kbitcupy.quantize` was given beside them), ``fitted`` (what of it was fitted to the array, as lists of
        numbers), ``label`` (name and changed options, which `get_format` reads), ``elements``, ``bits_per_element``,
        ``sqnr_db``, ``sqnr_centered_db`` (against the variance instead of the mean square),
        ``cosine``, ``mse``, ``max_error``, ``signal`` and ``squared_error`` (sums of squares), ``nbytes_before``,
        ``nbytes_after``, ``mean`` and ``deviation`` (standard deviation) of the tensor, ``nan`` and ``infinite`` (how
        many of its elements are), ``shares`` (what the format tells of its codes, such as the share of zeros, by a
        word) and ``remark`` (what it says of the error, or None).

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
    chosen = None if formats is None else [Candidate.of(choice) for choice in chosen_formats(formats, ())]
    device = None if device is None else _xp.resolve_device(device)
    rows, search = Sweep(), Search(all=all)
    for tensor, array in _progress(_named(x), progress):
        rows += rows_of(chosen, search, tensor, checked(array, f"tensor {tensor!r}", device))
    return rows


def rows_of(chosen: Sequence[Candidate] | None, search: Search, tensor: str, x: Any) -> list[dict[str, Any]]:
    """The rows of one array: of the chosen formats, or of those that `sweep` takes without any."""
    if chosen is not None:
        return [one.measured(x, tensor).row() for one in chosen]
    plain = default_formats(x.shape, all=search.all)
    found = [Candidate(format).measured(x, tensor) for format in plain]
    # What was ahead on a sample need not be on all of the array.
    found += (one.measured(x, tensor) for one in search.beyond(x, plain))
    sizes = [(each.nbytes_after, each.sums.noise, i < len(plain)) for i, each in enumerate(found)]
    return [found[i].row() for i in (*range(len(plain)), *ahead(sizes))]


def checked(x: Any, name: str, device: str | None = None) -> Any:
    """An array that can be measured, on a device if one is named.

    Raises
    ------
    TypeError
        When it is none, or not of a float dtype.
    """
    data = _xp.as_array(x, name)
    _xp.float_dtype(data.dtype, name)
    return data if device is None else _xp.to_device(data, device)


def chosen_formats(
    wanted: str | Format | Choice | Iterable[str | Format | Choice] | None, shape: tuple[int, ...], all: bool = False
) -> Sequence[Choice]:
    """Formats as `sweep` takes them, each with what is given beside it; for None `default_formats` of `shape`.

    Raises
    ------
    FormatError
        When there is none, or a name is not known.
    """
    if wanted is None:
        return [(format, {}) for format in default_formats(shape, all=all)]
    if isinstance(wanted, (str, Format)) or (isinstance(wanted, tuple) and wanted and isinstance(wanted[-1], Mapping)):
        wanted = (wanted,)
    found = [resolve(each) for each in wanted]
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
