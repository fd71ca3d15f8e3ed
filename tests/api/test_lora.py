"""kbitcupy.lora: adapters beside compressed weights, their gradients and dropout, merging, and PEFT's files."""

import copy
import dataclasses
import json
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
from inputs import BFLOAT16, ENCODED

import kbitcupy as kb
from kbitcupy.errors import DeviceError, FileError, FormatError
from kbitcupy.lora import LoRA

DATA = Path(__file__).parent.parent / "data" / "peft"
DTYPES = [np.dtype("float16"), BFLOAT16, np.dtype("float32"), np.dtype("float64")]
# What 1 may be off after a rounding.
ULP = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
N, K = 24, 256


def host(array):
    return array if isinstance(array, np.ndarray) else array.get()


def normal(shape, dtype="float32", xp=np, seed=0):
    values = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return xp.asarray(values.astype(dtype))


def trained(shape=(N, K), r=4, alpha=6, dtype="float32", xp=np, **options):
    """An adapter whose B is not 0 any more."""
    a, b = normal((r, shape[1]), dtype, xp, 11), normal((shape[0], r), dtype, xp, 12)
    return LoRA(a, b, alpha, **options)


def exact(lora, x, w, bias=0.0, mask=None):
    """The forward in float64."""
    x, w, a, b = (host(one).astype(np.float64) for one in (x, w, lora.A, lora.B))
    seen = x if mask is None else np.where(host(mask), x, 0) / (1 - lora.dropout)
    return x @ w.T + bias + lora.scaling * (seen @ a.T @ b.T)


def raw(q):
    return {name: host(plane).tobytes() for name, plane in q.planes.items()}


# ---- numbers of peft-rs --------------------------------------------------------------------------------------------


def test_scaling():
    made = LoRA.init((16, 16), r=8, alpha=16)
    assert made.scaling == 2.0
    stabilized = LoRA.init((16, 16), r=8, alpha=16, rank_stabilized=True)
    assert stabilized.scaling == 16 / math.sqrt(8) and round(stabilized.scaling, 3) == 5.657


def test_num_parameters():
    assert LoRA.init((768, 768), r=8).num_parameters == 12288
    assert LoRA.init((64, 128), r=4).num_parameters == 4 * (64 + 128)


def test_defaults():
    made = LoRA.init((64, 128))
    assert (made.r, made.alpha, made.dropout, made.rank_stabilized, made.shape) == (8, 16, 0.0, False, (64, 128))
    assert made.A.shape == (8, 128) and made.B.shape == (64, 8)
    assert made.A.dtype == made.B.dtype == np.float32


def test_standard_init():
    """A has the variance 1 / K and B is 0: a new adapter changes nothing."""
    made = LoRA.init((64, 1024), r=64, rng=3)
    assert abs(made.A.var() * 1024 - 1) < 0.03 and abs(made.A.mean()) < 1e-3
    assert abs((made.A**4).mean() / made.A.var() ** 2 - 3) < 0.1  # normal
    assert not made.B.any()
    x, w = normal((3, 1024)), normal((64, 1024))
    assert np.array_equal(made.forward(x, base=x @ w.T), x @ w.T)


def test_kaiming_init_is_uniform():
    made = LoRA.init((64, 1024), r=64, rng=3, init="kaiming")
    assert 0.99 / 32 < np.abs(made.A).max() <= 1 / 32
    assert abs(made.A.var() * 3 * 1024 - 1) < 0.02


def test_init_is_the_generators():
    first, again = LoRA.init((8, 16), rng=5), LoRA.init((8, 16), rng=np.random.default_rng(5))
    assert np.array_equal(first.A, again.A)
    assert not np.array_equal(first.A, LoRA.init((8, 16), rng=6).A)
    assert not np.array_equal(LoRA.init((8, 16)).A, LoRA.init((8, 16)).A)


def test_init_beside_a_weight(xp):
    w = normal((8, 64), xp=xp)
    for weight in (w, kb.quantize(w, "kbit4")):
        made = LoRA.init(weight, r=2, dtype="bfloat16")
        assert made.shape == (8, 64) and made.A.dtype == BFLOAT16 and type(made.A) is type(w)


