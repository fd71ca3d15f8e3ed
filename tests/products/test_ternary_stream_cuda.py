"""Ternary products on a GPU, most of them with codes that are read in place, give NumPy's bits.

Class `TestSmall` is what compute-sanitizer runs.
"""

import numpy as np
import pytest
from fuzz_ternary import DTYPES, clear_plans
from inputs import make, same_values

import kbitcupy as kb
from kbitcupy.products import activations, ternary_rows

pytestmark = pytest.mark.gpu

GRANULARITIES = ["tensor", ("channel", 0), ("group", 32), ("group", 64), ("group", 128)]


def weights(cupy, rng, rows, depth, granularity):
    """A ternary weight with all four codes, on the host and on the GPU."""
    count = 1 if granularity == "tensor" else rows
    if granularity[0] == "group":
        count *= depth // granularity[1]
    scale = (rng.random(count) * np.exp2(rng.integers(-9, 3, count))).astype(np.float32)
    trits = rng.integers(-1, 2, (rows, depth)).astype(np.int8)
    q = kb.bitnet.from_trits(trits, scale, granularity=granularity)
    if rng.random() < 0.3:
        q.planes["codes"][:] = rng.integers(0, 256, q.planes["codes"].shape)
    planes = {name: cupy.asarray(plane) for name, plane in q.planes.items()}
    return q, kb.QuantizedArray(q.format, planes, q.shape, q.dtype)


@pytest.fixture(params=["by size", "any"])
def least_rows(request, monkeypatch):
    """Warps have rows of their own where a weight is large enough, or any."""
    if request.param == "any":
        monkeypatch.setattr(ternary_rows, "LEAST_ROWS", 0)
    clear_plans()
    yield request.param
    clear_plans()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_random_products(cupy, dtype, granularity, least_rows):
    own = least_rows == "any"
    rng = np.random.default_rng([dtype.itemsize, GRANULARITIES.index(granularity), own])
    for _ in range(30):
        tokens, rows, depth = int(rng.integers(1, 36)), int(rng.integers(1, 200)), 128 * int(rng.integers(1, 40))
        if own:
            tokens, rows = int(rng.integers(1, 9)), int(rng.choice([rows, rows * 17]))
        q, on = weights(cupy, rng, rows, depth, granularity)
        x = make(rng.choice(["normal", "special", "wide"]), tokens * depth, dtype, int(rng.integers(99)))
        x = x.reshape(tokens, depth)
        bias = make("normal", rows, DTYPES[rng.integers(4)], 5) if rng.random() < 0.5 else None
        norm = (None, True, make("normal", depth, DTYPES[2], 7))[rng.integers(3)]
        options = ({}, {"granularity": "tensor"}, {"bits": 4, "rounding": "away"})[rng.integers(3)]
        wanted = kb.bitnet.linear(x, q, bias, norm=norm, **options)
        given = cupy.asarray(norm) if isinstance(norm, np.ndarray) else norm
        y = kb.bitnet.linear(
            cupy.asarray(x), on, None if bias is None else cupy.asarray(bias), norm=given, **options
        ).get()
        assert same_values(y, wanted), (tokens, rows, depth, norm is None, options)


@pytest.mark.parametrize(
    ("shape", "granularity"),
    [
        ((4096, 4096), ("channel", 0)),
        ((2560, 6912), "tensor"),
        ((5120, 640), ("channel", 0)),
        ((300, 131_072 - 128), ("channel", 0)),
        ((4096, 4096), ("group", 64)),
        ((1100, 8192), ("group", 128)),
        ((700, 40_960), ("group", 32)),
        ((28672, 2048), "tensor"),
        ((22528, 1408), ("group", 64)),
        ((21500, 6400), ("channel", 0)),
    ],
    ids=str,
)
def test_large_products(cupy, shape, granularity):
    """Thread blocks with many rows, warps with many steps, tokens longer than a block keeps, every number of tokens."""
    rng = np.random.default_rng(shape)
    q, on = weights(cupy, rng, *shape, granularity)
    x = make("normal", 33 * shape[1], DTYPES[0]).reshape(33, shape[1])
    y = kb.bitnet.linear(x, q)
    given = cupy.asarray(x)
    for tokens in (*range(1, 18), 23, 24, 25, 31, 32, 33):
        assert same_values(kb.bitnet.linear(given[:tokens], on).get(), y[:tokens]), tokens
    again = kb.bitnet.linear(given[:8], on)
    assert all((kb.bitnet.linear(given[:8], on) == again).all() for _ in range(50))


