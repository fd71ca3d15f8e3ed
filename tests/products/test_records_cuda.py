"""Products of few tokens with GGUF's types by records (linear_records), and by fragments (linear_few) with those of 4
bits. Compute-sanitizer runs `TestSmall` and `TestFew`.
"""

import ml_dtypes
import numpy as np
import pytest
from gguf_planes import planes_of
from inputs import BFLOAT16

import kbitcupy as kb
from kbitcupy.array import QuantizedArray
from kbitcupy.products.records import Streamed
from kbitcupy.products.routes import Problem, device, stored
from kbitcupy.products.small_batch import SmallBatch
from kbitcupy.products.staged import StagedColumns, StagedFew, StagedHalves, StagedRecords, StagedStream, staged

pytestmark = pytest.mark.gpu

FORMATS = [name for name in kb.list_formats() if kb.get_format(name).records()]
HALF = [np.dtype("float16"), BFLOAT16]
FEW = ["q4_1", "iq4_nl", "iq4_xs", "mxfp4", "nvfp4", "nvfp4:tensor_scale=true"]
IN_PLACE = ["q4_1", "iq4_nl", "iq4_xs", "mxfp4"]  # codes of quantized tokens' weights are
IN_HALVES = ["nvfp4", "nvfp4:tensor_scale=true"]  # quantized tokens are sums of two halves
RECORDS, FRAGMENTS = Streamed(), SmallBatch()


def weight(name, shape, xp, seed=0):
    format = kb.get_format(name)
    planes = {plane: xp.asarray(array) for plane, array in planes_of(format, shape, seed).items()}
    return QuantizedArray(format, planes, shape, "float16")


def tokens(shape, dtype, xp, mean=0.0):
    x = np.random.default_rng(shape).standard_normal(shape) + mean
    return xp.asarray(x.astype(np.float32).astype(dtype))


def check(y, x, q, bias=None):
    """Sums as those of float32, then one rounding."""
    w, x = q.get().dequantize(dtype="float32").astype(np.float64), x.get().astype(np.float64)
    y = y.get().astype(np.float64)
    wanted, terms = x @ w.swapaxes(-1, -2), np.abs(x) @ np.abs(w).swapaxes(-1, -2)
    if bias is not None:
        bias = bias.get().astype(np.float64)
        wanted, terms = wanted + bias, terms + np.abs(bias)
    return y, wanted, terms


def assert_right(y, x, q, bias=None):
    eps = float(ml_dtypes.finfo(y.dtype).eps)
    y, wanted, terms = check(y, x, q, bias)
    assert (np.abs(y - wanted) <= 1e-5 * terms + eps / 2 * 1.01 * np.abs(wanted) + 1e-7).all()


def product(x, q, bias=None, route=RECORDS):
    """By a route, whatever the plan would be."""
    import cupy

    problem = Problem(q.format, q.shape, len(x), x.dtype, device(0), True, stored(q))
    refusal = route.accepts(problem)
    assert refusal is None, refusal
    y = cupy.full((len(x), q.shape[0]), np.nan, x.dtype)
    route.prepare(problem)(x, q, bias, y)
    return y


def assert_quantized(name, shape, route, dtype, cupy, bias=False):
    """Exact in what shares scales: within 2^-20 of the terms of what the tokens stand for."""
    n, k, m = shape
    q, x = weight(name, (n, k), cupy), tokens((m, k), dtype, cupy, mean=m % 2)
    added = tokens((n,), np.float32, cupy) if bias else None
    problem = Problem(q.format, q.shape, m, x.dtype, device(0), True, stored(q), "q8_1")
    refusal = route.accepts(problem)
    assert refusal is None, refusal
    y = cupy.full((m, n), np.nan, dtype)
    route.prepare(problem)(x, q, added, y)
    eps = 0.0 if dtype == np.float32 else float(ml_dtypes.finfo(dtype).eps)
    found, wanted, terms = check(y, staged(x), q, added)
    assert (np.abs(found - wanted) <= 2.0**-20 * terms + eps / 2 * 1.01 * np.abs(wanted)).all()


