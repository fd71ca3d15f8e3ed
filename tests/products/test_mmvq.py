"""kb.gguf's products: the cases of baracuda's MMVQ, staged MMVQ and MMVQ of experts, and what theirs lack.

Their tolerances are kept or tightened: products of floats are within 1e-5 of the sum of the terms' magnitudes.
"""

import ml_dtypes
import numpy as np
import pytest
from gguf_planes import planes_of

import kbitcupy as kb
from kbitcupy.array import QuantizedArray
from kbitcupy.errors import FormatError

#: The formats that baracuda has; and all that are for weights.
ELEVEN = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q8_k")
STAGED = ELEVEN[:-1]
MORE = ("iq4_nl", "iq4_xs", "mxfp4", "nvfp4", "tq1_0", "tq2_0", "iq1_s", "iq1_m", "iq2_xxs", "iq2_s", "iq3_s")
HALF = [np.dtype("float16"), np.dtype(ml_dtypes.bfloat16)]
FLOATS = [*HALF, np.dtype("float32")]


def host(array):
    return array if isinstance(array, np.ndarray) else array.get()


def q8_0(d, codes):
    """A block of 32."""
    return np.concatenate([np.array([d], np.float16).view(np.uint8), np.array(codes, np.int8).view(np.uint8)])


def weight(name, shape, xp=np, seed=0):
    format = kb.get_format(name)
    planes = {plane: xp.asarray(array) for plane, array in planes_of(format, shape, seed).items()}
    return QuantizedArray(format, planes, shape, "float32")


def decoded(w):
    return host(w.dequantize(dtype="float32")).astype(np.float64)


def assert_sums(found, w, y, gate=1.0):
    """Within 1e-5 of the terms' magnitudes, and the rounding of the dtype."""
    y = host(y).astype(np.float64)
    wanted, terms = y @ w.swapaxes(-1, -2) * gate, np.abs(y) @ np.abs(w).swapaxes(-1, -2) * np.abs(gate)
    eps = float(ml_dtypes.finfo(found.dtype).eps) if found.dtype != np.float32 else 0.0
    assert (np.abs(host(found).astype(np.float64) - wanted) <= 1e-5 * terms + eps / 2 * 1.01 * np.abs(wanted)).all()


# ---- one vector ------------------------------------------------------------------------------------------------------


def test_q8_0_two_rows(xp):
    """Rows of d = .5 and .25 with codes i and i + 1, y = i."""
    rows = [q8_0(0.5, range(32)), q8_0(0.25, range(1, 33))]
    y = xp.arange(32, dtype=xp.float32)
    found = kb.gguf.mmvq(xp.asarray(np.concatenate(rows)), y, format="q8_0", shape=(2, 32))
    i = np.arange(32)
    np.testing.assert_array_equal(host(found), [0.5 * (i * i).sum(), 0.25 * ((i + 1) * i).sum()])


def test_q8_k_two_rows(xp):
    w = weight("q8_k", (2, 256), xp)
    y = xp.arange(256, dtype=xp.float32)
    assert_sums(kb.gguf.mmvq(w, y), decoded(w), y)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", [*ELEVEN, *MORE])
def test_every_format(xp, name, dtype):
    w = weight(name, (5, 512), xp)
    y = xp.asarray(np.random.default_rng(0).standard_normal(512).astype(np.float32).astype(dtype))
    assert_sums(kb.gguf.mmvq(w, y), decoded(w), y)


@pytest.mark.parametrize("name", ["q8_0", "q4_1", "mxfp4", "q8_k", "q6_k"])
def test_rows_of_one_block(xp, name):
    """K of one block, also one of 32, and a single row."""
    k = kb.gguf.block_size(name)
    for rows in (1, 3):
        w, y = weight(name, (rows, k), xp), xp.asarray(np.linspace(-1, 2, k, dtype=np.float32))
        assert_sums(kb.gguf.mmvq(w, y), decoded(w), y)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ["q8_0", "q4_k", "q8_k", "q5_0"])
def test_strides_of_y(xp, name, dtype):
    """1, 2, 0 (a number that is broadcast) and -1."""
    w = weight(name, (4, 256), xp)
    numbers = xp.asarray(np.random.default_rng(0).standard_normal(512).astype(np.float32).astype(dtype))
    for y in (numbers[:256], numbers[::2], xp.broadcast_to(numbers[3:4], (256,)), numbers[255::-1]):
        assert_sums(kb.gguf.mmvq(w, y), decoded(w), y)


