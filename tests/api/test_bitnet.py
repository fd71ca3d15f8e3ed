"""kb.bitnet: trits, the packings of other projects byte for byte, and the cases of bitnet-quantize."""

import numpy as np
import pytest

import kbitcupy as kb
from kbitcupy.bitnet import LAYOUTS
from kbitcupy.errors import FormatError

BLOCK_OF = {"i2_s": None, "tq1_0": 256, "tq2_0": 256, "q2_0": 64}


def host(array):
    return array if isinstance(array, np.ndarray) else array.get()


def random_trits(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).integers(-1, 2, shape).astype(np.int8)


def example(size):
    """-1 0 1 -1 0 1 ..."""
    return (np.arange(size) % 3 - 1).astype(np.int8)


def hexed(array, first, count=4):
    return host(array).reshape(-1).view(np.uint8)[first : first + count].tobytes().hex(" ")


# ---- trits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0,), (1,), (127,), (128,), (3, 129), (4, 256), (2, 3, 5, 7)], ids=str)
@pytest.mark.parametrize("granularity", ["tensor", ("channel", 0), ("group", 3), ("group", 64)], ids=str)
def test_from_trits_and_back(xp, shape, granularity):
    t = random_trits(*shape)
    q = kb.bitnet.from_trits(xp.asarray(t), 0.75, granularity=granularity, dtype="float16")
    assert q.dtype == np.float16 and q.format == kb.get_format("ternary", granularity=granularity)
    found = kb.bitnet.trits(q)
    assert found.dtype == np.int8 and found.shape == shape and np.array_equal(host(found), t)
    assert np.array_equal(host(q.dequantize()), t * np.float16(0.75))
    assert kb.bitnet.sparsity(q) == kb.bitnet.sparsity(xp.asarray(t)) == ((t == 0).mean() if t.size else 0)


def test_trits_are_those_that_quantize_finds(xp):
    w = np.random.default_rng(0).standard_normal((5, 200)).astype(np.float32)
    q = kb.quantize(xp.asarray(w), "ternary", granularity=("channel", 0))
    assert np.array_equal(host(kb.bitnet.trits(q)), np.sign(host(q.dequantize())).astype(np.int8))
    again = kb.bitnet.from_trits(kb.bitnet.trits(q), q.planes["scale"], granularity=("channel", 0))
    assert all((again.planes[name] == plane).all() for name, plane in q.planes.items())


@pytest.mark.parametrize("depth", [100, 128])
def test_trits_of_stacks(xp, depth):
    t = random_trits(4, 3, depth)
    members = [kb.bitnet.from_trits(xp.asarray(member), i + 1.0) for i, member in enumerate(t)]
    planes = {name: xp.concatenate([q.planes[name] for q in members]) for name in ("codes", "scale")}
    q = kb.QuantizedArray(members[0].format, planes, t.shape, "float32")
    assert q.lead == 1 and np.array_equal(host(kb.bitnet.trits(q)), t)
    if depth == 128:  # members are whole blocks
        assert np.array_equal(host(kb.bitnet.trits(q[2])), t[2])


# ---- packings --------------------------------------------------------------------------------------------------------

# t_i = i % 3 - 1, scale 0.75; what stands from which byte on, as the projects themselves write it.
WORKED = [
    ("tq2_0", (256,), 0, "18 61 86 18"),
    ("tq2_0", (256,), 64, "00 3a"),
    ("i2_s", (256,), 0, "24 49 92 24"),
    ("i2_s", (256,), 64, "00 00 40 3f 00 00"),
    ("tq1_0", (256,), 0, "45 6c cf 45"),
    ("tq1_0", (256,), 48, "30 92 bb 30"),
    ("tq1_0", (256,), 52, "00 3a"),
    ("q2_0", (256,), 0, "00 3a 24 49"),
    ("microsoft", (16, 96), 0, "79 9e e7 79"),
    ("torchao", (1, 8), 0, "c7 1c"),
]


