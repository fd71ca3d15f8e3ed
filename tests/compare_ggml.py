"""GGUF's quantizers beside ggml's.

``python tests/compare_ggml.py [--values 10000000] [TYPE ...]`` compares as many numbers of all kinds as one likes, with
and without importance, and prints how many blocks differ.
"""

import argparse
import sys
import time
import unittest.mock

import ggml
import numpy as np
from gguf_numbers import IMPORTANCES, KINDS, importance, numbers

import kbitcupy as kb
from kbitcupy.formats.base import format_factory

#: GGUF's types, those that can be made, and those that importance changes.
NAMES = [name for name in kb.list_formats() if getattr(format_factory(name), "family", "") == "gguf"]
MADE = [name for name in NAMES if kb.get_format(name).can_encode]
WEIGHED = [name for name in MADE if "importance" in format_factory(name).takes]
COLUMNS = 1024

# What ggml leaves to the machine, blocks of such magnitudes: conversions that are undefined in C, of infinity to an
# integer, and of a negative float to an unsigned one.
UNDEFINED = {
    "tq1_0": lambda largest: (largest > 0) & np.isinf(np.float32(1) / largest),
    "mxfp4": lambda largest: (largest > 0) & (largest < np.float32(2.0**-125)),
}
#: ggml asserts that what it rounds is no further from 0, and gives any number where it is, with its assertions compiled
#: out. It happens where the importance of a part of a block is 0.
FURTHEST = 4194303


def rounds_further(name, row, weights):
    """Whether a number beyond `FURTHEST` is rounded on the way to the blocks of a row."""
    largest, rint = [0.0], np.rint

    def recorded(y, **options):
        numbers = np.abs(np.asarray(y))
        largest.append(float(numbers[np.isfinite(numbers)].max(initial=0)))
        return rint(y, **options)

    with unittest.mock.patch.object(np, "rint", recorded):
        kb.gguf.quantize(row[None], name, importance=weights)
    return max(largest) >= FURTHEST


def different(name, x, weights=None):
    """How many blocks of float32[rows, columns] ours and ggml's differ in, and how many of them are undefined there.

    The blocks of the importance of several matrices, for x of [matrices, rows, columns], have none of the latter.
    """
    ours = kb.gguf.quantize(x, name, importance=weights)
    theirs = ggml.quantize(name, x, weights).reshape(ours.shape)
    size, block = kb.gguf.type_size(name), kb.gguf.block_size(name)
    differ = (ours.reshape(-1, size) != theirs.reshape(-1, size)).any(axis=1)
    undefined = 0
    for at in np.flatnonzero(differ):
        numbers = x.reshape(-1, block)[at]
        if name in UNDEFINED:
            with np.errstate(all="ignore"):
                undefined += bool(UNDEFINED[name](np.abs(numbers).max()))
        elif weights is not None and weights.ndim == 1:
            row, column = divmod(at * block, x.shape[-1])
            part = slice(None) if format_factory(name).row_mean else slice(column, column + block)
            undefined += rounds_further(name, x[row, part], weights[part])
    return int(differ.sum()) - undefined, undefined


ROWS = 64


def compare(name, values):
    """Compare so many numbers, and as many with importance: how many, and by kind what `different` says."""
    found, done = {}, 0
    for weights in [None, *IMPORTANCES] if name in WEIGHED else [None]:
        for kind in KINDS:
            left = values // len(KINDS) // (1 if weights is None else len(IMPORTANCES))
            for seed in range(1, 2 + left // (ROWS * COLUMNS)):
                x = numbers(kind, ROWS * COLUMNS, seed).reshape(-1, (256, 512, 1024, 4096)[seed % 4])
                v = None if weights is None else importance(weights, x.shape[1], seed)
                counts = np.array(different(name, x, v))
                done += x.size
                if counts.any():
                    found[kind, weights] = found.get((kind, weights), 0) + counts
    return done, found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--values", type=int, default=10_000_000, help="of each type, and as many with importance")
    parser.add_argument("types", nargs="*", default=MADE)
    options = parser.parse_args()
    wrong = 0
    for name in options.types or MADE:
        start = time.perf_counter()
        done, found = compare(name, options.values)
        differ, undefined = sum(found.values(), np.zeros(2, int))
        more = f", and {undefined} that are undefined in ggml" if undefined else ""
        print(f"{name}: {done} values, {differ} blocks differ{more} ({time.perf_counter() - start:.0f} s)", flush=True)
        for (kind, weights), counts in found.items():
            print(f"    {kind}{f', importance {weights}' if weights else ''}: {counts[0]}, undefined {counts[1]}")
        wrong += differ
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
