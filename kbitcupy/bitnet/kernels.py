"""Ternary products of bare trits and scales: the names of bitnet-quantize's kernels, over this package's functions.

Here every row of a weight has one scale, the mean magnitude of the row, 0 for a row of zeros; halves go away from zero.
Activations stay floats. NumPy and CuPy arrays are taken alike.

Source: the packages bitnet-quantize and trit-vsa.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..array import QuantizedArray
from ..backend import xp as _xp
from ..errors import FormatError, KbitError
from ..products.functions import linear
from .layers import TernaryWeight, quantize_weights
from .packing import from_trits, pack, unpack
from .training import array_of, floats

__all__ = [
    "absmean_quantize",
    "bitlinear_forward",
    "cuda_available",
    "pack_ternary_weights",
    "packed_ternary_matmul",
    "should_use_gpu",
    "ternary_dequantize",
    "ternary_matmul",
    "ternary_matmul_raw",
    "unpack_ternary_weights",
]

# Products of fewer multiplications are done before a GPU has begun.
_WORTH_A_GPU = 1 << 16


def absmean_quantize(W: Any) -> tuple[Any, Any]:
    """Trits of a matrix and the mean magnitude of each row.

    Parameters
    ----------
    W : array_like
        float [out, in].

    Returns
    -------
    trits : array
        int8 [out, in].
    scales : array
        float32 [out], 0 where a row is zero.

    Raises
    ------
    TypeError, ValueError
        When W is no float matrix.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> kb.bitnet.kernels.absmean_quantize(np.array([[1.5, -0.25, 0.5], [0, 0, 0]], np.float32))
    (array([[1, 0, 1],
           [0, 0, 0]], dtype=int8), array([0.75, 0.  ], dtype=float32))
    """
    W = _matrix(W, "W")
    weight = quantize_weights(W, granularity=("channel", 0))
    trits = weight.trits()
    with _xp.on_device_of(trits):
        # A row with a scale of its own has a weight that is as large as the mean.
        return trits, weight.scales.reshape(-1) * trits.any(axis=1)


def ternary_dequantize(trits: Any, scales: Any) -> Any:
    """Trits times the scale of their row.

    Parameters
    ----------
    trits : array_like
        int8 [out, in].
    scales : array_like
        float [out].

    Returns
    -------
    array
        float32 [out, in].

    Raises
    ------
    FormatError, TypeError, ValueError
        When an argument does not fit.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> kb.bitnet.kernels.ternary_dequantize(np.int8([[1, 0], [-1, 1]]), np.float32([2, 0.5]))
    array([[ 2. ,  0. ],
           [-0.5,  0.5]], dtype=float32)
    """
    return _of_rows(trits, scales).dequantize()


def ternary_matmul(x: Any, weight: Any, bias: Any = None) -> Any:
    """x times the transpose of ternary weights, floats as they came.

    Parameters
    ----------
    x : array_like
        float [..., in].
    weight : TernaryWeight or QuantizedArray
        [out, in].
    bias : array_like, optional
        float [out].

    Returns
    -------
    array
        [..., out], in x's dtype.

    Raises
    ------
    DeviceError, FormatError, TypeError, ValueError
        As `kbitcupy.linear`.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> weight = kb.bitnet.layers.quantize_weights(np.array([[2.0, -2.0, 0.5, 0.0]], np.float32))
    >>> kb.bitnet.kernels.ternary_matmul(np.array([[1.0, 2.0, 3.0, 4.0]], np.float32), weight)
    array([[-1.125]], dtype=float32)
    """
    return linear(x, weight.array if isinstance(weight, TernaryWeight) else weight, bias)


def ternary_matmul_raw(x: Any, trits: Any, scales: Any) -> Any:
    """x times the transpose of trits, times the scales of their rows.

    Parameters
    ----------
    x : array_like
        float [..., in].
    trits, scales : array_like
        As for `ternary_dequantize`.

    Returns
    -------
    array
        [..., out], in x's dtype.

    Raises
    ------
    DeviceError, FormatError, TypeError, ValueError
        When an argument does not fit.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> x = np.array([[1.0, 2.0]], np.float32)
    >>> kb.bitnet.kernels.ternary_matmul_raw(x, np.int8([[1, 0], [-1, 1]]), np.float32([2, 0.5]))
    array([[2. , 0.5]], dtype=float32)
    """
    return linear(x, _of_rows(trits, scales))


def packed_ternary_matmul(x: Any, packed: Any, scales: Any, in_features: int) -> Any:
    """`ternary_matmul_raw` of the words of `pack_ternary_weights`.

    Parameters
    ----------
    x : array_like
        float [..., in].
    packed : array_like
        uint32 [out, ceil(in / 16)].
    scales : array_like
        float [out].
    in_features : int
        in.

    Returns
    -------
    array
        [..., out], in x's dtype.

    Raises
    ------
    DeviceError, FormatError, TypeError, ValueError
        When an argument does not fit.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> packed = kb.bitnet.kernels.pack_ternary_weights(np.int8([[1, 0], [-1, 1]]))
    >>> x = np.array([[1.0, 2.0]], np.float32)
    >>> kb.bitnet.kernels.packed_ternary_matmul(x, packed, np.float32([2, 0.5]), 2)
    array([[2. , 0.5]], dtype=float32)
    """
    return ternary_matmul_raw(x, unpack_ternary_weights(packed, in_features), scales)


def pack_ternary_weights(trits: Any) -> Any:
    """Trits in two bits each: 0 is 0, 1 is +1, 2 is -1; sixteen to a word, the first in its lowest bits.

    Parameters
    ----------
    trits : array_like
        int8 [out, in].

    Returns
    -------
    array
        uint32 [out, ceil(in / 16)].

    Raises
    ------
    FormatError, TypeError, ValueError
        As `kbitcupy.bitnet.pack`.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> kb.bitnet.kernels.pack_ternary_weights(np.int8([[1, 0, -1, 1]])).tolist()
    [[97]]
    """
    return pack(trits, "u32")


def unpack_ternary_weights(packed: Any, in_features: int) -> Any:
    """The inverse of `pack_ternary_weights`.

    Parameters
    ----------
    packed : array_like
        uint32 [out, ceil(in / 16)].
    in_features : int
        in.

    Returns
    -------
    array
        int8 [out, in].

    Raises
    ------
    FormatError, TypeError, ValueError
        As `kbitcupy.bitnet.unpack`.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> kb.bitnet.kernels.unpack_ternary_weights(np.uint32([[97]]), 4)
    array([[ 1,  0, -1,  1]], dtype=int8)
    """
    words = packed if _xp.is_tensor(packed) else _xp.as_array(packed, "packed")
    if words.ndim != 2:
        raise ValueError(f"packed has shape {tuple(words.shape)}; it must be [out, ceil(in / 16)]")
    return unpack(words, (words.shape[0], in_features), "u32")


def bitlinear_forward(x: Any, W: Any, ln_weight: Any, ln_bias: Any = None, eps: float = 1e-5) -> Any:
    """A layer norm (mean and variance, in float64), then the product with the trits of a float matrix.

    Parameters
    ----------
    x : array_like
        float [..., in].
    W : array_like
        float [out, in]; quantized by `absmean_quantize`.
    ln_weight, ln_bias : array_like
        float [in]; nothing is added without `ln_bias`.
    eps : float, default 1e-5
        What the norm adds to the variance.

    Returns
    -------
    array
        [..., out], in x's dtype.

    Raises
    ------
    DeviceError, FormatError, TypeError, ValueError
        When an argument does not fit.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> x, ones = np.array([[1.0, 3.0]], np.float32), np.ones(2, np.float32)
    >>> kb.bitnet.kernels.bitlinear_forward(x, np.array([[-2.0, 2.0]], np.float32), ones, eps=0.0)
    array([[4.]], dtype=float32)
    """
    if _xp.is_tensor(x):
        return _xp.in_torch(bitlinear_forward, "x", x, W, ln_weight, ln_bias, eps)
    x, W = floats(x, "x"), _matrix(W, "W")
    if x.ndim == 0 or x.shape[-1] != W.shape[1]:
        raise ValueError(f"x has shape {x.shape}; weights of shape {W.shape} need [..., {W.shape[1]}]")
    number = isinstance(eps, (int, float, np.integer, np.floating)) and not isinstance(eps, bool)
    if not number or not 0 <= float(eps) < float("inf"):
        raise FormatError(f"eps is {eps!r}; it must be a number, 0 or more and finite, such as 1e-5")
    ln_weight = array_of(ln_weight, "ln_weight", x.shape[-1:], x)
    ln_bias = None if ln_bias is None else array_of(ln_bias, "ln_bias", x.shape[-1:], x)
    with _xp.on_device_of(x):
        z = x.astype(np.float64)
        z -= z.mean(axis=-1, keepdims=True)
        z /= ((z * z).mean(axis=-1, keepdims=True) + eps) ** 0.5
        z *= ln_weight.astype(np.float64)
        if ln_bias is not None:
            z += ln_bias.astype(np.float64)
        return ternary_matmul_raw(z.astype(np.float32), *absmean_quantize(W)).astype(x.dtype, copy=False)


def cuda_available() -> bool:
    """Whether CuPy is installed and finds a GPU.

    Returns
    -------
    bool

    Examples
    --------
    >>> import kbitcupy as kb
    >>> kb.bitnet.kernels.cuda_available() in (True, False)
    True
    """
    try:
        _xp.import_cupy()
    except KbitError:
        return False
    return True


def should_use_gpu(x: Any, W: Any) -> bool:
    """Whether a product is worth a GPU, if there is one: over 65536 pairs of an element of x and one of W.

    Parameters
    ----------
    x, W : array_like
        The operands; only their shapes are looked at.

    Returns
    -------
    bool

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> kb.bitnet.kernels.should_use_gpu(np.ones((2, 4)), np.ones((8, 4)))
    False
    """
    return bool(np.size(x) * np.size(W) > _WORTH_A_GPU and cuda_available())


def _matrix(W: Any, argument: str) -> Any:
    W = floats(W, argument)
    if W.ndim != 2:
        raise ValueError(f"{argument} has shape {W.shape}; it must be [out, in]")
    return W


def _of_rows(trits: Any, scales: Any) -> QuantizedArray:
    trits = _xp.as_array(trits, "trits")
    if trits.ndim != 2:
        raise ValueError(f"trits has shape {trits.shape}; it must be [out, in]")
    return from_trits(trits, scales, granularity=("channel", 0))
