"""Write tests/data/frozen/: what this version makes of a few numbers, by every format and kind of options.

Run once for a format that is new, ``python tests/make_frozen_data.py NAME ...``, and never again for one that has been
released: what a file holds is what every later version must decode to the same bytes. Files that exist are kept.
"""

import sys
from pathlib import Path

import numpy as np
from inputs import DTYPES, fitting, make
from ml_dtypes import finfo

import kbitcupy as kb
from kbitcupy.formats.blocks import BlockFormat

FOLDER = Path(__file__).parent / "data" / "frozen"
KINDS = ("normal", "small", "wide", "special", "zeros")
OPTIONS = {
    "kbit": [{}, {"codebook": "nf"}, {"absmax": "float16"}, {"absmax": "float32"}],
    "nf4": [{}, {"block": 16}, {"block": 128}, {"block": 16, "double_quant": True}],
    "fp4": [{}, {"block": 32}, {"block": 16, "double_quant": True}],
    "table4": [{}, {"codebook": "nf", "block": 32}, {"block": 16, "double_quant": True}],
    "dynamic8": [{}, {"block": 32}],
    "gguf": [{}],
    "int": [
        {"granularity": granularity, "symmetric": symmetric}
        for granularity in ("tensor", "token", ("channel", 0), ("channel", 1), ("group", 32))
        for symmetric in (True, False)
    ],
}
# Formats that take a codebook of one's own.
OWN = ("kbit", "table4")


def numbers(dtype, bounded=False):
    """[5, 96]: a row of each kind; `bounded`: what is infinite or near the end of the dtype is 0 instead."""
    x = np.stack([make(kind, 96, dtype, seed=i) for i, kind in enumerate(KINDS)])
    if bounded:
        x[np.abs(x.astype(np.float32)) > float(finfo(dtype).max) / 4] = 0
    return x


def is_bounded(name):
    """Whether a format gets the bounded numbers: 0.1 took the range of float32 for that of every dtype."""
    return family(name) == "int"


def family(name):
    if isinstance(kb.get_format(name), BlockFormat):
        return "gguf"
    return "int" if "int" in name else name if name in OPTIONS else name.rstrip("0123456789")


def fitted(name, x):
    """The numbers, over and over, in a shape that the format takes."""
    return np.resize(x, fitting(kb.get_format(name), x.shape))


def cases(name):
    """(label, options) of a format."""
    for options in OPTIONS[family(name)]:
        if not (name == "kbit8" and options.get("absmax") == "float16"):  # its default
            yield " ".join(f"{key}={value}" for key, value in options.items()) or "default", options
    if family(name) in OWN:
        size = 1 << kb.get_format(name).bits
        values = np.random.default_rng(size).permutation(np.linspace(-1, 0.75, size, dtype=np.float32))
        yield "own values", {"codebook": values}


def main():
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or kb.list_formats():
        path = FOLDER / f"{name}.safetensors"
        if path.exists():
            print(f"{path.name} exists and is kept")
            continue
        tensors = {}
        for label, options in cases(name):
            for dtype in DTYPES:
                q = kb.quantize(fitted(name, numbers(dtype, is_bounded(name))), name, **options)
                tensors[f"{label} {dtype}"] = q
                tensors[f"{label} {dtype} decoded"] = q.dequantize()
        kb.io.save(path, tensors)
        print(f"{path.name}: {len(tensors) // 2} arrays, {path.stat().st_size} bytes")
    inputs = FOLDER / "inputs.safetensors"
    if not inputs.exists():
        given = {str(dtype): numbers(dtype) for dtype in DTYPES}
        kb.io.save(inputs, given | {f"bounded {dtype}": numbers(dtype, True) for dtype in DTYPES})


if __name__ == "__main__":
    main()
