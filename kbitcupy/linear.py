"""Products with compressed weights: linear, matmul, linear_grouped.

Four ways lead to a product; ``linear(..., explain=True)`` prints which one is taken, and why:

- On NumPy the weights are decoded to float32, some rows at a time, and multiplied.
- On a GPU few tokens are multiplied with weights that are decoded in registers and never written (kernels/linear.cu):
  ``kbit2`` to ``kbit5`` and the 4-bit tables, float16 and bfloat16, rows of whole blocks, compute capability 8.0.
- On a GPU of compute capability 9.0 up to 128 tokens and mixtures of experts are multiplied in the same way, by larger
  tiles (kernels/linear_tile_sm90a.cu).
- On a GPU everything else is decoded whole, and cuBLAS multiplies.

Products are accumulated in fp32; the tensor scale of a k-bit format and the bias are applied in fp32, before the one
rounding to the dtype of the result.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import _cuda, _tma, _xp, tables
from ._cuda import CXX_TYPES, IDS_CXX, Template
from .array import QuantizedArray, TransposedQuantizedArray
from .errors import DeviceError, FormatError
from .formats.base import Format, register_templates
from .formats.float4 import Table4
from .formats.kbit import ABSMAX, BLOCK, KBit
from .ops import check_out, decode, dequantize

# NumPy decodes about this many elements at a time, in whole multiples of so many rows: 256 rows are whole runs of
# nested absmax values, whatever their length.
_CHUNK = 1 << 20
_CHUNK_ROWS = 256


def linear(x: Any, q: QuantizedArray, bias: Any = None, *, out: Any = None, explain: bool = False) -> Any:
    """x times the transpose of a compressed weight, plus a bias.

    Parameters
    ----------
    x : array_like
        float16, bfloat16, float32 or float64 [..., K].
    q : QuantizedArray
        Weight [N, K], on the device of `x`.
    bias : array_like, optional
        float [N]; added in fp32 (fp64 for float64 `x`) before the one rounding to x's dtype.
    out : array, optional
        C-contiguous array of the result's shape and dtype, which receives it; it must not overlap `x`.
    explain : bool, default False
        Print how the product is computed, and from how many tokens on it would be computed in another way.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        [..., N], with the dtype of `x`; `out` itself where it is given. Accumulated in fp32 (fp64 for float64 `x`). On
        CuPy the call does not synchronise, and the same call gives the same bits every time.

    Raises
    ------
    TypeError
        When an argument is of the wrong type or dtype.
    ValueError
        When a shape does not fit the others.
    DeviceError
        When the arguments are on different devices.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> rng = np.random.default_rng(0)
    >>> w = kb.quantize(rng.standard_normal((48, 64)).astype(np.float16), "kbit4")
    >>> x = rng.standard_normal((2, 3, 64)).astype(np.float16)
    >>> y = kb.linear(x, w, np.ones(48, np.float16))
    >>> y.shape, y.dtype
    ((2, 3, 48), dtype('float16'))
    >>> np.allclose(y, x @ kb.dequantize(w).T + 1, atol=0.05)
    True
    """
    x = _as_float(x, "x")
    _check_weight(q, 2, "q", "[N, K]")
    rows, depth = q.shape
    if x.ndim == 0 or x.shape[-1] != depth:
        raise ValueError(f"x has shape {x.shape}; a weight of shape {q.shape} needs [..., {depth}]")
    _check_beside(x, q)
    shape = (*x.shape[:-1], rows)
    if bias is not None:
        bias = _as_float(bias, "bias")
        if bias.shape != (rows,):
            raise ValueError(f"bias has shape {bias.shape}; a weight of shape {q.shape} needs ({rows},)")
        if not _xp.same_device(bias, x):
            raise DeviceError(f"bias is on {_xp.device_of(bias)} and x on {_xp.device_of(x)}; move one of them")
    if out is not None:
        check_out(out, shape, x, x.dtype)
    with _xp.on_device_of(x):
        if out is None:
            out = _xp.namespace(x).empty(shape, x.dtype)
        if explain:
            print(_explanation(x, q, out.size // rows if rows else 0))
        if out.size:
            _multiply(x, q, bias, out)
    return out


def matmul(a: Any, b: Any, *, out: Any = None) -> Any:
    """NumPy's ``a @ b`` where one of the two is compressed.

    Parameters
    ----------
    a, b : array_like, QuantizedArray or TransposedQuantizedArray
        Exactly one of them is compressed, the other one float16, bfloat16, float32 or float64. ``x @ q.T`` and
        ``q @ x`` of a 2-D `q` are `linear`; any other product decodes first.
    out : array, optional
        C-contiguous array of the result's shape and dtype, which receives it; it must not overlap the arguments.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        With the dtype of the operand that is not compressed, and the shape that NumPy gives the product; `out` itself
        where it is given.

    Raises
    ------
    TypeError
        When both or neither of the operands are compressed, or a dtype is not a float dtype.
    ValueError
        When the shapes do not fit.
    DeviceError
        When the operands are on different devices.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> rng = np.random.default_rng(0)
    >>> q = kb.quantize(rng.standard_normal((48, 64)).astype(np.float32), "kbit4")
    >>> kb.matmul(np.ones((5, 64), np.float32), q.T).shape, (q @ np.ones(64, np.float32)).shape
    ((5, 48), (48,))
    """
    compressed = (QuantizedArray, TransposedQuantizedArray)
    if isinstance(a, compressed) == isinstance(b, compressed):
        raise TypeError(
            f"a is {type(a).__name__} and b is {type(b).__name__}; exactly one of them must be a QuantizedArray: "
            "call .dequantize() on the other, or use the plain @ of two arrays"
        )
    left = isinstance(a, compressed)
    q = a if left else b
    x = _as_float(b if left else a, "b" if left else "a")
    shape = _product_shape(q.shape, x.shape) if left else _product_shape(x.shape, q.shape)
    _check_beside(x, q.T if isinstance(q, TransposedQuantizedArray) else q)
    if out is not None:
        check_out(out, shape, x, x.dtype)
    if not left and isinstance(b, TransposedQuantizedArray):
        return linear(x, b.T, out=out)
    if left and isinstance(a, QuantizedArray) and a.ndim == 2:
        if x.ndim == 1:
            return linear(x, a, out=out)
        result = linear(x.swapaxes(-1, -2), a).swapaxes(-1, -2)
    else:
        with _xp.on_device_of(x):
            dtype = _working_dtype(x.dtype)
            weight, array = q.dequantize(dtype=dtype), x.astype(dtype, copy=False)
            product = _xp.namespace(x).matmul(*((weight, array) if left else (array, weight)))
            result = product.astype(x.dtype, copy=False)
    if out is None:
        return result
    out[...] = result
    return out


def linear_grouped(x: Any, qs: Any, expert_ids: Any, weights: Any = None, *, out: Any = None) -> Any:
    """Each token times the transposes of the weights that it chose: a mixture of experts.

    Parameters
    ----------
    x : array_like
        float16, bfloat16, float32 or float64: [T, K], shared by the slots of a token, or [T, top_k, K], one for each.
    qs : QuantizedArray or array_like
        Weights [E, N, K] of the experts, compressed (see `stack`) or a plain float array, on the device of `x`.
    expert_ids : array_like of int
        [T, top_k]. An id outside 0 .. E - 1 chooses no expert: its product is zero.
    weights : array_like, optional
        float [T, top_k]: combine the slots of a token, in their order, in fp32.
    out : array, optional
        C-contiguous array of the result's shape and dtype, which receives it; it must not overlap the arguments.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        [T, top_k, N], or [T, N] with `weights`; with the dtype of `x`. The same call gives the same bits every time.

    Raises
    ------
    TypeError
        When an argument is of the wrong type or dtype.
    ValueError
        When a shape does not fit the others.
    DeviceError
        When the arguments are on different devices.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> rng = np.random.default_rng(0)
    >>> experts = kb.stack([kb.quantize(rng.standard_normal((48, 64)).astype(np.float32), "kbit4") for _ in range(4)])
    >>> x = rng.standard_normal((3, 64)).astype(np.float32)
    >>> kb.linear_grouped(x, experts, [[0, 2], [1, 3], [3, 0]]).shape
    (3, 2, 48)
    >>> kb.linear_grouped(x, experts, [[0, 2], [1, 3], [3, 0]], np.full((3, 2), 0.5, np.float32)).shape
    (3, 48)
    """
    x = _as_float(x, "x")
    if isinstance(qs, QuantizedArray):
        _check_weight(qs, 3, "qs", "[E, N, K]")
    else:
        qs = _as_float(qs, "qs")
        if qs.ndim != 3:
            raise ValueError(f"qs has shape {qs.shape}; it must be [E, N, K]")
    ids = _xp.as_array(expert_ids, "expert_ids")
    if ids.dtype.kind not in "iu":
        raise TypeError(f"expert_ids is {ids.dtype}; it must be an integer array")
    _, rows, depth = qs.shape
    if ids.ndim != 2:
        raise ValueError(f"expert_ids has shape {ids.shape}; it must be [T, top_k]")
    if x.shape not in ((len(ids), depth), (*ids.shape, depth)):
        raise ValueError(
            f"x has shape {x.shape}; expert_ids of shape {ids.shape} and weights of shape {qs.shape} need "
            f"({len(ids)}, {depth}) or ({len(ids)}, {ids.shape[1]}, {depth})"
        )
    _check_beside(x, qs, "qs")
    if not _xp.same_device(ids, x):
        ids = _xp.to_device(ids, _xp.device_of(x))
    if weights is not None:
        weights = _as_float(weights, "weights")
        if weights.shape != ids.shape:
            raise ValueError(f"weights has shape {weights.shape}; expert_ids has shape {ids.shape}")
        if not _xp.same_device(weights, x):
            raise DeviceError(f"weights is on {_xp.device_of(weights)} and x on {_xp.device_of(x)}; move one of them")
    shape = (len(ids), rows) if weights is not None else (*ids.shape, rows)
    if out is not None:
        check_out(out, shape, x, x.dtype)
    with _xp.on_device_of(x):
        if out is None:
            out = _xp.namespace(x).empty(shape, x.dtype)
        if not out.size:
            return out
        if not ids.size:  # no slot to add up
            out.fill(0)
        elif not _multiply_grouped(x, qs, ids, weights, out):
            _multiply_each(x, qs, ids, weights, out)
    return out


def _multiply_grouped(x: Any, qs: Any, ids: Any, weights: Any, out: Any) -> bool:
    """One launch for all experts, between those that sort and combine; whether there is a kernel for it."""
    if isinstance(x, np.ndarray) or not isinstance(qs, QuantizedArray):
        return False
    experts, rows, depth = qs.shape
    if not experts:
        return False
    kernels = _grouped_plan(qs.format, (rows, depth), x.dtype, min(ids.size, experts), x.data.device_id)
    xp = _xp.namespace(x)
    x = xp.ascontiguousarray(x)
    kernel = next((kernel for kernel in kernels if kernel.takes(x, qs.planes)), None)
    if kernel is None or experts > _MAX_EXPERTS or max(ids.size, qs.size >> 5) >= 1 << 31:
        return False
    ids = xp.ascontiguousarray(ids if ids.dtype.name in IDS_CXX else ids.astype(np.int64))
    if weights is not None:
        weights = xp.ascontiguousarray(weights.astype(np.float32, copy=False))
    kernel.grouped(x, qs.planes, ids, experts, weights, out)
    return True


def _multiply_each(x: Any, qs: Any, ids: Any, weights: Any, out: Any) -> None:
    """Expert after expert, through decoded weights."""
    xp = _xp.namespace(x)
    working = _working_dtype(x.dtype)
    _, rows, depth = qs.shape
    products = xp.zeros((*ids.shape, rows), working)
    x = xp.broadcast_to(x if x.ndim == 3 else x[:, None], (*ids.shape, depth)).astype(working, copy=False)
    for expert in range(qs.shape[0]):
        chosen = ids == expert
        weight = qs[expert].dequantize(dtype=working) if isinstance(qs, QuantizedArray) else qs[expert]
        if isinstance(x, np.ndarray):
            products[chosen] = x[chosen] @ weight.T.astype(working, copy=False)
        else:  # which tokens these are is known on the device only
            xp.copyto(products, xp.matmul(x, weight.T.astype(working, copy=False)), where=chosen[..., None])
    out[...] = products if weights is None else _combined(products, weights.astype(working, copy=False))


def _combined(products: Any, weights: Any) -> Any:
    """The weighted sum over the slots, in their order."""
    total = products[:, 0] * weights[:, :1] if products.shape[1] else products.sum(1)
    for slot in range(1, products.shape[1]):
        total = total + products[:, slot] * weights[:, slot : slot + 1]
    return total


# ---- checks --------------------------------------------------------------------------------------------------------


def _as_float(x: Any, argument: str) -> Any:
    if isinstance(x, (QuantizedArray, TransposedQuantizedArray)):
        raise TypeError(f"{argument} is {type(x).__name__}; it must be a plain array: call .dequantize()")
    array = _xp.as_array(x, argument)
    dtype = _xp.float_dtype(array.dtype, argument)
    return array if array.dtype == dtype else array.astype(dtype)  # another byte order


def _check_weight(q: Any, ndim: int, argument: str, shape: str) -> None:
    if not isinstance(q, QuantizedArray):
        hint = ": pass q, not q.T" if isinstance(q, TransposedQuantizedArray) else ", as quantize returns"
        raise TypeError(f"{argument} is {type(q).__name__}; it must be a QuantizedArray{hint}")
    if q.ndim != ndim:
        raise FormatError(f"{argument} has shape {q.shape}; it must be {shape}: reshape it")


def _check_beside(x: Any, q: Any, argument: str = "q") -> None:
    plane = next(iter(q.planes.values())) if isinstance(q, QuantizedArray) else q
    if not _xp.same_device(x, plane):
        raise DeviceError(
            f"{argument} is on {_xp.device_of(plane)} and x on {_xp.device_of(x)}; move one with .to_device(), "
            "cupy.asarray or cupy.asnumpy"
        )


@functools.lru_cache(maxsize=1024)
def _product_shape(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of ``a @ b``; strided views of one byte know NumPy's rules and messages and take no memory."""
    if not a or not b or a[-1] != b[-2 if len(b) > 1 else -1]:
        raise ValueError(f"a has shape {a} and b has shape {b}: the last length of a must be the last but one of b")
    try:
        batch = np.broadcast_shapes(a[:-2], b[:-2])
    except ValueError:
        raise ValueError(f"a has shape {a} and b has shape {b}: their leading lengths do not broadcast") from None
    return (*batch, *a[-2:-1], *(b[-1:] if len(b) > 1 else ()))


