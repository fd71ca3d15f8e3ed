"""Write tests/data/gguf_hashes.json: hashes of what GGUF's quantizers make of ten million numbers a type.

``python tests/make_gguf_hashes.py``, where the package pywhispercpp is: the hashes are those of our bytes on NumPy, and
written only where ggml has the same ones, but for blocks that are undefined there (`compare_ggml`).

By type: ``blocks``, by the kind of numbers; ``weighed``, by the kind of importance; ``values``, of random blocks. A
hash is the first 16 digits of SHA-256.
"""

import functools
import hashlib
import json
from pathlib import Path

import numpy as np
from gguf_numbers import IMPORTANCES, KINDS, Bits, importance, numbers

import kbitcupy as kb

FILE = Path(__file__).parent / "data" / "gguf_hashes.json"
COLUMNS = 1024
#: Rows of each kind; of each kind with every importance.
ROWS, WEIGHED_ROWS = 480, 48
#: Blocks that are decoded.
DECODED = 1 << 13


def sha(array):
    return hashlib.sha256(array.tobytes()).hexdigest()[:16]


@functools.cache
def rows_of(kind):
    return numbers(kind, ROWS * COLUMNS, seed=11).reshape(ROWS, COLUMNS)


@functools.cache
def weighed_rows():
    return np.concatenate([numbers(kind, WEIGHED_ROWS * COLUMNS, seed=12) for kind in KINDS]).reshape(-1, COLUMNS)


@functools.cache
def weights_of(kind):
    return importance(kind, COLUMNS, seed=13)


def random_blocks(name):
    count = DECODED * kb.gguf.type_size(name)
    return Bits(name, 14).words(-(-count // 4)).view(np.uint8)[:count].reshape(DECODED, -1)


def value_hash(values):
    """Of float32, with one NaN for all."""
    return sha(np.where(np.isnan(values), np.float32(np.nan), values))


def main():
    import ggml
    from compare_ggml import MADE, NAMES, WEIGHED, different

    found = {}
    for name in NAMES:
        found[name] = {"blocks": {}, "weighed": {}}
        for kind in KINDS if name in MADE else ():
            assert different(name, rows_of(kind))[0] == 0, (name, kind)
            found[name]["blocks"][kind] = sha(kb.gguf.quantize(rows_of(kind), name))
        for kind in IMPORTANCES if name in WEIGHED else ():
            x, v = weighed_rows(), weights_of(kind)
            assert different(name, x, v)[0] == 0, (name, kind)
            found[name]["weighed"][kind] = sha(kb.gguf.quantize(x, name, importance=v))
        values = kb.gguf.dequantize(random_blocks(name), name)
        found[name]["values"] = value_hash(values)
        assert name == "q8_1" or found[name]["values"] == value_hash(ggml.dequantize(name, random_blocks(name))), name
        found[name] = {key: value for key, value in found[name].items() if value}
        print(name, flush=True)
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(hashes)}" for name, hashes in found.items())
    FILE.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
