"""SmoothQuant: outliers of activations move into the weights (arXiv 2211.10438).

It divides activation channel k by ``s[k]`` and multiplies weight column k by it: ``s[k] = max|A[:, k]|^alpha / max|W[:,
k]|^(1 - alpha)``. The weights are smoothed before they are compressed; the division of the activations is part of their
quantization, see `kbitcupy.affine.linear_smoothquant`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..array import QuantizedArray
from ..backend import xp as _xp
from ..errors import DeviceError
from .int8 import float_vector

#: The smallest maximum that SmoothQuant reckons with.
SMALLEST_ABSMAX = 1e-5
_LARGEST = np.finfo(np.float32).max


class Calibration:
    """The running absmax of activation channels over batches.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> calibration = kb.affine.Calibration()
    >>> for batch in ([[1.0, -2.0]], [[-3.0, 0.5]]):
    ...     _ = calibration.update(np.array(batch, np.float32))
    >>> calibration.absmax
    array([3., 2.], dtype=float32)
    """

    __slots__ = ("_absmax",)

    def __init__(self) -> None:
        self._absmax: Any = None

    def update(self, batch: Any) -> Calibration:
        """Take a batch into account.

        Parameters
        ----------
        batch : array_like
            float [..., K]. NaN is ignored, an infinity counts as the largest float32. On CuPy nothing synchronises.

        Returns
        -------
        Calibration
            The object itself.

        Raises
        ------
        TypeError
            When the batch is not a float array.
        ValueError
            When its K is not that of the batches before.
        DeviceError
            When it is on another device than they.
        """
        batch = _xp.as_array(batch, "batch")
        _xp.float_dtype(batch.dtype, "batch")
        if batch.ndim == 0 or (self._absmax is not None and batch.shape[-1:] != self._absmax.shape):
            wanted = "[..., K]" if self._absmax is None else f"[..., {self._absmax.size}]"
            raise ValueError(f"batch has shape {batch.shape}; it must be {wanted}")
        if self._absmax is not None and not _xp.same_device(batch, self._absmax):
            raise DeviceError(
                f"batch is on {_xp.device_of(batch)} and the earlier ones on {_xp.device_of(self._absmax)}; move it"
            )
        with _xp.on_device_of(batch):
            found = column_absmax(batch)
            if self._absmax is not None:
                found = _xp.namespace(batch).maximum(found, self._absmax)
        self._absmax = found
        return self

    @property
    def absmax(self) -> Any:
        """float32 [K], on the device of the batches.

        Raises
        ------
        ValueError
            Before the first batch.
        """
        if self._absmax is None:
            raise ValueError("no batch has been seen: call update first")
        return self._absmax

    def activation_scale(self, smooth: Any = None) -> Any:
        """The scale of all tokens for `linear_smoothquant`: the largest ``absmax / smooth``, over 127.

        Parameters
        ----------
        smooth : array, optional
            float [K], from `smooth_scales`; by default nothing is divided.

        Returns
        -------
        array
            float32 [1], on the device of the batches; 1 where all batches were zeros.

        Raises
        ------
        ValueError, TypeError, DeviceError
            When `smooth` does not fit, or no batch has been seen.
        """
        absmax = self.absmax
        xp = _xp.namespace(absmax)
        with _xp.on_device_of(absmax):
            if smooth is not None:
                absmax = absmax / float_vector(smooth, "smooth", absmax.size, absmax, True)
            largest = (absmax if absmax.size else xp.zeros(1, np.float32)).max().reshape(1)
            return xp.where(largest > 0, largest / np.float32(127), np.float32(1)).astype(np.float32)


def column_absmax(x: Any) -> Any:
    """float32 [K]: the absmax over all axes but the last; NaN is ignored, infinity is the largest float32."""
    xp = _xp.namespace(x)
    with np.errstate(over="ignore"):
        magnitudes = xp.abs(x.astype(np.float32, copy=False)).reshape(-1, x.shape[-1])
    magnitudes = xp.where(xp.isnan(magnitudes), np.float32(0), magnitudes)
    if not len(magnitudes):  # CuPy's max knows no initial value
        return xp.zeros(x.shape[-1], np.float32)
    return xp.minimum(magnitudes.max(axis=0), _LARGEST)


def smooth_scales(activation_absmax: Any, weight: Any, alpha: float = 0.5) -> Any:
    """SmoothQuant's divisors of activation channels, ``max|A[:, k]|^alpha / max|W[:, k]|^(1 - alpha)``.

    Parameters
    ----------
    activation_absmax : array
        float [K], as `Calibration` keeps it.
    weight : array
        float [N, K], on the same device.
    alpha : float, default 0.5
        From 0 (everything stays with the activations) to 1 (all of their range moves to the weights).

    Returns
    -------
    array
        float32 [K]. Maxima below 1e-5 count as 1e-5; powers are taken in float64.

    Raises
    ------
    TypeError
        When an argument is not a float array.
    ValueError
        When the shapes do not fit or alpha is out of range.
    DeviceError
        When the arrays are on different devices.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> kb.affine.smooth_scales(np.array([16.0, 1.0], np.float32), np.array([[1.0, 4.0]], np.float32))
    array([4. , 0.5], dtype=float32)
    """
    if _xp.is_tensor(activation_absmax):
        return _xp.in_torch(smooth_scales, "activation_absmax", activation_absmax, weight, alpha)
    weight = _weight(weight)
    absmax = float_vector(activation_absmax, "activation_absmax", weight.shape[1], weight, True)
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float, np.number)) or not 0 <= alpha <= 1:
        raise ValueError(f"alpha is {alpha!r}; it must be a number from 0 to 1")
    xp = _xp.namespace(weight)
    with _xp.on_device_of(weight):
        activations = xp.maximum(absmax.astype(np.float64), SMALLEST_ABSMAX)
        weights = xp.maximum(column_absmax(weight).astype(np.float64), SMALLEST_ABSMAX)
        return (activations ** float(alpha) / weights ** (1 - float(alpha))).astype(np.float32)


def smooth_weight(weight: Any, smooth: Any) -> Any:
    """A weight whose columns are multiplied by SmoothQuant's divisors.

    Parameters
    ----------
    weight : array
        float [N, K].
    smooth : array
        float [K], from `smooth_scales`, on the same device.

    Returns
    -------
    array
        Shape and dtype of `weight`; the product is rounded to float32 and then to that dtype.

    Raises
    ------
    TypeError, ValueError, DeviceError
        As `smooth_scales`.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> kb.affine.smooth_weight(np.ones((1, 2), np.float16), np.array([4.0, 0.5], np.float32))
    array([[4. , 0.5]], dtype=float16)
    """
    if _xp.is_tensor(weight):
        return _xp.in_torch(smooth_weight, "weight", weight, smooth)
    weight = _weight(weight)
    smooth = float_vector(smooth, "smooth", weight.shape[1], weight, True)
    with _xp.on_device_of(weight), np.errstate(over="ignore"):
        return (weight.astype(np.float32, copy=False) * smooth).astype(weight.dtype, copy=False)


def _weight(weight: Any) -> Any:
    if isinstance(weight, QuantizedArray):
        raise TypeError("weight is a QuantizedArray; smooth the float weight before it is compressed")
    weight = _xp.as_array(weight, "weight")
    _xp.float_dtype(weight.dtype, "weight")
    if weight.ndim != 2:
        raise ValueError(f"weight has shape {weight.shape}; it must be [N, K]")
    return weight
