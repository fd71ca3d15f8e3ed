"""BitLinear's forward: RMSNorm, quantization of tokens, integer product, scales and bias."""

from __future__ import annotations

from typing import Any

from ..array import QuantizedArray
from ..backend import xp as _xp
from ..errors import FormatError
from ..ops import check_out
from ..products import ternary as _ternary
from ..products.activations import rule_of
from ..products.int8 import float_vector, token_planes
from .activations import check_beside, norm_of


def linear(
    x: Any,
    q: QuantizedArray,
    bias: Any = None,
    *,
    norm: Any = None,
    norm_eps: float = 1e-6,
    bits: int = 8,
    granularity: str = "token",
    rounding: str = "even",
    qmin: int = -128,
    eps: float = 1e-5,
    out: Any = None,
) -> Any:
    """Activations, quantized on the way, times the transpose of a ternary weight, plus a bias: BitLinear.

    ``fl(fl(float(sum of q * trit) * activation scale) * weight scale) + bias`` in float32, with exact integer sums;
    where groups of a weight have scales, sums are exact within a group and the groups are added from the first to the
    last. NumPy and CuPy give the same bits.

    Parameters
    ----------
    x : array_like or QuantizedArray
        float16, bfloat16, float32 or float64 [..., K]; or compressed already, in a symmetric ``int8`` with
        ``granularity="token"`` or ``"tensor"``: then the options below are left away.
    q : QuantizedArray
        Weight [N, K] of format ``ternary``, on the device of `x`; K up to 131071.
    bias : array_like, optional
        float [N]; added in float32.
    norm : array_like or bool, optional
        An RMSNorm ahead of the quantization: its weights, float [K], or True for one without. See `rms_norm`, whose
        float32 result is quantized without another rounding.
    norm_eps : float, default 1e-6
        Its eps.
    bits, granularity, rounding, qmin, eps
        As for `quantize_activations`.
    out : array, optional
        C-contiguous array of the result's shape and dtype, which receives it; it must not overlap `x`.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        [..., N], with the dtype of `x`; a torch tensor where `x` is one; `out` itself where it is given. On CuPy the
        call does not synchronise.

    Raises
    ------
    TypeError
        When an argument is of the wrong type or dtype.
    FormatError
        When `q` is no such weight, `x` compressed in another way, or an option is not allowed.
    ValueError
        When a shape does not fit the others.
    DeviceError
        When the arguments are on different devices.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> rng = np.random.default_rng(0)
    >>> w, x = (rng.standard_normal(shape).astype(np.float32) for shape in ((48, 256), (2, 5, 256)))
    >>> q = kb.quantize(w, "ternary")
    >>> y = kb.bitnet.linear(x, q)
    >>> y.shape, round(kb.metrics.sqnr_db(x @ q.dequantize().T, y), 0)
    ((2, 5, 48), 43.0)
    >>> bool((kb.linear(x, q, activations="bitnet") == y).all())
    True
    >>> kb.bitnet.linear(x, q, norm=np.ones(256, np.float32), bits=4).shape
    (2, 5, 48)
    """
    if _xp.is_tensor(x):
        options: dict[str, Any] = {"norm": norm, "norm_eps": norm_eps, "bits": bits, "granularity": granularity}
        return _xp.in_torch(linear, "x", x, q, bias, **options, rounding=rounding, qmin=qmin, eps=eps, out=out)
    rule = rule_of(bits, granularity, rounding, qmin, eps)
    if not isinstance(q, QuantizedArray):
        raise TypeError(f"q is {type(q).__name__}; it must be a QuantizedArray: kb.quantize(w, 'ternary')")
    part = _ternary.trits_of(q)
    if isinstance(x, QuantizedArray):
        if rule != _ternary.BITNET or norm is not None:
            raise FormatError(
                f"norm, bits, granularity, rounding, qmin and eps go with activations that are quantized here, and x "
                f"is {x!r}: leave them away"
            )
        dtype, plane = x.dtype, token_planes(x)[0]
    else:
        if not _xp.is_native(x):
            x = _xp.as_array(x, "x")
            x = x.astype(_xp.float_dtype(x.dtype, "x"), copy=False)  # another byte order
        dtype, plane = x.dtype, x
    rows, depth = q.shape
    if not x.ndim or x.shape[-1] != depth:
        raise ValueError(f"x has shape {x.shape}; a weight of shape {q.shape} needs [..., {depth}]")
    check_beside(plane, next(iter(q.planes.values())))
    ahead = None if norm is None else norm_of(norm, norm_eps, x, "norm", "norm_eps")
    if bias is not None:
        bias = float_vector(bias, "bias", rows, plane)
    shape = (*x.shape[:-1], rows)
    if out is not None:
        check_out(out, shape, plane, dtype)
    with _xp.on_device_of(plane):
        if out is None:
            out = _xp.empty(plane, shape, dtype)
        if out.size:
            _ternary.multiply(x, q, bias, out, rule, ahead, part)
    return out
