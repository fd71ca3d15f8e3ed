"""GGUF's quantizers beside ggml's: ``python tests/compare_ggml.py [--values 10000000] [TYPE ...]`` compares as many numbers
of all kinds as one likes, and prints how many blocks differ.
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

#: What ggml leaves to the machine, so that its own builds differ: types, kinds, and why.
UNDEFINED = {
    ("tq1_0", "subnormal"): "1 / max|x| is infinite, and infinity is converted to an integer",
}


def different(name, x, weights=None):
    """How many blocks ours and ggml's differ in."""
    ours = kb.gguf.quantize(x, name, importance=weights)
    theirs = ggml.quantize(name, x, weights).reshape(ours.shape)
    size = kb.gguf.type_size(name)
    return int((ours.reshape(-1, size) != theirs.reshape(-1, size)).any(axis=1).sum())


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
            why = UNDEFINED.get((name, kind), "")
            print(f"    {kind}{f', importance {weights}' if weights else ''}: {count} blocks{why and f' ({why})'}")
            wrong += not why
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
