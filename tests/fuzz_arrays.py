"""Random arrays of every format under random chains of index, take, reshape, stack, concatenate and the like.

``python tests/fuzz_arrays.py 20000`` runs that many chains and prints what became of their steps; ``python
tests/fuzz_arrays.py 20000 0 cupy`` does so on a GPU, from seed 0; the suite runs fewer. After each step the array is
compared with what NumPy makes of the decoded one: the same numbers, or both refuse. A chain that ends in a weight ends
with a product, which is compared with float64.
"""

import copy
import itertools
import json
import math
import pickle
import sys
import tempfile
import time
import unittest.mock
from collections import Counter
from pathlib import Path

import ml_dtypes
import numpy as np
from inputs import CODEBOOKS, ENCODED, KINDS, codebook, fitting, make

import kbitcupy as kb
import kbitcupy.products.functions  # whose modules are looked up
from kbitcupy.errors import DeviceError, FormatError
from kbitcupy.formats import base
from kbitcupy.formats.blocks import BlockFormat

DTYPES = [np.dtype(name) for name in ("float16", ml_dtypes.bfloat16, "float32", "float64")]
LENGTHS = (0, 1, 1, 2, 2, 3, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 64, 96, 128, 260, 512)
BLOCKS = (16, 32, 64, 128, 256)
LARGEST = 1 << 15
MOST_STEPS = 6
REFUSALS = (ValueError, TypeError, IndexError)


class Fault(AssertionError):
    """What no step may do."""


def host(array):
    return array if isinstance(array, np.ndarray) else array.get()


