"""BitLinear: activations, RMSNorm and products against their definitions, one number after the other."""

import numpy as np
import pytest
from inputs import BFLOAT16, DTYPES, make, same_values

import kbitcupy as kb
from kbitcupy.errors import FormatError
from kbitcupy.products import activations as tokens_of, ternary

SINGLE, DOUBLE = np.dtype("float32"), np.dtype("float64")
LARGEST = np.finfo(np.float32).max
GRANULARITIES = ["tensor", ("channel", 0), ("group", 64), ("group", 20), ("group", 1)]


def host(array):
    return array if isinstance(array, np.ndarray) else array.get()


# ---- the definition --------------------------------------------------------------------------------------------------


def normalized(x, weight, eps):
    """float32 rows behind an RMSNorm."""
    x = x.astype(np.float32)
    rows = []
    with np.errstate(all="ignore"):
        for row in x:
            lanes = [0.0] * 256
            for k, number in enumerate(row):
                value = 0.0 if np.isnan(number) else min(abs(float(number)), float(LARGEST))
                lanes[k % 256] += value * value
            while len(lanes) > 1:
                half = len(lanes) // 2
                lanes = [a + b for a, b in zip(lanes[:half], lanes[half:], strict=True)]
            r = np.float32(1 / np.sqrt(np.float64(lanes[0] / max(1, len(row)) + eps)))
            z = row * r
            rows.append(z if weight is None else z * weight)
    return np.stack(rows) if rows else x


def quantized(x, bits=8, granularity="token", rounding="even", qmin=-128, eps=1e-5):
    """int64 codes and float32 scales of the rows of float numbers."""
    top = np.float32(2 ** (bits - 1) - 1)
    lowest = -top - (qmin == -128)
    codes, scales = np.zeros(x.shape, np.int64), np.zeros(len(x), np.float32)
    with np.errstate(all="ignore"):
        x = x.astype(np.float32)
        x = np.where(np.isnan(x), np.float32(0), np.clip(x, -LARGEST, LARGEST))
        largest = [max(np.abs(row), default=np.float32(0)) for row in x]
        if granularity == "tensor":
            largest = [max(largest, default=np.float32(0))] * len(x)
        for m, row in enumerate(x):
            a = max(largest[m], np.float32(eps))
            scales[m] = a / top
            v = row * (top / a)
            if rounding == "away":
                v = np.where(np.abs(v) % 1 == 0.5, v + np.copysign(np.float32(0.25), v), v)
            codes[m] = np.where(np.isnan(v), 0, np.clip(np.rint(v), lowest, top))
    return codes, scales


