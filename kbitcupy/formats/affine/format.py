"""The formats ``int8``, ``uint8``, ``int4`` and ``uint4``."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...errors import FormatError
from ..base import Fragments, Integers, Magnitude, Plane, register
from ..decoders import Decoder
from ..granular import Granular
from ..granularity import Blocks, Granularity, blocks_of, granularity_of, stack_blocks, walk
from ..integer_codes import NOTHING, OFFSETS, ZERO_POINTS, IntegerCodes, lies_whole, scale_of
from . import cuda
from .arithmetic import (
    check_offset,
    check_percentile,
    check_scale,
    check_zero_point,
    dequantize,
    find,
    quantize,
    quantize_dynamic,
    rounded,
)
from .fragments import all_fragments, fragments_of
from .levels import DOUBLE, SINGLE, check_levels
from .numpy import bounds, ends_of, factor, signed_factor, store
from .stored import SCALE_DTYPES, stored

#: What `zero` may be.
ZEROS = ("none", "int", "float")


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
    zero : {"none", "int", "float"}, default "none"
        What stands for 0: one integer for all blocks (0, or 2^(bits - 1) of unsigned integers); an integer for each
        block; or nothing, each block having an offset that is added to the integers times the scale, so that the
        range need not hold 0: for what lies far from 0, such as temperatures in kelvin.
    symmetric : bool, optional
        An older way to say ``zero``: true is "none", false is "int".
    percentile : float, optional
        Find the range as this percentile of a block's magnitudes (of its values on both sides, where `zero` is not
        "none") instead of the extremes; above 0, up to 100.
    scale_dtype : {"float32", "float16", "bfloat16"}, default "float32"
        In what scales and offsets are stored; integers are chosen for the numbers that are. float16 ends at 65504.
    zero_dtype : {"int32", "int8", "uint8"}, default "int32"
        In what zero points are stored: int8 of signed integers, uint8 of others.

    Notes
    -----
    `kbitcupy.quantize` takes ``scale``: one number, or one for each block in the shape of the granularity, in that with
    a 1 behind it, or flat; with NumPy checked to be finite and not negative. Beside it and of the same shapes it takes
    ``zero_point`` for ``zero="int"``, and ``offset`` for ``zero="float"``; 0 where they are left away.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> kb.get_format("int8", granularity=("channel", 0))
    get_format('int8:granularity=channel:0')
    >>> kb.get_format("int4", granularity=("group", 32))
    get_format('int4:block=32')
    >>> x = 290 + np.random.default_rng(0).standard_normal((64, 64), np.float32)
    >>> q = kb.quantize(x, "int4", block=32, zero="float")
    >>> bool(abs(q.dequantize() - x).max() < 0.25)
    True
    """

    dtypes = ("float16", "bfloat16", "float32", "float64")
    origin = "baracuda-kernels, PyTorch, torchao"
    summary = "integers with a scale for a tensor, channel, token or group"
    takes = ("scale", "zero_point", "offset")
    kernels = (*cuda.KERNELS, *cuda.BLOCKS)
    all_fragments = all_fragments()

    def __init__(
        self,
        bits: int,
        signed: bool,
        *,
        granularity: Any = None,
        block: int | None = None,
        zero: str | None = None,
        symmetric: bool | None = None,
        percentile: float | None = None,
        scale_dtype: str = "float32",
        zero_dtype: str = "int32",
    ):
        self.bits: int = bits
        self.family = "int" if signed else "uint"
        self.name = f"{'int' if signed else 'uint'}{bits}"
        self.granularity = granularity_of(granularity, block)
        self.block = int(self.granularity[1]) if self.granularity[0] == "group" else 1
        self.zero = _zero_of(zero, symmetric)
        low = -(1 << bits - 1) if signed else 0
        self.pitch = 8 // bits
        self.levels = check_levels(
            low, low + (1 << bits) - 1, symmetric=self.zero == "none", floating=self.zero == "float"
        )
        self.percentile = check_percentile(percentile)
        if not isinstance(scale_dtype, str) or scale_dtype not in SCALE_DTYPES:
            raise FormatError(f"scale_dtype is {scale_dtype!r}; allowed are {', '.join(map(repr, SCALE_DTYPES))}")
        narrow = "int8" if signed else "uint8"
        if not isinstance(zero_dtype, str) or zero_dtype not in ("int32", narrow):
            raise FormatError(f"zero_dtype is {zero_dtype!r}; {self.name} allows 'int32' and {narrow!r}")
        if zero_dtype != "int32" and self.zero != "int":
            raise FormatError(f"zero_dtype={zero_dtype!r} goes with zero='int'; zero is {self.zero!r}")
        self.scale_dtype, self.zero_dtype = scale_dtype, zero_dtype
        self.stored = stored(scale_dtype)

    @classmethod
    def samples(cls) -> tuple[dict[str, Any], ...]:
        granularities = ("tensor", "token", ("channel", 0), ("channel", 1), ("group", 32))
        each = [{"granularity": granularity} for granularity in granularities]
        ints = [{**one, "zero": "int"} for one in each]
        floats = [{**each[i], "zero": "float"} for i in (0, 3, 4)]
        # Of the dtypes of zero points a format has one.
        zeros = [{**ints[4], "zero_dtype": dtype, "scale_dtype": "bfloat16"} for dtype in ("int8", "uint8")]
        others = {**each[4], "scale_dtype": "float16"}, {**floats[2], "scale_dtype": "float16"}
        return {}, *each[1:], *ints, *floats, *zeros, *others

    def check_given(self, given: Mapping[str, Any]) -> None:
        if "scale" in given and self.percentile is not None:
            raise FormatError("percentile says how a scale is found, and scale gives one: leave one of them away")
        for name, zero in (("zero_point", "int"), ("offset", "float")):
            if name in given and ("scale" not in given or self.zero != zero):
                raise FormatError(f"{name} goes with scale and zero={zero!r}")

    def options(self) -> dict[str, Any]:
        # Files have the words that were there before offsets, as long as these say it.
        zero = {"zero": self.zero} if self.levels.floating else {"symmetric": self.levels.symmetric}
        return {"granularity": self.granularity_option(), **zero, **self._rest()}

    def spelled(self) -> dict[str, Any]:
        spelled = super().spelled()
        spelled.pop("symmetric", None)
        first: dict[str, Any] = {key: spelled.pop(key) for key in ("block", "granularity") if key in spelled}
        return {**first, "zero": self.zero, **spelled}

    def _rest(self) -> dict[str, Any]:
        """The options beside granularity and zero that differ from their defaults."""
        rest: dict[str, Any] = {} if self.percentile is None else {"percentile": self.percentile}
        rest |= {} if self.scale_dtype == "float32" else {"scale_dtype": self.scale_dtype}
        return rest | ({} if self.zero_dtype == "int32" else {"zero_dtype": self.zero_dtype})

    def planes(self, shape: tuple[int, ...]) -> dict[str, Plane]:
        blocks, scope = blocks_of(shape, self.granularity), self.scope_of(shape)
        codes = "uint8" if self.bits == 4 or self.levels.qmin == 0 else "int8"
        planes = {
            "codes": Plane(codes, (-(-blocks.size * self.bits // 8),)),
            "scale": Plane(self.scale_dtype, (blocks.count,), scope),
        }
        if self.zero == "int":
            planes["zero_point"] = Plane(self.zero_dtype, (blocks.count,), scope)
        elif self.zero == "float":
            planes["offset"] = Plane(self.scale_dtype, (blocks.count,), scope)
        return planes

    def encode_numpy(self, x: np.ndarray, planes: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        if "stored" not in given:
            self._encode(x, planes, given)
            return
        blocks = blocks_of(x.shape, self.granularity)
        quantize(x, planes["codes"], planes["scale"], self._zero_in(planes), blocks, self.levels, self.bits)

    def part_numpy(self, x: np.ndarray, planes: Mapping[str, Any]) -> Any:
        if self.percentile is not None:
            return None
        return ends_of(x, blocks_of(x.shape, self.granularity), self.levels, None)

    def whole_numpy(self, found: list[Any], dtype: np.dtype, planes: Mapping[str, Any]) -> dict[str, Any]:
        high, low = (np.maximum.reduce(ends) for ends in zip(*found, strict=True))
        zero = planes.get("offset", planes.get("zero_point"))
        store(high, low, self.levels, dtype, None, planes["scale"], zero)
        return {"stored": True}

    def encode_cuda(self, x: Any, planes: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        self._encode(x, planes, given)

    def _encode(self, x: Any, planes: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        blocks = blocks_of(x.shape, self.granularity)
        scale, zero = planes["scale"], planes.get("offset" if self.levels.floating else "zero_point")
        if given:
            used, point = self._used(given, blocks, x)
            quantize(x, planes["codes"], used, point, blocks, self.levels, self.bits, scale, zero)
            return
        if self.percentile is None and x.dtype != DOUBLE:
            quantize_dynamic(x, planes["codes"], scale, zero, blocks, self.levels, self.bits)
            return
        find(x, scale, zero, blocks, self.levels, None if self.percentile is None else self.percentile / 100)
        quantize(x, planes["codes"], scale, self._zero_in(planes), blocks, self.levels, self.bits)

    def _used(self, given: Mapping[str, Any], blocks: Blocks, x: Any) -> tuple[Any, Any]:
        """The scales and zero points or offsets that one call brings, checked, as they are stored."""
        scale = rounded(check_scale(given["scale"], blocks, x, SINGLE), self.stored, "scale")
        if self.zero == "none":
            return scale, self.levels.zero
        if self.zero == "int":
            return scale, check_zero_point(given.get("zero_point", 0), blocks, x, self.levels)
        return scale, rounded(check_offset(given.get("offset", 0.0), blocks, x), self.stored, "offset")

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
        dequantize(planes["codes"], out, planes["scale"], self._zero_in(planes), blocks, self.levels, self.bits)

    def error_bound(self, x: Any, planes: Mapping[str, Any]) -> Any:
        blocks = blocks_of(x.shape, self.granularity)
        bound = np.empty(x.shape, np.float64)
        for (part, out), (s, z) in walk(blocks, (x, bound), (planes["scale"], self._zero_in(planes))):
            number = part.astype(np.float64)
            if self.levels.floating:
                step, offset = signed_factor(s, DOUBLE), z.astype(np.float64)
                low, high = offset + self.levels.qmin * step, offset + self.levels.qmax * step
                low, high, step = np.minimum(low, high), np.maximum(low, high), np.abs(step)
            else:
                _, first, last = bounds(z, self.levels)
                step, offset = factor(s, DOUBLE), np.zeros(z.shape)
                low, high = first * step, last * step
            outside = np.maximum(np.maximum(number - high, low - number), 0)
            # Half a step or the distance to the range; and the quotient, the product, and what is done with the offset
            # are rounded to float32.
            out[...] = np.maximum(step / 2, outside) + 2.0**-22 * (np.abs(number) + np.abs(offset)) + 2.0**-149
            out[...] = np.where(step > 0, out, np.abs(number - offset) + 2.0**-24 * np.abs(offset))
        return bound.reshape(-1)

    def integers(self, shape: tuple[int, ...], lead: int = 0) -> Integers | None:
        if self.name != "int8" or self.zero != "none" or self.scale_dtype != "float32" or not shape:
            return None
        if self.layout_of(shape, lead) == blocks_of(shape, "token").layout:
            return Integers("codes", "scale", "row")
        one = not lead and blocks_of(shape, self.granularity).count == 1
        return Integers("codes", "scale", "tensor") if one else None

    def integer_codes(self, shape: tuple[int, ...], lead: int = 0) -> IntegerCodes | None:
        if len(shape) <= lead or not lies_whole(shape, lead, self.pitch):
            return None
        found = scale_of(shape, self.granularity, lead)
        if found is None:
            return None
        added, beside = {"none": (NOTHING, None), "int": (ZERO_POINTS, "zero_point"), "float": (OFFSETS, "offset")}[
            self.zero
        ]
        dtype = self.zero_dtype if self.zero == "int" else self.scale_dtype
        about = "codes", "scale", self.scale_dtype, found, self.zero != "float", added, beside, dtype
        signed = self.levels.qmin < 0
        return IntegerCodes(self.bits, 1, signed, 0 if signed or self.zero == "float" else 1 << self.bits - 1, *about)

    def magnitude(self) -> Magnitude:
        # Of a code less its zero point.
        return Magnitude("scale", largest=float(1 << self.bits), offsets="offset" if self.levels.floating else None)

    def fragments(self, ndim: int = 2) -> Fragments | None:
        kind = self.granularity[0]
        if kind == "group":
            block = self.block
        elif self.granularity == "token" or (
            kind == "channel" and int(self.granularity[1]) in (ndim - 2, -2) and ndim == 2
        ):
            block = 0
        else:
            return None
        stored = self.zero, self.scale_dtype, self.zero_dtype
        return fragments_of(self.bits, self.levels.qmin < 0, block, *stored)

    def with_granularity(self, granularity: Granularity) -> Affine:
        return _of_granularity(self.name, granularity, (("zero", self.zero), *self._rest().items()))

    def why_not_whole(self, shape: tuple[int, ...]) -> str:
        return f"{math.prod(shape[1:])} codes of {self.bits} bits are no whole bytes"

    @functools.cached_property
    def decoder(self) -> Decoder:
        return cuda.decoder(self.bits, self.granularity, self.levels, self.scale_dtype, self.zero_dtype)

    def _zero_in(self, planes: Mapping[str, Any]) -> Any:
        """Zero points or offsets, one for each block or for all."""
        return planes["offset"] if self.levels.floating else planes.get("zero_point", self.levels.zero)


def _zero_of(zero: Any, symmetric: Any) -> str:
    """The option `zero`, from the two that say it."""
    if zero is not None and (not isinstance(zero, str) or zero not in ZEROS):
        raise FormatError(f"zero is {zero!r}; allowed are {', '.join(map(repr, ZEROS))}")
    if symmetric is None:
        return zero or "none"
    if not isinstance(symmetric, bool):
        raise FormatError(f"symmetric is {symmetric!r}; allowed are True and False")
    meant = "none" if symmetric else "int"
    if zero is not None and zero != meant:
        raise FormatError(f"zero is {zero!r} and symmetric {symmetric}, which means {meant!r}: leave one of them away")
    return meant


@functools.lru_cache(maxsize=256)
def _of_granularity(name: str, granularity: Granularity, options: tuple[tuple[str, Any], ...]) -> Affine:
    return Affine(int(name[-1]), name[0] == "i", granularity=granularity, **dict(options))


for _bits in (8, 4):
    for _signed in (True, False):
        register(f"{'int' if _signed else 'uint'}{_bits}", functools.partial(Affine, _bits, _signed))
