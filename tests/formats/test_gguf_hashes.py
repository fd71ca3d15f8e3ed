"""GGUF's types on millions of numbers: hashes that ggml agreed with, frozen in data/gguf_hashes.json."""

import json

import numpy as np
import pytest
from compare_ggml import MADE, NAMES, WEIGHED
from gguf_numbers import IMPORTANCES, KINDS
from make_gguf_hashes import FILE, random_blocks, rows_of, sha, value_hash, weighed_rows, weights_of

import kbitcupy as kb

HASHES = json.loads(FILE.read_text())
BLOCKS, WEIGHED_BLOCKS = ([name for name in HASHES if key in HASHES[name]] for key in ("blocks", "weighed"))


def test_every_type_has_hashes():
    assert set(HASHES) == set(NAMES) and set(BLOCKS) == set(MADE) and set(WEIGHED_BLOCKS) == set(WEIGHED)
    assert all(set(each.get("blocks", KINDS)) == set(KINDS) for each in HASHES.values())
    assert all(set(each.get("weighed", IMPORTANCES)) == set(IMPORTANCES) for each in HASHES.values())


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(name):
    assert sha(kb.gguf.quantize(rows_of("wide_blocks"), name)) == HASHES[name]["blocks"]["wide_blocks"]


@pytest.mark.parametrize("name", WEIGHED_BLOCKS[::3])
def test_weighed_blocks(name):
    blocks = kb.gguf.quantize(weighed_rows(), name, importance=weights_of("activations"))
    assert sha(blocks) == HASHES[name]["weighed"]["activations"]


@pytest.mark.parametrize("name", HASHES)
def test_values(name):
    assert value_hash(kb.gguf.dequantize(random_blocks(name), name)) == HASHES[name]["values"]


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_on_a_gpu(cupy, name):
    """Ten million numbers of all kinds."""
    found = {kind: sha(kb.gguf.quantize(cupy.asarray(rows_of(kind)), name).get()) for kind in KINDS}
    assert found == HASHES[name]["blocks"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", WEIGHED_BLOCKS)
def test_weighed_blocks_on_a_gpu(cupy, name):
    """The same with ten matrices of importance."""
    x = cupy.asarray(weighed_rows())
    found = {
        kind: sha(kb.gguf.quantize(x, name, importance=cupy.asarray(weights_of(kind))).get()) for kind in IMPORTANCES
    }
    assert found == HASHES[name]["weighed"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", HASHES)
def test_values_on_a_gpu(cupy, name):
    blocks = random_blocks(name)
    values = kb.gguf.dequantize(cupy.asarray(blocks), name)
    assert value_hash(values.get()) == HASHES[name]["values"]
    memory = cupy.concatenate([cupy.zeros(3, np.uint8), cupy.asarray(blocks).reshape(-1)])
    q = kb.gguf.from_blocks(memory, name, values.shape, offset=3)
    assert np.array_equal(kb.gguf.to_blocks(q).get(), blocks)
    assert np.array_equal(kb.gguf.to_blocks(q[5:]).get(), blocks[5:])  # planes that begin anywhere