@pytest.mark.parametrize("offset", [0, 1, 2, 3, 18, 144 * 4])
@pytest.mark.parametrize("name", ["q4_0", "q8_0", "q4_k", "q6_k", "mxfp4"])
def test_a_matrix_within_a_buffer(xp, name, offset):
    """Blocks from any byte on of a buffer that is longer."""
    w = weight(name, (6, 256))
    blocks = kb.gguf.to_blocks(w)
    buffer = np.full(offset + blocks.size + 77, 0xA5, np.uint8)
    buffer[offset : offset + blocks.size] = blocks.reshape(-1)
    y = xp.asarray(np.random.default_rng(0).standard_normal(512).astype(np.float32))[::2]
    found = kb.gguf.mmvq(xp.asarray(buffer), y, format=name, shape=(6, 256), offset=offset)
    assert_sums(found, decoded(w), y)


def test_out_and_nothing(xp):
    w, y = weight("q5_k", (6, 256), xp), xp.ones(256, xp.float32)
    out = xp.full(6, np.nan, xp.float32)
    assert kb.gguf.mmvq(w, y, out=out) is out
    assert (host(out) == host(kb.gguf.mmvq(w, y))).all()
    empty = xp.zeros(0, xp.uint8)
    assert kb.gguf.mmvq(empty, y, format="q5_k", shape=(0, 256)).shape == (0,)
    assert (host(kb.gguf.mmvq(empty, y[:0], format="q5_k", shape=(3, 0))) == 0).all()


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"shape": (2, 48)}, FormatError, "whole blocks"),
        ({"shape": (3, 32)}, FormatError, "end at byte 102"),
        ({"offset": 5}, FormatError, "raw holds 72 bytes"),
        ({"offset": -1}, FormatError, "must not be negative"),
        ({"offset": 1.5}, TypeError, "counted in bytes"),
        ({"y": np.ones(31, np.float32)}, ValueError, r"needs \(32,\)"),
        ({"y": np.ones((1, 32), np.float32)}, ValueError, r"needs \(32,\)"),
        ({"y": np.ones(32)}, TypeError, "y is float64"),
        ({"y": np.ones(32, np.int32)}, TypeError, "y"),
        ({"out": np.ones(3, np.float32)}, ValueError, "out"),
        ({"format": None}, TypeError, "need their format"),
        ({"format": "nf4"}, FormatError, "formats of GGUF"),
    ],
)
def test_refused(change, error, text):
    given = {"format": "q8_0", "shape": (2, 32), "y": np.ones(32, np.float32), **change}
    with pytest.raises(error, match=text):
        kb.gguf.mmvq(np.zeros(72, np.uint8), given.pop("y"), **given)


def test_arrays_have_a_format_of_their_own():
    w = weight("q8_0", (2, 32))
    with pytest.raises(TypeError, match="leave format, shape and offset away"):
        kb.gguf.mmvq(w, np.ones(32, np.float32), format="q8_0")
    with pytest.raises(FormatError, match="formats of GGUF"):
        kb.gguf.mmvq(kb.quantize(np.ones((2, 32), np.float32), "kbit4"), np.ones(32, np.float32))
    with pytest.raises(FormatError, match=r"it must be \[rows, K\]"):
        kb.gguf.mmvq(weight("q8_0", (2, 2, 32)), np.ones(32, np.float32))


# ---- vectors that are quantized --------------------------------------------------------------------------------------


def staged(x):
    """What is multiplied, by its definition: float64."""
    x = host(x).astype(np.float32)
    blocks = x.reshape(len(x), -1, 32)
    scale = np.abs(blocks).max(2, keepdims=True) / np.float32(127)
    with np.errstate(divide="ignore", invalid="ignore"):
        q = blocks * (np.float32(1) / scale)
    q = np.where(scale == 0, 0, np.trunc(q + np.copysign(np.float32(0.5), q)))
    return (q.astype(np.float64) * scale).reshape(x.shape)


def assert_staged(found, w, x, limit=0.05):
    """Equal to the product of what the vectors stand for, and close to that of the floats."""
    w, exact, found = decoded(w), staged(x), host(found).astype(np.float64)
    terms = np.abs(exact) @ np.abs(w).T
    assert (np.abs(found - exact @ w.T) <= 2.0**-20 * terms).all()
    floats = host(x).astype(np.float64) @ w.T
    assert np.abs(found - floats).max() <= limit * np.abs(floats).max()


