"""linear_tile with weights that are integers times a scale: every decoder, tile, and edge."""

import dataclasses

import numpy as np
import pytest
from inputs import BFLOAT16
from test_linear import HALF, exact, host, naive, numbers

import kbitcupy as kb
from kbitcupy.products import hopper, small_batch
from kbitcupy.products.hopper import INTEGER_CUTS, TileCut, TileKernel, rounds_scales, tile_refusal
from kbitcupy.products.routes import Device, Problem, Stored, device

H200 = Device(0, 90, 132, 227 << 10, True, True)
AFFINE = [
    f"{name}:{shares}{zero}"
    for name in ("int4", "uint4", "int8", "uint8")
    for shares in ("block=32", "block=64", "block=128", "granularity=channel:0")
    for zero in ("", ",symmetric=false", ",zero=float")
]
SPECS = [*AFFINE, "q4_0", "q4_1", "q8_0", "q4_k", "iq4_nl", "iq4_xs", "mxfp4", "nvfp4"]
SMALL = ["int8:block=32", "uint4:block=128,symmetric=false", "uint4:block=64,zero=float", *SPECS[len(AFFINE) :]]
FORMATS = [spec for spec in SPECS if getattr(kb.get_format(spec).fragments(), "hopper", "")]


def problem(spec, shape=(512, 1024), tokens=16, dtype=HALF[0], **others):
    return Problem(kb.get_format(spec), shape, tokens, dtype, H200, **others)


def weight(shape, spec, xp=np, seed=0):
    w = np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * 0.02
    return kb.quantize(xp.asarray(w + np.float32(0.05 if "zero" in spec or "sym" in spec else 0)), spec)


def check_error(y, x, q, most):
    """No more than `most` times the error of weights that are rounded to x's type, of which there are enough."""
    wanted = exact(x, q)
    mine, theirs = (
        np.sqrt(np.mean(np.square(host(each).astype(np.float64) - wanted))) for each in (y, naive(host(x), q.get()))
    )
    assert mine <= most * theirs


def most_of(spec, cut, dtype):
    return 1.4 if rounds_scales(problem(spec, dtype=dtype), cut) else 1.1


def multiple_of(spec):
    fragments = kb.get_format(spec).fragments()
    return 64 if spec == "nvfp4" else max(32, fragments.block, fragments.multiple)


def multiply(cupy, q, x, cut, bias=None):
    shape = q.shape
    tile = TileKernel(q.format.fragments(), shape, x.dtype, device(0), cut)
    out = cupy.full((len(x), shape[0]), np.nan, x.dtype)
    tile(x, q, bias, out)
    return out


def same_bits(cupy, spec, m, cut):
    q, x = weight((1000, 2048), spec, cupy), numbers((m, 2048), HALF[0], cupy)
    first = multiply(cupy, q, x, cut).view(np.uint16)
    for _ in range(50):
        assert bool((multiply(cupy, q, x, cut).view(np.uint16) == first).all())


@pytest.fixture
def hopper_gpu(cupy):
    if tile_refusal(dataclasses.replace(problem("int4:block=32"), device=device(0))):
        pytest.skip("linear_tile is for compute capability 9.0")
    return cupy


# ---- what can be said without a GPU --------------------------------------------------------------------------------


def test_there_are_decoders():
    assert {"int4:block=32", "uint4:block=128,symmetric=false", "int8:granularity=channel:0"} <= set(FORMATS)
    assert kb.get_format("uint4:block=384").fragments().hopper == ""


def test_what_is_rounded_is_said():
    """Scales of rows and, with few tokens, of large groups multiply sums in float32; halves are exact in float16."""
    said = "scales rounded to"
    for tokens, spec, dtype, rounded in (
        (16, "uint4:block=128,symmetric=false", HALF[0], False),
        (64, "uint4:block=128,symmetric=false", HALF[0], True),
        (16, "int4:block=32", HALF[0], True),
        (64, "int8:granularity=channel:0", BFLOAT16, False),
        (64, "kbit4", HALF[0], False),
        (64, "nf4", HALF[0], True),
    ):
        text = hopper.Hopper().describe(problem(spec, (8192, 8192), tokens, dtype))
        assert (said in text) == rounded, text
    for route in (hopper.Hopper(), small_batch.SmallBatch(), small_batch.SingleToken()):
        for spec in ("kbit4", "kbit4:codebook=custom"):
            text = route.describe(problem(spec, (8192, 8192), 1, HALF[0]))
            assert ("values rounded to float16" in text) == ("custom" in spec), text


