"""Activations in 8 bits or fewer, and RMSNorm, as arrays; `kbitcupy.products.activations` has the whole contract."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..affine import dequantize
from ..backend import xp as _xp
from ..errors import DeviceError
from ..ops import check_out
from ..products import activations as _tokens
from ..products.activations import Norm, check_eps, rule_of
from ..products.int8 import float_vector


def quantize_activations(
    x: Any,
    *,
    bits: int = 8,
    granularity: str = "token",
    rounding: str = "even",
    qmin: int = -128,
    eps: float = 1e-5,
) -> tuple[Any, Any]:
    """Activations as integers of 2 to 8 bits, with a scale for each token or one for all.

    With the largest magnitude ``a = max(max|x|, eps)``, x becomes ``clamp(rint(fl(x * fl(127 / a))), -128, 127)``, and
    the scale is ``fl(a / 127)``, all in float32. With fewer bits the largest code stands for 127.

    Parameters
    ----------
    x : array_like
        float16, bfloat16, float32 or float64 [..., K]; a row along the last axis is a token.
    bits : int, default 8
        Of a code, 2 to 8.
    granularity : {"token", "tensor"}, default "token"
        What shares a scale.
    rounding : {"even", "away"}, default "even"
        Where halves go: to the even neighbour, or away from zero.
    qmin : {-128, -127}, default -128
        The lowest code, by what it is with 8 bits; -127 is the negative of the highest one.
    eps : float, default 1e-5
        The least magnitude that a scale is made from: tinier tokens keep fewer bits.

    Returns
    -------
    q : array
        int8 of x's shape, on its device. NaN has become 0, and an infinity counts as the largest finite float32.
    scale : array
        float32, [...] for ``"token"`` and [1] for ``"tensor"``; x is about ``q * scale``.

    Raises
    ------
    TypeError
        When x is no float array.
    FormatError
        When an option is not allowed.
    ValueError
        When x has no axis.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> q, scale = kb.bitnet.quantize_activations(np.array([[0.5, -1.27, 0.004]], np.float32))
    >>> q, scale
    (array([[  50, -127,    0]], dtype=int8), array([0.01], dtype=float32))
    """
    if _xp.is_tensor(x):
        options: dict[str, Any] = {"bits": bits, "granularity": granularity}
        return _xp.in_torch(quantize_activations, "x", x, **options, rounding=rounding, qmin=qmin, eps=eps)
    x = _matrix_like(x)
    rule = rule_of(bits, granularity, rounding, qmin, eps)
    with _xp.on_device_of(x):
        codes, scale = _tokens.quantize(_tokens_of(x), rule)
    shape = x.shape[:-1] if granularity == "token" else (1,)
    return codes.reshape(x.shape), scale.reshape(shape)


def dequantize_activations(q: Any, scale: Any, *, dtype: Any = "float32", out: Any = None) -> Any:
    """Integers times their scales: what `quantize_activations` has left of the activations.

    Parameters
    ----------
    q : array_like
        int8 [..., K].
    scale : array_like
        float32, [...] with one for each token or one number for all, on the device of `q`.
    dtype : dtype_like, default "float32"
        Of the result, to which the float32 product is rounded.
    out : array, optional
        C-contiguous array of q's shape, which receives the result.

    Returns
    -------
    array
        ``q * scale`` of q's shape.

    Raises
    ------
    TypeError, ValueError, DeviceError
        When a dtype, a shape or a device does not fit.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> kb.bitnet.dequantize_activations(np.int8([[50, -127]]), np.float32([0.5]))
    array([[ 25. , -63.5]], dtype=float32)
    """
    if _xp.is_tensor(q):
        return _xp.in_torch(dequantize_activations, "q", q, scale, dtype=dtype, out=out)
    q = _xp.as_array(q, "q")
    if q.dtype != np.int8:
        raise TypeError(f"q is {q.dtype}; it must be int8, as quantize_activations returns")
    scale = _xp.as_array(scale, "scale")
    if scale.size == 1:
        return dequantize(q, scale.reshape(1), granularity="tensor", dtype=dtype, out=out)
    return dequantize(q, scale, granularity="token", dtype=dtype, out=out)


def rms_norm(x: Any, weight: Any = None, *, eps: float = 1e-6, out: Any = None) -> Any:
    """Each token over the root of its mean square, times a weight.

    ``fl(fl(x * r) * weight)`` with ``r = fl(1 / sqrt(mean(x^2) + eps))`` in float32; the mean is float64, its sum of a
    fixed order, so that NumPy and CuPy give the same bits. In the mean NaN counts as 0 and an infinity as the largest
    finite float32.

    Parameters
    ----------
    x : array_like
        float16, bfloat16, float32 or float64 [..., K]; float64 is rounded to float32 first.
    weight : array_like, optional
        float [K], on the device of `x`.
    eps : float, default 1e-6
        Added to the mean; transformers' default. The model microsoft/bitnet-b1.58-2B-4T has 1e-5.
    out : array, optional
        C-contiguous array of x's shape and dtype, which receives the result.

    Returns
    -------
    array
        Shape, dtype and device of `x`, to whose dtype the float32 result is rounded. `linear` quantizes what is not
        rounded.

    Raises
    ------
    TypeError, ValueError, DeviceError, FormatError
        When an argument does not fit the others.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> kb.bitnet.rms_norm(np.array([[3.0, -4.0]], np.float32), np.float32([1, 2]), eps=0)
    array([[ 0.84852815, -2.2627418 ]], dtype=float32)
    """
    if _xp.is_tensor(x):
        return _xp.in_torch(rms_norm, "x", x, weight, eps=eps, out=out)
    x = _matrix_like(x)
    norm = norm_of(True if weight is None else weight, eps, x, "weight", "eps")
    assert norm is not None
    if out is not None:
        check_out(out, x.shape, x, x.dtype)
    with _xp.on_device_of(x):
        if out is None:
            out = _xp.namespace(x).empty(x.shape, x.dtype)
        if x.size:
            _tokens.normalize(_tokens_of(x), norm, out.reshape(-1, x.shape[-1]))
    return out


def norm_of(norm: Any, eps: Any, beside: Any, argument: str, eps_argument: str) -> Norm | None:
    """The RMSNorm that an argument asks for: None or False none, True one without weights, else its weights."""
    if norm is None or norm is False:
        return None
    weight = None if norm is True else float_vector(norm, argument, beside.shape[-1], beside, True)
    return Norm(weight, check_eps(eps, eps_argument))


def _matrix_like(x: Any) -> Any:
    """A float array of one axis or more."""
    x = _xp.as_array(x, "x")
    dtype = _xp.float_dtype(x.dtype, "x")
    if not x.ndim:
        raise ValueError("x has no axis; it must be [..., K]: pass x.reshape(1)")
    return x if x.dtype == dtype else x.astype(dtype)  # another byte order


def _tokens_of(x: Any) -> Any:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def check_beside(x: Any, plane: Any, argument: str = "q") -> None:
    """Check that an array and a plane of a weight are on one device.

    Raises
    ------
    DeviceError
        When they are not.
    """
    if not _xp.same_device(x, plane):
        raise DeviceError(
            f"{argument} is on {_xp.device_of(plane)} and x on {_xp.device_of(x)}; move one with .to_device(), "
            "cupy.asarray or cupy.asnumpy"
        )
