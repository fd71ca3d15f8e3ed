"""Write tests/data/gguf_blocks.npz: what ggml and gguf-py make of a few numbers, and of blocks of random bytes.

``python tests/make_gguf_data.py libggml.so``, with the package gguf installed and a library that has ggml's
``ggml-quants.c``, compiled without contraction of a * b + c (gcc: -ffp-contract=off -DNDEBUG).

`x` is float32[kinds, 1024], `kinds` their names; `NAME` what each kind becomes, uint8[kinds, blocks, bytes];
`NAME.bytes` random blocks, uint8[16, bytes], and `NAME.values` what these decode to, float32[16, block]. gguf-py
quantizes all types but q4_k, and decodes all; the library gives the same bytes and values, and those of q4_k.
"""

import ctypes
import sys
from pathlib import Path

import numpy as np

FILE = Path(__file__).parent / "data" / "gguf_blocks.npz"
SIZE = 1024
TYPES = {"q8_0": "Q8_0", "q4_0": "Q4_0", "q4_k": "Q4_K", "tq2_0": "TQ2_0"}


def numbers(kind, size=SIZE, seed=0):
    """float32 of one kind, within the range of a half."""
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    x = rng.standard_normal(size).astype(np.float32)
    if kind == "halves":
        x = x.astype(np.float16).astype(np.float32)
    elif kind == "student":
        x = rng.standard_t(3, size).astype(np.float32)
    elif kind == "shifted":
        x += 5
    elif kind == "negative":
        x = -np.abs(x)
    elif kind == "ties":
        x = (rng.integers(-16, 17, size) / 2).astype(np.float32)
    elif kind == "constant":
        x = np.repeat(x[: size // 32], 32)
    elif kind == "sparse":
        x[rng.random(size) < 0.97] = 0
    elif kind == "wide":
        x *= np.exp2(rng.integers(-40, 12, size)).astype(np.float32)
    elif kind in SCALES:
        x *= np.float32(SCALES[kind])
    return x.clip(-65504, 65504)


SCALES = {"large": 15000, "small": 1e-6, "smaller": 1e-12, "tiny": 1e-30, "subnormal": 1e-40}
KINDS = ["normal", "halves", "student", "shifted", "negative", "ties", "constant", "sparse", "wide", *SCALES]


def call(library, function, source, target, elements):
    addresses = ctypes.c_void_p(source.ctypes.data), ctypes.c_void_p(target.ctypes.data)
    getattr(library, function)(*addresses, ctypes.c_int64(elements))


def main():
    from gguf import GGMLQuantizationType, quants

    library = ctypes.CDLL(sys.argv[1])
    x = np.stack([numbers(kind) for kind in KINDS])
    found = {"x": x, "kinds": np.array(KINDS)}
    for name, kind in TYPES.items():
        number = GGMLQuantizationType[kind]
        spelled = kind.lower().replace("_k", "_K")
        block, nbytes = quants._type_traits[number].block_size, quants._type_traits[number].type_size
        packed = np.zeros((len(KINDS), SIZE // block, nbytes), np.uint8)
        call(library, f"quantize_row_{spelled}_ref", x, packed, x.size)
        if name != "q4_k":
            with np.errstate(all="ignore"):
                assert np.array_equal(quants.quantize(x.reshape(-1), number), packed.reshape(-1))
        random = np.random.default_rng(len(found)).integers(0, 256, (16, nbytes), dtype=np.uint8)
        with np.errstate(all="ignore"):
            values = quants.dequantize(random.reshape(-1), number).reshape(16, block)
        again = np.zeros_like(values)
        call(library, f"dequantize_row_{spelled}", random, again, again.size)
        assert np.array_equal(values, again, equal_nan=True)
        found |= {name: packed, f"{name}.bytes": random, f"{name}.values": values}
    np.savez_compressed(FILE, **found)
    print(f"{FILE.name}: {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
