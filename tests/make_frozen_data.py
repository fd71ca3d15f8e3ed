"""Write tests/data/frozen/: what this version makes of a few numbers, by every format and its option sets.

Run once for a format or an option set that is new, ``python tests/make_frozen_data.py NAME ...``: what a file holds is
what every later version must decode to the same bytes. What is there already is kept.
"""

import sys
from pathlib import Path

import numpy as np
from inputs import DTYPES, bits_for, fitting, make
from ml_dtypes import finfo

import kbitcupy as kb
from kbitcupy.formats.base import samples

FOLDER = Path(__file__).parent / "data" / "frozen"
KINDS = ("normal", "small", "wide", "special", "zeros")


def numbers(dtype, bounded=False):
    """[5, 96]: a row of each kind; `bounded`: what is infinite or near the end of the dtype is 0 instead."""
    x = np.stack([make(kind, 96, dtype, seed=i) for i, kind in enumerate(KINDS)])
    if bounded:
        x[np.abs(x.astype(np.float32)) > float(finfo(dtype).max) / 4] = 0
    return x


def is_bounded(name):
    """Whether a format gets the bounded numbers: 0.1 took the range of float32 for that of every dtype."""
    return name in ("int8", "uint8", "int4", "uint4")


def fitted(name, x):
    """The numbers, over and over, in a shape that the format takes."""
    return np.resize(x, fitting(kb.get_format(name), x.shape))


def own_codebook(format):
    """Numbers in no order, of which none stands for the end of the range."""
    size = 1 << int(format.bits)
    return np.random.default_rng(size).permutation(np.linspace(-1, 0.75, size, dtype=np.float32))


def main():
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or kb.list_formats():
        path = FOLDER / f"{name}.safetensors"
        tensors = {key: array.copy() for key, array in kb.io.load(path).items()} if path.exists() else {}
        written = [q.format.counted_from_end(2) for q in tensors.values() if isinstance(q, kb.QuantizedArray)]
        new = [format for format in samples(name) if format.counted_from_end(2) not in written]
        if not new:
            print(f"{path.name} has all option sets and is kept")
            continue
        for format in new:
            given = {"codebook": own_codebook(format)} if format.options().get("codebook") == "custom" else {}
            for dtype in DTYPES:
                x = fitted(name, numbers(dtype, is_bounded(name)))
                if format.can_encode:
                    q = kb.quantize(x, format, **given)
                else:
                    q = kb.QuantizedArray(format, bits_for(format, x), x.shape, x.dtype)
                tensors[f"{format} {dtype}"] = q
                tensors[f"{format} {dtype} decoded"] = q.dequantize()
        kb.io.save(path, tensors, force=True)
        print(f"{path.name}: {len(tensors) // 2} arrays, {path.stat().st_size} bytes")
    inputs = FOLDER / "inputs.safetensors"
    if not inputs.exists():
        given = {str(dtype): numbers(dtype) for dtype in DTYPES}
        kb.io.save(inputs, given | {f"bounded {dtype}": numbers(dtype, True) for dtype in DTYPES})


if __name__ == "__main__":
    main()
