"""W8A8: products of int8 activations and int8 weights, the route of ``activations="int8"``.

    y[m, n] = sum_k aq[m, k] * wq[n, k] * sa[m] * sw[n] + bias[n]

The weight is compressed beforehand, with a scale for each output channel. The activations are quantized on the way,
with a scale for each token (symmetric, ``absmax / 127``), as float32 and by the rules of `kbitcupy.formats.affine`: NaN
becomes 0, infinity counts as the largest float32, a token of zeros has the scale 1; float64 is rounded to float32
first. Activations that are int8 already, with a scale for each token or one for all, are taken as they are. The sum is
exact in int32, which holds for K up to 131071. What follows is float32, every operation rounded once and subnormal
numbers kept: ``fl(fl(float(sum) * sa) * sw) + bias``, then one cast to the dtype of the activations. A scale that is
not positive and finite counts as 0.

The lowest code of activations is -128, or -127 on request. A scale that is found makes no finite number smaller than
-127: the two differ for -inf, and where one scale for all tokens was found beforehand.

Activations may be divided by SmoothQuant's factors on the way (see `kbitcupy.products.smoothquant`), which is part of
their quantization.

On a GPU the activations are quantized in one launch (none, where they are int8 already and K is a multiple of 128) and
multiplied in a second one, on tensor cores, with rescaling and bias at the end of it. From Hopper on each starts before
what is ahead of it has ended, and the second one fetches weights while tokens are quantized. Up to 16 tokens read the
weights once; more go in tiles, on Hopper by wgmma and the bulk tensor copy engine where rows of the weight start at
multiples of 16 bytes, everywhere else by mma.sync. Where tiles are too few for a Hopper GPU, blocks side by side take
parts of K, and exchange their sums.

Sources: the SmoothQuant paper (arXiv 2211.10438); LLM.int8 (arXiv 2208.07339) for scales of tokens and channels.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..array import QuantizedArray
from ..backend import launch as _launch, tma as _tma, xp as _xp
from ..backend.compile import CXX_BOOLS, CXX_TYPES, Template
from ..backend.structs import Constants
from ..errors import DeviceError, FormatError
from ..formats import affine
from ..formats.base import Format, Integers, register_templates
from ..ops import check_out, source, widen
from .routes import BYTES_PER_US, Problem, Product, Route, device as device_of

#: The largest K whose sums of products of int8 cannot leave int32.
MAX_DEPTH = 131071

# What the kernels take; float64 goes through float32.
_FLOATS = ("float16", "bfloat16", "float32")
_LARGEST = np.finfo(np.float32).max


# ---- products ------------------------------------------------------------------------------------------------------


def linear_w8a8(x: Any, qw: QuantizedArray, bias: Any = None, *, qmin: int = -128, out: Any = None) -> Any:
    """x times the transpose of an int8 weight, with x quantized to int8 by token.

    Shorthand of ``kbitcupy.linear(x, qw, bias, activations="int8")`` that lets the lowest code be chosen.

    Parameters
    ----------
    x : array_like or QuantizedArray
        float16, bfloat16, float32 or float64 [..., K]; or compressed already, in a symmetric ``int8`` with
        ``granularity="token"`` or ``"tensor"``.
    qw : QuantizedArray
        Weight [N, K] of format ``int8`` with ``granularity=("channel", 0)``, on the device of `x`; K up to 131071.
    bias : array_like, optional
        float [N]; added in float32.
    qmin : {-128, -127}, default -128
        The lowest code of `x`, where that is quantized here.
    out : array, optional
        C-contiguous array of the result's shape and dtype, which receives it.

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
        When `qw` is not such a weight, or `x` compressed in another way.
    ValueError
        When a shape does not fit the others.
    DeviceError
        When the arguments are on different devices.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> rng = np.random.default_rng(0)
    >>> w, x = (rng.standard_normal(shape).astype(np.float32) for shape in ((48, 256), (5, 256)))
    >>> y = kb.affine.linear_w8a8(x, kb.quantize(w, "int8", granularity=("channel", 0)))
    >>> round(kb.metrics.sqnr_db(x @ w.T, y), 1)
    39.5
    >>> codes = kb.quantize(x, "int8", granularity="token")
    >>> bool((kb.affine.linear_w8a8(codes, kb.quantize(w, "int8", granularity=("channel", 0))) == y).all())
    True
    """
    return _linear(x, qw, None, bias, None, qmin, out=out)


def linear_smoothquant(
    x: Any,
    qw: QuantizedArray,
    smooth: Any,
    bias: Any = None,
    *,
    activation_scale: Any = None,
    qmin: int = -128,
    out: Any = None,
) -> Any:
    """`linear_w8a8` of x / smooth and a smoothed weight.

    Parameters
    ----------
    x : array_like or QuantizedArray
        As for `linear_w8a8`. What is compressed already has been divided before: pass None for `smooth`.
    qw : QuantizedArray
        Weight [N, K], smoothed with `smooth_weight` and then compressed as for `linear_w8a8`.
    smooth : array or None
        float32 [K], from `smooth_scales`, on the device of `x`. The quotient is rounded once to float32. None where
        nothing is to be divided.
    bias : array_like, optional
        float [N]; added in float32.
    activation_scale : float or array, optional
        One scale for all tokens, found beforehand (see `Calibration`); where it is not positive and finite the product
        is 0. By default each token gets its own from its absmax, or has it, where `x` is compressed already.
    qmin : {-128, -127}, default -128
        The lowest code of `x`, where that is quantized here.
    out : array, optional
        C-contiguous array of the result's shape and dtype, which receives it.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        As `linear_w8a8`.

    Raises
    ------
    TypeError, FormatError, ValueError, DeviceError
        As `linear_w8a8`.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> rng = np.random.default_rng(0)
    >>> w, x = (rng.standard_normal(shape).astype(np.float32) for shape in ((48, 256), (64, 256)))
    >>> x[:, 7] *= 100  # an outlier channel
    >>> calibration = kb.affine.Calibration().update(x)
    >>> s = kb.affine.smooth_scales(calibration.absmax, w)
    >>> q = kb.quantize(kb.affine.smooth_weight(w, s), "int8", granularity=("channel", 0))
    >>> round(kb.metrics.sqnr_db(x @ w.T, kb.affine.linear_smoothquant(x, q, s)), 1)
    44.5
    >>> scale = calibration.activation_scale(s)
    >>> round(kb.metrics.sqnr_db(x @ w.T, kb.affine.linear_smoothquant(x, q, s, activation_scale=scale)), 1)
    38.1
    """
    return _linear(x, qw, smooth, bias, activation_scale, qmin, out=out)


def _linear(x: Any, qw: Any, smooth: Any, bias: Any, activation_scale: Any, qmin: Any, *, out: Any = None) -> Any:
    if _xp.is_tensor(x):
        return _xp.in_torch(_linear, "x", x, qw, smooth, bias, activation_scale, qmin, out=out)
    if type(qmin) is not int or qmin not in _LEVELS:
        raise FormatError(f"qmin is {qmin!r}; allowed are -128 and -127")
    token_scales = None
    if isinstance(x, QuantizedArray):
        dtype = x.dtype
        for name, given in (("smooth", smooth), ("activation_scale", activation_scale)):
            if given is not None:
                raise FormatError(f"{name} goes with activations that are quantized here, and x is {x!r}: pass None")
        if qmin != -128:
            raise FormatError(f"qmin goes with activations that are quantized here, and x is {x!r}: leave it away")
        x, token_scales = token_planes(x)
    else:
        if not _xp.is_native(x):
            x = _xp.as_array(x)
        dtype = _xp.float_dtype(x.dtype, "x")
    codes, scales = weight_planes(qw, "qw")
    rows, depth = qw.shape
    if x.ndim == 0 or x.shape[-1] != depth:
        raise ValueError(f"x has shape {x.shape}; a weight of shape {qw.shape} needs [..., {depth}]")
    if not _xp.same_device(x, codes):
        raise DeviceError(f"x is on {_xp.device_of(x)} and the weight on {qw.device}; move one of them")
    shape = (*x.shape[:-1], rows)
    if smooth is not None:
        smooth = float_vector(smooth, "smooth", depth, x, True)
    if bias is not None:
        bias = float_vector(bias, "bias", rows, x)
    if activation_scale is not None:
        activation_scale = _one_scale(activation_scale, x)
    if out is not None:
        check_out(out, shape, x, dtype)
    with _xp.on_device_of(x):
        if out is None:
            out = _xp.empty(x, shape, dtype)
        if out.size:
            _multiply(x, token_scales, codes, scales, smooth, activation_scale, qmin, bias, out)
    return out


def multiply(x: Any, token_scales: Any | None, codes: Any, scales: Any, bias: Any | None, out: Any) -> None:
    """Fill `out`, which is not empty, from int8 weights with a scale for each row.

    `x` is float, or int8 [tokens, K] where it has `token_scales`; on a GPU its rows may be longer, up to the next
    multiple of `PITCH`, and end in zeros. The device of all is the current one.
    """
    _multiply(x, token_scales, codes, scales, None, None, -128, bias, out)


def quantize_on_gpu(x: Any) -> tuple[Any, Any]:
    """int8 [M, K] and scales [M] of a matrix on the current device, by the rules of the affine formats."""
    x = source(x, _FLOATS)
    empty = _xp.namespace(x).empty
    codes, scales = empty(x.shape, np.int8), empty(len(x), np.float32)
    affine.quantize_dynamic(x, codes, scales, None, affine.blocks_of(x.shape, "token"), _LEVELS[-128])
    return codes, scales


def _multiply(
    x: Any,
    token_scales: Any | None,
    codes: Any,
    scales: Any,
    smooth: Any | None,
    fixed: Any | None,
    qmin: int,
    bias: Any | None,
    out: Any,
) -> None:
    """Fill `out`, which is not empty; x is int8 where it has `token_scales`, and float otherwise."""
    if token_scales is None:
        x = source(x, _FLOATS)
    if isinstance(x, np.ndarray):
        _multiply_host(x, token_scales, codes, scales, smooth, fixed, qmin, bias, out)
    elif out.dtype in _xp.dtype_set(_FLOATS):
        _multiply_cuda(x, token_scales, codes, scales, smooth, fixed, qmin, bias, out)
    else:
        single = _xp.namespace(x).empty(out.shape, np.float32)
        _multiply_cuda(x, token_scales, codes, scales, smooth, fixed, qmin, bias, single)
        widen(single, out)


def token_planes(x: QuantizedArray) -> tuple[Any, Any]:
    """Codes [..., K] and scales, one for each token or for all, of activations that are int8.

    Raises
    ------
    FormatError
        When they are not.
    """
    integers = integers_of(x)
    if integers is None:
        raise FormatError(
            f"x is {x.format!r} of shape {x.shape}; activations that are compressed must be [..., K] in a symmetric "
            "int8 with a scale for each token or for all: quantize(x, 'int8', granularity='token')"
        )
    return x.planes[integers.codes].reshape(x.shape), x.planes[integers.scales]


def weight_planes(q: Any, argument: str) -> tuple[Any, Any]:
    """Codes and scales of a weight that a product takes.

    Raises
    ------
    TypeError
        When it is not compressed.
    FormatError
        When it is compressed in another way.
    ValueError
        When it has too many columns.
    """
    if not isinstance(q, QuantizedArray):
        raise TypeError(
            f"{argument} is {type(q).__name__}; it must be a QuantizedArray: quantize(w, 'int8', granularity="
            "('channel', 0))"
        )
    integers = _integers(q.format, q.shape, q.lead)
    if integers is None or integers.shares != "row" or len(q.shape) != 2:
        raise FormatError(f"{argument} is {q.format!r} of shape {q.shape}; {_WANTED}")
    if q.shape[1] > MAX_DEPTH:
        raise ValueError(f"{argument} has K = {q.shape[1]}; {_TOO_DEEP}")
    return q.planes[integers.codes], q.planes[integers.scales]


_WANTED = (
    "it must be [N, K] in a symmetric int8 with a scale for each row: quantize(w, 'int8', granularity=('channel', 0))"
)
_TOO_DEEP = f"sums are exact in int32 up to K = {MAX_DEPTH}: split K"


def integers_of(q: QuantizedArray) -> Integers | None:
    """How a compressed array is a matrix of int8."""
    return _integers(q.format, q.shape, q.lead)


@functools.lru_cache(maxsize=1024)
def _integers(format: Format, shape: tuple[int, ...], lead: int) -> Integers | None:
    return format.integers(shape, lead)


def float_vector(values: Any, argument: str, size: int, beside: Any, single: bool = False) -> Any:
    """A contiguous float array [size] beside another; float32 for `single` and where it was float64."""
    array = values
    if not _xp.is_native(values):
        array = _xp.as_array(values, argument)
        _xp.float_dtype(array.dtype, argument)
    if array.shape != (size,):
        raise ValueError(f"{argument} has shape {array.shape}; it must be ({size},)")
    if not _xp.same_device(array, beside):
        raise DeviceError(f"{argument} is on {_xp.device_of(array)} and x on {_xp.device_of(beside)}; move one of them")
    return source(array, ("float32",) if single else _FLOATS)


def _one_scale(scale: Any, beside: Any) -> Any:
    """A scale of all tokens as float32 [1]: a host array that has been checked, or an array beside x."""
    array = _xp.as_array(scale, "activation_scale")
    if array.dtype.kind not in "fiu" or array.size != 1:
        raise ValueError(
            f"activation_scale is {array.dtype} of shape {array.shape}; it must be one number, or None for a scale for "
            "each token"
        )
    if not _xp.is_cupy(array):
        with np.errstate(all="ignore"):
            single = array.astype(np.float32).reshape(1)
        if not 0 < single[0] <= _LARGEST:
            raise FormatError(f"activation_scale is {array.reshape(-1)[0]}; it must be positive and finite in float32")
        array = single
        return single
    if not _xp.same_device(array, beside):
        raise DeviceError(
            f"activation_scale is on {_xp.device_of(array)} and x on {_xp.device_of(beside)}; move one of them"
        )
    with _xp.on_device_of(array):
        return array.astype(np.float32, copy=False).reshape(1)


# ---- NumPy ---------------------------------------------------------------------------------------------------------

# 1024 products of int8 stay within 2^24, up to which float32 holds every integer: partial sums by BLAS are exact.
_EXACT = 1024


# The codes of activations, by the lowest of them.
_LEVELS = {qmin: affine.check_levels(qmin, 127) for qmin in (-128, -127)}


def quantize_tokens(
    x: np.ndarray, smooth: np.ndarray | None, fixed: np.ndarray | None, qmin: int = -128
) -> tuple[Any, Any]:
    """int8 [M, K] and scales [M] of a matrix, by the rules of the affine formats."""
    numbers, levels = x.astype(np.float32, copy=False), _LEVELS[qmin]
    if smooth is not None:
        with np.errstate(all="ignore"):
            numbers = numbers / smooth
    blocks = affine.blocks_of(numbers.shape, "token")
    codes, scales = np.zeros(numbers.shape, np.int8), np.ones(len(numbers), np.float32)
    if fixed is None:
        affine.quantize_dynamic(numbers, codes, scales, None, blocks, levels)
    else:
        scales[:] = fixed
        affine.quantize(numbers, codes, scales, 0, blocks, levels)
    return codes, scales


def integer_product(a: np.ndarray, w: np.ndarray) -> np.ndarray:
    """int32 [M, N]: the product of int8 [M, K], as float32 where they are that already, and int8 [N, K], exact."""
    total = np.zeros((len(a), len(w)), np.int32)
    for k in range(0, a.shape[1], _EXACT):
        part = slice(k, k + _EXACT)
        total += (a[:, part].astype(np.float32, copy=False) @ w[:, part].T.astype(np.float32)).astype(np.int32)
    return total


# Channels whose weights are float32 at a time.
_CHANNELS = 4096


def factors(scales: np.ndarray) -> np.ndarray:
    """Scales, and 0 for those that count as 0."""
    if scales.size == 1:
        return scales if 0 < scales.item() < np.inf else np.zeros_like(scales)
    return np.where((scales > 0) & (scales < np.inf), scales, np.float32(0))


def _multiply_host(
    x: np.ndarray,
    token_scales: np.ndarray | None,
    codes: np.ndarray,
    scales: np.ndarray,
    smooth: np.ndarray | None,
    fixed: np.ndarray | None,
    qmin: int,
    bias: np.ndarray | None,
    out: np.ndarray,
) -> None:
    rows, depth = out.shape[-1], x.shape[-1]
    result = out.reshape(-1, rows)
    a = x.reshape(len(result), depth)
    if token_scales is None:
        a, token_scales = quantize_tokens(a, smooth, fixed, qmin)
    weight = codes.reshape(rows, depth)
    tokens, channels = factors(token_scales)[:, None], factors(scales)
    with np.errstate(all="ignore"):
        for first in range(0, rows, _CHANNELS):
            part = slice(first, first + _CHANNELS)
            y = integer_product(a, weight[part]).astype(np.float32)
            y *= tokens
            y *= channels[part]
            if bias is not None:
                y += bias[part].astype(np.float32)
            result[:, part] = y


# ---- CUDA ----------------------------------------------------------------------------------------------------------

_FILE, _HOPPER_FILE = "linear/int8.cu", "linear/int8_sm90a.cu"
_TYPES = tuple(CXX_TYPES[name] for name in _FLOATS)
# Numbers of both files, of kernels/linear/int8.cu and of kernels/linear/int8_sm90a.cu.
#: The dtypes of a bias, as kernels know them.
BIAS_KINDS = Constants(FLOAT32_BIAS=1, FLOAT16_BIAS=2, BFLOAT16_BIAS=3)
_BIASES = {
    "float32": BIAS_KINDS.FLOAT32_BIAS,
    "float16": BIAS_KINDS.FLOAT16_BIAS,
    "bfloat16": BIAS_KINDS.BFLOAT16_BIAS,
}
_SHARED = Constants(
    TOKEN_THREADS=512,
    STREAM_THREADS=256,
    STREAM_ROWS=16,
    STREAM_K=128,
    STREAM_DEPTH=3,
    TILE_N=128,
    TILE_K=64,
    TILE_STAGES=4,
    TILE_THREADS=2,
)
_HOPPER_SHARED = Constants(STEP_K=_tma.BOX_BYTES)
_ALIGNMENT = 16  # bytes, of what moves in vectors
_MOST_BLOCKS = 1 << 30
#: Columns of quantized tokens come in multiples of this.
PITCH = 128
_TOKEN_THREADS = _SHARED.TOKEN_THREADS
_STREAM_TOKENS = 16  # the most that are streamed
_STREAM_ROWS = _SHARED.STREAM_ROWS
_SMALL_WEIGHT = 1 << 25  # bytes; of larger ones tiles stream more than 8 tokens faster on Hopper
_STREAM_THREADS = _SHARED.STREAM_THREADS
_STREAM_SHARED = _STREAM_THREADS // 32 * _SHARED.STREAM_DEPTH * _STREAM_ROWS * _SHARED.STREAM_K
_TILE_N, _TILE_STAGE, _TILE_STAGES = _SHARED.TILE_N, _SHARED.TILE_K, _SHARED.TILE_STAGES


@dataclass(frozen=True)
class Tiling:
    """The template parameters of ``wgmma_w8a8`` after the dtype (see kernels/linear/int8_sm90a.cu), and what it costs.

    Parameters
    ----------
    warpgroups, n_steps, stages, share, split : int
        The template parameters.
    step, exchange : float
        Microseconds of 128 k, and of the exchange of sums, on an H200.
    """

    warpgroups: int
    n_steps: int
    stages: int
    share: int
    split: int
    step: float
    exchange: float = 0

    @property
    def tokens(self) -> int:
        """Tokens of a tile."""
        return 64 * self.warpgroups

    @property
    def channels(self) -> int:
        """Channels of a tile."""
        return 128 * self.n_steps

    @property
    def threads(self) -> int:
        """Threads of a block: the warpgroups that multiply, and what fetches."""
        return 160 if self.warpgroups == 1 else 128 * (self.warpgroups + 1)

    @property
    def shared(self) -> int:
        """Bytes of the ring, with room to align it."""
        return self.stages * self._stage_bytes + 1024

    @property
    def _stage_bytes(self) -> int:
        return (self.tokens + self.channels) * _tma.BOX_BYTES

    @property
    def text(self) -> str:
        """As C++, with the sizes that the kernel compares."""
        layout = f"Layout<{self.threads}, {self.tokens}, {self.channels}, {self._stage_bytes}>"
        return f"{self.warpgroups}, {self.n_steps}, {self.stages}, {self.share}, {self.split}, {layout}"

    def splits(self, depth: int) -> bool:
        """Whether there is something to do for each part of k."""
        return self.split <= -(-depth // _tma.BOX_BYTES)

    def blocks(self, tokens: int, channels: int) -> int:
        """Thread blocks that have work."""
        along_m = -(-tokens // (self.tokens * self.share)) * self.share
        return along_m * -(-channels // self.channels) * self.split

    def cost(self, tokens: int, channels: int, depth: int, multiprocessors: int) -> float:
        """Microseconds of a product, give or take what all tilings have in common."""
        # Not every multiprocessor finds three others for a cluster of four.
        held = multiprocessors if self.share * self.split < 4 else multiprocessors * 3 // 4
        rounds = -(-self.blocks(tokens, channels) // held)
        multiplying = rounds * -(-depth // _tma.BOX_BYTES) / self.split * self.step
        return max(multiplying, channels * depth / _READ_PER_US) + rounds * self.exchange


_READ_PER_US = 4.2e6  # bytes of weights
_TILINGS = (
    Tiling(1, 1, 8, 1, 1, 0.30),
    Tiling(1, 1, 8, 1, 2, 0.30, 2),
    Tiling(1, 1, 8, 1, 4, 0.30, 3),
    Tiling(2, 1, 6, 1, 1, 0.42),
    Tiling(2, 1, 6, 1, 2, 0.42, 3),
    Tiling(2, 1, 6, 1, 4, 0.42, 4),
    Tiling(2, 2, 4, 1, 2, 0.72, 5),
    Tiling(2, 2, 4, 2, 1, 0.71),
)


def _template(name: str, *axes: tuple[str, ...], hot: bool = True) -> Template:
    return Template(_FILE, name, (_TYPES, *axes), hot=hot, structs=(BIAS_KINDS, _SHARED))


_QUANTIZE_TOKENS = _template("quantize_tokens", CXX_BOOLS, CXX_BOOLS)
_STREAM = _template("stream_w8a8", ("8", "16"), ("true",))
_TILE = _template("tile_w8a8", ("64", "128"), ("true",))
_WGMMA = Template(
    _HOPPER_FILE, "wgmma_w8a8", (_TYPES, tuple(t.text for t in _TILINGS)), structs=(BIAS_KINDS, _HOPPER_SHARED)
)
register_templates(
    _QUANTIZE_TOKENS,
    _STREAM,
    _TILE,
    # Weights whose rows start anywhere are read byte by byte.
    _template("stream_w8a8", ("8", "16"), ("false",), hot=False),
    _template("tile_w8a8", ("64", "128"), ("false",), hot=False),
    _WGMMA,
)


@functools.cache
def _multiprocessors(device: int) -> int:
    """Multiprocessors of a Hopper GPU whose driver makes tensor maps and starts kernels early; 0 of any other."""
    gpu = device_of(device)
    hopper = gpu is not None and gpu.capability == 90 and gpu.tensor_maps and gpu.starts_early
    return gpu.multiprocessors if gpu is not None and hopper else 0


def choose_tiling(tokens: int, channels: int, depth: int, multiprocessors: int) -> Tiling | None:
    """The tiling that takes the least time; None for ``stream_w8a8``."""
    if tokens <= _STREAM_TOKENS and (tokens <= 8 or channels * depth < _SMALL_WEIGHT):
        return None
    # Narrow tiles read the weights again for every 64 tokens; wide ones would be half empty.
    fitting = (t for t in _TILINGS if t.splits(depth) and (tokens <= 128 if t.warpgroups == 1 else tokens > 64))
    return min(fitting, key=lambda tiling: tiling.cost(tokens, channels, depth, multiprocessors))


@dataclass(frozen=True, eq=False)
class _Plan:
    """The two launches of a product of one shape.

    Parameters
    ----------
    quantize, multiply : callable
        Kernels that are loaded; no first one for tokens that are int8 already.
    blocks : int
        Of the second one.
    boxes : tuple of int
        Rows of the boxes of tokens and of weights that the bulk tensor copy engine fetches; empty without it.
    """

    quantize: Any
    multiply: Any
    blocks: int
    boxes: tuple[int, ...]


_kernel = functools.cache(_launch.Kernel)
# The lowest codes as a kernel takes a float.
_LOWEST = {qmin: int(np.float32(qmin).view(np.int32)) for qmin in _LEVELS}
# Sizes of the arguments: pointers and ints, and tensor maps.
_TOKEN_SIZES, _SIZES, _MAP_SIZES = (*(8,) * 9, 4), (8,) * 11, (128, 128, *(8,) * 8)


@functools.lru_cache(maxsize=4096)
def _plan(
    dtype: np.dtype,
    tokens: int,
    channels: int,
    depth: int,
    vector: bool | None,
    smooth: bool,
    aligned: bool,
    device: int,
) -> _Plan:
    """How a product is computed, its kernels compiled. `vector` is None for tokens that are int8 already."""
    cxx = CXX_TYPES[dtype.name]
    multiprocessors = _multiprocessors(device) if aligned and depth else 0
    tiling = choose_tiling(tokens, channels, depth, multiprocessors) if multiprocessors else None
    boxes: tuple[int, ...] = ()
    # quantize_tokens lets the next kernel start once all work ahead of itself is done: weights can be read at once.
    early = vector is not None
    if tiling is not None:
        boxes = tiling.tokens, tiling.channels // tiling.share
        kernel = _kernel(_WGMMA, (cxx, tiling.text), tiling.threads, tiling.shared, signature=_MAP_SIZES, early=early)
        units, waves = tiling.blocks(tokens, channels), tiling.split == 1
    elif tokens <= _STREAM_TOKENS:
        values = cxx, "8" if tokens <= 8 else "16", CXX_BOOLS[aligned]
        kernel = _kernel(_STREAM, values, _STREAM_THREADS, _STREAM_SHARED, signature=_SIZES, early=early)
        units, waves = -(-channels // _STREAM_ROWS), True
    else:
        tile = 64 if tokens <= 64 else 128
        shared = _TILE_STAGES * (tile + _TILE_N) * _TILE_STAGE
        values, threads = (cxx, str(tile), CXX_BOOLS[aligned]), _SHARED.TILE_THREADS * tile
        kernel = _kernel(_TILE, values, threads, shared, signature=_SIZES, early=early)
        units, waves = -(-tokens // tile) * -(-channels // _TILE_N), False
    quantize = None
    if vector is not None:
        values = cxx, CXX_BOOLS[vector], CXX_BOOLS[smooth]
        threads = _TOKEN_THREADS if tokens <= _launch.multiprocessors(device) else _TOKEN_THREADS // 2
        kernel_of_tokens = _kernel(_QUANTIZE_TOKENS, values, threads, signature=_TOKEN_SIZES, early=True)
        quantize = kernel_of_tokens.ready(device).launch
    ready = kernel.ready(device)
    return _Plan(
        quantize,
        ready.launch,
        min(units, ready.resident if waves else _MOST_BLOCKS),
        boxes,
    )


@functools.cache
def bias_kind(dtype: np.dtype) -> int:
    """How kernels know the dtype of a bias."""
    return _BIASES[dtype.name]


def bias_of(bias: Any | None) -> tuple[int, int]:
    """The address of a bias and how kernels know its dtype; zeros for none."""
    return (0, 0) if bias is None else (bias.data.ptr, bias_kind(bias.dtype))


def _padded_tokens(codes: Any, scales: Any, tokens: int, pitch: int) -> tuple[Any, Any]:
    """Tokens that are int8 already, as the kernels read them: rows of `pitch` bytes that end in zeros, a scale each."""
    if codes.shape[-1] != pitch or codes.data.ptr % _ALIGNMENT:
        rows = codes.reshape(tokens, codes.shape[-1])
        codes = _xp.namespace(codes).zeros((tokens, pitch), np.int8)
        codes[:, : rows.shape[1]] = rows
    return codes, scales if scales.size == tokens else scales.repeat(tokens)


def _multiply_cuda(
    x: Any,
    token_scales: Any | None,
    codes: Any,
    scales: Any,
    smooth: Any | None,
    fixed: Any | None,
    qmin: int,
    bias: Any | None,
    out: Any,
) -> None:
    channels = out.shape[-1]
    tokens, depth = out.size // channels, codes.size // channels
    numbers, weight, divisors = x.data.ptr, codes.data.ptr, 0 if smooth is None else smooth.data.ptr
    vector = None
    if token_scales is None:
        vector = not (depth % 8 or numbers % _ALIGNMENT or divisors % _ALIGNMENT)
    aligned = not (depth % _ALIGNMENT or weight % _ALIGNMENT)
    plan = _plan(out.dtype, tokens, channels, depth, vector, divisors != 0, aligned, x.data.device_id)
    pitch = max(-(-depth // PITCH) * PITCH, PITCH)
    if token_scales is None:
        # The quantized tokens, and behind them their scales.
        scratch: Any = _xp.allocate(tokens * (pitch + 4))
        a = scratch.ptr
        factors = a + tokens * pitch
        there = given = 0
        if isinstance(fixed, np.ndarray):
            given = int(fixed.view(np.int32)[0])
        elif fixed is not None:
            there = fixed.data.ptr
        plan.quantize(
            (min(tokens, _MOST_BLOCKS),),
            (numbers, divisors, there, given, a, factors, tokens, depth, pitch, _LOWEST[qmin]),
        )
    else:
        scratch = _padded_tokens(x, token_scales, tokens, pitch)
        a, factors = (array.data.ptr for array in scratch)
    _launch_product(plan, a, factors, weight, scales.data.ptr, bias, out, depth)


def multiply_in_place(
    a: int, token_scales: int, weight: int, scales: int, depth: int, bias: Any | None, out: Any
) -> None:
    """`multiply` of what lies at these addresses, of which `a` and `weight` are multiples of 16.

    Rows of tokens are padded to a multiple of `PITCH`, those of the weight have `depth` bytes, which is not 0; there is
    a scale for each token and row. `out` is an array on a GPU, of a type of the kernels.
    """
    channels = out.shape[-1]
    tokens, device = out.size // channels, out.data.device_id
    plan = _plan(out.dtype, tokens, channels, depth, None, False, not depth % _ALIGNMENT, device)
    _launch_product(plan, a, token_scales, weight, scales, bias, out, depth)


def _launch_product(
    plan: _Plan, a: int, factors: int, weight: int, scales: int, bias: Any | None, out: Any, depth: int
) -> None:
    channels = out.shape[-1]
    tokens, pitch = out.size // channels, max(-(-depth // PITCH) * PITCH, PITCH)
    matrices: tuple[Any, Any] = a, weight
    last: tuple[int, ...] = (pitch,)
    if plan.boxes:
        matrices = (
            _tma.byte_matrix(a, tokens, pitch, pitch, plan.boxes[0]),
            _tma.byte_matrix(weight, channels, depth, depth, plan.boxes[1]),
        )
        last = ()
    added = bias_of(bias)
    plan.multiply((plan.blocks,), (*matrices, out.data.ptr, factors, scales, *added, tokens, channels, depth, *last))


# ---- routes --------------------------------------------------------------------------------------------------------


def _refusal(problem: Problem) -> str | None:
    """What stands against int8 products, on a GPU or not."""
    if problem.activations != "int8":
        return 'it multiplies activations that are int8: ask for activations="int8"'
    if problem.experts:
        return "it is for one weight"
    integers = problem.format.integers(problem.shape, problem.stored.lead)
    if integers is None or integers.shares != "row":
        return f"the weight is {problem.format!r}; {_WANTED}"
    return f"K is {problem.shape[1]}; {_TOO_DEEP}" if problem.shape[1] > MAX_DEPTH else None


def _product(x: Any, q: QuantizedArray, bias: Any, out: Any) -> None:
    """`linear` of int8 weights; x is float, or int8 with scales of tokens."""
    codes, scales = weight_planes(q, "q")
    token_scales = None
    if isinstance(x, QuantizedArray):
        x, token_scales = token_planes(x)
    bias = None if bias is None else source(bias, _FLOATS)
    _multiply(x, token_scales, codes, scales, None, None, -128, bias, out)


# Microseconds of the two launches; operations of a core of the host.
_START, _HOST_RATE = 4.0, 2e4


class Int8(Route):
    """Quantize tokens to int8, and multiply on integer tensor cores."""

    name = "int8"

    def accepts(self, problem: Problem) -> str | None:
        return "the arrays are in host memory" if problem.device is None else _refusal(problem)

    def cost(self, problem: Problem) -> float:
        tiling = self._tiling(problem)
        n, k = problem.shape
        if tiling is None:
            return _START + n * k / BYTES_PER_US * -(-problem.tokens // _STREAM_TOKENS)
        assert problem.device is not None
        return _START + tiling.cost(problem.tokens, n, k, problem.device.multiprocessors)

    def prepare(self, problem: Problem) -> Product:
        return _product

    def describe(self, problem: Problem) -> str:
        tiling = self._tiling(problem)
        if tiling is not None:
            how = f"wgmma_w8a8, {tiling.tokens} tokens x {tiling.channels} rows a thread block"
        else:
            how = "stream_w8a8" if problem.tokens <= _STREAM_TOKENS else "tile_w8a8"
        return f"tokens quantized to int8, then integer tensor cores: {how}"

    def _tiling(self, problem: Problem) -> Tiling | None:
        """What Hopper takes where rows of the weight start at multiples of 16 bytes."""
        assert problem.device is not None
        n, k = problem.shape
        aligned = k % _ALIGNMENT == 0 and k > 0 and problem.stored.codes >= _ALIGNMENT
        processors = _multiprocessors(problem.device.ordinal) if aligned else 0
        return choose_tiling(problem.tokens, n, k, processors) if processors else None


class Int8Host(Route):
    """Quantize tokens to int8, and multiply exactly by NumPy's BLAS."""

    name = "int8_numpy"

    def accepts(self, problem: Problem) -> str | None:
        return "the arrays are on a GPU" if problem.device is not None else _refusal(problem)

    def cost(self, problem: Problem) -> float:
        n, k = problem.shape
        return n * k * problem.tokens / _HOST_RATE

    def prepare(self, problem: Problem) -> Product:
        return _product

    def describe(self, problem: Problem) -> str:
        return "NumPy: tokens quantized to int8, integers multiplied exactly in float32"
