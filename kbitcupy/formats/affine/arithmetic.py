"""The arithmetic of affine integers for both libraries: given scales are checked here, work goes to the twins.

Arrays are contiguous and beside each other, scales and zero points what `check_scale` and `check_zero_point` return, or
planes. The device of a CuPy array is the current one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...backend import xp as _xp
from ...errors import FormatError
from ..granularity import Blocks, check_entries, check_host_scales
from . import cuda, numpy as host
from .levels import INT32, SIGNED8, SINGLE, Levels, scalar
from .stored import Stored

_SURELY_FINITE = 2.0**127  # in every dtype of scales


def check_scale(scale: Any, blocks: Blocks, beside: Any, dtype: np.dtype, argument: str = "scale") -> Any:
    """A scale as a Python float, or as a contiguous array of one entry for each block beside the array `beside`.

    Values of a device array are not looked at.

    Raises
    ------
    FormatError
        When there is neither one, nor one for each block in one of their shapes, or one is negative or not finite.
    DeviceError
        When it is an array on another device.
    TypeError
        When it is not numeric.
    """
    if type(scale) is float and 0 <= scale < _SURELY_FINITE:
        return float(scalar(dtype, scale))
    if _fits(scale, blocks, beside, dtype):
        return scale
    if type(scale) in (float, int):
        scale = np.asarray(scale, np.float64)
    array = _block_values(scale, blocks, beside, dtype, "fiu", argument)
    if _xp.is_cupy(array):
        return array
    check_host_scales(array, dtype, argument)
    return float(array[0]) if array.size == 1 else array


def check_zero_point(zero_point: Any, blocks: Blocks, beside: Any, levels: Levels) -> Any:
    """A zero point as a Python int, or as a contiguous int32 array of one entry for each block beside `beside`.

    Raises
    ------
    FormatError
        When there is neither one, nor one for each block in one of their shapes, or one is outside the range.
    DeviceError, TypeError
        As `check_scale`.
    """
    if type(zero_point) is int and levels.qmin <= zero_point <= levels.qmax:
        return zero_point
    if _fits(zero_point, blocks, beside, INT32):
        return zero_point
    array = _block_values(zero_point, blocks, beside, None, "iu", "zero_point")
    if _xp.is_cupy(array):
        return array
    if ((array < levels.qmin) | (array > levels.qmax)).any():
        bad = array[(array < levels.qmin) | (array > levels.qmax)][0]
        raise FormatError(f"zero_point holds {bad}; it must lie in the range, {levels.qmin} to {levels.qmax}")
    array = array.astype(INT32, copy=False)
    return int(array[0]) if array.size == 1 else array


def check_offset(offset: Any, blocks: Blocks, beside: Any) -> Any:
    """An offset as a Python float, or as a contiguous float32 array of one entry for each block beside `beside`.

    Raises
    ------
    FormatError
        When there is neither one, nor one for each block in one of their shapes, or one is not finite.
    DeviceError, TypeError
        As `check_scale`.
    """
    if _fits(offset, blocks, beside, SINGLE):
        return offset
    if type(offset) in (float, int):
        offset = np.asarray(offset, np.float64)
    array = _block_values(offset, blocks, beside, SINGLE, "fiu", "offset")
    if _xp.is_cupy(array):
        return array
    if not np.isfinite(array).all():
        raise FormatError(f"offset holds {array[~np.isfinite(array)][0]}; offsets must be finite in float32")
    return float(array[0]) if array.size == 1 else array


def rounded(values: Any, kind: Stored, argument: str) -> Any:
    """What `check_scale` or `check_offset` returned, as numbers of the dtype in which it is stored.

    Raises
    ------
    FormatError
        When one on the host is not finite in that dtype.
    """
    if kind.name == "float32":
        return values
    if _xp.is_cupy(values):
        return cuda.rounded(values, kind, argument == "scale")
    array = np.atleast_1d(np.asarray(values, SINGLE))
    with np.errstate(over="ignore"):
        beyond = np.isinf(array.astype(kind.dtype))
    if beyond.any():
        raise FormatError(
            f"{argument} holds {array[beyond][0]}; with scale_dtype={kind.name!r} it must be finite in {kind.name}"
        )
    near = kind.scale(array) if argument == "scale" else kind.nearest(array)
    return float(near[0]) if isinstance(values, float) else near


def _fits(values: Any, blocks: Blocks, beside: Any, dtype: np.dtype) -> bool:
    """Whether this is what a kernel takes: nothing has to be converted, and no value on a device is looked at."""
    return (
        _xp.same_gpu(values, beside)
        and values.dtype == dtype
        and (values.size == 1 or values.shape in blocks.shapes)
        and values.flags.c_contiguous
    )


def _block_values(values: Any, blocks: Blocks, beside: Any, dtype: np.dtype | None, kinds: str, argument: str) -> Any:
    """One number, or one for each block in their order, flat on the host; a single one there may go with any array."""
    array = check_entries(values, blocks, beside, kinds, argument)
    if _xp.is_cupy(array):
        wanted = dtype or INT32
        if array.dtype == wanted and array.flags.c_contiguous:
            return array
        with _xp.on_device_of(array):
            return cuda.converted(array, wanted)
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(array if dtype is None else array.astype(dtype, copy=False)).reshape(-1)


def check_percentile(percentile: Any) -> float | None:
    """A percentile as a float.

    Raises
    ------
    FormatError
        When it is not a number above 0, up to 100.
    """
    if percentile is None:
        return None
    number = isinstance(percentile, (int, float, np.integer, np.floating)) and not isinstance(percentile, bool)
    if not number or not 0 < percentile <= 100:
        raise FormatError(f"percentile is {percentile!r}; it must be a number above 0, up to 100, such as 99.9")
    return float(percentile)


# ---- the work ------------------------------------------------------------------------------------------------------


def find(
    x: Any, scale: Any, zero_point: Any | None, blocks: Blocks, levels: Levels, fraction: float | None = None
) -> None:
    """Fill `scale` and `zero_point` (offsets if `levels` say so, or None) with what is found for the blocks of x.

    `fraction` is a percentile / 100.
    """
    if blocks.size == 0:
        scale.fill(1)
        if zero_point is not None:
            zero_point.fill(0 if levels.floating else levels.zero if levels.symmetric else levels.qmin)
    elif _xp.is_cupy(x):
        cuda.find(x, scale, zero_point, blocks, levels, fraction)
    else:
        host.find(x, scale, zero_point, blocks, levels, fraction)


def quantize(
    x: Any,
    codes: Any,
    scale: Any,
    zero_point: Any,
    blocks: Blocks,
    levels: Levels,
    bits: int = 8,
    scale_out: Any | None = None,
    zero_point_out: Any | None = None,
) -> None:
    """Fill `codes`: int8 or uint8, or with 4 bits the packed bytes, signed when ``levels.qmin`` is.

    The planes `scale_out` and `zero_point_out`, if any, receive what is used. `zero_point` is offsets if `levels` say
    so.
    """
    planes: tuple[Any, Any] = (scale_out, zero_point_out)
    if blocks.size and _xp.is_cupy(x) and all(plane is None or plane.itemsize == 4 for plane in planes):
        cuda.each("quantize", x.dtype, bits, blocks, levels, (x, codes), scale, zero_point, 0, planes)
        return
    for plane, values in zip(planes, (scale, zero_point), strict=True):
        if plane is None:
            continue
        if isinstance(values, (float, int)):
            one = np.asarray(values, plane.dtype).view(f"u{plane.itemsize}")
            plane.view(one.dtype).fill(int(one))  # as bits: CuPy knows no number of bfloat16
        elif _xp.is_cupy(plane):
            cuda.store(values if values.size == plane.size else values.repeat(plane.size), plane)
        else:
            plane[...] = values.reshape(-1)
    if blocks.size and _xp.is_cupy(x):
        cuda.each("quantize", x.dtype, bits, blocks, levels, (x, codes), scale, zero_point, 0, (None, None))
        return
    if blocks.size == 0:
        return
    if bits == 8:
        host.quantize(x, codes, scale, zero_point, blocks, levels)
    else:
        whole = np.empty(blocks.size, np.int8 if levels.qmin < 0 else np.uint8)
        host.quantize(x, whole, scale, zero_point, blocks, levels)
        host.pack_nibbles(whole, codes)


def quantize_dynamic(
    x: Any, codes: Any, scale: Any, zero_point: Any | None, blocks: Blocks, levels: Levels, bits: int = 8
) -> None:
    """`find` and `quantize`; where a block fits on chip, with one reading of x."""
    if blocks.size and _xp.is_cupy(x) and cuda.quantize_dynamic(x, codes, scale, zero_point, blocks, levels, bits):
        return
    find(x, scale, zero_point, blocks, levels)
    quantize(x, codes, scale, levels.zero if zero_point is None else zero_point, blocks, levels, bits)


def dequantize(
    codes: Any, out: Any, scale: Any, zero_point: Any, blocks: Blocks, levels: Levels, bits: int = 8
) -> None:
    """Fill `out` with ``scale * (q - zero_point)``; zero points outside `levels` count as the nearer end. With offsets
    in their place, if `levels` say so, with ``scale * q + offset``.
    """
    if blocks.size == 0:
        return
    if _xp.is_cupy(codes):
        cuda.each("dequantize", out.dtype, bits, blocks, levels, (codes, out), scale, zero_point)
        return
    if bits == 4:
        packed, codes = codes, np.empty(blocks.size, np.int8 if levels.qmin < 0 else np.uint8)
        host.unpack_nibbles(packed, codes)
    host.dequantize(codes, out, scale, zero_point, blocks, levels)


def fake_quantize(x: Any, out: Any, scale: Any, zero_point: Any, blocks: Blocks, levels: Levels) -> None:
    """Fill `out` with x quantized and dequantized."""
    if blocks.size and _xp.is_cupy(x):
        cuda.each("fake_quantize", x.dtype, None, blocks, levels, (x, out), scale, zero_point)
    elif blocks.size:
        host.fake_quantize(x, out, scale, zero_point, blocks, levels)


def backward(
    dy: Any,
    x: Any | None,
    dx: Any,
    scale: Any,
    zero_point: Any,
    blocks: Blocks,
    levels: Levels,
    margin: int,
    divide: bool,
) -> None:
    """Fill `dx` with dy, divided by the scale for `divide`, where x (if any) is within the range less `margin`."""
    if blocks.size and _xp.is_cupy(dy):
        kind = "quantize_backward" if divide else "fake_quantize_backward"
        cuda.each(kind, dy.dtype, None, blocks, levels, (dy, 0 if x is None else x, dx), scale, zero_point, margin)
    elif blocks.size:
        host.backward(dy, x, dx, scale, zero_point, blocks, levels, margin, divide)


def multiply(dy: Any, dq: Any, scale: Any, blocks: Blocks) -> None:
    """Fill `dq` with dy times the scale."""
    if blocks.size and _xp.is_cupy(dy):
        cuda.each("dequantize_backward", dy.dtype, None, blocks, SIGNED8, (dy, dq), scale, 0)
    elif blocks.size:
        host.multiply(dy, dq, scale, blocks)
