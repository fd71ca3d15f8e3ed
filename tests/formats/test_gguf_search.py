"""GGUF's searched types: ggml's bytes with and without importance, and what may be given as importance."""

import json

import ggml
import numpy as np
import pytest
from inputs import make
from make_gguf_data import KINDS, numbers
from make_gguf_importance import BLOCKS, FEW, FILE, MATRICES, RANGED, TYPES, checksum, few, importance

import kbitcupy as kb
from kbitcupy.formats.blocks import BlockFormat
from kbitcupy.formats.chunks import CHUNK
from kbitcupy.formats.gguf import search

FROZEN = json.loads(FILE.read_text())
BYTES = dict(np.load(BLOCKS))
SEARCHED = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs")


def blocks_of(q):
    return q.format.to_blocks(q.planes)


def same(a, b):
    return all(np.array_equal(a.planes[name].view(np.uint8), b.planes[name].view(np.uint8)) for name in a.planes)


@pytest.mark.parametrize("name", TYPES)
def test_ggmls_bytes_with_importance(name):
    for kind, x in zip(BYTES["kinds"].tolist(), BYTES["x"], strict=True):
        for matrix, wanted in zip(MATRICES, FROZEN[name][kind], strict=True):
            q = kb.quantize(x, name, importance=importance(matrix, x.size))
            assert checksum(blocks_of(q)) == wanted, (kind, matrix)


@pytest.mark.parametrize("name", RANGED)
def test_inner_codes_are_kept_in_bytes(name):
    """Scales of sub-blocks may be negative where hardly a column has importance."""
    for seed, wanted in zip(FEW, FROZEN[name]["few"], strict=True):
        x, v = few(seed)
        assert checksum(blocks_of(kb.quantize(x, name, importance=v))) == wanted


@pytest.mark.parametrize("name", [*SEARCHED, "q8_k"])
def test_ggml(name):
    """Other numbers than the frozen ones, and what ggml decodes of them."""
    for kind in KINDS:
        x = numbers(kind, 1 << 13, seed=6).reshape(2, -1)
        q = kb.quantize(x, name)
        blocks = blocks_of(q)
        assert np.array_equal(blocks, ggml.quantize(name, x).reshape(blocks.shape)), kind
        assert np.array_equal(q.dequantize(), ggml.dequantize(name, blocks).reshape(x.shape)), kind


@pytest.mark.parametrize("name", TYPES)
def test_ggml_with_importance_in_long_rows(name):
    x = numbers("student", 3 * 2304, seed=7).reshape(3, -1)
    for matrix in MATRICES:
        v = importance(matrix, 2304, seed=7)
        blocks = blocks_of(kb.quantize(x, name, importance=v))
        assert np.array_equal(blocks, ggml.quantize(name, x, v).reshape(blocks.shape)), matrix


@pytest.mark.parametrize("name", ["q4_0", "q5_0", "q3_k", "q6_k", "iq4_nl", "iq4_xs"])
def test_ggml_where_only_subnormal_numbers_have_importance(name):
    """Scales are subnormal then, and 1 over them infinite. Types with minima round what ggml wraps."""
    x, v = numbers("subnormal", 1 << 12, seed=8).reshape(4, -1), importance("random", 1024)
    large = np.arange(1024) % 37 == 0
    x[:, ::5] = 0
    x[:, large], v[large] = numbers("normal", 1024, seed=8)[large], 0
    blocks = blocks_of(kb.quantize(x, name, importance=v))
    assert np.array_equal(blocks, ggml.quantize(name, x, v).reshape(blocks.shape))


# ---- sums in their order ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [2, 3, 8, 31, 1000, 1024, 8192, 8200])
@pytest.mark.parametrize("sub", [8, 16, 32])
def test_numpy_adds_rows_in_ascending_order(sub, columns):
    x = make("wide", sub * columns, np.dtype("float32")).reshape(sub, columns)
    chain = x[0].copy()
    for row in x[1:]:
        chain += row
    assert np.array_equal(search.total(x), chain)


@pytest.mark.parametrize("name", [*TYPES, "q8_k"])
def test_blocks_do_not_know_each_other(name):
    """One block, some, and many, which fill more than a tile: the same bytes, so that no sum depends on the others."""
    block = kb.get_format(name).block
    x = make("wide", 36 * 1024 + block, np.dtype("float32"))
    whole = blocks_of(kb.quantize(x, name))
    for first, last in ((0, 1), (1, 3), (len(whole) - 1, len(whole))):
        assert np.array_equal(blocks_of(kb.quantize(x[first * block : last * block], name)), whole[first:last])


