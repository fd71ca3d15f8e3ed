"""BitLinear: a linear layer of ternary weights in groups and activations of few bits, with its own arithmetic.

Weights [out, in], each row in groups of `group_size` neighbours, of which the last may be short:

    gamma = fl(mean |w|), or 1 where that is 0;    t = clamp(round(w / gamma), -1, 1);    w is about t * gamma

Activations, a token being a row along the last axis:

    scale = fl(max |x| / qmax);    q = clamp(round(fl(x / scale)), -qmax, qmax);    x is about q * scale

with qmax = ``2^(bits - 1) - 1``. Rounding sends halves away from zero. NaN is 0 and an infinity counts as the largest
finite float32; where a scale of activations would be below 2^-125 it is 1, and all that it is for are 0. Everything is
float32; the sum of a mean is that of the format ``ternary``.

`kbitcupy.bitnet.linear` has BitNet's later arithmetic, which multiplies by reciprocals, rounds halves to even and has a
scale for a whole matrix: codes differ where a quotient is at a half, or as near to it as its rounding.

Source: the package bitnet-quantize. There activations stay floats in ``forward``, and options of the configuration that
name a norm, a scale for all tokens and straight-through gradients change nothing; here they do what they say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..array import QuantizedArray
from ..backend import xp as _xp
from ..errors import FormatError
from ..formats.base import get_format
from ..formats.granularity import Blocks, blocks_of, check_granularity, walk
from ..formats.ternary import find
from ..ops import quantize
from ..products.functions import linear
from .activations import rms_norm
from .config import BitNetAdapterConfig, BitNetConfig
from .packing import from_trits, pack, sparsity, trits
from .training import array_of, floats, straight_through

__all__ = [
    "BitLinear",
    "BitNetAdapter",
    "QuantizedActivations",
    "TernaryWeight",
    "dequantize_activations",
    "dequantize_weights",
    "int8_ste",
    "quantize_activations",
    "quantize_ste",
    "quantize_weights",
    "ste_backward",
    "ste_forward",
    "ternary_ste",
]

_LARGEST = np.finfo(np.float32).max
_INFINITY = 0x7F800000
# Where numbers below 2^-126 are flushed to zero, codes are the same nevertheless from this scale on.
_LEAST_SCALE = np.float32(2.0**-125)
# The sum of a float32 and the number before a half reaches the next integer exactly where a half is missing, or less.
_BELOW_A_HALF = np.float32(0.5 - 2.0**-25)
# Elements of activations that NumPy works on at a time: what is computed in between stays in the cache.
_SLAB = 1 << 16


# ---- weights ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TernaryWeight:
    """A matrix of -1, 0 and 1 with scales.

    Parameters
    ----------
    array : QuantizedArray
        In the format ``ternary``.

    Raises
    ------
    FormatError, TypeError
        When it is none.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> w = np.array([[1, -1, 0.5, -0.5, 2, -2, 0.1, -0.1]], np.float32)
    >>> weight = kb.bitnet.layers.quantize_weights(w, kb.bitnet.BitNetConfig(group_size=4))
    >>> weight.trits(), weight.scales
    (array([[ 1, -1,  1, -1,  1, -1,  0,  0]], dtype=int8), array([[0.75, 1.05]], dtype=float32))
    >>> weight.sparsity(), weight.memory_bytes()
    (0.25, 40)
    """

    array: QuantizedArray

    def __post_init__(self) -> None:
        if not isinstance(self.array, QuantizedArray):
            raise TypeError(f"array is {type(self.array).__name__}; it must be a QuantizedArray in ternary")
        if self.array.format.name != "ternary" or not self.array.shape:
            raise FormatError(f"array is {self.array!r}; it must be [..., in] in ternary")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weights."""
        return self.array.shape

    @property
    def out_features(self) -> int:
        """Rows."""
        return math.prod(self.shape[:-1])

    @property
    def in_features(self) -> int:
        """Columns."""
        return self.shape[-1]

    @property
    def group_size(self) -> int:
        """Weights that share a scale."""
        granularity = check_granularity(self.array.format.options()["granularity"])
        if granularity[0] == "group":
            return int(granularity[1])
        whole = self.array.size // max(1, self.array.members)
        return whole if granularity == "tensor" else whole // max(1, self.shape[self.array.lead])

    @property
    def scales(self) -> Any:
        """float32 [rows, groups], or all that there are where rows have none of their own."""
        scale = self.array.planes["scale"]
        return scale.reshape(self.out_features, -1) if scale.size % max(1, self.out_features) == 0 else scale

    def trits(self) -> Any:
        """-1, 0 and 1 as int8, in the shape of the weights."""
        return trits(self.array)

    def bit_planes(self) -> Any:
        """uint32 [2, rows, ceil(columns / 32)]: which weights are 1, and which -1, 32 to a word from its lowest bit."""
        return pack(self.trits().reshape(self.out_features, self.in_features), "planes", check=False)

    def sparsity(self) -> float:
        """The share of zeros."""
        return sparsity(self.array)

    def memory_bytes(self) -> int:
        """Bytes of codes and scales."""
        return self.array.nbytes

    def compression_ratio(self) -> float:
        """Bytes of the weights in float32 over `memory_bytes`."""
        return 4 * self.array.size / max(1, self.array.nbytes)

    def dequantize(self, *, dtype: Any = None) -> Any:
        """The weights, trits times scales, in the dtype that was quantized or another."""
        return self.array.dequantize(dtype=dtype)