@pytest.mark.parametrize(("layout", "shape", "first", "text"), WORKED)
def test_worked_examples(xp, layout, shape, first, text):
    t = xp.asarray(example(np.prod(shape)).reshape(shape))
    scale = 0.75 if layout in BLOCK_OF else None
    count = len(text.split())
    assert hexed(kb.bitnet.pack(t, layout, scale=scale), first, count) == text
    if len(shape) == 1:
        q = kb.bitnet.from_trits(t, 0.75)
        assert hexed(kb.bitnet.pack(q, layout), first, count) == text


def test_our_own_codes_are_those_of_tq2_0(xp):
    t = xp.asarray(example(256))
    assert hexed(kb.bitnet.from_trits(t).planes["codes"], 0) == "18 61 86 18"
    packed = kb.bitnet.pack(t, "tq2_0")
    assert (packed[:64] == kb.bitnet.from_trits(t).planes["codes"]).all()


def test_the_worked_example_of_transformers(xp):
    column = xp.asarray(np.int8([[-1], [1], [0], [1], [0], [-1], [1], [0]]))
    assert hexed(kb.bitnet.pack(column, "transformers"), 0, 2) == "94 4a"


def test_microsofts_words_one_by_one():
    t = random_trits(32, 96)
    words = kb.bitnet.pack(t, "microsoft").view("<u4").reshape(2, 3, 32)
    for tile_row in range(2):
        for tile in range(3):
            for w in range(32):
                word = 0
                for e in range(16):
                    row, column = 8 * (w // 16) + w % 8, 16 * (w // 8 % 2) + e
                    word |= (int(t[16 * tile_row + row, 32 * tile + column]) + 2) << (8 * (e % 4) + 2 * (e // 4))
                assert words[tile_row, tile, w] == word


def test_bit_planes_and_words_of_bitnet_quantize(xp):
    """Its case of packing, and bits that are counted."""
    t = np.int8([[1, 0, -1, 1, 0, -1, 0, 1, -1, 0, 1, -1, 0, 0, 1, -1]])
    packed = kb.bitnet.pack(xp.asarray(t), "u32")
    assert packed.dtype == np.uint32 and packed.shape == (1, 1)
    assert int(packed[0, 0]) == sum({0: 0, 1: 1, -1: 2}[int(v)] << 2 * i for i, v in enumerate(t[0]))
    t = random_trits(3, 70)
    plus, minus = host(kb.bitnet.pack(xp.asarray(t), "planes"))
    assert plus.shape == (3, 3) and plus.dtype == np.uint32
    for row in range(3):
        for k in range(96):
            value = t[row, k] if k < 70 else 0
            assert (plus[row, k // 32] >> k % 32 & 1, minus[row, k // 32] >> k % 32 & 1) == (value == 1, value == -1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_round_trips(xp, layout):
    shapes = [(16, 256), (32, 512)]
    if layout in ("planes", "u32"):
        shapes += [(1, 1), (3, 33), (5, 0), (0, 5)]
    if layout in BLOCK_OF:
        shapes += [(512,), (2, 3, 256), (0, 256)]
    for shape in shapes:
        t = random_trits(*shape)
        packed = kb.bitnet.pack(xp.asarray(t), layout)
        found = kb.bitnet.unpack(packed, shape, layout, check=True)
        assert found.dtype == np.int8 and found.shape == shape and np.array_equal(host(found), t)
        assert np.array_equal(host(kb.bitnet.unpack(packed.reshape(-1), shape, layout)), t)
        assert (packed == kb.bitnet.pack(kb.bitnet.from_trits(xp.asarray(t)), layout)).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_byte(xp, layout):
    """What no packer writes is refused; what is not looked at has some value."""
    shape = (16, 256)
    good = kb.bitnet.pack(np.zeros(shape, np.int8), layout)
    raw = good.reshape(-1).view(np.uint8)
    place = 2 if layout == "q2_0" else 0
    valid, largest = [], 2 if layout == "q2_0" else 1
    for byte in range(256):
        changed = raw.copy()
        changed[place] = byte
        changed = changed.view(good.dtype).reshape(good.shape)
        loose = host(kb.bitnet.unpack(xp.asarray(changed), shape, layout, check=False))
        again = kb.bitnet.pack(loose, layout) if loose.min() >= -1 and loose.max() <= largest else None
        if again is None or not np.array_equal(again, changed):
            with pytest.raises(FormatError, match="no packer of"):
                kb.bitnet.unpack(xp.asarray(changed), shape, layout, check=True)
            continue
        t = kb.bitnet.unpack(xp.asarray(changed), shape, layout, check=True)
        assert np.array_equal(host(t), loose)
        valid.append(byte)
    wanted = {"tq1_0": 243, "q2_0": 256, "planes": 256}
    assert len(valid) == wanted.get(layout, 81)


def test_a_trit_in_both_planes(xp):
    packed = np.zeros((2, 1, 1), np.uint32)
    packed[:, 0, 0] = 4
    with pytest.raises(FormatError, match="no packer of 'planes'"):
        kb.bitnet.unpack(xp.asarray(packed), (1, 32), "planes", check=True)
    assert not kb.bitnet.unpack(xp.asarray(packed), (1, 32), "planes", check=False).any()


def test_values_of_codes_that_are_not_looked_at(xp):
    assert kb.bitnet.unpack(xp.full(64, 255, np.uint8), (128,), "i2_s", check=False).tolist() == [0] * 128
    assert kb.bitnet.unpack(xp.full((1, 1), 255, np.uint8), (4, 1), "transformers", check=False).tolist() == [[2]] * 4
    assert kb.bitnet.unpack(xp.full((1, 1), 2**32 - 1, np.uint32), (1, 16), "u32", check=False).tolist() == [[0] * 16]


def test_q2_0_has_a_value_of_2(xp):
    t = xp.asarray((np.arange(64) % 4 - 1).astype(np.int8))
    assert kb.bitnet.unpack(kb.bitnet.pack(t, "q2_0"), (64,), "q2_0").tolist() == t.tolist()
    with pytest.raises(FormatError, match="trits are -1 to 2; they must be -1 to 1"):
        kb.bitnet.from_trits(t, check=True)


def test_scales(xp):
    t = random_trits(4, 512)
    on = xp.asarray(t)
    rows = xp.asarray(np.float32([0.5, 2, 3.25, 0.125]))
    for layout, block in BLOCK_OF.items():
        if block is None:
            found = kb.bitnet.packed_scales(kb.bitnet.pack(on, layout, scale=1e-30), t.shape, layout)
            assert found.tolist() == [np.float32(1e-30)]
            continue
        each = xp.asarray((np.arange(4 * 512 // block) % 37).astype(np.float16))
        packed = kb.bitnet.pack(on, layout, scale=each)
        found = kb.bitnet.packed_scales(packed, t.shape, layout)
        assert found.shape == (4, 512 // block) and found.reshape(-1).tolist() == each.tolist()
        q = kb.bitnet.from_trits(on, rows, granularity=("channel", 0))
        found = kb.bitnet.packed_scales(kb.bitnet.pack(q, layout), t.shape, layout)
        assert np.array_equal(host(found), np.broadcast_to(host(rows)[:, None], found.shape))
        groups = xp.asarray(np.arange(8, dtype=np.float32))
        q = kb.bitnet.from_trits(on, groups.reshape(4, 2), granularity=("group", 256))
        found = host(kb.bitnet.packed_scales(kb.bitnet.pack(q, layout), t.shape, layout))
        assert np.array_equal(found, host(groups).repeat(256 // block).reshape(found.shape))


def test_llama_cpp_and_gguf_py_read_the_same():
    """Our blocks of tq1_0 and tq2_0, decoded by gguf-py and by our own format of that name."""
    quants = pytest.importorskip("gguf.quants", reason="gguf-py decodes its blocks")
    from gguf import GGMLQuantizationType as Type

    t = random_trits(3, 512)
    for layout, kind in (("tq1_0", Type.TQ1_0), ("tq2_0", Type.TQ2_0)):
        packed = kb.bitnet.pack(t, layout, scale=0.75)
        assert np.array_equal(quants.dequantize(packed, kind), t * np.float32(0.75))
        assert np.array_equal(kb.gguf.from_blocks(packed, layout, t.shape).dequantize(), t * np.float32(0.75))
        assert np.array_equal(quants.quantize(t * np.float32(0.75), kind), packed)


def test_transformers_packs_the_same():
    torch = pytest.importorskip("torch", reason="transformers' packer is torch")
    packer = pytest.importorskip("transformers.integrations.bitnet", reason="transformers packs weights")
    t = random_trits(12, 20)
    assert np.array_equal(kb.bitnet.pack(t, "transformers"), packer.pack_weights(torch.from_numpy(t.copy())).numpy())


def test_torch_tensors():
    torch = pytest.importorskip("torch", reason="torch tensors")
    t = random_trits(4, 256)
    packed = kb.bitnet.pack(torch.from_numpy(t), "transformers")
    assert isinstance(packed, torch.Tensor) and np.array_equal(packed.numpy(), kb.bitnet.pack(t, "transformers"))
    assert torch.equal(kb.bitnet.unpack(packed, (4, 256), "transformers"), torch.from_numpy(t))
    x = torch.arange(8.0).reshape(2, 4)
    q, scale = kb.bitnet.quantize_activations(x)
    assert q.dtype == torch.int8 and torch.allclose(kb.bitnet.dequantize_activations(q, scale), x, atol=0.05)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda t: kb.bitnet.pack(t, "tl1"), FormatError, "layout is 'tl1'; allowed are 'i2_s'"),
        (lambda t: kb.bitnet.pack(t, None), FormatError, "layout is None"),
        (lambda t: kb.bitnet.pack(t.astype(int), "u32"), TypeError, "q is int64; trits are int8"),
        (lambda t: kb.bitnet.pack(t + 1, "u32"), FormatError, "trits are 0 to 2"),
        (lambda t: kb.bitnet.pack(t, "u32", scale=1), FormatError, "has no scales"),
        (lambda t: kb.bitnet.pack(t[:, :100], "tq1_0"), ValueError, "K that is a multiple of 256"),
        (lambda t: kb.bitnet.pack(t[:3], "transformers"), ValueError, "N that is a multiple of 4"),
        (lambda t: kb.bitnet.pack(t[0], "transformers"), ValueError, r"packs a matrix \[N, K\]"),
        (lambda t: kb.bitnet.pack(t[:, :33], "i2_s"), ValueError, "size that is a multiple of 128"),
        (lambda t: kb.bitnet.pack(t, "tq2_0", scale=np.ones(3)), ValueError, "one number, or 16 of them"),
        (lambda t: kb.bitnet.pack(t, "tq2_0", scale=1e5), FormatError, "up to 65504"),
        (lambda t: kb.bitnet.pack(kb.bitnet.from_trits(t), "tq2_0", scale=1), FormatError, "q brings its own"),
        (lambda t: kb.bitnet.pack(rows_of(t), "i2_s"), FormatError, "with 16 scales; layout 'i2_s' has 1"),
        (lambda t: kb.bitnet.pack(kb.quantize(t * 1.0, "kbit4"), "u32"), FormatError, "it must be 'ternary'"),
        (lambda t: kb.bitnet.unpack(t, (16, 256), "tq1_0"), ValueError, "packed has 4096 bytes; .* has 864"),
        (lambda t: kb.bitnet.unpack(t * 1.0, (16, 256), "u32"), TypeError, "packed is float64"),
        (lambda t: kb.bitnet.unpack(t, (-1, 256), "u32"), ValueError, "shape is"),
        (lambda t: kb.bitnet.packed_scales(t, (16, 1024), "transformers"), FormatError, "those that have some are"),
        (lambda t: kb.bitnet.from_trits(t, -1.0), FormatError, "scales must be finite"),
        (lambda t: kb.bitnet.from_trits(t, np.ones(3)), FormatError, "scale has shape"),
        (lambda t: kb.bitnet.from_trits(t, check=1), FormatError, "check is 1"),
        (lambda t: kb.bitnet.trits(t), TypeError, "q is ndarray"),
    ],
)
def test_bad_calls(call, error, message):
    with pytest.raises(error, match=message):
        call(random_trits(16, 256))


def rows_of(t):
    return kb.bitnet.from_trits(t, np.ones(len(t)), granularity=("channel", 0))


# ---- bitnet-quantize's cases -----------------------------------------------------------------------------------------


def test_b4_b11_activations(xp):
    """4x128 has 4 scales, 2x16x128 has 32; (i - 32) / 10 within 127; zeros are 0."""
    rng = np.random.default_rng(0)
    for shape, count in (((4, 128), 4), ((2, 16, 128), 32), ((128,), 1), ((2, 3, 4, 64), 24)):
        x = rng.standard_normal(shape).astype(np.float32)
        q, scale = kb.bitnet.quantize_activations(xp.asarray(x))
        assert q.shape == shape and scale.size == count and scale.shape == shape[:-1]
        error = np.abs(host(kb.bitnet.dequantize_activations(q, scale)) - x)
        assert (error <= host(scale)[..., None] * 0.501).all()
    q, _ = kb.bitnet.quantize_activations(xp.asarray(((np.arange(64) - 32) / 10).astype(np.float32)))
    assert host(q).min() == -127 and host(q).max() <= 127
    q, scale = kb.bitnet.quantize_activations(xp.zeros((4, 64), np.float32))
    assert not q.any() and (kb.bitnet.dequantize_activations(q, scale) == 0).all()


def test_b5_b11_error_of_quantize_and_dequantize(xp):
    x = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32)
    for granularity in ("token", "tensor"):
        q, scale = kb.bitnet.quantize_activations(xp.asarray(x), granularity=granularity)
        y = kb.bitnet.dequantize_activations(q, scale)
        assert y.shape == x.shape and np.abs(host(y) - x).max() < 0.1
        assert kb.bitnet.dequantize_activations(q, scale, dtype="float16").dtype == np.float16


def test_b7_b11_dequantize(xp):
    t, scales = np.int8([[1, 0], [-1, 1]]), np.float32([2, 0.5])
    q = kb.bitnet.from_trits(xp.asarray(t), xp.asarray(scales), granularity=("channel", 0))
    assert q.dequantize().tolist() == [[2, 0], [-0.5, 0.5]]
    x = xp.asarray(np.float32([[1, 2], [3, 4]]))
    assert kb.linear(x, q).tolist() == [[2, 0.5], [6, 0.5]]
    assert np.allclose(host(kb.bitnet.linear(x, q)), [[2, 0.5], [6, 0.5]], atol=0.05)


def test_b11_sparsity(xp):
    t = xp.asarray(np.int8([[1, 0, 0, 0], [0, -1, 0, 0]]))
    assert kb.bitnet.sparsity(kb.bitnet.from_trits(t, granularity=("group", 4))) == 0.75


@pytest.mark.parametrize("biased", [False, True])
def test_b11_layer_shapes(xp, biased):
    rng = np.random.default_rng(0)
    q = kb.quantize(xp.asarray(rng.standard_normal((64, 128)).astype(np.float32)), "ternary:block=64")
    bias = xp.asarray(rng.standard_normal(64).astype(np.float32)) if biased else None
    for shape in ((4, 128), (2, 16, 128), (128,), (1, 2, 3, 128)):
        x = xp.asarray(rng.standard_normal(shape).astype(np.float32))
        y = kb.bitnet.linear(x, q, bias)
        assert y.shape == (*shape[:-1], 64)
        assert kb.metrics.sqnr_db(host(kb.linear(x, q, bias)), host(y)) > 35
