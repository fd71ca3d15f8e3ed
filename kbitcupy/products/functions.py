"""Products with compressed weights: linear, matmul, linear_grouped, explain, precompile.

The ways to compute a product are routes (`kbitcupy.products.routes`), of which the cheapest one that accepts it is
taken; `explain` shows them all:

- `host`: on NumPy weights are decoded to float32, some rows at a time, and multiplied.
- `small_batch`, `hopper`, `experts`: few tokens are multiplied with weights that are decoded in registers and never
  written: ``kbit2`` to ``kbit5`` and the 4-bit tables, float16 and bfloat16, rows of whole blocks, compute capability
  8.0; by larger tiles on compute capability 9.0.
- `records`, `grouped_records`: the same with weights of any GGUF type that those do not take.
- `generic`: few tokens are multiplied with weights of any other format that has a decoder, in float32.
- `int8`: ``activations="int8"`` multiplies integers: W8A8.
- `staged_stream`, `staged_small_batch`, `staged_records`, `staged_halves`, `staged`: ``"q8_1"`` with weights in the
  other types of GGUF: the kernels of `integer_stream`, `small_batch` and `records` multiply the tokens' integers, sums
  of what shares scales being exact; or what quantized tokens stand for is multiplied as floats, of up to four tokens as
  sums of two halves.
- `integers`: so do ``"int8"`` and ``"q8_1"`` with other formats of integer codes, exactly in what shares scales; few
  tokens on compute capability 8.0 with codes that are read in place, `integer_stream`, and products of experts,
  `integer_experts_stream`; more on compute capability 9.0 with codes that are decoded in registers, `integer_tile`, and
  up to 64 with `q4_0`, 33 to 64 with `q4_k`, `integer_batch`; 17 to some hundred in ``"q8_1"`` with these two types,
  `integer_units`, where rows keep all multiprocessors busy once, and `spread_units`; or else like few, some at a time,
  `integer_turns`.
  Where sums are scaled after every 32 elements, many tokens of float16 and bfloat16 are quicker once both sides are
  decoded and cuBLAS multiplies, `integer_decoded`.
- `ternary`: so do ``"int8"`` and ``"bitnet"`` with ternary weights: few tokens with codes that are read in place, more
  with codes that are decoded in registers on compute capability 9.0, and elsewhere with trits that are decoded to int8;
  `ternary_floats` reads codes in place for floats.
- `decoded`: everything else is decoded whole, and cuBLAS multiplies.

Products are accumulated in fp32; the tensor scale of a format and the bias are applied in fp32, before the one rounding
to the dtype of the result.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np

from ..array import QuantizedArray, TransposedQuantizedArray
from ..backend import compile as _compile, xp as _xp
from ..errors import DeviceError, FormatError
from ..formats.base import Format
from ..ops import check_out
from . import decoded, host
from .decoded import Decoded
from .experts import EachExpert, GroupedHopper, GroupedRecords, GroupedSmallBatch, multiply_each
from .generic import Generic
from .hopper import Hopper
from .host import Host, working_dtype
from .int8 import Int8, Int8Host, integers_of, token_planes
from .integer_batch import IntegerBatch
from .integer_decoded import IntegerDecoded
from .integer_experts import IntegerExperts, IntegerExpertsHost, IntegerExpertsStream
from .integer_stream import IntegerStream
from .integer_tile import IntegerTile
from .integer_turns import IntegerTurns
from .integer_units import IntegerUnits, SpreadUnits
from .integers import Integers, IntegersHost, refused
from .records import Streamed
from .routes import WELL_ALIGNED, Explanation, Problem, Product, Route, Stored, choices, device, explained, stored
from .small_batch import SingleToken, SmallBatch
from .staged import Staged, StagedColumns, StagedFew, StagedHalves, StagedRecords, StagedStream
from .ternary import Ternary, TernaryHost, TernaryStream, TernaryTile
from .ternary_experts import GroupedTernary, TernarySlots
from .ternary_stream import TernaryFloats

#: The routes of `linear` and of `linear_grouped`.
LINEAR: tuple[Route, ...] = (
    Host(),
    SingleToken(),
    SmallBatch(),
    Hopper(),
    Streamed(),
    TernaryFloats(),
    Generic(),
    Decoded(),
    Int8(),
    Int8Host(),
    IntegerStream(),
    IntegerBatch(),
    IntegerUnits(),
    SpreadUnits(),
    IntegerTile(),
    IntegerTurns(),
    IntegerDecoded(),
    Integers(),
    IntegersHost(),
    StagedStream(),
    StagedColumns(),
    StagedHalves(),
    StagedFew(),
    StagedRecords(),
    Staged(),
    TernaryStream(),
    TernaryTile(),
    Ternary(),
    TernaryHost(),
)
GROUPED: tuple[Route, ...] = (
    GroupedSmallBatch(),
    GroupedHopper(),
    GroupedRecords(),
    GroupedTernary(),
    TernarySlots(),
    EachExpert(),
    IntegerExpertsStream(),
    IntegerExperts(),
    IntegerExpertsHost(),
)
#: How `linear` may quantize its activations, and what that is.
ACTIVATIONS = {
    "int8": "one scale a token, its absmax over 127, as for W8A8",
    "bitnet": "the same with ternary weights and BitNet's arithmetic",
    "q8_1": "one scale for 32 elements, as GGUF's products have it",
}


def linear(x: Any, q: QuantizedArray, bias: Any = None, *, activations: str | None = None, out: Any = None) -> Any:
    """x times the transpose of a compressed weight, plus a bias.

    Parameters
    ----------
    x : array_like or QuantizedArray
        float16, bfloat16, float32 or float64 [..., K]. Activations that are compressed already, in a symmetric ``int8``
        with ``granularity="token"`` or ``"tensor"``, are multiplied as they are, by weights as for ``"int8"`` or
        ``"bitnet"``.
    q : QuantizedArray
        Weight [N, K], on the device of `x`.
    bias : array_like, optional
        float [N]; added in fp32 (fp64 for float64 `x`) before the one rounding to x's dtype.
    activations : {None, "int8", "q8_1", "bitnet"}, default None
        None multiplies the floats that came. Others quantize them to int8 on the way and multiply integers: sums of
        what shares scales are exact, everything beside them is float32. Of many tokens in 16 bits, where 32 elements
        share scales, a GPU may round what integers of both sides stand for to that dtype, and multiply it as floats;
        `explain` says so.

        - ``"int8"``: one scale for each token, ``absmax / 127``. Weights are of any format that is integer codes with
          scales of rows, of groups along rows or of all: ``int8``, ``uint8``, ``int4`` and ``uint4`` with zero points,
          offsets or neither, ``q8_0``, ``q4_0``, ``q4_k`` and ``ternary``. With ``int8`` whose rows have a scale each
          this is W8A8, `kbitcupy.affine.linear_w8a8`.
        - ``"q8_1"``: one scale for 32 neighbours, as GGUF's products quantize, for the same weights; where a few
          channels are much larger than others the error is a fraction of that of ``"int8"``. Weights in GGUF's other
          types are multiplied, too, many tokens or rows that are not whole 256 elements by what the codes stand for.
        - ``"bitnet"``: what BitNet b1.58 does, for weights in ``ternary``: `kbitcupy.bitnet.linear`, where there are
          options. It differs from ``"int8"`` where a token is tiny.
    out : array, optional
        C-contiguous array of the result's shape and dtype, which receives it; it must not overlap `x`.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        [..., N], with the dtype of `x`; a torch tensor where `x` is one; `out` itself where it is given. Accumulated
        in fp32 (fp64 for float64 `x`), or exactly, in int32. On CuPy the call does not synchronise, and the same call
        gives the same bits every time.

    Raises
    ------
    TypeError
        When an argument is of the wrong type or dtype.
    FormatError
        When `activations` is no such word, or the weight cannot be multiplied by such activations.
    ValueError
        When a shape does not fit the others.
    DeviceError
        When the arguments are on different devices.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> rng = np.random.default_rng(0)
    >>> w = kb.quantize(rng.standard_normal((48, 64)).astype(np.float16), "kbit4")
    >>> x = rng.standard_normal((2, 3, 64)).astype(np.float16)
    >>> y = kb.linear(x, w, np.ones(48, np.float16))
    >>> y.shape, y.dtype
    ((2, 3, 48), dtype('float16'))
    >>> np.allclose(y, x @ kb.dequantize(w).T + 1, atol=0.05)
    True
    >>> w8 = kb.quantize(w.dequantize(), "int8", granularity=("channel", 0))
    >>> np.allclose(kb.linear(x, w8, activations="int8"), x @ w.dequantize().T, atol=0.5)
    True
    >>> w4 = kb.quantize(w.dequantize(), "q4_0")
    >>> np.allclose(kb.linear(x, w4, activations="q8_1"), x @ w4.dequantize().T, atol=0.5)
    True
    """
    if _xp.is_tensor(x):
        return _xp.in_torch(linear, "x", x, q, bias, activations=activations, out=out)
    x, activations = _operand(x, activations)
    _check_weight(q, 2, "q", "[N, K]")
    rows, depth = q.shape
    if x.ndim == 0 or x.shape[-1] != depth:
        raise ValueError(f"x has shape {x.shape}; a weight of shape {q.shape} needs [..., {depth}]")
    plane = _check_beside(x, q)
    shape = (*x.shape[:-1], rows)
    if bias is not None:
        bias = as_float(bias, "bias")
        if bias.shape != (rows,):
            raise ValueError(f"bias has shape {bias.shape}; a weight of shape {q.shape} needs ({rows},)")
        if not _xp.same_device(bias, plane):
            raise DeviceError(f"bias is on {_xp.device_of(bias)} and x on {_xp.device_of(plane)}; move one of them")
    if out is not None:
        check_out(out, shape, plane, x.dtype)
    with _xp.on_device_of(plane):
        if out is None:
            out = _xp.empty(plane, shape, x.dtype)
        _multiply(x, q, bias, out, activations)
    return out


def matmul(a: Any, b: Any, *, out: Any = None) -> Any:
    """NumPy's ``a @ b`` where one of the two is compressed.

    Parameters
    ----------
    a, b : array_like, QuantizedArray or TransposedQuantizedArray
        Exactly one of them is compressed, the other one float16, bfloat16, float32 or float64. ``x @ q.T`` and
        ``q @ x`` of a 2-D `q` are `linear`; any other product decodes first.
    out : array, optional
        C-contiguous array of the result's shape and dtype, which receives it; it must not overlap the arguments.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        With the dtype of the operand that is not compressed, and the shape that NumPy gives the product; a torch tensor
        where that operand is one; `out` itself where it is given.

    Raises
    ------
    TypeError
        When both or neither of the operands are compressed, or a dtype is not a float dtype.
    ValueError
        When the shapes do not fit.
    DeviceError
        When the operands are on different devices.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> rng = np.random.default_rng(0)
    >>> q = kb.quantize(rng.standard_normal((48, 64)).astype(np.float32), "kbit4")
    >>> kb.matmul(np.ones((5, 64), np.float32), q.T).shape, (q @ np.ones(64, np.float32)).shape
    ((5, 48), (48,))
    """
    compressed = (QuantizedArray, TransposedQuantizedArray)
    if isinstance(a, compressed) == isinstance(b, compressed):
        raise TypeError(
            f"a is {type(a).__name__} and b is {type(b).__name__}; exactly one of them must be a QuantizedArray: "
            "call .dequantize() on the other, or use the plain @ of two arrays"
        )
    left = isinstance(a, compressed)
    if _xp.is_tensor(b if left else a):
        if left:
            return _xp.in_torch(lambda array, **options: matmul(a, array, **options), "b", b, out=out)
        return _xp.in_torch(matmul, "a", a, b, out=out)
    q = a if left else b
    x = as_float(b if left else a, "b" if left else "a")
    shape = _product_shape(q.shape, x.shape) if left else _product_shape(x.shape, q.shape)
    _check_beside(x, q.T if isinstance(q, TransposedQuantizedArray) else q)
    if out is not None:
        check_out(out, shape, x, x.dtype)
    if not left and isinstance(b, TransposedQuantizedArray):
        return linear(x, b.T, out=out)
    if left and isinstance(a, QuantizedArray) and a.ndim == 2:
        if x.ndim == 1:
            return linear(x, a, out=out)
        result = linear(x.swapaxes(-1, -2), a).swapaxes(-1, -2)
    else:
        with _xp.on_device_of(x):
            dtype = working_dtype(x.dtype)
            weight, array = q.dequantize(dtype=dtype), x.astype(dtype, copy=False)
            product = _xp.namespace(x).matmul(*((weight, array) if left else (array, weight)))
            result = product.astype(x.dtype, copy=False)
    if out is None:
        return result
    out[...] = result
    return out


def linear_grouped(
    x: Any, qs: Any, expert_ids: Any, weights: Any = None, *, activations: str | None = None, out: Any = None
) -> Any:
    """Each token times the transposes of the weights that it chose: a mixture of experts.

    Parameters
    ----------
    x : array_like
        float16, bfloat16, float32 or float64: [T, K], shared by the slots of a token, or [T, top_k, K], one for each.
    qs : QuantizedArray or array_like
        Weights [E, N, K] of the experts, compressed (see `stack`) or a plain float array, on the device of `x`.
    expert_ids : array_like of int
        [T, top_k]. An id outside 0 .. E - 1 chooses no expert: its product is zero.
    weights : array_like, optional
        float [T, top_k]: combine the slots of a token, in their order, in fp32.
    activations : {None, "int8", "q8_1", "bitnet"}, default None
        Quantize x on the way and multiply integers, as `linear` does, by weights that are compressed.
    out : array, optional
        C-contiguous array of the result's shape and dtype, which receives it; it must not overlap the arguments.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        [T, top_k, N], or [T, N] with `weights`; with the dtype of `x`; a torch tensor where `x` is one. The same call
        gives the same bits every time.

    Raises
    ------
    TypeError
        When an argument is of the wrong type or dtype.
    FormatError
        When `activations` is no such word, or the weights cannot be multiplied by such activations.
    ValueError
        When a shape does not fit the others.
    DeviceError
        When the arguments are on different devices.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> rng = np.random.default_rng(0)
    >>> experts = kb.stack([kb.quantize(rng.standard_normal((48, 64)).astype(np.float32), "kbit4") for _ in range(4)])
    >>> x = rng.standard_normal((3, 64)).astype(np.float32)
    >>> kb.linear_grouped(x, experts, [[0, 2], [1, 3], [3, 0]]).shape
    (3, 2, 48)
    >>> kb.linear_grouped(x, experts, [[0, 2], [1, 3], [3, 0]], np.full((3, 2), 0.5, np.float32)).shape
    (3, 48)
    """
    if _xp.is_tensor(x):
        return _xp.in_torch(linear_grouped, "x", x, qs, expert_ids, weights, activations=activations, out=out)
    x = as_float(x, "x")
    _check_activations(activations)
    compressed = isinstance(qs, QuantizedArray)
    if compressed:
        _check_weight(qs, 3, "qs", "[E, N, K]")
        if not qs.format.rows_are_blocks(qs.shape):
            raise FormatError(
                f"qs is {qs.format} of shape {qs.shape}, whose experts cannot be decoded one by one: "
                f"{qs.format.why_not_blocks(qs.shape)}; pass qs.dequantize()"
            )
    else:
        qs = as_float(qs, "qs")
        if qs.ndim != 3:
            raise ValueError(f"qs has shape {qs.shape}; it must be [E, N, K]")
        if activations is not None:
            raise FormatError(
                "activations go with weights that are compressed, and qs is a plain array: leave them away"
            )
    ids = as_integers(expert_ids, "expert_ids")
    _, rows, depth = qs.shape
    chosen = ids.shape
    if len(chosen) != 2:
        raise ValueError(f"expert_ids has shape {chosen}; it must be [T, top_k]")
    if x.shape != (chosen[0], depth) and x.shape != (*chosen, depth):
        raise ValueError(
            f"x has shape {x.shape}; expert_ids of shape {chosen} and weights of shape {qs.shape} need "
            f"({chosen[0]}, {depth}) or ({chosen[0]}, {chosen[1]}, {depth})"
        )
    device = _xp.ordinal(x)
    if _xp.ordinal(_plane(qs) if compressed else qs) != device:
        raise _apart(x, qs, "qs")
    if _xp.ordinal(ids) != device:
        ids = moved_to(ids, x)
    shape = *chosen, rows
    if weights is not None:
        weights = as_float(weights, "weights")
        if weights.shape != chosen:
            raise ValueError(f"weights has shape {weights.shape}; expert_ids has shape {chosen}")
        if _xp.ordinal(weights) != device:
            raise DeviceError(f"weights is on {_xp.device_of(weights)} and x on {_xp.device_of(x)}; move one of them")
        shape = chosen[0], rows
    if out is not None:
        check_out(out, shape, x, x.dtype)
    with _xp.on_device_of(x):
        if out is None:
            out = _xp.empty(x, shape, x.dtype)
        if not out.size:
            return out
        if not ids.size:  # no slot to add up
            out.fill(0)
        else:
            _multiply_grouped(x, qs, ids, weights, out, activations)
    return out


def explain(x: Any, q: Any, bias: Any = None, *, activations: str | None = None, expert_ids: Any = None) -> Explanation:
    """How a product is computed, and why so: what every route says of it. Nothing is computed.

    Parameters
    ----------
    x, q, bias, activations
        As for `linear`; with `expert_ids` as for `linear_grouped`.
    expert_ids : array_like of int, optional
        [T, top_k]; their values are not looked at.

    Returns
    -------
    Explanation
        A row for each route, the one that is taken first: its name, whether it is taken, its modelled microseconds on
        an H200, and how it computes the product or what stands against it. ``print`` shows a table.

    Raises
    ------
    TypeError, FormatError, ValueError, DeviceError
        As the product does.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> q = kb.quantize(np.ones((48, 64), np.float16), "kbit4")
    >>> found = kb.explain(np.ones((3, 64), np.float16), q)
    >>> found.route, found[0].reason
    ('numpy', 'NumPy: decode some rows at a time and multiply, in float32')
    >>> {row.route: row.reason for row in found}["decoded"]
    'the arrays are in host memory'
    """
    if _xp.is_tensor(x):
        x = _xp.as_array(x, "x")
    if expert_ids is not None:
        _check_activations(activations)
        if bias is not None:
            raise FormatError("a bias goes with one weight; leave it away where expert_ids are given")
        x = as_float(x, "x")
        _check_weight(q, 3, "q", "[E, N, K]")
        tokens = int(np.prod(np.shape(expert_ids)))
        routes, experts, heading = GROUPED, q.shape[0], f"{tokens} products of {x.dtype} with experts, {q!r}"
    else:
        x, activations = _operand(x, activations)
        _check_weight(q, 2, "q", "[N, K]")
        tokens = int(np.prod(x.shape[:-1]))
        routes, experts, heading = LINEAR, 0, f"{tokens} tokens of {x.dtype}, {q!r}"
    if not x.ndim or x.shape[-1] != q.shape[-1]:
        raise ValueError(f"x has shape {x.shape}; a weight of shape {q.shape} needs [..., {q.shape[-1]}]")
    plane = _check_beside(x, q)
    if not tokens or not q.size:
        return Explanation(f"{heading}: nothing to compute", ())
    ordinal = -1 if isinstance(plane, np.ndarray) else plane.data.device_id
    aligned = ordinal < 0 or isinstance(x, QuantizedArray) or not _xp.contiguous(x).data.ptr % 16

    def problem(count: int) -> Problem:
        facts = aligned, stored(q), activations, experts
        return Problem(q.format, q.shape[-2:], _planned(count, experts), x.dtype, device(ordinal), *facts)

    taken = [(count, choices(problem(count), routes)[0]) for count in (_STEPS if ordinal >= 0 else (1,))]
    names = [(count, choice.route.name) for count, choice in taken if choice.refusal is None]
    ranges = [next(group) for _, group in itertools.groupby(names, key=lambda pair: pair[1])]
    return explained(heading, problem(tokens), routes, ranges)


# Numbers of tokens from which on another route may be taken.
_STEPS = (*range(1, 34), 65, 129, 257, 513, 1025, 2049, 4097)


def precompile(
    q: QuantizedArray, tokens: Any = (1, 8, 32), *, dtype: Any = "float16", activations: str | None = None
) -> int:
    """Compile what `linear` needs for some numbers of tokens, so that no later call has to wait for it.

    A kernel takes a few tenths of a second the first time; CuPy keeps the binary on disk for later processes. The
    products are computed once, of zeros, which makes cuBLAS ready as well.

    Parameters
    ----------
    q : QuantizedArray
        Weight [N, K].
    tokens : sequence of int, default (1, 8, 32)
        How many tokens calls will have.
    dtype : dtype_like, default "float16"
        Of the tokens.
    activations : {None, "int8", "q8_1", "bitnet"}, default None
        As for `linear`.

    Returns
    -------
    int
        How many kernels of kbitcupy this process did not have before; 0 on NumPy.

    Raises
    ------
    TypeError, FormatError, ValueError
        As `linear`; ValueError too when a number of tokens is not positive.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> kb.precompile(kb.quantize(np.ones((48, 64), np.float16), "kbit4"), tokens=(1, 16))
    0
    """
    _check_weight(q, 2, "q", "[N, K]")
    wanted = _xp.float_dtype(dtype)
    counts = tuple(tokens)
    if not all(isinstance(count, (int, np.integer)) and count > 0 for count in counts):
        raise ValueError(f"tokens is {tokens!r}; it must be a sequence of positive integers")
    if isinstance(_plane(q), np.ndarray):
        _operand(np.empty((1, 1), wanted), activations)
        return 0
    before = len(_compile.loaded)
    with _xp.on_device_of(_plane(q)):
        for count in counts:
            linear(_xp.namespace(_plane(q)).zeros((count, q.shape[1]), wanted), q, activations=activations)
    return len(_compile.loaded) - before


# ---- plans ---------------------------------------------------------------------------------------------------------

# Up to so many tokens each number of them has a plan of its own; beyond, where no kernel is made for a number, all up
# to the next power of two have one.
_OWN_PLANS = 256


@functools.lru_cache(maxsize=4096)
def plan(
    format: Format,
    shape: tuple[int, int],
    dtype: np.dtype,
    tokens: int,
    ordinal: int,
    aligned: bool = True,
    lies: Stored = WELL_ALIGNED,
    activations: str | None = None,
    experts: int = 0,
) -> Product:
    """What computes a product; the parameters are the attributes of `Problem`, and the number of the device or -1.

    Raises
    ------
    FormatError
        When no route accepts it.
    """
    problem = Problem(format, shape, tokens, dtype, device(ordinal), aligned, lies, activations, experts)
    route, refusal, _ = choices(problem, GROUPED if experts else LINEAR)[0]
    if refusal is None:
        return route.prepare(problem)
    if activations != "bitnet":
        raise refused(activations or "", problem)
    on_gpu, on_host = (IntegerExperts, IntegerExpertsHost) if experts else (Ternary, TernaryHost)
    why = (on_gpu if ordinal >= 0 else on_host)().accepts(problem)
    raise FormatError(f"{'qs' if experts else 'q'} cannot be multiplied by activations in {activations}: {why}")


def _planned(count: int, experts: int = 0) -> int:
    """For how many tokens, or products with experts, so many are planned.

    Where there are more products than experts, all of these may be chosen.
    """
    return count if count < (experts or _OWN_PLANS + 1) else 1 << (count - 1).bit_length()


def _multiply(x: Any, q: QuantizedArray, bias: Any, out: Any, activations: str | None) -> None:
    """Fill `out`; its device is the current one."""
    size = out.size
    if not size and activations is None:
        return
    ordinal, aligned = -1, True
    if activations is None:
        x = _xp.contiguous(x)
    if not isinstance(out, np.ndarray):
        ordinal = out.data.device_id
        aligned = activations is not None or not x.data.ptr % 16
    lies = q._launches.get(Stored) or stored(q)
    tokens = _planned(size // q.shape[0] if size else 1)
    product = plan(q.format, q.shape, x.dtype, tokens, ordinal, aligned, lies, activations)
    if size:
        product(x, q, bias, out)


def multiply_decoded(x: Any, q: QuantizedArray, out: Any) -> None:
    """`linear` of a 2-D `x` by the way that writes the decoded weights: what a fused kernel is compared with."""
    (host if isinstance(x, np.ndarray) else decoded).multiply(x, q, None, out)


def _multiply_grouped(x: Any, qs: Any, ids: Any, weights: Any, out: Any, activations: str | None) -> None:
    """Fill `out`, which is not empty; its device is the current one."""
    if not isinstance(qs, QuantizedArray):
        multiply_each(x, qs, ids, weights, out)
        return
    experts, rows, depth = qs.shape
    ordinal, aligned = -1, True
    if not isinstance(x, np.ndarray):
        x = _xp.contiguous(x)
        ordinal, aligned = x.data.device_id, not x.data.ptr % 16
    lies = qs._launches.get(Stored) or stored(qs)
    products = _planned(ids.size, experts)
    product = plan(qs.format, (rows, depth), x.dtype, products, ordinal, aligned, lies, activations, experts)
    product(x, qs, ids, weights, out)


# ---- checks --------------------------------------------------------------------------------------------------------


def _check_activations(activations: Any) -> None:
    if activations is not None and (not isinstance(activations, str) or activations not in ACTIVATIONS):
        offered = ", ".join(f"{name!r} ({what})" for name, what in ACTIVATIONS.items())
        raise FormatError(f"activations is {activations!r}; allowed are None, which multiplies floats, and {offered}")


def _operand(x: Any, activations: str | None) -> tuple[Any, str | None]:
    """x as an array or in int8, and how it is quantized."""
    if activations is not None:
        _check_activations(activations)
    if not isinstance(x, QuantizedArray):
        return as_float(x, "x"), activations
    if activations is None and integers_of(x) is None:
        raise TypeError(
            "x is QuantizedArray; it must be a plain array, or in int8 with a scale for each token: call .dequantize()"
        )
    token_planes(x)
    if activations == "q8_1":
        raise FormatError(f"activations='q8_1' quantizes floats, and x is {x!r} already: leave activations away")
    return x, "int8"


def as_float(x: Any, argument: str) -> Any:
    """x as a plain array of floats in the machine's byte order."""
    if _xp.is_native(x):
        return x
    if isinstance(x, (QuantizedArray, TransposedQuantizedArray)):
        raise TypeError(f"{argument} is {type(x).__name__}; it must be a plain array: call .dequantize()")
    array = _xp.as_array(x, argument)
    dtype = _xp.float_dtype(array.dtype, argument)
    return array if array.dtype == dtype else array.astype(dtype)  # another byte order