@pytest.mark.parametrize("m", [1, 2, 3, 4, 7, 8, 9])
def test_staged_q8_0(xp, m):
    blocks = [
        q8_0(0.05 + 0.01 * (r + b), [(7 * r + 13 * b + j) % 17 - 8 for j in range(32)])
        for r in range(4)
        for b in range(2)
    ]
    y = np.array([[((11 * i + 3 * c) % 20) * 0.07 - 0.5 for c in range(64)] for i in range(m)], np.float32)
    raw = xp.asarray(np.concatenate(blocks))
    found = kb.gguf.mmvq_staged(raw, xp.asarray(y), format="q8_0", shape=(4, 64))
    w = kb.gguf.from_blocks(np.concatenate(blocks), "q8_0", (4, 64))
    assert found.dtype == np.float32 and found.shape == (m, 4)
    np.testing.assert_allclose(host(found), y.astype(np.float64) @ decoded(w).T, rtol=0.05, atol=0.05)
    assert_staged(found, w, y)


@pytest.mark.parametrize("m", [1, 8])
@pytest.mark.parametrize("name", STAGED)
def test_staged_bytes(xp, name, m):
    """Bytes (31 i + 17) mod 113, y = (i mod 23) * .07 - .5, beside the product of floats."""
    k, rows = 4 * max(kb.gguf.block_size(name), 64), 8
    size = k // kb.gguf.block_size(name) * kb.gguf.type_size(name) * rows
    raw = ((31 * np.arange(size) + 17) % 113).astype(np.uint8)
    w = kb.gguf.from_blocks(raw, name, (rows, k))
    y = ((np.arange(m * k) % 23) * 0.07 - 0.5).astype(np.float32).reshape(m, k)
    floats = np.stack([kb.gguf.mmvq(w, row) for row in y])
    found = kb.gguf.mmvq_staged(xp.asarray(raw), xp.asarray(y), format=name, shape=(rows, k))
    assert np.abs(host(found) - floats).max() < 0.05 * np.abs(floats).max()
    assert_staged(found, w, y)


@pytest.mark.parametrize("name", MORE)
def test_staged_in_more_formats(xp, name):
    w = weight(name, (33, 512), xp)
    x = xp.asarray(np.random.default_rng(0).standard_normal((5, 512)).astype(np.float32))
    assert_staged(kb.gguf.mmvq_staged(w, x), w, x)
    assert (host(kb.gguf.mmvq_staged(w, x)) == host(kb.gguf.mmvq_staged(w, x))).all()


@pytest.mark.parametrize("name", ["q8_0", "q5_1", "q4_k"])
def test_staged_large_activations(xp, name):
    """Sums and scales that a half cannot hold; zeros; halves away from zero."""
    w = weight(name, (4, 256), xp)
    x = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)
    x[0] = np.abs(x[0]) * np.float32(1e6)
    x[1] *= np.float32(1e9)
    x[2] = 0
    x[3] = np.tile(np.float32([127, 0.5, -0.5, 1.5]), 64)
    found = kb.gguf.mmvq_staged(w, xp.asarray(x))
    assert np.isfinite(host(found)).all() and (host(found)[2] == 0).all()
    exact = staged(x)
    assert (exact[3, :4] == [127, 1, -1, 2]).all()
    assert (np.abs(host(found) - exact @ decoded(w).T) <= 2.0**-20 * (np.abs(exact) @ np.abs(decoded(w)).T)).all()


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", ["q8_0", "q5_k"])
def test_staged_dtypes(xp, name, dtype):
    w = weight(name, (6, 256), xp)
    x = xp.asarray(np.random.default_rng(0).standard_normal((3, 256)).astype(np.float32).astype(dtype))
    single = kb.gguf.mmvq_staged(w, x)
    own = kb.gguf.mmvq_staged(w, x, dtype=dtype)
    assert single.dtype == np.float32 and own.dtype == dtype
    eps = float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(host(own).astype(np.float32), host(single), rtol=eps, atol=1e-5)
    for out in (xp.empty((3, 6), dtype), xp.empty((3, 6), np.float32)):
        assert kb.gguf.mmvq_staged(w, x, out=out) is out
        assert (host(out) == host(own if out.dtype == dtype else single)).all()