def same(a, b):
    """The same dtype, shape and numbers, any NaN equal to any NaN, 0 equal to -0."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | (np.isnan(a) & np.isnan(b))).all())


# ---- what a chain begins with ----------------------------------------------------------------------------------------


def random_shape(rng):
    shape = ()
    for _ in range(rng.choice(5, p=(0.04, 0.2, 0.36, 0.3, 0.1))):
        length = int(rng.choice(LENGTHS))
        shape += (length if math.prod(shape) * length <= LARGEST else 2,)
    return shape


def random_option(rng, name, format, shape):
    """A value for an option by its name, or None where there is none to try."""
    if name == "codebook":
        if rng.random() < 0.5:
            return str(rng.choice(("bnf", "nf")))
        return codebook(str(rng.choice(CODEBOOKS)), format.bits, int(rng.integers(3)))
    if name == "absmax":
        return str(rng.choice(("e4m4", "float16", "float32")))
    if name == "block" and format.block in BLOCKS:
        return int(rng.choice(BLOCKS))
    if name in ("double_quant", "symmetric"):
        return bool(rng.random() < 0.5)
    if name == "granularity":
        channel = "channel", int(rng.integers(-max(len(shape), 1), max(len(shape), 1)))
        return ("token", channel, channel, ("group", int(rng.choice((1, 3, 8, 32, 64)))))[rng.integers(4)]
    if name == "zero":
        return str(rng.choice(("none", "int", "float")))
    if name == "scale_dtype":
        return str(rng.choice(("float16", "bfloat16")))
    if name == "percentile":
        return float(rng.uniform(50, 100))
    if name == "scale":
        return float(rng.uniform(0.01, 1))
    return None


def random_format(rng, shape):
    """A registered format with some of its options chosen, and what a call of quantize brings beside it."""
    name = str(rng.choice(ENCODED))
    plain = kb.get_format(name)
    options = {}
    for option in (*base.option_names(base.format_factory(name)), *plain.takes):
        value = random_option(rng, option, plain, shape) if rng.random() < 0.4 else None
        if value is not None:
            options[option] = value
    if not options:
        return plain, {}
    try:
        chosen = base.resolve(name, **options)
        kb.quantize(np.ones(fitting(plain, shape), np.float32), chosen)
        return chosen
    except FormatError:  # options that exclude each other, or do not go with the shape
        return plain, {}


class State:
    """A compressed array, the host array that it decodes to, and what was done to get there.

    Parameters
    ----------
    q : QuantizedArray
        On the device under test.
    y : numpy.ndarray
        What NumPy says it decodes to.
    format : Format
        What other arrays are quantized with that join it.
    """

    def __init__(self, q, y, format, history):
        self.q, self.y, self.format, self.history = q, y, format, history


def random_numbers(rng, shape, dtype):
    kind = "normal" if rng.random() < 0.6 else str(rng.choice(KINDS))
    with np.errstate(over="ignore", invalid="ignore"):
        return make(kind, math.prod(shape), dtype, int(rng.integers(1000))).reshape(shape)


def begin(rng, xp):
    shape, dtype = random_shape(rng), DTYPES[rng.integers(len(DTYPES))]
    format = random_format(rng, shape)
    shape = fitting(format[0], shape)
    history = [f"quantize({dtype}{list(shape)}, {format!r})"]
    x = random_numbers(rng, shape, dtype)
    try:
        q = kb.quantize(xp.asarray(x), format)
    except FormatError:
        if "granularity" not in format[0].options():  # only these may not go with a shape
            raise
        return None
    y = host(q.dequantize())
    if xp is not np:
        here = kb.quantize(x, format)
        if not same(here.dequantize(), y):
            raise Fault("NumPy and CuPy quantize to different values")
    return State(q, y, format, history)


# ---- steps: (what ours gives, what NumPy gives, whether ours may refuse what NumPy does) -----------------------------


def random_key(rng, length):
    """An index along axis 0, seldom a wrong one."""
    kind = rng.integers(8)
    if kind == 0:
        return int(rng.integers(-length - 1, length + 1))
    if kind == 1:
        return np.int64(rng.integers(-length, length)) if length else slice(None)
    if kind <= 3:
        ends = [None if rng.random() < 0.3 else int(rng.integers(-length - 2, length + 3)) for _ in range(2)]
        return slice(*ends, [None, 1, 2, 3, -1, -2][rng.integers(6)])
    if kind == 4:
        return rng.random(length + (rng.random() < 0.05)) < rng.choice((0, 0.5, 1))
    return random_ids(rng, length)


def random_ids(rng, length):
    shape = [(), (0,), (1,), (3,), (5,), (2, 2), (1, 3)][rng.integers(7)]
    wrong = rng.random() < 0.05
    if not length and not wrong:
        shape = (0,)
    ids = rng.integers(-length - wrong, max(length + wrong, 1 - length), shape)
    if rng.random() < 0.3:
        return ids.tolist()
    return ids.astype(rng.choice(("int64", "int32", "int16")))


def cut_freely(q, key):
    """Whether the contract of the format lets this index cut its planes."""
    format = q.format
    if not format.rows_are_blocks(q.shape):
        return False
    if not q.lead and getattr(format, "double_quant", False):  # absmax of 256 blocks are stored together
        return math.prod(q.shape[1:]) // format.block % 256 == 0 or (isinstance(key, slice) and key == slice(None))
    return bool(q.lead) or not moves_axes(q, 1 if isinstance(key, slice) else np.ndim(key))


def moves_axes(q, ndim):
    """Whether indices of so many axes move one that scales belong to, or leave a vector's scales without one."""
    granularity = q.format.options().get("granularity", "tensor")
    return ndim != 1 and ("channel" in granularity or (granularity != "tensor" and q.ndim == 1))


def index(rng, state):
    q, y = state.q, state.y
    key = random_key(rng, len(y) if y.ndim else 1)
    state.history.append(f"[{key!r}]")
    return lambda: q[key], lambda: y[np.asarray(key, int) if np.size(key) == 0 else key], not cut_freely(q, key)


def take(rng, state):
    """Rows decoded: not another compressed array, so the chain goes on with the one it had."""
    q, y = state.q, state.y
    ids = random_ids(rng, len(y) if y.ndim else 1)
    dtype = DTYPES[rng.integers(4)] if rng.random() < 0.3 else None
    state.history.append(f"take({ids!r}, dtype={dtype})")
    found = y if dtype is None else host(q.dequantize(dtype=dtype))
    allowed = not q.format.rows_are_blocks(q.shape) or moves_axes(q, np.ndim(ids))
    return lambda: kb.take(q, ids, dtype=dtype), lambda: found[np.asarray(ids, int)], allowed


