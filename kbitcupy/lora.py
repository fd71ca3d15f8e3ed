"""LoRA: two small matrices trained beside a weight that stays compressed (QLoRA).

With a weight W [N, K], of which nothing changes, A [r, K], B [N, r] and ``c = alpha / r`` (rank-stabilized:
``alpha / sqrt(r)``):

========  ==============================================================================================================
forward   ``y = x W^T + bias + c (x A^T) B^T``
backward  ``dx = dy W + c (dy B) A``, ``dA = c (dy B)^T x``, ``dB = c dy^T (x A^T)``
merge     ``W + c B A``
========  ==============================================================================================================

Dropout sets elements of the x that meets A to 0 with probability p, and the others are multiplied by ``1 / (1 - p)``,
as PEFT does; what W meets stays whole. It happens where a `seed` is given, which stands for the mask: backward takes
the same one.

The side path is computed in float32, beside any float64 array in float64; results are rounded to the dtype that each
function says. Only the product with the weight comes from `kbitcupy.linear` in the dtype of x. For training take A and
B of float32: a step of an optimizer may be smaller than the distance of two 16-bit numbers. NumPy and CuPy arrays go
through the same lines, nothing synchronises, and no value is read back.

Sources: LoRA, arXiv 2106.09685; QLoRA, arXiv 2305.14314; rank-stabilized, arXiv 2312.03732; files as PEFT 0.21.

Examples
--------
One step of gradient descent, of which the compressed weight sees nothing:

>>> import dataclasses, numpy as np, kbitcupy as kb
>>> rng = np.random.default_rng(0)
>>> q = kb.quantize(rng.standard_normal((48, 64)).astype(np.float32), "nf4")
>>> x, wanted = rng.standard_normal((5, 64)).astype(np.float32), rng.standard_normal((5, 48)).astype(np.float32)
>>> lora = kb.lora.LoRA.init(q, r=4, alpha=8, rng=0)
>>> dy = lora.forward(x, q) - wanted
>>> dx, dA, dB = lora.backward(dy, x, q)
>>> better = dataclasses.replace(lora, A=lora.A - 0.003 * dA, B=lora.B - 0.003 * dB)
>>> bool(np.sum((better.forward(x, q) - wanted) ** 2) < np.sum(dy**2))
True
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import numpy as np

from .array import Compressed, QuantizedArray
from .backend import xp as _xp
from .errors import DeviceError, FormatError
from .formats.base import GIVEN, resolve
from .io import peft as _peft
from .ops import check_out, quantize
from .products.functions import linear, matmul

__all__ = ["LoRA", "load", "save"]

_HALF, _SINGLE, _DOUBLE = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)
_NOTHING = nullcontext()
_LARGEST = float(np.finfo(_SINGLE).max)
#: How A may begin.
_INITS = {
    "standard": "normal, of variance 1 / K",
    "kaiming": "uniform from -1 / sqrt(K) to 1 / sqrt(K), as PEFT's default",
}

# splitmix64: the step of its counter, and the multipliers and shifts of its mixing.
_STEP = 0x9E3779B97F4A7C15
_MIXING = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
_WORD = (1 << 64) - 1


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class LoRA:
    """A low-rank adapter of a weight [N, K].

    It cannot be changed, and holds the arrays that it is given without a copy; the next one of a training is
    ``dataclasses.replace(lora, A=..., B=...)``.

    Parameters
    ----------
    A : array_like
        [r, K], float16, bfloat16, float32 or float64: NumPy, CuPy, or anything that `kbitcupy.quantize` takes.
    B : array_like
        [N, r], on the device of `A`.
    alpha : float
        What scales the side path; positive, and a number that float32 can hold.
    rank_stabilized : bool, default False
        Divide `alpha` by the square root of r instead of r.
    dropout : float, default 0.0
        The probability p with which elements of x are left out where a call gives a `seed`; from 0 to below 1.

    Raises
    ------
    TypeError
        When `A` or `B` is no float array, or `rank_stabilized` no bool.
    ValueError
        When shapes do not fit, or a number is not allowed.
    DeviceError
        When `A` and `B` are on different devices.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> lora = kb.lora.LoRA(np.ones((2, 3), np.float32), np.ones((4, 2), np.float32), alpha=1)
    >>> lora
    LoRA(r=2, alpha=1, shape=(4, 3), dtype=float32, device=cpu)
    >>> lora.forward(np.ones((1, 3), np.float32))
    array([[3., 3., 3., 3.]], dtype=float32)
    """

    A: Any
    B: Any
    alpha: float
    _: KW_ONLY
    rank_stabilized: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        a, b = _floats(self.A, "A"), _floats(self.B, "B")
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or not a.size or not b.size:
            raise ValueError(
                f"A has shape {a.shape} and B has shape {b.shape}; they must be [r, K] and [N, r], and r, K and N "
                "positive"
            )
        if not _xp.same_device(a, b):
            raise DeviceError(f"A is on {_xp.device_of(a)} and B on {_xp.device_of(b)}; move one of them")
        if not isinstance(self.rank_stabilized, (bool, np.bool_)):
            raise TypeError(f"rank_stabilized is {self.rank_stabilized!r}; allowed are True and False")
        checked = {
            "A": a,
            "B": b,
            "alpha": _positive(self.alpha),
            "rank_stabilized": bool(self.rank_stabilized),
            "dropout": _probability(self.dropout),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @classmethod
    def init(
        cls,
        q: Any,
        r: int = 8,
        alpha: float = 16,
        *,
        rng: Any = None,
        init: str = "standard",
        dtype: Any = "float32",
        rank_stabilized: bool = False,
        dropout: float = 0.0,
    ) -> LoRA:
        """A new adapter, which changes nothing before it is trained: A is random and B is 0.

        Parameters
        ----------
        q : QuantizedArray, array or tuple of int
            The weight [N, K], on whose device the adapter lies, or its shape.
        r : int, default 8
            The rank, at least 1.
        alpha : float, default 16
            As for the class.
        rng : int or numpy.random.Generator, optional
            Where random numbers come from: A is drawn by NumPy, so that every device gets the same one.
        init : {"standard", "kaiming"}, default "standard"
            How A is drawn: normal of variance 1 / K, or uniform up to 1 / sqrt(K) on both sides, as PEFT does.
        dtype : dtype_like, default "float32"
            Of A and B.
        rank_stabilized, dropout
            As for the class.

        Returns
        -------
        LoRA

        Raises
        ------
        TypeError
            When `q`, `r` or `dtype` is of the wrong type.
        ValueError
            When a number, the shape or `init` is not allowed.

        Examples
        --------
        >>> import kbitcupy as kb
        >>> lora = kb.lora.LoRA.init((768, 768), r=8, alpha=16, rng=0)
        >>> lora.scaling, lora.num_parameters
        (2.0, 12288)
        """
        rows, depth = _shape_of(q)
        rank = _integer(r, "r", "a positive integer")
        if rank < 1:
            raise ValueError(f"r is {rank}; it must be a positive integer")
        if not isinstance(init, str) or init not in _INITS:
            offered = ", ".join(f"{name!r} ({what})" for name, what in _INITS.items())
            raise ValueError(f"init is {init!r}; allowed are {offered}")
        kind = _xp.float_dtype(dtype)
        generator = np.random.default_rng(rng)
        bound = 1 / math.sqrt(depth)
        if init == "standard":
            a = generator.standard_normal((rank, depth)) * bound
        else:
            a = generator.uniform(-bound, bound, (rank, depth))
        made = cls(
            a.astype(kind), np.zeros((rows, rank), kind), alpha, rank_stabilized=rank_stabilized, dropout=dropout
        )
        beside = next(iter(q.planes.values())) if isinstance(q, QuantizedArray) else q
        return made.to_device(_xp.device_of(beside))

    # ---- what it is ----------------------------------------------------------------------------------------------

    @property
    def r(self) -> int:
        """The rank."""
        return int(self.A.shape[0])

    @property
    def shape(self) -> tuple[int, int]:
        """Shape [N, K] of the weight."""
        return int(self.B.shape[0]), int(self.A.shape[1])

    @property
    def scaling(self) -> float:
        """c, which the side path is multiplied by: ``alpha / r``, rank-stabilized ``alpha / sqrt(r)``."""
        return self.alpha / (math.sqrt(self.r) if self.rank_stabilized else self.r)

    @property
    def num_parameters(self) -> int:
        """Numbers that are trained: ``r * (K + N)``."""
        return int(self.A.size + self.B.size)

    @property
    def device(self) -> str:
        """``"cpu"`` or ``"cuda:N"``."""
        return _xp.device_of(self.A)

    def to_device(self, device: str) -> LoRA:
        """The adapter on ``"cpu"`` or ``"cuda:N"``; itself when it is there already."""
        device = _xp.resolve_device(device)
        if device == self.device:
            return self
        return replace(self, A=_xp.to_device(self.A, device), B=_xp.to_device(self.B, device))

    def __repr__(self) -> str:
        kinds = " and ".join(dict.fromkeys((str(self.A.dtype), str(self.B.dtype))))
        options = ", rank_stabilized=True" if self.rank_stabilized else ""
        options += f", dropout={self.dropout}" if self.dropout else ""
        return f"LoRA(r={self.r}, alpha={self.alpha}{options}, shape={self.shape}, dtype={kinds}, device={self.device})"

    # ---- products ------------------------------------------------------------------------------------------------

    def forward(
        self, x: Any, q: Any = None, bias: Any = None, base: Any = None, *, seed: int | None = None, out: Any = None
    ) -> Any:
        """``x W^T + bias + c (x A^T) B^T``.

        Parameters
        ----------
        x : array_like
            float16, bfloat16, float32 or float64 [..., K].
        q : QuantizedArray, optional
            The weight [N, K] in any format, which is multiplied by `kbitcupy.linear`.
        bias : array_like, optional
            float [N], which goes with `q`.
        base : array_like, optional
            What the side path is added to instead of a product with `q`: float [..., N], such as ``x @ W.T`` of a float
            weight, ``kb.linear(x, q, activations="int8")`` or ``kb.bitnet.linear(x, q)``: A meets the x that is not
            quantized. Without `q` and `base` the result is the side path alone.
        seed : int, optional
            From 0 to 2^64 - 1: leave out elements of x, see `mask`. None leaves out none, as behind a training.
        out : array, optional
            C-contiguous array of the result's shape and dtype, which receives it; it must not overlap `x`.

        Returns
        -------
        numpy.ndarray or cupy.ndarray
            [..., N], with the dtype of `base`, or that of `x`; a torch tensor where `x` is one.

        Raises
        ------
        TypeError
            When an argument is of the wrong type or dtype.
        ValueError
            When a shape does not fit the adapter, or `bias` and `base` are both given.
        DeviceError
            When the arguments are on different devices.

        Examples
        --------
        >>> import numpy as np, kbitcupy as kb
        >>> q = kb.quantize(np.eye(48, 64, dtype=np.float32), "int4", block=32)
        >>> lora = kb.lora.LoRA.init(q, r=4, rng=0)
        >>> x = np.ones((2, 3, 64), np.float32)
        >>> bool((lora.forward(x, q) == kb.linear(x, q)).all())  # before it is trained
        True
        """
        if _xp.is_tensor(x):
            return _xp.in_torch(self.forward, "x", x, q, bias, base, seed=seed, out=out)
        x = self._input(x)
        seed = self._dropping(seed)
        shape = (*x.shape[:-1], self.B.shape[0])
        if bias is not None and (q is None or base is not None):
            raise ValueError("bias goes with q and without base: add it to base")
        if base is not None:
            base = self._beside(_floats(base, "base"), shape, "base")
        if q is not None:
            self._weight(q)
        dtype = x.dtype if base is None else base.dtype
        if out is not None:
            check_out(out, shape, x, dtype)
        if base is None and q is not None:
            base = linear(x, q, bias)
        with _xp.on_device_of(x), _quiet(x):
            working = _working(x.dtype, self.A.dtype, self.B.dtype, dtype)
            inputs, factor, _ = self._dropped(x, working, seed)
            hidden = inputs @ _as(self.A, working).T
            if factor != 1:
                hidden *= working.type(factor)
            y = hidden @ _as(self.B, working).T
            if y.ndim != len(shape):
                y = y.reshape(shape)
            if base is not None:
                if base.dtype == _HALF:  # both conversions and the sum at once
                    half = _xp.namespace(x).empty(shape, _HALF) if out is None else out
                    return _xp.namespace(x).add(y, base, out=half, dtype=working, casting="same_kind")
                y += _as(base, working)
            if out is None:
                return _as(y, dtype)
            out[...] = y
        return out

    def backward(self, dy: Any, x: Any, q: Any = None, *, seed: int | None = None) -> tuple[Any, Any, Any]:
        """Gradients of x, A and B; the weight has none.

        Parameters
        ----------
        dy : array_like
            Gradient of the result of `forward`, float [..., N].
        x : array_like
            The x of that call, float [..., K].
        q : QuantizedArray, optional
            The weight [N, K]; without it `dx` is the side path's part.
        seed : int, optional
            The seed of that call.

        Returns
        -------
        dx : array
            ``dy W + c (dy B) A``, shape and dtype of `x`. W is what `q` decodes to.
        dA : array
            ``c (dy B)^T x``, shape and dtype of A.
        dB : array
            ``c dy^T (x A^T)``, shape and dtype of B. Where dropout left out elements of x, it is without them here.

        Raises
        ------
        TypeError, ValueError, DeviceError
            As `forward`.

        Examples
        --------
        >>> import numpy as np, kbitcupy as kb
        >>> lora = kb.lora.LoRA(np.ones((1, 2), np.float32), np.ones((3, 1), np.float32), alpha=2)
        >>> x = np.array([[1.0, 2.0]], np.float32)
        >>> lora.backward(np.ones((1, 3), np.float32), x)[1]
        array([[ 6., 12.]], dtype=float32)
        """
        if _xp.is_tensor(dy):
            return _xp.in_torch(self.backward, "dy", dy, x, q, seed=seed)
        x = self._input(x)
        dy = self._beside(_floats(dy, "dy"), (*x.shape[:-1], self.B.shape[0]), "dy")
        seed = self._dropping(seed)
        if q is not None:
            self._weight(q)
        with _xp.on_device_of(x), _quiet(x):
            working = _working(dy.dtype, x.dtype, self.A.dtype, self.B.dtype)
            a, b = _as(self.A, working), _as(self.B, working)
            inputs, factor, mask = self._dropped(x, working, seed)
            gradient = _rows(_as(dy, working))
            back = gradient @ b
            hidden = inputs @ a.T
            if factor != 1:
                back *= working.type(factor)
                hidden *= working.type(factor)
            dx = back @ a
            if mask is not None:
                dx *= mask
            if q is not None:
                dx += matmul(gradient, q)
            if x.ndim != 2:
                dx = dx.reshape(x.shape)
            dA, dB = back.T @ inputs, gradient.T @ hidden
            return _as(dx, x.dtype), _as(dA, self.A.dtype), _as(dB, self.B.dtype)

    def mask(self, x: Any, seed: int) -> Any:
        """The elements of x that dropout keeps under a seed.

        Parameters
        ----------
        x : array_like
            float [..., K], of which only the shape and the device count.
        seed : int
            From 0 to 2^64 - 1.

        Returns
        -------
        numpy.ndarray or cupy.ndarray
            bool of x's shape. An element's fate depends on the seed and its place alone: the same on every device.

        Raises
        ------
        TypeError, ValueError, DeviceError
            As `forward`.

        Notes
        -----
        Number i of a seed s is one half of ``splitmix64(mix(s) + (i // 2 + 1) * 0x9E3779B97F4A7C15)``, the lower one
        for an even i; an element is kept where it is not below ``p * 2^32``.

        Examples
        --------
        >>> import numpy as np, kbitcupy as kb
        >>> lora = kb.lora.LoRA.init((8, 1000), dropout=0.25)
        >>> int(lora.mask(np.ones((4, 1000), np.float32), seed=1).sum())
        3035
        """
        if _xp.is_tensor(x):
            return _xp.in_torch(self.mask, "x", x, seed)
        x = self._input(x)
        with _xp.on_device_of(x):
            return self._kept(x, _seed(seed))

    # ---- merging -------------------------------------------------------------------------------------------------

    def merge(self, W: Any, *, out: Any = None) -> Any:
        """``W + c B A``: a weight that needs no side path.

        Parameters
        ----------
        W : array_like
            float [N, K], on the device of the adapter. `merge_and_export` takes compressed ones.
        out : array, optional
            C-contiguous array of W's shape and dtype, which receives the result; may be `W` itself.

        Returns
        -------
        numpy.ndarray or cupy.ndarray
            Shape and dtype of `W`.

        Raises
        ------
        TypeError, ValueError, DeviceError
            As `forward`.

        Examples
        --------
        >>> import numpy as np, kbitcupy as kb
        >>> lora = kb.lora.LoRA(np.ones((1, 2), np.float32), np.ones((3, 1), np.float32), alpha=2)
        >>> lora.merge(np.zeros((3, 2), np.float32))[0]
        array([2., 2.], dtype=float32)
        """
        if _xp.is_tensor(W):
            return _xp.in_torch(self.merge, "W", W, out=out)
        return self._added(W, self.scaling, out)

    def unmerge(self, W: Any, *, out: Any = None) -> Any:
        """``W - c B A``: what `merge` was given, but for roundings, which in 16 bits show.

        Parameters
        ----------
        W, out
            As for `merge`.

        Returns
        -------
        numpy.ndarray or cupy.ndarray
            Shape and dtype of `W`.

        Raises
        ------
        TypeError, ValueError, DeviceError
            As `forward`.

        Examples
        --------
        >>> import numpy as np, kbitcupy as kb
        >>> lora = kb.lora.LoRA(np.ones((1, 2), np.float32), np.ones((3, 1), np.float32), alpha=2)
        >>> lora.unmerge(lora.merge(np.ones((3, 2), np.float32)))[0]
        array([1., 1.], dtype=float32)
        """
        if _xp.is_tensor(W):
            return _xp.in_torch(self.unmerge, "W", W, out=out)
        return self._added(W, -self.scaling, out)

    def merge_and_export(self, q: QuantizedArray, format: Any = None, **options: Any) -> QuantizedArray:
        """A compressed weight with the adapter in it: decoded, ``+ c B A``, quantized.

        Parameters
        ----------
        q : QuantizedArray
            The weight [N, K], on the device of the adapter; it stays as it is.
        format : str, Format or tuple, optional
            What to quantize to, as `kbitcupy.quantize` takes it; by default the format of `q`.
        **options
            What else `kbitcupy.quantize` takes with that format: its options, `scale`, `codebook`, `importance`.

        Returns
        -------
        QuantizedArray
            Shape and dtype of `q`; what is quantized is not rounded to that dtype before.

        Raises
        ------
        TypeError, ValueError, DeviceError
            As `forward`.
        FormatError
            When the format's values are -1, 0 and 1 times a scale, which ``W + c B A`` is not; and as
            `kbitcupy.quantize`.

        Examples
        --------
        >>> import numpy as np, kbitcupy as kb
        >>> q = kb.quantize(np.eye(48, 64, dtype=np.float32), "nf4")
        >>> kb.lora.LoRA.init(q, rng=0).merge_and_export(q, "int8", granularity=("channel", 0))
        QuantizedArray(int8:granularity=channel:0, shape=(48, 64), dtype=float32, device=cpu, 8.50 bits/element)
        """
        self._weight(q)
        given = {name: options.pop(name) for name in GIVEN if not isinstance(options.get(name, ""), str)}
        chosen, given = resolve(q.format if format is None else format, given, **options)
        if chosen.ternary:
            raise FormatError(
                f"format is {chosen}, whose numbers are -1, 0 and 1 times a scale: W + c B A is not, and what it would "
                "be rounded to is another weight. Keep the adapter beside it (forward), or name another format, such "
                "as 'int4:block=32'"
            )
        working = _DOUBLE if q.dtype == _DOUBLE else _SINGLE
        weight = q.dequantize(dtype=working)
        made = quantize(self._added(weight, self.scaling, weight), (chosen, given))
        return made if made.dtype == q.dtype else QuantizedArray(made.format, made.planes, made.shape, q.dtype)

    # ---- within --------------------------------------------------------------------------------------------------

    def _input(self, x: Any) -> Any:
        """x, checked."""
        x = _floats(x, "x")
        if not x.ndim or x.shape[-1] != self.A.shape[1]:
            raise ValueError(f"x has shape {x.shape}; an adapter of shape {self.shape} needs [..., {self.shape[1]}]")
        return self._beside(x, x.shape, "x")

    def _beside(self, array: Any, shape: tuple[int, ...], argument: str) -> Any:
        """An array of this shape, on the device of the adapter."""
        if array.shape != shape:
            raise ValueError(f"{argument} has shape {array.shape}; x and an adapter of shape {self.shape} need {shape}")
        if not _xp.same_device(array, self.A):
            raise DeviceError(
                f"{argument} is on {_xp.device_of(array)} and the adapter on {self.device}; move one with "
                ".to_device(), cupy.asarray or cupy.asnumpy"
            )
        return array

    def _weight(self, q: Any) -> None:
        """Check a compressed weight."""
        if not isinstance(q, QuantizedArray):
            hint = (
                "pass q, not q.T" if isinstance(q, Compressed) else "for a float weight pass base=x @ W.T, or merge(W)"
            )
            raise TypeError(f"q is {type(q).__name__}; it must be a QuantizedArray, as quantize returns: {hint}")
        if q.shape != self.shape:
            raise ValueError(f"q has shape {q.shape}; the adapter is for a weight of shape {self.shape}")
        if not _xp.same_device(next(iter(q.planes.values())), self.A):
            raise DeviceError(f"q is on {q.device} and the adapter on {self.device}; move one with .to_device()")

    def _added(self, W: Any, factor: float, out: Any) -> Any:
        """``W + factor B A``, rounded once."""
        if isinstance(W, Compressed):
            raise TypeError(
                f"W is {type(W).__name__}; it must be a float array: merge_and_export takes compressed ones"
            )
        W = _floats(W, "W")
        if W.shape != self.shape:
            raise ValueError(f"W has shape {W.shape}; the adapter is for a weight of shape {self.shape}")
        W = self._beside(W, self.shape, "W")
        if out is not None:
            check_out(out, W.shape, W, W.dtype)
        with _xp.on_device_of(W), _quiet(W):
            working = _working(W.dtype, self.A.dtype, self.B.dtype)
            change = (_as(self.B, working) * working.type(factor)) @ _as(self.A, working)
            change += _as(W, working)
            if out is None:
                return _as(change, W.dtype)
            out[...] = change
        return out

    def _dropping(self, seed: Any) -> int | None:
        """The seed, checked; None where nothing is left out."""
        if seed is None:
            return None
        seed = _seed(seed)
        return seed if self.dropout else None

    def _dropped(self, x: Any, working: np.dtype, seed: int | None) -> tuple[Any, float, Any]:
        """The x that meets A, [tokens, K]; what its product is multiplied by; the elements that are kept."""
        inputs = _rows(_as(x, working))
        if seed is None:
            return inputs, self.scaling, None
        mask = self._kept(x, seed).reshape(inputs.shape)
        # Not a product: what is left out may be infinite.
        inputs = _xp.namespace(x).where(mask, inputs, working.type(0))
        return inputs, self.scaling / (1 - self.dropout), mask

    def _kept(self, x: Any, seed: int) -> Any:
        """See `mask`."""
        xp = _xp.namespace(x)
        numbers = xp.arange(1, x.size // 2 + 2, dtype=np.uint64)
        numbers *= np.uint64(_STEP)
        numbers += np.uint64(_mixed(seed))
        for shift, multiplier in _MIXING:
            numbers ^= numbers >> np.uint64(shift)
            if multiplier > 1:
                numbers *= np.uint64(multiplier)
        smallest = min(round(self.dropout * 2.0**32), 2**32 - 1)
        return (numbers.view(np.uint32)[: x.size] >= np.uint32(smallest)).reshape(x.shape)


# ---- files ---------------------------------------------------------------------------------------------------------


def save(
    path: str | os.PathLike[str],
    adapters: Mapping[str, LoRA],
    *,
    target_modules: Any = None,
    base_model: str | None = None,
    task_type: str | None = None,
) -> None:
    """Write adapters as PEFT does: a folder with ``adapter_config.json`` and ``adapter_model.safetensors``.

    Parameters
    ----------
    path : path_like
        The folder, which does not exist or is empty. It is filled beside and renamed: after a failure nothing is left.
    adapters : mapping of str to LoRA
        By the names of the model's modules: ``"model.layers.0.self_attn.q_proj"``. They share `rank_stabilized` and
        `dropout`; where `r` or `alpha` differ, ``rank_pattern`` and ``alpha_pattern`` say so.
    target_modules : sequence of str, optional
        That field of the configuration; by default the names of all modules.
    base_model : str, optional
        The model's name or path, ``base_model_name_or_path``.
    task_type : str, optional
        PEFT's word for the kind of the model, such as ``"CAUSAL_LM"``.

    Raises
    ------
    TypeError
        When an argument is of the wrong type.
    ValueError
        When the adapters do not share `rank_stabilized` and `dropout`, or there are none.
    FileError
        When `path` exists or cannot be written, or a name is not allowed.

    Examples
    --------
    >>> import os, tempfile, kbitcupy as kb
    >>> lora = kb.lora.LoRA.init((48, 64), r=4, rng=0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     kb.lora.save(f"{folder}/adapter", {"layers.0.q_proj": lora})
    ...     sorted(os.listdir(f"{folder}/adapter"))
    ...     kb.lora.load(f"{folder}/adapter")
    ['adapter_config.json', 'adapter_model.safetensors']
    {'layers.0.q_proj': LoRA(r=4, alpha=16, shape=(48, 64), dtype=float32, device=cpu)}
    """
    if not isinstance(adapters, Mapping) or not all(isinstance(one, LoRA) for one in adapters.values()):
        raise TypeError(f"adapters is {type(adapters).__name__}; it must be a mapping of names of modules to LoRA")
    if not all(isinstance(name, str) for name in adapters):
        raise TypeError("adapters has names that are no str; it must be a mapping of names of modules to LoRA")
    if not adapters:
        raise ValueError("adapters is empty; there is nothing to write")
    shared = {(one.rank_stabilized, one.dropout) for one in adapters.values()}
    if len(shared) > 1:
        raise ValueError(
            "the adapters differ in rank_stabilized or dropout, of which a configuration has one each: write them to "
            "folders of their own"
        )
    about: dict[str, Any] = {"base_model_name_or_path": base_model, "task_type": task_type}
    for name, value in (("base_model", base_model), ("task_type", task_type)):
        if value is not None and not isinstance(value, str):
            raise TypeError(f"{name} is {type(value).__name__}; it must be a str, or None")
    if target_modules is not None:
        about["target_modules"] = _names(target_modules)
    rank_stabilized, dropout = shared.pop()
    pairs = {name: _peft.Pair(one.A, one.B, one.alpha) for name, one in adapters.items()}
    _peft.write_adapters(path, _peft.Adapters(pairs, rank_stabilized, dropout), about)


def load(path: str | os.PathLike[str]) -> dict[str, LoRA]:
    """Read adapters that PEFT, or `save`, wrote.

    Parameters
    ----------
    path : path_like
        The folder with ``adapter_config.json`` and ``adapter_model.safetensors``.

    Returns
    -------
    dict of str to LoRA
        By the names of the model's modules, on the CPU, in the stored dtype. Keys of tensors may have
        ``base_model.model.`` in front and the name of one adapter behind ``lora_A``, or not.

    Raises
    ------
    TypeError
        When `path` is no path.
    FileError
        When a file is missing or not what it claims to be, or when the adapter is of a kind that computes something
        else: not LORA, DoRA, with biases, modules or embeddings of its own, or trained beside weights that its
        beginning had changed (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA). The message names the field or the tensor; fields
        that are not known are ignored.

    Examples
    --------
    >>> import tempfile, kbitcupy as kb
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     kb.lora.save(f"{folder}/a", {"q_proj": kb.lora.LoRA.init((8, 16), 2, alpha=4, rng=0)})
    ...     kb.lora.load(f"{folder}/a")["q_proj"].scaling
    2.0
    """
    found = _peft.read_adapters(path)
    options: dict[str, Any] = {"rank_stabilized": found.rank_stabilized, "dropout": found.dropout}
    return {name: LoRA(pair.A, pair.B, pair.alpha, **options) for name, pair in found.pairs.items()}


# ---- arguments -----------------------------------------------------------------------------------------------------


def _floats(x: Any, argument: str) -> Any:
    """A float array in this machine's byte order."""
    if isinstance(x, Compressed):
        raise TypeError(f"{argument} is {type(x).__name__}; it must be a plain array: call .dequantize()")
    array = _xp.as_array(x, argument)
    return _as(array, _xp.float_dtype(array.dtype, argument))


def _as(array: Any, dtype: np.dtype) -> Any:
    """The array in a dtype; a call of ``astype`` that changes nothing would cost as much as a check."""
    return array if array.dtype == dtype else array.astype(dtype)


def _rows(array: Any) -> Any:
    """[..., length] as [tokens, length]."""
    return array if array.ndim == 2 else array.reshape(-1, array.shape[-1])


def _working(*dtypes: np.dtype) -> np.dtype:
    """What arrays of these dtypes are computed with in."""
    return _DOUBLE if _DOUBLE in dtypes else _SINGLE


def _quiet(array: Any) -> AbstractContextManager[Any]:
    """A context in which NumPy says nothing of what overflows; nothing beside an array of CuPy, which never does."""
    return np.errstate(over="ignore", invalid="ignore") if isinstance(array, np.ndarray) else _NOTHING


def _shape_of(q: Any) -> tuple[int, int]:
    """N and K of a weight or of a shape."""
    shape = tuple(getattr(q, "shape", q)) if hasattr(q, "shape") or isinstance(q, (tuple, list)) else None
    if shape is None:
        raise TypeError(f"q is {type(q).__name__}; it must be a weight [N, K], or its shape (N, K)")
    lengths = [_integer(length, "q", "a weight [N, K], or its shape (N, K)") for length in shape]
    if len(lengths) != 2 or min(lengths) < 1:
        raise ValueError(f"q has shape {shape}; it must be (N, K), of at least 1 each")
    return lengths[0], lengths[1]


def _integer(value: Any, argument: str, allowed: str) -> int:
    if not isinstance(value, (bool, np.bool_)):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{argument} is {value!r}; it must be {allowed}")


def _seed(seed: Any) -> int:
    number = _integer(seed, "seed", "an integer from 0 to 2^64 - 1, or None")
    if not 0 <= number <= _WORD:
        raise ValueError(f"seed is {number}; it must be an integer from 0 to 2^64 - 1")
    return number


def _number(value: Any, argument: str) -> Any:
    """A Python number."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{argument} is {value!r}; it must be a number")
    return value


def _positive(alpha: Any) -> Any:
    number = _number(alpha, "alpha")
    if not 0 < number <= _LARGEST:
        raise ValueError(f"alpha is {number}; it must be a positive number that float32 can hold")
    return number


def _probability(dropout: Any) -> float:
    number = _number(dropout, "dropout")
    if not 0 <= number < 1:
        raise ValueError(f"dropout is {number}; it must be from 0 to below 1")
    return float(number)


def _names(target_modules: Any) -> list[str]:
    names = None if isinstance(target_modules, str) else list(target_modules)
    if names is None or not all(isinstance(name, str) for name in names):
        raise TypeError(f"target_modules is {target_modules!r}; it must be a sequence of str")
    return names


def _mixed(word: int) -> int:
    """splitmix64's mixing of one number, so that seeds side by side begin far apart."""
    for shift, multiplier in _MIXING:
        word = ((word ^ word >> shift) * multiplier) & _WORD
    return word