def test_staged_refused_and_nothing():
    x = np.ones((2, 256), np.float32)
    for name in ("q8_k", "q8_1"):
        with pytest.raises(FormatError, match="a format of activations"):
            kb.gguf.mmvq_staged(weight(name, (2, 256)), x)
    with pytest.raises(ValueError, match=r"needs \(M, 256\)"):
        kb.gguf.mmvq_staged(weight("q8_0", (2, 256)), x[0])
    with pytest.raises(ValueError, match="out"):
        kb.gguf.mmvq_staged(weight("q8_0", (2, 256)), x, out=np.ones((2, 3), np.float32))
    assert kb.gguf.mmvq_staged(weight("q8_0", (2, 256)), x[:0]).shape == (0, 2)


# ---- experts ---------------------------------------------------------------------------------------------------------


def by_hand(w, y, tokens, offsets, gates):
    """float64: the reference, dispatch after dispatch; and the magnitudes of the terms."""
    y, out, terms = host(y).astype(np.float64), 0, 0
    out, terms = np.zeros((len(y), w.shape[1])), np.zeros((len(y), w.shape[1]))
    for e in range(len(w)):
        for i in range(offsets[e], offsets[e + 1]):
            t, gate = tokens[i], 1.0 if gates is None else float(gates[i])
            out[t] += gate * (w[e] @ y[t])
            terms[t] += abs(gate) * (np.abs(w[e]) @ np.abs(y[t]))
    return out, terms


def assert_experts(found, w, y, tokens, offsets, gates=None, rounding=0.0):
    wanted, terms = by_hand(w, y, tokens, offsets, gates)
    assert (np.abs(host(found).astype(np.float64) - wanted) <= (1e-5 + rounding) * terms).all()


def four_experts():
    """E = 4, 2 rows, K = 64: d = .1 (e + 1) + .05 r + .01 b, codes (i + 2 e + r + 3 b) mod 127 - 63."""
    blocks = [
        q8_0(0.1 * (e + 1) + 0.05 * r + 0.01 * b, [(i + 2 * e + r + 3 * b) % 127 - 63 for i in range(32)])
        for e in range(4)
        for r in range(2)
        for b in range(2)
    ]
    y = np.array([[0.1 * t + 0.01 * c for c in range(64)] for t in range(4)], np.float32)
    return np.concatenate(blocks), y


@pytest.mark.parametrize("gated", [False, True])
def test_one_expert_a_token(xp, gated):
    raw, y = four_experts()
    w = decoded(kb.gguf.from_blocks(raw, "q8_0", (4, 2, 64)))
    tokens, offsets = np.array([2, 0, 3, 1], np.int32), np.array([0, 1, 2, 3, 4], np.int32)
    gates = np.float32([0.5, 2, -1, 0.25]) if gated else None
    given = {"sorted_token_ids": xp.asarray(tokens), "expert_offsets": xp.asarray(offsets)}
    buffer = np.concatenate([np.zeros(3, np.uint8), raw, raw])
    found = kb.gguf.mmvq_experts(
        xp.asarray(buffer),
        xp.asarray(y),
        **given,
        topk_weights=None if gates is None else xp.asarray(gates),
        format="q8_0",
        shape=(4, 2, 64),
        offset=3,
    )
    assert_experts(found, w, y, tokens, offsets, gates)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_two_experts_a_token(xp, dtype, gated):
    """T = 3, top_k = 2, ids [0, 1, 2, 0, 1, 2], offsets [0, 3, 6]: both ways give the same."""
    w = weight("q8_0", (2, 5, 64), xp)
    y = xp.asarray(np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32).astype(dtype))
    tokens, offsets = np.array([0, 1, 2, 0, 1, 2]), np.array([0, 3, 6])
    gates = np.random.default_rng(1).random(6, np.float32) if gated else None
    eps = float(ml_dtypes.finfo(dtype).eps) if dtype != np.float32 else 0.0
    found = kb.gguf.mmvq_experts(
        w,
        y,
        sorted_token_ids=xp.asarray(tokens),
        expert_offsets=xp.asarray(offsets),
        topk_weights=None if gates is None else xp.asarray(gates),
    )
    assert found.dtype == dtype
    assert_experts(found, decoded(w), y, tokens, offsets, gates, eps)
    slots = None if gates is None else xp.asarray(gates.reshape(2, 3).T.copy())
    other = kb.gguf.mmvq_experts(w, y, expert_ids=xp.asarray([[0, 1]] * 3), topk_weights=slots)
    assert_experts(other, decoded(w), y, tokens, offsets, gates, eps)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", [*ELEVEN, "iq4_xs", "iq2_xs", None])