def quantize_weights(
    W: Any, config: BitNetConfig | None = None, *, granularity: Any = None, rounding: str = "away"
) -> TernaryWeight:
    """Ternary weights by the mean magnitude of each group.

    Parameters
    ----------
    W : array_like
        float [..., in], at least one axis.
    config : BitNetConfig, optional
        Its `group_size` counts.
    granularity : {"tensor", ("channel", 0), ("group", size)}, optional
        Who shares a scale, where that is not a group of the configuration.
    rounding : {"away", "even"}, default "away"
        Where a quotient of a half goes: to one, or to zero as in torch.

    Returns
    -------
    TernaryWeight

    Raises
    ------
    FormatError, TypeError, ValueError
        When an argument is not allowed.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> weight = kb.bitnet.layers.quantize_weights(np.array([[0.375, 0.75, 1.125, -0.75]], np.float32))
    >>> weight.trits(), weight.dequantize()
    (array([[ 1,  1,  1, -1]], dtype=int8), array([[ 0.75,  0.75,  0.75, -0.75]], dtype=float32))
    """
    config = _config(config)
    array = floats(W, "W")
    if array.ndim == 0:
        raise ValueError("W has no axes; weights are [..., in]")
    granularity = ("group", config.group_size) if granularity is None else check_granularity(granularity)
    format = get_format("ternary", granularity=granularity, rounding=rounding, eps=0.0)
    with _xp.on_device_of(array), np.errstate(all="ignore"):
        numbers = _xp.contiguous(array.astype(np.float32, copy=False))
        blocks = blocks_of(numbers.shape, granularity)
        if isinstance(numbers, np.ndarray):
            scale = find(numbers, blocks, "absmean", 0.0)
        else:
            scale = quantize(numbers, format).planes["scale"]
        scale = _xp.namespace(numbers).where(scale.view(np.int32) == 0, np.float32(1), scale)
        made = from_trits(_trits_of(numbers, scale, blocks, rounding), scale, granularity=granularity, check=False)
    return TernaryWeight(QuantizedArray(format, made.planes, array.shape, array.dtype))