def _working_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype to multiply in: float32, or float64 for float64."""
    return dtype if dtype == np.float64 else np.dtype(np.float32)


# ---- through decoded weights ---------------------------------------------------------------------------------------


def _multiply(x: Any, q: QuantizedArray, bias: Any, out: Any) -> None:
    """Fill `out`, which is not empty; the device of `x` is the current one."""
    if not x.flags.c_contiguous:
        x = _xp.namespace(x).ascontiguousarray(x)
    n, k = q.shape
    m = out.size // n
    if isinstance(x, np.ndarray):
        _multiply_on_host(x.reshape(m, k), q, bias, out.reshape(m, n))
        return
    plan = _plan(q.format, q.shape, x.dtype, m, x.data.device_id)
    kernel = plan.kernel_for(x, q.planes)
    if kernel is not None:
        kernel(x, q.planes, bias, out)
    else:
        _multiply_decoded(x.reshape(m, k), q, bias, out.reshape(m, n))


def multiply_decoded(x: Any, q: QuantizedArray, out: Any) -> None:
    """`linear` of a 2-D `x` by the way that writes the decoded weights: what a fused kernel is compared with."""
    if isinstance(x, np.ndarray):
        _multiply_on_host(x, q, None, out)
    else:
        _multiply_decoded(x, q, None, out)


def _explanation(x: Any, q: QuantizedArray, m: int) -> str:
    """What happens to `m` tokens of the dtype and on the device of `x`, and to other numbers of them."""
    heading = f"{m} tokens of {x.dtype}, {q!r}"
    if isinstance(x, np.ndarray):
        return f"{heading}\n  any number of tokens: NumPy, decode {_CHUNK_ROWS} rows or more at a time and multiply"

    def way(tokens: int) -> str:
        return _plan(q.format, q.shape, x.dtype, tokens, x.data.device_id).reason if q.size else "nothing to multiply"

    lines = [heading, f"  these: {way(max(m, 1))}"]
    shown = ""
    for start in sorted({1, 2, _TILED_FROM, *(limit + 1 for limit in (*_FUSED_UP_TO.values(), *_TILE_TOKENS))}):
        if way(start) != shown:
            shown = way(start)
            lines.append(f"  from {start}: {shown}")
    return "\n".join(lines)


def _multiply_on_host(x: np.ndarray, q: QuantizedArray, bias: Any, out: np.ndarray) -> None:
    rows, depth = q.shape
    working = _working_dtype(x.dtype)
    x = x.astype(working, copy=False)
    step = rows
    if q.format.rows_are_blocks(q.shape):
        step = max(1, _CHUNK // max(1, depth) // _CHUNK_ROWS) * _CHUNK_ROWS
    with np.errstate(over="ignore", invalid="ignore"):  # what leaves the range of a dtype becomes infinite, as on a GPU
        for start in range(0, rows, step):
            part = q if step >= rows else q[start : start + step]
            product = x @ dequantize(part, dtype=working).T
            if bias is not None:
                product += bias[start : start + step].astype(working, copy=False)
            out[:, start : start + step] = product


def _multiply_decoded(x: Any, q: QuantizedArray, bias: Any, out: Any) -> None:
    """Decode to x's dtype and let cuBLAS multiply: alpha is the tensor scale, beta times C the bias."""
    cupy = _xp.namespace(x)
    if not x.shape[1]:
        out[...] = 0 if bias is None else bias
        return
    weight = cupy.empty(q.shape, x.dtype)
    planes = dict(q.planes)
    scale = None
    if isinstance(q.format, KBit) and x.dtype.itemsize == 2:
        scale = planes.pop("scale")  # decoded without it, weights of 1e-6 stay in the range of float16
    decode(q.format, planes, weight)
    target = out
    if bias is not None:
        if bias.dtype != out.dtype and out.dtype.itemsize == 2:
            target = cupy.empty(out.shape, np.float32)
        target[...] = bias
    _gemm(x, weight, scale, bias is not None, target)
    if target is not out:
        out[...] = target


