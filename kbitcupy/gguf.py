"""Raw blocks of GGUF, the files of ggml and llama.cpp: bytes as such a file has them, and arrays of them.

A `QuantizedArray` in one of GGUF's formats has a plane for each field of a block; a file has the fields of a block side
by side, block after block. `to_blocks` and `from_blocks` turn one into the other, exactly; `quantize` and `dequantize`
go from numbers to such bytes and back. All of them work on NumPy and on CuPy arrays, where the data is.

Blocks of an array of shape [..., K] are uint8 of shape [..., bytes of K elements], as the package ``gguf`` has them.
They are read from any byte of a buffer. Formats are named as in `kbitcupy.quantize`: ``"q4_k"``, in any case.

`mmvq`, `mmvq_staged` and `mmvq_experts` are products under the names that they have beside GGUF's blocks. They take
arrays and raw blocks; `kbitcupy.linear` and `kbitcupy.linear_grouped` are what they call.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import ops
from .array import QuantizedArray
from .backend import xp as _xp
from .errors import FormatError
from .formats.base import format_factory, get_format, list_formats
from .products import dispatch
from .products.functions import as_float, as_integers, linear, linear_grouped, moved_to

__all__ = [
    "block_size",
    "dequantize",
    "from_blocks",
    "mmvq",
    "mmvq_experts",
    "mmvq_staged",
    "quantize",
    "to_blocks",
    "type_id",
    "type_size",
]


def block_size(format: Any) -> int:
    """Elements of a block.

    Parameters
    ----------
    format : str or Format
        One of GGUF's formats.

    Returns
    -------
    int

    Raises
    ------
    FormatError
        When it is no format of GGUF.

    Examples
    --------
    >>> import kbitcupy as kb
    >>> kb.gguf.block_size("q4_k"), kb.gguf.type_size("q4_k"), kb.gguf.type_id("q4_k")
    (256, 144, 12)
    """
    return int(_format(format).block)


def type_size(format: Any) -> int:
    """Bytes of a block.

    Parameters
    ----------
    format : str or Format
        One of GGUF's formats.

    Returns
    -------
    int

    Raises
    ------
    FormatError
        When it is no format of GGUF.

    Examples
    --------
    >>> import kbitcupy as kb
    >>> 8 * kb.gguf.type_size("Q4_K") / kb.gguf.block_size("Q4_K")  # bits of an element
    4.5
    """
    return int(_format(format).block_bytes)


def type_id(format: Any) -> int:
    """The number that ggml and the headers of files give a format.

    Parameters
    ----------
    format : str or Format
        One of GGUF's formats.

    Returns
    -------
    int

    Raises
    ------
    FormatError
        When it is no format of GGUF.

    Examples
    --------
    >>> import kbitcupy as kb
    >>> kb.gguf.type_id("q8_0")
    8
    """
    return int(_format(format).ggml_type)


def to_blocks(q: QuantizedArray, /) -> Any:
    """The bytes of an array as a GGUF file has them.

    Parameters
    ----------
    q : QuantizedArray
        In a format of GGUF, of shape [..., K].

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        uint8[..., K / block_size * type_size], on the device of `q`. What does not lie in blocks, the tensor scale that
        ``nvfp4`` may have, is no part of it: a file has it as a tensor of its own.

    Raises
    ------
    TypeError
        When `q` is no QuantizedArray.
    FormatError
        When its format is none of GGUF.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> q = kb.quantize(np.full((2, 64), 7.0, np.float32), "q4_0")
    >>> blocks = kb.gguf.to_blocks(q)
    >>> blocks.shape
    (2, 36)
    >>> bool((kb.gguf.from_blocks(blocks, "q4_0", q.shape).dequantize() == 7).all())
    True
    """
    if not isinstance(q, QuantizedArray):
        raise TypeError(f"q is {type(q).__name__}; it must be a QuantizedArray, as quantize returns")
    format = _format(q.format)
    return format.to_blocks(q.planes).reshape(*q.shape[:-1], q.shape[-1] // format.block * format.block_bytes)


def from_blocks(raw: Any, format: Any, shape: Sequence[int], /, *, offset: int = 0, dtype: Any = "float32") -> Any:
    """The array whose blocks lie in a buffer.

    Parameters
    ----------
    raw : array or bytes-like
        uint8 array of any shape, NumPy or CuPy or with ``__dlpack__``; bytes, bytearray, memoryview, mmap. It may hold
        more than the array, and be read-only.
    format : str or Format
        One of GGUF's formats.
    shape : sequence of int
        Shape of the array, [..., K], in which K is whole blocks. (A file counts the lengths from the last one on.)
    offset : int, default 0
        Byte of `raw` at which the blocks begin: any.
    dtype : dtype_like, default "float32"
        The dtype that the array decodes to where none is asked for.

    Returns
    -------
    QuantizedArray
        On the device of `raw`, with planes of its own. `to_blocks` is the inverse.

    Raises
    ------
    TypeError
        When `raw` is of another dtype or type, or `offset` is no integer, or `dtype` no float dtype.
    FormatError
        When the format or the shape is not allowed, or `raw` is too short.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> block = np.float16(1).tobytes() + bytes([0xFF] * 16)  # d, and 32 codes of 15
    >>> q = kb.gguf.from_blocks(b"head" + block, "q4_0", (1, 32), offset=4)
    >>> q.dequantize()[0, :4]
    array([7., 7., 7., 7.], dtype=float32)
    """
    format, dtype = _format(format), _xp.float_dtype(dtype)
    lengths = _lengths(shape)
    format.check_shape(lengths)
    planes = format.from_blocks(_cut(_bytes(raw), lengths, format, offset))
    if len(planes) < len(names := _planes(format)):
        missing = ", ".join(name for name in names if name not in planes)
        raise FormatError(
            f"blocks do not hold the plane {missing} of {format}: read them as {format.name}, and add the plane by "
            "QuantizedArray(format, {**q.planes, ...}, q.shape, q.dtype)"
        )
    return QuantizedArray._wrap(format, planes, lengths, dtype)


def dequantize(
    blocks: Any,
    format: Any,
    /,
    *,
    shape: Sequence[int] | None = None,
    offset: int = 0,
    dtype: Any = None,
    out: Any = None,
) -> Any:
    """The numbers that blocks stand for.

    Parameters
    ----------
    blocks : array or bytes-like
        As for `from_blocks`.
    format : str or Format
        One of GGUF's formats.
    shape : sequence of int, optional
        As for `from_blocks`. By default that of `out`, or where that is not given either, of `blocks`, whose last axis
        is whole blocks from `offset` to the end.
    offset : int, default 0
        Byte of `blocks` at which they begin; other than 0 with a shape, or where `blocks` has one axis.
    dtype : dtype_like, optional
        float32 by default, or that of `out`.
    out : array, optional
        C-contiguous float array on the device of `blocks`, which receives the result.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        On the device of `blocks`; `out` itself where it is given.

    Raises
    ------
    TypeError, FormatError
        As `from_blocks`.
    ValueError
        When `out` has the wrong shape or order, or is read-only.
    DeviceError
        When `out` is on another device.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> block = np.concatenate([np.array([0.25], np.float16).view(np.uint8), np.arange(1, 33, dtype=np.uint8)])
    >>> kb.gguf.dequantize(block, "q8_0")[:4]
    array([0.25, 0.5 , 0.75, 1.  ], dtype=float32)
    """
    format = _format(format)
    raw = _bytes(blocks)
    if shape is None and out is not None and _xp.is_array(out):
        shape = out.shape
    if shape is None:
        shape, raw = _own_shape(raw, format, offset)
        offset = 0
    lengths = _lengths(shape)
    if out is not None:
        ops.check_out(out, lengths, raw, dtype)
    made = from_blocks(raw, format, lengths, offset=offset, dtype="float32" if dtype is None else dtype)
    return ops.dequantize(made, out=out)


def quantize(x: Any, format: Any, /, *, importance: Any = None) -> Any:
    """Blocks of numbers.

    Parameters
    ----------
    x : array_like
        As for `kbitcupy.quantize`, of shape [..., K], in which K is whole blocks.
    format : str or Format
        One of GGUF's formats that can be made.
    importance : array_like, optional
        As for `kbitcupy.quantize`: one number for each column, of formats that use it.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        uint8[..., K / block_size * type_size], on the device of `x`: the bytes that ggml gives.

    Raises
    ------
    TypeError, FormatError
        As `kbitcupy.quantize`.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> x = np.random.default_rng(0).standard_normal((4, 512)).astype(np.float32)
    >>> blocks = kb.gguf.quantize(x, "q8_0")
    >>> blocks.shape
    (4, 544)
    >>> round(kb.metrics.sqnr_db(x, kb.gguf.dequantize(blocks, "q8_0")), 1)
    45.5
    """
    return to_blocks(ops.quantize(x, _format(format), importance=importance))


# ---- products ------------------------------------------------------------------------------------------------------


def mmvq(
    w: Any, y: Any, /, *, format: Any = None, shape: Sequence[int] | None = None, offset: int = 0, out: Any = None
) -> Any:
    """A matrix times one vector: ``out[r] = sum over c of W[r, c] * y[c]``.

    Parameters
    ----------
    w : QuantizedArray, or array or bytes-like of blocks
        [rows, K] in a format of GGUF; or its blocks, as for `from_blocks`.
    y : array_like
        float16, bfloat16 or float32 [K], of any stride, on the device of `w`. It is not quantized.
    format, shape, offset
        Of blocks: as for `from_blocks`, `shape` being (rows, K).
    out : array, optional
        C-contiguous [rows] of y's dtype, which receives the result.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        [rows] of y's dtype: added up in float32, rounded once; the same bits every time.

    Raises
    ------
    TypeError, FormatError
        As `from_blocks`, and when a dtype is not allowed.
    ValueError
        When a shape does not fit.
    DeviceError
        When the arguments are on different devices.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> blocks = np.concatenate([np.float16([d]).view(np.uint8).tolist() + list(range(32)) for d in (0.5, 0.25)])
    >>> kb.gguf.mmvq(blocks.astype(np.uint8), np.ones(32, np.float32), format="q8_0", shape=(2, 32))
    array([248., 124.], dtype=float32)
    """
    q, y = _weight(w, format, shape, offset, 2, "[rows, K]"), _floats(y, "y")
    if y.shape != q.shape[1:]:
        raise ValueError(f"y has shape {y.shape}; a weight of shape {q.shape} needs ({q.shape[1]},)")
    return linear(y, q, out=out)


def mmvq_staged(
    w: Any,
    x: Any,
    /,
    *,
    format: Any = None,
    shape: Sequence[int] | None = None,
    offset: int = 0,
    dtype: Any = None,
    out: Any = None,
) -> Any:
    """A matrix times M vectors that are quantized on the way, 32 neighbours of int8 to a scale: ``out[m, r]``.

    The scales are float32, and the sums that types with minima need are those of the codes: neither overflows, as the
    halves of GGUF's Q8_1 blocks do for large activations. Vectors are quantized as `kbitcupy.linear` does with
    ``activations="q8_1"``.

    Parameters
    ----------
    w, format, shape, offset
        As for `mmvq`; ``q8_1`` and ``q8_k``, which are for activations, are refused.
    x : array_like
        float16, bfloat16 or float32 [M, K], on the device of `w`.
    dtype : dtype_like, optional
        Of the result: float32 by default, or that of `out`.
    out : array, optional
        C-contiguous [M, rows], which receives the result.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        [M, rows]; the same bits every time.

    Raises
    ------
    TypeError, FormatError, ValueError, DeviceError
        As `mmvq`.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> rng = np.random.default_rng(0)
    >>> w = kb.quantize(rng.standard_normal((8, 256)).astype(np.float32), "q5_k")
    >>> x = rng.standard_normal((3, 256)).astype(np.float16)
    >>> y = kb.gguf.mmvq_staged(w, x)
    >>> y.shape, y.dtype, bool(np.abs(y - kb.linear(x.astype(np.float32), w)).max() < 0.05 * np.abs(y).max())
    ((3, 8), dtype('float32'), True)
    """
    q, x = _weight(w, format, shape, offset, 2, "[rows, K]"), _floats(x, "x")
    if q.format.name in _ACTIVATIONS:
        raise FormatError(f"w is {q.format}, a format of activations: take mmvq, or dequantize it")
    if x.ndim != 2 or x.shape[1] != q.shape[1]:
        raise ValueError(f"x has shape {x.shape}; a weight of shape {q.shape} needs (M, {q.shape[1]})")
    if out is not None:
        ops.check_out(out, (len(x), q.shape[0]), x, dtype)
    wanted = (
        np.dtype(np.float32)
        if dtype is None and out is None
        else _xp.float_dtype(out.dtype if dtype is None else dtype)
    )
    if wanted == x.dtype:
        return linear(x, q, activations="q8_1", out=out)
    with _xp.on_device_of(x):
        if wanted == np.float32:
            return linear(x.astype(np.float32), q, activations="q8_1", out=out)
        result = linear(x.astype(np.float32, copy=False), q, activations="q8_1").astype(wanted)
        if out is None:
            return result
        out[...] = result
    return out


def mmvq_experts(
    w: Any,
    y: Any,
    /,
    *,
    expert_ids: Any = None,
    sorted_token_ids: Any = None,
    expert_offsets: Any = None,
    topk_weights: Any = None,
    format: Any = None,
    shape: Sequence[int] | None = None,
    offset: int = 0,
    out: Any = None,
) -> Any:
    """Each token times the matrices of the experts that it goes to, added up: a mixture of experts.

    Who goes where comes in one of two ways. With `expert_ids` token t goes to the experts of its row. Else dispatch i
    brings token ``sorted_token_ids[i]`` to the expert e with ``expert_offsets[e] <= i < expert_offsets[e + 1]``.

    Parameters
    ----------
    w : QuantizedArray, array or bytes-like
        [E, rows, K] in a format of GGUF; its blocks, where `format` is given; or plain float weights, of y's dtype.
    y : array_like
        float16, bfloat16 or float32 [T, K], on the device of `w`.
    expert_ids : array_like of int, optional
        [T, top_k]; an id outside 0 .. E - 1 is no expert.
    sorted_token_ids, expert_offsets : array_like of int, optional
        [M] and [E + 1], the latter from 0 on, ascending. A number outside 0 .. T - 1 is no token.
    topk_weights : array_like, optional
        float [T, top_k], or [M]: by what products are multiplied; 1 without.
    format, shape, offset
        Of blocks: as for `from_blocks`, `shape` being (E, rows, K).
    out : array, optional
        C-contiguous [T, rows] of y's dtype, which receives the result; what it held does not count.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        [T, rows] of y's dtype, 0 for tokens that go to no expert: added up in float32, in the order of the slots or of
        the dispatches, so that the bits are the same every time. Of dispatches each product is rounded to y's dtype
        once before.

    Raises
    ------
    TypeError, FormatError
        As `mmvq`.
    ValueError
        When a shape does not fit, or both or none of the two ways are given.
    DeviceError
        When the arguments are on different devices.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> rng = np.random.default_rng(0)
    >>> w = kb.quantize(rng.standard_normal((4, 8, 64)).astype(np.float32), "q8_0")
    >>> y = rng.standard_normal((3, 64)).astype(np.float32)
    >>> a = kb.gguf.mmvq_experts(w, y, expert_ids=[[0, 1], [1, 3], [0, 3]])
    >>> tokens, offsets = np.array([0, 2, 0, 1, 1, 2]), np.array([0, 2, 4, 4, 6])
    >>> b = kb.gguf.mmvq_experts(w, y, sorted_token_ids=tokens, expert_offsets=offsets)
    >>> a.shape, bool(np.allclose(a, b, atol=1e-4))
    ((3, 8), True)
    """
    y = _floats(y, "y")
    weights = _experts(w, y, format, shape, offset)
    experts, rows, depth = weights.shape
    if not experts:
        raise ValueError(f"w has shape {weights.shape}; there must be an expert")
    if y.ndim != 2 or y.shape[1] != depth:
        raise ValueError(f"y has shape {y.shape}; weights of shape {weights.shape} need (T, {depth})")
    if (expert_ids is None) == (sorted_token_ids is None) or (sorted_token_ids is None) != (expert_offsets is None):
        raise ValueError("pass expert_ids, or sorted_token_ids with expert_offsets, and not both")
    if out is not None:
        ops.check_out(out, (len(y), rows), y, y.dtype)
    with _xp.on_device_of(y):
        if out is None:
            out = _xp.namespace(y).empty((len(y), rows), y.dtype)
        if expert_ids is not None:
            ids = moved_to(as_integers(expert_ids, "expert_ids"), y)
            if ids.ndim != 2 or len(ids) != len(y) or not ids.shape[1]:
                raise ValueError(f"expert_ids has shape {ids.shape}; it must be ({len(y)}, top_k), top_k 1 or more")
            if topk_weights is None:
                topk_weights = _xp.namespace(y).ones(ids.shape, np.float32)
            return linear_grouped(y, weights, ids, topk_weights, out=out)
        tokens = moved_to(as_integers(sorted_token_ids, "sorted_token_ids"), y)
        offsets = moved_to(as_integers(expert_offsets, "expert_offsets"), y)
        if tokens.ndim != 1 or offsets.shape != (experts + 1,):
            raise ValueError(
                f"sorted_token_ids has shape {tokens.shape} and expert_offsets {offsets.shape}; they must be (M,) and "
                f"({experts + 1},) for {experts} experts"
            )
        if topk_weights is not None:
            topk_weights = _floats(topk_weights, "topk_weights", double=True)
            if topk_weights.shape != tokens.shape:
                raise ValueError(f"topk_weights has shape {topk_weights.shape}; it must be {tokens.shape}")
        dispatch.multiply(y, weights, tokens, offsets, topk_weights, out)
    return out


#: Formats of activations.
_ACTIVATIONS = ("q8_1", "q8_k")


def _weight(w: Any, format: Any, shape: Any, offset: Any, ndim: int, axes: str) -> QuantizedArray:
    """An array in a format of GGUF, of so many axes, from such an array or from blocks."""
    if isinstance(w, QuantizedArray):
        if format is not None or shape is not None or offset:
            raise TypeError(
                "w is a QuantizedArray, which has a format and a shape: leave format, shape and offset away"
            )
        _format(w.format)
        q = w
    else:
        if format is None or shape is None:
            raise TypeError(f"w is {type(w).__name__}; blocks need their format and shape, {axes}")
        q = from_blocks(w, format, shape, offset=offset)
    if q.ndim != ndim:
        raise FormatError(f"w has shape {q.shape}; it must be {axes}")
    return q


def _experts(w: Any, y: Any, format: Any, shape: Any, offset: Any) -> Any:
    """Weights of experts: compressed, or plain floats of y's dtype."""
    if isinstance(w, QuantizedArray) or format is not None:
        return _weight(w, format, shape, offset, 3, "[E, rows, K]")
    plain = _floats(w, "w")
    if plain.dtype != y.dtype:
        raise TypeError(f"w is {plain.dtype} and y is {y.dtype}; plain weights have the dtype of y: cast one of them")
    if plain.ndim != 3 or shape is not None or offset:
        raise ValueError(f"w has shape {plain.shape}; plain weights are [E, rows, K], without shape and offset")
    return plain


