"""The kernels behind linear, linear_grouped and take. Class `TestSmall` is what compute-sanitizer runs."""

import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from inputs import BFLOAT16, fitting, same_values
from test_linear import FORMATS, HALF, check, error, exact, naive, numbers, reference, weight

import kbitcupy as kb
from kbitcupy.bench.cases import random_array as random_weight
from kbitcupy.products import decoded, fused, generic, hopper
from kbitcupy.products.functions import multiply_decoded
from kbitcupy.products.routes import Problem, device
from kbitcupy.products.small_batch import SmallBatch

pytestmark = pytest.mark.gpu


def of(format):
    """The format of what `weight` takes: a format, or one with a codebook."""
    return format[0] if isinstance(format, tuple) else format


# Formats that a kernel decodes.
DECODED = [format for format in FORMATS if of(format).fragments() is not None]
# ... and those among them that linear_tile decodes.
TILED = [format for format in DECODED if of(format).fragments().hopper]

# One format for each kernel that decodes.
KERNELS = list({dataclasses.replace(of(format).fragments(), known_values=()): format for format in DECODED}.values())


def check_tile(cupy, format, dtype, cut, number):
    """``linear_tile`` as the host would not choose it for such a shape."""
    if hopper.tile_refusal(Problem(of(format), (64, 512), 8, dtype, device(0))):
        pytest.skip("linear_tile is for compute capability 9.0")
    shape = fitting(of(format), (64 * cut.groups + 5 * (number % 3), 128 * (number % 5) + 128))
    q = weight(shape, format, cupy, scale=(1e-3, 1.0, 20.0)[number % 3])
    x = numbers((max(2, cut.tokens - number), shape[1]), dtype, cupy)
    bias = numbers(shape[:1], np.dtype("float32") if number % 2 else dtype, cupy)
    tile = hopper.TileKernel(of(format).fragments(), shape, dtype, device(0), cut)
    out = cupy.full((len(x), shape[0]), np.nan, dtype)
    tile(x, q, bias, out)
    check(out, x, q, bias)


def check_two_tiles(cupy, format, dtype):
    """Thread blocks that share k, and warpgroups that do."""
    for number, cut in enumerate((hopper.TileCut(16, 1, 4, 2), hopper.TileCut(64, 2, 2, 1))):
        check_tile(cupy, format, dtype, cut, number)


class TestSmall:
    """Every decoder at the edges of its tiles, turns and blocks."""

    @pytest.mark.parametrize("dtype", HALF, ids=str)
    @pytest.mark.parametrize("format", KERNELS, ids=repr)
    def test_every_kernel(self, cupy, format, dtype):
        for shape in ((33, 192), (144, 1024)):  # rows and tiles that are whole, and not
            shape = fitting(of(format), shape)
            q = weight(shape, format, cupy)
            bias = numbers(shape[:1], np.dtype("float32"), cupy)
            for m in (1, 8, 9, 16):
                x = numbers((m, shape[1]), dtype, cupy)
                check(kb.linear(x, q, bias), x, q, bias)

    @pytest.mark.parametrize("name", ["kbit2", "kbit3", "kbit4", "kbit5", "nf4"])
    def test_every_tile(self, cupy, name):
        check_two_tiles(cupy, kb.get_format(name), HALF[0])

    @pytest.mark.parametrize("dtype", HALF, ids=str)
    @pytest.mark.parametrize("format", ["kbit4", "kbit3", "nf4"])
    def test_experts(self, cupy, format, dtype):
        w = [weight((40, 256), format, cupy, seed=i, scale=10.0**-i) for i in range(5)]
        qs = kb.stack(w)
        for tokens, slots, shared in ((1, 2, True), (30, 2, False), (4, 5, True)):
            ids = np.random.default_rng(tokens).integers(-1, 6, (tokens, slots))
            x = numbers((tokens, 256) if shared else (tokens, slots, 256), dtype, cupy)
            weights = numbers((tokens, slots), np.dtype("float32"), cupy)
            for given_weights in (None, weights):
                y = kb.linear_grouped(x, qs, cupy.asarray(ids), given_weights)
                wanted = reference(x, qs.dequantize(dtype="float32"), ids, given_weights)
                limit = 2.0**-7 if dtype == BFLOAT16 else 2.0**-10
                assert error(y, wanted) <= limit * np.sqrt(np.mean(np.square(wanted)))

    def test_scales_of_decoded_weights(self, cupy):
        """With an offset, with values on the device, of a few blocks and of more than a thread block has threads."""
        for name in (
            "nf4:block=16,double_quant=true",
            "kbit4:absmax=float32",
            "int8:block=16",
            "uint4:symmetric=false",
            "uint4:block=16,zero=float",
            "int8:block=16,zero=float,scale_dtype=bfloat16",
        ):
            for shape in ((3, 48), (96, 1040)):
                q, x = weight(shape, name, cupy), numbers((40, shape[1]), HALF[0], cupy)
                check(kb.linear(x, q), x, q)
        q = kb.quantize(
            cupy.asarray(np.random.default_rng(0).random((64, 64), np.float32)), "table4", codebook=range(16)
        )
        x = numbers((200, 64), HALF[0], cupy)
        check(kb.linear(x, q), x, q)

    @pytest.mark.parametrize("dtype", [*HALF, np.dtype("float32")], ids=str)
    @pytest.mark.parametrize("format", FORMATS, ids=repr)
    def test_rows(self, cupy, format, dtype):
        q = weight((37, 4096), format, cupy)
        decoded = q.dequantize(dtype=dtype).get()
        for kind in (np.int32, np.int64, np.uint8):
            ids = np.random.default_rng(0).integers(0, 37, (3, 2)).astype(kind)
            assert same_values(kb.take(q, cupy.asarray(ids), dtype=dtype).get(), decoded[ids])
        room = cupy.zeros(2 * 4096 + 3, dtype)
        kb.take(q, [5, -1], out=room[3:].reshape(2, 4096))
        assert same_values(room[3:].get().reshape(2, 4096), decoded[[5, -1]]) and not room[:3].any()