def _gemm(x: Any, weight: Any, scale: Any, accumulate: bool, out: Any) -> None:
    """out = scale * x @ weight.T (+ out), all row-major, accumulated in fp32."""
    import cupy
    from cupy.cuda import device
    from cupy_backends.cuda.libs import cublas

    double = x.dtype == np.float64
    one, zero = _constants(x.data.device_id, "float64" if double else "float32")
    handle = device.get_cublas_handle()
    kinds = [_CUDA_TYPES[array.dtype.name] for array in (weight, x, out)]
    rows, depth = weight.shape
    mode = cublas.getPointerMode(handle)
    cublas.setPointerMode(handle, cublas.CUBLAS_POINTER_MODE_DEVICE)
    try:
        call = _cublas()
        statuses = (
            call.cublasSetStream_v2(ctypes.c_void_p(handle), ctypes.c_void_p(cupy.cuda.get_current_stream().ptr)),
            call.cublasGemmEx(
                ctypes.c_void_p(handle),
                cublas.CUBLAS_OP_T,
                cublas.CUBLAS_OP_N,
                rows,
                len(x),
                depth,
                ctypes.c_void_p((one if scale is None else scale).data.ptr),
                ctypes.c_void_p(weight.data.ptr),
                kinds[0],
                depth,
                ctypes.c_void_p(x.data.ptr),
                kinds[1],
                depth,
                ctypes.c_void_p((one if accumulate else zero).data.ptr),
                ctypes.c_void_p(out.data.ptr),
                kinds[2],
                rows,
                cublas.CUBLAS_COMPUTE_64F if double else cublas.CUBLAS_COMPUTE_32F,
                cublas.CUBLAS_GEMM_DEFAULT,
            ),
        )
    finally:
        cublas.setPointerMode(handle, mode)
    for status in statuses:
        if status:
            raise cublas.CUBLASError(status)


@functools.cache
def _cublas() -> ctypes.CDLL:
    """The library that CuPy has loaded: CuPy's own calls are refused while a stream captures, cuBLAS allows them."""
    from cuda.pathfinder import load_nvidia_dynamic_lib

    return ctypes.CDLL(load_nvidia_dynamic_lib("cublas").abs_path)


# cudaDataType of the dtypes.
_CUDA_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}


@functools.cache
def _constants(device: int, dtype: str) -> tuple[Any, Any]:
    """1 and 0 on a device: cuBLAS reads both factors there once one of them is a plane."""
    import cupy

    # A stream of its own: the caller's may be capturing a graph, where an upload would become part of the graph.
    with cupy.cuda.Device(device), cupy.cuda.Stream(non_blocking=True) as stream:
        values = cupy.asarray(np.array([1, 0], dtype))
        stream.synchronize()
    return values[:1], values[1:]


# ---- through compressed weights --------------------------------------------------------------------------------------