def assert_experts(name, n, k, cupy):
    experts = 5
    members = [weight(name, (n, k), cupy, seed) for seed in range(experts)]
    qs = kb.stack(members)
    x = tokens((9, k), np.float16, cupy)
    ids = np.random.default_rng(0).integers(-1, experts, (9, 2))
    gates = cupy.asarray(np.random.default_rng(1).random((9, 2), np.float32))
    found = kb.linear_grouped(x, qs, cupy.asarray(ids)).get().astype(np.float64)
    combined = kb.linear_grouped(x, qs, cupy.asarray(ids), gates).get().astype(np.float64)
    wanted = np.zeros((9, 2, n))
    for token, slot in np.ndindex(9, 2):
        if ids[token, slot] >= 0:
            w = members[ids[token, slot]].get().dequantize(dtype="float32").astype(np.float64)
            wanted[token, slot] = w @ x[token].get().astype(np.float64)
    np.testing.assert_allclose(found, wanted, rtol=2e-3, atol=2e-3 * np.abs(wanted).max())
    both = (wanted * gates.get()[..., None]).sum(1)
    np.testing.assert_allclose(combined, both, rtol=2e-3, atol=2e-3 * np.abs(both).max())


class TestSmall:
    @pytest.mark.parametrize("dtype", HALF, ids=str)
    @pytest.mark.parametrize("name", FORMATS)
    def test_odd_shapes(self, cupy, name, dtype):
        for n, k, m in ((1, 256, 1), (33, 512, 3), (16, 2304, 8), (40, 768, 11)):
            q = weight(name, (n, k), cupy)
            bias = tokens((n,), np.float32, cupy) if m != 3 else None
            x = tokens((m, k), dtype, cupy, mean=m % 2)
            assert_right(product(x, q, bias), x, q, bias)

    @pytest.mark.parametrize("name", FORMATS)
    def test_quantized_tokens(self, cupy, name):
        for shape in ((1, 256, 1), (33, 2304, 3), (40, 768, 11), (40, 20480, 4)):
            assert_quantized(name, shape, StagedRecords(), np.float32, cupy)

    @pytest.mark.parametrize("name", ["q4_1", "q6_k", "iq2_xs", "nvfp4:tensor_scale=true"])
    def test_experts(self, cupy, name):
        assert_experts(name, 40, 512, cupy)


