"""Write tests/data/gguf_importance.json: checksums of what ggml makes of a few numbers with importance.

``python tests/make_gguf_importance.py``, with the package pywhispercpp installed (see `ggml`). The numbers are those of
data/gguf_blocks.npz; for each type and kind of numbers there is the CRC-32 of the blocks, a matrix of `MATRICES` after
the other. Then that of `few`, whose sub-blocks sometimes have negative scales, which ggml keeps in bytes.
"""

import json
import zlib
from pathlib import Path

import gguf_numbers
import numpy as np

FILE = Path(__file__).parent / "data" / "gguf_importance.json"
BLOCKS = Path(__file__).parent / "data" / "gguf_blocks.npz"
TYPES = ("q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs")
MATRICES = (
    "random", "ones", "zeros", "a third is zero", "few are not zero", "sub-blocks are zero", "wide", "squares",
    "tiny", "huge",
)  # fmt: skip
# Types with minima of sub-blocks, and seeds of `few`.
RANGED = ("q2_k", "q4_k", "q5_k")
FEW = (0, 4)


def importance(matrix, columns, seed=0):
    """float32[columns] of one kind, from whole numbers, so that it is the same everywhere."""
    rng = np.random.default_rng([seed, MATRICES.index(matrix)])
    v = (rng.integers(1, 1 << 20, columns) / (1 << 20)).astype(np.float32)
    if matrix == "ones":
        v[:] = 1
    elif matrix == "zeros":
        v[:] = 0
    elif matrix == "a third is zero":
        v[rng.integers(0, 3, columns) == 0] = 0
    elif matrix == "few are not zero":
        v[rng.integers(0, 20, columns) != 0] = 0
    elif matrix == "sub-blocks are zero":
        v[np.arange(columns) // 32 % 3 == 0] = 0
    elif matrix == "wide":
        v *= np.exp2(rng.integers(-30, 30, columns)).astype(np.float32)
    elif matrix == "squares":
        for _ in range(3):  # powers differ from one processor to the other
            v = v * v
    elif matrix == "tiny":
        v *= np.float32(1e-20)
    elif matrix == "huge":
        v *= np.float32(1e15)
    return v


def few(seed):
    """Numbers and importance of which nearly all is 0, for types with minima."""
    x = gguf_numbers.numbers("negative", 1 << 14, seed)
    return x.reshape(-1, 1024), importance("few are not zero", 1024, seed)


def checksum(blocks):
    return zlib.crc32(np.ascontiguousarray(blocks).tobytes())


def main():
    import ggml

    data = np.load(BLOCKS)
    found = {}
    for name in TYPES:
        for kind, x in zip(data["kinds"].tolist(), data["x"], strict=True):
            sums = [checksum(ggml.quantize(name, x[None], importance(matrix, x.size))) for matrix in MATRICES]
            found.setdefault(name, {})[kind] = sums
        if name in RANGED:
            found[name]["few"] = [checksum(ggml.quantize(name, *few(seed))) for seed in FEW]
    lines = [f'"{name}": {{\n' + ",\n".join(f'"{k}": {v}' for k, v in of.items()) + "\n}" for name, of in found.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    assert json.loads(FILE.read_text()) == found
    print(f"{FILE.name}: {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
