"""kbitcupy: arrays at a few bits per element, on NumPy and on CuPy.

>>> import numpy as np, kbitcupy as kb
>>> x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
>>> q = kb.quantize(x, "kbit4")
>>> y = kb.dequantize(q)
>>> round(kb.metrics.sqnr_db(x, y), 1)
22.0
"""

from typing import TYPE_CHECKING

from . import (
    formats as formats,  # registers the formats
    metrics,
)
from ._version import __version__
from .array import QuantizedArray
from .errors import KbitError
from .formats.base import get_format, list_formats, register
from .ops import concatenate, dequantize, quantize, stack, take, to_torch

__all__ = [
    "DecodedCache",
    "KbitError",
    "QuantizedArray",
    "__version__",
    "affine",
    "bitnet",
    "bitsandbytes",
    "concatenate",
    "dask",
    "dequantize",
    "explain",
    "explore",
    "fit_table",
    "get_format",
    "gguf",
    "io",
    "linear",
    "linear_grouped",
    "list_formats",
    "lora",
    "matmul",
    "metrics",
    "precompile",
    "quantize",
    "raw",
    "register",
    "stack",
    "take",
    "to_torch",
]


if TYPE_CHECKING:
    from . import affine, bitnet, dask, explore, gguf, io, lora, raw
    from .compat import bitsandbytes
    from .compat.bitsandbytes import (
        create_normal_float_codebook as create_normal_float_codebook,
        decode_absmax_e4m4 as decode_absmax_e4m4,
        dequantize_kbit as dequantize_kbit,
        dequantize_nf4 as dequantize_nf4,
        encode_absmax_e4m4 as encode_absmax_e4m4,
        pack_kbit as pack_kbit,
        quantize_kbit as quantize_kbit,
        quantize_nf4 as quantize_nf4,
        unpack_kbit as unpack_kbit,
    )
    from .explore.fit import fit_table
    from .products.functions import explain, linear, linear_grouped, matmul, precompile
    from .products.kept import DecodedCache
else:
    # What is imported when it is first asked for, and where it stands: `io` needs safetensors, the others are large.
    _LATER = {
        "affine": "affine",
        "bitnet": "bitnet",
        "bitsandbytes": "compat.bitsandbytes",
        "dask": "dask",
        "explore": "explore",
        "gguf": "gguf",
        "io": "io",
        "lora": "lora",
        "raw": "raw",
    }
    # Functions of such modules; those of bitsandbytes are documented there and not offered here.
    _FUNCTIONS = {
        "DecodedCache": "products.kept",
        "fit_table": "explore.fit",
        **dict.fromkeys(("explain", "linear", "linear_grouped", "matmul", "precompile"), "products.functions"),
        **dict.fromkeys(
            (
                "create_normal_float_codebook",
                "decode_absmax_e4m4",
                "dequantize_kbit",
                "dequantize_nf4",
                "encode_absmax_e4m4",
                "pack_kbit",
                "quantize_kbit",
                "quantize_nf4",
                "unpack_kbit",
            ),
            "compat.bitsandbytes",
        ),
    }

    # Hidden from type checkers, to which a module with `__getattr__` has every name that anybody asks for.
    def __getattr__(name):
        """Namespaces and functions that are imported when they are first asked for."""
        from importlib import import_module

        if name in _LATER:
            found = import_module(f".{_LATER[name]}", __name__)
        elif name in _FUNCTIONS:
            found = getattr(import_module(f".{_FUNCTIONS[name]}", __name__), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    """The public names, whether or not they are loaded yet, and no modules that only the package itself needs."""
    return sorted(__all__)
