"""Write tests/data/gguf_blocks.npz: what ggml makes of a few numbers, and of blocks of random bytes.

``python tests/make_gguf_data.py``, with the packages pywhispercpp (see `ggml`) and gguf installed.

`x` is float32[kinds, 1024], `kinds` their names; `NAME` what each kind becomes, uint8[kinds, blocks, bytes];
`NAME.bytes` random blocks, uint8[some, bytes], and `NAME.values` what these decode to, float32[some, block]: q8_1 has
none. gguf-py gives the same, as far as it goes.
"""

from pathlib import Path

import numpy as np

FILE = Path(__file__).parent / "data" / "gguf_blocks.npz"
SIZE = 1024
#: The types that have bytes in the file, and those that have random blocks alone.
TYPES = (
    "q8_0", "q4_0", "q4_k", "tq2_0", "q4_1", "q5_0", "q5_1", "q8_1", "mxfp4", "nvfp4", "tq1_0",
    "q2_k", "q3_k", "q5_k", "q6_k", "q8_k", "iq4_nl", "iq4_xs",
)  # fmt: skip
READ = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s")


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


#: What C does not define, where ggml's bytes are those of one machine: exponents below zero.
UNDEFINED = (("mxfp4", "subnormal"),)


def main():
    import ggml
    from gguf import GGMLQuantizationType, quants

    x = np.stack([numbers(kind) for kind in KINDS])
    found = {"x": x, "kinds": np.array(KINDS)}
    for name in (*TYPES, *READ):
        number = GGMLQuantizationType(ggml.NUMBERS[name])
        block, nbytes = ggml.block_size(name), ggml.type_size(name)
        if name in TYPES:
            found[name] = ggml.quantize(name, x).reshape(len(KINDS), SIZE // block, nbytes)
            known = [i for i, kind in enumerate(KINDS) if (name, kind) not in UNDEFINED]
            with np.errstate(all="ignore"):
                try:
                    same = quants.quantize(x.reshape(-1), number).reshape(found[name].shape)
                except (NotImplementedError, KeyError):
                    same = found[name]
            # Of a block of zeros that begins with -0 its q4_0 and q5_0 have another sign than ggml.
            assert np.array_equal(same[known], found[name][known]) or name in ("q4_0", "q5_0"), name
        random = np.random.default_rng(ggml.NUMBERS[name])
        found[f"{name}.bytes"] = random.integers(0, 256, (16 if block < 256 else 6, nbytes), dtype=np.uint8)
        if name != "q8_1":
            values = found[f"{name}.values"] = ggml.dequantize(name, found[f"{name}.bytes"])
            if number in quants._type_traits:
                with np.errstate(all="ignore"):
                    same = quants.dequantize(found[f"{name}.bytes"].reshape(-1), number).reshape(values.shape)
                assert np.array_equal(values, same, equal_nan=True), name
    np.savez_compressed(FILE, **found)
    print(f"{FILE.name}: {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
