"""Print the constants of kbitcupy/tables.py that hold the grids of GGUF's IQ types: ``python tests/make_iq_grids.py``.

The package gguf decodes blocks with d = 1 and all scale codes and signs 0, whose indices name every entry of a grid in
turn. The entries are sets of points in ascending order, each a number whose digits are the coordinates, the first one
the least; so a grid is a bitmap of the numbers that it has.
"""

import base64
import hashlib
import textwrap
import zlib

import numpy as np

#: Of each grid: the type that shows it, its entries, the values of a digit, digits of a point, and what the decoded
#: numbers times `factor`, less `offset`, are made of.
GRIDS = {
    "iq2_xxs": ("IQ2_XXS", 256, (8, 25, 43), 8, 8, 0),
    "iq2_xs": ("IQ2_XS", 512, (8, 25, 43), 8, 8, 0),
    "iq2_s": ("IQ2_S", 1024, (8, 25, 43), 8, 8, 0),
    "iq3_xxs": ("IQ3_XXS", 256, (4, 12, 20, 28, 36, 44, 52, 62), 4, 4, 0),
    "iq3_s": ("IQ3_S", 512, (1, 3, 5, 7, 9, 11, 13, 15), 4, 1, 0),
    "iq1": ("IQ1_S", 2048, (-8, 0, 8), 8, 8, 1),
}
#: How the sha256 of a bitmap begins.
BEGINNINGS = {
    "iq2_xxs": "6e641d33",
    "iq2_xs": "0be9378c",
    "iq2_s": "90050a58",
    "iq3_xxs": "a3723a6c",
    "iq3_s": "f8e48a28",
    "iq1": "17824356",
}


def blocks_naming(kind, indices):
    """Blocks of a type, uint8[blocks, bytes], whose indices are these: whole blocks of them, in order."""
    each = 64 if kind in ("IQ3_XXS", "IQ3_S") else 32
    index = indices.reshape(-1, each).astype(np.uint16)
    one = np.tile(np.array([1], np.float16).view(np.uint8), (len(index), 1))
    low, high, zero = index.astype(np.uint8), index >> 8, np.zeros((len(index), 64), np.uint8)
    if kind == "IQ2_XXS":  # four indices, and four bytes of signs and scale
        parts = [np.concatenate([low.reshape(-1, 8, 4), zero[:, :32].reshape(-1, 8, 4)], axis=2).reshape(-1, 64)]
    elif kind == "IQ2_XS":
        parts = [index.view(np.uint8), zero[:, :8]]
    elif kind == "IQ2_S":
        parts = [low, zero[:, :32], bits(high, 2, 4, np.uint8), zero[:, :8]]
    elif kind == "IQ3_XXS":
        parts = [low, zero[:, :32]]
    elif kind == "IQ3_S":
        parts = [low, bits(high, 1, 8, np.uint8), zero[:, :32], zero[:, :4]]
    else:
        parts = [low, bits(high, 3, 4, np.uint16).view(np.uint8)]
    return np.concatenate([one, *parts], axis=1)


def bits(high, width, count, dtype):
    """`count` neighbours of so many bits as one number, the first in the lowest."""
    places = np.arange(0, width * count, width)
    return np.bitwise_or.reduce(high.reshape(len(high), -1, count) << places, axis=2).astype(dtype)


def read_grid(name):
    """A grid as gguf-py decodes it, integers [entries, digits]."""
    from gguf import GGMLQuantizationType, quants

    kind, entries, _, digits, factor, offset = GRIDS[name]
    blocks = blocks_naming(kind, np.arange(entries))
    values = quants.dequantize(blocks.reshape(-1), GGMLQuantizationType[kind]).reshape(entries, digits)
    grid = values * factor - offset
    assert np.array_equal(grid, np.rint(grid))
    return grid.astype(int)


def bitmap(name, grid):
    """The points of a grid as bits, the first in the lowest bit of a byte."""
    _, entries, values, digits, _, _ = GRIDS[name]
    points = np.searchsorted(values, grid) @ len(values) ** np.arange(digits)
    assert (np.diff(points) > 0).all() and np.isin(grid, values).all() and len(points) == entries
    return np.packbits(np.isin(np.arange(len(values) ** digits), points), bitorder="little").tobytes()


def main():
    maps = {name: bitmap(name, read_grid(name)) for name in GRIDS}
    for name, packed in maps.items():
        assert hashlib.sha256(packed).hexdigest().startswith(BEGINNINGS[name]), name
    text = base64.b85encode(zlib.compress(b"".join(maps.values()), 9)).decode()
    print("_IQ_GRIDS = (")
    for line in textwrap.wrap(text, 112):
        print(f'    "{line}"')
    print(")")


if __name__ == "__main__":
    main()
