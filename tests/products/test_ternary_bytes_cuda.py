"""Ternary products of several tokens that are int8 already, in one launch; and tokens that thread blocks quantize.

Both give NumPy's bits. Class `TestSmall` is what compute-sanitizer runs.
"""

import numpy as np
import pytest
from fuzz_ternary import DTYPES, weight
from inputs import make, same_values

import kbitcupy as kb
from kbitcupy.products import activations

pytestmark = pytest.mark.gpu

GRANULARITIES = ["tensor", ("channel", 0)]


def tokens_of(rng, x, shared):
    """int8 tokens with bytes of every kind."""
    given = kb.quantize(x, "int8", granularity=shared)
    given.planes["codes"][...] = rng.integers(-128, 128, given.planes["codes"].shape)
    return given


def moved(cupy, given, offset):
    """The same tokens on the GPU, from so many bytes behind the begin of memory."""
    planes = {name: cupy.asarray(plane) for name, plane in given.planes.items()}
    room = cupy.zeros(planes["codes"].size + offset, np.int8)
    room[offset:] = planes["codes"]
    planes["codes"] = room[offset:]
    return kb.QuantizedArray(given.format, planes, given.shape, given.dtype)


def products(cupy, rng, shape, tokens, dtype, shared, offsets):
    """Whether products of tokens that begin at each offset have NumPy's bits."""
    rows, depth = shape
    q, on = weight(rng, rows, depth, GRANULARITIES[rng.integers(2)], cupy)
    bias = make("normal", rows, DTYPES[rng.integers(4)], 5) if rng.random() < 0.5 else None
    added = None if bias is None else cupy.asarray(bias)
    given = tokens_of(rng, make("normal", tokens * depth, dtype, depth).reshape(tokens, depth), shared)
    wanted = kb.bitnet.linear(given, q, bias)
    return all(same_values(kb.bitnet.linear(moved(cupy, given, at), on, added).get(), wanted) for at in offsets)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shared", ["token", "tensor"])