def as_integers(ids: Any, argument: str) -> Any:
    """ids as an array of integers."""
    array = _xp.as_array(ids, argument)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{argument} is {array.dtype}; it must be an integer array")
    return array


def moved_to(array: Any, beside: Any) -> Any:
    """An array on the device of another."""
    return array if _xp.same_device(array, beside) else _xp.to_device(array, _xp.device_of(beside))


def _check_weight(q: Any, ndim: int, argument: str, shape: str) -> None:
    if not isinstance(q, QuantizedArray):
        hint = ": pass q, not q.T" if isinstance(q, TransposedQuantizedArray) else ", as quantize returns"
        raise TypeError(f"{argument} is {type(q).__name__}; it must be a QuantizedArray{hint}")
    if q.ndim != ndim:
        raise FormatError(f"{argument} has shape {q.shape}; it must be {shape}: reshape it")


def _plane(q: QuantizedArray) -> Any:
    """Any plane of a compressed array: all are on one device."""
    return next(iter(q.planes.values()))


def _check_beside(x: Any, q: Any, argument: str = "q") -> Any:
    """x, or a plane of it where it is compressed: an array on the device of both."""
    plane = _plane(q) if isinstance(q, QuantizedArray) else q
    if isinstance(x, QuantizedArray):
        x = _plane(x)
    if not _xp.same_device(x, plane):
        raise _apart(x, q, argument)
    return x


def _apart(x: Any, q: Any, argument: str) -> DeviceError:
    """The error of arrays that are not on one device."""
    plane = _plane(q) if isinstance(q, QuantizedArray) else q
    return DeviceError(
        f"{argument} is on {_xp.device_of(plane)} and x on {_xp.device_of(x)}; move one with .to_device(), "
        "cupy.asarray or cupy.asnumpy"
    )


@functools.lru_cache(maxsize=1024)
def _product_shape(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of ``a @ b``; strided views of one byte know NumPy's rules and messages and take no memory."""
    if not a or not b or a[-1] != b[-2 if len(b) > 1 else -1]:
        raise ValueError(f"a has shape {a} and b has shape {b}: the last length of a must be the last but one of b")
    try:
        batch = np.broadcast_shapes(a[:-2], b[:-2])
    except ValueError:
        raise ValueError(f"a has shape {a} and b has shape {b}: their leading lengths do not broadcast") from None
    return (*batch, *a[-2:-1], *(b[-1:] if len(b) > 1 else ()))
