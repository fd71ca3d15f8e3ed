"""Flat functions with the names and the argument order of bitsandbytes' pull request 1858: buffers in, buffers out.

The pull request is open, no release of bitsandbytes has its functions. Its rules are kept: the index search divides by
the float32 absmax, there is no tensor scale, and buffers carry the padding that it allocates (K words of ``packed``,
one entry of ``absmax``, both zero and never read). Buffers without the padding are accepted. Two of its faults are
mended: E4M4 saturates at 31 instead of wrapping, and a float32 absmax is decoded as what it is. K = 1, 6, 7, 8, a
float16 absmax, `pack_kbit` and `unpack_kbit` are additions; magnitudes under 2^-126 are zero, as everywhere here.

Arrays are NumPy's, CuPy's, or torch tensors, which are shared without a copy; where the first argument is a tensor,
results are.

`quantize_nf4` and `dequantize_nf4` are the layout of bitsandbytes 0.50, see `kbitcupy.formats.codebook.table4`.
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any

import numpy as np

from .. import tables
from ..backend import xp as _xp
from ..backend.compile import Template
from ..backend.launch import Kernel
from ..errors import DeviceError, FormatError
from ..formats.base import get_format
from ..formats.codebook import kbit, numpy as host, scales, search
from ..ops import check_out, decode, quantize, source

_ABSMAX_FORMATS = {"e4m4": "e4m4", "fp32": "float32", "fp16": "float16"}
_ABSMAX_OF_DTYPE = {np.dtype(np.uint8): "e4m4", np.dtype(np.float32): "float32", np.dtype(np.float16): "float16"}
_WORDS = {np.dtype(np.int32): None, np.dtype(np.uint32): None}
_CODES = {
    name: Kernel(Template("codes.cu", name), (), 256, signature=("p", "i8", "i4", "p"))
    for name in ("pack_kbit", "unpack_kbit", "encode_absmax_e4m4", "decode_absmax_e4m4")
}


def create_normal_float_codebook(k: int, device: str | None = None) -> Any:
    """The 2^k values of the pull request's normal-float codebook: normal quantiles over their maximum.

    Parameters
    ----------
    k : int
        1 to 8.
    device : str, optional
        ``"cpu"`` (the default) or ``"cuda:N"``.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        float32[2^k], ascending, symmetric, from -1 to 1; the same array on every call.

    Raises
    ------
    FormatError
        When k is not 1 to 8.
    DeviceError
        When the device is not there.

    Examples
    --------
    >>> import kbitcupy as kb
    >>> kb.create_normal_float_codebook(2)
    array([-1.        , -0.27699357,  0.27699357,  1.        ], dtype=float32)
    """
    values = tables.standard_codebook("nf", search.check_k(k)).values
    device = _xp.resolve_device(device or "cpu")
    return values if device == "cpu" else _uploaded(values, int(device.partition(":")[2]))


_upload_lock = threading.Lock()


def _uploaded(values: np.ndarray, device: int) -> Any:
    """A codebook on a device: uploaded once, then the same array for everybody."""
    with _upload_lock:
        return _upload(values.tobytes(), device)


@functools.lru_cache(maxsize=256)
def _upload(values: bytes, device: int) -> Any:
    cupy = sys.modules["cupy"]
    # A stream of its own: the caller's may be capturing a graph, where an upload would become part of the graph.
    with cupy.cuda.Device(device), cupy.cuda.Stream(non_blocking=True) as stream:
        array = cupy.asarray(np.frombuffer(values, np.float32))
        stream.synchronize()
    return array


def _on_device_of(array: Any, values: np.ndarray) -> Any:
    """A host codebook where `array` is."""
    return _uploaded(values, array.data.device_id) if _xp.is_cupy(array) else values


def quantize_kbit(A: Any, k: int = 4, codebook: Any = None, absmax_format: str = "e4m4") -> tuple[Any, Any, Any]:
    """Quantize an array to k bits, as ``quantize_kbit`` of bitsandbytes' pull request 1858.

    Parameters
    ----------
    A : array_like
        float16, bfloat16, float32 or float64, flattened in C order.
    k : int, default 4
        1 to 8.
    codebook : array_like of 2^k float, optional
        By default `create_normal_float_codebook`.
    absmax_format : {"e4m4", "fp32", "fp16"}, default "e4m4"
        Storage of the block maxima.

    Returns
    -------
    packed : array
        int32[ceil(n / 32) * k + k] bit planes; bit e of word b * k + p is bit p of the index of element 32 b + e.
    absmax : array
        uint8, float32 or float16 [ceil(n / 32) + 1].
    codebook : array
        float32[2^k].

    Raises
    ------
    TypeError
        When `A` is not a float array.
    FormatError
        When k, the codebook or the absmax format is not allowed.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> packed, absmax, codebook = kb.quantize_kbit(np.linspace(-1, 1, 64, dtype=np.float32), k=4)
    >>> packed.shape, absmax.shape, codebook.shape
    ((12,), (3,), (16,))
    """
    if _xp.is_tensor(A):
        return _xp.in_torch(quantize_kbit, "A", A, k, codebook, absmax_format)
    k = search.check_k(k)
    x = _xp.as_array(A, "A")
    _xp.float_dtype(x.dtype, "A")
    if not isinstance(absmax_format, str) or absmax_format not in _ABSMAX_FORMATS:
        allowed = ", ".join(map(repr, _ABSMAX_FORMATS))
        raise FormatError(f"absmax_format is {absmax_format!r}; allowed are {allowed}")
    kind = _ABSMAX_FORMATS[absmax_format]
    standard = _on_device_of(x, tables.standard_codebook("nf", k).values)
    if codebook is None or codebook is standard:
        codebook, values = standard, 0
        table: tables.Codebook | None = tables.standard_codebook("nf", k)
    else:
        # A host codebook stays on the host for the search, which knows more of it there.
        codebook = _checked_codebook(codebook, k, x)
        table, values = search.given_codebook(codebook, k, x)
        if isinstance(codebook, np.ndarray):
            codebook = _on_device_of(x, codebook)
    x = source(x, kbit.KBit.dtypes)
    blocks = -(-x.size // host.BLOCK)
    with _xp.on_device_of(x):
        xp = _xp.namespace(x)
        allocate = xp.empty if _xp.is_cupy(x) and x.size else xp.zeros  # the kernel writes the padding, too
        packed = allocate(blocks * k + k, np.uint32)
        absmax = allocate(blocks + 1, scales.ABSMAX[kind].dtype)
        kbit.quantize_flat(x, {"packed": packed, "absmax": absmax}, k, kind, table, values)
    return packed.view(np.int32), absmax, codebook


def dequantize_kbit(packed: Any, absmax: Any, codebook: Any, k: int, n: int, dtype: Any = None, out: Any = None) -> Any:
    """Dequantize the buffers of `quantize_kbit`.

    Parameters
    ----------
    packed : array
        int32 or uint32, with or without the padding.
    absmax : array
        uint8 (E4M4), float32 or float16, decoded as what it is; with or without the padding.
    codebook : array_like of 2^k float
        The values.
    k : int
        1 to 8.
    n : int
        Number of elements. The buffers do not hold it: with the padding, up to one block more than was quantized looks
        like buffers without, and decodes it.
    dtype : dtype_like, optional
        dtype of the result: float16 by default, or that of `out`.
    out : array, optional
        One-dimensional contiguous array of at least n elements; exactly n are written.

    Returns
    -------
    array
        The n values; a view of the first n elements of `out` where that is given.

    Raises
    ------
    TypeError, ValueError
        When an argument does not fit the others.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> x = np.linspace(-1, 1, 64, dtype=np.float32)
    >>> y = kb.dequantize_kbit(*kb.quantize_kbit(x, k=5), k=5, n=64)
    >>> bool(abs(x - y).max() < 0.12)
    True
    """
    if _xp.is_tensor(packed):
        return _xp.in_torch(dequantize_kbit, "packed", packed, absmax, codebook, k, n, dtype, out=out)
    k = search.check_k(k)
    n = _check_count(n)
    packed, absmax = _xp.as_buffer(packed, "packed"), _xp.as_buffer(absmax, "absmax")
    for name, array, dtypes in (
        ("packed", packed, _WORDS),
        ("absmax", absmax, _ABSMAX_OF_DTYPE),
    ):
        if array.dtype not in dtypes:
            raise TypeError(f"{name} is {array.dtype}; allowed are {', '.join(map(str, dtypes))}")
        if array.ndim != 1 or not array.flags.c_contiguous:
            raise ValueError(f"{name} has shape {array.shape}; it must be one-dimensional and contiguous")
    blocks = -(-n // host.BLOCK)
    for name, array, exact, padding in (("packed", packed, blocks * k, k), ("absmax", absmax, blocks, 1)):
        if array.size not in (exact, exact + padding):
            raise ValueError(
                f"{name} has {array.size} entries; n = {n} and k = {k} need {exact}, or {exact + padding} with padding"
            )
    _xp.check_same_device(packed, absmax)
    values = _checked_codebook(codebook, k, packed)
    if out is not None:
        if not _xp.is_array(out):
            raise TypeError(f"out is {type(out).__name__}; it must be a NumPy or CuPy array")
        if out.ndim != 1 or out.size < n:
            raise ValueError(f"out has shape {out.shape}; it must be one-dimensional with at least {n} elements")
        check_out(out, out.shape, packed, dtype)
    kind = _ABSMAX_OF_DTYPE[absmax.dtype]
    if isinstance(packed, np.ndarray):  # a kernel looks at no more than n elements anyway
        packed, absmax = packed.view(np.uint32)[: blocks * k], absmax[:blocks]
    planes = {"packed": packed, "absmax": absmax}
    table = None
    if isinstance(values, np.ndarray):  # it travels with a launch
        table = search.custom_codebook(values, k)
    else:
        planes["codebook"] = values
    with _xp.on_device_of(packed):
        empty = _xp.namespace(packed).empty
        result = empty(n, _new_dtype(dtype)) if out is None else out[:n]
        if result.dtype in _xp.dtype_set(kbit.KBit.dtypes):
            kbit.dequantize_flat(planes, result, k, kind, table)
        else:
            single = empty(n, np.float32)
            kbit.dequantize_flat(planes, single, k, kind, table)
            result[...] = single
    return result


def pack_kbit(indices: Any, k: int) -> Any:
    """Pack indices into bit planes.

    Parameters
    ----------
    indices : array_like of int
        Values 0 to 2^k - 1, flattened in C order. On CuPy only the low k bits count.
    k : int
        1 to 8.

    Returns
    -------
    array
        int32[ceil(n / 32) * k], no padding; missing indices of the last block count as 0.

    Raises
    ------
    TypeError, FormatError
        When `indices` are not integers, or (on NumPy) out of range.

    Examples
    --------
    >>> import kbitcupy as kb
    >>> kb.pack_kbit([1, 2, 3], k=2)
    array([5, 6], dtype=int32)
    """
    if _xp.is_tensor(indices):
        return _xp.in_torch(pack_kbit, "indices", indices, k)
    k = search.check_k(k)
    array = _xp.as_array(indices, "indices")
    if array.size == 0 and not _xp.is_array(indices):
        array = array.astype(np.uint8)
    if array.dtype.kind not in "iu":
        raise TypeError(f"indices is {array.dtype}; it must be an integer array")
    blocks = -(-array.size // host.BLOCK)
    if _xp.is_cupy(array):
        with _xp.on_device_of(array):
            array = _xp.contiguous(array.astype(np.uint8, copy=False))
            packed = _xp.namespace(array).empty(blocks * k, np.uint32)
            _launch("pack_kbit", array.size, (array, array.size, int(k), packed))
        return packed.view(np.int32)
    if array.size and not (array.min() >= 0 and array.max() < 1 << k):
        raise FormatError(f"indices span {array.min()} to {array.max()}; k = {k} allows 0 to {(1 << k) - 1}")
    padded = np.zeros(blocks * host.BLOCK, np.uint8)
    padded[: array.size] = array.reshape(-1)
    packed = np.empty(blocks * k, np.uint32)
    host.pack_words(padded.reshape(-1, host.BLOCK), k, packed)
    return packed.view(np.int32)


def unpack_kbit(packed: Any, k: int, n: int) -> Any:
    """The indices in bit planes.

    Parameters
    ----------
    packed : array
        int32 or uint32, from `pack_kbit` or `quantize_kbit`.
    k : int
        1 to 8.
    n : int
        Number of indices; see `dequantize_kbit`.

    Returns
    -------
    array
        uint8[n].

    Raises
    ------
    TypeError, ValueError
        When `packed` has the wrong dtype or too few words.

    Examples
    --------
    >>> import kbitcupy as kb
    >>> kb.unpack_kbit(kb.pack_kbit([1, 2, 3], k=2), k=2, n=3)
    array([1, 2, 3], dtype=uint8)
    """
    if _xp.is_tensor(packed):
        return _xp.in_torch(unpack_kbit, "packed", packed, k, n)
    k = search.check_k(k)
    n = _check_count(n)
    packed = _xp.as_buffer(packed, "packed")
    if packed.dtype not in _WORDS:
        raise TypeError(f"packed is {packed.dtype}; it must be an int32 array")
    blocks = -(-n // host.BLOCK)
    if packed.ndim != 1 or packed.size not in (blocks * k, blocks * k + k):
        raise ValueError(
            f"packed has shape {packed.shape}; n = {n} and k = {k} need {blocks * k} words, or {blocks * k + k} with "
            "padding"
        )
    if _xp.is_cupy(packed):
        with _xp.on_device_of(packed):
            words = _xp.contiguous(packed)
            indices = _xp.namespace(words).empty(n, np.uint8)
            _launch("unpack_kbit", n, (words, n, int(k), indices))
        return indices
    return host.unpack_words(np.ascontiguousarray(packed).view(np.uint32)[: blocks * k], k).reshape(-1)[:n].copy()


def encode_absmax_e4m4(absmax: Any, bias: int = scales.E4M4_BIAS) -> Any:
    """Encode block maxima in one byte each.

    Parameters
    ----------
    absmax : array_like
        float array of any shape.
    bias : int, default 11
        Exponent bias; 11 covers 2^-14 to 31.

    Returns
    -------
    array
        uint8, shape of `absmax`. What is not positive, and NaN, give 0; from 2^(16 - bias) on 255.

    Raises
    ------
    TypeError, FormatError
        When `absmax` is not a float array or `bias` is not an integer from -96 to 120.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> kb.encode_absmax_e4m4(np.array([0.0, 1.0, 1.999, 40.0], np.float32))
    array([  0, 176, 191, 255], dtype=uint8)
    """
    if _xp.is_tensor(absmax):
        return _xp.in_torch(encode_absmax_e4m4, "absmax", absmax, bias)
    x = _xp.as_array(absmax, "absmax")
    _xp.float_dtype(x.dtype, "absmax")
    bias = _check_bias(bias)
    if not _xp.is_cupy(x):
        with np.errstate(over="ignore"):
            return scales.encode_e4m4(x.astype(np.float32), bias)
    with _xp.on_device_of(x):
        x = _xp.contiguous(x.astype(np.float32, copy=False))
        codes = _xp.namespace(x).empty(x.shape, np.uint8)
        _launch("encode_absmax_e4m4", x.size, (x, x.size, int(bias), codes))
    return codes


def decode_absmax_e4m4(encoded: Any, bias: int = scales.E4M4_BIAS) -> Any:
    """Decode block maxima.

    Parameters
    ----------
    encoded : array_like of uint8
        Codes, of any shape.
    bias : int, default 11
        Exponent bias.

    Returns
    -------
    array
        float32, shape of `encoded`.

    Raises
    ------
    TypeError, FormatError
        When `encoded` is not uint8 or `bias` is not an integer from -96 to 120.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> kb.decode_absmax_e4m4(np.array([0, 176, 255], np.uint8))
    array([ 0.,  1., 31.], dtype=float32)
    """
    if _xp.is_tensor(encoded):
        return _xp.in_torch(decode_absmax_e4m4, "encoded", encoded, bias)
    codes = _xp.as_array(encoded, "encoded")
    if codes.dtype != np.uint8:
        raise TypeError(f"encoded is {codes.dtype}; it must be uint8")
    bias = _check_bias(bias)
    if not _xp.is_cupy(codes):
        return scales.decode_e4m4(codes, bias)
    with _xp.on_device_of(codes):
        codes = _xp.contiguous(codes)
        absmax = _xp.namespace(codes).empty(codes.shape, np.float32)
        _launch("decode_absmax_e4m4", codes.size, (codes, codes.size, int(bias), absmax))
    return absmax


def quantize_nf4(x: Any, block_size_outer: int = 64, block_size_inner: int = 1) -> tuple[Any, Any]:
    """NF4 codes and scales as plain buffers.

    Parameters
    ----------
    x : array_like
        float16, bfloat16, float32 or float64, any shape; taken flat, in C order.
    block_size_outer : int, default 64
        Elements that share an absmax: a power of two from 16 to 4096.
    block_size_inner : int, default 1
        Changes nothing, as in the function of this name that it comes from: its kernel never reads it.

    Returns
    -------
    packed : array
        uint8[(n + 1) // 2], two codes a byte, the first in the high nibble.
    absmax : array
        float32[ceil(n / block)].

    Raises
    ------
    TypeError
        When `x` is not a float array.
    FormatError
        When the block size is not allowed.

    Notes
    -----
    The layout is that of bitsandbytes' ``quantize_4bit(quant_type="nf4")``. Source: QLoRA (arXiv 2305.14314).

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> packed, absmax = kb.quantize_nf4(np.linspace(-1, 1, 128, dtype=np.float32))
    >>> packed.shape, absmax
    ((64,), array([1., 1.], dtype=float32))
    """
    if _xp.is_tensor(x):
        return _xp.in_torch(quantize_nf4, "x", x, block_size_outer, block_size_inner)
    q = quantize(x, get_format("nf4", block=_nf4_block(block_size_outer, block_size_inner)))
    return q.planes["packed"], q.planes["absmax"]


def dequantize_nf4(
    packed: Any,
    absmax: Any,
    n: int,
    block_size_outer: int = 64,
    block_size_inner: int = 1,
    *,
    dtype: Any = None,
    out: Any = None,
) -> Any:
    """Dequantize the buffers of `quantize_nf4`.

    Parameters
    ----------
    packed : array
        uint8, (n + 1) // 2 entries in any shape.
    absmax : array
        float32[ceil(n / block)].
    n : int
        Number of elements.
    block_size_outer, block_size_inner : int
        As `quantize_nf4` was called.
    dtype : dtype_like, optional
        dtype of the result: float16 by default, or that of `out`.
    out : array, optional
        C-contiguous array of shape (n,), which receives the result.

    Returns
    -------
    array
        Shape (n,); `out` itself where that is given.

    Raises
    ------
    TypeError, ValueError
        When an argument does not fit the others.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> x = np.linspace(-1, 1, 128, dtype=np.float32)
    >>> y = kb.dequantize_nf4(*kb.quantize_nf4(x), n=128)
    >>> bool(abs(x - y).max() < 0.16)
    True
    """
    if _xp.is_tensor(packed):
        blocks = block_size_outer, block_size_inner
        return _xp.in_torch(dequantize_nf4, "packed", packed, absmax, n, *blocks, dtype=dtype, out=out)
    form = get_format("nf4", block=_nf4_block(block_size_outer, block_size_inner))
    packed, absmax = _xp.as_buffer(packed, "packed"), _xp.as_buffer(absmax, "absmax")
    planes = {"packed": _xp.contiguous(packed.reshape(-1)), "absmax": _xp.contiguous(absmax.reshape(-1))}
    n = _check_count(n)
    for name, spec in form.planes((n,)).items():
        plane = planes[name]
        if plane.dtype.name != spec.dtype or plane.shape != spec.shape:
            raise FormatError(
                f"{name} is {plane.dtype}[{plane.size}]; n = {n} in blocks of {form.block} needs "
                f"{spec.dtype}[{spec.shape[0]}]"
            )
    _xp.check_same_device(packed, absmax)
    with _xp.on_device_of(packed):
        if out is None:
            out = _xp.namespace(packed).empty(n, _new_dtype(dtype))
        else:
            check_out(out, (n,), packed, dtype)
        decode(form, planes, out)
    return out


def _nf4_block(outer: Any, inner: Any) -> int:
    if isinstance(outer, bool) or not isinstance(outer, (int, np.integer)) or outer not in search.BLOCKS:
        raise FormatError(
            f"block_size_outer is {outer!r}; allowed are the powers of two from {search.BLOCKS[0]} to "
            f"{search.BLOCKS[-1]}"
        )
    if isinstance(inner, bool) or not isinstance(inner, (int, np.integer)) or inner < 1:
        raise FormatError(f"block_size_inner is {inner!r}; it must be a positive integer, and changes nothing")
    return int(outer)


def _new_dtype(dtype: Any) -> np.dtype:
    """The dtype of a result that is allocated here."""
    return _xp.float_dtype("float16" if dtype is None else dtype)


def _launch(name: str, n: int, arguments: tuple[Any, ...]) -> None:
    if n:
        _CODES[name](arguments[0], -(-n // 256), arguments)


def _checked_codebook(codebook: Any, k: int, array: Any) -> Any:
    """A codebook as float32[2^k]: a CuPy array on the device of `array`, or a NumPy array."""
    if _xp.is_tensor(codebook):
        codebook = _xp.as_array(codebook, "codebook")
    if not _xp.is_cupy(codebook):
        return search.custom_codebook(codebook, k).values
    if not _xp.same_device(codebook, array):
        there, here = _xp.device_of(codebook), _xp.device_of(array)
        raise DeviceError(f"codebook is on {there} and the data on {here}; move one of them")
    return search.check_device_codebook(codebook, k)


def _check_count(n: Any) -> int:
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 0:
        raise FormatError(f"n is {n!r}; it must be a non-negative integer")
    return int(n)


def _check_bias(bias: Any) -> int:
    low, high = scales.E4M4_BIAS_RANGE
    if isinstance(bias, bool) or not isinstance(bias, (int, np.integer)) or not low <= bias <= high:
        raise FormatError(f"bias is {bias!r}; allowed are the integers {low} to {high}")
    return int(bias)