def dequantize_weights(weight: TernaryWeight, *, dtype: Any = None) -> Any:
    """The weights, trits times scales.

    Parameters
    ----------
    weight : TernaryWeight
        From `quantize_weights`.
    dtype : dtype_like, optional
        Another dtype than what was quantized.

    Returns
    -------
    array
        Shape of the weights.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> weight = kb.bitnet.layers.quantize_weights(np.array([[2.0, -2.0, 0.5, 0.0]], np.float32))
    >>> kb.bitnet.layers.dequantize_weights(weight)
    array([[ 1.125, -1.125,  0.   ,  0.   ]], dtype=float32)
    """
    return weight.dequantize(dtype=dtype)


def _trits_of(numbers: Any, scale: Any, blocks: Blocks, rounding: str) -> Any:
    """int8 trits by exact quotients: |w| is compared with half the scale, above which or from which on a trit is 1.

    A float32 quotient is at or above a half exactly where the numbers themselves are.
    """
    xp = _xp.namespace(numbers)
    bits = scale.view(np.int32)
    # A half, as the bits of a float32: the exponent less one, or half of all bits where these are the number itself.
    least = xp.where(bits >= 1 << 24, bits - (1 << 23), bits + 1 >> 1)
    if rounding == "even":
        least = xp.where(bits >= 1 << 24, least, bits >> 1) + 1
    if isinstance(numbers, np.ndarray):
        found = np.empty(numbers.shape, np.int8)
        for (part, out), (above,) in walk(blocks, (numbers, found), (least.view(np.float32),)):
            np.subtract((part >= above).view(np.int8), (part <= -above).view(np.int8), out=out)
        return found
    # As integers, whose order is that of magnitudes: a GPU would flush subnormal numbers.
    words, found = numbers.view(np.int32), xp.empty(numbers.shape, np.int8)
    for block in blocks.parts if blocks.size else ():
        word = block.view(words)
        magnitude = word & 0x7FFFFFFF
        one = ((magnitude >= block.of_blocks(least)) & (magnitude <= _INFINITY)).astype(np.int8)
        block.view(found)[...] = xp.where(word < 0, -one, one)
    return found


