"""Products of integer codes: the definition, its edges, CUDA against NumPy. Compute-sanitizer runs `TestSmall`."""

import itertools

import numpy as np
import pytest
from inputs import BFLOAT16, DTYPES, make, same_values
from test_w8a8 import quantized_tokens

import kbitcupy as kb
from kbitcupy.errors import FormatError
from kbitcupy.formats.integer_codes import FP4, IQ4
from kbitcupy.products import integer_activations as tokens_of, integer_stream
from kbitcupy.products.integer_experts import IntegerExperts
from kbitcupy.products.integer_stream import choose_cut, flavour_of
from kbitcupy.products.integers import Integers, stored_codes
from kbitcupy.products.routes import Problem, device, stored

SINGLE = np.dtype("float32")
PRESETS = ("int8", "q8_1")
FORMATS = [
    *(
        f"{name}:{granularity},zero={zero}"
        for name in ("int8", "uint8", "int4", "uint4")
        for granularity, zero in (
            ("granularity=channel:0", "none"),
            ("granularity=channel:0", "int"),
            ("block=32", "none"),
            ("block=64", "int"),
            ("block=128", "int"),
            ("block=128", "float"),
        )
    ),
    "int8:granularity=tensor",
    "uint4:block=40,zero=int",
    "int4:block=256,scale_dtype=float16",
    "uint4:block=128,zero=int,zero_dtype=uint8,scale_dtype=bfloat16",
    "q8_0",
    "q4_0",
    "q4_k",
    "ternary",
    "ternary:granularity=channel:0",
    "ternary:block=64",
]


def random_weight(text, rows, depth, seed=1):
    """Every code, scales of many magnitudes, and zero points beyond the range now and then."""
    format = kb.get_format(text)
    rng = np.random.default_rng([seed, rows, depth])
    planes = {}
    for name, plane in format.planes((rows, depth)).items():
        dtype = kb.backend.xp.named_dtype(plane.dtype)
        if name in ("codes", "qs", "scales"):
            planes[name] = rng.integers(0, 256, plane.shape).astype(np.uint8).view(dtype)
            if text.startswith("ternary"):
                planes[name] -= (planes[name] & 0xAA & planes[name] << 1 & 0xAA) >> 1  # no code is 3
        elif name == "zero_point":
            low, high = format.levels.qmin, format.levels.qmax
            beyond = 3 * (dtype == np.int32)
            planes[name] = rng.integers(low - beyond, high + 1 + beyond, plane.shape).astype(dtype)
        else:
            scale = rng.standard_normal(plane.shape) if name in ("offset", "d") else rng.random(plane.shape) + 0.01
            planes[name] = (scale * np.exp2(rng.integers(-9, 0, plane.shape))).astype(np.float32).astype(dtype)
    return kb.QuantizedArray(format, planes, (rows, depth), "float32")


