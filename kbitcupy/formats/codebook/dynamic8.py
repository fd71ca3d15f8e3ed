"""bitsandbytes' dynamic map of 8 bits, format ``dynamic8``: `kbitcupy.formats.codebook.table4` has the contract."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..base import Format, Magnitude, Plane, register
from ..decoders import Decoder
from . import cuda, numpy as host
from .search import check_block, dynamic_table


class Dynamic8(Format):
    """8-bit codes into bitsandbytes' dynamic map, one absmax for a block.

    Parameters
    ----------
    block : int, default 256
        Elements that share an absmax: a power of two from 16 to 4096.

    Examples
    --------
    >>> from kbitcupy.formats.codebook.dynamic8 import Dynamic8
    >>> Dynamic8()
    get_format('dynamic8')
    """

    name = "dynamic8"
    family = "dynamic"
    bits = 8
    origin = "8-bit optimizers (arXiv 2110.02861), bitsandbytes 0.50"
    summary = "8-bit dynamic map: seven decades, one float32 scale for a block"
    kernels = (cuda.QUANTIZE8, cuda.DEQUANTIZE8, *cuda.BLOCKS8)

    def __init__(self, *, block: int = 256):
        self.block = check_block(block)

    @classmethod
    def samples(cls) -> tuple[dict[str, Any], ...]:
        return {}, {"block": 32}

    def options(self) -> dict[str, Any]:
        return {"block": self.block}

    def planes(self, shape: tuple[int, ...]) -> dict[str, Plane]:
        n = math.prod(shape)
        return {
            "codes": Plane("uint8", (n,), per=self.block),
            "absmax": Plane("float32", (-(-n // self.block),)),
        }

    def encode_numpy(self, x: np.ndarray, planes: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        host.quantize_dynamic8(x, planes, self.block)

    def encode_cuda(self, x: Any, planes: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        cuda.quantize_dynamic8(x, planes, self.block)

    def decode_numpy(self, planes: Mapping[str, Any], out: np.ndarray) -> None:
        host.dequantize_dynamic8(planes, out, self.block)

    def decode_cuda(self, planes: Mapping[str, Any], out: Any) -> None:
        cuda.dequantize_dynamic8(planes, out, self.block)

    @functools.cached_property
    def decoder(self) -> Decoder:
        return cuda.dynamic8_decoder(self.block)

    def error_bound(self, x: Any, planes: Mapping[str, Any]) -> Any:
        return host.table_error_bound(x, self.block, dynamic_table(), planes)

    def magnitude(self) -> Magnitude:
        return Magnitude("absmax")


register("dynamic8", Dynamic8)
