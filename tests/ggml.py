"""ggml itself, compiled by its makers: the library within the PyPI package ``pywhispercpp``, by ctypes.

Names of types are ours, such as ``"q4_k"``. Without the package, or where it has no such library, a test that asks for
it is skipped.
"""

import ctypes
import functools
import importlib.metadata
from pathlib import Path

import numpy as np
import pytest

#: ggml's numbers of the types that have blocks.
NUMBERS = {
    "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "q8_1": 9,
    "q2_k": 10, "q3_k": 11, "q4_k": 12, "q5_k": 13, "q6_k": 14, "q8_k": 15,
    "iq2_xxs": 16, "iq2_xs": 17, "iq3_xxs": 18, "iq1_s": 19, "iq4_nl": 20, "iq3_s": 21, "iq2_s": 22, "iq4_xs": 23,
    "iq1_m": 29, "tq1_0": 34, "tq2_0": 35, "mxfp4": 39, "nvfp4": 40,
}  # fmt: skip
#: Types that only activations are staged in: they have no function for whole files, and q8_1 none that decodes.
STAGED = ("q8_1", "q8_k")
#: Types whose search needs an importance matrix, or neighbours that it looks up: here they are decoded only.
DECODED_ONLY = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s")

_SIZE, _POINTER = ctypes.c_int64, ctypes.c_void_p


@functools.cache
def path():
    """The library, or None. The package's own modules are not imported: that would start another engine."""
    try:
        files = importlib.metadata.files("pywhispercpp") or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    found = sorted((f for f in files if f.name.startswith("libggml-base")), key=lambda f: ".libs" not in str(f))
    return next((Path(f.locate()) for f in found if Path(f.locate()).exists()), None)


@functools.cache
def _loaded(file):
    library = ctypes.CDLL(str(file))
    library.ggml_blck_size.restype = _SIZE
    library.ggml_type_size.restype = ctypes.c_size_t
    library.ggml_quantize_init.restype = None
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = (ctypes.c_int, _POINTER, _POINTER, _SIZE, _SIZE, _SIZE, _POINTER)
    return library


def library():
    """The loaded library; skips the test without."""
    if path() is None:
        pytest.skip("compiled ggml, an oracle, is not installed: pip install --no-deps pywhispercpp")
    return _loaded(path())


def block_size(name):
    """Elements of a block."""
    return int(library().ggml_blck_size(NUMBERS[name]))


def type_size(name):
    """Bytes of a block."""
    return int(library().ggml_type_size(NUMBERS[name]))


def quantize(name, x, importance=None):
    """What ggml makes of finite float32 ``[..., columns]``: uint8[rows, bytes].

    `importance` is float32[columns], or [experts, columns] for x of [experts, rows, columns].
    """
    x = np.ascontiguousarray(x, np.float32)
    if importance is not None and np.ndim(importance) == 2:
        return np.concatenate([quantize(name, each, v) for each, v in zip(x, importance, strict=True)])
    columns, loaded = x.shape[-1], library()
    rows = x.size // columns
    out = np.zeros((rows, columns // block_size(name) * type_size(name)), np.uint8)
    assert columns % block_size(name) == 0 and name not in DECODED_ONLY
    if name in STAGED:
        _function(f"quantize_row_{_spelled(name)}_ref")(_address(x), _address(out), x.size)
        return out
    given = None if importance is None else np.ascontiguousarray(importance, np.float32)
    assert given is None or given.shape == (columns,)
    loaded.ggml_quantize_init(NUMBERS[name])
    written = loaded.ggml_quantize_chunk(NUMBERS[name], _address(x), _address(out), 0, rows, columns, _address(given))
    assert written == out.nbytes
    return out


def dequantize(name, blocks):
    """What ggml decodes of bytes, uint8[..., bytes]: float32[..., elements]."""
    blocks = np.ascontiguousarray(blocks, np.uint8)
    count, rest = divmod(blocks.shape[-1], type_size(name))
    assert rest == 0
    out = np.zeros((*blocks.shape[:-1], count * block_size(name)), np.float32)
    _function(f"dequantize_row_{_spelled(name)}")(_address(blocks), _address(out), out.size)
    return out


def _spelled(name):
    """Capital K in C's names."""
    return name[:-1] + "K" if name.endswith("_k") else name


@functools.cache
def _function(name):
    found = getattr(library(), name)
    found.restype, found.argtypes = None, (_POINTER, _POINTER, _SIZE)
    return found


def _address(array):
    return None if array is None else array.ctypes.data
