"""The format ternary: its contract element by element, BitNet's and bitnet-quantize's cases, special numbers."""

import math

import numpy as np
import pytest
from inputs import DTYPES, KINDS, make

import kbitcupy as kb
from kbitcupy.cli import main
from kbitcupy.formats import ternary
from kbitcupy.formats.chunks import narrow, widen
from kbitcupy.formats.granularity import blocks_of
from kbitcupy.formats.ternary import LIMITS, thresholds

LARGEST = np.finfo(np.float32).max


# ---- the contract, an element at a time ------------------------------------------------------------------------------


def magnitudes(block):
    found = [abs(np.float32(w)) for w in block]
    return [0.0 if math.isnan(w) else min(float(w), float(LARGEST)) for w in found]


def total(numbers):
    """By trees of 256, then 1024 lanes, then a tree of those."""
    sums = []
    for first in range(0, len(numbers), 256):
        part = numbers[first : first + 256]
        sums.append(tree(part + [0.0] * (256 - len(part))))
    lanes = [0.0] * 1024
    for i, number in enumerate(sums):
        lanes[i % 1024] += number
    return tree(lanes)


def tree(numbers):
    while len(numbers) > 1:
        half = len(numbers) // 2
        numbers = [numbers[i] + numbers[i + half] for i in range(half)]
    return numbers[0]


def scale_of(block, rule, eps=1e-5):
    w = magnitudes(block)
    if rule == "absmax":
        return np.float32(max(w, default=0))
    mean = np.float32(total(w) / max(len(w), 1))
    if rule == "absmean":
        return max(mean, np.float32(eps))
    scale, floor = mean, np.float32(0.7) * mean
    for _ in range(4):
        kept = [v for v in w if v > floor]
        scale = np.float32(total([v if v > floor else 0.0 for v in w]) / len(kept)) if kept else scale
        floor = scale * np.float32(0.5)
    return scale


def trit(w, scale, rounding):
    if not scale > 0 or math.isnan(w):
        return 0
    product = np.abs(np.float32(w)) * (np.float32(1) / scale)
    up = product > np.float32(0.5) if rounding == "even" else product >= np.float32(0.5)
    return int(np.sign(np.float32(w))) if up else 0


