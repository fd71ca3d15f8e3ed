"""Products with compressed weights: linear, matmul, linear_grouped.

Four ways lead to a product; ``linear(..., explain=True)`` prints which one is taken, and why:

- On NumPy the weights are decoded to float32, some rows at a time, and multiplied.
- On a GPU few tokens are multiplied with weights that are decoded in registers and never written (`fused`):
  ``kbit2`` to ``kbit5`` and the 4-bit tables, float16 and bfloat16, rows of whole blocks, compute capability 8.0.
- On a GPU of compute capability 9.0 up to 128 tokens and mixtures of experts are multiplied in the same way, by larger
  tiles (`fused_tile`).
- On a GPU everything else is decoded whole, and cuBLAS multiplies.

Products are accumulated in fp32; the tensor scale of a k-bit format and the bias are applied in fp32, before the one
rounding to the dtype of the result.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..array import QuantizedArray, TransposedQuantizedArray
from ..backend import xp as _xp
from ..backend.compile import IDS_CXX, Template
from ..backend.launch import Kernel, multiprocessors
from ..errors import DeviceError, FormatError
from ..formats.base import Format, Magnitude, register_templates
from ..formats.codebook.kbit import KBit
from ..ops import check_out, decode, dequantize, take
from .hopper import GROUPED_CUT, TILE_TOKENS, Tile, cut_tile, tile_refusal
from .small_batch import MAX_EXPERTS, TOKENS, Few, One, fits

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
        [..., N], with the dtype of `x`; a torch tensor where `x` is one; `out` itself where it is given. Accumulated
        in fp32 (fp64 for float64 `x`). On CuPy the call does not synchronise, and the same call gives the same bits
        every time.

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
    if _xp.is_tensor(x):
        return _xp.in_torch(linear, "x", x, q, bias, out=out, explain=explain)
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
        With the dtype of the operand that is not compressed, and the shape that NumPy gives the product; a torch tensor
        where that operand is one; `out` itself where it is given.

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
    if _xp.is_tensor(b if left else a):
        if left:
            return _xp.in_torch(lambda array, **options: matmul(a, array, **options), "b", b, out=out)
        return _xp.in_torch(matmul, "a", a, b, out=out)
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
        [T, top_k, N], or [T, N] with `weights`; with the dtype of `x`; a torch tensor where `x` is one. The same call
        gives the same bits every time.

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
    if _xp.is_tensor(x):
        return _xp.in_torch(linear_grouped, "x", x, qs, expert_ids, weights, out=out)
    x = _as_float(x, "x")
    if isinstance(qs, QuantizedArray):
        _check_weight(qs, 3, "qs", "[E, N, K]")
        if not qs.format.rows_are_blocks(qs.shape):
            raise FormatError(
                f"qs is {qs.format} of shape {qs.shape}, whose experts cannot be decoded one by one: "
                f"{qs.format.why_not_blocks(qs.shape)}; pass qs.dequantize()"
            )
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
    if qs.members != 1 and not (isinstance(qs.format, KBit) and qs.members == experts):  # kernels read one an expert
        return False
    if not experts or experts > MAX_EXPERTS or max(ids.size, qs.size >> 5) >= 1 << 31:
        return False
    x = _xp.contiguous(x)
    kernels = _grouped_plan(qs.format, (rows, depth), x.dtype, min(ids.size, experts), x.data.device_id)
    for kernel in kernels:
        if kernel.takes(x, qs):
            break
    else:
        return False
    ids = _xp.contiguous(ids if ids.dtype in _IDS else ids.astype(np.int64))
    if weights is not None:
        weights = _xp.contiguous(weights if weights.dtype == np.float32 else weights.astype(np.float32))
    kernel.grouped(x, qs, ids, experts, weights, out)
    return True


def _multiply_each(x: Any, qs: Any, ids: Any, weights: Any, out: Any) -> None:
    """Expert after expert, through decoded weights."""
    xp = _xp.namespace(x)
    working = _working_dtype(x.dtype)
    _, rows, depth = qs.shape
    products = xp.zeros((*ids.shape, rows), working)
    x = xp.broadcast_to(x if x.ndim == 3 else x[:, None], (*ids.shape, depth)).astype(working, copy=False)
    numbers = xp.arange(qs.shape[0])
    for expert in range(qs.shape[0]):
        chosen = ids == expert
        # Rows can be taken that cannot be cut out: double quantization stores the absmax of some of them together.
        this = numbers[expert : expert + 1]
        weight = take(qs, this, dtype=working)[0] if isinstance(qs, QuantizedArray) else qs[expert]
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
    x = _xp.contiguous(x)
    n, k = q.shape
    m = out.size // n
    if isinstance(x, np.ndarray):
        _multiply_on_host(x.reshape(m, k), q, bias, out.reshape(m, n))
        return
    plan = _plan(q.format, q.shape, x.dtype, m, x.data.device_id, q.lead > 0)
    kernel = plan.kernel_for(x, q)
    if kernel is not None:
        kernel(x, q, bias, out)
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
        return (
            _plan(q.format, q.shape, x.dtype, tokens, x.data.device_id, q.lead > 0).reason
            if q.size
            else "nothing to multiply"
        )

    lines = [heading, f"  these: {way(max(m, 1))}"]
    shown = ""
    limits = (1, TOKENS // 2, TOKENS, *_FUSED_UP_TO.values(), *TILE_TOKENS)
    for start in sorted({1, _TILED_FROM, *(limit + 1 for limit in limits)}):
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
    magnitude = _magnitude(q.format) if x.dtype == np.float16 else None
    if magnitude is not None and magnitude.offset is not None and q.lead:  # offsets by member: multiply in float32
        single = cupy.empty(out.shape, np.float32)
        _multiply_decoded(x.astype(np.float32), q, bias, single)
        out[...] = single
        return
    if magnitude is not None:
        planes, scale = _normalized(planes, magnitude)
    elif isinstance(q.format, KBit) and not q.lead and x.dtype.itemsize == 2:
        scale = planes.pop("scale")  # decoded without it, weights of 1e-6 stay in the range of float16
    decode(q.format, planes, weight, q.lead)
    target = out
    if bias is not None:
        if bias.dtype != out.dtype and out.dtype.itemsize == 2:
            target = cupy.empty(out.shape, np.float32)
        target[...] = bias
    _gemm(x, weight, scale, bias is not None, target)
    if target is not out:
        out[...] = target


_SCALES_THREADS, _SCALES_EACH = 256, 8  # scales of a thread, where there are not many more
# Thread blocks: what each of the first kernel's has found, each of the second one's asks for before it begins.
_MOST_PARTS, _MOST_SCALING = 512, 1024
_SCALES = tuple(Template("linear/prescale.cu", name, hot=False) for name in ("largest_scales", "normalize_scales"))
_LARGEST_SCALES = Kernel(_SCALES[0], (), _SCALES_THREADS, signature=("p", "i8", "p"), early=True)
_NORMALIZED = "p", "i8", "p", "p", "i4", "i4", "p", "i4", "p"
_NORMALIZE_SCALES = Kernel(_SCALES[1], (), _SCALES_THREADS, signature=_NORMALIZED, early=True)
register_templates(*_SCALES)


@functools.lru_cache(maxsize=256)
def _magnitude(format: Format) -> Magnitude | None:
    return format.magnitude()


def _normalized(planes: dict[str, Any], magnitude: Magnitude) -> tuple[dict[str, Any], Any]:
    """Planes of weights that a power of two has brought into the range of float16, and the float32[1] that undoes it.

    Of weights in the range of normal float16 numbers no bit changes in a product. The device is the current one.
    """
    scales = planes[magnitude.scales]
    count, source = scales.size, scales.data.ptr
    blocks = -(-count // (_SCALES_THREADS * _SCALES_EACH))
    parts = min(blocks, _MOST_PARTS)
    scratch = _xp.namespace(scales).empty(count + 2 + parts, np.float32)
    target = scratch.data.ptr
    largest = target + 4 * (count + 2)
    _LARGEST_SCALES.launch(scales, (parts,), (source, count, largest))
    offset = values = size = 0
    if magnitude.offset is not None:
        offset = planes[magnitude.offset].data.ptr
    if magnitude.values is not None:
        values, size = planes[magnitude.values].data.ptr, planes[magnitude.values].size
    arguments = source, count, offset, values, size, magnitude.bits, largest, parts, target
    _NORMALIZE_SCALES.launch(scales, (min(blocks, _MOST_SCALING),), arguments)
    planes[magnitude.scales] = scratch[:count]
    if magnitude.offset is not None:
        planes[magnitude.offset] = scratch[count : count + 1]
    return planes, scratch[count + 1 : count + 2]


def _gemm(x: Any, weight: Any, scale: Any, accumulate: bool, out: Any) -> None:
    """out = scale * x @ weight.T (+ out), all row-major, accumulated in fp32."""
    import cupy
    from cupy.cuda import device
    from cupy_backends.cuda.libs import cublas

    double = x.dtype == np.float64
    one, zero = _constants(x.data.device_id, "float64" if double else "float32")
    handle = device.get_cublas_handle()
    kinds = [_cuda_type(array.dtype) for array in (weight, x, out)]
    rows, depth = weight.shape
    mode, math = cublas.getPointerMode(handle), cublas.getMathMode(handle)
    try:
        cublas.setPointerMode(handle, cublas.CUBLAS_POINTER_MODE_DEVICE)
        cublas.setMathMode(handle, _SUMS_IN_FLOAT32)
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
        cublas.setMathMode(handle, math)
    for status in statuses:
        if status:
            raise cublas.CUBLASError(status)


@functools.cache
def _cublas() -> ctypes.CDLL:
    """The library that CuPy has loaded: CuPy's own calls are refused while a stream captures, cuBLAS allows them."""
    from cuda.pathfinder import load_nvidia_dynamic_lib

    return ctypes.CDLL(load_nvidia_dynamic_lib("cublas").abs_path)


# CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION, for which CuPy has no name. Else sums of parts of k may be rounded
# to 16 bits, and leave their range, before alpha brings them back.
_SUMS_IN_FLOAT32 = 16
# cudaDataType of the dtypes.
_CUDA_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}


@functools.cache
def _cuda_type(dtype: np.dtype) -> int:
    return _CUDA_TYPES[dtype.name]


@functools.cache
def _constants(device: int, dtype: str) -> tuple[Any, Any]:
    """1 and 0 on a device: cuBLAS reads both factors there once one of them is a plane."""
    import cupy

    # A stream of its own: the caller's may be capturing a graph, where an upload would become part of the graph.
    with cupy.cuda.Device(device), cupy.cuda.Stream(non_blocking=True) as stream:
        values = cupy.asarray(np.array([1, 0], dtype))
        stream.synchronize()
    return values[:1], values[1:]


_IDS = frozenset(np.dtype(name) for name in IDS_CXX)  # of expert numbers, as the kernels take them

# Tokens up to which a kernel is taken: linear_tile; linear_few, by whether a thread block can take 16 of them at a
# time. Beyond, cuBLAS reads the decoded weights once for all tokens, and the kernel decodes them again for each tile.
_TILED_UP_TO = 128
# From so few tokens on where linear_few is not quick, and the weight has so many elements: larger weights fill the
# device for linear_few, smaller ones are no work for either.
_TILED_FROM, _TILED_SIZES = 3, range(1 << 24, 1 << 27)
_FUSED_UP_TO = {True: 32, False: 16}