def depth_of(text, depth):
    """A length of rows that the format takes."""
    return -(-depth // 256) * 256 if text == "q4_k" else -(-depth // 32) * 32 if text[:2] in ("q8", "q4") else depth


def with_planes(q, **planes):
    """The same with other planes."""
    made = {**q.planes, **{name: np.full_like(q.planes[name], value) for name, value in planes.items()}}
    return kb.QuantizedArray(q.format, made, q.shape, q.dtype)


def parts(q):
    """Codes less zero points, int64, A and B, [rows, K]: of what the same array decodes to with other scales."""
    planes = q.planes
    depth = q.shape[1]
    if q.format.name == "q4_k":
        inner = np.tile(np.array([1] * 4 + [0] * 4 + [1] * 4, np.uint8), planes["scales"].size // 12)
        ones = np.tile(np.array([1, 0], np.float16), planes["d"].size // 2)
        ones = kb.QuantizedArray(q.format, {**planes, "d": ones, "scales": inner}, q.shape, q.dtype)
        zeros = with_planes(q, qs=0)
        b = zeros.dequantize(dtype="float32")
        d = planes["d"].reshape(-1, 2).astype(np.float32)
        no_offsets = kb.QuantizedArray(
            q.format, {**zeros.planes, "qs": np.full_like(planes["qs"], 0x11)}, q.shape, q.dtype
        )
        without = np.stack([d[:, 0], np.zeros_like(d[:, 0])], 1).astype(np.float16).reshape(-1)
        no_offsets = kb.QuantizedArray(q.format, {**no_offsets.planes, "d": without}, q.shape, q.dtype)
        return ones.dequantize(dtype="float32").astype(np.int64), no_offsets.dequantize(dtype="float32"), b
    scale = "d" if "d" in planes else "scale"
    one = {scale: 1, **({"offset": 0} if "offset" in planes else {})}
    codes = with_planes(q, **one).dequantize(dtype="float32").astype(np.int64)
    block = 32 if scale == "d" else q.format.block if q.format.granularity[0] == "group" else depth
    factors = planes[scale].astype(np.float32)
    if scale == "scale" and "offset" not in planes:
        factors = np.where((factors > 0) & (factors < np.inf), factors, np.float32(0))

    def spread(numbers):
        return np.repeat(np.resize(numbers, (q.shape[0], -(-depth // block))), block, axis=1)[:, :depth]

    if q.format.granularity == "tensor" if scale == "scale" else False:
        factors = np.broadcast_to(factors, q.shape[0])
    offsets = spread(planes["offset"].astype(np.float32)) if "offset" in planes else np.zeros(q.shape, np.float32)
    return codes, spread(factors), offsets


def quantized(x, preset):
    """Codes, int64, and the scale of each element, one block of a token after the other."""
    if preset == "int8":
        codes, scales = quantized_tokens(x)
        return codes, np.broadcast_to(scales[:, None], x.shape)
    codes, scales = np.zeros(x.shape, np.int64), np.zeros(x.shape, np.float32)
    largest = float(np.finfo(np.float32).max)
    with np.errstate(all="ignore"):
        for m in range(len(x)):
            for k in range(0, x.shape[1], 32):
                numbers = [0 if v != v else min(max(float(v), -largest), largest) for v in x[m, k : k + 32]]
                numbers = np.array(numbers).astype(np.float32)
                scale = np.abs(numbers).max() / np.float32(127)
                steps = numbers * (np.float32(1) / scale if scale else np.float32(0))
                away = [np.floor(abs(np.float64(v)) + 0.5) * np.sign(v) for v in steps]
                codes[m, k : k + 32] = np.clip(np.nan_to_num(away, posinf=127, neginf=-127), -127, 127)
                scales[m, k : k + 32] = scale
    return codes, scales


def defined(x, q, preset, bias=None):
    """The product by its definition, and the sum of the terms' magnitudes."""
    a, e = quantized(x, preset)
    c, scale, offset = parts(q)
    depth = q.shape[1]
    marks = [0]
    for k in range(1, depth):
        group = (
            q.format.block if q.format.name[:2] not in ("q8", "q4") and q.format.granularity[0] == "group" else depth
        )
        group = 32 if q.format.name[:2] in ("q8", "q4") else group
        if k % group == 0 or (preset == "q8_1" and k % 32 == 0):
            marks.append(k)
    marks.append(depth)
    y, size = None, np.zeros((len(x), q.shape[0]))
    added = "offset" in q.planes or q.format.name == "q4_k"
    with np.errstate(all="ignore"):
        for first, last in zip(marks[:-1], marks[1:], strict=True):
            here = slice(first, last)
            term = (a[:, here] @ c[:, here].T).astype(np.float32) * e[:, first][:, None] * scale[:, first]
            size += np.abs(term.astype(np.float64))
            if added:
                more = a[:, here].sum(1).astype(np.float32)[:, None] * e[:, first][:, None] * offset[:, first]
                size += np.abs(more.astype(np.float64))
                term = term + more
            y = term if y is None else y + term
        if bias is not None:
            y = y + bias.astype(np.float32)
        return y, size


def activations(kind, tokens, depth, dtype, seed=3):
    return make(kind, tokens * depth, np.dtype(dtype), seed).reshape(tokens, depth)


# ---- the definition --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("text", FORMATS)
def test_the_definition(text, preset):
    for tokens, rows, depth in ((1, 5, 256), (3, 7, 96), (8, 1, 512), (16, 3, depth_of(text, 72))):
        q = random_weight(text, rows, depth_of(text, depth))
        x = activations("special" if tokens == 3 else "normal", tokens, q.shape[1], "float32")
        bias = make("normal", rows, SINGLE, 7) if tokens == 8 else None
        wanted, _ = defined(x, q, preset, bias)
        assert same_values(kb.linear(x, q, bias, activations=preset), wanted)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("text", FORMATS)
def test_float64(text, preset):
    """Of decoded weights and decoded activations, which no part of the product has seen."""
    q = random_weight(text, 33, depth_of(text, 320))
    x = activations("normal", 4, q.shape[1], "float32")
    codes, scales = quantized(x, preset)
    a, w = codes * scales.astype(np.float64), q.dequantize(dtype="float32").astype(np.float64)
    off = np.abs(kb.linear(x, q, activations=preset) - a @ w.T)
    assert (off <= 2.0**-20 * (np.abs(a) @ np.abs(w).T)).all()


@pytest.mark.parametrize("dtype", [*DTYPES, np.dtype("float64")], ids=str)
def test_dtypes_and_out(dtype):
    q = random_weight("uint4:block=64,zero=int", 9, 192)
    x = activations("normal", 6, 192, "float32").astype(dtype).reshape(2, 3, 192)
    bias = make("normal", 9, SINGLE, 5)
    for preset in PRESETS:
        wanted = defined(x.reshape(6, 192).astype(np.float32), q, preset, bias)[0].astype(dtype).reshape(2, 3, 9)
        out = np.full(wanted.shape, 7, dtype)
        assert kb.linear(x, q, bias, activations=preset, out=out) is out and same_values(out, wanted)
        assert same_values(kb.linear(x.swapaxes(0, 1), q, bias, activations=preset), wanted.swapaxes(0, 1))
        assert kb.linear(x[:0], q, activations=preset).shape == (0, 3, 9)


def test_activations_that_are_int8_already():
    rng = np.random.default_rng(5)
    codes = rng.integers(-128, 128, (3, 96)).astype(np.int8)
    for granularity, count in (("token", 3), ("tensor", 1)):
        scale = rng.random(count).astype(np.float32)
        planes = {"codes": codes.reshape(-1), "scale": scale}
        x = kb.QuantizedArray(kb.get_format("int8", granularity=granularity), planes, (3, 96), "float16")
        for text in ("int4:block=32", "uint4:block=128,zero=int", "q4_0", "q8_0", "uint8:block=64,zero=float"):
            q = random_weight(text, 5, 96)
            c, a, b = parts(q)
            w = a.astype(np.float64) * c + b
            y = kb.linear(x, q).astype(np.float64)
            decoded = codes * np.broadcast_to(scale[:, None], (3, 1)).astype(np.float64)
            assert (np.abs(y - decoded @ w.T) <= 2.0**-10 * (np.abs(decoded) @ np.abs(w).T)).all()
            assert y.dtype == np.float64 and kb.linear(x, q).dtype == np.float16


def test_outliers():
    """What one scale for 32 elements is for: a few channels much larger than others."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((16, 512)).astype(np.float32)
    x[:, ::100] *= 60
    w = rng.standard_normal((64, 512)).astype(np.float32)
    q = kb.quantize(w, "int8", granularity="channel:0")
    wanted = x @ q.dequantize().T
    error = {preset: kb.metrics.sqnr_db(wanted, kb.linear(x, q, activations=preset)) for preset in PRESETS}
    assert error["q8_1"] > error["int8"] + 3


def test_large_activations_do_not_overflow():
    """Beyond 2047 and 65504, where halves of scales and sums would be infinite."""
    q = random_weight("q4_k", 8, 512)
    x = np.full((2, 512), 3.0e5, np.float32)
    a, w = x.astype(np.float64), q.dequantize(dtype="float32").astype(np.float64)
    y = kb.linear(x, q, activations="q8_1")
    assert (np.abs(y - a @ w.T) <= 2.0**-18 * (np.abs(a) @ np.abs(w).T)).all()


def test_sums_stay_in_int32():
    message = "may leave int32; up to 65793 are exact"
    q = kb.quantize(np.zeros((1, 65794), np.float32), "uint8:granularity=channel:0,zero=int")
    with pytest.raises(FormatError, match=message):
        kb.linear(np.zeros((1, 65794), np.float32), q, activations="int8")
    assert kb.linear(np.zeros((1, 65794), np.float32), q, activations="q8_1")[0, 0] == 0
    codes = np.full(65793, 255, np.uint8)
    planes = {"codes": codes, "scale": np.ones(1, np.float32), "zero_point": np.zeros(1, np.int32)}
    q = kb.QuantizedArray(q.format, planes, (1, 65793), "float32")
    x = np.ones((1, 65793), np.float32)
    assert kb.linear(x, q, activations="int8")[0, 0] == np.float32(65793 * 255 * 127) * np.float32(1 / 127)


def test_formats_without_integer_codes():
    for text in ("kbit4", "nf4", "q8_k", "int8:granularity=channel:1"):
        q = kb.quantize(np.ones((32, 256), np.float32), text)
        for preset in PRESETS:
            with pytest.raises(
                FormatError, match=f"activations in {preset}: the weight is .*it must be .N, K. in int8"
            ):
                kb.linear(np.ones((1, 256), np.float32), q, activations=preset)


@pytest.mark.parametrize(
    "text", ["int4:block=32", "uint4:block=128,zero=int", "q4_k", "ternary:block=64", "uint8:block=40"]
)
def test_experts(text):
    rng = np.random.default_rng(2)
    depth = 256
    members = [random_weight(text, 6, depth, seed) for seed in range(4)]
    ids = np.array([[0, 3], [2, 9], [3, -1], [1, 1], [0, 2]])
    weights = rng.random((5, 2)).astype(np.float32)
    for x in (
        activations("normal", 5, depth, "float32"),
        activations("normal", 10, depth, BFLOAT16).reshape(5, 2, depth),
    ):
        for preset in PRESETS:
            wanted = np.zeros((5, 2, 6), np.float32)
            for t, j in np.ndindex(5, 2):
                if 0 <= ids[t, j] < 4:
                    token = (x[t] if x.ndim == 2 else x[t, j])[None].astype(np.float32)
                    wanted[t, j] = kb.linear(token, members[ids[t, j]], activations=preset)[0]
            qs = kb.stack(members)
            y = kb.linear_grouped(x, qs, ids, activations=preset)
            assert same_values(y, wanted.astype(x.dtype))
            total = wanted[:, 0] * weights[:, :1] + wanted[:, 1] * weights[:, 1:]
            for chosen in (ids, ids.astype(np.int32)):
                y = kb.linear_grouped(x, qs, chosen, weights, activations=preset)
                assert same_values(y, total.astype(x.dtype))
            assert kb.explain(x, qs, activations=preset, expert_ids=ids).route == "integer_experts_numpy"


def test_experts_refuse():
    x, ids = np.ones((2, 64), np.float32), np.zeros((2, 1), np.int64)
    qs = kb.quantize(np.ones((2, 5, 64), np.float32), "kbit4")
    with pytest.raises(FormatError, match="qs cannot be multiplied by activations in int8"):
        kb.linear_grouped(x, qs, ids, activations="int8")
    with pytest.raises(
        FormatError, match="qs cannot be multiplied by activations in bitnet: the weights are .*ternary"
    ):
        kb.linear_grouped(x, qs, ids, activations="bitnet")
    with pytest.raises(FormatError, match="allowed are None.*'int8'.*'bitnet'"):
        kb.linear_grouped(x, qs, ids, activations="int3")
    with pytest.raises(FormatError, match="qs is a plain array"):
        kb.linear_grouped(x, np.ones((2, 5, 64), np.float32), ids, activations="int8")


# ---- CUDA ------------------------------------------------------------------------------------------------------------


def on_device(cupy, q):
    return kb.QuantizedArray(q.format, {name: cupy.asarray(p) for name, p in q.planes.items()}, q.shape, q.dtype)


def check(cupy, x, q, preset, bias=None, exact=True):
    """By whatever route, within what the contract allows; by the plain one, and in one unit, to the bit."""
    wanted = kb.linear(x, q, bias, activations=preset)
    args = cupy.asarray(x), on_device(cupy, q), None if bias is None else cupy.asarray(bias)
    y = cupy.full(wanted.shape, np.nan, x.dtype)
    assert kb.linear(*args, activations=preset, out=y) is y
    if not same_values(y.get(), wanted):
        exactly, size = defined(x.astype(np.float32), q, preset, bias)
        allowed = 2.0**-20 * size + np.abs(exactly) * float(kb.backend.xp.named_dtype(x.dtype.name).itemsize == 2) / 128
        assert (np.abs(y.get().astype(np.float64) - exactly) <= allowed).all()
    plain = cupy.full(wanted.shape, np.nan, x.dtype)
    multiply_plainly(*args, plain, preset)
    assert same_values(plain.get(), wanted)


def multiply_plainly(x, q, bias, out, preset):
    """By the plain kernel, whatever the plan would take."""
    problem = Problem(q.format, q.shape, len(x), x.dtype, device(0), True, stored(q), preset)
    Integers().prepare(problem)(x, q, bias, out)


@pytest.mark.parametrize("layout", ["ROWS", "ROWS_SPLIT", "IN_TURN", "NIBBLES", "HALVES", "OWN_BYTES", "OWN_NIBBLES"])
def test_where_codes_lie(cupy, layout):
    """Every layout has every code once, where its description says."""
    tokens, depth = 11, 392
    x = cupy.asarray(activations("normal", tokens, depth, "float16"))
    pitch, padded = tokens_of.pitch_of(depth), tokens_of.padded_of(tokens)
    number = getattr(tokens_of.NUMBERS, layout)
    wanted = np.zeros((padded, pitch), np.int8)
    wanted[:tokens, :depth] = tokens_of.quantize_host(x.get(), "q8_1").codes
    codes, scales = cupy.zeros(padded * pitch, np.int8), cupy.zeros((13, padded), np.float32)
    sums = cupy.zeros((13, padded), np.int32)
    addresses = codes.data.ptr, scales.data.ptr, sums.data.ptr
    tokens_of.quantize_into(x, tokens, "q8_1", *addresses, number, 32)
    assert same_values(scales.get()[:, :tokens].T, tokens_of.quantize_host(x.get(), "q8_1").scales)
    blocks = np.pad(wanted, ((0, 0), (0, 32))).astype(np.int32)[:, : 13 * 32].reshape(padded, 13, 32)
    assert np.array_equal(sums.get(), blocks.sum(axis=2).T)
    found = codes.get()
    if layout == "ROWS":
        assert np.array_equal(found[: tokens * pitch], wanted[:tokens].reshape(-1))
        return
    if layout == "ROWS_SPLIT":
        split = wanted[:tokens].reshape(tokens, -1, 16, 2).swapaxes(2, 3)
        assert np.array_equal(found[: tokens * pitch], split.reshape(-1))
        return
    found = found.reshape(pitch // 64, padded // 8, 8, 4, 2, 2, 4)  # 64 k, 8 tokens, token, t, mma, b, byte
    mma, t, b, i = np.ogrid[: pitch // 32, :4, :2, :4]
    k = {
        "IN_TURN": 32 * mma + 8 * t + 4 * b + i,
        "NIBBLES": 32 * mma + 8 * t + b + 2 * i,
        "HALVES": 32 * mma + 16 * b + 4 * t + i,
        "OWN_BYTES": mma // 2 * 64 + 16 * t + mma % 2 * 8 + 4 * b + i,
        "OWN_NIBBLES": mma // 4 * 128 + 32 * t + mma % 4 * 8 + b + 2 * i,
    }[layout]
    found = found.transpose(1, 2, 0, 4, 3, 5, 6).reshape(padded, pitch // 32, 4, 2, 4)
    assert np.array_equal(found, wanted[:, k])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("tokens", "depth"), [(11, 400), (300, 8192), (9, 20000), (8, 392)])
def test_rows_of_tokens_with_one_scale(cupy, tokens, depth, dtype):
    """Whichever kernel writes them: short tokens and long ones, special numbers, zeros behind the end."""
    x = activations("special", tokens, depth, "float32")
    x[1], x[2], x[3] = 0, 1e-44, x[3] * np.float32(1e-38)
    with np.errstate(all="ignore"):
        x = x.astype(dtype)
    pitch = tokens_of.pitch_of(depth)
    wanted = np.zeros((tokens, pitch), np.int8)
    wanted[:, :depth], of_tokens = tokens_of.quantize_host(x, "int8")
    split = wanted.reshape(tokens, -1, 16, 2).swapaxes(2, 3).reshape(tokens, pitch)
    for layout, codes_wanted in ((tokens_of.NUMBERS.ROWS, wanted), (tokens_of.NUMBERS.ROWS_SPLIT, split)):
        codes, scales = cupy.full((tokens, pitch), 77, np.int8), cupy.zeros(tokens, np.float32)
        tokens_of.quantize_into(cupy.asarray(x), tokens, "int8", codes.data.ptr, scales.data.ptr, 0, layout, 0)
        assert np.array_equal(codes.get(), codes_wanted)
        assert same_values(scales.get(), of_tokens.reshape(-1))


class TestSmall:
    """Every kernel at sizes around its tiles."""

    @pytest.mark.parametrize("preset", PRESETS)
    @pytest.mark.parametrize("text", FORMATS)
    def test_products(self, cupy, text, preset):
        for tokens, rows, depth in ((1, 33, 128), (3, 5, 256), (8, 31, 512), (16, 17, 1312)):
            q = random_weight(text, rows, depth_of(text, depth))
            dtype = DTYPES[tokens % 3]
            bias = make("normal", rows, SINGLE, 7) if tokens == 8 else None
            check(cupy, activations("normal", tokens, q.shape[1], dtype), q, preset, bias)

    @pytest.mark.parametrize("preset", PRESETS)
    def test_activations(self, cupy, preset):
        q = random_weight("int4:block=32", 5, 200)
        for dtype in (*DTYPES, np.dtype("float64")):
            for kind in ("special", "normal"):
                wide = dtype == np.float64
                x = activations(kind, 3, 200, "float32" if wide else dtype).astype(dtype)
                y = kb.linear(cupy.asarray(x), on_device(cupy, q), activations=preset).get()
                assert same_values(y, kb.linear(x, q, activations=preset))

    @pytest.mark.parametrize("dtype", [*DTYPES, np.dtype("float64")], ids=str)
    @pytest.mark.parametrize("text", ["int4:block=32", "uint4:granularity=channel:0,zero=int", "q4_0", "q8_0"])
    def test_one_unit(self, cupy, text, dtype):
        """Any numbers, where codes are read in place and nothing is added in another order."""
        q = random_weight(text, 37, 32)
        on = on_device(cupy, q)
        presets = PRESETS if "channel" in text else PRESETS[1:]  # which multiply by the scale of a token first
        for tokens, preset in itertools.product((1, 2, 3, 9), presets):
            wide = dtype == np.float64
            x = activations("special", tokens, 32, "float32" if wide else dtype).astype(dtype)
            assert kb.explain(cupy.asarray(x), on, activations=preset).route == "integer_stream"
            y = kb.linear(cupy.asarray(x), on, activations=preset).get()
            assert np.array_equal(y, kb.linear(x, q, activations=preset), equal_nan=True)

    def test_activations_that_are_int8_already(self, cupy):
        x = activations("normal", 5, 200, "float16")
        for text in ("int4:block=32", "uint8:block=64,zero=int", "uint4:granularity=channel:0,zero=float"):
            q = random_weight(text, 19, 200)
            for granularity in ("token", "tensor"):
                codes = kb.quantize(x, "int8", granularity=granularity)
                y = kb.linear(on_device(cupy, codes), on_device(cupy, q)).get()
                assert same_values(y, kb.linear(codes, q))

    def test_rows_that_start_anywhere(self, cupy):
        q = random_weight("int4:block=32", 7, 96)
        memory = cupy.zeros(5 * 96 + 16, np.float16)
        for offset in (1, 3, 8):
            x = memory[offset : offset + 5 * 96].reshape(5, 96)
            x[...] = cupy.asarray(activations("normal", 5, 96, "float16"))
            for preset in PRESETS:
                check(cupy, x.get(), q, preset)
                y = kb.linear(x, on_device(cupy, q), activations=preset)
                assert (y == kb.linear(x.copy(), on_device(cupy, q), activations=preset)).all()

    @pytest.mark.parametrize(
        "text", ["int4:block=32", "uint4:block=128,zero=int", "q4_k", "uint8:granularity=channel:0"]
    )
    def test_experts(self, cupy, text):
        members = [random_weight(text, 70, 768, seed) for seed in range(4)]
        ids = np.array([[0, 3], [2, 9], [3, -1], [1, 1], [0, 2]])
        weights = np.random.default_rng(0).random((5, 2)).astype(np.float32)
        qs, on = kb.stack(members), kb.stack([on_device(cupy, q) for q in members])
        shared, own = (activations("normal", count, 768, "float32") for count in (5, 10))
        magnitudes = np.abs(qs.dequantize(dtype="float32"))
        for x in (shared, own.reshape(5, 2, 768)):
            each = np.broadcast_to(x if x.ndim == 3 else x[:, None], (5, 2, 768))
            size = np.einsum("tsk,tsnk->tsn", np.abs(each), magnitudes[ids % 4])
            for preset in PRESETS:
                arguments = cupy.asarray(x), on, cupy.asarray(ids)
                assert (
                    kb.explain(cupy.asarray(x), on, activations=preset, expert_ids=ids).route
                    == "integer_experts_stream"
                )
                wanted = kb.linear_grouped(x, qs, ids, activations=preset)
                y = kb.linear_grouped(*arguments, activations=preset)
                assert (np.abs(y.get() - wanted) <= 2.0**-20 * size).all()
                wanted_sum = kb.linear_grouped(x, qs, ids, weights, activations=preset)
                y = kb.linear_grouped(*arguments, cupy.asarray(weights), activations=preset)
                assert (np.abs(y.get() - wanted_sum) <= 2.0**-20 * (size * weights[..., None]).sum(axis=1)).all()
                problem = Problem(qs.format, (70, 768), 10, x.dtype, device(0), True, stored(on), preset, 4)
                plain = cupy.empty((5, 2, 70), np.float32)
                IntegerExperts().prepare(problem)(*arguments, None, plain)
                assert same_values(plain.get(), wanted)


STREAMED = [
    "uint8:granularity=channel:0,zero=int",
    "uint4:block=128,zero=int",
    "q4_0",
    "q4_k",
    "int4:block=256,zero=float",
    "uint4:block=1024,zero=int",
]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("text", STREAMED)
def test_larger_products(cupy, text, preset):
    for tokens in (1, 8, 16, 70):
        q = random_weight(text, 130, 8192 + 256)
        x = activations("normal", tokens, q.shape[1], "float16")
        check(cupy, x, q, preset)
        route = kb.explain(cupy.asarray(x), on_device(cupy, q), activations=preset).route
        assert (route == "integer_stream") == (tokens <= 16)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("text", STREAMED)
def test_many_tiles_and_phases(cupy, text, preset):
    """Teams with more than one tile; tokens that do not fit the shared memory at once."""
    for tokens, rows, depth in (
        (8, 9000, 512), (16, 4500, 1024), (16, 40, 40960), (5, 4400, 20480), (1, 4500, 1024), (1, 70, 40960),
    ):  # fmt: skip
        q = random_weight(text, rows, depth)
        x = activations("normal", tokens, depth, "float32")
        y = cupy.empty((tokens, rows), np.float32)
        kb.linear(cupy.asarray(x), on_device(cupy, q), activations=preset, out=y)
        for some in (slice(0, 20), slice(rows - 20, rows)):
            wanted = kb.linear(x, q[some], activations=preset)
            size = np.abs(x).astype(np.float64) @ np.abs(q[some].dequantize(dtype="float32")).T
            assert (np.abs(y.get()[:, some] - wanted) <= 2.0**-20 * size).all()


def test_shared_k(cupy, monkeypatch):
    """Two thread blocks share K of q4_k, rows of few blocks of which have none for one of them; the same bits again."""
    monkeypatch.setattr(integer_stream, "_LEAST_SPLIT", 0)
    for tokens, rows, depth in ((16, 300, 8192), (9, 4500, 4096), (13, 70, 256), (16, 17, 4864), (11, 3000, 40960)):
        q = random_weight("q4_k", rows, depth)
        x = activations("normal", tokens, depth, "float32")
        on, given = on_device(cupy, q), cupy.asarray(x)
        found = []
        for most in (1 << 30, 0):
            monkeypatch.setattr(integer_stream, "_MOST_SPLIT", most)
            integer_stream._plan.cache_clear()
            y = cupy.full((tokens, rows), np.nan, np.float32)
            integer_stream.multiply(given, "q8_1", on, None, y)
            found.append(y.get())
            for _ in range(20):
                integer_stream.multiply(given, "q8_1", on, None, y)
                assert (y.get() == found[-1]).all()
        assert rows * depth < 1 << 18 or (found[0] != found[1]).any()  # added in another order
        for some in (slice(0, 20), slice(max(rows - 20, 0), rows)):
            wanted = kb.linear(x, q[some], activations="q8_1")
            size = np.abs(x).astype(np.float64) @ np.abs(q[some].dequantize(dtype="float32")).T
            for y in found:
                assert (np.abs(y[:, some] - wanted) <= 2.0**-20 * size).all()
    integer_stream._plan.cache_clear()


@pytest.mark.parametrize("text", STREAMED)
def test_again(cupy, text):
    """The same bits every time, while the memory is busy, too."""
    q = on_device(cupy, random_weight(text, 3000, 4096))
    big = cupy.zeros(1 << 26, np.float32)
    for preset, tokens in itertools.product(PRESETS, (1, 16)):
        x = cupy.asarray(activations("normal", tokens, 4096, "float16"))
        first = kb.linear(x, q, activations=preset)
        for i in range(30):
            if i % 3 == 0:
                big += 1
            assert bool((kb.linear(x, q, activations=preset) == first).all())


def odd_numbers(kind, tokens, depth, dtype):
    """Tokens with what is rare: halves, infinities and NaN, zeros, and magnitudes near the ends of float32."""
    x = np.random.default_rng(depth).standard_normal((tokens, depth)).astype(np.float32)
    if kind == "halves":
        x[0] = np.arange(depth) % 256 - 127.5
        x[-1, ::7] = np.round(x[-1, ::7] * 4) / 4
    elif kind == "infinite":
        x[0, 3], x[-1, 5], x[0, 9] = np.inf, -np.inf, np.nan
    elif kind == "empty":
        x[0], x[-1, :40] = 0, np.nan
    elif kind == "small":
        x[:, : depth // 2] *= np.float32(1e-20)
        x[-1] *= np.float32(1e-6 if dtype == np.float16 else 1e-39)
    elif kind == "subnormal":
        x[-1] *= np.float32(1e-44)
    elif kind == "large":
        x[0] *= np.float32(1e37)
    with np.errstate(over="ignore"):
        return x.astype(dtype)


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
@pytest.mark.parametrize(
    ("text", "preset"),
    [("uint4:block=128,zero=int", "int8"), ("int4:block=32", "int8"), ("int8:block=64", "int8"),
     ("uint4:block=512,zero=int", "int8"), ("q4_0", "q8_1"), ("q4_k", "q8_1"), ("q8_0", "q8_1"),
     ("q4_1", "q8_1"), ("mxfp4", "q8_1")],
)  # fmt: skip
def test_tokens_that_blocks_quantize(cupy, monkeypatch, text, preset, dtype):
    """The same numbers whether the product's blocks quantize them, a launch of few threads, or the one for all."""
    depth = 1536 if kb.get_format(text).block in (256, 512) or text in ("q4_1", "mxfp4") else 1056
    if text.startswith("uint4:block=128"):
        depth = 1120  # fragments with zeros behind the end
    q = on_device(cupy, random_weight(text, 40, depth))
    for kind in ("halves", "infinite", "empty", "small", "subnormal", "large"):
        for tokens in (1, 3, 8):
            x = cupy.asarray(odd_numbers(kind, tokens, depth, kb.backend.xp.named_dtype(dtype)))
            found = []
            for own, few in ((8, 0), (0, 8), (0, 0)):
                monkeypatch.setattr(integer_stream, "_MOST_OWN", own)
                for name in ("_MOST_FEW", "_MOST_ROWS"):
                    monkeypatch.setattr(integer_stream, name, few)
                integer_stream._plan.cache_clear()
                y = cupy.zeros((tokens, 40), np.float32).astype(x.dtype)
                found.append(kb.linear(x, q, activations=preset, out=y).get())
            assert same_values(found[0], found[2]) and same_values(found[1], found[2]), (kind, tokens)
    integer_stream._plan.cache_clear()


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
@pytest.mark.parametrize("text", ["q4_0", "q4_k", "q4_1", "iq4_nl", "mxfp4"])
def test_one_token_of_one_team(cupy, monkeypatch, text, dtype):
    """No warp waits for another: it multiplies what it has quantized itself, in one phase or in several."""
    for rows, depth in ((40, 7680), (2200, 8192), (40, 14336), (40, 28672 + 512)):
        q = on_device(cupy, random_weight(text, rows, depth))
        for kind in ("halves", "infinite", "empty", "small"):
            x = cupy.asarray(odd_numbers(kind, 1, depth, kb.backend.xp.named_dtype(dtype)))
            found = []
            for own in (1, 1, 0):
                monkeypatch.setattr(integer_stream, "_MOST_OWN", own)
                integer_stream._plan.cache_clear()
                out = cupy.empty((1, rows), x.dtype)
                integer_stream.multiply(x, "q8_1", q, None, out)
                found.append(out.get())
            assert same_values(found[0], found[2]) and same_values(found[1], found[2]), (depth, kind)
    integer_stream._plan.cache_clear()


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
@pytest.mark.parametrize("text", ["uint4:block=128,zero=int", "int4:block=256", "uint4:block=512"])
def test_tokens_that_some_blocks_quantize(cupy, monkeypatch, text, dtype):
    """Each thread block of a token finds the largest magnitude, wherever it is."""
    for depth in (2048, 4608, 8192):
        q, parts = on_device(cupy, random_weight(text, 24, depth)), -(-depth // 2048)
        flavour = flavour_of(q.format.integer_codes(q.shape), False)
        assert integer_stream._are_few(flavour, 8, depth, 0) and not integer_stream._are_few(flavour, 9, depth, 0)
        for tokens in (4, 7, 8):
            x = np.random.default_rng(depth).standard_normal((tokens, depth)).astype(np.float32)
            for part in range(parts):
                x[part % tokens, min(2048 * part + 77 * tokens, depth - 1)] = 50.0 + part
            x[-1, -1], x[0, 0] = -100, np.nan
            given = cupy.asarray(x.astype(kb.backend.xp.named_dtype(dtype)))
            found = []
            for few in (8, 0):
                monkeypatch.setattr(integer_stream, "_MOST_ROWS", few)
                integer_stream._plan.cache_clear()
                out = cupy.empty((tokens, 24), given.dtype)
                integer_stream.multiply(given, "int8", q, None, out)
                found.append(out.get())
            assert same_values(*found), (depth, tokens)
        monkeypatch.undo()
        integer_stream._plan.cache_clear()


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
@pytest.mark.parametrize("text", ["q4_0", "q4_k", "q8_0", "mxfp4"])
def test_tokens_that_few_threads_quantize(cupy, monkeypatch, text, dtype):
    """Some blocks take a token more than once, and the last time fewer of them."""
    for tokens, depth in ((16, 9216), (8, 17152), (13, 7424)):
        q = on_device(cupy, random_weight(text, 24, depth))
        x = np.random.default_rng(depth).standard_normal((tokens, depth)).astype(np.float32)
        x[-1, -1], x[0, 0], x[1, -40] = -1e30, np.nan, np.inf
        with np.errstate(over="ignore"):
            given = cupy.asarray(x.astype(kb.backend.xp.named_dtype(dtype)))
        found = []
        for few in (16, 0):
            monkeypatch.setattr(integer_stream, "_MOST_FEW", few)
            integer_stream._plan.cache_clear()
            out = cupy.empty((tokens, 24), given.dtype)
            integer_stream.multiply(given, "q8_1", q, None, out)
            found.append(out.get())
        assert same_values(*found), (depth, tokens)
        monkeypatch.undo()
        integer_stream._plan.cache_clear()


@pytest.mark.parametrize(("text", "preset"), [("q4_0", "q8_1"), ("q4_k", "q8_1"), ("uint4:block=128,zero=int", "int8")])
def test_integer_weights_that_were_just_written(cupy, text, preset):
    """The product starts while what is ahead of its tokens is at work: it may not have read the weight by then."""
    for tokens, rows, depth in ((8, 4096, 8192), (8, 28672, 8192), (16, 2048, 4096)):
        weights = [random_weight(text, 64, depth, seed).planes for seed in range(2)]
        planes = [{n: cupy.tile(cupy.asarray(p), rows // 64) for n, p in each.items()} for each in weights]
        q = kb.QuantizedArray(
            kb.get_format(text), {n: p.copy() for n, p in planes[0].items()}, (rows, depth), np.dtype("float16")
        )
        x = cupy.asarray(make("normal", tokens * depth, DTYPES[0]).reshape(tokens, depth))
        wanted = []
        for each in planes:
            for name, plane in each.items():
                q.planes[name][:] = plane
            cupy.cuda.Device().synchronize()
            wanted.append(kb.linear(x, q, activations=preset))
        differ = cupy.zeros((), np.int64)
        for i in range(60):
            for name, plane in planes[i % 2].items():
                if i < 30:
                    q.planes[name][:] = plane
                else:  # by kernels
                    cupy.add(plane, 0, out=q.planes[name])
            y = kb.linear(x, q, activations=preset)
            differ += (y.view(np.uint16) != wanted[i % 2].view(np.uint16)).any()
        assert not int(differ), (tokens, rows, depth)


def test_pairs_of_a_table():
    """As prmt takes them by codes, and by codes whose highest bit is turned over, the bytes of a value add up to it."""

    def permuted(words, selector):
        byte = int(np.array(words, np.int32).view(np.int8)[selector & 7])
        return -(byte < 0) if selector & 8 else byte

    for values in (IQ4, FP4):
        words = integer_stream.pairs_of(values)
        for code, value in enumerate(values):
            assert permuted(words[:2], code) + permuted(words[2:], code ^ 8) == value
    with pytest.raises(AssertionError):
        integer_stream.pairs_of([-1, *[0] * 7] * 2)  # each byte would have to make up for the other


def test_cuts_fit():
    """Every shape has a cut, whose parts of the shared memory do not meet."""
    for text in (*STREAMED, "q4_1", "iq4_nl", "iq4_xs", "mxfp4"):
        part = stored_codes(kb.get_format(text), (1, 256))
        for blocked in (False, True):
            flavour = flavour_of(part, blocked)
            if flavour is None:  # for tokens with scales of 32 alone
                assert not blocked and text not in STREAMED
                continue
            for eights, rows, depth in itertools.product((1, 2), (1, 130, 8192, 28672), (256, 4096, 14336, 65536)):
                cut = choose_cut(flavour, eights, rows, depth, 132, 227 << 10)
                assert cut.shared <= 227 << 10 and list(cut.places) == sorted(cut.places)
                assert not any(place % 16 for place in cut.places)  # what is there is read in words of 16 bytes
                assert 1 <= cut.warps * cut.teams <= 16 and cut.phases >= 1
                if flavour.splits and eights == 2:
                    halves = choose_cut(flavour, eights, rows, depth, 132, 227 << 10, split=2)
                    assert halves.shared <= 227 << 10 and list(halves.places) == sorted(halves.places)
                    assert not any(place % 16 for place in halves.places) and halves.blocks % 2 == 0
                    assert halves.kept * 66 * halves.teams * 16 >= rows  # all tiles are kept
                own = choose_cut(flavour, eights, rows, depth, 132, 227 << 10, 1, 2)
                assert own is None or own.places[-1] + 2 * flavour.token_bytes(depth) < own.shared <= 227 << 10
                assert own is not None or depth > 14336