def product(codes, scales, q, bias, dtype):
    """From trits as the array decodes, and its scales one by one."""
    rows, depth = q.shape
    granularity = q.format.granularity
    group = granularity[1] if granularity[0] == "group" else max(1, depth)
    trits = kb.bitnet.trits(q).astype(np.int64)
    gamma = np.broadcast_to(
        q.planes["scale"].reshape(1 if granularity == "tensor" else rows, -1), (rows, -(-depth // group))
    )
    y = np.zeros((len(codes), rows), np.float32)
    with np.errstate(all="ignore"):
        for number, first in enumerate(range(0, depth, group)):
            sums = codes[:, first : first + group] @ trits[:, first : first + group].T
            term = sums.astype(np.float32) * scales[:, None] * gamma[:, number]
            y = term if number == 0 else y + term
        if bias is not None:
            y = y + bias.astype(np.float32)
        return y.astype(dtype)


def weight(rows, depth, granularity="tensor", xp=np, seed=1):
    rng = np.random.default_rng([seed, rows, depth])
    trits = rng.integers(-1, 2, (rows, depth)).astype(np.int8)
    count = 1 if granularity == "tensor" else rows
    if granularity[0] == "group":
        count = rows * -(-depth // granularity[1])
    scale = (rng.random(count) * np.exp2(rng.integers(-9, 3, count))).astype(np.float32)
    return kb.bitnet.from_trits(xp.asarray(trits), xp.asarray(scale), granularity=granularity)


# ---- activations -----------------------------------------------------------------------------------------------------

OPTIONS = [
    {},
    {"rounding": "away"},
    {"granularity": "tensor"},
    {"bits": 2, "rounding": "away", "qmin": -127},
    {"bits": 5, "granularity": "tensor", "eps": 0},
    {"eps": 0},
]


@pytest.mark.parametrize("dtype", [*DTYPES, DOUBLE], ids=str)
@pytest.mark.parametrize("kind", ["normal", "special", "extreme", "subnormal", "zeros", "constant", "small"])
def test_activations(xp, kind, dtype):
    for tokens, depth in [(1, 1), (3, 40), (5, 300), (2, 1031)]:
        x = make(kind, tokens * depth, dtype).reshape(tokens, depth)
        for options in OPTIONS:
            codes, scales = quantized(x, **options)
            q, scale = kb.bitnet.quantize_activations(xp.asarray(x), **options)
            assert q.dtype == np.int8 and q.shape == x.shape and scale.dtype == np.float32
            assert np.array_equal(host(q), codes), (options, tokens, depth)
            assert host(scale).tobytes() == (scales if "granularity" not in options else scales[:1]).tobytes()


@pytest.mark.parametrize("rounding", ["even", "away"])
def test_halves(xp, rounding):
    """Numbers about the middles of all codes, under a scale of 1."""
    middles = (np.arange(-127, 127) + 0.5).astype(np.float32)
    x = np.concatenate([[127], middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, 2 * middles)])[None]
    x = x.astype(np.float32)
    q, scale = kb.bitnet.quantize_activations(xp.asarray(x), rounding=rounding)
    assert host(scale) == 1 and np.array_equal(host(q), quantized(x, rounding=rounding)[0])
    beside = [round(float(v)) if rounding == "even" else int(np.trunc(v + np.copysign(0.5, v))) for v in middles]
    assert host(q)[0, 1:255].tolist() == beside


def test_slabs_are_one_array(monkeypatch):
    x = make("wide", 4000, SINGLE).reshape(100, 40)
    whole = [kb.bitnet.quantize_activations(x, granularity=g) for g in ("token", "tensor")]
    monkeypatch.setattr(tokens_of, "_SLAB", 70)
    for g, (q, scale) in zip(("token", "tensor"), whole, strict=True):
        found = kb.bitnet.quantize_activations(x, granularity=g)
        assert np.array_equal(found[0], q) and np.array_equal(found[1], scale)


@pytest.mark.parametrize("dtype", [*DTYPES, DOUBLE], ids=str)
@pytest.mark.parametrize("kind", ["normal", "special", "extreme", "subnormal", "huge", "zeros"])
def test_rms_norm(xp, kind, dtype):
    for tokens, depth in [(1, 1), (3, 40), (2, 700)]:
        x = make(kind, tokens * depth, dtype).reshape(tokens, depth)
        g = make("normal", depth, SINGLE, 7)
        for weight, eps in ((None, 1e-6), (g, 1e-5), (g, 0)):
            given = None if weight is None else xp.asarray(weight)
            y = kb.bitnet.rms_norm(xp.asarray(x), given, eps=eps)
            with np.errstate(all="ignore"):
                wanted = normalized(x, weight, eps).astype(dtype)
            assert y.dtype == dtype and same_values(host(y), wanted), (tokens, depth, eps)


def test_rms_norm_is_torchs():
    torch = pytest.importorskip("torch", reason="torch has the function too")
    x, g = make("normal", 5 * 512, SINGLE).reshape(5, 512), make("normal", 512, SINGLE, 3)
    wanted = torch.nn.functional.rms_norm(torch.from_numpy(x), (512,), torch.from_numpy(g), 1e-6).numpy()
    assert np.allclose(kb.bitnet.rms_norm(x, g), wanted, rtol=1e-6, atol=1e-6)
    found = kb.bitnet.rms_norm(torch.from_numpy(x), torch.from_numpy(g))
    assert isinstance(found, torch.Tensor) and np.array_equal(found.numpy(), kb.bitnet.rms_norm(x, g))


# ---- products --------------------------------------------------------------------------------------------------------

SHAPES = [(1, 1, 1), (1, 40, 128), (3, 17, 33), (9, 5, 300), (20, 33, 384), (70, 3, 1040)]


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("dtype", [*DTYPES, DOUBLE], ids=str)
def test_the_definition(xp, dtype, granularity):
    for tokens, rows, depth in SHAPES:
        q, on = weight(rows, depth, granularity), weight(rows, depth, granularity, xp)
        for kind, biased in (("normal", False), ("special", True)):
            x = make(kind, tokens * depth, dtype).reshape(tokens, depth)
            bias = make("normal", rows, dtype, 5) if biased else None
            wanted = product(*quantized(x), q, bias, dtype)
            y = kb.bitnet.linear(xp.asarray(x), on, None if bias is None else xp.asarray(bias))
            assert y.dtype == dtype and same_values(host(y), wanted), (tokens, rows, depth, kind)
            again = kb.linear(xp.asarray(x), on, None if bias is None else xp.asarray(bias), activations="bitnet")
            assert again.tobytes() == y.tobytes()


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_and_norms(xp, options, granularity):
    tokens, rows, depth = 5, 33, 256
    q, on = weight(rows, depth, granularity), weight(rows, depth, granularity, xp)
    g = make("normal", depth, SINGLE, 7)
    for dtype in (SINGLE, BFLOAT16):
        x = make("wide", tokens * depth, dtype).reshape(tokens, depth)
        for norm, weights in ((None, None), (True, None), (g, g)):
            numbers = x if norm is None else normalized(x, weights, 1e-5)
            wanted = product(*quantized(numbers, **options), q, None, dtype)
            given = xp.asarray(norm) if norm is g else norm
            y = kb.bitnet.linear(xp.asarray(x), on, norm=given, norm_eps=1e-5, **options)
            assert same_values(host(y), wanted)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_activations_that_are_int8_already(xp, granularity):
    for tokens, rows, depth in SHAPES:
        q, on = weight(rows, depth, granularity), weight(rows, depth, granularity, xp)
        x = xp.asarray(make("normal", tokens * depth, SINGLE).reshape(tokens, depth))
        for shared in ("token", "tensor"):
            a = kb.quantize(x, "int8", granularity=shared)
            scales = np.broadcast_to(host(a.planes["scale"]), tokens)
            wanted = product(host(a.planes["codes"]).reshape(tokens, depth).astype(np.int64), scales, q, None, SINGLE)
            assert same_values(host(kb.bitnet.linear(a, on)), wanted)
            assert same_values(host(kb.linear(a, on)), wanted)
            assert same_values(host(kb.linear(a, on, activations="bitnet")), wanted)
            if shared == "token":  # W8A8's rule on the way
                assert same_values(host(kb.linear(x, on, activations="int8")), wanted)


def test_any_rank_and_out(xp):
    q = weight(48, 160, xp=xp)
    x = xp.asarray(make("normal", 2 * 3 * 160, SINGLE).reshape(2, 3, 160))
    y = kb.bitnet.linear(x, q)
    assert y.shape == (2, 3, 48)
    for part, wanted in ((x[1, 2], y[1, 2]), (x[:, 1], y[:, 1]), (x[None], y[None])):
        assert kb.bitnet.linear(part, q).tobytes() == host(wanted).tobytes()
    out = xp.empty_like(y)
    assert kb.bitnet.linear(x, q, out=out) is out and (out == y).all()
    assert kb.bitnet.linear(x[:0], q).shape == (0, 3, 48)
    assert kb.linear(x[:0], q, activations="bitnet").shape == (0, 3, 48)


@pytest.mark.parametrize("dtype", [*DTYPES, DOUBLE], ids=str)
@pytest.mark.parametrize("granularity", ["tensor", ("channel", 0), ("group", 64)])
def test_experts(xp, granularity, dtype):
    """Each product of experts is BitLinear of its token, to the bit; slots are combined in float32."""
    rows, depth = 24, 256
    members = [weight(rows, depth, granularity, xp, seed) for seed in range(4)]
    qs = kb.stack(members)
    ids = np.array([[0, 3], [2, 9], [3, -1], [1, 1], [0, 2]])
    weights = np.random.default_rng(0).random((5, 2)).astype(np.float32)
    for shape in ((5, depth), (5, 2, depth)):
        x = xp.asarray(make("special", int(np.prod(shape)), dtype, 3).reshape(shape))
        wanted, single = np.zeros((5, 2, rows), x.dtype), np.zeros((5, 2, rows), np.float32)
        for t, j in np.ndindex(5, 2):
            if 0 <= ids[t, j] < 4:
                token = x[t] if x.ndim == 2 else x[t, j]
                wanted[t, j] = host(kb.bitnet.linear(token, members[ids[t, j]]))
                single[t, j] = host(kb.bitnet.linear(token.astype(np.float32), members[ids[t, j]]))
        y = kb.linear_grouped(x, qs, xp.asarray(ids), activations="bitnet")
        assert same_values(host(y), wanted)
        if dtype == SINGLE:
            y = kb.linear_grouped(x, qs, xp.asarray(ids), xp.asarray(weights), activations="bitnet")
            with np.errstate(all="ignore"):
                wanted = single[:, 0] * weights[:, :1] + single[:, 1] * weights[:, 1:]
            assert np.allclose(host(y), wanted, rtol=1e-6, atol=0, equal_nan=True)


def test_nothing_to_add_up(xp):
    """K of 0 leaves the bias."""
    q = kb.bitnet.from_trits(xp.zeros((3, 0), np.int8))
    bias = xp.asarray(np.float32([1, 2, 3]))
    assert kb.bitnet.linear(xp.zeros((2, 0), np.float32), q, bias).tolist() == [[1, 2, 3]] * 2
    assert kb.bitnet.linear(xp.zeros((2, 0), np.float32), q, norm=True).tolist() == [[0, 0, 0]] * 2


def test_a_code_of_another_origin_counts_as_decoded(xp):
    q = weight(4, 256)
    q.planes["codes"][:] = np.random.default_rng(0).integers(0, 256, q.planes["codes"].shape)
    x = make("normal", 3 * 256, SINGLE).reshape(3, 256)
    on = kb.QuantizedArray(q.format, {name: xp.asarray(p) for name, p in q.planes.items()}, q.shape, q.dtype)
    assert (host(kb.bitnet.trits(on)) == 2).any()
    assert same_values(host(kb.bitnet.linear(xp.asarray(x), on)), product(*quantized(x), q, None, SINGLE))


@pytest.mark.parametrize("tokens", [2, 7])
@pytest.mark.parametrize("depth", [1408, 1536, 1 << 15, (1 << 15) + 128, 131071])
def test_the_largest_sums(depth, tokens):
    """All trits, or codes, of one sign: float32 parts stay exact."""
    x = np.ones((tokens, depth), np.float32)
    for value in (1, 2):
        q = kb.bitnet.from_trits(np.ones((3, depth), np.int8))
        if value == 2:
            q.planes["codes"][:] = 255
        codes, scales = kb.bitnet.quantize_activations(x)
        assert (codes == 127).all()
        wanted = np.float32(127 * value * depth) * scales[0]
        assert (kb.bitnet.linear(x, q) == wanted).all()


@pytest.mark.parametrize("run", [1, 32, 128])
@pytest.mark.parametrize(("depth", "tokens"), [(1408, 1), (4096, 3), (4096, 9), ((1 << 16) + 128, 2)])
def test_the_largest_sums_of_both_signs(depth, tokens, run):
    """Activations whose sign changes from field to field of a byte, or from block to block: largest factors."""
    rng = np.random.default_rng(depth)
    x = np.where(np.arange(depth) // run % 2, -127, 127) + rng.integers(0, 2, (tokens, depth))
    q = kb.bitnet.from_trits(np.where(rng.random((5, depth)) < 0.9, x[0] >= 64, -1).astype(np.int8))
    q.planes["codes"][: len(q.planes["codes"]) // 5] = 255  # of the first row: codes of another origin
    codes, scales = kb.bitnet.quantize_activations(x.astype(np.float32))
    assert np.abs(codes).min() >= 125
    sums = codes.astype(np.int64) @ kb.bitnet.trits(q).astype(np.int64).T
    assert (kb.bitnet.linear(x.astype(np.float32), q) == sums.astype(np.float32) * scales[:, None]).all()


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("large", [slice(0, 1 << 13), slice(1 << 13, None), slice(1 << 12, 3 << 12)])
def test_large_activations_beside_small_ones(tokens, large):
    """Columns of large activations are added up in shorter parts than those of small ones."""
    rng = np.random.default_rng(0)
    x = rng.integers(-1, 2, (tokens, 1 << 14)).astype(np.float32)
    x[:, large] = 127
    q = weight(300, 1 << 14)
    y = kb.bitnet.linear(x, q)
    codes, scales = kb.bitnet.quantize_activations(x)
    assert (codes == x).all() and same_values(y, product(codes.astype(np.int64), scales, q, None, SINGLE))


def test_tiny_tokens_differ_from_w8a8(xp):
    """Below eps BitNet keeps fewer bits."""
    q, x = weight(8, 128, xp=xp), xp.asarray(np.full((1, 128), 1e-7, np.float32))
    assert not kb.bitnet.quantize_activations(x)[0][0, 0] - 1
    assert kb.linear(x, q, activations="bitnet").tobytes() != kb.linear(x, q, activations="int8").tobytes()


@pytest.mark.parametrize(
    ("group", "depth"),
    [(32, 128), (64, 384), (128, 2432), (256, 512), (256, 384), (384, 768), (32768, 65536), (65536, 65536)],
)
def test_groups_of_whole_blocks(group, depth, monkeypatch):
    """On NumPy some are multiplied as their codes lie: the largest sums of both signs, and codes that count 2."""
    rng = np.random.default_rng([group, depth])
    monkeypatch.setattr(ternary, "_FLOATS", depth)  # four rows at a time
    tokens, rows = 3, 9
    q = weight(rows, depth, ("group", group))
    q.planes["codes"][:] = rng.integers(0, 256, q.planes["codes"].shape)
    q.planes["codes"][: 3 * depth // 4] = np.repeat(np.uint8([0, 0b10101010, 0b11111111]), depth // 4)
    a = rng.integers(-128, 128, (tokens, depth)).astype(np.int8)
    a[0], a[1] = -128, 127
    scales, bias = rng.random(tokens).astype(np.float32), make("normal", rows, SINGLE, 5)
    trits = kb.formats.ternary.unpack(q.planes["codes"]).reshape(rows, depth).astype(np.int64)
    wanted = np.float32(0)
    for number, first in enumerate(range(0, depth, group)):
        sums = a[:, first : first + group].astype(np.int64) @ trits[:, first : first + group].T
        term = sums.astype(np.float32) * scales[:, None] * q.planes["scale"].reshape(rows, -1)[:, number]
        wanted = wanted + term if number else term
    for given, dtype in ((None, SINGLE), (bias, SINGLE), (bias, np.dtype("float16"))):
        found = np.empty((tokens, rows), dtype)
        with np.errstate(over="ignore"):
            ternary._multiply_host(a, scales, q, q.format.trits(q.shape), given, found)
            assert same_values(found, (wanted if given is None else wanted + bias).astype(dtype))


@pytest.mark.parametrize("group", [32, 64, 100])
def test_the_error_of_groups(group):
    """Against float64: what the additions of float32 may leave."""
    w, x = make("normal", 64 * 1024, SINGLE).reshape(64, 1024), make("normal", 7 * 1024, SINGLE, 2).reshape(7, 1024)
    q = kb.quantize(w, "ternary", granularity=("group", group))
    codes, scales = kb.bitnet.quantize_activations(x)
    a = codes * scales[:, None].astype(np.float64)
    weights = kb.bitnet.trits(q) * q.planes["scale"].reshape(64, -1).astype(np.float64).repeat(group, axis=1)[:, :1024]
    assert (np.abs(kb.bitnet.linear(x, q) - a @ weights.T) <= 2.0**-20 * (np.abs(a) @ np.abs(weights).T)).all()


def test_transformers_formula():
    """fl(acc / s / scale) of its float32 layer, within 4 ulp."""
    rng = np.random.default_rng(3)
    w, x = (rng.standard_normal(shape).astype(np.float32) for shape in ((64, 512), (9, 512)))
    q = kb.quantize(w, "ternary")
    s = np.float32(127) / np.maximum(np.abs(x).max(1, keepdims=True), np.float32(1e-5))
    codes = np.clip(np.rint(x * s), -128, 127)
    sums = codes.astype(np.int64) @ kb.bitnet.trits(q).astype(np.int64).T
    theirs = sums.astype(np.float32) / s / (np.float32(1) / q.planes["scale"])
    y = kb.bitnet.linear(x, q)
    assert (np.abs(y.view(np.int32).astype(np.int64) - theirs.view(np.int32)) <= 4).all()


def test_transformers_layers():
    """Its own layers: packed, and with float weights."""
    torch = pytest.importorskip("torch", reason="transformers' layers are torch's")
    layers = pytest.importorskip("transformers.integrations.bitnet", reason="transformers has such layers")
    rng = np.random.default_rng(3)
    w, x = (rng.standard_normal(shape).astype(np.float32) for shape in ((64, 512), (9, 512)))
    q = kb.quantize(w, "ternary")
    y = kb.bitnet.linear(x, q)
    packed = layers.BitLinear(512, 64, False, dtype=torch.float32)
    packed.weight = torch.from_numpy(kb.bitnet.pack(q, "transformers"))
    packed.weight_scale = torch.from_numpy(1 / q.planes["scale"])
    theirs = packed(torch.from_numpy(x)).numpy()
    assert (np.abs(y.view(np.int32).astype(np.int64) - theirs.view(np.int32)) <= 4).all()
    assert np.array_equal(packed.activation_quant(torch.from_numpy(x))[0].numpy(), kb.bitnet.quantize_activations(x)[0])
    online = layers.AutoBitLinear(512, 64, False, online_quant=True, dtype=torch.float32)
    online.weight = torch.nn.Parameter(torch.from_numpy(w))
    assert np.allclose(online(torch.from_numpy(x)).detach().numpy(), y, rtol=0, atol=1e-6 * np.abs(y).max())


# ---- routes ----------------------------------------------------------------------------------------------------------


def test_explain(xp):
    found = {
        (granularity, activations): kb.explain(
            xp.zeros((3, 64), np.float32), weight(16, 64, granularity, xp), activations=activations
        )
        for granularity in ("tensor", ("group", 32))
        for activations in ("bitnet", "int8")
    }
    for (granularity, _), explanation in found.items():
        assert explanation.route == ("ternary_numpy" if xp is np else "ternary")
        if xp is not np and granularity != "tensor":
            assert "multiply_groups" in explanation[0].reason


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x, q: kb.bitnet.linear(x, kb.quantize(x, "int8")), FormatError, "must be .* in ternary"),
        (lambda x, q: kb.bitnet.linear(x, x), TypeError, "q is ndarray"),
        (lambda x, q: kb.bitnet.linear(x[:, :5], q), ValueError, r"needs \[..., 64\]"),
        (lambda x, q: kb.bitnet.linear(np.float32(1), q), ValueError, r"needs \[..., 64\]"),
        (lambda x, q: kb.bitnet.linear(x.astype(int), q), TypeError, "x is int64"),
        (lambda x, q: kb.bitnet.linear(x, q, bits=9), FormatError, "bits is 9; allowed are 2 to 8"),
        (lambda x, q: kb.bitnet.linear(x, q, bits=1), FormatError, "bits is 1"),
        (lambda x, q: kb.bitnet.linear(x, q, bits=True), FormatError, "bits is True"),
        (lambda x, q: kb.bitnet.linear(x, q, granularity="row"), FormatError, "granularity is 'row'"),
        (lambda x, q: kb.bitnet.linear(x, q, rounding="up"), FormatError, "rounding is 'up'"),
        (lambda x, q: kb.bitnet.linear(x, q, qmin=-7), FormatError, "qmin is -7; allowed are -128 and -127"),
        (lambda x, q: kb.bitnet.linear(x, q, eps=-1), FormatError, "eps is -1"),
        (lambda x, q: kb.bitnet.linear(x, q, norm=True, norm_eps="x"), FormatError, "norm_eps is 'x'"),
        (lambda x, q: kb.bitnet.linear(x, q, norm=x[0, :5]), ValueError, r"norm has shape \(5,\)"),
        (lambda x, q: kb.bitnet.linear(x, q, x[0]), ValueError, r"bias has shape \(64,\); it must be \(16,\)"),
        (lambda x, q: kb.bitnet.linear(x, q, out=x), ValueError, "out has shape"),
        (lambda x, q: kb.bitnet.linear(kb.quantize(x, "int8"), q, bits=4), FormatError, "leave them away"),
        (lambda x, q: kb.bitnet.linear(kb.quantize(x, "kbit4"), q), FormatError, "symmetric int8"),
        (lambda x, q: kb.bitnet.linear(x, kb.stack([q, q])), FormatError, "take one member"),
        (
            lambda x, q: kb.bitnet.linear(
                np.zeros((1, 131072), "f4"), kb.bitnet.from_trits(np.zeros((1, 131072), "i1"))
            ),
            ValueError,
            "K = 131072",
        ),
        (
            lambda x, q: kb.linear(x, kb.quantize(x, "kbit4"), activations="bitnet"),
            FormatError,
            "activations in bitnet.*kbit4.*in ternary",
        ),
        (lambda x, q: kb.bitnet.rms_norm(np.float32(1)), ValueError, "no axis"),
        (lambda x, q: kb.bitnet.quantize_activations(x, eps=np.nan), FormatError, "eps is nan"),
        (lambda x, q: kb.bitnet.dequantize_activations(x, x), TypeError, "q is float32"),
    ],
)
def test_bad_calls(call, error, message):
    with pytest.raises(error, match=message):
        call(np.ones((3, 64), np.float32), weight(16, 64))


def test_precompile(xp):
    assert kb.precompile(weight(16, 128, xp=xp), tokens=(1, 9), dtype="float32", activations="bitnet") >= 0


def test_rows_are_decoded_anywhere():
    q = weight(7, 100)
    t = kb.bitnet.trits(q)
    for first in range(7):
        for last in range(first + 1, 8):
            assert np.array_equal(ternary.decoded_rows(q.planes["codes"], 100, first, last), t[first:last])
