"""GGUF's quantizers beside ggml's.

``python tests/compare_ggml.py [--values 10000000] [TYPE ...]`` compares as many numbers of all kinds as one likes, with
and without importance, and prints how many blocks differ.
"""

import argparse
import sys
import time

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

# What ggml leaves to the machine: blocks of so large a magnitude. Conversions that are undefined in C, of infinity to an
# integer, and of a negative float to an unsigned one.
UNDEFINED = {
    "tq1_0": lambda largest: (largest > 0) & np.isinf(np.float32(1) / largest),
    "mxfp4": lambda largest: (largest > 0) & (largest < np.float32(2.0**-125)),
}


def different(name, x, weights=None):
    """How many blocks ours and ggml's differ in, but for those that are undefined there."""
    ours = kb.gguf.quantize(x, name, importance=weights)
    theirs = ggml.quantize(name, x, weights).reshape(ours.shape)
    size = kb.gguf.type_size(name)
    differ = (ours.reshape(-1, size) != theirs.reshape(-1, size)).any(axis=1)
    if name in UNDEFINED and differ.any():
        with np.errstate(all="ignore"):
            differ &= ~UNDEFINED[name](np.abs(x.reshape(-1, kb.gguf.block_size(name))).max(axis=1))
    return int(differ.sum())


ROWS = 64


def compare(name, values):
    """Compare so many numbers with each importance or without; what differs, by kind."""
    found, done = {}, 0
    with_importance = [None, *IMPORTANCES] if name in WEIGHED else [None]
    for weights in with_importance:
        for kind in KINDS:
            left = values // len(KINDS) // (1 if weights is None else len(IMPORTANCES))
            for seed in range(1, 2 + left // (ROWS * COLUMNS)):
                x = numbers(kind, ROWS * COLUMNS, seed).reshape(-1, (256, 512, 1024, 4096)[seed % 4])
                v = None if weights is None else importance(weights, x.shape[1], seed)
                count = different(name, x, v)
                done += x.size
                if count:
                    found[kind, weights] = found.get((kind, weights), 0) + count
    return done, found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--values", type=int, default=10_000_000, help="of each type; with importance as many again")
    parser.add_argument("types", nargs="*", default=MADE)
    options = parser.parse_args()
    wrong = 0
    for name in options.types or MADE:
        start = time.perf_counter()
        done, found = compare(name, options.values)
        print(
            f"{name}: {done} values, {sum(found.values())} blocks differ ({time.perf_counter() - start:.0f} s)",
            flush=True,
        )
        for (kind, weights), count in found.items():
            print(f"    {kind}{f', importance {weights}' if weights else ''}: {count} blocks")
            wrong += count
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
