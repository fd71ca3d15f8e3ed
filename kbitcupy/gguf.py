"""Raw blocks of GGUF, the files of ggml and llama.cpp: bytes as such a file has them, and arrays of them.

A `QuantizedArray` in one of GGUF's formats has a plane for each field of a block; a file has the fields of a block side
by side, block after block. `to_blocks` and `from_blocks` turn one into the other, exactly; `quantize` and `dequantize`
go from numbers to such bytes and back. All of them work on NumPy and on CuPy arrays, where the data is.

Blocks of an array of shape [..., K] are uint8 of shape [..., bytes of K elements], as the package ``gguf`` has them.
They are read from any byte of a buffer. Formats are named as in `kbitcupy.quantize`: ``"q4_k"``, in any case.
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

__all__ = ["block_size", "dequantize", "from_blocks", "quantize", "to_blocks", "type_id", "type_size"]


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