# As in kernels/linear.cu and linear.cuh.
_ITEM_K, _ITEM_ROWS, _TOKENS = 128, 16, 8
_TABLE_AT, _HEAD = 2048, 1024
_MOST_K = 128 * _ITEM_K  # elements of x in the gaps of a table
# As in kernels/linear_tile_sm90a.cu, and the tokens of its instances.
_GRANULE_K, _RING_END = 32, 228 * 1024 - 512
_TILE_TOKENS = (8, 16, 32, 64, 128)
# Counted in the 48 KiB of shared memory that every kernel has.
_MAX_EXPERTS = 12000


@dataclass(frozen=True)
class Decoder:
    """How a kernel reads the weights of a format.

    Parameters
    ----------
    expression : str
        The C++ type; ``{T}`` stands for the type of x.
    granule : int
        k must be a multiple of it: the elements of a row that have to lie in one block.
    entries : int
        Of the table of values.
    gaps : bool
        Whether the table has gaps, where the sums find room.
    item_bytes, scale_bytes : int
        As there.
    items, grouped_items : int
        Most items of a warp of ``linear_few``, and of its grouped flavour: there are registers for them.
    wide : bool
        Whether a thread block of ``linear_few`` may take 16 tokens: there are registers for it.
    swizzled : bool
        Whether ``TURNS`` is not 1.
    copied : bool
        Whether the scales are used as they are stored; otherwise they are spread, one for each granule.
    block : int
        Elements of a block.
    """

    expression: str
    granule: int
    entries: int
    gaps: bool
    item_bytes: int
    scale_bytes: int
    items: int
    grouped_items: int
    wide: bool
    swizzled: bool
    copied: bool
    block: int

    def shared_bytes(self, eights: int, items: int, warps: int) -> int:
        """Shared memory of a thread block of ``linear_few``."""
        stages = warps * items * _ITEM_ROWS * (self.item_bytes + 2 * self.scale_bytes)
        slots = 2 if eights == 2 else 4
        sums = 0 if self.gaps else slots * warps * _ITEM_ROWS * _TOKENS * eights * 4
        return self._table_bytes + sums + stages

    def shared_bytes_one(self, k: int, run: int, items: int, warps: int) -> int:
        """... of ``linear_one``."""
        slots = warps * 2 * items * _ITEM_ROWS * (self.item_bytes + self.scale_bytes)
        return self._table_bytes + (0 if self.gaps else k * 2) + slots + (run + warps) * _ITEM_ROWS * 4

    @property
    def _table_bytes(self) -> int:
        """Shared memory up to the end of the table of values and of what stands behind it."""
        return _TABLE_AT + self.entries * 256 + _HEAD


def _kbit_decoder(k: int, absmax: str) -> Decoder:
    return Decoder(
        f"Kbit<{{T}}, {k}, {ABSMAX[absmax].kernel}>",
        granule=BLOCK,
        entries=32 if k == 5 else 256,
        gaps=k in (3, 4),
        item_bytes=_ITEM_K * k // 8,
        scale_bytes=_ITEM_K // BLOCK * np.dtype(ABSMAX[absmax].dtype).itemsize,
        items=2 if k == 5 or absmax == "float32" else 4,
        grouped_items=2 if k == 5 or absmax == "float32" else 4,
        wide=absmax != "float32",
        swizzled=False,
        copied=True,
        block=BLOCK,
    )


def _table4_decoder(block: int, double_quant: bool) -> Decoder:
    granule = min(block, 64)
    return Decoder(
        f"Table4<{{T}}, {granule}>",
        granule=granule,
        entries=256,
        gaps=True,
        item_bytes=_ITEM_K // 2,
        scale_bytes=_ITEM_K // granule * 4,
        items=4 if block == 64 and not double_quant else 2,
        grouped_items=2,
        wide=granule == 64,
        swizzled=True,
        copied=block == granule and not double_quant,
        block=block,
    )


def decoder_of(format: Format) -> Decoder | None:
    """The decoder of a format; None where products go through decoded weights."""
    if isinstance(format, KBit):
        return _kbit_decoder(format.bits, format.absmax) if 2 <= format.bits <= 5 else None
    return _table4_decoder(format.block, format.double_quant) if isinstance(format, Table4) else None


def _decoders() -> list[Decoder]:
    """All there are, for the compile check."""
    kbit = [_kbit_decoder(k, absmax) for k in (2, 3, 4, 5) for absmax in ABSMAX]
    return kbit + [_table4_decoder(*options) for options in ((64, False), (32, False), (16, False), (64, True))]


_HALF_CXX = (CXX_TYPES["float16"], CXX_TYPES["bfloat16"])


def few_room(decoder: Decoder, eights: int, room: int, even: bool, grouped: bool = False) -> tuple[int, int]:
    """``ITEMS`` and warps of ``linear_few``, as many as the shared memory allows; no warps where it does not at all.

    Parameters
    ----------
    decoder : Decoder
        How a weight is read.
    eights : int
        Tokens of a thread block, in eights.
    room : int
        Bytes of shared memory that a thread block can have.
    even : bool
        Whether tiles are whole, and rows whole items that begin at multiples of 16 bytes.
    grouped : bool
        Whether it is the flavour for experts.
    """
    most = decoder.grouped_items if grouped else decoder.items
    for warps, items in itertools.product((16, 8), (4, 2) if even else (1,)):
        if eights * items <= 4 and items <= most and decoder.shared_bytes(eights, items, warps) <= room:
            return items, warps
    return 1, 0


def one_room(decoder: Decoder, k: int, run: int, room: int) -> tuple[int, int]:
    """``ITEMS`` and warps of ``linear_one`` as `few_room` has them, for rows of `k` and `run` tiles a thread block."""
    for warps, items in itertools.product((16, 8), (4, 2, 1)):
        if k % (items * _ITEM_K) or (items > 1 and not decoder.copied) or (decoder.gaps and k > _MOST_K):
            continue
        if decoder.shared_bytes_one(k, run, items, warps) <= room:
            return items, warps
    return 1, 0


def _instances(eights: int, grouped: bool, even: bool) -> tuple[str, ...]:
    """Those that a device with the 227 KiB of shared memory of an H100 takes."""
    found = {
        _few_arguments(decoder, T, eights, few_room(decoder, eights, 227 << 10, even, grouped)[0], grouped): None
        for decoder in _decoders()
        for T in (_HALF_CXX if even else _HALF_CXX[:1])
        if eights == 1 or decoder.wide
    }
    return tuple(found)


def _one_instances(even: bool) -> tuple[str, ...]:
    """... of ``linear_one``, for rows of whole units of four items, and for others."""
    room = 227 << 10
    return tuple(
        dict.fromkeys(
            f"{decoder.expression.format(T=T)}, {one_room(decoder, k, 16, room)[0]}, 16"
            for decoder in _decoders()
            for k in ((8192,) if even else (256, 128))
            for T in (_HALF_CXX if even else _HALF_CXX[:1])
        )
    )


def _few_arguments(decoder: Decoder, T: str, eights: int, items: int, grouped: bool) -> str:
    return f"{decoder.expression.format(T=T)}, {eights}, {items}, {str(grouped).lower()}"


def _tight() -> tuple[str, ...]:
    """With two registers too many; so are some of those for 16 tokens."""
    return tuple(f"Table4<{T}, 64>, 1, 4, false" for T in _HALF_CXX)