@pytest.mark.parametrize("granularity", [("channel", 0), ("group", 64)], ids=str)
@pytest.mark.parametrize("shared", ["token", "tensor"])
def test_tokens_that_are_int8_already(cupy, shared, granularity):
    rng = np.random.default_rng(3)
    q, on = weights(cupy, rng, 70, 1280, granularity)
    x = make("normal", 19 * 1280, DTYPES[0]).reshape(19, 1280)
    for tokens in (1, 8, 9, 19):
        a = kb.quantize(x[:tokens], "int8", granularity=shared)
        b = kb.quantize(cupy.asarray(x[:tokens]), "int8", granularity=shared)
        assert same_values(kb.bitnet.linear(b, on).get(), kb.bitnet.linear(a, q))
        y = kb.linear(cupy.asarray(x[:tokens]), on, activations="int8").get()
        assert same_values(y, kb.linear(x[:tokens], q, activations="int8"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shared", ["token", "tensor"])
def test_one_token_that_is_int8_already(cupy, dtype, shared, any_rows):
    """In one launch as far as it has room, with bytes of every kind, which may begin anywhere."""
    rng = np.random.default_rng([dtype.itemsize, len(shared)])
    for rows, depth in ((150, 128), (33, 1280), (300, 4096), (150, 8192), (70, 8320), (40, 16384), (20, 16512)):
        granularity = GRANULARITIES[rng.integers(2)]
        q, on = weights(cupy, rng, rows, depth, granularity)
        bias = make("normal", rows, DTYPES[rng.integers(4)], 5) if rng.random() < 0.5 else None
        added = None if bias is None else cupy.asarray(bias)
        x = make("normal", depth, dtype, depth).reshape(1, depth)
        given = kb.quantize(x, "int8", granularity=shared)
        given.planes["codes"][...] = rng.integers(-128, 128, given.planes["codes"].shape)
        wanted = kb.bitnet.linear(given, q, bias)
        for offset in (0, 1, 8, 16):
            planes = {name: cupy.asarray(plane) for name, plane in given.planes.items()}
            room = cupy.zeros(depth + offset, planes["codes"].dtype)
            room[offset:] = planes["codes"].ravel()
            planes["codes"] = room[offset:].reshape(planes["codes"].shape)
            token = kb.QuantizedArray(given.format, planes, given.shape, given.dtype)
            assert same_values(kb.bitnet.linear(token, on, added).get(), wanted), (rows, depth, offset)
        y = kb.linear(cupy.asarray(x), on, added, activations="int8").get()
        assert same_values(y, kb.linear(x, q, bias, activations="int8")), (rows, depth)


def test_planes_and_tokens_begin_anywhere(cupy):
    rng = np.random.default_rng(4)
    q, on = weights(cupy, rng, 40, 512, "tensor")
    x = make("normal", 3 * 512 + 1, DTYPES[0])
    wanted = kb.bitnet.linear(x[1:].reshape(3, 512), q)
    tokens = cupy.asarray(x)[1:].reshape(3, 512)
    assert same_values(kb.bitnet.linear(tokens, on).get(), wanted)
    for offset in (1, 8, 16):
        room = cupy.zeros(on.planes["codes"].size + offset, np.uint8)
        room[offset:] = on.planes["codes"]
        moved = kb.QuantizedArray(on.format, {**on.planes, "codes": room[offset:]}, on.shape, on.dtype)
        assert same_values(kb.bitnet.linear(tokens, moved).get(), wanted)
        route = "ternary_stream" if offset == 16 else "ternary"
        assert kb.explain(tokens, moved, activations="bitnet").route == route


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["normal", "special", "extreme", "subnormal", "huge", "zeros"])
def test_tokens_that_a_product_quantizes(cupy, dtype, kind, any_rows):
    """Numbers of every kind, tokens of every length that it takes and one more, with norms and rules."""
    rng = np.random.default_rng([dtype.itemsize, len(kind)])
    for tokens, depth in ((1, 128), (2, 4096), (8, 1280), (1, 8320), (17, 8192), (5, 16384), (3, 16512)):
        q, on = weights(cupy, rng, 150, depth, ("channel", 0))
        x = make(kind, tokens * depth, dtype, depth).reshape(tokens, depth)
        for norm in (None, True, make("normal", depth, DTYPES[2], 7), make("special", depth, DTYPES[2], 7)):
            for options in ({}, {"qmin": -127, "eps": 0, "norm_eps": 0}, {"bits": 4, "rounding": "away"}):
                wanted = kb.bitnet.linear(x, q, norm=norm, **options)
                given = cupy.asarray(norm) if isinstance(norm, np.ndarray) else norm
                y = kb.bitnet.linear(cupy.asarray(x), on, norm=given, **options).get()
                assert same_values(y, wanted), (tokens, depth, norm is None, options)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("group", [0, 32, 64, 128])
def test_tokens_that_clusters_quantize(cupy, dtype, group, monkeypatch):
    """Codes, sums and scales are those of the kernel of many tokens, wherever threads have their numbers."""
    rng = np.random.default_rng([dtype.itemsize, group])
    kinds = "normal", "special", "extreme", "subnormal", "zeros"
    for depth in (128, 384, 1920, 2048, 2176, 4096, 8192, 8320, 12288, 16384):
        tokens = int(rng.choice([1, 2, 7, 8, 9, 16, 32]))
        x = cupy.asarray(make(rng.choice(kinds), tokens * depth, dtype, depth).reshape(tokens, depth))
        weight = cupy.asarray(make("normal", depth, DTYPES[2], 7))
        norm = (None, activations.Norm(None, 1e-6), activations.Norm(weight, 1e-5))[rng.integers(3)]
        rule = (activations.Rule(), activations.Rule(4, "token", "away"), activations.Rule(eps=0))[rng.integers(3)]
        groups = -(-tokens // 8)
        found = []
        for most in (activations.MOST_FEW, 0):
            monkeypatch.setattr(activations, "MOST_FEW", most)
            activations.quantizing.cache_clear()
            codes = cupy.full(-(-depth // 256) * groups * 2048, 7, np.int8)
            sums, scales = cupy.zeros(-(-depth // 32) * 8 * groups, np.int32), cupy.zeros(tokens, np.float32)
            activations.quantize_into(x, tokens, rule, norm, codes, scales, sums, depth, groups, group)
            found.append([each.get().tobytes() for each in (codes, sums, scales)])
            monkeypatch.undo()
            activations.quantizing.cache_clear()
        assert found[0] == found[1], (depth, tokens, norm is None, rule)


def test_weights_that_were_just_written(cupy):
    """The product starts while what is ahead of its tokens is at work: it may not have read the weight by then."""
    rng = np.random.default_rng(8)
    shapes = (8, 4096, 8192), (3, 28672, 1024), (16, 2048, 4096), (1, 8192, 8192), (1, 28672, 4096), (8, 28672, 8192)
    for tokens, rows, depth in shapes:
        codes = [cupy.asarray(rng.integers(0, 256, rows * depth // 4, np.uint8)) for _ in range(2)]
        scale = cupy.ones(1, np.float32)
        q = kb.QuantizedArray(
            kb.get_format("ternary"), {"codes": codes[0].copy(), "scale": scale}, (rows, depth), DTYPES[0]
        )
        x = cupy.asarray(make("normal", tokens * depth, DTYPES[0]).reshape(tokens, depth))
        for given, norm in ((x, True), (kb.quantize(x, "int8", granularity="token"), None)):
            wanted = []
            for each in codes:
                q.planes["codes"][:] = each
                cupy.cuda.Device().synchronize()
                wanted.append(kb.bitnet.linear(given, q, norm=norm))
            differ = cupy.zeros((), np.int64)
            for i in range(60):
                if i < 30:
                    q.planes["codes"][:] = codes[i % 2]
                else:  # by a kernel
                    cupy.add(codes[i % 2], 0, out=q.planes["codes"])
                y = kb.bitnet.linear(given, q, norm=norm)
                differ += (y.view(np.uint16) != wanted[i % 2].view(np.uint16)).any()
            assert not int(differ), (tokens, rows, depth, norm)


def test_tokens_of_two_streams(cupy):
    """Products side by side share nothing but the weight."""
    rng = np.random.default_rng(9)
    _, on = weights(cupy, rng, 1000, 8192, "tensor")
    x = [cupy.asarray(make("normal", 8 * 8192, DTYPES[0], i).reshape(8, 8192)) for i in range(2)]
    wanted = [kb.bitnet.linear(each, on, norm=True) for each in x]
    cupy.cuda.Device().synchronize()
    streams, differ = [cupy.cuda.Stream(non_blocking=True) for _ in x], [cupy.zeros((), np.int64) for _ in x]
    cupy.cuda.Device().synchronize()
    for _ in range(50):
        for i, stream in enumerate(streams):
            with stream:
                y = kb.bitnet.linear(x[i], on, norm=True)
                differ[i] += (y.view(np.uint16) != wanted[i].view(np.uint16)).any()
    cupy.cuda.Device().synchronize()
    assert not any(int(each) for each in differ)


@pytest.mark.parametrize(("tokens", "depth"), [(1, 2048), (5, 2048), (3, 12288)])
def test_norms_between_two_numbers(cupy, tokens, depth, any_rows):
    """Where 1 / root is halfway between two float32, what is added up in another order might round otherwise."""
    rng = np.random.default_rng(tokens)
    q, on = weights(cupy, rng, 40, depth, "tensor")
    x = make("normal", tokens * depth, DTYPES[0], 3).reshape(tokens, depth)
    for token in range(tokens):
        mean = activations.mean_squares(x[token : token + 1].astype(np.float32))[0]
        for step in range(6):
            below = np.float32(1 / np.sqrt(1.5 * mean)) * np.float32(1 + 0.01 * step)
            half = (np.float64(below) + np.float64(np.nextafter(below, np.float32(np.inf)))) / 2
            eps = 1 / half**2 - mean
            wanted = kb.bitnet.linear(x, q, norm=True, norm_eps=eps)
            assert same_values(kb.bitnet.linear(cupy.asarray(x), on, norm=True, norm_eps=eps).get(), wanted)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("size", [1e-30, 1e-4, 1e4, 1e30], ids=str)
def test_floats_of_all_sizes(cupy, dtype, size, any_rows):
    """Products with subnormal numbers, and where tokens are too large or too small for them."""
    if dtype == np.float16 and not 1e-5 < size < 1e5:
        pytest.skip("float16 has no such numbers")
    rng = np.random.default_rng(6)
    q, on = weights(cupy, rng, 70, 1024, "tensor")
    q.planes["scale"][:] = on.planes["scale"][:] = 0.5
    x = (make("normal", 3 * 1024, DTYPES[2]) * np.float32(size)).astype(dtype).reshape(3, 1024)
    exact = x.astype(np.float64) @ q.dequantize(dtype=np.float32).astype(np.float64).T
    y = kb.linear(cupy.asarray(x), on).get().astype(np.float64)
    eps = 2.0**-11 if dtype == np.float16 else 2.0**-8
    inside = np.abs(exact) < (6e4 if dtype == np.float16 else np.inf)
    off = np.abs(y - exact) <= np.abs(exact) * eps * 1.01 + 1e-5 * np.abs(exact).max()
    assert off[inside].all()
    x[1, 5], x[2, 7] = np.nan, np.inf
    y = kb.linear(cupy.asarray(x), on).get()
    assert np.isnan(y[1]).all() and not np.isfinite(y[2]).any() and np.isfinite(y[0][inside[0]]).all()


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("granularity", ["tensor", ("channel", 0)], ids=str)
def test_floats(cupy, dtype, granularity, least_rows):
    """Against float64: at most twice as far off as a product of float32."""
    rng = np.random.default_rng([dtype.itemsize, len(granularity)])
    for tokens, rows, depth in [
        (1, 40, 128),
        (3, 17, 384),
        (8, 200, 2560),
        (16, 33, 4096),
        (11, 70, 8192),
        (1, 64, 16384),
    ]:
        q, on = weights(cupy, rng, rows, depth, granularity)
        x = make("normal", tokens * depth, dtype, depth).reshape(tokens, depth)
        bias = make("normal", rows, dtype, 5)
        given = cupy.asarray(x)
        assert rows * depth < 1e5 or kb.explain(given, on).route == "ternary_floats"
        for b in (None, bias):
            y = kb.linear(given, on, None if b is None else cupy.asarray(b)).get()
            w = q.dequantize(dtype=np.float32)
            exact = x.astype(np.float64) @ w.astype(np.float64).T + (0 if b is None else b.astype(np.float64))
            single = x.astype(np.float32) @ w.T + (np.float32(0) if b is None else b.astype(np.float32))
            # Of the result's own rounding, and of what is added up.
            error = np.abs(y.astype(np.float64) - exact)
            own = np.abs(exact) * (2.0**-11 if dtype == np.float16 else 2.0**-8) + 2.0**-24
            assert (error <= own + 2 * np.abs(single - exact).max() + 1e-6 * np.abs(w).max()).all(), (
                tokens,
                rows,
                depth,
            )
            assert (kb.linear(given, on, None if b is None else cupy.asarray(b)).get() == y).all()


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("shares", ["all", "experts", "rows"])
def test_experts(cupy, dtype, shares):
    """Against float64; ids of no expert, a row of x for each slot, slots that are combined."""
    rng = np.random.default_rng([dtype.itemsize, len(shares)])
    for tokens, slots, experts, rows, depth in [
        (1, 1, 3, 16, 128),
        (9, 2, 5, 300, 384),
        (40, 3, 4, 70, 2048),
        (70, 3, 4, 70, 2048),
    ]:
        members = [
            weights(cupy, rng, rows, depth, ("channel", 0) if shares == "rows" else "tensor") for _ in range(experts)
        ]
        if shares == "all":
            planes = {name: cupy.concatenate([m[1].planes[name] for m in members]) for name in ("codes", "scale")}
            planes["scale"] = planes["scale"][:1]
            on = kb.QuantizedArray(members[0][1].format, planes, (experts, rows, depth), members[0][1].dtype)
        else:
            on = kb.stack([m[1] for m in members])
        w = on.get().dequantize(dtype=np.float32).astype(np.float64)
        ids = rng.integers(-1, experts + 1, (tokens, slots))
        each = rng.random() < 0.5
        x = make("normal", tokens * (slots if each else 1) * depth, dtype, depth)
        x = x.reshape((tokens, slots, depth) if each else (tokens, depth))
        mixed = rng.random((tokens, slots)).astype(np.float32)
        given = cupy.asarray(x)
        assert kb.explain(given, on, expert_ids=ids).route == "grouped_ternary"
        wide = np.broadcast_to(x if each else x[:, None], (tokens, slots, depth)).astype(np.float64)
        exact = np.zeros((tokens, slots, rows))
        for t, s in np.argwhere((ids >= 0) & (ids < experts)):
            exact[t, s] = w[ids[t, s]] @ wide[t, s]
        y = kb.linear_grouped(given, on, cupy.asarray(ids))
        eps = 2.0**-11 if dtype == np.float16 else 2.0**-8
        bound = np.abs(exact) * eps + 1e-5 * np.abs(exact).max() + 2.0**-24
        assert (np.abs(y.get().astype(np.float64) - exact) <= bound).all(), (tokens, slots, experts)
        combined = kb.linear_grouped(given, on, cupy.asarray(ids), cupy.asarray(mixed)).get().astype(np.float64)
        wanted = (exact * mixed[:, :, None]).sum(1)
        assert (np.abs(combined - wanted) <= np.abs(wanted) * eps + 2e-5 * np.abs(exact).max() + 2.0**-24).all()
        assert (kb.linear_grouped(given, on, cupy.asarray(ids)) == y).all()


def test_what_explain_says(cupy):
    q = kb.bitnet.from_trits(cupy.zeros((64, 256), np.int8))
    more = "ternary_tile" if cupy.cuda.Device().compute_capability == "90" else "ternary"
    for tokens, route in ((1, "ternary_stream"), (32, "ternary_stream"), (33, more)):
        found = kb.explain(cupy.zeros((tokens, 256), np.float16), q, activations="bitnet")
        assert found.route == route
    reasons = {row.route: row.reason for row in found}
    assert "up to 32 tokens" in reasons["ternary_stream"] and "ternary_numpy" in reasons
    for group, route in ((64, "ternary_stream"), (96, "ternary")):
        q = kb.bitnet.from_trits(cupy.zeros((64, 384), np.int8), np.float32(1), granularity=("group", group))
        found = kb.explain(cupy.zeros((100, 384), np.float16), q, activations="bitnet")
        assert found.route == route and "groups" in found[0].reason


class TestSmall:
    @pytest.mark.parametrize("granularity", [*GRANULARITIES, ("group", 40)], ids=str)
    def test_products(self, cupy, granularity):
        """Codes in place, decoded, and by groups of any size; tokens that are quantized on the way, and before."""
        rng = np.random.default_rng(8)
        for tokens, rows, depth in [(1, 40, 128), (5, 17, 384), (19, 33, 2304), (40, 20, 256), (3, 9, 200)]:
            if granularity in (("group", 32), ("group", 64), ("group", 128)) and depth % 128:
                continue
            if granularity == ("group", 40) and depth % 40:
                continue
            q, on = weights(cupy, rng, rows, depth, granularity)
            x = make("normal", tokens * depth, DTYPES[0]).reshape(tokens, depth)
            given = cupy.asarray(x)
            for options in ({}, {"norm": True}, {"granularity": "tensor"}):
                assert same_values(kb.bitnet.linear(given, on, **options).get(), kb.bitnet.linear(x, q, **options))
            a, b = (kb.quantize(y, "int8", granularity="token") for y in (x, given))
            assert same_values(kb.bitnet.linear(b, on).get(), kb.bitnet.linear(a, q))

    @pytest.mark.parametrize("granularity", ["tensor", ("group", 32), ("group", 64), ("group", 128)], ids=str)
    def test_own_rows(self, cupy, least_rows, granularity):
        """Warps that have rows, as large weights have them: tokens quantized ahead and on the way; floats; experts."""
        rng = np.random.default_rng(9)
        for tokens, rows, depth in [(1, 40, 640), (2, 300, 1152), (7, 170, 384)]:
            q, on = weights(cupy, rng, rows, depth, granularity)
            x = make("normal", tokens * depth, DTYPES[0]).reshape(tokens, depth)
            given = cupy.asarray(x)
            for options in ({}, {"norm": True}):
                assert same_values(kb.bitnet.linear(given, on, **options).get(), kb.bitnet.linear(x, q, **options))
            if granularity != "tensor":
                continue
            exact = x.astype(np.float64) @ q.dequantize(dtype=np.float32).T.astype(np.float64)
            assert np.allclose(kb.linear(given, on).get(), exact, rtol=2e-3, atol=1e-2 * np.abs(exact).max())
            ids = rng.integers(-1, 3, (tokens, 2))
            experts, on_gpu = kb.stack([q, q]), kb.stack([on, on])
            wanted = kb.linear_grouped(x, experts, ids, activations="bitnet")
            assert same_values(kb.linear_grouped(given, on_gpu, cupy.asarray(ids), activations="bitnet").get(), wanted)
            y = kb.linear_grouped(given, on_gpu, cupy.asarray(ids)).get()
            assert np.allclose(y[ids >= 0][:, :5], np.where(ids[..., None] < 2, exact[:, None], 0)[ids >= 0][:, :5],
                               rtol=2e-3, atol=1e-2 * np.abs(exact).max())  # fmt: skip

    @pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
    def test_activations(self, cupy, dtype):
        for tokens, depth in [(2, 40), (3, 1031), (1, 8192 + 300)]:
            x = make("special", tokens * depth, dtype).reshape(tokens, depth)
            for granularity in ("token", "tensor"):
                wanted = kb.bitnet.quantize_activations(x, granularity=granularity)
                found = kb.bitnet.quantize_activations(cupy.asarray(x), granularity=granularity)
                assert all(a.get().tobytes() == b.tobytes() for a, b in zip(found, wanted, strict=True))
            assert same_values(kb.bitnet.rms_norm(cupy.asarray(x)).get(), kb.bitnet.rms_norm(x))


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES[:2], ids=str)
def test_experts_of_many_tokens(cupy, dtype, granularity):
    """Sorted by expert, and quantized by each thread block: products, and their sums over slots, are NumPy's."""
    rng = np.random.default_rng([dtype.itemsize, len(granularity)])
    kinds = "normal", "special", "extreme", "subnormal", "zeros"
    for tokens, slots, experts, rows, depth in (
        (65, 8, 20, 100, 256),
        (260, 1, 3, 769, 2048),
        (40, 7, 128, 33, 4096),
        (130, 2, 5, 400, 4224),
        (90, 3, 9, 17, 8192),
        (90, 3, 9, 17, 8320),
    ):
        members = [weights(cupy, rng, rows, depth, granularity) for _ in range(experts)]
        qs, on = (kb.stack([member[i] for member in members]) for i in range(2))
        each = rng.random() < 0.5
        shape = (tokens, slots, depth) if each else (tokens, depth)
        x = make(str(rng.choice(kinds)), int(np.prod(shape)), dtype, depth).reshape(shape)
        ids = rng.integers(-1, experts + 1, (tokens, slots))
        mixed = make("normal", ids.size, DTYPES[2], 3).reshape(ids.shape)
        given, chosen = cupy.asarray(x), cupy.asarray(ids)
        found = kb.explain(given, on, activations="bitnet", expert_ids=ids)
        assert found.route == "ternary_slots"
        for weight in (None, mixed):
            wanted = kb.linear_grouped(x, qs, ids, weight, activations="bitnet")
            of_slots = None if weight is None else cupy.asarray(weight)
            y = kb.linear_grouped(given, on, chosen, of_slots, activations="bitnet").get()
            assert same_values(y, wanted), (tokens, slots, rows, depth, each, weight is None)