class TestFew:
    @pytest.mark.parametrize("dtype", HALF, ids=str)
    @pytest.mark.parametrize("name", FEW)
    def test_shapes(self, cupy, name, dtype):
        """Tiles and rows that end, whole ones that thread blocks share, two tiles of tokens; odd blocks of a row."""
        format = kb.get_format(name)
        block = format.fragments().multiple or format.block
        shapes = (1, block, 1), (33, 3 * block, 3), (64, 1024, 5), (2064, 2304, 8), (272, 4096, 16), (40, 768, 11)
        for n, k, m in shapes:
            q = weight(name, (n, k), cupy)
            bias = tokens((n,), np.float32, cupy) if m != 3 else None
            x = tokens((m, k), dtype, cupy, mean=m % 2)
            assert_right(product(x, q, bias, FRAGMENTS), x, q, bias)

    @pytest.mark.parametrize("name", ["q4_0", "q8_0", "q4_1", "iq4_nl", "iq4_xs", "mxfp4", "nvfp4"])
    def test_quantized_tokens(self, cupy, name):
        block = max(kb.get_format(name).block, 32)
        for n, k, m in (
            (1, block, 1),
            (33, 3 * block, 3),
            (64, 1024, 8),
            (2064, 2304, 5),
            (272, 4096, 16),
            (40, 768, 11),
        ):
            assert_quantized(name, (n, k, m), StagedFew(), np.float32, cupy, m == 3)
        assert_quantized(name, (272, 4096, 4), StagedFew(), np.float16, cupy, True)

    @pytest.mark.parametrize("dtype", [*HALF, np.dtype("float32")], ids=str)
    def test_quantized_tokens_as_rows(self, cupy, dtype):
        """More than 8 tokens of nvfp4: an odd number of k-tiles, and three tiles of rows for a warp."""
        assert_quantized("nvfp4", (17408, 1152, 13), StagedFew(), dtype, cupy, True)

    @pytest.mark.parametrize("name", IN_HALVES)
    def test_quantized_tokens_in_two_halves(self, cupy, name):
        """Warps with half of their k-tiles or none, blocks that share k and such that do not; any types."""
        for shape in ((16, 256, 1), (48, 768, 3), (2064, 2304, 2), (272, 4096, 4), (64, 8192, 1), (4400, 5376, 4)):
            assert_quantized(name, shape, StagedHalves(), np.float32, cupy, shape[2] == 3)
        for dtype in HALF:
            for m in (1, 4):
                assert_quantized(name, (272, 3072, m), StagedHalves(), dtype, cupy, True)

    @pytest.mark.parametrize("name", IN_PLACE)
    def test_quantized_tokens_of_codes_in_place(self, cupy, name):
        """Half a share of a warp, rows that end; tokens of the blocks' own and of a launch ahead."""
        shapes = (1, 256, 1), (33, 768, 3), (64, 1024, 8), (2064, 2304, 5), (272, 4096, 16), (40, 1280, 11)
        if name == "iq4_xs":  # of more than 8 tokens
            shapes = (1, 512, 9), (33, 1536, 16), (2064, 2560, 12)
        for shape in shapes:
            assert_quantized(name, shape, StagedStream(), np.float32, cupy, shape[2] in (3, 12))
        for dtype in HALF:
            for m in (12,) if name == "iq4_xs" else (1, 4, 12):
                assert_quantized(name, (272, 3072, m), StagedStream(), dtype, cupy, True)

    @pytest.mark.parametrize(("n", "k"), [(40, 256), (48, 2048)])
    @pytest.mark.parametrize("name", ["q4_0", "q4_k", *FEW])
    def test_experts(self, cupy, name, n, k):
        assert_experts(name, n, k, cupy)


@pytest.mark.parametrize("name", ["q5_1", "q5_k", "q6_k", "iq3_s", "tq1_0"])
def test_long_rows_and_the_same_bits(cupy, name):
    """Rows that thread blocks share, since x is too long for one of them; twenty times."""
    for n, k, m in ((48, 24576, 8), (3000, 4096, 5), (8192, 2048, 17)):
        q, x = weight(name, (n, k), cupy), tokens((m, k), np.float16, cupy)
        y = product(x, q)
        assert_right(y, x, q)
        for _ in range(20):
            assert (product(x, q) == y).all()


@pytest.mark.parametrize("dtype", [*HALF, np.dtype("float32")], ids=str)
@pytest.mark.parametrize("name", ["q4_1", "q2_k", "q6_k", "iq2_xs"])
def test_quantized_tokens_of_any_type(cupy, name, dtype):
    """Eight at once and sixteen; rows that thread blocks share."""
    for shape in ((33, 768, 5), (48, 20480, 13), (40, 28672, 8)):
        assert_quantized(name, shape, StagedRecords(), dtype, cupy, shape[2] == 5)


@pytest.mark.parametrize("name", IN_PLACE)
def test_many_tiles_of_codes_in_place(cupy, name):
    """Teams with several tiles, tokens that do not fit at once, rows that start anywhere; the same bits each time."""
    for n, k, m in ((9000, 512, 8), (4500, 1024, 16), (40, 40960, 16), (4400, 20480, 5), (5000, 4352, 1)):
        if name == "iq4_xs" and m <= 8:
            continue
        assert_quantized(name, (n, k, m), StagedStream(), np.float32, cupy)
        q, memory = weight(name, (n, k), cupy), cupy.zeros(m * k + 3, np.float16)
        x = memory[3:].reshape(m, k)
        x[...] = tokens((m, k), np.float16, cupy)
        assert kb.explain(x, q, activations="q8_1").route == "staged_stream"
        first = kb.linear(x, q, activations="q8_1")
        assert (first == kb.linear(x.copy(), q, activations="q8_1")).all()
        for _ in range(20):
            assert (first == kb.linear(x, q, activations="q8_1")).all()