def test_what_is_brought_into_order_ahead():
    """x, for all thread blocks, where something is added and the tokens are many; experts have few.

    Not where a weight is what one operation of x's type makes of its code.
    """
    for spec, half, other in (
        ("q4_k", True, True),
        ("q4_1", False, True),
        ("int4:block=64,zero=float", True, True),
        ("q4_0", False, False),
    ):
        for ahead, dtype, T in zip((half, other), (HALF[0], BFLOAT16), hopper.HALF_CXX, strict=True):
            fragments = hopper.for_type(kb.get_format(spec).fragments(), T)
            for cut in INTEGER_CUTS:
                assert cut.prepared(fragments) == (ahead and cut.tokens == 64)
                assert not cut.prepared(fragments, grouped=True)
            describe = hopper.Hopper().describe
            assert ("arrange_tokens" in describe(problem(spec, (28672, 8192), 64, dtype))) == ahead
            assert "arrange_tokens" not in describe(problem(spec, (28672, 8192), 16, dtype))


def test_what_is_added_to_each_weight():
    """What q4_k's records say, where clusters share k of 64 tokens: there stages have no means of x."""
    stages = {}
    for spec in ("q4_k", "int4:block=64,zero=float", "q4_0", "kbit4"):
        for T in hopper.HALF_CXX:
            fragments = hopper.for_type(kb.get_format(spec).fragments(), T)
            for cut in hopper.tile_cuts():
                shared = (cut.tokens, cut.k_groups, cut.splits) == (64, 2, 2)
                assert cut.centred(fragments) == (spec == "q4_k" and shared)
                assert not cut.centred(fragments, grouped=True)
                stages[spec, T, cut] = cut.stage_bytes(fragments)
    for T in hopper.HALF_CXX:
        for cut in hopper.tile_cuts():
            fewer = stages["int4:block=64,zero=float", T, cut] - stages["q4_k", T, cut]
            shared = (cut.tokens, cut.k_groups, cut.splits) == (64, 2, 2)
            assert fewer == (64 * hopper.SIZES.MEANS_BYTES if shared else 0)


def test_what_is_refused():
    assert tile_refusal(problem("int4:block=128")) is None
    assert "no decoder for blocks of 384" in tile_refusal(problem("int4:block=384", (64, 1152)))
    assert "no multiples of 128" in tile_refusal(problem("int4:block=128", (64, 1056)))
    assert "16 bytes" in tile_refusal(problem("int4:block=32", (64, 1040)))
    assert "planes of scales" in tile_refusal(problem("int4:block=32", stored=Stored(scales=2)))
    assert tile_refusal(problem("nvfp4", stored=Stored(scales=2))) is None
    assert "multiples of 2 bytes" in tile_refusal(problem("nvfp4", stored=Stored(scales=1)))