@pytest.mark.parametrize("format", TILED, ids=repr)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_every_decoder_of_tiles(cupy, format, dtype):
    check_two_tiles(cupy, format, dtype)


@pytest.mark.parametrize("name", ["kbit4", "nf4"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_every_cut_of_a_tile(cupy, name, dtype):
    for number, cut in enumerate(hopper.tile_cuts()):
        check_tile(cupy, kb.get_format(name), dtype, cut, number)


@pytest.mark.parametrize("format", FORMATS, ids=repr)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_error_of_every_format(cupy, format, dtype):
    """At most twice the naive error; odd shapes and float32 weights of 1e-6 included."""
    for shape in ((257, 512), (100, 1376), (65, 333), (96, 768)):
        shape = fitting(of(format), shape)
        q = weight(shape, format, cupy, scale=0.02)
        for m in (*range(1, 18), 31, 32, 33, 64, 127, 128, 129, 500):
            x = numbers((m, shape[1]), dtype, cupy)
            check(kb.linear(x, q), x, q)


@pytest.mark.parametrize("dtype", [*HALF, np.dtype("float32")], ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_the_simple_product(cupy, format, dtype):
    """Any format that has a decoder, whatever way its products take otherwise; every kind of bias."""
    if of(format).decoder is None:
        pytest.skip("it has no decoder")
    for number, shape in enumerate(((40, 256), (33, 224), (7, 4096))):
        shape = fitting(of(format), shape)
        q = weight(shape, format, cupy)
        for m in (1, 8, 11):
            x, out = numbers((m, shape[1]), dtype, cupy), cupy.empty((m, shape[0]), dtype)
            bias = (None, numbers(shape[:1], dtype, cupy), numbers(shape[:1], np.dtype("float32"), cupy))[number]
            generic.multiply(x, q, bias, out)
            check(out, x, q, bias)


@settings(max_examples=60)
@given(
    m=st.integers(1, 70),
    n=st.integers(64, 700),
    k=st.integers(1, 1500),
    dtype=st.sampled_from(HALF),
    format=st.sampled_from(DECODED),
)
def test_any_shape(cupy, m, n, k, dtype, format):
    n, k = fitting(of(format), (n, k))
    q = weight((n, k), format, cupy)
    x = numbers((m, k), dtype, cupy)
    check(kb.linear(x, q), x, q)


@pytest.mark.parametrize("format", KERNELS, ids=repr)
def test_one_token(cupy, format):
    """Units of two and four items, warps that meet no tile or several, thread blocks with a tile less than others."""
    for number, shape in enumerate([(16, 256), (48, 4352), (2240, 768), (2240, 1536), (4256, 512)]):
        dtype = HALF[number % 2]
        q, x = weight(shape, format, cupy), numbers((1, shape[1]), dtype, cupy)
        bias = numbers(shape[:1], dtype, cupy)
        if fused.Decoder(q.format.fragments()).single:
            assert kb.explain(x, q).route == "single_token"
        check(kb.linear(x, q, bias), x, q, bias)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(
    "format", ["q4_0", "q4_1", "q4_k", "iq4_nl", "iq4_xs", "int4:block=64", "uint4:block=128,zero=int"]
)
def test_one_and_two_tokens_are_those_of_eight(cupy, format, dtype):
    """They may come line by line where eight come in boxes, and the last warps of a cluster have no k of their own."""
    if device(0).capability != 90:
        pytest.skip("thread blocks share k as clusters on compute capability 9.0")
    for shape in ((528, 6400), (2064, 4352), (4112, 512)):
        q, x = weight(shape, kb.get_format(format), cupy), numbers((8, shape[1]), dtype, cupy)
        assert {kb.explain(x[:m], q).route for m in (1, 2, 8)} == {"small_batch"}
        eight = kb.linear(x, q)
        check(eight, x, q)
        kernel = SmallBatch()._kernel(Problem(q.format, shape, 1, dtype, device(0)))
        for m in (1, 2):
            y = kb.linear(x[:m], q)
            if m == 1 and kernel.columns:  # it adds up in another order
                check(y, x[:1], q)
            else:
                assert bool((y.view(np.uint16) == eight[:m].view(np.uint16)).all())


@pytest.mark.parametrize("format", ["q4_1", "q4_k", "q6_k", "iq4_nl", "iq4_xs", "mxfp4"])
def test_each_element_of_one_token(cupy, format):
    """Its parts have columns of their own: a token with one element brings a column of the weight, whichever it is."""
    n, k = 1056, 1536
    q, out = weight((n, k), kb.get_format(format), cupy), cupy.empty((k, n), np.float16)
    if device(0).capability == 90 and format != "q6_k":
        assert SmallBatch()._kernel(Problem(q.format, (n, k), 1, HALF[0], device(0))).columns
    for i, x in enumerate(cupy.eye(k, dtype=np.float16)):
        kb.linear(x[None], q, out=out[i : i + 1])
    wanted = kb.dequantize(q, dtype=np.float32).T
    assert bool((abs(out - wanted) <= 2.0**-10 * abs(wanted).max()).all())


@pytest.mark.parametrize("format", ["q4_1", "q4_k", "q6_k"])
def test_subnormal_tokens(cupy, format):
    """Codes are halves as they are, far below 1: the smallest tokens make the same sums as larger ones, too."""
    q = weight((1056, 1024), kb.get_format(format), cupy, scale=2.0**13)
    x = cupy.asarray(np.random.default_rng(0).integers(-7, 8, (16, 1024)).astype(np.float16))
    for m in (1, 2, 8, 16):
        small, large = (kb.linear(x[:m] * np.float16(2.0**-power), q) for power in (24, 10))
        check(large, x[:m] * np.float16(2.0**-10), q)
        off = abs(small.astype(np.float32) * 2.0**14 - large.astype(np.float32))
        assert large.any() and bool((off <= 2.0**-10).all())  # where the small ones are subnormal


@pytest.mark.parametrize("scale", [1e-6, 1e-12, 1e4, 1e6])
@pytest.mark.parametrize("options", [{"absmax": "float32"}, {"absmax": "float16"}, {}])
def test_scales_far_from_one(cupy, options, scale):
    q = weight((256, 512), kb.get_format("kbit4", **options), cupy, scale=scale)
    for m in (1, 8):
        x = numbers((m, 512), np.dtype("float16"), cupy)
        big = (x.astype(np.float32) * min(1e3, 1 / scale / 100)).astype(np.float16)
        wanted = exact(big, q)
        y = kb.linear(big, q)
        limit = 2.0**-10 * np.sqrt(np.mean(np.square(wanted)))
        assert error(y, wanted) <= max(limit, 2.0**-25)


@pytest.mark.parametrize("format", ["kbit4", "kbit5", "nf4"])
@pytest.mark.parametrize("shape", [(4096, 4096), (1000, 2048), (64, 8192), (512, 4352)])
def test_the_same_bits_every_time(cupy, format, shape):
    q = weight(shape, format, cupy)
    for m in (1, 8, 16, 32):
        x = numbers((m, shape[1]), np.dtype("float16"), cupy)
        assert m > 16 or kb.explain(x, q).route in ("single_token", "small_batch", "hopper")
        first = kb.linear(x, q)
        for _ in range(50):
            assert bool((kb.linear(x, q).view(np.uint16) == first.view(np.uint16)).all())
    qs = kb.stack([q[:64].copy() for _ in range(3)]) if format == "nf4" else None
    if qs is not None:
        ids = cupy.asarray(np.random.default_rng(0).integers(0, 3, (40, 2)))
        x = numbers((40, shape[1]), np.dtype("float16"), cupy)
        first = kb.linear_grouped(x, qs, ids)
        for _ in range(50):
            assert bool((kb.linear_grouped(x, qs, ids).view(np.uint16) == first.view(np.uint16)).all())


READS = r"""
extern "C" __global__ void reads(const unsigned* from, unsigned* to, int loads) {
    unsigned at = blockIdx.x * blockDim.x + threadIdx.x, sum = 0;
    for (int i = 0; i < loads; ++i) at = at * 1664525u + 1013904223u, sum += from[at & (1u << 28) - 1];
    to[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
"""


class Crowd:
    """Reads all over 1 GiB of memory by another stream, on every multiprocessor, so that loads of others wait."""

    def __init__(self, cupy):
        self.cupy, self.stream, self.ends = cupy, cupy.cuda.Stream(non_blocking=True), []
        self.blocks = 2 * cupy.cuda.Device().attributes["MultiProcessorCount"]
        self.kernel = cupy.RawKernel(READS, "reads")
        self.memory, self.sums = cupy.zeros(1 << 28, np.uint32), cupy.zeros(256 * self.blocks, np.uint32)
        cupy.cuda.Device().synchronize()

    def queue(self):
        """Keep two kernels under way."""
        self.ends = [end for end in self.ends if not end.done]
        with self.stream:
            while len(self.ends) < 2:
                self.kernel((self.blocks,), (256,), (self.memory, self.sums, np.int32(200)))
                self.ends.append(self.stream.record(self.cupy.cuda.Event(disable_timing=True)))


def assert_repeats(call, wanted, crowd):
    """The same bits 60 times, and about the wanted numbers."""
    first = call()
    off = (first.astype(np.float32) - wanted.astype(np.float32)).get()
    assert np.abs(off).max() <= 2.0**-5 * np.sqrt(np.mean(np.square(wanted.get().astype(np.float64))))
    for _ in range(60):
        crowd.queue()
        assert bool((call().view(np.uint16) == first.view(np.uint16)).all())


@pytest.mark.parametrize(
    "format", ["kbit2", "kbit3", "kbit4", "kbit5", "kbit8", "nf4", "nf4 double", "q4_0", "q8_0", "q4_k"]
)
def test_weights_that_keep_the_memory_busy(cupy, format):
    """Copies that arrive while the numbers before them are still being read would show here."""
    format = kb.get_format(format.split()[0], **({"double_quant": True} if " " in format else {}))
    n, k = 14336, 8192
    q = random_weight(format, (n, k), cupy)
    x = numbers((64, k), HALF[0], cupy) * np.float16(2**-6)
    wanted, crowd = cupy.empty((64, n), np.float16), Crowd(cupy)
    multiply_decoded(x, q, wanted)
    for m in (1, 8, 16, 64):
        assert_repeats(functools.partial(kb.linear, x[:m], q), wanted[:m], crowd)
    ids = cupy.asarray(np.random.default_rng(0).integers(0, 8, (64, 2)))
    chosen = wanted.reshape(64, 8, n // 8)[cupy.arange(64)[:, None], ids]
    assert_repeats(functools.partial(kb.linear_grouped, x, q.reshape(8, n // 8, k), ids), chosen, crowd)
    if not hopper.tile_refusal(Problem(format, (n, k), 8, HALF[0], device(0))):
        cut = hopper.cut_tile(n, k, 8, 132, hopper.decoding(format.fragments()))
        out = cupy.empty((8, n), np.float16)
        tile = hopper.TileKernel(format.fragments(), (n, k), HALF[0], device(0), cut)

        def by_tiles():
            tile(x[:8], q, None, out)
            return out.copy()

        assert_repeats(by_tiles, wanted[:8], crowd)


@pytest.mark.parametrize("format", ["kbit4", "nf4"])
def test_tiles_take_few_tokens_of_middling_weights(cupy, format):
    if hopper.tile_refusal(Problem(kb.get_format(format), (4096, 4096), 8, HALF[0], device(0))):
        pytest.skip("linear_tile is for compute capability 9.0")
    # Few tokens are for linear_few where its tiles are whole.
    for n, few in ((4096, 8), (4104, 2)):
        q = weight((n, 4096), format, cupy)
        for m in (2, 3, 8, 9):
            x = numbers((m, 4096), HALF[0], cupy)
            assert kb.explain(x, q).route == ("small_batch" if m <= few else "hopper")
            check(kb.linear(x, q), x, q)


@pytest.mark.parametrize("format", ["kbit4", "nf4"])
def test_scales_that_grow_along_a_row(cupy, format):
    """float16 scales are relative to the rows' first ones: later ones may be far larger, or the first ones zero."""
    w = np.random.default_rng(0).standard_normal((96, 1024)).astype(np.float32)
    w[:, :512] *= 1e-9
    w[::3, :256] = 0
    w[::4, 512:] *= 1e-6
    w[5] = 0
    q = kb.quantize(cupy.asarray(w), kb.get_format(format, **({"absmax": "float32"} if format == "kbit4" else {})))
    for dtype in HALF:
        for m in (12, 64):
            x = numbers((m, 1024), dtype, cupy)
            check(kb.linear(x, q), x, q)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("format", ["kbit4", "nf4", "kbit8"])
def test_graphs_and_streams(cupy, format, dtype):
    q = weight((512, 1024), format, cupy)
    for m in (3, 64):
        x = numbers((m, 1024), np.dtype(dtype), cupy)
        bias = numbers((512,), np.dtype("float16"), cupy)
        wanted = kb.linear(x, q, bias)
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        out = cupy.zeros_like(wanted)
        cupy.cuda.Device().synchronize()
        with stream:
            kb.linear(x, q, bias, out=out)
            stream.synchronize()
            out.fill(0)
            stream.begin_capture()
            kb.linear(x, q, bias, out=out)
            graph = stream.end_capture()
            graph.launch(stream)
            stream.synchronize()
        assert bool((out == wanted).all())


@pytest.mark.parametrize("m", [1, 2, 8, 16, 64])
@pytest.mark.parametrize("format", ["kbit4", "nf4", "kbit5", "q4_0"])
def test_products_wait_for_what_they_read(cupy, format, m):
    """Kernels start before those ahead of them have ended, which write weights, x, and what their memory held."""
    k = 2048
    weights = [numbers((k, k), np.dtype("float16"), cupy, seed=i) * np.float16(k**-0.5) for i in range(3)]
    first = numbers((m, k), np.dtype("float16"), cupy)
    ids = cupy.asarray(np.random.default_rng(0).integers(0, 2, (m, 2)))
    w = cupy.empty_like(weights[0])

    def chain(pause):
        x = first
        for other in weights:
            w[...] = other
            pause()
            q = kb.quantize(w, format)
            pause()
            for _ in range(4):
                x = kb.linear(x, q)
                pause()
            experts = q.reshape(2, k // 2, k)
            x = kb.linear_grouped(x, experts, ids).reshape(m, k)
            pause()
        return x

    wanted = chain(cupy.cuda.get_current_stream().synchronize)
    assert bool(wanted.any()) and bool(cupy.isfinite(wanted).all())
    for _ in range(20):
        _ = weights[0] @ weights[1]  # work to do while the calls below pile up behind it
        assert bool((chain(lambda: None).view(np.uint16) == wanted.view(np.uint16)).all())


@pytest.mark.parametrize("offset", [1, 2, 4, 7, 8])
@pytest.mark.parametrize("format", ["kbit2", "kbit3", "kbit4", "kbit5", "nf4"])
def test_arrays_that_start_anywhere(cupy, format, offset):
    q = weight((96, 512), format, cupy)
    bias = numbers((96,), np.dtype("float16"), cupy)

    def shifted(array):
        room = cupy.zeros(array.size + offset, array.dtype)
        room[offset:] = array.reshape(-1)
        return room[offset:].reshape(array.shape)

    moved = kb.QuantizedArray(q.format, {n: shifted(p) for n, p in q.planes.items()}, q.shape, q.dtype)
    for m in (1, 5):
        x = numbers((m, 512), np.dtype("float16"), cupy)
        for planes in (moved, q):
            out = shifted(cupy.zeros((m, 96), np.float16))
            kb.linear(shifted(x) if planes is moved else x, planes, shifted(bias), out=out)
            check(out, x, q, bias)


def test_float16_and_other_routes_agree(cupy):
    """Fused and decoded products of the same arrays lie within the naive error of each other."""
    q = weight((640, 1024), "kbit4", cupy, scale=0.02)
    for m in (1, 8):
        x = numbers((m, 1024), np.dtype("float16"), cupy)
        fused, through = kb.linear(x, q), cupy.empty((m, 640), np.float16)
        multiply_decoded(x, q, through)
        wanted = exact(x, q)
        assert error(fused, wanted) <= 2 * error(naive(x, q), wanted)
        assert error(through, wanted) <= 2 * error(naive(x, q), wanted)


def test_stacks_larger_than_a_group_of_tokens(cupy):
    """More than 8 products of an expert, experts without any, and ids of no expert."""
    qs = kb.stack([weight((48, 256), "kbit4", cupy, seed=i) for i in range(7)])
    ids = np.zeros((50, 2), np.int64)
    ids[:, 1] = np.where(np.arange(50) % 3 == 0, 6, 99)
    x = numbers((50, 256), np.dtype("float16"), cupy)
    wanted = reference(x, qs.dequantize(dtype="float32"), ids, None)
    y = kb.linear_grouped(x, qs, cupy.asarray(ids))
    assert error(y, wanted) <= 2.0**-10 * np.sqrt(np.mean(np.square(wanted)))
    assert not y[ids == 99].any()


# ---- weights beyond the range of float16 -----------------------------------------------------------------------------

SCALED = [format for format in FORMATS if of(format).magnitude() is not None] + [
    kb.get_format(name, granularity=granularity, zero=zero)
    for name in ("int8", "uint4")
    for granularity in ("token", ("channel", 1), ("group", 32))
    for zero in ("none", "int", "float")
]


@pytest.mark.parametrize(("scale", "size"), [(1e-9, 2e3), (3e-6, 1e2), (3e6, 2e-5)])
@pytest.mark.parametrize("format", SCALED, ids=repr)
def test_weights_beyond_float16(cupy, format, scale, size):
    """Weights of that scale with tokens of that size, so that products are in the range: whatever way they take."""
    q = weight((48, 320), format, cupy, scale=scale)
    for m in (1, 20, 300):
        x = (numbers((m, 320), np.dtype("float32"), cupy) * np.float32(size)).astype(HALF[0])
        wanted = exact(x, q)
        found = kb.linear(x, q).get().astype(np.float64)
        limit = 2.0**-10 * np.sqrt(np.mean(np.square(wanted))) + 2.0**-25
        assert np.isfinite(found).all() and np.sqrt(np.mean(np.square(found - wanted))) <= limit


@pytest.mark.parametrize("format", SCALED, ids=repr)
def test_the_range_of_weights_changes_no_bit(cupy, format, monkeypatch):
    """Where float16 holds the weights, the power of two that brings them into its range is not seen in the product."""
    q = weight((96, 512), format, cupy)
    x = numbers((200, 512), HALF[0], cupy)
    y = cupy.empty((200, 96), HALF[0])
    multiply_decoded(x, q, y)
    monkeypatch.setattr(decoded, "_normalized", lambda planes, magnitude: (planes, None))
    plain = cupy.empty_like(y)
    multiply_decoded(x, q, plain)
    assert same_values(y.get(), plain.get())


def test_weights_of_zero_and_infinite_scales(cupy):
    x = numbers((40, 64), HALF[0], cupy)
    zero = kb.quantize(cupy.zeros((32, 64), np.float32), "dynamic8")
    assert not kb.linear(x, zero).any()
    w = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)
    w[5] = np.inf
    q = kb.quantize(cupy.asarray(w), "dynamic8", block=64)
    y = kb.linear(x, q).get()
    assert np.isfinite(np.delete(y, 5, axis=1)).all() and not np.isfinite(y[:, 5]).any()


def test_a_weight_keeps_few_notes(cupy):
    """What kernels say of it does not grow with the numbers of tokens it has met."""
    for format in ("kbit4", "nf4"):
        q = weight((4096, 1024), format, cupy)
        for m in range(1, 131):
            kb.linear(numbers((m, 1024), HALF[0], cupy), q)
        assert 1 <= len(q._launches) <= 8