@pytest.mark.parametrize(
    ("m", "route"), [(1, StagedColumns()), (4, StagedHalves()), (8, StagedFew()), (12, StagedFew())]
)
def test_every_scale_of_nvfp4(cupy, m, route):
    """Bit 7 counts for nothing, and 0x7f is no number, but 0xff is one."""
    q, x = weight("nvfp4", (48, 1024), cupy), tokens((m, 1024), np.float16, cupy)
    scales = q.planes["scales"]
    scales[...] = cupy.asarray(np.random.default_rng(0).permutation(np.arange(scales.size) % 256), np.uint8)
    problem = Problem(q.format, q.shape, m, x.dtype, device(0), True, stored(q), "q8_1")
    assert route.accepts(problem) is None
    y = cupy.empty((m, 48), np.float16)
    route.prepare(problem)(x, q, None, y)
    found, wanted, terms = check(y, staged(x), q)
    assert (np.abs(found - wanted) <= 2.0**-20 * terms + 2.0**-11 * 1.01 * np.abs(wanted)).all()
    assert_right(product(x, q, route=FRAGMENTS), x, q)
    assert_right(product(x, q), x, q)


def test_every_power_of_two_of_codes_in_place(cupy):
    """Each byte is the scale of a row of mxfp4; of the larger ones results would overflow."""
    q, x = weight("mxfp4", (236, 512), cupy), tokens((9, 512), np.float32, cupy)
    q.planes["scales"].reshape(236, -1)[...] = cupy.arange(236, dtype=np.uint8)[:, None]
    y = kb.linear(x, q, activations="q8_1")
    assert kb.explain(x, q, activations="q8_1").route == "staged_stream"
    found, wanted, terms = check(y, staged(x), q)
    assert (np.abs(found - wanted) <= 2.0**-20 * terms + 2.0**-146).all()
    assert found.any(axis=0).all()  # those of subnormal scales, too


def test_powers_of_two_of_any_size_side_by_side(cupy):
    """Rows whose scales are large beside rows whose scales are small, and blocks, with small tokens."""
    q, x = weight("mxfp4", (236, 512), cupy), tokens((12, 512), np.float32, cupy) * np.float32(2.0**-40)
    for shape in ((236, 1), (236, 16)):
        powers = np.random.default_rng(0).integers(0, 251, shape)
        q.planes["scales"].reshape(236, -1)[...] = cupy.asarray(powers, np.uint8)
        for m in (5, 12):
            y = kb.linear(x[:m], q, activations="q8_1")
            found, wanted, terms = check(y, staged(x[:m]), q)
            assert (np.abs(found - wanted) <= 2.0**-20 * terms + 2.0**-146).all()


@pytest.mark.parametrize(
    ("name", "n", "route"),
    [("q5_0", 33, StagedRecords()), ("iq1_s", 33, StagedRecords()), ("nvfp4", 48, StagedHalves())],
)
def test_quantized_tokens_that_are_no_numbers(cupy, name, n, route):
    """NaN counts as 0 and an infinity as the largest number; a block of zeros has codes of zeros."""
    q, x = weight(name, (n, 768), cupy), tokens((4, 768), np.float32, cupy)
    x[0, 5], x[1, 40], x[1, 70], x[3] = np.nan, np.inf, -np.inf, 0
    problem = Problem(q.format, q.shape, 4, x.dtype, device(0), True, stored(q), "q8_1")
    found, wanted = cupy.empty((2, 4, n), np.float32)
    multiply = route.prepare(problem)
    multiply(x, q, None, found)
    multiply(cupy.nan_to_num(x), q, None, wanted)
    assert (found.view(np.uint32) == wanted.view(np.uint32)).all()
    within = [0, 2, 3] if name == "nvfp4" else [0, 1, 2, 3]  # of nvfp4 some results are beyond float32
    assert cupy.isfinite(found[within]).all() and not found[3].any() and found[1].any()