TEMPLATES = (
    Template("linear.cu", "linear_few", (tuple(i for i in _instances(1, False, True) if i not in _tight()),)),
    Template("linear.cu", "linear_few", (_tight(),), hot=False),
    Template("linear.cu", "linear_few", (_instances(2, False, True),), hot=False),
    Template("linear.cu", "linear_few", (_instances(1, True, True),)),
    *(Template("linear.cu", "linear_few", (_instances(eights, False, False),), hot=False) for eights in (1, 2)),
    Template("linear.cu", "linear_few", (_instances(1, True, False),), hot=False),
    Template("linear.cu", "linear_one", (_one_instances(True),)),
    Template("linear.cu", "linear_one", (_one_instances(False),), hot=False),
    Template("linear.cu", "add_partials", (_HALF_CXX,), hot=False),
    Template("linear.cu", "combine_slots", (_HALF_CXX,), hot=False),
    Template("linear.cu", "group_tokens", (tuple(IDS_CXX.values()),), hot=False),
)
register_templates(*TEMPLATES)


@dataclass(frozen=True)
class Cut:
    """How the work of ``linear_few`` is cut: ``struct Cut`` of kernels/linear.cu, and the grid.

    Parameters
    ----------
    run, warps, items, share
        As there.
    grid : tuple of int
        Thread blocks along n and along k.
    """

    run: int
    warps: int
    items: int
    share: int
    grid: tuple[int, int]