# ---- activations -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class QuantizedActivations:
    """Activations of few bits.

    Parameters
    ----------
    data : array
        int8 [..., hidden].
    scales : array
        float32, one for each token in their order, or one for all: [1].
    per_token : bool
        Which of the two.
    dtype : dtype
        What they were quantized from.
    """

    data: Any
    scales: Any
    per_token: bool
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the activations."""
        return tuple(self.data.shape)

    @property
    def hidden_dim(self) -> int:
        """Elements of a token."""
        return self.shape[-1]

    @property
    def seq_len(self) -> int:
        """Tokens of a sequence: the length before the last of [..., sequence, hidden]; 1 with fewer axes."""
        return self.shape[-2] if len(self.shape) > 2 else 1

    @property
    def batch_size(self) -> int:
        """Sequences, or tokens of [batch, hidden]."""
        return math.prod(self.shape[:-2]) if len(self.shape) > 2 else math.prod(self.shape[:-1])

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def array(self) -> QuantizedArray:
        """The same as a `QuantizedArray` in ``int8``, which products take."""
        return self._array(self.dtype)

    def _array(self, dtype: Any) -> QuantizedArray:
        """... that decodes to a dtype."""
        format = get_format("int8", granularity="token" if self.per_token else "tensor")
        planes = {"codes": self.data.reshape(-1), "scale": self.scales}
        return QuantizedArray(format, planes, self.shape, dtype)

    def dequantize(self, *, dtype: Any = None) -> Any:
        """Codes times scales, in the dtype that was quantized or another."""
        return self.array().dequantize(dtype=dtype)


def quantize_activations(x: Any, config: BitNetConfig | None = None) -> QuantizedActivations:
    """Activations of few bits by division (see the module).

    Parameters
    ----------
    x : array_like
        float [..., hidden], at least one axis.
    config : BitNetConfig, optional
        Its `activation_bits` and `per_token_activation` count.

    Returns
    -------
    QuantizedActivations

    Raises
    ------
    TypeError, ValueError
        When x is no float array, or has no axes.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> found = kb.bitnet.layers.quantize_activations(np.array([[2.54, 0.01, -0.03], [0, 0, 0]], np.float32))
    >>> found.data, found.scales
    (array([[127,   1,  -2],
           [  0,   0,   0]], dtype=int8), array([0.02, 1.  ], dtype=float32))
    """
    config = _config(config)
    x = floats(x, "x")
    if x.ndim == 0:
        raise ValueError("x has no axes; activations are [..., hidden]")
    each, highest = config.per_token_activation, np.float32((1 << config.activation_bits - 1) - 1)
    with _xp.on_device_of(x), np.errstate(all="ignore"):
        xp = _xp.namespace(x)
        tokens = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        codes, largest = xp.empty(tokens.shape, np.int8), xp.zeros((len(tokens), 1), np.float32)
        step = max(1, _SLAB // max(1, x.shape[-1])) if xp is np else max(1, len(tokens))
        slabs = [slice(first, first + step) for first in range(0, len(tokens), step)] if x.size else []
        for part in slabs:
            numbers = _finite(tokens[part])
            largest[part] = abs(numbers).max(axis=1, keepdims=True)
            if each:
                codes[part] = _rounded(numbers / _scale_of(largest[part], highest))
        if not each:
            largest = largest.max(keepdims=True) if x.size else xp.zeros((1, 1), np.float32)
            for part in slabs:
                codes[part] = _rounded(_finite(tokens[part]) / _scale_of(largest, highest))
        scale = _scale_of(largest, highest).reshape(-1)
    return QuantizedActivations(codes.reshape(x.shape), scale, each, x.dtype)


def _finite(x: Any) -> Any:
    """Some tokens as float32, NaN 0 and infinities the largest finite number."""
    numbers = x.astype(np.float32)
    if isinstance(numbers, np.ndarray) and np.isfinite(numbers).all():
        return numbers
    xp = _xp.namespace(numbers)
    return xp.clip(xp.where(numbers == numbers, numbers, np.float32(0)), -_LARGEST, _LARGEST)


def _scale_of(largest: Any, highest: Any) -> Any:
    scale = largest / highest
    return _xp.namespace(scale).where(scale < _LEAST_SCALE, np.float32(1), scale)


def dequantize_activations(activations: QuantizedActivations, *, dtype: Any = None) -> Any:
    """Codes times scales.

    Parameters
    ----------
    activations : QuantizedActivations
        From `quantize_activations`.
    dtype : dtype_like, optional
        Another dtype than what was quantized.

    Returns
    -------
    array
        Shape of the activations.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> found = kb.bitnet.layers.quantize_activations(np.array([1.27, -0.5], np.float32))
    >>> kb.bitnet.layers.dequantize_activations(found)
    array([ 1.27, -0.5 ], dtype=float32)
    """
    return activations.dequantize(dtype=dtype)


def _rounded(x: Any) -> Any:
    """What truncation, also that of a cast, makes the nearest integers of, halves away from zero."""
    return x + _xp.namespace(x).copysign(_BELOW_A_HALF, x)


# ---- straight through ------------------------------------------------------------------------------------------------


def quantize_ste(x: Any, config: BitNetConfig | None = None) -> Any:
    """What activations are after they were quantized; the gradient passes as it is, see `ste_backward`.

    Parameters
    ----------
    x, config
        As for `quantize_activations`.

    Returns
    -------
    array
        Shape and dtype of x.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> config = kb.bitnet.BitNetConfig(activation_bits=2)
    >>> kb.bitnet.layers.quantize_ste(np.array([0.5, -2.0, 1.0], np.float32), config)
    array([ 0., -2.,  2.], dtype=float32)
    """
    if _xp.is_tensor(x):
        return _xp.in_torch(quantize_ste, "x", x, config)
    return quantize_activations(x, config).dequantize()


def ste_forward(x: Any, scale: Any, lowest: int, highest: int) -> Any:
    """``clamp(round(x * (1 / scale)), lowest, highest) * scale``, halves away from zero, NaN to 0.

    Parameters
    ----------
    x : array_like
        float array.
    scale : float or array
        Above 0; an array goes with x as NumPy broadcasts it.
    lowest, highest : int
        The range of codes.

    Returns
    -------
    array
        Shape and dtype of x; computed in float32.

    Raises
    ------
    FormatError
        When a scale is not above 0 and finite, or the range is empty. Scales on a device are not looked at.
    TypeError, ValueError
        When x is no float array, or `scale` does not go with it.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> kb.bitnet.layers.ste_forward(np.array([0.25, 0.8, -9.0], np.float32), 0.5, -4, 3)
    array([ 0.5,  1. , -2. ], dtype=float32)
    """
    if _xp.is_tensor(x):
        return _xp.in_torch(ste_forward, "x", x, scale, lowest, highest)
    x, scale = floats(x, "x"), _xp.as_array(scale, "scale")
    if scale.dtype.kind not in "iuf":
        raise TypeError(f"scale is {scale.dtype}; it must hold numbers")
    if isinstance(scale, np.ndarray) and not (np.isfinite(scale) & (scale > 0)).all():
        raise FormatError(f"scale holds {scale[~(np.isfinite(scale) & (scale > 0))][0]}; it must be above 0 and finite")
    if type(lowest) is not int or type(highest) is not int or lowest > highest:
        raise FormatError(f"the range is {lowest!r} to {highest!r}; it must be two integers, the lower one first")
    with _xp.on_device_of(x), np.errstate(all="ignore"):
        xp = _xp.namespace(x)
        scale = xp.asarray(scale, np.float32)
        codes = xp.clip(xp.trunc(_rounded(x.astype(np.float32) * (np.float32(1) / scale))), lowest, highest)
        y = xp.where(codes == codes, codes, np.float32(0)) * scale
        if y.shape != x.shape:
            raise ValueError(f"scale has shape {scale.shape}, which does not go with x of shape {x.shape}")
        return y.astype(x.dtype)


def ste_backward(dy: Any) -> Any:
    """The gradient of `ste_forward`, `ternary_ste`, `int8_ste` and `quantize_ste`: `dy` itself.

    Parameters
    ----------
    dy : array_like
        Gradient of the result.

    Returns
    -------
    array
        The same.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> kb.bitnet.layers.ste_backward(np.array([1.0, 2.0, 3.0], np.float32))
    array([1., 2., 3.], dtype=float32)
    """
    return dy if _xp.is_tensor(dy) else floats(dy, "dy")


def ternary_ste(x: Any, scale: Any = 1.0) -> Any:
    """`ste_forward` to -1, 0 and 1.

    Parameters
    ----------
    x, scale
        As for `ste_forward`.

    Returns
    -------
    array
        Shape and dtype of x.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> kb.bitnet.layers.ternary_ste(np.array([-2, -0.5, 0, 0.5, 2], np.float32))
    array([-1., -1.,  0.,  1.,  1.], dtype=float32)
    """
    return ste_forward(x, scale, -1, 1)


def int8_ste(x: Any, scale: Any = 1.0) -> Any:
    """`ste_forward` to -127 to 127.

    Parameters
    ----------
    x, scale
        As for `ste_forward`.

    Returns
    -------
    array
        Shape and dtype of x.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> kb.bitnet.layers.int8_ste(np.array([-200, -50, 0, 50, 200], np.float32))
    array([-127.,  -50.,    0.,   50.,  127.], dtype=float32)
    """
    return ste_forward(x, scale, -127, 127)


# ---- layers ----------------------------------------------------------------------------------------------------------


class BitLinear:
    """A linear layer of ternary weights, ``y = x W^T + bias``.

    Made by `from_weight` or `from_quantized`; it does not change afterwards. A call, which is `forward`, normalizes x
    where the configuration says so, quantizes it, and multiplies integers.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> rng = np.random.default_rng(0)
    >>> W = rng.standard_normal((64, 128)).astype(np.float32)
    >>> layer = kb.bitnet.BitLinear.from_weight(W)
    >>> layer
    BitLinear(128 -> 64, group_size=64, 31% zeros)
    >>> layer(rng.standard_normal((2, 16, 128)).astype(np.float32)).shape
    (2, 16, 64)
    """

    __slots__ = ("_bias", "_config", "_weight")

    def __init__(self, weight: TernaryWeight, bias: Any = None, config: BitNetConfig | None = None):
        if not isinstance(weight, TernaryWeight):
            raise TypeError(f"weight is {type(weight).__name__}; it must be a TernaryWeight, see quantize_weights")
        if len(weight.shape) != 2:
            raise ValueError(f"weight has shape {weight.shape}; a layer needs [out, in]")
        self._weight, self._config = weight, _config(config)
        self._bias = None if bias is None else floats(bias, "bias")
        if self._bias is not None and self._bias.shape != (weight.out_features,):
            raise ValueError(f"bias has shape {self._bias.shape}; {weight.out_features} features need as many numbers")

    @classmethod
    def from_weight(
        cls, W: Any, bias: Any = None, config: BitNetConfig | None = None, *, granularity: Any = None
    ) -> BitLinear:
        """The layer of float weights [out, in], which are quantized by `quantize_weights`, in groups of the
        configuration or by another `granularity`.

        Raises
        ------
        FormatError, TypeError, ValueError
            When an argument is not allowed, or a shape does not fit.
        """
        array = floats(W, "W")
        if array.ndim != 2:
            raise ValueError(f"W has shape {array.shape}; a layer needs [out, in]")
        return cls(quantize_weights(array, config, granularity=granularity), bias, config)

    @classmethod
    def from_quantized(
        cls, weight: Any, bias: Any = None, config: BitNetConfig | None = None, device: str | None = None
    ) -> BitLinear:
        """The layer of weights that are ternary already: a `TernaryWeight`, or a `QuantizedArray` in ``ternary``.

        Its groups are those of the weights, whatever `group_size` says. With a `device`, such as ``"cuda:0"``, weights
        and bias are moved there.

        Raises
        ------
        DeviceError, FormatError, TypeError, ValueError
            When an argument is not allowed, or a shape does not fit.
        """
        if isinstance(weight, QuantizedArray):
            weight = TernaryWeight(weight)
        layer = cls(weight, bias, config)
        if device is not None:
            where = _xp.resolve_device(device)
            moved = None if layer.bias is None else _xp.to_device(layer.bias, where)
            layer = cls(TernaryWeight(weight.array.to_device(where)), moved, config)
        return layer

    @property
    def quantized_weight(self) -> TernaryWeight:
        """The weights."""
        return self._weight

    @property
    def bias(self) -> Any:
        """[out], or None."""
        return self._bias

    @property
    def config(self) -> BitNetConfig:
        """What it was made with."""
        return self._config

    @property
    def in_features(self) -> int:
        """Elements of a token that comes in."""
        return self._weight.in_features

    @property
    def out_features(self) -> int:
        """Elements of a token that goes out."""
        return self._weight.out_features

    @property
    def device(self) -> str:
        """``"cpu"`` or ``"cuda:<ordinal>"``."""
        return self._weight.array.device

    @property
    def is_frozen(self) -> bool:
        """Whether it has no gradients."""
        return not self._config.enable_ste

    def freeze(self) -> BitLinear:
        """The same layer for inference, without gradients."""
        return BitLinear(self._weight, self._bias, self._config.with_ste(False))

    def sparsity(self) -> float:
        """The share of zeros among the weights."""
        return self._weight.sparsity()

    def compression_ratio(self) -> float:
        """Bytes of the weights in float32 over those that they take."""
        return self._weight.compression_ratio()

    def __call__(self, x: Any, *, activations: str = "int8") -> Any:
        """Shorthand of `forward`."""
        return self.forward(x, activations=activations)

    def forward(self, x: Any, *, activations: str = "int8") -> Any:
        """x times the weights, plus the bias.

        Parameters
        ----------
        x : array_like
            float [..., in], on the layer's device.
        activations : {"int8", "float"}, default "int8"
            Whether x is quantized first, to the bits of the configuration, or multiplied as floats.

        Returns
        -------
        array
            [..., out], in x's dtype; a torch tensor where x is one.

        Raises
        ------
        DeviceError, FormatError, TypeError, ValueError
            When an argument is not allowed, or a shape does not fit.
        """
        if _xp.is_tensor(x):
            return _xp.in_torch(self.forward, "x", x, activations=activations)
        if activations not in ("int8", "float"):
            raise FormatError(f"activations is {activations!r}; allowed are 'int8' and 'float'")
        x = self._checked(x)
        seen = self._normalized(x)
        if activations == "float":
            return linear(seen, self._weight.array, self._bias).astype(x.dtype, copy=False)
        return self._multiply(quantize_activations(seen, self._config), x.dtype)

    def forward_quantized(self, x: Any) -> Any:
        """x, floats or `QuantizedActivations`, times the weights in exact integers, plus the bias.

        Floats are normalized and quantized as by `forward`; activations that are quantized already are taken as they
        are.

        Parameters
        ----------
        x : array_like or QuantizedActivations
            [..., in], on the layer's device.

        Returns
        -------
        array
            [..., out], in the dtype of x before it was quantized.

        Raises
        ------
        DeviceError, TypeError, ValueError
            When an argument is not allowed, or a shape does not fit.
        """
        if not isinstance(x, QuantizedActivations):
            return self.forward(x)
        return self._multiply(x, x.dtype)

    def backward(self, dy: Any, x: Any, W: Any = None, *, mask: str = "none") -> tuple[Any, Any, Any]:
        """Straight-through gradients of `forward`, as `kbitcupy.bitnet.linear_backward` has them.

        Parameters
        ----------
        dy : array_like
            Gradient of the result, float [..., out].
        x : array_like
            What came in, float [..., in].
        W : array_like, optional
            The float weights [out, in] that the layer was made of; only masks look at their values.
        mask : {"none", "inclusive", "strict"}, default "none"
            Where gradients of weights pass.

        Returns
        -------
        dx, dW, db : array
            As from `kbitcupy.bitnet.linear_backward`.

        Raises
        ------
        FormatError
            When the layer is frozen, or `mask` is not known.
        DeviceError, TypeError, ValueError
            When shapes or devices do not fit.
        """
        if _xp.is_tensor(dy):
            return _xp.in_torch(self.backward, "dy", dy, x, W, mask=mask)
        if self.is_frozen:
            raise FormatError("the layer is for inference (enable_ste=False): make one with BitNetConfig.training()")
        x = self._checked(x)
        norm = True if self._config.use_rms_norm else None

        def seen(z: Any) -> Any:
            return quantize_activations(z, self._config).dequantize(dtype=z.dtype)

        dx, dw, db, *_ = straight_through(dy, x, self._weight.array, W, mask, norm, self._config.eps, seen)
        return dx, dw, db

    def _checked(self, x: Any) -> Any:
        x = floats(x, "x")
        if x.ndim == 0 or x.shape[-1] != self.in_features:
            raise ValueError(f"x has shape {x.shape}; the layer needs [..., {self.in_features}]")
        return x

    def _normalized(self, x: Any) -> Any:
        """What is quantized."""
        if not self._config.use_rms_norm:
            return x
        return rms_norm(x if x.dtype == np.float32 else x.astype(np.float32), eps=self._config.eps)

    def _multiply(self, x: QuantizedActivations, dtype: Any) -> Any:
        return linear(x._array(dtype), self._weight.array, self._bias)

    def __repr__(self) -> str:
        weight = self._weight
        kind = f"{self.in_features} -> {self.out_features}, group_size={weight.group_size}"
        return f"BitLinear({kind}, {weight.sparsity():.0%} zeros)" if weight.array.size else f"BitLinear({kind})"


class BitNetAdapter:
    """A `BitLinear` beside another layer, whose result its own is added to.

    Parameters
    ----------
    layer : BitLinear
        The side path.
    config : BitNetAdapterConfig, optional
        What it was made with.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> layer = kb.bitnet.BitLinear.from_weight(np.ones((2, 4), np.float32))
    >>> adapter = kb.bitnet.BitNetAdapter(layer)
    >>> x = np.ones((1, 4), np.float32)
    >>> layer(x).round(3), adapter(x, np.float32([[10, 20]])).round(3)
    (array([[4., 4.]], dtype=float32), array([[14., 24.]], dtype=float32))
    >>> adapter.freeze()
    >>> dx, dW, db = adapter.backward(np.ones((1, 2), np.float32), x)
    >>> dW is None, adapter.num_parameters()
    (True, 8)
    """

    def __init__(self, layer: BitLinear, config: BitNetAdapterConfig | None = None):
        if not isinstance(layer, BitLinear):
            raise TypeError(f"layer is {type(layer).__name__}; it must be a BitLinear")
        config = BitNetAdapterConfig(layer.config) if config is None else config
        if not isinstance(config, BitNetAdapterConfig):
            raise TypeError(f"config is {type(config).__name__}; it must be a BitNetAdapterConfig")
        self._layer, self._config, self._frozen = layer, config, False

    @property
    def layer(self) -> BitLinear:
        """The side path."""
        return self._layer

    @property
    def config(self) -> BitNetAdapterConfig:
        """What it was made with."""
        return self._config

    @property
    def is_frozen(self) -> bool:
        """Whether weights and bias of the side path get no gradients; at first they do."""
        return self._frozen

    def freeze(self) -> None:
        """Give weights and bias no gradients from now on."""
        self._frozen = True

    def unfreeze(self) -> None:
        """Give weights and bias gradients from now on."""
        self._frozen = False

    def num_parameters(self) -> int:
        """Number of weights."""
        return self._layer.quantized_weight.array.size

    def compression_ratio(self) -> float:
        """Bytes of the weights in float32 over those that they take."""
        return self._layer.compression_ratio()

    def __call__(self, x: Any, base_output: Any = None) -> Any:
        """Shorthand of `forward`."""
        return self.forward(x, base_output)

    def forward(self, x: Any, base_output: Any = None) -> Any:
        """The layer's result, added to that of the layer beside it.

        Parameters
        ----------
        x : array_like
            float [..., in].
        base_output : array_like, optional
            [..., out]; nothing is added without.

        Returns
        -------
        array
            [..., out], in x's dtype.

        Raises
        ------
        DeviceError, TypeError, ValueError
            When an argument is not allowed, or a shape does not fit.
        """
        if _xp.is_tensor(x):
            return _xp.in_torch(self.forward, "x", x, base_output)
        y = self._layer.forward(x)
        if base_output is None:
            return y
        base = array_of(base_output, "base_output", y.shape, y)
        with _xp.on_device_of(y):
            return y + base.astype(y.dtype, copy=False)

    def backward(self, dy: Any, x: Any, W: Any = None, *, mask: str = "none") -> tuple[Any, Any, Any]:
        """The layer's `backward`; dW and db are None where the adapter is frozen. The other layer's gradient is `dy`.

        Parameters
        ----------
        dy, x, W, mask
            As for `BitLinear.backward`.

        Returns
        -------
        dx, dW, db : array or None
            See there.

        Raises
        ------
        DeviceError, FormatError, TypeError, ValueError
            See there.
        """
        dx, dW, db = self._layer.backward(dy, x, W, mask=mask)
        return (dx, None, None) if self._frozen else (dx, dW, db)


def _config(config: Any) -> BitNetConfig:
    if config is None:
        return BitNetConfig()
    if not isinstance(config, BitNetConfig):
        raise TypeError(f"config is {type(config).__name__}; it must be a BitNetConfig")
    return config