def test_merged_weight_gives_the_same_forward():
    made, x, w = trained(), normal((5, K)), normal((N, K))
    wanted = made.forward(x, base=x @ w.T)
    np.testing.assert_allclose(x @ made.merge(w).T, wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge_and_unmerge(dtype, xp):
    made, w = trained(xp=xp), normal((N, K), dtype, xp)
    merged = made.merge(w)
    wanted = host(w).astype(np.float64) + made.scaling * host(made.B).astype(np.float64) @ host(made.A)
    assert merged.dtype == dtype and merged.shape == w.shape
    error = np.abs(host(merged).astype(np.float64) - wanted)
    assert (error <= ULP[dtype.name] * np.abs(wanted) + (2e-5 if dtype != np.float64 else 1e-12)).all()
    back = host(made.unmerge(merged)).astype(np.float64)
    assert (np.abs(back - host(w).astype(np.float64)) <= 2 * ULP[dtype.name] * (np.abs(wanted) + 4) + 2e-5).all()
    assert np.array_equal(host(w), normal((N, K), dtype))  # its argument stays
    out = w.copy()
    assert made.merge(out, out=out) is out and (host(out) == host(merged)).all()


# ---- forward -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leading", [(), (1,), (5,), (2, 3), (2, 1, 3), (0,)], ids=str)
def test_any_leading_lengths(leading, xp):
    made = trained(xp=xp)
    q = kb.quantize(normal((N, K), xp=xp), "kbit4")
    x, bias = normal((*leading, K), xp=xp, seed=2), normal((N,), xp=xp, seed=3)
    y = made.forward(x, q, bias)
    assert y.shape == (*leading, N) and y.dtype == np.float32 and type(y) is type(x)
    np.testing.assert_allclose(host(y), exact(made, x, q.dequantize(), host(bias)), rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factors", DTYPES, ids=str)
def test_dtypes(dtype, factors, xp):
    """The result is rounded once where the base is, and once for the sum."""
    made = trained(dtype=factors, xp=xp, rank_stabilized=True)
    q = kb.quantize(normal((N, K), dtype, xp), "kbit5")
    x = normal((3, K), dtype, xp, 2)
    y = made.forward(x, q)
    assert y.dtype == dtype
    wanted = exact(made, x, q.dequantize(dtype="float64"))
    base = kb.linear(x, q)
    room = ULP[dtype.name] * (np.abs(wanted) + np.abs(host(base).astype(np.float64))) + 2e-5 * np.abs(wanted).max()
    assert (np.abs(host(y).astype(np.float64) - wanted) <= room).all()


@pytest.mark.parametrize("name", ENCODED)
def test_beside_every_format(name, xp):
    """The frozen bytes stay as they are, forward, backward and when the adapter takes a step."""
    q = kb.quantize(normal((N, K), xp=xp), name)
    before = raw(q)
    made = LoRA.init(q, r=4, rng=0)
    x, dy = normal((6, K), xp=xp, seed=2), normal((6, N), xp=xp, seed=3)
    for _ in range(2):
        _, da, db = made.backward(dy, x, q)
        made = dataclasses.replace(made, A=made.A - np.float32(1e-3) * da, B=made.B - np.float32(1e-3) * db)
    assert made.B.any() and raw(q) == before
    w = q.dequantize()
    np.testing.assert_allclose(host(made.forward(x, q)), exact(made, x, w), rtol=1e-4, atol=2e-3)
    a, b, g = (host(one).astype(np.float64) for one in (made.A, made.B, dy))
    wanted = g @ host(w) + made.scaling * g @ b @ a
    np.testing.assert_allclose(host(made.backward(dy, x, q)[0]), wanted, rtol=1e-4, atol=2e-3)


def test_base_instead_of_a_weight(xp):
    made, x = trained(xp=xp), normal((3, K), "float16", xp)
    q = kb.quantize(normal((N, K), xp=xp), "int8", granularity=("channel", 0))
    base = kb.linear(x, q, activations="int8")
    y = made.forward(x, q, base=base)
    side = made.forward(x)
    assert y.dtype == np.float16
    np.testing.assert_allclose(host(y), host(base).astype(np.float32) + host(side), rtol=2e-3, atol=2e-2)
    single = made.forward(x, base=base.astype(np.float32))
    assert single.dtype == np.float32
    assert np.array_equal(host(base), host(kb.linear(x, q, activations="int8")))  # its argument stays


def test_beside_bitnet(xp):
    """A meets the x that is not quantized; gradients go straight through to x, by the trits times their scale."""
    made, x = trained(xp=xp), normal((2, 3, K), xp=xp)
    q = kb.quantize(normal((N, K), xp=xp), "ternary")
    dy = normal((2, 3, N), xp=xp, seed=3)
    base = kb.bitnet.linear(x, q)
    y, dx = made.forward(x, q, base=base), made.backward(dy, x, q)[0]
    h = host(x).astype(np.float64) @ host(made.A).T
    np.testing.assert_allclose(host(y), host(base) + made.scaling * h @ host(made.B).T, rtol=1e-4, atol=2e-3)
    through = host(dy).astype(np.float64) @ host(q.dequantize())
    side = made.scaling * host(dy).astype(np.float64) @ host(made.B) @ host(made.A)
    np.testing.assert_allclose(host(dx), through + side, rtol=1e-4, atol=2e-3)


def test_out(xp):
    made, x = trained(xp=xp), normal((2, 3, K), xp=xp)
    q = kb.quantize(normal((N, K), xp=xp), "nf4")
    out = xp.full((2, 3, N), 7, np.float32)
    assert made.forward(x, q, out=out) is out
    assert np.array_equal(host(out), host(made.forward(x, q)))
    with pytest.raises(ValueError, match="out has shape"):
        made.forward(x, q, out=out[0])


def test_inputs_of_any_strides_and_byte_order():
    made = trained()
    x = normal((4, 2 * K))[:, ::2]
    wanted = made.forward(x.copy())
    np.testing.assert_allclose(made.forward(x), wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(made.forward(x.astype(">f4")), wanted, rtol=1e-5, atol=1e-5)
    transposed = LoRA(made.A.T.copy().T, made.B.T.copy().T, made.alpha)
    np.testing.assert_allclose(transposed.forward(x), wanted, rtol=1e-5, atol=1e-4)


# ---- gradients -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("rank_stabilized", [False, True])
def test_gradients_against_finite_differences(rank_stabilized, dropout):
    made = trained((5, 32), 3, dtype="float64", rank_stabilized=rank_stabilized, dropout=dropout)
    q = kb.quantize(normal((5, 32), "float64"), "kbit6")
    x, dy = normal((2, 2, 32), "float64", seed=2), normal((2, 2, 5), "float64", seed=3)
    seed = 9 if dropout else None
    found = made.backward(dy, x, q, seed=seed)

    def loss(x, a, b):
        return float((dataclasses.replace(made, A=a, B=b).forward(x, q, seed=seed) * dy).sum())

    values = [x, made.A, made.B]
    for place, gradient in enumerate(found):
        assert gradient.dtype == np.float64 and gradient.shape == values[place].shape
        for index in np.random.default_rng(place).choice(gradient.size, 12, replace=False):
            step = np.zeros(gradient.size)
            step[index] = 1e-3
            sides = []
            for sign in (1, -1):
                moved = list(values)
                moved[place] = values[place] + sign * step.reshape(gradient.shape)
                sides.append(loss(*moved))
            slope = (sides[0] - sides[1]) / 2e-3  # every one of the three is linear
            assert abs(slope - gradient.flat[index]) < 1e-8 * max(1, abs(slope))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradients_against_torch(dtype, dropout):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    made = trained(dtype=dtype, dropout=dropout)
    q = kb.quantize(normal((N, K), dtype), "nf4")
    x, dy = normal((2, 3, K), dtype, seed=2), normal((2, 3, N), dtype, seed=3)
    leaves = [torch.tensor(one, requires_grad=True) for one in (x, made.A, made.B)]
    side = leaves[0]
    if dropout:
        side = side * torch.tensor(made.mask(x, 5)) / (1 - dropout)
    y = leaves[0] @ torch.tensor(q.dequantize()).T + (side @ leaves[1].T) @ leaves[2].T * made.scaling
    y.backward(torch.tensor(dy))
    seed = 5 if dropout else None
    tolerance = 2e-5 if dtype == "float32" else 1e-12
    np.testing.assert_allclose(made.forward(x, q, seed=seed), y.detach().numpy(), rtol=tolerance, atol=100 * tolerance)
    for found, leaf in zip(made.backward(dy, x, q, seed=seed), leaves, strict=True):
        np.testing.assert_allclose(found, leaf.grad.numpy(), rtol=tolerance, atol=100 * tolerance)


def test_torch_tensors_come_back_as_tensors():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    made = LoRA(torch.ones(2, K, dtype=torch.bfloat16), torch.ones(N, 2, dtype=torch.bfloat16), 2, dropout=0.5)
    q = kb.quantize(normal((N, K)), "kbit4")
    x = torch.tensor(normal((3, K)))
    y = made.forward(x, q, seed=1)
    assert isinstance(y, torch.Tensor) and np.array_equal(y.numpy(), made.forward(x.numpy(), q, seed=1))
    found = made.backward(y, x, q, seed=1)
    assert [one.dtype for one in found] == [torch.float32, torch.bfloat16, torch.bfloat16]
    assert made.mask(x, 1).dtype == torch.bool
    assert torch.equal(made.merge(torch.zeros(N, K)), torch.full((N, K), 2.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_have_their_own_dtypes(dtype, xp):
    made = dataclasses.replace(trained(xp=xp), B=normal((N, 4), "float16", xp, 12))
    q = kb.quantize(normal((N, K), xp=xp), "kbit4")
    x, dy = normal((3, K), dtype, xp, 2), normal((3, N), dtype, xp, 3)
    dx, da, db = made.backward(dy, x, q)
    assert (dx.dtype, da.dtype, db.dtype) == (dtype, np.float32, np.float16)
    g, a, b = (host(one).astype(np.float64) for one in (dy, made.A, made.B))
    wanted = g @ host(q.dequantize(dtype="float64")) + made.scaling * g @ b @ a
    room = ULP[dtype.name] * np.abs(wanted) + 1e-5 * np.abs(wanted).max()
    assert (np.abs(host(dx).astype(np.float64) - wanted) <= room).all()
    side = host(made.backward(dy, x)[0]).astype(np.float64)
    assert (np.abs(side - made.scaling * g @ b @ a) <= room + ULP[dtype.name] * np.abs(side)).all()


def test_no_tokens(xp):
    made, q = trained(xp=xp), kb.quantize(normal((N, K), xp=xp), "kbit4")
    dx, da, db = made.backward(xp.zeros((0, N), np.float32), xp.zeros((0, K), np.float32), q)
    assert dx.shape == (0, K) and not da.any() and not db.any()


# ---- dropout -------------------------------------------------------------------------------------------------------


def splitmix64(state):
    """The generator as it is published, in Python's integers."""
    word = (1 << 64) - 1
    state = (state + 0x9E3779B97F4A7C15) & word
    z = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & word
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & word
    return state, z ^ z >> 31


def mixed(seed):
    return splitmix64((seed - 0x9E3779B97F4A7C15) & ((1 << 64) - 1))[1]


@pytest.mark.parametrize("seed", [0, 1, (1 << 64) - 1])
def test_the_mask_is_splitmix64s(seed, xp):
    made, x = trained((3, 7), dropout=0.3, xp=xp), normal((5, 7), xp=xp)
    state, numbers = mixed(seed), []
    for _ in range(-(-x.size // 2)):
        state, number = splitmix64(state)
        numbers += [number & 0xFFFFFFFF, number >> 32]
    wanted = np.array(numbers[: x.size]).reshape(x.shape) >= round(0.3 * 2**32)
    assert np.array_equal(host(made.mask(x, seed)), wanted)
    # Published numbers of the state 1234567.
    assert [splitmix64(1234567)[1], splitmix64(splitmix64(1234567)[0])[1]] == [
        6457827717110365317,
        3203168211198807973,
    ]


@pytest.mark.parametrize("dropout", [0.01, 0.25, 0.9])
def test_dropout_leaves_out_its_share(dropout):
    made, x = LoRA.init((8, 512), dropout=dropout), np.ones((512, 512), np.float32)
    masks = [made.mask(x, seed) for seed in range(4)]
    room = 5 * math.sqrt(dropout * (1 - dropout) / x.size)
    for mask in masks:
        assert abs(1 - mask.mean() - dropout) < room
        assert abs(np.corrcoef(mask[:, :-1].ravel(), mask[:, 1:].ravel())[0, 1]) < 0.012
    for other in masks[1:]:  # seeds side by side have nothing to do with each other
        assert abs(np.corrcoef(masks[0].ravel(), other.ravel())[0, 1]) < 0.012


def test_dropout_is_on_x_and_scaled(xp):
    """PEFT's: B(A(dropout(x))); W sees the whole x."""
    made = trained(xp=xp, dropout=0.25)
    q = kb.quantize(normal((N, K), xp=xp), "kbit4")
    x = normal((4, K), xp=xp, seed=2)
    y = made.forward(x, q, seed=17)
    wanted = exact(made, x, q.dequantize(), mask=made.mask(x, 17))
    np.testing.assert_allclose(host(y), wanted, rtol=1e-4, atol=2e-3)
    assert np.array_equal(host(y), host(made.forward(x, q, seed=17)))
    assert not np.array_equal(host(y), host(made.forward(x, q, seed=18)))
    # Without a seed, and without a probability, nothing is left out.
    np.testing.assert_allclose(host(made.forward(x, q)), exact(made, x, q.dequantize()), rtol=1e-4, atol=2e-3)
    whole = dataclasses.replace(made, dropout=0.0)
    assert np.array_equal(host(whole.forward(x, q, seed=17)), host(made.forward(x, q)))
    assert host(whole.mask(x, 17)).all()


def test_what_is_left_out_may_be_infinite():
    made = trained(dropout=0.5)
    x = normal((1, K))
    dropped = np.flatnonzero(~made.mask(x, 3))
    wanted = made.forward(x, seed=3)
    x[0, dropped[0]] = np.inf
    assert np.array_equal(made.forward(x, seed=3), wanted)


# ---- merging into compressed weights -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge_and_export(dtype, xp):
    made = trained(xp=xp, alpha=0.5)
    q = kb.quantize(normal((N, K), dtype, xp), "nf4")
    before = raw(q)
    merged = made.merge_and_export(q)
    assert (merged.format, merged.shape, merged.dtype, merged.device) == (q.format, q.shape, q.dtype, q.device)
    working = "float64" if dtype == np.float64 else "float32"
    assert raw(merged) == raw(kb.quantize(made.merge(q.dequantize(dtype=working)), "nf4"))
    assert raw(q) == before


def test_merge_and_export_to_another_format():
    made, q = trained(alpha=0.5), kb.quantize(normal((N, K)), "kbit4")
    wanted = made.merge(q.dequantize())
    importance = np.linspace(0, 4, K, dtype=np.float32)
    cases = [
        (("int8:granularity=channel:0", {}), {"format": "int8", "granularity": ("channel", 0)}),
        (("q4_k", {"importance": importance}), {"format": "q4_k", "importance": importance}),
        (("kbit3:codebook=nf", {}), {"format": "kbit3", "codebook": "nf"}),
        (("kbit2", {"codebook": np.arange(4.0)}), {"format": "kbit2", "codebook": np.arange(4.0)}),
        (("int8", {"scale": 0.1}), {"format": kb.get_format("int8"), "scale": 0.1}),
        (("kbit5", {}), {"format": ("kbit5", {})}),
    ]
    for plain, options in cases:
        found, expected = made.merge_and_export(q, **options), kb.quantize(wanted, plain)
        assert found.format == expected.format and raw(found) == raw(expected)


TERNARY = [name for name in ENCODED if kb.get_format(name).ternary]


def test_which_formats_are_ternary():
    """Those that never decode to four different magnitudes and signs beside a scale for all."""
    x = normal((1, 256))
    for name in ENCODED:
        values = np.unique(kb.quantize(x, name).dequantize())
        assert (name in TERNARY) == (len(values) <= 3 and values[len(values) // 2] == 0), name
    assert {"tq1_0", "tq2_0"} <= set(TERNARY)


@pytest.mark.parametrize("name", TERNARY)
def test_ternary_is_not_merged(name):
    made, q = trained(), kb.quantize(normal((N, K)), name)
    with pytest.raises(FormatError, match=r"-1, 0 and 1 times a scale: W \+ c B A is not"):
        made.merge_and_export(q)
    with pytest.raises(FormatError, match="Keep the adapter beside it"):
        made.merge_and_export(kb.quantize(normal((N, K)), "kbit4"), name)
    assert made.merge_and_export(q, "kbit4").format == kb.get_format("kbit4")
    assert made.forward(normal((2, K)), q).shape == (2, N)


# ---- refusals ------------------------------------------------------------------------------------------------------

A, B = np.ones((2, 6), np.float32), np.ones((4, 2), np.float32)
GOOD = LoRA(A, B, 1)
Q = kb.quantize(np.ones((4, 6), np.float32), "kbit4")
NARROW = kb.quantize(np.ones((3, 6), np.float32), "kbit4")
X = np.ones((3, 6), np.float32)

REFUSED = {
    "r = 0": (lambda: LoRA.init((4, 6), r=0), ValueError, "r is 0; it must be a positive integer"),
    "r < 0": (lambda: LoRA.init((4, 6), r=-1), ValueError, "r is -1"),
    "r no integer": (lambda: LoRA.init((4, 6), r=2.0), TypeError, "r is 2.0"),
    "r a bool": (lambda: LoRA.init((4, 6), r=True), TypeError, "r is True"),
    "empty factors": (lambda: LoRA(A[:0], B[:, :0], 1), ValueError, "r, K and N positive"),
    "alpha = 0": (lambda: LoRA(A, B, 0), ValueError, "alpha is 0; it must be a positive number"),
    "alpha < 0": (lambda: LoRA(A, B, -1.5), ValueError, "alpha is -1.5"),
    "alpha infinite": (lambda: LoRA(A, B, math.inf), ValueError, "alpha is inf"),
    "alpha too large": (lambda: LoRA(A, B, 10**400), ValueError, "it must be a positive number that float32 can hold"),
    "alpha NaN": (lambda: LoRA(A, B, math.nan), ValueError, "alpha is nan"),
    "alpha no number": (lambda: LoRA(A, B, "1"), TypeError, "alpha is '1'"),
    "alpha = 0 in init": (lambda: LoRA.init((4, 6), alpha=0), ValueError, "alpha is 0"),
    "dropout = 1": (lambda: LoRA(A, B, 1, dropout=1), ValueError, "dropout is 1; it must be from 0 to below 1"),
    "dropout < 0": (lambda: LoRA(A, B, 1, dropout=-0.1), ValueError, "dropout is -0.1"),
    "dropout NaN": (lambda: LoRA(A, B, 1, dropout=math.nan), ValueError, "dropout is nan"),
    "rank_stabilized": (lambda: LoRA(A, B, 1, rank_stabilized=1), TypeError, "rank_stabilized is 1"),
    "ranks differ": (lambda: LoRA(A, B[:, :1], 1), ValueError, r"A has shape \(2, 6\) and B has shape \(4, 1\)"),
    "A of 1 axis": (lambda: LoRA(A[0], B, 1), ValueError, r"A has shape \(6,\)"),
    "A of integers": (lambda: LoRA(A.astype(int), B, 1), TypeError, "A is int64"),
    "A compressed": (lambda: LoRA(Q, B, 1), TypeError, "A is QuantizedArray"),
    "shape of 3": (lambda: LoRA.init((4, 6, 2)), ValueError, r"q has shape \(4, 6, 2\)"),
    "shape of 0": (lambda: LoRA.init((4, 0)), ValueError, r"q has shape \(4, 0\)"),
    "no shape": (lambda: LoRA.init(4), TypeError, "q is int"),
    "init": (lambda: LoRA.init((4, 6), init="zeros"), ValueError, "init is 'zeros'; allowed are 'standard'"),
    "dtype": (lambda: LoRA.init((4, 6), dtype="int8"), TypeError, "dtype is int8"),
    "x": (lambda: GOOD.forward(X[:, 1:], Q), ValueError, r"x has shape \(3, 5\); an adapter of shape \(4, 6\) needs"),
    "x of 0 axes": (lambda: GOOD.forward(np.float32(1)), ValueError, r"x has shape \(\)"),
    "x of integers": (lambda: GOOD.forward(X.astype(int)), TypeError, "x is int64"),
    "x compressed": (lambda: GOOD.forward(Q, Q), TypeError, "x is QuantizedArray"),
    "q of floats": (lambda: GOOD.forward(X, B @ A), TypeError, "q is ndarray; .*base=x @ W.T"),
    "q transposed": (lambda: GOOD.forward(X, Q.T), TypeError, "pass q, not q.T"),
    "q of another shape": (lambda: GOOD.forward(X, NARROW), ValueError, r"q has shape \(3, 6\); the adapter is for"),
    "bias without q": (lambda: GOOD.forward(X, None, B[:, 0]), ValueError, "bias goes with q"),
    "bias beside base": (lambda: GOOD.forward(X, Q, B[:, 0], X @ A.T @ B.T), ValueError, "add it to base"),
    "bias": (lambda: GOOD.forward(X, Q, A[0]), ValueError, "bias has shape"),
    "base": (lambda: GOOD.forward(X, base=X), ValueError, r"base has shape \(3, 6\); .* need \(3, 4\)"),
    "seed < 0": (lambda: GOOD.forward(X, seed=-1), ValueError, "seed is -1"),
    "seed of 65 bits": (lambda: GOOD.forward(X, seed=1 << 64), ValueError, "seed is 18446744073709551616"),
    "seed no integer": (lambda: GOOD.mask(X, 0.5), TypeError, "seed is 0.5"),
    "dy": (lambda: GOOD.backward(X, X, Q), ValueError, r"dy has shape \(3, 6\)"),
    "q in backward": (lambda: GOOD.backward(X @ A.T @ B.T, X, NARROW), ValueError, r"q has shape \(3, 6\)"),
    "W": (lambda: GOOD.merge(X), ValueError, r"W has shape \(3, 6\)"),
    "W compressed": (lambda: GOOD.merge(Q), TypeError, "merge_and_export takes compressed ones"),
    "out of merge": (lambda: GOOD.unmerge(B @ A, out=X), ValueError, "out has shape"),
    "q to merge": (lambda: GOOD.merge_and_export(B @ A), TypeError, "q is ndarray"),
    "format": (lambda: GOOD.merge_and_export(Q, "kbit9"), FormatError, "kbit9"),
    "option": (lambda: GOOD.merge_and_export(Q, "kbit4", block=3), FormatError, "no option 'block'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    call, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        call()


def test_an_adapter_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        GOOD.alpha = 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        GOOD.A = B
    assert dataclasses.replace(GOOD, alpha=2).scaling == 1.0 and GOOD.scaling == 0.5


def test_an_adapter_is_copied_and_pickled():
    made = trained(dropout=0.5)
    for other in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert same(other, made)


def test_devices(cupy):
    there = GOOD.to_device("cuda:0")
    assert there.device == "cuda:0" and there.to_device("cpu").device == "cpu" and GOOD.to_device("cpu") is GOOD
    found = there.forward(cupy.asarray(X), Q.to_device("cuda:0"))
    np.testing.assert_allclose(found.get(), GOOD.forward(X, Q), rtol=1e-6)
    for call in (
        lambda: there.forward(X),
        lambda: GOOD.forward(cupy.asarray(X)),
        lambda: there.forward(cupy.asarray(X), Q),
        lambda: there.merge(B @ A),
        lambda: LoRA(cupy.asarray(A), B, 1),
    ):
        with pytest.raises(DeviceError):
            call()


# ---- files ---------------------------------------------------------------------------------------------------------


def test_peft_adapter():
    """What PEFT wrote gives what PEFT computed, with other ranks and alphas for some modules."""
    found = kb.lora.load(DATA)
    numbers = kb.io.load(DATA / "forward.safetensors")
    assert [(name, one.r, one.alpha) for name, one in found.items()] == [("0.q_proj", 4, 6), ("0.v_proj", 2, 3)]
    assert all(one.rank_stabilized and one.dropout == 0.25 for one in found.values())
    y = numbers["x"]
    for name, one in found.items():
        base = y @ numbers[f"model.{name}.weight"].T
        if f"model.{name}.bias" in numbers:
            base += numbers[f"model.{name}.bias"]
        y = one.forward(y, base=base)
    np.testing.assert_allclose(y, numbers["y"], rtol=1e-5, atol=1e-5)


def test_written_as_peft_writes(tmp_path):
    """Keys, shapes, dtypes and bytes of tensors, and the fields that count, are those of PEFT's own file."""
    found = kb.lora.load(DATA)
    kb.lora.save(tmp_path / "adapter", found, target_modules=["q_proj", "v_proj"])
    ours = kb.io.load(tmp_path / "adapter" / "adapter_model.safetensors")
    theirs = kb.io.load(DATA / "adapter_model.safetensors")
    assert set(ours) == set(theirs) and ours.metadata == theirs.metadata == {"format": "pt"}
    assert all(np.array_equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in theirs)
    written, peft = (
        json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        for folder in (tmp_path / "adapter", DATA)
    )
    # Two modules, of which either may be the usual one.
    different = {name for name in written if written[name] != peft[name]} - {"auto_mapping"}
    assert different <= {"r", "lora_alpha", "rank_pattern", "alpha_pattern"}
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "adapter",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def same(one, other):
    return (
        np.array_equal(one.A, other.A)
        and np.array_equal(one.B, other.B)
        and (one.A.dtype, one.B.dtype) == (other.A.dtype, other.B.dtype)
        and (one.alpha, one.rank_stabilized, one.dropout) == (other.alpha, other.rank_stabilized, other.dropout)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_round_trip(dtype, tmp_path, xp):
    """Ranks and alphas of modules whose names end in those of others come back as well."""
    shapes = {"a.q": (4, 6), "q": (2, 1), "b.a.q": (4, 8), "c.q": (4, 6), "d": (2.5, 6), "e.d": (4, 6), "f.d": (4, 8)}
    options = {"rank_stabilized": True, "dropout": 0.125}
    adapters = {
        name: trained((5, 7), r if isinstance(r, int) else 4, alpha if isinstance(r, int) else r, dtype, xp, **options)
        for name, (r, alpha) in shapes.items()
    }
    kb.lora.save(tmp_path / "adapter", adapters, base_model="some/model", task_type="CAUSAL_LM")
    found = kb.lora.load(tmp_path / "adapter")
    assert list(found) == sorted(adapters)
    assert all(same(found[name], adapters[name].to_device("cpu")) for name in adapters)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["target_modules"] == sorted(adapters) and config["base_model_name_or_path"] == "some/model"
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["task_type"]) == ("LORA", 4, 6, "CAUSAL_LM")
    assert found["q"].A.flags.writeable


@pytest.mark.filterwarnings("ignore")
def test_peft_loads_what_we_write(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft, which brings transformers")
    torch = pytest.importorskip("torch", reason="torch is not installed")

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q = torch.nn.Linear(24, 16)
            self.a = torch.nn.ModuleDict({"q": torch.nn.Linear(16, 12), "v": torch.nn.Linear(12, 8)})

        def forward(self, x):
            return self.a["v"](self.a["q"](self.q(x)))

    model = Model()
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}
    numbers = {"q": (3, 2), "a.q": (2, 5.5), "a.v": (2, 5.5)}
    adapters = {
        name: trained(tuple(layers[name].weight.shape), r, alpha, rank_stabilized=True, dropout=0.5)
        for name, (r, alpha) in numbers.items()
    }
    kb.lora.save(tmp_path / "adapter", adapters)
    x = normal((3, 24))
    y = x
    for name in ("q", "a.q", "a.v"):
        base = y @ layers[name].weight.detach().numpy().T + layers[name].bias.detach().numpy()
        y = adapters[name].forward(y, base=base)
    loaded = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    np.testing.assert_allclose(loaded(torch.tensor(x)).detach().numpy(), y, rtol=1e-4, atol=1e-4)
    loaded.save_pretrained(tmp_path / "again")
    found = kb.lora.load(tmp_path / "again")
    assert all(same(found[name], adapters[name]) for name in adapters)


def folder_of(path, tensors, **fields):
    """A folder as PEFT writes one, with other tensors and fields."""
    path.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q"], **fields}
    config = {name: value for name, value in config.items() if value != "absent"}
    (path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    kb.io.save(path / "adapter_model.safetensors", tensors)
    return path


@pytest.mark.parametrize("prefix", ["", "base_model.model."])
@pytest.mark.parametrize("adapter", ["", ".default", ".mine"])
def test_keys_in_all_spellings(prefix, adapter, tmp_path):
    tensors = {f"{prefix}layers.0.q.lora_{side}{adapter}.weight": array for side, array in (("A", A), ("B", B))}
    found = kb.lora.load(folder_of(tmp_path / "adapter", tensors, of_a_later_version={"a": [1]}, use_dora=False))
    assert list(found) == ["layers.0.q"] and same(found["layers.0.q"], LoRA(A, B, 4))
    kb.lora.save(tmp_path / "again", {f"{prefix}layers.0.q": found["layers.0.q"]})
    names = set(kb.io.load(tmp_path / "again" / "adapter_model.safetensors"))
    assert names == {f"base_model.model.layers.0.q.lora_{side}.weight" for side in "AB"}


PAIR = {"q.lora_A.weight": A, "q.lora_B.weight": B}


@pytest.mark.parametrize("patterns", [{"q": 8}, {"^layers.1.q": 8, "layers.1.q": 9}, {"1.q": 8, "q": 9}], ids=str)
def test_alphas_of_modules(patterns, tmp_path):
    tensors = {f"layers.1.{name}": array for name, array in PAIR.items()}
    assert kb.lora.load(folder_of(tmp_path / "a", tensors, alpha_pattern=patterns))["layers.1.q"].alpha == 8


def test_a_pattern_from_the_beginning_matches_whole_names(tmp_path):
    tensors = {f"layers.1.{name}": array for name, array in PAIR.items()}
    assert kb.lora.load(folder_of(tmp_path / "a", tensors, alpha_pattern={"^q": 8, "s.1": 9}))["layers.1.q"].alpha == 4


UNREADABLE = {
    "kind": ({"peft_type": "LOHA"}, PAIR, "peft_type is 'LOHA'; it must be 'LORA'"),
    "no kind": ({"peft_type": "absent"}, PAIR, "peft_type is 'None'"),
    "bias": ({"bias": "all"}, PAIR, "bias is 'all'; it must be 'none'"),
    "DoRA": ({"use_dora": True}, PAIR, "use_dora is set, which rescales the weights"),
    "biases": ({"lora_bias": True}, PAIR, "lora_bias is set"),
    "modules": ({"modules_to_save": ["lm_head"]}, PAIR, "modules_to_save is set"),
    "parameters": ({"target_parameters": ["gate"]}, PAIR, "target_parameters is set"),
    "PiSSA": ({"init_lora_weights": "pissa_niter_4"}, PAIR, "init_lora_weights is 'pissa_niter_4', which changed"),
    "no r": ({"r": "absent"}, PAIR, "r is 'None'; it must be a positive integer"),
    "r = 0": ({"r": 0}, PAIR, "r is '0'"),
    "r": ({"r": 3}, PAIR, r"module 'q' has lora_A of shape \(2, 6\) .*; r = 3 of adapter_config.json needs \(3, K\)"),
    "rank_pattern": ({"rank_pattern": {"q": 3}}, PAIR, "r = 3"),
    "rslora": ({"use_rslora": "yes"}, PAIR, "use_rslora is 'yes'; it must be true or false"),
    "no alpha": ({"lora_alpha": "absent"}, PAIR, "lora_alpha is 'None'; it must be a positive number"),
    "alpha = 0": ({"lora_alpha": 0}, PAIR, "lora_alpha is '0'"),
    "alpha infinite": ({"lora_alpha": math.inf}, PAIR, "lora_alpha is 'inf'"),
    "alpha too large": ({"lora_alpha": 10**400}, PAIR, "lora_alpha is '1000"),
    "r too large": ({"r": 10**400}, PAIR, "r is '1000"),
    "alpha of a module": ({"alpha_pattern": {"q": -1}}, PAIR, r"alpha_pattern\['q'\] is '-1'"),
    "patterns": ({"alpha_pattern": [1]}, PAIR, "alpha_pattern is '.1.'; it must be an object"),
    "expression": ({"alpha_pattern": {"(a+)+": 1}}, PAIR, "regular expressions are not run"),
    "dropout": ({"lora_dropout": 1.0}, PAIR, "lora_dropout is '1.0'; it must be a number from 0 to below 1"),
    "embedding": ({}, {**PAIR, "e.lora_embedding_A": A}, "tensor 'e.lora_embedding_A' is no weight of a low-rank pair"),
    "magnitude": ({}, {**PAIR, "q.lora_magnitude_vector": A}, "'q.lora_magnitude_vector'"),
    "other tensor": ({}, {**PAIR, "lm_head.weight": A}, "'lm_head.weight'"),
    "half a pair": ({}, {"q.lora_A.weight": A}, "module 'q' has lora_A alone"),
    "twice": ({}, {**PAIR, "base_model.model.q.lora_A.weight": A}, "module 'q' has lora_A twice"),
    "two adapters": ({}, {**PAIR, "v.lora_A.one.weight": A}, "more than one adapter"),
    "convolution": ({}, {**PAIR, "q.lora_A.weight": A.reshape(2, 6, 1, 1)}, r"shape \(2, 6, 1, 1\)"),
    "integers": ({}, {**PAIR, "q.lora_A.weight": A.astype(np.int8)}, "is int8"),
    "nothing": ({}, {}, "holds no adapter"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_is_not_read(case, tmp_path):
    fields, tensors, message = UNREADABLE[case]
    with pytest.raises(FileError, match=message):
        kb.lora.load(folder_of(tmp_path / "adapter", tensors, **fields))


def test_files_that_are_missing_or_broken(tmp_path):
    with pytest.raises(FileError, match="not there; pass the directory"):
        kb.lora.load(tmp_path / "nothing")
    folder = folder_of(tmp_path / "adapter", PAIR)
    with pytest.raises(FileError, match="is a file; pass the directory"):
        kb.lora.load(folder / "adapter_config.json")
    for text in ("{", "[]", '{"r": 1, "r": 2}'):
        (folder / "adapter_config.json").write_text(text, encoding="utf-8")
        with pytest.raises(FileError, match=r"adapter_config.json is no JSON"):
            kb.lora.load(folder)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(FileError, match=r"adapter_config.json does not exist"):
        kb.lora.load(folder)
    folder_of(tmp_path / "pickle", PAIR)
    (tmp_path / "pickle" / "adapter_model.safetensors").rename(tmp_path / "pickle" / "adapter_model.bin")
    with pytest.raises(FileError, match="a pickle"):
        kb.lora.load(tmp_path / "pickle")
    with pytest.raises(TypeError, match="path is int"):
        kb.lora.load(1)


UNWRITABLE = {
    "empty": ({}, {}, ValueError, "adapters is empty"),
    "no mapping": ([GOOD], {}, TypeError, "adapters is list"),
    "no adapter": ({"q": A}, {}, TypeError, "mapping of names of modules to LoRA"),
    "name": ({1: GOOD}, {}, TypeError, "names that are no str"),
    "no name": ({"base_model.model.": GOOD}, {}, FileError, "is empty"),
    "twice": ({"q": GOOD, "base_model.model.q": GOOD}, {}, FileError, "stands twice"),
    "dropouts": ({"q": GOOD, "v": dataclasses.replace(GOOD, dropout=0.5)}, {}, ValueError, "differ in rank_stabilized"),
    "target": ({"q": GOOD}, {"target_modules": "q"}, TypeError, "target_modules is 'q'"),
    "model": ({"q": GOOD}, {"base_model": 1}, TypeError, "base_model is int"),
    "surrogate": ({"q\ud800": GOOD}, {}, FileError, "Unicode"),
}


@pytest.mark.parametrize("case", UNWRITABLE)
def test_what_is_not_written(case, tmp_path):
    adapters, options, error, message = UNWRITABLE[case]
    with pytest.raises(error, match=message):
        kb.lora.save(tmp_path / "adapter", adapters, **options)
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path):
    kb.lora.save(tmp_path / "adapter", {"q": GOOD})
    with pytest.raises(FileError, match="never overwritten"):
        kb.lora.save(tmp_path / "adapter", {"q": GOOD})
    with pytest.raises(FileError, match="does not exist; create it first"):
        kb.lora.save(tmp_path / "a" / "b", {"q": GOOD})
    assert same(kb.lora.load(tmp_path / "adapter")["q"], GOOD)