@pytest.mark.parametrize("name", TYPES)
def test_rows_do_not_know_each_other(name):
    """With importance whole rows are taken at a time, fewer or more of them than there are."""
    x = make("wide", 5 * 1280, np.dtype("float32")).reshape(5, -1)
    v = importance("random", 1280)
    many = np.resize(x, (CHUNK // 1280 + 7, 1280))
    found = blocks_of(kb.quantize(many, name, importance=v)).reshape(len(many), -1)
    for row, blocks in zip(many[:5], found, strict=False):
        assert np.array_equal(blocks_of(kb.quantize(row, name, importance=v)).reshape(-1), blocks)
    assert np.array_equal(found, np.resize(found[:5], found.shape))


def test_a_row_that_is_longer_than_a_chunk():
    x = make("normal", 2 * (CHUNK + 256), np.dtype("float32")).reshape(2, -1)
    v = importance("random", x.shape[1])
    for name in ("q4_1", "q4_k"):
        whole = kb.quantize(x, name, importance=v)
        rows = [kb.quantize(row, name, importance=v) for row in x]
        assert np.array_equal(blocks_of(whole), np.concatenate([blocks_of(row) for row in rows]))


# ---- what importance may be ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TYPES)
def test_experts_have_their_own(name):
    x = make("normal", 2 * 3 * 4 * 256, np.dtype("float16")).reshape(2, 3, 4, 256)
    v = np.stack([importance("wide", 256, seed=i) for i in range(6)]).reshape(2, 3, 256)
    q = kb.quantize(x, name, importance=v)
    for at in np.ndindex(2, 3):
        alone = kb.quantize(x[at], name, importance=v[at])
        assert np.array_equal(blocks_of(alone), blocks_of(q).reshape(2, 3, -1, q.format.block_bytes)[at])
    assert same(kb.quantize(x, name, importance=v[1, 2]), kb.quantize(x, name, importance=np.resize(v[1, 2], v.shape)))
    out = kb.quantize(x, name)
    assert kb.quantize(x, name, importance=v, out=out) is out and same(out, q)


@pytest.mark.parametrize(
    "as_given", [list, np.float64, np.float16, lambda v: v[::-1][::-1]], ids=["list", "float64", "float16", "view"]
)
def test_importance_goes_to_float32(as_given):
    x = make("normal", 4 * 256, np.dtype("float32")).reshape(4, 256)
    v = importance("random", 256).astype(np.float16).astype(np.float32)
    given = list(v.tolist()) if as_given is list else as_given(v)
    assert same(kb.quantize(x, "q4_k", importance=given), kb.quantize(x, "q4_k", importance=v))
    assert same(kb.quantize(x, ("q4_k", {"importance": given})), kb.quantize(x, "q4_k", importance=v))


def test_importance_that_is_the_same_everywhere_differs_from_none():
    """ggml has other searches for it."""
    x = make("normal", 256, np.dtype("float32"))
    assert not same(kb.quantize(x, "q4_k", importance=np.ones(256)), kb.quantize(x, "q4_k"))


def with_one(value):
    v = np.ones(256)
    v[77] = value
    return v


REFUSED = [
    (
        np.ones(255),
        kb.KbitError,
        r"importance has shape \(255,\); for an array of shape \(4, 256\) it must have \(256,\)",
    ),
    (np.ones((4, 256)), kb.KbitError, r"importance has shape \(4, 256\)"),
    (np.ones((1, 256)), kb.KbitError, r"importance has shape \(1, 256\)"),
    (1.0, kb.KbitError, "importance is a single number"),
    (with_one(-1e-9), kb.KbitError, "importance holds -1e-09; it must be from 0 to 2"),
    (with_one(np.nan), kb.KbitError, "importance holds nan"),
    (with_one(np.inf), kb.KbitError, "importance holds inf"),
    (with_one(1e20), kb.KbitError, "importance holds 1e.20; .* divide it by its mean"),
    (np.ones(256, complex), TypeError, "importance is complex128; it must hold numbers"),
    (np.ones(256, bool), TypeError, "importance is bool; it must hold numbers"),
    (["a"] * 256, TypeError, "importance is list"),
]


@pytest.mark.parametrize(("given", "error", "message"), REFUSED)
@pytest.mark.parametrize("name", ["q4_0", "q4_k", "iq4_nl"])
def test_what_is_refused(name, given, error, message):
    x = make("normal", 4 * 256, np.dtype("float32")).reshape(4, 256)
    out = kb.quantize(np.zeros_like(x), name)
    before = {plane: values.copy() for plane, values in out.planes.items()}
    with pytest.raises(error, match=message):
        kb.quantize(x, name, importance=given, out=out)
    assert all(np.array_equal(values, out.planes[plane]) for plane, values in before.items())


def test_a_stack_says_both_shapes():
    with pytest.raises(kb.KbitError, match=r"it must have \(256,\) or \(2, 256\), one number for each column"):
        kb.quantize(np.zeros((2, 3, 256), np.float32), "q4_k", importance=np.ones((3, 256)))


def test_formats_without_importance_refuse_it():
    for name in kb.list_formats():
        format = kb.get_format(name)
        if isinstance(format, BlockFormat) and "importance" not in format.takes and format.can_encode:
            with pytest.raises(kb.KbitError, match="takes no importance"):
                kb.quantize(np.zeros((1, 256), np.float32), name, importance=np.ones(256))


@pytest.mark.parametrize("name", TYPES)
def test_nothing_to_quantize(name):
    assert kb.quantize(np.zeros((0, 256), np.float32), name, importance=np.ones(256)).shape == (0, 256)
    assert kb.quantize(np.zeros((3, 0, 256), np.float32), name, importance=np.ones((3, 256))).shape == (3, 0, 256)


@pytest.mark.parametrize("name", TYPES)
def test_the_largest_importance_of_the_largest_numbers(name):
    x = np.resize(np.float32([65504, -65504, 1, 65504]), (2, 256))
    q = kb.quantize(x, name, importance=np.full(256, 2.0**64))
    assert np.isfinite(q.dequantize()).all()


@pytest.mark.parametrize("name", TYPES)
def test_nan_counts_as_zero_in_the_mean_too(name):
    x = make("normal", 2 * 512, np.dtype("float32")).reshape(2, 512)
    v, plain = importance("random", 512), x.copy()
    x[:, ::9], plain[:, ::9] = np.nan, 0
    x[0, 5], plain[0, 5] = np.inf, 65504
    assert same(kb.quantize(x, name, importance=v), kb.quantize(plain, name, importance=v))