@dataclass(frozen=True)
class Plan:
    """How a product is computed.

    Parameters
    ----------
    kernels : tuple of One, Tile or Few
        The first one that takes the arrays; where none does: decode and multiply.
    reason : str
        One line for the user.
    """

    kernels: tuple[One | Tile | Few, ...]
    reason: str

    def kernel_for(self, x: Any, q: QuantizedArray) -> One | Tile | Few | None:
        """The kernel that takes these arrays, which may start anywhere."""
        for kernel in self.kernels:
            if kernel.takes(x, q):
                return kernel
        return None


@functools.lru_cache(maxsize=4096)
def _plan(format: Format, shape: tuple[int, int], dtype: np.dtype, m: int, device: int, stack: bool = False) -> Plan:
    kernels: list[One | Tile | Few] = []
    reasons = []
    decoder, refusal = fits(format, shape, dtype, device)
    few = None
    if stack:
        decoder = None
        refusal = "a stack is for linear_grouped"
    elif decoder is not None and m > _FUSED_UP_TO[decoder.wide]:
        refusal = f"more than {_FUSED_UP_TO[decoder.wide]} tokens"
    elif decoder is not None:
        eights = 2 if decoder.wide and m > TOKENS else 1
        together = -(-m // (eights * TOKENS))
        few = Few(format, decoder, shape, dtype, device, eights=eights, together=together)
    # Lines of x are read in halves for bit planes where x does not fit shared memory: that takes too long for 8 tokens.
    quick = few and few.clustered and (few.staged or m <= TOKENS // 2 or not isinstance(format, KBit))
    least = _TILED_FROM if shape[0] * shape[1] in _TILED_SIZES and not quick else TOKENS + 1
    if least <= m <= _TILED_UP_TO and not stack and not tile_refusal(format, shape, dtype, device):
        cut = cut_tile(*shape, m, multiprocessors(device))
        kernels.append(Tile(format, shape, dtype, device, cut))
        shape_of_block = f"{cut.tokens} tokens x {64 * cut.groups} rows a thread block"
        reasons.append(f"fused: linear_tile, {shape_of_block}, k in {cut.k_groups * cut.splits} parts")
    if few and decoder:
        if m == 1:
            one = One(format, decoder, shape, dtype, device)
            if one.fits:
                kernels.append(one)
                reasons.append(f"fused: linear_one, {one.run} tiles a thread block")
        if few.fits:
            kernels.append(few)
            grid = together, *few.grid
            reasons.append(f"fused: linear_few, {few.tokens} tokens a thread block, grid {grid}")
        refusal = "the device has too little shared memory for the fused kernel"
    return Plan(tuple(kernels), (*reasons, f"decode, then cuBLAS: {refusal}")[0])


@functools.lru_cache(maxsize=1024)
def _grouped_plan(
    format: Format, shape: tuple[int, int], dtype: np.dtype, experts: int, device: int
) -> tuple[Tile | Few, ...]:
    """Kernels for a mixture of experts, of which `experts` may be chosen; the faster one first."""
    tile: tuple[Tile, ...] = ()
    # Large tiles are the faster ones where they fill the device a few times.
    filled = experts * shape[0] // (64 * GROUPED_CUT.groups) >= 2 * multiprocessors(device)
    if filled and not tile_refusal(format, shape, dtype, device, grouped=True):
        tile = (Tile(format, shape, dtype, device, GROUPED_CUT, grouped=True),)
    decoder, _ = fits(format, shape, dtype, device)
    if decoder is None:
        return tile
    few = Few(format, decoder, shape, dtype, device, together=experts, grouped=True)
    return (*tile, few) if few.fits else tile
