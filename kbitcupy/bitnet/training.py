"""Gradients of BitNet's layers, straight through the rounding: arrays in, arrays out, no framework.

A layer computes ``y = xh @ wh.T + b`` with the quantized activations ``xh = codes * scale`` and the quantized weights
``wh = trits * scale``. Its derivatives are those of the surrogate that has no rounding and no clamping and takes all
scales for constants, at the point (xh, wh):

    dX = dY wh,    dW = dY^T xh,    db = sum of dY over the tokens

dW belongs to the float weights that the trits were made of, which an optimizer moves and which are quantized anew for
the next step. BitNet lets it pass everywhere; with a mask it only passes where ``rint(w / scale)`` is -1, 0 or 1
(``"inclusive"``), or 0 (``"strict"``). An RMSNorm ahead of the quantization, z = x r g with r = ``1 / sqrt(mean(x^2) +
eps)``, has

    dg = sum over the tokens of dz x r,    dX = r g dz - x r^3 / K * sum over k of (g dz x)

Matrix products are float32 (float64 beside float64 activations), the norm's own derivatives are computed in float64.

Sources: "The Era of 1-bit LLMs: Training Tips, Code and FAQ" by the authors of arXiv 2402.17764, and transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..array import QuantizedArray
from ..backend import xp as _xp
from ..errors import FormatError
from ..products import activations as _activations
from ..products.activations import Norm
from .activations import check_beside, norm_of

__all__ = ["linear_backward", "rms_norm_backward"]

MASKS = ("none", "inclusive", "strict")


def linear_backward(
    dy: Any,
    x: Any,
    q: QuantizedArray,
    W: Any = None,
    *,
    mask: str = "none",
    norm: Any = None,
    norm_eps: float = 1e-6,
    bits: int | None = 8,
    granularity: str = "token",
    rounding: str = "even",
    qmin: int = -128,
    eps: float = 1e-5,
) -> tuple[Any, ...]:
    """Straight-through gradients of `kbitcupy.bitnet.linear`.

    Parameters
    ----------
    dy : array_like
        Gradient of the result, float [..., N].
    x : array_like or QuantizedArray
        The activations that were multiplied, [..., K]: floats, or int8 that was compressed before.
    q : QuantizedArray
        The weight [N, K], on the device of `x`; without a mask in any format.
    W : array_like, optional
        The float weights [N, K] that `q` was made of. Only masks look at their values.
    mask : {"none", "inclusive", "strict"}, default "none"
        Where gradients of weights pass: everywhere, where ``rint(w / scale)`` is -1, 0 or 1, or where it is 0. Under a
        scale of 0 no mask lets anything pass.
    norm : True or array_like, optional
        The RMSNorm ahead of the quantization, as `kbitcupy.bitnet.linear` takes it: its weights [K], or True for one
        without.
    norm_eps : float, default 1e-6
        What the norm adds to the mean of the squares.
    bits, granularity, rounding, qmin, eps
        How activations were quantized, see `kbitcupy.bitnet.quantize_activations`. ``bits=None``: not at all, as
        `kbitcupy.linear` multiplies.

    Returns
    -------
    dx : array
        Shape and dtype of `x`.
    dW : array
        [N, K], in the dtype of `W`, without it float32 (float64 beside float64 `x`).
    db : array
        [N], in the dtype of `dW`.
    dnorm : array
        Only with `norm`: the gradient of the norm's weights [K], in the dtype of `dW`.

    Raises
    ------
    FormatError
        When an option is not known, or the weight is not ternary and there is a mask.
    TypeError
        When an array holds no floats.
    ValueError
        When shapes do not fit, or a mask comes without `W`.
    DeviceError
        When arrays are on different devices.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> W = np.array([[0.75, -0.5, 0.1, 2.0]], np.float32)
    >>> q = kb.quantize(W, "ternary", scale=0.5)
    >>> x = np.array([[127.0, 0.0, -127.0, 1.0]], np.float32)
    >>> dy = np.ones((1, 1), np.float32)
    >>> dx, dW, db = kb.bitnet.linear_backward(dy, x, q)
    >>> dx, dW
    (array([[ 0.5, -0.5,  0. ,  0.5]], dtype=float32), array([[ 127.,    0., -127.,    1.]], dtype=float32))
    >>> kb.bitnet.linear_backward(dy, x, q, W, mask="inclusive")[1]
    array([[   0.,    0., -127.,    0.]], dtype=float32)
    """
    if _xp.is_tensor(dy):
        options = {"mask": mask, "norm": norm, "norm_eps": norm_eps, "bits": bits, "granularity": granularity}
        options |= {"rounding": rounding, "qmin": qmin, "eps": eps}
        return _xp.in_torch(linear_backward, "dy", dy, x, q, W, **options)
    rule = None if bits is None else _activations.rule_of(bits, granularity, rounding, qmin, eps)
    if isinstance(x, QuantizedArray):
        if norm is not None:
            raise FormatError("norm goes with float activations, and x is compressed: leave it away")
        x, rule = x.dequantize(), None
    return straight_through(dy, x, q, W, mask, norm, norm_eps, lambda z: z if rule is None else _quantized(z, rule))


def rms_norm_backward(dz: Any, x: Any, weight: Any = None, *, eps: float = 1e-6) -> tuple[Any, Any]:
    """Gradients of `kbitcupy.bitnet.rms_norm`.

    Parameters
    ----------
    dz : array_like
        Gradient of the result, float, of x's shape.
    x : array_like
        What was normalized: float [..., K].
    weight : array_like, optional
        The norm's weights [K]; ones without.
    eps : float, default 1e-6
        What the norm adds to the mean of the squares.

    Returns
    -------
    dx : array
        Shape and dtype of `x`.
    dweight : array
        [K], in the dtype of `weight`, without it float32 (float64 beside float64 `x`).

    Raises
    ------
    TypeError
        When an array holds no floats.
    ValueError
        When shapes do not fit, or `eps` is no number of 0 or more.
    DeviceError
        When arrays are on different devices.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> x = np.array([[3.0, -3.0]], np.float32)
    >>> dx, dweight = kb.bitnet.rms_norm_backward(np.array([[1.0, 1.0]], np.float32), x, eps=0.0)
    >>> dx.round(6), dweight
    (array([[0.333333, 0.333333]], dtype=float32), array([ 1., -1.], dtype=float32))
    """
    if _xp.is_tensor(dz):
        return _xp.in_torch(rms_norm_backward, "dz", dz, x, weight, eps=eps)
    x = floats(x, "x")
    if x.ndim == 0:
        raise ValueError("x has no axis; it must be [..., K]")
    dz = array_of(dz, "dz", x.shape, x)
    weight = None if weight is None else array_of(weight, "weight", x.shape[-1:], x)
    norm = Norm(weight, _activations.check_eps(eps, "eps"))
    result = weight.dtype if weight is not None else np.float64 if x.dtype == np.float64 else np.float32
    with _xp.on_device_of(x), np.errstate(all="ignore"):
        tokens = math.prod(x.shape[:-1]), x.shape[-1]
        dx, dweight = _norm_gradients(dz.reshape(tokens), x.reshape(tokens), norm)
        return dx.astype(x.dtype).reshape(x.shape), dweight.astype(result)


# ---- the products ----------------------------------------------------------------------------------------------------


def straight_through(
    dy: Any, x: Any, q: Any, W: Any, mask: str, norm: Any, norm_eps: Any, quantized: Callable[[Any], Any]
) -> tuple[Any, ...]:
    """What `linear_backward` returns, where `quantized` makes of a float matrix what the layer multiplies."""
    if not isinstance(mask, str) or mask not in MASKS:
        raise FormatError(f"mask is {mask!r}; allowed are {', '.join(map(repr, MASKS))}")
    if not isinstance(q, QuantizedArray):
        raise TypeError(f"q is {type(q).__name__}; it must be a QuantizedArray")
    plane = next(iter(q.planes.values()))
    if q.ndim != 2:
        raise ValueError(f"q has shape {q.shape}; it must be a weight [N, K]")
    rows, depth = q.shape
    x, dy = floats(x, "x"), floats(dy, "dy")
    if x.ndim == 0 or x.shape[-1] != depth or dy.shape != (*x.shape[:-1], rows):
        raise ValueError(
            f"x has shape {x.shape} and dy {dy.shape}; a weight of shape {q.shape} needs x [..., {depth}] and dy "
            f"[..., {rows}]"
        )
    check_beside(x, plane)
    check_beside(x, dy, "dy")
    if W is not None:
        W = array_of(W, "W", q.shape, x)
    if mask != "none" and (W is None or q.format.trits(q.shape, q.lead) is None):
        raise FormatError(f"mask={mask!r} needs the float weights W that q was made of, and q in ternary; q is {q!r}")
    ahead = norm_of(norm, norm_eps, x, "norm", "norm_eps")
    working = np.dtype(np.float64 if x.dtype == np.float64 else np.float32)
    dtype = working if W is None else W.dtype
    with _xp.on_device_of(x), np.errstate(all="ignore"):
        tokens = x.reshape(math.prod(x.shape[:-1]), depth)
        seen = quantized(tokens if ahead is None else _normalized(tokens, ahead)).astype(working, copy=False)
        slope = dy.reshape(len(tokens), rows).astype(working, copy=False)
        dx, dw, db = slope @ q.dequantize(dtype=working), slope.T @ seen, slope.sum(axis=0)
        if mask != "none":
            dw *= passing(W, q, mask)
        found = [dw.astype(dtype, copy=False), db.astype(dtype, copy=False)]
        if ahead is not None:
            dx, dnorm = _norm_gradients(dx, tokens, ahead)
            found.append(dnorm.astype(dtype))
        return (dx.astype(x.dtype, copy=False).reshape(x.shape), *found)


def passing(W: Any, q: QuantizedArray, mask: str) -> Any:
    """Where a mask lets the gradient of a weight pass, boolean [N, K]."""
    ratio = abs(W.astype(np.float32, copy=False)) * (np.float32(1) / scales(q))
    if mask == "inclusive":
        return ratio < np.float32(1.5)
    return ratio < np.float32(0.5) if q.format.options()["rounding"] == "away" else ratio <= np.float32(0.5)


def scales(q: QuantizedArray) -> Any:
    """The scales of a ternary matrix, of a shape that goes with its own."""
    part = q.format.trits(q.shape, q.lead)
    assert part is not None
    scale = q.planes[part.scales]
    if part.shares == "tensor":
        return scale.reshape(1, 1)
    each = scale.reshape(len(q), -1)
    return each if part.shares == "row" else each.repeat(part.group, axis=1)[:, : q.shape[1]]


# ---- the norm --------------------------------------------------------------------------------------------------------


def _norm_gradients(dz: Any, x: Any, norm: Norm) -> tuple[Any, Any]:
    """dX and dg of matrices [M, K], float64."""
    x, dz = x.astype(np.float64), dz.astype(np.float64)
    r = 1 / ((x * x).sum(axis=1, keepdims=True) / max(1, x.shape[1]) + norm.eps) ** 0.5
    slope = dz if norm.weight is None else dz * norm.weight.astype(np.float64)
    dx = r * slope - x * (r**3 / max(1, x.shape[1])) * (slope * x).sum(axis=1, keepdims=True)
    return dx, (dz * x * r).sum(axis=0)


def _normalized(x: Any, norm: Norm) -> Any:
    """What the norm makes of a matrix, float32."""
    out = _xp.namespace(x).empty(x.shape, np.float32)
    if x.size:
        _activations.normalize(x, norm, out)
    return out


def _quantized(x: Any, rule: _activations.Rule) -> Any:
    """Codes times scales of a matrix, float32."""
    codes, scale = _activations.quantize(x, rule)
    return codes.astype(np.float32) * scale[:, None]


# ---- arguments -------------------------------------------------------------------------------------------------------


def floats(x: Any, argument: str) -> Any:
    """A float array of the machine's byte order.

    Raises
    ------
    TypeError
        When it is none.
    """
    array = _xp.as_array(x, argument)
    dtype = _xp.float_dtype(array.dtype, argument)
    return array if array.dtype == dtype else array.astype(dtype)


def array_of(x: Any, argument: str, shape: tuple[int, ...], beside: Any) -> Any:
    """A float array of some shape beside another.

    Raises
    ------
    TypeError, ValueError, DeviceError
        When it is none.
    """
    array = floats(x, argument)
    if array.shape != shape:
        raise ValueError(f"{argument} has shape {array.shape}; it must be {shape}")
    check_beside(beside, array, argument)
    return array
