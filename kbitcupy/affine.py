"""Affine quantization as plain functions: arrays in, arrays out, each with its straight-through backward.

An element x becomes the integer ``q = clamp(rint(x / scale) + zero_point, qmin, qmax)`` and comes back as
``scale * (q - zero_point)``. `kbitcupy.formats.affine` has the whole contract: rounding, NaN, infinities, scales of 0.

Every function takes a `granularity`, which says what elements share a scale, and with it the shape of scales and zero
points for an array of shape [..., N, D]:

====================  =========================================================  ======================
granularity           elements that share a scale                                shape of the scales
====================  =========================================================  ======================
``"tensor"``          all                                                        (1,)
``"token"``           those of one row along the last axis                       [..., N]
``("channel", a)``    all with the same index on axis a                          (shape[a],)
``("group", g)``      g neighbours along the last axis; the last may be fewer    [..., N, ceil(D / g)]
====================  =========================================================  ======================

That shape with a 1 behind it is taken as well, and all scales in one dimension. Another order of axes is refused, such
as GPTQ's [D / g, N]: transpose it.

When which one pays: one scale for a tensor costs nothing, and one outlier costs everybody their precision; take it
where a calibrated scale is fixed beforehand. A scale for each output channel of a weight (axis 0 of [N, K]) and for
each token of an activation is what an integer matrix product can still take out of its sum: 8 bits in general. Groups
of 32 to 128 are for 4 bits: they hold the error of an outlier within the group, for 0.25 to 1 bit an element.
Asymmetric ranges pay where values lie on one side of 0, as behind a ReLU. For a table whose rows are looked up take
"token", which stays right when rows are picked in any shape.

Arrays may be NumPy, CuPy, or anything with ``__dlpack__`` or ``__cuda_array_interface__``, of float16, bfloat16,
float32 or float64; where the first argument is a torch tensor, so are the results. Arithmetic and scales are float32,
beside float64 arrays float64. On CuPy nothing synchronises and no value is read back: scales and zero points in NumPy
arrays and Python numbers are checked, those on the device are not (what becomes of bad ones is part of the contract).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .array import QuantizedArray
from .backend import xp as _xp
from .errors import DeviceError, FormatError
from .formats import affine as _affine
from .formats.affine import Blocks, Levels
from .formats.base import Format, get_format
from .ops import check_out, source
from .products.int8 import linear_smoothquant, linear_w8a8
from .products.smoothquant import Calibration, smooth_scales, smooth_weight

__all__ = [
    "Calibration",
    "choose_qparams",
    "dequantize",
    "dequantize_backward",
    "dynamic_range",
    "dynamic_range_backward",
    "fake_quantize",
    "fake_quantize_backward",
    "from_hqq",
    "from_mlx",
    "linear_smoothquant",
    "linear_w8a8",
    "quantize",
    "quantize_backward",
    "smooth_scales",
    "smooth_weight",
]

# How far from the ends of the range a mask begins; None: no mask.
_MARGINS = {"inclusive": 0, "strict": 1, "none": None}
_INT8, _UINT8, _INT32 = np.dtype(np.int8), np.dtype(np.uint8), np.dtype(np.int32)
_CODES = {_INT8: _affine.SIGNED8, _UINT8: _affine.UNSIGNED8}
_SINGLE = np.dtype(np.float32)


def quantize(
    x: Any,
    scale: Any,
    zero_point: Any = 0,
    *,
    qmin: int = -128,
    qmax: int = 127,
    granularity: Any = "tensor",
    out: Any = None,
) -> Any:
    """Integers ``clamp(rint(x / scale) + zero_point, qmin, qmax)``.

    Parameters
    ----------
    x : array_like
        Float array of any shape.
    scale : float or array
        A single number, or one for each block (see the module); finite and not negative. 0 gives the zero point.
    zero_point : int or array, default 0
        A single integer, or one for each block, from qmin to qmax.
    qmin, qmax : int, default -128, 127
        The range: within -128 to 127, or within 0 to 255.
    granularity : str or tuple, default "tensor"
        ``"tensor"``, ``"token"``, ``("channel", axis)`` or ``("group", size)``.
    out : array, optional
        C-contiguous int8 or uint8 array of x's shape, which receives the result.

    Returns
    -------
    array
        int8 where qmin is negative, else uint8; shape and device of x.

    Raises
    ------
    FormatError
        When the range, the granularity, the number of scales or a value of them is not allowed.
    TypeError
        When x is not a float array, or `out` is of the wrong dtype.
    ValueError
        When `out` has the wrong shape or order.
    DeviceError
        When arrays are on different devices.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> kb.affine.quantize(np.array([-1.0, 0.25, 0.75, 9.0], np.float32), 0.5)
    array([-2,  0,  2, 18], dtype=int8)
    """
    if _xp.is_tensor(x):
        return _xp.in_torch(quantize, "x", x, scale, zero_point, qmin=qmin, qmax=qmax, granularity=granularity, out=out)
    x, blocks = _blocked(x, granularity)
    levels = _byte_levels(qmin, qmax)
    codes = _codes_out(out, x, _code_dtype(levels))
    scale, zero_point = _parameters(scale, zero_point, blocks, x, levels, x.dtype)
    with _xp.on_device_of(x):
        if codes is None:
            codes = _xp.namespace(x).empty(x.shape, _code_dtype(levels))
        _affine.quantize(x, codes, scale, zero_point, blocks, levels)
    return codes


def dequantize(
    q: Any,
    scale: Any,
    zero_point: Any = 0,
    *,
    granularity: Any = "tensor",
    dtype: Any = None,
    out: Any = None,
) -> Any:
    """Numbers ``scale * (q - zero_point)``.

    Parameters
    ----------
    q : array_like
        int8 or uint8 array of any shape.
    scale, zero_point, granularity
        As for `quantize`; zero points lie within the range of q's dtype.
    dtype : dtype_like, optional
        dtype of a new result, float32 by default.
    out : array, optional
        C-contiguous float array of q's shape, which receives the result.

    Returns
    -------
    array
        Shape and device of q.

    Raises
    ------
    FormatError, TypeError, ValueError, DeviceError
        As `quantize`.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> kb.affine.dequantize(np.array([-2, 0, 18], np.int8), 0.5)
    array([-1.,  0.,  9.], dtype=float32)
    """
    if _xp.is_tensor(q):
        return _xp.in_torch(dequantize, "q", q, scale, zero_point, granularity=granularity, dtype=dtype, out=out)
    q = _xp.as_array(q, "q")
    levels = _CODES.get(q.dtype)
    if levels is None:
        raise TypeError(f"q is {q.dtype}; allowed are int8 and uint8")
    with _xp.on_device_of(q):
        if not q.flags.c_contiguous:
            q = q.copy(order="C")
        blocks = _affine.blocks_of(q.shape, _affine.check_granularity(granularity))
        if out is None:
            out_dtype = _SINGLE if dtype is None else _xp.float_dtype(dtype)
        else:
            check_out(out, q.shape, q, dtype)
            out_dtype = out.dtype
        scale, zero_point = _parameters(scale, zero_point, blocks, q, levels, out_dtype)
        if out is None:
            out = _xp.namespace(q).empty(q.shape, out_dtype)
        _affine.dequantize(q, out, scale, zero_point, blocks, levels)
    return out


def fake_quantize(
    x: Any,
    scale: Any,
    zero_point: Any = 0,
    *,
    qmin: int,
    qmax: int,
    granularity: Any = "tensor",
    out: Any = None,
) -> Any:
    """Quantize and dequantize at once, without storing the integers (for quantization-aware training).

    Parameters
    ----------
    x, scale, zero_point, granularity
        As for `quantize`.
    qmin, qmax : int
        The range, within -2^20 to 2^20.
    out : array, optional
        C-contiguous array of x's shape and dtype, which receives the result; may be `x` itself.

    Returns
    -------
    array
        ``scale * (clamp(rint(x / scale) + zero_point, qmin, qmax) - zero_point)``, shape, dtype and device of x.

    Raises
    ------
    FormatError, TypeError, ValueError, DeviceError
        As `quantize`.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> kb.affine.fake_quantize(np.array([-1.0, 0.3, 9.0], np.float32), 0.5, qmin=-8, qmax=7)
    array([-1. ,  0.5,  3.5], dtype=float32)
    """
    if _xp.is_tensor(x):
        options = {"qmin": qmin, "qmax": qmax, "granularity": granularity}
        return _xp.in_torch(fake_quantize, "x", x, scale, zero_point, out=out, **options)
    x, blocks = _blocked(x, granularity)
    levels = _affine.check_levels(qmin, qmax)
    _float_out(out, x)
    scale, zero_point = _parameters(scale, zero_point, blocks, x, levels, x.dtype)
    with _xp.on_device_of(x):
        if out is None:
            out = _xp.namespace(x).empty(x.shape, x.dtype)
        _affine.fake_quantize(x, out, scale, zero_point, blocks, levels)
    return out


def choose_qparams(
    x: Any,
    *,
    qmin: int = -128,
    qmax: int = 127,
    granularity: Any = "tensor",
    symmetric: bool = True,
    percentile: float | None = None,
) -> tuple[Any, Any]:
    """Scales and zero points that fit an array (torchao's ``choose_qparams_affine``).

    Parameters
    ----------
    x : array_like
        Float array of any shape.
    qmin, qmax : int, default -128, 127
        The range, within -2^20 to 2^20.
    granularity : str or tuple, default "tensor"
        As for `quantize`.
    symmetric : bool, default True
        From max|x| around one zero point (0, or the middle of a range without negative numbers) instead of from min and
        max, with a zero point for each block.
    percentile : float, optional
        Take this percentile of a block's magnitudes (of its values on both sides, where not symmetric) for its
        extremes; above 0, up to 100.

    Returns
    -------
    scale : array
        float32, or float64 where x is; see the module for its shape.
    zero_point : array
        int32, of the same shape.

    Raises
    ------
    FormatError, TypeError
        As `quantize`.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> x = np.array([[-1.0, 0.5], [0.0, 2.0]], np.float32)
    >>> kb.affine.choose_qparams(x, qmin=0, qmax=15, granularity="token", symmetric=False)
    (array([0.1       , 0.13333334], dtype=float32), array([10,  0], dtype=int32))
    """
    if _xp.is_tensor(x):
        options = {"qmin": qmin, "qmax": qmax, "granularity": granularity}
        options |= {"symmetric": symmetric, "percentile": percentile}
        return _xp.in_torch(choose_qparams, "x", x, **options)
    x, blocks = _blocked(x, granularity)
    levels = _affine.check_levels(qmin, qmax, symmetric=_flag(symmetric))
    fraction = _affine.check_percentile(percentile)
    with _xp.on_device_of(x):
        scale, zero_point = _new_parameters(x, blocks, levels)
        _affine.find(x, scale, zero_point, blocks, levels, None if fraction is None else fraction / 100)
    return scale, zero_point


def dynamic_range(
    x: Any,
    *,
    qmin: int = -128,
    qmax: int = 127,
    granularity: Any = "tensor",
    symmetric: bool = True,
    out: Any = None,
) -> tuple[Any, Any, Any]:
    """Find scales and zero points and quantize with them; blocks that fit on chip are read once.

    Parameters
    ----------
    x, qmin, qmax, granularity, out
        As for `quantize`.
    symmetric
        As for `choose_qparams`.

    Returns
    -------
    q : array
        int8 where qmin is negative, else uint8; shape and device of x.
    scale, zero_point : array
        As `choose_qparams` returns them.

    Raises
    ------
    FormatError, TypeError, ValueError, DeviceError
        As `quantize`.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> q, scale, _ = kb.affine.dynamic_range(np.array([[-1.0, 0.5], [0.0, 2.0]], np.float32), granularity="token")
    >>> q
    array([[-127,   64],
           [   0,  127]], dtype=int8)
    """
    if _xp.is_tensor(x):
        options = {"qmin": qmin, "qmax": qmax, "granularity": granularity, "symmetric": symmetric}
        return _xp.in_torch(dynamic_range, "x", x, out=out, **options)
    x, blocks = _blocked(x, granularity)
    levels = _byte_levels(qmin, qmax, _flag(symmetric))
    codes = _codes_out(out, x, _code_dtype(levels))
    with _xp.on_device_of(x):
        if codes is None:
            codes = _xp.namespace(x).empty(x.shape, _code_dtype(levels))
        scale, zero_point = _new_parameters(x, blocks, levels)
        _affine.quantize_dynamic(x, codes, scale, zero_point, blocks, levels)
    return codes, scale, zero_point


# ---- gradients -----------------------------------------------------------------------------------------------------


def quantize_backward(
    dy: Any,
    x: Any,
    scale: Any,
    zero_point: Any = 0,
    *,
    qmin: int = -128,
    qmax: int = 127,
    granularity: Any = "tensor",
    mask: str = "inclusive",
    out: Any = None,
) -> Any:
    """Straight-through gradient of `quantize`: ``dy / scale`` where x was not clamped, else 0.

    Parameters
    ----------
    dy : array_like
        Gradient of the integers, shape and dtype of x.
    x, scale, zero_point, qmin, qmax, granularity
        As they were given to `quantize`.
    mask : {"inclusive", "strict", "none"}, default "inclusive"
        Where gradient passes, with u = rint(x / scale) + zero_point: ``qmin <= u <= qmax`` (PyTorch's), ``qmin < u <
        qmax``, or everywhere (BitNet's), NaN included. NaN has no gradient otherwise, and a scale of 0 never has.
    out : array, optional
        C-contiguous array of x's shape and dtype, which receives the result; may be `dy` itself.

    Returns
    -------
    array
        Shape, dtype and device of x.

    Raises
    ------
    FormatError, TypeError, ValueError, DeviceError
        As `quantize`; ValueError too when the shapes or dtypes of dy and x differ.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> x = np.array([-1.0, 0.3, 9.0], np.float32)
    >>> kb.affine.quantize_backward(np.ones_like(x), x, 0.5, qmin=-8, qmax=7)
    array([2., 2., 0.], dtype=float32)
    """
    return _backward(dy, x, scale, zero_point, qmin, qmax, granularity, mask, out=out, divide=True)


def dynamic_range_backward(
    dy: Any,
    x: Any,
    scale: Any,
    zero_point: Any = 0,
    *,
    qmin: int = -128,
    qmax: int = 127,
    granularity: Any = "tensor",
    mask: str = "inclusive",
    out: Any = None,
) -> Any:
    """Straight-through gradient of the integers of `dynamic_range`: the scale it found counts as a constant.

    Parameters
    ----------
    dy, x, scale, zero_point, qmin, qmax, granularity, mask, out
        As for `quantize_backward`, with the scales and zero points that `dynamic_range` returned.

    Returns
    -------
    array
        Shape, dtype and device of x.

    Raises
    ------
    FormatError, TypeError, ValueError, DeviceError
        As `quantize_backward`.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> x = np.array([-1.0, 0.5, 2.0], np.float32)
    >>> q, scale, zero_point = kb.affine.dynamic_range(x)
    >>> kb.affine.dynamic_range_backward(scale * np.ones_like(x), x, scale, zero_point)
    array([1., 1., 1.], dtype=float32)
    """
    return _backward(dy, x, scale, zero_point, qmin, qmax, granularity, mask, out=out, divide=True)


def fake_quantize_backward(
    dy: Any,
    x: Any,
    scale: Any,
    zero_point: Any = 0,
    *,
    qmin: int,
    qmax: int,
    granularity: Any = "tensor",
    mask: str = "inclusive",
    out: Any = None,
) -> Any:
    """Straight-through gradient of `fake_quantize`: dy where x was not clamped, else 0.

    Parameters
    ----------
    dy : array_like
        Gradient of the result, shape and dtype of x.
    x, scale, zero_point, qmin, qmax, granularity
        As they were given to `fake_quantize`.
    mask, out
        As for `quantize_backward`; without a mask dy passes everywhere, scales of 0 included.

    Returns
    -------
    array
        Shape, dtype and device of x.

    Raises
    ------
    FormatError, TypeError, ValueError, DeviceError
        As `quantize_backward`.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> x = np.array([-4.0, 3.5, 3.8], np.float32)
    >>> kb.affine.fake_quantize_backward(np.ones_like(x), x, 0.5, qmin=-8, qmax=7)
    array([1., 1., 0.], dtype=float32)
    >>> kb.affine.fake_quantize_backward(np.ones_like(x), x, 0.5, qmin=-8, qmax=7, mask="strict")
    array([0., 0., 0.], dtype=float32)
    """
    return _backward(dy, x, scale, zero_point, qmin, qmax, granularity, mask, out=out, divide=False)


def dequantize_backward(dy: Any, scale: Any, *, granularity: Any = "tensor", out: Any = None) -> Any:
    """Gradient of `dequantize` with respect to the integers: ``dy * scale``.

    Parameters
    ----------
    dy : array_like
        Gradient of the result, a float array.
    scale, granularity
        As they were given to `dequantize`.
    out : array, optional
        C-contiguous array of dy's shape and dtype, which receives the result; may be `dy` itself.

    Returns
    -------
    array
        Shape, dtype and device of dy.

    Raises
    ------
    FormatError, TypeError, ValueError, DeviceError
        As `quantize`.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> kb.affine.dequantize_backward(np.array([1.0, -2.0], np.float32), 0.5)
    array([ 0.5, -1. ], dtype=float32)
    """
    if _xp.is_tensor(dy):
        return _xp.in_torch(dequantize_backward, "dy", dy, scale, granularity=granularity, out=out)
    dy, blocks = _blocked(dy, granularity, "dy")
    _float_out(out, dy)
    scale = _affine.check_scale(scale, blocks, dy, _affine.compute_dtype(dy.dtype))
    with _xp.on_device_of(dy):
        if out is None:
            out = _xp.namespace(dy).empty(dy.shape, dy.dtype)
        _affine.multiply(dy, out, scale, blocks)
    return out


def _backward(
    dy: Any,
    x: Any,
    scale: Any,
    zero_point: Any,
    qmin: Any,
    qmax: Any,
    granularity: Any,
    mask: Any,
    *,
    out: Any = None,
    divide: bool,
) -> Any:
    if _xp.is_tensor(dy):
        arguments = x, scale, zero_point, qmin, qmax, granularity, mask
        return _xp.in_torch(_backward, "dy", dy, *arguments, out=out, divide=divide)
    x, blocks = _blocked(x, granularity)
    dy = _xp.as_array(dy, "dy")
    _xp.float_dtype(dy.dtype, "dy")
    dy = source(dy, _xp.FLOAT_DTYPES)
    if dy.shape != x.shape or dy.dtype != x.dtype:
        raise ValueError(f"dy is {dy.dtype}{list(dy.shape)} and x {x.dtype}{list(x.shape)}; they must be alike")
    _xp.check_same_device(x, dy)
    levels = _byte_levels(qmin, qmax) if divide else _affine.check_levels(qmin, qmax)
    if not isinstance(mask, str) or mask not in _MARGINS:
        raise FormatError(f"mask is {mask!r}; allowed are {', '.join(map(repr, _MARGINS))}")
    margin = _MARGINS[mask]
    _float_out(out, x)
    scale, zero_point = _parameters(scale, zero_point, blocks, x, levels, x.dtype)
    with _xp.on_device_of(x):
        if out is None:
            out = _xp.namespace(x).empty(x.shape, x.dtype)
        _affine.backward(dy, None if margin is None else x, out, scale, zero_point, blocks, levels, margin or 0, divide)
    return out


# ---- arrays of other projects --------------------------------------------------------------------------------------


def from_mlx(weight: Any, scales: Any, biases: Any, *, bits: int = 4, group_size: int = 64) -> QuantizedArray:
    """A weight as MLX quantizes it (mode "affine"), whose element is ``scale * q + bias``, to the bit.

    Parameters
    ----------
    weight : array
        uint32 [..., K * bits / 32]: integers in order, the first in the low bits.
    scales, biases : array
        float16, bfloat16 or float32 [..., K / group_size].
    bits : {4, 8}, default 4
        Bits of an integer.
    group_size : int, default 64
        Elements that share a scale.

    Returns
    -------
    QuantizedArray
        ``uint4`` or ``uint8`` with ``zero="float"`` of shape [..., K], dtype and ``scale_dtype`` those of `scales`; its
        planes may be views of the arguments.

    Raises
    ------
    FormatError
        When bits or shapes do not go together.
    TypeError
        When an array is of another dtype.
    DeviceError
        When arrays are on different devices.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> one = np.ones((1, 1), np.float16)
    >>> q = kb.affine.from_mlx(np.uint32([[0x76543210] * 4]), one / 2, 290 * one, group_size=32)
    >>> q.dequantize()[0, :4]
    array([290. , 290.5, 291. , 291.5], dtype=float16)
    """
    weight, scales, biases = (
        _xp.as_array(weight, "weight"),
        _xp.as_array(scales, "scales"),
        _xp.as_array(biases, "biases"),
    )
    format = _grouped(bits, group_size, scales)
    if weight.dtype != np.uint32 or biases.dtype != scales.dtype:
        raise TypeError(
            f"weight is {weight.dtype}, scales {scales.dtype} and biases {biases.dtype}; weight must be uint32, and "
            "scales and biases must be alike"
        )
    _xp.check_same_device(weight, scales, biases)
    wanted = (*weight.shape[:-1], weight.shape[-1] * 32 // bits // group_size) if weight.ndim else ()
    if not weight.ndim or weight.shape[-1] * 32 % (bits * group_size) or {scales.shape, biases.shape} != {wanted}:
        raise FormatError(
            f"weight has shape {weight.shape}, scales {scales.shape} and biases {biases.shape}; with bits={bits} and "
            f"group_size={group_size} they must be [..., K * {bits} / 32] and twice [..., K / {group_size}]"
        )
    with _xp.on_device_of(weight):
        codes = _xp.contiguous(weight).reshape(-1).view(np.uint8)
        planes = {"codes": codes, "scale": _flat(scales), "offset": _flat(biases)}
    return QuantizedArray(format, planes, (*weight.shape[:-1], weight.shape[-1] * 32 // bits), scales.dtype)


def from_hqq(
    W_q: Any, scale: Any, zero: Any, *, shape: tuple[int, ...], nbits: int = 4, group_size: int = 64, dtype: Any = None
) -> QuantizedArray:
    """A weight as HQQ quantizes it (``axis=1``), whose element is ``(q - zero) * scale`` with any number as zero.

    Parameters
    ----------
    W_q : array
        uint8, with R = N * K / group_size: for 8 bits [R, group_size]; for 4 bits [R / 2, group_size], rows r and r + R
        / 2 in one byte, the first in the high half.
    scale, zero : array
        float16, bfloat16 or float32, R numbers.
    shape : tuple of int
        (N, K) of the weight; K is a multiple of `group_size`.
    nbits : {4, 8}, default 4
        Bits of an integer.
    group_size : int, default 64
        Elements that share a scale.
    dtype : dtype_like, optional
        dtype of the array; that of `scale` by default.

    Returns
    -------
    QuantizedArray
        ``uint4`` or ``uint8`` with ``zero="float"`` and the offset ``-zero * scale`` in float32. Where scale and zero
        have 16 bits that is exact, and an element is ``(q - zero) * scale``, rounded once to float32; HQQ itself rounds
        in between.

    Raises
    ------
    FormatError
        When bits or shapes do not go together.
    TypeError
        When an array is of another dtype.
    DeviceError
        When arrays are on different devices.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> q = np.arange(8, dtype=np.uint8).reshape(2, 4)
    >>> scale, zero = np.float16([[0.5], [2]]), np.float16([[1.5], [4]])
    >>> kb.affine.from_hqq(q, scale, zero, shape=(2, 4), nbits=8, group_size=4).dequantize()
    array([[-0.75, -0.25,  0.25,  0.75],
           [ 0.  ,  2.  ,  4.  ,  6.  ]], dtype=float16)
    """
    W_q, scale, zero = _xp.as_array(W_q, "W_q"), _xp.as_array(scale, "scale"), _xp.as_array(zero, "zero")
    format = get_format(_grouped(nbits, group_size, scale).name, block=group_size, zero="float")
    if W_q.dtype != np.uint8 or zero.dtype.name not in _affine.SCALE_DTYPES:
        raise TypeError(f"W_q is {W_q.dtype} and zero {zero.dtype}; W_q must be uint8, and zero as scale")
    _xp.check_same_device(W_q, scale, zero)
    shape = tuple(shape)
    groups = math.prod(shape) // group_size
    if len(shape) != 2 or shape[1] % group_size or (groups % 2 and nbits == 4):
        raise FormatError(
            f"shape is {shape} with group_size={group_size}; it must be (N, K), where K consists of whole groups, and "
            "of 4 bits an even number of them: HQQ's groups of other weights lie across rows"
        )
    if W_q.shape != (groups * nbits // 8, group_size) or {scale.size, zero.size} != {groups}:
        raise FormatError(
            f"W_q has shape {W_q.shape}, scale {scale.shape} and zero {zero.shape}; weights of shape {shape} need "
            f"({groups * nbits // 8}, {group_size}) and twice {groups} numbers, as axis=1 writes them"
        )
    with _xp.on_device_of(W_q):
        if nbits == 4:
            rows = _xp.namespace(W_q).concatenate([W_q >> 4, W_q & 15]).reshape(-1)
            W_q = rows[::2] | rows[1::2] << 4
        scales = _flat(scale).astype(np.float32)
        offsets = 0 - _flat(zero).astype(np.float32) * scales
        planes = {"codes": _flat(W_q), "scale": scales, "offset": offsets}
    return QuantizedArray(format, planes, shape, scale.dtype if dtype is None else _xp.float_dtype(dtype))


def _grouped(bits: Any, group_size: Any, scales: Any) -> Format:
    """The format of unsigned integers with offsets that are stored as `scales` are."""
    if bits not in (4, 8):
        raise FormatError(f"integers have {bits!r} bits; those of 4 and 8 have a format here: dequantize others")
    if scales.dtype.name not in _affine.SCALE_DTYPES:
        raise TypeError(f"scales are {scales.dtype}; allowed are {', '.join(_affine.SCALE_DTYPES)}")
    return get_format(f"uint{bits}", block=group_size, zero="float", scale_dtype=scales.dtype.name)


def _flat(array: Any) -> Any:
    return _xp.contiguous(array).reshape(-1)


# ---- arguments -----------------------------------------------------------------------------------------------------


def _blocked(x: Any, granularity: Any, argument: str = "x") -> tuple[Any, Blocks]:
    """A float array, C-contiguous and native, and its block shape."""
    x = _xp.as_array(x, argument)
    _xp.float_dtype(x.dtype, argument)
    blocks = _affine.blocks_of(x.shape, _affine.check_granularity(granularity))
    return source(x, _xp.FLOAT_DTYPES), blocks


def _byte_levels(qmin: Any, qmax: Any, symmetric: bool = True) -> Levels:
    """A range that int8 or uint8 holds."""
    levels = _affine.check_levels(qmin, qmax, (-128, 255), symmetric)
    if levels.qmin < 0 and levels.qmax > 127:
        raise FormatError(f"qmin is {qmin} and qmax {qmax}; the range must lie within -128 to 127, or within 0 to 255")
    return levels


def _parameters(
    scale: Any, zero_point: Any, blocks: Blocks, beside: Any, levels: Levels, dtype: np.dtype
) -> tuple[Any, Any]:
    """Checked scales and zero points."""
    scale = _affine.check_scale(scale, blocks, beside, _affine.compute_dtype(dtype))
    if type(zero_point) is int and zero_point == 0 and levels.qmin <= 0 <= levels.qmax:
        return scale, 0
    return scale, _affine.check_zero_point(zero_point, blocks, beside, levels)


def _new_parameters(x: Any, blocks: Blocks, levels: Levels) -> tuple[Any, Any]:
    """Arrays for what will be found."""
    if not levels.symmetric or levels.divisor > 0:
        empty = _xp.namespace(x).empty
        return empty(blocks.shape, _affine.compute_dtype(x.dtype)), empty(blocks.shape, _INT32)
    raise FormatError(
        f"qmin is {levels.qmin} and qmax {levels.qmax}; a symmetric range needs room above its zero point "
        f"{levels.zero}: pass symmetric=False"
    )


def _flag(symmetric: Any) -> bool:
    if not isinstance(symmetric, bool):
        raise FormatError(f"symmetric is {symmetric!r}; allowed are True and False")
    return symmetric


def _code_dtype(levels: Levels) -> np.dtype:
    return _INT8 if levels.qmin < 0 else _UINT8


def _codes_out(out: Any, x: Any, dtype: np.dtype) -> Any:
    """Check an output array of integers."""
    if out is None:
        return None
    if not _xp.is_array(out):
        raise TypeError(f"out is {type(out).__name__}; it must be a NumPy or CuPy array")
    if not _xp.same_device(out, x):
        raise DeviceError(f"out is on {_xp.device_of(out)}; the result is on {_xp.device_of(x)}: allocate it there")
    if out.dtype != dtype:
        raise TypeError(f"out is {out.dtype}; this range needs {dtype}")
    if out.shape != x.shape:
        raise ValueError(f"out has shape {out.shape}; the result has shape {x.shape}")
    if not out.flags.c_contiguous:
        raise ValueError("out is not C-contiguous; allocate it with empty(shape, dtype)")
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise ValueError("out is read-only; pass a writable array")
    return out


def _float_out(out: Any, x: Any) -> None:
    """Check an output array of x's shape and dtype."""
    if out is not None:
        check_out(out, x.shape, x, x.dtype)