def test_several_tokens(cupy, dtype, shared, any_rows):
    """Every number of them, warps that share rows and that have several passes, and tokens beyond what has room."""
    rng = np.random.default_rng([dtype.itemsize, len(shared)])
    for shape in ((300, 4096), (2113, 1280), (150, 8192), (70, 8320), (5000, 640), (40, 14336), (33, 128), (20, 24576)):
        for tokens in range(2, 9):
            offsets = (0, 1, 8, 16) if tokens == 3 else (0,)
            assert products(cupy, rng, shape, tokens, dtype, shared, offsets), (shape, tokens)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_tokens_that_w8a8_quantizes(cupy, dtype, any_rows):
    """Of any strides and dimensions, from any address."""
    rng = np.random.default_rng(dtype.itemsize)
    for tokens, rows, depth in ((2, 300, 1280), (5, 70, 4096), (6, 33, 384), (8, 2113, 640)):
        q, on = weight(rng, rows, depth, ("channel", 0), cupy)
        room = make("normal", tokens * (2 * depth + 3) + 1, dtype, depth)
        whole = room[1:].reshape(tokens, 2 * depth + 3)
        there = cupy.asarray(room)[1:].reshape(whole.shape)
        for cut in (np.s_[:, :depth], np.s_[:, 1 : 2 * depth + 1 : 2], np.s_[::-1, depth : 2 * depth]):
            y = kb.linear(there[cut], on, activations="int8").get()
            assert same_values(y, kb.linear(whole[cut], q, activations="int8")), (tokens, rows, depth, cut)
        if tokens % 2 == 0:
            halves = (2, tokens // 2, depth)
            x = np.ascontiguousarray(whole[:, :depth]).reshape(halves)
            y = kb.linear(cupy.asarray(x), on, activations="int8").get()
            assert same_values(y, kb.linear(x, q, activations="int8"))


@pytest.mark.parametrize(
    "shape", [(4096, 4096), (8192, 8192), (14336, 4096), (4096, 14336), (22528, 1408), (2560, 2560)], ids=str
)
def test_sizes_of_models(cupy, shape):
    """As they are planned: int8 tokens, and those that are quantized ahead; all repeats have the same bits."""
    rng = np.random.default_rng(shape)
    q, on = weight(rng, *shape, "tensor", cupy)
    x = make("normal", 8 * shape[1], DTYPES[0]).reshape(8, shape[1])
    given = tokens_of(rng, x, "token")
    there, floats = moved(cupy, given, 0), cupy.asarray(x)
    wanted, normed = kb.bitnet.linear(given, q), kb.bitnet.linear(x, q, norm=True)
    for tokens in range(2, 9):
        planes = {"codes": there.planes["codes"][: tokens * shape[1]], "scale": there.planes["scale"][:tokens]}
        some = kb.QuantizedArray(there.format, planes, (tokens, shape[1]), there.dtype)
        assert same_values(kb.bitnet.linear(some, on).get(), wanted[:tokens]), tokens
        assert same_values(kb.bitnet.linear(floats[:tokens], on, norm=True).get(), normed[:tokens]), tokens
    for call in (lambda: kb.bitnet.linear(there, on), lambda: kb.bitnet.linear(floats, on, norm=True)):
        first, differ = call(), cupy.zeros((), np.int64)
        for _ in range(50):
            differ += (call().view(np.uint16) != first.view(np.uint16)).any()
        assert not int(differ)


def test_what_explain_says(cupy):
    if int(cupy.cuda.Device().compute_capability) < 90:
        pytest.skip("kernels of the copy engine are from 9.0 on")
    q = kb.bitnet.from_trits(cupy.zeros((8192, 8192), np.int8))
    for tokens in range(1, 10):
        x = cupy.zeros((tokens, 8192), np.float16)
        given, floats = (kb.explain(x, q, activations=each)[0].reason for each in ("int8", "bitnet"))
        assert ("rows_ternary_bytes" in given, "rows_ternary_early" in floats) == (1 < tokens < 9,) * 2


def test_graphs(cupy, any_rows):
    """A captured product reads what tokens are when it is launched."""
    rng = np.random.default_rng(2)
    q, on = weight(rng, 300, 1280, ("channel", 0), cupy)
    x = [make("normal", 5 * 1280, DTYPES[0], seed).reshape(5, 1280) for seed in range(3)]
    given = [tokens_of(rng, each, "token") for each in x]
    token, floats = moved(cupy, given[0], 0), cupy.asarray(x[0])

    def both():
        return kb.bitnet.linear(token, on), kb.bitnet.linear(floats, on, norm=True)

    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()  # weights and tokens are there
    with stream:
        both()
        stream.synchronize()
        stream.begin_capture()
        found = both()
        graph = stream.end_capture()
        for a, b in zip(given, x, strict=True):
            for name, plane in token.planes.items():
                plane.set(a.planes[name])
            floats.set(b)
            graph.launch(stream)
            stream.synchronize()
            assert same_values(found[0].get(), kb.bitnet.linear(a, q))
            assert same_values(found[1].get(), kb.bitnet.linear(b, q, norm=True))


def rows_of_codes(cupy, x, rule, norm, pitch):
    """Codes, sums and scales of rows on the GPU, as bytes; the sums are of the codes where NumPy quantizes."""
    tokens, depth = x.shape
    if isinstance(x, np.ndarray):
        codes, scales = activations.quantize(x, rule, norm)
        padded = np.zeros((tokens, pitch), np.int8)
        padded[:, :depth] = codes
        return [each.tobytes() for each in (padded, codes.sum(1, dtype=np.int32), scales)]
    codes, sums = cupy.full((tokens, pitch), 7, np.int8), cupy.zeros(tokens, np.int32)
    scales = cupy.zeros(tokens, np.float32)
    activations.quantize_into(x, tokens, rule, norm, codes, scales, sums, pitch)
    return [each.get().tobytes() for each in (codes, sums, scales)]


RULES = activations.Rule(), activations.Rule(4, "token", "away"), activations.Rule(qmin=-127, eps=0)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("kind", ["normal", "special", "extreme", "subnormal", "huge", "zeros"])
def test_tokens_that_blocks_quantize(cupy, dtype, kind):
    """Lengths that thread blocks have in registers, and the next ones; norms, rules, and rows that end in zeros."""
    rng = np.random.default_rng([dtype.itemsize, len(kind)])
    for depth in (2040, 2048, 2056, 4096, 4104, 5120, 8192, 8200, 11008, 16384, 16392):
        tokens = int(rng.choice([1, 2, 33, 64]))
        x = make(kind, tokens * depth, dtype, depth).reshape(tokens, depth)
        gain = make(str(rng.choice(["normal", "special"])), depth, DTYPES[2], 7)
        for weights in ("no norm", None, gain):
            norm = on = None
            if weights is None or isinstance(weights, np.ndarray):
                norm = activations.Norm(weights, 1e-5)
                on = activations.Norm(None if weights is None else cupy.asarray(weights), 1e-5)
            rule = RULES[rng.integers(3)]
            for pitch in (depth, depth + 8, -(-depth // 128) * 128):
                with np.errstate(all="ignore"):
                    wanted = rows_of_codes(cupy, x, rule, norm, pitch)
                assert rows_of_codes(cupy, cupy.asarray(x), rule, on, pitch) == wanted, (depth, tokens, pitch, rule)


def test_blocks_quantize_tokens_between_two_numbers(cupy):
    """Where 1 / root is halfway between two float32, what is added up in another order might round otherwise."""
    depth = 4096
    x = make("normal", 3 * depth, DTYPES[0], 3).reshape(3, depth)
    for token in range(3):
        mean = activations.mean_squares(x[token : token + 1].astype(np.float32))[0]
        for step in range(6):
            below = np.float32(1 / np.sqrt(1.5 * mean)) * np.float32(1 + 0.01 * step)
            half = (np.float64(below) + np.float64(np.nextafter(below, np.float32(np.inf)))) / 2
            norm = activations.Norm(None, float(1 / half**2 - mean))
            wanted = rows_of_codes(cupy, x, RULES[0], norm, depth)
            assert rows_of_codes(cupy, cupy.asarray(x), RULES[0], norm, depth) == wanted


@pytest.mark.parametrize("offset", [0, 1, 8])
def test_many_tokens(cupy, offset):
    """Through the tile, from any address."""
    rng = np.random.default_rng(offset)
    for tokens, depth in ((33, 2048), (64, 4096), (100, 8192)):
        q, on = weight(rng, 256, depth, "tensor", cupy)
        x = make("normal", tokens * depth + offset, DTYPES[0], depth)
        given = cupy.asarray(x)[offset:].reshape(tokens, depth)
        wanted = kb.bitnet.linear(x[offset:].reshape(tokens, depth), q, norm=True)
        assert same_values(kb.bitnet.linear(given, on, norm=True).get(), wanted), (tokens, depth)


class TestSmall:
    @pytest.mark.parametrize("shared", ["token", "tensor"])
    def test_products(self, cupy, any_rows, shared):
        rng = np.random.default_rng(8)
        for tokens, rows, depth in ((2, 33, 128), (3, 170, 640), (8, 300, 1152)):
            assert products(cupy, rng, (rows, depth), tokens, DTYPES[0], shared, (0, 1)), (tokens, rows, depth)
            q, on = weight(rng, rows, depth, "tensor", cupy)
            x = make("normal", tokens * depth, DTYPES[0]).reshape(tokens, depth)
            assert same_values(
                kb.bitnet.linear(cupy.asarray(x), on, norm=True).get(), kb.bitnet.linear(x, q, norm=True)
            )

    @pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
    def test_activations(self, cupy, dtype):
        for tokens, depth in ((2, 2048), (1, 4104), (1, 8200)):
            x = make("special", tokens * depth, dtype, depth).reshape(tokens, depth)
            gain = make("normal", depth, DTYPES[2], 7)
            for norm, on in ((None, None), (activations.Norm(gain, 1e-5), activations.Norm(cupy.asarray(gain), 1e-5))):
                with np.errstate(all="ignore"):
                    wanted = rows_of_codes(cupy, x, RULES[0], norm, depth + 8)
                assert rows_of_codes(cupy, cupy.asarray(x), RULES[0], on, depth + 8) == wanted
