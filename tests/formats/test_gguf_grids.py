"""GGUF's types with grids, which are decoded only: the grids, and the layout one element at a time."""

import functools
import hashlib

import numpy as np
import pytest
from make_iq_grids import BEGINNINGS, GRIDS, bitmap, read_grid

import kbitcupy as kb
from kbitcupy import tables

TYPES = ["iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s"]
BYTES = {"iq1_s": 50, "iq1_m": 56, "iq2_xxs": 66, "iq2_xs": 74, "iq2_s": 82, "iq3_xxs": 98, "iq3_s": 110}


def random_blocks(name, count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, BYTES[name]), np.uint8)


def array_of(name, blocks):
    """Blocks as an array, a row each."""
    format = kb.get_format(name)
    return kb.QuantizedArray(format, format.from_blocks(blocks), (len(blocks), 256), "float32")


@pytest.mark.parametrize("name", TYPES)
def test_facts(name):
    format = kb.get_format(name)
    assert (format.block, format.block_bytes, format.can_encode, format.default) == (256, BYTES[name], False, False)
    blocks = random_blocks(name, 40)
    assert np.array_equal(format.to_blocks(format.from_blocks(blocks)), blocks)
    with pytest.raises(kb.KbitError, match=f"{name} can be decoded but not made: quantize to another format"):
        kb.quantize(np.zeros(256, np.float32), name)


# ---- grids -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GRIDS)
def test_grids(name):
    _, entries, values, coordinates, _, offset = GRIDS[name]
    assert hashlib.sha256(tables.iq_bitmaps()[name]).hexdigest().startswith(BEGINNINGS[name])
    grid = tables.iq_grid(name)
    assert grid.shape == (entries, coordinates) and grid.dtype == np.int8 and not grid.flags.writeable
    assert set(np.unique(grid) * (8 if offset else 1)) == set(values)
    assert bitmap(name, grid * (8 if offset else 1)) == tables.iq_bitmaps()[name]


@pytest.mark.parametrize("name", GRIDS)
def test_gguf_pys_grids(name):
    """As blocks show them that name every entry in turn."""
    pytest.importorskip("gguf", reason="the package gguf is an oracle, and not installed")
    assert bitmap(name, read_grid(name)) == tables.iq_bitmaps()[name]


# ---- the layout, one element at a time -------------------------------------------------------------------------------


def half(block, at):
    return float(np.frombuffer(block[at : at + 2], np.float16)[0])


def word(block, at, size=2):
    return int.from_bytes(block[at : at + size], "little")


def sign(bits, i):
    return -1 if bits >> i & 1 else 1


def even_sign(number, i):
    """Element i by the number of a byte of signs, whose highest bit makes the count even."""
    return sign(number | number.bit_count() % 2 << 7, i)


@functools.cache
def grid_of(name):
    return tables.iq_grid("iq1" if name.startswith("iq1") else name).tolist()


def element(name, block, i):
    """Element i of a block, in exact arithmetic, from the text of the format."""
    part, group, e = i // 32, i // 8, i % 8
    within = group % 4
    grid = grid_of(name)
    if name == "iq2_xxs":
        signs = word(block, 2 + 8 * part + 4, 4)
        c = grid[block[2 + 8 * part + within]][e] * even_sign(signs >> 7 * within & 127, e)
        return half(block, 0) * (2 * (signs >> 28) + 1) / 8 * c
    if name == "iq2_xs":
        both, s = word(block, 2 + 2 * group), block[66 + part] >> 4 * (within // 2) & 15
        return half(block, 0) * (2 * s + 1) / 8 * grid[both & 511][e] * even_sign(both >> 9, e)
    if name == "iq2_s":
        index = block[2 + group] | (block[66 + part] >> 2 * within & 3) << 8
        s = block[74 + part] >> 4 * (within // 2) & 15
        return half(block, 0) * (2 * s + 1) / 8 * grid[index][e] * sign(block[34 + group], e)
    if name == "iq3_xxs":
        signs = word(block, 66 + 4 * part, 4)
        c = grid[block[2 + i // 4]][i % 4] * even_sign(signs >> 7 * within & 127, e)
        return half(block, 0) * (2 * (signs >> 28) + 1) / 4 * c
    if name == "iq3_s":
        index = block[2 + i // 4] | (block[66 + part] >> i // 4 % 8 & 1) << 8
        s = block[106 + part // 2] >> 4 * (part % 2) & 15
        return half(block, 0) * (2 * s + 1) * grid[index][i % 4] * sign(block[74 + group], e)
    if name == "iq1_s":
        more = word(block, 34 + 2 * part)
        c = 8 * grid[block[2 + group] | (more >> 3 * within & 7) << 8][e] + sign(more, 15)
        return half(block, 0) * (2 * (more >> 12 & 7) + 1) / 8 * c
    more = block[32 + group // 2] >> 4 * (group % 2) & 15
    words = [word(block, 48 + 2 * j) for j in range(4)]
    d = np.array(sum(words[j] >> 12 << 4 * j for j in range(4)), np.uint16).view(np.float16)
    s = words[i // 64] >> 3 * (i // 16 % 4) & 7
    c = 8 * grid[block[group] | (more & 7) << 8][e] + sign(more, 3)
    return float(d) * (2 * s + 1) / 8 * c


@pytest.mark.parametrize("name", TYPES)
def test_layout(name):
    blocks = random_blocks(name, 12, 1)
    for block, decoded in zip(blocks, array_of(name, blocks).dequantize(), strict=True):
        wanted = [element(name, block.tobytes(), i) for i in range(256)]
        assert np.array_equal(decoded, np.float32(wanted), equal_nan=True)
