"""Dask arrays of compressed blocks: each chunk is compressed, and decoded, for itself.

A chunk of ``quantize(x, format)`` is the `QuantizedArray` of a chunk of `x`, NumPy's or CuPy's, on whatever scheduler
it is computed. ``chunks`` are true, so blocks are taken with ``q.blocks``, rows with ``q[a:b]``; arithmetic wants
`dequantize` first, which is a map over blocks as well and fuses with what comes behind it.

It needs the extra ``dask``. Where that is installed, schedulers count a compressed array by the
bytes of its planes, and workers of dask-cuda move it to the host when their GPU is full.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from . import ops
from .array import QuantizedArray
from .backend import xp as _xp
from .dask_size import register as _register_size
from .errors import FormatError, MissingExtraError
from .formats.base import Choice, Format, resolve
from .metrics import Sums, sums

try:
    import dask
    import dask.array as da
    from dask.array.dispatch import concatenate_lookup, take_lookup
    from dask.sizeof import sizeof
except ImportError:  # documentation is read without it, too
    dask = None

if TYPE_CHECKING:
    from dask.delayed import Delayed

__all__ = ["compare", "dequantize", "quantize"]

# Sums that are added together.
_ADDED = 16


def quantize(x: da.Array, format: str | Format | Choice, **options: Any) -> da.Array:
    """Compress each chunk of a Dask array.

    Parameters
    ----------
    x : dask.array.Array
        Of float16, bfloat16, float32 or float64, with chunks of NumPy or CuPy. Formats whose rows are whole blocks want
        chunks whose rows are.
    format : str, Format or tuple of one of them and a dict
        As for `kbitcupy.quantize`.
    **options
        Options of the format, or what `kbitcupy.quantize` is given beside it, such as ``codebook=``: the same for all
        chunks.

    Returns
    -------
    dask.array.Array
        Of the same shape, dtype and chunks, whose chunks are `kbitcupy.QuantizedArray`. A format with one scale for the
        whole array has one for each chunk. ``compute()`` puts chunks together along axis 0 where `kbitcupy.concatenate`
        does; ``to_delayed()`` and ``blocks`` give them one by one.

    Raises
    ------
    TypeError
        When `x` is no Dask array, or of no float dtype.
    FormatError
        When the format is not known; when it is computed, where it refuses a chunk.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> import dask.array as da  # doctest: +SKIP
    >>> x = da.random.default_rng(0).standard_normal((4096, 1024), chunks=(1024, 1024))  # doctest: +SKIP
    >>> q = kb.dask.quantize(x, "nf4")  # doctest: +SKIP
    >>> q.chunks, q.blocks[1].compute()  # doctest: +SKIP
    """
    _check(x, "x")
    _xp.float_dtype(x.dtype, "x.dtype")
    resolved, given = resolve(format, **options)
    if not resolved.can_encode:
        raise FormatError(f"{resolved} is only decoded, it cannot be compressed to")
    work = functools.partial(_quantized, format=resolved, given=given)
    return x.map_blocks(
        work, dtype=x.dtype, meta=_empty(work, x._meta), name=f"kbit-quantize-{_token(x, resolved, given)}"
    )


def dequantize(q: da.Array, *, dtype: Any = None) -> da.Array:
    """Restore each chunk of a Dask array that `quantize` made.

    Parameters
    ----------
    q : dask.array.Array
        Its chunks are `kbitcupy.QuantizedArray`.
    dtype : dtype_like, optional
        float16, bfloat16, float32 or float64; by default that of `q`.

    Returns
    -------
    dask.array.Array
        Of the same shape and chunks, of NumPy or CuPy, where the planes are.

    Raises
    ------
    TypeError
        When `q` is no Dask array, or `dtype` no float dtype; when it is computed, where a chunk is not compressed.

    Examples
    --------
    >>> import dask.array as da, kbitcupy as kb  # doctest: +SKIP
    >>> x = da.random.default_rng(0).standard_normal((4096, 1024), chunks=(1024, 1024))  # doctest: +SKIP
    >>> kb.dask.dequantize(kb.dask.quantize(x, "kbit4")).mean(axis=0).compute()  # doctest: +SKIP
    """
    _check(q, "q")
    wanted = _xp.float_dtype(q.dtype if dtype is None else dtype)
    work = functools.partial(_dequantized, dtype=wanted)
    return q.map_blocks(work, dtype=wanted, meta=_empty(work, q._meta), name=f"kbit-dequantize-{_token(q, wanted)}")


def compare(x: da.Array, formats: str | Format | Choice | Sequence[str | Format | Choice]) -> Delayed:
    """What formats would cost and keep, chunk by chunk: nothing but sums travels.

    Parameters
    ----------
    x : dask.array.Array
        As for `quantize`.
    formats : str, Format, tuple of one of them and a dict, or sequence of these
        What to measure.

    Returns
    -------
    dask.delayed.Delayed
        Of a list with a dict for each format: ``format`` (as it calls itself), ``bits_per_element``, ``sqnr_db``,
        ``sqnr_centered_db``, ``cosine``, ``mse``, ``max_error``, ``elements``, ``nbytes_before``, ``nbytes_after``: the
        numbers of `kbitcupy.explore.sweep`, of all chunks together.

    Raises
    ------
    TypeError, FormatError
        As `quantize`.

    Examples
    --------
    >>> import dask.array as da, kbitcupy as kb  # doctest: +SKIP
    >>> x = da.random.default_rng(0).standard_normal((4096, 1024), chunks=(1024, 1024))  # doctest: +SKIP
    >>> [row["sqnr_db"] for row in kb.dask.compare(x, ["kbit3", "kbit4"]).compute()]  # doctest: +SKIP
    """
    _check(x, "x")
    _xp.float_dtype(x.dtype, "x.dtype")
    one = isinstance(formats, (str, Format)) or (isinstance(formats, tuple) and isinstance(formats[-1], dict))
    wanted: Any = [formats] if one else formats
    chosen = [resolve(each) for each in wanted]
    if not chosen:
        raise FormatError("formats is empty; name at least one, see kbitcupy.list_formats()")
    parts = [dask.delayed(_measured)(chunk, chosen) for chunk in x.to_delayed().ravel()]
    while len(parts) > 1:
        parts = [dask.delayed(_added)(parts[i : i + _ADDED]) for i in range(0, len(parts), _ADDED)]
    return dask.delayed(_rows)(parts[0], [format for format, _ in chosen])


# ---- what is done to a chunk -----------------------------------------------------------------------------------------


def _quantized(x: Any, format: Format, given: dict[str, Any]) -> QuantizedArray:
    return ops.quantize(x, format, **given)


def _dequantized(q: Any, dtype: np.dtype) -> Any:
    return ops.dequantize(q, dtype=dtype)


def _measured(x: Any, chosen: Sequence[Choice]) -> list[tuple[Sums, int, int]]:
    """Sums of the errors, bytes before and after, for each format."""
    found = []
    for format, given in chosen:
        q = ops.quantize(x, format, **given)
        found.append((sums(x, ops.dequantize(q)), int(x.nbytes), q.nbytes))
    return found


def _added(parts: Sequence[Sequence[tuple[Sums, int, int]]]) -> list[tuple[Sums, int, int]]:
    total = list(parts[0])
    for part in parts[1:]:
        total = [(a + b, c + d, e + f) for (a, c, e), (b, d, f) in zip(total, part, strict=True)]
    return total


def _rows(total: Sequence[tuple[Sums, int, int]], formats: Sequence[Format]) -> list[dict[str, Any]]:
    return [
        {
            "format": str(format),
            "bits_per_element": 8 * after / found.count if found.count else float("nan"),
            "sqnr_db": found.sqnr_db,
            "sqnr_centered_db": found.sqnr_centered_db,
            "cosine": found.cosine,
            "mse": found.mse,
            "max_error": found.largest,
            "elements": found.count,
            "nbytes_before": before,
            "nbytes_after": after,
        }
        for format, (found, before, after) in zip(formats, total, strict=True)
    ]


# ---- what Dask asks --------------------------------------------------------------------------------------------------


def _check(x: Any, argument: str) -> None:
    if dask is None:
        raise MissingExtraError("kbitcupy.dask needs Dask's arrays: pip install 'kbitcupy[dask]'")
    if not isinstance(x, da.Array):
        raise TypeError(
            f"{argument} is {type(x).__name__}; it must be a dask.array.Array: dask.array.from_array makes one, and "
            "kbitcupy.quantize and dequantize take plain arrays"
        )


def _token(*what: Any) -> str:
    return str(
        dask.base.tokenize(*(getattr(each, "name", each) if isinstance(each, da.Array) else each for each in what))
    )


def _empty(work: Any, meta: Any) -> Any:
    """What `work` makes of a chunk without elements, which is how Dask knows what chunks are."""
    try:
        return work(meta)
    except (ValueError, TypeError):  # the format has no empty arrays, or what chunks are is not known
        return None


def _concatenate(parts: Sequence[QuantizedArray], axis: int = 0) -> QuantizedArray:
    """Chunks that lie one behind the other, as one array."""
    if len(parts) == 1:
        return parts[0]
    if axis != 0:
        raise FormatError(
            f"chunks that lie beside each other along axis {axis} are not put together compressed: call "
            "kbitcupy.dask.dequantize first, compute blocks one by one, or rechunk to whole rows before quantizing"
        )
    return ops.concatenate(list(parts))


def _take(q: QuantizedArray, rows: Any, axis: int = 0) -> QuantizedArray:
    """Some rows of a chunk."""
    if axis != 0:
        raise FormatError(
            f"a compressed array is indexed along axis 0, not {axis}: call kbitcupy.dask.dequantize first"
        )
    return q[rows]


if dask is not None:
    concatenate_lookup.register(QuantizedArray, _concatenate)
    take_lookup.register(QuantizedArray, _take)
    _register_size(sizeof)  # for a checkout that is not installed: its entry point is not known
