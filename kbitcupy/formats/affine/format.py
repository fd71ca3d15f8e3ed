"""The formats ``int8``, ``uint8``, ``int4`` and ``uint4``."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...errors import FormatError
from ..base import Integers, Magnitude, Plane, register
from ..decoders import Decoder
from ..granular import Granular
from ..granularity import Blocks, Granularity, blocks_of, granularity_of, stack_blocks, walk
from . import cuda
from .arithmetic import (
    check_percentile,
    check_scale,
    check_zero_point,
    dequantize,
    find,
    quantize,
    quantize_dynamic,
)
from .levels import DOUBLE, SINGLE, check_levels
from .numpy import bounds, factor


class Affine(Granular):
    """Integers of 8 or 4 bits with scales of any granularity.

    Parameters
    ----------
    bits : {8, 4}
        Bits of an integer.
    signed : bool
        Whether integers are two's complement.
    granularity : {"tensor", "token", ("channel", axis), ("group", size)}, optional
        Elements that share a scale; as text ``"channel:0"``, ``"group:32"``. ``"tensor"`` where `block` is not given
        either.
    block : int, optional
        Another way to say ``("group", block)``.
    symmetric : bool, default True
        One zero point for all blocks (0, or 2^(bits - 1) of unsigned integers) instead of one for each.
    percentile : float, optional
        Find the range as this percentile of a block's magnitudes (of its values on both sides, where it is not
        symmetric) instead of the extremes; above 0, up to 100.

    Notes
    -----
    `kbitcupy.quantize` takes ``scale``: one number, or one for each block in the shape of the granularity, in that with
    a 1 behind it, or flat; with NumPy checked to be finite and not negative; and ``zero_point`` beside it, of the same
    shapes, for ``symmetric=False``.

    Examples
    --------
    >>> import kbitcupy as kb
    >>> kb.get_format("int8", granularity=("channel", 0))
    get_format('int8:granularity=channel:0')
    >>> kb.get_format("int4", granularity=("group", 32))
    get_format('int4:block=32')
    """

    dtypes = ("float16", "bfloat16", "float32", "float64")
    origin = "baracuda-kernels, PyTorch, torchao"
    summary = "integers with a scale for a tensor, channel, token or group"
    takes = ("scale", "zero_point")
    kernels = (*cuda.KERNELS, *cuda.BLOCKS)

    def __init__(
        self,
        bits: int,
        signed: bool,
        *,
        granularity: Any = None,
        block: int | None = None,
        symmetric: bool = True,
        percentile: float | None = None,
    ):
        self.bits: int = bits
        self.family = "int" if signed else "uint"
        self.name = f"{'int' if signed else 'uint'}{bits}"
        self.granularity = granularity_of(granularity, block)
        self.block = int(self.granularity[1]) if self.granularity[0] == "group" else 1
        if not isinstance(symmetric, bool):
            raise FormatError(f"symmetric is {symmetric!r}; allowed are True and False")
        low = -(1 << bits - 1) if signed else 0
        self.pitch = 8 // bits
        self.levels = check_levels(low, low + (1 << bits) - 1, symmetric=symmetric)
        self.percentile = check_percentile(percentile)

    @classmethod
    def samples(cls) -> tuple[dict[str, Any], ...]:
        granularities = ("tensor", "token", ("channel", 0), ("channel", 1), ("group", 32))
        symmetric = [{"granularity": granularity} for granularity in granularities]
        return {}, *symmetric[1:], *({**each, "symmetric": False} for each in symmetric)

    def check_given(self, given: Mapping[str, Any]) -> None:
        if "scale" in given and self.percentile is not None:
            raise FormatError("percentile says how a scale is found, and scale gives one: leave one of them away")
        if "zero_point" in given and ("scale" not in given or self.levels.symmetric):
            raise FormatError("zero_point goes with scale and symmetric=False")

    def options(self) -> dict[str, Any]:
        options = {"granularity": self.granularity_option(), "symmetric": self.levels.symmetric}
        return options if self.percentile is None else {**options, "percentile": self.percentile}

    def planes(self, shape: tuple[int, ...]) -> dict[str, Plane]:
        blocks, scope = blocks_of(shape, self.granularity), self.scope_of(shape)
        codes = "uint8" if self.bits == 4 or self.levels.qmin == 0 else "int8"
        planes = {
            "codes": Plane(codes, (-(-blocks.size * self.bits // 8),)),
            "scale": Plane("float32", (blocks.count,), scope),
        }
        if not self.levels.symmetric:
            planes["zero_point"] = Plane("int32", (blocks.count,), scope)
        return planes

    def encode_numpy(self, x: np.ndarray, planes: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        self._encode(x, planes, given)

    def encode_cuda(self, x: Any, planes: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        self._encode(x, planes, given)

    def _encode(self, x: Any, planes: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        blocks = blocks_of(x.shape, self.granularity)
        scale, zero = planes["scale"], planes.get("zero_point")
        if given:
            used, point = self._used(given, blocks, x)
            quantize(x, planes["codes"], used, point, blocks, self.levels, self.bits, scale, zero)
            return
        if self.percentile is None and x.dtype != DOUBLE:
            quantize_dynamic(x, planes["codes"], scale, zero, blocks, self.levels, self.bits)
            return
        find(x, scale, zero, blocks, self.levels, None if self.percentile is None else self.percentile / 100)
        quantize(x, planes["codes"], scale, self._zero_of(planes), blocks, self.levels, self.bits)

    def _used(self, given: Mapping[str, Any], blocks: Blocks, x: Any) -> tuple[Any, Any]:
        """The scales and zero points that one call brings, checked."""
        scale = check_scale(given["scale"], blocks, x, SINGLE)
        if self.levels.symmetric:
            return scale, self.levels.zero
        return scale, check_zero_point(given.get("zero_point", 0), blocks, x, self.levels)

    def decode_numpy(self, planes: Mapping[str, Any], out: np.ndarray) -> None:
        self._decode(planes, out, blocks_of(out.shape, self.granularity))

    def decode_cuda(self, planes: Mapping[str, Any], out: Any) -> None:
        self._decode(planes, out, blocks_of(out.shape, self.granularity))

    def decode_stack(self, planes: Mapping[str, Any], out: Any, lead: int) -> bool:
        blocks = stack_blocks(out.shape, self.granularity, lead)
        if blocks is not None:
            self._decode(planes, out, blocks)
        return blocks is not None

    def _decode(self, planes: Mapping[str, Any], out: Any, blocks: Blocks) -> None:
        dequantize(planes["codes"], out, planes["scale"], self._zero_of(planes), blocks, self.levels, self.bits)

    def error_bound(self, x: Any, planes: Mapping[str, Any]) -> Any:
        blocks = blocks_of(x.shape, self.granularity)
        bound = np.empty(x.shape, np.float64)
        for (part, out), (s, z) in walk(blocks, (x, bound), (planes["scale"], self._zero_of(planes))):
            _, low, high = bounds(z, self.levels)
            number, step = part.astype(np.float64), factor(s, DOUBLE)
            outside = np.maximum(np.maximum(number - high * step, low * step - number), 0)
            # Half a step or the distance to the range; and the quotient and the product are rounded to float32.
            out[...] = np.maximum(step / 2, outside) + 2.0**-22 * np.abs(number) + 2.0**-149
            out[...] = np.where(step > 0, out, np.abs(number))
        return bound.reshape(-1)

    def integers(self, shape: tuple[int, ...], lead: int = 0) -> Integers | None:
        if self.name != "int8" or not self.levels.symmetric or not shape:
            return None
        if self.layout_of(shape, lead) == blocks_of(shape, "token").layout:
            return Integers("codes", "scale", "row")
        one = not lead and blocks_of(shape, self.granularity).count == 1
        return Integers("codes", "scale", "tensor") if one else None

    def magnitude(self) -> Magnitude:
        return Magnitude("scale", largest=float(1 << self.bits))  # of a code less its zero point

    def with_granularity(self, granularity: Granularity) -> Affine:
        return _of_granularity(self.name, granularity, self.levels.symmetric, self.percentile)

    def why_not_whole(self, shape: tuple[int, ...]) -> str:
        return f"{math.prod(shape[1:])} codes of {self.bits} bits are no whole bytes"

    @functools.cached_property
    def decoder(self) -> Decoder:
        return cuda.decoder(self.bits, self.granularity, self.levels)

    def _zero_of(self, planes: Mapping[str, Any]) -> Any:
        return planes.get("zero_point", self.levels.zero)


@functools.lru_cache(maxsize=256)
def _of_granularity(name: str, granularity: Granularity, symmetric: bool, percentile: float | None) -> Affine:
    bits, signed = int(name[-1]), name[0] == "i"
    return Affine(bits, signed, granularity=granularity, symmetric=symmetric, percentile=percentile)


for _bits in (8, 4):
    for _signed in (True, False):
        register(f"{'int' if _signed else 'uint'}{_bits}", functools.partial(Affine, _bits, _signed))