def by_hand(x, granularity="tensor", rule="absmean", rounding="even", eps=1e-5, scale=None):
    """Planes and decoded numbers of an array, float32."""
    blocks, flat = blocks_of(x.shape, granularity), [float(v) for v in x.reshape(-1)]
    number = [i // blocks.row * blocks.per_row + i % blocks.row // blocks.run for i in range(len(flat))]
    members = [[] for _ in range(blocks.count)]
    for i, v in enumerate(flat):
        members[number[i]].append(v)
    with np.errstate(all="ignore"):
        scales = [scale_of(block, rule, eps) if scale is None else np.float32(scale) for block in members]
        trits = [trit(v, scales[n], rounding) for v, n in zip(flat, number, strict=True)]
        values = [np.float32(t) * scales[n] for t, n in zip(trits, number, strict=True)]
    codes = np.zeros(-(-len(flat) // 128) * 32, np.uint8)
    for i in range(len(codes) * 4):
        code = (trits[i] if i < len(flat) else 0) + 1
        codes[i // 128 * 32 + i % 32] |= code << i % 128 // 32 * 2
    return codes, np.array(scales, np.float32), np.array(values, np.float32).reshape(x.shape)


def check(x, granularity="tensor", scale=None, **options):
    given = {} if scale is None else {"scale": scale}
    q = kb.quantize(x, "ternary", granularity=granularity, **options, **given)
    codes, scales, values = by_hand(x, granularity, scale=scale, **options)
    assert q.planes["scale"].tobytes() == scales.tobytes()
    assert q.planes["codes"].tobytes() == codes.tobytes()
    decoded = q.dequantize(dtype="float32")
    assert decoded.tobytes() == values.tobytes()
    if np.isfinite(x.astype(np.float32)).all():
        assert kb.metrics.error_bound(x.astype(np.float32), q, decoded).violations == 0
    return q


SHAPES = {
    "tensor": [(), (0,), (1,), (127,), (128,), (129,), (3, 100), (5, 256), (2, 3, 47)],
    ("channel", 0): [(1,), (5,), (3, 64), (4, 300), (2, 3, 47), (1, 513), (3, 0)],
    ("group", 64): [(64,), (200,), (2, 64), (3, 100), (2, 3, 70)],
    ("group", 7): [(3, 20), (2, 7), (40,)],
    ("group", 300): [(2, 700), (3, 299), (1, 600)],
}


@pytest.mark.parametrize("rule", ["absmean", "absmax", "fit"])
@pytest.mark.parametrize(("granularity", "shape"), [(g, s) for g, shapes in SHAPES.items() for s in shapes], ids=str)
def test_the_contract(granularity, shape, rule):
    x = make("normal", math.prod(shape), np.float32, seed=len(shape)).reshape(shape)
    check(x, granularity, rule=rule)
    check(x.astype(np.float16), granularity, rule=rule, rounding="away")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_numbers(kind, dtype):
    x = make(kind, 6 * 300, dtype, seed=3).reshape(6, 300)
    for granularity in ("tensor", ("channel", 0), ("group", 64)):
        for rule in ("absmean", "absmax", "fit"):
            check(x, granularity, rule=rule, eps=0)
    check(x, scale=0.03125, rounding="away")


@pytest.mark.parametrize("size", [1 << 15, (1 << 15) + 1, 256 * 1024 + 300, 3 * 256 * 1024 + 1])
def test_sums_of_long_blocks(size):
    """Over several slabs, and over more than one round of lanes, whose order shows in the last bits."""
    x = make("wide", size, np.float32, seed=4)
    expected = np.float32(total([float(abs(v)) for v in x]) / size)
    for shape, granularity in (((size,), "tensor"), ((1, size), ("channel", 0)), ((1, size), ("group", size))):
        assert kb.quantize(x.reshape(shape), "ternary", granularity=granularity).planes["scale"][0] == expected


def test_the_order_of_sums():
    """In float64, of numbers so different that every addition rounds."""
    x = np.abs(make("extreme", 5 * 256 + 77, np.float32, seed=5))
    assert ternary._lane_sums(ternary._first_sums(x[None]))[0] == total([float(w) for w in x])
    sums = np.abs(make("extreme", 2 * 1024 + 5, np.float32, seed=6)).astype(np.float64)
    lanes = [sum(float(s) for s in sums[i::1024]) for i in range(1024)]
    assert ternary._lane_sums(sums[None])[0] == tree(lanes)


@pytest.mark.parametrize("width", [4, 32, 128, 256])
def test_sums_that_any_order_gives(width):
    """Only they are not found by the tree: the last bits of all numbers are within 53 bits of the sum."""
    rng = np.random.default_rng(width)
    for exponent in (0, -20, -21, -22, -23, -24, -25, -29, -149):
        low = np.float32(1.5 * 2.0**exponent if exponent > -149 else 2.0**-149)
        for rows in ([], [7], [0, 3, 49], range(1, 50), range(50)):
            x = rng.integers(1 << 23, 1 << 24, (50, width)).astype(np.float32) * np.float32(2.0**-23)
            x[:, 2] = 0
            x[rows, 1] = low
            sums = np.array([math.fsum(row) for row in x])
            exact = sums < 2.0 ** (53 + max(exponent - 23, -149))
            assert ternary._inexact(x, sums).tolist() == [row for row in rows if not exact[row]], low
            assert ternary._first_sums(x)[:, 0].tobytes() == ternary._tree(x).tobytes()
            order = [sum(float(w) for w in row) for row in x]  # one after the other
            assert all(sums[row] == order[row] for row in range(50) if exact[row] or row not in rows)


def test_sums_of_float16_are_exact():
    """Of all magnitudes, the smallest beside the largest: subnormal numbers of float16 and of float32."""
    x = np.arange(0x7C00, dtype=np.uint16).view(np.float16).reshape(-1, 256)
    x = np.concatenate([x, x.T.reshape(-1, 256), np.tile(np.float16([65504, 2.0**-24]), (3, 128)), -x])
    found = ternary._slab_sums(x[:, None], np.empty(x.size, np.float32))
    assert found[:, 0].tolist() == [math.fsum(abs(float(w)) for w in row) for row in x]
    assert kb.quantize(x, "ternary").planes["scale"][0] == np.float32(math.fsum(np.abs(x.astype(float)).flat) / x.size)


@pytest.mark.parametrize("largest", [65519.9, np.inf])
def test_float16_is_rounded_bit_by_bit(largest):
    """Every float16, the middles between neighbours, and what is next to either; NaN and infinities."""
    half = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    with np.errstate(all="ignore"):
        middles = (half.astype(np.float32) + np.nextafter(half, np.float16(np.inf)).astype(np.float32)) / 2
        exact = np.concatenate([half.astype(np.float32), middles, np.full(3000, 2.0**-25), np.full(9, 1e-42)])
        exact = exact.astype(np.float32)
        x = np.concatenate([exact, np.nextafter(exact, np.float32(9e9)), np.nextafter(exact, np.float32(-9e9))])
        x = np.random.default_rng(0).permutation(x[np.abs(x) <= largest] if largest < np.inf else x)
        found, wanted = np.empty(x.shape, np.float16), x.astype(np.float16)
        narrow(x, found)
    assert len(x) > 300_000
    np.testing.assert_array_equal(found.view(np.uint16), wanted.view(np.uint16))
    grid = np.empty((40, 60), np.float16)
    narrow(x[:2400].reshape(40, 60), grid.T.reshape(60, 40).T)
    narrow(x[:2400].reshape(60, 40).T, grid)
    np.testing.assert_array_equal(grid.view(np.uint16), wanted[:2400].reshape(60, 40).T.view(np.uint16))


def test_float16_is_widened_bit_by_bit():
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    for x in (every, every[np.isfinite(every)], every[::3], every[:0]):
        found = np.empty(x.shape, np.float32)
        widen(x, found)
        assert found.tobytes() == x.astype(np.float32).tobytes()


@pytest.mark.parametrize("rounding", sorted(LIMITS))
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_numbers_of_16_bits_have_the_trits_of_their_float32(dtype, rounding):
    """Compared by their bits: every number under scales in and beyond the dtype's range, in rows long and short."""
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    scales = np.float32([0, 1e-45, 1e-40, 3e-8, 6.1e-5, 0.75, 1, 65504, 7e4, 3.4e38])
    for numbers in (every, every[:0x7C00]):  # with NaN and without
        x = np.tile(numbers, (len(scales), 1))
        for shape, granularity in ((x.shape, ("channel", 0)), ((-1, 8), ("channel", 0))):
            y = np.ascontiguousarray(x[:, : x.shape[1] // 8 * 8]).reshape(shape if shape[0] < 0 else (len(scales), -1))
            scale = np.repeat(scales, len(y) // len(scales))
            found, wanted = (
                kb.quantize(z, "ternary", granularity=granularity, rounding=rounding, scale=scale)
                for z in (y, y.astype(np.float32))
            )
            assert found.planes["codes"].tobytes() == wanted.planes["codes"].tobytes()


# ---- the cases of others ---------------------------------------------------------------------------------------------


def test_the_worked_example():
    """The bytes of TQ2_0, whose codes lie alike."""
    t = np.arange(256) % 3 - 1
    q = kb.quantize((t * 0.75).astype(np.float32), "ternary", rule="absmax")
    assert q.planes["codes"][:4].tobytes() == bytes.fromhex("18618618") and q.planes["scale"].tolist() == [0.75]
    tq2_0 = kb.quantize((t * 0.75).astype(np.float32), "tq2_0")
    assert q.planes["codes"].tobytes() == tq2_0.planes["qs"].tobytes()


def test_a_group_of_bitnet_quantize():
    x = np.array([[1, -1, 0.5, -0.5, 2, -2, 0.1, -0.1]], np.float32)
    q = check(x, ("group", 4), rounding="away")
    assert q.planes["scale"].tolist() == [0.75, np.float32(1.05)]
    assert q.dequantize().tolist() == [[0.75, -0.75, 0.75, -0.75, np.float32(1.05), np.float32(-1.05), 0, 0]]


@pytest.mark.parametrize(("rounding", "trits"), [("away", [-1, -1, 0, 1, 1]), ("even", [-1, 0, 0, 0, 1])])
def test_ties(rounding, trits):
    assert check(np.float32([-2, -0.5, 0, 0.5, 2]), scale=1, rounding=rounding).dequantize().tolist() == trits
    doubled = check(np.float32([-4, -1, 0, 1, 4]), scale=2, rounding=rounding).dequantize()
    assert doubled.tolist() == [2 * t for t in trits]


def test_zeros():
    x = np.zeros((3, 5), np.float32)
    assert check(x).planes["scale"].tolist() == [np.float32(1e-5)]
    assert check(x, rule="absmax").planes["scale"].tolist() == [0]
    assert check(x + 1, scale=0).dequantize().tolist() == x.tolist()


def test_ternary_numbers_come_back():
    """By absmax exactly; absmean shrinks them by the share of zeros."""
    x = np.float32(0.7) * np.float32([1, 0, 0, 0, -1, 0, 1, 0])
    assert kb.quantize(x, "ternary:rule=absmax").dequantize().tobytes() == x.tobytes()
    assert kb.quantize(x, "ternary").planes["scale"] == np.float32(0.2625)


def test_weights_never_trained_ternary():
    """The SQNR that theory gives for normal numbers and Laplace's."""
    rng = np.random.default_rng(0)
    for x, absmean, fit in (
        (rng.standard_normal(1 << 18), 5.79, 7.20),
        (rng.laplace(size=1 << 18), 4.05, 5.78),
    ):
        x = x.astype(np.float32)
        for rule, expected in (("absmean", absmean), ("fit", fit)):
            assert kb.metrics.sqnr_db(x, kb.quantize(x, "ternary", rule=rule)) == pytest.approx(expected, abs=0.05)


# ---- special numbers, thresholds -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity(dtype):
    x = np.array([np.nan, np.inf, -np.inf, 1, -1, 0, -0.0, np.nan], np.float32).astype(dtype)
    q = check(x, scale=2.0, rounding="away")
    assert q.dequantize(dtype="float32").tolist() == [0, 2, -2, 2, -2, 0, 0, 0]
    assert check(x, rule="absmax").planes["scale"].tolist() == [float(LARGEST)]
    assert check(x).planes["scale"].tolist() == [np.float32((2 * float(LARGEST) + 2) / 8)]
    assert check(np.full(300, np.nan, dtype), ("group", 64)).dequantize(dtype="float32").tolist() == [0] * 300


@pytest.mark.parametrize("rounding", LIMITS)
def test_thresholds(rounding):
    """They part the numbers as the rule does, for scales of every size."""
    rng = np.random.default_rng(1)
    scale = rng.integers(1, 0x7F800000, 20_000).astype(np.uint32).view(np.float32)
    scale[:6] = [1e-45, 2.0**-149 * 3, 2.0**-128, 2.0**-126, LARGEST, 1]
    found = thresholds(scale, rounding)
    with np.errstate(all="ignore"):
        inverse = np.float32(1) / scale
        for steps in range(-2, 3):
            w = np.maximum(found.view(np.int32) + steps, 0).view(np.float32)
            product = w * inverse
            above = product > np.float32(0.5) if rounding == "even" else product >= np.float32(0.5)
            assert np.array_equal(above, w >= found)
    assert np.isnan(thresholds(np.zeros(1, np.float32), rounding)).all()


# ---- options, given scales, parts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_given_scales(shape):
    x = make("normal", 3 * 40, np.float32).reshape(3, 40)
    scale = np.float64([0.5, 1, 2]).reshape(shape)
    q = kb.quantize(x, "ternary", granularity=("channel", 0), scale=scale)
    for row, step in enumerate((0.5, 1.0, 2.0)):
        assert q.dequantize()[row].tobytes() == by_hand(x[row], scale=step)[2].tobytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"granularity": "token"}, "granularity is 'token'; ternary takes 'tensor', .*'channel', 0.* and"),
        ({"granularity": ("channel", 1)}, r"granularity is \('channel', 1\)"),
        ({"granularity": ("group", 0)}, "group size of granularity is 0"),
        ({"rule": "mean"}, "rule is 'mean'; allowed are 'absmean', 'absmax', 'fit'"),
        ({"rule": 3}, "rule is 3; allowed"),
        ({"rounding": "up"}, "rounding is 'up'; allowed are 'even', 'away'"),
        ({"eps": -1.0}, "eps is -1.0; it must be a number, 0 or more and finite in float32"),
        ({"eps": True}, "eps is True"),
        ({"eps": 1e39}, r"eps is 1e\+39"),
        ({"eps": math.nan}, "eps is nan"),
    ],
)
def test_refused_options(options, message):
    with pytest.raises(kb.KbitError, match=message):
        kb.get_format("ternary", **options)


@pytest.mark.parametrize(
    ("scale", "error", "message"),
    [
        (-1.0, ValueError, "scale holds -1.0; scales must be finite in float32 and not negative"),
        (math.inf, ValueError, "scale holds inf"),
        (1e39, ValueError, "scale holds inf"),
        ([1.0, 2.0], ValueError, r"scale has shape \(2,\); this granularity needs shape \(1,\)"),
        ("1", TypeError, "scale"),
    ],
)
def test_refused_scales(scale, error, message):
    with pytest.raises(error, match=message):
        kb.quantize(np.ones((3, 4), np.float32), "ternary", scale=scale)


@pytest.mark.parametrize("text", ["ternary", "ternary:granularity=channel:0", "ternary:block=48"])
def test_stacks_keep_each_members_scale(text):
    members = [kb.quantize(make("normal", 4 * 96, np.float32, seed=i).reshape(4, 96) * 10**i, text) for i in range(3)]
    stack = kb.stack(members)
    assert stack.members in (1, 3)
    for i, q in enumerate(members):
        assert stack[i].planes["scale"].tobytes() == q.planes["scale"].tobytes()
        assert stack[i].dequantize().tobytes() == q.dequantize().tobytes()


def test_rows_that_share_bytes_are_not_cut():
    q = kb.quantize(np.ones((4, 96), np.float32), "ternary")
    with pytest.raises(kb.KbitError, match="96 elements are no multiple of 128, whose codes lie together"):
        q[1:3]


def test_code_three_is_two():
    q = kb.quantize(np.zeros(128, np.float32), "ternary", scale=0.5)
    q.planes["codes"][:] = 0xFF
    assert q.dequantize().tolist() == [1.0] * 128


# ---- what lists show -------------------------------------------------------------------------------------------------


def test_the_share_of_zeros():
    x = np.float32([1, 0, 0, -1, 0] * 61)
    q = kb.quantize(x, "ternary", scale=1)
    assert q.format.shares(q.planes, q.shape) == {"zeros": 0.6}
    stack = kb.stack([kb.quantize(x[:256] * s, "ternary:rule=absmax") for s in (0, 1, 2)])
    assert stack.format.shares(stack.planes, stack.shape)["zeros"] == pytest.approx((256 + 2 * 153) / 768)
    empty = kb.quantize(np.zeros(0, np.float32), "ternary")
    assert empty.format.shares(empty.planes, empty.shape) == {}


def test_sweeps_show_zeros_and_say_what_an_error_means():
    rng = np.random.default_rng(2)
    trits = (rng.integers(-1, 2, (64, 64)) * 0.7).astype(np.float32)
    arrays = {"normal": rng.standard_normal((64, 64)).astype(np.float32), "trits": trits}
    rows = kb.explore.sweep(arrays, ["kbit4", "ternary", "ternary:rule=absmax"])
    found = {(row["tensor"], row["label"]): row for row in rows}
    assert found["normal", "kbit4"]["shares"] == {} and found["normal", "kbit4"]["remark"] is None
    assert found["trits", "ternary"]["shares"]["zeros"] == (trits == 0).mean()
    assert "never trained to be ternary" in found["normal", "ternary"]["remark"]
    assert "ternary already" in found["trits", "ternary"]["remark"]
    assert found["trits", "ternary:rule=absmax"]["remark"] is None
    text = repr(rows)
    assert "zeros" in text.splitlines()[0] and "note: ternary of 'normal': so low an SQNR says" in text


def test_the_command_line_shows_zeros(tmp_path, capsys):
    x = (np.random.default_rng(3).integers(-1, 2, (256, 256)) * 2).astype(np.float32)
    kb.io.save(tmp_path / "in.safetensors", {"w": x})
    share = f"{(x == 0).mean():.1%}"
    files = str(tmp_path / "in.safetensors"), str(tmp_path / "out.safetensors")
    assert main(["compare", files[0], "--formats", "ternary:rule=absmax", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "zeros" in printed and share in printed and "note" not in printed
    assert main(["quantize", *files[:1], "-o", files[1], "--format", "ternary", "--device", "cpu"]) == 0
    capsys.readouterr()
    assert main(["inspect", files[1]]) == 0
    printed = capsys.readouterr().out
    assert "zeros" in printed and share in printed
    assert main(["compare", files[0], "--formats", "kbit4,ternary", "--device", "cpu"]) == 0
    assert "note: ternary of 'w': the numbers are ternary already" in capsys.readouterr().out