@pytest.mark.parametrize("shape", [(28672, 8192), (8192, 8192), (14336, 4096)])
def test_tiles_of_larger_weights_fill_the_device(shape):
    for spec in ("uint4:block=128,symmetric=false", "int8:granularity=channel:0"):
        for tokens in (16, 64):
            it = problem(spec, shape, tokens)
            cut = hopper.cut_tile(*shape, tokens, 132, hopper.decoding(it.fragments))
            blocks = -(-shape[0] // cut.rows) * cut.splits
            assert blocks / (-(-blocks // 132) * 132) > 0.8


# ---- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
class TestSmall:
    """Few tiles of every kind of decoder."""

    @pytest.mark.parametrize("spec", SMALL)
    def test_tiles(self, hopper_gpu, spec):
        q = weight((140, 512), spec, hopper_gpu)
        for m, cut in ((16, INTEGER_CUTS[1]), (70, INTEGER_CUTS[5])):
            x = numbers((m, 512), HALF[0], hopper_gpu)
            wanted = exact(x, q)
            y = host(multiply(hopper_gpu, q, x, cut)).astype(np.float64)
            assert np.abs(y - wanted).max() <= 2.0**-7 * np.abs(wanted).max()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("spec", FORMATS)
def test_every_decoder(hopper_gpu, spec, dtype):
    """Odd rows, rows that end within a tile's stages, tokens that fill no tile; x of mean 0 and 1."""
    depth = 768 if multiple_of(spec) == 256 else 1152
    q = weight((201, depth), spec, hopper_gpu)
    cuts = [(16, INTEGER_CUTS[0]), (9, INTEGER_CUTS[3]), (50, INTEGER_CUTS[5]), (100, INTEGER_CUTS[4])]
    cuts += [(17, INTEGER_CUTS[1]), (33, INTEGER_CUTS[5])]
    for number, (m, cut) in enumerate(cuts):
        x = numbers((m, depth), np.dtype("float32"), hopper_gpu) + np.float32(number % 2)
        x = x.astype(dtype)
        check_error(multiply(hopper_gpu, q, x, cut), x, q, most_of(spec, cut, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("spec", FORMATS)
def test_tokens_and_depths(hopper_gpu, spec):
    """As the host cuts it, from one group on."""
    group = multiple_of(spec)
    for number, m in enumerate((9, 16, 17, 64, 128)):
        shape = 64 * number + 37, group * (1, 3, 8)[number % 3]
        q, dtype = weight(shape, spec, hopper_gpu, number), HALF[number % 2]
        cut = hopper.cut_tile(*shape, m, 132, hopper.decoding(q.format.fragments()))
        x, bias = numbers((m, shape[1]), dtype, hopper_gpu), numbers(shape[:1], np.dtype("float32"), hopper_gpu)
        y = multiply(hopper_gpu, q, x, cut, bias)
        wanted = exact(x, q, bias)
        assert np.abs(host(y).astype(np.float64) - wanted).max() <= 2.0**-6 * np.abs(wanted).max()
        assert np.abs(host(kb.linear(x, q, bias)).astype(np.float64) - wanted).max() <= 2.0**-6 * np.abs(wanted).max()


@pytest.mark.gpu
@pytest.mark.parametrize("spec", FORMATS)
def test_scales_that_differ_by_far(hopper_gpu, spec):
    """In float16 scales are relative to the largest so far, of which there may be a far larger one."""
    q = weight((70, 1024), spec, hopper_gpu)
    name = q.format.fragments().scales
    factor = hopper_gpu.asarray(np.random.default_rng(1).choice([1e-3, 1, 300], q.planes[name].shape))
    if q.planes[name].dtype == np.uint8:  # exponents
        q.planes[name][...] += hopper_gpu.rint(hopper_gpu.log2(factor)).astype(np.int8).view(np.uint8)
    else:
        q.planes[name][...] = (q.planes[name].astype(np.float32) * factor).astype(q.planes[name].dtype)
    x = numbers((20, 1024), HALF[0], hopper_gpu) * np.float16(0.01)
    for cut in (INTEGER_CUTS[1], INTEGER_CUTS[4], INTEGER_CUTS[5]):
        wanted = exact(x, q)
        off = host(multiply(hopper_gpu, q, x, cut)).astype(np.float64) - wanted
        assert np.sqrt(np.mean(off**2)) <= 2.0**-10 * np.sqrt(np.mean(wanted**2))


@pytest.mark.gpu
@pytest.mark.parametrize("ahead", [1, 3, 8])
@pytest.mark.parametrize("spec", ["uint4:block=128,symmetric=false", "int8:granularity=channel:0", "q4_0", "q4_k"])
def test_planes_that_start_anywhere(hopper_gpu, spec, ahead):
    q = weight((64, 512), spec, hopper_gpu)
    planes = {}
    for name, plane in q.planes.items():
        room = hopper_gpu.zeros(plane.size + ahead, plane.dtype)
        room[ahead:] = plane
        planes[name] = room[ahead:]
    moved = kb.QuantizedArray(q.format, planes, q.shape, q.dtype)
    for m in (9, 16, 64):
        x = numbers((m, 512), HALF[0], hopper_gpu)
        wanted = exact(x, q)
        assert np.abs(host(kb.linear(x, moved)).astype(np.float64) - wanted).max() <= 2.0**-7 * np.abs(wanted).max()


@pytest.mark.gpu
@pytest.mark.parametrize("spec", [spec for spec in FORMATS if "64" not in spec])
def test_experts(hopper_gpu, spec):
    depth = 512
    qs = kb.stack([weight((72, depth), spec, hopper_gpu, seed) for seed in range(5)])
    x = numbers((30, depth), HALF[0], hopper_gpu)
    ids = np.random.default_rng(3).integers(-1, 6, (30, 2))
    y = host(kb.linear_grouped(x, qs, hopper_gpu.asarray(ids))).astype(np.float64)
    w = host(qs.dequantize(dtype="float32")).astype(np.float64)
    for token in range(30):
        for slot in range(2):
            chosen = ids[token, slot]
            wanted = host(x)[token].astype(np.float64) @ w[chosen].T if 0 <= chosen < 5 else np.zeros(72)
            assert np.abs(y[token, slot] - wanted).max() <= 2.0**-7 * max(1e-3, np.abs(wanted).max())


@pytest.mark.gpu
@pytest.mark.parametrize("spec", [spec for spec in FORMATS if "channel" in spec or "128" in spec][::3])
def test_the_same_bits_every_time(hopper_gpu, spec):
    same_bits(hopper_gpu, spec, 16, TileCut(16, 1, 4, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("spec", ["kbit4", "kbit5", "nf4", "nvfp4", "iq4_xs", "q4_0", "q4_1", "q4_k"])
def test_the_same_bits_while_products_go_on(hopper_gpu, spec):
    """Where half of a stage is decoded while the other half is multiplied, and where not."""
    same_bits(hopper_gpu, spec, 64, TileCut(64, 2, 2, 2))
