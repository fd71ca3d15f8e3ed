"""Products through weights that are decoded whole, by cuBLAS: for any format, shape and number of tokens."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

from ..array import QuantizedArray
from ..backend import xp as _xp
from ..backend.compile import Template
from ..backend.launch import Kernel
from ..backend.structs import Constants
from ..formats.base import Format, Magnitude, register_templates
from ..ops import decode
from .routes import BYTES_PER_US, Problem, Product, Route, refused_by_all


def multiply(x: Any, q: QuantizedArray, bias: Any, out: Any) -> None:
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
        multiply(x.astype(np.float32), q, bias, single)
        out[...] = single
        return
    if magnitude is not None:
        planes, scale = _normalized(planes, magnitude)
    elif x.dtype.itemsize == 2 and q.format.tensor_scale is not None and not q.lead:
        # Decoded without it, weights of 1e-6 stay in the range of float16.
        scale = planes.pop(q.format.tensor_scale, None)
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
_SIZES = (Constants(THREADS=_SCALES_THREADS),)
_SCALES = tuple(
    Template("linear/prescale.cu", name, hot=False, structs=_SIZES) for name in ("largest_scales", "normalize_scales")
)
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
    if magnitude.offsets is not None:  # the same power of two for both
        scales = _xp.namespace(scales).concatenate([scales, planes[magnitude.offsets]])
    if scales.dtype != np.float32:
        scales = scales.astype(np.float32)
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
    if magnitude.offsets is not None:
        planes[magnitude.scales], planes[magnitude.offsets] = scratch[: count // 2], scratch[count // 2 : count]
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


# Two launches, the first of which decodes; where scales are brought into the range of float16, two more.
_START, _NORMALIZING = 8.0, 5.0
# What a long K costs where there is little else to do: microseconds of 128 k.
_ALONG_K = 0.15
# Products and additions of a microsecond: in 16 bits, on tensor cores, and in more.
_RATES = {2: 3.4e8, 4: 2.2e7, 8: 2.2e7}


class Decoded(Route):
    """Decode all of the weight to the dtype of x, and let cuBLAS multiply."""

    name = "decoded"

    def accepts(self, problem: Problem) -> str | None:
        return refused_by_all(problem, "one weight")

    def cost(self, problem: Problem) -> float:
        n, k = problem.shape
        size = problem.dtype.itemsize
        passing = n * k * size / BYTES_PER_US
        start = _START + (_NORMALIZING if size == 2 and _magnitude(problem.format) is not None else 0.0)
        multiplying = max(passing, n * k * problem.tokens / _RATES[size])
        return start + problem.reading + passing + multiplying + k / 128 * _ALONG_K

    def prepare(self, problem: Problem) -> Product:
        n, k = problem.shape
        # Many numbers of tokens share a plan: how many these are, the arrays say.
        return lambda x, q, bias, out: multiply(x.reshape(out.size // n, k), q, bias, out.reshape(out.size // n, n))

    def describe(self, problem: Problem) -> str:
        return f"decode to {problem.dtype}, then cuBLAS"