def test_halves_of_small_numbers_beside_large_ones(cupy):
    """They keep their bits where the large ones meet weights of zero."""
    q = weight("nvfp4", (48, 1024), cupy)
    q.planes["qs"].reshape(48, -1, 32)[:, :, :16] = 0
    zero = ~q.get().dequantize().reshape(48, 32, 32).any(axis=(0, 2))
    assert zero.sum() == 16
    x = tokens((4, 1024), np.float32, cupy)
    x.reshape(4, 32, 32)[:, cupy.asarray(zero)] *= np.float32(2.0**20)
    problem = Problem(q.format, q.shape, 4, x.dtype, device(0), True, stored(q), "q8_1")
    y = cupy.empty((4, 48), np.float32)
    StagedHalves().prepare(problem)(x, q, None, y)
    found, wanted, terms = check(y, staged(x), q)
    assert (np.abs(found - wanted) <= 2.0**-20 * terms).all()


@pytest.mark.parametrize(("name", "n", "route"), [("iq1_m", 33, StagedRecords()), ("nvfp4", 48, StagedHalves())])
def test_halves_of_tokens_of_any_size(cupy, name, n, route):
    """A power of two changes no bit but those of exponents."""
    q, x = weight(name, (n, 768), cupy), tokens((3, 768), np.float32, cupy)
    problem = Problem(q.format, q.shape, 3, x.dtype, device(0), True, stored(q), "q8_1")
    y, scaled = cupy.empty((2, 3, n), np.float32)
    multiply = route.prepare(problem)
    multiply(x, q, None, y)
    for power in (2.0**-60, 2.0**100):
        multiply(x * np.float32(power), q, None, scaled)
        assert (scaled == y * np.float32(power)).all()


@pytest.mark.parametrize("m", [8, 12])
def test_nvfp4_with_tokens_of_any_size(cupy, m):
    """A power of two of small or large tokens changes no bit but those of exponents."""
    q, x = weight("nvfp4", (41, 768), cupy), tokens((m, 768), np.float32, cupy)
    problem = Problem(q.format, q.shape, m, x.dtype, device(0), True, stored(q), "q8_1")
    y, scaled = cupy.empty((2, m, 41), np.float32)
    multiply = StagedFew().prepare(problem)
    multiply(x, q, None, y)
    for power in (2.0**-80, 2.0**100):
        multiply(x * np.float32(power), q, None, scaled)
        assert (scaled == y * np.float32(power)).all() and cupy.isfinite(scaled).all()


@pytest.mark.parametrize("name", ["q2_k", "q6_k", "iq3_s"])
def test_bfloat16_of_any_size(cupy, name):
    """As halves they are multiplied by a power of two, which changes nothing but the exponent."""
    q, x = weight(name, (33, 2304), cupy), tokens((3, 2304), BFLOAT16, cupy)
    x[:, 300:310] *= BFLOAT16.type(2.0**-20)
    y = product(x, q)
    assert_right(y, x, q)
    for power in (2.0**-90, 2.0**100):
        scaled = product((x.astype(np.float32) * np.float32(power)).astype(BFLOAT16), q)
        assert (scaled.astype(np.float32) == y.astype(np.float32) * np.float32(power)).all()


def test_a_part_of_an_array(cupy):
    """Rows that do not begin where memory does; and planes that cannot be copied from, which go another way."""
    q = weight("q5_k", (64, 512), cupy)
    x = tokens((4, 512), np.float16, cupy)
    assert_right(product(x, q[7:40]), x, q[7:40])
    shifted = {name: cupy.concatenate([plane[:1], plane])[1:] for name, plane in q.planes.items()}
    moved = QuantizedArray(q.format, shifted, q.shape, "float16")
    problem = Problem(q.format, q.shape, 4, x.dtype, device(0), True, stored(moved))
    assert "planes do not start" in RECORDS.accepts(problem)
    assert_right(kb.linear(x, moved), x, moved)


@pytest.mark.parametrize("name", FORMATS)
def test_it_is_what_a_product_takes(cupy, name):
    q = weight(name, (4096, 4096), cupy)
    found = kb.explain(cupy.ones((4, 4096), np.float16), q)
    fragments = q.format.fragments()
    few = fragments is not None and fragments.small_batch
    assert found.route == "small_batch" if few else found.route in ("records", "hopper")
    assert "decoded in registers" in found[0].reason