def _floats(x: Any, argument: str, double: bool = False) -> Any:
    """An array of floats that products multiply."""
    array = as_float(x, argument)
    if array.dtype == np.float64 and not double:
        raise TypeError(f"{argument} is float64; allowed are float16, bfloat16 and float32: cast it")
    return array


# ---- what is given -------------------------------------------------------------------------------------------------


def _format(format: Any) -> Any:
    """A format of GGUF, which knows its blocks."""
    found = get_format(format) if isinstance(format, str) else format
    if getattr(found, "family", None) != "gguf":
        known = [name for name in list_formats() if getattr(format_factory(name), "family", "") == "gguf"]
        shown = str(found) if hasattr(found, "family") else type(found).__name__
        raise FormatError(f"format is {shown}; formats of GGUF are {', '.join(known)}")
    return found


@functools.lru_cache(maxsize=256)
def _planes(format: Any) -> tuple[str, ...]:
    """Names of the planes of an array."""
    return tuple(format.planes((format.block,)))


def _lengths(shape: Any) -> tuple[int, ...]:
    try:
        lengths = tuple(map(operator.index, shape))
    except TypeError:
        lengths = (-1,)
    if lengths and min(lengths) < 0:
        raise FormatError(f"shape is {shape!r}; it must be a sequence of integers that are not negative")
    return lengths


