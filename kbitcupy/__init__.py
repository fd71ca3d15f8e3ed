"""kbitcupy: arrays at a few bits per element, on NumPy and on CuPy.

>>> import numpy as np, kbitcupy as kb
>>> x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
>>> q = kb.quantize(x, "kbit4")
>>> y = kb.dequantize(q)
>>> round(kb.metrics.sqnr_db(x, y), 1)
22.0
"""

from typing import TYPE_CHECKING

from . import formats as _formats  # noqa: F401  (registers the formats)
from . import metrics
from ._version import __version__
from .array import QuantizedArray
from .errors import KbitError
from .fit import fit_table
from .formats.base import formats, get_format, register
from .functional import (
    create_normal_float_codebook,
    decode_absmax_e4m4,
    dequantize_kbit,
    dequantize_nf4,
    encode_absmax_e4m4,
    pack_kbit,
    quantize_kbit,
    quantize_nf4,
    unpack_kbit,
)
from .linear import linear, linear_grouped, matmul
from .ops import concatenate, dequantize, quantize, stack, take, to_torch

__all__ = [
    "KbitError",
    "QuantizedArray",
    "__version__",
    "affine",
    "concatenate",
    "create_normal_float_codebook",
    "decode_absmax_e4m4",
    "dequantize",
    "dequantize_kbit",
    "dequantize_nf4",
    "encode_absmax_e4m4",
    "explore",
    "fit_table",
    "formats",
    "get_format",
    "io",
    "linear",
    "linear_grouped",
    "matmul",
    "metrics",
    "pack_kbit",
    "quantize",
    "quantize_kbit",
    "quantize_nf4",
    "register",
    "stack",
    "take",
    "to_torch",
    "unpack_kbit",
]


if TYPE_CHECKING:
    from . import affine, explore, io
else:
    # Hidden from type checkers, to which a module with `__getattr__` has every name that anybody asks for.
    def __getattr__(name):
        """`io` (which needs safetensors), `explore` and `affine` are imported when they are first asked for."""
        if name in ("io", "explore", "affine"):
            from importlib import import_module

            return import_module(f".{name}", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, whether or not they are loaded yet, and no modules that only the package itself needs."""
    return sorted(__all__)