def test_every_format_of_experts(xp, name, dtype):
    """Dispatches in any number, tokens of none, empty experts, and none at all; None: plain weights of y's dtype."""
    rng = np.random.default_rng(0)
    if name is None:
        plain = rng.standard_normal((5, 7, 256)).astype(np.float32).astype(dtype)
        w, numbers = xp.asarray(plain), plain.astype(np.float64)
    else:
        w = weight(name, (5, 7, 256), xp)
        numbers = decoded(w)
    y = xp.asarray(rng.standard_normal((6, 256)).astype(np.float32).astype(dtype))
    tokens, offsets = rng.integers(0, 5, 300).astype(np.int32), np.array([0, 120, 120, 200, 299, 300], np.int32)
    eps = float(ml_dtypes.finfo(dtype).eps) if dtype != np.float32 else 0.0
    for count in (300, 9, 0):
        own = np.minimum(offsets, count)
        given = {"sorted_token_ids": xp.asarray(tokens[:count]), "expert_offsets": xp.asarray(own)}
        out = xp.full((6, 7), np.nan, dtype)  # what it holds does not count
        assert kb.gguf.mmvq_experts(w, y, **given, out=out) is out
        assert_experts(out, numbers, y, tokens, own, None, 3 * eps)
        assert (host(out)[5] == 0).all(), "a token that goes to no expert"
        again = kb.gguf.mmvq_experts(w, y, **given)
        assert (host(again) == host(out)).all(), "the same bits"


def test_dispatches_of_no_expert_and_no_token(xp):
    w, y = weight("q8_0", (2, 3, 32), xp), xp.ones((2, 32), np.float32)
    tokens, offsets = xp.asarray([1, 0, 7, 1]), xp.asarray([1, 2, 3])  # the first and the last are of none, 7 is none
    found = host(kb.gguf.mmvq_experts(w, y, sorted_token_ids=tokens, expert_offsets=offsets))
    np.testing.assert_allclose(found[0], decoded(w)[0].sum(-1), rtol=1e-5)
    assert (found[1] == 0).all()
    assert (host(kb.gguf.mmvq_experts(w, y, expert_ids=xp.asarray([[-1], [2]]))) == 0).all()
    assert kb.gguf.mmvq_experts(w, y[:0], expert_ids=xp.zeros((0, 2), int)).shape == (0, 3)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"shape": (0, 2, 64)}, ValueError, "there must be an expert"),
        ({"shape": (4, 2, 48)}, FormatError, "whole blocks"),
        ({"shape": (5, 2, 64)}, FormatError, "raw holds"),
        ({"expert_offsets": [0, 4]}, ValueError, r"\(5,\) for 4 experts"),
        ({"expert_offsets": None}, ValueError, "sorted_token_ids with expert_offsets"),
        ({"expert_ids": [[0]] * 4}, ValueError, "not both"),
        ({"sorted_token_ids": [0.5] * 4}, TypeError, "integer array"),
        ({"topk_weights": [1.0] * 3}, ValueError, r"it must be \(4,\)"),
        ({"y": np.ones((4, 32), np.float32)}, ValueError, "need"),
        ({"y": np.ones(64, np.float32)}, ValueError, "need"),
        ({"out": np.ones((4, 3), np.float32)}, ValueError, "out"),
    ],
)
def test_refused_experts(change, error, text):
    raw, y = four_experts()
    given = {
        "format": "q8_0",
        "shape": (4, 2, 64),
        "sorted_token_ids": [0, 1, 2, 3],
        "expert_offsets": [0, 1, 2, 3, 4],
        "y": y,
        **change,
    }
    with pytest.raises(error, match=text):
        kb.gguf.mmvq_experts(raw, given.pop("y"), **given)


def test_refused_ids_and_plain_weights():
    w, y = weight("q8_0", (2, 3, 32)), np.ones((2, 32), np.float32)
    with pytest.raises(ValueError, match=r"it must be \(2, top_k\)"):
        kb.gguf.mmvq_experts(w, y, expert_ids=np.zeros((2, 0), int))
    with pytest.raises(TypeError, match="plain weights have the dtype of y"):
        kb.gguf.mmvq_experts(np.ones((2, 3, 32), np.float16), y, expert_ids=[[0], [1]])
    with pytest.raises(ValueError, match=r"plain weights are \[E, rows, K\]"):
        kb.gguf.mmvq_experts(np.ones((3, 32), np.float32), y, expert_ids=[[0], [1]])