def reshape(rng, state):
    q, y = state.q, state.y
    if rng.random() < 0.1:
        shape = random_shape(rng)
    else:  # lengths merged and split
        factors = [length for length in y.shape if length != 1] or [1]
        shape = []
        for length in factors:
            divisors = [d for d in (2, 3, 4, 8, 32) if length and length % d == 0]
            if divisors and rng.random() < 0.4:
                d = int(rng.choice(divisors))
                shape += [d, length // d] if rng.random() < 0.5 else [length // d, d]
            elif shape and rng.random() < 0.4:
                shape[-1] *= length
            else:
                shape.append(length)
        if y.size and rng.random() < 0.2:
            shape[rng.integers(len(shape))] = -1
        shape = tuple(shape)
    state.history.append(f"reshape({shape})")
    # Others know blocks of the flat array.
    whole = q.lead or "granularity" in q.format.options() or isinstance(q.format, BlockFormat)
    return lambda: q.reshape(shape), lambda: y.reshape(shape), bool(whole)


def beside(rng, state):
    """An array that can join the one of `state`: a copy, itself, or other numbers in the same format."""
    kind = rng.integers(3)
    if kind == 0 or state.format[0] != state.q.format:
        return state.q.copy(), state.y
    if kind == 1:
        return state.q, state.y
    xp = type(next(iter(state.q.planes.values())))
    x = random_numbers(rng, state.y.shape, state.y.dtype)
    q = kb.quantize(x, state.format)
    q = q if xp is np.ndarray else q.to_device(state.q.device)
    return q, q.get().dequantize()


def stack(rng, state):
    members = [(state.q, state.y), *(beside(rng, state) for _ in range(rng.integers(3)))]
    members = [members[i] for i in rng.permutation(len(members))]
    state.history.append(f"stack of {len(members)}")
    qs, ys = zip(*members, strict=True)
    return lambda: kb.stack(qs), lambda: np.stack(ys), True


def concatenate(rng, state):
    q, y = state.q, state.y
    if rng.random() < 0.5 and y.ndim and cut_freely(q, slice(0)):  # parts of itself
        cuts = sorted(int(cut) for cut in rng.integers(0, len(y) + 1, rng.integers(1, 3)))
        ends = [0, *cuts, len(y)]
        members = [(q[a:b], y[a:b]) for a, b in itertools.pairwise(ends)]
        state.history.append(f"concatenate of parts {ends}")
    else:
        members = [(q, y), *(beside(rng, state) for _ in range(rng.integers(3)))]
        state.history.append(f"concatenate of {len(members)}")
    qs, ys = zip(*members, strict=True)
    return lambda: kb.concatenate(qs), lambda: np.concatenate(ys), True


def again(rng, state):
    """The same array by another way."""
    q, y = state.q, state.y
    ways = {
        "copy": q.copy,
        "copy.copy": lambda: copy.copy(q),
        "deepcopy": lambda: copy.deepcopy(q),
        "pickle": lambda: pickle.loads(pickle.dumps(q)),
        "config": lambda: kb.QuantizedArray.from_config(json.loads(json.dumps(q.config())), q.planes),
        "constructor": lambda: kb.QuantizedArray(q.format, q.planes, q.shape, q.dtype),
        "get": lambda: q.get().to_device(q.device),
        "file": lambda: through_a_file(q),
    }
    way = str(rng.choice(list(ways)))
    state.history.append(way)
    return ways[way], lambda: y, False


def through_a_file(q):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.safetensors"
        kb.io.save(path, {"q": q})
        return kb.io.load(path)["q"].copy().to_device(q.device)


def overwrite(rng, state):
    """``out=`` of a part: refused, or the other rows stay as they are."""
    q, y, format = state.q, state.y, state.format
    first, last = sorted(int(end) for end in rng.integers(0, len(y) + 1, 2)) if y.ndim else (0, 0)
    if rng.random() < 0.3 and first < last:
        last = first + 1
    key = slice(first, last)
    if last == first + 1 and rng.random() < 0.7:
        key = first
    state.history.append(f"quantize(out=q[{key}])")
    xp = np if isinstance(next(iter(q.planes.values())), np.ndarray) else sys.modules["cupy"]

    def ours():
        part = q[key]
        x = random_numbers(rng, part.shape, y.dtype)
        found = kb.quantize(xp.asarray(x), format, out=part)
        alone = x.reshape(part.members, *x.shape[part.lead :])  # members of a stack have scales of their own
        wanted = [kb.quantize(each, format).dequantize() for each in alone]
        if wanted and not same(host(found.dequantize()), np.stack(wanted).reshape(x.shape)):
            raise Fault("out= holds other values than a new array")
        now = host(q.dequantize())
        if not (same(now[:first], y[:first]) and same(now[last:], y[last:])):
            raise Fault("rows that are no part of out= were changed")
        state.y = now
        return q

    return ours, lambda: state.y, True


STEPS = {
    index: 4,
    take: 2,
    reshape: 3,
    stack: 2,
    concatenate: 2,
    again: 2,
    overwrite: 1,
}


def step(rng, state, outcomes):
    """Do one step; the state behind it, or None where both refuse."""
    kind = list(STEPS)[rng.choice(len(STEPS), p=np.array(list(STEPS.values())) / sum(STEPS.values()))]
    ours, theirs, may_refuse = kind(rng, state)
    found = refusal = None
    try:
        found = ours()
    except (*REFUSALS, DeviceError) as error:
        refusal = error
    try:
        wanted = theirs()
    except REFUSALS:
        if refusal is None:
            raise Fault("NumPy refuses this step") from None
        outcomes[f"{kind.__name__} refused by both"] += 1
        return state
    if refusal is not None:
        if not (may_refuse and isinstance(refusal, FormatError)) and state.y.ndim:
            raise refusal
        outcomes[f"{kind.__name__} refused"] += 1
        return state
    outcomes[kind.__name__] += 1
    if kind is take:
        if not same(host(found), wanted):
            raise Fault("other values than NumPy's")
        return state
    look_at(found, wanted)
    return State(found, wanted, state.format, state.history)


def look_at(q, y):
    """Every array is one that its own constructor takes, and decodes to the numbers of `y`."""
    kb.QuantizedArray(q.format, q.planes, q.shape, q.dtype)
    if (q.shape, q.ndim, q.size, q.dtype) != (y.shape, y.ndim, y.size, y.dtype):
        raise Fault(f"shape {q.shape} of {q.dtype}; NumPy has {y.shape} of {y.dtype}")
    if not same(host(q.dequantize()), y):
        raise Fault("other values than NumPy's")


# ---- products --------------------------------------------------------------------------------------------------------


def product(rng, state, xp, outcomes):
    """A product with the array that a chain ended with, in the range where rounding explains the error."""
    q = state.q
    w = host(q.dequantize(dtype="float64"))
    largest = np.abs(w).max(initial=0)
    if not 2 <= w.ndim <= 3 or not 1e-3 < largest < 1e3:
        return
    dtype = DTYPES[rng.integers(len(DTYPES))]
    tokens, k = int(rng.integers(5)), w.shape[-1]

    def numbers(*shape):
        return rng.standard_normal(shape).astype(dtype)

    x, bias, order = numbers(*(tokens, k)[rng.integers(2) if tokens else 0 :]), None, "linear"
    if w.ndim == 2 and rng.random() < 0.3:
        order, x = "q @ x", numbers(k, tokens)
        state.history.append(f"q @ {dtype}{list(x.shape)}")
        y = q @ xp.asarray(x)
        wanted, magnitude = w @ x.astype(np.float64), np.abs(w) @ np.abs(x.astype(np.float64))
    elif w.ndim == 2:
        bias = numbers(len(w)) if rng.random() < 0.5 else None
        state.history.append(f"linear({dtype}{list(x.shape)}, bias={bias is not None})")
        y = kb.linear(xp.asarray(x), q, None if bias is None else xp.asarray(bias))
        wanted, magnitude = x.astype(np.float64) @ w.T, np.abs(x.astype(np.float64)) @ np.abs(w.T)
        if bias is not None:
            wanted, magnitude = wanted + bias.astype(np.float64), magnitude + np.abs(bias.astype(np.float64))
    elif rng.random() < 0.3:
        order, x = "x @ q", numbers(tokens, w.shape[1])
        state.history.append(f"{dtype}{list(x.shape)} @ q")
        y = xp.asarray(x) @ q
        wanted, magnitude = x.astype(np.float64) @ w, np.abs(x.astype(np.float64)) @ np.abs(w)
    else:
        order = "linear_grouped"
        y, wanted, magnitude = grouped(rng, state, xp, w, numbers)
        if y is None:
            outcomes["linear_grouped refused"] += 1
            return
    depth = w.shape[1] if order == "x @ q" else k
    rounding = float(ml_dtypes.finfo(dtype).eps)
    allowed = magnitude * (2.0**-50 if dtype == np.float64 else 2.0**-22) * (depth + 8)
    if xp is not np:  # there weights may be rounded to the dtype of the tokens, the smallest ones to a fixed step
        step = 2.0**-24 if dtype == np.float16 else 0.0
        allowed = allowed + magnitude * rounding + step * depth * float(np.abs(x).max(initial=0))
    allowed = allowed + np.abs(wanted) * rounding + 2.0**-24
    y = host(y)
    if y.dtype != dtype or y.shape != wanted.shape:
        raise Fault(f"{order} is {y.dtype}{list(y.shape)}; it must be {dtype}{list(wanted.shape)}")
    error = np.abs(y.astype(np.float64) - wanted)
    if not (error <= allowed).all():
        raise Fault(f"{order} is off by {error.max():.3g}, where {allowed.flat[np.argmax(error)]:.3g} is allowed")
    outcomes[order] += 1


def grouped(rng, state, xp, w, numbers):
    """`linear_grouped`, its value in float64 and what rounding multiplies; (None,) * 3 where it is refused."""
    experts, n, k = w.shape
    tokens, slots = int(rng.integers(5)), int(rng.integers(1, 3))
    x = numbers(tokens, k) if rng.random() < 0.5 else numbers(tokens, slots, k)
    ids = rng.integers(-1, experts + 1, (tokens, slots))
    weights = rng.random((tokens, slots)).astype(np.float32) if rng.random() < 0.5 else None
    state.history.append(f"linear_grouped({x.dtype}{list(x.shape)}, {ids.tolist()}, weights={weights is not None})")
    try:
        y = kb.linear_grouped(xp.asarray(x), state.q, ids, None if weights is None else xp.asarray(weights))
    except FormatError:
        if state.q.format.rows_are_blocks(state.q.shape):
            raise
        return None, None, None
    wide = np.broadcast_to(x if x.ndim == 3 else x[:, None], (tokens, slots, k)).astype(np.float64)
    wanted, magnitude = np.zeros((2, tokens, slots, n))
    for t, s in np.ndindex(ids.shape):
        if 0 <= ids[t, s] < experts:
            wanted[t, s] = w[ids[t, s]] @ wide[t, s]
            magnitude[t, s] = np.abs(w[ids[t, s]]) @ np.abs(wide[t, s])
    if weights is not None:
        factor = weights[..., None].astype(np.float64)
        wanted, magnitude = (wanted * factor).sum(1), (magnitude * factor).sum(1) * 2
    return y, wanted, magnitude


# ---- runs ------------------------------------------------------------------------------------------------------------


def run(seed, n, xp=np):
    """Run n chains of a seed; what became of the steps, and descriptions of failures."""
    outcomes, failures = Counter(), []
    # Weights of few elements are decoded in parts, too, where they have more than 256 rows.
    with unittest.mock.patch.object(sys.modules["kbitcupy.products.host"], "_CHUNK", 1):
        for number in range(n):
            rng = np.random.default_rng([seed, number])
            state, history = None, ["(nothing)"]
            try:
                state = begin(rng, xp)
                if state is None:
                    outcomes["granularity refused"] += 1
                    continue
                history = state.history
                for _ in range(rng.integers(MOST_STEPS + 1)):
                    state = step(rng, state, outcomes)
                product(rng, state, xp, outcomes)
            except Exception as error:
                text = f"{type(error).__name__}: {str(error)[:300]}"
                failures.append(f"chain {number} of seed {seed}: {' -> '.join(history)}: {text}")
    return outcomes, failures


def main(n, seed=0, library="numpy"):
    """Run n chains on a library and print what became of them; whether there were failures."""
    xp = __import__(library)
    began = time.perf_counter()
    outcomes, failures = run(seed, n, xp)
    print(f"{n} chains, seed {seed}, {library}: {len(failures)} failures, {time.perf_counter() - began:.0f} s")
    print(*(f"{count:8} {outcome}" for outcome, count in sorted(outcomes.items())), sep="\n")
    print(*failures[:20], sep="\n")
    return bool(failures)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(main(*map(int, arguments[:2] or [20_000]), *arguments[2:]))