@functools.lru_cache(maxsize=1024)
def cut_few(n: int, k: int, most: int, warps: int, resident: int, splits: int = 8) -> Cut:
    """The cut with the least work for the busiest warp.

    Parameters
    ----------
    n, k : int
        Shape of the weight.
    most : int
        Items of k that a warp can have at a time, ``ITEMS`` of the kernel.
    warps : int
        Warps of a thread block.
    resident : int
        Thread blocks that the device holds.
    splits : int
        Thread blocks that may share k.
    """
    rows, total = -(-n // _ITEM_ROWS), -(-k // _ITEM_K)
    best: tuple[float, Cut] | None = None
    for split, teams in itertools.product(range(1, 1 + min(splits, total)), range(1, 1 + warps)):
        share, team = -(-total // split), warps // teams
        chunks = -(-share // (team * most))
        items = -(-share // (team * chunks))
        run = -(-rows // max(1, resident // split))
        passes = -(-run // teams)
        # Beside the items of a warp, in their unit: x, once or in each pass; sums; the launch that adds up the splits.
        work = passes * (chunks * items * (1 + 0.4 * (chunks > 1)) + 0.5) + (4 + 0.2 * split) * (split > 1)
        if best is None or work < best[0]:
            best = work, Cut(run, team, items, share, (-(-rows // run), -(-total // share)))
    assert best is not None
    return best[1]


@functools.cache
def _values_struct() -> np.dtype:
    """``struct Values`` of kernels/linear.cuh."""
    return np.dtype([("value", "f4", 32), ("map", "f4", 256), ("factor", "f4")])


@functools.lru_cache(maxsize=256)
def _values_of(format: Format, dtype: np.dtype) -> np.ndarray:
    """What a kernel knows of a format by value; planes with values of their own come first."""
    struct = np.zeros((), _values_struct())
    struct["factor"] = 1
    values = known_values(format)
    if values is not None:
        struct["value"][: values.size] = values
        struct["factor"] = gentle_factor(values, dtype)
    if isinstance(format, Table4) and format.double_quant:
        struct["map"] = tables.dynamic_map()
    return struct


def known_values(format: Format) -> Any:
    """The values that the indices of a format stand for, float32; None where a plane holds them."""
    if isinstance(format, KBit):
        return None if format.codebook == "custom" else tables.standard_codebook(format.codebook, format.bits).values
    if isinstance(format, Table4) and format.table_name != "custom":
        return format.values({})
    return None


def gentle_factor(values: np.ndarray, dtype: np.dtype) -> float:
    """A factor from 1 to 2 with which `values` lose least when they are rounded to `dtype`.

    The rounding of a table is the same for every weight of an index, so it is worth some choice; the products are
    divided by the factor in fp32.
    """
    factors = np.float32(1) + np.arange(1024, dtype=np.float32) / np.float32(1024)
    # The kernel brings the largest value to 1 .. 2 by a power of two.
    power = np.ldexp(np.float32(1), 1 - np.frexp(np.abs(values).max())[1])
    scaled = np.asarray(values, np.float32)[None, :] * power * factors[:, None]
    lost = (scaled.astype(dtype).astype(np.float64) - scaled) / factors[:, None]
    return float(factors[np.square(lost).sum(1).argmin()])


@functools.cache
def _cut_struct() -> np.dtype:
    """``struct Cut`` of kernels/linear.cu."""
    return np.dtype([(name, "i4") for name in ("run", "warps", "items", "share", "width", "wide")])


@dataclass(frozen=True)
class TileCut:
    """How the work of ``linear_tile`` is cut.

    Parameters
    ----------
    tokens : int
        Of a thread block.
    groups, k_groups : int
        Warpgroups of a thread block: those with other rows, 64 each, and those that share k.
    splits : int
        Thread blocks that share k, a cluster.
    """

    tokens: int
    groups: int
    k_groups: int
    splits: int

    def ring_bytes(self, bits: int) -> int:
        """Shared memory left of the system's and the declared part and of the table."""
        entries = {3: 64, 5: 32}.get(bits, 256)
        return _RING_END - (-(-(_TABLE_AT + entries * 256) // 1024) * 1024)

    def stage_bytes(self, bits: int) -> int:
        """x and weights of a stage."""
        return self.tokens * _ITEM_K * 2 + 64 * self.groups * _ITEM_K * bits // 8

    def shared(self, bits: int, grouped: bool = False) -> int:
        """Dynamic shared memory of a thread block; the sums of groups do not take the place of the ring."""
        ring, stage = self.ring_bytes(bits), self.stage_bytes(bits)
        sums = self.k_groups * self.tokens * (64 * self.groups + 4) * 4
        if grouped:
            used = min((ring - sums) // stage, 12) * stage + sums
        else:
            used = max(min(ring // stage, 12) * stage, sums)
        return _RING_END - ring - 1024 + used


@functools.lru_cache(maxsize=1024)
def cut_tile(n: int, k: int, m: int, processors: int) -> TileCut:
    """The cut that should be fastest.

    Parameters
    ----------
    n, k : int
        Shape of the weight.
    m : int
        Tokens.
    processors : int
        Multiprocessors of the device.
    """
    items = -(-k // _ITEM_K)

    def microseconds(cut: TileCut) -> float:
        # Measured on an H200: what 64 rows and what the tokens of a stage cost, and a thread block beside them.
        rows, tokens = 0.19 + 0.0007 * cut.tokens, 0.02 + 0.0037 * cut.tokens if cut.tokens <= 64 else 0.7
        blocks = -(-n // (64 * cut.groups)) * cut.splits * -(-m // cut.tokens)
        return -(-blocks // processors) * (-(-items // cut.splits) * (cut.groups * rows + tokens) + 4)

    return min((cut for cut in tile_cuts() if cut.tokens >= min(m, 64)), key=microseconds)


_GROUPED_CUT = TileCut(_TOKENS, 4, 1, 1)


@functools.cache
def tile_cuts() -> tuple[TileCut, ...]:
    """All that `cut_tile` chooses from. Four warpgroups leave the registers for the sums of 64 tokens, two for 128."""
    cuts = []
    for tokens in _TILE_TOKENS:
        cuts += [TileCut(tokens, 4, 1, 1)] if tokens <= 64 else []
        groups = ((2, 2), (1, 4)) if tokens <= 64 else ((2, 1),)
        cuts += [TileCut(tokens, *shape, splits) for shape in groups for splits in (1, 2)]
    return tuple(cuts)


class _Fused:
    """What the kernels have in common that multiply compressed weights."""

    _shape: tuple[np.int32, ...]  # n and more
    _launch: Callable[..., None]

    def grouped(self, x: Any, planes: Mapping[str, Any], ids: Any, experts: int, weights: Any, out: Any) -> None:
        """`linear_grouped`: sort by expert, multiply, combine."""
        xp = _xp.namespace(x)
        products, n = ids.size, int(self._shape[0])
        room = products // _TOKENS + min(products, experts + 1)
        order, groups = xp.empty(products, np.int32), xp.empty(room * 4, np.int32)
        _other_kernel("group_tokens", IDS_CXX[ids.dtype.name], 1024, 4 * (experts + 1))(
            ids, 1, (ids, np.int32(products), np.int32(experts), order, groups, np.int32(room))
        )
        divisor = 1 if x.ndim == 3 else ids.shape[1]
        partial: Any = 0 if weights is None else xp.empty(products * n, np.float32)
        step = int("scale" in planes and planes["scale"].size > 1)
        self._launch(room, x, planes, 0, out, partial, products, groups, order, divisor, step)
        if weights is not None:
            _other_kernel("combine_slots", CXX_TYPES[x.dtype.name])(
                out, -(-out.size // 256), (partial, weights, np.int32(ids.shape[1]), out, out.size, self._shape[0])
            )


class _Few(_Fused):
    """``linear_few`` for one format, shape and dtype, and how many tokens share a thread block."""

    def __init__(
        self,
        format: Format,
        decoder: Decoder,
        shape: tuple[int, int],
        dtype: np.dtype,
        device: int,
        *,
        eights: int = 1,
        together: int = 1,
        grouped: bool = False,
    ):
        n, k = shape
        self.tokens = _TOKENS * eights
        room = _cuda.shared_memory(device)
        even = n % _ITEM_ROWS == 0 and k % _ITEM_K == 0 and _copies(device)
        even = even and few_room(decoder, eights, room, True, grouped)[1] > 0
        items, warps = few_room(decoder, eights, room, even, grouped)
        self.fits = warps > 0
        # Thread blocks with the same weights and other tokens run `together`, so that they share what they read.
        resident = max(1, _cuda.multiprocessors(device) // together)
        cut = cut_few(n, k, items, max(1, warps), resident, 1 if grouped else 8)
        arguments = _few_arguments(decoder, CXX_TYPES[dtype.name], eights, items, grouped)
        self._kernel = _few_kernel("linear_few", arguments, 32 * warps, decoder.shared_bytes(eights, items, warps))
        self._grid, self._even = cut.grid, even
        self._map = functools.partial(_map_of_weights, decoder, k, device)
        self._shape = (np.int32(n), np.int32(k), np.int32(decoder.block))
        pitches = [k * size // _ITEM_K for size in (decoder.item_bytes, decoder.scale_bytes)]
        wide = even or pitches[0] % 16 == 0
        width = 0
        if decoder.copied:
            width = min(16, decoder.scale_bytes) if even else 4 if pitches[1] % 4 == decoder.scale_bytes % 4 == 0 else 1
        self._alignments = (16, 16 if wide else 4, max(1, width))
        struct = np.array((cut.run, cut.warps, cut.items, cut.share, width, wide), _cut_struct())
        self._cut = _cuda.by_value(struct)
        values = _values_of(format, dtype)
        self._values = _cuda.by_value(values)
        self._structs = (struct, values)  # what the pointers point to

    def takes(self, x: Any, planes: Mapping[str, Any]) -> bool:
        """Whether the arrays start where the kernel can read them."""
        return _start_at((x, planes["packed"], planes["absmax"]), self._alignments)

    def __call__(self, x: Any, planes: Mapping[str, Any], bias: Any, out: Any) -> None:
        """Fill out[..., n], each row from that of x."""
        n = int(self._shape[0])
        tokens = out.size // n
        bias, kind = _bias_argument(bias, x.dtype)
        splits = self._grid[1]
        partial: Any = 0 if splits == 1 else _xp.namespace(x).empty(splits * out.size, np.float32)
        self._launch(-(-tokens // self.tokens), x, planes, bias, out, partial, tokens, kind=kind)
        if splits > 1:
            _other_kernel("add_partials", CXX_TYPES[x.dtype.name])(
                out, -(-out.size // 256), (partial, np.int32(splits), bias, kind, out, out.size, self._shape[0])
            )

    def _launch(
        self,
        blocks: int,
        x: Any,
        planes: Mapping[str, Any],
        bias: Any,
        out: Any,
        partial: Any,
        tokens: int,
        groups: Any = 0,
        order: Any = 0,
        divisor: int = 1,
        step: int = 0,
        *,
        kind: Any = None,
    ) -> None:
        self._kernel.launch(
            x,
            (blocks, *self._grid),
            (
                *_plane_arguments(planes),
                x,
                bias,
                out,
                partial,
                groups,
                order,
                np.int32(divisor),
                np.int32(step),
                _NO_BIAS if kind is None else kind,
                np.int32(tokens),
                *self._shape,
                self._cut,
                self._values,
                self._map(planes) if self._even else _no_map(),
            ),
        )


def _tile_instances(decoders: Iterable[str], cuts: Iterable[TileCut], flavour: str = "false") -> tuple[str, ...]:
    return tuple(
        f"{decoder.format(T=T)}, {', '.join(map(str, dataclasses.astuple(cut)))}, {flavour}"
        for decoder in decoders
        for T in _HALF_CXX
        for cut in cuts
    )


_MAIN_TILES = (f"TileKbit<{{T}}, 4, {ABSMAX['e4m4'].kernel}>", "TileTable4<{T}>")
_MORE_TILES = tuple(f"TileKbit<{{T}}, {k}, {absmax.kernel}>" for k in (2, 3, 4, 5) for absmax in ABSMAX.values())
# Every cut of the formats with targets; of all others those with the most registers.
register_templates(
    Template("linear_tile_sm90a.cu", "linear_tile", (_tile_instances(_MAIN_TILES, tile_cuts()),)),
    Template(
        "linear_tile_sm90a.cu",
        "linear_tile",
        (_tile_instances(_MORE_TILES, (TileCut(64, 2, 2, 1), TileCut(128, 2, 1, 1))),),
        hot=False,  # the sums of 64 tokens leave some of them one register too few
    ),
    Template(
        "linear_tile_sm90a.cu",
        "linear_tile",
        (_tile_instances((*_MORE_TILES, _MAIN_TILES[1]), (_GROUPED_CUT,), "true"),),
    ),
)


class _Tile(_Fused):
    """``linear_tile`` for one format, shape and dtype."""

    def __init__(
        self,
        format: Format,
        shape: tuple[int, int],
        dtype: np.dtype,
        device: int,
        cut: TileCut,
        *,
        grouped: bool = False,
    ):
        n, k = shape
        bits, expression, block = _tile_decoder(format)
        arguments = cut.tokens, cut.groups, cut.k_groups, cut.splits, str(grouped).lower()
        expression = ", ".join((expression.format(T=CXX_TYPES[dtype.name]), *map(str, arguments)))
        self._kernel = _tile_kernel(expression, 128 * (cut.groups * cut.k_groups + 1), cut.shared(bits, grouped))
        self._cut, self._row_bytes, self._box_bytes = cut, k * bits // 8, _ITEM_K * bits // 8
        self._tiles, self._processors = -(-n // (64 * cut.groups)), _cuda.multiprocessors(device)
        self._shape = np.int32(n), np.int32(k), np.int32(block)
        values = _values_of(format, dtype)
        self._values = _cuda.by_value(values)
        self._struct = values  # what the pointer points to

    def takes(self, x: Any, planes: Mapping[str, Any]) -> bool:
        """Whether the copy engine can read the arrays."""
        return not (planes["packed"].data.ptr % 16 or x.data.ptr % 16)

    def __call__(self, x: Any, planes: Mapping[str, Any], bias: Any, out: Any) -> None:
        """Fill out[..., n], each row from that of x."""
        tokens = out.size // int(self._shape[0])
        bias, kind = _bias_argument(bias, x.dtype)
        self._launch(-(-tokens // self._cut.tokens), x, planes, bias, out, 0, tokens, kind=kind)

    def _launch(
        self,
        blocks: int,
        x: Any,
        planes: Mapping[str, Any],
        bias: Any,
        out: Any,
        partial: Any,
        tokens: int,
        groups: Any = 0,
        order: Any = 0,
        divisor: int = 1,
        step: int = 0,
        *,
        kind: Any = None,
    ) -> None:
        grouped = kind is None
        packed, k = planes["packed"], int(self._shape[1])
        rows, depth = packed.nbytes // self._row_bytes, 2 * k
        x_map, _ = _matrix(x.data.ptr, x.size // k, depth, 1 if grouped else self._cut.tokens, _tma.BOX_BYTES)
        w_map, _ = _matrix(packed.data.ptr, rows, self._row_bytes, 64, self._box_bytes)
        grid = (min(blocks * self._tiles, self._processors), 1) if grouped else (self._tiles * self._cut.splits, blocks)
        self._kernel.launch(
            x,
            grid,
            (
                x_map,
                w_map,
                planes["absmax"],
                planes.get("nested_absmax", 0),
                planes.get("nested_offset", 0),
                planes.get("scale", 0),
                planes.get("codebook", planes.get("table", 0)),
                bias,
                out,
                partial,
                groups,
                order,
                np.int32(divisor),
                np.int32(step),
                _NO_BIAS if grouped else kind,
                np.int32(blocks if grouped else tokens),
                *self._shape,
                self._values,
            ),
        )


class _One:
    """``linear_one`` for one format, shape and dtype."""

    def __init__(self, format: Format, decoder: Decoder, shape: tuple[int, int], dtype: np.dtype, device: int):
        n, k = shape
        self.run = max(1, -(-n // _ITEM_ROWS // _cuda.multiprocessors(device)))
        items, warps = one_room(decoder, k, self.run, _cuda.shared_memory(device))
        self.fits = n % _ITEM_ROWS == 0 and warps > 0 and _copies(device)
        if not self.fits:
            return
        self._blocks = -(-n // (_ITEM_ROWS * self.run))
        part = -(-self.run * (k // _ITEM_K // items) // warps)
        arguments = f"{decoder.expression.format(T=CXX_TYPES[dtype.name])}, {items}, {warps}"
        shared = decoder.shared_bytes_one(k, self.run, items, warps)
        self._kernel = _few_kernel("linear_one", arguments, 32 * warps, shared)
        numbers = (n, k, decoder.block, self.run, part, decoder.copied)
        self._numbers = tuple(np.int32(i) for i in numbers)
        self._map = functools.partial(_map_of_weights, decoder, k, device)
        self._alignments = (16, 16, min(16, items * decoder.scale_bytes) if decoder.copied else 1)
        values = _values_of(format, dtype)
        self._values = _cuda.by_value(values)
        self._struct = values  # what the pointer points to

    def takes(self, x: Any, planes: Mapping[str, Any]) -> bool:
        """Whether the arrays start where the kernel can read them."""
        return _start_at((x, planes["packed"], planes["absmax"]), self._alignments)

    def __call__(self, x: Any, planes: Mapping[str, Any], bias: Any, out: Any) -> None:
        """Fill out[..., n], which has one row."""
        self._kernel.launch(
            x,
            (self._blocks,),
            (
                *_plane_arguments(planes),
                x,
                *_bias_argument(bias, x.dtype),
                out,
                *self._numbers,
                self._values,
                self._map(planes),
            ),
        )


def _copies(device: int) -> bool:
    """Whether there is what copies whole tiles: Hopper's bulk copy engine, or asynchronous copies before it."""
    return _cuda.capability(device) < 90 or _tma.available()


def _map_of_weights(decoder: Decoder, k: int, device: int, planes: Mapping[str, Any]) -> Any:
    """The tensor map of the packed plane: boxes of 16 rows and an item."""
    if _cuda.capability(device) < 90:
        return _no_map()
    packed, pitch = planes["packed"], k // _ITEM_K * decoder.item_bytes
    rows = packed.nbytes // pitch
    return _matrix(packed.data.ptr, rows, pitch, _ITEM_ROWS, decoder.item_bytes, decoder.swizzled)[0]


@functools.cache
def _no_map() -> Any:
    """An argument in the place of a tensor map where there is no use for one."""
    memory = np.zeros(128, np.uint8)
    pointer = _cuda.by_value(memory)
    _kept.append(memory)
    return pointer


_kept: list[np.ndarray] = []


def _start_at(arrays: tuple[Any, ...], alignments: tuple[int, ...]) -> bool:
    """Whether arrays start at multiples of so many bytes."""
    return not any(array.data.ptr % size for array, size in zip(arrays, alignments, strict=True))


def _plane_arguments(planes: Mapping[str, Any]) -> tuple[Any, ...]:
    return (
        planes["packed"],
        planes["absmax"],
        planes.get("nested_absmax", 0),
        planes.get("nested_offset", 0),
        planes.get("scale", 0),
        planes.get("codebook", planes.get("table", 0)),
    )


@functools.lru_cache(maxsize=1024)
def _matrix(
    address: int, rows: int, columns: int, box_rows: int, box_bytes: int, swizzled: bool = True
) -> tuple[Any, np.ndarray]:
    """The tensor map of a byte matrix as a kernel argument, and the memory behind it."""
    memory = np.frombuffer(_tma.byte_matrix(address, rows, columns, columns, box_rows, box_bytes, swizzled), np.uint8)
    return _cuda.by_value(memory), memory


def _bias_argument(bias: Any, dtype: np.dtype) -> tuple[Any, np.int32]:
    """A bias as the kernels take it, and its kind."""
    if bias is None:
        return 0, _NO_BIAS
    if bias.dtype != dtype and bias.dtype != np.float32:
        bias = bias.astype(np.float32)
    bias = bias if bias.flags.c_contiguous else bias.copy()
    return bias, _OWN_BIAS if bias.dtype == dtype else _FLOAT_BIAS


_NO_BIAS, _OWN_BIAS, _FLOAT_BIAS = (np.int32(i) for i in range(3))


@functools.cache
def _few_kernel(name: str, arguments: str, threads: int, shared: int) -> _cuda.Kernel:
    return _cuda.Kernel("linear.cu", f"{name}<{arguments}>", threads, shared)


@functools.cache
def _tile_kernel(arguments: str, threads: int, shared: int) -> _cuda.Kernel:
    return _cuda.Kernel("linear_tile_sm90a.cu", f"linear_tile<{arguments}>", threads, shared)


@functools.cache
def _other_kernel(name: str, argument: str, threads: int = 256, shared: int = 0) -> _cuda.Kernel:
    return _cuda.Kernel("linear.cu", f"{name}<{argument}>", threads, shared)


# Tokens up to which a kernel is taken: linear_tile; linear_few, by whether a thread block can take 16 of them at a
# time. Beyond, cuBLAS reads the decoded weights once for all tokens, and the kernel decodes them again for each tile.
_TILED_UP_TO = 128
# From so few tokens on, where the weight has so many elements: larger weights fill the device for linear_few, smaller
# ones are no work for either.
_TILED_FROM, _TILED_SIZES = 3, range(1 << 24, 1 << 27)
_FUSED_UP_TO = {True: 32, False: 16}


@dataclass(frozen=True)
class Plan:
    """How a product is computed.

    Parameters
    ----------
    kernels : tuple of _One, _Tile or _Few
        The first one that takes the arrays; where none does: decode and multiply.
    reason : str
        One line for the user.
    """

    kernels: tuple[_One | _Tile | _Few, ...]
    reason: str

    def kernel_for(self, x: Any, planes: Mapping[str, Any]) -> _One | _Tile | _Few | None:
        """The kernel that takes these arrays, which may start anywhere."""
        return next((kernel for kernel in self.kernels if kernel.takes(x, planes)), None)


@functools.lru_cache(maxsize=4096)
def _plan(format: Format, shape: tuple[int, int], dtype: np.dtype, m: int, device: int) -> Plan:
    kernels: list[_One | _Tile | _Few] = []
    reasons = []
    least = _TILED_FROM if shape[0] * shape[1] in _TILED_SIZES else _TOKENS + 1
    if least <= m <= _TILED_UP_TO and not _tile_refusal(format, shape, dtype, device):
        cut = cut_tile(*shape, m, _cuda.multiprocessors(device))
        kernels.append(_Tile(format, shape, dtype, device, cut))
        shape_of_block = f"{cut.tokens} tokens x {64 * cut.groups} rows a thread block"
        reasons.append(f"fused: linear_tile, {shape_of_block}, k in {cut.k_groups * cut.splits} parts")
    decoder, refusal = _fits(format, shape, dtype, device)
    if isinstance(format, KBit) and format.members > 1:
        refusal = "a stack is for linear_grouped"
    elif decoder is not None and m > _FUSED_UP_TO[decoder.wide]:
        refusal = f"more than {_FUSED_UP_TO[decoder.wide]} tokens"
    elif decoder is not None:
        if m == 1:
            one = _One(format, decoder, shape, dtype, device)
            if one.fits:
                kernels.append(one)
                reasons.append(f"fused: linear_one, {one.run} tiles a thread block")
        eights = 2 if decoder.wide and m > _TOKENS else 1
        together = -(-m // (eights * _TOKENS))
        few = _Few(format, decoder, shape, dtype, device, eights=eights, together=together)
        if few.fits:
            kernels.append(few)
            grid = together, *few._grid
            reasons.append(f"fused: linear_few, {eights * _TOKENS} tokens a thread block, grid {grid}")
        refusal = "the device has too little shared memory for the fused kernel"
    return Plan(tuple(kernels), (*reasons, f"decode, then cuBLAS: {refusal}")[0])


@functools.lru_cache(maxsize=1024)
def _grouped_plan(
    format: Format, shape: tuple[int, int], dtype: np.dtype, experts: int, device: int
) -> tuple[_Tile | _Few, ...]:
    """Kernels for a mixture of experts, of which `experts` may be chosen; the faster one first."""
    tile: tuple[_Tile, ...] = ()
    # Large tiles are the faster ones where they fill the device a few times.
    filled = experts * shape[0] // (64 * _GROUPED_CUT.groups) >= 2 * _cuda.multiprocessors(device)
    if filled and not _tile_refusal(format, shape, dtype, device, grouped=True):
        tile = (_Tile(format, shape, dtype, device, _GROUPED_CUT, grouped=True),)
    decoder, _ = _fits(format, shape, dtype, device)
    if decoder is None:
        return tile
    few = _Few(format, decoder, shape, dtype, device, together=experts, grouped=True)
    return (*tile, few) if few.fits else tile


def _tile_decoder(format: Format) -> tuple[int, str, int]:
    """Bits of an element, C++ type (``{T}`` is that of x) and block; 0 bits where the kernel has no decoder."""
    if isinstance(format, KBit) and 2 <= format.bits <= 5:
        return format.bits, f"TileKbit<{{T}}, {format.bits}, {ABSMAX[format.absmax].kernel}>", BLOCK
    if isinstance(format, Table4) and format.block >= _GRANULE_K:
        return 4, "TileTable4<{T}>", format.block
    return 0, "", 0


@functools.lru_cache(maxsize=1024)
def _tile_refusal(format: Format, shape: tuple[int, int], dtype: np.dtype, device: int, grouped: bool = False) -> str:
    """What stands against ``linear_tile``; nothing: an empty text."""
    bits, _, _ = _tile_decoder(format)
    n, k = shape
    if not bits or (not grouped and isinstance(format, KBit) and format.members > 1):
        return f"{format} has no decoder"
    if dtype.itemsize != 2:
        return f"x is {dtype}"
    if _cuda.capability(device) != 90 or not _tma.available():
        return "it is for compute capability 9.0"
    if k % _GRANULE_K or k * bits // 8 % 16 or not k or not n:
        return f"rows of {k} elements are not whole granules"
    return "" if max(n, k) < 1 << 30 and n * k < 1 << 36 else "numbers of 32 bits do not reach through the weight"


def _fits(format: Format, shape: tuple[int, int], dtype: np.dtype, device: int) -> tuple[Decoder | None, str]:
    """The decoder, or None and what stands against a fused kernel."""
    decoder = decoder_of(format)
    if decoder is None:
        return None, f"{format} has no decoder"
    if dtype.itemsize != 2:
        return None, f"x is {dtype}, the tensor cores take float16 and bfloat16"
    if _cuda.capability(device) < 80:
        return None, "the fused kernel needs compute capability 8.0"
    n, k = shape
    if k % decoder.granule or not k:
        return None, f"rows of {k} elements are not whole blocks of {decoder.granule}"
    if n * k >= 1 << 33:
        return None, "the kernel's offsets of 32 bits do not reach through the weight"
    return decoder, ""
