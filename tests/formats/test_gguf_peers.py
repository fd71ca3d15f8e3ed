"""GGUF's types beside ggml, compiled by its makers, and gguf-py: the same bytes and the same values, whatever comes.

``python tests/compare_ggml.py`` compares more.
"""

import ggml
import numpy as np
import pytest
from compare_ggml import COLUMNS, MADE, NAMES, WEIGHED, different
from gguf_numbers import IMPORTANCES, KINDS, importance, numbers

import kbitcupy as kb


def same_bits(a, b):
    """Equal float32 to the bit, any NaN equal to any NaN."""
    return a.shape == b.shape and bool(((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))).all())


@pytest.mark.parametrize("name", NAMES)
def test_sizes(name):
    assert (kb.gguf.block_size(name), kb.gguf.type_size(name)) == (ggml.block_size(name), ggml.type_size(name))
    assert kb.gguf.type_id(name) == ggml.NUMBERS[name]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MADE)
def test_ggmls_bytes(name, kind):
    assert different(name, numbers(kind, 16 * COLUMNS).reshape(-1, COLUMNS))[0] == 0


@pytest.mark.parametrize("kind", IMPORTANCES)
@pytest.mark.parametrize("name", WEIGHED)
def test_ggmls_bytes_with_importance(name, kind):
    for at, values in enumerate(("normal", "heavy", "wide_blocks", "levels")):
        x = numbers(values, 4 * COLUMNS, seed=at).reshape(-1, COLUMNS)
        assert different(name, x, importance(kind, COLUMNS))[0] == 0, values


@pytest.mark.parametrize("name", WEIGHED)
def test_experts_have_an_importance_each(name):
    x = numbers("normal", 6 * 512).reshape(3, 2, 512)
    weights = np.stack([importance(kind, 512) for kind in ("activations", "uniform", "ties")])
    assert different(name, x, weights) == (0, 0)


@pytest.mark.parametrize("name", ["q8_0", "tq1_0", "tq2_0", "mxfp4", "nvfp4"])
def test_the_others_have_none_in_ggml_either(name):
    assert name not in WEIGHED
    x = numbers("normal", 4 * COLUMNS).reshape(-1, COLUMNS)
    assert np.array_equal(ggml.quantize(name, x), ggml.quantize(name, x, importance("activations", COLUMNS)))


def random_blocks(name, blocks, seed):
    return np.random.default_rng(seed).integers(0, 256, (blocks, kb.gguf.type_size(name)), dtype=np.uint8)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "q8_1"])
def test_ggmls_values(name):
    blocks = random_blocks(name, 300_000 // kb.gguf.block_size(name), 0)
    assert same_bits(kb.gguf.dequantize(blocks, name), ggml.dequantize(name, blocks))


@pytest.mark.parametrize("name", NAMES)
def test_gguf_py(name):
    gguf = pytest.importorskip("gguf", reason="the package gguf, an oracle, is not installed")
    kind = gguf.GGMLQuantizationType(kb.gguf.type_id(name))
    if name != "q8_1":  # of which it has an older size
        assert gguf.GGML_QUANT_SIZES[kind] == (kb.gguf.block_size(name), kb.gguf.type_size(name))
    blocks = random_blocks(name, 300_000 // kb.gguf.block_size(name), 1)
    with np.errstate(all="ignore"):
        try:
            values = gguf.quants.dequantize(blocks, kind)
        except NotImplementedError:
            assert name in ggml.STAGED
            return
    assert same_bits(kb.gguf.dequantize(blocks, name), values)
    x = numbers("heavy", 64 * COLUMNS).reshape(-1, COLUMNS)
    with np.errstate(all="ignore"):
        try:
            theirs = gguf.quants.quantize(x, kind)
        except NotImplementedError:
            return
    assert np.array_equal(kb.gguf.quantize(x, name), theirs)