def _bytes(raw: Any) -> Any:
    """A buffer as a uint8 array of its shape; of bytes-like objects flat."""
    if not (_xp.is_array(raw) or hasattr(raw, "__dlpack__") or hasattr(raw, "__cuda_array_interface__")):
        try:
            return np.frombuffer(memoryview(raw).cast("B"), np.uint8)
        except TypeError as error:
            raise TypeError(
                f"raw is {type(raw).__name__}; it must be a uint8 array, or bytes-like and contiguous"
            ) from error
    array = _xp.as_array(raw, "raw")
    if array.dtype != np.uint8:
        raise TypeError(f"raw is {array.dtype}; blocks are bytes: pass uint8, or raw.view(numpy.uint8)")
    return array


def _offset(offset: Any) -> int:
    try:
        start = operator.index(offset)
    except TypeError:
        raise TypeError(f"offset is {offset!r}; it must be an integer, counted in bytes") from None
    if start < 0:
        raise FormatError(f"offset is {offset}; it must not be negative")
    return start


def _cut(raw: Any, lengths: tuple[int, ...], format: Any, offset: Any) -> Any:
    """The blocks of an array from byte `offset` on, contiguous."""
    count = math.prod(lengths) // format.block
    start, nbytes = _offset(offset), count * format.block_bytes
    if start + nbytes > raw.size:
        raise FormatError(
            f"raw holds {raw.size} bytes; an array of shape {lengths} in {format} has {count} blocks of "
            f"{format.block_bytes} bytes, which end at byte {start + nbytes}"
        )
    if nbytes == raw.size and raw.flags.c_contiguous:
        return raw
    with _xp.on_device_of(raw):
        return _xp.contiguous(raw).reshape(-1)[start : start + nbytes]


def _own_shape(raw: Any, format: Any, offset: Any) -> tuple[tuple[int, ...], Any]:
    """The shape that blocks have by themselves, and the blocks."""
    start = _offset(offset)
    if start and raw.ndim != 1:
        raise FormatError(f"offset is {start} and raw has shape {raw.shape}; with an offset pass the shape, too")
    if not raw.ndim or (raw.shape[-1] - start) % format.block_bytes or raw.shape[-1] < start:
        raise FormatError(
            f"raw has shape {raw.shape}{f' and offset is {start}' if start else ''}; without a shape its last axis is "
            f"whole blocks of {format} of {format.block_bytes} bytes"
        )
    rest = raw[..., start:] if start else raw
    return (*rest.shape[:-1], rest.shape[-1] // format.block_bytes * format.block), rest
